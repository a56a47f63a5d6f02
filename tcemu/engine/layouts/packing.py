"""Packing of elements into 32-bit registers: the width of an element's container, the code's position in it, and the order of elements."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.engine.formats.number_formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from tcemu.engine.layouts.fragment_layouts import REGISTER_BITS


class Container(NamedTuple):
    """The bits of a register that store one element."""

    container_bits: int  # width of the container
    shift: int = 0  # lowest bit of the code in the container


# Each element of f8f6f4 takes a byte: e2m1 the middle four bits, six-bit types the low six. Source: PTX ISA 9.7.14.5.14, which describes
# .kind; CUTLASS mma_traits_sm120.hpp, fp4_shift_A. What a target does with the padding: `tcemu.engine.architectures.container_rows`
_F8F6F4 = {fmt: Container(container_bits=8) for fmt in (E4M3, E5M2, E3M2, E2M3)} | {E2M1: Container(container_bits=8, shift=2)}
CONTAINERS = {"f8f6f4": _F8F6F4, "mxf8f6f4": _F8F6F4}


def container(fmt: Format, kind: str | None = None) -> Container:
    """Return the container of a format's elements in a register.

    Args:
        fmt: Format of the elements.
        kind: The instruction's `.kind::`, such as "f8f6f4". Without it, or for a kind that is not in CONTAINERS, the width is the smallest
            power of two that holds a code.

    Returns:
        The width and the shift.

    Raises:
        ValueError: `kind` is f8f6f4 or mxf8f6f4 and does not take `fmt`.

    Source: PTX ISA 9.7.14.5.14.
    """
    rows = CONTAINERS.get(kind or "")
    if rows is None:
        return Container(container_bits=1 << (fmt.bits - 1).bit_length())
    if fmt not in rows:
        raise ValueError(f"fmt: .kind::{kind} takes {', '.join(map(repr, rows))}; got {fmt!r}. PTX ISA 9.7.14.5.14")
    return rows[fmt]


def unpack_registers(registers: Any, fmt: Format, *, container_bits: int | None = None, shift: int = 0) -> jax.Array:
    """Unpack registers into codes; element 0 is in the lowest bits.

    Args:
        registers: uint32[..., n]. Bits outside the codes are ignored.
        fmt: Format of the codes.
        container_bits: Width of an element's container; by default that of `container(fmt)`.
        shift: Lowest bit of the code in its container.

    Returns:
        Codes [..., n * 32 / container_bits] of dtype `fmt.dtype`. For f64: uint32[..., n / 2, 2], low word first, in the registers' order.

    Raises:
        TypeError: Registers are not uint32.
        ValueError: The container does not divide a register or does not hold the code, or n is odd for f64.
    """
    if registers.dtype != jnp.uint32:
        raise TypeError(f"registers: expected uint32[..., n], got dtype {registers.dtype}")
    if registers.ndim < 1:
        raise ValueError("registers: expected uint32[..., n], got no axis")
    bits = _container_bits(fmt, container_bits, shift)
    registers = jnp.asarray(registers)
    *batch, n = registers.shape
    if bits == 2 * REGISTER_BITS:
        if n % 2:
            raise ValueError(f"registers: an f64 takes two registers, low word first; got shape {registers.shape}")
        return registers.reshape(*batch, n // 2, 2)
    if bits == fmt.bits == REGISTER_BITS:
        return registers
    per_register = REGISTER_BITS // bits
    codes = (registers[..., None] >> _positions(bits, shift)) & _mask(fmt)
    return codes.astype(fmt.dtype).reshape(*batch, n * per_register)


def pack_registers(codes: Any, fmt: Format, *, container_bits: int | None = None, shift: int = 0) -> jax.Array:
    """Pack codes into registers, with zeros as padding; the inverse of `unpack_registers`.

    Args:
        codes: Codes [..., count] of any integer dtype; bits above the format's are dropped. For f64: uint32[..., count, 2].
        fmt: Format of the codes.
        container_bits: Width of an element's container; by default that of `container(fmt)`.
        shift: Lowest bit of the code in its container.

    Returns:
        uint32[..., count * container_bits / 32]. For f64: uint32[..., 2 * count].

    Raises:
        TypeError: Codes are not integers; for f64, not uint32.
        ValueError: The codes do not fill whole registers, or the container does not divide a register or does not hold the code.
    """
    bits = _container_bits(fmt, container_bits, shift)
    if bits == 2 * REGISTER_BITS:
        if codes.dtype != jnp.uint32:
            raise TypeError(f"codes: expected uint32[..., count, 2] for f64, got dtype {codes.dtype}")
        if codes.ndim < 2 or codes.shape[-1] != 2:
            raise ValueError(f"codes: expected uint32[..., count, 2] for f64, low word first; got shape {codes.shape}")
        codes = jnp.asarray(codes)
        return codes.reshape(*codes.shape[:-2], 2 * codes.shape[-2])
    if not jnp.issubdtype(codes.dtype, jnp.integer):
        raise TypeError(f"codes: expected the integer codes of {fmt!r}, got dtype {codes.dtype}")
    per_register = REGISTER_BITS // bits
    if codes.ndim < 1 or codes.shape[-1] % per_register:
        raise ValueError(
            f"codes: expected [..., count] with count a multiple of {per_register}, whole registers of {fmt!r}; got shape {codes.shape}"
        )
    *batch, count = codes.shape
    codes = (jnp.asarray(codes).astype(jnp.uint32) & _mask(fmt)).reshape(*batch, count // per_register, per_register)
    shifted = codes << _positions(bits, shift)
    return jax.lax.reduce_or(shifted, axes=(shifted.ndim - 1,))


def _container_bits(fmt: Format, container_bits: int | None, shift: int) -> int:
    """Return the width of an element's container, after a check that it divides a register and holds the code."""
    bits = container(fmt).container_bits if container_bits is None else container_bits
    fills_registers = bits == fmt.bits == 2 * REGISTER_BITS or (0 < bits <= REGISTER_BITS and REGISTER_BITS % bits == 0)
    if not fills_registers or shift < 0 or shift + fmt.bits > bits:
        raise ValueError(f"container_bits: {bits} with shift {shift} does not hold {fmt!r}, {fmt.bits} bits, in a register of 32")
    return bits


def _positions(bits: int, shift: int) -> np.ndarray:
    return np.arange(shift, REGISTER_BITS, bits, dtype=np.uint32)


def _mask(fmt: Format) -> np.uint32:
    return np.uint32((1 << fmt.bits) - 1)
