"""`run`: one instruction on the GPU that is here, with the arguments of the emulated operation."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.errors import Unsupported
from tcemu.engine.backends.native.gpu_runner import Runner, gpu
from tcemu.engine.backends.native.native_statement import launch_cases, program_runner
from tcemu.engine.backends.native.units import gpu_target
from tcemu.engine.backends.product_requests import StatementLaunch
from tcemu.engine.instructions.mma import bind_mma
from tcemu.engine.instructions.movers import bind_mover
from tcemu.engine.instructions.operand_checks import check_registers
from tcemu.engine.instructions.statement_operands import mma_launch, mover_launch, wgmma_launch, wmma_memory_launch
from tcemu.engine.instructions.wgmma import bind_wgmma
from tcemu.engine.instructions.wmma import bind_wmma_memory, bind_wmma_mma, memory_lines
from tcemu.engine.isa.families import Instruction, MatrixMultiply, Mover, WmmaMemory
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check

EMULATED_ONLY = {"target", "model", "checked", "every_lane"}  # arguments that a GPU does not take
OF_SCALES = {"scale_a", "scale_b", "selector_a", "selector_b"}


def run(op: str | Instruction, *operands: ArrayLike, runner: Runner | None = None, **keywords: Any) -> Array:
    """Run one instruction on a real GPU, with the arguments of the emulated operation, and return the same registers.

    Traced operands, as under `jax.jit` and `jax.vmap`, make the launch a part of the program, on the GPU for which it is compiled. Offsets,
    descriptors and selectors must be known then too, since the GPU stops at an address outside its memory.

    Args:
        op: PTX spelling, short name or `Instruction` of mma, mma.sp, wmma, wgmma or of matrix movement.
        operands: As `tcemu.mma`, `mma_sp`, `wmma_load`, `wmma_mma`, `wmma_store`, `wgmma`, `ldmatrix`, `stmatrix` and `movmatrix` take
            them: arrays of JAX or NumPy. Leading axes are batch axes; each case is a warp, or warpgroup, of one launch.
        runner: Runner that executes; by default the GPU that JAX computes on, or the first one. Not with traced operands.
        keywords: As the emulated operations take them, without target, model and checked.

    Returns:
        uint32 words, on the GPU if JAX has it.

    Raises:
        Unsupported: There is no GPU, it lacks the instruction, or cuda-core is missing where nothing is traced.
        TypeError: As the emulated operation, or a keyword is unknown.
        ValueError: As the emulated operation.
        UndefinedBehaviour: As the emulated operation.

    Source: The driver's own compiler assembles the PTX for the GPU's own target, such as sm_90a.
    """
    given, op = op, parse(op)
    if op.family not in LAUNCHES:
        raise Unsupported(f"{op}: tcemu.silicon.run runs {', '.join(LAUNCHES)}")
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves((operands, keywords)))
    if traced and runner is not None:
        raise TypeError(f"{op}: an operand is traced; a runner is given arrays, outside jit. Without runner= the GPU is run inside")
    target = gpu_target() if traced else (runner := gpu() if runner is None else runner).target
    op = check(given, target)
    if unknown := sorted(
        set(keywords) & (EMULATED_ONLY if isinstance(op, MatrixMultiply) and op.scaling is not None else EMULATED_ONLY | OF_SCALES)
    ):
        raise TypeError(f"{op}: takes no {', '.join(unknown)}")
    return launch_cases(op, LAUNCHES[op.family](op, *operands, **keywords), program_runner(target) if runner is None else runner)


def _mma(op: MatrixMultiply, *operands: ArrayLike, **keywords: Any) -> StatementLaunch:
    selectors = {"selector_a": (0, 0), "selector_b": (0, 0)} | keywords
    chosen = {name: selectors[name] for name in ("selector_a", "selector_b")}
    return mma_launch(op, bind_mma(op, *operands, **keywords), keywords.get("selector"), **chosen)


def _wmma_memory(op: WmmaMemory, *operands: ArrayLike, **place: Any) -> StatementLaunch:
    return wmma_memory_launch(op, memory_lines(op), bind_wmma_memory(op, *operands, **place), place.get("offset", 0), place.get("stride"))


def _mover(op: Mover, *operands: ArrayLike) -> StatementLaunch:
    return mover_launch(op, bind_mover(op, *operands, every_lane=True))


def _wgmma(op: MatrixMultiply, *operands: Any, **keywords: Any) -> StatementLaunch:
    return wgmma_launch(op, bind_wgmma(op, *operands, **keywords), keywords.get("sp_sel", 0))


LAUNCHES: dict[str, Callable[..., StatementLaunch]] = {
    "mma": _mma, "mma.sp": _mma, "wgmma": _wgmma, "wgmma.sp": _wgmma,
    "wmma.load": lambda op, memory, **place: _wmma_memory(op, memory, **place),
    "wmma.store": lambda op, memory, fragment, **place: _wmma_memory(op, memory, fragment, **place),
    "wmma.mma": lambda op, a, b, c: StatementLaunch(0, {}, bind_wmma_mma(op, a, b, c)._asdict()),
    "ldmatrix": lambda op, shared, address: _mover(op, shared, address),
    "stmatrix": lambda op, shared, address, registers: _mover(op, shared, address, registers),
    "movmatrix": lambda op, registers: StatementLaunch(0, {}, {"a": check_registers(op, "a", registers, "registers")}),
}  # fmt: skip
