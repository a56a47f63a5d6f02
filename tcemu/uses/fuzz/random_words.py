"""Random words by counting: each word is a function of the seed, the case's number and an index, and of nothing else.

Case 10^12 therefore needs none of the cases before it, on any number of devices and in chunks of any size. A resumed run needs no generator
state, and a mismatch is kept as its case number. `jax.random` does not fit: the word of its stream that a case receives depends on the
shape drawn, on `jax_threefry_partitionable`, and on how each release draws shapes; and a threefry word costs about 70 integer operations
where 10 are enough here. No word has to be unpredictable. Neighbouring words only have to look unrelated.

The second half of the module says which bits of each word serve which purpose, one class of named bit fields per word. Two fields share
bits only if no kind of case reads both, or if their correlation does no harm; a comment marks the latter.

Source of `mix_words`: lowbias32 by Chris Wellons, a bijection of 32-bit words (nullprogram.com/blog/2018/07/31, public domain).
"""

from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.engine.arithmetic.step.values import V

GOLDEN_STEP = 0x9E3779B9  # 2^32 divided by the golden ratio, the step of the counter
ROUNDS = 4  # rounds of the Feistel network
WORD_MASK = (1 << 32) - 1

WordPair = tuple[Array, Array]  # a 64-bit number as two uint32 arrays, low word first
W = TypeVar("W")  # words: uint32 arrays, or lane values


def split_uint64(value: int) -> WordPair:
    """Split a Python integer from 0 to 2^64 - 1 into two words."""
    return jnp.asarray(value & WORD_MASK, jnp.uint32), jnp.asarray(value >> 32, jnp.uint32)


def add_offset(base: WordPair, offset: Array) -> WordPair:
    """Add uint32[...] offsets to a 64-bit number."""
    low = base[0] + offset
    return low, base[1] + (low < offset)


def mix_words(x: W) -> W:
    """Map each word to a distant word, bijectively."""
    word: Any = x
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def case_keys(seed: WordPair, number: WordPair) -> WordPair:
    """Compute the key of each case. A Feistel network is a bijection of 64-bit numbers, so two cases of one seed never share a key."""
    left, right = number
    for i in range(ROUNDS):
        left, right = right, left ^ mix_words(right + mix_words(seed[i % 2] + np.uint32(GOLDEN_STEP * (i + 1) & WORD_MASK)))
    return left, right


def draw_words(keys: tuple[W, W], stream: int, indices: W) -> W:
    """Draw one word for each index of a case's stream. Keys and indices broadcast.

    The function is `mix_words` with half of the key added midway.
    """
    index: Any = indices
    return mix_positions(index * np.uint32(GOLDEN_STEP) + keys[0] + np.uint32(mix_int(stream)), keys[1])


def mix_positions(x: W, other_key: W) -> W:
    """The words at these positions of the counter: the second half of `draw_words`."""
    word: Any = x
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D) ^ other_key
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


def remix_words(word: W) -> W:
    """Derive a second word from each word, where 32 bits are not enough. This is half of `mix_words`."""
    x: Any = word
    x = (x ^ (x >> 15)) * np.uint32(0x2C1B3C6D)
    return x ^ (x >> 16)


def mix_int(x: int) -> int:
    """Apply `mix_words` to a Python integer."""
    x = (x ^ x >> 16) * 0x7FEB352D & WORD_MASK
    x = (x ^ x >> 15) * 0x846CA68B & WORD_MASK
    return x ^ x >> 16


# ---- bit fields of the words


WORD_BITS = 32


class BitField(NamedTuple):
    """A contiguous range of bits in a word."""

    low: int  # index of the lowest bit
    width: int

    @property
    def mask(self) -> int:
        """A word with ones in this field."""
        return (1 << self.width) - 1 << self.low

    def extract(self, word: W) -> W:
        """Extract the field, from 0 to 2^width - 1."""
        given: Any = word
        shifted = given >> self.low if self.low else given
        return shifted if self.low + self.width == WORD_BITS else shifted & np.uint32((1 << self.width) - 1)

    def is_below(self, word: V, bound: V | int) -> V:
        """Compare the field, without bit 31 of the word, with bounds from 0 to 2^width. Nothing of the word is shifted."""
        return (word & self.mask) < (bound << self.low)

    def insert(self, value: W) -> W:
        """Build a word that has the lowest bits of `value` in this field and zeros elsewhere."""
        given: Any = value
        return (given & np.uint32((1 << self.width) - 1)) << self.low


class CaseBitField(NamedTuple):
    """A bit field of one of the words that a case draws."""

    word: int  # index of the word in the stream CASE
    bits: BitField


class CaseFields:
    """Fields of words 1 to 7 of the stream CASE. Word 0 as a whole selects the kind."""

    C_MODE = CaseBitField(1, BitField(0, 3))  # magnitude of C: 0 to 2 beside the products, 3 to 5 at a distance, 6 anywhere, 7 zero
    EXPONENT_A = CaseBitField(1, BitField(16, 16))  # start of A's exponents where each operand has its own
    EXPONENT_B = CaseBitField(2, BitField(16, 16))
    EXPONENT_C = CaseBitField(2, BitField(16, 16))  # start of C's exponents where C is anywhere; the same bits as B's
    TARGET = CaseBitField(3, BitField(16, 16))  # index of the exponent that the products are aimed at
    MISS = CaseBitField(4, BitField(0, 4))  # offset from that exponent, plus 8
    SPLIT = CaseBitField(4, BitField(4, 3))  # deviation of A's share of that exponent from one half, plus 4
    LARGE = CaseBitField(5, BitField(0, 16))  # index k of the large term
    STRIDE = CaseBitField(5, BitField(16, 16))  # distance between twins along K
    C_ABOVE = CaseBitField(6, BitField(0, 1))  # 1: C lies above the products, 0: below
    C_DRAWN = CaseBitField(6, BitField(1, 1))  # 1: C anywhere has a drawn exponent, 0: the smallest
    C_BESIDE = CaseBitField(6, BitField(8, 3))  # offset of C's exponent from the products beside it, plus 3
    EDGE = CaseBitField(6, BitField(16, 16))  # index of a distance at which a result changes
    EDGE_MISS = CaseBitField(7, BitField(0, 3))  # offset from that distance, plus 4
    DISTANCE = CaseBitField(7, BitField(15, 16))  # any distance, used in its place
    AT_AN_EDGE = CaseBitField(7, BitField(31, 1))  # 1: the distance near a change, 0: any distance


class TermFields:
    """Fields of the word of the stream TERM that each k draws. Twins share the word."""

    IS_LARGE = BitField(0, 4)  # 0: the term is one of the large terms
    DROP_MISS = BitField(4, 2)  # offset from the case's distance, plus 1
    IS_NUDGED = BitField(30, 2)  # 0: a twin differs from the other in its last bit


class FloatFields:
    """Fields of the word of a floating-point element. The topmost bits of the word, as many as the format has, are the fraction."""

    EXPONENT = BitField(0, 8)  # exponent above the lowest one
    LOW_EXPONENT = BitField(0, 16)  # the same for f64, in its third word


class FloatSecondFields:
    """Fields of the second word of a floating-point element."""

    ONE = BitField(0, 5)  # index of the one bit of an edge fraction
    VARIANT = BitField(5, 3)  # which edge fraction: zero, that one bit, or ones from that bit to either end
    EDGE = BitField(8, 8)  # below the kind's share: the fraction is an edge fraction
    SPECIAL = BitField(16, 8)  # below the kind's shares: a special value, or zero
    WHICH_SPECIAL = BitField(24, 3)
    SIGN = BitField(31, 1)


class IntegerSecondFields:
    """Fields of the second word of an integer element of A or B. The first word is its value."""

    ZERO = BitField(0, 8)  # below the kind's share: zero
    END = BitField(8, 8)  # below the kind's share: a limit of the range
    WHICH_END = BitField(24, 3)


class IntegerAccumulatorFields:
    """Fields of the word of an integer element of C. Where C is anywhere, the whole word is its value."""

    FROM_END = BitField(0, 16)  # distance from a limit of the range, plus 2^15
    LEAST = BitField(31, 1)  # 1: distance from the smallest value, 0: from the largest


class MetadataFields:
    """Fields of the word of a metadata field, and of the case's word that decides whether its metadata may be undefined."""

    ANY = BitField(0, 4)
    DEFINED = BitField(16, 16)  # index among the defined metadata fields
    MAY_BE_UNDEFINED = BitField(24, 8)  # a field of the case's word


class ScaleFields:
    """Fields of the word of a block scale. The lowest bits of the word, as many as the format has, are the fraction."""

    ANY = BitField(0, 8)
    EXPONENT = BitField(29, 3)  # offset from the exponent of 1.0, plus 3


class ScaleSecondFields:
    """Fields of the second word of a block scale."""

    WHICH_SPECIAL = BitField(0, 2)
    SPECIAL = BitField(8, 8)  # below the kind's share: a special value


class PackedKindFields:
    """Fields of the two words per case that hand the attributes of a Kind to the CUDA kernel. Shares are as in `Kind`."""

    SPAN = CaseBitField(0, BitField(0, 8))
    EDGE = CaseBitField(0, BitField(8, 8))
    SPECIAL = CaseBitField(0, BitField(16, 8))
    ZERO = CaseBitField(1, BitField(0, 9))  # share of zeros; 256 means all elements
    SAME_SIGN = CaseBitField(1, BitField(9, 1))
    RAW = CaseBitField(1, BitField(10, 1))
    TWINS = CaseBitField(1, BitField(11, 1))


class PlaceFields:
    """Fields of the word for elements that share one exponent drop: those of one k, or all of C."""

    PLACE = BitField(0, 14)  # index of the words that the elements take
    FLIPPED = BitField(14, 1)
    NUDGED = BitField(15, 1)
    FIELD = BitField(16, 16)  # exponent field of the lowest elements, signed
