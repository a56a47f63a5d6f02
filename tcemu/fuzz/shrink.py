"""A mismatch made small: one dot product of it, the fewest terms that are not zero, the simplest values; then both sides explained."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tcemu.architectures.lookup import row_for
from tcemu.arithmetic.model import Model
from tcemu.errors import NotModelled
from tcemu.explanation.exact import word
from tcemu.explanation.explain import explain
from tcemu.formats import Format
from tcemu.fuzz.loop import differing, result
from tcemu.fuzz.operands import HostOperands, Operands, Vector, as_integers, from_integers
from tcemu.fuzz.sides import Side
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import defined_fields

TRIED = 32  # variants in one call


@dataclass(frozen=True)
class Shrunk:
    """A mismatch as small as it became. `str()` shows it, with both sides explained if they have targets."""

    op: Instruction
    left: Side
    right: Side
    number: int  # of the case
    place: tuple[int, int]  # row and column of D
    vector: Vector
    words: tuple[int, int]  # D by left and right; other places of D may differ besides
    terms: int  # products that are not zero
    whole: bool = False  # it does not come down to one dot product: the vector is that of the case, beside which others matter

    def __str__(self) -> str:
        d = signature_of(self.op).d
        said = [f"case {self.number}, row {self.place[0]}, column {self.place[1]}: {self.left.name} gives {word(d, self.words[0])}, "
                f"{self.right.name} {word(d, self.words[1])}"]  # fmt: skip
        if self.whole:
            return "\n".join([*said, "It is no matter of one dot product: with all other rows and columns zero both agree."])
        terms = f"{self.terms} product{'' if self.terms == 1 else 's'} that {'is' if self.terms == 1 else 'are'} not zero"
        said.append(f"made small: {terms}" + ("" if self.vector["c"][0] else ", C zero"))
        try:
            return "\n".join([*said, "", self.explained()])
        except ValueError as error:
            return "\n".join([*said, *(f"{name} {codes}" for name, codes in self.vector.items()), f"(not explained: {error})"])

    def explained(self) -> str:
        """Both sides taken apart; one alone where the other has no model. Raises ValueError if neither has."""
        sides = [s for s in (self.left, self.right) if s.target is not None]
        if not sides:
            raise ValueError("neither side has a target or a model")
        v = self.vector
        given: dict[str, Any] = {"a_row": v["a"], "b_col": v["b"], "c": v["c"][0], "codes": True}
        given |= {name: v[name] for name in ("e", "scale_a", "scale_b") if name in v}
        targets, models = [str(s.target) for s in sides], [self._changed(s) for s in sides]
        return str(
            explain(self.op, **given, target=targets if len(sides) > 1 else targets[0], model=models if len(sides) > 1 else models[0])
        )

    def _changed(self, one: Side) -> Model | None:
        """The side's model if it is not the target's own."""
        try:
            return None if one.model == row_for(self.op, str(one.target)).model else one.model
        except NotModelled:
            return one.model


def shrink(op: Instruction, left: Side, right: Side, given: dict[str, Any], number: int = 0) -> Shrunk:
    """Makes the first mismatch of a case small, as long as the sides still differ somewhere. given: the operands of one case, [1, ...]."""
    given = {name: np.asarray(codes) for name, codes in given.items()}
    d = signature_of(op).d
    x, y = (as_integers(d, np.asarray(result(op, side, _device(given))))[0] for side in (left, right))
    places = np.argwhere(x != y)
    if not len(places):
        raise ValueError(f"given: {left.name} and {right.name} agree on it; there is nothing to make small")
    i, j = (int(v) for v in places[0])
    vector = _vector(op, given, i, j)

    def differ(tried: list[Vector]) -> np.ndarray:
        filled = tried + [tried[-1]] * (TRIED - len(tried))  # one shape, one compilation
        cases = _device(_cases(op, filled, i, j))
        counts = differing(op, result(op, left, cases), result(op, right, cases))
        return np.asarray(counts)[: len(tried)] > 0

    terms = lambda v: _terms(op, v)  # noqa: E731
    if not differ([vector])[0]:
        return Shrunk(op, left, right, number, (i, j), vector, (int(x[i, j]), int(y[i, j])), terms(vector), whole=True)
    progress = True
    while progress:
        progress = False
        tried: list[Vector] = []
        best = cost(op, vector)
        for variant in _variants(op, vector):
            if cost(op, variant) < best:
                tried.append(variant)
            if len(tried) == TRIED:
                progress, vector, tried = _take(differ, tried, vector)
                if progress:
                    break
        if tried and not progress:
            progress, vector, _ = _take(differ, tried, vector)
    case = _device(_cases(op, [vector] * TRIED, i, j))
    x, y = (as_integers(d, np.asarray(result(op, side, case)))[0] for side in (left, right))
    at = (i, j) if x[i, j] != y[i, j] else tuple(int(v) for v in np.argwhere(x != y)[0])
    return Shrunk(op, left, right, number, (at[0], at[1]), vector, (int(x[at]), int(y[at])), terms(vector))


def _take(differ: Any, tried: list[Vector], vector: Vector) -> tuple[bool, Vector, list[Vector]]:
    still = differ(tried)
    return (True, tried[int(np.argmax(still))], []) if still.any() else (False, vector, [])


def _terms(op: Instruction, v: Vector) -> int:
    signature = signature_of(op)
    b = _met(op, v)
    return sum(not _is_zero(signature.a, x) and not _is_zero(signature.b, y) for x, y in zip(v["a"], b, strict=True))


def _met(op: Instruction, v: Vector) -> list[int]:
    """The elements of B at the places of A's; of a sparse instruction only roughly: the whole column, cut to A's length."""
    return v["b"] if not op.sparse else [max(v["b"][2 * k : 2 * k + 2], key=bool) for k in range(len(v["a"]))]


def cost(op: Instruction, v: Vector) -> tuple[int, int]:
    """What is made small: elements that are not zero, then how complicated they are."""
    signature = signature_of(op)
    elements = [(signature.a, x) for x in v["a"]] + [(signature.b, x) for x in v["b"]] + [(signature.c, v["c"][0])]
    present = sum(not _is_zero(fmt, x) for fmt, x in elements)
    detail = sum(_detail(fmt, x) for fmt, x in elements)
    if op.stype is not None:
        detail += sum(_detail(op.stype, x) for name in ("scale_a", "scale_b") for x in v[name])
    if op.sparse:
        detail += sum(field != defined_fields(op.chunk, op.ordered)[0] for field in v["e"])
    return present, detail


def _is_zero(fmt: Format, code: int) -> bool:
    sign = 1 << (fmt.bits - 1) if fmt.signed and not fmt.is_integer else 0
    return code & ~sign & ((1 << fmt.bits) - 1) >> fmt.unused_bits << fmt.unused_bits == 0 and fmt.subnormals


def _detail(fmt: Format, code: int) -> int:
    """Bits of the fraction, the sign, the distance of the exponent from that of one, unused bits that are set; NaN payloads too."""
    if fmt.is_integer:
        value = code - (1 << fmt.bits) if fmt.signed and code >> (fmt.bits - 1) else code
        return 2 * abs(value).bit_length() + abs(value).bit_count() + (value < 0)
    unused = code & ((1 << fmt.unused_bits) - 1)
    code >>= fmt.unused_bits
    sign = code >> (fmt.bits - fmt.unused_bits - 1) if fmt.signed else 0
    fraction, field = code & ((1 << fmt.mantissa_bits) - 1), code >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1)
    if field == 0 and fraction == 0 and fmt.subnormals:
        return sign + unused.bit_count()
    return 4 * fraction.bit_count() + sign + abs(field - fmt.bias) + unused.bit_count() + 2


def _variants(op: Instruction, v: Vector) -> Iterator[Vector]:
    """Simpler ones, the boldest first."""
    signature = signature_of(op)

    def put(name: str, at: int, code: int) -> Vector:
        return v | {name: [*v[name][:at], code, *v[name][at + 1 :]]}

    if not op.sparse:
        k = len(v["a"])
        for size in (k // 2, k // 4, k // 8, 1):  # stretches of K, then single terms
            for first in range(0, k if size else 0, max(size, 1)):
                gone = range(first, first + size)
                yield v | {name: [0 if at in gone else x for at, x in enumerate(v[name])] for name in "ab"}
    for name in "ab":
        for at in range(len(v[name])):
            yield put(name, at, 0)
    yield put("c", 0, 0)
    if op.sparse:
        plain = defined_fields(op.chunk, op.ordered)[0]
        yield v | {"e": [plain] * len(v["e"])}
        for at in range(len(v["e"])):
            yield put("e", at, plain)
    for name in ("scale_a", "scale_b") if op.stype is not None else ():
        assert op.stype is not None
        one = op.stype.bias << op.stype.mantissa_bits
        yield v | {name: [one] * len(v[name])}
        for at, code in enumerate(v[name]):
            for simpler in _simpler(op.stype, code):
                yield put(name, at, simpler)
    for name, fmt in (("a", signature.a), ("b", signature.b), ("c", signature.c)):
        for at, code in enumerate(v[name]):
            if not _is_zero(fmt, code):
                for simpler in _simpler(fmt, code):
                    yield put(name, at, simpler)
            elif code:
                yield put(name, at, 0)


def _simpler(fmt: Format, code: int) -> Iterator[int]:
    """Codes with less to them: one, no fraction, fewer bits, no sign, an exponent nearer to that of one."""
    if fmt.is_integer:
        value = code - (1 << fmt.bits) if fmt.signed and code >> (fmt.bits - 1) else code
        for simpler in (1, abs(value), value // 2, value - 1 if value > 0 else value + 1):
            yield simpler & ((1 << fmt.bits) - 1)
        return
    m, u = fmt.mantissa_bits, fmt.unused_bits
    field, fraction = code >> (u + m) & ((1 << fmt.exponent_bits) - 1), code >> u & ((1 << m) - 1)
    sign = code >> (fmt.bits - 1) << (fmt.bits - 1) if fmt.signed else 0
    made = lambda f, x: sign | f << (m + u) | x << u  # noqa: E731
    yield fmt.bias << (m + u)
    yield made(field, fraction) & ~sign
    yield made(field, 0)
    yield made(field, fraction)  # without the unused bits
    for bit in range(m):
        if fraction >> bit & 1:
            yield made(field, fraction & ~(1 << bit))
    toward = 1 if field < fmt.bias else -1
    for step in (abs(field - fmt.bias), 16, 4, 1):
        if 0 < step <= abs(field - fmt.bias):
            yield made(field + toward * step, fraction)


# ---- between vectors and cases


def _device(given: HostOperands) -> Operands:
    return {name: jnp.asarray(codes) for name, codes in given.items()}


def _vector(op: Instruction, given: HostOperands, i: int, j: int) -> Vector:
    signature = signature_of(op)
    arrays = {
        "a": as_integers(signature.a, given["a"])[0, i],
        "b": as_integers(signature.b, given["b"])[0, :, j],
        "c": as_integers(signature.c, given["c"])[0, i, j : j + 1],
    }
    if op.sparse:
        arrays["e"] = given["e"][0, i]
    if op.block_scale:
        arrays |= {"scale_a": given["scale_a"][0, i], "scale_b": given["scale_b"][0, :, j]}
    return {name: [int(x) for x in codes] for name, codes in arrays.items()}


def _cases(op: Instruction, vectors: list[Vector], i: int, j: int) -> HostOperands:
    """Cases with one dot product each, at row i and column j; all else is zero, a scale one, metadata the plain ones."""
    signature, count = signature_of(op), len(vectors)
    (m, k), (_, n) = op.matrix("a"), op.matrix("d")
    whole = {"a": np.zeros((count, m, k), object), "b": np.zeros((count, op.k, n), object), "c": np.zeros((count, m, n), object)}
    for at, v in enumerate(vectors):
        whole["a"][at, i], whole["b"][at, :, j], whole["c"][at, i, j] = v["a"], v["b"], v["c"][0]
    operands = {name: from_integers(fmt, whole[name]) for name, fmt in (("a", signature.a), ("b", signature.b), ("c", signature.c))}
    if op.sparse:
        operands["e"] = np.full((count, *op.matrix(op.metadata)), defined_fields(op.chunk, op.ordered)[0], np.uint8)
        operands["e"][:, i] = [v["e"] for v in vectors]
    if op.stype is not None:
        one = op.stype.bias << op.stype.mantissa_bits
        for name in ("scale_a", "scale_b"):
            operands[name] = np.full((count, *op.matrix(name)), one, np.uint8)
            rows = [v[name] for v in vectors]
            if name == "scale_a":
                operands[name][:, i] = rows
            else:
                operands[name][:, :, j] = rows
    return operands
