"""Operands of any computing instruction from a seed and a number, made on the device, as matrices of raw codes.

Every element is a function of the case's key and its own place, so that no two of them need an order. Terms relate to each other through
the key alone: which k is large, how far below it the others lie, which k is whose twin, is drawn once a case, for A's columns and B's rows
alike.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.architectures.lookup import must_compute
from tcemu.formats import Format
from tcemu.fuzz.bit_fields import (
    CaseBits,
    OfCase,
    OfFloat,
    OfIntegerC,
    OfMetadata,
    OfScale,
    OfTerm,
    SecondOfFloat,
    SecondOfInteger,
    SecondOfScale,
)
from tcemu.fuzz.counter import Pair, case_keys, mix, pair, plus, second, words
from tcemu.fuzz.kinds import AIMED, EVERY, KINDS, Kind, bounds, chosen
from tcemu.fuzz.operands import Operands
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import defined_fields

# streams of words: the case's own, the terms', and the operands'
CASE, TERM, STREAMS = 1, 2, {"a": 3, "b": 4, "c": 5, "e": 6, "scale_a": 7, "scale_b": 8}
ILLEGAL = 32  # of 256 sparse cases have metadata of any bits
Draw = Callable[[CaseBits], Array]  # the bits that each case drew for something, uint32 [cases]


class CaseDraw(NamedTuple):
    """What is drawn once for each case; arrays [cases, 1, 1] unless it says otherwise."""

    kind: dict[str, Array]  # the fields of Kind
    low: dict[str, Array]  # the exponent field that A's and B's elements start from
    c_mode: Array
    c_field: Array  # the exponent field that C's elements start from
    drop: Array  # [cases, K]: exponents by which the terms at a k lie below the largest
    k: Array  # [cases, K]: where a term's words are taken from, its own k or its twin's
    flipped: Array  # bool [cases, K]: the second of two twins
    nudged: Array  # bool [cases, K]: and one last bit away from the first


class Terms(NamedTuple):
    """The terms of each case. [cases, K] each."""

    k: Array  # whose words they take
    flipped: Array
    nudged: Array
    word: Array  # see `OfTerm`


# fraction bits of the known models and least exponents of their steps: written out, so that a new row of `models` moves no operand
CUTS, FLOORS = (13, 23, 24, 25, 35), {16: -21, 32: -133}


@lru_cache(maxsize=4096)
def edges(op: Instruction) -> tuple[int, ...]:
    """Distances from the largest term at which some model cuts, or the result rounds."""
    d = signature_of(op).d
    return tuple(sorted({*CUTS, d.mantissa_bits, d.mantissa_bits + 1} if d.words == 1 else {d.mantissa_bits, 2 * d.mantissa_bits}))


def generate(
    op: str | Instruction,
    seed: int,
    start: int,
    count: int,
    *,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
) -> Operands:
    """Cases number `start` to `start + count - 1` of a seed, each the operands of one instruction, as `tcemu.dot` takes them.

    op: a PTX spelling or an Instruction of mma, mma.sp, wmma.mma, wgmma or wgmma.sp. seed, start: 0 to 2^64 - 1. kinds: names of
    `tcemu.fuzz.KINDS` (all of them when left out), with weights in place of their own.
    Returns codes a [count, M, K] (sparse: [count, M, K/2]), b [count, K, N], c [count, M, N]; of a sparse instruction e, the metadata
    fields [count, M, chunks], some of which PTX leaves undefined; of a block-scaled one scale_a [count, M, scale_vec] and
    scale_b [count, scale_vec, N]. The same on every platform and device, whatever the count.
    Raises Unsupported if `op` is no such instruction, ValueError for a number out of range or an unknown kind.
    """
    op = parse(op)
    must_compute(op)
    for name, value, largest in (("seed", seed, 1 << 64), ("start", start, 1 << 64), ("count", count, 1 << 31)):
        if not isinstance(value, int | np.integer) or not 0 <= value < largest:
            raise ValueError(f"{name}: got {value}; wanted a whole number from 0 to {largest - 1}")
    return _generate(op, chosen(kinds, weights), int(count), pair(int(seed)), pair(int(start)))


@partial(jax.jit, static_argnames=("op", "kinds", "count"))
def _generate(op: Instruction, kinds: tuple[Kind, ...], count: int, seed: Pair, start: Pair) -> Operands:
    return operands(op, case_keys(seed, plus(start, jnp.arange(count, dtype=jnp.uint32))), kinds)


def kind_of(keys: Pair, kinds: tuple[Kind, ...]) -> Array:
    """int32 [cases]: the number of each case's kind."""
    drawn = words(keys, CASE, jnp.uint32(0))
    return jnp.sum(drawn[:, None] >= bounds(kinds), axis=1, dtype=jnp.int32)


def operands(op: Instruction, keys: Pair, kinds: tuple[Kind, ...] = KINDS) -> Operands:
    """The operands of the cases with these keys, uint32[cases] each."""
    signature, case = signature_of(op), _case_draw(op, keys, kinds)
    (m, k), (_, n) = op.matrix("a"), op.matrix("d")
    row_a, column_b = np.arange(m, dtype=np.uint32), np.arange(n, dtype=np.uint32)
    ratio = op.k // k  # 2 if sparse: A holds one of two
    drop = _split_drop(op, case)
    places = {
        "a": row_a[:, None] * np.uint32(k) + case.k[:, None, :],
        "b": _dense(case.k, ratio)[:, :, None] * np.uint32(n) + column_b,
    }
    made: Operands = {}
    for name, fmt, along_k in (("a", signature.a, (slice(None), None)), ("b", signature.b, (slice(None), slice(None), None))):
        drawn = words(_cases(keys), STREAMS[name], places[name])
        if fmt.is_integer:
            made[name] = _integers(fmt, drawn, case)
            continue
        flip, nudge = (case.flipped[along_k], case.nudged[along_k]) if name == "a" else (None, None)
        made[name] = _floats(fmt, drawn, case.low[name] - drop[name][along_k], case.kind, flip, nudge)
    of_c = np.arange(m * n, dtype=np.uint32).reshape(m, n)
    made["c"] = _accumulators(signature.c, words(_cases(keys), STREAMS["c"], of_c), case)
    if op.sparse:
        made["e"] = _metadata(op, keys, case, k)
    if op.block_scale and op.stype is not None:
        for name in ("scale_a", "scale_b"):
            made[name] = _scales(op, op.stype, name, keys, case)
    return lax.optimization_barrier(made)  # else a fusion makes them again for each of their users


def _cases(keys: Pair) -> Pair:
    return keys[0][:, None, None], keys[1][:, None, None]


def _dense(k: Array, ratio: int) -> Array:
    """The words' places of a sparse instruction's whole column, from those of its stored row."""
    return jnp.repeat(k * ratio, ratio, axis=1) + jnp.tile(jnp.arange(ratio, dtype=jnp.uint32), k.shape[1]) if ratio > 1 else k


def _targets(op: Instruction) -> np.ndarray:
    """Exponents of products at which a result becomes subnormal, zero or infinite, or a step's alignment ends; and that of one."""
    d = signature_of(op).d
    near = {0, d.least_exponent, d.least_exponent - d.mantissa_bits, d.greatest_exponent - 4, FLOORS.get(d.bits, 0)}
    return np.array(sorted(near), np.int32)


def _case_draw(op: Instruction, keys: Pair, kinds: tuple[Kind, ...]) -> CaseDraw:
    signature = signature_of(op)
    number = kind_of(keys, kinds)
    kind = {name: jnp.asarray(np.array([getattr(kind, name) for kind in kinds], np.int32))[number] for name in Kind._fields[2:]}
    drawn = [words(keys, CASE, jnp.uint32(place)) for place in range(8)]

    def draw(field: CaseBits) -> Array:
        return field.bits.of(drawn[field.word])

    low = dict.fromkeys("ab", jnp.zeros_like(number))
    if not signature.a.is_integer:
        low = _start_exponents(op, draw, kind)
    terms, stride, twins = _terms(op, keys, draw, kind)
    distance = _distance(op, draw)
    drop = _drop(op, draw, kind, terms, jnp.where(twins, ~stride, np.uint32(0xFFFFFFFF)), distance)
    c_mode, c_field = draw(OfCase.C_MODE), jnp.zeros_like(number)
    if not signature.c.is_integer and not signature.a.is_integer:
        c_field = _start_exponent_of_c(op, draw, low, distance)
    per_case = lambda v: v[:, None, None]  # noqa: E731
    return CaseDraw(
        kind={name: per_case(v) for name, v in kind.items()},
        low={name: per_case(v) for name, v in low.items()},
        c_mode=per_case(c_mode),
        c_field=per_case(c_field),
        drop=drop,
        k=terms.k,
        flipped=terms.flipped,
        nudged=terms.nudged,
    )


def _signed(bits: Array, middle: int) -> Array:
    """int32: the bits' value less `middle`."""
    return bits.astype(jnp.int32) - middle


def _start_exponents(op: Instruction, draw: Draw, kind: dict[str, Array]) -> dict[str, Array]:
    """The exponent field that A's and B's elements start from, int32 [cases]: each drawn alone, or aimed by their product."""
    signature = signature_of(op)
    a, b = signature.a, signature.b
    last = {"a": _last_field(a), "b": _last_field(b)}
    alone = {"a": _below(draw(OfCase.EXPONENT_A), last["a"] + 1), "b": _below(draw(OfCase.EXPONENT_B), last["b"] + 1)}
    targets = _targets(op)
    aim = jnp.asarray(targets)[_below(draw(OfCase.TARGET), len(targets))] + _signed(draw(OfCase.MISS), 8)
    total = aim + a.bias + b.bias
    of_a = jnp.clip(total // 2 + _signed(draw(OfCase.SPLIT), 4), 0, last["a"])
    aimed = {"a": of_a, "b": jnp.clip(total - of_a, 0, last["b"])}
    room = jnp.where(kind["span"] > 16, 0, kind["span"])  # for the exponents above the start
    low = {name: jnp.where(kind["base"] == AIMED, aimed[name], jnp.maximum(alone[name] - room, 0)) for name in "ab"}
    return {name: jnp.where(kind["span"] == EVERY, 0, field) for name, field in low.items()}


def _terms(op: Instruction, keys: Pair, draw: Draw, kind: dict[str, Array]) -> tuple[Terms, Array, Array]:
    """The terms; how far twins stand apart, uint32 [cases]; and whether a case has twins, bool [cases].

    Twins stand a power of two apart; of a sparse instruction whole chunks.
    """
    _, k = op.matrix("a")
    least = max(1, op.chunk // 2)
    strides = np.array([1 << i for i in range(least.bit_length() - 1, max(k.bit_length() - 1, 1)) if 1 << i < k] or [1], np.uint32)
    stride = jnp.asarray(strides)[_below(draw(OfCase.STRIDE), len(strides))]
    twins = (kind["twins"] == 1) & (k >= 2 * least) & (not signature_of(op).a.is_integer)
    place = jnp.arange(k, dtype=jnp.uint32)
    own = jnp.where(twins[:, None], place & ~stride[:, None], place)
    flipped = own != place
    word = words((keys[0][:, None], keys[1][:, None]), TERM, own)
    nudged = flipped & (OfTerm.IS_NUDGED.of(word) == 0)
    return Terms(k=own, flipped=flipped, nudged=nudged, word=word), stride, twins


def _distance(op: Instruction, draw: Draw) -> Array:
    """How far the small terms of a case lie below the large ones, int32 [cases]: near a distance at which something changes, or any."""
    changes = edges(op)
    edge = jnp.asarray(np.array(changes, np.int32))[_below(draw(OfCase.EDGE), len(changes))]
    anywhere = _below(draw(OfCase.DISTANCE), int(changes[-1]) + 12)
    return jnp.where(draw(OfCase.AT_AN_EDGE) == 1, edge + _signed(draw(OfCase.EDGE_MISS), 4), anywhere)


def _drop(op: Instruction, draw: Draw, kind: dict[str, Array], terms: Terms, first_twin: Array, distance: Array) -> Array:
    """How far each term lies below the large ones, int32 [cases, K]. first_twin: a mask that takes a k to that of its first twin."""
    _, k = op.matrix("a")
    first = _below(draw(OfCase.LARGE), k).astype(jnp.uint32) & first_twin
    large = (terms.k == first[:, None]) | (OfTerm.IS_LARGE.of(terms.word) == 0)
    drop = jnp.maximum(distance[:, None] + _signed(OfTerm.DROP_MISS.of(terms.word), 1), 0)
    return jnp.where((kind["spread"][:, None] == 1) & ~large, drop, 0)


def _start_exponent_of_c(op: Instruction, draw: Draw, low: dict[str, Array], distance: Array) -> Array:
    """The exponent field that C's elements start from, int32 [cases], by the case's mode."""
    signature = signature_of(op)
    of_products = low["a"] + low["b"] - signature.a.bias - signature.b.bias + signature.c.bias
    sign = jnp.where(draw(OfCase.C_ABOVE) == 1, 1, -1)
    mode = draw(OfCase.C_MODE)
    near = jnp.where(mode < 3, of_products + _signed(draw(OfCase.C_BESIDE), 3), of_products + sign * distance)
    anywhere = jnp.where(draw(OfCase.C_DRAWN) == 1, _below(draw(OfCase.EXPONENT_C), _last_field(signature.c) + 1), 0)
    return jnp.where(mode < 6, near, anywhere)


def _below(half: Array, count: int) -> Array:
    """int32 from 0 to count - 1, from 16 drawn bits; count up to 2^16."""
    return (half * np.uint32(count) >> 16).astype(jnp.int32)


def _split_drop(op: Instruction, case: CaseDraw) -> dict[str, Array]:
    """How far the exponents of A's columns and B's rows go down for `case.drop`: A as far as it can, then B, if each k has one of both."""
    a = jnp.minimum(case.drop, case.low["a"][:, :, 0])
    if op.sparse:
        return {"a": a, "b": jnp.zeros((*case.drop.shape[:-1], op.k), jnp.int32)}
    return {"a": a, "b": case.drop - a}


def _last_field(fmt: Format) -> int:
    """The exponent field of the largest finite value."""
    return fmt.greatest_magnitude >> fmt.mantissa_bits


def _specials(fmt: Format) -> list[int]:
    """Eight magnitudes, without unused bits."""
    one, hidden = fmt.bias << fmt.mantissa_bits, 1 << fmt.mantissa_bits
    infinity = fmt.infinity if fmt.specials == "ieee" else fmt.greatest_magnitude
    nan = {"ieee": fmt.infinity + 1, "nan": fmt.nan, "none": fmt.greatest_magnitude}[fmt.specials]
    return [0, infinity, nan, fmt.greatest_magnitude, 1, hidden - 1, hidden, one]


def one_of(values: Sequence[int], which: Array) -> Array:
    """values[which] as uint32, by selection: a gather is slow where it stands for each element."""
    chosen_value = jnp.full(which.shape, values[0], jnp.uint32)
    for i, value in enumerate(values[1:], 1):
        chosen_value = jnp.where(which == i, np.uint32(value), chosen_value)
    return chosen_value


def _floats(fmt: Format, word: Array, field: Array, kind: dict[str, Array], flip: Array | None = None, nudge: Array | None = None) -> Array:
    """Codes of the words' shape. field: the exponent field of the lowest elements; flip: negate; nudge: change the last bit."""
    more = second(word)
    low = mix(more) if fmt.words == 2 else None  # the lower word of f64
    code, edged = _finite(fmt, word, more, low, field, kind)
    greatest = fmt.greatest_magnitude >> (32 * (fmt.words - 1))
    code = jnp.minimum(code, greatest - (fmt.words - 1))
    pick, special = SecondOfFloat.SPECIAL.of(more), kind["special"].astype(jnp.uint32)
    is_special = pick < special
    is_zero = ~is_special & (pick < special + kind["zero"].astype(jnp.uint32))
    magnitudes, which = _specials(fmt), SecondOfFloat.WHICH_SPECIAL.of(more)
    value = lambda part: one_of([v >> (32 * part) & 0xFFFFFFFF for v in magnitudes], which)  # noqa: E731
    top = jnp.where(is_special, value(fmt.words - 1), jnp.where(is_zero, 0, code))
    if nudge is not None and low is None:
        top = jnp.where(nudge & ~is_special & (top < greatest), top ^ 1, top)
    sign = (SecondOfFloat.SIGN.of(more) & (kind["same_sign"] == 0)).astype(jnp.uint32)
    sign = sign if flip is None else sign ^ flip
    raw = kind["raw"] == 1
    if low is not None:
        variant = SecondOfFloat.VARIANT.of(more)
        bottom = jnp.where(edged, jnp.where(variant < 5, 0, jnp.where(variant == 5, np.uint32(0xFFFFFFFF), low & 1)), low)
        bottom = jnp.where(is_special, value(0), jnp.where(is_zero, 0, bottom))
        bottom = bottom if nudge is None else bottom ^ nudge
        return jnp.stack([jnp.where(raw, low, bottom), jnp.where(raw, word, top | sign << 31)], axis=-1)
    code = top << fmt.unused_bits | (word & ((1 << fmt.unused_bits) - 1)) | (sign << (fmt.bits - 1) if fmt.signed else 0)
    return jnp.where(raw, word & np.uint32((1 << fmt.bits) - 1), code).astype(fmt.dtype)


def _finite(fmt: Format, word: Array, more: Array, low: Array | None, field: Array, kind: dict[str, Array]) -> tuple[Array, Array]:
    """Exponent and fraction of a number as they stand in the upper word, and where the fraction is a significant one."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)  # fraction bits in the upper word
    full = word >> (32 - m) if m else jnp.zeros_like(word)
    variant = SecondOfFloat.VARIANT.of(more)
    one = np.uint32(1) << (SecondOfFloat.ONE.of(more) * np.uint32(m) >> 5)
    all_ones = np.uint32((1 << m) - 1)
    fraction = jnp.where(variant < 3, 0, jnp.where(variant < 5, one, jnp.where(variant == 5, all_ones & ~(one - 1), one - 1)))
    edge = SecondOfFloat.EDGE.of(more)
    edged = (edge < kind["edge"].astype(jnp.uint32)) & (variant < 7) if m else jnp.zeros(word.shape, bool)
    fraction = jnp.where(edged, fraction, full) if m else full
    every_field = (1 << fmt.exponent_bits) - 1
    span = kind["span"] if fmt.exponent_bits == 8 else jnp.where(kind["span"] == EVERY, every_field, kind["span"])
    bits, drawn = (OfFloat.EXPONENT, word) if low is None else (OfFloat.LOW_EXPONENT, low)
    field = field + (bits.of(drawn) * (span + 1).astype(jnp.uint32) >> bits.width).astype(jnp.int32)
    return jnp.clip(field, 0, _last_field(fmt)).astype(jnp.uint32) << m | fraction, edged


def _integers(fmt: Format, word: Array, case: CaseDraw) -> Array:
    """Any code, or one of the ends; of single bits many zeros, or many ones."""
    more, mask, kind = second(word), np.uint32((1 << fmt.bits) - 1), case.kind
    same_sign = kind["same_sign"] == 1
    share = jnp.where(same_sign, EVERY, jnp.maximum(kind["edge"] // 2, kind["special"] * 4)).astype(jnp.uint32)
    greatest = np.uint32(fmt.greatest_magnitude)
    least = greatest + 1 & mask if fmt.signed else np.uint32(0)
    which = SecondOfInteger.WHICH_END.of(more)
    ends = jnp.where(which < 2, greatest, jnp.where(which < 4, least, jnp.where(which == 4, mask, which & 1)))
    ends = jnp.where(same_sign, jnp.where(case.c_mode & 1 == 1, greatest, jnp.where(which < 6, least, greatest)), ends)
    is_zero = SecondOfInteger.ZERO.of(more) < kind["zero"].astype(jnp.uint32)
    is_end = SecondOfInteger.END.of(more) < share
    return jnp.where(is_zero, 0, jnp.where(is_end, ends, word & mask)).astype(fmt.dtype)


def _accumulators(fmt: Format, word: Array, case: CaseDraw) -> Array:
    """C by the case's mode: beside the products, at a distance that matters, anywhere, or zero."""
    if not fmt.is_integer:
        everywhere = case.kind["span"] == EVERY
        kind = case.kind | {"span": jnp.where(everywhere, EVERY, 3), "same_sign": jnp.zeros_like(case.c_mode)}
        codes = _floats(fmt, word, jnp.where(everywhere, 0, case.c_field), kind)
        zero = (case.c_mode == 7) & (case.kind["raw"] == 0)
        return jnp.where(zero[..., None] if fmt.words == 2 else zero, 0, codes)
    least = np.uint32(1 << (fmt.bits - 1))
    beside = jnp.where(OfIntegerC.LEAST.of(word) == 1, least, least - 1) + OfIntegerC.FROM_END.of(word) - np.uint32(0x8000)
    return jnp.where(case.c_mode < 4, beside, jnp.where(case.c_mode == 7, 0, word)).astype(fmt.dtype)


def _metadata(op: Instruction, keys: Pair, case: CaseDraw, k: int) -> Array:
    """Fields [cases, M, chunks]: defined ones, in some cases any; twins have the same."""
    rows, chunks = op.matrix(op.metadata)
    per_chunk = k // chunks
    chunk = case.k[:, ::per_chunk] // np.uint32(per_chunk)
    word = words(_cases(keys), STREAMS["e"], np.arange(rows, dtype=np.uint32)[:, None] * np.uint32(chunks) + chunk[:, None, :])
    defined = np.array(defined_fields(op.chunk, op.ordered), np.uint8)
    of_case = words(keys, STREAMS["e"], jnp.uint32(rows * chunks))
    anything = OfMetadata.MAY_BE_UNDEFINED.of(of_case) < ILLEGAL
    drawn = jnp.asarray(defined)[_below(OfMetadata.DEFINED.of(word), len(defined))]
    return jnp.where(anything[:, None, None], OfMetadata.ANY.of(word).astype(jnp.uint8), drawn)


def _scales(op: Instruction, fmt: Format, name: str, keys: Pair, case: CaseDraw) -> Array:
    """Scale codes around one, their blocks apart by the case's distances; some NaN, zero or of any bits."""
    rows, columns = op.matrix(name)
    places = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    word = words(_cases(keys), STREAMS[name], places)
    more = second(word)
    blocks = case.drop[:, :: case.drop.shape[1] // (op.scale_vec or 1)]
    half = (blocks + (name == "scale_a")) // 2  # of the distance each of the two scales takes one half
    half = half[:, None, :] if name == "scale_a" else half[:, :, None]
    field = fmt.bias + _signed(OfScale.EXPONENT.of(word), 3) - half
    if fmt.mantissa_bits:
        field = jnp.where(case.kind["spread"] == 1, field + 4, field)
    code = jnp.clip(field, 0, (1 << fmt.exponent_bits) - 1).astype(jnp.uint32) << fmt.mantissa_bits
    code = code | (word & ((1 << fmt.mantissa_bits) - 1))
    specials = jnp.asarray(np.array([0, 1, fmt.nan - 1, fmt.nan], np.uint32))[SecondOfScale.WHICH_SPECIAL.of(more)]
    is_special = SecondOfScale.SPECIAL.of(more) < case.kind["special"].astype(jnp.uint32)
    anything = (case.kind["raw"] == 1) | (case.kind["span"] == EVERY)
    return jnp.where(anything, OfScale.ANY.of(word), jnp.where(is_special, specials, code)).astype(fmt.dtype)
