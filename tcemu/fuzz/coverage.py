"""What the cases of a run reached: counted on one element of D in one of sixteen cases, in the first step that its model takes.

What is counted was surely reached. What is not counted was perhaps reached elsewhere.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu import bits
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.order import Order
from tcemu.bits import Limbs
from tcemu.formats import Format, Number, convert, cuts, decode
from tcemu.fuzz.counter import Pair, mix
from tcemu.fuzz.counts import EVENTS, FAR, LEAST_CARRY, MOST_CARRY, Coverage
from tcemu.fuzz.operands import Operands
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import gather

NOWHERE = -(1 << 20)  # the exponent of a term that takes no part
Events = dict[str, Array]  # by their names in EVENTS: bool [cases]


# ---- what is counted


class Element(NamedTuple):
    """One element of D in each case, decoded, with its row of A, its column of B, its C and its scales."""

    a: Number  # [cases, K], converted as the model says
    b: Number
    c: Number  # [cases]
    d: Number
    a_format: Format  # of `a`, after the conversion
    b_format: Format
    scale_exponents: Array | None  # int32 [cases, K]: the sum of those of a product's two scales
    scale_is_nan: Array | None  # bool [cases]: some scale is


class Specials(NamedTuple):
    """What NaNs and infinities among the operands of an element do. bool [cases] each."""

    nan: Array  # a NaN in A, B or C
    undefined: Array  # Inf x 0
    plus: Array  # an infinite term, positive
    minus: Array  # an infinite term, negative
    present: Array  # any of these, or a NaN scale


class Step(NamedTuple):
    """The terms of an element's first step."""

    products: np.ndarray  # their numbers along K
    negative: Array  # bool [cases, terms]
    present: Array  # bool [cases, terms]: it is not zero
    exponent: Array  # int32 [cases, terms]: by which it is aligned
    c_exponent: Array  # int32 [cases]; NOWHERE if C is zero, or is added after a chain
    greatest: Array  # int32 [cases]: the one that all are aligned to


def count(op: Instruction, model: Model, operands: Operands, d: Array, number: Pair, valid: Array) -> Coverage:
    """Counts, int32, of the valid ones (bool [cases]) of some cases; d: their results."""
    signature = signature_of(op)
    element = _element(op, model, operands, d, number)
    events = _events_of_zeros_and_signs(element)
    if signature.a.is_integer:
        return _counted(events | _integer_events(element, events), valid)
    specials = _specials(element)
    events |= _special_events(element, specials) | _result_events(signature, element, specials)
    step = _first_step(op, model, signature, element)
    plain = valid & ~specials.present & (step.greatest > NOWHERE)
    distances = jnp.minimum(step.greatest[:, None] - step.exponent, FAR)
    of_products = _histogram(distances, step.present & plain[:, None], FAR + 1)
    of_c = None
    if model.chain is None:
        of_c = _histogram(jnp.minimum(step.greatest - step.c_exponent, FAR), plain & (step.c_exponent > NOWHERE), FAR + 1)
    if not _sums_are_looked_at(model, signature.a):
        return _counted(events, valid, of_products, of_c)
    total, something_cut = _first_sum(model, signature, element, step)
    leading = 63 - bits.leading_zeros(total)  # in units of the last bit that alignment keeps
    places = jnp.clip(leading - _kept_bits(model), LEAST_CARRY, MOST_CARRY) - LEAST_CARRY
    carries = _histogram(places, plain & ~bits.is_zero(total), MOST_CARRY - LEAST_CARRY + 1)
    finite = ~specials.present
    events |= {
        "the sum cancels to 0": bits.is_zero(total) & finite & step.present.any(-1),
        "nothing cut": ~something_cut & finite,
        "something cut": something_cut & finite,
    }
    roundings = _rounding_events(model, total, leading, step.greatest)
    events |= {name: happened & finite & ~bits.is_zero(total) for name, happened in roundings.items()}
    return _counted(events, valid, of_products, of_c, carries)


def _counted(
    events: Events, valid: Array, products: Array | None = None, accumulator: Array | None = None, carries: Array | None = None
) -> Coverage:
    """The counts, with zeros for what was not looked at."""
    # without the barrier a GPU makes all that leads to the events in the one block that adds them
    events, valid = lax.optimization_barrier((events, valid))
    counts = [jnp.sum(events[name] & valid, dtype=jnp.int32) if name in events else jnp.int32(0) for name in EVENTS]
    zeros = lambda size: jnp.zeros(size, jnp.int32)  # noqa: E731
    return Coverage(
        products=zeros(FAR + 1) if products is None else products,
        accumulator=zeros(FAR + 1) if accumulator is None else accumulator,
        carries=zeros(MOST_CARRY - LEAST_CARRY + 1) if carries is None else carries,
        events=jnp.stack(counts),
        cases=jnp.sum(valid, dtype=jnp.int32)[None],
    )


def _histogram(values: Array, present: Array, size: int) -> Array:
    """int32 [size]: how often each value from 0 to size - 1 stands among those present."""
    values, present = lax.optimization_barrier((values, present))  # else they are made again for each place
    hits = (values.reshape(-1, 1) == jnp.arange(size)) & present.reshape(-1, 1)
    return jnp.sum(hits, axis=0, dtype=jnp.int32)


# ---- the element that is looked at


def _element(op: Instruction, model: Model, operands: Operands, d: Array, number: Pair) -> Element:
    signature = signature_of(op)
    case = jnp.arange(len(d))
    place = mix(number[0])  # mixed, since the numbers of the cases looked at have a common divisor, also with the rows
    i = (place % np.uint32(op.m)).astype(jnp.int32)
    j = (place // np.uint32(op.m) % np.uint32(op.n)).astype(jnp.int32)
    a, b = operands["a"][case, i], operands["b"][case, :, j]
    if op.sparse:
        b = gather(b[:, :, None], operands["e"][case, i][:, None, :], op.chunk)[:, 0, :, 0]
    a_format, b_format = signature.a, signature.b
    if model.multiplicand is not None:
        a, b = convert(a_format, model.multiplicand, a), convert(b_format, model.multiplicand, b)
        a_format = b_format = model.multiplicand
    scale_exponents = scale_is_nan = None
    if op.block_scale and op.stype is not None:
        of_a, of_b = decode(op.stype, operands["scale_a"][case, i]), decode(op.stype, operands["scale_b"][case, :, j])
        both = of_a.exponent + of_b.exponent + 2 * op.stype.mantissa_bits
        scale_exponents = jnp.repeat(both, a.shape[-1] // both.shape[-1], axis=-1)
        scale_is_nan = of_a.nan.any(-1) | of_b.nan.any(-1)
    return Element(
        a=decode(a_format, a),
        b=decode(b_format, b),
        c=decode(signature.c, operands["c"][case, i, j]),
        d=decode(signature.d, d[case, i, j]),
        a_format=a_format,
        b_format=b_format,
        scale_exponents=scale_exponents,
        scale_is_nan=scale_is_nan,
    )


def _zero(n: Number) -> Array:
    return bits.is_zero(n.magnitude) & ~n.nan & ~n.infinite


def _specials(element: Element) -> Specials:
    a, b, c = element.a, element.b, element.c
    number = ~a.nan & ~b.nan
    undefined = ((a.infinite & _zero(b)) | (b.infinite & _zero(a))) & number
    infinite = (a.infinite | b.infinite) & ~undefined & number
    negative = a.negative != b.negative
    nan = (a.nan | b.nan).any(-1) | c.nan
    plus = (infinite & ~negative).any(-1) | (c.infinite & ~c.negative)
    minus = (infinite & negative).any(-1) | (c.infinite & c.negative)
    present = nan | undefined.any(-1) | plus | minus
    if element.scale_is_nan is not None:
        present = present | element.scale_is_nan
    return Specials(nan=nan, undefined=undefined.any(-1), plus=plus, minus=minus, present=present)


def _events_of_zeros_and_signs(element: Element) -> Events:
    a, b, c, d = element.a, element.b, element.c, element.d
    return {
        "D zero": _zero(d),
        "D NaN": d.nan,
        "D negative": d.negative,
        "C zero": _zero(c),
        "all products zero": (_zero(a) | _zero(b)).all(-1),
    }


def _special_events(element: Element, specials: Specials) -> Events:
    some_nan = specials.nan if element.scale_is_nan is None else specials.nan | element.scale_is_nan
    return {
        "an operand NaN": some_nan,
        "Inf x 0": specials.undefined,
        "+Inf and -Inf": specials.plus & specials.minus & ~specials.nan,
        "one infinity": (specials.plus != specials.minus) & element.d.infinite,
    }


def _result_events(signature: Signature, element: Element, specials: Specials) -> Events:
    d = element.d
    finite = ~d.nan & ~d.infinite
    small = _magnitude_below(d, 1 << signature.d.mantissa_bits)
    return {
        "D subnormal": small & ~_zero(d) & finite,
        "D normal": ~small & finite,
        "D infinite of finite terms": d.infinite & ~specials.present,
    }


def _magnitude_below(n: Number, hidden: int) -> Array:
    """Whether the significand has no leading one: zero or subnormal."""
    word, within = (1, hidden >> 32) if hidden >> 32 else (0, hidden)
    return n.magnitude[word] < within


def _integer_events(element: Element, events: Events) -> Events:
    """Of integers, whose sum is taken modulo 2^32."""
    a, b, c = element.a, element.b, element.c
    product = (a.magnitude[0] * b.magnitude[0]).astype(jnp.int32)
    products = jnp.sum(jnp.where(a.negative != b.negative, -product, product), axis=-1)
    start = jnp.where(c.negative, -c.magnitude[0], c.magnitude[0]).astype(jnp.int32)
    total = start + products
    return {
        "D normal": ~events["D zero"],
        "the sum cancels to 0": (total == 0) & ~events["all products zero"],
        "s32 passed": ((start ^ total) & (products ^ total)) < 0,
    }


# ---- its first step


def _first_step(op: Instruction, model: Model, signature: Signature, element: Element) -> Step:
    a, b, c = element.a, element.b, element.c
    exponent = a.exponent + b.exponent + element.a_format.mantissa_bits + element.b_format.mantissa_bits
    if element.scale_exponents is not None:
        # products that are summed before they are scaled are aligned by their scales alone
        exponent = element.scale_exponents if model.summed is not None else exponent + element.scale_exponents
    order = Order.of(model.replace(terms=int(model.terms)), signature.k)
    first = np.array(order.steps(signature.k)[0])
    present, exponent = (~_zero(a) & ~_zero(b))[:, first], exponent[:, first]
    nowhere = jnp.int32(NOWHERE)
    with_c = model.chain is None
    c_exponent = jnp.where(_zero(c) | (not with_c), nowhere, c.exponent + signature.c.mantissa_bits)
    floor = nowhere if model.fraction_bits is None else jnp.int32(model.floor)
    greatest = jnp.maximum(jnp.maximum(jnp.where(present, exponent, nowhere).max(-1), c_exponent), floor)
    return Step(
        products=first, negative=(a.negative != b.negative)[:, first], present=present, exponent=exponent, c_exponent=c_exponent,
        greatest=greatest,
    )  # fmt: skip


def _kept_bits(model: Model) -> int:
    """Fraction bits that a step keeps, of a model that cuts."""
    return int(model.fraction_bits)  # type: ignore[arg-type]


def _first_sum(model: Model, signature: Signature, element: Element, step: Step) -> tuple[Limbs, Array]:
    """The magnitude of the step's sum, as the model cuts its terms, in units of the last bit kept; and whether something was cut."""
    kept, first = _kept_bits(model), step.products
    product = bits.multiply((element.a.magnitude[0][:, first],), (element.b.magnitude[0][:, first],))
    product = tuple(jnp.where(step.present, limb, 0) for limb in product)
    below = element.a_format.mantissa_bits + element.b_format.mantissa_bits
    terms, cut = _aligned(product, kept - below - (step.greatest[:, None] - step.exponent))
    c = jnp.where(_zero(element.c), 0, element.c.magnitude[0])
    c_term, c_cut = _aligned((c, jnp.zeros_like(c)), kept - signature.c.mantissa_bits - (step.greatest - step.c_exponent))
    if model.chain is None:
        negative, total, something_cut = element.c.negative, c_term, cut.any(-1) | c_cut
    else:
        negative, total, something_cut = jnp.zeros_like(element.c.negative), bits.zeros_like(c_term), cut.any(-1)
    for t in range(len(first)):
        negative, total = bits.add_signed(negative, total, step.negative[:, t], tuple(limb[:, t] for limb in terms))
    return total, something_cut


def _aligned(magnitude: Limbs, up: Array) -> tuple[Limbs, Array]:
    """Two limbs shifted left by `up` places (down if negative), and whether bits fell off."""
    left, right = jnp.clip(up, 0, 63), jnp.clip(-up, 0, 64)
    whole = bits.shift_left(magnitude, left)
    shifted = bits.shift_right(whole, right)
    back = bits.shift_left(shifted, right)
    lost = ~bits.is_zero(tuple(x ^ y for x, y in zip(back, whole, strict=True)))
    return shifted, lost


def _rounding_events(model: Model, total: Limbs, leading: Array, greatest: Array) -> Events:
    """Where the rest of a sum lies between two values of the result. leading: the place of the sum's leading bit."""
    room = model.result.mantissa_bits if model.result_bits is None else int(model.result_bits)
    least = model.result.least_exponent - room - (greatest - _kept_bits(model))
    last = jnp.maximum(leading - room, least)  # the place of the result's last bit
    # the rest, as a fraction of that bit: 2^64 would be the whole bit
    rest = bits.shift_left(total, jnp.clip(64 - last, 0, 64))
    rest = tuple(jnp.where(last <= 0, 0, limb) for limb in rest)
    rest = bits.select(last > 64, (jnp.uint32(1), jnp.uint32(0)), rest)
    half = (jnp.zeros_like(rest[0]), jnp.full_like(rest[0], 1 << 31))
    exact, tie = bits.is_zero(rest), (rest[0] == half[0]) & (rest[1] == half[1])
    below = bits.less(rest, half) & ~exact
    return {
        "rounding exact": exact,
        "rounding below half": below,
        "rounding a tie": tie,
        "rounding above half": ~exact & ~below & ~tie,
    }


# ---- the account


def expected(op: Instruction, model: Model) -> tuple[str, ...]:
    """The events that can happen to this instruction, by its formats and its model."""
    signature = signature_of(op)
    if signature.a.is_integer:
        return ("D zero", "D normal", "D negative", "C zero", "all products zero", "the sum cancels to 0", "s32 passed")
    left_out = {"s32 passed"}
    by_format = {"Inf x 0": signature.a.specials == "ieee" or signature.b.specials == "ieee"}
    # the largest products that a sum may have do not reach the last bit of D's largest number
    top = signature.a.greatest_exponent + signature.b.greatest_exponent + 2 + signature.k.bit_length()
    by_format["D infinite of finite terms"] = op.block_scale or top >= signature.d.greatest_exponent - signature.d.mantissa_bits - 1
    left_out |= {name for name, possible in by_format.items() if not possible}
    if not _sums_are_looked_at(model, signature.a):
        left_out |= {name for name in EVENTS if name.startswith(("rounding", "something", "nothing", "the sum"))}
    elif _fits(model, signature.a, signature.b):
        left_out.add("something cut")
    return tuple(name for name in EVENTS if name not in left_out)


def _sums_are_looked_at(model: Model, a: Format) -> bool:
    """Steps that cut each product by itself."""
    return model.fraction_bits is not None and model.summed is None and a.words == 1 and cuts(model.alignment)


def _fits(model: Model, a: Format, b: Format) -> bool:
    """Products of such formats are never cut, even beside the largest."""
    spread = a.greatest_exponent - a.least_exponent + b.greatest_exponent - b.least_exponent
    return model.chain is not None and spread + a.mantissa_bits + b.mantissa_bits <= int(model.fraction_bits or 0)


def lines(op: Instruction, model: Model | None, coverage: Coverage) -> Iterator[str]:
    """What was reached and what was not, as text."""
    if model is None:
        yield "coverage: not counted, since neither side has a model"
        return
    wanted = expected(op, model)
    seen = {name: int(n) for name, n in zip(EVENTS, coverage.events, strict=True)}
    yield f"looked at for what was reached: one output in each of {int(coverage.cases[0]):,} cases"
    yield "reached: " + ", ".join(f"{name} {seen[name]:,}" for name in wanted if seen[name])
    missed = [name for name in wanted if not seen[name]]
    if not model.result.is_integer:
        near = 40 if model.fraction_bits is None else int(model.fraction_bits) + 3
        for name, counts in (("a product", coverage.products), *((("C", coverage.accumulator),) if model.chain is None else ())):
            reached = np.flatnonzero(counts)
            yield f"distances of {name} to the largest exponent: {_ranges(reached)}"
            holes = np.flatnonzero(counts[: near + 1] == 0)
            missed += [f"{name} at distances of {_ranges(holes)}"] if holes.size else []
        if coverage.carries.any():
            yield f"places of the sum's leading bit from the largest exponent: {_ranges(np.flatnonzero(coverage.carries) + LEAST_CARRY)}"
    yield "not reached: " + (", ".join(missed) if missed else "nothing of what is looked for")


def _ranges(values: np.ndarray) -> str:
    """1 2 3 7 -> "1 to 3, 7"."""
    parts: list[list[int]] = []
    for v in values.tolist():
        if parts and v == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], v]
        else:
            parts.append([v])
    return ", ".join(" to ".join(map(str, part)) for part in parts) or "none"
