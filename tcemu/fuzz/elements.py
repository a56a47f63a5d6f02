"""Elements of float operands, each from its word and what its case's kind asks for: by XLA, or by a kernel of an NVIDIA GPU.

The kernel has no arithmetic of its own: `one_float` is written as CUDA C++ from its trace. `cuda/draw.cu` puts in what is known of a case.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.arithmetic.kernels import calls, elementwise, scalars
from tcemu.arithmetic.kernels.launch import Entry, launch
from tcemu.arithmetic.kernels.source import after_machine
from tcemu.formats import Format
from tcemu.fuzz.bit_fields import CaseBits, OfFloat, OfPacked, OfPlace, SecondOfFloat
from tcemu.fuzz.counter import Pair, mix, second, words
from tcemu.fuzz.kinds import ALL, EVERY

WARPS = 8  # of a block; a warp draws a case
BYTES = 4  # that a thread writes at once, at most
PACKED = {name.lower(): bits for name, bits in vars(OfPacked).items() if isinstance(bits, CaseBits)}  # fields of a Kind


def last_field(fmt: Format) -> int:
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


def one_float(
    fmt: Format, word: Array, field: Array, kind: dict[str, Array], flip: Array | None = None, nudge: Array | None = None
) -> Array:
    """Codes of the words' shape. kind: fields of a Kind; field: the exponent field of the lowest elements; flip: negate; nudge: change the
    last bit.
    """
    more = second(word)
    low = mix(more) if fmt.words == 2 else None  # the lower word of f64
    code, edged = _finite(fmt, word, more, low, field, kind)
    greatest = fmt.greatest_magnitude >> (32 * (fmt.words - 1))
    is_special = SecondOfFloat.SPECIAL.below(more, kind["special"])
    is_zero = ~is_special & (SecondOfFloat.SPECIAL.of(more) < (kind["special"] + kind["zero"]).astype(jnp.uint32))
    magnitudes, which = _specials(fmt), SecondOfFloat.WHICH_SPECIAL.of(more)
    value = lambda part: one_of([v >> (32 * part) & 0xFFFFFFFF for v in magnitudes], which)  # noqa: E731
    top = jnp.where(is_special, value(fmt.words - 1), jnp.where(is_zero, 0, code))
    if nudge is not None and low is None:
        top = jnp.where(nudge & ~is_special & (top < greatest), top ^ 1, top)
    at, minus = (fmt.bits - 1) % 32, np.uint32(1 << (fmt.bits - 1) % 32)
    sign = (more >> (SecondOfFloat.SIGN.low - at)) & jnp.where(kind["same_sign"] == 0, minus, 0)
    sign = sign if flip is None else sign ^ jnp.where(flip, minus, 0)
    raw = kind["raw"] == 1
    if low is not None:
        variant = SecondOfFloat.VARIANT.of(more)
        bottom = jnp.where(edged, jnp.where(variant < 5, 0, jnp.where(variant == 5, np.uint32(0xFFFFFFFF), low & 1)), low)
        bottom = jnp.where(is_special, value(0), jnp.where(is_zero, 0, bottom))
        bottom = bottom if nudge is None else bottom ^ nudge
        return jnp.stack([jnp.where(raw, low, bottom), jnp.where(raw, word, top | sign)], axis=-1)
    code = top << fmt.unused_bits | (word & ((1 << fmt.unused_bits) - 1)) | (sign if fmt.signed else 0)
    return jnp.where(raw, word & np.uint32((1 << fmt.bits) - 1), code).astype(fmt.dtype)


def _finite(fmt: Format, word: Array, more: Array, low: Array | None, field: Array, kind: dict[str, Array]) -> tuple[Array, Array]:
    """Exponent and fraction of a number as they stand in the upper word, and where the fraction is a significant one."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)  # fraction bits in the upper word
    greatest, all_ones = fmt.greatest_magnitude >> (32 * (fmt.words - 1)), np.uint32((1 << m) - 1)
    full = word >> (32 - m) if m else jnp.zeros_like(word)
    variant = partial(SecondOfFloat.VARIANT.below, more)
    one = np.uint32(1) << (SecondOfFloat.ONE.of(more) * np.uint32(m) >> 5)
    fraction = jnp.where(variant(3), 0, jnp.where(variant(5), one, jnp.where(variant(6), all_ones & ~(one - 1), one - 1)))
    edged = SecondOfFloat.EDGE.below(more, kind["edge"]) & variant(7) if m else jnp.zeros(word.shape, bool)
    fraction = jnp.where(edged, fraction, full) if m else full
    every_field = (1 << fmt.exponent_bits) - 1
    span = kind["span"] if fmt.exponent_bits == 8 else jnp.where(kind["span"] == EVERY, every_field, kind["span"])
    bits, drawn = (OfFloat.EXPONENT, word) if low is None else (OfFloat.LOW_EXPONENT, low)
    field = field + (bits.of(drawn) * (span + 1).astype(jnp.uint32) >> bits.width).astype(jnp.int32)
    code = jnp.clip(field, 0, last_field(fmt)).astype(jnp.uint32) << m | fraction
    if low is not None:
        return jnp.minimum(code, greatest - 1), edged  # whatever the lower word is
    return code if greatest & all_ones == all_ones else jnp.minimum(code, greatest), edged


class Drawing(NamedTuple):
    """Which elements of a case: an operand's matrix as [outer, places, inner], where each of the `places` has a drop of its own."""

    fmt: Format
    stream: int
    outer: int
    places: int
    inner: int

    @property
    def size(self) -> int:
        """Elements of a case."""
        return self.outer * self.places * self.inner


class Given(NamedTuple):
    """What the elements of some cases are drawn from."""

    keys: Pair  # uint32 [cases] each
    kind: dict[str, Array]  # fields of a Kind, int32 [cases]
    field: Array  # int32 [cases, places]: the exponent field of the lowest elements
    place: Array  # uint32 [cases, places]: whose words they take
    flipped: Array | None = None  # bool [cases, places]: negated
    nudged: Array | None = None  # bool [cases, places]: their last bit changed


def floats(which: Drawing, given: Given) -> Array:
    """Codes [cases, elements]; of a format with two words [..., 2]."""
    portable = partial(_by_xla, which)
    if which.fmt.words == 2:
        return portable(given)
    return lax.platform_dependent(given, default=portable, **elementwise.programs(partial(_by_kernel, which), given.field))


def _by_xla(which: Drawing, given: Given) -> Array:
    kind = {name: v[:, None, None, None] for name, v in given.kind.items()}
    flipped, nudged = (None if v is None else v[:, None, :, None] for v in (given.flipped, given.nudged))
    word = words_of(which, given.keys, given.place)
    codes = one_float(which.fmt, word, given.field[:, None, :, None], kind, flipped, nudged)
    return codes.reshape(len(codes), which.size, *codes.shape[4:])


def words_of(which: Drawing, keys: Pair, place: Array) -> Array:
    """The word of each element, uint32 [cases, outer, places, inner]. place: as in Given."""
    row, column = (jnp.arange(n, dtype=jnp.uint32) for n in (which.outer, which.inner))
    places = _place(which, row[:, None, None], place[:, None, :, None], column)
    return words((keys[0][:, None, None, None], keys[1][:, None, None, None]), which.stream, places)


def _place(which: Drawing, row: Array, place: Array, column: Array) -> Array:
    """Which word of the stream is that of an element."""
    return (row * np.uint32(which.places) + place) * np.uint32(which.inner) + column


class _Kernel(NamedTuple):
    """A call of `calls.run`: from uint32 [cases, 4], a key and OfPacked, and [cases, places], OfPlace, codes [cases, elements]."""

    which: Drawing
    axes: tuple[str, ...] = ("w", "j", "e")
    shared: tuple[bool, ...] = (False, False)

    def __call__(self, *operands: Array) -> Array:
        of_cases, of_places = operands
        cases = len(of_cases)
        result = jax.ShapeDtypeStruct((cases, self.which.size), self.which.fmt.dtype)
        if cases == 0:
            return jnp.zeros(result.shape, result.dtype)
        entry = Entry("draw", text(self.which), 32 * WARPS)
        return launch(entry, -(-cases // WARPS), result, calls.numbers(cases), of_cases, of_places)[0]


def _by_kernel(which: Drawing, given: Given) -> Array:
    packed = [jnp.zeros_like(given.keys[0])] * 2
    for name, (word, bits) in PACKED.items():
        packed[word] |= bits.at(given.kind[name])
    of_places = OfPlace.PLACE.at(given.place) | OfPlace.FIELD.at(given.field)
    if given.flipped is not None and given.nudged is not None:
        of_places |= OfPlace.FLIPPED.at(given.flipped) | OfPlace.NUDGED.at(given.nudged)
    return calls.run(_Kernel(which), jnp.stack([*given.keys, *packed], axis=1), of_places)


@lru_cache(maxsize=256)
def text(which: Drawing) -> str:
    """CUDA C++ of the kernel."""

    def element(key: Array, other_key: Array, first: Array, last: Array, place: Array, row: Array, column: Array) -> Array:
        kind = {name: bits.of((first, last)[word]).astype(jnp.int32) for name, (word, bits) in PACKED.items()}
        word = words((key, other_key), which.stream, _place(which, row, OfPlace.PLACE.of(place), column))
        field = place.astype(jnp.int32) >> OfPlace.FIELD.low
        return one_float(which.fmt, word, field, kind, OfPlace.FLIPPED.of(place) == 1, OfPlace.NUDGED.of(place) == 1)

    code, size = which.fmt.dtype, which.size
    piece = next(n for n in (4, 2, 1) if size % n == 0 and n * code.itemsize <= BYTES and (n == 1 or size >= 32 * n))
    numbers = {"ELEMENTS": size, "PLACES": which.places, "INNER": which.inner, "PIECE": piece, "WARPS": WARPS}
    masks = {name.upper(): bits.mask for name, (_, bits) in PACKED.items()} | {
        "ALL": ALL << OfPacked.ZERO.bits.low,
        "FLIPPED": OfPlace.FLIPPED.mask,
        "NUDGED": OfPlace.NUDGED.mask,
    }
    lines = [f"typedef {scalars.TYPES[str(code)]} Code;"]
    lines += [f"[[maybe_unused]] constexpr int {name} = {number};" for name, number in numbers.items()]
    lines += [f"[[maybe_unused]] constexpr u32 {name} = {mask}u;" for name, mask in masks.items()]
    loop = resources.files("tcemu.fuzz").joinpath("cuda", "draw.cu").read_text()
    return after_machine(*lines, scalars.function("element", element, *[np.uint32] * 7), loop)
