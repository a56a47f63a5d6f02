"""Shrinking of a mismatch to one dot product with the fewest nonzero terms and the simplest values.

The small mismatch is then explained for both implementations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.exact_values import hex_code
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.uses.explanation.explain import explain
from tcemu.uses.fuzz.case_generator import DotOperands, HostOperandCodes, OperandCodes, codes_to_integers, place_dots
from tcemu.uses.fuzz.comparison_loop import compute_result, count_differing_outputs
from tcemu.uses.fuzz.implementations import Implementation

VARIANTS_PER_CALL = 32  # simpler operands per call


@dataclass(frozen=True)
class SmallMismatch:
    """A mismatch, shrunk as far as possible. `str()` shows it, with both implementations explained if they have targets."""

    op: MatrixMultiply
    left: Implementation
    right: Implementation
    number: int  # number of the case
    position: tuple[int, int]  # row and column of D
    operands: DotOperands
    results: tuple[int, int]  # codes of D by left and right; other elements of D may differ too
    terms: int  # nonzero products
    irreducible: bool = False  # the mismatch needs more than one dot product; the operands are those of the original case

    def __str__(self) -> str:
        d = product_spec(self.op).d
        (row, column), (left, right) = self.position, (hex_code(d, result) for result in self.results)
        lines = [f"case {self.number}, row {row}, column {column}: {self.left.name} gives {left}, {self.right.name} {right}"]
        if self.irreducible:
            return "\n".join([*lines, "It needs more than one dot product: with all other rows and columns zero both agree."])
        lines.append(
            f"shrunk: {self.terms} nonzero product{'' if self.terms == 1 else 's'}" + ("" if self.operands["c"][0] else ", C zero")
        )
        try:
            return "\n".join([*lines, "", self.explanation_text()])
        except ValueError as error:
            return "\n".join([*lines, *(f"{name} {codes}" for name, codes in self.operands.items()), f"(not explained: {error})"])

    def explanation_text(self) -> str:
        """Explain both implementations, or the one that has a target.

        Returns:
            Text with every term of the dot product.

        Raises:
            ValueError: Neither implementation has a target, or the operands cannot be explained.
        """
        implementations = [s for s in (self.left, self.right) if s.target is not None]
        if not implementations:
            raise ValueError("neither implementation has a target or a model")
        v = self.operands
        arguments: dict[str, Any] = {"a_row": v["a"], "b_col": v["b"], "c": v["c"][0], "codes": True}
        arguments |= {name: v[name] for name in ("e", "scale_a", "scale_b") if name in v}
        targets, models = [str(s.target) for s in implementations], [self._changed_model(s) for s in implementations]
        return str(
            explain(
                self.op,
                **arguments,
                target=targets if len(implementations) > 1 else targets[0],
                model=models if len(implementations) > 1 else models[0],
            )
        )

    def _changed_model(self, implementation: Implementation) -> Model | None:
        """Return the implementation's model if it is not the target's own."""
        try:
            return None if implementation.model == find_row(self.op, str(implementation.target)).model else implementation.model
        except NotModelled:
            return implementation.model


def shrink_mismatch(
    op: MatrixMultiply, left: Implementation, right: Implementation, operands: dict[str, Any], number: int = 0
) -> SmallMismatch:
    """Shrink the first mismatch of a case as long as the implementations still differ somewhere.

    Args:
        op: The instruction.
        left: One implementation.
        right: The other implementation.
        operands: Operands of one case, [1, ...].
        number: Number of the case, for the account.

    Returns:
        The shrunk mismatch.

    Raises:
        ValueError: The implementations agree on the operands.
    """
    operands = {name: np.asarray(codes) for name, codes in operands.items()}
    d = product_spec(op).d
    x, y = (codes_to_integers(d, np.asarray(compute_result(op, side, _to_device(operands))))[0] for side in (left, right))
    differing = np.argwhere(x != y)
    if not len(differing):
        raise ValueError(f"operands: {left.name} and {right.name} agree on them; there is nothing to shrink")
    i, j = (int(v) for v in differing[0])
    dot = _extract_dot(op, operands, i, j)
    positions = [(case, i, j) for case in range(VARIANTS_PER_CALL)]

    def differ(candidates: list[DotOperands]) -> np.ndarray:
        filled = candidates + [candidates[-1]] * (VARIANTS_PER_CALL - len(candidates))  # one shape, one compilation
        cases = _to_device(place_dots(op, filled, positions, len(filled)))
        counts = count_differing_outputs(op, compute_result(op, left, cases), compute_result(op, right, cases))
        return np.asarray(counts)[: len(candidates)] > 0

    if not differ([dot])[0]:
        return SmallMismatch(op, left, right, number, (i, j), dot, (int(x[i, j]), int(y[i, j])), _count_terms(op, dot), irreducible=True)
    progress = True
    while progress:
        progress = False
        candidates: list[DotOperands] = []
        best = mismatch_cost(op, dot)
        for variant in _simpler_operands(op, dot):
            if mismatch_cost(op, variant) < best:
                candidates.append(variant)
            if len(candidates) == VARIANTS_PER_CALL:
                progress, dot, candidates = _take_first_differing(differ, candidates, dot)
                if progress:
                    break
        if candidates and not progress:
            progress, dot, _ = _take_first_differing(differ, candidates, dot)
    case = _to_device(place_dots(op, [dot] * VARIANTS_PER_CALL, positions, VARIANTS_PER_CALL))
    x, y = (codes_to_integers(d, np.asarray(compute_result(op, side, case)))[0] for side in (left, right))
    position = (i, j) if x[i, j] != y[i, j] else tuple(int(v) for v in np.argwhere(x != y)[0])
    return SmallMismatch(
        op, left, right, number, (position[0], position[1]), dot, (int(x[position]), int(y[position])), _count_terms(op, dot)
    )


def _take_first_differing(differ: Any, candidates: list[DotOperands], dot: DotOperands) -> tuple[bool, DotOperands, list[DotOperands]]:
    still = differ(candidates)
    return (True, candidates[int(np.argmax(still))], []) if still.any() else (False, dot, [])


def _count_terms(op: MatrixMultiply, v: DotOperands) -> int:
    spec = product_spec(op)
    b = _paired_b(op, v)
    return sum(not _is_zero(spec.a, x) and not _is_zero(spec.b, y) for x, y in zip(v["a"], b, strict=True))


def _paired_b(op: MatrixMultiply, v: DotOperands) -> list[int]:
    """Return the elements of B that meet A's. For a sparse instruction this is approximate: the full column, reduced to A's length."""
    return v["b"] if not op.sparse else [max(v["b"][2 * k : 2 * k + 2], key=bool) for k in range(len(v["a"]))]


def mismatch_cost(op: MatrixMultiply, v: DotOperands) -> tuple[int, int]:
    """Return the number of nonzero elements, then their complexity. Shrinking reduces this pair."""
    spec = product_spec(op)
    elements = [(spec.a, x) for x in v["a"]] + [(spec.b, x) for x in v["b"]] + [(spec.c, v["c"][0])]
    present = sum(not _is_zero(fmt, x) for fmt, x in elements)
    detail = sum(_code_complexity(fmt, x) for fmt, x in elements)
    if op.scaling is not None:
        detail += sum(_code_complexity(op.scaling.format, x) for name in ("scale_a", "scale_b") for x in v[name])
    if op.sparse:
        detail += sum(field != defined_fields(op.chunk_size, op.ordered)[0] for field in v["e"])
    return present, detail


def _is_zero(fmt: Format, code: int) -> bool:
    sign = 1 << (fmt.bits - 1) if fmt.signed and not fmt.is_integer else 0
    return code & ~sign & ((1 << fmt.bits) - 1) >> fmt.unused_bits << fmt.unused_bits == 0 and fmt.subnormals


def _code_complexity(fmt: Format, code: int) -> int:
    """Count fraction bits, the sign, the exponent's distance from that of 1.0, and set unused bits. NaN payloads count too."""
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


def _simpler_operands(op: MatrixMultiply, v: DotOperands) -> Iterator[DotOperands]:
    """Yield simpler operands, the boldest simplification first."""
    spec = product_spec(op)

    def replace_code(name: str, at: int, code: int) -> DotOperands:
        return v | {name: [*v[name][:at], code, *v[name][at + 1 :]]}

    if not op.sparse:
        k = len(v["a"])
        for size in (k // 2, k // 4, k // 8, 1):  # parts of K, then single terms
            for first in range(0, k if size else 0, max(size, 1)):
                gone = range(first, first + size)
                yield v | {name: [0 if at in gone else x for at, x in enumerate(v[name])] for name in "ab"}
    for name in "ab":
        for at in range(len(v[name])):
            yield replace_code(name, at, 0)
    yield replace_code("c", 0, 0)
    if op.sparse:
        defined = defined_fields(op.chunk_size, op.ordered)[0]
        yield v | {"e": [defined] * len(v["e"])}
        for at in range(len(v["e"])):
            yield replace_code("e", at, defined)
    for name, scaling in (("scale_a", op.scaling), ("scale_b", op.scaling)):
        if scaling is None:
            break
        unit_scale = scaling.format.bias << scaling.format.mantissa_bits
        yield v | {name: [unit_scale] * len(v[name])}
        for at, code in enumerate(v[name]):
            for simpler in _simpler_codes(scaling.format, code):
                yield replace_code(name, at, simpler)
    for name, fmt in (("a", spec.a), ("b", spec.b), ("c", spec.c)):
        for at, code in enumerate(v[name]):
            if not _is_zero(fmt, code):
                for simpler in _simpler_codes(fmt, code):
                    yield replace_code(name, at, simpler)
            elif code:
                yield replace_code(name, at, 0)


def _simpler_codes(fmt: Format, code: int) -> Iterator[int]:
    """Yield simpler codes: one, no fraction, fewer bits, no sign, an exponent nearer to that of 1.0."""
    if fmt.is_integer:
        value = code - (1 << fmt.bits) if fmt.signed and code >> (fmt.bits - 1) else code
        for simpler in (1, abs(value), value // 2, value - 1 if value > 0 else value + 1):
            yield simpler & ((1 << fmt.bits) - 1)
        return
    m, u = fmt.mantissa_bits, fmt.unused_bits
    field, fraction = code >> (u + m) & ((1 << fmt.exponent_bits) - 1), code >> u & ((1 << m) - 1)
    sign = code >> (fmt.bits - 1) << (fmt.bits - 1) if fmt.signed else 0

    def build_code(f, x):
        return sign | f << (m + u) | x << u

    yield fmt.bias << (m + u)
    yield build_code(field, fraction) & ~sign
    yield build_code(field, 0)
    yield build_code(field, fraction)  # without the unused bits
    for bit in range(m):
        if fraction >> bit & 1:
            yield build_code(field, fraction & ~(1 << bit))
    toward = 1 if field < fmt.bias else -1
    for step in (abs(field - fmt.bias), 16, 4, 1):
        if 0 < step <= abs(field - fmt.bias):
            yield build_code(field + toward * step, fraction)


# ---- conversion between single dot products and cases


def _to_device(operands: HostOperandCodes) -> OperandCodes:
    return {name: jnp.asarray(codes) for name, codes in operands.items()}


def _extract_dot(op: MatrixMultiply, operands: HostOperandCodes, i: int, j: int) -> DotOperands:
    spec = product_spec(op)
    arrays = {
        "a": codes_to_integers(spec.a, operands["a"])[0, i],
        "b": codes_to_integers(spec.b, operands["b"])[0, :, j],
        "c": codes_to_integers(spec.c, operands["c"])[0, i, j : j + 1],
    }
    if op.sparse:
        arrays["e"] = operands["e"][0, i]
    if op.scaling is not None:
        arrays |= {"scale_a": operands["scale_a"][0, i], "scale_b": operands["scale_b"][0, :, j]}
    return {name: [int(x) for x in codes] for name, codes in arrays.items()}
