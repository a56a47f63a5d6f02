"""What an accumulator's width costs, as a smooth function of it: a surrogate of the error of `gemm`, differentiable in fraction_bits.

Plain f32 arithmetic and a statistical model: for gradients and for choosing a width, never for bits.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.checkify import debug_check
from jax.typing import ArrayLike

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.model import LIMITS, Model, Signature
from tcemu.errors import Unsupported
from tcemu.formats import F16, F32, Format, cuts, round_to
from tcemu.isa.catalog import check
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import named_target
from tcemu.linalg.shapes import shape_of_product
from tcemu.operations.operands import signature_of

WHOLE_UNITS = 6  # beyond so many units what is cut of a term is as good as uniform


class Error(NamedTuple):
    """The error of each output as a random variable. Both float32 [..., M, N]."""

    mean: Array
    variance: Array


def expected_error(
    a: ArrayLike, b: ArrayLike, fraction_bits: ArrayLike, *, op: str | Instruction, target: str, model: Model | None = None
) -> Error:
    """The error that the sums of `gemm` make, with a real number of fraction bits: what the products of the rounded operands lose.

    a: float32 [..., M, K]; b: float32 [..., K, N]; leading axes are batch axes and broadcast. op, target, model: as in `gemm`; models that
    align all products of a step and chain their steps.
    fraction_bits: a float from 1 to 40, traced or not, in which the result is differentiable; it takes the place of the model's; or floats
    that broadcast with the batch axes. A traced one below 1 counts as 1, above 40 as 40, and the derivative there is 0; NaN gives NaN. In
    `tcemu.checked` functions these raise UndefinedBehaviour.

    The surrogate: a step cuts what lies below u = 2^(E - fraction_bits), E its largest exponent. A term of magnitude t loses t mod u,
    toward zero; here its expectation over magnitudes from t / sqrt(2) to t * sqrt(2), so that it is smooth in u: t for t far below u, u / 2
    far above, less what the term's own last bit g spares: nothing is lost once u <= g. The running value is cut in the same way, and
    rounding a step's sum to the result loses half an ulp toward zero (RZ) or, on average, nothing (RN).
    Means and variances of all these add up. All is f32: what is below 2^-126 is lost, of a variance what comes of errors below 2^-63.
    Raises Unsupported for a model of another form, ValueError for shapes that do not fit and for known fraction_bits out of range, and as
    `gemm`.
    """
    op = check(op, target)
    used = applied(op, target, model).model
    terms, result_bits, rounding = used.terms, used.result_bits, used.rounding
    simple = used.fraction_bits is not None and used.chain is None and used.summed is None and used.groups == 1
    if not simple or used.multiplicand is not None or not isinstance(terms, int) or op.sparse or op.block_scale:
        raise Unsupported(
            f"{op} on {named_target(target)}: the surrogate is of steps that align all their products, one after the other, not of {used}"
        )
    if used.result not in (F32, F16) or not isinstance(rounding, str) or not cuts(used.alignment):
        raise Unsupported(f"{used}: the surrogate is of results f32 or f16, with a rounding known beforehand, and of terms that are cut")
    signature = signature_of(op)
    x, y = _rounded(signature, a, b)
    step = Step(
        a=signature.a,
        b=signature.b,
        terms=min(terms, signature.k),
        result_bits=result_bits if isinstance(result_bits, int) else used.result.mantissa_bits,
        rounding=rounding,
    )
    of_batches = jnp.vectorize(partial(_error, step), signature="(m,k),(k,n),(),()->(m,n),(m,n)")
    return Error(*of_batches(x, y, jnp.float32(used.floor), _within_limits(fraction_bits)))


def _within_limits(fraction_bits: ArrayLike) -> Array:
    """float32, cut to the limits of a model's fraction_bits where it is traced; NaN stays."""
    least, greatest = LIMITS["fraction_bits"]
    if not isinstance(fraction_bits, Tracer):
        known = np.asarray(fraction_bits, np.float64)
        if not ((known >= least) & (known <= greatest)).all():
            raise ValueError(f"fraction_bits={fraction_bits!r}: wanted real numbers from {least} to {greatest}, the limits of tcemu.Model")
        return jnp.asarray(known, jnp.float32)
    given = fraction_bits.astype(jnp.float32)
    low, high = given < least, given > greatest
    debug_check(
        ~jnp.any(low | high | jnp.isnan(given)), f"traced fraction_bits are not from {least} to {greatest}, the limits of tcemu.Model"
    )
    return jnp.where(low, least, jnp.where(high, greatest, given))


def _rounded(signature: Signature, a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Both operands in the instruction's formats, float32."""
    shape_of_product(jnp.shape(a), jnp.shape(b))
    x, y = (round_to(fmt, jnp.asarray(v, jnp.float32)) for fmt, v in ((signature.a, a), (signature.b, b)))
    return x, y


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
    """A stand-in for `gemm` with a real number of fraction bits, float32 [..., M, N], differentiable in a, b and fraction_bits.

    a, b, fraction_bits, op, target, model: as in `expected_error`. Without key the expected form: A·B of the rounded operands plus the
    mean of `expected_error`. With a jax.random key the noise form: that plus a normal error of its variance. Gradients to a and b are those
    of the product, roundings counted as identity. Raises as `expected_error`.
    """
    x, y = _rounded(signature_of(check(op, target)), a, b)
    error = expected_error(lax.stop_gradient(x), lax.stop_gradient(y), fraction_bits, op=op, target=target, model=model)
    product = jnp.matmul(x, y, precision=lax.Precision.HIGHEST) + error.mean
    if key is None:
        return product
    some = error.variance > 0  # the root has no derivative at 0
    deviation = jnp.where(some, jnp.sqrt(jnp.where(some, error.variance, 1)), 0)
    return product + deviation * jax.random.normal(key, product.shape)


class Step(NamedTuple):
    """What is known of a step before it is traced."""

    a: Format
    b: Format
    terms: int
    result_bits: int  # fraction bits of its result
    rounding: str


class Units(NamedTuple):
    """The unit below which a step cuts, as a quotient: itself it may be below what an f32 holds, and then nothing can be divided by it."""

    top: Array  # 2^E, [M, N]
    in_top: Array  # 2^fraction_bits, so many units in 2^E


class Running(NamedTuple):
    """The sum after some steps. float32 [M, N] each."""

    total: Array  # as if nothing had been lost
    last_bit: Array  # of the running value
    mean: Array  # of the error so far
    variance: Array


# which way a rounding moves a value of a given sign, in halves of an ulp on average
TOWARD = {"RZ": lambda sign: -sign, "RN": jnp.zeros_like, "RM": lambda sign: -jnp.ones_like(sign), "RP": jnp.ones_like}


@partial(jax.jit, static_argnames="step")
def _error(step: Step, a: Array, b: Array, floor: Array, fraction_bits: Array) -> tuple[Array, Array]:
    """Mean and variance. a: [M, K], b: [K, N], values of their formats."""
    missing = -a.shape[1] % step.terms
    a = jnp.pad(a, [(0, 0), (0, missing)]).T.reshape(-1, step.terms, a.shape[0])
    b = jnp.pad(b, [(0, missing), (0, 0)]).reshape(-1, step.terms, b.shape[1])
    exponents = _exponent(a, step.a.least_exponent), _exponent(b, step.b.least_exponent)

    def add(running: Running, terms: tuple[Array, Array, Array, Array]) -> tuple[Running, None]:
        return _after_step(step, running, *terms, floor, fraction_bits), None

    nothing = jnp.zeros((a.shape[-1], b.shape[-1]), jnp.float32)
    last = lax.scan(add, Running(nothing, nothing, nothing, nothing), (a, b, *exponents))[0]
    return last.mean, last.variance


def _after_step(step: Step, running: Running, a: Array, b: Array, i: Array, j: Array, floor: Array, fraction_bits: Array) -> Running:
    """a, i: the elements of A and their exponents, [terms, M]; b, j: those of B, [terms, N]."""
    products, exponent = a[:, :, None] * b[:, None, :], i[:, :, None] + j[:, None, :]
    largest = jnp.maximum(jnp.max(jnp.where(products == 0, -1e4, exponent), axis=0), floor)
    largest = jnp.maximum(largest, jnp.where(running.total == 0, -1e4, _exponent(running.total, -126)))
    largest = jnp.maximum(largest, -120)  # its power of two stays a normal f32, also where exp2 is rounded
    units = Units(top=jnp.exp2(largest), in_top=jnp.exp2(fraction_bits))
    unit = units.top / units.in_top
    last_bits = jnp.exp2(exponent - (step.a.mantissa_bits + step.b.mantissa_bits))
    terms = jnp.concatenate([products, running.total[None]])
    lost, spread = _cut(terms, jnp.concatenate([last_bits, running.last_bit[None]]), units)
    total = running.total + jnp.sum(products, axis=0)
    of_result = jnp.where(total == 0, 0, jnp.exp2(_exponent(total, -126) - step.result_bits))  # a sum of 0 rounds nothing
    last_bit = jnp.maximum(unit, lax.stop_gradient(of_result))
    return Running(
        total=total,
        last_bit=last_bit,
        mean=running.mean - jnp.sum(lost, axis=0) + TOWARD[step.rounding](jnp.sign(total)) * (last_bit - unit) / 2,
        variance=running.variance + jnp.sum(spread, axis=0) + (last_bit**2 - unit**2) / 12,
    )


def _exponent(x: Array, least: int) -> Array:
    """As f32: that of the leading one, at least `least`."""
    return lax.stop_gradient(jnp.maximum(jnp.frexp(x)[1] - 1, least).astype(jnp.float32))


def _cut(terms: Array, last_bit: Array, units: Units) -> tuple[Array, Array]:
    """The expectation, with the term's sign, and the variance of what is cut of each term below the unit."""
    in_units = lambda x: x / units.top * units.in_top  # noqa: E731
    first, second = _of_an_octave(in_units(jnp.abs(terms)))
    fine = jnp.minimum(in_units(last_bit), 1)  # what is cut is a multiple of the term's last bit
    unit = units.top / units.in_top
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
