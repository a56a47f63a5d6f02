"""Operands of which a selector names a part: sparsity metadata and block scales, one 32-bit register in each lane."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.engine.formats.number_formats import U4, Format
from tcemu.engine.instructions.operand_checks import check_codes
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.layouts.fragment_layouts import Fragment, metadata_fragment, scale_fragment
from tcemu.engine.layouts.packing import pack_registers, unpack_registers
from tcemu.engine.layouts.sparsity import defined_fields, undefined_fields

SCALES = ("scale_a", "scale_b")
BYTE = 8  # a scale's container


class ScaleSelector(NamedTuple):
    """The bytes, and the lane of each quad, that hold the scales, int32."""

    byte_id: Array
    thread_id: Array


def _metadata(op: MatrixMultiply) -> Fragment:
    return metadata_fragment(op.k, op.container_bits("a"))


def sparsity_selector(op: MatrixMultiply, value: ArrayLike, name: str = "selector") -> Array:
    """A sparsity selector as int32, or an error; a traced one is taken modulo what its bits can say."""
    return _selector(op, name, value, op.selectors)


def scale_selector(op: MatrixMultiply, name: str, value: tuple[ArrayLike, ArrayLike]) -> ScaleSelector:
    """{byte-id, thread-id} of "scale_a" or "scale_b", or an error; traced ones are taken modulo what their bits can say."""
    selector = name.replace("scale", "selector")
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{selector}: got {value!r}; expected a pair (byte_id, thread_id) for {op}. PTX ISA 9.7.14.3")
    byte_id, thread_id = value
    scaling = op.require_scaling()
    return ScaleSelector(
        byte_id=_selector(op, f"{selector}, its byte_id", byte_id, scaling.byte_ids),
        thread_id=_selector(op, f"{selector}, its thread_id", thread_id, scaling.thread_ids[name[-1]]),
    )


def _selector(op: Instruction, name: str, value: ArrayLike, wanted: tuple[int, ...]) -> Array:
    if isinstance(value, Tracer):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; expected one integer for {op}. PTX ISA {manual_section(op)}")
        return value.astype(jnp.int32) & wanted[-1]
    if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.integer) or int(np.asarray(value)) not in wanted:
        raise ValueError(
            f"{name}: got {value!r}; {op} takes {', '.join(map(str, wanted))}. PTX ISA {manual_section(op)}, 9.7.14.3, 9.7.14.6.1"
        )
    return jnp.int32(int(np.asarray(value)))


class MetadataRegisters(NamedTuple):
    """Sparsity metadata: uint32[..., 32] (a warpgroup's: [..., 4, 32]), and which lanes of each quad hold it."""

    registers: Array
    selector: Array


class ScaleRegisters(NamedTuple):
    """The scales of A or B: uint32[..., 32], and the selector."""

    registers: Array
    selector: ScaleSelector


@partial(jax.jit, static_argnames="op")
def metadata_fields(op: MatrixMultiply, metadata: MetadataRegisters) -> Array:
    """The 4-bit fields [..., M, chunks] that the metadata hold, uint8."""
    fields = _metadata(op).decode(unpack_registers(metadata.registers[..., None], U4))[..., metadata.selector, :, :]
    return fields if op.warps == 1 else fields.reshape(*fields.shape[:-3], op.m, fields.shape[-1])


def metadata_registers(op: MatrixMultiply, fields: Array, selector: Array) -> Array:
    """The registers of `Metadata`: the inverse of `metadata_fields`; what the selector leaves out is zero."""
    if op.warps > 1:
        fields = fields.reshape(*fields.shape[:-2], op.warps, op.m // op.warps, fields.shape[-1])
    every = jnp.zeros((*fields.shape[:-2], *_metadata(op).shape), jnp.uint8).at[..., selector, :, :].set(fields.astype(jnp.uint8))
    return pack_registers(_metadata(op).encode(every), U4)[..., 0]


def scale_codes(op: MatrixMultiply, name: str, scale: ScaleRegisters) -> Array:
    """The codes that the registers hold: [..., M, scale_vec] of "scale_a", [..., scale_vec, N] of "scale_b"."""
    fmt, fragment, group = _scales(op, name, scale.selector)
    every = fragment.decode(unpack_registers(scale.registers[..., None], fmt, container_bits=BYTE))
    return every[..., scale.selector.thread_id, group, :, :]


def scale_registers(op: MatrixMultiply, name: str, codes: Array, selector: ScaleSelector) -> Array:
    """The registers of `Scale`: the inverse of `scale_codes`; what the selector leaves out is zero."""
    fmt, fragment, group = _scales(op, name, selector)
    every = jnp.zeros((*codes.shape[:-2], *fragment.shape), jnp.uint8)
    every = every.at[..., selector.thread_id, group, :, :].set(codes.astype(jnp.uint8))
    return pack_registers(fragment.encode(every), fmt, container_bits=BYTE)[..., 0]


def _scales(op: MatrixMultiply, name: str, selector: ScaleSelector) -> tuple[Format, Fragment, Array]:
    """The scales' format and fragment, and which group of `scale_vec` bytes the selector names."""
    scaling = op.require_scaling()
    return scaling.format, scale_fragment(name.removeprefix("scale_"), scaling.count), selector.byte_id // scaling.count


def forbid_undefined_metadata(op: MatrixMultiply, metadata: MetadataRegisters) -> None:
    """Checked mode: raises UndefinedBehaviour for the first field whose value PTX does not define."""
    fields = metadata_fields(op, metadata)
    per_lane = _metadata(op).elements
    place = _metadata(op).decode(np.arange(LANES * per_lane).reshape(LANES, per_lane))  # lane and field of each (selector, row, chunk)
    place = jnp.asarray(np.tile(place, (1, op.warps, 1)))[metadata.selector]
    defined = ", ".join(f"{field:04b}" for field in defined_fields(op.chunk_size, op.ordered))
    warp = "warp {warp}, " if op.warps > 1 else ""
    forbid(
        undefined_fields(fields, op.chunk_size, op.ordered),
        f"{op}: {warp}lane {{lane}}, field {{field}} (bits {{low}} to {{high}}) of the sparsity metadata is {{value:04b}}, for row {{row}} "
        f"and chunk {{chunk}}; defined are {defined}. PTX ISA 9.7.14.6.1, 9.7.15.6.1",
        warp=np.arange(op.m)[:, None] // (op.m // op.warps),
        lane=place // per_lane,
        field=place % per_lane,
        low=4 * (place % per_lane),
        high=4 * (place % per_lane) + 3,
        value=fields,
        row=np.arange(op.m)[:, None],
        chunk=np.arange(fields.shape[-1]),
    )


def check_scale_matrix(op: MatrixMultiply, name: str, codes: Any) -> Array:
    """The raw scale codes of "scale_a" or "scale_b" as the caller gives them, or an error."""
    return check_codes(op, name, codes, op.require_scaling().format, op.matrix_shape(name))
