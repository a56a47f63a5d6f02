"""`wgmma`: A from registers or shared memory, B from shared memory, the accumulator in the registers of a warpgroup's four warps."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.checking import forbid
from tcemu.errors import UndefinedBehaviour, Unsupported
from tcemu.isa.catalog import section
from tcemu.isa.instructions import LANES, Instruction
from tcemu.memory import as_memory
from tcemu.operations.operands import lane_words, modelled, multiply_add, pack_matrix, register_words, unpack_matrix
from tcemu.operations.selected import forbid_undefined_metadata, metadata_fields, sparsity_selector
from tcemu.shared_memory import ADDRESS_BITS, UNIT, descriptor_words, extent, fields, outside, read, strays, unit_addresses

DESCRIPTORS = {"a": "a_desc", "b": "b_desc"}


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
    model: Model | None = None,
    checked: bool = False,
) -> Array:
    """One `wgmma.mma_async`, dense or sparse, for each warpgroup of the batch, and the wait for it: D = A·B + D, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU, as "sm_90a". Both are static under `jit`, and so are the immediates and sp_sel.
    d: uint32[..., 4, 32, n], warp, lane, register. shared: uint32[..., words], little-endian, from shared address 0. A is either
    a: uint32[..., 4, 32, 4], or a_desc; descriptors are ints from `tcemu.descriptor` or uint32[..., 2], low word first, and may be traced.
    scale_d: bool[...]; false leaves D out of the sum. imm_scale_a, imm_scale_b: -1 negates the operand; imm_trans_a, imm_trans_b: 1 if it
    lies MN-major in shared memory. sp_meta: uint32[..., 4, 32], sparse only, with sp_sel. Leading axes are batch axes and broadcast.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    checked: raise UndefinedBehaviour for metadata that PTX leaves undefined, and for traced descriptors that reach beyond `shared` or have
    bits outside their fields. Without it, traced addresses beyond `shared` give what lies at its end.
    Returns uint32[..., 4, 32, n]: D's registers. To play the asynchronous protocol too, see `tcemu.Warpgroup`.
    Raises Unsupported if PTX does not give `op`, or this form of it, to `target`; NotModelled if nobody has evidence of its arithmetic;
    UndefinedBehaviour for an sp_sel that the shape does not have; TypeError or ValueError for other shapes and dtypes, and for descriptors
    of known value that reach beyond `shared` or have bits outside their fields.
    Source: PTX ISA 9.7.15.5.2, 9.7.15.6.3; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    applied = modelled(op, target, model, "wgmma", "wgmma", "wgmma.sp")
    op, model = applied.op, applied.model
    form = _form(op, a, a_desc, (imm_scale_a, imm_scale_b), (imm_trans_a, imm_trans_b))
    d, shared = register_words(op, "d", d), as_memory("shared", shared)
    metadata = _metadata(op, sp_meta, sp_sel, checked)
    b_words = _descriptor(op, "b", form, b_desc, shared, checked)
    a_words = register_words(op, "a", a) if a is not None else _descriptor(op, "a", form, a_desc, shared, checked)
    assert op.a
    sign = np.uint32(1 << (op.a.bits - 1) if imm_scale_a != imm_scale_b else 0)  # of the product: two negations cancel
    return _wgmma(op, form, model, d, a_words, b_words, shared, sign, _scale_d(op, scale_d), metadata)


def uniform_descriptor(registers: ArrayLike, *, checked: bool = False) -> Array:
    """The descriptor that a warpgroup's lanes hold in a 64-bit register, for `wgmma`.

    registers: uint32[..., 4, 32, 2], warp, lane, word, low word first. Returns uint32[..., 2]: that of warp 0, lane 0.
    checked: raise UndefinedBehaviour where another lane holds another one. Raises TypeError or ValueError for another dtype or shape.
    Source: PTX ISA 9.7.15.5.2: its contents must be the same across all the warps of the warpgroup.
    """
    registers = registers if isinstance(registers, jax.Array) else np.asarray(registers)
    if registers.dtype != jnp.uint32:
        raise TypeError(f"registers: got {registers.dtype}{list(registers.shape)}; wanted uint32[..., 4, 32, 2], warp, lane, word")
    if registers.shape[-3:] != (4, LANES, 2):
        raise ValueError(f"registers: got uint32{list(registers.shape)}; wanted uint32[..., 4, 32, 2], warp, lane, word")
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


class Form(NamedTuple):
    """What a program depends on besides the instruction: how A comes, and how A and B lie in shared memory."""

    a_registers: bool
    majors: tuple[str, str]


def operand_addresses(op: Instruction, name: str, major: str, words: Any) -> Any:
    """int32 [..., lines, units]: where A or B lies, by its descriptor's words uint32[..., 2], NumPy or JAX."""
    rows, columns = op.matrix(name)
    size = (rows, columns) if name == "a" else (columns, rows)
    return unit_addresses(fields(words), major, *extent(getattr(op, name), major, *size))


def _form(op: Instruction, a: Any, a_desc: Any, scales: tuple[int, int], trans: tuple[int, int]) -> Form:
    """The statement's form, or an error if the instruction has no such one."""
    if (a is None) == (a_desc is None):
        raise ValueError(f"{op}: A comes either in registers, a=, or from shared memory, a_desc=; got {'neither' if a is None else 'both'}")
    from_descriptor, from_registers = op.forms
    names = from_descriptor if a is None else from_registers
    given = {
        f"imm_{kind}_{name}": value for kind, pair in (("scale", scales), ("trans", trans)) for name, value in zip("ab", pair, strict=True)
    }
    for name, value in given.items():
        valid, default = ((1, -1), 1) if "scale" in name else ((0, 1), 0)
        if not isinstance(value, int | np.integer) or value not in valid:
            raise ValueError(f"{name}: got {value!r}; an immediate, {valid[0]} or {valid[1]}. PTX ISA {section(op)}")
        if value != default and name not in names:
            who = "floating-point types" if "scale" in name else "f16 and bf16 in shared memory"
            raise Unsupported(
                f"{op}: {name}={value}, which only {who} take; this form's operands are {', '.join(names)}. PTX ISA {section(op)}"
            )
    a_major, b_major = ("mn" if value else "k" for value in trans)
    return Form(a is not None, (a_major, b_major))


def _descriptor(op: Instruction, name: str, form: Form, value: Any, shared: Array, checked: bool) -> Any:
    """The words of a descriptor, looked at as far as its value is known."""
    said = DESCRIPTORS[name]
    words = descriptor_words(said, value)
    if isinstance(words, Tracer) and not checked:
        return words
    addresses = operand_addresses(op, name, form.majors["ab".index(name)], words)
    stray, beyond = strays(words), outside(addresses, shared.shape[-1])
    limit = f"{4 * shared.shape[-1]} bytes of shared memory" if 4 * shared.shape[-1] < 1 << ADDRESS_BITS else "the 2^18 that it can address"
    if isinstance(words, Tracer):
        forbid(stray, said + ": bits are set that belong to no field. PTX ISA 9.7.15.5.1.2.2")
        forbid(beyond, f"{said}: the operand's 16 bytes at {{address}} lie beyond {limit}. PTX ISA 9.7.15.5.1.2", address=addresses)
    elif stray.any():
        raise ValueError(f"{said}: bits are set that belong to no field; tcemu.descriptor makes descriptors. PTX ISA 9.7.15.5.1.2.2")
    elif beyond.any():
        worst = fields(words.reshape(-1, 2)[np.argmax(addresses.max((-2, -1)))])._asdict()
        what = ", ".join(f"{field} {value}" for field, value in worst.items())
        raise ValueError(
            f"{said}: {what} reaches to byte {addresses.max() + UNIT - 1}, beyond {limit}; lower its start or strides, or give "
            "more memory. PTX ISA 9.7.15.5.1.2"
        )
    return words


def _scale_d(op: Instruction, value: Any) -> Array | None:
    """None for a plain true, else bool[...]."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.dtype != jnp.bool_:
        raise TypeError(f"scale_d: got {value.dtype}{list(value.shape)}; a predicate, bool or bool[...]. PTX ISA {section(op)}")
    return None if not isinstance(value, Tracer) and bool(np.all(value)) else jnp.asarray(value)


def _metadata(op: Instruction, sp_meta: Any, sp_sel: Any, checked: bool) -> Array | None:
    """The metadata fields [..., 64, chunks] of a sparse instruction, looked at in checked mode."""
    if not op.sparse:
        if sp_meta is not None or sp_sel != 0:
            raise ValueError(f"{op}: is dense; sp_meta and sp_sel belong to wgmma.mma_async.sp. PTX ISA {section(op)}")
        return None
    if sp_meta is None:
        raise ValueError(f"{op}: is sparse; give its metadata, sp_meta=uint32[..., 4, 32]. PTX ISA {section(op)}")
    if not isinstance(sp_sel, int | np.integer) or sp_sel not in op.selectors:
        raise UndefinedBehaviour(f"sp_sel: got {sp_sel!r}; {op} takes {' or '.join(map(str, op.selectors))}. PTX ISA {section(op)}")
    selector = sparsity_selector(op, sp_sel, "sp_sel")
    found = metadata_fields(op, lane_words(op, "sp_meta", sp_meta), selector)
    if checked:
        forbid_undefined_metadata(op, found, selector)
    return found


@partial(jax.jit, static_argnames=("op", "form"))
def _wgmma(
    op: Instruction,
    form: Form,
    model: Model,
    d: Array,
    a: Array,
    b: Array,
    shared: Array,
    sign: Array,
    scale_d: Array | None,
    metadata: Array | None,
) -> Array:
    """a: registers or a descriptor's words, as `form` says; b: a descriptor's words. sign: uint32, the bit of A to flip.

    B's negation stands in A's sign: silicon negates what metadata has gathered from B, and a field that PTX does not define gathers halves
    of tf32 elements, whose signs are not where B's were (tests/golden, tf32_negation).
    metadata: 4-bit fields [..., 64, chunks].
    """

    def from_memory(name: str, words: Array) -> Array:
        major = form.majors["ab".index(name)]
        return read(shared, operand_addresses(op, name, major, words), getattr(op, name), major)

    x, y = unpack_matrix(op, "a", a) if form.a_registers else from_memory("a", a), from_memory("b", b).swapaxes(-1, -2)
    x = x ^ sign.astype(x.dtype)
    c = unpack_matrix(op, "d", d)
    if scale_d is not None:
        c = jnp.where(scale_d[..., None, None], c, jnp.zeros((), c.dtype))  # +0, which adds nothing to a sum that is never -0
    return pack_matrix(op, "d", multiply_add(op, model, x, y, c, metadata))
