"""Waits that nothing ends are named at once, with what is waited for; waits that end, and loops that give up, are not."""

import time

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.base.errors import UndefinedBehaviour
from tcemu.ptx import StepLimit, run

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p, .param .u32 n) {
.reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<8>;
.shared .align 8 .b64 bar[4]; .shared .align 16 .b8 tile[64];
ld.param.u64 %d0, [p]; ld.param.u32 %r9, [n]; mov.u32 %r0, %tid.x; mov.u32 %r1, bar; setp.eq.u32 %p0, %r0, 0; mov.u32 %r8, %ctaid.x;
@%p0 mbarrier.init.shared.b64 [%r1], 2; @%p0 mbarrier.init.shared.b64 [%r1+8], 1; bar.sync 0;
"""  # the body begins in line 9
WAIT = "wait{n}: mbarrier.{kind}.parity.shared::cta.b64 %p1, [%r1+{offset}], {phase}; @!%p1 bra wait{n};"
DEFAULTS = {"grid": 1, "block": 64, "args": [np.zeros(8, np.uint32), 3], "target": "H100"}


def launch(body, **options):
    return run(HEAD + body + "\nret; }", **DEFAULTS | options)


def wait(offset=0, phase=0, kind="try_wait", n=0):
    return WAIT.format(offset=offset, phase=phase, kind=kind, n=n)


DEADLOCKS = {
    "one arrival of two": (
        f"@%p0 mbarrier.arrive.shared.b64 %d1, [%r1];\n{wait()}",
        r"line 10: mbarrier\.try_wait.*64 threads wait for phase 0 of the mbarrier at 0x0 to complete; in phase 0 it has 1 of 2 arrivals "
        "and 0 bytes pending",
    ),
    "bytes that no copy brings": (
        f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+8], 96;\n{wait(8, kind='test_wait')}",
        r"line 10: mbarrier\.test_wait.*the mbarrier at 0x8 .*in phase 0 it has 0 of 1 arrivals and 96 bytes pending",
    ),
    "a copy of other bytes": (
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d1, [%r1+8], 96; mov.u32 %r2, tile;\n"
        "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d0], 32, [%r1+8];\n" + wait(8),
        "line 11.*0 of 1 arrivals and 64 bytes pending",
    ),
    "the phase after": (
        f"@%p0 mbarrier.arrive.shared.b64 %d1, [%r1+8];\n{wait(8)}\n{wait(8, 1, n=1)}",
        "line 11: .*wait for phase 1 of the mbarrier at 0x8 to complete; in phase 1 it has 1 of 1 arrivals",
    ),
    "two groups for two mbarriers": (
        f"@%p0 bra wait0;\n{wait(8, n=1)} bra end;\n{wait()}\nend:",
        "line 10: .*63 threads wait for phase 0 of the mbarrier at 0x8.*line 11: .*1 thread wait for phase 0 of the mbarrier at 0x0",
    ),
    "a warp at a barrier": (
        f"setp.lt.u32 %p2, %r0, 32; @%p2 bra wait0;\nbar.sync 1, 64; bra end;\n{wait()}\nend:",
        "line 11: .*32 threads wait for phase 0.*32 threads wait at a barrier before line 10",
    ),
    "a counter of the waits": (
        "mov.u32 %r3, 0;\nwait: add.u32 %r3, %r3, 1; mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra wait;"
        "st.global.u32 [%d0], %r3;",
        "line 10: .*2 of 2 arrivals",
    ),
    "a state as a token": (
        "@%p0 mbarrier.arrive.shared.b64 %d1, [%r1];\n@!%p0 ret; wait: mbarrier.try_wait.shared::cta.b64 %p1, [%r1], %d1; @!%p1 bra wait;",
        "line 10: .*1 thread wait for phase 0 .*1 of 2 arrivals",
    ),
    "a barrier before its init": (
        "@%p0 mbarrier.inval.shared.b64 [%r1]; bar.sync 0;\n" + wait(),
        "line 10: .*was not initialised, or was invalidated",
    ),
    "a flag": (
        "wait: ld.acquire.gpu.global.u32 %r3, [%d0+4]; setp.ne.u32 %p1, %r3, 1;\n@%p1 bra wait;",
        r"line 9: ld\.acquire.*64 threads read 0x0 again and again at address 0x\w+, byte 4 of p, which has 32 bytes",
    ),
    "a flag in shared memory": (
        "mov.u32 %r2, tile; mov.u32 %r3, 0; st.volatile.shared.u32 [%r2+4], %r3; wait: ld.volatile.shared.u32 %r3, [%r2+4];"
        "setp.ne.u32 %p1, %r3, 1;\n@%p1 bra wait;",
        r"line 9: ld\.volatile.*read 0x0 again and again at address 0x24; the block has 96 bytes of shared memory",
    ),
    "a plain load": (
        "wait: ld.global.u32 %r3, [%d0+4]; setp.ne.u32 %p1, %r3, 1;\n@%p1 bra wait;",
        r"line 9: ld\.global.*64 threads read 0x0 again and again",
    ),
    "a lock that is never given back": (
        "wait: atom.acquire.gpu.global.cas.b32 %r3, [%d0], 0, 1;\nsetp.ne.u32 %p1, %r3, 0; @%p1 bra wait;",
        r"line 9: atom.*63 threads read 0x1 again and again at address 0x\w+, byte 0 of p",
    ),
    "a lock by exchange": (
        "wait: atom.global.exch.b32 %r3, [%d0], 1;\nsetp.ne.u32 %p1, %r3, 0; @%p1 bra wait;",
        "line 9: atom.*63 threads read 0x1 again and again",
    ),
    "a warp that waits for a lane": (
        f"@%p0 bra wait0;\nshfl.sync.idx.b32 %r3, %r0, 0, 31, -1; bra end;\n{wait()}\nend:",
        "line 11: .*1 thread wait for phase 0",
    ),
    "a wait in a function": ("call wait_for, (%r1);", r"line \d+: mbarrier\.try_wait.*64 threads wait for phase 0"),
}
FUNCTION = """
.func wait_for(.reg .b32 at) { .reg .pred %p;
again: mbarrier.try_wait.parity.shared::cta.b64 %p, [at], 0; @!%p bra again; ret; }
"""


UNCHECKED, CHECKED = ([(body, checked) for body in DEADLOCKS] for checked in (False, True))
USUAL = [*UNCHECKED[::2], *CHECKED[1::4], ("a barrier before its init", True)]


@pytest.mark.parametrize("case", sample_cases(UNCHECKED + CHECKED, USUAL, lambda case: f"{case[0]}{', checked' * case[1]}"))
def test_a_deadlock_is_named_at_once(case):
    body, checked = case
    text, said = DEADLOCKS[body]
    if checked and body == "a barrier before its init":
        said = "not initialised"
    began, head = time.process_time(), HEAD.replace(".visible .entry", FUNCTION + ".visible .entry") if "call" in text else HEAD
    with pytest.raises(UndefinedBehaviour, match=rf"(?s){said}") as caught:
        run(head + text + "\nret; }", **DEFAULTS, checked=checked)
    assert checked or "deadlock: no thread can go on" in str(caught.value)
    assert time.process_time() - began < 20, "5 million statements take minutes"


def test_a_loop_that_waits_for_nothing_says_so():
    with pytest.raises(UndefinedBehaviour, match=r"never ends.*wait for nothing.*64 threads wait before line 9"):
        launch("again: xor.b32 %r3, %r3, 1; xor.b32 %r3, %r3, 1; bra again;")


def test_absent_blocks_are_named(monkeypatch):
    monkeypatch.setattr("tcemu.kernels.ptx.runtime.kernel_runner.CHUNK_BYTES", 1)
    flag = "setp.eq.u32 %p1, %r8, 1; @%p1 st.release.gpu.global.u32 [%d0], 1; @%p1 ret;\nwait: ld.acquire.gpu.global.u32 %r3, [%d0]; "
    body = flag + "setp.eq.u32 %p1, %r3, 0; @%p1 bra wait;"
    with pytest.raises(UndefinedBehaviour, match=r"1 blocks of the launch run before or after these.*cooperative=True"):
        launch(body, grid=2)
    launch(body, grid=2, cooperative=True)


def test_the_same_wait_of_several_blocks_is_said_once():
    with pytest.raises(UndefinedBehaviour, match=r"192 threads of 3 blocks wait for phase 0 of the mbarrier at 0x0") as caught:
        launch(wait(), grid=3)
    assert str(caught.value).count("wait for phase") == 1


LIVE = {
    "one more arrival": f"setp.lt.u32 %p2, %r0, 2; @%p2 mbarrier.arrive.shared.b64 %d1, [%r1];\n{wait()}",
    "an arrival after long work": (
        "setp.ge.u32 %p2, %r0, 32; @!%p2 bra wait0; mov.u32 %r3, 0;\nwork: add.u32 %r3, %r3, 1; setp.lt.u32 %p3, %r3, 300; @%p3 bra work;"
        f"setp.lt.u32 %p2, %r0, 34; @%p2 mbarrier.arrive.shared.b64 %d1, [%r1];\n{wait()}"
    ),
    "a loop that gives up": (
        "mov.u32 %r3, 0;\nwait: add.u32 %r3, %r3, 1; setp.gt.u32 %p2, %r3, 200; @%p2 bra end;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra wait;\nend:"
    ),
    "a loop that gives up by the clock": (
        "mov.u64 %d3, %globaltimer;\nwait: mov.u64 %d4, %globaltimer; sub.u64 %d4, %d4, %d3; setp.gt.u64 %p2, %d4, 900; @%p2 bra end;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra wait;\nend:"
    ),
    "a loop that waits for a coarse clock": "wait: mov.u32 %r3, %clock; shr.u32 %r3, %r3, 10; setp.eq.u32 %p1, %r3, 0; @%p1 bra wait;",
    "turns by tickets": (
        "wait: ld.acquire.gpu.global.u32 %r3, [%d0];\nsetp.ne.u32 %p1, %r3, %r0; @%p1 bra wait;"
        "add.u32 %r3, %r3, 1; st.release.gpu.global.u32 [%d0], %r3;"
    ),
    "a lock that is given back": (
        "wait: atom.acquire.gpu.global.cas.b32 %r3, [%d0], 0, 1; setp.ne.u32 %p1, %r3, 0; @%p1 bra wait;\n"
        "ld.global.u32 %r4, [%d0+4]; add.u32 %r4, %r4, 1; st.global.u32 [%d0+4], %r4; atom.release.gpu.global.exch.b32 %r3, [%d0], 0;"
    ),
    "a loop of many equal states": (
        "mov.u32 %r3, 0;\nouter: mov.u32 %r4, 0;\ninner: add.u32 %r4, %r4, 1; setp.lt.u32 %p1, %r4, 40; @%p1 bra inner;\n"
        "add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 200; @%p1 bra outer;"
    ),
}


@pytest.mark.parametrize("body", sample_cases(list(LIVE), 2))
def test_what_goes_on_is_no_deadlock(body):
    launch(LIVE[body], checked=body not in ("turns by tickets", "a lock that is given back"))


CALLS_ITSELF = """.version 8.0
.target sm_90a
.address_size 64
.func (.reg .b32 r) f(.reg .b32 n) { .reg .pred %p; .reg .b32 %m, %i, %s, %t;
mov.u32 %i, 0; mov.u32 %s, 1; bra x;
x: setp.eq.u32 %p, n, 0; @%p bra leaf;
loop: sub.u32 %m, n, 1; call (%t), f, (%m); add.u32 %s, %s, %t; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, 2500; @%p bra loop;
leaf: mov.u32 r, %s; ret; }
.visible .entry k(.param .u64 p) { .reg .b32 %r; .reg .b64 %d; ld.param.u64 %d, [p];
call (%r), f, (1); st.global.u32 [%d], %r; ret; }
"""


@pytest.mark.full
def test_a_loop_of_calls_to_itself_is_no_deadlock():
    """The registers of the caller, with its counter, are saved while the callee runs."""
    (out,) = run(CALLS_ITSELF, grid=1, block=1, args=[np.zeros(1, np.uint32)], target="H100")
    assert out[0] == 2501


def test_a_wait_with_a_clock_is_left_to_the_step_limit():
    body = "wait: mov.u64 %d4, %globaltimer; setp.eq.u64 %p2, %d4, 0; @%p2 bra end;\n" + wait() + "\nend:"
    clock = body.replace("bra wait0", "bra wait")
    with pytest.raises(StepLimit, match="step_limit=5000"):
        launch(clock, step_limit=5000)
