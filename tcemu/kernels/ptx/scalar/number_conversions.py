"""cvt between integers and floats, to and from formats of 8, 6 and 4 bits, and cvt.pack (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.coding import decode, encode
from tcemu.engine.formats.number_formats import FORMATS, Format
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar.float_arithmetic import apply_qualifiers, saturate_to_one
from tcemu.kernels.ptx.scalar.opcode_syntax import Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import (
    CANONICAL_NAN,
    FLOAT_FORMATS,
    as_integer,
    element_kind,
    flush_subnormals,
    format_constants,
    is_nan,
    join_halves,
    magnitude,
    ones,
    sign_bit,
    split_halves,
    truncate,
    width,
)
from tcemu.kernels.ptx.scalar.softfloat import FloatParts, decompose, round_to_bits, round_to_integer
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

MIN_SCALE = 0x00400000  # 2^-127 as f32
INTEGER_ROUNDINGS = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


def convert_scalar(qualifiers: Qualifiers) -> Operation:
    """Build cvt.dtype.atype between the integer types, f16, bf16, f32 and f64."""
    target, source = qualifiers.types
    rounding = qualifiers.find(*INTEGER_ROUNDINGS, "rn", "rz", "rm", "rp")
    if source not in FLOAT_FORMATS and target not in FLOAT_FORMATS:
        exact = _max_value(target) >= _max_value(source) and _min_value(target) <= _min_value(source)
        if rounding or "ftz" in qualifiers or ("sat" in qualifiers and exact):
            raise Unsupported(
                f"cvt.{target}.{source} takes no qualifier but .sat, and .sat only if .{source} exceeds .{target} (PTX ISA 9.7.9.21)"
            )
        return between_integers(target, source, "sat" in qualifiers)
    if "sat" in qualifiers and "bf16" in (target, source):
        raise Unsupported("cvt.sat is not for bf16 (PTX ISA 9.7.9.21)")
    if "ftz" in qualifiers and "f32" not in (target, source):
        raise Unsupported("cvt.ftz flushes f32 only (PTX ISA 9.7.9.21): neither type is")
    if target not in FLOAT_FORMATS:
        return to_integer(qualifiers, target, source, _require_rounding(rounding, tuple(INTEGER_ROUNDINGS), target, source))
    if source not in FLOAT_FORMATS:
        return from_integer(qualifiers, target, source, _require_rounding(rounding, ("rn", "rz", "rm", "rp"), target, source))
    if target == source or (width(target) >= width(source) and {target, source} != {"f16", "bf16"}):
        if rounding and (target != source or rounding not in INTEGER_ROUNDINGS):
            raise Unsupported(f"cvt.{rounding}.{target}.{source} is exact; leave .{rounding} out (PTX ISA 9.7.9.21)")
    elif not rounding and {target, source} == {"f16", "bf16"}:
        rounding = "rn"  # ptxas 12.9 assembles cvt.bf16.f16, as Triton writes it, to the code of cvt.rn.bf16.f16
    elif rounding not in ("rn", "rz", "rm", "rp"):
        raise Unsupported(f"cvt.{target}.{source} needs a rounding: .rn, .rz, .rm or .rp (PTX ISA 9.7.9.21)")
    return between_floats(qualifiers, target, source, rounding)


def _require_rounding(rounding: str, known: tuple[str, ...], target: str, source: str) -> str:
    if rounding not in known:
        raise Unsupported(f"cvt.{target}.{source} needs a rounding: .{', .'.join(known)} (PTX ISA 9.7.9.21)")
    return rounding


def between_integers(target: str, source: str, saturates: bool) -> Operation:
    """Build cvt between integers: truncated or extended, or with `.sat` clamped to the range of the destination."""

    def compute(a: Array) -> tuple[Array]:
        value = as_integer(a, source)
        value = value.astype(jnp.int64 if KINDS[source].signed else jnp.uint64)
        if saturates:
            most = min(_max_value(target), _max_value("s64" if KINDS[source].signed else "u64"))
            value = jnp.minimum(value, value.dtype.type(most))
            value = jnp.maximum(value, value.dtype.type(_min_value(target))) if KINDS[source].signed else value
        return (truncate(value, target),)

    return Operation((target,), (source,), compute)


def _max_value(kind: str) -> int:
    return ones(width(kind) - KINDS[kind].signed)


def _min_value(kind: str) -> int:
    return -(1 << (width(kind) - 1)) if KINDS[kind].signed else 0


def to_integer(qualifiers: Qualifiers, target: str, source: str, rounding: str) -> Operation:
    """Build cvt from a float to an integer, rounded and clamped to the range of the destination.

    NaN gives 0, but in conversions to 64 bits or from f64 it gives the upper bit alone, as on an H200.
    """
    greatest, least = _max_value(target), -_min_value(target)
    nan = 1 << (width(target) - 1) if width(target) == 64 or source == "f64" else 0

    def compute(a: Array) -> tuple[Array]:
        x = decompose(flush_subnormals(a, source) if "ftz" in qualifiers else a, source)
        size, beyond = round_to_integer(x, INTEGER_ROUNDINGS[rounding])
        limit = jnp.where(x.negative, jnp.uint64(least), jnp.uint64(greatest))
        size = jnp.where(beyond | (size > limit), limit, size)
        value = jnp.where(x.negative, -size, size)
        return (truncate(jnp.where(x.nan, jnp.uint64(nan), value), target),)

    return Operation((target,), (source,), compute)


def from_integer(qualifiers: Qualifiers, target: str, source: str, rounding: str) -> Operation:
    """Build cvt from an integer to a float."""

    def compute(a: Array) -> tuple[Array]:
        value = as_integer(a, source).astype(jnp.int64 if KINDS[source].signed else jnp.uint64)
        negative = value < 0
        size = jnp.where(negative, -value, value).astype(jnp.uint64)
        never = jnp.zeros(size.shape, bool)
        result = round_to_bits(FloatParts(negative, size, jnp.zeros(size.shape, jnp.int32), never, never), target, rounding)
        return (saturate_to_one(result, target) if "sat" in qualifiers else result,)

    return Operation((target,), (source,), compute)


def between_floats(qualifiers: Qualifiers, target: str, source: str, rounding: str) -> Operation:
    """Build cvt between float formats, or cvt that rounds a float to an integer value."""

    def compute(a: Array) -> tuple[Array]:
        if "ftz" in qualifiers and source == "f32" and target != "f16":  # an H200 does not flush in conversions to f16
            a = flush_subnormals(a, source)
        x = decompose(a, source)
        if rounding in INTEGER_ROUNDINGS:
            size, beyond = round_to_integer(x, INTEGER_ROUNDINGS[rounding])
            large = beyond | (x.exponent >= 0)  # already an integer
            x = x._replace(significand=jnp.where(large, x.significand, size), exponent=jnp.where(large, x.exponent, 0))
        result = round_to_bits(x, target, rounding if rounding in ("rz", "rm", "rp") else "rn", "ftz" in qualifiers and target == "f32")
        result = jnp.where(x.nan, convert_nan(a, target, source, qualifiers), result)
        return (apply_qualifiers(result, target, qualifiers),)

    return Operation((target,), (source,), compute)


def convert_nan(a: Array, target: str, source: str, qualifiers: Qualifiers) -> Array:
    """Convert a NaN as an H200 does.

    A conversion from or to f64 keeps the sign and the upper bits and makes the NaN quiet; bf16 to f32 keeps the bits; every other
    conversion gives the canonical NaN.
    """
    bits = storage_dtype(target).type
    if target == source and target in ("f32", "f64") and not qualifiers[:-2]:
        return a
    if (target, source) == ("f32", "bf16") and not qualifiers[:-2]:
        return a << 16
    if "f64" not in (target, source):
        return jnp.asarray(bits(CANONICAL_NAN[target]))
    if "ftz" in qualifiers and source == "f32":
        a = jnp.full_like(a, CANONICAL_NAN["f32"])
    fraction = magnitude(a, source).astype(jnp.uint64) & (format_constants(source).hidden_bit - 1)
    move = FLOAT_FORMATS[target].mantissa_bits - FLOAT_FORMATS[source].mantissa_bits
    fraction = fraction << move if move > 0 else fraction >> -move
    signs = jnp.where(sign_bit(a, source) != 0, bits(format_constants(target).sign), bits(0))
    return signs | fraction.astype(bits) | bits(format_constants(target).infinity | (format_constants(target).hidden_bit >> 1))


def to_half_pair(qualifiers: Qualifiers) -> Operation:
    """Build cvt.f16x2.f32 and cvt.bf16x2.f32: the first operand goes to the upper half."""
    kind = qualifiers.types[0]
    element = element_kind(kind)

    def compute(a: Array, b: Array) -> tuple[Array]:
        codes = jnp.stack(jnp.broadcast_arrays(b, a))
        rounded = round_to_bits(decompose(codes, "f32"), element, qualifiers.rounding)
        return (join_halves(apply_qualifiers(rounded, element, qualifiers)),)

    return Operation((kind,), ("f32", "f32"), compute)


def to_tf32(qualifiers: Qualifiers) -> Operation:
    """Build cvt to tf32, an f32 whose lowest 13 bits are 0."""
    rounding = qualifiers.find("rna", "rn", "rz")

    def compute(a: Array) -> tuple[Array]:
        half = {"rna": jnp.uint32(1 << 12), "rz": jnp.uint32(0), "rn": ((a >> 13) & 1) + jnp.uint32((1 << 12) - 1)}[rounding]
        infinity = jnp.uint32(format_constants("f32").infinity)
        half = jnp.where(magnitude(a, "f32") >= infinity, jnp.uint32(0), half)
        result = (a + half) & jnp.uint32(ones(32) - ones(13))
        if "satfinite" in qualifiers:  # also for a NaN, whose bits `.rna` keeps
            result = jnp.where(magnitude(result, "f32") >= infinity, result - jnp.uint32(1 << 13), result)
        if rounding != "rna":
            result = jnp.where(is_nan(a, "f32"), jnp.uint32(0x7FFFE000), result)
        if "relu" in qualifiers:
            result = jnp.where((sign_bit(result, "f32") != 0) & ~is_nan(a, "f32"), 0, result).astype(jnp.uint32)
        return (result,)

    return Operation(("b32",), ("f32",), compute)


def pack_integers(qualifiers: Qualifiers) -> Operation:
    """Build cvt.pack: clamp two s32 and pack them, a above b.

    16-bit integers fill the result. Integers of 8 to 2 bits are put below the lower bits of a third operand.
    """
    target = qualifiers[2]
    bits, is_signed = int(target[1:]), target[0] == "s"

    def clamp(x: Array) -> Array:
        maximum = ones(bits - is_signed)
        return jnp.clip(as_integer(x, "s32"), -maximum - 1 if is_signed else 0, maximum).astype(jnp.uint32) & ones(bits)

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        both = (clamp(a) << bits) | clamp(b)
        return (both if c is None else (c << (2 * bits)) | both,)

    return Operation(("b32",), ("s32", "s32", *("b32",) * (qualifiers[-1] == "b32")), compute)


# ---- formats source 8, 6 and 4 bits, in pairs


def pair_offset(fmt: Format) -> int:
    """Return the distance in bits of the two elements of a pair: half a byte for formats of 4 bits, else a byte."""
    return 4 if fmt.bits == 4 else 8


def to_narrow(qualifiers: Qualifiers) -> Operation:
    """Build cvt to a pair of a narrow format, from a packed pair or from two f32, of which the first goes to the upper part."""
    target, source = qualifiers.types
    fmt, element = FORMATS[element_kind(target)], element_kind(source)

    def convert(x: Array) -> Array:
        if "relu" in qualifiers:
            x = jnp.where((sign_bit(x, element) != 0) & ~is_nan(x, element), 0, x).astype(x.dtype)
        overflow = "saturate" if "satfinite" in qualifiers else "ieee"
        return encode(fmt, decode(FLOAT_FORMATS[element], x), qualifiers.rounding.upper(), overflow=overflow).astype(jnp.uint32)

    def compute(*values: Array) -> tuple[Array]:
        x = jnp.stack(jnp.broadcast_arrays(*values[::-1])) if len(values) == 2 else split_halves(values[0])
        lower, upper = convert(x)
        return (lower | (upper << pair_offset(fmt)),)

    return Operation((target,), (source,) if source != element else (source, source), compute)


def to_scale(qualifiers: Qualifiers) -> Operation:
    """Build cvt to a pair of ue8m0, powers of two, from a bf16x2 or from two f32, of which the first goes to the upper part.

    Signs are dropped. Source: NVIDIA's fallback for GPUs without the instruction, CUDA 13.0 cuda_fp8.hpp, __nv_cvt_bfloat16raw_to_e8m0.
    """
    source = qualifiers.types[1]

    def compute(*values: Array) -> tuple[Array]:
        x = jnp.stack(jnp.broadcast_arrays(*values[::-1])) if len(values) == 2 else split_halves(values[0]) << 16
        size = magnitude(x, "f32")
        field = size >> 23
        if "rp" in qualifiers:
            rounds_up = (size > MIN_SCALE) & (size < format_constants("f32").infinity) & (size & 0x7FFFFF != 0)
            field = field + rounds_up.astype(jnp.uint32)
        if "satfinite" in qualifiers:
            field = jnp.where((field == 0xFF) & ~is_nan(x, "f32"), jnp.uint32(0xFE), field)
        return (field[0] | (field[1] << 8),)

    return Operation(("ue8m0x2",), (source,) if source == "bf16x2" else (source, source), compute)


def refuse_stochastic(qualifiers: Qualifiers) -> Operation:
    """Refuse cvt.rs: nobody has measured which random bits round which element.

    Raises:
        Unsupported: always.
    """
    raise Unsupported(
        f"cvt.{'.'.join(qualifiers)} rounds by random bits, and no GPU that has it was measured: nobody knows which bits round which "
        "element. .rn is supported, and .rz for f16x2 and bf16x2 (PTX ISA 9.7.9.21)"
    )


def from_narrow(qualifiers: Qualifiers) -> Operation:
    """Build cvt from a pair of a narrow format to a packed pair of f16 or bf16, which represent every value."""
    target, source = qualifiers.types
    fmt, element = FORMATS[element_kind(source)], element_kind(target)

    def compute(x: Array) -> tuple[Array]:
        both = jnp.stack([x, x >> pair_offset(fmt)]) & ((1 << fmt.bits) - 1)
        codes = encode(FLOAT_FORMATS[element], decode(fmt, both)).astype(jnp.uint32)
        if "relu" in qualifiers:
            codes = jnp.where((sign_bit(codes, element) != 0) & ~is_nan(codes, element), 0, codes).astype(jnp.uint32)
        return (join_halves(codes),)

    return Operation((target,), (source,), compute)
