"""NumPy arrays as lane values, to enumerate the inputs of a formula. Floats are IEEE's, and none is flushed."""

from __future__ import annotations

from typing import Any

import numpy as np

from tcemu.engine.arithmetic.step.values import BOOL, F32, F64, I8, I16, I32, I64, Lane, Value

DTYPES = {I8: np.int8, I16: np.int16, I32: np.int32, I64: np.int64, F32: np.float32, F64: np.float64, BOOL: np.bool_}
LANES = {np.dtype(dtype): lane for lane, dtype in DTYPES.items()}


class NumpyValue(Value):
    """An array as a lane value."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    @property
    def lane(self) -> Lane:
        return LANES[self.array.dtype]

    def constant(self, number: float, lane: Lane | None = None) -> NumpyValue:
        lane = lane or self.lane
        if lane.kind == "int":
            number = (int(number) + (1 << (lane.bits - 1)) & ((1 << lane.bits) - 1)) - (1 << (lane.bits - 1))
        return NumpyValue(np.asarray(number, DTYPES[lane]))

    def apply(self, name: str, lane: Lane, *others: NumpyValue, extra: str = "") -> NumpyValue:
        with np.errstate(all="ignore"):
            result = ROWS[f"{name} {extra}".strip()](lane, self.array, *(v.array for v in others))
        return NumpyValue(np.asarray(result).astype(DTYPES[lane], copy=False))


def _unsigned(x: Any) -> Any:
    return x.view(f"u{x.dtype.itemsize}") if x.dtype != np.bool_ else x


def _leading_zeros(lane: Lane, x: Any) -> Any:
    halves = [(_unsigned(x) >> shift).astype(np.uint64) & 0xFFFFFFFF for shift in range(0, lane.bits, 32)]
    lengths = [
        np.where(half == 0, -shift, np.frexp(half.astype(np.float64))[1]) + shift for shift, half in zip((0, 32), halves, strict=False)
    ]
    return lane.bits - np.maximum.reduce(lengths)


def _toward_zero(lane: Lane, x: Any) -> Any:
    exact = x.astype(np.float64)  # of at most 32 bits
    return (exact.view(np.int64) & (-1 << 29)).view(np.float64)


def _narrowed_toward_zero(lane: Lane, x: Any) -> Any:
    nearest = x.astype(np.float32)
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)


ROWS = {
    "add": lambda lane, x, y: x + y,
    "sub": lambda lane, x, y: x - y,
    "mul": lambda lane, x, y: x * y,
    "div": lambda lane, x, y: x / y,
    "and": lambda lane, x, y: x & y,
    "or": lambda lane, x, y: x | y,
    "xor": lambda lane, x, y: x ^ y,
    "shl": lambda lane, x, y: x << y,
    "lshr": lambda lane, x, y: (_unsigned(x) >> _unsigned(y)).view(x.dtype),
    "ashr": lambda lane, x, y: x >> y,
    "eq": lambda lane, x, y: x == y,
    "ne": lambda lane, x, y: (x < y) | (x > y) if x.dtype.kind == "f" else x != y,
    "lt": lambda lane, x, y: x < y,
    "le": lambda lane, x, y: x <= y,
    "select": lambda lane, x, y, z: np.where(x, y, z),
    "max": lambda lane, x, y: np.maximum(x, y),
    "min": lambda lane, x, y: np.minimum(x, y),
    "bits": lambda lane, x: x.view(DTYPES[lane]),
    "float": lambda lane, x: x.view(DTYPES[lane]),
    "sext": lambda lane, x: -x.astype(DTYPES[lane]) if x.dtype == np.bool_ else x,
    "zext": lambda lane, x: _unsigned(x),
    "trunc": lambda lane, x: x,
    "fptosi": lambda lane, x: x,
    "sitofp": lambda lane, x: x,
    "uitofp": lambda lane, x: _unsigned(x),
    "sitofp_rz": _toward_zero,
    "uitofp_rz": lambda lane, x: _toward_zero(lane, _unsigned(x)),
    "clz": _leading_zeros,
    "fpext": lambda lane, x: x,
    "fptrunc RN": lambda lane, x: x,
    "fptrunc RZ": _narrowed_toward_zero,
    "integral RN": lambda lane, x: np.rint(x),
    "integral RM": lambda lane, x: np.floor(x),
    "integral RP": lambda lane, x: np.ceil(x),
}
