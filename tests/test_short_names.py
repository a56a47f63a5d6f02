"""Short names of instructions: what each means, that everything that takes a spelling takes them, and what is said of one that is none."""

import inspect
import re

import jax
import numpy as np
import pytest
from support.public import public

import tcemu
from tcemu.cli import main
from tcemu.isa.catalog import is_supported, targets
from tcemu.isa.short_names import by_short_name, short_names

MEANT = {
    "f16": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "bf16": "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
    "tf32": "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "e4m3": "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32",
    "e5m2": "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32",
    "e2m1": "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32",
    "s8": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "f64": "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
    "mxf8": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0",
    "mxf4": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
    "nvf4": "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
    "e4m3 wgmma": "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3",
    "f16 wgmma": "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16",
    "f16 sparse": "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    "f16 wgmma sparse": "wgmma.mma_async.sp.sync.aligned.m64n256k32.f32.f16.f16",
    "f16 wmma": "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32",
    "b1 and": "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc",
}
WRITTEN = {  # as people write them -> the name of the table
    "F16": "f16", " fp16 ": "f16", "half": "f16", "mma f16": "f16", "f16-sparse": "f16 sparse", "sparse fp16": "f16 sparse",
    "WGMMA E4M3": "e4m3 wgmma", "sparse wgmma f16": "f16 wgmma sparse", "int8": "s8", "nvfp4": "nvf4", "MXFP8": "mxf8", "bfloat16": "bf16",
}  # fmt: skip
WGMMA = "f16 wgmma sparse"


def zeros(*shape: int, dtype=np.uint32) -> np.ndarray:
    return np.zeros(shape, dtype)


def group() -> tcemu.Warpgroup:
    return tcemu.Warpgroup(zeros(8192), {"d": zeros(4, 32, 128), "a": zeros(4, 32, 4)}).fence()


HALVES, ONES = zeros(16, 16, dtype=np.uint16), np.ones((1, 16), np.float32)
TAKING = {  # everything public that takes an instruction and computes or says something of it, and the short name that it gets
    "check": ("f16", lambda op: tcemu.check(op, "sm_90a")),
    "is_supported": ("f16", lambda op: tcemu.is_supported(op, "sm_90a")),
    "targets": ("f16", tcemu.targets),
    "model": ("f16", lambda op: tcemu.model(op, "sm_90a")),
    "evidence": ("f16", lambda op: tcemu.evidence(op, "sm_90a")),
    "backends": ("f16", lambda op: tcemu.backends(op, target="sm_90a")),
    "mma": ("f16", lambda op: tcemu.mma(op, zeros(32, 4), zeros(32, 2), zeros(32, 4), target="sm_90a")),
    "mma_sp": (
        "f16 sparse",
        lambda op: tcemu.mma_sp(op, zeros(32, 4), zeros(32, 4), zeros(32, 4), zeros(32), selector=0, target="sm_90a"),
    ),
    "wgmma": ("f16 wgmma", lambda op: tcemu.wgmma(op, zeros(4, 32, 128), 0, zeros(8192), a=zeros(4, 32, 4), target="sm_90a")),
    "Warpgroup.wgmma": (
        "f16 wgmma",
        lambda op: group().wgmma(op, "d", 0, a="a", target="sm_90a").commit_group().wait_group(0).read("d")[0],
    ),
    "wmma_mma": ("f16 wmma", lambda op: tcemu.wmma_mma(op, zeros(32, 8), zeros(32, 8), zeros(32, 8), target="sm_90a")),
    "dot": ("f16", lambda op: tcemu.dot(op, HALVES, HALVES[:, :8], zeros(16, 8), target="sm_90a")),
    "pack": ("f16", lambda op: tcemu.pack(op, "a", HALVES)),
    "unpack": ("f16", lambda op: tcemu.unpack(op, "a", zeros(32, 4))),
    "sparsify": ("f16 sparse", lambda op: tcemu.sparsify(np.ones((16, 32), np.float16), op=op)),
    "densify": ("f16 sparse", lambda op: tcemu.densify(np.ones((16, 16), np.float16), zeros(32), op=op)),
    "gemm": ("f16", lambda op: tcemu.gemm(ONES, ONES.T, op=op, target="sm_90a")),
    "Recipe": ("f16", lambda op: repr(tcemu.Recipe(op, "sm_90a"))),
    "replay.Steps": ("f16", lambda op: repr(tcemu.replay.Steps(op, "sm_90a"))),
    "explain": ("f16", lambda op: tcemu.explain(op, [1], [1], target="sm_90a").to_dict()),
    "fuzz.generate": ("f16", lambda op: tcemu.fuzz.generate(op, 4, 0, 4)),
    "fuzz.Run": ("f16", None),  # what `run` gives back
    "fuzz.Inferred": ("f16", None),  # what `infer` gives back
    "fuzz.run": ("f16", lambda op: str(tcemu.fuzz.run(op, "sm_80", "sm_90a", cases=4, covering=False)).split(", seed")[0]),
    "fuzz.infer": ("s8", lambda op: str(tcemu.fuzz.infer(op, "sm_90a", cases=4))),
    "fuzz.emulated": ("f16", None),  # takes an Instruction
    "fuzz.side": ("f16", lambda op: tcemu.fuzz.side(op, "sm_90a").identity),
    "silicon.kernel": ("f16", None),  # takes an Instruction
    "silicon.run": ("f16", None),  # wants a GPU; see test_silicon.py, whose operations parse as these
    "viz.svg": ("f16", lambda op: tcemu.viz.svg(op, "a")),
    "viz.operands": ("f16", tcemu.viz.operands),
    "viz.page": ("f16", tcemu.viz.page),
    "study.expected_error": ("f16", lambda op: tcemu.study.expected_error(ONES, ONES.T, 13.0, op=op, target="sm_90a")),
    "study.surrogate": ("f16", lambda op: tcemu.study.surrogate(ONES, ONES.T, 13.0, op=op, target="sm_90a")),
    # movers have no short names: their spellings are short
    **dict.fromkeys(("wmma_load", "wmma_store", "ldmatrix", "stmatrix", "movmatrix"), ("f16", None)),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_a_name_means(name):
    assert str(tcemu.parse(name)) == MEANT[name]
    assert repr(tcemu.parse(name)) == f"tcemu.parse('{MEANT[name]}')"


def test_as_people_write_them():
    assert {text: by_short_name(text) for text in WRITTEN} == {text: short_names()[name] for text, name in WRITTEN.items()}


def test_every_name_follows_the_rule():
    """Held against the names themselves: the words of a name stand in its spelling, and nothing larger of the sort is as old."""
    for name, op in short_names().items():
        first, *more = name.split()
        assert tcemu.parse(name) is op and by_short_name(name.upper()) is op
        assert op.sparse == ("sparse" in more) and op.family.split(".")[0] == next((w for w in more if "mma" in w), "mma")
        assert op.a == op.b and (str(op.a) == first or op.kind.startswith(first[:3]) or first == "nvf4")
        assert str(op.d) == {"f64": "f64"}.get(first, "f32" if op.a.exponent_bits else "s32")
        assert not op.satfinite and op.rounding in (None, "rn")
        like = re.sub(r"m\d+n\d+k\d+", "SHAPE", str(op))
        first_target = max(targets(op)[0], "sm_80", key=targets().index)
        rivals = [other for other in tcemu.instructions(first_target, op.family) if re.sub(r"m\d+n\d+k\d+", "SHAPE", str(other)) == like]
        assert op.m * op.n * op.k == max(other.m * other.n * other.k for other in rivals)


def test_every_format_of_the_catalogue_has_a_name():
    formats = {op.a.name for target in targets() for op in tcemu.instructions(target, "mma") if op.a == op.b}
    assert {name.split()[0] for name in short_names()} == formats | {"mxf8", "mxf4", "nvf4"}
    assert all(is_supported(op, targets(op)[-1]) or op.family.startswith("wgmma") or op.a.bits < 8 for op in short_names().values())


def test_what_takes_an_instruction_is_here():
    """Found by its parameter, so that a new function cannot be forgotten."""
    assert {name for name, value in public().items() if "op" in inspect.signature(value).parameters} == TAKING.keys()


@pytest.mark.parametrize("taking", [name for name, (_, call) in TAKING.items() if call is not None])
def test_a_short_name_is_its_spelling(taking):
    name, call = TAKING[taking]
    short, full = (jax.tree.leaves(call(op)) for op in (name, str(tcemu.parse(name))))
    assert len(short) == len(full) and all(np.array_equal(x, y) for x, y in zip(short, full, strict=True))
    if taking in ("is_supported", "targets"):  # what is no instruction no target has
        assert not call("f1666")
        return
    with pytest.raises(tcemu.Unsupported, match=r"unknown instruction 'f1666', did you mean '.*f16.*'\?; known are mma"):
        call("f1666")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("b1", "did you mean 'b1 and' or 'b1 xor'"),
        ("fp17", "did you mean 'fp16'?"),
        ("e4m3 wgma", "did you mean 'e4m3 wgmma'"),
        ("e3m2 wgmma", "unknown instruction 'e3m2 wgmma'"),
        ("nma", "did you mean 'mma'?"),
        ("f16 " * 10**5, "unknown instruction"),
    ],
)
def test_a_name_that_is_none(text, said):
    with pytest.raises(tcemu.Unsupported) as caught:
        tcemu.parse(text)
    assert said in str(caught.value) and "(tcemu list --short)" in str(caught.value) and len(str(caught.value)) < 1000


# ---- the command line


def test_commands_take_short_names(capsys, tmp_path):
    full = MEANT["f16"]
    np.save(tmp_path / "a.npy", ONES)
    np.save(tmp_path / "b.npy", ONES.T)
    files = f"{tmp_path}/a.npy {tmp_path}/b.npy"
    for words in (
        "check f16 --target H100",
        f"gemm {files} --op f16 --target H100",
        "show f16",
        "explain f16 --a 1 --b 1",
        "infer f16 --cases 4",
    ):
        assert main(words.split()) == 0
        assert full in capsys.readouterr().out
    main(["fuzz", "f16", "--left", "A100", "--right", "H100", "--cases", "4", "--quiet"])
    assert full in capsys.readouterr().out
    assert main(["check", "e4m3 wgmma", "--target", "H100"]) == 0
    assert f"{MEANT['e4m3 wgmma']} is an instruction of sm_90a" in capsys.readouterr().out


def test_short_names_are_listed(capsys):
    assert main(["list", "--short"]) == 0
    out = capsys.readouterr().out
    assert f"e4m3 wgmma          sm_90a  {MEANT['e4m3 wgmma']}\n" in out
    assert len(re.findall(r"sm_\d+", out)) == len(short_names())
    assert main(["list", "--short", "--gpus"]) == main(["list", "--short", "--target", "H100"]) == 2


def test_tcgen05_says_what_there_is(capsys):
    """What the message names works."""
    assert main(["check", "tcgen05.mma.cta_group::1.kind::f16", "--target", "B200"]) == 1
    said = capsys.readouterr().out
    for words in ("9.7.16", "recipe='fp8 on B200'", "unit='tcgen05'", "B200@tcgen05", "tcemu list --evidence --target B200"):
        assert words in said
    for text in ("tcgen05", "tcgen05.alloc.cta_group::1.sync.aligned.b32 [p], 32;"):
        with pytest.raises(tcemu.Unsupported, match=r"PTX ISA 9\.7\.16"):
            tcemu.parse(text)
    model = tcemu.model("f16", "B200", unit="tcgen05")
    recipe = tcemu.recipe("f16 on B200")
    assert recipe.unit == "tcgen05" and recipe.arithmetic == model
    assert tcemu.fuzz.side("f16", "B200@tcgen05").model == model
    assert tcemu.gemm(ONES, ONES.T, op="f16", target="B200", model=model) == 16
    assert main(["list", "--evidence", "--target", "B200"]) == 0
    assert "tcgen05 f16/bf16 to f32" in capsys.readouterr().out
