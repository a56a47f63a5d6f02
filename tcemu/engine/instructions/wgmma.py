"""`wgmma`: A from registers or shared memory, B from shared memory, the accumulator in the registers of a warpgroup's four warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.checking import forbid
from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.base.meshes import shard_like
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.backends.product_requests import KernelRegisters, RegisterForms, WarpOperands
from tcemu.engine.instructions.operand_checks import (
    check_lane_registers,
    check_registers,
    instruction_product,
    pack_matrix,
    resolve_model,
    unpack_matrix,
)
from tcemu.engine.instructions.register_products import TILE_COLUMNS, Family, compute_registers, stack_selectors, warp_operands
from tcemu.engine.instructions.selected_operands import MetadataRegisters, forbid_undefined_metadata, metadata_fields, sparsity_selector
from tcemu.engine.instructions.statement_operands import wgmma_launch
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply
from tcemu.engine.isa.legality import manual_section
from tcemu.engine.layouts.shared_memory import (
    ADDRESS_BITS,
    UNIT,
    decode_descriptor,
    descriptor_words,
    has_stray_bits,
    is_outside,
    read_matrix,
    unit_addresses,
    unit_extent,
)
from tcemu.engine.layouts.strided_memory import as_memory


def wgmma(
    op: str | Instruction,
    d: ArrayLike,
    b_desc: int | ArrayLike,
    shared: ArrayLike,
    *,
    a: ArrayLike | None = None,
    a_desc: int | ArrayLike | None = None,
    scale_d: bool | ArrayLike = True,
    imm_scale_a: int = 1,
    imm_scale_b: int = 1,
    imm_trans_a: int = 0,
    imm_trans_b: int = 0,
    sp_meta: ArrayLike | None = None,
    sp_sel: int = 0,
    target: str,
    model: Model | str | None = None,
    checked: bool = False,
) -> Array:
    """Compute one `wgmma.mma_async`, dense or sparse, for each warpgroup of a batch, and wait for it: D = A·B + D, bit for bit.

    `tcemu.instructions.Warpgroup` also plays the asynchronous protocol.

    Args:
        op: PTX spelling, short name or `Instruction`. Static under `jit`, as are the immediates and `sp_sel`.
        d: uint32[..., 4, 32, n], warp, lane, register. Leading axes are batch axes; they broadcast.
        b_desc: Descriptor of B: an int from `tcemu.layouts.descriptor` or uint32[..., 2], low word first. It may be traced.
        shared: uint32[..., words], little-endian, from shared address 0.
        a: Registers of A, uint32[..., 4, 32, 4]; give either `a` or `a_desc`.
        a_desc: Descriptor of A, as `b_desc`.
        scale_d: bool[...]; False leaves D out of the sum.
        imm_scale_a: -1 negates A.
        imm_scale_b: -1 negates B.
        imm_trans_a: 1 if A lies MN-major in shared memory.
        imm_trans_b: 1 if B lies MN-major in shared memory.
        sp_meta: Metadata of a sparse instruction, uint32[..., 4, 32].
        sp_sel: Sparsity selector.
        target: GPU or target to emulate, as "H100" or "sm_90a". Static under `jit`.
        model: Another arithmetic in place of the target's own. Its fields may be traced (see `tcemu.Model`).
        checked: Report undefined metadata, and traced descriptors that reach beyond `shared` or have bits outside their fields. Without it
            a traced address beyond `shared` reads the end of the memory.

    Returns:
        D's registers, uint32[..., 4, 32, n].

    Raises:
        Unsupported: PTX does not give `op`, or this form of it, to `target`.
        NotModelled: There is no evidence of the target's arithmetic for `op`.
        UndefinedBehaviour: The shape does not have `sp_sel`; with `checked`, metadata or a traced descriptor is undefined.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape, or a known descriptor reaches beyond `shared` or has bits outside its fields.

    Source: PTX ISA 9.7.15.5.2, 9.7.15.6.3; the arithmetic is `tcemu.evidence(op, target)`.
    """
    applied = resolve_model(op, target, model, "wgmma", "wgmma", "wgmma.sp")
    op = applied.op
    operands = bind_wgmma(
        op, d, b_desc, shared, a=a, a_desc=a_desc, scale_d=scale_d, imm_scale_a=imm_scale_a, imm_scale_b=imm_scale_b,
        imm_trans_a=imm_trans_a, imm_trans_b=imm_trans_b, sp_meta=sp_meta, sp_sel=sp_sel, checked=checked,
    )  # fmt: skip
    if checked and operands.metadata is not None:
        forbid_undefined_metadata(op, operands.metadata)

    def call(given: WgmmaOperands) -> Array:
        return compute_registers(applied, WGMMA, given, lambda: wgmma_launch(op, given, sp_sel))

    return shard_like(lambda given: given.d[..., :1] | given.shared[..., None, None, :1], call, operands)


def uniform_descriptor(registers: ArrayLike, *, checked: bool = False) -> Array:
    """Return the descriptor that the lanes of a warpgroup hold in a 64-bit register, for `wgmma`.

    Args:
        registers: uint32[..., 4, 32, 2], warp, lane, word, low word first.
        checked: Report a lane that holds another descriptor than lane 0 of warp 0.

    Returns:
        uint32[..., 2], the descriptor of lane 0 of warp 0.

    Raises:
        TypeError: `registers` has another dtype.
        ValueError: `registers` has another shape.
        UndefinedBehaviour: With `checked`, the lanes differ.

    Source: PTX ISA 9.7.15.5.2: the contents must be the same across all the warps of the warpgroup.
    """
    registers = registers if isinstance(registers, jax.Array) else np.asarray(registers)
    if registers.dtype != jnp.uint32:
        raise TypeError(f"registers: got {registers.dtype}{list(registers.shape)}; expected uint32[..., 4, 32, 2], warp, lane, word")
    if registers.shape[-3:] != (4, LANES, 2):
        raise ValueError(f"registers: got uint32{list(registers.shape)}; expected uint32[..., 4, 32, 2], warp, lane, word")
    registers = jnp.asarray(registers)
    first = registers[..., :1, :1, :]
    if checked:
        forbid(
            (registers != first).any(-1),
            "descriptor: warp {warp}, lane {lane} holds another one than warp 0, lane 0; it must be the same across the warpgroup. "
            "PTX ISA 9.7.15.5.2",
            warp=np.arange(4)[:, None],
            lane=np.arange(LANES),
        )
    return first[..., 0, 0, :]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Majors:
    """The major axes of A and B in shared memory, "k" or "mn". Static under jit."""

    a: str
    b: str


class WgmmaOperands(NamedTuple):
    """The operands of a wgmma. Descriptors are uint32[..., 2], low word first."""

    d: Array
    shared: Array
    b_desc: Array
    a: Array | None  # registers, or else the next
    a_desc: Array | None
    scale_d: Array | None  # bool[...]; None: true
    imm_scale_a: int
    imm_scale_b: int
    majors: Majors  # by imm-trans-a and imm-trans-b
    metadata: MetadataRegisters | None  # metadata of a sparse instruction


def bind_wgmma(
    op: MatrixMultiply,
    d: ArrayLike,
    b_desc: int | ArrayLike,
    shared: ArrayLike,
    *,
    a: ArrayLike | None = None,
    a_desc: int | ArrayLike | None = None,
    scale_d: bool | ArrayLike = True,
    imm_scale_a: int = 1,
    imm_scale_b: int = 1,
    imm_trans_a: int = 0,
    imm_trans_b: int = 0,
    sp_meta: ArrayLike | None = None,
    sp_sel: int = 0,
    checked: bool = False,
) -> WgmmaOperands:
    """The operands of a wgmma, checked, the values in its metadata aside. Arguments and errors are those of `wgmma`."""
    immediates = {"imm_scale_a": imm_scale_a, "imm_scale_b": imm_scale_b, "imm_trans_a": imm_trans_a, "imm_trans_b": imm_trans_b}
    _check_form(op, a, a_desc, immediates)
    majors = Majors(a="mn" if imm_trans_a else "k", b="mn" if imm_trans_b else "k")
    d, memory = check_registers(op, "d", d), as_memory("shared", shared)
    metadata = _bind_metadata(op, sp_meta, sp_sel)
    return WgmmaOperands(
        d=d,
        shared=memory,
        b_desc=_bind_descriptor(op, "b", majors.b, b_desc, memory, checked),
        a=None if a is None else check_registers(op, "a", a),
        a_desc=None if a is not None else _bind_descriptor(op, "a", majors.a, a_desc, memory, checked),
        scale_d=_bind_scale_d(op, scale_d),
        imm_scale_a=imm_scale_a,
        imm_scale_b=imm_scale_b,
        majors=majors,
        metadata=metadata,
    )


def operand_addresses(op: Instruction, name: str, major: str, words: Any) -> Any:
    """int32 [..., lines, units]: where A or B lies, by its descriptor's words uint32[..., 2], NumPy or JAX."""
    rows, columns = op.matrix_shape(name)
    size = (rows, columns) if name == "a" else (columns, rows)
    return unit_addresses(decode_descriptor(words), major, *unit_extent(getattr(op, name), major, *size))


def _check_form(op: Instruction, a: ArrayLike | None, a_desc: int | ArrayLike | None, immediates: dict[str, int]) -> None:
    """Raises ValueError or Unsupported if no form of the instruction has A and the immediates like this."""
    if (a is None) == (a_desc is None):
        raise ValueError(f"{op}: A comes either in registers, a=, or from shared memory, a_desc=; got {'neither' if a is None else 'both'}")
    from_descriptor, from_registers = op.operand_forms
    names = from_descriptor if a is None else from_registers
    for name, value in immediates.items():
        valid, default = ((1, -1), 1) if "scale" in name else ((0, 1), 0)
        if not isinstance(value, int | np.integer) or value not in valid:
            raise ValueError(f"{name}: got {value!r}; an immediate, {valid[0]} or {valid[1]}. PTX ISA {manual_section(op)}")
        if value != default and name not in names:
            takers = "floating-point types" if "scale" in name else "f16 and bf16 in shared memory"
            raise Unsupported(
                f"{op}: {name}={value}, which only {takers} take; this form's operands are {', '.join(names)}. PTX ISA {manual_section(op)}"
            )


def _bind_descriptor(op: Instruction, name: str, major: str, value: Any, shared: Array, checked: bool) -> Any:
    """The words of the descriptor of A or B, checked if its value is known, and a traced one if `checked`."""
    argument = f"{name}_desc"
    words = descriptor_words(argument, value)
    if isinstance(words, Tracer) and not checked:
        return words
    addresses = operand_addresses(op, name, major, words)
    stray, beyond = has_stray_bits(words), is_outside(addresses, shared.shape[-1])
    limit = f"{4 * shared.shape[-1]} bytes of shared memory" if 4 * shared.shape[-1] < 1 << ADDRESS_BITS else "the 2^18 that it can address"
    if isinstance(words, Tracer):
        forbid(stray, argument + ": bits are set that belong to no field. PTX ISA 9.7.15.5.1.2.2")
        forbid(beyond, f"{argument}: the operand's 16 bytes at {{address}} lie beyond {limit}. PTX ISA 9.7.15.5.1.2", address=addresses)
    elif stray.any():
        raise ValueError(
            f"{argument}: bits are set that belong to no field; tcemu.layouts.descriptor makes descriptors. PTX ISA 9.7.15.5.1.2.2"
        )
    elif beyond.any():
        worst = decode_descriptor(words.reshape(-1, 2)[np.argmax(addresses.max((-2, -1)))])._asdict()
        reason = ", ".join(f"{field} {value}" for field, value in worst.items())
        raise ValueError(
            f"{argument}: {reason} reaches to byte {addresses.max() + UNIT - 1}, beyond {limit}; lower its start or strides, or give "
            "more memory. PTX ISA 9.7.15.5.1.2"
        )
    return words


def _bind_scale_d(op: Instruction, value: Any) -> Array | None:
    """Returns None for a plain True, else bool[...]."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.dtype != jnp.bool_:
        raise TypeError(f"scale_d: got {value.dtype}{list(value.shape)}; a predicate, bool or bool[...]. PTX ISA {manual_section(op)}")
    return None if not isinstance(value, Tracer) and bool(np.all(value)) else jnp.asarray(value)


def _bind_metadata(op: MatrixMultiply, sp_meta: ArrayLike | None, sp_sel: int) -> MetadataRegisters | None:
    """A sparse instruction's metadata, or an error."""
    if not op.sparse:
        if sp_meta is not None or sp_sel != 0:
            raise ValueError(f"{op}: is dense; sp_meta and sp_sel belong to wgmma.mma_async.sp. PTX ISA {manual_section(op)}")
        return None
    if sp_meta is None:
        raise ValueError(f"{op}: is sparse; give its metadata, sp_meta=uint32[..., 4, 32]. PTX ISA {manual_section(op)}")
    if not isinstance(sp_sel, int | np.integer) or sp_sel not in op.selectors:
        raise UndefinedBehaviour(f"sp_sel: got {sp_sel!r}; {op} takes {' or '.join(map(str, op.selectors))}. PTX ISA {manual_section(op)}")
    return MetadataRegisters(registers=check_lane_registers(op, "sp_meta", sp_meta), selector=sparsity_selector(op, sp_sel, "sp_sel"))


def _places(op: MatrixMultiply, clamped: bool, operands: WgmmaOperands) -> WarpOperands:
    return warp_operands(op, clamped, a_in_memory=operands.a is None)


def _words(op: MatrixMultiply, operands: WgmmaOperands) -> KernelRegisters:
    """Reads matrices in memory as codes; registers stay as they are."""
    assert op.a
    b = _from_memory(op, "b", operands)
    if operands.a is None:
        a = _negated(op, operands, _from_memory(op, "a", operands))
        a = a.reshape(*a.shape[:-2], op.warps, op.m // op.warps, a.shape[-1])
    else:
        a = _negated(op, operands, operands.a)
    fields = None if operands.metadata is None else operands.metadata.registers
    b = b.reshape(*b.shape[:-2], op.n // TILE_COLUMNS, TILE_COLUMNS, op.k)
    return KernelRegisters(a, b, _accumulator(operands, operands.d, 3), fields, selectors=stack_selectors(op, operands.metadata))


def _by_matrices(op: MatrixMultiply, clamped: bool, model: Model, operands: WgmmaOperands) -> Array:
    a = _negated(op, operands, unpack_matrix(op, "a", operands.a) if operands.a is not None else _from_memory(op, "a", operands))
    b = _from_memory(op, "b", operands).swapaxes(-1, -2)
    c = _accumulator(operands, unpack_matrix(op, "d", operands.d), 2)
    kept = None if operands.metadata is None else metadata_fields(op, operands.metadata)
    return pack_matrix(op, "d", instruction_product(op, model, a, b, c, kept, clamped=clamped))


def _from_memory(op: MatrixMultiply, name: str, operands: WgmmaOperands) -> Array:
    """The codes of A [..., M, K], or of B's transpose [..., N, K]."""
    major, descriptor = getattr(operands.majors, name), getattr(operands, f"{name}_desc")
    return read_matrix(operands.shared, operand_addresses(op, name, major, descriptor), getattr(op, name), major)


def _negated(op: MatrixMultiply, operands: WgmmaOperands, a: Array) -> Array:
    """A, as codes or as registers, negated if just one of the immediates says so; of integers none does.

    Two negations cancel. A single one stands in A's sign, also that of B: silicon negates what metadata has gathered from B. A field that
    PTX does not define gathers halves of tf32 elements, and their signs are not where B's were (tests/golden, tf32_negation).
    """
    assert op.a
    signs = sum(1 << at for at in range(op.a.bits - 1, a.dtype.itemsize * 8, op.a.bits))
    return a ^ jnp.where(jnp.not_equal(operands.imm_scale_a, operands.imm_scale_b), np.uint32(signs), np.uint32(0)).astype(a.dtype)


def _accumulator(operands: WgmmaOperands, d: Array, axes: int) -> Array:
    """Return D, whose last `axes` axes are not batch axes; +0 where scale_d is false, which adds nothing to a sum that is never -0."""
    if operands.scale_d is None:
        return d
    return jnp.where(operands.scale_d.reshape(*operands.scale_d.shape, *(1,) * axes), d, jnp.zeros((), d.dtype))


WGMMA = Family(_by_matrices, RegisterForms(_places, _words))
