"""Operands of which a selector names a part: sparsity metadata and block scales, one 32-bit register in each lane."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.checking import forbid
from tcemu.formats import U4, Format
from tcemu.isa.catalog import section
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import Fragment, metadata_fragment, scale_fragment
from tcemu.operations.operands import codes_of
from tcemu.packing import pack_registers, unpack_registers
from tcemu.sparsity import defined_fields, undefined

Selector = int | Array
SCALES = ("scale_a", "scale_b")
BYTE = 8  # a scale's container


def _metadata(op: Instruction) -> Fragment:
    return metadata_fragment(op.k, op.container_bits("a"))


def sparsity_selector(op: Instruction, value: ArrayLike, name: str = "selector") -> Array:
    """A sparsity selector as int32, or an error; a traced one is taken modulo what its bits can say."""
    return _selector(op, name, value, op.selectors)


def scale_selector(op: Instruction, name: str, value: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    """{byte-id, thread-id} of "scale_a" or "scale_b" as (group of bytes, thread-id), int32, or an error."""
    assert op.scale_vec is not None
    selector = name.replace("scale", "selector")
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ValueError(f"{selector}: got {value!r}; wanted a pair (byte_id, thread_id) for {op}. PTX ISA 9.7.14.3")
    byte = _selector(op, f"{selector}, its byte_id", value[0], op.byte_ids)
    thread = _selector(op, f"{selector}, its thread_id", value[1], op.thread_ids_a if name == "scale_a" else op.thread_ids_b)
    return byte // op.scale_vec, thread


def _selector(op: Instruction, name: str, value: ArrayLike, wanted: tuple[int, ...]) -> Array:
    if isinstance(value, Tracer):
        if value.shape or not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; wanted one integer for {op}. PTX ISA {section(op)}")
        return value.astype(jnp.int32) & wanted[-1]
    if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.integer) or int(np.asarray(value)) not in wanted:
        raise ValueError(f"{name}: got {value!r}; {op} takes {', '.join(map(str, wanted))}. PTX ISA {section(op)}, 9.7.14.3, 9.7.14.6.1")
    return jnp.int32(int(np.asarray(value)))


@partial(jax.jit, static_argnames="op")
def metadata_fields(op: Instruction, registers: Array, selector: Selector) -> Array:
    """Metadata registers uint32[..., 32] (a warpgroup's: [..., 4, 32]) -> 4-bit fields [..., M, chunks], uint8."""
    fields = _metadata(op).decode(unpack_registers(registers[..., None], U4))[..., selector, :, :]
    return fields if op.warps == 1 else fields.reshape(*fields.shape[:-3], op.m, fields.shape[-1])


def metadata_registers(op: Instruction, fields: Array, selector: Selector) -> Array:
    """The inverse of `metadata_fields`; what the selector leaves out is zero."""
    if op.warps > 1:
        fields = fields.reshape(*fields.shape[:-2], op.warps, op.m // op.warps, fields.shape[-1])
    every = jnp.zeros((*fields.shape[:-2], *_metadata(op).shape), jnp.uint8).at[..., selector, :, :].set(fields.astype(jnp.uint8))
    return pack_registers(_metadata(op).encode(every), U4)[..., 0]


def scale_codes(op: Instruction, name: str, registers: Array, selector: tuple[Selector, Selector]) -> Array:
    """Scale registers uint32[..., 32] -> the codes of `op.stype` that the selector (group of bytes, thread-id) names.

    "scale_a": [..., M, scale_vec]; "scale_b": [..., scale_vec, N].
    """
    group, thread = selector
    fmt, fragment = _scales(op, name)
    return fragment.decode(unpack_registers(registers[..., None], fmt, container_bits=BYTE))[..., thread, group, :, :]


def scale_registers(op: Instruction, name: str, codes: Array, selector: tuple[Selector, Selector]) -> Array:
    """The inverse of `scale_codes`; what the selector leaves out is zero."""
    group, thread = selector
    fmt, fragment = _scales(op, name)
    every = jnp.zeros((*codes.shape[:-2], *fragment.shape), jnp.uint8).at[..., thread, group, :, :].set(codes.astype(jnp.uint8))
    return pack_registers(fragment.encode(every), fmt, container_bits=BYTE)[..., 0]


def _scales(op: Instruction, name: str) -> tuple[Format, Fragment]:
    assert op.stype is not None and op.scale_vec is not None
    return op.stype, scale_fragment(name.removeprefix("scale_"), op.scale_vec)


def forbid_undefined_metadata(op: Instruction, fields: Array, selector: Selector) -> None:
    """Checked mode: raises UndefinedBehaviour for the first field of [..., M, chunks] whose value PTX does not define."""
    per_lane = _metadata(op).elements
    place = _metadata(op).decode(np.arange(LANES * per_lane).reshape(LANES, per_lane))  # lane and field of each (selector, row, chunk)
    place = jnp.asarray(np.tile(place, (1, op.warps, 1)))[selector]
    defined = ", ".join(f"{field:04b}" for field in defined_fields(op.chunk, op.ordered))
    warp = "warp {warp}, " if op.warps > 1 else ""
    forbid(
        undefined(fields, op.chunk, op.ordered),
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


def scale_matrix(op: Instruction, name: str, codes: Any) -> Array:
    assert op.stype is not None
    return codes_of(op, name, codes, op.stype, op.matrix(name))
