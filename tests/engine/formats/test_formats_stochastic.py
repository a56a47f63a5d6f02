"""tcemu.formats: stochastic rounding. Keys are fixed, so that nothing here can fail by chance."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import reference
from oracles.other_formats import DTYPES
from support import random_operands as operands
from support.sampling import sample_cases

from tcemu import formats
from tcemu.formats import FORMATS, convert, from_float, round_float, to_float

DRAWS = 1 << 16
TARGETS = ["f16", "bf16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "ue4m3", "ue8m0"]


def draw_codes(source: str, target: str, value: Fraction, seed: int, saturate: bool = False) -> list[int]:
    """The codes of DRAWS stochastic roundings of one value, which the source must hold exactly."""
    code = reference.encode(source, value)
    assert reference.decode(source, code) == value
    codes = np.full(DRAWS, code, operands.storage_dtype(source))
    codes = operands.two_words(codes) if source == "f64" else codes
    found = np.asarray(convert(FORMATS[source], FORMATS[target], codes, "SR", saturate, key=jax.random.key(seed)))
    return found.tolist()


def assert_binomial(count: int, chance: Fraction) -> None:
    """`count` of DRAWS within five standard deviations."""
    spread = (DRAWS * float(chance * (1 - chance))) ** 0.5
    assert abs(count - DRAWS * float(chance)) <= 5 * spread, f"{count} of {DRAWS}, expected {DRAWS * float(chance):.0f} +- {spread:.0f}"


@pytest.mark.parametrize("target", sample_cases(TARGETS, 5))
def test_it_is_unbiased_between_its_two_neighbours(target):
    """The share of draws that go up is the distance from the lower neighbour, for normals and subnormals, for both signs."""
    spec = reference.FORMATS[target]
    seed = 0
    for magnitude in {1, (1 << spec.fraction) + 1, spec.bias << spec.fraction, spec.greatest - 2}:
        low, high = (reference.decode(target, code) for code in (magnitude, magnitude + 1))
        for chance in (Fraction(1, 2), Fraction(1, 8), Fraction(29, 32)):
            for sign in (1, -1) if spec.signed else (1,):
                value = low + (high - low) * chance
                found = draw_codes("f32", target, sign * value, seed := seed + 1)
                codes = [reference.encode(target, sign * x) for x in (low, high)]
                assert set(found) == set(codes)
                assert_binomial(found.count(codes[1]), chance)


SOURCES = [("f64", "f16"), ("f64", "f32"), ("f64", "e4m3"), ("f16", "e5m2"), ("bf16", "e2m1"), ("f32", "tf32")]


@pytest.mark.parametrize("case", sample_cases(SOURCES, 2, "-".join))
def test_it_is_unbiased_from_every_source(case):
    source, target = case
    low, high = (
        reference.decode(target, reference.encode(target, Fraction(1)) + (code << reference.FORMATS[target].ignored)) for code in (0, 1)
    )
    for seed, chance in enumerate((Fraction(1, 2), Fraction(3, 8))):
        assert_binomial(draw_codes(source, target, low + (high - low) * chance, seed).count(reference.encode(target, high)), chance)


EXACT = [("f32", "e4m3"), ("f32", "e2m1"), ("f16", "e5m2"), ("f32", "bf16"), ("f64", "f32"), ("f64", "bf16")]


@pytest.mark.parametrize("case", sample_cases(EXACT, 2, "-".join))
def test_the_chance_is_exact_to_the_last_dropped_bit(case):
    """With the random word in hand: up if it is below 2^32 times the distance from the lower neighbour, cut to an integer."""
    source, target = case
    spec, wide = reference.FORMATS[target], reference.FORMATS[source]
    one = reference.encode(source, Fraction(1))
    low, high = Fraction(1), reference.decode(target, reference.encode(target, Fraction(1)) + 1)
    rng = np.random.default_rng(1)
    encoded = jax.jit(lambda code, random: formats.encode(FORMATS[target], formats.decode(FORMATS[source], code), "SR", random=random))
    for rest in [*rng.integers(1, 1 << wide.fraction - spec.fraction, 20).tolist(), (1 << wide.fraction - spec.fraction) - 1]:
        code = np.array([one + rest] * 2, operands.storage_dtype(source))
        chance = (reference.decode(source, one + rest) - low) / (high - low)
        cut = chance * (1 << 32)
        cut = cut.numerator // cut.denominator
        given = operands.two_words(code) if source == "f64" else code
        found = np.asarray(encoded(given, np.array([cut - 1, cut], np.uint32))).tolist()
        assert found == [reference.encode(target, high), reference.encode(target, low)], f"rest {rest:#x}"


@pytest.mark.parametrize("target", sample_cases([*TARGETS, "tf32", "s8"], 6))
def test_it_never_leaves_the_two_neighbours(target):
    codes = np.concatenate([operands.codes("f32", kind, (4000,), np.random.default_rng(2)) for kind in operands.CLASSES])
    for saturate in (False, True):
        found, down, up = (
            np.asarray(convert(FORMATS["f32"], FORMATS[target], codes, mode, saturate, key=jax.random.key(3)))
            for mode in ("SR", "RM", "RP")
        )
        assert ((found == down) | (found == up)).all()


@pytest.mark.parametrize("target", sample_cases(TARGETS, 3))
def test_exact_values_stay(target):
    bits = FORMATS[target].bits
    codes = np.arange(1 << bits).astype(operands.storage_dtype(target))
    number = np.array([reference.decode(target, code) != "nan" for code in codes.tolist()])
    for seed in range(3):
        again = from_float(FORMATS[target], to_float(FORMATS[target], codes[number]), "SR", key=jax.random.key(seed))
        assert (np.asarray(again) == codes[number]).all()


@pytest.mark.parametrize("target", sample_cases(["f16", "bf16", "e5m2", "e4m3", "ue4m3", "ue8m0"], ["f16", "e4m3", "ue8m0"]))
def test_beyond_the_largest(target):
    """Half way past the largest value it overflows half of the time, and never where it saturates; far past it always does."""
    spec = reference.FORMATS[target]
    largest, before = (reference.decode(target, spec.greatest - i) for i in (0, 1))
    step = largest if target == "ue8m0" else largest - before
    special = reference.encode(target, largest * 4, "RP")
    found = draw_codes("f64", target, largest + step / 2, 4)
    assert set(found) == {spec.greatest, special}
    assert_binomial(found.count(special), Fraction(1, 2))
    assert set(draw_codes("f64", target, largest + step / 2, 4, saturate=True)) == {spec.greatest}
    assert set(draw_codes("f64", target, largest * 5, 5)) == {special}
    assert set(draw_codes("f64", target, largest * 5, 5, saturate=True)) == {spec.greatest}


@pytest.mark.parametrize("target", ["e3m2", "e2m3", "e2m1"])
def test_formats_without_specials_always_saturate(target):
    largest = reference.decode(target, reference.FORMATS[target].greatest)
    for sign in (1, -1):
        assert set(draw_codes("f32", target, sign * largest * Fraction(9, 8), 6)) == {reference.encode(target, sign * largest)}


def test_zeros_and_specials_draw_no_lots():
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], np.float32)
    for name in ("f16", "e5m2", "e4m3", "e2m1"):
        want = [reference.convert("f32", name, code) for code in x.view(np.uint32).tolist()]
        assert np.asarray(from_float(FORMATS[name], x, "SR", key=jax.random.key(7))).tolist() == want


def test_below_the_least_subnormal():
    """A quarter of e4m3's least subnormal becomes it one time in four, and else a zero of the value's sign."""
    least = reference.decode("e4m3", 1)
    found = draw_codes("f32", "e4m3", -least / 4, 8)
    assert set(found) == {0x80, 0x81}
    assert_binomial(found.count(0x81), Fraction(1, 4))


def test_the_key_decides():
    x = jax.random.normal(jax.random.key(0), (4096,))
    first, again, other = (np.asarray(from_float(FORMATS["e4m3"], x, "SR", key=jax.random.key(seed))) for seed in (9, 9, 10))
    assert (first == again).all()
    assert 0.1 < (first != other).mean() < 0.6


def test_the_mean_of_many_roundings_is_the_value():
    """2^16 different values in [-448, 448]: the mean error of e4m3 is within five standard errors of none, that of RZ is not."""
    x = np.random.default_rng(11).uniform(-448, 448, DRAWS).astype(np.float32)

    def errors(mode: str) -> np.ndarray:
        rounded = np.asarray(round_float(FORMATS["e4m3"], jnp.asarray(x), mode, key=jax.random.key(12)), np.float64)
        return (rounded - x.astype(np.float64)) * np.sign(x)

    for mode, unbiased in (("SR", True), ("RZ", False)):
        error = errors(mode)
        assert (abs(error.mean()) <= 5 * error.std() / DRAWS**0.5) == unbiased


def test_every_element_draws_for_itself():
    """Neighbouring elements of one value do not go the same way together."""
    found = np.array(draw_codes("f32", "e4m3", Fraction(17, 16), 13)) == reference.encode("e4m3", Fraction(9, 8))
    assert_binomial(int((found[:-1] == found[1:]).sum()), Fraction(1, 2))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_round_to_draws_the_same_lots(dtype):
    x = jnp.asarray(operands.codes(dtype, "near one", (500,), np.random.default_rng(14)).view(DTYPES[dtype]))
    key = jax.random.key(15)
    codes = from_float(FORMATS["e4m3"], x, "SR", key=key)
    assert (round_float(FORMATS["e4m3"], x, "SR", key=key) == to_float(FORMATS["e4m3"], codes, x.dtype)).all()
