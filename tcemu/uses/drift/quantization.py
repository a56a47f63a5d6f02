"""Hypotheses of a quantiser that was recorded as one operation: the rule of its scales, the extent of the largest magnitude, the division.

The f32 arithmetic is NumPy's, whose operations are single IEEE operations. The exponents of scales are `tcemu.quantize.RULES`; NVFP4, whose
block scales stand below a scale of the tensor, is computed by the rows of `tcemu.quantize.CONTRACTS`, which have the sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.engine.formats.number_formats import ARRAY_FORMATS, E2M1, F32, Format
from tcemu.operations.quantize.contract_rows import NVFP4_ROWS
from tcemu.operations.quantize.contracts import QuantizedGroups, QuantizerContract, dequantize_groups
from tcemu.operations.quantize.scale_rules import RULES
from tcemu.operations.quantize.two_level_scales import FourOverSixScale, TwoLevelScale
from tcemu.uses.drift.records import DTYPES, Operation

EXPONENT_RULES = tuple(name for name, rule in RULES.items() if rule.exponent is not None)
SCALE_RULES = ("f32", "f32 by the reciprocal", *EXPONENT_RULES)
DIVISIONS = ("x / scale", "x · (1 / scale)", "x · (largest element / amax)")
BLOCKS = (16, 32, 64, 128, 256)
BLOCK = 16  # elements of a block of NVFP4
WHOLE = 0  # an extent that spans its axis
ELEMENTS = {E2M1: np.dtype(ml_dtypes.float4_e2m1fn)} | {ARRAY_FORMATS[DTYPES[n]]: DTYPES[n] for n in ("float8_e4m3fn", "float8_e5m2")}


class Quantization(NamedTuple):
    """The arithmetic of a quantiser.

    Attributes:
        element: Format of the elements.
        rule: One of SCALE_RULES. "f32": amax over the largest element; "f32 by the reciprocal": amax times its rounded reciprocal.
        extent: Rows and columns over which the largest magnitude is taken; WHOLE for all. Rows of all leading axes are counted.
        division: One of DIVISIONS.
        stored: "scale", or "inverse" for its reciprocal.
    """

    element: Format
    rule: str
    extent: tuple[int, int]
    division: str
    stored: str

    def features(self) -> dict[str, str]:
        """Return the choices by the name of the hypothesis."""
        return {
            "element format": str(self.element),
            "quantisation rule": self.rule,
            "extent of amax": _extent_words(self.extent),
            "division by the scale": self.division,
            "stored scale": self.stored,
        }

    def __str__(self) -> str:
        words = f"{self.element} elements, scales by {self.rule} from the amax of {_extent_words(self.extent)}, {self.division}"
        return words + ("" if self.stored == "scale" else ", the inverse scale is stored")


class BlockQuantization(NamedTuple):
    """The arithmetic of a quantiser to NVFP4: e2m1 elements with e4m3 scales of blocks, and mostly an f32 scale of the tensor.

    Attributes:
        contract: The library's arithmetic.
        stored: "scale", or "inverse" for the reciprocal of the tensor's scale.
    """

    contract: QuantizerContract
    stored: str

    @property
    def has_tensor_scale(self) -> bool:
        return isinstance(self.contract.scale, TwoLevelScale | FourOverSixScale) and self.contract.scale.has_tensor_scale

    def features(self) -> dict[str, str]:
        """Return the choices by the name of the hypothesis."""
        return {
            "element format": str(self.contract.element),
            "quantisation rule": self.contract.scale.describe(),
            "extent of amax": _extent_words((1, BLOCK)),
            "levels of scales": "a tensor and its blocks" if self.has_tensor_scale else "blocks",
            "stored scale": self.stored,
        }

    def __str__(self) -> str:
        words = f"NVFP4 as {self.contract.libraries[0]}: {self.contract.scale.describe()}"
        return words + ("" if self.stored == "scale" else ", the inverse scale of the tensor is stored")

    def compute(self, x: np.ndarray, operation: Operation) -> list[np.ndarray]:
        """Compute the results of a quantiser, each as it was recorded: packed elements, codes or values, and scales."""
        words = self.contract.quantize(x.reshape(-1, x.shape[-1]))
        return [self._result(words, tensor.shape, DTYPES[tensor.dtype], x.size) for tensor in operation.results]

    def _result(self, words: QuantizedGroups, shape: tuple[int, ...], dtype: np.dtype, size: int) -> np.ndarray:
        count = prod(shape)
        if count == 1:
            scale = np.float32(1) if words.tensor_scale is None else np.asarray(words.tensor_scale).view(np.float32)
            return np.asarray(scale if self.stored == "scale" else np.float32(1) / scale, dtype).reshape(shape)
        if count * BLOCK == size:
            codes = np.asarray(words.scales, np.uint8)
            return (codes if dtype == np.uint8 else codes.view(dtype)).reshape(shape)
        if dtype != np.uint8:
            return np.asarray(dequantize_groups(self.contract, words)).astype(dtype).reshape(shape)
        codes = np.asarray(words.codes, np.uint8).reshape(-1)
        return (codes if count == size else codes[::2] | codes[1::2] << 4).reshape(shape)  # the first element in the low bits


def _extent_words(extent: tuple[int, int]) -> str:
    rows, columns = extent
    if (rows, columns) == (WHOLE, WHOLE):
        return "the tensor"
    if rows == 1:
        return "a row" if columns == WHOLE else f"a block of {columns}"
    return f"a tile of {rows or 'all rows'} x {columns or 'all columns'}" if columns != 1 else f"a column of {rows or 'all rows'}"


def is_block_quantizer(operation: Operation) -> bool:
    """Return whether an operation quantises to NVFP4: its name says so, and it gives 4-bit elements or values and scales of blocks."""
    if not operation.operands or not operation.operands[0].shape or "quant" not in operation.name.lower():
        return False
    given, sizes = operation.operands[0], [(prod(t.shape), t.dtype) for t in operation.results]
    size = prod(given.shape)
    scales = [(count, dtype) for count, dtype in sizes if count * BLOCK == size and dtype in ("float8_e4m3fn", "uint8")]
    elements = [count for count, dtype in sizes if dtype == "uint8" and count in (size, size // 2)]
    values = [count for count, dtype in sizes if dtype == given.dtype and count == size > 1]
    others = len(sizes) - len(scales) - len(elements) - len(values)
    alone = len(values) == len(sizes) == 1
    whole = given.dtype in ("float32", "bfloat16") and given.shape[-1] % BLOCK == 0 and size > BLOCK
    tensor = [dtype for count, dtype in sizes if count == 1]
    return (
        whole and len(elements) + len(values) == 1 and (alone or len(scales) == 1) and others == len(tensor) and set(tensor) <= {"float32"}
    )


def is_quantizer(operation: Operation) -> bool:
    """Return whether an operation quantises: it gives narrow elements and their scales, or its name says so."""
    if is_block_quantizer(operation):
        return True
    if not operation.operands or not operation.results or operation.results[0].shape != operation.operands[0].shape:
        return False
    wide = operation.operands[0].dtype in ("float32", "bfloat16", "float16")
    narrow = operation.results[0].dtype.startswith("float8")
    named = "quant" in operation.name.lower() and operation.results[0].dtype in ("float32", "bfloat16", "float16")
    return (
        wide
        and len(operation.operands[0].shape) > 0
        and ((narrow and len(operation.results) == 2) or (named and len(operation.results) <= 2))
    )


def candidate_quantizations(operation: Operation) -> Iterator[Quantization | BlockQuantization]:
    """Yield the arithmetics that fit the shapes of a quantiser, those whose extent is the scales' own first."""
    results = [(prod(t.shape), t.dtype) for t in operation.results]
    if len(results) < 3 and results[0][1] != "uint8" and operation.results[0].shape == operation.operands[0].shape:
        yield from _candidate_scalings(operation)
    if is_block_quantizer(operation):
        stored = ("scale", "inverse") if any(count == 1 for count, _ in results) else ("scale",)
        for contract, kind in product(NVFP4_ROWS, stored):
            how = BlockQuantization(contract, kind)
            if (how.has_tensor_scale or kind == "scale") and contract.only in (None, ARRAY_FORMATS[DTYPES[operation.operands[0].dtype]]):
                yield how


def _candidate_scalings(operation: Operation) -> Iterator[Quantization]:
    shape = operation.operands[0].shape
    rows, columns = prod(shape[:-1]), shape[-1]
    narrow = DTYPES.get(operation.results[0].dtype)
    elements = [fmt for fmt, dtype in ELEMENTS.items() if dtype == narrow] or list(ELEMENTS)
    layout = scale_block(shape, operation.results[1].shape) if len(operation.results) > 1 else None
    sizes = [WHOLE, *(block for block in BLOCKS if block < columns)]
    tiles = [(r, c) for r, c in product((1, 128, WHOLE), [*sizes, 1]) if (r, c) != (1, 1) and (r != 128 or c == 128)]
    named = {(r if r < rows else WHOLE, c if c < columns else WHOLE) for r, c in tiles}
    extents = sorted(named, key=lambda extent: (extent != layout, extent))
    if layout is not None:  # an extent must not be finer than the scales
        extents = [
            e for e in extents if all(size == WHOLE or (own != WHOLE and size % own == 0) for size, own in zip(e, layout, strict=True))
        ]
    stored = ("scale", "inverse") if len(operation.results) > 1 else ("scale",)
    for element, extent, rule, division, kind in product(elements, extents, SCALE_RULES, DIVISIONS, stored):
        if rule in EXPONENT_RULES and division != DIVISIONS[0]:
            continue  # a power of two: every division is exact
        yield Quantization(element, rule, extent, division, kind)


def scale_block(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, from the shapes; None if they do not fit."""
    rows, columns = prod(shape[:-1]), shape[-1]
    if prod(scales) == 1:
        return WHOLE, WHOLE
    if scales[:-1] == shape[:-1] and scales[-1] and columns % scales[-1] == 0:
        size = columns // scales[-1]
        return 1, WHOLE if size == columns else size
    if scales == shape[:-1]:
        return 1, WHOLE
    if len(scales) == 2 and all(scales) and rows % scales[0] == columns % scales[1] == 0:
        down, along = rows // scales[0], columns // scales[1]
        return WHOLE if down == rows else down, WHOLE if along == columns else along
    return None


def quantize(how: Quantization, x: np.ndarray, operation: Operation) -> list[np.ndarray]:
    """Compute the results of a quantiser: the elements, as codes or as values, and the scales if it gives them."""
    wide = np.ascontiguousarray(x, np.float32).reshape(prod(x.shape[:-1]), x.shape[-1])
    dtype = ELEMENTS[how.element]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    down, along = (axis if size == WHOLE else size for axis, size in zip(wide.shape, how.extent, strict=True))
    missing = [(0, -axis % size) for axis, size in zip(wide.shape, (down, along), strict=True)]
    padded = np.pad(np.abs(wide), missing)
    tiles = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // along, along)
    amax = tiles.max((1, 3))
    with np.errstate(all="ignore"):
        scale = _scales(how, amax, largest)
        spread = lambda values: np.repeat(np.repeat(values, down, 0), along, 1)[: wide.shape[0], : wide.shape[1]]
        inverse = np.where(amax == 0, np.float32(1), largest / amax if how.division == DIVISIONS[2] else np.float32(1) / scale)
        scaled = wide / spread(scale) if how.division == DIVISIONS[0] else wide * spread(inverse)
        elements = np.clip(scaled, -largest, largest).astype(dtype)
        first = DTYPES[operation.results[0].dtype]
        values = elements if first == dtype else (elements.astype(np.float32) * spread(scale)).astype(first)
        results: list[np.ndarray] = [values.reshape(x.shape)]
        if len(operation.results) > 1:
            kept = operation.results[1]
            block = scale_block(x.shape, kept.shape)
            if block is None:
                return results
            steps = [axis if size == WHOLE else size for axis, size in zip(wide.shape, block, strict=True)]
            chosen = spread(scale if how.stored == "scale" else inverse.astype(np.float32))[:: steps[0], :: steps[1]]
            results.append(_scale_codes(chosen, kept.dtype).reshape(kept.shape))
    return results


def _scales(how: Quantization, amax: np.ndarray, largest: np.float32) -> np.ndarray:
    if how.rule == "f32":
        return np.where(amax == 0, np.float32(1), amax / largest)
    if how.rule == "f32 by the reciprocal":
        return np.where(amax == 0, np.float32(1), amax * (np.float32(1) / largest))
    exponents = np.clip(_exponents(how.rule, how.element, amax.tobytes()).reshape(amax.shape), -127, 127)
    return np.ldexp(np.float32(1), exponents)


@lru_cache(maxsize=64)  # every division is tried with the same scales
def _exponents(rule: str, element: Format, amax: bytes) -> np.ndarray:
    exponent = RULES[rule].require_exponent()
    return np.asarray(exponent((jnp.asarray(np.frombuffer(amax, np.uint32)),), F32, element))


def _scale_codes(scale: np.ndarray, name: str) -> np.ndarray:
    """Return scales in the recorded dtype; bytes are exponents with a bias of 127."""
    if name in ("uint8", "float8_e8m0fnu"):
        codes = (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)
        return codes if name == "uint8" else codes.view(DTYPES[name])
    return scale.astype(DTYPES[name]) if name in DTYPES else scale


def quantization_misses(how: Quantization | BlockQuantization, x: np.ndarray, operation: Operation, results: list[Any]) -> tuple[int, int]:
    """Return the number of wrong words of all results, and the number of words."""
    got = quantize(how, x, operation) if isinstance(how, Quantization) else how.compute(x, operation)
    if len(got) != len(results):
        return 1, 1
    bits = lambda y: np.ascontiguousarray(y).reshape(-1).view(f"u{y.dtype.itemsize}")
    wrong = sum(int((bits(y) != bits(z)).sum()) for y, z in zip(got, results, strict=True))
    return wrong, sum(y.size for y in got)
