"""Instructions of values against the words of an H200."""

from __future__ import annotations

import numpy as np
import pytest
from support.ptx_recorded import document, operands, results
from support.ptx_scalars import operation, run

FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def made(case):
    """The operation of a case: setp of wide types has two destinations there."""
    parts = case["op"].split(".")
    two = len(case["words"]) == 2 and parts[0] == "setp"
    return operation(case["op"], *((2,) + (1,) * len(case["sources"]) if two else ()))


def compared(cases):
    """(words compared, cases of which some differ) of those that promise bits."""
    operations = [made(case) for case in cases]
    given = [operands(case, each.sources) for case, each in zip(cases, operations, strict=True)]
    seen, wrong = 0, []
    for case, each, values, words in zip(cases, operations, given, run(operations, given), strict=True):
        kinds = each.results[: len(case["words"])]
        for got, wanted in zip(words, results(case, kinds, len(values[0])), strict=True):
            seen += wanted.size
            differs = np.flatnonzero(got != wanted)
            if differs.size:
                at = differs[0]
                row = [hex(x[at]) for x in values]
                wrong.append(f"{case['op']}: {differs.size} of {wanted.size}, first {row} -> {hex(got[at])}, the GPU {hex(wanted[at])}")
    return seen, wrong


def exact(case):
    return ".approx" not in case["op"] and ".full" not in case["op"]


def test_words_are_those_of_the_gpu():
    cases = [case for case in document()["cases"] if exact(case)]
    seen, wrong = compared([case for at, case in enumerate(cases) if at % 16 == 0 or (".ftz.f32" in case["op"][-8:] and at % 2 == 0)])
    assert wrong == [] and seen > 15_000


@pytest.mark.full
def test_all_words_are_those_of_the_gpu():
    cases = [case for case in document()["cases"] if exact(case)]
    seen, wrong = compared(cases)
    assert wrong == [] and seen > 250_000


def places(words, kind):
    """How many values of the format lie between each and zero, signed; NaN apart."""
    exponent_bits, mantissa_bits = FLOATS[kind]
    top = exponent_bits + mantissa_bits
    sizes = [int(word) & ((1 << top) - 1) for word in words]
    nan = [size > ((1 << exponent_bits) - 1) << mantissa_bits for size in sizes]
    return np.array([-size if int(word) >> top else size for size, word in zip(sizes, words, strict=True)], object), np.array(nan)


# how far from a GPU's word: one unit more than the manual's error of it, since ours is rounded once. f64: of the upper 32 bits
NEAR = {"ex2": 3, "rcp": 2, "sqrt": 2, "rsqrt": 3, "div": 3}


def test_approximations_are_near_the_gpu():
    cases = [case for case in document()["cases"] if not exact(case) and case["op"].partition(".")[0] in NEAR]
    operations = [made(case) for case in cases]
    given = [operands(case, each.sources) for case, each in zip(cases, operations, strict=True)]
    for case, each, values, words in zip(cases, operations, given, run(operations, given), strict=True):
        kind = each.results[0]
        if kind.endswith("x2"):
            continue
        (wanted,) = results(case, each.results, len(values[0]))
        (ours, our_nan), (theirs, their_nan) = places(words[0], kind), places(wanted, kind)
        unit = 1 << 32 if kind == "f64" and "ftz" in case["op"] else 1
        assert not each.exact and (our_nan == their_nan).all(), case["op"]
        assert max(abs(ours - theirs)[~our_nan]) <= NEAR[case["op"].partition(".")[0]] * unit, case["op"]
    assert len(cases) > 15
