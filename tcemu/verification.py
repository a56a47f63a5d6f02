"""The emulation against a real GPU: every spelling of a family, each on its share of generated cases, all words compared."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.architectures.lookup import COMPUTING, row_for
from tcemu.errors import NotModelled
from tcemu.fuzz.counter import Pair, case_keys, mix, pair, plus
from tcemu.fuzz.generators import generate, operands
from tcemu.fuzz.kinds import KINDS
from tcemu.fuzz.loop import differing, turn_size
from tcemu.fuzz.runs import Run
from tcemu.fuzz.shrink import shrink
from tcemu.fuzz.sides import Side, codes, emulated
from tcemu.isa.catalog import instructions
from tcemu.isa.instructions import LANES, Instruction
from tcemu.native.text import SINGLES, runs
from tcemu.operations.launches import line_alignment
from tcemu.operations.movement import ldmatrix, movmatrix, stmatrix
from tcemu.operations.wmma import memory_lines, wmma_load, wmma_store
from tcemu.shared_memory import MODES
from tcemu.silicon.gpu import Runner
from tcemu.silicon.placement import Variant, launched, placed, product, product_codes, variants
from tcemu.sparsity import undefined

MOVING = ("wmma.load", "wmma.store", "ldmatrix", "stmatrix", "movmatrix")
FAMILIES = (*COMPUTING, *MOVING)
WGMMA_N = (8, 24, 256)  # of wgmma's 32 sizes, those that are verified unless more are asked for
IMAGE_ROWS = 64  # of 16 bytes: the shared memory of a mover's case
ABSENT = 8  # one case in so many has wgmma's scale_d false


class Verified(NamedTuple):
    """What the comparison of one spelling showed. outputs: D's elements, or words of registers and memory moved, that were compared.

    undefined, undefined_mismatches: of sparse instructions those with metadata that PTX leaves undefined, counted apart.
    """

    op: str
    family: str
    outputs: int
    mismatches: int
    variants: int
    said: str = ""  # the first mismatch, made small and explained
    undefined: int = 0
    undefined_mismatches: int = 0
    failed: str = ""  # the GPU's error, which ended it


def spelled(target: str, family: str, sizes: tuple[int, ...] | None = WGMMA_N) -> tuple[Instruction, ...]:
    """The spellings of a family, or "all", that the target has and tcemu models. sizes: of wgmma's N (None: all)."""
    families = FAMILIES if family == "all" else (family,)
    runnable = (op for name in families for op in instructions(target, name) if runs(op))
    return tuple(op for op in runnable if (op.warps == 1 or sizes is None or op.n in sizes) and modelled(op, target))


def modelled(op: Instruction, target: str) -> bool:
    """Whether there is a model of what the target computes; what only moves words needs none."""
    try:
        return op.family in MOVING or row_for(op, target) is not None
    except NotModelled:
        return False


def alike(op: Instruction) -> Instruction:
    """The spelling whose compiled emulation serves this one too: where a matrix lies in memory changes no word of the result."""
    return replace(op, alayout="row", blayout="col") if op.family == "wmma.mma" else replace(op, space=None)


def verified(op: Instruction, runner: Runner, outputs: int, seed: int = 0, explained: bool = True) -> Verified:
    """One spelling by the GPU and by the emulation: at least so many outputs, spread over its variants."""
    if op.family in MOVING:
        return _moved(op, runner, outputs, seed)
    chosen = variants(op, _shift(op))
    size = turn_size(op, jax.default_backend())
    size += -size % op.products
    turns = max(1, -(-outputs // (size * op.m * op.n)))
    mismatches, undefined_mismatches, undefined_outputs, first = 0, 0, 0, None
    emulate = _emulated(alike(op), runner.target, size)
    for turn in range(max(turns, len(chosen))):
        variant, start = chosen[turn % len(chosen)], turn * size
        cases, scale_d, expected = emulate(pair(seed), pair(start), sign(op, variant))
        d = launched(op, variant, placed(op, variant, cases, scale_d), runner)
        differ, is_undefined = np.asarray(_differing(op, d, expected)), np.asarray(_undefined(op, cases))
        defined = np.where(is_undefined, 0, differ)
        if defined.any() and first is None:
            first = variant, start + int(np.argmax(defined > 0))
        mismatches += int(defined.sum())
        undefined_mismatches += int((differ - defined).sum())
        undefined_outputs += int(is_undefined.sum()) * op.m * op.n
    total = max(turns, len(chosen)) * size * op.m * op.n
    return Verified(
        op=str(op),
        family=op.family,
        outputs=total - undefined_outputs,
        mismatches=mismatches,
        variants=len(chosen),
        said=_explained(op, runner, seed, *first) if first is not None and explained else "",
        undefined=undefined_outputs,
        undefined_mismatches=undefined_mismatches,
    )


def _undefined(op: Instruction, cases: dict[str, Array]) -> Array:
    """bool[cases]: whose metadata PTX leaves undefined."""
    if not op.sparse:
        return jnp.zeros(len(cases["a"]), bool)
    return undefined(cases["e"], op.chunk, op.ordered).any((-2, -1))


def sign(op: Instruction, variant: Variant) -> np.uint32:
    """The bit of A to flip for wgmma's immediates: B's negation reaches the product too (see `tcemu.wgmma`)."""
    negated = variant.values.get("imm_scale_a", 1) != variant.values.get("imm_scale_b", 1)
    return np.uint32(1 << op.a.bits - 1 if negated and op.a is not None else 0)


@lru_cache(maxsize=8)
def _emulated(op: Instruction, target: str, size: int) -> Callable[[Pair, Pair, np.uint32], tuple[dict[str, Array], Array, Array]]:
    """One compiled turn: the operands, wgmma's predicate, and D by the emulation."""
    applied = row_for(op, target)

    @jax.jit
    def turn(seed: Pair, start: Pair, flip: Array) -> tuple[dict[str, Array], Array, Array]:
        number = plus(start, jnp.arange(size, dtype=jnp.uint32))
        cases = operands(op, case_keys(seed, number), KINDS)
        present = (number[0] % ABSENT != 0) | (op.warps == 1)
        multiplied = dict(cases)
        if op.warps > 1:
            multiplied["a"] = cases["a"] ^ flip.astype(cases["a"].dtype)
            multiplied["c"] = jnp.where(present[:, None, None], cases["c"], 0)
        return cases, present, codes(op, applied.model, multiplied, applied.clamped_metadata)

    return turn


def _differing(op: Instruction, words: Array, expected: Array) -> Array:
    """int32[cases]: outputs that differ."""
    return _counted(alike(op), product_codes(op, words), expected)


_counted = jax.jit(differing, static_argnums=0)


def _explained(op: Instruction, runner: Runner, seed: int, variant: Variant, number: int) -> str:
    """The mismatch made small, without scale_d and negation; a case that does not differ without them is told by its number alone."""
    emulation = emulated(op, runner.target)
    real = Side(runner.name, product(op, runner, variant._replace(immediates=_without_negation(variant))), traced=False)
    case = Run(op, emulation, real, 0, seed, KINDS).operands(number)
    where = f"{str(variant) or 'no immediates'}, case {number}"
    try:
        return f"{where}: {shrink(op, emulation, real, case, number)}"
    except ValueError as error:
        return f"{where}: {error}"


def _without_negation(variant: Variant) -> tuple[tuple[str, Any], ...]:
    return tuple((name, 1 if name.startswith("imm_scale") else value) for name, value in variant.immediates)


# ---- movement


class Movement(NamedTuple):
    """One launch of a moving instruction: the runner's words, and the same words by the emulation."""

    form: int
    words: dict[str, Array]
    expected: Array


def _moved(op: Instruction, runner: Runner, outputs: int, seed: int) -> Verified:
    cases, mismatches, total, forms = 4096, 0, 0, 0
    for number, form in enumerate(_forms(op, outputs, cases)):
        made = movement(op, runner.target, form, cases, seed, number)
        written = runner(op, made.form, {}, made.words)
        if written.shape != made.expected.shape:
            raise ValueError(f"{op}: the runner gave uint32{list(written.shape)}; wanted {list(made.expected.shape)}")
        mismatches += int(_unlike(written, made.expected))
        total, forms = total + written.size, max(forms, form + 1)
    return Verified(op=str(op), family=op.family, outputs=total, mismatches=mismatches, variants=forms)


@jax.jit
def _unlike(x: Array, y: Array) -> Array:
    """How many words differ."""
    return jnp.sum(x != y, dtype=jnp.int32)


def _forms(op: Instruction, outputs: int, cases: int) -> Iterator[int]:
    """The form of each launch; every form at least once."""
    each = cases * LANES * (op.registers("r") if op.family.endswith(("load", "matrix")) and op.family != "movmatrix" else 1)
    for number in range(max(len(op.forms), -(-outputs // each))):
        yield number % len(op.forms)


def movement(op: Instruction, target: str, form: int, cases: int, seed: int, number: int) -> Movement:
    """Random words moved by the emulation: places are drawn among those that PTX allows, no two lanes of a store have the same."""
    draw = _Draw(seed, number)
    if op.family == "movmatrix":
        held = draw.words(cases, LANES, 1)
        return Movement(form=form, words={"a": held}, expected=movmatrix(op, held, target=target))
    held = draw.words(cases, LANES, op.registers("r"))
    if op.family in ("ldmatrix", "stmatrix"):
        memory = draw.words(cases, 4 * IMAGE_ROWS)
        step, first = draw.words(cases, 1) | 1, draw.words(cases, 1)  # an odd step visits each row once before it comes round
        address = np.asarray((np.arange(LANES, dtype=np.uint32) * step + first) % IMAGE_ROWS * 16).astype(np.int32)
        words = {"memory": memory, "address": jnp.asarray(address, jnp.uint32)[..., None]}
        if op.family == "ldmatrix":
            return Movement(form=form, words=words, expected=ldmatrix(op, memory, address, target=target))
        return Movement(form=form, words=words | {"r": held}, expected=stmatrix(op, memory, address, held, target=target))
    lines, bits = memory_lines(op), getattr(op, op.operand or "").bits
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
    return Movement(form=form, words=words | {"r": held}, expected=wmma_store(op, memory, held, **place))


class _Draw:
    """Words that depend on the seed, the launch, and how many arrays were drawn before."""

    def __init__(self, seed: int, number: int) -> None:
        self.key, self.count = seed * 0x9E3779B1 + number * 0x85EBCA77 & 0xFFFFFFFF, 0

    def words(self, *shape: int) -> Array:
        self.count += 1
        return _mixer(shape)(jnp.uint32(self.key + self.count * 0xC2B2AE3D & 0xFFFFFFFF))


@lru_cache(maxsize=256)
def _mixer(shape: tuple[int, ...]) -> Callable[[Array], Array]:
    return jax.jit(lambda start: mix(mix(jnp.arange(int(np.prod(shape)), dtype=jnp.uint32) + mix(start)) ^ start).reshape(shape))


# ---- golden files

# the names that the recorded files in tests/golden have for the runner's words
NAMES = {
    "wgmma": {"memory": "shared", "d": "d_in", "result": "d_out"},
    "ldmatrix": {"memory": "shared_in", "result": "registers_out"},
    "stmatrix": {"memory": "shared_in", "r": "registers_in", "result": "shared_out"},
    "movmatrix": {"a": "registers_in", "result": "registers_out"},
    "wmma.mma": {name: f"frag_{name}" for name in "abc"} | {"result": "frag_d"},
    "wmma.load": {"result": "registers_out"},
    "wmma.store": {"memory": "memory_in", "r": "registers_in", "result": "memory_out"},
}


def recorded(op: Instruction, runner: Runner, cases: int, seed: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """Each variant's entry for the index of a golden file, and its words as the runner took and gave them."""
    family = "movement" if op.family in ("ldmatrix", "stmatrix", "movmatrix") else op.family.replace(".", "_")
    entry = {"family": family, "ptx": str(op)}
    if op.family in MOVING:
        for form in range(len(op.forms)):
            made = movement(op, runner.target, form, cases, seed, form)
            yield entry, _arrays(op, made.words, runner(op, form, {}, made.words))
        return
    count = cases * op.products
    for at, variant in enumerate(variants(op, _shift(op))):
        codes_of_cases = generate(op, seed, at * count, count)
        present = at % len(MODES) != len(MODES) - 1  # the last one leaves wgmma's accumulator out
        words = placed(op, variant, codes_of_cases, jnp.full(count, present))
        arrays = _arrays(op, words, launched(op, variant, words, runner))
        more = {{"f": "selector"}.get(name, name): value for name, value in variant.immediates}
        if op.warps > 1:
            immediates = [value for name, value in variant.immediates if name.startswith("imm")]
            more = {"immediates": immediates, "sp_sel": variant.values.get("sp_sel")}
            more |= {"a": "registers" if variant.form else "descriptor", "scale_d": int(present)}
            for name in ("a_desc", "b_desc"):
                if name in arrays:
                    low, high = arrays.pop(name)[0].tolist()
                    more[name] = low | high << 32
            del arrays["scale_d"]
        yield entry | more, arrays


def _arrays(op: Instruction, words: dict[str, Array], result: Array) -> dict[str, np.ndarray]:
    """By their names in a golden file; an operand of one register has no axis of registers, a warpgroup's lanes are [4, 32]."""
    names = NAMES.get(op.family.removesuffix(".sp") if op.warps > 1 else op.family, {"result": "d"})
    arrays = {}
    for name, x in (words | {"result": result}).items():
        x = np.asarray(x)
        if op.warps > 1 and x.ndim == 3:
            x = x.reshape(len(x), op.warps, LANES, -1)
        arrays[names.get(name, name)] = x[..., 0] if name in (*SINGLES, "address", "stride") else x
    return arrays


def _shift(op: Instruction) -> int:
    """A number from the spelling, so that neighbouring spellings do not meet the same swizzles in the same forms."""
    return sum(map(ord, str(op)))
