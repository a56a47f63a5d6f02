"""What the cases of a run reached: counted on one element of D in one of sixteen cases, in the first step that its model takes.

What is counted was surely reached, and what is not, perhaps only elsewhere.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu import bits
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.order import Order
from tcemu.formats import Format, Number, convert, cuts, decode
from tcemu.fuzz.counter import Pair, mix
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import gather

FAR = 64  # distances from here on are one
LEAST_CARRY, MOST_CARRY = -32, 8
EVENTS = (
    "an operand NaN", "Inf x 0", "+Inf and -Inf", "one infinity", "D zero", "D subnormal", "D normal",
    "D infinite of finite terms", "D NaN",
    "all products zero", "C zero", "the sum cancels to 0", "nothing cut", "something cut",
    "rounding exact", "rounding below half", "rounding a tie", "rounding above half", "D negative", "s32 passed",
)  # fmt: skip


class Coverage(NamedTuple):
    """Counts of a run."""

    products: np.ndarray  # [FAR + 1]: distances of products to the largest exponent of their step
    accumulator: np.ndarray  # [FAR + 1]: those of C
    carries: np.ndarray  # [MOST_CARRY - LEAST_CARRY + 1]: the place of the sum's leading bit above (below) the largest exponent
    events: np.ndarray  # [len(EVENTS)]
    cases: np.ndarray  # [1]: those that were looked at

    @classmethod
    def none(cls) -> "Coverage":
        return cls(*(np.zeros(n, np.int64) for n in (FAR + 1, FAR + 1, MOST_CARRY - LEAST_CARRY + 1, len(EVENTS), 1)))

    def __add__(self, other: "Coverage") -> "Coverage":  # type: ignore[override]
        return Coverage(*(np.asarray(x, np.int64) + np.asarray(y, np.int64) for x, y in zip(self, other, strict=True)))


def _histogram(values: Array, present: Array, size: int) -> Array:
    """int32 [size]: how often each value from 0 to size - 1 stands among those present."""
    values, present = lax.optimization_barrier((values, present))  # else they are made again for each place
    hits = (values.reshape(-1, 1) == jnp.arange(size)) & present.reshape(-1, 1)
    return jnp.sum(hits, axis=0, dtype=jnp.int32)


def count(op: Instruction, model: Model, operands: dict[str, Array], d: Array, number: Pair, valid: Array) -> tuple[Array, ...]:
    """The fields of Coverage, int32, of the valid ones (bool [cases]) of some cases; d: their results."""
    signature = signature_of(op)
    at = jnp.arange(len(valid))
    place = mix(number[0])  # the numbers of those looked at have a common divisor, also with the rows
    i, j = (place % np.uint32(op.m)).astype(jnp.int32), (place // np.uint32(op.m) % np.uint32(op.n)).astype(jnp.int32)
    a, b, c, d = operands["a"][at, i], operands["b"][at, :, j], operands["c"][at, i, j], d[at, i, j]
    if op.sparse:
        b = gather(b[:, :, None], operands["e"][at, i][:, None, :], op.chunk)[:, 0, :, 0]
    exact = model.fraction_bits is None
    formats = [signature.a, signature.b]
    if model.multiplicand is not None:
        a, b = (convert(codes, fmt, model.multiplicand) for codes, fmt in ((a, signature.a), (b, signature.b)))
        formats = [model.multiplicand] * 2
    x, y, z, result = decode(formats[0], a), decode(formats[1], b), decode(signature.c, c), decode(signature.d, d)
    zeros = [_zero(n) for n in (x, y, z, result)]
    events = {
        "an operand NaN": (x.nan | y.nan).any(-1) | z.nan,
        "D zero": zeros[3] & ~result.nan & ~result.infinite, "D NaN": result.nan, "D negative": result.negative,
        "C zero": zeros[2], "all products zero": (zeros[0] | zeros[1]).all(-1),
    }  # fmt: skip
    no_distance, no_carry = jnp.zeros(FAR + 1, jnp.int32), jnp.zeros(MOST_CARRY - LEAST_CARRY + 1, jnp.int32)
    if signature.a.is_integer:
        total, wide = _integer_total(x, y, z)
        events |= {"D normal": ~events["D zero"], "the sum cancels to 0": (total == 0) & ~events["all products zero"], "s32 passed": wide}
        return no_distance, no_distance, no_carry, *_events(events, valid)

    undefined = ((x.infinite & zeros[1]) | (y.infinite & zeros[0])) & ~x.nan & ~y.nan
    infinite = (x.infinite | y.infinite) & ~undefined & ~x.nan & ~y.nan
    sign = x.negative != y.negative
    plus, minus = (infinite & ~sign).any(-1) | (z.infinite & ~z.negative), (infinite & sign).any(-1) | (z.infinite & z.negative)
    special = events["an operand NaN"] | undefined.any(-1) | plus | minus
    hidden = _magnitude_below(result, 1 << signature.d.mantissa_bits)
    events |= {
        "Inf x 0": undefined.any(-1), "+Inf and -Inf": plus & minus & ~events["an operand NaN"], 
        "one infinity": (plus != minus) & result.infinite,
        "D subnormal": hidden & ~zeros[3] & ~result.nan & ~result.infinite, "D normal": ~hidden & ~result.nan & ~result.infinite,
        "D infinite of finite terms": result.infinite & ~special,
    }  # fmt: skip

    exponent = x.exponent + y.exponent + formats[0].mantissa_bits + formats[1].mantissa_bits
    if op.block_scale and op.stype is not None:
        scales = [decode(op.stype, v) for v in (operands["scale_a"][at, i], operands["scale_b"][at, :, j])]
        events["an operand NaN"] |= scales[0].nan.any(-1) | scales[1].nan.any(-1)
        special = special | events["an operand NaN"]
        both = scales[0].exponent + scales[1].exponent + 2 * op.stype.mantissa_bits
        each = jnp.repeat(both, exponent.shape[-1] // both.shape[-1], axis=-1)
        exponent = each if model.summed is not None else exponent + each
    first = _first_step(model, signature.k)
    present = (~zeros[0] & ~zeros[1])[:, first]
    exponent, least = exponent[:, first], jnp.int32(-(1 << 20))
    with_c = model.chain is None
    c_exponent = jnp.where(zeros[2] | (not with_c), least, z.exponent + signature.c.mantissa_bits)
    floor = least if exact else jnp.int32(model.floor)
    greatest = jnp.maximum(jnp.maximum(jnp.where(present, exponent, least).max(-1), c_exponent), floor)
    plain = valid & ~special & (greatest > least)
    distances = _histogram(jnp.minimum(greatest[:, None] - exponent, FAR), present & plain[:, None], FAR + 1)
    c_distance = no_distance
    if with_c:
        c_distance = _histogram(jnp.minimum(greatest - c_exponent, FAR), plain & (c_exponent > least), FAR + 1)
    if not _sums_are_looked_at(model, signature.a):
        return distances, c_distance, no_carry, *_events(events, valid)

    # the step's sum, as the model cuts its terms
    kept = int(model.fraction_bits)  # type: ignore[arg-type]
    product = bits.multiply((x.magnitude[0][:, first],), (y.magnitude[0][:, first],))
    product = tuple(jnp.where(present, limb, 0) for limb in product)
    below = formats[0].mantissa_bits + formats[1].mantissa_bits
    terms, cut = _aligned(product, kept - below - (greatest[:, None] - exponent))
    mine, c_cut = _aligned(
        (jnp.where(zeros[2], 0, z.magnitude[0]), jnp.zeros_like(z.magnitude[0])), kept - signature.c.mantissa_bits - (greatest - c_exponent)
    )
    if with_c:
        negative, total = z.negative, mine
        something = cut.any(-1) | c_cut
    else:
        negative, total, something = jnp.zeros_like(z.negative), bits.zeros_like(mine), cut.any(-1)
    for t in range(len(first)):
        negative, total = bits.add_signed(negative, total, sign[:, first[t]], tuple(limb[:, t] for limb in terms))
    zero = bits.is_zero(total)
    lead = 63 - bits.leading_zeros(total)
    carries = _histogram(jnp.clip(lead - kept, LEAST_CARRY, MOST_CARRY) - LEAST_CARRY, plain & ~zero, MOST_CARRY - LEAST_CARRY + 1)
    room = model.result.mantissa_bits if model.result_bits is None else int(model.result_bits)
    unit = jnp.maximum(lead - room, model.result.least_exponent - room - (greatest - kept))  # the place of the result's last bit
    rest = bits.shift_left(total, jnp.clip(64 - unit, 0, 64))
    rest = tuple(jnp.where(unit <= 0, 0, limb) for limb in rest)
    rest = bits.select(unit > 64, (jnp.uint32(1), jnp.uint32(0)), rest)
    half = (jnp.zeros_like(rest[0]), jnp.full_like(rest[0], 1 << 31))
    exactly, tie = bits.is_zero(rest), (rest[0] == half[0]) & (rest[1] == half[1])
    under = bits.less(rest, half) & ~exactly
    fine = ~special & ~zero
    events |= {
        "the sum cancels to 0": zero & ~special & present.any(-1), 
        "nothing cut": ~something & ~special, "something cut": something & ~special,
        "rounding exact": exactly & fine, "rounding below half": under & fine, "rounding a tie": tie & fine,
        "rounding above half": ~exactly & ~under & ~tie & fine,
    }  # fmt: skip
    return distances, c_distance, carries, *_events(events, valid)


def _zero(n: Number) -> Array:
    return bits.is_zero(n.magnitude) & ~n.nan & ~n.infinite


def _magnitude_below(n: Number, hidden: int) -> Array:
    """Whether the significand has no leading one: zero or subnormal."""
    word, within = (1, hidden >> 32) if hidden >> 32 else (0, hidden)
    return n.magnitude[word] < within


def _first_step(model: Model, k: int) -> np.ndarray:
    """Which products the first step of an instruction adds."""
    return np.array(Order.of(model.replace(terms=int(model.terms)), k).steps(k)[0])


def _aligned(magnitude: tuple[Array, ...], up: Array) -> tuple[tuple[Array, ...], Array]:
    """Two limbs shifted left by `up` places (down if negative), and whether bits fell off."""
    left, right = jnp.clip(up, 0, 63), jnp.clip(-up, 0, 64)
    shifted = bits.shift_right(bits.shift_left(magnitude, left), right)
    back = bits.shift_left(shifted, right)
    lost = ~bits.is_zero(tuple(x ^ y for x, y in zip(back, bits.shift_left(magnitude, left), strict=True)))
    return shifted, lost


def _integer_total(x: Number, y: Number, z: Number) -> tuple[Array, Array]:
    """The sum modulo 2^32, and whether it is beyond s32."""
    product = (x.magnitude[0] * y.magnitude[0]).astype(jnp.int32)
    part = jnp.sum(jnp.where(x.negative != y.negative, -product, product), axis=-1)
    c = jnp.where(z.negative, -z.magnitude[0], z.magnitude[0]).astype(jnp.int32)
    total = c + part
    return total, ((c ^ total) & (part ^ total)) < 0


def _events(found: dict[str, Array], valid: Array) -> tuple[Array, Array]:
    """The events' counts, and that of the cases."""
    found, valid = lax.optimization_barrier((found, valid))  # else a GPU makes all that leads to them in the one block that adds them
    counts = [jnp.sum(found[name] & valid, dtype=jnp.int32) if name in found else jnp.int32(0) for name in EVENTS]
    return jnp.stack(counts), jnp.sum(valid, dtype=jnp.int32)[None]


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


def lines(op: Instruction, model: Model | None, found: Coverage) -> Iterator[str]:
    """What was reached and what was not, as text."""
    if model is None:
        yield "coverage: not counted, since neither side has a model"
        return
    wanted = expected(op, model)
    seen = {name: int(n) for name, n in zip(EVENTS, found.events, strict=True)}
    yield f"looked at for what was reached: one output in each of {int(found.cases[0]):,} cases"
    yield "reached: " + ", ".join(f"{name} {seen[name]:,}" for name in wanted if seen[name])
    missed = [name for name in wanted if not seen[name]]
    if not model.result.is_integer:
        near = 40 if model.fraction_bits is None else int(model.fraction_bits) + 3
        for name, counts in (("a product", found.products), *((("C", found.accumulator),) if model.chain is None else ())):
            reached = np.flatnonzero(counts)
            yield f"distances of {name} to the largest exponent: {_ranges(reached)}"
            holes = np.flatnonzero(counts[: near + 1] == 0)
            missed += [f"{name} at distances of {_ranges(holes)}"] if holes.size else []
        if found.carries.any():
            yield f"places of the sum's leading bit from the largest exponent: {_ranges(np.flatnonzero(found.carries) + LEAST_CARRY)}"
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
