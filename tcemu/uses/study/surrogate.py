"""The error of an accumulator's width as a smooth function of it: a surrogate of the error of `gemm`, differentiable in fraction_bits.

It is plain f32 arithmetic and a statistical model, for gradients and for the choice of a width, never for bits.

A step truncates the bits below u = 2^(E - fraction_bits), where E is its max exponent. A term of magnitude t loses t mod u, toward zero.
The surrogate takes its expectation over magnitudes from t / sqrt(2) to t * sqrt(2), so that it is smooth in u: t for t far below u, and
u / 2 far above, less the part that the term's own last bit g saves: nothing is lost once u <= g. The running value is truncated in the same
way, and rounding a step's sum to the result loses half an ulp toward zero (RZ) or, on average, nothing (RN). Means and variances of all
these add up.
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

from tcemu.base.errors import Unsupported
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.model import LIMITS, Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.formats.float_arrays import round_float
from tcemu.engine.formats.number_formats import F16, F32, Format
from tcemu.engine.formats.rounding import truncates
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.targets import resolve_target
from tcemu.operations.products.product_arguments import product_shape

UNIFORM_UNITS = 6  # number of units above which the truncated part of a term is as good as uniform


class ErrorEstimate(NamedTuple):
    """The error of each output as a random variable.

    Attributes:
        mean: Means, float32 [..., M, N].
        variance: Variances, float32 [..., M, N].
    """

    mean: Array
    variance: Array


def expected_error(
    a: ArrayLike, b: ArrayLike, fraction_bits: ArrayLike, *, op: str | Instruction, target: str, model: Model | str | None = None
) -> ErrorEstimate:
    """Estimate the error of the sums of `gemm` for a real number of fraction bits.

    The estimate is of the error that the sums make on the rounded operands, as a random variable; the module's docstring derives it. The
    expected root mean square error is `sqrt(mean(error.mean**2 + error.variance))`. The variance alone is too small where results are
    rounded toward zero, 48 times for f16 on an H100 at K = 65,536. There, more bits can also mean a larger error: with 23 bits the terms
    are truncated at the running sum's last bit, with either sign; with 25 the sum itself is rounded toward zero in every step. The
    how-to on what-if models has the numbers. All is f32: values below 2^-126 are lost, and so is the variance of errors below 2^-63.

    Args:
        a: Array [..., M, K], float32. Leading axes are batch axes and broadcast.
        b: Array [..., K, N], float32.
        fraction_bits: A float from 1 to 40, traced or not, in which the result is differentiable; or floats that broadcast with the batch
            axes. It takes the place of the model's. A traced value below 1 counts as 1 and above 40 as 40, with derivative 0; NaN gives
            NaN. In `tcemu.checked` functions these raise UndefinedBehaviour.
        op: Instruction as in `gemm`.
        target: Target as in `gemm`.
        model: Model as in `gemm`; it must align all products of a step and chain its steps.

    Returns:
        An `ErrorEstimate`.

    Raises:
        Unsupported: The model is of another form, and as `gemm`.
        ValueError: Shapes do not match, or known fraction_bits are out of range, and as `gemm`.
    """
    applied = resolve_arithmetic(op, target, model)
    op, used = applied.op, applied.model
    terms, result_bits, rounding = used.terms, used.result_bits, used.rounding
    simple = used.fraction_bits is not None and used.chain is None and used.summed is None and used.groups == 1
    if not simple or used.multiplicand is not None or not isinstance(terms, int) or op.sparse or op.scaling is not None:
        raise Unsupported(
            f"{op} on {resolve_target(target)}: the surrogate is of steps that align all their products, one after the other, not of {used}"
        )
    if used.result not in (F32, F16) or not isinstance(rounding, str) or not truncates(used.alignment):
        raise Unsupported(f"{used}: the surrogate is of results f32 or f16, with a rounding known beforehand, and of terms that are cut")
    signature = product_spec(op)
    x, y = _round_operands(signature, a, b)
    step = StepFacts(
        a=signature.a,
        b=signature.b,
        terms=min(terms, signature.k),
        result_bits=result_bits if isinstance(result_bits, int) else used.result.mantissa_bits,
        rounding=rounding,
    )
    error_of_batches = jnp.vectorize(partial(_estimate_error, step), signature="(m,k),(k,n),(),()->(m,n),(m,n)")
    return ErrorEstimate(*error_of_batches(x, y, jnp.float32(used.floor), _clip_to_limits(fraction_bits)))


def _clip_to_limits(fraction_bits: ArrayLike) -> Array:
    """Return fraction_bits as float32, clipped to the limits of a model if it is traced; NaN stays NaN."""
    least, greatest = LIMITS["fraction_bits"]
    if not isinstance(fraction_bits, Tracer):
        known = np.asarray(fraction_bits, np.float64)
        if not ((known >= least) & (known <= greatest)).all():
            raise ValueError(
                f"fraction_bits={fraction_bits!r}: expected real numbers from {least} to {greatest}, the limits of tcemu.Model"
            )
        return jnp.asarray(known, jnp.float32)
    traced = fraction_bits.astype(jnp.float32)
    low, high = traced < least, traced > greatest
    debug_check(
        ~jnp.any(low | high | jnp.isnan(traced)), f"traced fraction_bits are not from {least} to {greatest}, the limits of tcemu.Model"
    )
    return jnp.where(low, least, jnp.where(high, greatest, traced))


def _round_operands(signature: ProductSpec, a: ArrayLike, b: ArrayLike) -> tuple[Array, Array]:
    """Round both operands to the instruction's formats, float32."""
    product_shape(jnp.shape(a), jnp.shape(b))
    x, y = (round_float(fmt, jnp.asarray(v, jnp.float32)) for fmt, v in ((signature.a, a), (signature.b, b)))
    return x, y


def surrogate(
    a: ArrayLike,
    b: ArrayLike,
    fraction_bits: ArrayLike,
    *,
    op: str | Instruction,
    target: str,
    model: Model | str | None = None,
    key: PRNGKey | None = None,
) -> Array:
    """Compute a smooth stand-in for `gemm` with a real number of fraction bits, differentiable in a, b and fraction_bits.

    Gradients with respect to a and b are those of the product, with roundings counted as identity.

    Args:
        a: Array [..., M, K] as in `expected_error`.
        b: Array [..., K, N] as in `expected_error`.
        fraction_bits: Floats as in `expected_error`.
        op: Instruction as in `gemm`.
        target: Target as in `gemm`.
        model: Model as in `expected_error`.
        key: A jax.random key. None gives the expected form: A·B of the rounded operands plus the mean of `expected_error`. A key gives the
            noise form: that plus a normal error of its variance.

    Returns:
        Array [..., M, N], float32.

    Raises:
        Unsupported: As `expected_error`.
        ValueError: As `expected_error`.
    """
    x, y = _round_operands(product_spec(resolve_arithmetic(op, target).op), a, b)
    error = expected_error(lax.stop_gradient(x), lax.stop_gradient(y), fraction_bits, op=op, target=target, model=model)
    product = jnp.matmul(x, y, precision=lax.Precision.HIGHEST) + error.mean
    if key is None:
        return product
    some = error.variance > 0  # the root has no derivative at 0
    deviation = jnp.where(some, jnp.sqrt(jnp.where(some, error.variance, 1)), 0)
    return product + deviation * jax.random.normal(key, product.shape)


class StepFacts(NamedTuple):
    """Static facts of a step."""

    a: Format
    b: Format
    terms: int
    result_bits: int  # fraction bits of its result
    rounding: str


class Units(NamedTuple):
    """The unit below which a step truncates, as a quotient. The unit itself may be too small for an f32 divisor."""

    top: Array  # 2^E, [M, N]
    units_per_top: Array  # 2^fraction_bits, the number of units in 2^E


class RunningSum(NamedTuple):
    """The sum after some steps. All fields are float32 [M, N]."""

    total: Array  # sum without any loss
    last_bit: Array  # last bit of the running value
    mean: Array  # mean of the error so far
    variance: Array


# mean shift by a rounding of a value with a given sign, in halves of an ulp
ROUNDING_DRIFT = {"RZ": lambda sign: -sign, "RN": jnp.zeros_like, "RM": lambda sign: -jnp.ones_like(sign), "RP": jnp.ones_like}


@partial(jax.jit, static_argnames="step")
def _estimate_error(step: StepFacts, a: Array, b: Array, floor: Array, fraction_bits: Array) -> tuple[Array, Array]:
    """Return mean and variance of the error. a: [M, K]; b: [K, N], values of their formats."""
    missing = -a.shape[1] % step.terms
    a = jnp.pad(a, [(0, 0), (0, missing)]).T.reshape(-1, step.terms, a.shape[0])
    b = jnp.pad(b, [(0, missing), (0, 0)]).reshape(-1, step.terms, b.shape[1])
    exponents = _leading_exponent(a, step.a.min_exponent), _leading_exponent(b, step.b.min_exponent)

    def add(running: RunningSum, terms: tuple[Array, Array, Array, Array]) -> tuple[RunningSum, None]:
        return _add_step(step, running, *terms, floor, fraction_bits), None

    nothing = jnp.zeros((a.shape[-1], b.shape[-1]), jnp.float32)
    last = lax.scan(add, RunningSum(nothing, nothing, nothing, nothing), (a, b, *exponents))[0]
    return last.mean, last.variance


def _add_step(
    step: StepFacts, running: RunningSum, a: Array, b: Array, i: Array, j: Array, floor: Array, fraction_bits: Array
) -> RunningSum:
    """Add a step. a, i: elements of A and their exponents, [terms, M]; b, j: elements of B and their exponents, [terms, N]."""
    products, exponent = a[:, :, None] * b[:, None, :], i[:, :, None] + j[:, None, :]
    largest = jnp.maximum(jnp.max(jnp.where(products == 0, -1e4, exponent), axis=0), floor)
    largest = jnp.maximum(largest, jnp.where(running.total == 0, -1e4, _leading_exponent(running.total, -126)))
    largest = jnp.maximum(largest, -120)  # its power of two stays a normal f32, also where exp2 is rounded
    units = Units(top=jnp.exp2(largest), units_per_top=jnp.exp2(fraction_bits))
    unit = units.top / units.units_per_top
    last_bits = jnp.exp2(exponent - (step.a.mantissa_bits + step.b.mantissa_bits))
    terms = jnp.concatenate([products, running.total[None]])
    lost, spread = _truncation_moments(terms, jnp.concatenate([last_bits, running.last_bit[None]]), units)
    total = running.total + jnp.sum(products, axis=0)
    result_last_bit = jnp.where(total == 0, 0, jnp.exp2(_leading_exponent(total, -126) - step.result_bits))  # a sum of 0 rounds nothing
    last_bit = jnp.maximum(unit, lax.stop_gradient(result_last_bit))
    return RunningSum(
        total=total,
        last_bit=last_bit,
        mean=running.mean - jnp.sum(lost, axis=0) + ROUNDING_DRIFT[step.rounding](jnp.sign(total)) * (last_bit - unit) / 2,
        variance=running.variance + jnp.sum(spread, axis=0) + (last_bit**2 - unit**2) / 12,
    )


def _leading_exponent(x: Array, least: int) -> Array:
    """Return the exponent of the leading one as f32, at least `least`."""
    return lax.stop_gradient(jnp.maximum(jnp.frexp(x)[1] - 1, least).astype(jnp.float32))


def _truncation_moments(terms: Array, last_bit: Array, units: Units) -> tuple[Array, Array]:
    """Return the expectation, with the term's sign, and the variance of each term's part below the unit."""
    in_units = lambda x: x / units.top * units.units_per_top
    first, second = _octave_moments(in_units(jnp.abs(terms)))
    fine = jnp.minimum(in_units(last_bit), 1)  # the truncated part is a multiple of the term's last bit
    unit = units.top / units.units_per_top
    mean, square = first * (1 - fine), second * (1 - fine) * (1 - fine / 2)
    return jnp.sign(terms) * unit * mean, unit**2 * jnp.maximum(square - mean**2, 0)


def _octave_moments(t: Array) -> tuple[Array, Array]:
    """Return the mean of x mod 1 and of its square over x from t / sqrt(2) to t * sqrt(2) with log x uniform."""
    inside = jnp.where(t < UNIFORM_UNITS, t, 1.0)

    def integral(top: Array) -> tuple[Array, Array]:
        first, second = jnp.minimum(top, 1), jnp.minimum(top, 1) ** 2 / 2
        for n in range(1, 2 * UNIFORM_UNITS):
            x = jnp.clip(top, n, n + 1)
            first = first + (x - n) - n * jnp.log(x / n)
            second = second + (x**2 - n**2) / 2 - 2 * n * (x - n) + n**2 * jnp.log(x / n)
        return first, second

    (low, low_square), (high, high_square) = integral(inside / 2**0.5), integral(inside * 2**0.5)
    octave = jnp.log(2.0)
    known = t < UNIFORM_UNITS
    return jnp.where(known, (high - low) / octave, 1 / 2), jnp.where(known, (high_square - low_square) / octave, 1 / 3)
