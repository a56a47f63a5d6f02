"""Which bits of each drawn word serve what: a table for each word that `generators` draws.

Two fields share bits only where no kind of case looks at both, or where it does no harm that they go together; the tables say where.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

WORD = 32


class Bits(NamedTuple):
    """Some bits of a word."""

    low: int  # the first of them
    width: int

    @property
    def mask(self) -> int:
        """A word of these bits."""
        return (1 << self.width) - 1 << self.low

    def of(self, word: Array) -> Array:
        """Their value, uint32 from 0 to 2^width - 1."""
        shifted = word >> self.low if self.low else word
        return shifted if self.low + self.width == WORD else shifted & np.uint32((1 << self.width) - 1)

    def below(self, word: Array, bound: Array | int) -> Array:
        """Whether their value is below a number from 0 to 2^width - 1: both are compared as the uppermost bits of words."""
        up = np.uint32(WORD - self.width)
        return word << (up - np.uint32(self.low)) < jnp.asarray(bound).astype(jnp.uint32) << up

    def at(self, value: Array) -> Array:
        """A word that has the value's lowest bits there, and zeros elsewhere."""
        return (value.astype(jnp.uint32) & np.uint32((1 << self.width) - 1)) << self.low


class CaseBits(NamedTuple):
    """Some bits of one of the words that a case draws."""

    word: int  # its place in the stream CASE
    bits: Bits


class OfCase:
    """Words 1 to 7 of the stream CASE. Word 0, all of it, chooses the kind."""

    C_MODE = CaseBits(1, Bits(0, 3))  # what C is: 0 to 2 beside the products, 3 to 5 at a distance, 6 anywhere, 7 zero
    EXPONENT_A = CaseBits(1, Bits(16, 16))  # where A's exponents start, if each operand has its own
    EXPONENT_B = CaseBits(2, Bits(16, 16))
    EXPONENT_C = CaseBits(2, Bits(16, 16))  # where C is anywhere; goes with B's
    TARGET = CaseBits(3, Bits(16, 16))  # which exponent the products are aimed at
    MISS = CaseBits(4, Bits(0, 4))  # how far from it: this less 8
    SPLIT = CaseBits(4, Bits(4, 3))  # how far A's share of it is from one half: this less 4
    LARGE = CaseBits(5, Bits(0, 16))  # the k of the large term
    STRIDE = CaseBits(5, Bits(16, 16))  # how far twins stand apart
    C_ABOVE = CaseBits(6, Bits(0, 1))  # C lies above the products, not below
    C_DRAWN = CaseBits(6, Bits(1, 1))  # C anywhere has a drawn exponent, not the least
    C_BESIDE = CaseBits(6, Bits(8, 3))  # how far C is from the products that it is beside: this less 3
    EDGE = CaseBits(6, Bits(16, 16))  # which of the distances at which something changes
    EDGE_MISS = CaseBits(7, Bits(0, 3))  # how far from it: this less 4
    DISTANCE = CaseBits(7, Bits(15, 16))  # a distance in its place, any
    AT_AN_EDGE = CaseBits(7, Bits(31, 1))  # which of the two


class OfTerm:
    """The word of the stream TERM that a k draws; twins have the same."""

    IS_LARGE = Bits(0, 4)  # 0: it is one of the large terms
    DROP_MISS = Bits(4, 2)  # how far it is from the case's distance: this less 1
    IS_NUDGED = Bits(30, 2)  # 0: a twin differs in its last bit


class OfFloat:
    """The word of a floating-point element. Its fraction is the uppermost bits of the word, as many as the format has."""

    EXPONENT = Bits(0, 8)  # above the lowest one
    LOW_EXPONENT = Bits(0, 16)  # the same for f64, in the third word


class SecondOfFloat:
    """The second word of a floating-point element."""

    ONE = Bits(0, 5)  # which bit of a significant fraction
    VARIANT = Bits(5, 3)  # which significant fraction: zero, that one bit, or ones from it to either end
    EDGE = Bits(8, 8)  # below the kind's share: the fraction is a significant one
    SPECIAL = Bits(16, 8)  # below the kind's shares: a special value, a zero
    WHICH_SPECIAL = Bits(24, 3)
    SIGN = Bits(31, 1)


class SecondOfInteger:
    """The second word of an integer element of A or B; the first is its value."""

    ZERO = Bits(0, 8)  # below the kind's share: zero
    END = Bits(8, 8)  # below the kind's share: an end of the range
    WHICH_END = Bits(24, 3)


class OfIntegerC:
    """The word of an integer element of C; where C is anywhere, all of it."""

    FROM_END = Bits(0, 16)  # how far from an end of the range: this less 2^15
    LEAST = Bits(31, 1)  # from the least value, not the greatest


class OfMetadata:
    """The word of a metadata field, and the one that tells of a case whether its fields may be undefined."""

    ANY = Bits(0, 4)
    DEFINED = Bits(16, 16)  # which of the defined ones
    MAY_BE_UNDEFINED = Bits(24, 8)  # of the case's word


class OfScale:
    """The word of a block scale. Its fraction is the lowest bits of the word, as many as the format has."""

    ANY = Bits(0, 8)
    EXPONENT = Bits(29, 3)  # from that of one: this less 3


class SecondOfScale:
    """The second word of a block scale."""

    WHICH_SPECIAL = Bits(0, 2)
    SPECIAL = Bits(8, 8)  # below the kind's share: a special value


class OfPacked:
    """Two words of a case, in which the kernel of floats is given what an element looks at. Shares as in Kind."""

    SPAN = CaseBits(0, Bits(0, 8))
    EDGE = CaseBits(0, Bits(8, 8))
    SPECIAL = CaseBits(0, Bits(16, 8))
    ZERO = CaseBits(1, Bits(0, 9))  # 256: all elements
    SAME_SIGN = CaseBits(1, Bits(9, 1))
    RAW = CaseBits(1, Bits(10, 1))
    TWINS = CaseBits(1, Bits(11, 1))


class OfPlace:
    """The word of those elements that have one drop: a k's, or all of C."""

    PLACE = Bits(0, 14)  # whose words they take
    FLIPPED = Bits(14, 1)
    NUDGED = Bits(15, 1)
    FIELD = Bits(16, 16)  # their exponent field, signed
