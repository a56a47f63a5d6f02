"""Conversions between matrices of codes and the words of an instruction's statement, and the variants of its operands."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.backends.native.gpu_runner import Words
from tcemu.engine.backends.native.native_statement import Run
from tcemu.engine.instructions.operand_checks import pack_matrix, unpack_matrix
from tcemu.engine.instructions.register_packing import pack
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply
from tcemu.engine.layouts.shared_memory import SWIZZLE_BYTES, SharedLayout, descriptor_words, to_shared

ATOM_BYTES = 1024  # the largest swizzle atom: an operand that begins at a multiple of it has base offset 0
Codes = Mapping[str, Array]


class OperandVariant(NamedTuple):
    """One way to give an instruction its operands: the form, the immediates, and how wgmma's matrices lie in shared memory."""

    form: int = 0
    immediates: tuple[tuple[str, Any], ...] = ()
    swizzle: int = 0

    @property
    def values(self) -> dict[str, Any]:
        """The immediates by name."""
        return dict(self.immediates)

    def __str__(self) -> str:
        settings = [f"{name} {value}" for name, value in self.immediates]
        return ", ".join(settings + ([f"swizzle {self.swizzle}"] if self.swizzle else []))


@lru_cache(maxsize=4096)
def operand_variants(op: MatrixMultiply, shift: int = 0) -> tuple[OperandVariant, ...]:
    """The variants of a computing instruction in which each of its immediates takes each of its values.

    wgmma has four: A from a descriptor and from registers, both majors, both signs, every swizzle; `shift` moves the swizzles against the
    rest.
    """
    if op.warps == 1:
        if op.sparse and op.scaling is None:
            return tuple(OperandVariant(immediates=(("f", selector),)) for selector in op.selectors)
        if op.scaling is None:
            return (OperandVariant(),)
        scaled, byte_ids, threads = [], op.scaling.byte_ids, op.scaling.thread_ids
        for i in range(max(len(byte_ids) * 2, 4)):
            at = lambda ids, i=i: (byte_ids[i // 2 % len(byte_ids)], ids[i % len(ids)])
            pairs = (("selector_a", at(threads["a"])), ("selector_b", at(threads["b"])))
            sparse = (("f", op.selectors[i % len(op.selectors)]),) if op.sparse else ()
            scaled.append(OperandVariant(immediates=sparse + pairs))
        return tuple(scaled)
    four = []
    for i in range(4):
        form, high = i % 2, i // 2
        values = {"imm_scale_a": 1 - 2 * (i & 1), "imm_scale_b": 1 - 2 * high, "imm_trans_a": high, "imm_trans_b": high}
        immediates = {name: values[name] for name in op.operand_forms[form] if name in values}
        immediates |= {"sp_sel": op.selectors[high % len(op.selectors)]} if op.sparse else {}
        swizzle = SWIZZLE_BYTES[(i + shift) % len(SWIZZLE_BYTES)]
        four.append(OperandVariant(form=form, immediates=tuple(immediates.items()), swizzle=swizzle))
    return tuple(four)


@partial(jax.jit, static_argnames=("op", "variant"))
def place_operands(op: MatrixMultiply, variant: OperandVariant, operands: Codes, scale_d: Array | None = None) -> dict[str, Array]:
    """Cases of codes as `tcemu.dot` takes them -> the runner's words.

    A warp of m8n8k4 with f16 takes four cases, so that their number must be a multiple of four. scale_d: bool[cases], wgmma's predicate
    (None: true).
    """
    selectors = variant.values
    by_warp = lambda x: x.reshape(-1, op.matrix_count, *x.shape[1:]) if op.matrix_count > 1 else x
    if op.warps == 1:
        words = {name: pack_matrix(op, name, by_warp(operands[name])) for name in "abc"}
        if op.sparse:
            words["e"] = pack(op, "e", operands["e"], selector=selectors.get("f", 0))[..., None]
        for name in ("scale_a", "scale_b") if op.scaling is not None else ():
            words[name] = pack(op, name, operands[name], selector=selectors[name.replace("scale", "selector")])[..., None]
        return words
    lanes = lambda x: x.reshape(x.shape[0], op.warps * LANES, -1)
    cases = operands["a"].shape[0]
    scale = jnp.ones(cases, bool) if scale_d is None else scale_d
    words = {"d": lanes(pack_matrix(op, "d", operands["c"])), "scale_d": scale.astype(jnp.uint32)[:, None]}
    if op.sparse:
        words["sp_meta"] = lanes(pack(op, "sp_meta", operands["e"], selector=selectors["sp_sel"]))
    layouts = _layouts(op, variant)
    memory = jnp.zeros((cases, max(layout.words for layout in layouts.values())), jnp.uint32)
    for name, layout in layouts.items():
        matrix = operands[name] if name == "a" else operands[name].swapaxes(-1, -2)
        memory = to_shared(matrix, layout, memory)
        words[f"{name}_desc"] = jnp.broadcast_to(jnp.asarray(descriptor_words(name, layout.descriptor())), (cases, 2))
    if "a" not in layouts:
        words["a"] = lanes(pack_matrix(op, "a", operands["a"]))
    return words | {"memory": memory}


def _layouts(op: Instruction, variant: OperandVariant) -> dict[str, SharedLayout]:
    """Layouts of B, and of A unless it is in registers: one after the other, each at the start of the largest atom, without gaps inside."""
    layouts, start = {}, 0
    for name in ("b", "a") if variant.form == 0 else ("b",):
        rows, columns = op.matrix_shape(name) if name == "a" else op.matrix_shape(name)[::-1]
        major = "mn" if variant.values.get(f"imm_trans_{name}") else "k"
        layouts[name] = SharedLayout(getattr(op, name), rows, columns, major, variant.swizzle, start)
        start = -(-4 * layouts[name].words // ATOM_BYTES) * ATOM_BYTES
    return layouts


@partial(jax.jit, static_argnames="op")
def product_codes(op: Instruction, words: Array) -> Array:
    """D's words from a runner -> the codes of the cases, [cases, M, N]."""
    words = words.reshape(words.shape[0], op.warps, LANES, -1) if op.warps > 1 else words
    codes = unpack_matrix(op, "d", words)
    return codes.reshape(-1, *codes.shape[2:]) if op.matrix_count > 1 else codes


def run_on_codes(op: Instruction, runner: Run, variant: OperandVariant | None = None) -> Callable[[Codes], Array]:
    """The runner as a function of codes, for fuzzing: from the operands of `tcemu.dot` to the codes of D."""
    chosen = operand_variants(op)[0] if variant is None else variant

    def call(operands: Codes) -> Array:
        cases = len(operands["a"])
        filled = {name: _filled(jnp.asarray(x), -cases % op.matrix_count) for name, x in operands.items()}
        words = place_operands(op, chosen, filled)
        return product_codes(op, run_variant(op, chosen, words, runner))[:cases]

    return call


def run_variant(op: Instruction, variant: OperandVariant, words: Words, runner: Run) -> Array:
    """The runner's words for this variant."""
    return runner(op, variant.form, variant.values, words)


def _filled(x: Array, more: int) -> Array:
    """Return the cases with the last one repeated `more` times."""
    return jnp.pad(x, [(0, more)] + [(0, 0)] * (x.ndim - 1), mode="edge") if more else x
