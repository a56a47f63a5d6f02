"""Functions of the CUDA runtime that a kernel calls, `vprintf`, `malloc`, `free` and `__assertfail`, and memory on the stack, `alloca`."""

from pathlib import Path

import numpy as np
import pytest

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour, Unsupported

TEXT = (Path(__file__).parents[2] / "ptx_files" / "printing.ptx").read_text()
COUNT = 5


def talk(given):
    return ptx.run(TEXT, grid=1, block=COUNT, args=[given, np.zeros(COUNT, np.int32), COUNT], target="sm_90a", checked=True)


def test_text_that_a_kernel_prints():
    """Every thread's text as C writes it, thread after thread, and what printf returns; memory from malloc is each thread's own."""
    given = np.array([3, -7, 200, 0, 9], np.int32)
    found = talk(given)
    wanted = ""
    for i, value in enumerate(given.tolist()):
        word = "odd" if i % 2 else "even"
        wanted += f"thread {i} of {COUNT}: {word} {value * 0.5:5.2f}|{value << 33:<6d}|{chr(97 + i)}%{value % 2**32:x} {1 / (i + 1):e}\n"
    assert found.printed == wanted + "done\n"
    sums = [(i + 1) * int(value) + i * (i + 1) // 2 for i, value in enumerate(given)]
    assert found[1].tolist() == [100 * total + 8 for total in sums]


def test_an_assertion_that_fails():
    with pytest.raises(ptx.Trapped, match=r"thread \(2, 0, 0\).*printing.cu:\d+: .*talk.*assertion in\[i\] != 77 failed"):
        talk(np.array([3, 4, 77, 0, 9], np.int32))


HEAD = """.version 8.0
.target sm_90
.address_size 64
.extern .func (.param .b64 result) malloc(.param .b64 size);
.extern .func free(.param .b64 address);
.extern .func (.param .b32 result) other(.param .b64 size);
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<9>; .reg .b64 %rd<20>; .reg .pred %p; .param .b64 given; .param .b64 taken;
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 8; add.u64 %rd1, %rd1, %rd2;
"""


def run(body, declared=""):
    text = HEAD.replace(".visible", f"{declared}.visible") + body + "ret; }"
    (found,) = ptx.run(text, grid=1, block=4, args=[np.zeros(4, np.uint64)], target="sm_90a", checked=True)
    return found.tolist()


def allocate(size, result):
    return f"st.param.b64 [given], {size}; call (taken), malloc, (given); ld.param.b64 {result}, [taken];"


FREE = "st.param.b64 [given], %rd5; call free, (given);"


def test_a_heap():
    """Memory that was freed is given again, blocks do not overlap and begin at multiples of 16; too large a request gives 0."""
    body = allocate(40, "%rd4") + allocate(24, "%rd5") + "sub.u64 %rd6, %rd5, %rd4; and.b64 %rd7, %rd4, 15;" + FREE + allocate(20, "%rd8")
    body += "setp.eq.u64 %p, %rd8, %rd5; selp.u64 %rd9, 1000, 0, %p;" + allocate(1 << 40, "%rd10")
    body += "add.u64 %rd6, %rd6, %rd7; add.u64 %rd6, %rd6, %rd9; add.u64 %rd6, %rd6, %rd10; st.global.u64 [%rd1], %rd6;"
    found = run("setp.ne.u32 %p, %r1, 0; @%p exit;" + body)
    assert found == [1048, 0, 0, 0]


@pytest.mark.parametrize("body", [allocate(24, "%rd5") + FREE + FREE, "mov.u64 %rd5, 12345;" + FREE])
def test_what_was_not_allocated_is_not_freed(body):
    with pytest.raises(UndefinedBehaviour, match=r"free.*no block that malloc gave"):
        run(body)


def test_other_functions_are_refused_before_anything_runs():
    with pytest.raises(Unsupported, match=r"line 10, column .*other is not in the module.*vprintf, malloc, free"):
        run("call (taken), other, (given);")


STACK = """
    cvt.u64.u32 %rd3, %r1; add.u64 %rd3, %rd3, 1; stacksave.u64 %rd9;
    alloca.u64 %rd4, %rd3; alloca.u64 %rd5, 24, 64; alloca.u32 %r5, 4;
    st.local.u8 [%rd4], %r1; st.local.u64 [%rd5+16], %rd3; st.local.u32 [%r5], 7;
    cvta.local.u64 %rd6, %rd5; ld.u64 %rd7, [%rd6+16]; ld.local.u8 %r2, [%rd4]; ld.local.u32 %r3, [%r5];
    and.b64 %rd10, %rd5, 63; stackrestore.u64 %rd9; alloca.u64 %rd11, 8; sub.u64 %rd11, %rd11, %rd4;
    cvt.u64.u32 %rd8, %r2; mad.lo.u64 %rd7, %rd7, 10, %rd8; cvt.u64.u32 %rd8, %r3; mad.lo.u64 %rd7, %rd8, 1000, %rd7;
    add.u64 %rd7, %rd7, %rd10; add.u64 %rd7, %rd7, %rd11; st.global.u64 [%rd1], %rd7;"""


def test_memory_on_the_stack():
    """Sizes that differ by thread, alignments, and a stack that is restored: the next block begins where the first one did."""
    assert run(STACK) == [7000 + 10 * (thread + 1) + thread for thread in range(4)]


NESTED = """.func (.param .b64 result) sum(.param .b64 count) {
    .reg .b64 %a, %b, %c; .reg .pred %q;
    ld.param.b64 %a, [count]; alloca.u64 %b, 400; st.local.u64 [%b+8], %a; ld.local.u64 %c, [%b+8]; add.u64 %c, %c, 1;
    st.param.b64 [result], %c; ret;
}
"""


def test_functions_give_their_stack_back():
    """Ten calls of a function that takes 400 bytes of the 1,024; what the caller took stays."""
    body = "alloca.u64 %rd5, 8; st.local.u64 [%rd5], 5; mov.u64 %rd4, 0;"
    body += "st.param.b64 [given], %rd4; call (taken), sum, (given); ld.param.b64 %rd4, [taken];" * 10
    assert run(body + "ld.local.u64 %rd6, [%rd5]; mad.lo.u64 %rd4, %rd6, 100, %rd4; st.global.u64 [%rd1], %rd4;", NESTED) == [510] * 4


def test_a_stack_that_overflows():
    with pytest.raises(ptx.OutOfBounds, match="local memory"):
        run("alloca.u64 %rd4, 4096; st.local.u64 [%rd4+4000], %rd4;")
