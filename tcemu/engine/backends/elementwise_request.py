"""Requests to the kernels of quantisers: elements that are scaled and rounded, and the max magnitudes from which scales are found."""

from typing import NamedTuple

from tcemu.engine.formats.number_formats import F32, Format

EVERY = (1 << 31) - 1  # elements along K that share a scale, where all do


class ElementwiseRequest(NamedTuple):
    """x / scale or x * scale in f32, and then the nearest number of the target: codes of the target [batch, R, K].

    The operands are codes of x [batch, R, K] and, unless `depth` is None, codes of scales [batch or 1, R or 1, groups along K]. Both
    operations are those of IEEE 754, rounded to nearest even, with subnormals; codes are as `tcemu.formats.convert` returns them.
    """

    source: Format  # f32, f16 or bf16; on CPUs e4m3 too
    target: Format
    saturate: bool
    depth: int | None  # elements along K that share a scale; None: there are no scales
    multiplied: bool = False
    scale: Format = F32  # of the scales, f32 or ue8m0


class ScaleRequest(NamedTuple):
    """The scale of a max magnitude: magnitude / largest, an f32 quotient, or `least` if that is greater; 1 where the magnitude is zero.

    Numbers are f32 codes. A magnitude of Inf or NaN has the scale Inf or NaN, the canonical one.
    """

    largest: int
    least: int
    power_of_two: bool  # a finite scale is rounded up to a power of two


class MagnitudeRequest(NamedTuple):
    """The max magnitude of each group of neighbours along K: f32 codes without sign [batch, R, groups], of codes of x [batch, R, K].

    NaN is greater than Inf, and keeps its fraction unless x is f16.
    """

    source: Format  # f32, f16 or bf16
    depth: int  # elements of a group; the last one may have fewer
    scale: ScaleRequest | None = None  # the result is the scale of the max magnitude
