"""`sparsify`, `densify` and `prune`: a matrix and its structured-sparse form, as `mma.sp` and `wgmma.sp` take it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.bits import Limbs, is_zero
from tcemu.base.compilation import outside_traces
from tcemu.base.errors import Unsupported
from tcemu.base.gradients import straight_through
from tcemu.engine.formats.coding import codes_to_limbs, decode
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.instructions.operand_checks import check_lane_registers
from tcemu.engine.instructions.selected_operands import MetadataRegisters, metadata_fields, metadata_registers, sparsity_selector
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.layouts.sparsity import PATTERN_NAMES, PATTERNS, compress, decompress, keep_largest

DEFAULT_PATTERN = "2:4"


class Sparse(NamedTuple):
    """A structured-sparse matrix."""

    values: Any  # [..., M, K/2], the stored elements, in the dtype of the dense matrix
    metadata: Array  # 4-bit fields uint8[..., M, chunks], or with `op` its registers: uint32[..., 32], of wgmma [..., 4, 32]


@outside_traces
def sparsify(
    dense: ArrayLike,
    pattern: str | None = None,
    *,
    op: str | Instruction | None = None,
    selector: ArrayLike = 0,
    already_sparse: bool = False,
) -> Sparse:
    """Prune a matrix to a structured-sparse one: in each chunk along K the elements of largest magnitude are kept, in their order.

    Of equal magnitudes the first is kept. A NaN is larger than Inf, -0 is zero, and magnitudes are compared by their bits, so that
    subnormals count.

    Args:
        dense: [..., M, K], any real dtype. NumPy in gives NumPy out, and JAX in gives JAX out.
        pattern: "2:4" (the default: two elements of four), "1:2" (one of two, tf32) or "4:8" (two neighbouring pairs of four, the 4-bit
            types: a pair counts by its larger magnitude, then by the smaller).
        op: An mma.sp or wgmma.sp spelling. It fixes the pattern, and the metadata come as its registers. `dense` then has the shape of its
            A, M x K, and unsigned integers are the raw codes of its A.
        selector: Sparsity selector of those registers.
        already_sparse: Raise if pruning would lose a value that is not zero. Not under a trace, where values are unknown.

    Returns:
        `Sparse(values, metadata)`.

    Raises:
        Unsupported: `op` is not sparse.
        ValueError: The pattern or the shape does not fit, or `already_sparse` does not hold.

    Source: PTX ISA 9.7.14.6.1, 9.7.15.6.1.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> kept = tcemu.sparsify(np.array([[1.0, -4.0, 3.0, 2.0]]))
        >>> kept.values, kept.metadata
        (array([[-4.,  3.]]), Array([[9]], dtype=uint8))
    """
    instruction, chunk = _chunk(pattern, op)
    if not isinstance(dense, jax.Array):
        dense = np.asarray(dense)
    wanted = (
        f"[..., M, K], K a multiple of {chunk}" if instruction is None else f"[..., {instruction.m}, {instruction.k}] for {instruction}"
    )
    fits = dense.ndim >= 2 and dense.shape[-1] % chunk == 0
    if not fits or (instruction is not None and dense.shape[-2:] != (instruction.m, instruction.k)):
        raise ValueError(f"dense: got {dense.dtype}{list(dense.shape)}; expected {wanted}. PTX ISA 9.7.14.6.1")
    magnitude = _magnitude(instruction, dense)
    fields = keep_largest(magnitude, chunk)
    if already_sparse:
        _check_nothing_lost(magnitude, fields, chunk)
    kept = compress(dense, fields, chunk)
    if instruction is None:
        return Sparse(values=kept, metadata=fields)
    return Sparse(values=kept, metadata=metadata_registers(instruction, fields, sparsity_selector(instruction, selector)))


@outside_traces
def densify(
    kept: ArrayLike, metadata: ArrayLike, pattern: str | None = None, *, op: str | Instruction | None = None, selector: ArrayLike = 0
) -> Any:
    """Return the dense matrix of a structured-sparse one, zero where no element is kept; the inverse of `sparsify`.

    Where a field names an element twice, which PTX leaves undefined, the later one stays.

    Args:
        kept: [..., M, K/2], the stored elements.
        metadata: As `sparsify` returns them.
        pattern: As in `sparsify`.
        op: As in `sparsify`.
        selector: As in `sparsify`.

    Returns:
        [..., M, K].

    Raises:
        As `sparsify`.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> tcemu.densify(*tcemu.sparsify(np.array([[1.0, -4.0, 3.0, 2.0]])))
        array([[ 0., -4.,  3.,  0.]])
    """
    instruction, chunk = _chunk(pattern, op)
    if not isinstance(kept, jax.Array):
        kept = np.asarray(kept)
    if instruction is None:
        fields = jnp.asarray(metadata)
        if not jnp.issubdtype(fields.dtype, jnp.unsignedinteger):
            raise TypeError(f"metadata: got {fields.dtype}{list(fields.shape)}; expected 4-bit fields, unsigned integers [..., M, chunks]")
    else:
        words = check_lane_registers(instruction, instruction.metadata_operand, metadata)
        fields = metadata_fields(instruction, MetadataRegisters(registers=words, selector=sparsity_selector(instruction, selector)))
    if kept.ndim < 2 or kept.shape[-1] * 2 != fields.shape[-1] * chunk or kept.shape[-2] != fields.shape[-2]:
        raise ValueError(
            f"kept is {kept.dtype}{list(kept.shape)} and the metadata's fields are {list(fields.shape)}; expected [..., M, K/2] and "
            f"[..., M, K/{chunk}]. PTX ISA 9.7.14.6.1"
        )
    return decompress(kept, fields, chunk)


@outside_traces
def prune(dense: ArrayLike, pattern: str = DEFAULT_PATTERN, *, axis: int = -1) -> Any:
    """Return a matrix with zeros in place of the elements that `sparsify` would not keep.

    The gradient is straight through: that of the result is that of `dense`, also where an element is pruned, so that a pruned weight can
    come back (arXiv 2102.04010).

    Args:
        dense: [..., M, K], any real dtype. NumPy in gives NumPy out, and JAX in gives JAX out.
        pattern: As in `sparsify`.
        axis: The axis of the chunks: -1, K of a sparse A [M, K], or -2, K of a weight [K, N].

    Returns:
        The pruned matrix, in the shape and dtype of `dense`. The last chunk may be short; it is pruned as if padded with zeros.

    Raises:
        ValueError: The pattern, the axis or the shape does not fit.

    Source: PTX ISA 9.7.14.6.1; the gradient is that of 2:4 training, "SR-STE" without its decay.

    Example:
        >>> import tcemu
        >>> import numpy as np
        >>> tcemu.prune(np.array([[1.0, -4.0, 3.0, 2.0]]))
        array([[ 0., -4.,  3.,  0.]])
    """
    _, chunk = _chunk(pattern, None)
    if not isinstance(dense, jax.Array):
        dense = np.asarray(dense)
    if axis not in (-1, -2) or dense.ndim < 2:
        raise ValueError(f"dense: got {dense.dtype}{list(dense.shape)}, axis={axis!r}; expected a matrix [..., M, K] and axis -1 or -2")
    rows = dense if axis == -1 else dense.swapaxes(-1, -2)
    fields = choose_fields(rows, chunk)
    kept = prune_by_fields(jnp.ones(rows.shape, jnp.uint8), fields, chunk)
    mask = kept if axis == -1 else kept.swapaxes(-1, -2)
    if not isinstance(dense, jax.Array):
        return np.where(np.asarray(mask) != 0, dense, np.zeros((), dense.dtype))
    zero = jnp.zeros((), dense.dtype)
    if not isinstance(dense, Tracer) or not jnp.issubdtype(dense.dtype, jnp.floating):
        return jnp.where(mask != 0, dense, zero)
    return straight_through(lambda mask, x: jnp.where(mask != 0, x, zero), lambda mask, x: x, lax.stop_gradient(mask), dense)


def pad_to_chunks(rows: Any, chunk: int) -> Any:
    """Return a matrix [..., M, K] with zeros up to whole chunks along K. A NumPy array stays one."""
    pad: Any = np.pad if isinstance(rows, np.ndarray) else jnp.pad
    missing = -rows.shape[-1] % chunk
    return pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows


def prune_by_fields(rows: Any, fields: Array, chunk: int) -> Any:
    """Return a matrix [..., M, K] with zeros where the fields [..., M, chunks] keep no element."""
    return decompress(compress(pad_to_chunks(rows, chunk), fields, chunk), fields, chunk)[..., : rows.shape[-1]]


def choose_fields(rows: Any, chunk: int) -> Array:
    """Return the 4-bit fields [..., M, chunks] of the elements that `sparsify` keeps of numbers [..., M, K]; K may be any."""
    return keep_largest(_magnitude(None, pad_to_chunks(rows, chunk)), chunk)


def _chunk(pattern: str | None, op: str | Instruction | None) -> tuple[MatrixMultiply | None, int]:
    """The instruction, if one is given, and the elements of a chunk."""
    if pattern is not None and pattern not in PATTERNS:
        raise ValueError(f"pattern: got {pattern!r}; expected {', '.join(map(repr, PATTERNS))}. PTX ISA 9.7.14.6.1")
    if op is None:
        return None, PATTERNS[pattern or DEFAULT_PATTERN]
    op = parse(op)
    if not isinstance(op, MatrixMultiply) or not op.sparse:
        raise Unsupported(f"{op} is dense; sparsify and densify take mma.sp and wgmma.sp. PTX ISA {manual_section(op)}")
    if pattern is not None and PATTERNS[pattern] != op.chunk_size:
        raise ValueError(f"pattern: got {pattern!r}; {op} has {PATTERN_NAMES[op.chunk_size]!r}. PTX ISA 9.7.14.6.1")
    return op, op.chunk_size


def _magnitude(op: MatrixMultiply | None, dense: Any) -> Limbs:
    """Unsigned integers that order the elements as their magnitudes do."""
    fmt: Format
    if op is not None and jnp.issubdtype(dense.dtype, jnp.unsignedinteger):
        fmt, codes = op.a, jnp.asarray(dense)
    else:
        fmt, codes = array_codes(lax.stop_gradient(dense) if isinstance(dense, Tracer) else dense)  # which are kept has no derivative
    if fmt.is_integer:
        return decode(fmt, codes).magnitude
    *low, top = codes_to_limbs(fmt, codes)
    bits = fmt.bits - 32 * len(low) - fmt.signed  # of the magnitude, in the top limb
    top = (top & ((1 << bits) - 1)) >> fmt.unused_bits
    return (*low, top)


def _check_nothing_lost(magnitude: Limbs, fields: Array, chunk: int) -> None:
    present = (~is_zero(magnitude)).astype(jnp.uint8)
    left = present & (1 - decompress(jnp.ones((*present.shape[:-1], present.shape[-1] // 2), jnp.uint8), fields, chunk))
    if isinstance(left, Tracer):
        raise ValueError("already_sparse: values are unknown under jit and vmap; check the matrix outside them")
    lost = np.argwhere(np.asarray(left))
    if len(lost):
        *batch, row, k = lost[0].tolist()
        where = f"row {row}, chunk {k // chunk} (k = {k})" + (f", batch element {tuple(batch)}" if batch else "")
        raise ValueError(
            f"already_sparse: {len(lost)} values that are not zero would be lost, the first in {where}; leave already_sparse out to prune. "
            "PTX ISA 9.7.14.6.1"
        )
