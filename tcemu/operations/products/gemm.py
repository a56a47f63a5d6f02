"""`gemm`: a matrix product of any shape by the arithmetic of one instruction."""

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

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.errors import Unsupported
from tcemu.base.gradients import straight_through
from tcemu.base.meshes import shard_like
from tcemu.engine.architectures.lookup import require_evidence, require_product, resolve_arithmetic
from tcemu.engine.arithmetic.fitting import needs_whole_instructions
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, array_format, number_array, to_float
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F64, S32, Format
from tcemu.engine.formats.rounding import CONVERSION_ROUNDINGS
from tcemu.engine.instructions.operand_checks import as_stored_codes
from tcemu.engine.instructions.sparsify import choose_fields, prune_by_fields
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import check, manual_section, source_reference
from tcemu.operations.products.differentiable import attach_derivative
from tcemu.operations.products.product_arguments import check_scale_numbers, pad_k, pad_scales, product_shape
from tcemu.operations.products.recipes import names_recipe_alone
from tcemu.operations.products.sparse_rows import multiply_sparse_rows, pad_fields


def gemm(
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike | None = None,
    *,
    op: str | Instruction,
    target: str,
    model: Model | str | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    rounding: str = "RN",
    saturate: bool = False,
    key: PRNGKey | None = None,
    evidence: str | None = None,
    sparse: str | None = None,
) -> Array | np.ndarray:
    """Multiply matrices of any shape as a kernel built on one instruction does, bit for bit: D = A·B + C.

    The kernel reduces K in ascending order, in steps of the instruction, with one accumulator per output. K is padded to whole instructions
    with products that change nothing (`tcemu.operations.products.product_arguments.pad_k`). M or N of 0 give an empty result, K of 0 gives
    C.

    Gradients, forward and reverse, are those of the product of the rounded operands and scales in plain float arithmetic, with roundings
    counted as identity. Integer results have no gradients, and differentiating them raises TypeError.

    Args:
        a: Array [..., M, K] of any real dtype. Leading axes are batch axes and broadcast. Values are rounded once to the instruction's
            format, NumPy's 64-bit ones too (`formats.array_codes` says what JAX does to these as arguments of a transformation).
        b: Array [..., K, N], as a.
        c: Array that broadcasts to [..., M, N], as a; None: +0.
        op: PTX spelling, short name or `Instruction`. Static under `jit`.
        target: The GPU, as "sm_90a". Static under `jit`.
        model: Another arithmetic than the target's own: a `tcemu.Model`, whose fields may be traced, or changes in words, such as
            "fraction_bits=13,rounding=RN".
        scale_a: Block scales [..., M, S] of an instruction with .block_scale, one for each `op.k // op.scaling.count` elements along K;
            the last block may be short. Raw codes of `op.scaling.format` (unsigned integers), or floats that are numbers of it;
            traced floats, whose values are unknown, are rounded to it.
        scale_b: Block scales [..., S, N], as scale_a.
        rounding: Rounding of the operands: "RN", "RZ", "RM", "RP", "RNA", to nearest with ties away from zero, or "SR", stochastic, with
            a key.
        saturate: Values out of range become the largest finite value, and not Inf or NaN. Integers always saturate.
        key: JAX random key for "SR".
        evidence: The least level of evidence that is accepted, as "published": less is an error. None: any, "assumed" included.
        sparse: "a": A is pruned along K as `tcemu.prune` does, by the pattern of the sparse instruction `op`, such as "f16 sparse", and the
            instruction gets the kept elements alone; gradients pass straight through the pruning. None: a dense instruction.

    Returns:
        Array [..., M, N] in the accumulator's format: float32 or float16, int32 for integers, float64 for f64 (a NumPy array unless x64
        mode is on).

    Raises:
        Unsupported: PTX does not give `op` to `target`, the instruction is sparse and `sparse` is not "a", or the other way round, or it is
            sparse with block scales.
        NotModelled: there is no evidence for this arithmetic, or less than `evidence` asks for.
        TypeError, ValueError: arrays of another kind or shape, or a block scale that is no number of its format.

    Example:
        >>> import tcemu
        >>> tcemu.gemm([[1.0, 2.0]], [[3.0], [4.0]], op="f16", target="H100")
        Array([[11.]], dtype=float32)
    """
    op = require_sparsity(require_product(_check_instruction(op, target)), sparse)
    if evidence is not None and model is not None:
        raise ValueError(f"evidence={evidence!r}, model={model!r}: another arithmetic has no evidence; leave one of them out")
    if evidence is not None:
        require_evidence(op, target, evidence)
    model = resolve_arithmetic(op, target, model).model
    if op.scaling is None and (scale_a is not None or scale_b is not None):
        raise ValueError(f"scale_a, scale_b: {op} has no block scales; leave them out. {source_reference(op)}")
    if rounding not in CONVERSION_ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(CONVERSION_ROUNDINGS)}")
    if not isinstance(saturate, (bool, np.bool_)):
        raise TypeError(f"saturate: got {saturate!r}; expected True or False")
    product = _GemmProduct(op, rounding, bool(saturate))
    plain = lambda given: jnp.matmul(*(v.astype(jnp.float32) for v in given[:2]))
    given = _GemmOperands(a, b, c, scale_a, scale_b)
    operands = given._replace(**{name: number_array(v, name) for name, v in given._asdict().items() if v is not None})
    return shard_like(plain, lambda given: product.differentiable(model, key, given), operands)


def require_sparsity(op: MatrixMultiply, sparse: str | None = None) -> MatrixMultiply:
    """Return the instruction. Raises Unsupported unless it is as sparse as the argument says."""
    if sparse not in (None, "a"):
        raise ValueError(f"sparse={sparse!r}: expected 'a', A pruned for a sparse instruction, or None")
    if op.sparse and sparse is None:
        raise Unsupported(
            f"{op}: gemm multiplies dense matrices; sparse='a' prunes A for this instruction, and tcemu.dot takes the fields of "
            f"tcemu.sparsify. PTX ISA {manual_section(op)}"
        )
    if sparse and not op.sparse:
        raise Unsupported(f"{op} is dense; sparse='a' needs a sparse instruction, as op='{op.a} sparse'. PTX ISA {manual_section(op)}")
    if op.sparse and op.scaling is not None:
        raise Unsupported(
            f"{op}: gemm has no sparse products with block scales; tcemu.dot and tcemu.mma_sp compute single instructions. "
            f"PTX ISA {manual_section(op)}"
        )
    return op


def _check_instruction(op: str | Instruction, target: str) -> Instruction:
    """Return the target's instruction, or raise an error that tells a recipe from an instruction."""
    try:
        return check(op, target)
    except Unsupported as error:
        if not isinstance(op, str) or not names_recipe_alone(op):
            raise
        raise Unsupported(f"op={op!r}: {op!r} is a recipe: tcemu.matmul(a, b, recipe={op!r}) multiplies by it. {error}") from None


class _GemmOperands(NamedTuple):
    """The given arrays: numbers; the scales may be raw codes."""

    a: ArrayLike
    b: ArrayLike
    c: ArrayLike | None
    scale_a: ArrayLike | None
    scale_b: ArrayLike | None


_OperandCodes = tuple[Array, ...]  # A, B and C as raw codes, or as JAX arrays of numbers, which the compiled product reinterprets as codes


class _Conversion(NamedTuple):
    """The rounding of A, B and C to the instruction's formats."""

    sources: tuple[Format, ...]  # formats of the given arrays
    rounding: str
    saturate: bool


class _GemmProduct(NamedTuple):
    """A product by one instruction: its bits, and the smooth product whose derivatives stand for theirs."""

    op: MatrixMultiply
    rounding: str
    saturate: bool

    def differentiable(self, model: Model, key: PRNGKey | None, operands: _GemmOperands) -> Array | np.ndarray:
        """Returns `bits`, with the derivative of `smooth` where floats are traced."""
        traced = {name: v for name, v in operands._asdict().items() if isinstance(v, Tracer)}
        if self.op.d == S32 or not any(jnp.issubdtype(v.dtype, jnp.floating) for v in traced.values()):
            return self.bits(model, key, operands)
        # all tracers are operands, integers too, since a rule that closed over one would outlive it. Other values stay outside, since JAX
        # would truncate a NumPy float64
        known = operands._replace(**dict.fromkeys(traced))
        return straight_through(
            lambda model, key, traced: self.bits(model, key, known._replace(**traced)),
            lambda model, key, traced: self.smooth(key, known._replace(**traced)),
            model, key, traced,
        )  # fmt: skip

    def bits(self, model: Model, key: PRNGKey | None, operands: _GemmOperands) -> Array | np.ndarray:
        op, spec = self.op, product_spec(self.op)
        conversion, codes = self._codes(operands)
        scales = _scale_codes(op, op.scaling.format, operands) if op.scaling is not None else None
        if op.d == F64 and not _is_x64_enabled() and any(isinstance(v, Tracer) for v in codes):
            raise Unsupported(
                f"{op}: its float64 result cannot be an array under jit or vmap while JAX's x64 mode is off; call gemm outside them "
                "(the result is then a NumPy array), or enable jax_enable_x64 in your program"
            )
        fields = choose_fields(operands.a, op.chunk_size) if op.sparse else None
        d = _gemm_numbers(model, spec, conversion, codes, scales, key, op.chunk_size if op.sparse else 0, fields)
        return np.ascontiguousarray(d).view(np.float64)[..., 0] if op.d == F64 and not _is_x64_enabled() else d

    def smooth(self, key: PRNGKey | None, operands: _GemmOperands) -> Array:
        """Multiplies the rounded operands and scales in plain float arithmetic. All roundings count as identity."""
        op, spec = self.op, product_spec(self.op)
        dtype = jnp.float64 if op.d == F64 else jnp.float32
        fixed = jax.tree.map(lax.stop_gradient, operands)
        conversion, codes = self._codes(fixed)
        rounded = _round_operands(spec, conversion, codes, key)
        formats = spec.a, spec.b, spec.c
        numbers = (_codes_to_numbers(F64, x) if fmt == F64 else to_float(fmt, x) for fmt, x in zip(formats, rounded, strict=True))
        values = operands.a, operands.b, operands.c
        if op.sparse:
            mask = prune_by_fields(jnp.ones(np.shape(operands.a), jnp.float32), choose_fields(fixed.a, op.chunk_size), op.chunk_size)
            numbers = (x if name != "a" else jnp.where(mask != 0, x, 0) for name, x in zip("abc", numbers, strict=True))
        a, b, c = (_attach_derivative(x, value, dtype) for x, value in zip(numbers, values, strict=True))
        if op.scaling is not None:
            block = op.k // op.scaling.count
            scales = (to_float(op.scaling.format, v) for v in _scale_codes(op, op.scaling.format, fixed))
            values = operands.scale_a, operands.scale_b
            scale_a, scale_b = (_attach_derivative(scale, value, dtype) for scale, value in zip(scales, values, strict=True))
            a = a * jnp.repeat(scale_a, block, axis=-1)[..., : a.shape[-1]]
            b = b * jnp.repeat(scale_b, block, axis=-2)[..., : b.shape[-2], :]
        return jnp.matmul(a, b, precision=lax.Precision.HIGHEST) + c

    def _codes(self, operands: _GemmOperands) -> tuple[_Conversion, _OperandCodes]:
        """Checks A, B and C. Returns their conversion to the instruction's formats, and their codes."""
        c = jax.device_put(np.zeros((1, 1), np.float32)) if operands.c is None else operands.c
        values = operands.a, operands.b, c
        sources, codes = zip(*(_format_and_codes(name, value) for name, value in zip("abc", values, strict=True)), strict=True)
        shape_a, shape_b, shape_c = (np.shape(value) for value in values)
        product_shape(shape_a, shape_b, shape_c)
        if len(shape_c) < 2:
            raise ValueError(f"c: got shape {list(shape_c)}; expected a matrix, [..., M, N], with any batch axes in front")
        return _Conversion(sources, self.rounding, self.saturate), codes


def _attach_derivative(rounded: ArrayLike, value: Any, dtype: DTypeLike) -> Array:
    """Returns `rounded`, with the derivative of `value` where it is a traced float."""
    rounded = lax.stop_gradient(jnp.asarray(rounded, dtype))
    if not isinstance(value, Tracer) or not jnp.issubdtype(value.dtype, jnp.floating):
        return rounded
    return attach_derivative(rounded, value.astype(dtype))


@jit_wide_vectors(1, 2, 6)
def _gemm_numbers(model: Model, spec: ProductSpec, *rest: Any) -> Array:
    """Computes D as `_gemm_codes` does: numbers, or codes where JAX has no dtype for them."""
    d = _gemm_codes(model, spec, *rest)
    return d if spec.d == F64 and not _is_x64_enabled() else _codes_to_numbers(spec.d, d)


def _gemm_codes(
    model: Model,
    spec: ProductSpec,
    conversion: _Conversion,
    codes: _OperandCodes,
    scales: tuple[Array, Array] | None,
    key: PRNGKey | None,
    chunk: int,
    fields: Array | None,
) -> Array:
    """Computes the codes of D. chunk, fields: of a sparse A; 0 and None of a dense one."""
    a, b, c = _round_operands(spec, conversion, codes, key)
    (*a_batch, m, k), (*b_batch, _, n) = _number_shape(spec.a, a), _number_shape(spec.b, b)
    batch = jnp.broadcast_shapes(tuple(a_batch), tuple(b_batch), _number_shape(spec.c, c)[:-2])
    c = jnp.broadcast_to(c, (*batch, m, n, *c.shape[c.ndim - spec.c.words + 1 :]))
    if k == 0 or m == 0 or n == 0 or 0 in batch:
        return convert(spec.c, spec.d, c)
    if fields is not None:
        a, b = pad_k(spec, a, b, 2 * spec.k)  # K of a sparse instruction is of the dense A, twice the kept elements
        multiply = partial(multiply_matrices, model, spec)
        return multiply_sparse_rows(multiply, (a, b), pad_fields(fields, a.shape[-1] // chunk), chunk, c)
    if needs_whole_instructions(model, spec):
        a, b = pad_k(spec, a, b, spec.k)
    if scales is not None:
        return multiply_matrices(model, spec, a, b, c, pad_scales(spec, scales, spec.k))
    if not b_batch and a_batch:  # one B for the whole batch, whose rows are rows of one A
        shape = c.shape
        a = jnp.broadcast_to(a, (*batch, *a.shape[len(a_batch) :]))
        a, c = (v.reshape(-1, *v.shape[len(batch) + 1 :]) for v in (a, c))
        return multiply_matrices(model, spec, a, b, c).reshape(shape)
    return multiply_matrices(model, spec, a, b, c)


def _round_operands(spec: ProductSpec, conversion: _Conversion, codes: _OperandCodes, key: PRNGKey | None) -> list[Array]:
    """Rounds A, B and C to the instruction's formats."""
    keys = (None,) * 3 if key is None else jax.random.split(key, 3)
    targets = spec.a, spec.b, spec.c
    bits = (x if x.dtype == source.dtype else array_codes(x)[1] for x, source in zip(codes, conversion.sources, strict=True))
    return [
        x if source == target else convert(source, target, x, conversion.rounding, conversion.saturate or target.is_integer, operand_key)
        for x, source, target, operand_key in zip(bits, conversion.sources, targets, keys, strict=True)
    ]


def _scale_codes(op: MatrixMultiply, fmt: Format, operands: _GemmOperands) -> tuple[Array, Array]:
    """Returns the codes of both scale matrices, each checked against its operand."""
    (*_, m, k), (*_, n) = np.shape(operands.a), np.shape(operands.b)
    blocks = -(-k // op.scale_block)
    scale_a = _check_scale_codes("scale_a", operands.scale_a, op, fmt, (m, blocks))
    scale_b = _check_scale_codes("scale_b", operands.scale_b, op, fmt, (blocks, n))
    batches = [np.shape(x)[:-2] for x in (operands.a, operands.b, scale_a, scale_b)]
    try:
        jnp.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(f"the batch axes of a, b, scale_a and scale_b, {', '.join(map(str, batches))}, do not broadcast") from None
    return scale_a, scale_b


def _check_scale_codes(name: str, value: ArrayLike | None, op: MatrixMultiply, fmt: Format, shape: tuple[int, int]) -> Array:
    expected = f"[..., {shape[0]}, {shape[1]}], a scale for each {op.scale_block} elements along K, for {op}"
    if value is None:
        raise ValueError(f"{name}: missing; expected {expected}. PTX ISA {manual_section(op)}")
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.shape[-2:] != shape:
        raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}; expected {expected}. PTX ISA {manual_section(op)}")
    if jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        return as_stored_codes(name, value, fmt)
    if jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == bool:
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; expected raw codes of {fmt}, unsigned, or floats")
    check_scale_numbers(name, value, fmt)
    source, codes = array_codes(value)
    return convert(source, fmt, codes)


def _is_x64_enabled() -> bool:
    return jax.dtypes.canonicalize_dtype(np.float64) == np.float64


def _format_and_codes(name: str, value: ArrayLike) -> tuple[Format, Array]:
    """Returns an array's format, and its codes, or the array itself if it is a JAX array."""
    try:
        if isinstance(value, jax.Array):
            return array_format(value.dtype), value
        return array_codes(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def _number_shape(fmt: Format, codes: Array) -> tuple[int, ...]:
    return codes.shape[: codes.ndim - (fmt.words - 1)]


def _codes_to_numbers(fmt: Format, codes: Array) -> Array:
    """Reinterprets the codes of an accumulator as numbers."""
    return lax.bitcast_convert_type(codes, next(dtype for dtype, f in ARRAY_FORMATS.items() if f == fmt))
