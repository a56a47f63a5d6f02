"""The bound operands of each family as the words that its PTX statement takes on a GPU."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.errors import Unsupported
from tcemu.engine.backends.native.native_statement import uses_shared_memory
from tcemu.engine.backends.product_requests import StatementLaunch
from tcemu.engine.isa.families import LANES, Instruction, WmmaMemory
from tcemu.engine.layouts.strided_memory import StridedLines, as_integers

LDMATRIX_ROW = 16  # bytes to which ldmatrix's rows are aligned: PTX ISA 9.7.14.5.15


def mma_launch(op: Instruction, bound: Any, selector: ArrayLike | None = None, **selectors: tuple[ArrayLike, ArrayLike]) -> StatementLaunch:
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
    return StatementLaunch(form=0, immediates=immediates, words=words)


def wmma_memory_launch(op: WmmaMemory, lines: StridedLines, bound: Any, offset: ArrayLike, stride: ArrayLike | None) -> StatementLaunch:
    """bound: of `bind_wmma_memory`, made with this offset and stride."""
    bits, least = lines.bits, line_alignment(op, lines)
    words = {"memory": bound.memory} | ({"r": bound.fragment} if op.family == "wmma.store" else {})
    start = _concrete_array("offset", as_integers("offset", offset))
    step = _concrete_array("stride", as_integers("stride", op.default_stride if stride is None else stride))
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
    return StatementLaunch(form=int(stride is not None), immediates={}, words=words)


def line_alignment(op: WmmaMemory, lines: StridedLines) -> int:
    """Bytes to which the lines of a wmma.load or wmma.store must be aligned on a GPU.

    PTX asks for the size of a lane's fragment (9.7.14.4.2). But ptxas reads an A or B in shared memory by ldmatrix (SASS: LDSM) where it
    can: elements of 16 bits, or shorter ones that lie along K. Of sm_90a's loads 36 then have fragments shorter than a row of ldmatrix.
    Aligned to their fragments only, exactly these 36 ended with CUDA_ERROR_MISALIGNED_ADDRESS on an H200, and their CUDA context with them
    (each was run by hand, 2026-11-21; no test repeats it).
    """
    fits = lines.bits == 16 or (lines.bits < 16 and (op.operand, op.layout) in (("a", "row"), ("b", "col")))
    by_ldmatrix = fits and op.family == "wmma.load" and op.operand in ("a", "b") and uses_shared_memory(op)
    return max(lines.alignment * lines.bits // 8, LDMATRIX_ROW if by_ldmatrix else 1)


def mover_launch(op: Instruction, bound: Any) -> StatementLaunch:
    """bound: of `bind_mover`."""
    address, used = _concrete_array("address", bound.address), bound.rows.starts.shape[-1]
    if op.family == "stmatrix" and (np.diff(np.sort(address[..., :used])) == 0).any():
        raise Unsupported("two lanes have one address, and which row stays is open in PTX")
    address = np.where(np.arange(LANES) < used, address, 0)  # those of the other lanes may be anything
    words = {"memory": bound.shared, "address": _words(address)[..., None]}
    return StatementLaunch(form=0, immediates={}, words=words | ({"r": bound.registers} if op.family == "stmatrix" else {}))


def wgmma_launch(op: Instruction, bound: Any, sp_sel: int = 0) -> StatementLaunch:
    """bound: of `bind_wgmma`, made with this sp_sel."""
    words: dict[str, Array] = {"d": bound.d, "memory": bound.shared, "b_desc": jnp.asarray(_concrete_array("b_desc", bound.b_desc))}
    if bound.a is not None:
        words["a"] = bound.a
    if bound.a_desc is not None:
        words["a_desc"] = jnp.asarray(_concrete_array("a_desc", bound.a_desc))
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
    return StatementLaunch(form=int(bound.a is not None), immediates=immediates, words=words)


def _immediate(name: str, value: Any) -> int:
    if isinstance(value, Tracer):
        raise Unsupported(f"{name} is traced, and the statement has it as an immediate; give a number")
    return int(np.asarray(value))


def _concrete_array(name: str, value: Any) -> np.ndarray:
    """Return an address or offset as a NumPy array. Traced values are refused: the GPU fails outside the memory, so they are checked."""
    if isinstance(value, Tracer):
        raise Unsupported(f"{name} is traced; the GPU would stop at one that leads outside its memory. Give numbers, or a NumPy array")
    return np.asarray(value)


def _words(value: ArrayLike) -> Array:
    return jnp.asarray(np.asarray(value).astype(np.uint32))
