"""`gemm`: a matrix product of any shape, every element through one instruction's arithmetic."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.fitting import fills_k
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.program import multiply_add
from tcemu.compilation import wide_vectors
from tcemu.errors import Unsupported
from tcemu.formats import ARRAY_FORMATS, F64, S32, Format, array_codes, array_format, convert, to_float
from tcemu.gradients import stand_in
from tcemu.isa.catalog import check, section
from tcemu.isa.instructions import Instruction
from tcemu.linalg.shapes import fill, fill_scales, shape_of_product
from tcemu.meshes import with_axes_of
from tcemu.operations.operands import held_codes, signature_of


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    op: str | Instruction,
    target: str,
    model: Model | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    rounding: str = "RN",
    saturate: bool = False,
    key: PRNGKey | None = None,
) -> Array | np.ndarray:
    """D = A·B + C, of any shape, as a kernel that walks K with this instruction in ascending order computes it, bit for bit.

    a: [..., M, K]; b: [..., K, N]; c: [..., M, N], or what broadcasts to it, or None for +0. Any real dtype: the values are rounded to the
    instruction's formats first, by `rounding` ("RN", "RZ", "RM", "RP", or "SR" with a jax.random `key`), out of range to Inf or NaN, or
    with `saturate` to the largest finite value; integers always saturate. Leading axes are batch axes and broadcast. Each value is rounded
    once, also NumPy's 64-bit ones (`formats.array_codes` says what JAX does to these where they are arguments of a transformation).
    op: a PTX spelling or an Instruction; target: the GPU, as "sm_90a". Both are static under `jit`.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    scale_a, scale_b: the block scales of an instruction with .block_scale, [..., M, S] and [..., S, N], each for `op.k // op.scale_vec`
    elements along K, S of them, the last block perhaps not full: raw codes of `op.stype` (unsigned integers), or float arrays, which are
    rounded to it. Batch axes as in a and b.
    Returns the accumulator's format: float32 or float16, int32 for integers. For f64: float64, a NumPy array unless x64 mode is on.
    M or N of 0 give an empty result, K of 0 gives C.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic, TypeError or ValueError
    for arrays of another kind or shape.
    Gradients, forward and reverse: those of the product of the rounded operands and scales in plain float arithmetic, roundings counted as
    identity. Results in integers have none, and differentiating them raises TypeError.

    K is filled up to whole instructions with products that change nothing: see `tcemu.linalg.shapes.fill`.
    """
    op = check(op, target)
    if op.sparse:
        raise Unsupported(
            f"{op}: gemm takes a dense A; choose a dense instruction for it, or run the sparse one on what tcemu.sparsify makes of A, "
            f"by tcemu.{'mma_sp' if op.warps == 1 else 'wgmma'}. PTX ISA {section(op)}"
        )
    model = applied(op, target, model).model
    if not op.block_scale and (scale_a is not None or scale_b is not None):
        raise ValueError(f"scale_a, scale_b: {op} has no block scales; leave them out. PTX ISA {section(op)}")
    product = _Product(op, rounding, saturate)
    plain = lambda given: jnp.matmul(*(v.astype(jnp.float32) for v in given[:2]))  # noqa: E731
    return with_axes_of(plain, lambda given: product.differentiable(model, key, given), _Operands(a, b, c, scale_a, scale_b))


class _Operands(NamedTuple):
    """What came: numbers, and of the scales numbers or raw codes."""

    a: ArrayLike
    b: ArrayLike
    c: ArrayLike | None
    scale_a: ArrayLike | None
    scale_b: ArrayLike | None


class _Codes(NamedTuple):
    """A, B and C as raw codes, or as JAX's arrays of numbers, whose bits are taken in the program that multiplies."""

    a: Array
    b: Array
    c: Array


class _Conversion(NamedTuple):
    """How A, B and C come to the instruction's formats."""

    sources: tuple[Format, ...]  # the formats that they have
    rounding: str
    saturate: bool


class _Product(NamedTuple):
    """The product of floats by one instruction: its bits, and what stands for them in derivatives."""

    op: Instruction
    rounding: str
    saturate: bool

    def differentiable(self, model: Model, key: PRNGKey | None, operands: _Operands) -> Array | np.ndarray:
        """`bits`, with the derivative of `smooth` where floats are traced."""
        traced = {name: v for name, v in operands._asdict().items() if isinstance(v, Tracer)}
        if self.op.d == S32 or not any(jnp.issubdtype(v.dtype, jnp.floating) for v in traced.values()):
            return self.bits(model, key, operands)
        # all tracers go in as operands, integers too: a rule that closed over one would outlive it. What is not traced stays outside, since
        # JAX would cut a NumPy float64
        known = operands._replace(**dict.fromkeys(traced))
        return stand_in(
            lambda model, key, traced: self.bits(model, key, known._replace(**traced)),
            lambda model, key, traced: self.smooth(key, known._replace(**traced)),
            model, key, traced,
        )  # fmt: skip

    def bits(self, model: Model, key: PRNGKey | None, operands: _Operands) -> Array | np.ndarray:
        op, signature = self.op, signature_of(self.op)
        conversion, codes = self._codes(operands)
        scales = _scales(op, operands, codes) if op.block_scale else None
        if op.d == F64 and not _x64_mode() and any(isinstance(v, Tracer) for v in codes):
            raise Unsupported(
                f"{op}: its float64 result cannot be an array under jit or vmap while JAX's x64 mode is off; call gemm outside them "
                "(the result is then a NumPy array), or turn jax_enable_x64 on in your program"
            )
        d = _gemm(model, signature, conversion, codes, scales, key)
        return np.ascontiguousarray(d).view(np.float64)[..., 0] if op.d == F64 and not _x64_mode() else d

    def smooth(self, key: PRNGKey | None, operands: _Operands) -> Array:
        """The product of the rounded operands and scales in plain float arithmetic; all roundings count as identity."""
        op, signature = self.op, signature_of(self.op)
        dtype = jnp.float64 if op.d == F64 else jnp.float32
        held = jax.tree.map(lax.stop_gradient, operands)
        conversion, codes = self._codes(held)
        rounded = _rounded(signature, conversion, codes, key)
        formats = signature.a, signature.b, signature.c
        numbers = (_numbers(F64, x) if fmt == F64 else to_float(fmt, x) for fmt, x in zip(formats, rounded, strict=True))
        values = operands.a, operands.b, operands.c
        a, b, c = (_with_derivative(x, value, dtype) for x, value in zip(numbers, values, strict=True))
        if op.block_scale:
            assert op.stype is not None and op.scale_vec is not None
            block = op.k // op.scale_vec
            scales = (to_float(op.stype, v) for v in _scales(op, held, codes))
            values = operands.scale_a, operands.scale_b
            scale_a, scale_b = (_with_derivative(scale, value, dtype) for scale, value in zip(scales, values, strict=True))
            a = a * jnp.repeat(scale_a, block, axis=-1)[..., : a.shape[-1]]
            b = b * jnp.repeat(scale_b, block, axis=-2)[..., : b.shape[-2], :]
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST) + c

    def _codes(self, operands: _Operands) -> tuple[_Conversion, _Codes]:
        """A, B and C in the formats that they have, and how they come to the instruction's. Raises for what does not fit."""
        c = jax.device_put(np.zeros((1, 1), np.float32)) if operands.c is None else operands.c
        values = operands.a, operands.b, c
        sources, codes = zip(*(_format_and_codes(name, value) for name, value in zip("abc", values, strict=True)), strict=True)
        shape_a, shape_b, shape_c = (np.shape(value) for value in values)
        shape_of_product(shape_a, shape_b, shape_c)
        if len(shape_c) < 2:
            raise ValueError(f"c: got shape {list(shape_c)}; wanted a matrix, [..., M, N], with any batch axes in front")
        return _Conversion(sources, self.rounding, self.saturate), _Codes(*codes)


def _with_derivative(rounded: ArrayLike, value: Any, dtype: DTypeLike) -> Array:
    """`rounded`, with the derivative of `value`."""
    rounded = lax.stop_gradient(jnp.asarray(rounded, dtype))
    if not isinstance(value, Tracer) or not jnp.issubdtype(value.dtype, jnp.floating):
        return rounded
    value = value.astype(dtype)
    return rounded + (value - lax.stop_gradient(value))


@wide_vectors(1, 2)
def _gemm(
    model: Model, signature: Signature, conversion: _Conversion, codes: _Codes, scales: tuple[Array, Array] | None, key: PRNGKey | None
) -> Array:
    """D: an array of numbers, or codes where JAX has no dtype for them."""
    d = _multiplied(model, signature, conversion, codes, scales, key)
    return d if signature.d == F64 and not _x64_mode() else _numbers(signature.d, d)


def _multiplied(
    model: Model, signature: Signature, conversion: _Conversion, codes: _Codes, scales: tuple[Array, Array] | None, key: PRNGKey | None
) -> Array:
    """Codes of D."""
    a, b, c = _rounded(signature, conversion, codes, key)
    (*a_batch, m, k), (*b_batch, _, n) = _shape(signature.a, a), _shape(signature.b, b)
    batch = jnp.broadcast_shapes(tuple(a_batch), tuple(b_batch), _shape(signature.c, c)[:-2])
    c = jnp.broadcast_to(c, (*batch, m, n, *c.shape[c.ndim - signature.c.words + 1 :]))
    if k == 0 or m == 0 or n == 0 or 0 in batch:
        return convert(signature.c, signature.d, c)
    if fills_k(model, signature):
        a, b = fill(signature, a, b, signature.k)
    if scales is not None:
        return multiply_add(model, signature, a, b, c, fill_scales(signature, scales, signature.k))
    if not b_batch and a_batch:  # one B for all: the batch is more rows of A
        shape = c.shape
        a = jnp.broadcast_to(a, (*batch, *a.shape[len(a_batch) :]))
        a, c = (v.reshape(-1, *v.shape[len(batch) + 1 :]) for v in (a, c))
        return multiply_add(model, signature, a, b, c).reshape(shape)
    return multiply_add(model, signature, a, b, c)


def _rounded(signature: Signature, conversion: _Conversion, codes: _Codes, key: PRNGKey | None) -> list[Array]:
    """A, B and C in the instruction's formats."""
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    targets = signature.a, signature.b, signature.c
    bits = (x if x.dtype == source.dtype else array_codes(x)[1] for x, source in zip(codes, conversion.sources, strict=True))
    return [
        x if source == target else convert(source, target, x, conversion.rounding, conversion.saturate or target.is_integer, own_key)
        for x, source, target, own_key in zip(bits, conversion.sources, targets, keys, strict=True)
    ]


def _scales(op: Instruction, operands: _Operands, codes: _Codes) -> tuple[Array, Array]:
    """The codes of both scale matrices, each checked against its operand."""
    assert op.scale_vec is not None
    block = op.k // op.scale_vec
    blocks = -(-codes.a.shape[-1] // block)
    scale_a = _codes_of_scales("scale_a", operands.scale_a, op, (codes.a.shape[-2], blocks))
    return scale_a, _codes_of_scales("scale_b", operands.scale_b, op, (blocks, codes.b.shape[-1]))


def _codes_of_scales(name: str, value: ArrayLike | None, op: Instruction, shape: tuple[int, int]) -> Array:
    assert op.stype is not None and op.scale_vec is not None
    wanted = f"[..., {shape[0]}, {shape[1]}], a scale for each {op.k // op.scale_vec} elements along K, for {op}"
    if value is None:
        raise ValueError(f"{name}: none came; wanted {wanted}. PTX ISA {section(op)}")
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.shape[-2:] != shape:
        raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}; wanted {wanted}. PTX ISA {section(op)}")
    if jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        return held_codes(name, value, op.stype)
    if jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == bool:
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; wanted raw codes of {op.stype}, unsigned, or floats")
    source, codes = array_codes(value)
    return convert(source, op.stype, codes)


def _x64_mode() -> bool:
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def _format_and_codes(name: str, value: ArrayLike) -> tuple[Format, Array]:
    """The format of what came; its codes, or the array itself if it is JAX's."""
    try:
        if isinstance(value, jax.Array):
            return array_format(value.dtype), value
        return array_codes(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _shape(fmt: Format, codes: Array) -> tuple[int, ...]:
    return codes.shape[: codes.ndim - (fmt.words - 1)]


def _numbers(fmt: Format, codes: Array) -> Array:
    """Codes of an accumulator as numbers: a reinterpretation of their bits."""
    return lax.bitcast_convert_type(codes, next(dtype for dtype, f in ARRAY_FORMATS.items() if f == fmt))
