"""Steps of FP8 by a tensor core's own steps of bf16, as tcemu computes both: the reasoning of `anchored` without the text of a kernel."""

from collections import Counter

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles.vectorised_reference import decode
from support.llvm_products import arithmetics
from support.step_lattice import Lattice, LatticeBuilder, expected

import tcemu
from tcemu.engine.arithmetic.step.forms import REPEATS

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LEAST, MOST = -40, 100  # exponents of steps that are computed: a kernel takes the others by its careful steps
NOTHING = -999  # exponent of what takes no part


def step_by_tensor_core(target: str, name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The f32 codes of one step that keeps 13 fraction bits, and where the step's exponent is one that is computed.

    Args:
        target: Whose `mma` of bf16 multiplies.
        name: Of the format of A and B.
        a: Codes [batch, M, K], K one step.
        b: Codes [batch, K, N].
        c: f32 codes [batch, M, N].
    """
    x, y, own = decode(name, a), decode(name, b), c.astype(np.uint32).view(np.float32)
    products = (x.significand[..., None] != 0) & (y.significand[:, None] != 0)
    top = np.where(products, x.exponent[..., None] + y.exponent[:, None], NOTHING).max(axis=2)
    top = np.maximum(top, np.where(own == 0, NOTHING, np.frexp(own)[1] - 1))
    computed = (top >= LEAST) & (top <= MOST)
    top, own = np.where(computed, top, 0), np.where(computed, own, 0)
    anchor = np.ldexp(1.5, top + tcemu.get_model(MMA, target).fraction_bits - 13).astype(np.float32)
    values = [v.astype(np.uint8).view(DTYPES[name]).astype(ml_dtypes.bfloat16) for v in (a, b)]
    four_times = [np.repeat(v, REPEATS, axis) for v, axis in zip(values, (2, 1), strict=True)]
    total = np.asarray(tcemu.gemm(*map(jnp.asarray, (*four_times, anchor)), op=MMA, target=target))
    unit = np.ldexp(1.0, top - 13)
    exact = (total.astype(np.float64) - anchor) / REPEATS + np.trunc(own / unit) * unit
    assert (exact == exact.astype(np.float32)).all()
    code = exact.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFFFF << 10 & 0xFFFFFFFF)
    return np.where(exact == 0, 0, code), computed


def random_codes(name: str, terms: int) -> Lattice:
    """Every code but Inf and NaN as they come, and C near the sums."""
    rng = np.random.default_rng(3)
    codes = np.arange(256)[np.isfinite(np.arange(256).astype(np.uint8).view(DTYPES[name]).astype(np.float32))]
    draw = lambda *shape: rng.choice(codes, shape)
    c = np.ldexp(rng.normal(size=(8, 64, 64)), rng.integers(-20, 30, (8, 64, 64))).astype(np.float32).view(np.uint32)
    return Lattice(draw(8, 64, terms), draw(8, terms, 64), c, None)


@pytest.mark.parametrize(
    ("name", "terms"), [("e4m3", 32), *(pytest.param(*case, marks=pytest.mark.full) for case in (("e5m2", 32), ("e4m3", 16)))]
)
def test_a_tensor_core_truncates_products_of_fp8(name, terms):
    """Every exponent of A, B and C against every other, cancelled and not; then codes as they come."""
    arithmetic = arithmetics()[f"{name} in steps of {terms} by 13"]
    arithmetic = arithmetic._replace(spec=arithmetic.spec._replace(k=terms))
    words, differ = Counter(), Counter()
    for lattice in (LatticeBuilder(arithmetic, 1, instructions=1).spread(1, 64, 300), random_codes(name, terms)):
        wanted = expected(arithmetic, lattice)
        for target in ("A100", "H100"):
            code, computed = step_by_tensor_core(target, name, lattice.a, lattice.b, lattice.c)
            words[target] += int(computed.sum())
            differ[target] += int((computed & (code != wanted)).sum())
    assert set(differ.values()) == {0} and min(words.values()) > 100_000, f"{differ} of {words} words differ"
