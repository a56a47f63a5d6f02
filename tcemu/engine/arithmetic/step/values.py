"""Lane values: the operations in which the arithmetic of a step is written.

A `Value` is one number of a lane, or a whole array or vector of them: JAX arrays (`jax_values`), LLVM IR (`backends.llvm.values`), CUDA C++
(`backends.cuda.values`), or terms of a solver (`tests/engine/proofs`). A formula is a Python function of
values. It does not know which ones.

Integers have no sign of their own, as in a machine: they wrap, `>>` shifts zeros in, and comparisons, `max` and `min` take them as signed.
Floats are f32 or f64, and each operation rounds to nearest unless it says otherwise. A plain Python number may stand on either side of an
operator. Shifts are by less than the width.

A renderer is a subclass with two methods, `constant` and `apply`, and `apply` has a row for each name in `OPERATIONS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar


class Lane(NamedTuple):
    """The type of a lane."""

    kind: str  # "int", "float" or "bool"
    bits: int


BOOL, I8, I16, I32, I64 = Lane("bool", 1), Lane("int", 8), Lane("int", 16), Lane("int", 32), Lane("int", 64)
F32, F64 = Lane("float", 32), Lane("float", 64)

OPERATIONS = {
    "add": "x + y, integers that wrap or floats rounded to nearest",
    "sub": "x - y, likewise",
    "mul": "x * y, likewise",
    "div": "x / y of floats, rounded to nearest",
    "add_rz": "x + y of floats, rounded toward zero",
    "and": "bitwise, or of conditions",
    "or": "bitwise, or of conditions",
    "xor": "bitwise, or of conditions",
    "shl": "x << y of integers",
    "lshr": "x >> y of integers, zeros shifted in",
    "ashr": "x >> y of integers, the sign shifted in",
    "eq": "x == y; false for a NaN",
    "ne": "x != y; false for a NaN too",
    "lt": "x < y, integers as signed",
    "le": "x <= y, integers as signed",
    "select": "y where the condition x holds, else z",
    "max": "the larger of two signed integers",
    "min": "the smaller of two signed integers",
    "bits": "the bits of a float as an integer",
    "float": "the float with these bits",
    "sext": "an integer of more bits, the sign repeated; of a condition 0 or -1",
    "zext": "an integer of more bits, zeros before it; of a condition 0 or 1",
    "trunc": "the low bits of an integer",
    "fptosi": "a float as a signed i32, truncated toward zero; the float is below 2^31",
    "sitofp": "a signed integer as a float, rounded to nearest",
    "uitofp": "an unsigned integer as a float, rounded to nearest",
    "sitofp_rz": "a signed i32 as an f32, rounded toward zero",
    "uitofp_rz": "an unsigned i32 as an f32, rounded toward zero",
    "clz": "the number of leading zeros of an integer; its width for 0",
    "fpext": "an f32 as an f64",
    "fptrunc": "an f64 as an f32: extra is RN or RZ",
    "integral": "a float rounded to an integer: extra is RN, RM or RP",
    "fma": "x * y + z of floats, rounded once: extra is RN, RZ or RM",
    "muladd": "x * y + z of floats where the product is exact, so that it does not matter whether it is rounded",
}


V = TypeVar("V", bound="Value")  # the values of one renderer


def _operator(name: str, lane: Lane | None = None) -> Callable[[V, Any], V]:
    return lambda value, other: value.apply(name, lane or value.lane, value._match(other))


class Value(ABC):
    """A lane value. Its operators append operations to what is being built, or compute."""

    keeps_subnormals = True  # operations on floats flush no subnormal number

    @property
    @abstractmethod
    def lane(self) -> Lane:
        """The type of the lane."""

    @abstractmethod
    def constant(self, number: float, lane: Lane | None = None) -> Self:
        """Returns a number as a value of this shape. lane: its type; None: this one's."""

    @abstractmethod
    def apply(self, name: str, lane: Lane, *others: Self, extra: str = "") -> Self:
        """Returns the result, of type `lane`, of an operation on this value and others. name: in `OPERATIONS`."""

    def _match(self, other: Any) -> Self:
        return other if isinstance(other, Value) else self.constant(other)  # type: ignore[return-value]

    def _binary(self, name: str, other: Any, lane: Lane | None = None) -> Self:
        return self.apply(name, lane or self.lane, self._match(other))

    __add__ = _operator("add")
    __sub__ = _operator("sub")
    __mul__ = _operator("mul")
    __truediv__ = _operator("div")
    __and__ = _operator("and")
    __or__ = _operator("or")
    __xor__ = _operator("xor")
    __lshift__ = _operator("shl")
    __rshift__ = _operator("lshr")
    shift_right_signed = _operator("ashr")
    __lt__ = _operator("lt", BOOL)
    __le__ = _operator("le", BOOL)
    max = _operator("max")
    min = _operator("min")
    add_toward_zero = _operator("add_rz")

    def __radd__(self, other: Any) -> Self:
        return self + other

    def __rsub__(self, other: Any) -> Self:
        return self._match(other) - self

    def __invert__(self) -> Self:
        return self ^ (1 if self.lane == BOOL else -1)

    def shift_right_any(self, other: Any) -> Self:
        """x >> other, zeros shifted in, by any distance as an unsigned number: 0 from the width on. Some machines have it as it is."""
        distance = self._match(other)
        last = self.lane.bits - 1
        inside = (distance & ~last) == 0
        return inside.select(self >> (distance & last), 0)

    def __eq__(self, other: Any) -> Self:  # type: ignore[override]
        return self._binary("eq", other, BOOL)

    def __ne__(self, other: Any) -> Self:  # type: ignore[override]
        return self._binary("ne", other, BOOL)

    def __gt__(self, other: Any) -> Self:
        return self._match(other)._binary("lt", self, BOOL)

    def __ge__(self, other: Any) -> Self:
        return self._match(other)._binary("le", self, BOOL)

    __hash__ = None  # type: ignore[assignment]

    def select(self, yes: Any, no: Any) -> Self:
        """Returns `yes` where this condition holds, else `no`. One of both is a value."""
        typed: Any = yes if isinstance(yes, Value) else no
        return self.apply("select", typed.lane, typed._match(yes), typed._match(no))

    def bits(self) -> Self:
        return self.apply("bits", Lane("int", self.lane.bits))

    def as_float(self) -> Self:
        return self.apply("float", Lane("float", self.lane.bits))

    def resize(self, lane: Lane, signed: bool = True) -> Self:
        """The integer, or condition, with another number of bits. signed: the sign, or a condition's bit, fills more bits."""
        if lane == self.lane:
            return self
        return self.apply("trunc" if lane.bits < self.lane.bits else "sext" if signed else "zext", lane)

    def to_integer(self) -> Self:
        """A float as a signed i32, truncated toward zero."""
        return self.apply("fptosi", I32)

    def to_float(self, lane: Lane = F32, signed: bool = True, toward_zero: bool = False) -> Self:
        """An integer as a float, rounded to nearest or toward zero."""
        return self.apply(("sitofp" if signed else "uitofp") + ("_rz" if toward_zero else ""), lane)

    def leading_zeros(self) -> Self:
        """The number of leading zeros of an integer, in its own type."""
        return self.apply("clz", self.lane)

    def widen(self) -> Self:
        return self.apply("fpext", F64)

    def narrow(self, rounding: str) -> Self:
        """An f64 as an f32. rounding: RN or RZ."""
        return self.apply("fptrunc", F32, extra=rounding)

    def to_integral(self, rounding: str) -> Self:
        """A float rounded to an integer, as a float. rounding: RN, RM or RP."""
        return self.apply("integral", self.lane, extra=rounding)

    def multiply_add(self, y: Any, z: Any, rounding: str = "RN") -> Self:
        """x * y + z of floats, rounded once. rounding: RN, RZ or RM."""
        return self.apply("fma", self.lane, self._match(y), self._match(z), extra=rounding)

    def multiply_add_exact(self, y: Any, z: Any) -> Self:
        """x * y + z of floats, where the product is exact."""
        return self.apply("muladd", self.lane, self._match(y), self._match(z))

    def never(self) -> Self:
        return self.constant(0, BOOL)
