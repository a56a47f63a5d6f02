"""Checks and conversions of operands that all operations share.

It finds the instruction and its model, checks the operands' dtypes and shapes, and goes between registers and codes.
`instruction_product` is the one way from the operations to the arithmetic.

Each operation has a function `bind_...`, which checks its operands and returns them by name. The emulated operation and the one on a real
GPU (`tcemu.silicon.run`) both call it.

What computes takes `target`, which says by which arithmetic. What only moves words takes `target` or None: if a target is given, it must
have the instruction; None means as sm_80 and later hold the words.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.errors import Unsupported
from tcemu.engine.architectures.container_rows import PADDED_SCALES
from tcemu.engine.architectures.lookup import Arithmetic, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply, Record, WmmaMemory
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, manual_section
from tcemu.engine.isa.operand_fragments import WMMA_SM, matrix_fragment
from tcemu.engine.isa.other_makers import Unit
from tcemu.engine.isa.targets import resolve_target
from tcemu.engine.layouts.packing import Container, container, pack_registers, unpack_registers
from tcemu.engine.layouts.sparsity import gather


def resolve_mover(op: str | Instruction, target: str | None, call: str, record: type[Record], family: str) -> tuple[Record, str | None]:
    """An instruction that only moves words, and the target by its own name, None if none is given.

    Raises Unsupported if it is of another family, or `target` is given and lacks it.
    """
    target = None if target is None else resolve_target(target)
    op = parse(op) if target is None else check(op, target)
    if not isinstance(op, record) or op.family != family:
        raise wrong_family(op, call, family)
    return op, target


def resolve_model(op: str | Instruction, target: str, model: Model | str | None, call: str, *families: str) -> Arithmetic:
    """The arithmetic of an instruction that `call` takes. Raises as `applied`, and Unsupported if `call` takes no such family."""
    op = check(op, target)
    if families and op.family not in families:
        raise wrong_family(op, call, *families)
    return resolve_arithmetic(op, target, model)


def wrong_family(op: Instruction, call: str, *families: str) -> Unsupported:
    """The error for an instruction of a family that `call` does not take."""
    if isinstance(op, Unit):
        return Unsupported(
            f"{op}: tcemu.{call} takes NVIDIA's registers, and those of other makers' units are not modelled; tcemu.gemm multiplies "
            f"matrices by {op}. {op.source}"
        )
    return Unsupported(f"{op} is {op.family}; tcemu.{call} runs {' and '.join(families)}. PTX ISA {manual_section(op)}")


def instruction_product(
    op: MatrixMultiply,
    model: Model,
    a: Array,
    b: Array,
    c: Array,
    fields: Array | None = None,
    scales: tuple[Array, Array] | None = None,
    clamped: bool = False,
) -> Array:
    """D = A·B + C on raw codes: a [..., M, K] (sparse: the kept K/2), b [..., K, N], c [..., M, N] -> [..., M, N].

    fields: a sparse `op`'s metadata, [..., M, chunks] of four bits; clamped: see `sparsity.gather`. scales: those of a block-scaled one,
    [..., M, S] and [..., S, N].
    """
    if fields is None:
        return multiply_matrices(model, product_spec(op), a, b, c, scales)
    if op.warps > 1:  # one warp's rows after the other: B gathered for all of them at once would be large
        by_warp = [jnp.moveaxis(v.reshape(*v.shape[:-2], op.warps, op.m // op.warps, v.shape[-1]), -3, 0) for v in (a, fields, c)]
        d = jnp.moveaxis(lax.map(lambda warp: _sparse(op, model, warp[0], b, warp[2], warp[1], None, clamped), tuple(by_warp)), 0, -3)
        return d.reshape(*d.shape[:-3], op.m, op.n)
    return _sparse(op, model, a, b, c, fields, scales, clamped)


def _sparse(
    op: MatrixMultiply, model: Model, a: Array, b: Array, c: Array, fields: Array, scales: tuple[Array, Array] | None, clamped: bool
) -> Array:
    """Each row of A meets its own elements of B: a row is a product of its own."""
    gathered = gather(b, fields, op.chunk_size, clamped)
    if scales is not None:
        scales = scales[0][..., :, None, :], scales[1][..., None, :, :]
    return multiply_matrices(model, product_spec(op), a[..., :, None, :], gathered, c[..., :, None, :], scales)[..., 0, :]


def check_registers(op: Instruction, name: str, value: ArrayLike, argument: str | None = None) -> Array:
    """Return the operand's registers, uint32[..., 32, n] (a warpgroup's: [..., 4, 32, n]), or raise for another shape or dtype.

    argument: what the caller calls it, if not as the manual does.
    """
    axes = "lane, register" if op.warps == 1 else "warp, lane, register"
    return _words(op, argument or name, value, (op.register_count(name),), f" ({axes}) for {op}", "registers are raw words,")


def check_lane_registers(op: Instruction, name: str, value: ArrayLike) -> Array:
    """An operand of one register a lane, uint32[..., 32] (a warpgroup's: [..., 4, 32])."""
    return _words(op, name, value, (), f", one register a lane, for {op}", "expected")


def _words(op: Instruction, name: str, value: ArrayLike, in_lane: tuple[int, ...], meaning: str, lead: str) -> Array:
    """Raw words with the lanes' axes and `in_lane`, or an error; meaning, lead: the words of its message around the expected shape."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    shape = ((LANES,) if op.warps == 1 else (op.warps, LANES)) + in_lane
    expected = f"uint32[..., {', '.join(map(str, shape))}]{meaning}"
    if value.dtype != jnp.uint32:
        hint = "tcemu.pack makes them from codes" if in_lane else f"PTX ISA {manual_section(op)}"
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; {lead} {expected}. {hint}")
    if value.shape[-len(shape) :] != shape:
        raise ValueError(f"{name}: got uint32{list(value.shape)}; expected {expected}. PTX ISA {manual_section(op)}")
    # jnp.asarray without a dtype compiles an identity for each shape of a NumPy array (JAX 0.10 to 0.12)
    return value if isinstance(value, jax.Array) else jnp.asarray(value, value.dtype)


def check_matrix(op: MatrixMultiply | WmmaMemory, name: str, value: ArrayLike, products: bool = False) -> Array:
    """The raw codes of an operand's matrix, or an error. products: with the leading axis of the four products of m8n8k4 with f16."""
    fmt = op.operand_format(name)
    shape = ((op.matrix_count,) if products and op.matrix_count > 1 else ()) + op.matrix_shape(name) + ((2,) if fmt.words == 2 else ())
    return check_codes(op, name, value, fmt, shape)


def check_codes(op: Instruction, name: str, value: ArrayLike, fmt: Format, shape: tuple[int, ...]) -> Array:
    """Raw codes of `fmt` whose last axes are `shape`, or an error; see `held_codes` for codes that the format does not have."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    expected = f"the raw codes of {fmt}, {fmt.dtype}[..., {', '.join(map(str, shape))}] for {op}"
    if not jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        raise TypeError(
            f"{name}: got {value.dtype}{list(value.shape)}; expected {expected}. tcemu.formats.from_float makes codes of numbers"
        )
    if value.shape[value.ndim - len(shape) :] != shape or value.ndim < len(shape):
        raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}; expected {expected}. PTX ISA {manual_section(op)}")
    return as_stored_codes(name, value, fmt)


def as_stored_codes(name: str, value: Array | np.ndarray, fmt: Format) -> Array:
    """Raw codes, unsigned of any width, in the format's own dtype. Raises ValueError for a code that the format does not have.

    Bit 7 of a ue4m3 byte means nothing to the hardware, and may be set. What is traced shows its dtype alone: one that is wider than the
    format's is refused; in that of a 4-, 6- or 7-bit format the bits above the format's are dropped.
    """
    own = fmt.dtype
    bits = 32 if fmt.words == 2 else 8 if fmt in PADDED_SCALES else fmt.bits
    if isinstance(value, Tracer):
        if value.dtype.itemsize > own.itemsize:
            raise TypeError(
                f"{name}: got traced {value.dtype}{list(value.shape)}; a code of {fmt} has {fmt.bits} bits, and which codes come is not "
                f"known while tracing; expected {own}: cast them (.astype({own.name!r}))"
            )
    elif value.dtype.itemsize * 8 > bits:
        codes = np.asarray(value)
        above = codes >= 1 << bits
        if above.any():
            place = np.unravel_index(int(np.argmax(above)), codes.shape)
            raise ValueError(
                f"{name}: got the code {int(codes[place])} at {[int(i) for i in place]}; {fmt} has {fmt.bits} bits, codes 0 to "
                f"{(1 << bits) - 1}. tcemu.formats.from_float makes codes of numbers"
            )
    return jnp.asarray(value, own)


def _container(op: MatrixMultiply | WmmaMemory, operand: str) -> Container:
    return container(op.operand_format(operand), op.kind if isinstance(op, MatrixMultiply) and operand in "ab" else None)


@partial(jax.jit, static_argnames=("op", "operand", "sm"))
def pack_matrix(op: MatrixMultiply | WmmaMemory, operand: str, codes: Array, sm: int = WMMA_SM) -> Array:
    """The matrix of codes of "a", "b", "c" or "d" -> its registers; wmma's as the target number `sm` holds it."""
    fmt = op.operand_format(operand)
    elements = matrix_fragment(op, operand, sm).encode(codes, trailing=fmt.words - 1)
    return pack_registers(elements, fmt, **_container(op, operand)._asdict())


@partial(jax.jit, static_argnames=("op", "operand", "sm"))
def unpack_matrix(op: MatrixMultiply | WmmaMemory, operand: str, registers: Array, sm: int = WMMA_SM) -> Array:
    """The registers of "a", "b", "c" or "d" -> its matrix of codes; the inverse of `pack_matrix`."""
    fmt = op.operand_format(operand)
    elements = unpack_registers(registers, fmt, **_container(op, operand)._asdict())
    return matrix_fragment(op, operand, sm).decode(elements, trailing=fmt.words - 1)


def require_operand(op: Instruction, name: str, value: Any, has: bool) -> None:
    """Raises ValueError if `op` has the operand and it did not come, or has none and it came."""
    kind = "sparsity metadata" if name == "e" else "block scales"
    if has and value is None:
        raise ValueError(f"{name}: {op} has {kind}, and none came. PTX ISA {manual_section(op)}")
    if not has and value is not None:
        raise ValueError(f"{name}: {op} has no {kind}; leave it out. PTX ISA {manual_section(op)}")
