"""Calls through registers, and the operands of calls."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.ptx import PtxError, parse, run

POINTERS = (Path(__file__).parents[2] / "ptx_files/function_pointers.ptx").read_text()
HEAD = """.version 9.0
.target sm_90a
.address_size 64
.global .align 128 .b8 gvar[256];
.func (.reg .b32 o) plus(.reg .b32 i) { add.u32 o, i, 1; ret; }
.func (.reg .b32 o) twice(.reg .b32 i) { add.u32 o, i, i; ret; }
.func (.param .b32 o) minus(.param .b32 i) { .reg .b32 %r; ld.param.b32 %r, [i]; sub.u32 %r, %r, 1; st.param.b32 [o], %r; ret; }
.func (.reg .b32 o) again(.reg .b32 i) { .reg .b64 %f; P: .callprototype (.reg .b32 _) _ (.reg .b32 _);
mov.u64 %f, again; call (o), %f, (i), P; ret; }
.extern .func (.param .b32 o) vprintf(.param .b64 a, .param .b64 b);
.visible .entry k(.param .u64 p, .param .align 16 .b8 s[64]) {
.reg .pred %p<8>; .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .b16 %h<4>; .reg .f32 %f<4>; .reg .b128 %q<3>; .param .b32 out; .param .b64 wide;
P: .callprototype (.reg .b32 _) _ (.reg .b32 _); Q: .callprototype (.param .b32 _) _ (.param .b32 _); T: .calltargets plus, twice;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p]; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1; setp.lt.u32 %p0, %r0, 3;
"""


def launch(body, **options):
    text = HEAD + body + "\nst.global.u32 [%d0], %r1; ret; }"
    return run(text, **{"grid": 1, "block": 8, "args": [np.zeros(8, np.uint32), bytes(64)], "target": "sm_90a"} | options)[0]


@pytest.mark.parametrize(
    ("entry", "args", "expected"),
    [
        ("by_table", (), lambda x, t: np.where(t % 2, 2 * x, x + 1)),
        ("by_choice", (3,), lambda x, t: np.where(t < 3, x + 3, 8 * x)),
        ("by_virtual", (5,), lambda x, t: np.where(t < 5, 2 * x * x, 1.5 * x * x)),
    ],
)
def test_functions_are_called_through_pointers(entry, args, expected):
    x = np.arange(1, 41, dtype=np.float32)
    found = run(POINTERS, entry=entry, grid=1, block=40, args=[x, *args], target="H100", checked=True)[0]
    assert np.array_equal(found, expected(x, np.arange(40)).astype(np.float32))


@pytest.mark.parametrize("last", ["P", "T"])
def test_threads_of_a_warp_call_different_functions(last):
    body = f"mov.u64 %d2, plus; mov.u64 %d3, twice; selp.b64 %d2, %d2, %d3, %p0; call (%r1), %d2, (%r0), {last};"
    assert launch(body).tolist() == [1, 2, 3, 6, 8, 10, 12, 14]
    body = f"mov.u64 %d2, plus; mov.u64 %d3, twice; selp.b64 %d2, %d2, %d3, %p0; mov.u32 %r1, 7; @%p0 call (%r1), %d2, (%r0), {last};"
    assert launch(body).tolist() == [1, 2, 3, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        (
            "mov.u64 %d2, minus; call (%r1), %d2, (%r0), P;",
            UndefinedBehaviour,
            "%d2 is 0x.*the address of no function of the call's prototype",
        ),
        ("mov.u64 %d2, minus; call (%r1), %d2, (%r0), T;", UndefinedBehaviour, "those are plus, twice"),
        ("mov.u64 %d2, 0; call (%r1), %d2, (%r0), Q;", UndefinedBehaviour, "%d2 is 0x0.*those are"),
        ("mov.u64 %d2, plus; call (%r1), %d2, (%r0);", (PtxError, Unsupported), "callprototype"),
        (
            "mov.u64 %d2, again; call (%r1), %d2, (%r0), P;",
            Unsupported,
            "recursion is not supported: again calls itself through a register",
        ),
    ],
)
def test_what_is_no_function_of_the_call_is_named(body, error, said):
    with pytest.raises(error, match=rf"(?s)line \d+.*{said}"):
        launch(body)


ODD = (
    "%r1", "{%r1}", "%laneid", "%clock", "%clock64", "%tid.x", "_", "1.5", "-7", "!%p1", "gvar", "plus", "P", "out", "{%r1, %r2}", "%q1",
    "%d1", "%h1", "%p1", "%f1", "0f3F800000", "L1", "[%d1]", "%r1|%p1", "wide", "s",
)  # fmt: skip
RIGHT = {"result": {"%r1", "%f1", "_", "out"}, "argument": {"%r1", "%f1", "out", "1.5", "-7", "0f3F800000"}}


@pytest.mark.parametrize("callee", ["plus", "minus", "%d2"])
def test_operands_of_calls_are_registers_variables_or_constants(callee):
    last = ", P" if callee == "%d2" else ""
    for role, odd in product(RIGHT, ODD):
        result, argument = (odd, "%r2") if role == "result" else ("%r1", odd)
        text = f"{HEAD} mov.u64 %d2, plus; mov.u32 %r2, 5; call ({result}), {callee}, ({argument}){last}; L1: ret; }}"
        if odd in RIGHT[role]:
            run(parse(text), grid=1, block=4, args=[np.zeros(8, np.uint32), bytes(64)], target="sm_90a")
            continue
        with pytest.raises((PtxError, Unsupported), match=r"line \d+") as caught:
            run(parse(text), grid=1, block=4, args=[np.zeros(8, np.uint32), bytes(64)], target="sm_90a")
        if caught.type is Unsupported and "call" in str(caught.value):
            assert re.search(
                rf"{role} 1 is .*; plus takes|{role} 1 is .*; minus takes|no supported special|no label|is no ", str(caught.value)
            )


@pytest.mark.parametrize("odd", ["{%d1}", "_", "1.5", "!%p1", "plus", "P", "L1", "[%d1]", "%laneid", "%h1", "%p1"])
def test_operands_of_runtime_functions_are_checked(odd):
    with pytest.raises((PtxError, Unsupported), match=r"line \d+"):
        launch(f"call (out), vprintf, ({odd}, wide); L1:")


RECURSION = """.version 8.0
.target sm_80
.address_size 64
.func (.param .b32 result) fib(.param .b32 n) {
.reg .b32 %n, %a, %b; .reg .pred %p; .param .b32 x; .param .b32 y;
ld.param.u32 %n, [n]; setp.lt.u32 %p, %n, 2; @%p bra small;
sub.u32 %a, %n, 1; st.param.b32 [x], %a; call (y), fib, (x); ld.param.b32 %a, [y];
ld.param.u32 %n, [n]; sub.u32 %b, %n, 2; st.param.b32 [x], %b; call (y), fib, (x); ld.param.b32 %b, [y];
add.u32 %n, %a, %b;
small: st.param.b32 [result], %n; ret; }
.func (.reg .b32 r) odd(.reg .b32 n);
.func (.reg .b32 r) even(.reg .b32 n) { .reg .pred %p; .reg .b32 %m;
setp.eq.u32 %p, n, 0; mov.u32 r, 1; @%p ret; sub.u32 %m, n, 1; call (r), odd, (%m); mad.lo.u32 r, n, 10, r; ret; }
.func (.reg .b32 r) odd(.reg .b32 n) { .reg .pred %p; .reg .b32 %m;
setp.eq.u32 %p, n, 0; mov.u32 r, 0; @%p ret; sub.u32 %m, n, 1; call (r), even, (%m); add.u32 r, r, n; ret; }
.func (.reg .b32 r) swap(.reg .b32 a, .reg .b32 b) { call (r), swap, (b, a); ret; }
.visible .entry k(.param .u64 p) {
.reg .b32 %r<4>; .reg .b64 %d<3>; .param .b32 x; .param .b32 y;
ld.param.u64 %d0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1;
BODY
st.global.u32 [%d0], %r1; ret; }
"""


def call_recursively(body, threads):
    args = [np.zeros(threads, np.uint32)]
    return run(RECURSION.replace("BODY", body), grid=1, block=threads, args=args, target="A100", checked=True)[0].tolist()


def test_functions_call_themselves():
    fibonacci = [0, 1]
    while len(fibonacci) < 10:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    body = "rem.u32 %r2, %r0, 10; st.param.b32 [x], %r2; call (y), fib, (x); ld.param.b32 %r1, [y];"
    assert call_recursively(body, 40) == fibonacci * 4


def test_functions_call_each_other():
    def even(n):
        return 1 if n == 0 else 10 * n + odd(n - 1)

    def odd(n):
        return 0 if n == 0 else even(n - 1) + n

    assert call_recursively("call (%r1), even, (%r0);", 33) == [even(n) for n in range(33)]


def test_parameters_that_change_places_are_refused():
    with pytest.raises(Unsupported, match="in another place"):
        call_recursively("call (%r1), swap, (%r0, %r0);", 4)
