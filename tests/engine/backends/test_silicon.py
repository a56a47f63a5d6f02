"""The same instruction on a real GPU, as far as it goes without one: kernel texts, errors, and all that lies around the GPU's one call."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from support import golden
from support.emulated_gpu import EmulatedGpu, without_gpu

import tcemu
from tcemu import fuzz, silicon
from tcemu.cli import main
from tcemu.engine.backends.native.native_statement import has_kernel
from tcemu.engine.instructions.statement_operands import line_alignment
from tcemu.engine.instructions.wmma import memory_lines
from tcemu.engine.isa.targets import capability_target
from tcemu.faces.commands import verify_commands as command
from tcemu.uses.fuzz import verification
from tcemu.uses.silicon.operand_variants import operand_variants, run_on_codes

TEXTS = Path(__file__).parents[2] / "ptx_files"
F16 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
SPARSE = "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
QUAD = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
S8 = "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16"
MOVE = "movmatrix.sync.aligned.m8n8.trans.b16"
SCALED = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
TARGETS = {"sm_90a": verification.FAMILIES, "sm_100a": ("mma", "mma.sp", "ldmatrix", "stmatrix"), "sm_120a": ("mma", "mma.sp")}
LOAD = "ldmatrix.sync.aligned.m8n8.x1.b16"
LOADED = "wmma.load.a.sync.aligned.row.m8n32k16.shared.s8"  # by ldmatrix, once assembled
KEPT = {  # name of the file -> the kernel
    "mma": (SPARSE, "sm_90a", 0, {"f": 1}),
    "scaled": (SCALED, "sm_120a", 0, {"selector_a": (0, 1), "selector_b": (0, 3)}),
    "wgmma": (WGMMA, "sm_90a", 0, {"imm_scale_a": -1, "imm_trans_b": 1}),
    "stmatrix": ("stmatrix.sync.aligned.m8n8.x2.trans.b16", "sm_90a", 0, {}),
    "wmma_load": ("wmma.load.a.sync.aligned.row.m8n8k4.shared.f64", "sm_90a", 1, {}),
}


# ---- texts


@pytest.mark.parametrize("name", KEPT)
def test_kernels_are_those_that_were_looked_at(name):
    op, *how = KEPT[name]
    assert silicon.statement_kernel(tcemu.parse(op), *how).text == (TEXTS / f"{name}.ptx").read_text()


def kernels(target, families):
    for family in families:
        for op in tcemu.isa.instructions(target, family, "9.0"):
            ways = operand_variants(op) if family in verification.COMPUTING_FAMILIES else [None] * len(op.operand_forms)
            for form, way in enumerate(ways) if has_kernel(op) else ():
                yield silicon.statement_kernel(op, target, form if way is None else way.form, {} if way is None else way.values).text


def faults(texts, folder):
    """What the assembler says of those that it does not take."""
    found = []
    for text in texts:
        path = folder / "kernel.ptx"
        path.write_text(text)
        target = text.split(".target ")[1].split()[0]
        done = subprocess.run(
            ["ptxas", f"-arch={target}", str(path), "-o", str(folder / "out")], capture_output=True, text=True, check=False
        )
        found += [done.stderr + text] if done.returncode else []
    return found


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas here")
@pytest.mark.parametrize(
    ("target", "count"), [*((target, 2) for target in TARGETS), *(pytest.param(target, 6, marks=pytest.mark.full) for target in TARGETS)]
)
def test_a_sample_of_the_kernels_assembles(target, count, tmp_path):
    texts = list(kernels(target, TARGETS[target]))
    assert faults(random.Random(target).sample(texts, count), tmp_path) == []
    assert faults([texts[0].replace(".sync.aligned", ".sync")], tmp_path) != []


@pytest.mark.full
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas here")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_assembles(target, tmp_path):
    assert faults(kernels(target, TARGETS[target]), tmp_path) == []


# ---- run


CASES = {
    "mma": "mma.sync.aligned.m8n8k4.row.row.f16.f16.f16.f16",
    "mma_sp": "mma.sp.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "movement": "stmatrix.sync.aligned.m8n8.x2.trans.b16",
    "wgmma": "wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16",
}
DEFAULT = ("movement",)


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.full]) for name in CASES])
def test_words_reach_the_runner_and_come_back(family, monkeypatch):
    runner = EmulatedGpu()
    calls = {name: on_runner(runner) for name in ("mma", "mma_sp", "wgmma", "ldmatrix", "stmatrix", "movmatrix")}
    monkeypatch.setattr(replay, "tcemu", type("OnRunner", (), {name: staticmethod(call) for name, call in calls.items()}))
    case = next(case for case in golden.cases(family) if case["ptx"] == CASES[family])
    wrong, total = replay.compare(case)
    assert wrong == 0 and total > 0 and runner.calls == 1


def on_runner(runner):
    return lambda op, *operands, target=None, **keywords: silicon.run(op, *operands, runner=runner, **keywords)


def test_batch_axes_broadcast_and_images_keep_their_length():
    runner, draw = EmulatedGpu(), np.random.default_rng(0)
    words = lambda *shape: draw.integers(0, 1 << 32, shape, dtype=np.uint32)
    a, b, c = words(2, 1, 32, 1), words(3, 32, 1), words(32, 2)
    assert np.array_equal(silicon.run(S8, a, b, c, runner=runner), tcemu.mma(S8, a, b, c, target="sm_90a"))
    memory, fragment = words(3, 269), words(3, 32, 8)
    store = "wmma.store.d.sync.aligned.row.m16n16k16.f32"
    wanted = tcemu.wmma_store(store, memory, fragment, offset=8)
    assert np.array_equal(silicon.run(store, memory, fragment, offset=8, runner=runner), wanted) and wanted.shape == (3, 269)


@pytest.mark.full
def test_scales_and_their_selectors_reach_the_runner():
    scaled, draw = EmulatedGpu("sm_120a"), np.random.default_rng(0)
    words = lambda *shape: draw.integers(0, 1 << 32, shape, dtype=np.uint32)
    given = [words(32, n) for n in (4, 2, 4)]
    keywords = {"scale_a": words(32), "scale_b": words(32), "selector_a": (0, 1), "selector_b": (0, 3)}
    wanted = tcemu.mma(SCALED, *given, **keywords, target="sm_120a")
    assert np.array_equal(silicon.run(SCALED, *given, **keywords, runner=scaled), wanted)


@pytest.mark.parametrize(
    ("op", "operands", "keywords", "error", "said"),
    [
        (SCALED, (), {}, tcemu.Unsupported, "needs sm_120a"),
        ("wgmma.fence.sync.aligned", (), {}, tcemu.Unsupported, "silicon.run runs mma"),
        (F16, (0, 0, 0), {}, TypeError, "a: got int64"),
        (F16, [np.zeros((32, n), np.uint32) for n in (2, 1, 4)], {"scale_a": 0}, TypeError, "takes no scale_a"),
        (SPARSE, [np.zeros((32, n), np.uint32) for n in (2, 2, 4)], {}, ValueError, "takes its metadata"),
        (MOVE, (np.zeros((31, 1), np.uint32),), {}, ValueError, "registers: got"),
        (LOADED, (np.zeros(64, np.uint32),), {"offset": 8}, ValueError, "offset 8 is no multiple of 16 elements, 16 bytes"),
        (LOADED, (np.zeros(64, np.uint32),), {"stride": 24}, ValueError, "stride 24 is no multiple of 16 elements, 16 bytes"),
        (
            "ldmatrix.sync.aligned.m8n8.x1.b16",
            (np.zeros(4, np.uint32), np.full(32, 16)),
            {},
            tcemu.UndefinedBehaviour,
            "lane 0 has address",
        ),
    ],
)
def test_what_cannot_be_run_is_said(op, operands, keywords, error, said):
    with pytest.raises(error, match=said):
        silicon.run(op, *operands, runner=EmulatedGpu(), **keywords)


def test_lines_are_aligned_as_the_assembled_instruction_wants():
    """A fragment of PTX is enough, but for 36 loads by ldmatrix, those that stopped an H200; the emulation asks for PTX's alone."""
    found = [op for family in ("wmma.load", "wmma.store") for op in tcemu.isa.instructions("sm_90a", family)]
    more = [op for op in found if line_alignment(op, memory_lines(op)) * 8 > memory_lines(op).alignment * memory_lines(op).bits]
    assert len(more) == 36 and {op.operand for op in more} == {"a", "b"} and all(op.space.startswith("shared") for op in more)
    assert tcemu.wmma_load(LOADED, np.zeros(64, np.uint32), offset=8, target="sm_90a").shape == (32, 1)


def test_without_a_gpu_it_says_what_is_missing():
    if not isinstance(missing := _gpu_error(), str):
        pytest.skip("there is a GPU here")
    assert "needs an NVIDIA GPU and the extra `silicon`" in missing


def _gpu_error():
    try:
        return silicon.gpu()
    except tcemu.Unsupported as error:
        return str(error)


def test_a_gpu_has_its_own_target():
    assert [capability_target(*pair) for pair in ((9, 0), (8, 0), (12, 0), (7, 5))] == ["sm_90a", "sm_80", "sm_120a", "sm_75"]
    with pytest.raises(tcemu.Unsupported, match="sm_61"):
        capability_target(6, 1)


# ---- comparison


def flipped_top_bit(family):
    """A fault: the top bit of the first word, of instructions of one family."""
    return lambda op, found: found.at[0, 0].set(found[0, 0] ^ np.uint32(1 << 31)) if op.family == family else found


@pytest.fixture
def runner(monkeypatch):
    found = EmulatedGpu()
    monkeypatch.setattr(command, "gpu", lambda: found)
    return found


@without_gpu
def test_verify_compares_holds_and_goes_on(tmp_path, capsys, runner):
    words = ["verify", S8, MOVE, "--outputs", "100", "--out", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{S8}: 0 mismatches of 65,536" in said and "0 mismatches of 196,608 outputs, 2 spellings" in said
    calls = runner.calls
    held = json.loads((tmp_path / "verify.json").read_text())
    held["rows"] = held["rows"][:1]  # as a kill between the two leaves it
    (tmp_path / "verify.json").write_text(json.dumps(held))
    assert main(words) == 0 and runner.calls == calls + 1
    assert capsys.readouterr().out.splitlines()[-2:] == said.splitlines()[-2:]
    assert "mma: 1 spellings, 0 mismatches of 65,536" in (tmp_path / "verify.txt").read_text()
    assert main([*words, "--seed", "1"]) == 2
    assert "another comparison: seed is 0 there and 1 here" in capsys.readouterr().err


@without_gpu
def test_verify_finds_a_planted_fault(capsys, runner):
    runner.fault = flipped_top_bit("mma")
    assert main(["verify", S8, "--outputs", "1"]) == 1
    said = capsys.readouterr().out
    assert "2 mismatches of 65,536" in said and "case 0" in said
    runner.fault = flipped_top_bit("movmatrix")
    assert main(["verify", MOVE, "--outputs", "1"]) == 1
    assert "1 mismatches of 131,072" in capsys.readouterr().out


@pytest.mark.parametrize("op", [S8, *(pytest.param(op, marks=pytest.mark.full) for op in (QUAD, WGMMA))])
def test_a_runner_behind_registers_is_a_side(op):
    op = tcemu.parse(op)
    given = {name: np.asarray(x) for name, x in fuzz.generate(op, 0, 0, 5).items()}
    assert np.array_equal(run_on_codes(op, EmulatedGpu())(given), tcemu.dot(op, **given, target="sm_90a"))


@pytest.mark.full
def test_wgmma_differs_where_its_operands_are_elsewhere():
    """All four variants agree, with signs, both majors and scale_d; a descriptor that is off by a unit does not."""
    op, real = tcemu.parse(WGMMA), EmulatedGpu()
    assert {dict(way.immediates)["imm_scale_a"] for way in operand_variants(op)} == {1, -1}
    small = verification.batch_size(op, "cpu") * op.m * op.n * 4
    assert verification.verify_instruction(op, real, small).mismatches == 0

    def off(asked, form, immediates, words):
        return real(asked, form, immediates, words | {"b_desc": words["b_desc"] + jnp.array([1, 0], jnp.uint32)})

    off.target, off.name = real.target, "off by a unit"
    assert verification.verify_instruction(op, off, small, explain_first=False).mismatches > 1000


def test_every_immediate_takes_every_value():
    for spelling, name, values in ((SPARSE, "f", {0, 1, 2, 3}), (SCALED, "selector_b", {(0, i) for i in range(4)})):
        assert {way.values[name] for way in operand_variants(tcemu.parse(spelling))} == values
    for op in verification.list_spellings("sm_90a", "wgmma.sp"):
        assert {way.form for way in operand_variants(op)} == {0, 1} and {way.values["sp_sel"] for way in operand_variants(op)} == set(
            op.selectors
        )
        assert {way.swizzle for way in operand_variants(op)} == {0, 32, 64, 128}


@pytest.mark.parametrize("sparse", [[], pytest.param([SPARSE, WGMMA], marks=pytest.mark.full)])
def test_record_writes_words_that_replay(sparse, tmp_path, runner):
    path = tmp_path / "words.npz"
    ops = [S8, MOVE, "stmatrix.sync.aligned.m8n8.x2.b16", *sparse]
    assert main(["record", *ops, "--cases", "2", "--out", str(path)]) == 0
    with np.load(path) as held:
        header = json.loads(held["header"].tobytes())
        assert {"device", "driver", "compiler", "date", "seed", "tcemu"} <= set(header)
        assert [case["ptx"] for case in header["cases"]] == [op for op in ops for _ in range(4 if op in sparse else 1)]
        for case in header["cases"]:
            start = f"{case['i']:04d}_"
            words = {name.removeprefix(start): held[name] for name in held.files if name.startswith(start)}
            for name, made in replay.REPLAYS[case["family"]](case, words).items():
                assert np.array_equal(made, words[name])
