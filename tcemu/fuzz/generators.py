"""Operands of any computing instruction from a seed and a number, made on the device, as matrices of raw codes.

Every element is a function of the case's key and its own place, so that no two of them need an order. Terms relate to each other through
the key alone: which k is large, how far below it the others lie, which k is whose twin, is drawn once a case, for A's columns and B's rows
alike.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.architectures.lookup import must_compute
from tcemu.formats import Format
from tcemu.fuzz.counter import Pair, case_keys, mix, pair, plus, second, words
from tcemu.fuzz.kinds import AIMED, KINDS, Kind, bounds, chosen
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import defined_fields

Operands = dict[str, Array]
# streams of words: the case's own, the terms', and the operands'
CASE, TERM, STREAMS = 1, 2, {"a": 3, "b": 4, "c": 5, "e": 6, "scale_a": 7, "scale_b": 8}
ILLEGAL = 32  # of 256 sparse cases have metadata of any bits


class Plan(NamedTuple):
    """What is drawn once for each case; arrays [cases, 1, 1]."""

    kind: dict[str, Array]  # the fields of Kind
    low: dict[str, Array]  # the exponent field that A's and B's elements start from
    c_mode: Array
    c_field: Array
    drop: Array  # [cases, K]: exponents by which the terms at a k lie below the largest
    k: Array  # [cases, K]: where a term's words are taken from, its own k or its twin's
    flipped: Array  # bool [cases, K]: the second of two twins
    nudged: Array  # bool [cases, K]: and one last bit away from the first


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
        if not 0 <= value < largest:
            raise ValueError(f"{name}: got {value}; wanted a number from 0 to {largest - 1}")
    return _generate(op, chosen(kinds, weights), count, pair(seed), pair(start))


@partial(jax.jit, static_argnames=("op", "kinds", "count"))
def _generate(op: Instruction, kinds: tuple[Kind, ...], count: int, seed: Pair, start: Pair) -> Operands:
    return operands(op, case_keys(seed, plus(start, jnp.arange(count, dtype=jnp.uint32))), kinds)


def kind_of(keys: Pair, kinds: tuple[Kind, ...]) -> Array:
    """int32 [cases]: the number of each case's kind."""
    drawn = words(keys, CASE, jnp.uint32(0))
    return jnp.sum(drawn[:, None] >= bounds(kinds), axis=1, dtype=jnp.int32)


def operands(op: Instruction, keys: Pair, kinds: tuple[Kind, ...] = KINDS) -> Operands:
    """The operands of the cases with these keys, uint32[cases] each."""
    signature, plan = signature_of(op), _plan(op, keys, kinds)
    (m, k), (_, n) = op.matrix("a"), op.matrix("d")
    row_a, column_b = np.arange(m, dtype=np.uint32), np.arange(n, dtype=np.uint32)
    ratio = op.k // k  # 2 if sparse: A holds one of two
    spread = _split_drop(op, plan)
    a_places, b_places = row_a * np.uint32(k) + plan.k[:, :, None], _dense(plan.k, ratio)[:, :, None] * np.uint32(n) + column_b
    found = {}
    for name, fmt, places in (("a", signature.a, a_places), ("b", signature.b, b_places)):  # both [cases, K, ...]
        drawn = words(_cases(keys), STREAMS[name], places)
        if fmt.is_integer:
            found[name] = _integers(fmt, drawn, plan)
            continue
        flip, nudge = (plan.flipped[:, :, None], plan.nudged[:, :, None]) if name == "a" else (None, None)
        found[name] = _floats(fmt, drawn, plan.low[name] - spread[name][:, :, None], plan.kind, flip, nudge)
    places = np.arange(m * n, dtype=np.uint32).reshape(m, n)
    found["c"] = _accumulators(signature.c, words(_cases(keys), STREAMS["c"], places), plan)
    if op.sparse:
        found["e"] = _metadata(op, keys, plan, k)
    if op.block_scale and op.stype is not None:
        for name in ("scale_a", "scale_b"):
            found[name] = _scales(op, op.stype, name, keys, plan)
    found = lax.optimization_barrier(found)  # else a fusion makes them again for each of their users
    return found | {"a": jnp.swapaxes(found["a"], 1, 2)}  # K was in front, as `tile_kernel` wants it


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


def _plan(op: Instruction, keys: Pair, kinds: tuple[Kind, ...]) -> Plan:
    signature, (_, k) = signature_of(op), op.matrix("a")
    which = kind_of(keys, kinds)
    kind = {name: jnp.asarray(np.array([getattr(one, name) for one in kinds], np.int32))[which] for name in Kind._fields[2:]}
    draw = [words(keys, CASE, jnp.uint32(i)) for i in range(1, 8)]

    low = dict.fromkeys("ab", jnp.zeros_like(which))
    if not signature.a.is_integer:
        room = {name: _last_field(fmt) for name, fmt in (("a", signature.a), ("b", signature.b))}
        free = {name: _below(draw[i], room[name] + 1) for i, name in enumerate("ab")}
        near = _targets(op)
        aim = jnp.asarray(near)[_below(draw[2], len(near))] + (draw[3] & 15).astype(jnp.int32) - 8
        total = aim + signature.a.bias + signature.b.bias
        part = jnp.clip(total // 2 + (draw[3] >> 4 & 7).astype(jnp.int32) - 4, 0, room["a"])
        aimed = {"a": part, "b": jnp.clip(total - part, 0, room["b"])}
        spared = jnp.where(kind["span"] > 16, 0, kind["span"])
        low = {name: jnp.where(kind["base"] == AIMED, aimed[name], jnp.maximum(free[name] - spared, 0)) for name in "ab"}
        low = {name: jnp.where(kind["span"] == 255, 0, value) for name, value in low.items()}

    # twins stand a power of two apart; of a sparse instruction whole chunks
    least = max(1, op.chunk // 2)
    strides = np.array([1 << i for i in range(least.bit_length() - 1, max(k.bit_length() - 1, 1)) if 1 << i < k] or [1], np.uint32)
    stride = jnp.asarray(strides)[_below(draw[4], len(strides))]
    twins = (kind["twins"] == 1) & (k >= 2 * least) & (not signature.a.is_integer)
    at = jnp.arange(k, dtype=jnp.uint32)
    own = jnp.where(twins[:, None], at & ~stride[:, None], at)
    flipped = own != at
    by_term = words((keys[0][:, None], keys[1][:, None]), TERM, own)
    nudged = flipped & (by_term >> 30 == 0)

    edge = jnp.asarray(np.array(edges(op), np.int32))
    near_edge = edge[_below(draw[5], len(edges(op)))] + (draw[6] & 7).astype(jnp.int32) - 4
    at_any = _below(draw[6] << 1, int(edges(op)[-1]) + 12)
    distance = jnp.where(draw[6] >> 31 == 1, near_edge, at_any)
    first = _below(draw[4] << 16, k).astype(jnp.uint32)
    first = jnp.where(twins, first & ~stride, first)
    large = (own == first[:, None]) | (by_term & 15 == 0)
    drop = jnp.maximum(distance[:, None] + (by_term >> 4 & 3).astype(jnp.int32) - 1, 0)
    drop = jnp.where((kind["spread"][:, None] == 1) & ~large, drop, 0)

    c = signature.c
    c_mode, c_field = draw[0] & 7, jnp.zeros_like(which)
    if not c.is_integer and not signature.a.is_integer:
        top = low["a"] + low["b"] - signature.a.bias - signature.b.bias + c.bias
        sign = jnp.where(draw[5] & 1 == 1, 1, -1)
        beside = jnp.where(c_mode < 3, top + (draw[5] >> 8 & 7).astype(jnp.int32) - 3, top + sign * distance)
        anywhere = jnp.where(draw[5] & 2 == 2, _below(draw[1], _last_field(c) + 1), 0)
        c_field = jnp.where(c_mode < 6, beside, anywhere)
    cases = lambda v: v[:, None, None]  # noqa: E731
    return Plan(
        {name: cases(v) for name, v in kind.items()}, {name: cases(v) for name, v in low.items()}, cases(c_mode), cases(c_field),
        drop, own, flipped, nudged,
    )  # fmt: skip


def _below(word: Array, count: int) -> Array:
    """int32 from 0 to count - 1, count up to 2^16."""
    return ((word >> 16) * np.uint32(count) >> 16).astype(jnp.int32)


def _split_drop(op: Instruction, plan: Plan) -> dict[str, Array]:
    """How far the exponents of A's columns and B's rows go down for `plan.drop`: A as far as it can, then B, if each k has one of both."""
    a = jnp.minimum(plan.drop, plan.low["a"][:, :, 0])
    if op.sparse:
        return {"a": a, "b": jnp.zeros((*plan.drop.shape[:-1], op.k), jnp.int32)}
    return {"a": a, "b": plan.drop - a}


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
    found = jnp.full(which.shape, values[0], jnp.uint32)
    for i, value in enumerate(values[1:], 1):
        found = jnp.where(which == i, np.uint32(value), found)
    return found


def _floats(fmt: Format, word: Array, field: Array, kind: dict[str, Array], flip: Array | None = None, nudge: Array | None = None) -> Array:
    """Codes of the words' shape. field: the exponent field of the lowest elements; flip: negate; nudge: change the last bit."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)  # fraction bits in the top word
    more = second(word)
    share = more >> 8 & 255
    low = mix(more) if fmt.words == 2 else None
    full = word >> (32 - m) if m else jnp.zeros_like(word)
    one = np.uint32(1) << ((more & 31) * np.uint32(m) >> 5)
    variant = more >> 5 & 7
    all_ones = np.uint32((1 << m) - 1)
    fraction = jnp.where(variant < 3, 0, jnp.where(variant < 5, one, jnp.where(variant == 5, all_ones & ~(one - 1), one - 1)))
    edged = (share < kind["edge"].astype(jnp.uint32)) & (variant < 7) if m else jnp.zeros(word.shape, bool)
    fraction = jnp.where(edged, fraction, full) if m else full
    span = kind["span"] if fmt.exponent_bits == 8 else jnp.where(kind["span"] == 255, (1 << fmt.exponent_bits) - 1, kind["span"])
    drawn = word & 255 if low is None else low & 0xFFFF
    field = field + (drawn * (span + 1).astype(jnp.uint32) >> (8 if low is None else 16)).astype(jnp.int32)
    code = jnp.clip(field, 0, _last_field(fmt)).astype(jnp.uint32) << m | fraction
    greatest = fmt.greatest_magnitude >> (32 * (fmt.words - 1))
    code = jnp.minimum(code, greatest - (fmt.words - 1))
    pick = more >> 16 & 255
    special, which = kind["special"].astype(jnp.uint32), more >> 24 & 7
    is_special = pick < special
    is_zero = ~is_special & (pick < special + kind["zero"].astype(jnp.uint32))
    magnitudes = _specials(fmt)
    value = lambda part: one_of([v >> (32 * part) & 0xFFFFFFFF for v in magnitudes], which)  # noqa: E731
    top = jnp.where(is_special, value(fmt.words - 1), jnp.where(is_zero, 0, code))
    if nudge is not None:
        top = jnp.where(nudge & ~is_special & (top < greatest), top ^ 1, top) if low is None else top
    sign = (more >> 31 & (kind["same_sign"] == 0)).astype(jnp.uint32)
    sign = sign if flip is None else sign ^ flip
    raw = kind["raw"] == 1
    if low is not None:
        bottom = jnp.where(edged, jnp.where(variant < 5, 0, jnp.where(variant == 5, np.uint32(0xFFFFFFFF), low & 1)), low)
        bottom = jnp.where(is_special, value(0), jnp.where(is_zero, 0, bottom))
        bottom = bottom if nudge is None else bottom ^ nudge
        return jnp.stack([jnp.where(raw, low, bottom), jnp.where(raw, word, top | sign << 31)], axis=-1)
    code = top << fmt.unused_bits | (word & ((1 << fmt.unused_bits) - 1)) | (sign << (fmt.bits - 1) if fmt.signed else 0)
    return jnp.where(raw, word & np.uint32((1 << fmt.bits) - 1), code).astype(fmt.dtype)


def _integers(fmt: Format, word: Array, plan: Plan) -> Array:
    """Any code, or one of the ends; of single bits many zeros, or many ones."""
    more, mask = second(word), np.uint32((1 << fmt.bits) - 1)
    share = jnp.where(plan.kind["same_sign"] == 1, 255, jnp.maximum(plan.kind["edge"] // 2, plan.kind["special"] * 4)).astype(jnp.uint32)
    greatest = np.uint32(fmt.greatest_magnitude)
    least = greatest + 1 & mask if fmt.signed else np.uint32(0)
    which = more >> 24 & 7
    ends = jnp.where(which < 2, greatest, jnp.where(which < 4, least, jnp.where(which == 4, mask, which & 1)))
    ends = jnp.where(plan.kind["same_sign"] == 1, jnp.where(plan.c_mode & 1 == 1, greatest, jnp.where(which < 6, least, greatest)), ends)
    zero = (more & 255) < plan.kind["zero"].astype(jnp.uint32)
    return jnp.where(zero, 0, jnp.where((more >> 8 & 255) < share, ends, word & mask)).astype(fmt.dtype)


def _accumulators(fmt: Format, word: Array, plan: Plan) -> Array:
    """C by the case's mode: beside the products, at a distance that matters, anywhere, or zero."""
    if not fmt.is_integer:
        kind = plan.kind | {"span": jnp.where(plan.kind["span"] == 255, 255, 3), "same_sign": jnp.zeros_like(plan.c_mode)}
        codes = _floats(fmt, word, jnp.where(plan.kind["span"] == 255, 0, plan.c_field), kind)
        zero = (plan.c_mode == 7) & (plan.kind["raw"] == 0)
        return jnp.where(zero[..., None] if fmt.words == 2 else zero, 0, codes)
    least = np.uint32(1 << (fmt.bits - 1))
    beside = jnp.where(word >> 31 == 1, least, least - 1) + (word & 0xFFFF) - np.uint32(0x8000)  # up to 2^15 from an end
    return jnp.where(plan.c_mode < 4, beside, jnp.where(plan.c_mode == 7, 0, word)).astype(fmt.dtype)


def _metadata(op: Instruction, keys: Pair, plan: Plan, k: int) -> Array:
    """Fields [cases, M, chunks]: defined ones, in some cases any; twins have the same."""
    rows, chunks = op.matrix(op.metadata)
    per_chunk = k // chunks
    chunk = plan.k[:, ::per_chunk] // np.uint32(per_chunk)
    word = words(_cases(keys), STREAMS["e"], np.arange(rows, dtype=np.uint32)[:, None] * np.uint32(chunks) + chunk[:, None, :])
    legal = np.array(defined_fields(op.chunk, op.ordered), np.uint8)
    illegal = words(keys, STREAMS["e"], jnp.uint32(rows * chunks)) >> 24 < ILLEGAL
    return jnp.where(illegal[:, None, None], (word & 15).astype(jnp.uint8), jnp.asarray(legal)[_below(word, len(legal))])


def _scales(op: Instruction, fmt: Format, name: str, keys: Pair, plan: Plan) -> Array:
    """Scale codes around one, their blocks apart by the case's distances; some NaN, zero or of any bits."""
    rows, columns = op.matrix(name)
    places = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    word = words(_cases(keys), STREAMS[name], places)
    more = second(word)
    blocks = plan.drop[:, :: plan.drop.shape[1] // (op.scale_vec or 1)]
    half = (blocks + (name == "scale_a")) // 2
    half = half[:, None, :] if name == "scale_a" else half[:, :, None]
    field = fmt.bias + (word >> 29).astype(jnp.int32) - 3 - half
    if fmt.mantissa_bits:
        field = jnp.where(plan.kind["spread"] == 1, field + 4, field)
    code = jnp.clip(field, 0, (1 << fmt.exponent_bits) - 1).astype(jnp.uint32) << fmt.mantissa_bits
    code = code | (word & ((1 << fmt.mantissa_bits) - 1))
    specials = jnp.asarray(np.array([0, 1, fmt.nan - 1, fmt.nan], np.uint32))[more & 3]
    odd = (more >> 8 & 255) < plan.kind["special"].astype(jnp.uint32)
    anything = (plan.kind["raw"] == 1) | (plan.kind["span"] == 255)
    return jnp.where(anything, word & 0xFF, jnp.where(odd, specials, code)).astype(fmt.dtype)
