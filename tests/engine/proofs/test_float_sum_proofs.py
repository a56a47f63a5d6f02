"""Sums of products as floats that round toward zero, by enumeration: what a CPU without AVX-512 never executes, in the usual run."""

from __future__ import annotations

import numpy as np
import pytest
from proof_records import ENUMERATION, proves
from step_rows import bounded_forms
from support.numpy_values import NumpyValue

from tcemu.engine.arithmetic.step import bounded
from tcemu.engine.arithmetic.step.decoding import decode, value_word
from tcemu.formats import Format

FORMS = sorted({form for form in bounded_forms().values() if form.adds_floats}, key=repr)
DISTANCES = range(0, 41, 2)  # binades between a product's exponent and the one that a step aligns to


def magnitudes(fmt: Format) -> np.ndarray:
    """The bits of every number of a format as an f32, without sign."""
    x = decode(fmt, NumpyValue(np.arange(1 << (fmt.bits - 1), dtype=np.int32)))
    words = value_word(fmt, x).array
    return words[~x.special.array] if x.special is not None else words


@proves(
    "bounded.float_sum_start", "bounded.add_truncated", "bounded.float_sums_difference",
    by=ENUMERATION, domain="every pair of factors of every form that adds floats, at 21 distances, with random sums before",
)  # fmt: skip
@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_a_product_is_truncated_as_it_is_added(form):
    rng = np.random.default_rng(0)
    x, y, distance = np.meshgrid(magnitudes(form.a), magnitudes(form.b), np.array(DISTANCES, np.int32), indexing="ij")
    field = np.maximum(x >> 23, 1) + np.maximum(y >> 23, 1) - 127
    unit = np.clip(field + distance - form.fraction_bits, 1, 230).astype(np.int32)
    exact = np.floor(x.view(np.float32).astype(np.float64) * y.view(np.float32) / np.ldexp(1.0, unit - 127)).astype(np.int64)
    room = (1 << 23) - (4 << form.fraction_bits)
    before = rng.integers(0, room, x.shape, np.int32)
    start = bounded.float_sum_start(NumpyValue(unit << 23))
    total = NumpyValue(start.array.view(np.int32) + before).as_float()
    after = bounded.add_truncated(total, NumpyValue(x).as_float(), NumpyValue(y).as_float())
    np.testing.assert_array_equal(bounded.float_sums_difference(after, start).array, before + exact)
    assert (exact > 0).mean() > 0.1 and exact.max() < 4 << form.fraction_bits
