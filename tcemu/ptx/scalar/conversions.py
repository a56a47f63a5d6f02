"""cvt between integers and floats, and cvt.pack (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.float_core import Parts, integral, pack, unpack
from tcemu.ptx.scalar.floats import clamped, rectified
from tcemu.ptx.scalar.lanes import cut, number, ones, width
from tcemu.ptx.scalar.number_codes import CANONICAL, FLOATS, code, flushed, is_nan, magnitude, sign
from tcemu.ptx.scalar.syntax import Qualifiers
from tcemu.ptx.values import KINDS, dtype

TO_INTEGERS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


def scalar(qualifiers: Qualifiers) -> Operation:
    """cvt.dtype.atype between the integer types, f16, bf16, f32 and f64."""
    to, of = qualifiers.types
    rounding = qualifiers.one_of(*TO_INTEGERS, "rn", "rz", "rm", "rp")
    if of not in FLOATS and to not in FLOATS:
        holds = _greatest(to) >= _greatest(of) and _least(to) <= _least(of)
        if rounding or "ftz" in qualifiers or ("sat" in qualifiers and holds):
            raise Unsupported(f"cvt.{to}.{of} takes .sat alone, and only where .{to} does not hold every .{of} (PTX ISA 9.7.9.21)")
        return integers(to, of, "sat" in qualifiers)
    if "sat" in qualifiers and "bf16" in (to, of):
        raise Unsupported("cvt.sat is not for bf16 (PTX ISA 9.7.9.21)")
    if "ftz" in qualifiers and "f32" not in (to, of):
        raise Unsupported("cvt.ftz flushes f32 only (PTX ISA 9.7.9.21): neither type is")
    if to not in FLOATS:
        return to_integer(qualifiers, to, of, _needed(rounding, tuple(TO_INTEGERS), to, of))
    if of not in FLOATS:
        return from_integer(qualifiers, to, of, _needed(rounding, ("rn", "rz", "rm", "rp"), to, of))
    if to == of or (width(to) >= width(of) and {to, of} != {"f16", "bf16"}):
        if rounding and (to != of or rounding not in TO_INTEGERS):
            raise Unsupported(f"cvt.{rounding}.{to}.{of} rounds nothing: leave .{rounding} out (PTX ISA 9.7.9.21)")
    elif rounding not in ("rn", "rz", "rm", "rp"):
        raise Unsupported(f"cvt.{to}.{of} takes a rounding, .rn, .rz, .rm or .rp (PTX ISA 9.7.9.21)")
    return between_floats(qualifiers, to, of, rounding)


def _needed(rounding: str, known: tuple[str, ...], to: str, of: str) -> str:
    if rounding not in known:
        raise Unsupported(f"cvt.{to}.{of} takes a rounding, one of .{', .'.join(known)} (PTX ISA 9.7.9.21)")
    return rounding


def integers(to: str, of: str, saturates: bool) -> Operation:
    """cvt between integers: cut or extended, or with `.sat` clamped to what the destination holds."""

    def compute(a: Array) -> tuple[Array]:
        value = number(a, of)
        value = value.astype(jnp.int64 if KINDS[of].signed else jnp.uint64)
        if saturates:
            most = min(_greatest(to), _greatest("s64" if KINDS[of].signed else "u64"))
            value = jnp.minimum(value, value.dtype.type(most))
            value = jnp.maximum(value, value.dtype.type(_least(to))) if KINDS[of].signed else value
        return (cut(value, to),)

    return Operation((to,), (of,), compute)


def _greatest(kind: str) -> int:
    return ones(width(kind) - KINDS[kind].signed)


def _least(kind: str) -> int:
    return -(1 << (width(kind) - 1)) if KINDS[kind].signed else 0


def to_integer(qualifiers: Qualifiers, to: str, of: str, rounding: str) -> Operation:
    """A float rounded to an integer and clamped to what the destination holds.

    NaN gives 0; to 64 bits or from f64 the upper bit alone, as on an H200.
    """
    greatest, least = _greatest(to), -_least(to)
    nan = 1 << (width(to) - 1) if width(to) == 64 or of == "f64" else 0

    def compute(a: Array) -> tuple[Array]:
        x = unpack(flushed(a, of) if "ftz" in qualifiers else a, of)
        size, beyond = integral(x, TO_INTEGERS[rounding])
        limit = jnp.where(x.negative, jnp.uint64(least), jnp.uint64(greatest))
        size = jnp.where(beyond | (size > limit), limit, size)
        value = jnp.where(x.negative, -size, size)
        return (cut(jnp.where(x.nan, jnp.uint64(nan), value), to),)

    return Operation((to,), (of,), compute)


def from_integer(qualifiers: Qualifiers, to: str, of: str, rounding: str) -> Operation:
    """An integer rounded to a float."""

    def compute(a: Array) -> tuple[Array]:
        value = number(a, of).astype(jnp.int64 if KINDS[of].signed else jnp.uint64)
        negative = value < 0
        size = jnp.where(negative, -value, value).astype(jnp.uint64)
        never = jnp.zeros(size.shape, bool)
        result = pack(Parts(negative, size, jnp.zeros(size.shape, jnp.int32), never, never), to, rounding)
        return (clamped(result, to) if "sat" in qualifiers else result,)

    return Operation((to,), (of,), compute)


def between_floats(qualifiers: Qualifiers, to: str, of: str, rounding: str) -> Operation:
    """A float in another format, or as a float of integer value."""

    def compute(a: Array) -> tuple[Array]:
        if "ftz" in qualifiers and of == "f32" and to != "f16":  # to f16 an H200 does not flush
            a = flushed(a, of)
        x = unpack(a, of)
        if rounding in TO_INTEGERS:
            size, beyond = integral(x, TO_INTEGERS[rounding])
            large = beyond | (x.exponent >= 0)  # an integer already
            x = x._replace(significand=jnp.where(large, x.significand, size), exponent=jnp.where(large, x.exponent, 0))
        result = pack(x, to, rounding if rounding in ("rz", "rm", "rp") else "rn", "ftz" in qualifiers and to == "f32")
        result = jnp.where(x.nan, nan_word(a, to, of, qualifiers), result)
        return (finished(result, to, qualifiers),)

    return Operation((to,), (of,), compute)


def nan_word(a: Array, to: str, of: str, qualifiers: Qualifiers) -> Array:
    """What an H200 makes of a NaN: of or to f64 its sign and upper bits, made quiet; bf16 to f32 its bits; else the canonical one."""
    target = dtype(to).type
    if to == of and to in ("f32", "f64") and not qualifiers[:-2]:
        return a
    if (to, of) == ("f32", "bf16") and not qualifiers[:-2]:
        return a << 16
    if "f64" not in (to, of):
        return jnp.asarray(target(CANONICAL[to]))
    if "ftz" in qualifiers and of == "f32":
        a = jnp.full_like(a, CANONICAL["f32"])
    fraction = magnitude(a, of).astype(jnp.uint64) & (code(of).hidden - 1)
    move = FLOATS[to].mantissa_bits - FLOATS[of].mantissa_bits
    fraction = fraction << move if move > 0 else fraction >> -move
    signs = jnp.where(sign(a, of) != 0, target(code(to).sign), target(0))
    return signs | fraction.astype(target) | target(code(to).infinity | (code(to).hidden >> 1))


def finished(x: Array, kind: str, qualifiers: Qualifiers) -> Array:
    """`.sat`, `.relu` and `.satfinite`, which takes Inf to the largest finite number."""
    if "satfinite" in qualifiers:
        x = jnp.where(magnitude(x, kind) == code(kind).infinity, sign(x, kind) | code(kind).greatest, x).astype(x.dtype)
    x = clamped(x, kind) if "sat" in qualifiers else x
    return rectified(x, kind) if "relu" in qualifiers else x


def pairs(qualifiers: Qualifiers) -> Operation:
    """cvt.f16x2.f32 and cvt.bf16x2.f32: the first operand in the upper half."""
    kind = qualifiers.types[0]
    single = kind.removesuffix("x2")

    def compute(a: Array, b: Array) -> tuple[Array]:
        codes = jnp.stack(jnp.broadcast_arrays(b, a))
        parts = finished(pack(unpack(codes, "f32"), single, qualifiers.rounding), single, qualifiers)
        return (parts[0] | (parts[1] << 16),)

    return Operation((kind,), ("f32", "f32"), compute)


def to_tf32(qualifiers: Qualifiers) -> Operation:
    """cvt to tf32, an f32 whose lowest 13 bits are 0."""
    rounding = qualifiers.one_of("rna", "rn", "rz")

    def compute(a: Array) -> tuple[Array]:
        half = {"rna": jnp.uint32(1 << 12), "rz": jnp.uint32(0), "rn": ((a >> 13) & 1) + jnp.uint32((1 << 12) - 1)}[rounding]
        infinity = jnp.uint32(code("f32").infinity)
        half = jnp.where(magnitude(a, "f32") >= infinity, jnp.uint32(0), half)
        result = (a + half) & jnp.uint32(ones(32) - ones(13))
        if "satfinite" in qualifiers:  # also of a NaN, whose bits `.rna` keeps
            result = jnp.where(magnitude(result, "f32") >= infinity, result - jnp.uint32(1 << 13), result)
        if rounding != "rna":
            result = jnp.where(is_nan(a, "f32"), jnp.uint32(0x7FFFE000), result)
        if "relu" in qualifiers:
            result = jnp.where((sign(result, "f32") != 0) & ~is_nan(a, "f32"), 0, result).astype(jnp.uint32)
        return (result,)

    return Operation(("b32",), ("f32",), compute)


def packed(qualifiers: Qualifiers) -> Operation:
    """cvt.pack: two s32, clamped, as 16-bit integers, or as 8- to 2-bit ones above the lower bits of a third operand.

    a is the upper one, b the lower.
    """
    to = qualifiers[2]
    bits = int(to[1:])

    def saturated(x: Array) -> Array:
        value = number(x, "s32")
        top = ones(bits - (to[0] == "s"))
        return jnp.clip(value, -top - 1 if to[0] == "s" else 0, top).astype(jnp.uint32) & ones(bits)

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        both = (saturated(a) << bits) | saturated(b)
        return (both if c is None else (c << (2 * bits)) | both,)

    return Operation(("b32",), ("s32", "s32", *("b32",) * (qualifiers[-1] == "b32")), compute)
