"""Operands of any computing instruction, generated on the device from a seed and a case number, as matrices of raw codes.

Every element is a function of its case's key and its own index, so elements need no order among each other. Terms are related through the
key alone: which k is large, how far the other terms lie below it and which k has a twin is drawn once per case, for A's columns and B's
rows alike.

The formulas are those of `case_formulas`. Float operands are built by XLA, by a kernel for CPUs (`llvm.drawing_kernel`), or by a CUDA
kernel on an NVIDIA GPU, for which `build_float` is written as CUDA C++; `cuda/elements.cu` adds what is known of a case.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base.compilation import call_kernel_by_platform, compile_once
from tcemu.base.execution import PORTABLE, current_execution
from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.step.jax_values import JaxValue, conditions, integers
from tcemu.engine.arithmetic.step.values import I32, V
from tcemu.engine.backends import batched_calls as calls
from tcemu.engine.backends.cuda import values as cuda_values
from tcemu.engine.backends.cuda.kernel_text import prepend_machine
from tcemu.engine.backends.cuda.step_functions import constants_text
from tcemu.engine.backends.cuda.xla_launch import PLATFORM, KernelEntry, launch, route
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.grammar import parse
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.uses.fuzz import case_formulas as formulas
from tcemu.uses.fuzz.case_formulas import STREAMS, DrawnCase, DrawnTerm, FloatValues, KindValues
from tcemu.uses.fuzz.case_kinds import ALL, EVERY, KINDS, Kind, select_kinds
from tcemu.uses.fuzz.llvm.kernel_calls import find_draw_call
from tcemu.uses.fuzz.random_words import (
    CaseBitField,
    IntegerAccumulatorFields,
    IntegerSecondFields,
    MetadataFields,
    PackedKindFields,
    PlaceFields,
    ScaleFields,
    ScaleSecondFields,
    WordPair,
    add_offset,
    case_keys,
    draw_words,
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


# ---- elements of float operands


WARPS_PER_BLOCK = 8  # one warp draws one case
BYTES_PER_WRITE = 4  # upper bound of the bytes that a thread writes at once
PACKED = {name.lower(): bits for name, bits in vars(PackedKindFields).items() if isinstance(bits, CaseBitField)}  # fields of a Kind


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
    """Inputs from which the float elements of some cases are drawn. The cases are the minor axis."""

    keys: WordPair  # uint32 [cases] each
    kind: KindValues[Array]  # int32 [cases]
    field: Array  # int32 [places, cases]: exponent field of the lowest elements
    word_index: Array  # int32 [places, cases]: index of the words that the elements take
    flipped: Array | None = None  # bool [places, cases]: the element is negated
    nudged: Array | None = None  # bool [places, cases]: the last bit changes


def draw_floats(grid: ElementGrid, shape: tuple[int, int], inputs: FloatInputs, by_cpu: Callable[..., Array] | None = None) -> Array:
    """Draw codes [cases, *shape], with a last axis of two words for two-word formats. by_cpu: the kernel for CPUs, which takes the keys."""
    portable = partial(_draw_with_xla, grid, shape)
    if grid.fmt.words == 2 or current_execution() == PORTABLE:
        return portable(inputs)
    kernels: dict[str, Callable[[FloatInputs], Array]] = {}
    if by_cpu is not None:
        kernels["cpu"] = lambda inputs: by_cpu(*inputs.keys)
    if not route().missing:
        kernels[PLATFORM] = lambda inputs: _draw_with_kernel(grid, inputs).reshape(-1, *shape)
    return call_kernel_by_platform(kernels, portable, inputs)


def _draw_with_xla(grid: ElementGrid, shape: tuple[int, int], inputs: FloatInputs) -> Array:
    """Draw with the cases as the minor axis, which fills the vectors of a CPU, and as which `reduce_small_products` takes them."""
    words = element_words(grid, inputs.keys, inputs.word_index)
    spread = lambda v: v[:, None, :]  # [places, cases] -> [places, inner, cases]
    twins = (None if v is None else conditions(spread(v)) for v in (inputs.flipped, inputs.nudged))
    source = FloatValues(KindValues(*map(integers, inputs.kind)), integers(spread(inputs.field)), *twins)
    codes = [jnp.asarray(code.raw) for code in formulas.build_float(grid.fmt, integers(words), source)]
    codes = [lax.bitcast_convert_type(code, jnp.uint32).astype(grid.fmt.dtype) for code in codes]
    made = codes[0] if len(codes) == 1 else jnp.stack(codes, axis=-1)
    made = lax.optimization_barrier(made.reshape(*shape, *made.shape[3:]))  # otherwise a fusion recomputes them for each user
    return jnp.moveaxis(made, len(shape), 0)


def element_words(grid: ElementGrid, keys: WordPair, index: Array) -> Array:
    """Draw the word of each element, uint32 [outer, places, inner, cases]. `index` is `FloatInputs.word_index`."""
    row, column = (jnp.arange(n, dtype=jnp.uint32) for n in (grid.outer, grid.inner))
    places = _word_index(grid, row[:, None, None, None], index.astype(jnp.uint32)[:, None, :], column[:, None])
    return draw_words(keys, grid.stream, places)


def _word_index(grid: ElementGrid, row: Any, index: Any, column: Any) -> Any:
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
    return calls.call_batched(_DrawKernel(grid), *pack_inputs(inputs))


def pack_inputs(inputs: FloatInputs) -> tuple[Array, Array]:
    """Pack the inputs as `_DrawKernel` takes them."""
    word = lambda v: lax.bitcast_convert_type(v.astype(jnp.int32), jnp.uint32)
    packed = [jnp.zeros_like(inputs.keys[0])] * 2
    for name, (at, bits) in PACKED.items():
        if name == "twins" and inputs.flipped is None:
            continue
        packed[at] |= bits.insert(word(getattr(inputs.kind, name)))
    of_places = PlaceFields.PLACE.insert(word(inputs.word_index)) | PlaceFields.FIELD.insert(word(inputs.field))
    if inputs.flipped is not None and inputs.nudged is not None:
        of_places |= PlaceFields.FLIPPED.insert(word(inputs.flipped)) | PlaceFields.NUDGED.insert(word(inputs.nudged))
    return jnp.stack([*inputs.keys, *packed], axis=1), of_places.T


def draw_kernel_text(grid: ElementGrid) -> str:
    """Write the CUDA C++ text of the drawing kernel for one grid of elements."""
    return prepend_machine(element_text(grid), constants_text(warps=WARPS_PER_BLOCK), cuda_text("draw"))


def cuda_text(name: str) -> str:
    """Read a file of `cuda/`."""
    return resources.files("tcemu.uses.fuzz").joinpath("cuda", f"{name}.cu").read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def element_text(grid: ElementGrid) -> str:
    """Write the CUDA C++ text that draws the elements of one case."""

    def element(key: V, other_key: V, first: V, last: V, place: V, index: V) -> V:
        fields = {name: bits.extract((first, last)[word]) for name, (word, bits) in PACKED.items()}
        kind = KindValues(**dict.fromkeys(KindValues._fields, key.constant(0)) | fields)
        word = draw_words((key, other_key), grid.stream, index)
        twins = (PlaceFields.FLIPPED.extract(place) == 1, PlaceFields.NUDGED.extract(place) == 1)
        source = FloatValues(kind, place.shift_right_signed(PlaceFields.FIELD.low), *twins)
        return formulas.build_float(grid.fmt, word, source, find_edge_fraction=from_table)[0]

    def from_table(fmt: Format, byte: Any) -> Any:
        return cuda_values.Value(I32, "edge_fractions[{0}]", byte)

    code, size = grid.fmt.dtype, grid.size
    codes_per_write = next(n for n in (4, 2, 1) if size % n == 0 and n * code.itemsize <= BYTES_PER_WRITE and (n == 1 or size >= 32 * n))
    may_be_twins = grid.stream == STREAMS["a"]
    numbers = constants_text(elements=size, places=grid.places, inner=grid.inner, piece=codes_per_write, may_be_twins=may_be_twins)
    masks = {name.upper(): bits.mask for name, (_, bits) in PACKED.items()} | {
        "ALL": ALL << PackedKindFields.ZERO.bits.low,
        "PLACE": PlaceFields.PLACE.mask,
        "FLIPPED": PlaceFields.FLIPPED.mask,
        "NUDGED": PlaceFields.NUDGED.mask,
    }
    lines = [f"typedef u{8 * code.itemsize} Code;", numbers]
    lines += [f"[[maybe_unused]] constexpr u32 {name} = {mask}u;" for name, mask in masks.items()]
    rendered = [
        cuda_values.function_text("edge_fraction", lambda byte: formulas.edge_fraction(grid.fmt, byte), I32),
        f"__shared__ {'short' if grid.fmt.mantissa_bits < 16 else 'int'} edge_fractions[{formulas.EDGE_FRACTIONS}];",
        cuda_values.function_text("element", element, *[I32] * 6),
    ]
    return "\n".join([*lines, *rendered, cuda_text("elements")])


# ---- cases


UNDEFINED_SHARE = 32  # out of 256 sparse cases: those whose metadata has any bits


class DrawnCases(NamedTuple):
    """What the elements of some cases share. The cases are the minor axis."""

    keys: WordPair  # uint32 [cases] each
    case: DrawnCase[Array]  # int32 [cases]
    term: DrawnTerm[Array]  # int32 and bool [K, cases]


@compile_once(0, 2)  # a unit, since a fusion would draw a case again for each of its elements
def draw_cases(op: MatrixMultiply, keys: WordPair, kinds: tuple[Kind, ...]) -> DrawnCases:
    """Draw what the elements of the cases with these keys share. keys: uint32 [cases] each."""
    of_case = integers(keys[0]), integers(keys[1])
    case = formulas.draw_case(op, of_case, kinds)
    k = jnp.arange(op.matrix_shape("a")[1], dtype=jnp.int32)[:, None]
    term = formulas.draw_term(of_case, case, integers(k))
    arrays = lambda values, shape: jax.tree.map(lambda v: jnp.broadcast_to(v.raw, shape), values, is_leaf=lambda v: isinstance(v, JaxValue))
    return DrawnCases(keys, arrays(case, keys[0].shape), arrays(term, (*k.shape[:1], *keys[0].shape)))


def draw_case_kinds(keys: WordPair, kinds: tuple[Kind, ...]) -> Array:
    """Draw the index of each case's kind, int32 [cases]."""
    return jnp.broadcast_to(formulas.draw_case_kind((integers(keys[0]), integers(keys[1])), kinds).raw, keys[0].shape)


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


def element_grids(op: MatrixMultiply) -> dict[str, ElementGrid]:
    """Return the grids of A, B and C."""
    spec, (m, k), n = product_spec(op), op.matrix_shape("a"), op.n
    return {
        "a": ElementGrid(spec.a, STREAMS["a"], m, k, 1),
        "b": ElementGrid(spec.b, STREAMS["b"], 1, op.k, n),
        "c": ElementGrid(spec.c, STREAMS["c"], 1, 1, m * n),
    }


def draw_operands(op: MatrixMultiply, keys: WordPair, kinds: tuple[Kind, ...] = KINDS) -> OperandCodes:
    """Draw the operands of the cases with these keys, uint32[cases] each."""
    cases = draw_cases(op, keys, kinds)
    (m, k), (_, n) = op.matrix_shape("a"), op.matrix_shape("d")
    shapes = {"a": (m, k), "b": (op.k, n), "c": (m, n)}
    floats: OperandCodes = {}
    others: OperandCodes = {}
    for name, grid in element_grids(op).items():
        if not grid.fmt.is_integer:
            call = find_draw_call(op, kinds, name)
            by_cpu = None if call is None else partial(calls.call_batched, call)
            floats[name] = draw_floats(grid, shapes[name], float_inputs(op, name, cases), by_cpu)
            continue
        word = jnp.moveaxis(element_words(grid, keys, _word_indices(op, name, cases)).reshape(*shapes[name], -1), -1, 0)
        others[name] = (_build_integer_accumulators if name == "c" else _build_integers)(grid.fmt, word, cases.case)
    if op.sparse:
        others["e"] = _build_metadata(op, cases, k)
    if op.scaling is not None:
        for name in ("scale_a", "scale_b"):
            others[name] = _build_scales(op, op.scaling.format, name, cases)
    return floats | lax.optimization_barrier(others)  # otherwise a fusion recomputes them for each user


def float_inputs(op: MatrixMultiply, name: str, cases: DrawnCases) -> FloatInputs:
    """Return the inputs from which the elements of a float operand are drawn."""
    case, term = jax.tree.map(integers, (cases.case, cases.term._replace(flipped=None, nudged=None)))
    index = _word_indices(op, name, cases)
    if name == "c":
        kind, field = formulas.accumulator_kind(case)
        return FloatInputs(cases.keys, KindValues(*(v.raw for v in kind)), field.raw[None], index)
    fields = formulas.start_fields(op, case, term.drop)
    if name == "a":
        return FloatInputs(cases.keys, cases.case.kind, fields[0].raw, index, cases.term.flipped, cases.term.nudged)
    field = jnp.broadcast_to(cases.case.low_b, index.shape) if op.sparse else fields[1].raw
    return FloatInputs(cases.keys, cases.case.kind, field, index)


def _word_indices(op: MatrixMultiply, name: str, cases: DrawnCases) -> Array:
    """Return the indices of the words that the elements of an operand take, int32 [places, cases]."""
    index = cases.term.word_index
    if name == "c":
        return jnp.zeros_like(index[:1])
    ratio = op.k // len(index) if name == "b" else 1  # elements of a sparse instruction's column for each element that A stores
    return index if ratio == 1 else jnp.repeat(index * ratio, ratio, axis=0) + jnp.tile(jnp.arange(ratio), len(index))[:, None]


def _per_case(v: Array) -> Array:
    return v[:, None, None]


def _expanded_keys(keys: WordPair) -> WordPair:
    return _per_case(keys[0]), _per_case(keys[1])


def _build_integers(fmt: Format, word: Array, case: DrawnCase[Array]) -> Array:
    """Build any integer code, or one of the limits of the range. Single-bit operands get many zeros, or many ones."""
    more, mask, kind = remix_words(word), np.uint32((1 << fmt.bits) - 1), KindValues(*map(_per_case, case.kind))
    same_sign = kind.same_sign == 1
    share = jnp.where(same_sign, EVERY, jnp.maximum(kind.edge // 2, kind.special * 4)).astype(jnp.uint32)
    largest = np.uint32(fmt.max_magnitude)
    smallest = largest + 1 & mask if fmt.signed else np.uint32(0)
    which = IntegerSecondFields.WHICH_END.extract(more)
    ends = jnp.where(which < 2, largest, jnp.where(which < 4, smallest, jnp.where(which == 4, mask, which & 1)))
    ends = jnp.where(same_sign, jnp.where(_per_case(case.c_mode) & 1 == 1, largest, jnp.where(which < 6, smallest, largest)), ends)
    is_zero = IntegerSecondFields.ZERO.extract(more) < kind.zero.astype(jnp.uint32)
    is_end = IntegerSecondFields.END.extract(more) < share
    return jnp.where(is_zero, 0, jnp.where(is_end, ends, word & mask)).astype(fmt.dtype)


def _build_integer_accumulators(fmt: Format, word: Array, case: DrawnCase[Array]) -> Array:
    """Build C by the case's mode: beside a limit of the range, anywhere, or zero."""
    smallest = np.uint32(1 << (fmt.bits - 1))
    beside = (
        jnp.where(IntegerAccumulatorFields.LEAST.extract(word) == 1, smallest, smallest - 1)
        + IntegerAccumulatorFields.FROM_END.extract(word)
        - np.uint32(0x8000)
    )
    return jnp.where(_per_case(case.c_mode) < 4, beside, jnp.where(_per_case(case.c_mode) == 7, 0, word)).astype(fmt.dtype)


def _build_metadata(op: MatrixMultiply, cases: DrawnCases, k: int) -> Array:
    """Build metadata fields [cases, M, chunks]: defined ones, in some cases any. Twins have the same fields."""
    rows, chunks = op.matrix_shape(op.metadata_operand)
    per_chunk = k // chunks
    chunk = cases.term.word_index.T[:, ::per_chunk].astype(jnp.uint32) // np.uint32(per_chunk)
    places = jnp.arange(rows, dtype=jnp.uint32)[:, None] * np.uint32(chunks) + chunk[:, None, :]
    word = draw_words(_expanded_keys(cases.keys), STREAMS["e"], places)
    defined = np.array(defined_fields(op.chunk_size, op.ordered), np.uint8)
    of_case = draw_words(cases.keys, STREAMS["e"], jnp.uint32(rows * chunks))
    anything = MetadataFields.MAY_BE_UNDEFINED.extract(of_case) < UNDEFINED_SHARE
    defined_field = jnp.asarray(defined)[MetadataFields.DEFINED.extract(word) * np.uint32(len(defined)) >> 16]
    return jnp.where(_per_case(anything), MetadataFields.ANY.extract(word).astype(jnp.uint8), defined_field)


def _build_scales(op: MatrixMultiply, fmt: Format, name: str, cases: DrawnCases) -> Array:
    """Build scale codes around 1.0, with blocks apart by the case's distances. Some are NaN, zero or any bits."""
    rows, columns = op.matrix_shape(name)
    places = jnp.arange(rows * columns, dtype=jnp.uint32).reshape(rows, columns)
    word = draw_words(_expanded_keys(cases.keys), STREAMS[name], places)
    more, kind, drop = remix_words(word), KindValues(*map(_per_case, cases.case.kind)), cases.term.drop.T
    blocks = drop[:, :: drop.shape[1] // (1 if op.scaling is None else op.scaling.count)]
    half = (blocks + (name == "scale_a")) // 2  # each of the two scales takes half of the distance
    half = half[:, None, :] if name == "scale_a" else half[:, :, None]
    field = fmt.bias + ScaleFields.EXPONENT.extract(word).astype(jnp.int32) - 3 - half
    if fmt.mantissa_bits:
        field = jnp.where(kind.spread == 1, field + 4, field)
    code = jnp.clip(field, 0, (1 << fmt.exponent_bits) - 1).astype(jnp.uint32) << fmt.mantissa_bits
    code = code | (word & ((1 << fmt.mantissa_bits) - 1))
    specials = jnp.asarray(np.array([0, 1, fmt.nan - 1, fmt.nan], np.uint32))[ScaleSecondFields.WHICH_SPECIAL.extract(more)]
    is_special = ScaleSecondFields.SPECIAL.extract(more) < kind.special.astype(jnp.uint32)
    anything = (kind.raw == 1) | (kind.span == EVERY)
    return jnp.where(anything, ScaleFields.ANY.extract(word), jnp.where(is_special, specials, code)).astype(fmt.dtype)
