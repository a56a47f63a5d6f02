"""Instructions of values against the words of an H200."""

from __future__ import annotations

import numpy as np
import pytest
from support.ptx_recorded import document, operands, results
from support.ptx_scalars import operation, run_operations

FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def case_operation(case):
    """The operation of a case: setp of wide types has two destinations there."""
    parts = case["op"].split(".")
    two = len(case["words"]) == 2 and parts[0] == "setp"
    return operation(case["op"], *((2,) + (1,) * len(case["sources"]) if two else ()))


def compare_cases(cases):
    """(words compared, cases of which some differ) of those that promise bits."""
    operations = [case_operation(case) for case in cases]
    given = [operands(case, each.sources) for case, each in zip(cases, operations, strict=True)]
    seen, wrong = 0, []
    for case, each, values, words in zip(cases, operations, given, run_operations(operations, given), strict=True):
        kinds = each.results[: len(case["words"])]
        for got, wanted in zip(words, results(case, kinds, len(values[0])), strict=True):
            seen += wanted.size
            differs = np.flatnonzero(got != wanted)
            if differs.size:
                at = differs[0]
                row = [hex(x[at]) for x in values]
                wrong.append(f"{case['op']}: {differs.size} of {wanted.size}, first {row} -> {hex(got[at])}, the GPU {hex(wanted[at])}")
    return seen, wrong


def test_words_are_those_of_the_gpu():
    cases = document()["cases"]
    seen, wrong = compare_cases([case for at, case in enumerate(cases) if at % 64 == 0 or (".ftz.f32" in case["op"][-8:] and at % 8 == 0)])
    assert wrong == [] and seen > 3_500


@pytest.mark.full
def test_all_words_are_those_of_the_gpu():
    seen, wrong = compare_cases(document()["cases"])
    assert wrong == [] and seen > 250_000


def recorded_approximations():
    return [case for case in document()["cases"] if ".approx" in case["op"] or ".full" in case["op"]]


def test_a_sample_of_the_approximations_is_that_of_the_gpu():
    """test_special_functions.py compares all of their words, without PTX around them."""
    seen, wrong = compare_cases(recorded_approximations()[::8])
    assert wrong == [] and seen > 250


@pytest.mark.full
def test_approximations_are_those_of_the_gpu():
    """All recorded words of ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div.approx and div.full, of all types."""
    cases = recorded_approximations()
    seen, wrong = compare_cases(cases)
    assert wrong == [] and seen == 3404 and len(cases) == 30
