"""The drawing of cases as LLVM IR: the formulas of `case_formulas`, what the elements of a case share on vectors of LANES cases, and the
elements of a float operand on vectors of LANES elements of one case.

Most kinds of cases need a part of `build_float` alone. So there is a loop over elements for each set of features that the kinds have, and
a case takes the one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from tcemu.engine.arithmetic.step.values import I32 as WORD
from tcemu.engine.backends.llvm.blocks import LANES, code_type
from tcemu.engine.backends.llvm.small_kernel import transpose
from tcemu.engine.backends.llvm.values import I32, I64, POINTER, Builder, Value
from tcemu.uses.fuzz import case_formulas as formulas
from tcemu.uses.fuzz.case_formulas import STREAMS, DrawnCase, Features, FloatValues, KindValues
from tcemu.uses.fuzz.case_kinds import EVERY
from tcemu.uses.fuzz.llvm.kernel_requests import DrawRequest
from tcemu.uses.fuzz.random_words import GOLDEN_STEP, PlaceFields, mix_int, mix_positions

VECTOR = ir.VectorType(I32, LANES)
EDGE, ZERO, SPECIAL, TWINS, RAW, NOTHING = 1, 2, 4, 8, 16, 32  # bits of a case's variant; NOTHING: all elements are +0
ELEMENT_FIELDS = ("span", "edge", "special", "zero", "same_sign")  # fields of a kind that elements need


def find_variants(request: DrawRequest, name: str) -> list[int]:
    """The variants that cases of an operand have."""
    found = set()
    for kind in request.kinds:
        if kind.raw:
            found.add(RAW)
            continue
        own = EDGE * (kind.edge > 0) | (SPECIAL if kind.special else ZERO * (kind.zero > 0))
        found |= {own, NOTHING} if name == "c" else {own | TWINS} if name == "a" and kind.twins else {own}
    if any(variant & TWINS for variant in found):
        found |= {variant & ~TWINS for variant in found}  # an instruction with few products has no twins
    return sorted(found)


class OperandMemory(NamedTuple):
    """What the elements of an operand are drawn from, for LANES cases."""

    kind: dict[str, Value]  # i32 of each case by ELEMENT_FIELDS
    variant: Value  # i32 of each case
    places: Value  # PlaceFields of each case, [cases, places]; those of C are its exponent fields


class CaseDrawing:
    """The drawing of LANES cases in a function that is being built."""

    def __init__(self, b: Builder, request: DrawRequest, names: tuple[str, ...]) -> None:
        self.b, self.request, self.names = b, request, names
        self.keys = b.allocate(VECTOR), b.allocate(VECTOR)
        self.padded = {name: -(-self._places(name) // LANES) * LANES for name in names}
        self.operands = {
            name: OperandMemory(
                {field: b.allocate(VECTOR) for field in ELEMENT_FIELDS},
                b.allocate(VECTOR),
                b.allocate(VECTOR, 1 if name == "c" else self.padded[name] + 1),  # the last load goes beyond the places
            )
            for name in names
        }
        self.terms = b.allocate(VECTOR, max([self.padded[name] for name in names if name != "c"], default=1))

    def _places(self, name: str) -> int:
        """Number of places of an operand: elements of one place share an exponent field."""
        return {"a": self.request.shape("a")[1], "b": self.request.op.k, "c": 1}[name]

    # ---- what the elements of a case share

    def draw_cases(self, keys: tuple[Value, Value]) -> None:
        """Draws what the elements of each case share. keys: VECTORs."""
        b, op = self.b, self.request.op
        for key, memory in zip(keys, self.keys, strict=True):
            b.store(key, memory)
        case = formulas.draw_case(op, keys, self.request.kinds)
        for name in self.names:
            kind, field = formulas.accumulator_kind(case) if name == "c" else (case.kind, case.low_a)
            memory = self.operands[name]
            for of_kind, place in memory.kind.items():
                b.store(getattr(kind, of_kind), place)
            b.store(self._find_variant(name, kind, case), memory.variant)
            if name == "c":
                b.store(field, memory.places)
            else:
                self._draw_places(name, keys, case)

    def _find_variant(self, name: str, kind: KindValues[Value], case: DrawnCase[Value]) -> Value:
        zero = kind.raw.constant(0)
        variant = (kind.edge != 0).select(EDGE, zero) | (kind.special != 0).select(SPECIAL, (kind.zero != 0).select(ZERO, zero))
        if name == "a":
            variant = variant | (case.twin_bit != 0).select(TWINS, zero)
        if name == "c":
            variant = (kind.zero > EVERY).select(NOTHING, variant)
        return (kind.raw == 1).select(RAW, variant)

    def _draw_places(self, name: str, keys: tuple[Value, Value], case: DrawnCase[Value]) -> None:
        b, op = self.b, self.request.op
        count = self.padded[name]
        _, k = op.matrix_shape("a")
        ratio = op.k // k if name == "b" else 1  # elements of a sparse instruction's column for each element that A stores
        with b.loop(b.constant(I64, count)) as at:
            place = b.splat(at.cast("trunc", I32), LANES)
            term = formulas.draw_term(keys, case, place if ratio == 1 else (place >> (ratio.bit_length() - 1)))
            fields = formulas.start_fields(op, case, term.drop)
            if ratio > 1:
                word_index, field = term.word_index * ratio + (place & (ratio - 1)), case.low_b
            else:
                word_index, field = term.word_index, fields[name == "b"]
            word = PlaceFields.PLACE.insert(word_index) | PlaceFields.FIELD.insert(field)
            if name == "a":
                flipped, nudged = (v.resize(WORD, signed=False) for v in (term.flipped, term.nudged))
                word = word | PlaceFields.FLIPPED.insert(flipped) | PlaceFields.NUDGED.insert(nudged)
            b.store(word, b.at(self.terms, VECTOR, at))
        with b.loop(b.constant(I64, count), LANES) as block:
            rows = transpose(b, [b.load(VECTOR, b.at(self.terms, VECTOR, block + lane)) for lane in range(LANES)])
            for lane, row in enumerate(rows):
                b.store(row, b.at(self.operands[name].places, I32, block + lane * count))

    # ---- elements

    def draw_elements(self, name: str, lane: Value, out: Value) -> None:
        """Stores the codes of an operand of one case. lane: its number among the cases; out: where its codes begin."""
        b, memory = self.b, self.operands[name]
        bodies = {
            variant: lambda variant=variant: self._draw_variant(name, variant, lane, out) for variant in find_variants(self.request, name)
        }
        b.switch(b.load(I32, b.at(memory.variant, I32, lane)), bodies)

    def _draw_variant(self, name: str, variant: int, lane: Value, out: Value) -> None:
        b, fmt, memory = self.b, self.request.format(name), self.operands[name]
        code = code_type(fmt)
        if variant == NOTHING:
            with b.loop(b.constant(I64, self.request.size(name)), LANES) as at:
                b.store(b.constant(ir.VectorType(code, LANES), 0), b.at(out, code, at))
            return
        key, other_key = (b.load(I32, b.at(memory, I32, lane)) for memory in self.keys)
        start, other = b.splat(key + mix_int(STREAMS[name]), LANES), b.splat(other_key, LANES)
        values: dict[str, Any] = dict.fromkeys(KindValues._fields)  # those that no element needs are absent
        values |= {field: b.splat(b.load(I32, b.at(place, I32, lane)) & 0x1FF, LANES) for field, place in memory.kind.items()}
        kind = KindValues(**values)
        features = Features(bool(variant & EDGE), bool(variant & ZERO), bool(variant & SPECIAL), raw=False)

        def store(position: Value, place: Value, index: Value) -> None:
            """Draws and stores LANES elements. position: of their words; index: of the first element."""
            word = mix_positions(position + start, other)
            if variant == RAW:
                drawn = formulas.raw_code(fmt, word)
            else:
                twins: tuple[Any, ...] = (None, None)
                if variant & TWINS:
                    twins = tuple(bits.extract(place) != 0 for bits in (PlaceFields.FLIPPED, PlaceFields.NUDGED))
                source = FloatValues(kind, place.shift_right_signed(PlaceFields.FIELD.low), *twins)
                (drawn,) = formulas.build_float(fmt, word, source, features)
            b.store(drawn if code == I32 else drawn.cast("trunc", code), b.at(out, code, index))

        {"a": self._visit_rows, "b": self._visit_columns, "c": self._visit_accumulators}[name](lane, store)

    def _visit_rows(self, lane: Value, store: Callable[[Value, Value, Value], None]) -> None:
        """The elements of A: the words of a row follow those of the row before."""
        b, (rows, k) = self.b, self.request.shape("a")
        period = max(k, LANES)
        with b.loop(b.constant(I64, period), LANES) as at:
            place = self._load_places("a", lane, at)
            index = PlaceFields.PLACE.extract(place)
            if k < LANES:
                place, index = (b.shuffle(v, v, [e % k for e in range(LANES)]) for v in (place, index))
                index = index + b.vector([e // k * k for e in range(LANES)])
            position = index * np.uint32(GOLDEN_STEP)
            with b.loop(b.constant(I64, rows * k), period) as first:
                store(position + b.splat(first.cast("trunc", I32) * np.uint32(GOLDEN_STEP), LANES), place, first + at)

    def _visit_columns(self, lane: Value, store: Callable[[Value, Value, Value], None]) -> None:
        """The elements of B: each k has the words of one row."""
        b, (k, n) = self.b, self.request.shape("b")
        with b.loop(b.constant(I64, k), max(1, LANES // n)) as at:
            place = self._load_places("b", lane, at)
            place = b.shuffle(place, place, [e // n for e in range(LANES)])
            position = PlaceFields.PLACE.extract(place) * np.uint32(n * GOLDEN_STEP & 0xFFFFFFFF)
            position = position + b.vector([e % n * GOLDEN_STEP for e in range(LANES)])
            if n <= LANES:
                store(position, place, at * n)
            else:
                with b.loop(b.constant(I64, n), LANES) as column:
                    store(position + b.splat(column.cast("trunc", I32) * np.uint32(GOLDEN_STEP), LANES), place, at * n + column)

    def _visit_accumulators(self, lane: Value, store: Callable[[Value, Value, Value], None]) -> None:
        """The elements of C, which have one exponent field."""
        b = self.b
        field = b.splat(b.load(I32, b.at(self.operands["c"].places, I32, lane)) << PlaceFields.FIELD.low, LANES)
        steps = b.vector([e * GOLDEN_STEP for e in range(LANES)])
        with b.loop(b.constant(I64, self.request.size("c")), LANES) as at:
            store(steps + b.splat(at.cast("trunc", I32) * np.uint32(GOLDEN_STEP), LANES), field, at)

    def _load_places(self, name: str, lane: Value, at: Value) -> Value:
        return self.b.load(VECTOR, self.b.at(self.operands[name].places, I32, lane * self.padded[name] + at))


def load_keys(b: Builder, pointers: list[Value], first: Value, count: Value) -> tuple[Value, Value]:
    """The keys of LANES cases, of which `count` exist."""
    mask = b.splat(count.cast("trunc", I32), LANES) > b.iota(I32, LANES)
    low, high = (b.masked_load(VECTOR, b.at(pointer, I32, first), mask) for pointer in pointers)
    return low, high


def count_case_tasks(module: ir.Module, name: str) -> None:
    """Adds the function NAME_tasks, which returns the number of groups of LANES cases."""
    counting = Builder(ir.Function(module, ir.FunctionType(I64, [POINTER]), f"{name}_tasks"))
    (dims,) = counting.arguments
    counting.finish((counting.load(I64, counting.load(POINTER, dims)) + (LANES - 1)) // LANES)


@lru_cache(maxsize=256)
def drawing_text(name: str, request: DrawRequest, operand: str) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. Operands: keys, uint32 [cases] each. Result: the codes of an
    operand, [cases, rows, columns].
    """
    module = ir.Module(name)
    count_case_tasks(module, name)
    b = Builder(ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, POINTER]), f"{name}_task"))
    task, buffers, dims = b.arguments
    low, high, out = (b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(3))
    first = task * LANES
    count = b.minimum(b.load(I64, b.load(POINTER, dims)) - first, b.constant(I64, LANES))
    drawing = CaseDrawing(b, request, (operand,))
    drawing.draw_cases(load_keys(b, [low, high], first, count))
    with b.loop(count) as lane:
        code, size = code_type(request.format(operand)), request.size(operand)
        drawing.draw_elements(operand, lane, b.at(out, code, (first + lane) * size))
    b.finish()
    return str(module)
