"""bf16 and FP8 in Triton's interpreter: its operations on their codes, replaced by operations on their numbers.

The interpreter of Triton 3.9 keeps these types as raw codes in unsigned integers. It adds and compares the codes of bf16, truncates f32 to
bf16, and loses a carry of f32 to e4m3. Here each operation of bf16 is computed exactly enough to be rounded once, to nearest even, and each
conversion is the one that Triton's compiler emits for the target: `cvt.rn`, `cvt.rz`, to integers `cvt.rzi`, and to FP8 `cvt.rn.satfinite`
or integer operations.
Source: PTX of Triton 3.8.0 and 3.9.0 for sm_75, sm_80 and sm_90. The codes of NaN are not promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tcemu.base.errors import Unsupported
from tcemu.kernels.triton.triton_versions import HALF_UP, TritonVersion

DTYPES = {  # of the interpreter's raw codes
    tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2,
}  # fmt: skip
NAN = {tl.bfloat16: 0x7FFF, tl.float8e4nv: 0x7F, tl.float8e5: 0x7F}  # the code that cvt returns
CVT_FP8 = 89  # compute capability from which on PTX has cvt.rn.satfinite to FP8
SINGLE_ROUNDING = 90  # from which on PTX has cvt.rn.bf16 from integers
BF16_ARITHMETIC = 80  # from which on PTX has fma.rn.bf16
OPERATIONS = ("binary_op", "unary_op", "create_clampf", "create_erf", "create_rsqrt")


def numbers(handle: Any) -> np.ndarray:
    """Return the array of a handle with the dtype of its numbers."""
    kind = handle.dtype.scalar
    if kind not in DTYPES:
        return handle.data
    return handle.data.view(DTYPES[kind]) if handle.data.dtype.kind == "u" else handle.data.astype(DTYPES[kind])


def round_to_odd_f32(x: np.ndarray) -> np.ndarray:
    """Return f64 numbers as f32, inexact ones with an odd last bit, so that rounding them again equals rounding once."""
    near = x.astype(np.float32)
    even = near.view(np.uint32) & 1 == 0
    towards = np.where(near.astype(np.float64) < x, np.float32(np.inf), np.float32(-np.inf))
    return np.where((near != x) & even & np.isfinite(x), np.nextafter(near, towards), near)


def fma_bf16(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x·y + z of bf16 numbers as f32 that round to bf16 as the exact sum does.

    The product is exact in f64. The error of the sum is exact too (Knuth's TwoSum), and makes the last bit of an inexact sum odd.
    """
    product, addend = np.broadcast_arrays(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64))
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = total.view(np.uint64) & 1 == 0
    inexact = np.isfinite(total) & (error != 0) & even
    return round_to_odd_f32(np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total))


def towards_zero(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return f32 numbers rounded towards zero to f16 or bf16."""
    near = x.astype(dtype)
    codes = near.view(np.uint16)
    return np.where(np.abs(near.astype(np.float32)) > np.abs(x), codes - np.uint16(1), codes).view(dtype)


def integers_from_floats(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Return floats as integers, as `cvt.rzi` gives them: truncated and clamped to the range.

    The host's own conversion differs between processors. Triton converts to 8 bits by way of 16 bits, of which it keeps the lower half. NaN
    gives 0, but in conversions to 64 bits or from f64 it gives the upper bit alone.
    """
    dtype = np.dtype(dtype)
    converted = np.dtype(f"{dtype.kind}{max(dtype.itemsize, 2)}")
    limits, bits = np.iinfo(converted), 8 * converted.itemsize
    nan = 1 << (bits - 1) if bits == 64 or values.dtype == np.float64 else 0
    wide = np.trunc(values.astype(np.float64))
    least, bound = float(limits.min), float(limits.max + 1)  # powers of two and 0, exact in f64
    integers = np.where((wide >= least) & (wide < bound), wide, 0).astype(converted)
    integers = np.where(wide >= bound, limits.max, np.where(wide < least, limits.min, integers)).astype(converted)
    return np.where(np.isnan(wide), np.array(nan, np.uint64).astype(converted), integers).astype(dtype)


class NarrowFloats:
    """The interpreter's operations for one target."""

    def __init__(self, capability: int, version: TritonVersion) -> None:
        self.capability, self.version = capability, version
        self.builder = interpreter.interpreter_builder

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the interpreter's operations meanwhile."""
        replacements: dict[str, Callable] = {name: self._in_numbers(getattr(self.builder, name)) for name in OPERATIONS}
        replacements |= {
            "create_fma": self._fma(self.builder.create_fma),
            "create_fneg": self._negate(self.builder.create_fneg),
            "cast_impl": lambda source, to: self._convert(source, to, None),
            "create_fp_to_fp": self._convert,
            "create_atomic_rmw": self._atomic(self.builder.create_atomic_rmw),
        }
        with ExitStack() as stack:
            for name, replacement in replacements.items():
                stack.enter_context(patch.object(self.builder, name, replacement))
            yield

    @np.errstate(over="ignore", invalid="ignore")  # what overflows, and NaN, is what cvt makes of it
    def _encode(self, values: np.ndarray, kind: tl.dtype) -> Any:
        """Return a handle of numbers rounded to nearest even."""
        if kind is not tl.bfloat16:  # satfinite, and so do the integer operations before sm_89
            limit = float(ml_dtypes.finfo(DTYPES[kind]).max)
            values = np.clip(values, -limit, limit)
        codes = values.astype(DTYPES[kind])
        raw = codes.view(np.uint16 if kind is tl.bfloat16 else np.uint8)
        return interpreter.TensorHandle(np.where(np.isnan(values), raw.dtype.type(NAN[kind]), raw), kind)

    def _in_numbers(self, operation: Callable) -> Callable:
        """Return an operation of the interpreter that computes bf16 in f32.

        Rounding sums, products, quotients and square roots of bf16 to f32 first changes no bf16 result: 24 bits are at least 2·8 + 2.
        """

        def run(*arguments: Any) -> Any:
            handles = [each for each in arguments if isinstance(each, interpreter.TensorHandle)]
            kind = next((each.dtype.scalar for each in handles if each.dtype.scalar in DTYPES), None)
            if kind is None:
                return operation(*arguments)
            if kind is not tl.bfloat16:
                raise Unsupported(f"interpreted: arithmetic of {kind}: Triton does not compile it; convert to float16 or float32 first")
            wide = (_widened(each) if isinstance(each, interpreter.TensorHandle) else each for each in arguments)
            result = operation(*wide)
            return result if result.data.dtype.kind != "f" else self._encode(result.data, kind)

        return run

    def _fma(self, operation: Callable) -> Callable:
        def run(x: Any, y: Any, z: Any) -> Any:
            if z.dtype.scalar is not tl.bfloat16:
                return operation(x, y, z)
            if self.capability < BF16_ARITHMETIC:
                return self._encode(operation(*map(_widened, (x, y, z))).data, tl.bfloat16)
            return self._encode(fma_bf16(numbers(x), numbers(y), numbers(z)), tl.bfloat16)

        return run

    def _negate(self, operation: Callable) -> Callable:
        def run(x: Any) -> Any:
            return interpreter.TensorHandle(x.data ^ np.uint16(0x8000), x.dtype) if x.dtype.scalar is tl.bfloat16 else operation(x)

        return run

    @np.errstate(over="ignore", invalid="ignore")  # what overflows, and NaN, is what cvt makes of it
    def _convert(self, source: Any, to: Any, rounding: Any) -> Any:
        kind, result = source.dtype.scalar, to.scalar
        values = numbers(source)
        if kind in DTYPES:
            values = values.astype(np.float32)
        if rounding == interpreter._ir.ROUNDING_MODE.RTZ:
            if kind is not tl.float32 or result not in (tl.float16, tl.bfloat16):
                raise Unsupported(
                    f"interpreted: {kind} to {result} towards zero: only float32 to float16 and bfloat16 are interpreted; "
                    "tcemu.triton.emulated runs what Triton compiles"
                )
            if result is tl.float16:
                return interpreter.TensorHandle(towards_zero(values, np.float16), result)
            codes = towards_zero(values, ml_dtypes.bfloat16).view(np.uint16)
            return interpreter.TensorHandle(np.where(np.isnan(values), np.uint16(NAN[result]), codes), result)
        if result not in DTYPES:
            dtype = np.dtype(interpreter._get_np_dtype(result))
            narrowed = values.dtype.kind == "f" and dtype.kind in "iu"
            return interpreter.TensorHandle(integers_from_floats(values, dtype) if narrowed else values.astype(dtype), result)
        if result is tl.bfloat16:
            if kind is tl.float8e5:
                return interpreter.TensorHandle(_bf16_from_e5m2(source.data), result)
            if values.dtype.kind in "iub":
                single = self.capability >= SINGLE_ROUNDING
                values = _odd_from_integers(values) if single else values.astype(np.float32)
            elif values.dtype == np.float64:
                values = round_to_odd_f32(values)
        elif self.capability < CVT_FP8 and result is tl.float8e5 and self.version.e5m2 == HALF_UP:
            return interpreter.TensorHandle(_e5m2_half_up(kind, source.data, values), result)
        elif self.capability < CVT_FP8 and kind is tl.bfloat16:
            values = values.astype(np.float16)  # the compiler converts to f16 first
        return self._encode(values, result)

    def _atomic(self, operation: Callable) -> Callable:
        """Return an atomic operation that adds bf16 element by element in ascending order."""

        def run(kind: Any, pointers: Any, values: Any, mask: Any, order: Any, scope: Any) -> Any:
            if values.dtype.scalar is not tl.bfloat16 or kind != interpreter._ir.ATOMIC_OP.FADD:
                return operation(kind, pointers, values, mask, order, scope)
            before = np.zeros(values.data.shape, np.uint16)
            for place in np.ndindex(before.shape):
                if not mask.data[place]:
                    continue
                address, always = pointers.data[place].reshape(1), np.ones(1, bool)
                old = interpreter._interpreter.load(address, always, np.zeros(1, np.uint16), np.dtype(np.uint16))
                added = interpreter.TensorHandle(values.data[place].reshape(1), tl.bfloat16)
                interpreter._interpreter.store(
                    address, self.builder.create_fadd(interpreter.TensorHandle(old, tl.bfloat16), added).data, always
                )
                before[place] = old[0]
            return interpreter.TensorHandle(before, tl.bfloat16)

        return run


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar is not tl.bfloat16:
        return handle
    return interpreter.TensorHandle(numbers(handle).astype(np.float32), tl.float32)


def _bf16_from_e5m2(codes: np.ndarray) -> np.ndarray:
    """Return codes of bf16. The compiler shifts the fields and scales, so that infinity and NaN become numbers from 2^16 on."""
    small = (codes & 0x7F).astype(np.uint16) << 5
    values = small.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(2.0**112)
    return values.astype(ml_dtypes.bfloat16).view(np.uint16) | (codes & 0x80).astype(np.uint16) << 8


def _e5m2_half_up(kind: tl.dtype, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return codes of e5m2 as Triton 3.8 computes them by integer operations.

    f32 is truncated to f16. Half a unit is added to the code of f16, which carries into infinity. The code of bf16 is clipped to the range
    from 2^-15; its largest values carry into the sign.
    """
    if kind is tl.bfloat16:
        clipped = np.clip(codes & 0x7FFF, 0x3800, 0x57E0).astype(np.uint16)
        return (((clipped + np.uint16(0x10) - np.uint16(0x3800)) << 3) >> 8 | (codes & 0x8000) >> 8).astype(np.uint8)
    halves = values if values.dtype == np.float16 else towards_zero(values.astype(np.float32), np.float16)
    return ((halves.view(np.uint16) + np.uint16(0x80)) >> 8).astype(np.uint8)


def _odd_from_integers(values: np.ndarray) -> np.ndarray:
    """Return integers as f32 that round to bf16 as the integers do; those past 53 bits keep a sticky bit."""
    if values.dtype.itemsize == 8:
        low = values & 0x7FF
        values = np.where(np.abs(values.astype(np.float64)) >= 2.0**53, (values - low) | ((low != 0) * 0x400).astype(values.dtype), values)
    return round_to_odd_f32(values.astype(np.float64))
