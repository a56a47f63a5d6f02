"""Which instruction of the GPU that is here computes an arithmetic: the rows of its target that are equal to the one that is asked for.

Two arithmetics are equal if they give the same bits for all operands of the formats. That is so if their models are equal as values, but
for a floor that no exponent reaches. It is so too if the GPU's step is longer and is filled up with zeros, which take no part in it.
"""

import ctypes
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import jax

from tcemu.architectures.evidence import Evidence
from tcemu.architectures.lookup import TOOLKITS, row_for, rows_of
from tcemu.architectures.rows import ROWS, ModelRow
from tcemu.arithmetic.kernels import nvrtc
from tcemu.arithmetic.kernels.launch import capabilities, route
from tcemu.arithmetic.model import LIMITS, Model, Signature
from tcemu.arithmetic.order import Order
from tcemu.errors import NotModelled, Unsupported
from tcemu.formats import Format
from tcemu.isa.catalog import instructions, is_supported
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import own_target

MATRICES = ("wgmma", "mma")  # families whose products have any shape, the fastest first
EQUAL, FILLED = "equal", "filled with zeros"
MOVEMENT_SEEN = ("sm_90", "sm_90a")  # tests/golden, families movement and wmma
NEWEST = (1 << 16, 0)  # a version later than all


def target_here() -> str:
    """The target of the GPU that kernels run on. Raises Unsupported where there is none, or where kernels do not run."""
    missing = route().missing
    if missing:
        raise Unsupported(missing)
    ((major, minor),) = capabilities()
    return own_target(major, minor)


def device_here() -> str:
    """What that GPU is called."""
    return jax.devices("cuda")[0].device_kind


class Arithmetic(NamedTuple):
    """What of a model decides the bits of a product by an instruction."""

    model: Model  # as the instruction uses it; steps and a floor that is never reached have fixed values
    step: int  # products of a step; 0: it does not matter
    k: int  # of the instruction; 0: it does not matter
    clamp: bool
    bit_op: str | None

    @classmethod
    def of(cls, model: Model, signature: Signature) -> "Arithmetic":
        """Raises Unsupported for a model that is traced."""
        if model.result.is_integer:
            # a clamp comes once an instruction
            return cls(Model(model.result), 0, signature.k if signature.clamp else 0, signature.clamp, signature.bit_op)
        if traced := [name for name in LIMITS if not isinstance(getattr(model, name), int | str | None)]:
            raise Unsupported(
                f"{', '.join(traced)} of the model {'is an array' if len(traced) == 1 else 'are arrays'}; a GPU has one value"
            )
        if signature.rounding is not None:
            model = model.replace(rounding=signature.rounding.upper())
        if model.fraction_bits is None and model.chain is None:
            return cls(model, 0, 0, False, None)
        step = Order.of(model, signature.k).step_size(signature.k)
        plain = model.groups == 1 and model.chain is None and signature.k % step == 0
        steps = 1 if model.fraction_bits is None else model.summed or 16
        return cls(_without_floor(model, signature).replace(terms=steps), step, 0 if plain else signature.k, False, None)


def _without_floor(model: Model, signature: Signature) -> Model:
    """With the floor as low as it can be if no exponent is below: neither of a product that is not zero nor of an accumulator."""
    a, b = ((model.multiplicand or fmt).least_exponent for fmt in (signature.a, signature.b))
    reached = min(a + b, model.result.least_exponent) < (model.floor if isinstance(model.floor, int) else 0)
    return model if reached else model.replace(floor=LIMITS["floor"][0])


class Unit(NamedTuple):
    """An instruction of a GPU that computes an arithmetic."""

    op: Instruction
    target: str  # of the GPU
    how: str  # EQUAL or FILLED
    step: int  # products of a step that is asked for
    own_step: int  # of the instruction's
    evidence: Evidence  # of the GPU's row


def fits(asked: Arithmetic, own: Arithmetic) -> str:
    """EQUAL, FILLED, or "" where the second does not compute the first."""
    if asked == own:
        return EQUAL
    return FILLED if asked.k == own.k == 0 < asked.step < own.step and asked == own._replace(step=asked.step) else ""


def unit_of_instruction(op: Instruction, model: Model, clamped: bool, signature: Signature, target: str) -> Unit:
    """The instruction itself on the GPU, if it computes the same there. Raises Unsupported, which says why it does not."""
    if not is_supported(op, target):
        raise Unsupported(f"the GPU here is {target}, which does not have the instruction")
    row = _row(op, target, driver_version(), "the driver")
    if clamped != row.clamped_metadata:
        raise Unsupported(f"the GPU here, {target}, takes metadata that PTX leaves undefined otherwise")
    if fits(Arithmetic.of(model, signature), Arithmetic.of(row.model, signature)) != EQUAL:
        raise Unsupported(f"the GPU here, {target}, computes it by {row.model}, not by {model}")
    return _verified(Unit(op, target, EQUAL, signature.k, signature.k, row.evidence), row)


def allow_movement(op: Instruction, target: str) -> None:
    """Raises Unsupported where the GPU does not have an instruction that moves words, or nobody has verified what it does."""
    if not is_supported(op, target):
        raise Unsupported(f"the GPU here is {target}, which does not have the instruction")
    if target not in MOVEMENT_SEEN:
        raise Unsupported(
            f"what the GPU here, {target}, does is not verified; seen was {', '.join(MOVEMENT_SEEN)}. tcemu verify compares the two"
        )


def unit_of_product(op: Instruction, model: Model, signature: Signature, target: str) -> Unit:
    """The instruction of the GPU for products of matrices of any shape: `op` itself, or another of its types that computes the same.

    Raises Unsupported, which says why there is none.
    """
    if op.sparse or op.block_scale:
        which, run = ("metadata", "tcemu.mma_sp and tcemu.wgmma run") if op.sparse else ("block scales", "tcemu.mma runs")
        raise Unsupported(f"products of matrices with {which} are emulated; {run} the instruction on registers")
    if signature.d != model.result:
        raise Unsupported(f"sums of {model.result} are rounded to {signature.d} after each instruction, which no kernel does")
    asked, tried = Arithmetic.of(model, signature), []
    for candidate in _candidates(op, model.result, target):
        row = _row(candidate, target, nvrtc.version() if nvrtc.library() is not None else NEWEST, "NVRTC")
        own = Arithmetic.of(row.model, signature._replace(k=candidate.k, rounding=candidate.rounding))
        how = fits(asked, own)
        if how == EQUAL or (how == FILLED and candidate.family == "wgmma"):
            return _verified(Unit(candidate, target, how, asked.step or candidate.k, own.step or candidate.k, row.evidence), row)
        tried.append(f"{candidate.family} {candidate.shape} computes by {row.model}")
    has = "; ".join(dict.fromkeys(tried)) or f"it multiplies no {op.a} by {op.b} to {model.result}"
    raise Unsupported(f"no instruction of the GPU here, {target}, computes by {model}: {has}")


def _candidates(op: Instruction, result: Format, target: str) -> Iterator[Instruction]:
    """Dense instructions of the same types that the target has: the one that is named, then those of MATRICES."""
    wanted = op.a, op.b, result, result, op.satfinite, op.bit_op, op.rounding
    for family in (op.family, *MATRICES):
        alike = [other for other in _of_types(target, family) if _types(other) == wanted] if family in MATRICES else []
        alike = [other for other in alike if family == "mma" or (other.a is not None and other.a.bits >= 8)]  # codes are whole bytes there
        yield from [op] if op in alike else sorted(alike, key=lambda other: -other.k)[: None if family == "mma" else 1]


@cache
def _of_types(target: str, family: str) -> tuple[Instruction, ...]:
    return tuple(instructions(target, family))


@cache
def _multiplicands(target: str, family: str) -> tuple[tuple[Format, Format], ...]:
    """The formats of A and B that a family takes, each pair once."""
    return tuple(sorted({(op.a, op.b) for op in _of_types(target, family) if op.a and op.b}, key=str))


def _types(op: Instruction) -> tuple:
    return op.a, op.b, op.d, op.c or op.d, op.satfinite, op.bit_op, op.rounding


def _row(op: Instruction, target: str, version: tuple[int, int], compiler: str) -> ModelRow:
    """The row by which the target computes the instruction as this version of a compiler makes it."""
    try:
        row = row_for(op, target)
    except NotModelled as error:
        raise Unsupported(f"nobody knows what the GPU here, {target}, computes: {error}") from error
    for toolkit in TOOLKITS:
        if row_for(op, target, toolkit=toolkit) != row and version < _since(op, target):
            since = ".".join(map(str, _since(op, target)))
            raise Unsupported(f"{compiler} is of CUDA {version[0]}.{version[1]}, which made other code of it; {since} or later is needed")
    return row


def _since(op: Instruction, target: str) -> tuple[int, int]:
    """The first version of ptxas from which on all make the code of today."""
    row, since = row_for(op, target), (0, 0)
    for toolkit, following in pairwise(TOOLKITS):
        if row_for(op, target, toolkit=toolkit) != row:
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
            f"{row.key} of the GPU here, {unit.target}, is not verified: its evidence is {level!r}. tcemu verify compares the two"
        )
    return unit


# ---- the table


class Equality(NamedTuple):
    """An arithmetic of a target, and a row of a GPU that computes the same for these multiplicands."""

    target: str
    row: str  # its key
    multiplicands: tuple[Format, Format]
    unit: str  # the key of the GPU's row
    how: str  # EQUAL or FILLED
    evidence: str  # its level, of the GPU's row


@cache
def equalities(gpu: str) -> tuple[Equality, ...]:
    """What a GPU of this target computes by an instruction of its own, of all targets: from the models alone.

    A row is served by one of its own family, which takes the registers; products of dense matrices by one of MATRICES too.
    """
    found = []
    for row in ROWS:
        families = {row.family} if row.family.endswith(".sp") else {row.family, *MATRICES}
        own = [other for other in rows_of(gpu) if other.family in families and not other.toolkits]
        alike = [(pair, other, how) for other in own for pair, how in _pairs(row, other, gpu)]
        for target in row.targets:
            found += [Equality(target, row.key, pair, other.key, how, other.evidence.level) for pair, other, how in alike]
    return tuple(found)


def _pairs(row: ModelRow, own: ModelRow, gpu: str) -> Iterator[tuple[tuple[Format, Format], str]]:
    """The multiplicands for which the second row computes what the first does, each by its longest K."""
    limits = lambda one: (one.shapes, one.toolkits, one.clamped_metadata, one.c, one.kinds or (None,))  # noqa: E731
    if limits(row) != limits(own):
        return
    for a, b in _multiplicands(gpu, own.family):
        both = {a, b} <= {*row.multiplicands} & {*own.multiplicands}
        for d in row.accumulators if both else ():
            signature = Signature(a, b, row.c or d, d, 4 if row.shapes else max(256 // max(a.bits, 8), 4))
            how = fits(Arithmetic.of(row.model, signature), Arithmetic.of(own.model, signature)) if d in own.accumulators else ""
            if how:
                yield (a, b), how
