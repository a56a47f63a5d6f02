"""Coverage of a run: the numerical events that its cases reached, as counts and as a table.

Events are counted on one element of D in one of sixteen cases, in the first step that the model takes. A counted event was certainly
reached. An event that was not counted may have been reached elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.base.results import Result, Table
from tcemu.engine.arithmetic.integer_dot import add_clamped
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order, products_per_clamp
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.formats.coding import Number, convert, decode
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.formats.rounding import truncates
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.layouts.sparsity import gather
from tcemu.uses.fuzz.case_generator import OperandCodes
from tcemu.uses.fuzz.random_words import WordPair, mix_words

MAX_DISTANCE = 64  # distances from this one on are counted together
MIN_CARRY, MAX_CARRY = -32, 8
EVENTS = (
    "an operand NaN", "Inf x 0", "+Inf and -Inf", "one infinity", "D zero", "D subnormal", "D normal",
    "D infinite of finite terms", "D NaN",
    "all products zero", "C zero", "the sum cancels to 0", "nothing cut", "something cut",
    "rounding exact", "rounding below half", "rounding a tie", "rounding above half", "D negative", "s32 passed",
    "clamped before the last step",
)  # fmt: skip


SIZES = {
    "products": MAX_DISTANCE + 1, "accumulator": MAX_DISTANCE + 1, "carries": MAX_CARRY - MIN_CARRY + 1, "events": len(EVENTS), "cases": 1,
}  # fmt: skip


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Coverage(Result):
    """Counts of what the cases of a run reached, by the sizes in SIZES.

    The fields are NumPy arrays; for one iteration of the compiled loop they are JAX arrays.
    """

    products: np.ndarray | Array  # distances of products to the max exponent of their step
    accumulator: np.ndarray | Array  # distances of C
    carries: np.ndarray | Array  # position of the sum's leading bit relative to the max exponent
    events: np.ndarray | Array
    cases: np.ndarray | Array  # cases that were examined

    @classmethod
    def empty(cls) -> Coverage:
        """Make counts of zero.

        Returns:
            The counts.
        """
        return cls(**{name: np.zeros(size, np.int64) for name, size in SIZES.items()})

    def table(self) -> Table:
        """Make a table with a row per event, and per distance or position that occurred.

        Returns:
            The table. Its column "counted" is "events", "products", "accumulator" or "carries".
        """
        rows = [("events", name, int(n)) for name, n in zip(EVENTS, self.events, strict=True)]
        for name, start in (("products", 0), ("accumulator", 0), ("carries", MIN_CARRY)):
            rows += [(name, place, int(count)) for place, count in enumerate(getattr(self, name), start) if count]
        return Table(f"Coverage of {int(self.cases[0]):,} cases", ("counted", "at", "count"), tuple(rows), {"cases": int(self.cases[0])})

    def __repr__(self) -> str:
        return f"<Coverage of {int(self.cases[0]):,} cases>"

    def __add__(self, other: Coverage) -> Coverage:
        return jax.tree.map(lambda x, y: np.asarray(x, np.int64) + np.asarray(y, np.int64), self, other)


NO_EXPONENT = -(1 << 20)  # exponent of an absent term
Events = dict[str, Array]  # bool [cases] by the names of EVENTS


# ---- counting


class DecodedElement(NamedTuple):
    """One element of D in each case, decoded, with its row of A, its column of B, its C and its scales."""

    a: Number  # [cases, K], converted as the model prescribes
    b: Number
    c: Number  # [cases]
    d: Number
    a_format: Format  # format of `a` after the conversion
    b_format: Format
    scale_exponents: Array | None  # int32 [cases, K]: sum of the exponents of a product's two scales
    scale_is_nan: Array | None  # bool [cases]: some scale is NaN


class SpecialTerms(NamedTuple):
    """NaNs and infinities among the operands of an element. Every array is bool [cases]."""

    nan: Array  # A, B or C has a NaN
    undefined: Array  # Inf x 0
    plus: Array  # an infinite term, positive
    minus: Array  # an infinite term, negative
    present: Array  # any of these, or a NaN scale


class FirstStep(NamedTuple):
    """The terms of an element's first step."""

    products: np.ndarray  # indices along K
    negative: Array  # bool [cases, terms]
    present: Array  # bool [cases, terms]: the term is not zero
    exponent: Array  # int32 [cases, terms]: exponent by which the term is aligned
    c_exponent: Array  # int32 [cases]; NO_EXPONENT if C is zero or is added after a chain
    max_exponent: Array  # int32 [cases]: exponent to which all terms are aligned


def count_coverage(op: MatrixMultiply, model: Model, operands: OperandCodes, d: Array, number: WordPair, valid: Array) -> Coverage:
    """Count the events of some cases.

    Args:
        op: The instruction.
        model: Model whose first step is examined.
        operands: Operands of the cases.
        d: Results of the cases.
        number: Numbers of the cases.
        valid: bool [cases]: cases that count.

    Returns:
        int32 counts.
    """
    spec = product_spec(op)
    element = _decode_element(op, model, operands, d, number)
    events = _zero_and_sign_events(element)
    if spec.a.is_integer:
        return _sum_events(events | _integer_events(model, spec, element, events), valid)
    specials = _find_specials(element)
    events |= _special_events(element, specials) | _result_events(spec, element, specials)
    step = _first_step(op, model, spec, element)
    counted = valid & ~specials.present & (step.max_exponent > NO_EXPONENT)
    distances = jnp.minimum(step.max_exponent[:, None] - step.exponent, MAX_DISTANCE)
    of_products = _histogram(distances, step.present & counted[:, None], MAX_DISTANCE + 1)
    of_c = None
    if model.chain is None:
        of_c = _histogram(
            jnp.minimum(step.max_exponent - step.c_exponent, MAX_DISTANCE), counted & (step.c_exponent > NO_EXPONENT), MAX_DISTANCE + 1
        )
    if not _counts_sums(model, spec.a):
        return _sum_events(events, valid, of_products, of_c)
    total, truncated = _first_sum(model, spec, element, step)
    leading = 63 - bits.leading_zeros(total)  # in units of the last bit that alignment retains
    positions = jnp.clip(leading - _fraction_bits(model), MIN_CARRY, MAX_CARRY) - MIN_CARRY
    carries = _histogram(positions, counted & ~bits.is_zero(total), MAX_CARRY - MIN_CARRY + 1)
    finite = ~specials.present
    events |= {
        "the sum cancels to 0": bits.is_zero(total) & finite & step.present.any(-1),
        "nothing cut": ~truncated & finite,
        "something cut": truncated & finite,
    }
    roundings = _rounding_events(model, total, leading, step.max_exponent)
    events |= {name: happened & finite & ~bits.is_zero(total) for name, happened in roundings.items()}
    return _sum_events(events, valid, of_products, of_c, carries)


def _sum_events(
    events: Events, valid: Array, products: Array | None = None, accumulator: Array | None = None, carries: Array | None = None
) -> Coverage:
    """Sum the events, with zeros for counts that were not made."""
    # without the barrier a GPU computes everything that leads to the events in the one block that adds them
    events, valid = lax.optimization_barrier((events, valid))
    counts = [jnp.sum(events[name] & valid, dtype=jnp.int32) if name in events else jnp.int32(0) for name in EVENTS]

    given = {"products": products, "accumulator": accumulator, "carries": carries, "events": jnp.stack(counts)}
    given["cases"] = jnp.sum(valid, dtype=jnp.int32)[None]
    return Coverage(**{name: jnp.zeros(SIZES[name], jnp.int32) if x is None else x for name, x in given.items()})


def _histogram(values: Array, present: Array, size: int) -> Array:
    """Count each value from 0 to size - 1 among those present, int32 [size]."""
    values, present = lax.optimization_barrier((values, present))  # otherwise they are recomputed for each bin
    hits = (values.reshape(-1, 1) == jnp.arange(size)) & present.reshape(-1, 1)
    return jnp.sum(hits, axis=0, dtype=jnp.int32)


# ---- the examined element


def _decode_element(op: MatrixMultiply, model: Model, operands: OperandCodes, d: Array, number: WordPair) -> DecodedElement:
    spec = product_spec(op)
    case = jnp.arange(len(d))
    random_word = mix_words(number[0])  # mixed, since the numbers of examined cases share a divisor, also with the rows
    i = (random_word % np.uint32(op.m)).astype(jnp.int32)
    j = (random_word // np.uint32(op.m) % np.uint32(op.n)).astype(jnp.int32)
    a, b = operands["a"][case, i], operands["b"][case, :, j]
    if op.sparse:
        b = gather(b[:, :, None], operands["e"][case, i][:, None, :], op.chunk_size)[:, 0, :, 0]
    a_format, b_format = spec.a, spec.b
    if model.multiplicand is not None:
        a, b = convert(a_format, model.multiplicand, a), convert(b_format, model.multiplicand, b)
        a_format = b_format = model.multiplicand
    scale_exponents = scale_is_nan = None
    if op.scaling is not None:
        of_a, of_b = decode(op.scaling.format, operands["scale_a"][case, i]), decode(op.scaling.format, operands["scale_b"][case, :, j])
        both = of_a.exponent + of_b.exponent + 2 * op.scaling.format.mantissa_bits
        scale_exponents = jnp.repeat(both, a.shape[-1] // both.shape[-1], axis=-1)
        scale_is_nan = of_a.nan.any(-1) | of_b.nan.any(-1)
    return DecodedElement(
        a=decode(a_format, a),
        b=decode(b_format, b),
        c=decode(spec.c, operands["c"][case, i, j]),
        d=decode(spec.d, d[case, i, j]),
        a_format=a_format,
        b_format=b_format,
        scale_exponents=scale_exponents,
        scale_is_nan=scale_is_nan,
    )


def _is_zero(n: Number) -> Array:
    return bits.is_zero(n.magnitude) & ~n.nan & ~n.infinite


def _find_specials(element: DecodedElement) -> SpecialTerms:
    a, b, c = element.a, element.b, element.c
    number = ~a.nan & ~b.nan
    undefined = ((a.infinite & _is_zero(b)) | (b.infinite & _is_zero(a))) & number
    infinite = (a.infinite | b.infinite) & ~undefined & number
    negative = a.negative != b.negative
    nan = (a.nan | b.nan).any(-1) | c.nan
    plus = (infinite & ~negative).any(-1) | (c.infinite & ~c.negative)
    minus = (infinite & negative).any(-1) | (c.infinite & c.negative)
    present = nan | undefined.any(-1) | plus | minus
    if element.scale_is_nan is not None:
        present = present | element.scale_is_nan
    return SpecialTerms(nan=nan, undefined=undefined.any(-1), plus=plus, minus=minus, present=present)


def _zero_and_sign_events(element: DecodedElement) -> Events:
    a, b, c, d = element.a, element.b, element.c, element.d
    return {
        "D zero": _is_zero(d),
        "D NaN": d.nan,
        "D negative": d.negative,
        "C zero": _is_zero(c),
        "all products zero": (_is_zero(a) | _is_zero(b)).all(-1),
    }


def _special_events(element: DecodedElement, specials: SpecialTerms) -> Events:
    some_nan = specials.nan if element.scale_is_nan is None else specials.nan | element.scale_is_nan
    return {
        "an operand NaN": some_nan,
        "Inf x 0": specials.undefined,
        "+Inf and -Inf": specials.plus & specials.minus & ~specials.nan,
        "one infinity": (specials.plus != specials.minus) & element.d.infinite,
    }


def _result_events(spec: ProductSpec, element: DecodedElement, specials: SpecialTerms) -> Events:
    d = element.d
    finite = ~d.nan & ~d.infinite
    small = _is_below_normal(d, 1 << spec.d.mantissa_bits)
    return {
        "D subnormal": small & ~_is_zero(d) & finite,
        "D normal": ~small & finite,
        "D infinite of finite terms": d.infinite & ~specials.present,
    }


def _is_below_normal(n: Number, hidden: int) -> Array:
    """Return whether the significand has no leading one: the number is zero or subnormal."""
    word, within = (1, hidden >> 32) if hidden >> 32 else (0, hidden)
    return n.magnitude[word] < within


def _integer_events(model: Model, spec: ProductSpec, element: DecodedElement, events: Events) -> Events:
    """Find the events of integers, whose sum is taken modulo 2^32."""
    a, b, c = element.a, element.b, element.c
    magnitude = (a.magnitude[0] * b.magnitude[0]).astype(jnp.int32)
    product = jnp.where(a.negative != b.negative, -magnitude, magnitude)
    start = jnp.where(c.negative, -c.magnitude[0], c.magnitude[0]).astype(jnp.int32)
    total = start + jnp.sum(product, axis=-1)
    found = {
        "D normal": ~events["D zero"],
        "the sum cancels to 0": (total == 0) & ~events["all products zero"],
        "s32 passed": _passes_s32(start, total - start),
    }
    if spec.clamp:
        step, running, passed = products_per_clamp(model, spec.k), start, jnp.zeros(start.shape, bool)
        for first in range(0, spec.k - step, step):
            part = jnp.sum(product[..., first : first + step], axis=-1)
            passed, running = passed | _passes_s32(running, part), add_clamped(running, part)
        found["clamped before the last step"] = passed
    return found


def _passes_s32(x: Array, y: Array) -> Array:
    """Return whether x + y is beyond s32."""
    return ((x ^ (x + y)) & (y ^ (x + y))) < 0


# ---- the first step


def _first_step(op: Instruction, model: Model, spec: ProductSpec, element: DecodedElement) -> FirstStep:
    a, b, c = element.a, element.b, element.c
    exponent = a.exponent + b.exponent + element.a_format.mantissa_bits + element.b_format.mantissa_bits
    if element.scale_exponents is not None:
        # products that are summed before scaling are aligned by their scales alone
        exponent = element.scale_exponents if model.summed is not None else exponent + element.scale_exponents
    order = Order.from_model(model.replace(terms=int(model.terms)), spec.k)
    first = np.array(order.steps(spec.k)[0])
    present, exponent = (~_is_zero(a) & ~_is_zero(b))[:, first], exponent[:, first]
    nowhere = jnp.int32(NO_EXPONENT)
    with_c = model.chain is None
    c_exponent = jnp.where(_is_zero(c) | (not with_c), nowhere, c.exponent + spec.c.mantissa_bits)
    floor = nowhere if model.fraction_bits is None else jnp.int32(model.floor)
    max_exponent = jnp.maximum(jnp.maximum(jnp.where(present, exponent, nowhere).max(-1), c_exponent), floor)
    return FirstStep(
        products=first, negative=(a.negative != b.negative)[:, first], present=present, exponent=exponent, c_exponent=c_exponent,
        max_exponent=max_exponent,
    )  # fmt: skip


def _fraction_bits(model: Model) -> int:
    """Return the fraction bits that a truncating model retains."""
    return int(model.fraction_bits)  # type: ignore[arg-type]


def _first_sum(model: Model, spec: ProductSpec, element: DecodedElement, step: FirstStep) -> tuple[Limbs, Array]:
    """Compute the magnitude of the step's sum in units of the last retained bit, and whether something was truncated."""
    retained, first = _fraction_bits(model), step.products
    product = bits.multiply((element.a.magnitude[0][:, first],), (element.b.magnitude[0][:, first],))
    product = tuple(jnp.where(step.present, limb, 0) for limb in product)
    below = element.a_format.mantissa_bits + element.b_format.mantissa_bits
    terms, lost = _align(product, retained - below - (step.max_exponent[:, None] - step.exponent))
    c = jnp.where(_is_zero(element.c), 0, element.c.magnitude[0])
    c_term, c_lost = _align((c, jnp.zeros_like(c)), retained - spec.c.mantissa_bits - (step.max_exponent - step.c_exponent))
    total, truncated = bits.sum_along(_negate_where(step.negative, terms), -1), lost.any(-1)
    if model.chain is None:
        total, truncated = bits.add(total, _negate_where(element.c.negative, c_term)), truncated | c_lost
    # without the barrier XLA computes the sum again for each event
    return lax.optimization_barrier((_negate_where(total[-1] >> 31 == 1, total), truncated))


def _negate_where(condition: Array, x: Limbs) -> Limbs:
    return bits.select(condition, bits.negate(x), x)


def _align(magnitude: Limbs, up: Array) -> tuple[Limbs, Array]:
    """Shift two limbs left by `up` bits (right if negative), and return whether bits were lost."""
    left, right = jnp.clip(up, 0, 63), jnp.clip(-up, 0, 64)
    shifted_left = bits.shift_left(magnitude, left)
    shifted = bits.shift_right(shifted_left, right)
    back = bits.shift_left(shifted, right)
    lost = ~bits.is_zero(tuple(x ^ y for x, y in zip(back, shifted_left, strict=True)))
    return shifted, lost


def _rounding_events(model: Model, total: Limbs, leading: Array, max_exponent: Array) -> Events:
    """Classify the remainder of a sum between two values of the result. `leading` is the position of the sum's leading bit."""
    room = model.result.mantissa_bits if model.result_bits is None else int(model.result_bits)
    smallest = model.result.min_exponent - room - (max_exponent - _fraction_bits(model))
    last = jnp.maximum(leading - room, smallest)  # position of the result's last bit
    # the remainder as a fraction of that bit: 2^64 stands for the whole bit
    remainder = bits.shift_left(total, jnp.clip(64 - last, 0, 64))
    remainder = tuple(jnp.where(last <= 0, 0, limb) for limb in remainder)
    remainder = bits.select(last > 64, (jnp.uint32(1), jnp.uint32(0)), remainder)
    half = (jnp.zeros_like(remainder[0]), jnp.full_like(remainder[0], 1 << 31))
    exact, tie = bits.is_zero(remainder), (remainder[0] == half[0]) & (remainder[1] == half[1])
    below = bits.less(remainder, half) & ~exact
    return {
        "rounding exact": exact,
        "rounding below half": below,
        "rounding a tie": tie,
        "rounding above half": ~exact & ~below & ~tie,
    }


# ---- the report


def reachable_events(op: MatrixMultiply, model: Model) -> tuple[str, ...]:
    """Return the events that this instruction can reach, by its formats and its model."""
    spec = product_spec(op)
    if spec.a.is_integer:
        events = ("D zero", "D normal", "D negative", "C zero", "all products zero", "the sum cancels to 0", "s32 passed")
        by_steps = spec.clamp and products_per_clamp(model, spec.k) < spec.k
        return (*events, "clamped before the last step") if by_steps else events
    impossible = {"s32 passed", "clamped before the last step"}
    by_format = {"Inf x 0": spec.a.specials == "ieee" or spec.b.specials == "ieee"}
    # the largest possible sum of products does not reach the last bit of D's largest number
    top = spec.a.max_exponent + spec.b.max_exponent + 2 + spec.k.bit_length()
    by_format["D infinite of finite terms"] = op.scaling is not None or top >= spec.d.max_exponent - spec.d.mantissa_bits - 1
    impossible |= {name for name, possible in by_format.items() if not possible}
    if not _counts_sums(model, spec.a):
        impossible |= {name for name in EVENTS if name.startswith(("rounding", "something", "nothing", "the sum"))}
    elif _products_fit(model, spec.a, spec.b):
        impossible.add("something cut")
    return tuple(name for name in EVENTS if name not in impossible)


def _counts_sums(model: Model, a: Format) -> bool:
    """Return whether steps truncate each product by itself, so that their sums can be counted."""
    return model.fraction_bits is not None and model.summed is None and a.words == 1 and truncates(model.alignment)


def _products_fit(model: Model, a: Format, b: Format) -> bool:
    """Return whether products of such formats are never truncated, even beside the largest."""
    spread = a.max_exponent - a.min_exponent + b.max_exponent - b.min_exponent
    return model.chain is not None and spread + a.mantissa_bits + b.mantissa_bits <= int(model.fraction_bits or 0)


def coverage_lines(op: MatrixMultiply, model: Model | None, coverage: Coverage) -> Iterator[str]:
    """Yield the report of what was reached and what was not."""
    if model is None:
        yield "coverage: not counted, since neither implementation has a model"
        return
    expected = reachable_events(op, model)
    counts_by_event = {name: int(n) for name, n in zip(EVENTS, coverage.events, strict=True)}
    yield f"examined for coverage: one output in each of {int(coverage.cases[0]):,} cases"
    yield "reached: " + ", ".join(f"{name} {counts_by_event[name]:,}" for name in expected if counts_by_event[name])
    missed = [name for name in expected if not counts_by_event[name]]
    if not model.result.is_integer:
        near = 40 if model.fraction_bits is None else int(model.fraction_bits) + 3
        for name, counts in (("a product", coverage.products), *((("C", coverage.accumulator),) if model.chain is None else ())):
            reached = np.flatnonzero(counts)
            yield f"distances of {name} to the max exponent: {_ranges(reached)}"
            gaps = np.flatnonzero(counts[: near + 1] == 0)
            missed += [f"{name} at distances of {_ranges(gaps)}"] if gaps.size else []
        if coverage.carries.any():
            yield f"positions of the sum's leading bit from the max exponent: {_ranges(np.flatnonzero(coverage.carries) + MIN_CARRY)}"
    yield "not reached: " + (", ".join(missed) if missed else "nothing; every event was reached")


def _ranges(values: np.ndarray) -> str:
    """Format ascending numbers as ranges: 1 2 3 7 becomes "1 to 3, 7"."""
    parts: list[list[int]] = []
    for v in values.tolist():
        if parts and v == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], v]
        else:
            parts.append([v])
    return ", ".join(" to ".join(map(str, part)) for part in parts) or "none"
