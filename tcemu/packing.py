"""Elements and 32-bit registers: how wide an element's container is, where in it the code sits, and which comes first."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format

REGISTER_BITS = 32


class Container(NamedTuple):
    """The bits an element takes in a register, and how far up in them its code starts."""

    container_bits: int
    shift: int = 0


# Each element of f8f6f4 takes a byte: e2m1 the middle four bits, six-bit types the low six. PTX ISA 9.7.14.5.14, where .kind is described;
# CUTLASS mma_traits_sm120.hpp, fp4_shift_A. No source says that the padding is ignored: that is assumed
_F8F6F4 = {fmt: Container(container_bits=8) for fmt in (E4M3, E5M2, E3M2, E2M3)} | {E2M1: Container(container_bits=8, shift=2)}
CONTAINERS = {"f8f6f4": _F8F6F4, "mxf8f6f4": _F8F6F4}


def container(fmt: Format, kind: str | None = None) -> Container:
    """The container of `fmt` under `.kind::<kind>` (without the dots); for any other kind, the smallest power of two that holds it.

    Raises ValueError if `kind` is f8f6f4 or mxf8f6f4 and does not take `fmt`.
    """
    rows = CONTAINERS.get(kind or "")
    if rows is None:
        return Container(container_bits=1 << (fmt.bits - 1).bit_length())
    if fmt not in rows:
        raise ValueError(f"fmt: .kind::{kind} takes {', '.join(map(repr, rows))}; got {fmt!r}. PTX ISA 9.7.14.5.14")
    return rows[fmt]


def code_dtype(fmt: Format) -> Any:
    """The smallest unsigned dtype that holds a code; an f64 code is two uint32 words."""
    return jnp.uint8 if fmt.bits <= 8 else jnp.uint16 if fmt.bits <= 16 else jnp.uint32


def unpack_registers(registers: Any, fmt: Format, *, container_bits: int | None = None, shift: int = 0) -> jax.Array:
    """uint32[..., n] -> codes[..., n * 32 / container_bits], element 0 in the lowest bits; bits outside the code are ignored.

    Codes have dtype `code_dtype(fmt)`. For f64 they are uint32[..., n / 2, 2], low word first, as the registers hold them.
    `container_bits` and `shift` are those of `container(fmt)` unless given. Raises TypeError if registers are not uint32, ValueError if
    the container does not divide a register or does not hold the code, or if n is odd for f64.
    """
    if registers.dtype != jnp.uint32:
        raise TypeError(f"registers: wants uint32[..., n], got dtype {registers.dtype}")
    if registers.ndim < 1:
        raise ValueError("registers: wants uint32[..., n], got no axis")
    bits = _container_bits(fmt, container_bits, shift)
    registers = jnp.asarray(registers)
    *batch, n = registers.shape
    if bits == 2 * REGISTER_BITS:
        if n % 2:
            raise ValueError(f"registers: an f64 takes two, low word first; got shape {registers.shape}")
        return registers.reshape(*batch, n // 2, 2)
    if bits == fmt.bits == REGISTER_BITS:
        return registers
    per = REGISTER_BITS // bits
    codes = (registers[..., None] >> _positions(bits, shift)) & _mask(fmt)
    return codes.astype(code_dtype(fmt)).reshape(*batch, n * per)


def pack_registers(codes: Any, fmt: Format, *, container_bits: int | None = None, shift: int = 0) -> jax.Array:
    """codes[..., count] -> uint32[..., count * container_bits / 32]; the inverse of `unpack_registers`, with zeros as padding.

    Codes may have any integer dtype; bits above the format's are cut off. For f64: uint32[..., count, 2] -> uint32[..., 2 * count].
    Raises TypeError if codes are not integers (for f64: not uint32), ValueError if they do not fill registers or the container is wrong.
    """
    bits = _container_bits(fmt, container_bits, shift)
    if bits == 2 * REGISTER_BITS:
        if codes.dtype != jnp.uint32:
            raise TypeError(f"codes: wants uint32[..., count, 2] for f64, got dtype {codes.dtype}")
        if codes.ndim < 2 or codes.shape[-1] != 2:
            raise ValueError(f"codes: wants uint32[..., count, 2] for f64, low word first; got shape {codes.shape}")
        codes = jnp.asarray(codes)
        return codes.reshape(*codes.shape[:-2], 2 * codes.shape[-2])
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"codes: wants the integer codes of {fmt!r}, got dtype {codes.dtype}")
    per = REGISTER_BITS // bits
    if codes.ndim < 1 or codes.shape[-1] % per:
        raise ValueError(f"codes: wants [..., count] with count a multiple of {per}, whole registers of {fmt!r}; got shape {codes.shape}")
    *batch, count = codes.shape
    placed = (jnp.asarray(codes).astype(jnp.uint32) & _mask(fmt)).reshape(*batch, count // per, per) << _positions(bits, shift)
    return jax.lax.reduce_or(placed, axes=(placed.ndim - 1,))


def _container_bits(fmt: Format, container_bits: int | None, shift: int) -> int:
    bits = container(fmt).container_bits if container_bits is None else container_bits
    whole = bits == fmt.bits == 2 * REGISTER_BITS or (0 < bits <= REGISTER_BITS and REGISTER_BITS % bits == 0)
    if not whole or shift < 0 or shift + fmt.bits > bits:
        raise ValueError(f"container_bits: {bits} with shift {shift} does not hold {fmt!r}, {fmt.bits} bits, in a register of 32")
    return bits


def _positions(bits: int, shift: int) -> np.ndarray:
    return np.arange(shift, REGISTER_BITS, bits, dtype=np.uint32)


def _mask(fmt: Format) -> np.uint32:
    return np.uint32((1 << fmt.bits) - 1)
