"""Every tensor-core instruction as a PTX file: the text of `native_statement`, run by `tcemu.ptx.run` on words of any bits."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np

import tcemu
from support.emulated_gpu import EmulatedGpu
from tcemu import ptx
from tcemu.engine.backends.native import native_statement as text
from tcemu.engine.isa.grammar import split_operands
from tcemu.uses.silicon.operand_variants import OperandVariant, operand_variants, place_operands

CASES = 4
IMAGE = 1024  # words of the memory of a case that movers and wmma read or write
NAME = r"(?<![\w.%])%?[A-Za-z_]\w*"


def choose_variant(op, which=0) -> OperandVariant:
    """A choice of the immediates and forms of an instruction."""
    if op.family in ("mma", "mma.sp", "wgmma", "wgmma.sp"):
        return operand_variants(op)[which]
    return OperandVariant(form=which % len(op.operand_forms))


def draw_words(op, variant: OperandVariant, seed=0) -> dict[str, np.ndarray]:
    """Draw the words of the kernel's parameters: any bits, at valid addresses."""
    rng = np.random.default_rng(seed)
    if op.warps > 1:
        return _draw_warpgroup_words(op, variant, rng)
    draw = lambda *shape: rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    made = text.statement_kernel(op, _target(op), variant.form, variant.values)
    words = {parameter.name: draw(CASES, made.threads, parameter.words) for parameter in made.parameters if parameter.scope == text.LANE}
    if "e" in words:
        words["e"] = (
            np.full_like(words["e"], 0x44444444)
            if op.chunk_size == 2
            else rng.choice(np.uint32([0x4444EEEE, 0x8C9DED49]), words["e"].shape)
        )
    if "memory" in {parameter.name for parameter in made.parameters}:
        words["memory"] = draw(CASES, IMAGE)
    if op.family in ("ldmatrix", "stmatrix"):
        words["address"] = 16 * np.stack([rng.permutation(IMAGE // 4)[:32] for _ in range(CASES)]).astype(np.uint32)[..., None]
    elif "memory" in words:
        unit = op.register_count("r") * 4
        words["address"] = (unit * rng.integers(0, 2, (CASES, 1))).astype(np.uint32)
        words["stride"] = np.full((CASES, 1), op.default_stride + unit * 8 // op.format.bits, np.uint32)
    return words


def _draw_warpgroup_words(op, variant, rng):
    codes = lambda fmt, *shape: jnp.asarray(rng.integers(0, 1 << fmt.bits, (CASES, *shape), dtype=np.uint64).astype(fmt.dtype))
    operands = {"a": codes(op.a, *op.matrix_shape("a")), "b": codes(op.b, *op.matrix_shape("b")), "c": codes(op.d, *op.matrix_shape("d"))}
    if op.sparse:
        fields = [0b0100, 0b1110] if op.chunk_size == 2 else [0b0100, 0b1001, 0b1110]
        operands["e"] = jnp.asarray(rng.choice(np.uint8(fields), (CASES, *op.matrix_shape("sp_meta"))))
    words = place_operands(op, variant, operands, jnp.asarray(np.arange(CASES) != 1))
    return {name: np.asarray(value) for name, value in words.items()}


def _target(op) -> str:
    """Return the newest target that has the instruction."""
    return tcemu.targets(op)[-1]


def run_statement(op, variant: OperandVariant, words, target=None, source=None, checked=False):
    """Return the parameter that the kernel writes, computed by `tcemu.ptx.run`. source: a changed text."""
    target = target or _target(op)
    made = text.statement_kernel(op, target, variant.form, variant.values)
    shape = (CASES, made.threads, op.register_count(made.written)) if made.written != "memory" else words["memory"].shape
    held = {**words} if text.reads_written_operand(op) else {**words, made.written: np.zeros(shape, np.uint32)}
    image = words["memory"].shape[-1] if "memory" in words else 0
    given: list[Any] = [np.ascontiguousarray(held[parameter.name]) for parameter in made.parameters]
    results = ptx.run(
        source or made.text, grid=CASES - 1, block=made.threads, args=[*given, CASES, image], target=target,
        shared_bytes=4 * image if made.shared else 0, checked=checked,
    )  # fmt: skip
    return np.asarray(results[[parameter.name for parameter in made.parameters].index(made.written)])


def call_operation(op, variant: OperandVariant, words, target=None):
    """Return the same parameter, computed by the operation itself."""
    return np.asarray(EmulatedGpu(target or _target(op))(op, variant.form, variant.values, words))


def example(statement: str):
    """The instruction of a statement as a manual prints it, the variant that it says, and the kernel's text with it in its place.

    Registers take the kernel's names; those that stand where the kernel has constants are made, with the kernel's values.
    """
    op = tcemu.parse(statement)
    forms = [i for i, form in enumerate(op.operand_forms) if len(form) == len(op.arguments)]
    in_registers = op.arguments[1].startswith("{") if len(op.arguments) > 1 else False
    form = next((i for i in forms if ("a_desc" in op.operand_forms[i]) != in_registers), forms[0])
    given = dict(zip(op.operand_forms[form], op.arguments, strict=True))
    fixed = {"f": "0", "sp_sel": "0", "selector_a": "{0, 0}", "selector_b": "{0, 0}"}
    immediates = {name: _constant(given[name], fixed.get(name, "0")) for name in text.IMMEDIATES if name in given}
    variant = OperandVariant(form=form, immediates=tuple(immediates.items()))
    lines = text.statement_kernel(op, _target(op), form, immediates).text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(text.spell(op) + " "))
    ours = split_operands(lines[at].strip().rstrip(";").partition(" ")[2])
    names, made = {}, []
    for theirs, own in zip(op.arguments, ours, strict=True):
        registers = re.findall(NAME, own)
        for one, value in zip(re.findall(NAME, theirs), registers or re.findall(r"-?\d+", own), strict=False):
            names[one] = value if registers else one
            made += [] if registers else [f".reg .b16 {one};", f"mov.b16 {one}, {value};"]
    spelling, _, rest = statement.rstrip(";").partition(" ")
    lines[at : at + 1] = [*made, f"{spelling} {re.sub(NAME, lambda match: names[match[0]], rest)};"]
    return op, variant, "\n".join(lines), given


def _constant(argument: str, otherwise: str):
    """Return the value of an argument: a number or a pair, or the other register."""
    argument = otherwise if re.search(r"[A-Za-z_]{2}|%", argument) else argument
    numbers = tuple(int(number, 0) for number in argument.strip("{}").split(","))
    return numbers[0] if len(numbers) == 1 else numbers
