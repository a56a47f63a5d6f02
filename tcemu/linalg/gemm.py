"""`gemm`: a matrix product of any shape, every element through one instruction's arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.architectures.lookup import applied
from tcemu.arithmetic.model import Model, Signature, fills_k
from tcemu.arithmetic.program import run
from tcemu.errors import Unsupported
from tcemu.formats import ARRAY_FORMATS, F64, S32, Format, array_codes, convert, to_float
from tcemu.gradients import stand_in
from tcemu.isa.catalog import check, section
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of


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
    with `saturate` to the largest finite value; integers always saturate. Leading axes are batch axes and broadcast.
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

    K is filled up to whole instructions with products that change nothing: see `fill`.
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
    face, values = _Face(op, rounding, saturate), {"a": a, "b": b, "c": c, "scale_a": scale_a, "scale_b": scale_b}
    traced = {name: v for name, v in values.items() if isinstance(v, Tracer) and jnp.issubdtype(v.dtype, jnp.floating)}
    if not traced or op.d == S32:
        return face.bits(model, key, values)
    # what is not traced stays outside: JAX would cut a NumPy float64
    return stand_in(
        lambda model, key, traced: face.bits(model, key, values | traced),
        lambda model, key, traced: face.smooth(key, values | traced),
        model, key, traced,
    )  # fmt: skip


class _Face(NamedTuple):
    """The float face of one instruction: what its bits are, and what stands for them in derivatives."""

    op: Instruction
    rounding: str
    saturate: bool

    def bits(self, model: Model, key: PRNGKey | None, values: dict[str, Any]) -> Array | np.ndarray:
        op, signature = self.op, signature_of(self.op)
        (a_format, a_codes), (b_format, b_codes), (c_format, c_codes) = self._operands(values)
        scales = _scales(op, values["scale_a"], values["scale_b"], a_codes, b_codes) if op.block_scale else None
        if op.d == F64 and not _x64_mode() and any(isinstance(v, Tracer) for v in (a_codes, b_codes, c_codes)):
            raise Unsupported(
                f"{op}: its float64 result cannot be an array under jit or vmap while JAX's x64 mode is off; call gemm outside them "
                "(the result is then a NumPy array), or turn jax_enable_x64 on in your program"
            )
        formats = a_format, b_format, c_format
        codes = _gemm(model, signature, formats, self.rounding, self.saturate, a_codes, b_codes, c_codes, key, scales)
        return _array(signature.d, codes)

    def smooth(self, key: PRNGKey | None, values: dict[str, Any]) -> Array:
        """The product of the rounded operands, and their scales, whose roundings count as identity; in plain float arithmetic."""
        op, signature = self.op, signature_of(self.op)
        dtype = jnp.float64 if op.d == F64 else jnp.float32
        formats, codes = zip(*self._operands(jax.tree.map(lax.stop_gradient, values)), strict=True)
        rounded = _rounded(signature, formats, self.rounding, self.saturate, codes, key)
        numbers = (_array(F64, x) if fmt == F64 else to_float(fmt, x) for fmt, x in zip(signature[:3], rounded, strict=True))
        a, b, c = (_moving(x, values[name], dtype) for name, x in zip("abc", numbers, strict=True))
        if op.block_scale:
            assert op.stype is not None and op.scale_vec is not None
            block, given = op.k // op.scale_vec, (values["scale_a"], values["scale_b"])
            held = lax.stop_gradient(given)
            scales = [to_float(op.stype, v) for v in _scales(op, held[0], held[1], codes[0], codes[1])]
            x, y = (_moving(scale, value, dtype) for scale, value in zip(scales, given, strict=True))
            a = a * jnp.repeat(x, block, axis=-1)[..., : a.shape[-1]]
            b = b * jnp.repeat(y, block, axis=-2)[..., : b.shape[-2], :]
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST) + c

    def _operands(self, values: dict[str, Any]) -> list[tuple[Format, Array]]:
        a, b = _operand("a", values["a"]), _operand("b", values["b"])
        c = _operand("c", np.zeros((1, 1), np.float32) if values["c"] is None else values["c"])
        _check_shapes(_shape(*a), _shape(*b), _shape(*c), self.op)
        return [a, b, c]


def _moving(rounded: ArrayLike, value: Any, dtype: DTypeLike) -> Array:
    """`rounded`, with the derivative of `value`."""
    rounded = lax.stop_gradient(jnp.asarray(rounded, dtype))
    if not isinstance(value, Tracer) or not jnp.issubdtype(value.dtype, jnp.floating):
        return rounded
    value = value.astype(dtype)
    return rounded + (value - lax.stop_gradient(value))


@partial(jax.jit, static_argnames=("signature", "formats", "rounding", "saturate"))
def _gemm(
    model: Model,
    signature: Signature,
    formats: tuple[Format, Format, Format],
    rounding: str,
    saturate: bool,
    a: Array,
    b: Array,
    c: Array,
    key: PRNGKey | None,
    scales: tuple[Array, Array] | None,
) -> Array:
    a, b, c = _rounded(signature, formats, rounding, saturate, (a, b, c), key)
    (*a_batch, m, k), (*b_batch, _, n) = _shape(signature.a, a), _shape(signature.b, b)
    batch = np.broadcast_shapes(tuple(a_batch), tuple(b_batch), _shape(signature.c, c)[:-2])
    c = jnp.broadcast_to(c, (*batch, m, n, *c.shape[c.ndim - signature.c.words + 1 :]))
    if k == 0 or m == 0 or n == 0 or 0 in batch:
        return convert(c, signature.c, signature.d)
    if fills_k(model, signature):
        a, b = fill(signature, a, b, signature.k)
    if scales is not None:
        return run(model, signature, a, b, c, fill_scales(signature, scales, signature.k))
    if not b_batch and a_batch:  # one B for all: the batch is more rows of A
        shape = c.shape
        a = jnp.broadcast_to(a, (*batch, *a.shape[len(a_batch) :]))
        a, c = (v.reshape(-1, *v.shape[len(batch) + 1 :]) for v in (a, c))
        return run(model, signature, a, b, c).reshape(shape)
    return run(model, signature, a, b, c)


def _rounded(
    signature: Signature, formats: tuple[Format, ...], rounding: str, saturate: bool, codes: tuple[Array, ...], key: PRNGKey | None
) -> list[Array]:
    """A, B and C in the instruction's formats."""
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    return [
        x if source == target else convert(x, source, target, rounding, saturate or target.is_integer, own_key)
        for x, source, target, own_key in zip(codes, formats, signature[:3], keys, strict=True)
    ]


def fill(signature: Signature, a: Array, b: Array, multiple: int) -> tuple[Array, Array]:
    """A and B with K filled up to a multiple of `multiple`, whole instructions: A with -0 (integers: 0) and B with 0.

    That changes no bit. In a fused step a zero product takes part neither in the largest exponent nor in the sum, and a step of zeros alone
    rounds a value that already is of the result's format, +0 included (a step never leaves -0 behind). A rounded addition of the product
    -0 returns the other operand, -0 included, in RN, the mode of every chain of multiply-adds. Integer zeros add nothing.
    """
    missing = -(a.shape[-1] if signature.a.words == 1 else a.shape[-2]) % multiple
    if missing == 0:
        return a, b
    tail = [(0, 0)] * (signature.a.words - 1)
    filling = 0 if signature.a.is_integer else 1 << (signature.a.bits - 1)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1 - len(tail)) + [(0, missing)] + tail, constant_values=np.array(filling, signature.a.dtype))
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2 - len(tail)) + [(0, missing), (0, 0)] + tail)


def _scales(op: Instruction, scale_a: ArrayLike | None, scale_b: ArrayLike | None, a: Array, b: Array) -> tuple[Array, Array]:
    """The codes of both scale matrices, each checked against its operand."""
    assert op.stype is not None and op.scale_vec is not None
    block = op.k // op.scale_vec
    blocks, found = -(-a.shape[-1] // block), []
    for name, value, shape in (("scale_a", scale_a, (a.shape[-2], blocks)), ("scale_b", scale_b, (blocks, b.shape[-1]))):
        wanted = f"[..., {shape[0]}, {shape[1]}], a scale for each {block} elements along K, for {op}"
        if value is None:
            raise ValueError(f"{name}: none came; wanted {wanted}. PTX ISA {section(op)}")
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        if value.shape[-2:] != shape:
            raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}; wanted {wanted}. PTX ISA {section(op)}")
        if jnp.issubdtype(value.dtype, jnp.unsignedinteger):
            found.append(jnp.asarray(value).astype(op.stype.dtype))
            continue
        if jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == bool:
            raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; wanted raw codes of {op.stype}, unsigned, or floats")
        source, codes = _operand(name, value)
        found.append(convert(codes, source, op.stype))
    return found[0], found[1]


def fill_scales(signature: Signature, scales: tuple[Array, Array], multiple: int) -> tuple[Array, Array]:
    """The scales filled up, with ones, to those of K as a multiple of `multiple`, whole instructions."""
    assert signature.scale is not None
    a, b = scales
    missing = -a.shape[-1] % (multiple // signature.k * signature.scale_vec)
    one = signature.scale.bias << signature.scale.mantissa_bits
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)], constant_values=one)
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, missing), (0, 0)], constant_values=one)


def _x64_mode() -> bool:
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def _operand(name: str, value: ArrayLike) -> tuple[Format, Array]:
    try:
        return array_codes(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _shape(fmt: Format, codes: Array) -> tuple[int, ...]:
    return codes.shape[: codes.ndim - (fmt.words - 1)]


def _check_shapes(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...], op: Instruction) -> None:
    for name, shape, wanted in (("a", a, "[..., M, K]"), ("b", b, "[..., K, N]"), ("c", c, "[..., M, N]")):
        if len(shape) < 2:
            raise ValueError(f"{name}: got shape {list(shape)}; wanted a matrix, {wanted}, with any batch axes in front")
    if a[-1] != b[-2]:
        raise ValueError(
            f"a is [..., M, K] = {list(a)} and b is [..., K, N] = {list(b)}: K is {a[-1]} in a and {b[-2]} in b; they must be equal"
        )
    try:
        batch = np.broadcast_shapes(a[:-2], b[:-2])
    except ValueError:
        raise ValueError(f"the batch axes of a, {list(a[:-2])}, and of b, {list(b[:-2])}, do not broadcast") from None
    d = (*batch, a[-2], b[-1])
    try:
        fits = np.broadcast_shapes(c, d) == d
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"c: got shape {list(c)}; wanted one that broadcasts to D, [..., M, N] = {list(d)}")


def _array(fmt: Format, codes: Array) -> Array | np.ndarray:
    """Codes of an accumulator as numbers: a reinterpretation of their bits."""
    if fmt is F64 and not _x64_mode():
        return np.ascontiguousarray(codes).view(np.float64)[..., 0]
    return lax.bitcast_convert_type(codes, next(dtype for dtype, f in ARRAY_FORMATS.items() if f == fmt))
