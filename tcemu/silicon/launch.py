"""`run`: one instruction on the GPU that is here, with the arguments of the emulated operation."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.errors import Unsupported
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.native.units import target_here
from tcemu.operations.launches import Launch, in_program, launched, of_mma, of_mover, of_movmatrix, of_wgmma, of_wmma_memory, of_wmma_mma
from tcemu.operations.mma import bind_mma
from tcemu.operations.movement import bind_ldmatrix, bind_movmatrix, bind_stmatrix
from tcemu.operations.wgmma import bind_wgmma
from tcemu.operations.wmma import bind_wmma_load, bind_wmma_mma, bind_wmma_store, memory_lines
from tcemu.silicon.gpu import Runner, gpu

EMULATED_ONLY = {"target", "model", "checked", "every_lane"}  # arguments that a GPU does not take
OF_SCALES = {"scale_a", "scale_b", "selector_a", "selector_b"}


def run(op: str | Instruction, *operands: ArrayLike, runner: Runner | None = None, **keywords: Any) -> Array:
    """The instruction on a real GPU: takes the arguments of the emulated operation, without `target`, and returns the same registers.

    op: a PTX spelling or an Instruction of mma, mma.sp, wmma, wgmma or of matrix movement. operands, keywords: as `tcemu.mma`, `mma_sp`,
    `wmma_load`, `wmma_mma`, `wmma_store`, `wgmma`, `ldmatrix`, `stmatrix` and `movmatrix` take them, without target, model and checked;
    arrays of JAX or NumPy. Leading axes are batch axes and broadcast; each case is a warp, or warpgroup, of one launch.
    Traced operands, as under `jax.jit` and `jax.vmap`, make the launch a part of the program, on the GPU that it is compiled for. Places in
    memory, descriptors and selectors must be known then too, since the GPU stops at a place that is outside.
    runner: what executes (default: the GPU that JAX computes on, or the first one); not with traced operands.
    Returns uint32 words, on the GPU if JAX has it. Raises Unsupported without a GPU, with one that lacks the instruction, and without
    cuda-core where nothing is traced; ValueError, TypeError and UndefinedBehaviour for operands as the emulated operation does.
    Source: the PTX is assembled by the driver's own compiler for the GPU's own target, such as sm_90a.
    """
    op = parse(op)
    if op.family not in LAUNCHES:
        raise Unsupported(f"{op}: tcemu.silicon.run runs {', '.join(LAUNCHES)}")
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((operands, keywords)))
    if traced and runner is not None:
        raise TypeError(f"{op}: an operand is traced; a runner is given arrays, outside jit. Without runner= the GPU is run inside")
    target = target_here() if traced else (runner := gpu() if runner is None else runner).target
    check(op, target)
    if unknown := sorted(set(keywords) & (EMULATED_ONLY if op.block_scale else EMULATED_ONLY | OF_SCALES)):
        raise TypeError(f"{op}: takes no {', '.join(unknown)}")
    return launched(op, LAUNCHES[op.family](op, *operands, **keywords), in_program(target) if runner is None else runner)


def _mma(op: Instruction, *operands: ArrayLike, **keywords: Any) -> Launch:
    selectors = {"selector_a": (0, 0), "selector_b": (0, 0)} | keywords
    chosen = {name: selectors[name] for name in ("selector_a", "selector_b")}
    return of_mma(op, bind_mma(op, *operands, **keywords), keywords.get("selector"), **chosen)


def _wmma_mma(op: Instruction, *operands: ArrayLike) -> Launch:
    return of_wmma_mma(op, bind_wmma_mma(op, *operands))


def _wmma_load(op: Instruction, *operands: ArrayLike, **place: Any) -> Launch:
    return of_wmma_memory(op, memory_lines(op), bind_wmma_load(op, *operands, **place), place.get("offset", 0), place.get("stride"))


def _wmma_store(op: Instruction, *operands: ArrayLike, **place: Any) -> Launch:
    return of_wmma_memory(op, memory_lines(op), bind_wmma_store(op, *operands, **place), place.get("offset", 0), place.get("stride"))


def _ldmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    return of_mover(op, bind_ldmatrix(op, *operands, every_lane=True))


def _stmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    return of_mover(op, bind_stmatrix(op, *operands, every_lane=True))


def _movmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    return of_movmatrix(op, bind_movmatrix(op, *operands))


def _wgmma(op: Instruction, *operands: Any, **keywords: Any) -> Launch:
    return of_wgmma(op, bind_wgmma(op, *operands, **keywords), keywords.get("sp_sel", 0))


LAUNCHES: dict[str, Callable[..., Launch]] = {
    "mma": _mma, "mma.sp": _mma, "wmma.load": _wmma_load, "wmma.mma": _wmma_mma, "wmma.store": _wmma_store,
    "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix, "wgmma": _wgmma, "wgmma.sp": _wgmma,
}  # fmt: skip
