"""`infer` finds each known row from its own emulation, refuses what no model does, and reads trees of additions."""

import re
from contextlib import suppress
from functools import cache

import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz
from tcemu.cli import main
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.architectures.model_rows import ROWS
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.isa.legality import instructions
from tcemu.engine.isa.tcgen05 import find_counterpart
from tcemu.formats import F16, F32, S32
from tcemu.uses.fuzz.model_probes import match_order, possible_orders, subtree_sizes, summation_tree


def breadth(op):
    """How well an instruction shows its model: products, then the reach of its types, then how little there is to compute."""
    reach = sum(f.max_exponent - f.min_exponent + f.mantissa_bits for f in (op.a, op.b))
    return (
        product_spec(op).k,
        op.scaling is not None and op.scaling.format.name == "ue8m0",
        reach,
        op.a == op.b,
        -op.n,
        not op.satfinite,
    )


@cache
def questions():
    """For each different thing that a row says, the instruction that shows it best: (spelling, box, model, the row's number)."""
    found = {}
    for number, one in enumerate(ROWS):
        target, unit = one.targets[-1], "tcgen05" if one.family.startswith("tcgen05") else None
        toolkit = one.toolkits[-1] if one.toolkits else None
        box = f"{target}@{unit or toolkit}" if unit or toolkit else target
        ops = [op for t in ("sm_90a", "sm_120a") for op in instructions(t, "mma")] if unit else instructions(target, one.family)
        by_scales = {}
        for op in ops:
            with suppress(tcemu.NotModelled):
                shown = find_counterpart(op) if unit else op
                if shown is not None and find_row(shown, target, toolkit=toolkit) is one:
                    by_scales.setdefault(op.scaling and op.scaling.count, []).append(op)
        for of_row in by_scales.values():
            best = max(of_row, key=breadth)
            found.setdefault((str(best), one.model, one.clamped_metadata), (str(best), box, one.model, number))
    return list(found.values())


# of tcgen05's rows for these types alone, which have no scale for each block: their operands cannot show where terms are truncated
TOO_NARROW = ("f32.e2m1.e2m1.f32", "f32.e2m3.e2m3.f32", "f32.e3m2.e3m2.f32")
F16_ROW = ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a")


def check(spelling, target, model):
    op = tcemu.parse(spelling)
    if any(types in spelling for types in TOO_NARROW) and (op.scaling is None or op.scaling.count == 1):
        with pytest.raises(tcemu.Unsupported, match="range of its operands is too small"):
            fuzz.infer_model(op, target, cases=256)
        return
    found = fuzz.infer_model(op, target, cases=256)
    assert found.confirmed and found.model is not None, str(found)
    assert found.admits(model), f"{found}\n{found.undetermined}"
    if not model.result.is_integer:
        alone = {name for name in vars(model) if name not in found.undetermined and name != "result_bits"}
        assert all(getattr(found.model, name) == getattr(model, name) for name in alone), str(found)
    assert f"{found.comparison.done * op.m * op.n:,} outputs" in str(found)


def test_a_row_is_found_from_its_own_emulation():
    (model,) = (model for *question, model, _ in questions() if tuple(question) == F16_ROW)
    check(*F16_ROW, model)
    assert len(questions()) > 40


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{number} {ROWS[number].label}")
def test_every_row_is_found_from_its_own_emulation(number):
    """Some rows say what an earlier one says, and ask nothing."""
    for *question, row in questions():
        if row == number:
            check(*question)


@pytest.mark.full
def test_a_changed_model_is_found_as_changed():
    op = tcemu.parse("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16")
    found = fuzz.infer_model(op, "sm_90a:fraction_bits=19,terms=4,floor=-20,rounding=RM", cases=64)
    assert found.confirmed
    assert found.model == tcemu.Model(F16, 4, 19, -20, "RM")


NARROW = [
    (f"mma.sync.aligned.m16n8k8.row.col.{d}.{t}.{t}.{d}", {"fraction_bits": bits, "alignment": alignment, "rounding": rounding})
    for d, t in (("f16", "f16"), ("f32", "f16"), ("f32", "bf16"))
    for bits in (8, 12, 17, 20, 22)
    for alignment in ("RZ", "RN", "RM", "RP")
    for rounding in ("RZ", "RN", "RM", "RP")
]
NARROW_CASES = sample_cases(NARROW, [], lambda case: f"{case[0].split('.', 6)[-1]} {' '.join(map(str, case[1].values()))}")


@pytest.mark.parametrize("case", NARROW_CASES)
def test_narrow_widths_and_any_alignment_are_found_or_said_to_be_undetermined(case):
    spelling, planted = case
    op = tcemu.parse(spelling)
    own = tcemu.get_model(op, "sm_90a").replace(**planted)
    found = fuzz.infer_model(op, f"sm_90a:{','.join(f'{k}={v}' for k, v in planted.items())}", cases=64)
    assert found.confirmed and found.survivors[0] == found.model, str(found)
    assert (found.model.fraction_bits, found.model.alignment, found.model.terms) == (own.fraction_bits, own.alignment, 8), str(found)
    assert own.rounding in [model.rounding for model in found.survivors], str(found)
    assert found.admits(own), f"{found}\n{found.undetermined}"
    if len({model.rounding for model in found.survivors}) > 1:
        assert "Not determined" in str(found) and "rounding: RZ" in str(found).replace("RN, ", "")


def test_a_box_without_a_model_is_not_given_one():
    """Sums in pairs, which no model has."""

    def pairwise(given):
        a, b, c = (np.asarray(given[n]).view(t).astype(np.float32) for n, t in (("a", np.float16), ("b", np.float16), ("c", np.float32)))
        with np.errstate(all="ignore"):
            parts = [a[:, :, k, None] * b[:, None, k] for k in range(8)]
            while len(parts) > 1:
                parts = [x + y for x, y in zip(parts[::2], parts[1::2], strict=True)]
            return (parts[0] + c).view(np.uint32)

    found = fuzz.infer_model("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", pairwise)
    assert found.model is None and not found.confirmed
    assert "No model of tcemu with an order" in str(found) and "terms = unknown" in str(found)


@pytest.mark.full
def test_what_is_not_the_whole_truth_is_said():
    """A box whose NaN is another word: its model is found, and the comparison tells."""
    op = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"

    def other_nan(given):
        d = np.array(tcemu.dot(op, **given, target="sm_90a"))
        return np.where(d == 0x7FFFFFFF, np.uint32(0x7FC00000), d)

    found = fuzz.infer_model(op, other_nan, cases=128)
    assert not found.confirmed and found.model is not None and found.model.fraction_bits == 25
    assert "NaN x 1 gives 7fc00000" in str(found) and "so the model is incomplete" in str(found)


@pytest.mark.full
def test_integers_have_one_model():
    found = fuzz.infer_model("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32", "sm_90a", cases=64)
    assert found.confirmed and found.model == tcemu.Model(S32)


def test_what_cannot_be_told_is_refused():
    with pytest.raises(tcemu.Unsupported, match=r"terms of 2\^-18 survive beside every 2\^16"):
        fuzz.infer_model("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", "sm_120a")
    with pytest.raises(tcemu.Unsupported, match="range of its operands is too small"):
        fuzz.infer_model("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", "sm_120a")


# ---- trees


def test_trees_of_additions_by_hand():
    assert summation_tree(Order(2), 4) == ((4, 0, 1), 2, 3)
    assert summation_tree(Order(1), 2) == ((2, 0), 1)
    assert summation_tree(Order(2, groups=2, chain="k"), 4) == (4, ((0, 1), 2, 3))
    assert summation_tree(Order(2, groups=2, chain=2, together=True), 4) == (4, ((0, 1), (2, 3)))
    assert summation_tree(Order(1, chain=2), 4) == ((4, (0, 1)), (2, 3))
    assert subtree_sizes(summation_tree(Order(2), 4), 5).tolist() == [
        [0, 3, 5, 5, 3], [3, 0, 5, 5, 3], [5, 5, 0, 5, 5], [5, 5, 5, 0, 5], [3, 3, 5, 5, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("k", sample_cases([4, 8, 16], [4]))
def test_every_order_is_found_by_its_table(k):
    """Or a plainer one with the same table."""
    for order in possible_orders(k):
        table = subtree_sizes(summation_tree(order, k), k + 1)
        found = match_order(table)
        assert found is not None and np.array_equal(subtree_sizes(summation_tree(found, k), k + 1), table)
    assert match_order(np.zeros((k + 1, k + 1), int)) is None


@pytest.mark.full
def test_the_model_is_what_a_user_can_pass_on():
    found = fuzz.infer_model("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", "sm_80", cases=64)
    assert found.model == tcemu.Model(F32, 4, 24, -132, "RZ")


@pytest.mark.full
def test_the_report_says_which_unit_computed():
    op = tcemu.parse("e4m3")
    compared = fuzz.find_mismatches(op, "H100", "H100", cases=2, coverage=False, shrink=False)
    report = " ".join(str(fuzz.InferredModel(op, "sm_90a", tcemu.get_model(op, "H100"), (), 0, compared)).split())
    assert "Unit: mma.sync. It multiplies e4m3 as f16 there. Libraries use wgmma on sm_90a" in report
    assert "Unit:" not in str(fuzz.InferredModel(op, "a function", None, (), 0, None))


def test_a_black_box_takes_one_argument():
    for box in (lambda a, b, c: a, lambda: 0):
        with pytest.raises(TypeError, match=r"<lambda>: .*; expected a function of one argument, the operands' NumPy codes in a dict"):
            fuzz.infer_model("f16", box)


@pytest.mark.full
def test_an_error_names_a_command_that_works(capsys):
    with pytest.raises(tcemu.Unsupported) as caught:
        fuzz.infer_model("e4m3 tcgen05", "B200")
    words = re.search(r"such as tcemu (fuzz .*)", str(caught.value))
    assert words is not None and main([*words[1].split(), "--cases", "2", "--quiet"]) in (0, 1)
