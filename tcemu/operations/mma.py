"""`mma`: registers -> codes -> sum -> codes -> registers, for any number of warps at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.arithmetic.program import Model, Signature, run
from tcemu.catalog import check
from tcemu.formats import Format
from tcemu.grammar import parse
from tcemu.instructions import LANES, Instruction
from tcemu.models import Evidence, row
from tcemu.operations.fragments import matrix_fragment
from tcemu.packing import container, pack_registers, unpack_registers


def mma(op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str) -> Array:
    """One dense `mma.sync` for each batch element: D = A·B + C, registers in, registers out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate, as "sm_90a". Both are static under `jit`.
    a, b, c: uint32[..., 32, n], lane, then register in the order of the PTX statement, n = `op.registers(...)`; an f64 register is two
    words, low first. Leading axes are batch axes, any number of them; they broadcast.
    Returns uint32[..., 32, n]: D's registers. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape.
    Source: PTX ISA 9.7.14.5.14; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    op, model = _modelled(op, target)
    registers = (_registers(op, name, value) for name, value in (("a", a), ("b", b), ("c", c)))
    return _mma(op, model, *registers)


def dot(op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str) -> Array:
    """One instruction's D = A·B + C on raw codes, without registers.

    a: codes [..., M, K]; b: [..., K, N]; c: [..., M, N], unsigned integers; f64 codes are uint32[..., 2], low word first. (Each of the four
    products of m8n8k4 with f16 is one element of the batch.) Leading axes broadcast. Returns codes [..., M, N] in `op.d.dtype`.
    Raises as `mma`.
    """
    op, model = _modelled(op, target)
    codes = (_codes(op, name, value) for name, value in (("a", a), ("b", b), ("c", c)))
    return _dot(model, signature(op), *codes)


def pack(op: str | Instruction, operand: str, codes: ArrayLike) -> Array:
    """A matrix of raw codes -> the registers that hold it.

    operand: "a", "b", "c" or "d". codes: unsigned [..., rows, columns] of A (M x K), B (K x N), C or D (M x N); for m8n8k4 with f16, which
    is four products, [..., 4, rows, columns]; for f64 [..., rows, columns, 2]. Bits above the format's are dropped.
    Returns uint32[..., 32, n]. Raises Unsupported if `op` is no instruction, TypeError or ValueError for another dtype or shape.
    Source: PTX ISA 9.7.14.5.1 to 9.7.14.5.13.
    """
    op = parse(op)
    return _pack(op, _operand(op, operand), _codes(op, operand, codes, products=True))


def unpack(op: str | Instruction, operand: str, registers: ArrayLike) -> Array:
    """Registers -> the matrix of raw codes that they hold, in the smallest unsigned dtype; the inverse of `pack`, with the same errors."""
    op = parse(op)
    return _unpack(op, _operand(op, operand), _registers(op, operand, registers))


def evidence(op: str | Instruction, target: str) -> Evidence:
    """How it is known what `target` computes for `op`: a level, one of `tcemu.models.LEVELS`, and its source. Raises as `mma`."""
    op = check(op, target)
    return row(op, target).evidence


def signature(op: Instruction) -> Signature:
    """The types and modes of an instruction, as its arithmetic wants them."""
    assert op.a and op.b and op.c and op.d
    return Signature(op.a, op.b, op.c, op.d, op.k, op.rounding, op.satfinite, op.bit_op)


def _modelled(op: str | Instruction, target: str) -> tuple[Instruction, Model]:
    op = check(op, target)
    return op, row(op, target).model


@partial(jax.jit, static_argnames=("op", "model"))
def _mma(op: Instruction, model: Model, a: Array, b: Array, c: Array) -> Array:
    return _pack(op, "d", run(model, signature(op), _unpack(op, "a", a), _unpack(op, "b", b), _unpack(op, "c", c)))


@partial(jax.jit, static_argnames=("model", "signature"))
def _dot(model: Model, signature: Signature, a: Array, b: Array, c: Array) -> Array:
    return run(model, signature, a, b, c)


@partial(jax.jit, static_argnames=("op", "operand"))
def _pack(op: Instruction, operand: str, codes: Array) -> Array:
    fmt = _format(op, operand)
    elements = matrix_fragment(op, operand).encode(codes, trailing=fmt.words - 1)
    return pack_registers(elements, fmt, **container(fmt, op.kind if operand in "ab" else None)._asdict())


@partial(jax.jit, static_argnames=("op", "operand"))
def _unpack(op: Instruction, operand: str, registers: Array) -> Array:
    fmt = _format(op, operand)
    elements = unpack_registers(registers, fmt, **container(fmt, op.kind if operand in "ab" else None)._asdict())
    return matrix_fragment(op, operand).decode(elements, trailing=fmt.words - 1)


def _format(op: Instruction, operand: str) -> Format:
    return getattr(op, operand)


def _operand(op: Instruction, operand: str) -> str:
    if operand not in ("a", "b", "c", "d"):
        raise ValueError(f"operand {operand!r} of {op}: its matrices are 'a' (M x K), 'b' (K x N), 'c' and 'd' (M x N)")
    return operand


def _registers(op: Instruction, name: str, value: ArrayLike) -> Array:
    """The operand's registers as a JAX array, or an error that names what came and what is wanted."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    wanted = f"uint32[..., {LANES}, {op.registers(name)}] (lane, register) for {op}"
    if value.dtype != jnp.uint32:
        raise TypeError(
            f"{name}: got {value.dtype}{list(value.shape)}; registers are raw words, {wanted}. tcemu.pack makes them from codes"
        )
    if value.shape[-2:] != (LANES, op.registers(name)):
        raise ValueError(f"{name}: got uint32{list(value.shape)}; wanted {wanted}. PTX ISA 9.7.14.5")
    return jnp.asarray(value)


def _codes(op: Instruction, name: str, value: ArrayLike, products: bool = False) -> Array:
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    fmt = _format(op, name)
    shape = ((op.products,) if products and op.products > 1 else ()) + op.matrix(name) + ((2,) if fmt.words == 2 else ())
    wanted = f"the raw codes of {fmt}, {fmt.dtype}[..., {', '.join(map(str, shape))}] for {op}"
    if not jnp.issubdtype(value.dtype, jnp.unsignedinteger):
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; wanted {wanted}. tcemu.formats.from_float makes codes from numbers")
    if value.shape[value.ndim - len(shape) :] != shape or value.ndim < len(shape):
        raise ValueError(f"{name}: got {value.dtype}{list(value.shape)}; wanted {wanted}. PTX ISA 9.7.14.5")
    return jnp.asarray(value)
