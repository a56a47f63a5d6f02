"""What can stand on either side of a comparison: a target, a model, an older lowering, the slow reference, any function of operands."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.architectures.lookup import applied, model, row_for
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.what_if import what_if
from tcemu.errors import Unsupported
from tcemu.executing import EMULATED, execution
from tcemu.explanation.products import met, products
from tcemu.explanation.steps import walk
from tcemu.fuzz.operands import HostOperands, Operands, as_integers, from_integers
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import named_target
from tcemu.native.units import device_here, driver_version, target_here
from tcemu.operations.dot import dot_codes
from tcemu.operations.launches import in_program
from tcemu.operations.operands import signature_of
from tcemu.operations.registers import pack, unpack
from tcemu.silicon.gpu import gpu
from tcemu.silicon.placement import product

GPU, REFERENCE = "gpu", "reference:"


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    call: operands -> the codes of D [cases, M, N]. The operands are a dict of arrays with the cases in front: of level "codes" as
    `tcemu.fuzz.generate` makes them, of level "registers" uint32 words as the instruction's lanes hold them, and then D comes back as such.
    traced: it is made of JAX operations, and runs inside the compiled loop. Else it is called between two compiled parts, with NumPy
    arrays, and may be anything: another emulator, a GPU.
    target, model: what `explain` shows of it, if there is such a thing.
    identity: words that change when what it computes does. A held run goes on only with sides that have one, and the same; those made of
    words have theirs. None: it cannot be told from another side of its name.
    """

    name: str
    call: Callable[[Operands], Any]
    level: str = "codes"
    traced: bool = True
    target: str | None = None
    model: Model | None = field(default=None, compare=False)  # it may hold arrays
    identity: str | None = None

    def __post_init__(self) -> None:
        if self.level not in ("codes", "registers"):
            raise ValueError(f"level: got {self.level!r}; want 'codes' or 'registers'")
        if self.target is not None:
            object.__setattr__(self, "target", named_target(self.target))


def emulated(op: Instruction, target: str, chosen: Model | None = None, name: str | None = None) -> Side:
    """The emulation of `op` on a target, or with another model. Raises Unsupported, NotModelled and ValueError as `dot`."""
    used, target = applied(op, target, chosen), named_target(target)
    call = lambda given: codes(op, used.model, given, used.clamped_metadata)  # noqa: E731
    identity = f"{target}, {used.model}, clamped metadata {used.clamped_metadata}"
    return Side(name or target, call, target=target, model=used.model, identity=identity)


def codes(op: Instruction, used: Model, given: Operands, clamped: bool = False) -> Array:
    """D's codes by one model."""
    scales = (given["scale_a"], given["scale_b"]) if op.block_scale else None
    with execution(EMULATED):  # a comparison knows who computes
        return dot_codes(op, clamped, used, given["a"], given["b"], given["c"], given.get("e"), scales)


def reference(op: Instruction, target: str) -> Side:
    """The slow one: the same rules in Python's integers and fractions, an element at a time, which share no arithmetic with `dot`."""
    target = named_target(target)
    signature, own = signature_of(check(op, target)), row_for(op, target)
    used = own.model if signature.rounding is None else own.model.replace(rounding=signature.rounding.upper())

    def element(given: HostOperands, case: int, i: int, j: int) -> int:
        a, b = [int(x) for x in given["a"][case, i]], [int(x) for x in given["b"][case, :, j]]
        names = [f"k {k}" for k in range(len(b))]
        if op.sparse:
            b, names = met(op.chunk, b, [int(x) for x in given["e"][case, i]], own.clamped_metadata)
        scales = None
        if op.block_scale:
            scales = tuple(int(x) for x in given["scale_a"][case, i]), tuple(int(x) for x in given["scale_b"][case, :, j])
        return walk(used, signature, products(used, signature, a, b, names, scales), int(given["c"][case, i, j]))[1]

    def call(given: Operands) -> np.ndarray:
        formats = {"a": signature.a, "b": signature.b, "c": signature.c}
        whole = {name: np.asarray(x) for name, x in given.items()}
        whole |= {name: as_integers(fmt, whole[name]) for name, fmt in formats.items()}
        results = [[[element(whole, case, i, j) for j in range(op.n)] for i in range(op.m)] for case in range(len(whole["a"]))]
        return from_integers(signature.d, np.array(results, object))

    return Side(f"{REFERENCE}{target}", call, traced=False, target=target, identity=f"{REFERENCE}{target}, {used}")


def side(op: str | Instruction, what: "str | Side | Callable[[Operands], Any]") -> Side:
    """One side of a comparison from its words.

    what: a target ("sm_90a", or "H100"); the same with fields of its model changed ("sm_90a:fraction_bits=24,terms=8"); as an older
    assembler lowered it ("sm_90@12.6") or as another unit computes it ("sm_100a@tcgen05"); "reference:sm_90a", the slow one; "gpu", the
    NVIDIA GPU that is here; a Side; or a function of operands, as codes, that is called with NumPy arrays. Raises ValueError (Unsupported,
    NotModelled) with what would work.
    """
    op = parse(op)
    if isinstance(what, Side):
        return what
    if callable(what):
        return Side(getattr(what, "__name__", "function"), what, traced=False)
    if not isinstance(what, str):
        raise TypeError(f"side: want words such as 'sm_90a' or 'H100', a Side or a function of operands, got {type(what).__name__}")
    return _of_words(op, in_full(what))


def in_full(what: str) -> str:
    """The words of a side with the target by its own name: "reference:H100" -> "reference:sm_90a". Raises Unsupported."""
    if what == GPU:
        return what
    start = REFERENCE if what.startswith(REFERENCE) else ""
    target, lowering, changes = words(what.removeprefix(start))
    return start + named_target(target) + (f"@{lowering}" if lowering else "") + (f":{changes}" if changes else "")


def words(what: str) -> tuple[str, str, str]:
    """A target, the unit or older assembler after "@", the changes of its model after ":"; "" for what is not there."""
    target, _, changes = what.partition(":")
    target, _, lowering = target.partition("@")
    return target, lowering, changes


@lru_cache(maxsize=256)
def _of_words(op: Instruction, what: str) -> Side:
    """The same Side for the same words, so that what was compiled for it serves again."""
    if what == GPU:
        return _real(op)
    if what.startswith(REFERENCE):
        return reference(op, what.removeprefix(REFERENCE))
    target, lowering, changes = words(what)
    if lowering:
        given = {"unit": lowering} if lowering == "tcgen05" else {"toolkit": lowering}
        lowered = model(op, target, **given)
        used = what_if(lowered, changes) if changes else lowered
        return Side(what, lambda operands: codes(op, used, operands), target=target, model=used, identity=f"{what}, {used}")
    return emulated(op, target, what_if(row_for(op, target).model, changes) if changes else None, what)


def _real(op: Instruction) -> Side:
    """The GPU that is here: inside the compiled loop if kernels run in programs, else called from outside through cuda-core."""
    try:
        target = target_here()
    except Unsupported:
        runner = gpu()
        facts = ", ".join(f"{name} {fact}" for name, fact in runner.facts().items())
        return Side("gpu", product(check(op, runner.target), runner), traced=False, identity=f"gpu, {facts}")
    version = ".".join(map(str, driver_version()))
    identity = f"gpu, device {device_here()}, target {target}, CUDA {version} of the driver"
    return Side("gpu", product(check(op, target), in_program(target)), identity=identity)


def as_codes(op: Instruction, one: Side) -> Callable[[Operands], Any]:
    """The side's call from codes to codes, whatever its level."""
    if one.level == "codes":
        return one.call

    def call(given: Operands) -> Any:
        registers = to_registers(op, given)
        d = one.call(registers if one.traced else jax.tree.map(np.asarray, registers))
        return _only(op, unpack(op, "d", jnp.asarray(d)))

    return call


def to_registers(op: Instruction, given: Operands) -> Operands:
    """The registers that hold the operands, all selectors 0.

    wgmma's B, which lies in memory as the caller likes, stays codes. A warp of m8n8k4 with f16 holds the case four times.
    """
    names = {"c": "d"} if op.c is None else {}
    four = lambda x: jnp.stack([x] * op.products, axis=1) if op.products > 1 else x  # noqa: E731
    registers = {name: pack(op, names.get(name, name), four(given[name])) for name in ("a", "b", "c") if name != "b" or op.warps == 1}
    if op.warps > 1:
        registers["b"] = given["b"]
    if op.sparse:
        registers["e"] = pack(op, op.metadata, given["e"])
    return registers | {name: pack(op, name, given[name]) for name in ("scale_a", "scale_b") if name in given}


def _only(op: Instruction, d: Array) -> Array:
    """One product of those that a warp computes; where they differ, the first that does."""
    if op.products == 1:
        return d
    other = jnp.argmax((d != d[:, :1]).any((-2, -1)), axis=1)
    return jnp.take_along_axis(d, other[:, None, None, None], axis=1)[:, 0]
