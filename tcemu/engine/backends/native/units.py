"""The instruction of the GPU that is here that computes an arithmetic, found by comparing the rows of its target with the requested one.

Two arithmetics are equal if they give the same bits for all operands of the formats. That is so if their models are equal as values, but
for a floor that no exponent reaches. It is so too if the GPU's step is longer and is filled up with zeros, which take no part in it.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.meshes import local_device
from tcemu.engine.architectures.container_rows import decoded_op
from tcemu.engine.architectures.evidence import Evidence
from tcemu.engine.architectures.lookup import TOOLKITS, find_row
from tcemu.engine.architectures.model_rows import ModelRow
from tcemu.engine.arithmetic.model import LIMITS, Model
from tcemu.engine.arithmetic.order import Order, products_per_clamp
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.cuda import nvrtc
from tcemu.engine.backends.cuda.xla_launch import PLATFORM, compute_capabilities, route
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import instructions, min_version
from tcemu.engine.isa.targets import capability_target

MATRICES = ("wgmma", "mma")  # families whose products have any shape, the fastest first
EQUAL, FILLED = "equal", "filled with zeros"
MOVEMENT_SEEN = ("sm_90", "sm_90a")  # tests/golden, families movement and wmma
NEWEST = (1 << 16, 0)  # a version later than all


def gpu_target() -> str:
    """The target of the GPU that kernels run on. Raises Unsupported where there is none, or where kernels do not run."""
    missing = route().missing
    if missing:
        raise Unsupported(missing)
    ((major, minor),) = compute_capabilities()
    return capability_target(major, minor)


def gpu_name() -> str:
    return local_device(PLATFORM).device_kind


class ArithmeticKey(NamedTuple):
    """The parts of a model that decide the bits of a product by an instruction."""

    model: Model  # as the instruction uses it; steps and a floor that is never reached have fixed values
    step: int  # products of a step; 0: it does not matter
    k: int  # products of the instruction, or after which an integer sum is clamped; 0: it does not matter
    clamp: bool
    bit_op: str | None

    @classmethod
    def from_model(cls, model: Model, spec: ProductSpec) -> "ArithmeticKey":
        """Return the key of a model for one instruction. Raises Unsupported for a traced model."""
        if model.result.is_integer:
            # sums are the same where they are clamped after as many products, unless the last step of an instruction is short
            step = products_per_clamp(model, spec.k) if spec.clamp else 0
            short = spec.clamp and spec.k % step
            return cls(Model(model.result, clamp_step=step if short else None), 0, spec.k if short else step, spec.clamp, spec.bit_op)
        if traced := [name for name in LIMITS if not isinstance(getattr(model, name), int | str | None)]:
            raise Unsupported(
                f"{', '.join(traced)} of the model {'is an array' if len(traced) == 1 else 'are arrays'}; a GPU has one value"
            )
        if spec.rounding is not None:
            model = model.replace(rounding=spec.rounding.upper())
        if model.fraction_bits is None and model.chain is None:
            return cls(model, 0, 0, False, None)
        step = Order.from_model(model, spec.k).step_size(spec.k)
        plain = model.groups == 1 and model.chain is None and spec.k % step == 0
        steps = 1 if model.fraction_bits is None else model.summed or 16
        return cls(_without_floor(model, spec).replace(terms=steps), step, 0 if plain else spec.k, False, None)


def _without_floor(model: Model, spec: ProductSpec) -> Model:
    """With the floor as low as it can be if no exponent is below: neither of a product that is not zero nor of an accumulator."""
    a, b = ((model.multiplicand or fmt).min_exponent for fmt in (spec.a, spec.b))
    reached = min(a + b, model.result.min_exponent) < (model.floor if isinstance(model.floor, int) else 0)
    return model if reached else model.replace(floor=LIMITS["floor"][0])


class Unit(NamedTuple):
    """An instruction of a GPU that computes an arithmetic."""

    op: MatrixMultiply
    target: str  # target of the GPU
    how: str  # EQUAL or FILLED
    step: int  # products of a step that is asked for
    own_step: int  # products of a step of the instruction
    evidence: Evidence  # evidence of the GPU's row


def match_arithmetic(requested: ArithmeticKey, own: ArithmeticKey) -> str:
    """Return EQUAL or FILLED, or "" if the instruction's own arithmetic does not compute the requested one."""
    if requested == own:
        return EQUAL
    return FILLED if requested.k == own.k == 0 < requested.step < own.step and requested == own._replace(step=requested.step) else ""


def find_statement_unit(op: MatrixMultiply, model: Model, clamped: bool, spec: ProductSpec, target: str) -> Unit:
    """The instruction itself on the GPU, if it computes the same there. Raises Unsupported, which says why it does not."""
    if min_version(op, target) is None:
        raise Unsupported(f"the GPU here is {target}, which does not have the instruction")
    row = _row(op, target, driver_version(), "the driver")
    if clamped != row.clamped_metadata:
        raise Unsupported(f"the GPU here, {target}, takes metadata that PTX leaves undefined otherwise")
    if match_arithmetic(ArithmeticKey.from_model(model, spec), ArithmeticKey.from_model(row.model, spec)) != EQUAL:
        raise Unsupported(f"the GPU here, {target}, computes it by {row.model}, not by {model}")
    return _verified(Unit(op, target, EQUAL, spec.k, spec.k, row.evidence), row)


def require_same_padding(op: MatrixMultiply, decoded: MatrixMultiply, target: str) -> None:
    """Raises Unsupported where the GPU decodes registers otherwise than `decoded` says: see `architectures.container_rows`."""
    if decoded_op(op, target) != decoded:
        raise Unsupported(f"the GPU here, {target}, reads the padding of {op.a} and {op.b} otherwise; PTX leaves it open")


def require_verified_movement(op: Instruction, target: str) -> None:
    """Raises Unsupported where the GPU does not have an instruction that moves words, or nobody has verified what it does."""
    if min_version(op, target) is None:
        raise Unsupported(f"the GPU here is {target}, which does not have the instruction")
    if target not in MOVEMENT_SEEN:
        raise Unsupported(
            f"what the GPU here, {target}, does is not verified; seen was {', '.join(MOVEMENT_SEEN)}. tcemu verify compares the two"
        )


def find_product_unit(spec: ProductSpec, model: Model, target: str) -> Unit:
    """Returns the GPU's instruction for products of matrices of any shape: one of the spec's own family, or another of the same bits.

    Raises Unsupported, which says why there is none.
    """
    if spec.family.endswith(".sp"):
        raise Unsupported("products of matrices with metadata are emulated; tcemu.mma_sp and tcemu.wgmma run the instruction on registers")
    if spec.scale is not None:
        raise Unsupported("products of matrices with block scales are emulated; tcemu.mma runs the instruction on registers")
    if spec.d != model.result:
        raise Unsupported(f"sums of {model.result} are rounded to {spec.d} after each instruction, which no kernel does")
    requested, tried = ArithmeticKey.from_model(model, spec), []
    for candidate in _candidates(spec, target):
        row = _row(candidate, target, nvrtc.version() if nvrtc.library() is not None else NEWEST, "NVRTC")
        own = ArithmeticKey.from_model(row.model, spec._replace(k=candidate.k, rounding=candidate.rounding))
        how = match_arithmetic(requested, own)
        if how == EQUAL or (how == FILLED and candidate.family == "wgmma"):
            return _verified(Unit(candidate, target, how, requested.step or candidate.k, own.step or candidate.k, row.evidence), row)
        tried.append(f"{candidate.family} {candidate.shape} computes by {row.model}")
    has = "; ".join(dict.fromkeys(tried)) or f"it multiplies no {spec.a} by {spec.b} to {model.result}"
    raise Unsupported(f"no instruction of the GPU here, {target}, computes by {model}: {has}")


def _candidates(spec: ProductSpec, target: str) -> Iterator[MatrixMultiply]:
    """Dense instructions of the spec's types that the target has: those of its own family first, then those of MATRICES."""
    types = spec.a, spec.b, spec.d, spec.d, spec.clamp, spec.bit_op, spec.rounding
    for family in (spec.family, *MATRICES):
        ops = [op for op in _of_types(target, family) if _types(op) == types] if family in MATRICES else []
        ops = [op for op in ops if family == "mma" or op.a.bits >= 8]  # codes are whole bytes there
        same_k = [op for op in ops if family == spec.family and op.k == spec.k]
        if same_k:
            yield max(same_k, key=lambda op: (op.m, op.n))
        else:
            yield from sorted(ops, key=lambda op: -op.k)[: None if family == "mma" else 1]


@cache
def _of_types(target: str, family: str) -> tuple[MatrixMultiply, ...]:
    return tuple(op for op in instructions(target, family) if isinstance(op, MatrixMultiply))


def _types(op: MatrixMultiply) -> tuple:
    return op.a, op.b, op.d, op.accumulator, op.satfinite, op.bit_op, op.rounding


def _row(op: Instruction, target: str, version: tuple[int, int], compiler: str) -> ModelRow:
    """The row by which the target computes the instruction as this version of a compiler makes it."""
    try:
        row = find_row(op, target)
    except NotModelled as error:
        raise Unsupported(f"nobody knows what the GPU here, {target}, computes: {error}") from error
    for toolkit in TOOLKITS:
        if find_row(op, target, toolkit=toolkit) != row and version < _since(op, target):
            since = ".".join(map(str, _since(op, target)))
            raise Unsupported(f"{compiler} is of CUDA {version[0]}.{version[1]}, which made other code of it; {since} or later is needed")
    return row


def _since(op: Instruction, target: str) -> tuple[int, int]:
    """The first version of ptxas from which on all make the code of today."""
    row, since = find_row(op, target), (0, 0)
    for toolkit, following in pairwise(TOOLKITS):
        if find_row(op, target, toolkit=toolkit) != row:
            major, minor = following.split(".")
            since = int(major), int(minor)
    return since


@cache
def driver_version() -> tuple[int, int]:
    """The CUDA version of the driver, whose compiler assembles PTX."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return NEWEST  # there is no driver: nothing is run
    return version.value // 1000, version.value % 1000 // 10


def _verified(unit: Unit, row: ModelRow) -> Unit:
    if row.evidence.level != "silicon":
        level = row.evidence.level
        raise Unsupported(
            f"{row.label} of the GPU here, {unit.target}, is not verified: its evidence is {level!r}. tcemu verify compares the two"
        )
    return unit
