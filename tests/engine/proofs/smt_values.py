"""Terms of an SMT solver (Bitwuzla) as lane values: `SmtValue` renders the arithmetic of a step for proofs.

A value is one term: a bit vector, an IEEE float, or a condition. What an operation leaves open is a variable of its own, so that a proof
holds for every machine: the bits of a NaN, a float from 2^31 on as an integer, whether "muladd" rounds its product, and, in a `Trace` that
flushes, whether a subnormal number becomes zero. What operations demand of their operands is collected in `Trace.demands`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from tcemu.engine.arithmetic.step.values import BOOL, I32, Lane, Value

bitwuzla = pytest.importorskip("bitwuzla", reason="needs the solver of the extra `test`: pip install bitwuzla")
Kind, RoundingMode = bitwuzla.Kind, bitwuzla.RoundingMode
Term = Sort = Any  # the solver's own

MODES = {"RN": RoundingMode.RNE, "RZ": RoundingMode.RTZ, "RM": RoundingMode.RTN, "RP": RoundingMode.RTP}
EXPONENT_BITS = {16: 5, 32: 8, 64: 11}  # of floats


class Trace:
    """The terms of one proof: what holds of the variables that operations made, and what operations demand."""

    def __init__(self, flushes: bool = False) -> None:
        self.terms, self.flushes = bitwuzla.TermManager(), flushes
        self.named: list[SmtValue] = []  # variables of the proof itself
        self.facts: list[Term] = []
        self.demands: list[Term] = []
        self._of_word: dict[Term, Term] = {}  # the words of floats that were made of words

    def variable(self, lane: Lane, name: str = "") -> SmtValue:
        """A value of which nothing is known."""
        value = SmtValue(self, lane, self.terms.mk_const(self.sort(lane), name or f"open{len(self.demands)}"))
        self.named += [value] if name else []
        return value

    def sort(self, lane: Lane) -> Sort:
        if lane.kind == "float":
            return self.terms.mk_fp_sort(EXPONENT_BITS[lane.bits], lane.bits - EXPONENT_BITS[lane.bits])
        return self.terms.mk_bool_sort() if lane == BOOL else self.terms.mk_bv_sort(lane.bits)

    def constant(self, number: float, lane: Lane) -> Term:
        if lane == BOOL:
            return self.terms.mk_true() if number else self.terms.mk_false()
        if lane.kind == "int":
            return self.terms.mk_bv_value(self.sort(lane), int(number) & ((1 << lane.bits) - 1))
        data = struct.pack("<d" if lane.bits == 64 else "<f", number)
        assert struct.unpack("<d" if lane.bits == 64 else "<f", data)[0] == number, f"{number} is no float of {lane.bits} bits"
        word = self.constant(int.from_bytes(data, "little"), Lane("int", lane.bits))
        return self.terms.mk_term(Kind.FP_TO_FP_FROM_BV, [word], self.float_indices(lane))

    def float_indices(self, lane: Lane) -> list[int]:
        return [EXPONENT_BITS[lane.bits], lane.bits - EXPONENT_BITS[lane.bits]]

    def mode(self, name: str) -> Term:
        return self.terms.mk_rm_value(MODES[name])

    def make(self, kind: Kind, *terms: Term, indices: tuple[int, ...] | list[int] = ()) -> Term:
        return self.terms.mk_term(kind, list(terms), list(indices))

    def float_of_word(self, word: Term, lane: Lane) -> Term:
        term = self.make(Kind.FP_TO_FP_FROM_BV, word, indices=self.float_indices(lane))
        self._of_word[term] = word
        return term

    def word_of_float(self, term: Term, lane: Lane) -> Term:
        if term not in self._of_word:
            word = self.variable(lane).term
            of_word = self.float_of_word(word, Lane("float", lane.bits))
            self.facts.append(self.make(Kind.EQUAL, of_word, term))  # not FP_EQUAL: +0 is not -0, and a NaN is one
            self._of_word[term] = word
        return self._of_word[term]

    def flush(self, term: Term) -> Term:
        """A float, or perhaps zero in place of a subnormal one."""
        if not self.flushes or not term.sort().is_fp() or term.is_value():
            return term
        zeros = self.terms.mk_fp_neg_zero(term.sort()), self.terms.mk_fp_pos_zero(term.sort())
        zero = self.make(Kind.ITE, self.make(Kind.FP_IS_NEG, term), *zeros)
        is_flushed = self.make(Kind.AND, self.make(Kind.FP_IS_SUBNORMAL, term), self.variable(BOOL).term)
        return self.make(Kind.ITE, is_flushed, zero, term)


class SmtValue(Value):
    """A term as a lane value."""

    def __init__(self, trace: Trace, lane: Lane, term: Term) -> None:
        self.trace, self._lane, self.term, self.keeps_subnormals = trace, lane, term, not trace.flushes

    @property
    def lane(self) -> Lane:
        return self._lane

    def constant(self, number: float, lane: Lane | None = None) -> SmtValue:
        return SmtValue(self.trace, lane or self.lane, self.trace.constant(number, lane or self.lane))

    def apply(self, name: str, lane: Lane, *others: SmtValue, extra: str = "") -> SmtValue:
        trace, terms = self.trace, [self.term, *(other.term for other in others)]
        if name in COMMON:
            return SmtValue(trace, lane, COMMON[name](trace, lane, terms))
        of = "condition" if self.lane == BOOL else self.lane.kind
        if of == "float":
            result = FLOATS[name](trace, lane, [trace.flush(term) for term in terms], *([trace.mode(extra)] if extra else []))
            return SmtValue(trace, lane, trace.flush(result))
        return SmtValue(trace, lane, (CONDITIONS if of == "condition" else INTEGERS)[name](trace, lane, terms))


Row = Callable[..., Term]


def _plain(kind: Kind) -> Row:
    return lambda trace, lane, terms: trace.make(kind, *terms)


def _rounded(kind: Kind, mode: str = "RN") -> Row:
    return lambda trace, lane, terms: trace.make(kind, trace.mode(mode), *terms)


def _shift(kind: Kind) -> Row:
    def apply(trace: Trace, lane: Lane, terms: list[Term]) -> Term:
        trace.demands.append(trace.make(Kind.BV_ULT, terms[1], trace.constant(lane.bits, lane)))
        return trace.make(kind, *terms)

    return apply


def _larger(kind: Kind) -> Row:
    return lambda trace, lane, terms: trace.make(Kind.ITE, trace.make(kind, *terms), *terms)


def _extend(kind: Kind) -> Row:
    return lambda trace, lane, terms: trace.make(kind, *terms, indices=[lane.bits - terms[0].sort().bv_size()])


def _of_condition(number: int) -> Row:
    return lambda trace, lane, terms: trace.make(Kind.ITE, *terms, trace.constant(number, lane), trace.constant(0, lane))


def _leading_zeros(trace: Trace, lane: Lane, terms: list[Term]) -> Term:
    zeros, one = trace.constant(lane.bits, lane), trace.constant(1, Lane("int", 1))
    for bit in range(lane.bits):
        is_set = trace.make(Kind.EQUAL, trace.make(Kind.BV_EXTRACT, *terms, indices=[bit, bit]), one)
        zeros = trace.make(Kind.ITE, is_set, trace.constant(lane.bits - 1 - bit, lane), zeros)
    return zeros


def _to_integer(trace: Trace, lane: Lane, terms: list[Term]) -> Term:
    fits = trace.make(Kind.FP_LT, trace.make(Kind.FP_ABS, *terms), trace.constant(2.0**31, Lane("float", 32)))
    trace.demands.append(fits)
    integer = trace.make(Kind.FP_TO_SBV, trace.mode("RZ"), *terms, indices=[32])
    return trace.make(Kind.ITE, fits, integer, trace.variable(I32).term)


def _to_float(kind: Kind, rounding: str = "RN") -> Row:
    return lambda trace, lane, terms, *mode: trace.make(kind, *mode or [trace.mode(rounding)], *terms, indices=trace.float_indices(lane))


def _ordered_and_unequal(trace: Trace, lane: Lane, terms: list[Term]) -> Term:
    return trace.make(Kind.OR, *(trace.make(kind, *terms) for kind in (Kind.FP_LT, Kind.FP_GT)))


def _multiply_add(trace: Trace, lane: Lane, terms: list[Term]) -> Term:
    fused, product = _rounded(Kind.FP_FMA)(trace, lane, terms), _rounded(Kind.FP_MUL)(trace, lane, terms[:2])
    return trace.make(Kind.ITE, trace.variable(BOOL).term, fused, _rounded(Kind.FP_ADD)(trace, lane, [product, terms[2]]))


COMMON: dict[str, Row] = {
    "select": _plain(Kind.ITE), "bits": lambda trace, lane, terms: trace.word_of_float(terms[0], lane),
    "float": lambda trace, lane, terms: trace.float_of_word(terms[0], lane),
}  # fmt: skip
CONDITIONS: dict[str, Row] = {
    "and": _plain(Kind.AND), "or": _plain(Kind.OR), "xor": _plain(Kind.XOR), "eq": _plain(Kind.EQUAL), "ne": _plain(Kind.XOR),
    "sext": _of_condition(-1), "zext": _of_condition(1),
}  # fmt: skip
INTEGERS: dict[str, Row] = {
    "add": _plain(Kind.BV_ADD), "sub": _plain(Kind.BV_SUB), "mul": _plain(Kind.BV_MUL), "and": _plain(Kind.BV_AND),
    "or": _plain(Kind.BV_OR), "xor": _plain(Kind.BV_XOR), "shl": _shift(Kind.BV_SHL), "lshr": _shift(Kind.BV_SHR),
    "ashr": _shift(Kind.BV_ASHR), "eq": _plain(Kind.EQUAL), "ne": _plain(Kind.DISTINCT), "lt": _plain(Kind.BV_SLT),
    "le": _plain(Kind.BV_SLE), "max": _larger(Kind.BV_SGT), "min": _larger(Kind.BV_SLT),
    "sext": _extend(Kind.BV_SIGN_EXTEND), "zext": _extend(Kind.BV_ZERO_EXTEND), "clz": _leading_zeros,
    "trunc": lambda trace, lane, terms: trace.make(Kind.BV_EXTRACT, *terms, indices=[lane.bits - 1, 0]),
    "sitofp": _to_float(Kind.FP_TO_FP_FROM_SBV), "uitofp": _to_float(Kind.FP_TO_FP_FROM_UBV),
    "sitofp_rz": _to_float(Kind.FP_TO_FP_FROM_SBV, "RZ"), "uitofp_rz": _to_float(Kind.FP_TO_FP_FROM_UBV, "RZ"),
}  # fmt: skip
FLOATS: dict[str, Row] = {
    "add": _rounded(Kind.FP_ADD), "add_rz": _rounded(Kind.FP_ADD, "RZ"), "sub": _rounded(Kind.FP_SUB),
    "mul": _rounded(Kind.FP_MUL), "div": _rounded(Kind.FP_DIV),
    "eq": _plain(Kind.FP_EQUAL), "ne": _ordered_and_unequal, "lt": _plain(Kind.FP_LT), "le": _plain(Kind.FP_LEQ),
    "fptosi": _to_integer, "muladd": _multiply_add,
    "fpext": _to_float(Kind.FP_TO_FP_FROM_FP), "fptrunc": _to_float(Kind.FP_TO_FP_FROM_FP),
    "integral": lambda trace, lane, terms, mode: trace.make(Kind.FP_RTI, mode, *terms),
    "fma": lambda trace, lane, terms, mode: trace.make(Kind.FP_FMA, mode, *terms),
}  # fmt: skip
