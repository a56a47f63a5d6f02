"""Looking inside a kernel: `trace=`, `compare`, and `tcemu run`, which has both on the command line."""

import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import ptx
from tcemu.cli import main
from tcemu.ptx import Tracepoint

HEAD = ".version 8.4\n.target sm_80\n.address_size 64\n"
SUMS = f"""{HEAD}.visible .entry sums(.param .u64 x, .param .u32 n)
{{
    .reg .pred %p<3>; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<4>; .shared .b32 s[64];
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd1, %rd1, %rd2;
    mov.f32 %f1, 0f00000000;
LOOP:
    setp.lt.u32 %p1, %r2, 8;
    @%p1 add.f32 %f1, %f1, 0f3FC00000;
    add.u32 %r3, %r3, 1;
    st.global.f32 [%rd1], %f1;
    setp.lt.u32 %p2, %r3, %r1;
    @%p2 bra LOOP;
    mov.u64 %rd3, s;
    add.u64 %rd3, %rd3, %rd2;
    st.shared.b32 [%rd3], %r2;
    ret;
}}
"""  # the guarded addition stands in line 15, the two stores in lines 17 and 22
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
PRODUCT = f"""{HEAD}.visible .entry product(.param .u64 a, .param .u64 b, .param .u64 d)
{{
    .reg .b32 %r<10>; .reg .b64 %rd<4>; .reg .f32 %f<5>;
    ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [d];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd1, %r1, 16, %rd1; mad.wide.u32 %rd2, %r1, 8, %rd2; mad.wide.u32 %rd3, %r1, 16, %rd3;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd1];
    ld.global.v2.b32 {{%r6, %r7}}, [%rd2];
    {MMA} {{%f1, %f2, %f3, %f4}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, {{%f1, %f2, %f3, %f4}};
    {MMA} {{%f1, %f2, %f3, %f4}}, {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, {{%f1, %f2, %f3, %f4}};
    st.global.v4.f32 [%rd3], {{%f1, %f2, %f3, %f4}};
    ret;
}}
"""
LAUNCH = {"grid": 1, "block": 32}


def operands(cases, seed=0):
    """A and B in registers as float16 pairs, and room for D: [cases, 32, ...]."""
    rng = np.random.default_rng(seed)
    given = [rng.normal(size=(cases, 32, count)).astype(np.float16) for count in (8, 4)]
    return [*given, np.zeros((cases, 32, 4), np.float32)]


# ---- trace


def test_a_trace_keeps_registers_and_memory_at_a_line():
    x = np.full((2, 40), 7, np.float32)
    tracepoints = [
        Tracepoint(15, blocks=None, threads=(7, 8)),
        Tracepoint(17, registers=("%p1", "%r3", "%tid.x"), blocks=(1,), arrays=(0,), max_snapshots=2),
        Tracepoint(22, shared=(0, 16)),
        Tracepoint(22, blocks=(5,)),
    ]
    result = ptx.run(SUMS, grid=2, block=40, args=[x, 3], target="sm_80", trace=tracepoints)
    guarded, stores, shared = ([snapshot for snapshot in result.snapshots if snapshot.line == line] for line in (15, 17, 22))
    assert [snapshot.hit for snapshot in guarded] == [0, 1, 2]
    for hit, snapshot in enumerate(guarded):
        assert (snapshot.blocks, snapshot.threads) == ((0, 1), (7, 8))
        assert snapshot.active.tolist() == [[True, False]] * 2
        assert snapshot.registers.keys() == {"%f1"}
        assert snapshot.registers["%f1"].dtype == np.float32
        assert snapshot.registers["%f1"].tolist() == [[1.5 * (hit + 1), 0]] * 2
    assert [snapshot.registers["%r3"].tolist() for snapshot in stores] == [[[1] * 40], [[2] * 40]]
    assert stores[0].registers["%p1"].tolist() == [[thread < 8 for thread in range(40)]]
    assert stores[0].registers["%tid.x"].tolist() == [list(range(40))]
    assert stores[0].statement == "st.global.f32 [%rd1], %f1;"
    assert [snapshot.arrays[0].reshape(-1)[0] for snapshot in stores] == [1.5, 3.0]
    (snapshot,) = shared
    assert snapshot.shared is not None
    assert snapshot.shared.view(np.uint32).tolist() == [[0, 1, 2, 3]]
    assert result[0].reshape(-1)[:9].tolist() == [4.5] * 8 + [0.0]


@pytest.mark.parametrize(
    ("tracepoint", "expected"),
    [
        (Tracepoint(3), "line 3 has no statement of sums that changes a register or memory; nearest are lines 7, 8, 9"),
        (Tracepoint(19), "Branches, calls, barriers"),
        (Tracepoint(15, registers=("%f9",)), "there is no register %f9 in the function of line 15"),
        (Tracepoint(15, threads=(0, 40)), "threads: got 40; a block has 40, from 0 on"),
    ],
)
def test_a_trace_that_would_keep_nothing_is_refused(tracepoint, expected):
    with pytest.raises(ValueError, match="trace: ") as caught:
        ptx.run(SUMS, grid=1, block=40, args=[np.zeros(40, np.float32), 1], target="sm_80", trace=tracepoint)
    assert expected in str(caught.value)


# ---- compare


@pytest.mark.parametrize("cases", sample_cases((40, 10_000), (40,)))
def test_targets_part_at_the_first_product_which_is_explained(cases):
    """Many inputs in one call; the line, the words and the element against the operations themselves."""
    a, b, d = operands(cases)
    a[:3] = 0  # no difference in the first three cases
    targets = ("sm_80", "sm_90a")
    found = ptx.compare(PRODUCT, targets=targets, args=[a, b, d], cases=cases, **LAUNCH)
    words = [x.reshape(cases, 32, -1).view(np.uint32) for x in (a, b)]
    after, ends = [], []
    for target in targets:
        c = np.zeros((cases, 32, 4), np.uint32)
        after.append(np.asarray(tcemu.mma(MMA, *words, c, target=target)))
        ends.append(np.asarray(tcemu.mma(MMA, *words, after[-1], target=target)))
    differing = ends[0] != ends[1]
    assert [np.array_equal(x[2].view(np.uint32), y) for x, y in zip(found.outputs, ends, strict=True)] == [True, True]
    assert found.differing_elements == (0, 0, differing.sum())
    assert found.differing_cases == differing.any((1, 2)).sum() > 0
    divergence = found.divergence
    assert divergence is not None
    assert (divergence.line, divergence.earlier_executions) == (12, 0)
    where = np.argwhere((after[0] != after[1]).any(-1))[0]
    assert (divergence.case, divergence.block, divergence.thread) == (where[0], (0, 0, 0), (where[1], 0, 0))
    first = {at: tuple(np.argwhere((after[0] != after[1])[..., at])[0]) for at in range(4) if (after[0] != after[1])[..., at].any()}
    assert [(each.name, each.words) for each in divergence.registers] == [
        (f"%f{at + 1}", (after[0][(*place, at)], after[1][(*place, at)])) for at, place in first.items()
    ]
    codes = [np.asarray(tcemu.unpack(MMA, "d", each[where[0]])) for each in after]
    row, column = np.argwhere(codes[0] != codes[1])[0]
    assert divergence.explanation is not None
    assert [each.result for each in divergence.explanation.explanations] == [int(side[row, column]) for side in codes]
    assert "diverge at line 12" in str(found)


def test_addresses_of_32_bits_are_refused():
    with pytest.raises(tcemu.Unsupported, match="the module has addresses of 32 bits"):
        ptx.run(SUMS.replace(".address_size 64", ""), grid=1, block=32, args=[np.zeros(32, np.float32), 1], target="sm_80")


@pytest.mark.full
def test_targets_that_agree_do_not_part():
    found = ptx.compare(SUMS, targets=("sm_80", "H100"), grid=1, block=32, args=[np.zeros(32, np.float32), 2])
    assert (found.equal, found.divergence, found.differing_elements) == (True, None, (0,))
    assert str(found).endswith(f"No register differs after any of {found.steps} statements.")
    assert found.steps == 6 + 2 * 5 + 3
    assert found.records() == [{"entry": "sums", "left": "sm_80", "right": "sm_90a", "array": 0, "elements": 32, "differing": 0}]


def test_two_targets_are_wanted():
    with pytest.raises(ValueError, match="targets: got 'sm_80'"):
        ptx.compare(SUMS, targets="sm_80", grid=1, block=32)  # pyright: ignore[reportArgumentType]


# ---- the command


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with both kernels and their arrays."""
    (tmp_path / "sums.ptx").write_text(SUMS)
    (tmp_path / "product.ptx").write_text(PRODUCT)
    a, b, _ = operands(1)
    for name, array in (("A", a[0]), ("B", b[0]), ("X", np.arange(32, dtype=np.float32))):
        np.save(tmp_path / f"{name}.npy", array)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SUMS_WORDS = "run sums.ptx --grid 1 --block 32 --arg X.npy --arg 2u32"


def test_the_command_writes_the_arrays(folder, capsys):
    assert main(f"{SUMS_WORDS} --out out".split()) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("sums, 1 by 32, sm_80: 32 threads in ")
    assert said[1:] == ["argument 0, X.npy: float32 [32], 31 of 32 elements changed, in out/arg0.npy"]
    assert np.load("out/arg0.npy").tolist() == [3.0] * 8 + [0.0] * 24
    assert np.load("X.npy").tolist() == list(range(32))


@pytest.mark.full
def test_the_command_compares_targets(folder, capsys):
    words = "run product.ptx --grid 1 --block 32,1 --arg A.npy --arg B.npy --arg 0f32x32x4 --target A100 --compare-target H100"
    assert main(words.split()) == 0
    said = capsys.readouterr().out
    assert "argument 2, 0f32x32x4: float32 [32, 4], 128 of 128 elements changed\n" in said
    assert "diverge at line 12, block (0, 0, 0)" in said
    assert "[1] sm_80\n" in said
    assert "[2] sm_90a\n" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run none.ptx --grid 1 --block 1", "none.ptx cannot be read: No such file or directory"),
        ("run X.npy --grid 1 --block 1", "X.npy is not text"),
        ("run sums.ptx --grid 1x --block 1", "--grid: '1x' is not a size"),
        ("run sums.ptx --grid 0 --block 1 --arg X.npy --arg 1", "sums.ptx: grid: got (0,)"),
        ("run sums.ptx --grid 1 --block 1 --entry other", "the file has no entry 'other'; its entries: sums"),
        ("run sums.ptx --grid 1 --block 32 --arg X.npy", "sums.ptx: args: got 1; sums has 2 parameters: .u64 x, .u32 n"),
        ("run sums.ptx --grid 1 --block 32 --arg X.npy --arg 1q", "argument 1: '1q' is not an argument"),
        ("run sums.ptx --grid 1 --block 32 --arg X.npy --arg 300u8", "argument 1: '300u8': 300 does not fit uint8"),
        ("run sums.ptx --grid 1 --block 32 --arg 1x32 --arg 1", "argument 0: '1x32' is an array without a type"),
        ("run sums.ptx --grid 1 --block 32 --arg 0f64x9999999x9999999 --arg 1", "does not fit in this machine's memory"),
        ("run sums.ptx --grid 1 --block 33 --arg X.npy --arg 1", "sums.ptx: line 17: st.global.f32: block (0, 0, 0), thread (32, 0, 0)"),
        (f"{SUMS_WORDS} --step-limit 9", "more than step_limit=9, and has not ended"),
        (f"{SUMS_WORDS} --overwrite", "--overwrite needs --out"),
        (f"{SUMS_WORDS} --out X.npy", "X.npy cannot be created: File exists"),
        (f"{SUMS_WORDS} --checked --compare-target H100", "--checked and --compare-target exclude each other"),
        (f"{SUMS_WORDS} --target V100", "the module is for .target sm_80, which does not run there"),
    ],
)
def test_errors_of_the_command(words, said, folder, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("tcemu run: ")
    assert said in error


def test_what_was_read_is_not_overwritten(folder, capsys):
    (folder / "out").mkdir()
    np.save("out/arg0.npy", np.zeros(32, np.float32))
    words = "run sums.ptx --grid 1 --block 32 --arg out/arg0.npy --arg 1 --out out"
    assert main([*words.split(), "--overwrite"]) == 2
    assert "Inputs are never overwritten" in capsys.readouterr().err
    assert main(f"{SUMS_WORDS} --out out".split()) == 2
    assert "exists already; name another file, or add --overwrite" in capsys.readouterr().err


def test_a_text_that_is_no_ptx_is_shown_where(folder, capsys):
    (folder / "bad.ptx").write_text(SUMS.replace("mov.u32", "mov.u32 %r9,"))
    assert main(["run", "bad.ptx", "--grid", "1", "--block", "32"]) == 2
    first, line, mark = capsys.readouterr().err.splitlines()
    assert first.startswith("tcemu run: bad.ptx: PTX, line 9, column 13: %r9 is neither a supported special register nor declared here")
    assert line[mark.index("^") :].startswith("%r9")
