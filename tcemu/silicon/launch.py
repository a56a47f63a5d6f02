"""`run`: one instruction on the GPU that is here, with the arguments of the emulated operation."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.errors import Unsupported
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import LANES, Instruction
from tcemu.operations.mma import bind_mma
from tcemu.operations.movement import bind_ldmatrix, bind_movmatrix, bind_stmatrix
from tcemu.operations.wgmma import bind_wgmma
from tcemu.operations.wmma import Place, bind_wmma_load, bind_wmma_mma, bind_wmma_store, memory_lines
from tcemu.silicon.gpu import Runner, gpu
from tcemu.native.text import in_shared

IMAGE_WORDS = 8  # 32 bytes, so that every case's image is aligned for anything
EMULATED_ONLY = {"target", "model", "checked", "every_lane"}  # arguments that a GPU does not take
OF_SCALES = {"scale_a", "scale_b", "selector_a", "selector_b"}
LDMATRIX_ROW = 16  # bytes to which ldmatrix's rows are aligned: PTX ISA 9.7.14.5.15


class Launch(NamedTuple):
    """What a runner is given: the form of the statement, its immediates, and the operands' words with their batch axes in front."""

    form: int
    immediates: Mapping[str, Any]
    words: Mapping[str, Array]


def run(op: str | Instruction, *operands: ArrayLike, runner: Runner | None = None, **keywords: Any) -> Array:
    """The instruction on a real GPU: takes the arguments of the emulated operation, without `target`, and returns the same registers.

    op: a PTX spelling or an Instruction of mma, mma.sp, wmma, wgmma or of matrix movement. operands, keywords: as `tcemu.mma`, `mma_sp`,
    `wmma_load`, `wmma_mma`, `wmma_store`, `wgmma`, `ldmatrix`, `stmatrix` and `movmatrix` take them, without target, model and checked;
    arrays of JAX or NumPy, not traced. Leading axes are batch axes and broadcast; each case is a warp, or warpgroup, of one launch.
    runner: what executes (default: the GPU that JAX computes on, or the first one).
    Returns uint32 words, on the GPU if JAX has it. Raises Unsupported without cuda-core or a GPU, or with one that lacks the instruction;
    ValueError, TypeError and UndefinedBehaviour for operands as the emulated operation does.
    Source: the PTX is assembled by the driver's own compiler for the GPU's own target, such as sm_90a.
    """
    op = parse(op)
    if op.family not in LAUNCHES:
        raise Unsupported(f"{op}: tcemu.silicon.run runs {', '.join(LAUNCHES)}")
    runner = gpu() if runner is None else runner
    check(op, runner.target)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((operands, keywords))):
        raise TypeError(f"{op}: an operand is traced; a GPU is run on arrays, outside jit")
    if unknown := sorted(set(keywords) & (EMULATED_ONLY if op.block_scale else EMULATED_ONLY | OF_SCALES)):
        raise TypeError(f"{op}: takes no {', '.join(unknown)}")
    return executed(op, LAUNCHES[op.family](op, *operands, **keywords), runner)


def executed(op: Instruction, launch: Launch, runner: Runner) -> Array:
    """The runner's words, with the batch axes of the operands."""
    ranks = {name: rank_of(op, name) for name in launch.words}
    batch = jnp.broadcast_shapes(*(x.shape[: x.ndim - ranks[name]] for name, x in launch.words.items()))
    image = launch.words["memory"].shape[-1] if "memory" in launch.words else 0
    flat = {}
    for name, x in launch.words.items():
        own = x.shape[x.ndim - ranks[name] :]
        x = jnp.broadcast_to(x, (*batch, *own)).reshape(-1, *own)
        if ranks[name] == 3:  # the lanes of four warps in one row
            x = x.reshape(x.shape[0], 4 * LANES, -1)
        flat[name] = jnp.pad(x, ((0, 0), (0, -image % IMAGE_WORDS))) if name == "memory" else x
    written = runner(op, launch.form, launch.immediates, flat)
    if written.ndim == 2:
        return written[:, :image].reshape(*batch, image)
    return written.reshape(*batch, *((4,) if op.warps > 1 else ()), LANES, written.shape[-1])


def rank_of(op: Instruction, name: str) -> int:
    """Axes of a parameter's words without the batch: a case's, a lane's, or those of a warpgroup."""
    if name in ("memory", "a_desc", "b_desc", "scale_d", "stride") or (name == "address" and op.family.startswith("wmma")):
        return 1
    return 3 if op.warps > 1 else 2


def _mma(op: Instruction, *operands: ArrayLike, **keywords: Any) -> Launch:
    bound = bind_mma(op, *operands, **keywords)
    words: dict[str, Array] = {"a": bound.a, "b": bound.b, "c": bound.c}
    immediates: dict[str, Any] = {}
    if bound.metadata is not None:
        words["e"], immediates["f"] = bound.metadata.registers[..., None], int(bound.metadata.selector)
    for name, scale in (("a", bound.scale_a), ("b", bound.scale_b)):
        if scale is not None:
            words[f"scale_{name}"] = scale.registers[..., None]
            immediates[f"selector_{name}"] = int(scale.selector.byte_id), int(scale.selector.thread_id)
    return Launch(form=0, immediates=immediates, words=words)


def _wmma_mma(op: Instruction, *operands: ArrayLike) -> Launch:
    return Launch(form=0, immediates={}, words=bind_wmma_mma(op, *operands)._asdict())


def _wmma_load(op: Instruction, *operands: ArrayLike, **keywords: Any) -> Launch:
    bound = bind_wmma_load(op, *operands, **keywords)
    return _wmma_memory(op, bound.place, {"memory": bound.memory}, keywords.get("stride") is not None)


def _wmma_store(op: Instruction, *operands: ArrayLike, **keywords: Any) -> Launch:
    bound = bind_wmma_store(op, *operands, **keywords)
    return _wmma_memory(op, bound.place, {"memory": bound.memory, "r": bound.fragment}, keywords.get("stride") is not None)


def _wmma_memory(op: Instruction, place: Place, words: dict[str, Array], has_stride: bool) -> Launch:
    bits, least = getattr(op, op.operand or "").bits, line_alignment(op)
    offset, stride = 4 * np.asarray(place.start, np.int64), 4 * np.asarray(place.step, np.int64)  # in bytes
    for name, value in (("offset", offset), ("stride", stride)):
        if (misaligned := value % least != 0).any():
            raise ValueError(
                f"{op}: {name} {value[misaligned].flat[0] * 8 // bits} is no multiple of {8 * least // bits} elements, {least} bytes. PTX "
                "asks for less, as tcemu.wmma_load does; but ptxas has this fragment read by ldmatrix, and the GPU stops if a row is not "
                "aligned"
            )
    words["address"] = _words(offset)[..., None]
    if has_stride:
        words["stride"] = _words(stride * 8 // bits)[..., None]
    return Launch(form=int(has_stride), immediates={}, words=words)


def line_alignment(op: Instruction) -> int:
    """Bytes to which the lines of a wmma.load or wmma.store must be aligned on a GPU.

    PTX asks for the size of a lane's fragment (9.7.14.4.2). But ptxas reads an A or B in shared memory by ldmatrix (SASS: LDSM) where it
    can: elements of 16 bits, or shorter ones that lie along K. Of sm_90a's loads 36 then have fragments shorter than a row of ldmatrix.
    Aligned to their fragments only, exactly these 36 ended with CUDA_ERROR_MISALIGNED_ADDRESS on an H200, and their CUDA context with them
    (each was run by hand, 2026-11-21; no test repeats it).
    """
    lines = memory_lines(op)
    fits = lines.bits == 16 or (lines.bits < 16 and (op.operand, op.layout) in (("a", "row"), ("b", "col")))
    by_ldmatrix = fits and op.family == "wmma.load" and op.operand in ("a", "b") and in_shared(op)
    return max(lines.alignment * lines.bits // 8, LDMATRIX_ROW if by_ldmatrix else 1)


def _ldmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    bound = bind_ldmatrix(op, *operands, every_lane=True)
    return Launch(form=0, immediates={}, words={"memory": bound.shared, "address": _words(bound.address)[..., None]})


def _stmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    bound = bind_stmatrix(op, *operands, every_lane=True)
    words = {"memory": bound.shared, "address": _words(bound.address)[..., None], "r": bound.registers}
    return Launch(form=0, immediates={}, words=words)


def _movmatrix(op: Instruction, *operands: ArrayLike) -> Launch:
    return Launch(form=0, immediates={}, words={"a": bind_movmatrix(op, *operands).registers})


def _wgmma(op: Instruction, *operands: Any, **keywords: Any) -> Launch:
    bound = bind_wgmma(op, *operands, **keywords)
    words: dict[str, Array] = {"d": bound.d, "memory": bound.shared, "b_desc": jnp.asarray(bound.b_desc)}
    if bound.a is not None:
        words["a"] = bound.a
    if bound.a_desc is not None:
        words["a_desc"] = jnp.asarray(bound.a_desc)
    scale_d = jnp.ones((), bool) if bound.scale_d is None else bound.scale_d
    words["scale_d"] = scale_d.astype(jnp.uint32)[..., None]
    immediates = {
        "imm_scale_a": bound.imm_scale_a,
        "imm_scale_b": bound.imm_scale_b,
        "imm_trans_a": int(bound.majors.a == "mn"),
        "imm_trans_b": int(bound.majors.b == "mn"),
    }
    if bound.metadata is not None:
        words["sp_meta"], immediates["sp_sel"] = bound.metadata.registers[..., None], int(bound.metadata.selector)
    return Launch(form=int(bound.a is not None), immediates=immediates, words=words)


def _words(value: ArrayLike) -> Array:
    return jnp.asarray(np.asarray(value).astype(np.uint32))


LAUNCHES: dict[str, Callable[..., Launch]] = {
    "mma": _mma, "mma.sp": _mma, "wmma.load": _wmma_load, "wmma.mma": _wmma_mma, "wmma.store": _wmma_store,
    "ldmatrix": _ldmatrix, "stmatrix": _stmatrix, "movmatrix": _movmatrix, "wgmma": _wgmma, "wgmma.sp": _wgmma,
}  # fmt: skip
