"""Operands of any computing instruction, generated on the device from a seed and a case number, as matrices of raw codes.

Every element is a function of its case's key and its own index, so elements need no order among each other. Terms are related through the
key alone: which k is large, how far the other terms lie below it and which k has a twin is drawn once per case, for A's columns and B's
rows alike.

Elements of float operands are built by XLA, or by a CUDA kernel on an NVIDIA GPU. The kernel has no arithmetic of its own: `build_float` is
written as CUDA C++ from its trace, and `cuda/draw.cu` adds what is known of a case.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.compilation import call_by_platform, compile_once
from tcemu.base.execution import PORTABLE, current_execution
from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends import batched_calls as calls
from tcemu.engine.backends.cuda import scalar_functions as scalars
from tcemu.engine.backends.cuda.kernel_text import prepend_machine
from tcemu.engine.backends.cuda.xla_launch import PLATFORM, KernelEntry, launch, route
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.grammar import parse
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.uses.fuzz.random_words import (
    CaseBitField,
    CaseFields,
    FloatFields,
    FloatSecondFields,
    IntegerAccumulatorFields,
    IntegerSecondFields,
    MetadataFields,
    PackedKindFields,
    PlaceFields,
    ScaleFields,
    ScaleSecondFields,
    TermFields,
    WordPair,
    add_offset,
    case_keys,
    draw_words,
    mix_words,
    remix_words,
    split_uint64,
)

# codes by operand name, with a leading axis of cases: "a", "b" and "c"; "e", the metadata, for a sparse instruction; "scale_a" and
# "scale_b" for a block-scaled one
OperandCodes = dict[str, Array]
HostOperandCodes = dict[str, np.ndarray]  # the same as NumPy arrays
# the operands of one element of D as Python integers: K codes of "a" and "b", one of "c", the others of its row and column
DotOperands = dict[str, list[int]]


def codes_to_integers(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Return codes with one entry each: two-word codes as Python integers, others unchanged."""
    return codes[..., 0].astype(object) + (codes[..., 1].astype(object) << 32) if fmt.words == 2 else codes


def integers_to_codes(fmt: Format, codes: Any) -> np.ndarray:
    """Convert an array of integers, one per code, to the format's dtype, or to uint32[..., 2] for two-word formats."""
    if fmt.words == 1:
        return codes.astype(fmt.dtype)
    return np.stack([(codes & 0xFFFFFFFF).astype(np.uint32), (codes >> 32).astype(np.uint32)], axis=-1)


def place_dots(op: MatrixMultiply, dots: Sequence[DotOperands], positions: Sequence[tuple[int, int, int]], count: int) -> HostOperandCodes:
    """Build `count` cases with dot products at the positions (case, row, column).

    Other elements are zero, scales are 1.0, and metadata is the first defined field.
    """
    spec = product_spec(op)
    (m, k), (_, n) = op.matrix_shape("a"), op.matrix_shape("d")
    shapes = {"a": (m, k), "b": (op.k, n), "c": (m, n)}
    formats = {"a": spec.a, "b": spec.b, "c": spec.c}
    integers = {name: np.zeros((count, *shape), object) for name, shape in shapes.items()}
    extra: HostOperandCodes = {}
    if op.sparse:
        extra["e"] = np.full((count, *op.matrix_shape(op.metadata_operand)), defined_fields(op.chunk_size, op.ordered)[0], np.uint8)
    if op.scaling is not None:
        unit_scale = op.scaling.format.bias << op.scaling.format.mantissa_bits
        extra |= {name: np.full((count, *op.matrix_shape(name)), unit_scale, np.uint8) for name in ("scale_a", "scale_b")}
    for dot, (case, i, j) in zip(dots, positions, strict=True):
        integers["a"][case, i], integers["b"][case, :, j], integers["c"][case, i, j] = dot["a"], dot["b"], dot["c"][0]
        for name, codes in extra.items():
            codes[(case, slice(None), j) if name == "scale_b" else (case, i)] = dot[name]
    return {name: integers_to_codes(formats[name], x) for name, x in integers.items()} | extra


# ---- kinds of cases


EVERY = 255  # the largest share, and the span of all exponents
ALL = EVERY + 1  # a share that includes every element
MAX_WEIGHT = (1 << 31) - 1  # keeps the sum of all weights times a word within 64 bits
ANY_BASE, AIMED_BASE = (
    0,
    1,
)  # bases: exponents of A and B drawn independently, or so that products meet an exponent at which a result changes


class Kind(NamedTuple):
    """The distribution of one kind of case. Shares are out of 255 elements."""

    name: str
    weight: int
    base: int = ANY_BASE
    span: int = 0  # number of exponents above the base
    raw: bool = False  # every bit is drawn
    edge: int = 0  # share of edge fractions: zero, one bit, ones at either end
    special: int = 0  # share of zero, Inf, NaN, the first and last normal and subnormal numbers; for integers the limits of the range
    zero: int = 0  # share of zeros
    same_sign: bool = False
    spread: bool = False  # most terms lie below a few others by an alignment distance at which a result changes
    twins: bool = False  # terms come in pairs that cancel, except for the last bit of some


KINDS = (
    Kind("raw bits", 8, raw=True),
    Kind("edge values", 8, span=EVERY, edge=EVERY, special=16),
    Kind("near one another", 14, base=AIMED_BASE, span=3),
    Kind("any exponent", 8, span=EVERY, zero=16),
    Kind("subnormal", 6, base=AIMED_BASE, span=1, edge=64, zero=16),
    Kind("specials", 6, base=AIMED_BASE, span=6, special=24, zero=24),
    Kind("carries", 8, base=AIMED_BASE, edge=200, same_sign=True),
    Kind("few terms", 8, base=AIMED_BASE, span=10, edge=96, zero=200),
    Kind("alignment edges", 14, base=AIMED_BASE, edge=96, spread=True),
    Kind("near ties", 12, base=AIMED_BASE, edge=EVERY, zero=64, spread=True),
    Kind("cancellation", 14, base=AIMED_BASE, edge=64, spread=True, twins=True),
    Kind("near-cancelling alike", 8, base=AIMED_BASE, span=2, edge=64, twins=True),
)


def select_kinds(names: Sequence[str] | None = None, weights: Sequence[int] | None = None) -> tuple[Kind, ...]:
    """Select kinds by name, optionally with other weights.

    Args:
        names: Names from `tcemu.fuzz.KINDS`, each at most once. None selects all kinds.
        weights: One weight per selected kind, from 0 to 2^31 - 1, not all zero. None keeps the kinds' own weights.

    Returns:
        The selected kinds.

    Raises:
        ValueError: A name or a weight is invalid.
    """
    known = {kind.name: kind for kind in KINDS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"kinds: {name!r} is unknown; known kinds are {', '.join(map(repr, known))}")
    if names is not None and (not len(names) or len(set(names)) < len(names)):
        raise ValueError(f"kinds: got {list(names)}; expected at least one name, each once; weights set how often each kind occurs")
    kinds = KINDS if names is None else tuple(known[name] for name in names)
    if weights is not None:
        valid = all(isinstance(weight, int | np.integer) and 0 <= weight <= MAX_WEIGHT for weight in weights)
        if len(weights) != len(kinds) or not valid or not any(weights):
            raise ValueError(f"weights: got {list(weights)}; expected {len(kinds)} integers from 0 to 2^31 - 1, one per kind, not all 0")
        kinds = tuple(kind._replace(weight=int(weight)) for kind, weight in zip(kinds, weights, strict=True))
    return kinds


def kind_thresholds(kinds: Sequence[Kind]) -> np.ndarray:
    """Return uint32 thresholds: words below the i-th select one of the first i + 1 kinds, and the last kind takes the rest."""
    total = np.cumsum([kind.weight for kind in kinds])
    return np.array([min((int(part) << 32) // int(total[-1]), (1 << 32) - 1) for part in total[:-1]], np.uint32)


# ---- elements of float operands


WARPS_PER_BLOCK = 8  # one warp draws one case
BYTES_PER_WRITE = 4  # upper bound of the bytes that a thread writes at once
PACKED = {name.lower(): bits for name, bits in vars(PackedKindFields).items() if isinstance(bits, CaseBitField)}  # fields of a Kind


def max_exponent_field(fmt: Format) -> int:
    """Return the exponent field of the largest finite value."""
    return fmt.max_magnitude >> fmt.mantissa_bits


def _special_magnitudes(fmt: Format) -> list[int]:
    """Return eight special magnitudes, without unused bits."""
    one, hidden = fmt.bias << fmt.mantissa_bits, 1 << fmt.mantissa_bits
    infinity = fmt.infinity if fmt.specials == "ieee" else fmt.max_magnitude
    nan = {"ieee": fmt.infinity + 1, "nan": fmt.nan, "none": fmt.max_magnitude}[fmt.specials]
    return [0, infinity, nan, fmt.max_magnitude, 1, hidden - 1, hidden, one]


def select_value(values: Sequence[int], index: Array) -> Array:
    """Compute values[index] as uint32 by selection, since a gather per element is slow."""
    chosen_value = jnp.full(index.shape, values[0], jnp.uint32)
    for i, value in enumerate(values[1:], 1):
        chosen_value = jnp.where(index == i, np.uint32(value), chosen_value)
    return chosen_value


def build_float(
    fmt: Format, word: Array, field: Array, kind: dict[str, Array], flip: Array | None = None, nudge: Array | None = None
) -> Array:
    """Build codes from words.

    Args:
        fmt: Format of the codes.
        word: uint32 words, one per element.
        field: Exponent field of the lowest elements.
        kind: Fields of a `Kind` as arrays.
        flip: Elements to negate.
        nudge: Elements whose last bit changes.

    Returns:
        Codes of the words' shape, with a last axis of two words for f64.
    """
    more = remix_words(word)
    low = mix_words(more) if fmt.words == 2 else None  # lower word of f64
    code, edged = _build_finite(fmt, word, more, low, field, kind)
    largest = fmt.max_magnitude >> (32 * (fmt.words - 1))
    is_special = FloatSecondFields.SPECIAL.is_below(more, kind["special"])
    is_zero = ~is_special & (FloatSecondFields.SPECIAL.extract(more) < (kind["special"] + kind["zero"]).astype(jnp.uint32))
    magnitudes, which = _special_magnitudes(fmt), FloatSecondFields.WHICH_SPECIAL.extract(more)

    def value(part):
        return select_value([v >> (32 * part) & 0xFFFFFFFF for v in magnitudes], which)

    top = jnp.where(is_special, value(fmt.words - 1), jnp.where(is_zero, 0, code))
    if nudge is not None and low is None:
        top = jnp.where(nudge & ~is_special & (top < largest), top ^ 1, top)
    sign_bit, minus = (fmt.bits - 1) % 32, np.uint32(1 << (fmt.bits - 1) % 32)
    sign = (more >> (FloatSecondFields.SIGN.low - sign_bit)) & jnp.where(kind["same_sign"] == 0, minus, 0)
    sign = sign if flip is None else sign ^ jnp.where(flip, minus, 0)
    raw = kind["raw"] == 1
    if low is not None:
        variant = FloatSecondFields.VARIANT.extract(more)
        bottom = jnp.where(edged, jnp.where(variant < 5, 0, jnp.where(variant == 5, np.uint32(0xFFFFFFFF), low & 1)), low)
        bottom = jnp.where(is_special, value(0), jnp.where(is_zero, 0, bottom))
        bottom = bottom if nudge is None else bottom ^ nudge
        return jnp.stack([jnp.where(raw, low, bottom), jnp.where(raw, word, top | sign)], axis=-1)
    code = top << fmt.unused_bits | (word & ((1 << fmt.unused_bits) - 1)) | (sign if fmt.signed else 0)
    return jnp.where(raw, word & np.uint32((1 << fmt.bits) - 1), code).astype(fmt.dtype)


def _build_finite(fmt: Format, word: Array, more: Array, low: Array | None, field: Array, kind: dict[str, Array]) -> tuple[Array, Array]:
    """Build the exponent and fraction of a number in the upper word, and return where the fraction is an edge fraction."""
    m = fmt.mantissa_bits - 32 * (fmt.words - 1)  # fraction bits in the upper word
    largest, all_ones = fmt.max_magnitude >> (32 * (fmt.words - 1)), np.uint32((1 << m) - 1)
    full = word >> (32 - m) if m else jnp.zeros_like(word)
    variant = partial(FloatSecondFields.VARIANT.is_below, more)
    one_bit = np.uint32(1) << (FloatSecondFields.ONE.extract(more) * np.uint32(m) >> 5)
    fraction = jnp.where(variant(3), 0, jnp.where(variant(5), one_bit, jnp.where(variant(6), all_ones & ~(one_bit - 1), one_bit - 1)))
    edged = FloatSecondFields.EDGE.is_below(more, kind["edge"]) & variant(7) if m else jnp.zeros(word.shape, bool)
    fraction = jnp.where(edged, fraction, full) if m else full
    every_field = (1 << fmt.exponent_bits) - 1
    span = kind["span"] if fmt.exponent_bits == 8 else jnp.where(kind["span"] == EVERY, every_field, kind["span"])
    bits, exponent_word = (FloatFields.EXPONENT, word) if low is None else (FloatFields.LOW_EXPONENT, low)
    field = field + (bits.extract(exponent_word) * (span + 1).astype(jnp.uint32) >> bits.width).astype(jnp.int32)
    code = jnp.clip(field, 0, max_exponent_field(fmt)).astype(jnp.uint32) << m | fraction
    if low is not None:
        return jnp.minimum(code, largest - 1), edged  # finite for any lower word
    return code if largest & all_ones == all_ones else jnp.minimum(code, largest), edged


class ElementGrid(NamedTuple):
    """The elements of an operand per case, as [outer, places, inner]. Each of the `places` has its own exponent drop."""

    fmt: Format
    stream: int
    outer: int
    places: int
    inner: int

    @property
    def size(self) -> int:
        """Number of elements per case."""
        return self.outer * self.places * self.inner


class FloatInputs(NamedTuple):
    """Inputs from which the float elements of some cases are drawn."""

    keys: WordPair  # uint32 [cases] each
    kind: dict[str, Array]  # fields of a `Kind`, int32 [cases]
    field: Array  # int32 [cases, places]: exponent field of the lowest elements
    word_index: Array  # uint32 [cases, places]: index of the words that the elements take
    flipped: Array | None = None  # bool [cases, places]: the element is negated
    nudged: Array | None = None  # bool [cases, places]: the last bit changes


def draw_floats(grid: ElementGrid, shape: tuple[int, int], inputs: FloatInputs) -> Array:
    """Draw codes [cases, *shape], with a last axis of two words for two-word formats."""
    portable = partial(_draw_with_xla, grid, shape)
    if grid.fmt.words == 2:
        return portable(inputs)

    def by_kernel(inputs: FloatInputs) -> Array:
        return _draw_with_kernel(grid, inputs).reshape(-1, *shape)

    no_kernel = current_execution() == PORTABLE or route().missing
    return call_by_platform({} if no_kernel else {PLATFORM: by_kernel}, portable, inputs)


def _draw_with_xla(grid: ElementGrid, shape: tuple[int, int], inputs: FloatInputs) -> Array:
    """Draw with the cases as the minor axis, which fills the vectors of a CPU, and as which `reduce_small_products` takes them."""
    spread = lambda v: v.T[:, None, :]  # [cases, places] -> [places, inner, cases]
    flipped, nudged = (None if v is None else spread(v) for v in (inputs.flipped, inputs.nudged))
    row, column = jnp.arange(grid.outer, dtype=jnp.uint32), jnp.arange(grid.inner, dtype=jnp.uint32)
    places = _word_index(grid, row[:, None, None, None], spread(inputs.word_index), column[:, None])
    word = draw_words(inputs.keys, grid.stream, places)
    codes = build_float(grid.fmt, word, spread(inputs.field), inputs.kind, flipped, nudged)
    codes = lax.optimization_barrier(codes.reshape(*shape, *codes.shape[3:]))  # otherwise a fusion recomputes them for each user
    return jnp.moveaxis(codes, len(shape), 0)


def element_words(grid: ElementGrid, keys: WordPair, index: Array) -> Array:
    """Draw the word of each element, uint32 [cases, outer, places, inner]. `index` is `FloatInputs.word_index`."""
    row, column = (jnp.arange(n, dtype=jnp.uint32) for n in (grid.outer, grid.inner))
    places = _word_index(grid, row[:, None, None], index[:, None, :, None], column)
    return draw_words((keys[0][:, None, None, None], keys[1][:, None, None, None]), grid.stream, places)


def _word_index(grid: ElementGrid, row: Array, index: Array, column: Array) -> Array:
    """Compute the index of an element's word in the stream."""
    return (row * np.uint32(grid.places) + index) * np.uint32(grid.inner) + column


class _DrawKernel(NamedTuple):
    """The launch of the drawing kernel.

    It maps uint32 [cases, 4], a key and `PackedKindFields`, and uint32 [cases, places], `PlaceFields`, to codes [cases, elements].
    """

    grid: ElementGrid
    axes: tuple[str, ...] = ("w", "j", "e")
    sharing: tuple[str, ...] = ("", "")

    def __call__(self, *operands: Array) -> Array:
        of_cases, of_places = operands
        cases = len(of_cases)
        result = jax.ShapeDtypeStruct((cases, self.grid.size), self.grid.fmt.dtype)
        if cases == 0:
            return jnp.zeros(result.shape, result.dtype)
        entry = KernelEntry("draw", draw_kernel_text(self.grid), 32 * WARPS_PER_BLOCK)
        return launch(entry, -(-cases // WARPS_PER_BLOCK), result, calls.launch_numbers(cases), of_cases, of_places)[0]


def _draw_with_kernel(grid: ElementGrid, inputs: FloatInputs) -> Array:
    packed = [jnp.zeros_like(inputs.keys[0])] * 2
    for name, (word, bits) in PACKED.items():
        packed[word] |= bits.insert(inputs.kind[name])
    of_places = PlaceFields.PLACE.insert(inputs.word_index) | PlaceFields.FIELD.insert(inputs.field)
    if inputs.flipped is not None and inputs.nudged is not None:
        of_places |= PlaceFields.FLIPPED.insert(inputs.flipped) | PlaceFields.NUDGED.insert(inputs.nudged)
    return calls.call_batched(_DrawKernel(grid), jnp.stack([*inputs.keys, *packed], axis=1), of_places)


@lru_cache(maxsize=256)
def draw_kernel_text(grid: ElementGrid) -> str:
    """Write the CUDA C++ text of the drawing kernel for one grid of elements."""

    def element(key: Array, other_key: Array, first: Array, last: Array, place: Array, row: Array, column: Array) -> Array:
        kind = {name: bits.extract((first, last)[word]).astype(jnp.int32) for name, (word, bits) in PACKED.items()}
        word = draw_words((key, other_key), grid.stream, _word_index(grid, row, PlaceFields.PLACE.extract(place), column))
        field = place.astype(jnp.int32) >> PlaceFields.FIELD.low
        return build_float(grid.fmt, word, field, kind, PlaceFields.FLIPPED.extract(place) == 1, PlaceFields.NUDGED.extract(place) == 1)

    code, size = grid.fmt.dtype, grid.size
    codes_per_write = next(n for n in (4, 2, 1) if size % n == 0 and n * code.itemsize <= BYTES_PER_WRITE and (n == 1 or size >= 32 * n))
    numbers = {"ELEMENTS": size, "PLACES": grid.places, "INNER": grid.inner, "PIECE": codes_per_write, "WARPS": WARPS_PER_BLOCK}
    masks = {name.upper(): bits.mask for name, (_, bits) in PACKED.items()} | {
        "ALL": ALL << PackedKindFields.ZERO.bits.low,
        "FLIPPED": PlaceFields.FLIPPED.mask,
        "NUDGED": PlaceFields.NUDGED.mask,
    }
    lines = [f"typedef {scalars.TYPES[str(code)]} Code;"]
    lines += [f"[[maybe_unused]] constexpr int {name} = {number};" for name, number in numbers.items()]
    lines += [f"[[maybe_unused]] constexpr u32 {name} = {mask}u;" for name, mask in masks.items()]
    loop = resources.files("tcemu.uses.fuzz").joinpath("cuda", "draw.cu").read_text()
    return prepend_machine(*lines, scalars.scalar_function_text("element", element, *[np.uint32] * 7), loop)


# ---- cases


# streams of words: of the case, of its terms, and of its operands
CASE, TERM, STREAMS = 1, 2, {"a": 3, "b": 4, "c": 5, "e": 6, "scale_a": 7, "scale_b": 8}
UNDEFINED_SHARE = 32  # out of 256 sparse cases: those whose metadata has any bits
FieldReader = Callable[[CaseBitField], Array]  # reads a bit field of every case's words, uint32 [cases]


class CaseDraw(NamedTuple):
    """Values drawn once per case. Arrays are [cases, 1, 1] unless a comment says otherwise."""

    kind: dict[str, Array]  # fields of `Kind`
    low: dict[str, Array]  # exponent fields where A's and B's elements start
    c_mode: Array
    c_field: Array  # exponent field where C's elements start
    drop: Array  # [cases, K]: exponents by which the terms at k lie below the largest
    k: Array  # [cases, K]: index of a term's words, its own k or its twin's
    flipped: Array  # bool [cases, K]: the second of two twins
    nudged: Array  # bool [cases, K]: the second twin differs in the last bit


class Terms(NamedTuple):
    """The terms of each case. Every array is [cases, K]."""

    k: Array  # index of a term's words, its own k or its twin's
    flipped: Array
    nudged: Array
    word: Array  # see `TermFields`


# fraction bits of the known models, and floors of their steps; literal, so that a new model row changes no operand
FRACTION_WIDTHS, FLOOR_EXPONENTS = (13, 23, 24, 25, 35), {16: -21, 32: -133}


@lru_cache(maxsize=4096)
def alignment_edges(op: Instruction) -> tuple[int, ...]:
    """Return the distances from the largest term at which some model truncates, or at which the result rounds."""
    d = product_spec(op).d
    return tuple(
        sorted({*FRACTION_WIDTHS, d.mantissa_bits, d.mantissa_bits + 1} if d.words == 1 else {d.mantissa_bits, 2 * d.mantissa_bits})
    )


def generate(
    op: str | Instruction,
    seed: int,
    start: int,
    count: int,
    *,
    kinds: Sequence[str] | None = None,
    weights: Sequence[int] | None = None,
) -> OperandCodes:
    """Generate cases `start` to `start + count - 1` of a seed, each the operands of one instruction, as `tcemu.dot` takes them.

    The codes are the same on every platform and device, whatever the count.

    Args:
        op: PTX spelling, short name or `Instruction` of mma, mma.sp, wmma.mma, wgmma or wgmma.sp.
        seed: Integer from 0 to 2^64 - 1.
        start: Number of the first case, from 0 to 2^64 - 1.
        count: Number of cases.
        kinds: Names from `tcemu.fuzz.KINDS`. None takes all kinds.
        weights: One weight per kind, in place of the kinds' own.

    Returns:
        Codes by operand name: a [count, M, K] (sparse: [count, M, K/2]), b [count, K, N] and c [count, M, N]. A sparse instruction also has
        e, metadata fields [count, M, chunks], some of which PTX leaves undefined. A block-scaled one also has scale_a [count, M, scale_vec]
        and scale_b [count, scale_vec, N].

    Raises:
        Unsupported: `op` does not compute.
        ValueError: A number is out of range, or a kind is unknown.
    """
    op = require_product(parse(op))
    for name, value, limit in (("seed", seed, 1 << 64), ("start", start, 1 << 64), ("count", count, 1 << 31)):
        if not isinstance(value, int | np.integer) or not 0 <= value < limit:
            raise ValueError(f"{name}: got {value}; expected an integer from 0 to {limit - 1}")
    return _generate(op, select_kinds(kinds, weights), int(count), split_uint64(int(seed)), split_uint64(int(start)))


@partial(jax.jit, static_argnames=("op", "kinds", "count"))
def _generate(op: MatrixMultiply, kinds: tuple[Kind, ...], count: int, seed: WordPair, start: WordPair) -> OperandCodes:
    return draw_operands(op, case_keys(seed, add_offset(start, jnp.arange(count, dtype=jnp.uint32))), kinds)


def draw_case_kinds(keys: WordPair, kinds: tuple[Kind, ...]) -> Array:
    """Draw the index of each case's kind, int32 [cases]."""
    word = draw_words(keys, CASE, jnp.uint32(0))
    return jnp.sum(word[:, None] >= kind_thresholds(kinds), axis=1, dtype=jnp.int32)


def draw_operands(op: MatrixMultiply, keys: WordPair, kinds: tuple[Kind, ...] = KINDS) -> OperandCodes:
    """Draw the operands of the cases with these keys, uint32[cases] each."""
    spec, (case, inputs) = product_spec(op), _draw_case_inputs(op, keys, kinds)
    (m, k), (_, n) = op.matrix_shape("a"), op.matrix_shape("d")
    shapes = {"a": (m, k), "b": (op.k, n), "c": (m, n)}
    grids = {
        "a": ElementGrid(spec.a, STREAMS["a"], m, k, 1),
        "b": ElementGrid(spec.b, STREAMS["b"], 1, op.k, n),
        "c": ElementGrid(spec.c, STREAMS["c"], 1, 1, m * n),
    }
    floats: OperandCodes = {}
    others: OperandCodes = {}
    for name, grid in grids.items():
        if name in inputs:
            floats[name] = draw_floats(grid, shapes[name], inputs[name].with_keys(keys))
            continue
        word = element_words(grid, keys, _word_indices(op, case)[name]).reshape(-1, *shapes[name])
        others[name] = (_build_integer_accumulators if name == "c" else _build_integers)(grid.fmt, word, case)
    if op.sparse:
        others["e"] = _build_metadata(op, keys, case, k)
    if op.scaling is not None:
        for name in ("scale_a", "scale_b"):
            others[name] = _build_scales(op, op.scaling.format, name, keys, case)
    return floats | lax.optimization_barrier(others)  # otherwise a fusion recomputes them for each user


class CaseInputs(NamedTuple):
    """The fields of `FloatInputs` that cases draw, with the cases as the minor axis: [places, cases]."""

    kind: dict[str, Array]  # [cases]
    field: Array
    word_index: Array
    flipped: Array | None
    nudged: Array | None

    def with_keys(self, keys: WordPair) -> FloatInputs:
        flipped, nudged = (None if v is None else v.T for v in (self.flipped, self.nudged))
        return FloatInputs(keys, self.kind, self.field.T, self.word_index.T, flipped, nudged)


@compile_once(0, 2)  # a unit, since a fusion would draw a case again for each of its elements
def _draw_case_inputs(op: MatrixMultiply, keys: WordPair, kinds: tuple[Kind, ...]) -> tuple[CaseDraw, dict[str, CaseInputs]]:
    """Draw the values that the elements of a case share, and the inputs from which float elements are drawn."""
    spec, case = product_spec(op), _draw_case(op, keys, kinds)
    drop, places = _split_drop(op, case), _word_indices(op, case)
    inputs = {}
    for name, fmt in {"a": spec.a, "b": spec.b, "c": spec.c}.items():
        if not fmt.is_integer:
            kind, field = _accumulator_inputs(case) if name == "c" else (_flatten_kind(case.kind), case.low[name][:, :, 0] - drop[name])
            twins = (case.flipped.T, case.nudged.T) if name == "a" else (None, None)
            inputs[name] = CaseInputs(kind, field.T, places[name].T, *twins)
    return case, inputs


def _word_indices(op: MatrixMultiply, case: CaseDraw) -> dict[str, Array]:
    """Return the indices of the words that elements take, by operand, uint32 [cases, places]."""
    _, k = op.matrix_shape("a")
    return {"a": case.k, "b": _dense_word_indices(case.k, op.k // k), "c": jnp.zeros((len(case.k), 1), jnp.uint32)}


def _flatten_kind(kind: dict[str, Array]) -> dict[str, Array]:
    """Drop the unit axes of a kind's fields, which leaves [cases]."""
    return {name: v[:, 0, 0] for name, v in kind.items()}


def _expanded_keys(keys: WordPair) -> WordPair:
    return keys[0][:, None, None], keys[1][:, None, None]


def _dense_word_indices(k: Array, ratio: int) -> Array:
    """Expand the word indices of a sparse instruction's stored row to its full column."""
    return jnp.repeat(k * ratio, ratio, axis=1) + jnp.tile(jnp.arange(ratio, dtype=jnp.uint32), k.shape[1]) if ratio > 1 else k


def _target_exponents(op: Instruction) -> np.ndarray:
    """Return the product exponents at which a result becomes subnormal, zero or infinite, or alignment ends, and that of 1.0."""
    d = product_spec(op).d
    near = {0, d.min_exponent, d.min_exponent - d.mantissa_bits, d.max_exponent - 4, FLOOR_EXPONENTS.get(d.bits, 0)}
    return np.array(sorted(near), np.int32)


def _draw_case(op: MatrixMultiply, keys: WordPair, kinds: tuple[Kind, ...]) -> CaseDraw:
    spec = product_spec(op)
    number = draw_case_kinds(keys, kinds)
    kind = {name: jnp.asarray(np.array([getattr(kind, name) for kind in kinds], np.int32))[number] for name in Kind._fields[2:]}
    case_words = [draw_words(keys, CASE, jnp.uint32(index)) for index in range(8)]

    def draw(field: CaseBitField) -> Array:
        return field.bits.extract(case_words[field.word])

    low = dict.fromkeys("ab", jnp.zeros_like(number))
    if not spec.a.is_integer:
        low = _draw_start_exponents(op, draw, kind)
    terms, stride, twins = _draw_terms(op, keys, draw, kind)
    distance = _draw_distance(op, draw)
    drop = _draw_drop(op, draw, kind, terms, jnp.where(twins, ~stride, np.uint32(0xFFFFFFFF)), distance)
    c_mode, c_field = draw(CaseFields.C_MODE), jnp.zeros_like(number)
    if not spec.c.is_integer and not spec.a.is_integer:
        c_field = _draw_accumulator_exponent(op, draw, low, distance)

    def per_case(v):
        return v[:, None, None]

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


def _centered(bits: Array, middle: int) -> Array:
    """Return the bits as int32, minus `middle`."""
    return bits.astype(jnp.int32) - middle


def _draw_start_exponents(op: Instruction, draw: FieldReader, kind: dict[str, Array]) -> dict[str, Array]:
    """Draw the exponent fields where A's and B's elements start, int32 [cases]: independently, or aimed by their product."""
    spec = product_spec(op)
    a, b = spec.a, spec.b
    last = {"a": max_exponent_field(a), "b": max_exponent_field(b)}
    independent = {
        "a": _scale_to_count(draw(CaseFields.EXPONENT_A), last["a"] + 1),
        "b": _scale_to_count(draw(CaseFields.EXPONENT_B), last["b"] + 1),
    }
    targets = _target_exponents(op)
    aim = jnp.asarray(targets)[_scale_to_count(draw(CaseFields.TARGET), len(targets))] + _centered(draw(CaseFields.MISS), 8)
    total = aim + a.bias + b.bias
    of_a = jnp.clip(total // 2 + _centered(draw(CaseFields.SPLIT), 4), 0, last["a"])
    aimed = {"a": of_a, "b": jnp.clip(total - of_a, 0, last["b"])}
    room = jnp.where(kind["span"] > 16, 0, kind["span"])  # exponents above the start
    low = {name: jnp.where(kind["base"] == AIMED_BASE, aimed[name], jnp.maximum(independent[name] - room, 0)) for name in "ab"}
    return {name: jnp.where(kind["span"] == EVERY, 0, field) for name, field in low.items()}


def _draw_terms(op: MatrixMultiply, keys: WordPair, draw: FieldReader, kind: dict[str, Array]) -> tuple[Terms, Array, Array]:
    """Draw the terms, the distance between twins, uint32 [cases], and whether a case has twins, bool [cases].

    Twins stand a power of two apart. Twins of a sparse instruction are in different chunks.
    """
    _, k = op.matrix_shape("a")
    smallest = max(1, op.chunk_size // 2)
    strides = np.array([1 << i for i in range(smallest.bit_length() - 1, max(k.bit_length() - 1, 1)) if 1 << i < k] or [1], np.uint32)
    stride = jnp.asarray(strides)[_scale_to_count(draw(CaseFields.STRIDE), len(strides))]
    twins = (kind["twins"] == 1) & (k >= 2 * smallest) & (not product_spec(op).a.is_integer)
    index = jnp.arange(k, dtype=jnp.uint32)
    word_index = jnp.where(twins[:, None], index & ~stride[:, None], index)
    flipped = word_index != index
    word = draw_words((keys[0][:, None], keys[1][:, None]), TERM, word_index)
    nudged = flipped & (TermFields.IS_NUDGED.extract(word) == 0)
    return Terms(k=word_index, flipped=flipped, nudged=nudged, word=word), stride, twins


def _draw_distance(op: Instruction, draw: FieldReader) -> Array:
    """Draw how far a case's small terms lie below its large ones, int32 [cases]: near a distance that changes a result, or any."""
    changes = alignment_edges(op)
    edge = jnp.asarray(np.array(changes, np.int32))[_scale_to_count(draw(CaseFields.EDGE), len(changes))]
    anywhere = _scale_to_count(draw(CaseFields.DISTANCE), int(changes[-1]) + 12)
    return jnp.where(draw(CaseFields.AT_AN_EDGE) == 1, edge + _centered(draw(CaseFields.EDGE_MISS), 4), anywhere)


def _draw_drop(op: Instruction, draw: FieldReader, kind: dict[str, Array], terms: Terms, first_twin: Array, distance: Array) -> Array:
    """Compute how far terms lie below the large ones, int32 [cases, K]. `first_twin` masks a k to its first twin."""
    _, k = op.matrix_shape("a")
    first = _scale_to_count(draw(CaseFields.LARGE), k).astype(jnp.uint32) & first_twin
    large = (terms.k == first[:, None]) | (TermFields.IS_LARGE.extract(terms.word) == 0)
    drop = jnp.maximum(distance[:, None] + _centered(TermFields.DROP_MISS.extract(terms.word), 1), 0)
    return jnp.where((kind["spread"][:, None] == 1) & ~large, drop, 0)


def _draw_accumulator_exponent(op: Instruction, draw: FieldReader, low: dict[str, Array], distance: Array) -> Array:
    """Draw the exponent field where C's elements start, int32 [cases], by the case's mode."""
    spec = product_spec(op)
    of_products = low["a"] + low["b"] - spec.a.bias - spec.b.bias + spec.c.bias
    sign = jnp.where(draw(CaseFields.C_ABOVE) == 1, 1, -1)
    mode = draw(CaseFields.C_MODE)
    near = jnp.where(mode < 3, of_products + _centered(draw(CaseFields.C_BESIDE), 3), of_products + sign * distance)
    anywhere = jnp.where(draw(CaseFields.C_DRAWN) == 1, _scale_to_count(draw(CaseFields.EXPONENT_C), max_exponent_field(spec.c) + 1), 0)
    return jnp.where(mode < 6, near, anywhere)


def _scale_to_count(half: Array, count: int) -> Array:
    """Scale 16 drawn bits to int32 from 0 to count - 1. `count` is at most 2^16."""
    return (half * np.uint32(count) >> 16).astype(jnp.int32)


def _split_drop(op: MatrixMultiply, case: CaseDraw) -> dict[str, Array]:
    """Split `case.drop` between the exponents of A's columns and B's rows: A takes as much as it can, B the rest."""
    a = jnp.minimum(case.drop, case.low["a"][:, :, 0])
    if op.sparse:
        return {"a": a, "b": jnp.zeros((*case.drop.shape[:-1], op.k), jnp.int32)}
    return {"a": a, "b": case.drop - a}


def _build_integers(fmt: Format, word: Array, case: CaseDraw) -> Array:
    """Build any integer code, or one of the limits of the range. Single-bit operands get many zeros, or many ones."""
    more, mask, kind = remix_words(word), np.uint32((1 << fmt.bits) - 1), case.kind
    same_sign = kind["same_sign"] == 1
    share = jnp.where(same_sign, EVERY, jnp.maximum(kind["edge"] // 2, kind["special"] * 4)).astype(jnp.uint32)
    largest = np.uint32(fmt.max_magnitude)
    smallest = largest + 1 & mask if fmt.signed else np.uint32(0)
    which = IntegerSecondFields.WHICH_END.extract(more)
    ends = jnp.where(which < 2, largest, jnp.where(which < 4, smallest, jnp.where(which == 4, mask, which & 1)))
    ends = jnp.where(same_sign, jnp.where(case.c_mode & 1 == 1, largest, jnp.where(which < 6, smallest, largest)), ends)
    is_zero = IntegerSecondFields.ZERO.extract(more) < kind["zero"].astype(jnp.uint32)
    is_end = IntegerSecondFields.END.extract(more) < share
    return jnp.where(is_zero, 0, jnp.where(is_end, ends, word & mask)).astype(fmt.dtype)


def _accumulator_inputs(case: CaseDraw) -> tuple[dict[str, Array], Array]:
    """Return the kind of float C, [cases], and the exponent field of its lowest elements, [cases, 1], by the case's mode."""
    kind = _flatten_kind(case.kind)
    everywhere, zero = kind["span"] == EVERY, (case.c_mode[:, 0, 0] == 7) & (kind["raw"] == 0)
    own = {
        "span": jnp.where(everywhere, EVERY, 3),
        "special": jnp.where(zero, 0, kind["special"]),
        "zero": jnp.where(zero, ALL, kind["zero"]),
        "same_sign": zero.astype(jnp.int32),
    }
    return kind | own, jnp.where(everywhere[:, None], 0, case.c_field[:, :, 0])


def _build_integer_accumulators(fmt: Format, word: Array, case: CaseDraw) -> Array:
    """Build C by the case's mode: beside a limit of the range, anywhere, or zero."""
    smallest = np.uint32(1 << (fmt.bits - 1))
    beside = (
        jnp.where(IntegerAccumulatorFields.LEAST.extract(word) == 1, smallest, smallest - 1)
        + IntegerAccumulatorFields.FROM_END.extract(word)
        - np.uint32(0x8000)
    )
    return jnp.where(case.c_mode < 4, beside, jnp.where(case.c_mode == 7, 0, word)).astype(fmt.dtype)


def _build_metadata(op: MatrixMultiply, keys: WordPair, case: CaseDraw, k: int) -> Array:
    """Build metadata fields [cases, M, chunks]: defined ones, in some cases any. Twins have the same fields."""
    rows, chunks = op.matrix_shape(op.metadata_operand)
    per_chunk = k // chunks
    chunk = case.k[:, ::per_chunk] // np.uint32(per_chunk)
    word = draw_words(_expanded_keys(keys), STREAMS["e"], np.arange(rows, dtype=np.uint32)[:, None] * np.uint32(chunks) + chunk[:, None, :])
    defined = np.array(defined_fields(op.chunk_size, op.ordered), np.uint8)
    of_case = draw_words(keys, STREAMS["e"], jnp.uint32(rows * chunks))
    anything = MetadataFields.MAY_BE_UNDEFINED.extract(of_case) < UNDEFINED_SHARE
    defined_field = jnp.asarray(defined)[_scale_to_count(MetadataFields.DEFINED.extract(word), len(defined))]
    return jnp.where(anything[:, None, None], MetadataFields.ANY.extract(word).astype(jnp.uint8), defined_field)


def _build_scales(op: MatrixMultiply, fmt: Format, name: str, keys: WordPair, case: CaseDraw) -> Array:
    """Build scale codes around 1.0, with blocks apart by the case's distances. Some are NaN, zero or any bits."""
    rows, columns = op.matrix_shape(name)
    places = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    word = draw_words(_expanded_keys(keys), STREAMS[name], places)
    more = remix_words(word)
    blocks = case.drop[:, :: case.drop.shape[1] // (1 if op.scaling is None else op.scaling.count)]
    half = (blocks + (name == "scale_a")) // 2  # each of the two scales takes half of the distance
    half = half[:, None, :] if name == "scale_a" else half[:, :, None]
    field = fmt.bias + _centered(ScaleFields.EXPONENT.extract(word), 3) - half
    if fmt.mantissa_bits:
        field = jnp.where(case.kind["spread"] == 1, field + 4, field)
    code = jnp.clip(field, 0, (1 << fmt.exponent_bits) - 1).astype(jnp.uint32) << fmt.mantissa_bits
    code = code | (word & ((1 << fmt.mantissa_bits) - 1))
    specials = jnp.asarray(np.array([0, 1, fmt.nan - 1, fmt.nan], np.uint32))[ScaleSecondFields.WHICH_SPECIAL.extract(more)]
    is_special = ScaleSecondFields.SPECIAL.extract(more) < case.kind["special"].astype(jnp.uint32)
    anything = (case.kind["raw"] == 1) | (case.kind["span"] == EVERY)
    return jnp.where(anything, ScaleFields.ANY.extract(word), jnp.where(is_special, specials, code)).astype(fmt.dtype)
