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
    OfIntegerC,
    OfMetadata,
    OfScale,
    OfTerm,
    SecondOfInteger,
    SecondOfScale,
)
from tcemu.fuzz.counter import Pair, case_keys, pair, plus, second, words
from tcemu.fuzz.elements import Drawing, Given, floats, last_field, words_of
from tcemu.fuzz.kinds import AIMED, ALL, EVERY, KINDS, Kind, bounds, chosen
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
    shapes, drop = {"a": (m, k), "b": (op.k, n), "c": (m, n)}, _split_drop(op, case)
    drawings = {
        "a": Drawing(signature.a, STREAMS["a"], m, k, 1),
        "b": Drawing(signature.b, STREAMS["b"], 1, op.k, n),
        "c": Drawing(signature.c, STREAMS["c"], 1, 1, m * n),
    }
    places = {"a": case.k, "b": _dense(case.k, op.k // k), "c": jnp.zeros((len(keys[0]), 1), jnp.uint32)}
    made: Operands = {}
    for name, which in drawings.items():
        if which.fmt.is_integer:
            word = words_of(which, keys, places[name]).reshape(-1, *shapes[name])
            made[name] = (_integer_accumulators if name == "c" else _integers)(which.fmt, word, case)
            continue
        kind, field = _of_c(case) if name == "c" else (_flat(case.kind), case.low[name][:, :, 0] - drop[name])
        twins = (case.flipped, case.nudged) if name == "a" else (None, None)
        codes = floats(which, Given(keys, kind, field, places[name], *twins))
        made[name] = codes.reshape(-1, *shapes[name], *codes.shape[2:])
    if op.sparse:
        made["e"] = _metadata(op, keys, case, k)
    if op.block_scale and op.stype is not None:
        for name in ("scale_a", "scale_b"):
            made[name] = _scales(op, op.stype, name, keys, case)
    return lax.optimization_barrier(made)  # else a fusion makes them again for each of their users


def _flat(kind: dict[str, Array]) -> dict[str, Array]:
    """[cases] each."""
    return {name: v[:, 0, 0] for name, v in kind.items()}


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
    last = {"a": last_field(a), "b": last_field(b)}
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
    anywhere = jnp.where(draw(OfCase.C_DRAWN) == 1, _below(draw(OfCase.EXPONENT_C), last_field(signature.c) + 1), 0)
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


def _of_c(case: CaseDraw) -> tuple[dict[str, Array], Array]:
    """The kind of floats C, [cases], and the exponent field of its lowest ones, [cases, 1]: by the case's mode."""
    kind = _flat(case.kind)
    everywhere, zero = kind["span"] == EVERY, (case.c_mode[:, 0, 0] == 7) & (kind["raw"] == 0)
    own = {
        "span": jnp.where(everywhere, EVERY, 3),
        "special": jnp.where(zero, 0, kind["special"]),
        "zero": jnp.where(zero, ALL, kind["zero"]),
        "same_sign": zero.astype(jnp.int32),
    }
    return kind | own, jnp.where(everywhere[:, None], 0, case.c_field[:, :, 0])


def _integer_accumulators(fmt: Format, word: Array, case: CaseDraw) -> Array:
    """C by the case's mode: beside an end of the range, anywhere, or zero."""
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
