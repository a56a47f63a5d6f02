"""Small kernels in PTX for tests of the engine. All take (in: u32 [128], out: u32 [128], n: u32) and run as 2 blocks of 64 threads."""

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# %r1: the thread, %r2: its number in the grid, %rd1, %rd2: the addresses of its words of in and out, %r3: the word of in, %r4: n
START = """
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    ld.param.u64 %rd1, [in]; ld.param.u64 %rd2, [out]; ld.param.u32 %r4, [n];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r2, %r2, 64, %r1;
    mul.wide.u32 %rd3, %r2, 4; add.u64 %rd1, %rd1, %rd3; add.u64 %rd2, %rd2, %rd3; ld.global.u32 %r3, [%rd1];
"""


def entry(body: str, name: str = "k", declared: str = "") -> str:
    """Return an entry whose result is %r5."""
    head = f"{declared}\n.visible .entry {name}(.param .u64 in, .param .u64 out, .param .u32 n)\n"
    return f"{head}{{{START}{body}\n    st.global.u32 [%rd2], %r5;\n    ret;\n}}\n"


def module(body: str, declared: str = "") -> str:
    """Return a file with one such entry."""
    return HEAD + entry(body, declared=declared)


FUNCTIONS = """
.const .align 4 .b32 table[4] = {3, 1, 4, 1};
.global .align 4 .b32 counter[2] = {100, 7};
.global .align 8 .u64 there[1] = {counter};
.func (.param .b32 result) twice(.param .b32 x) {
    .reg .b32 %a; ld.param.b32 %a, [x]; shl.b32 %a, %a, 1; st.param.b32 [result], %a; ret;
}
.func (.reg .b32 first, .reg .b32 second) pair(.param .align 4 .b8 both[8], .reg .b32 more) {
    .reg .b32 %a, %b; .reg .pred %q;
    ld.param.b32 %a, [both]; ld.param.b32 %b, [both+4];
    mov.b32 second, %b; setp.gt.u32 %q, %a, 50;
    @%q bra LARGE;
    add.u32 first, %a, more; ret;
LARGE:
    {
    .param .b32 given; .param .b32 taken;
    st.param.b32 [given], %a;
    call (taken), twice, (given);
    ld.param.b32 first, [taken];
    }
    ret;
}
"""
CALLS = """
    { .param .align 4 .b8 both[8];
    st.param.b32 [both], %r3; st.param.b32 [both+4], %r1;
    call (%r6, %r7), pair, (both, 9); }
    setp.lt.u32 %p1, %r1, 32;
    @%p1 bra PLAIN;
    { .param .b32 given; .param .b32 taken; st.param.b32 [given], %r6; call (taken), twice, (given); ld.param.b32 %r6, [taken]; }
PLAIN:
    add.u32 %r5, %r6, %r7;
    and.b32 %r8, %r1, 3; mul.wide.u32 %rd4, %r8, 4; mov.u64 %rd5, table; add.u64 %rd5, %rd5, %rd4; ld.const.u32 %r9, [%rd5];
    mad.lo.u32 %r5, %r9, 1000, %r5;
    ld.global.u64 %rd6, [there]; ld.u32 %r10, [%rd6+4]; mad.lo.u32 %r5, %r10, 100000, %r5;
    red.global.add.u32 [counter], 1;
"""
SWITCH = """
    and.b32 %r6, %r3, 3; mov.u32 %r5, 0; mov.u32 %r7, %r3;
LOOP:
    and.b32 %r6, %r7, 3;
    brx.idx %r6, TARGETS;
TARGETS: .branchtargets ZERO, ONE, TWO, THREE;
ZERO: add.u32 %r5, %r5, 1; bra NEXT;
ONE: mul.lo.u32 %r5, %r5, 3; bra NEXT;
TWO: xor.b32 %r5, %r5, %r7; bra NEXT;
THREE: sub.u32 %r5, %r5, 5;
NEXT:
    shr.u32 %r7, %r7, 2;
    setp.ne.u32 %p1, %r7, 0;
    @%p1 bra LOOP;
"""
BYTES = """
    mov.u32 %r6, bytes; add.u32 %r7, %r6, %r1; st.shared.u8 [%r7], %r3;
    mad.lo.u32 %r8, %r1, 2, %r6; st.shared.b16 [%r8+64], %r3;
    bar.sync 0;
    xor.b32 %r9, %r1, 63; add.u32 %r7, %r6, %r9; ld.shared.s8 %r10, [%r7];
    mad.lo.u32 %r8, %r9, 2, %r6; ld.shared.u16 %r11, [%r8+64];
    shr.u32 %r12, %r1, 2; shl.b32 %r12, %r12, 3; add.u32 %r12, %r12, %r6; ld.shared.v4.u16 {%h1, %h2, %h3, _}, [%r12+64];
    cvt.u32.u16 %r13, %h3;
    cvta.shared.u64 %rd4, bytes; isspacep.shared %p1, %rd4; isspacep.global %p2, %rd1; cvt.u64.u32 %rd5, %r1; add.u64 %rd4, %rd4, %rd5;
    ld.u8 %r14, [%rd4]; and.pred %p1, %p1, %p2; selp.u32 %r15, 1, 0, %p1;
    .local .align 8 .b8 mine[16]; st.local.u64 [mine+8], %rd5; ld.local.u32 %r16, [mine+8];
    add.u32 %r5, %r10, %r11; mad.lo.u32 %r5, %r13, 3, %r5; mad.lo.u32 %r5, %r14, 5, %r5; add.u32 %r5, %r5, %r15;
    mad.lo.u32 %r5, %r16, 7, %r5;
"""
MEETING = """
    setp.lt.u32 %p1, %r3, %r4;
    bar.red.popc.u32 %r6, 0, %p1; bar.red.and.pred %p2, 0, %p1; bar.red.or.pred %p3, 0, 64, !%p1;
    selp.u32 %r7, 1000, 0, %p2; selp.u32 %r8, 2000, 0, %p3;
    mov.u32 %r9, word; setp.ge.u32 %p4, %r1, 32;
    @%p4 bra SECOND;
    st.shared.u32 [%r9], %r4; bar.arrive 3, 64; mov.u32 %r10, 1; bra BOTH;
SECOND: bar.sync 3, 64; ld.shared.u32 %r10, [%r9];
BOTH:
    setp.eq.u32 %p5, %r1, 63;
    @%p5 exit;
    bar.sync 0;
    add.u32 %r5, %r6, %r7; add.u32 %r5, %r5, %r8; mad.lo.u32 %r5, %r10, 10000, %r5;
"""
LOCK = """
    mov.u32 %r5, 0; and.b32 %r6, %r1, 15; setp.ne.u32 %p1, %r6, 0;
    @%p1 bra DONE;
WAIT:
    atom.global.acquire.gpu.cas.b32 %r7, [lock], 0, 1; setp.ne.u32 %p2, %r7, 0;
    @%p2 bra WAIT;
    ld.global.relaxed.gpu.u32 %r8, [lock+4]; add.u32 %r8, %r8, %r3; st.global.relaxed.gpu.u32 [lock+4], %r8; mov.u32 %r5, %r8;
    atom.global.release.gpu.exch.b32 %r7, [lock], 0;
DONE:
"""
# a lock whose holder is inside the loop of those who wait, and a block that waits for the other
TURNS = """
    mov.u32 %r6, 0; mov.u32 %r9, %ctaid.x; setp.eq.u32 %p1, %r9, 0;
LOOP:
    setp.ne.u32 %p2, %r6, 0;
    @%p2 bra OUT;
    atom.global.acquire.gpu.cas.b32 %r7, [lock], 0, 1; setp.ne.u32 %p3, %r7, 0;
    @%p3 bra LOOP;
    ld.global.relaxed.gpu.u32 %r8, [lock+4]; add.u32 %r8, %r8, %r3; st.global.relaxed.gpu.u32 [lock+4], %r8; mov.u32 %r6, 1;
    atom.global.release.gpu.exch.b32 %r7, [lock], 0;
    bra LOOP;
OUT:
    @!%p1 bra LAST;
WAITS:
    ld.global.relaxed.gpu.u32 %r5, [lock+8]; setp.lt.u32 %p4, %r5, 64;
    @%p4 bra WAITS;
    bra DONE;
LAST:
    atom.global.add.u32 %r5, [lock+8], 1;
DONE:
    ld.global.relaxed.gpu.u32 %r5, [lock+4];
"""
ATOMS = """
    mov.u32 %r6, word; st.shared.u32 [%r6], 0; st.shared.u32 [%r6+4], 5; st.shared.u32 [%r6+8], 0; bar.sync 0;
    atom.shared.add.u32 %r7, [%r6], %r3;
    atom.shared.inc.u32 %r8, [%r6+4], 9;
    cvta.shared.u64 %rd4, word; atom.max.s32 %r9, [%rd4+8], %r3;
    mad.lo.u32 %r5, %r8, 65536, %r7; xor.b32 %r5, %r5, %r9;
"""
REGISTERS = """
    mov.u32 %r5, %laneid; mov.u32 %r6, %warpid; mad.lo.u32 %r5, %r6, 100, %r5; mov.u32 %r7, %nctaid.x; mad.lo.u32 %r5, %r7, 1000, %r5;
    mov.u32 %r8, %lanemask_lt; popc.b32 %r8, %r8; mad.lo.u32 %r5, %r8, 10000, %r5; mov.u64 %rd4, %clock64; mov.u64 %rd5, %clock64;
    setp.gt.u64 %p1, %rd5, %rd4; selp.u32 %r9, 1000000, 0, %p1; add.u32 %r5, %r5, %r9; mov.u32 %r10, %ntid.y; add.u32 %r5, %r5, %r10;
"""
