"""Comparison of the emulation with a real GPU: every spelling of a family, on its share of generated cases, all results compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.lookup import COMPUTING_FAMILIES, find_row, require_product
from tcemu.engine.backends.native.gpu_runner import Runner
from tcemu.engine.backends.native.native_statement import SINGLES, has_kernel
from tcemu.engine.instructions.movers import ldmatrix, movmatrix, stmatrix
from tcemu.engine.instructions.statement_operands import line_alignment
from tcemu.engine.instructions.wmma import memory_lines, wmma_load, wmma_store
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply, Mover, Record, Wgmma, Wmma, WmmaMemory
from tcemu.engine.isa.legality import instructions
from tcemu.engine.layouts.shared_memory import SWIZZLE_BYTES
from tcemu.engine.layouts.sparsity import undefined_fields
from tcemu.uses.fuzz.case_generator import draw_operands, generate
from tcemu.uses.fuzz.case_kinds import KINDS
from tcemu.uses.fuzz.comparison_loop import batch_size, count_differing_outputs
from tcemu.uses.fuzz.differential_run import FuzzRun
from tcemu.uses.fuzz.implementations import Implementation, compute_codes, emulator
from tcemu.uses.fuzz.random_words import WordPair, add_offset, case_keys, mix_words, split_uint64
from tcemu.uses.fuzz.shrinking import shrink_mismatch
from tcemu.uses.silicon.operand_variants import OperandVariant, operand_variants, place_operands, product_codes, run_on_codes, run_variant

MOVING_FAMILIES = ("wmma.load", "wmma.store", "ldmatrix", "stmatrix", "movmatrix")
FAMILIES = (*COMPUTING_FAMILIES, *MOVING_FAMILIES)
WGMMA_N = (8, 24, 256)  # the sizes of wgmma, out of 32, that are verified by default
IMAGE_ROWS = 64  # rows of 16 bytes in the shared memory of a mover's case
ABSENT_INTERVAL = 8  # every eighth case has wgmma's scale_d false


class Verification(NamedTuple):
    """The result of comparing one spelling with the GPU.

    Attributes:
        op: The spelling.
        family: Its family.
        outputs: Compared elements of D, or compared words of registers and memory that were moved.
        mismatches: Outputs that differ.
        variants: Number of compared variants.
        message: The first mismatch, shrunk and explained.
        undefined: Outputs of sparse instructions with metadata that PTX leaves undefined, counted separately.
        undefined_mismatches: Those that differ.
        failed: The GPU's error, which ended the comparison.
    """

    op: str
    family: str
    outputs: int
    mismatches: int
    variants: int
    message: str = ""
    undefined: int = 0
    undefined_mismatches: int = 0
    failed: str = ""


def list_spellings(target: str, family: str, sizes: tuple[int, ...] | None = WGMMA_N) -> tuple[Instruction, ...]:
    """List the spellings of a family that the target has and tcemu models.

    Args:
        target: GPU or target.
        family: A family, or "all".
        sizes: Values of wgmma's N, or None for all.

    Returns:
        The instructions.
    """
    families = FAMILIES if family == "all" else (family,)
    runnable = (op for name in families for op in instructions(target, name) if has_kernel(op))
    return tuple(op for op in runnable if (not isinstance(op, Wgmma) or sizes is None or op.n in sizes) and has_model(op, target))


def has_model(op: Instruction, target: str) -> bool:
    """Return whether there is a model of what the target computes. An instruction that only moves words needs none."""
    try:
        return op.family in MOVING_FAMILIES or find_row(op, target) is not None
    except NotModelled:
        return False


def emulation_key(op: Record) -> Record:
    """Return the spelling whose compiled emulation serves this one too. The memory layout of a matrix changes no result."""
    if isinstance(op, Wmma):
        return replace(op, alayout="row", blayout="col")
    return replace(op, space=None) if isinstance(op, Mover | WmmaMemory) else op


def verify_instruction(op: Instruction, runner: Runner, outputs: int, seed: int = 0, explain_first: bool = True) -> Verification:
    """Compare one spelling by the GPU and by the emulation.

    Args:
        op: The instruction.
        runner: Runs the instruction on the GPU.
        outputs: Minimum number of outputs, spread over the variants.
        seed: Seed of the cases.
        explained: Shrink and explain the first mismatch.

    Returns:
        The counts.
    """
    if isinstance(op, Mover | WmmaMemory):
        return _verify_movement(op, runner, outputs, seed)
    op = require_product(op)
    all_variants = operand_variants(op, _spelling_number(op))
    size = batch_size(op, jax.default_backend())
    size += -size % op.matrix_count
    iterations = max(1, -(-outputs // (size * op.m * op.n)))
    mismatches, undefined_mismatches, undefined_outputs, first_mismatch = 0, 0, 0, None
    emulate = _compile_emulation(emulation_key(op), runner.target, size)
    for iteration in range(max(iterations, len(all_variants))):
        variant, start = all_variants[iteration % len(all_variants)], iteration * size
        cases, scale_d, expected = emulate(split_uint64(seed), split_uint64(start), negation_bit(op, variant))
        d = run_variant(op, variant, place_operands(op, variant, cases, scale_d), runner)
        differ, is_undefined = np.asarray(_count_differing(op, d, expected)), np.asarray(_undefined_cases(op, cases))
        defined = np.where(is_undefined, 0, differ)
        if defined.any() and first_mismatch is None:
            first_mismatch = variant, start + int(np.argmax(defined > 0))
        mismatches += int(defined.sum())
        undefined_mismatches += int((differ - defined).sum())
        undefined_outputs += int(is_undefined.sum()) * op.m * op.n
    total = max(iterations, len(all_variants)) * size * op.m * op.n
    return Verification(
        op=str(op),
        family=op.family,
        outputs=total - undefined_outputs,
        mismatches=mismatches,
        variants=len(all_variants),
        message=_explain_mismatch(op, runner, seed, *first_mismatch) if first_mismatch is not None and explain_first else "",
        undefined=undefined_outputs,
        undefined_mismatches=undefined_mismatches,
    )


def _undefined_cases(op: MatrixMultiply, cases: dict[str, Array]) -> Array:
    """Return the cases whose metadata PTX leaves undefined, bool[cases]."""
    if not op.sparse:
        return jnp.zeros(len(cases["a"]), bool)
    return undefined_fields(cases["e"], op.chunk_size, op.ordered).any((-2, -1))


def negation_bit(op: MatrixMultiply, variant: OperandVariant) -> np.uint32:
    """Return the bit of A to flip for wgmma's immediates. The negation of B reaches the product too (see `tcemu.wgmma`)."""
    negated = variant.values.get("imm_scale_a", 1) != variant.values.get("imm_scale_b", 1)
    return np.uint32(1 << op.a.bits - 1 if negated and op.a is not None else 0)


@lru_cache(maxsize=8)
def _compile_emulation(
    op: MatrixMultiply, target: str, size: int
) -> Callable[[WordPair, WordPair, np.uint32], tuple[dict[str, Array], Array, Array]]:
    """Compile one iteration: the operands, wgmma's predicate, and D by the emulation."""
    applied = find_row(op, target)

    @jax.jit
    def iterate(seed: WordPair, start: WordPair, flip: Array) -> tuple[dict[str, Array], Array, Array]:
        number = add_offset(start, jnp.arange(size, dtype=jnp.uint32))
        cases = draw_operands(op, case_keys(seed, number), KINDS)
        present = (number[0] % ABSENT_INTERVAL != 0) | (op.warps == 1)
        multiplied = dict(cases)
        if op.warps > 1:
            multiplied["a"] = cases["a"] ^ flip.astype(cases["a"].dtype)
            multiplied["c"] = jnp.where(present[:, None, None], cases["c"], 0)
        return cases, present, compute_codes(op, applied.model, multiplied, applied.clamped_metadata)

    return iterate


def _count_differing(op: Instruction, words: Array, expected: Array) -> Array:
    """Count the outputs that differ, int32[cases]."""
    return _jitted_count(emulation_key(op), product_codes(op, words), expected)


_jitted_count = jax.jit(count_differing_outputs, static_argnums=0)


def _explain_mismatch(op: MatrixMultiply, runner: Runner, seed: int, variant: OperandVariant, number: int) -> str:
    """Shrink the mismatch without scale_d and negation. A case that agrees without these is reported by its number only."""
    emulation = emulator(op, runner.target)
    real = Implementation(runner.name, run_on_codes(op, runner, variant._replace(immediates=_without_negation(variant))), traceable=False)
    case = FuzzRun(op, emulation, real, 0, seed, KINDS).case_operands(number)
    where = f"{str(variant) or 'no immediates'}, case {number}"
    try:
        return f"{where}: {shrink_mismatch(op, emulation, real, case, number)}"
    except ValueError as error:
        return f"{where}: {error}"


def _without_negation(variant: OperandVariant) -> tuple[tuple[str, Any], ...]:
    return tuple((name, 1 if name.startswith("imm_scale") else value) for name, value in variant.immediates)


# ---- movement


class Movement(NamedTuple):
    """One launch of a moving instruction: the runner's words, and the same words by the emulation."""

    form: int
    words: dict[str, Array]
    expected: Array


def _verify_movement(op: Mover | WmmaMemory, runner: Runner, outputs: int, seed: int) -> Verification:
    cases, mismatches, total, forms = 4096, 0, 0, 0
    for number, form in enumerate(_launch_forms(op, outputs, cases)):
        moved = draw_movement(op, runner.target, form, cases, seed, number)
        result = runner(op, moved.form, {}, moved.words)
        if result.shape != moved.expected.shape:
            raise ValueError(f"{op}: the runner gave uint32{list(result.shape)}; expected {list(moved.expected.shape)}")
        mismatches += int(_count_unequal(result, moved.expected))
        total, forms = total + result.size, max(forms, form + 1)
    return Verification(op=str(op), family=op.family, outputs=total, mismatches=mismatches, variants=forms)


@jax.jit
def _count_unequal(x: Array, y: Array) -> Array:
    """Count the words that differ."""
    return jnp.sum(x != y, dtype=jnp.int32)


def _launch_forms(op: Instruction, outputs: int, cases: int) -> Iterator[int]:
    """Yield the form of each launch, with every form at least once."""
    each = cases * LANES * (op.register_count("r") if op.family.endswith(("load", "matrix")) and op.family != "movmatrix" else 1)
    for number in range(max(len(op.operand_forms), -(-outputs // each))):
        yield number % len(op.operand_forms)


def draw_movement(op: Mover | WmmaMemory, target: str, form: int, cases: int, seed: int, number: int) -> Movement:
    """Move random words by the emulation.

    Addresses are drawn among those that PTX allows. No two lanes of a store have the same address.
    """
    draw = _WordDraw(seed, number)
    if isinstance(op, Mover) and not op.uses_memory:
        registers = draw.words(cases, LANES, 1)
        return Movement(form=form, words={"a": registers}, expected=movmatrix(op, registers, target=target))
    registers = draw.words(cases, LANES, op.register_count("r"))
    if isinstance(op, Mover):
        memory = draw.words(cases, 4 * IMAGE_ROWS)
        step, first = draw.words(cases, 1) | 1, draw.words(cases, 1)  # an odd step visits each row once before it repeats
        address = np.asarray((np.arange(LANES, dtype=np.uint32) * step + first) % IMAGE_ROWS * 16).astype(np.int32)
        words = {"memory": memory, "address": jnp.asarray(address, jnp.uint32)[..., None]}
        if op.family == "ldmatrix":
            return Movement(form=form, words=words, expected=ldmatrix(op, memory, address, target=target))
        return Movement(form=form, words=words | {"r": registers}, expected=stmatrix(op, memory, address, registers, target=target))
    lines, bits = memory_lines(op), op.format.bits
    step = 8 * line_alignment(op, lines) // bits
    offset = np.asarray(draw.words(cases) % 4).astype(np.int64) * step
    stride = op.default_stride + (np.asarray(draw.words(cases) % 4).astype(np.int64) * step if form else 0)
    size = -(-((lines.count - 1) * (op.default_stride + 3 * step) + lines.length + 3 * step) * bits // 32)
    memory = draw.words(cases, size + -size % 8)
    words = {"memory": memory, "address": jnp.asarray(offset * bits // 8, jnp.uint32)[:, None]}
    place: dict[str, Any] = {"offset": offset, "target": target}
    if form:
        words["stride"] = jnp.asarray(stride, jnp.uint32)[:, None]
        place["stride"] = stride
    if op.family == "wmma.load":
        return Movement(form=form, words=words, expected=wmma_load(op, memory, **place))
    return Movement(form=form, words=words | {"r": registers}, expected=wmma_store(op, memory, registers, **place))


class _WordDraw:
    """Random words that depend on the seed, the launch, and the number of arrays drawn before."""

    def __init__(self, seed: int, number: int) -> None:
        self.key, self.count = seed * 0x9E3779B1 + number * 0x85EBCA77 & 0xFFFFFFFF, 0

    def words(self, *shape: int) -> Array:
        self.count += 1
        return _word_mixer(shape)(jnp.uint32(self.key + self.count * 0xC2B2AE3D & 0xFFFFFFFF))


@lru_cache(maxsize=256)
def _word_mixer(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return jax.jit(
        lambda start: mix_words(mix_words(jnp.arange(int(np.prod(shape)), dtype=jnp.uint32) + mix_words(start)) ^ start).reshape(shape)
    )


# ---- golden files

# names of the runner's words in the recorded files of tests/golden
RECORDED_NAMES = {
    "wgmma": {"memory": "shared", "d": "d_in", "result": "d_out"},
    "ldmatrix": {"memory": "shared_in", "result": "registers_out"},
    "stmatrix": {"memory": "shared_in", "r": "registers_in", "result": "shared_out"},
    "movmatrix": {"a": "registers_in", "result": "registers_out"},
    "wmma.mma": {name: f"frag_{name}" for name in "abc"} | {"result": "frag_d"},
    "wmma.load": {"result": "registers_out"},
    "wmma.store": {"memory": "memory_in", "r": "registers_in", "result": "memory_out"},
}


def record_cases(op: Instruction, runner: Runner, cases: int, seed: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Yield each variant's entry for the index of a golden file, and its words as the runner received and returned them."""
    family = "movement" if op.family in ("ldmatrix", "stmatrix", "movmatrix") else op.family.replace(".", "_")
    entry = {"family": family, "ptx": str(op)}
    if isinstance(op, Mover | WmmaMemory):
        for form in range(len(op.operand_forms)):
            moved = draw_movement(op, runner.target, form, cases, seed, form)
            yield entry, _name_arrays(op, moved.words, runner(op, form, {}, moved.words))
        return
    op = require_product(op)
    count = cases * op.matrix_count
    for at, variant in enumerate(operand_variants(op, _spelling_number(op))):
        codes_of_cases = generate(op, seed, at * count, count)
        present = at % len(SWIZZLE_BYTES) != len(SWIZZLE_BYTES) - 1  # the last one leaves wgmma's accumulator out
        words = place_operands(op, variant, codes_of_cases, jnp.full(count, present))
        arrays = _name_arrays(op, words, run_variant(op, variant, words, runner))
        details = {{"f": "selector"}.get(name, name): value for name, value in variant.immediates}
        if op.warps > 1:
            immediates = [value for name, value in variant.immediates if name.startswith("imm")]
            details = {"immediates": immediates, "sp_sel": variant.values.get("sp_sel")}
            details |= {"a": "registers" if variant.form else "descriptor", "scale_d": int(present)}
            for name in ("a_desc", "b_desc"):
                if name in arrays:
                    low, high = arrays.pop(name)[0].tolist()
                    details[name] = low | high << 32
            del arrays["scale_d"]
        yield entry | details, arrays


def _name_arrays(op: Instruction, words: dict[str, Array], result: Array) -> dict[str, np.ndarray]:
    """Name the arrays as in a golden file. An operand of one register has no axis of registers; a warpgroup's lanes are [4, 32]."""
    names = RECORDED_NAMES.get(op.family.removesuffix(".sp") if op.warps > 1 else op.family, {"result": "d"})
    arrays = {}
    for name, x in (words | {"result": result}).items():
        x = np.asarray(x)
        if op.warps > 1 and x.ndim == 3:
            x = x.reshape(len(x), op.warps, LANES, -1)
        arrays[names.get(name, name)] = x[..., 0] if name in (*SINGLES, "address", "stride") else x
    return arrays


def _spelling_number(op: Instruction) -> int:
    """Derive a number from the spelling, so that neighbouring spellings do not get the same swizzles in the same forms."""
    return sum(map(ord, str(op)))
