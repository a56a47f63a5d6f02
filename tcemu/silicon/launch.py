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
from tcemu.memory import as_memory
from tcemu.operations.movement import _rows
from tcemu.operations.operands import lane_words, register_words
from tcemu.operations.selected import scale_selector, sparsity_selector
from tcemu.operations.wgmma import _descriptor, _form, _scale_d
from tcemu.operations.wmma import _lines, _place
from tcemu.silicon.gpu import Runner, gpu
from tcemu.silicon.text import in_shared

IMAGE_WORDS = 8  # 32 bytes, so that every case's image is aligned for anything
SCALES = ("scale_a", "scale_b")
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
    found = runner(op, launch.form, launch.immediates, flat)
    if found.ndim == 2:
        return found[:, :image].reshape(*batch, image)
    return found.reshape(*batch, *((4,) if op.warps > 1 else ()), LANES, found.shape[-1])


def rank_of(op: Instruction, name: str) -> int:
    """Axes of a parameter's words without the batch: a case's, a lane's, or those of a warpgroup."""
    if name in ("memory", "a_desc", "b_desc", "scale_d", "stride") or (name == "address" and op.family.startswith("wmma")):
        return 1
    return 3 if op.warps > 1 else 2


def _mma(
    op: Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, e: ArrayLike | None = None, *, selector: int | None = None, **scales: Any
) -> Launch:
    words = {name: register_words(op, name, x) for name, x in (("a", a), ("b", b), ("c", c))}
    immediates: dict[str, Any] = {}
    if (e is None or selector is None) == op.sparse:
        raise ValueError(f"{op}: a sparse instruction takes its metadata, e, and selector=; a dense one neither")
    if op.sparse and e is not None and selector is not None:
        words["e"], immediates["f"] = lane_words(op, "e", e)[..., None], int(sparsity_selector(op, selector))
    wanted = {*SCALES, "selector_a", "selector_b"} if op.block_scale else set()
    if unknown := sorted(set(scales) - wanted):
        raise TypeError(f"{op}: takes no {', '.join(unknown)}")
    for name in SCALES if op.block_scale else ():
        if scales.get(name) is None:
            raise ValueError(f"{name}: {op} has block scales, and none came")
        at = scales.get(name.replace("scale", "selector"), (0, 0))
        scale_selector(op, name, at)
        words[name], immediates[name.replace("scale", "selector")] = lane_words(op, name, scales[name])[..., None], (int(at[0]), int(at[1]))
    return Launch(0, immediates, words)


def _wmma_mma(op: Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Launch:
    return Launch(0, {}, {name: register_words(op, name, x) for name, x in (("a", a), ("b", b), ("c", c))})


def _wmma_memory(op: Instruction, memory: ArrayLike, fragment: Any = None, *, offset: ArrayLike = 0, stride: Any = None) -> Launch:
    image = as_memory("memory", memory)
    _place(op, image.shape[-1], offset, stride, False)
    bits, least = getattr(op, op.operand or "").bits, line_alignment(op)
    for name, value in (("offset", offset), ("stride", op.default_stride if stride is None else stride)):
        if (odd := np.asarray(value) * bits // 8 % least != 0).any():
            raise ValueError(
                f"{op}: {name} {np.asarray(value)[odd].flat[0]} is no multiple of {8 * least // bits} elements, {least} bytes. PTX asks "
                "for less, as tcemu.wmma_load does; but ptxas has this fragment read by ldmatrix, and the GPU stops if a row is not aligned"
            )
    words = {"memory": image, "address": _words(np.asarray(offset) * bits // 8)[..., None]}
    if stride is not None:
        words["stride"] = _words(stride)[..., None]
    if op.family == "wmma.store":
        words["r"] = register_words(op, "r", fragment, "fragment")
    return Launch(int(stride is not None), {}, words)


def line_alignment(op: Instruction) -> int:
    """Bytes to which the lines of a wmma.load or wmma.store must be aligned on a GPU.

    PTX asks for the size of a lane's fragment (9.7.14.4.2). But an A or B in shared memory ptxas reads by ldmatrix (SASS: LDSM), if it can:
    elements of 16 bits, or shorter ones that lie along K. 36 of sm_90a's loads have fragments shorter than a row of ldmatrix there. On an
    H200 exactly these, of all, ended with CUDA_ERROR_MISALIGNED_ADDRESS, and the context with them, if aligned to their fragments only
    (each was run by hand, 2026-11-21; no test repeats it).
    """
    lines = _lines(op)
    fits = lines.bits == 16 or (lines.bits < 16 and (op.operand, op.layout) in (("a", "row"), ("b", "col")))
    by_ldmatrix = fits and op.family == "wmma.load" and op.operand in ("a", "b") and in_shared(op)
    return max(lines.alignment * lines.bits // 8, LDMATRIX_ROW if by_ldmatrix else 1)


def _matrices(op: Instruction, shared: ArrayLike, address: ArrayLike, registers: Any = None) -> Launch:
    image = as_memory("shared", shared)
    _rows(op, image.shape[-1], address, False, every_lane=True)
    words = {"memory": image, "address": _words(address)[..., None]}
    if op.family == "stmatrix":
        words["r"] = register_words(op, "r", registers, "registers")
    return Launch(0, {}, words)


def _movmatrix(op: Instruction, registers: ArrayLike) -> Launch:
    return Launch(0, {}, {"a": register_words(op, "a", registers, "registers")})


def _wgmma(
    op: Instruction,
    d: ArrayLike,
    b_desc: Any,
    shared: ArrayLike,
    *,
    a: Any = None,
    a_desc: Any = None,
    scale_d: Any = True,
    imm_scale_a: int = 1,
    imm_scale_b: int = 1,
    imm_trans_a: int = 0,
    imm_trans_b: int = 0,
    sp_meta: Any = None,
    sp_sel: int = 0,
) -> Launch:
    form = _form(op, a, a_desc, (imm_scale_a, imm_scale_b), (imm_trans_a, imm_trans_b))
    image = as_memory("shared", shared)
    words: dict[str, Array] = {"d": register_words(op, "d", d), "memory": image}
    words["b_desc"] = jnp.asarray(_descriptor(op, "b", form, b_desc, image, False))
    if a is None:
        words["a_desc"] = jnp.asarray(_descriptor(op, "a", form, a_desc, image, False))
    else:
        words["a"] = register_words(op, "a", a)
    known = _scale_d(op, scale_d)
    words["scale_d"] = (jnp.ones((), bool) if known is None else known).astype(jnp.uint32)[..., None]
    if (sp_meta is None) == op.sparse:
        raise ValueError(f"{op}: {'is sparse; give its metadata' if op.sparse else 'is dense; leave out'} sp_meta")
    if op.sparse:
        sparsity_selector(op, sp_sel, "sp_sel")
        words["sp_meta"] = lane_words(op, "sp_meta", sp_meta)[..., None]
    immediates = {"imm_scale_a": imm_scale_a, "imm_scale_b": imm_scale_b, "imm_trans_a": imm_trans_a, "imm_trans_b": imm_trans_b}
    return Launch(int(form.a_registers), immediates | {"sp_sel": int(sp_sel)}, words)


def _words(value: ArrayLike) -> Array:
    return jnp.asarray(np.asarray(value).astype(np.uint32))


LAUNCHES: dict[str, Callable[..., Launch]] = {
    "mma": _mma, "mma.sp": _mma, "wmma.load": _wmma_memory, "wmma.mma": _wmma_mma, "wmma.store": _wmma_memory,
    "ldmatrix": _matrices, "stmatrix": _matrices, "movmatrix": _movmatrix, "wgmma": _wgmma, "wgmma.sp": _wgmma,
}  # fmt: skip
