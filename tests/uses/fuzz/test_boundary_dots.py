"""Operands built for two models tell them apart, also where random ones do not."""

from fractions import Fraction

import numpy as np
import pytest

import tcemu
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.exact_values import decode, power_of_two
from tcemu.formats import BF16, E2M1, E4M3, F16, F32, TF32
from tcemu.uses.fuzz.boundary_dots import BoundaryDrawer, encode_integers, sparse_products
from tcemu.uses.fuzz.model_hypotheses import DotDrawer, group_models, predict


@pytest.mark.parametrize("fmt", [F16, BF16, TF32, F32, E4M3, E2M1], ids=str)
def test_odd_integers_times_powers_of_two_are_encoded_exactly_or_are_zero(fmt):
    random = np.random.default_rng(1)
    integer = random.integers(1, 1 << np.minimum(random.integers(1, fmt.mantissa_bits + 4, 400), 30)) | 1
    exponent = random.integers(fmt.min_exponent - fmt.mantissa_bits - 3, fmt.max_exponent + 3, 400)
    negative = random.random(400) < 0.5
    largest = decode(fmt, fmt.max_magnitude << fmt.unused_bits).value
    codes, lost = encode_integers(fmt, negative, integer, exponent), 0
    for code, minus, x, e in zip(codes.tolist(), negative.tolist(), integer.tolist(), exponent.tolist(), strict=True):
        value = Fraction(x) * power_of_two(e)
        in_units = value / max(power_of_two(fmt.min_exponent - fmt.mantissa_bits), power_of_two(e + x.bit_length() - 1 - fmt.mantissa_bits))
        fits = in_units.denominator == 1 and value <= largest
        lost += not fits
        assert decode(fmt, code).value == (-value if minus else value) * fits
    assert 20 < lost < 380


def test_the_table_has_the_products_with_long_runs_of_zeros():
    table = sparse_products(11, 11)
    pairs = set(zip(table.a.tolist(), table.b.tolist(), strict=True))
    assert {(1, 1), (145, 113), (481, 545)} <= pairs and 481 * 545 == 2**18 + 1  # the longest run of two f16 numbers
    assert (1003, 821) not in pairs
    chosen = table.choose(np.random.default_rng(0), np.full(50, 14))
    assert set(np.abs(table.a[chosen] * table.b[chosen] - 2**14).tolist()) <= {1, *(2**i + s for i in range(14) for s in (-1, 1))}


def count_differences(op, models, drawer_class):
    """The dot products of 8,192 for which two models differ."""
    spec = product_spec(tcemu.parse(op))
    drawer = drawer_class(spec, 14, -14, 5)
    groups = group_models(models)
    dots = drawer.draw(8192, groups) if drawer_class is BoundaryDrawer else drawer.draw(8192)
    left, right = np.concatenate([predict(spec, group, dots) for group in groups])
    return int((left != right).sum())


@pytest.mark.parametrize("bits", [40, *(pytest.param(bits, marks=pytest.mark.full) for bits in (33, 37))])
def test_an_exact_addition_differs_from_steps_of_up_to_40_bits(bits):
    models = [Model(F32, terms=1, fraction_bits=None, rounding="RN"), Model(F32, terms=1, fraction_bits=bits, floor=-1024, rounding="RN")]
    assert count_differences("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", models, BoundaryDrawer) >= 5


@pytest.mark.full
def test_a_floor_at_the_end_of_the_range_shows():
    """Of random operands, 1 of 3,072 told these models apart."""
    planted = Model(F16, terms=8, fraction_bits=27, floor=-126, rounding="RZ", alignment="RM")
    models = [planted, planted.replace(floor=-14, multiplicand=TF32)]
    op = "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16"
    built, random = (count_differences(op, models, drawer_class) for drawer_class in (BoundaryDrawer, DotDrawer))
    assert built > 20 * max(random, 1)
