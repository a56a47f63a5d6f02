"""Short names of instructions: what each means, that everything that takes a spelling takes them, and what is said of one that is none."""

import inspect
import re

import jax
import numpy as np
import pytest
from support.public_names import public_objects
from support.sampling import sample_cases

import tcemu
from tcemu.cli import main
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import RECIPE_NAMES, targets
from tcemu.engine.isa.short_names import _short_name, find_short_name, short_names
from tcemu.engine.isa.tcgen05 import usual_products

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
    "f16 tcgen05": "tcgen05.mma.cta_group::1.kind::f16.m128n256k16.f32.f16.f16",
    "nvf4 tcgen05": "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16.m128n256k64.f32.e2m1.e2m1.ue4m3",
    "s8 tcgen05 sparse": "tcgen05.mma.sp.cta_group::1.kind::i8.m128n256k64.s32.s8.s8",
    "b1 and": "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc",
}
WRITTEN = {  # as people write them -> the name of the table
    "F16": "f16", " fp16 ": "f16", "half": "f16", "mma f16": "f16", "f16-sparse": "f16 sparse", "sparse fp16": "f16 sparse",
    "WGMMA E4M3": "e4m3 wgmma", "sparse wgmma f16": "f16 wgmma sparse", "int8": "s8", "nvfp4": "nvf4", "MXFP8": "mxf8", "bfloat16": "bf16",
    "float16": "f16", "e4m3fn": "e4m3", "float8_e4m3fn wgmma": "e4m3 wgmma", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1",
}  # fmt: skip
WGMMA = "f16 wgmma sparse"


def zeros(*shape: int, dtype=np.uint32) -> np.ndarray:
    return np.zeros(shape, dtype)


def group() -> tcemu.instructions.Warpgroup:
    return tcemu.instructions.Warpgroup(zeros(8192), {"d": zeros(4, 32, 128), "a": zeros(4, 32, 4)}).fence()


HALVES, ONES = zeros(16, 16, dtype=np.uint16), np.ones((1, 16), np.float32)
TAKING = {  # everything public that takes an instruction and computes or says something of it, and the short name that it gets
    "check": ("f16", lambda op: tcemu.check(op, "sm_90a")),
    "targets": ("f16", tcemu.targets),
    "get_model": ("f16", lambda op: tcemu.get_model(op, "sm_90a")),
    "evidence": ("f16", lambda op: tcemu.evidence(op, "sm_90a")),
    "backends.describe": ("f16", lambda op: str(tcemu.backends.describe(op, target="sm_90a"))),
    "mma": ("f16", lambda op: tcemu.mma(op, zeros(32, 4), zeros(32, 2), zeros(32, 4), target="sm_90a")),
    "mma_sp": (
        "f16 sparse",
        lambda op: tcemu.mma_sp(op, zeros(32, 4), zeros(32, 4), zeros(32, 4), zeros(32), selector=0, target="sm_90a"),
    ),
    "wgmma": ("f16 wgmma", lambda op: tcemu.wgmma(op, zeros(4, 32, 128), 0, zeros(8192), a=zeros(4, 32, 4), target="sm_90a")),
    "instructions.Warpgroup.wgmma": (
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
    "fuzz.FuzzRun": ("f16", None),  # what `run` gives back
    "fuzz.InferredModel": ("f16", None),  # what `infer` gives back
    "fuzz.find_mismatches": (
        "f16",
        lambda op: str(tcemu.fuzz.find_mismatches(op, "sm_80", "sm_90a", cases=4, coverage=False)).split(", seed")[0],
    ),
    "fuzz.infer_model": ("s8", lambda op: str(tcemu.fuzz.infer_model(op, "sm_90a", cases=4))),
    "fuzz.emulator": ("f16", None),  # takes an Instruction
    "fuzz.get_implementation": ("f16", lambda op: tcemu.fuzz.get_implementation(op, "sm_90a").identity),
    "silicon.statement_kernel": ("f16", None),  # takes an Instruction
    **{f"instructions.Tcgen05Block.{name}": ("f16 tcgen05", None) for name in ("mma", "ld", "st", "cp", "shift")},  # spellings in full
    "products.OzakiSliceRecipe": ("s8", None),  # see test_ozaki.py
    "products.OzakiModularRecipe": ("s8", None),  # see test_ozaki_moduli.py
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


OWN = {  # a short name and a target that lacks its common shape -> the target's own instruction
    ("f16", "V100"): "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    ("f16", "Jetson Xavier"): "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32",
    ("half", "T4"): "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
    ("f16", "RTX 2080"): "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32",
    ("s8", "T4"): "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32",
    ("int4", "T4"): "mma.sync.aligned.m8n8k32.row.col.s32.s4.s4.s32",
    ("b1 xor", "T4"): "mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc",
}


@pytest.mark.parametrize(("name", "target"), OWN)
def test_a_short_name_knows_its_target(name, target):
    op = OWN[name, target]
    assert str(tcemu.check(name, target)) == op
    assert tcemu.get_model(name, target) == tcemu.get_model(op, target)
    assert tcemu.evidence(name, target) == tcemu.evidence(op, target)
    with pytest.raises(tcemu.Unsupported, match="needs sm_80 or later"):  # a whole spelling means itself
        tcemu.check(str(tcemu.parse(name)), target)


def test_a_short_name_is_the_largest_instruction_of_every_target():
    """Counted here from the table, against what `check` returns; f64 alone keeps the shape of `parse` where there is a larger one."""
    found = {}
    for target in targets():
        for op in tcemu.isa.instructions(target):
            if isinstance(op, MatrixMultiply) and (name := _short_name(op)):
                found.setdefault((name, target), []).append(op.m * op.n * op.k)
    for op in usual_products():  # by its own name; also by the plain one where mma has none
        for target in targets(op) if (name := _short_name(op)) else ():
            found.setdefault((name, target), []).append(op.m * op.n * op.k)
            found.setdefault((name.replace(" tcgen05", ""), target), [op.m * op.n * op.k])
    assert {name for name, _ in found} == set(short_names())
    for (name, target), sizes in found.items():
        op = tcemu.check(name, target)
        assert op.m * op.n * op.k == max(sizes) or (name == "f64" and op == tcemu.parse("f64"))
    for name in short_names():
        assert list(targets(name)) == [target for target in targets() if (name, target) in found]


@pytest.mark.full
def test_a_product_by_a_short_name_on_old_gpus():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 16, 16)).astype(np.float32)
    for target, op in (("V100", OWN["f16", "V100"]), ("RTX 2080", OWN["f16", "RTX 2080"])):
        whole = tcemu.gemm(a, b, op=op, target=target)
        assert np.array_equal(tcemu.gemm(a, b, op="f16", target=target), whole)
        assert np.array_equal(tcemu.matmul(a, b, recipe=f"f16 on {target}"), whole)
        assert tcemu.explain("f16", a[0], b[:, 0], target=target).value == float(whole[0, 0])
    both = tcemu.explain("f16", a[0], b[:, 0], target=["T4", "A100"])
    assert [e.op.k for e in both.explanations] == [8, 16]
    assert all(str(e.op) in str(both) for e in both.explanations)
    found = tcemu.fuzz.find_mismatches("f16", "T4", "reference:A100", cases=4, coverage=False)
    assert found.op.k == 8 and not found.wrong_cases
    assert tcemu.fuzz.infer_model("s8", "T4", cases=4).op.k == 16


ELSEWHERE = {  # an instruction that a target lacks -> what the message says works, and what it must not say
    ("bf16", "T4"): ("no mma of bf16, only of f16, u8, s8, u4, s4, b1", "nearest"),
    ("e4m3 wgmma", "B200"): ("no wgmma at all. sm_100a multiplies these operands by tcgen05, which a recipe takes: recipe='fp8", "mma."),
    ("nvf4", "H100"): ("no mma of e2m1, only of f16, bf16", "tcgen05"),
}


@pytest.mark.parametrize(("name", "target"), ELSEWHERE)
def test_what_a_target_has_instead(name, target):
    said, unsaid = ELSEWHERE[name, target]
    with pytest.raises(tcemu.Unsupported) as caught:
        tcemu.check(name, target)
    assert said in str(caught.value) and unsaid not in str(caught.value).split("the target is")[1]
    for recipe in RECIPE_NAMES.values() if "recipe=" in said else ():
        assert tcemu.get_recipe(f"{recipe} on {target}").op.family == "tcgen05.mma"


def test_as_people_write_them():
    assert {text: find_short_name(text) for text in WRITTEN} == {text: short_names()[name] for text, name in WRITTEN.items()}


def test_every_name_follows_the_rule():
    """Held against the names themselves: the words of a name stand in its spelling, and nothing larger of the sort is as old."""
    for name, op in short_names().items():
        first, *more = name.split()
        assert tcemu.parse(name) is op and find_short_name(name.upper()) is op
        assert op.sparse == ("sparse" in more) and op.family.split(".")[0] == next((w for w in more if "mma" in w or w == "tcgen05"), "mma")
        assert op.a == op.b and (str(op.a) == first or op.kind.startswith(first[:3]) or first == "nvf4")
        assert str(op.d) == {"f64": "f64"}.get(first, "f32" if op.a.exponent_bits else "s32")
        assert not op.satfinite and op.rounding in (None, "rn")
        like = re.sub(r"m\d+n\d+k\d+", "SHAPE", str(op))
        first_target = max(targets(op)[0], "sm_80", key=targets().index)
        rivals = [
            other
            for other in (*tcemu.isa.instructions(first_target, op.family), *usual_products())
            if re.sub(r"m\d+n\d+k\d+", "SHAPE", str(other)) == like
        ]
        assert op.m * op.n * op.k == max(other.m * other.n * other.k for other in rivals)


def test_every_format_of_the_catalogue_has_a_name():
    formats = {op.a.name for target in targets() for op in tcemu.isa.instructions(target, "mma") if op.a == op.b}
    assert {name.split()[0] for name in short_names()} == formats | {"mxf8", "mxf4", "nvf4"}
    assert all(
        targets(op)[-1] == targets()[-1] or op.family.startswith(("wgmma", "tcgen05")) or op.a.bits < 8 for op in short_names().values()
    )


def test_what_takes_an_instruction_is_here():
    """Found by its parameter, so that a new function cannot be forgotten."""
    assert {name for name, value in public_objects().items() if "op" in inspect.signature(value).parameters} == TAKING.keys()


CALLS = [name for name, (_, call) in TAKING.items() if call is not None]
SLOW = (  # each compiles a program of its own
    "fuzz.find_mismatches", "fuzz.infer_model", "instructions.Warpgroup.wgmma", "mma_sp", "study.expected_error", "study.surrogate",
    "wgmma", "wmma_mma",
)  # fmt: skip


@pytest.mark.parametrize("taking", sample_cases(CALLS, [name for name in CALLS if name not in SLOW]))
def test_a_short_name_is_its_spelling(taking):
    name, call = TAKING[taking]
    short, full = (jax.tree.leaves(call(op)) for op in (name, str(tcemu.parse(name))))
    if taking == "targets":  # a short name works where its spelling does, and on targets with a smaller shape
        assert set(full) < set(short)
        full = short
    assert len(short) == len(full) and all(np.array_equal(x, y) for x, y in zip(short, full, strict=True))
    if taking == "targets":  # no target has a string that is no instruction
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
        ("mma", "mma: missing qualifiers; give a whole spelling, or a short name"),
        ("wgmma", "wgmma: unknown instruction; the family has wgmma.mma_async, wgmma.fence"),
        ("nma", "did you mean 'mma'?"),
        ("f16 " * 10**5, "unknown instruction"),
        ("fp8", "unknown instruction 'fp8': fp8 is two formats, e4m3 and e5m2 (a recipe, such as 'fp8', is given as recipe="),
        ("FP8 wgmma", "fp8 is two formats, e4m3 and e5m2"),
        ("float32", "float32 is no format of A and B on a tensor core; tf32, bf16 and f16 are"),
        ("float8_e4m3fnuz", "is a format of AMD's GPUs"),
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
    ):
        assert main(words.split()) == 0
        assert full in capsys.readouterr().out
    for words in ("infer s8 --cases 4", "fuzz s8 --left A100 --right H100 --cases 4 --quiet"):  # integers, which compile in less time
        assert main(words.split()) == 0
        assert MEANT["s8"] in capsys.readouterr().out
    assert main(["check", "e4m3 wgmma", "--target", "H100"]) == 0
    assert f"{MEANT['e4m3 wgmma']} is an instruction of sm_90a" in capsys.readouterr().out


def test_short_names_are_listed(capsys):
    assert main(["list", "--short"]) == 0
    out = capsys.readouterr().out
    assert ["e4m3", "wgmma", "sm_90a", MEANT["e4m3 wgmma"]] in [line.split() for line in out.splitlines()]
    assert len(re.findall(r"sm_\d+", out)) == len(short_names())
    assert main(["list", "--short", "--gpus"]) == main(["list", "--short", "--target", "H100"]) == 2


def test_tcgen05_says_what_there_is(capsys):
    assert main(["check", "tcgen05.mma.cta_group::1.kind::f16", "--target", "B200"]) == 0
    assert "from PTX ISA 8.6 on" in capsys.readouterr().out
    for text in ("tcgen05", "tcgen05.make [p], 32;"):
        with pytest.raises(tcemu.Unsupported, match=r"tcgen05\.alloc"):
            tcemu.parse(text)
    model = tcemu.get_model("f16 tcgen05", "B200")
    recipe = tcemu.get_recipe("f16 on B200")
    assert recipe.op == tcemu.parse("f16 tcgen05") and recipe.arithmetic == model
    assert tcemu.fuzz.get_implementation("f16", "B200@tcgen05").model == model
    assert tcemu.gemm(ONES, ONES.T, op="f16 tcgen05", target="B200") == 16
    assert main(["list", "--evidence", "--target", "B200"]) == 0
    assert "tcgen05.mma f16 to f32" in capsys.readouterr().out
    assert str(recipe.op) == "tcgen05.mma.cta_group::1.kind::f16.m128n256k16.f32.f16.f16"
