"""Lane values as CUDA C++: a formula of `arithmetic.step` becomes a function of single numbers, one line for each operation.

Integers wrap, so that sums are computed on unsigned numbers. Each operation of floats is an intrinsic with its rounding: the compiler
contracts none. Lines that no result needs are left out, and equal expressions are one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from tcemu.engine.arithmetic.step import values
from tcemu.engine.arithmetic.step.values import BOOL, F32, F64, I8, I16, I32, I64, Lane

TYPES = {BOOL: "bool", I8: "signed char", I16: "short", I32: "int", I64: "s64", F32: "float", F64: "double"}
UNSIGNED = {I8: "u8", I16: "u16", I32: "u32", I64: "u64"}
WRAPPING = {"add": "+", "sub": "-", "mul": "*", "shl": "<<"}  # on unsigned numbers, of 32 bits at least
INFIX = {"and": "&", "or": "|", "xor": "^", "ashr": ">>", "eq": "==", "ne": "!=", "lt": "<", "le": "<="}
ROUNDINGS = {"": "rn", "RN": "rn", "RZ": "rz", "RM": "rd", "RP": "ru"}
INTRINSICS = {  # of f32 and of f64, without the rounding
    "add": ("__fadd", "__dadd"), "add_rz": ("__fadd", "__dadd"), "sub": ("__fsub", "__dsub"), "mul": ("__fmul", "__dmul"),
    "div": ("__fdiv", "__ddiv"), "fma": ("__fmaf", "__fma"), "muladd": ("__fmaf", "__fma"),
}  # fmt: skip
INTEGRAL = {"RN": "rint", "RM": "floor", "RP": "ceil"}


class Value(values.Value):
    """An expression of CUDA C++: a template with its operands in the places of {0}, {1} and so on."""

    def __init__(self, lane: Lane, template: str, *operands: Value) -> None:
        self._lane, self.template, self.operands = lane, template, operands

    @property
    def lane(self) -> Lane:
        return self._lane

    def constant(self, number: float, lane: Lane | None = None) -> Value:
        lane = lane or self.lane
        if lane.kind == "float":
            return Value(lane, float(number).hex() + "f" * (lane == F32))
        if lane == BOOL:
            return Value(lane, "true" if number else "false")
        word = int(number) & ((1 << lane.bits) - 1)
        if word < 1 << (lane.bits - 1):
            return Value(lane, f"{word}" + "ll" * (lane == I64))
        return Value(lane, f"({TYPES[lane]}){word:#x}u" + "ll" * (lane == I64))

    def apply(self, name: str, lane: Lane, *others: Any, extra: str = "") -> Value:
        return Value(lane, _template(name, self.lane, lane, extra), self, *others)

    def shift_right_any(self, other: Any) -> Value:
        """As in the base class: one instruction, which clamps the distance."""
        if self.lane != I32:
            return super().shift_right_any(other)
        return Value(I32, "__funnelshift_rc((u32){0}, 0, (u32){1})", self, self._match(other))


def _template(name: str, operand: Lane, lane: Lane, extra: str) -> str:
    """The expression of an operation of `OPERATIONS` on a first operand of this type."""
    if name in INTRINSICS and operand.kind == "float":
        places = ", ".join(["{0}", "{1}", "{2}"][: 3 if name in ("fma", "muladd") else 2])
        return f"{INTRINSICS[name][operand == F64]}_{ROUNDINGS['RZ' if name == 'add_rz' else extra]}({places})"
    if name == "ne" and operand.kind == "float":
        return "{0} < {1} || {0} > {1}"  # false for a NaN
    if name in WRAPPING:
        unsigned = "u64" if operand == I64 else "u32"
        second = "{1}" if name == "shl" else f"({unsigned}){{1}}"
        return f"({TYPES[lane]})(({unsigned}){{0}} {WRAPPING[name]} {second})"
    if name == "lshr":
        return f"({TYPES[lane]})(({UNSIGNED[operand]}){{0}} >> {{1}})"
    if name in INFIX:
        return f"{{0}} {INFIX[name]} {{1}}"
    if name in ("max", "min"):
        return f"{name}({{0}}, {{1}})"
    if name in ("uitofp", "zext") and operand != BOOL:
        return f"({TYPES[lane]})({UNSIGNED[operand]}){{0}}"  # every cast to a float rounds to nearest
    if name == "trunc":
        return "({0} & 1) != 0" if lane == BOOL else f"({TYPES[lane]}){{0}}"
    return {
        "select": "{0} ? {1} : {2}",
        "bits": "(int)__float_as_uint({0})" if operand == F32 else "__double_as_longlong({0})",
        "float": "__uint_as_float((u32){0})" if lane == F32 else "__longlong_as_double({0})",
        "sext": "-(int){0}" if operand == BOOL else f"({TYPES[lane]}){{0}}",
        "zext": f"({TYPES[lane]}){{0}}",
        "sitofp": f"({TYPES[lane]}){{0}}",
        "fpext": f"({TYPES[lane]}){{0}}",
        "fptrunc": f"__double2float_{ROUNDINGS[extra]}({{0}})",
        "fptosi": f"__{TYPES[operand]}2int_rz({{0}})",
        "sitofp_rz": "__int2float_rz({0})",
        "uitofp_rz": "__uint2float_rz((u32){0})",
        "clz": "__clzll({0})" if operand == I64 else "__clz({0})",
        "integral": f"{INTEGRAL.get(extra)}{'f' * (operand == F32)}({{0}})",
    }[name]


class Struct(NamedTuple):
    """A named tuple of values as a struct of CUDA C++."""

    name: str
    type: Any  # the named tuple
    lanes: tuple[Lane, ...]  # of its fields, in order

    @property
    def text(self) -> str:
        fields = zip(self.type._fields, self.lanes, strict=True)
        return f"struct {self.name} {{ {' '.join(f'{TYPES[lane]} {name};' for name, lane in fields)} }};"


def function_text(
    name: str, formula: Callable[..., Any], *parameters: Lane | Struct, result: Struct | None = None, prefix: str = ""
) -> str:
    """Returns a formula as a function of CUDA C++.

    Args:
        name: Of the function.
        formula: Takes a value, or a named tuple of values, for each of `parameters`, and returns the same kind.
        parameters: Their types; they are named as those of the formula.
        result: The struct that the function returns; None: a single number.
        prefix: Before "__device__".
    """
    words = list(inspect.signature(formula).parameters)[: len(parameters)]
    given, declared = [], []
    for word, parameter in zip(words, parameters, strict=True):
        declared.append(f"{parameter.name if isinstance(parameter, Struct) else TYPES[parameter]} {word}")
        if isinstance(parameter, Struct):
            fields = zip(parameter.type._fields, parameter.lanes, strict=True)
            given.append(parameter.type(*(Value(lane, f"{word}.{field}") for field, lane in fields)))
        else:
            given.append(Value(parameter, word))
    returned = formula(*given)
    body = _Body()
    ends = [body.write(value) for value in ([returned] if result is None else returned)]
    kind = TYPES[returned.lane] if result is None else result.name
    last = ends[0] if result is None else f"{{{', '.join(ends)}}}"
    head = f"{prefix}__device__ __forceinline__ {kind} {name}({', '.join(declared)}) {{"
    return "\n".join([head, *(f"    {line}" for line in body.lines), f"    return {last};", "}"])


class _Body:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[int, tuple[Value, str]] = {}  # by identity; the value is kept, so that its identity stays its own
        self._expressions: dict[tuple[Lane, str], str] = {}

    def write(self, value: Value) -> str:
        """Appends what a value needs and returns its name."""
        if not value.operands:
            return value.template
        if id(value) not in self._names:
            expression = value.template.format(*map(self.write, value.operands))
            key = value.lane, expression
            if key not in self._expressions:
                self._expressions[key] = f"v{len(self.lines)}"
                self.lines.append(f"const {TYPES[value.lane]} {self._expressions[key]} = {expression};")
            self._names[id(value)] = value, self._expressions[key]
        return self._names[id(value)][1]
