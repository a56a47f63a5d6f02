"""The contracts that give equal words, and the inputs on which others part, on the same drawn blocks and with a counterexample.

The draws aim at what contracts disagree on: max magnitudes near powers of two and near the largest element, elements in the middle of two
codes, very small and very large numbers, zeros, NaN and Inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from tcemu.base.results import Result, Table
from tcemu.base.text import table_lines
from tcemu.engine.formats.coding import decode
from tcemu.engine.formats.number_formats import BF16, E2M1, F32, UE4M3, Format
from tcemu.operations.quantize.contract_rows import CONTRACTS
from tcemu.operations.quantize.contracts import QuantizerContract, quantize_blocks
from tcemu.operations.quantize.two_level_scales import FourOverSixScale

OPEN = "left open"
SIGNS = np.array([-1, 1], np.float32)
BLOCK = 16  # elements of a drawn block
BF16_BITS = np.uint32(0xFFFF0000)  # of an f32 code
REDUCED_BLOCKS = 256  # parting blocks that are reduced to two elements, in search of one that parts still


class Region(NamedTuple):
    """A kind of input."""

    letter: str
    description: str


REGIONS = {
    "ordinary": Region("o", "amax from 2^-8 to 2^100"),
    "small": Region("s", "amax from 2^-100 to 2^-8"),
    "tiny": Region("t", "amax below 2^-100, subnormal numbers included"),
    "huge": Region("h", "amax from 2^100 on"),
    "negative zero": Region("-", "ordinary numbers beside -0"),
    "zero": Region("0", "zeros alone"),
    "infinite": Region("i", "Inf beside ordinary numbers"),
    "not a number": Region("n", "NaN beside ordinary numbers"),
}
SPECIAL = ("infinite", "not a number")  # regions that some libraries leave open
EXPONENTS = {"ordinary": (-8, 100), "small": (-100, -8), "tiny": (-149, -100), "huge": (100, 128)}


def draw_blocks(region: str, element: Format, count: int, seed: int = 0, source: Format = F32) -> tuple[np.ndarray, np.ndarray]:
    """Draw blocks of f32 numbers.

    Args:
        region: One of `REGIONS`.
        element: The format of the elements that they will be rounded to.
        count: Number of blocks.
        seed: Seed of NumPy's generator.
        source: bf16: the numbers are rounded to it, toward zero.

    Returns:
        The codes of the blocks, uint32 [count, BLOCK], and the max magnitudes of their tensors, f32 codes [count, 1].

    Raises:
        KeyError: The region is unknown.
    """
    rng = np.random.default_rng([seed, list(REGIONS).index(region)])
    low, high = EXPONENTS.get(region, EXPONENTS["ordinary"])
    amax = _draw_amax(rng, element, count, low, high)
    x = (amax[:, None].astype(np.float64) * _draw_ratios(rng, element, amax, (count, BLOCK))).astype(np.float32)
    x = np.clip(x, -amax[:, None], amax[:, None])
    place = rng.integers(BLOCK, size=count)
    x[np.arange(count), place] = amax * rng.choice(SIGNS, count)
    others = (place + rng.integers(1, BLOCK, size=count)) % BLOCK
    if region == "negative zero":
        x[np.arange(count), others] = np.float32(-0.0)
    elif region == "zero":
        x[:] = 0
        x[: count // 2, ::2] = np.float32(-0.0)
    elif region in ("infinite", "not a number"):
        value = np.float32(np.inf) * rng.choice(SIGNS, count) if region == "infinite" else np.uint32(0x7FC00000).view(np.float32)
        x[np.arange(count), others] = value
    codes, tensor = x.view(np.uint32), _draw_tensor_amax(rng, amax)
    return (codes & BF16_BITS, tensor & BF16_BITS) if source == BF16 else (codes, tensor)


def _draw_tensor_amax(rng: np.random.Generator, amax: np.ndarray) -> np.ndarray:
    """Draws larger magnitudes: powers of two times amax, or such that the block's scale is near a code of ue4m3 or near a middle."""
    count = len(amax)
    values = _format_values(UE4M3)
    near = (
        448 / rng.choice(np.concatenate([values[1:], (values[1:] + values[:-1]) / 2]), count) * (1 + rng.integers(-3, 4, count) * 2.0**-23)
    )
    ratio = np.where(rng.random(count) < 0.5, np.exp2(rng.integers(0, 24, count)), np.maximum(near, 1))
    tensor = np.minimum(amax.astype(np.float64) * ratio, np.finfo(np.float32).max).astype(np.float32)
    return tensor.view(np.uint32)[:, None]


def _format_values(fmt: Format) -> np.ndarray:
    """Returns every finite magnitude of a narrow format."""
    number = decode(fmt, jnp.arange(fmt.max_magnitude + 1).astype(fmt.dtype))
    return np.asarray(number.magnitude[0]).astype(np.float64) * np.exp2(np.asarray(number.exponent).astype(np.float64))


def _draw_amax(rng: np.random.Generator, element: Format, count: int, low: int, high: int) -> np.ndarray:
    """Draws positive numbers: half at random, half within some units of the fractions at which a rule may change its mind."""
    fractions = rng.integers(0, 1 << 23, count)
    steps = 1 << (23 - element.mantissa_bits)
    special = rng.integers(0, 1 << element.mantissa_bits, count) * steps + rng.choice([0, steps // 2], count) + rng.integers(-12, 13, count)
    fractions = np.where(rng.random(count) < 0.5, fractions, special)
    codes = (rng.integers(low, high, count) + 127 << 23) + fractions
    subnormal = rng.integers(1, 1 << 23, count)
    codes = np.where(codes < 1 << 23, subnormal, np.minimum(codes, 0x7F7FFFFF))
    return codes.astype(np.uint32).view(np.float32)


def _draw_ratios(rng: np.random.Generator, element: Format, amax: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Draws x / amax: at random over many binades, or so that x / scale is near the middle of two codes."""
    random = rng.uniform(-1, 1, shape) * np.exp2(-rng.integers(0, 14, shape))
    values = _format_values(element)
    middles = (values[1:] + values[:-1]) / 2
    largest = values[-1]
    powers = np.exp2(np.floor(np.log2(amax.astype(np.float64))))[:, None] / amax[:, None].astype(np.float64)
    scale = np.where(rng.random((shape[0], 1)) < 0.5, 1 / largest, powers / 2.0**element.max_exponent)
    near = rng.choice(middles, shape) * scale * (1 + rng.integers(-2, 3, shape) * 2.0**-23) * rng.choice([-1, 1], shape)
    return np.where(rng.random(shape) < 0.5, random, near)


class GroupWords(NamedTuple):
    """The words of drawn blocks."""

    codes: np.ndarray  # [blocks, BLOCK]
    scales: np.ndarray  # [blocks, 1]
    tensor_scale: np.ndarray | None  # [blocks, 1]


class Counterexample(NamedTuple):
    """Two elements of a block on which two contracts part, and their words."""

    amax: float
    x: float
    tensor_amax: float | None
    left: tuple[int, int]  # code of x, code of the scale
    right: tuple[int, int]
    alone: bool = True  # the two elements part by themselves; False: only with the others of their block

    def __str__(self) -> str:
        tensor = "" if self.tensor_amax is None else f", tensor amax {self.tensor_amax:.9g}"
        words = " and ".join(f"{code:#x} by scale {scale:#x}" for code, scale in (self.left, self.right))
        beside = "" if self.alone else " among other elements"
        return f"amax {self.amax:.9g}{tensor}, x {self.x:.9g}{beside}: {words}"


class Divergence(NamedTuple):
    """The comparison of two contracts on one region."""

    region: str
    differing: int  # blocks
    compared: int  # 0 where a library leaves the region open
    example: Counterexample | None


@dataclass(frozen=True)
class ContractComparison:
    """Two contracts on the same blocks."""

    left: str
    right: str
    divergences: tuple[Divergence, ...]  # one per region

    @property
    def equal(self) -> bool:
        """True if no word differed."""
        return not any(d.differing for d in self.divergences)

    @property
    def letters(self) -> str:
        """The letters of the regions in which words differ; "=" if none does."""
        return "".join(REGIONS[d.region].letter for d in self.divergences if d.differing) or "="


@dataclass(frozen=True)
class ContractMatrix(Result):
    """Every pair of contracts with equal formats."""

    names: tuple[str, ...]
    comparisons: tuple[ContractComparison, ...]
    blocks: int  # per region

    def table(self) -> Table:
        """Return one row for each pair and region in which they part, with a counterexample."""
        rows = [
            (c.left, CONTRACTS[c.left].versions, c.right, CONTRACTS[c.right].versions, d.region, d.differing, d.compared, str(d.example))
            for c in self.comparisons
            for d in c.divergences
            if d.differing
        ]
        columns = ("left", "left_version", "right", "right_version", "region", "differing", "compared", "counterexample")
        return Table("Pairs of contracts that part", columns, tuple(rows), {"blocks_per_region": self.blocks})

    def __str__(self) -> str:
        """Return the matrix as text: for each pair the letters of the regions in which words differ."""
        lines = []
        found = {frozenset((c.left, c.right)): c for c in self.comparisons}
        for family in dict.fromkeys(CONTRACTS[name].family for name in self.names):
            names = [name for name in self.names if CONTRACTS[name].family == family]
            heads = [family, "version", *map(str, range(1, len(names)))]
            rows = [
                [f"{n} {name}", CONTRACTS[name].versions, *(found[frozenset((name, other))].letters for other in names[: n - 1])]
                for n, name in enumerate(names, 1)
            ]
            rows = [row + [""] * (len(heads) - len(row)) for row in rows]
            lines += [*table_lines(heads, rows, left=range(len(heads))), ""]
        legend = [f"{region.letter} {region.description}" for region in REGIONS.values()]
        narrow = [name for name in self.names if _takes_bf16_alone(name)]
        if narrow:
            legend.append(f"Pairs with {', '.join(narrow)} are compared on bfloat16 numbers, since that rule takes no others.")
        return "\n".join(
            [*lines, f"= equal words on {self.blocks} float32 blocks of each kind; else the kinds on which words differ:", *legend]
        )


def contract_matrix(names: Sequence[str] = tuple(CONTRACTS), *, blocks: int = 2048, seed: int = 0) -> ContractMatrix:
    """Compare every pair of contracts with equal formats on drawn blocks.

    Args:
        names: Names of `CONTRACTS`.
        blocks: Blocks of 16 elements per region.
        seed: Seed of the draws.

    Returns:
        The matrix, with a counterexample for each pair and region.

    Raises:
        KeyError: A name is unknown.
    """
    pairs = [(a, b) for a, b in combinations(names, 2) if CONTRACTS[a].family == CONTRACTS[b].family]
    words: dict[tuple[str, Format], dict[str, GroupWords]] = {}
    found = []
    for a, b in pairs:
        source = BF16 if _takes_bf16_alone(a) or _takes_bf16_alone(b) else F32
        for name in (a, b):
            if (name, source) not in words:
                words[name, source] = {region: contract_words(CONTRACTS[name], region, blocks, seed, source) for region in REGIONS}
        found.append(_compare(a, b, words[a, source], words[b, source], blocks, seed, source))
    return ContractMatrix(tuple(names), tuple(found), blocks)


def _takes_bf16_alone(name: str) -> bool:
    return CONTRACTS[name].only == BF16


def contract_words(contract: QuantizerContract, region: str, blocks: int, seed: int = 0, source: Format = F32) -> GroupWords:
    """Return the words of a contract on the blocks of a region (f32, or bf16 numbers in f32), as NumPy arrays."""
    codes, tensor = draw_blocks(region, contract.element, blocks, seed, source)
    words = quantize_blocks(contract, jnp.asarray(codes), jnp.asarray(tensor))
    return GroupWords(
        np.asarray(words.codes), np.asarray(words.scales), None if words.tensor_scale is None else np.asarray(words.tensor_scale)
    )


def _compare(
    a: str, b: str, left: dict[str, GroupWords], right: dict[str, GroupWords], blocks: int, seed: int, source: Format
) -> ContractComparison:
    found = []
    skipped = SPECIAL if any(CONTRACTS[name].open_specials for name in (a, b)) else ()
    for region in REGIONS:
        if region in skipped:
            found.append(Divergence(region, 0, 0, None))
            continue
        one, other = left[region], right[region]
        wrong = (one.codes != other.codes) | (one.scales != other.scales)
        if one.tensor_scale is not None and other.tensor_scale is not None:
            wrong |= one.tensor_scale != other.tensor_scale
        differing = np.flatnonzero(wrong.any(-1))
        example = None
        if differing.size:
            codes, tensor = draw_blocks(region, CONTRACTS[a].element, blocks, seed, source)
            takes_tensor = any(CONTRACTS[name].takes_tensor_amax for name in (a, b))
            if any(isinstance(CONTRACTS[name].scale, FourOverSixScale) for name in (a, b)):
                example = _reduced_example((a, b), codes, tensor, (one, other), differing)
            else:
                example = _example(takes_tensor, codes, tensor, one, other, int(differing[0]))
        found.append(Divergence(region, int(differing.size), blocks, example))
    return ContractComparison(a, b, tuple(found))


def _reduced_example(
    names: tuple[str, str], codes: np.ndarray, tensor: np.ndarray, words: tuple[GroupWords, GroupWords], differing: np.ndarray
) -> Counterexample:
    """Returns a counterexample of rules that look at all elements: a block is one if its two elements part by themselves."""
    differing = np.resize(differing, REDUCED_BLOCKS)  # always one shape: JAX compiles each rule once
    chosen = codes[differing].view(np.float32)
    place = np.argmax(words[0].codes[differing] != words[1].codes[differing], axis=-1)
    magnitude = np.where(np.isnan(chosen), np.inf, np.abs(chosen))
    rows = np.arange(len(differing))
    blocks = np.zeros_like(chosen)
    blocks[:, 0], blocks[:, 1] = np.abs(chosen[rows, np.argmax(magnitude, axis=-1)]), chosen[rows, place]
    reduced = [quantize_blocks(CONTRACTS[name], jnp.asarray(blocks.view(np.uint32)), jnp.asarray(tensor[differing])) for name in names]
    one, other = (GroupWords(np.asarray(w.codes)[:, :2], np.asarray(w.scales), None) for w in reduced)
    parted = (one.codes[:, 1] != other.codes[:, 1]) | (one.scales[:, 0] != other.scales[:, 0])
    row = int(np.argmax(parted))  # the first block, if none parts
    if parted[row]:
        found = [(int(w.codes[row, 1]), int(w.scales[row, 0])) for w in (one, other)]
    else:
        found = [(int(w.codes[differing[row], place[row]]), int(w.scales[differing[row], 0])) for w in words]
    amax, x = map(float, blocks[row, :2])
    left, right = found
    return Counterexample(amax, x, float(tensor[differing[row]].view(np.float32)[0]), left, right, alone=bool(parted[row]))


def _example(takes_tensor: bool, codes: np.ndarray, tensor: np.ndarray, one: GroupWords, other: GroupWords, row: int) -> Counterexample:
    x = codes[row].view(np.float32)
    place = int(np.argmax(one.codes[row] != other.codes[row]))
    left, right = ((int(w.codes[row, place]), int(w.scales[row, 0])) for w in (one, other))
    special = x[~np.isfinite(x)]
    largest = float(special[0]) if special.size else float(np.max(np.abs(x)))
    return Counterexample(abs(largest), float(x[place]), float(tensor[row].view(np.float32)[0]) if takes_tensor else None, left, right)


def special_words(contract: QuantizerContract) -> dict[str, str]:
    """Return in words what a contract does with a block of zeros, with NaN and with Inf beside 1, and with 2^-140 alone."""
    blocks = np.zeros((4, BLOCK), np.uint32)
    blocks[1:, 0] = np.float32(1).view(np.uint32)
    blocks[1, 1], blocks[2, 1] = 0x7FC00000, 0x7F800000
    blocks[3, 0] = 1 << 9
    tensor = np.full((4, 1), np.float32(1).view(np.uint32))
    words = quantize_blocks(contract, jnp.asarray(blocks), jnp.asarray(tensor))
    codes, scales = np.asarray(words.codes), np.asarray(words.scales)[:, 0]
    digits = 8 if contract.scale.format == F32 else 2
    width = 1 if contract.element == E2M1 else 2
    tell = lambda n, *places: " ".join(f"{int(codes[n, i]):0{width}x}" for i in places) + f" by {int(scales[n]):0{digits}x}"
    of_specials = [OPEN if contract.open_specials else tell(n, 0, 1) for n in (1, 2)]
    return {"zero": tell(0, 0), "1 and NaN": of_specials[0], "1 and Inf": of_specials[1], "2^-140": tell(3, 0)}
