"""An operation's bound operands as the words of the kernel that runs its statement on a GPU; and when that is done."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.architectures.lookup import Applied
from tcemu.arithmetic.kernels.calls import known_sizes
from tcemu.arithmetic.kernels.launch import route
from tcemu.errors import Unsupported
from tcemu.executing import AUTO, EMULATED, chosen, execution
from tcemu.isa.instructions import LANES, Instruction
from tcemu.memory import Lines, as_integers
from tcemu.native.instruction import executed
from tcemu.native.products import refused
from tcemu.native.text import in_shared
from tcemu.native.units import allow_movement, target_here, unit_of_instruction
from tcemu.operations.operands import signature_of

IMAGE_WORDS = 8  # 32 bytes, so that every case's image is aligned for anything
LDMATRIX_ROW = 16  # bytes to which ldmatrix's rows are aligned: PTX ISA 9.7.14.5.15


class Launch(NamedTuple):
    """What a runner is given: the form of the statement, its immediates, and the operands' words with their batch axes in front."""

    form: int
    immediates: Mapping[str, Any]
    words: Mapping[str, Array]


Run = Callable[[Instruction, int, Mapping[str, Any], Mapping[str, Array]], Array]


def launched(op: Instruction, launch: Launch, run: Run) -> Array:
    """What `run` writes, which takes one axis of cases, with the batch axes of the operands."""
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
    written = run(op, launch.form, launch.immediates, flat)
    if written.ndim == 2:
        return written[:, :image].reshape(*batch, image)
    return written.reshape(*batch, *((4,) if op.warps > 1 else ()), LANES, written.shape[-1])


def rank_of(op: Instruction, name: str) -> int:
    """Axes of a parameter's words without the batch: a case's, a lane's, or those of a warpgroup."""
    if name in ("memory", "a_desc", "b_desc", "scale_d", "stride") or (name == "address" and op.family.startswith("wmma")):
        return 1
    return 3 if op.warps > 1 else 2


# ---- where it is chosen


def computed(op: Instruction, applied: Applied, launch: Callable[[], Launch], emulated: Callable[[], Array]) -> Array:
    """A computing instruction as `tcemu.execution` says here: by the GPU's own statement, by a product on the GPU, or emulated.

    launch raises Unsupported where the statement cannot be made. Where there is no such statement on the GPU, `emulated` comes to
    `program.multiply_add`, which knows of products.
    """
    signature = signature_of(op)._replace(native=None)
    allow = lambda target: unit_of_instruction(op, applied.model, applied.clamped_metadata, signature, target)  # noqa: E731
    return _either(op, allow, launch, emulated, others=not (op.sparse or op.block_scale))


def moved(op: Instruction, launch: Callable[[], Launch], emulated: Callable[[], Array]) -> Array:
    """The same for an instruction that only moves words."""
    return _either(op, lambda target: allow_movement(op, target), launch, emulated, others=False)


def _either(
    op: Instruction, allow: Callable[[str], Any], launch: Callable[[], Launch], emulated: Callable[[], Array], *, others: bool
) -> Array:
    """others: where the statement is refused, other ways are left to `emulated`."""
    if chosen() == EMULATED:
        return emulated()
    try:
        target = target_here()
        allow(target)
        given = launch()
        known_sizes(*given.words.values())
        _fits_shared_memory(op, given)
    except Unsupported as error:
        if chosen() == AUTO or others:
            return emulated()
        raise refused(op, str(error)) from None

    def plain() -> Array:
        with execution(EMULATED):
            return emulated()

    native = lambda: launched(op, given, in_program(target))  # noqa: E731
    return lax.platform_dependent(cuda=native, default=plain) if chosen() == AUTO else native()


def _fits_shared_memory(op: Instruction, given: Launch) -> None:
    image = given.words["memory"].shape[-1] if in_shared(op) and "memory" in given.words else 0
    if 4 * image > route().shared_bytes:
        raise Unsupported(f"a memory of {4 * image} bytes; a block of the GPU here has {route().shared_bytes} bytes of shared memory")


def in_program(target: str) -> Run:
    """What runs statements inside a program, on the GPU that is here, of this target."""
    return lambda op, form, immediates, words: executed(op, target, form, immediates, words)


# ---- the words of each family


def of_mma(op: Instruction, bound: Any, selector: ArrayLike | None = None, **selectors: tuple[ArrayLike, ArrayLike]) -> Launch:
    """bound: of `bind_mma`; selector, selectors: those that it was made with, which the statement has as immediates."""
    words: dict[str, Array] = {"a": bound.a, "b": bound.b, "c": bound.c}
    immediates: dict[str, Any] = {}
    if bound.metadata is not None:
        words["e"], immediates["f"] = bound.metadata.registers[..., None], _immediate("selector", selector)
    for name, scale in (("scale_a", bound.scale_a), ("scale_b", bound.scale_b)):
        if scale is not None:
            which = name.replace("scale", "selector")
            words[name] = scale.registers[..., None]
            immediates[which] = tuple(_immediate(which, value) for value in selectors[which])
    return Launch(form=0, immediates=immediates, words=words)


def of_wmma_mma(op: Instruction, bound: Any) -> Launch:
    return Launch(form=0, immediates={}, words=bound._asdict())


def of_wmma_memory(op: Instruction, lines: Lines, bound: Any, offset: ArrayLike, stride: ArrayLike | None) -> Launch:
    """bound: of `bind_wmma_load` or `bind_wmma_store`, made with this offset and stride."""
    bits, least = lines.bits, line_alignment(op, lines)
    words = {"memory": bound.memory} | ({"r": bound.fragment} if op.family == "wmma.store" else {})
    start = _known("offset", as_integers("offset", offset))
    step = _known("stride", as_integers("stride", op.default_stride if stride is None else stride))
    for name, value in (("offset", start), ("stride", step)):
        if (misaligned := value * bits // 8 % least != 0).any():
            raise Unsupported(
                f"{op}: {name} {value[misaligned].flat[0]} is no multiple of {8 * least // bits} elements, {least} bytes. PTX asks "
                "for less, as tcemu.wmma_load does; but ptxas has this fragment read by ldmatrix, and the GPU stops if a row is not aligned"
            )
    if op.family == "wmma.store" and (step < op.default_stride).any():
        raise Unsupported(f"stride {step.min()} is below {op.default_stride}, so that rows overlap, and which stays is open in PTX")
    words["address"] = _words(start * bits // 8)[..., None]
    if stride is not None:
        words["stride"] = _words(step)[..., None]
    return Launch(form=int(stride is not None), immediates={}, words=words)


def line_alignment(op: Instruction, lines: Lines) -> int:
    """Bytes to which the lines of a wmma.load or wmma.store must be aligned on a GPU.

    PTX asks for the size of a lane's fragment (9.7.14.4.2). But ptxas reads an A or B in shared memory by ldmatrix (SASS: LDSM) where it
    can: elements of 16 bits, or shorter ones that lie along K. Of sm_90a's loads 36 then have fragments shorter than a row of ldmatrix.
    Aligned to their fragments only, exactly these 36 ended with CUDA_ERROR_MISALIGNED_ADDRESS on an H200, and their CUDA context with them
    (each was run by hand, 2026-11-21; no test repeats it).
    """
    fits = lines.bits == 16 or (lines.bits < 16 and (op.operand, op.layout) in (("a", "row"), ("b", "col")))
    by_ldmatrix = fits and op.family == "wmma.load" and op.operand in ("a", "b") and in_shared(op)
    return max(lines.alignment * lines.bits // 8, LDMATRIX_ROW if by_ldmatrix else 1)


def of_mover(op: Instruction, bound: Any) -> Launch:
    """bound: of `bind_ldmatrix` or `bind_stmatrix`."""
    address, used = _known("address", bound.address), bound.rows.starts.shape[-1]
    if op.family == "stmatrix" and (np.diff(np.sort(address[..., :used])) == 0).any():
        raise Unsupported("two lanes have one address, and which row stays is open in PTX")
    address = np.where(np.arange(LANES) < used, address, 0)  # those of the other lanes may be anything
    words = {"memory": bound.shared, "address": _words(address)[..., None]}
    return Launch(form=0, immediates={}, words=words | ({"r": bound.registers} if op.family == "stmatrix" else {}))


def of_movmatrix(op: Instruction, bound: Any) -> Launch:
    return Launch(form=0, immediates={}, words={"a": bound.registers})


def of_wgmma(op: Instruction, bound: Any, sp_sel: int = 0) -> Launch:
    """bound: of `bind_wgmma`, made with this sp_sel."""
    words: dict[str, Array] = {"d": bound.d, "memory": bound.shared, "b_desc": jnp.asarray(_known("b_desc", bound.b_desc))}
    if bound.a is not None:
        words["a"] = bound.a
    if bound.a_desc is not None:
        words["a_desc"] = jnp.asarray(_known("a_desc", bound.a_desc))
    scale_d = jnp.ones((), bool) if bound.scale_d is None else bound.scale_d
    words["scale_d"] = scale_d.astype(jnp.uint32)[..., None]
    immediates = {
        "imm_scale_a": int(bound.imm_scale_a),
        "imm_scale_b": int(bound.imm_scale_b),
        "imm_trans_a": int(bound.majors.a == "mn"),
        "imm_trans_b": int(bound.majors.b == "mn"),
    }
    if bound.metadata is not None:
        words["sp_meta"], immediates["sp_sel"] = bound.metadata.registers[..., None], int(sp_sel)
    return Launch(form=int(bound.a is not None), immediates=immediates, words=words)


def _immediate(name: str, value: Any) -> int:
    if isinstance(value, Tracer):
        raise Unsupported(f"{name} is traced, and the statement has it as an immediate; give a number")
    return int(np.asarray(value))


def _known(name: str, value: Any) -> np.ndarray:
    """A place in memory, as NumPy has it. The GPU stops at one that is outside, so it must have been checked."""
    if isinstance(value, Tracer):
        raise Unsupported(f"{name} is traced; the GPU would stop at one that leads outside its memory. Give numbers, or a NumPy array")
    return np.asarray(value)


def _words(value: ArrayLike) -> Array:
    return jnp.asarray(np.asarray(value).astype(np.uint32))
