"""What an accumulator's width costs, as a smooth function of it: a surrogate of the error of `gemm`, differentiable in fraction_bits.

Plain f32 arithmetic and a statistical model: for gradients and for choosing a width, never for bits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.model import Model
from tcemu.errors import Unsupported
from tcemu.formats import F16, F32, Format, cuts, round_to
from tcemu.isa.catalog import check
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of

WHOLE_UNITS = 6  # beyond so many units what is cut of a term is as good as uniform


class Error(NamedTuple):
    """The error of each output as a random variable. Both float32 [M, N]."""

    mean: Array
    variance: Array


def expected_error(
    a: ArrayLike, b: ArrayLike, fraction_bits: ArrayLike, *, op: str | Instruction, target: str, model: Model | None = None
) -> Error:
    """The error that the sums of `gemm` make, with a real number of fraction bits: what the products of the rounded operands lose.

    a: float32 [M, K]; b: float32 [K, N]; fraction_bits: a float, traced or not, in which the result is differentiable; it takes the place
    of the model's. op, target, model: as in `gemm`; models that align all products of a step and chain their steps.

    The surrogate: a step cuts what lies below u = 2^(E - fraction_bits), E its largest exponent. A term of magnitude t loses t mod u,
    toward zero; here its expectation over magnitudes from t / sqrt(2) to t * sqrt(2), so that it is smooth in u: t for t far below u, u / 2
    far above, less what the term's own last bit g spares: nothing is lost once u <= g. The running value is cut in the same way, and
    rounding a step's sum to the result loses half an ulp toward zero (RZ) or, on average, nothing (RN).
    Means and variances of all these add up.
    Raises Unsupported for a model of another form, and as `gemm`.
    """
    found = check(op, target)
    chosen = applied(found, target, model).model
    plain = chosen.fraction_bits is not None and chosen.chain is None and chosen.summed is None and chosen.groups == 1
    if not plain or chosen.multiplicand is not None or not isinstance(chosen.terms, int) or found.sparse or found.block_scale:
        raise Unsupported(
            f"{found} on {target}: the surrogate is of steps that align all their products, one after the other, not of {chosen}"
        )
    if chosen.result not in (F32, F16) or not isinstance(chosen.rounding, str) or not cuts(chosen.alignment):
        raise Unsupported(f"{chosen}: the surrogate is of results f32 or f16, with a rounding known beforehand, and of terms that are cut")
    signature = signature_of(found)
    x, y = (round_to(fmt, jnp.asarray(v, jnp.float32)) for fmt, v in ((signature.a, a), (signature.b, b)))
    bits = chosen.result_bits if isinstance(chosen.result_bits, int) else chosen.result.mantissa_bits
    floor, terms = jnp.float32(chosen.floor), min(chosen.terms, signature.k)
    return _error(signature.a, signature.b, terms, bits, chosen.rounding, x, y, floor, jnp.asarray(fraction_bits, jnp.float32))


def surrogate(
    a: ArrayLike,
    b: ArrayLike,
    fraction_bits: ArrayLike,
    *,
    op: str | Instruction,
    target: str,
    model: Model | None = None,
    key: PRNGKey | None = None,
) -> Array:
    """A stand-in for `gemm` with a real number of fraction bits, float32 [M, N], differentiable in a, b and fraction_bits.

    Without key the expected form: A·B of the rounded operands plus the mean of `expected_error`. With a jax.random key the noise form: that
    plus a normal error of its variance. Gradients to a and b are those of the product, roundings counted as identity. Raises as
    `expected_error`.
    """
    signature = signature_of(check(op, target))
    x, y = (round_to(fmt, jnp.asarray(v, jnp.float32)) for fmt, v in ((signature.a, a), (signature.b, b)))
    mean, variance = expected_error(lax.stop_gradient(x), lax.stop_gradient(y), fraction_bits, op=op, target=target, model=model)
    product = jnp.matmul(x, y, precision=lax.Precision.HIGHEST) + mean
    return product if key is None else product + jnp.sqrt(variance + 1e-38) * jax.random.normal(key, product.shape)


@partial(jax.jit, static_argnames=("a_format", "b_format", "terms", "result_bits", "rounding"))
def _error(
    a_format: Format,
    b_format: Format,
    terms: int,
    result_bits: int,
    rounding: str,
    a: Array,
    b: Array,
    floor: Array,
    fraction_bits: Array,
) -> Error:
    """a: [M, K], b: [K, N], values of their formats."""
    missing = -a.shape[1] % terms
    a = jnp.pad(a, [(0, 0), (0, missing)]).T.reshape(-1, terms, a.shape[0])
    b = jnp.pad(b, [(0, missing), (0, 0)]).reshape(-1, terms, b.shape[1])
    exponents = _exponent(a, a_format.least_exponent), _exponent(b, b_format.least_exponent)
    last = a_format.mantissa_bits + b_format.mantissa_bits
    toward = {"RZ": lambda s: -jnp.sign(s), "RN": jnp.zeros_like, "RM": lambda s: -jnp.ones_like(s), "RP": jnp.ones_like}[rounding]

    def step(state: tuple[Array, Array, Array, Array], one: tuple) -> tuple[tuple[Array, Array, Array, Array], None]:
        (running, grain, mean, variance), (x, y, i, j) = state, one
        products, exponent = x[:, :, None] * y[:, None, :], i[:, :, None] + j[:, None, :]
        largest = jnp.maximum(jnp.max(jnp.where(products == 0, -1e4, exponent), axis=0), floor)
        largest = jnp.maximum(largest, jnp.where(running == 0, -1e4, _exponent(running, -126)))
        unit = jnp.exp2(largest - fraction_bits)
        lost, spread = _cut(jnp.concatenate([products, running[None]]), jnp.concatenate([jnp.exp2(exponent - last), grain[None]]), unit)
        total = running + jnp.sum(products, axis=0)
        grain = jnp.maximum(unit, lax.stop_gradient(jnp.exp2(_exponent(total, -126) - result_bits)))
        mean = mean - jnp.sum(lost, axis=0) + toward(total) * (grain - unit) / 2
        variance = variance + jnp.sum(spread, axis=0) + (grain**2 - unit**2) / 12
        return (total, grain, mean, variance), None

    nothing = jnp.zeros((a.shape[-1], b.shape[-1]), jnp.float32)
    _, _, mean, variance = lax.scan(step, (nothing, nothing, nothing, nothing), (a, b, *exponents))[0]
    return Error(mean, variance)


def _exponent(x: Array, least: int) -> Array:
    """As f32: that of the leading one, at least `least`."""
    return lax.stop_gradient(jnp.maximum(jnp.frexp(x)[1] - 1, least).astype(jnp.float32))


def _cut(terms: Array, grain: Array, unit: Array) -> tuple[Array, Array]:
    """The expectation, with the term's sign, and the variance of what is cut of each term below `unit`."""
    size = jnp.abs(terms) / unit
    first, second = _of_an_octave(size)
    fine = jnp.minimum(grain / unit, 1)  # what is cut is a multiple of the term's last bit
    mean, square = first * (1 - fine), second * (1 - fine) * (1 - fine / 2)
    return jnp.sign(terms) * unit * mean, unit**2 * jnp.maximum(square - mean**2, 0)


def _of_an_octave(t: Array) -> tuple[Array, Array]:
    """The mean of x mod 1 and of its square over x from t / sqrt(2) to t * sqrt(2), log x uniform."""
    inside = jnp.where(t < WHOLE_UNITS, t, 1.0)

    def integral(top: Array) -> tuple[Array, Array]:
        first, second = jnp.minimum(top, 1), jnp.minimum(top, 1) ** 2 / 2
        for n in range(1, 2 * WHOLE_UNITS):
            x = jnp.clip(top, n, n + 1)
            first = first + (x - n) - n * jnp.log(x / n)
            second = second + (x**2 - n**2) / 2 - 2 * n * (x - n) + n**2 * jnp.log(x / n)
        return first, second

    (low, low_square), (high, high_square) = integral(inside / 2**0.5), integral(inside * 2**0.5)
    octave = jnp.log(2.0)
    known = t < WHOLE_UNITS
    return jnp.where(known, (high - low) / octave, 1 / 2), jnp.where(known, (high_square - low_square) / octave, 1 / 3)
