"""Implementations of an instruction: a target, a model, an older lowering, the slow reference, a GPU, or any function."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.execution import without_native
from tcemu.engine.architectures.lookup import find_row, get_model, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model, what_if
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.reference_products import decode_products, gather_stored
from tcemu.engine.arithmetic.reference.reference_steps import reduce_products
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.native.gpu_runner import gpu
from tcemu.engine.backends.native.native_statement import program_runner
from tcemu.engine.backends.native.units import driver_version, gpu_name, gpu_target
from tcemu.engine.instructions.dot import dot_codes
from tcemu.engine.instructions.register_packing import pack, unpack
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import check, resolve_op
from tcemu.engine.isa.other_makers import OTHER_TARGETS, Unit, other_units
from tcemu.engine.isa.targets import resolve_target
from tcemu.engine.isa.tcgen05 import Tcgen05Product, find_counterpart
from tcemu.uses.fuzz.case_generator import HostOperandCodes, OperandCodes, codes_to_integers, integers_to_codes
from tcemu.uses.silicon.operand_variants import run_on_codes

GPU, REFERENCE = "gpu", "reference:"


@dataclass(frozen=True)
class Implementation:
    """One implementation of an instruction, the left or the right one of a comparison.

    Attributes:
        name: Name in messages and results.
        fn: Function from operands to the codes of D [cases, M, N]. Operands are a dict of arrays with a leading axis of cases. At
            level "codes" they are codes as `tcemu.fuzz.generate` makes them. At level "registers" they are uint32 words as the
            instruction's lanes hold them, and D is returned as registers too.
        level: "codes" or "registers".
        traceable: True if `fn` consists of JAX operations and can run inside the compiled loop. Otherwise it is called with NumPy arrays
            between two compiled parts, and may be anything, such as another emulator or a GPU.
        target: Target that `explain` shows, if any.
        model: Model that `explain` shows, if any.
        emulated: Model of a `fn` that computes as `tcemu.dot` does by this model, so that a kernel may compute both. None: any other `fn`.
        identity: Text that changes when the results of `fn` change. A saved run resumes only with implementations that have the same
            identity as before. None: the implementation cannot be told from another one of its name.
    """

    name: str
    fn: Callable[[OperandCodes], Any]
    level: str = "codes"
    traceable: bool = True
    target: str | None = None
    model: Model | None = field(default=None, compare=False)  # it may hold arrays
    identity: str | None = None
    emulated: Model | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.level not in ("codes", "registers"):
            raise ValueError(f"level: got {self.level!r}; expected 'codes' or 'registers'")
        if self.target is not None:
            object.__setattr__(self, "target", resolve_target(self.target))


def emulator(op: MatrixMultiply, target: str, model: Model | None = None, name: str | None = None) -> Implementation:
    """Return the emulation of an instruction on a target.

    Args:
        op: The instruction.
        target: GPU or target.
        model: Model in place of the target's own.
        name: Name of the implementation. None takes the target's.

    Returns:
        The implementation, which is traceable.

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        NotModelled: There is no evidence for this arithmetic.
        ValueError: `model` does not fit `op`.
    """
    own, target = own_instruction(op, target), resolve_target(target)
    used = resolve_arithmetic(own, target, model)

    def compute(operands: OperandCodes) -> Array:
        if own is op:
            return compute_codes(op, used.model, operands, used.clamped_metadata)
        a, b = pad_products(own, operands["a"], operands["b"])
        with without_native():
            return multiply_matrices(used.model, product_spec(own), a, b, operands["c"])

    identity = f"{target}, {used.model}, clamped metadata {used.clamped_metadata}" + ("" if own is op else f", {own}")
    if own is not op:
        return Implementation(name or target, compute, identity=identity)  # explain shows instructions of `op`
    return Implementation(name or target, compute, target=target, model=used.model, identity=identity, emulated=used.model)


def own_instruction(op: MatrixMultiply, target: str) -> MatrixMultiply:
    """Return the instruction by which a target multiplies the operands of another instruction: on NVIDIA's targets that instruction itself.

    Raises:
        Unsupported: No unit of another maker's target multiplies such operands, or the target is unknown.
    """
    target = resolve_target(target)
    if isinstance(op, Unit) or target not in OTHER_TARGETS:
        return op
    fits = (unit for unit in other_units(target) if (unit.a, unit.b, unit.d) == (op.a, op.b, op.d))
    if op.accumulator == op.d and not op.sparse and op.scaling is None and (unit := next(fits, None)):
        return unit
    known = ", ".join(dict.fromkeys(f"{unit.a} by {unit.b} to {unit.d}" for unit in other_units(target)))
    raise Unsupported(
        f"{op}: no unit of {target} ({OTHER_TARGETS[target].architecture}) multiplies such operands; its units multiply dense {known} "
        f"(tcemu list --target {target})"
    )


def pad_products(op: MatrixMultiply, a: Array, b: Array) -> tuple[Array, Array]:
    """Pad K of A [cases, M, K, ...] and B [cases, K, N, ...] with zeros to whole instructions of K = `op.k`."""
    more = -a.shape[2] % op.k
    widths = [[(0, more if axis == at else 0) for axis in range(a.ndim)] for at in (2, 1)]
    return jnp.pad(a, widths[0]), jnp.pad(b, widths[1])


def compute_codes(op: MatrixMultiply, model: Model, operands: OperandCodes, clamped: bool = False) -> Array:
    """Compute D's codes by one model."""
    scales = (operands["scale_a"], operands["scale_b"]) if op.scaling is not None else None
    with without_native():  # a comparison fixes who computes
        return dot_codes(op, clamped, model, operands["a"], operands["b"], operands["c"], operands.get("e"), scales)


def reference_implementation(op: MatrixMultiply, target: str) -> Implementation:
    """Return the slow reference, which computes the same rules element by element in Python integers and fractions.

    The reference shares no arithmetic with `dot`.
    """
    target, own = resolve_target(target), own_instruction(op, target)
    spec, row = product_spec(check(own, target)), find_row(own, target)
    used = row.model if spec.rounding is None else row.model.replace(rounding=spec.rounding.upper())

    def element(operands: HostOperandCodes, case: int, i: int, j: int) -> int:
        a, b = [int(x) for x in operands["a"][case, i]], [int(x) for x in operands["b"][case, :, j]]
        a, b = (values + [0] * (-len(values) % own.k if own is not op else 0) for values in (a, b))
        names = [f"k {k}" for k in range(len(b))]
        if op.sparse:
            b, names = gather_stored(op.chunk_size, b, [int(x) for x in operands["e"][case, i]], row.clamped_metadata)
        scales = None
        if op.scaling is not None:
            scales = tuple(int(x) for x in operands["scale_a"][case, i]), tuple(int(x) for x in operands["scale_b"][case, :, j])
        return reduce_products(used, spec, decode_products(used, spec, a, b, names, scales), int(operands["c"][case, i, j]))[1]

    def call(operands: OperandCodes) -> np.ndarray:
        formats = {"a": spec.a, "b": spec.b, "c": spec.c}
        integers = {name: np.asarray(x) for name, x in operands.items()}
        integers |= {name: codes_to_integers(fmt, integers[name]) for name, fmt in formats.items()}
        results = [[[element(integers, case, i, j) for j in range(op.n)] for i in range(op.m)] for case in range(len(integers["a"]))]
        return integers_to_codes(spec.d, np.array(results, object))

    shown = target if own is op else None
    return Implementation(f"{REFERENCE}{target}", call, traceable=False, target=shown, identity=f"{REFERENCE}{target}, {used}")


def get_implementation(op: str | Instruction, spec: "str | Implementation | Callable[[OperandCodes], Any]") -> Implementation:
    """Return the implementation that a specification names.

    Args:
        op: PTX spelling, short name or `Instruction`.
        spec: One of
            a target or GPU: "sm_90a", "H100"; another maker's, such as "MI300X", computes NVIDIA's operands by its own instruction;
            a target with changed fields of its model: "sm_90a:fraction_bits=24,terms=8";
            a target as an older assembler lowered the instruction, "sm_90@12.6", or as another unit computes it, "sm_100a@tcgen05";
            the slow reference: "reference:sm_90a";
            the NVIDIA GPU of this machine: "gpu";
            an `Implementation`, which is returned unchanged;
            a function from operands, as NumPy codes, to D's codes.

    Returns:
        The implementation.

    Raises:
        Unsupported: PTX does not give `op` to the target, or there is no such target or GPU.
        NotModelled: There is no evidence for this arithmetic.
        ValueError: A changed field or its value is invalid.
        TypeError: `spec` is of another type.
    """
    op = resolve_common_op(op, spec)
    if isinstance(op, Tcgen05Product):
        raise Unsupported(
            f"{op}: its operands lie in memory, and the generator makes registers; give the mma of the same types, and the target as "
            "TARGET@tcgen05, such as tcemu fuzz e4m3 --left B200@tcgen05 --right RTX-5090"
        )
    if isinstance(spec, Implementation):
        return spec
    if callable(spec):
        return Implementation(_check_black_box(spec), spec, traceable=False)
    if not isinstance(spec, str):
        raise TypeError(
            f"spec: got {type(spec).__name__}; expected text such as 'sm_90a' or 'H100', an Implementation or a function of operands"
        )
    return _implementation_from_spec(op, canonical_spec(spec))


def _check_black_box(function: Callable[..., Any]) -> str:
    """Return the name of a function of operands. Raises TypeError if it cannot be called with one argument."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(function).bind({})
    except TypeError as error:
        raise TypeError(
            f"{name}: {error}; expected a function of one argument, the operands' NumPy codes in a dict ('a', 'b', 'c'), "
            "that returns D's codes"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return name


def resolve_common_op(op: str | Instruction, *specs: "str | Implementation | Callable[[OperandCodes], Any]") -> Instruction:
    """Return the instruction that a spelling or a short name means on the targets of some specifications: see `legality.resolve_op`."""
    given = [spec.target if isinstance(spec, Implementation) else spec for spec in specs]
    names = [split_spec(canonical_spec(spec).removeprefix(REFERENCE)) for spec in given if isinstance(spec, str) and spec != GPU]
    given = [resolve_target(target) for target, unit, _ in names if unit != "tcgen05"]
    # another maker's target takes the operands of the instruction that NVIDIA's have: see `own_instruction`
    return resolve_op(op, *([target for target in given if target not in OTHER_TARGETS] or given))


def canonical_spec(spec: str) -> str:
    """Return a text specification with the target by its own name: "reference:H100" becomes "reference:sm_90a". Raises Unsupported."""
    if spec == GPU:
        return spec
    start = REFERENCE if spec.startswith(REFERENCE) else ""
    target, lowering, changes = split_spec(spec.removeprefix(start))
    return start + resolve_target(target) + (f"@{lowering}" if lowering else "") + (f":{changes}" if changes else "")


def split_spec(spec: str) -> tuple[str, str, str]:
    """Split a specification into target, unit or older assembler (after "@"), and changes of the model (after ":"). Absent parts are ""."""
    target, _, changes = spec.partition(":")
    target, _, lowering = target.partition("@")
    return target, lowering, changes


@lru_cache(maxsize=256)
def _implementation_from_spec(op: MatrixMultiply, spec: str) -> Implementation:
    """Return the same Implementation for the same text, so that compiled programs are reused."""
    if spec == GPU:
        return _gpu_implementation(op)
    if spec.startswith(REFERENCE):
        return reference_implementation(op, spec.removeprefix(REFERENCE))
    target, lowering, changes = split_spec(spec)
    if lowering:
        lowered = get_model(_require_counterpart(op), target) if lowering == "tcgen05" else get_model(op, target, toolkit=lowering)
        used = what_if(lowered, changes) if changes else lowered
        return Implementation(
            spec,
            lambda operands: compute_codes(op, used, operands),
            target=target,
            model=used,
            identity=f"{spec}, {used}",
            emulated=used,
        )
    return emulator(op, target, what_if(find_row(own_instruction(op, target), target).model, changes) if changes else None, spec)


def _require_counterpart(op: MatrixMultiply) -> Tcgen05Product:
    """Return the tcgen05 product of an instruction's operands; raises Unsupported if tcgen05 has no such product."""
    counterpart = find_counterpart(op)
    if counterpart is None:
        raise Unsupported(f"{op}: tcgen05 does not multiply such operands. PTX ISA 9.7.16.4.2")
    return counterpart


def _gpu_implementation(op: Instruction) -> Implementation:
    """Return this machine's GPU: inside the compiled loop if kernels run in programs, else called through cuda-core."""
    try:
        target = gpu_target()
    except Unsupported:
        runner = gpu()
        facts = ", ".join(f"{name} {fact}" for name, fact in runner.facts().items())
        return Implementation("gpu", run_on_codes(check(op, runner.target), runner), traceable=False, identity=f"gpu, {facts}")
    version = ".".join(map(str, driver_version()))
    identity = f"gpu, device {gpu_name()}, target {target}, CUDA {version} of the driver"
    return Implementation("gpu", run_on_codes(check(op, target), program_runner(target)), identity=identity)


def codes_function(op: MatrixMultiply, implementation: Implementation) -> Callable[[OperandCodes], Any]:
    """Return the implementation's function from codes to codes, whatever its level."""
    if implementation.level == "codes":
        return implementation.fn

    def call(operands: OperandCodes) -> Any:
        registers = pack_operands(op, operands)
        d = implementation.fn(registers if implementation.traceable else jax.tree.map(np.asarray, registers))
        return _first_differing_product(op, unpack(op, "d", jnp.asarray(d)))

    return call


def pack_operands(op: MatrixMultiply, operands: OperandCodes) -> OperandCodes:
    """Pack operands into the registers that hold them. All selectors are 0.

    The B operand of wgmma, which lies in memory as the caller likes, stays codes. A warp of m8n8k4 with f16 holds the case four times.
    """
    names = {"c": op.accumulator_operand}

    def copies(x):
        return jnp.stack([x] * op.matrix_count, axis=1) if op.matrix_count > 1 else x

    registers = {name: pack(op, names.get(name, name), copies(operands[name])) for name in ("a", "b", "c") if name != "b" or op.warps == 1}
    if op.warps > 1:
        registers["b"] = operands["b"]
    if op.sparse:
        registers["e"] = pack(op, op.metadata_operand, operands["e"])
    return registers | {name: pack(op, name, operands[name]) for name in ("scale_a", "scale_b") if name in operands}


def _first_differing_product(op: Instruction, d: Array) -> Array:
    """Return one of the products that a warp computes: where they differ, the first that does."""
    if op.matrix_count == 1:
        return d
    other = jnp.argmax((d != d[:, :1]).any((-2, -1)), axis=1)
    return jnp.take_along_axis(d, other[:, None, None, None], axis=1)[:, 0]
