"""After how many products .satfinite clamps an integer sum: the engine, the reference, products of any size, and the fuzzer."""

import numpy as np
import pytest
from oracles import reference
from oracles.reference import kept_positions
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.formats import F32, S32
from tcemu.uses.fuzz.coverage import EVENTS

LARGEST = 2**31 - 1
DENSE = "mma.sync.aligned.m16n8k{}.row.col.satfinite.s32.{}.{}.s32"
SPARSE = "mma.sp.sync.aligned.m16n8k{}.row.col.satfinite.s32.{}.{}.s32"
S8 = DENSE.format(32, "s8", "s8")
CASES = [(DENSE, 32, "s8", "s8"), (DENSE, 64, "s4", "s4"), (SPARSE, 64, "s8", "s8"), (SPARSE, 128, "s4", "s4")]
CASES += [(DENSE, 32, "s8", "u8"), (DENSE, 32, "u8", "s8"), (DENSE, 64, "u4", "s4"), (SPARSE, 64, "s8", "u8")]
STEPS = {"s8": 16, "u8": 16, "s4": 32, "u4": 32}


@pytest.mark.parametrize(
    "target", sample_cases(["sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90a", "sm_100a", "sm_120a"], ["sm_86", "sm_89", "sm_90a"])
)
@pytest.mark.parametrize(("form", "k", "a", "b"), CASES[:4])
def test_a_sum_that_leaves_s32_midway(form, k, a, b, target):
    """C is the largest s32; 1 is the first stored product, -1 the first of the second half."""
    op = tcemu.parse(form.format(k, a, b))
    x, y = np.zeros(op.matrix_shape("a"), np.uint8), np.zeros(op.matrix_shape("b"), np.uint8)
    stored, sparse = x.shape[1], {}
    fields = np.full((16, op.k // op.chunk_size), 4, np.uint8) if op.sparse else None  # the first two of four, or pairs of them
    met = kept_positions(a, fields[0].tolist()) if op.sparse else list(range(op.k))
    x[0, 0], x[0, stored // 2], y[met[0], 0], y[met[stored // 2], 0] = 1, (1 << op.a.bits) - 1, 1, 1
    if fields is not None:
        sparse = {"e": fields}
    c = np.full((16, 8), LARGEST, np.uint32)
    d = tcemu.dot(op, x, y, c, target=target, **sparse)
    by_halves = target in ("sm_80", "sm_86", "sm_87", "sm_88", "sm_89")
    assert hex(d[0, 0]) == hex(LARGEST - 1 if by_halves else LARGEST)
    assert tcemu.get_model(op, target).clamp_step == (STEPS[a] if by_halves else None)


@pytest.mark.parametrize("case", sample_cases(CASES, 3, lambda case: ".".join(map(str, case[1:]))))
def test_dot_is_the_oracle_near_the_ends(case):
    form, k, a, b = case
    op, rng = tcemu.parse(form.format(k, a, b)), np.random.default_rng(k)
    x, y = (operands.integers(name, (4, *op.matrix_shape(matrix)), rng) for name, matrix in ((a, "a"), (b, "b")))
    near = rng.integers(0, 1 << (12 if a[1] == "8" else 7), (4, 16, 8))
    c = np.where(rng.random(near.shape) < 0.5, LARGEST - near, -(2**31) + near).astype(np.int32).view(np.uint32)
    sparse = {"e": rng.choice(np.uint8(defined_fields(op.chunk_size, op.ordered)), (4, 16, op.k // op.chunk_size))} if op.sparse else {}
    d, whole = (np.asarray(tcemu.dot(op, x, y, c, target=target, **sparse)) for target in ("sm_86", "sm_90a"))
    assert (d != whole).mean() > 0.1  # enough of them leave s32 midway
    wrong = 0
    for t, i, j in np.ndindex(d.shape):
        met = kept_positions(a, sparse["e"][t, i].tolist()) if op.sparse else slice(None)
        wanted = reference.clamped_dot(a, b, x[t, i].tolist(), y[t, met, j].tolist(), int(c[t, i, j]), STEPS[a])
        wrong += int(d[t, i, j]) != wanted
    assert wrong == 0, f"{wrong} mismatches of {d.size}"


def test_unsigned_sums_only_grow():
    op, rng = DENSE.format(32, "u8", "u8"), np.random.default_rng(0)
    x, y = rng.integers(0, 256, (16, 32), np.uint8), rng.integers(0, 256, (32, 8), np.uint8)
    c = np.full((16, 8), LARGEST - 1000, np.uint32)
    assert (np.asarray(tcemu.dot(op, x, y, c, target="sm_86")) == tcemu.dot(op, x, y, c, target="sm_90a")).all()


def test_gemm_clamps_after_the_same_products():
    """Two instructions of K = 32 are four steps on sm_86."""
    a, b, c = np.zeros((1, 64), np.int8), np.ones((64, 1), np.int8), np.array([[LARGEST]], np.int32)
    a[0, [0, 16, 32, 48]] = 1, -1, 1, -1
    results = {target: int(tcemu.gemm(a, b, c, op=S8, target=target)[0, 0]) for target in ("sm_86", "sm_89", "sm_120a")}
    assert results == {"sm_86": LARGEST - 1, "sm_89": LARGEST - 1, "sm_120a": LARGEST}
    a[0, [0, 16, 32, 48]] = 1, -1, -1, 1
    assert int(tcemu.gemm(a, b, c, op=S8, target="sm_86")[0, 0]) == LARGEST - 1
    wrapped = S8.replace(".satfinite", "")
    assert int(tcemu.gemm(a, b, c, op=wrapped, target="sm_86")[0, 0]) == LARGEST


def test_any_step_is_a_model():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (16, 32), np.uint8), rng.integers(0, 256, (32, 8), np.uint8)
    c = (LARGEST - rng.integers(0, 1 << 12, (16, 8))).astype(np.uint32)
    for step in (1, 5, 12, 32, 100):
        d = np.asarray(tcemu.dot(S8, x, y, c, target="sm_90a", model=f"clamp_step={step}"))
        wanted = np.zeros((16, 8), np.uint32)
        for i, j in np.ndindex(wanted.shape):
            wanted[i, j] = reference.clamped_dot("s8", "s8", x[i].tolist(), y[:, j].tolist(), int(c[i, j]), step)
        assert (d == wanted).all(), step
    with pytest.raises(ValueError, match="clamp_step must be None where the result is not s32"):
        Model(F32, clamp_step=16)
    with pytest.raises(ValueError, match="clamp_step must be a number of products"):
        Model(S32, clamp_step=0)
    assert repr(Model(S32, clamp_step=16)).endswith("clamp_step=16)") and "clamp_step" not in repr(Model(S32))


def test_explanations_show_every_clamp():
    a, b = [0] * 32, [1] * 32
    a[0], a[16] = 1, 255
    found = tcemu.explain(S8, a, b, LARGEST, target="sm_86", codes=True)
    assert found.result == LARGEST - 1 and [step.rounding for step in found.steps] == ["clamp", "clamp"]
    assert "clamped to s32 after every 16 products" in str(found)
    assert "clamped to s32." in str(tcemu.explain(S8, a, b, LARGEST, target="sm_90a", codes=True))
    compared = tcemu.explain(S8, a, b, LARGEST, target=("sm_86", "sm_120a"), codes=True)
    assert [e.result for e in compared.explanations] == [LARGEST - 1, LARGEST] and compared.divergences[0] is not None


def test_the_reference_agrees_on_generated_cases():
    found = fuzz.find_mismatches(S8, "sm_86", "reference:sm_86", cases=2, coverage=False)
    assert (found.wrong_outputs, found.done) == (0, 2)


def test_fuzzing_reaches_and_tells_the_clamps():
    found = fuzz.find_mismatches(S8, "sm_86", "sm_120a", cases=2048, shrink=False)
    count = int(found.coverage.events[EVENTS.index("clamped before the last step")])
    assert found.wrong_outputs > 0 and count > 0 and f"clamped before the last step {count:,}" in str(found)
    same = fuzz.find_mismatches(S8, "sm_120a", "sm_90a", cases=64, shrink=False)
    assert same.wrong_outputs == 0 and "clamped before the last step" not in str(same)


FOUND = [(S8, "sm_86", 16), (S8, "sm_90a", None), (SPARSE.format(128, "s4", "s4"), "sm_89", 32)]


@pytest.mark.parametrize("case", sample_cases(FOUND, FOUND[:1], lambda case: f"{case[1]} {case[2]}"))
def test_the_step_is_found_from_a_black_box(case):
    op, target, step = case
    found = fuzz.infer_model(op, target, cases=64)
    assert found.confirmed and found.model == Model(S32, clamp_step=step) and "clamp_step = " in str(found)
    assert found.admits(tcemu.get_model(op, target)) and not found.admits(Model(S32, clamp_step=8))


def test_a_step_that_no_operands_show_is_open():
    found = fuzz.infer_model(DENSE.format(32, "u8", "u8"), "sm_86", cases=64)
    assert found.confirmed and found.admits(Model(S32, clamp_step=16)) and found.admits(Model(S32))
    assert list(found.undetermined) == ["clamp_step"] and "clamp_step: any" in str(found)


def test_rows_say_what_is_known_of_the_clamp():
    levels = {target: tcemu.evidence(S8, target).level for target in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a")}
    assert levels == {
        "sm_80": "assumed", "sm_86": "published", "sm_89": "published", "sm_90a": "silicon", "sm_100a": "assumed",
        "sm_120a": "published", "sm_121a": "assumed",
    }  # fmt: skip
    assert "not known" in tcemu.evidence(S8, "A100").source and find_row(tcemu.parse(S8), "sm_80").label.endswith("(m16n8k32, .satfinite)")
    assert "RTX 3060" in tcemu.evidence(S8, "sm_86").source and tcemu.evidence(S8.replace("s8.s8", "u8.s8"), "sm_86").level == "assumed"
    assert tcemu.evidence(S8.replace(".satfinite", ""), "A100").level == "literature"
