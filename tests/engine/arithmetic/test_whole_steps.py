"""Whole steps by the formulas that CUDA kernels render, as NumPy arrays: the words of the exact reference, on the lattice of a step.

The texts of the kernels are compiled for this CPU in `test_step_lattice.py` for few arithmetics alone, because that takes long.
"""

import pytest
from support import numpy_steps
from support.lattice_paths import build
from support.llvm_products import Arithmetic, arithmetics
from support.sampling import sample_cases
from support.step_lattice import LatticeBuilder, expected

from tcemu.engine.arithmetic.step.forms import keeps_floats

BF16, HALF, NVF4 = "bf16 in steps of 16 by 25", "f16 in steps of 16 by 25 to f16", "e2m1 in steps of 64 by 35, ue4m3 scales of 16"
CHAINED = "e5m2 by e4m3 as f16 in steps of 16 by 25"  # chains are replaced by steps that follow each other
USUAL = (
    "f16 in steps of 16 by 25", "e4m3 in steps of 32 by 13", "tf32 in steps of 4 by 24", BF16, HALF, NVF4, CHAINED,
    "e4m3 in steps of 32 by 25, ue8m0 scales of 32", "e2m1 in steps of 64 by 35, ue8m0 scales of 32",
)  # fmt: skip
# changes of the model: other roundings and widths have other ends of a step
CHANGED = {
    "rounded to nearest": (BF16, {"rounding": "RN", "alignment": "RZ"}),
    "rounded up, terms down": (BF16, {"rounding": "RP", "alignment": "RM", "result_bits": 6}),
    "few bits of the result": ("f16 in steps of 16 by 25", {"rounding": "RZ", "result_bits": 6}),
    "many fraction bits": ("f16 in steps of 16 by 25", {"fraction_bits": 31}),
    "few fraction bits": (BF16, {"fraction_bits": 9}),
    "fewer fraction bits than the result": ("f16 in steps of 16 by 25", {"fraction_bits": 13}),
    "a floor": (BF16, {"floor": -20}),
    "a floor, f16": (HALF, {"floor": 3}),
}  # fmt: skip
NAMES = [name for name, (model, spec, _) in sorted(arithmetics().items()) if spec.c == spec.d == model.result]


def without_chain(arithmetic: Arithmetic) -> Arithmetic:
    return arithmetic._replace(model=arithmetic.model.replace(chain=None))


def assert_no_word_differs(arithmetic: Arithmetic) -> set[str]:
    """Returns the ways on which a step was computed."""
    ways: set[str] = set()
    for lattice in (build(arithmetic, "tile"), build(arithmetic, "guards"), LatticeBuilder(arithmetic, 1).special(2)):
        case, wanted = numpy_steps.case_of(arithmetic, lattice), expected(arithmetic, lattice)
        assert case is not None
        got = {"integers": numpy_steps.by_integers(case)}
        if case.anchored is not None:
            got["anchors"], count = numpy_steps.by_anchors(case)
            assert count > wanted.size // 8, "few steps are anchored ones"
        if keeps_floats(case.numbers, case.stored, case.multiplied) and case.scale is None:
            got["floats"], far = numpy_steps.by_floats(case)
            assert (far > 0) == (not case.form.products_are_normal)
        assert {way: int((words != wanted).sum()) for way, words in got.items()} == dict.fromkeys(got, 0)
        ways |= set(got)
    return ways


@pytest.mark.parametrize("name", sample_cases(NAMES, USUAL))
def test_whole_steps(name):
    ways = assert_no_word_differs(without_chain(arithmetics()[name]))
    assert name not in USUAL or ways == {"integers", "anchors"} | (set() if "scales" in name else {"floats"})


@pytest.mark.parametrize("change", CHANGED)
def test_whole_steps_of_other_models(change):
    name, fields = CHANGED[change]
    arithmetic = arithmetics()[name]
    assert_no_word_differs(arithmetic._replace(model=arithmetic.model.replace(**fields)))
