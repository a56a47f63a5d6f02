"""The model that applies: from an instruction and a target to a row of `model_rows`, its model and its evidence."""

from functools import cache, lru_cache
from typing import NamedTuple

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.container_rows import decoded_op
from tcemu.engine.architectures.evidence import LEVELS, Evidence
from tcemu.engine.architectures.model_rows import ROWS, ModelRow
from tcemu.engine.architectures.other_maker_rows import OTHER_ROWS, UNKNOWN
from tcemu.engine.arithmetic.model import Model, what_if
from tcemu.engine.formats.number_formats import S32
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.engine.isa.tcgen05 import Tcgen05Mma, usual_products

COMPUTING_FAMILIES = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")  # families whose spellings say what they compute
# families whose instruction descriptor says it: only a `Tcgen05Product` has an arithmetic
DESCRIBED_FAMILIES = ("tcgen05.mma", "tcgen05.mma.sp", "tcgen05.mma.ws", "tcgen05.mma.ws.sp")
TOOLKITS = ("12.4", "12.6", "12.8", "12.9", "13.0", "13.5")  # versions of ptxas whose machine code was read


def list_models(target: str) -> dict[str, Model]:
    """Return every arithmetic of one target.

    `tcemu.get_model` finds the model of one instruction: the first that fits it, in the order of this table.

    Args:
        target: GPU name or target, such as "H100" or "sm_90a".

    Returns:
        The models by the instructions that they belong to, such as "mma f16 to f32 (m8n8k4)".

    Raises:
        Unsupported: The target is unknown.

    Example:
        >>> import tcemu
        >>> list(tcemu.list_models("T4"))[:2]
        ['mma f16 to f32 (m8n8k4, C f16)', 'mma f16 to f32 (m8n8k4)']
    """
    return {row.label: row.model for row in target_rows(target)}


def get_model(op: str | Instruction, target: str, *, toolkit: str | None = None) -> Model:
    """Return the arithmetic by which a target computes an instruction, to look at, to change, and to pass as `model=`.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target: GPU name or target.
        toolkit: Version of ptxas that made the code, "12.4" to "13.5"; None is the newest. It matters to FP8 `mma` on sm_90 before 12.8.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or `op` computes nothing.
        NotModelled: There is no evidence for this arithmetic.
        ValueError: The toolkit is unknown.

    Example:
        >>> import tcemu
        >>> tcemu.get_model("f16", "A100").fraction_bits, tcemu.get_model("f16", "H100").fraction_bits
        (24, 25)
    """
    return find_row(check(op, target), target, toolkit=toolkit).model


def evidence(op: str | Instruction, target: str) -> Evidence:
    """Return how it is known what a target computes for an instruction.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target: GPU name or target.

    Returns:
        An `Evidence`: its `level` is one of `tcemu.engine.architectures.evidence.LEVELS`, its `source` says the same in words.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or `op` computes nothing.
        NotModelled: There is no evidence for this arithmetic.

    Example:
        >>> import tcemu
        >>> tcemu.evidence("f16", "H100").level
        'silicon'
    """
    return find_row(check(op, target), target).evidence


def require_evidence(op: str | Instruction, target: str, least: str) -> None:
    """Raise an error unless the arithmetic of an instruction is known well enough.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target: GPU name or target.
        least: A level of evidence: that one or a better one is required. The levels, the best first, are those of
            `tcemu.engine.architectures.evidence.LEVELS`.

    Raises:
        NotModelled: The evidence is of a lower level, or no arithmetic is known.
        Unsupported: PTX does not give `op` to `target`.
        ValueError: There is no such level.
    """
    levels = tuple(LEVELS)
    if least not in levels:
        raise ValueError(f"evidence={least!r}: expected one of {', '.join(levels)}, the best first, or None")
    op = check(op, target)
    known = find_row(op, target).evidence
    if levels.index(known.level) > levels.index(least):
        raise NotModelled(
            f"{op} on {resolve_target(target)}: its evidence is {known.level!r} ({known.source}), and evidence={least!r} asks for more; "
            f"accept less by evidence={known.level!r}, or take a target of which more is known: tcemu list --evidence"
        )


class Arithmetic(NamedTuple):
    """The arithmetic that applies to an instruction on a target."""

    op: MatrixMultiply
    target: str  # as `tcemu.engine.isa.targets.resolve_target` returns it
    model: Model
    row: ModelRow | None  # the target's own row; None where it is unknown and a model was given in its place

    @property
    def clamped_metadata(self) -> bool:
        """True if undefined metadata fields are clamped: see `sparsity.gather`."""
        return self.row is not None and self.row.clamped_metadata

    @property
    def decoded_op(self) -> MatrixMultiply:
        """The instruction in whose formats the target decodes the registers of A and B: see `tcemu.engine.architectures.container_rows`."""
        return decoded_op(self.op, self.target)


def change_model(model: Model, words: str) -> Model:
    """Return a model with the changes that a `model=` in words states.

    Raises:
        ValueError: The words are no changes of a model.
    """
    try:
        return what_if(model, words)
    except ValueError as error:
        raise ValueError(f"model={words!r}: {error}") from error


def resolve_arithmetic(op: str | Instruction, target: str, model: Model | str | None = None) -> Arithmetic:
    """Return the arithmetic of `op` on `target`: the target's own, or the given model in its place.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target: GPU name or target.
        model: Model to use instead of the target's own, or changes of that one in words, such as "fraction_bits=13,terms=8"; None: its own.

    Raises:
        Unsupported: PTX does not give `op` to `target`, or `op` computes nothing.
        NotModelled: The target's arithmetic is unknown and no model is given.
        TypeError: `model` is no Model.
        ValueError: The results of `model` cannot be those of `op`.
    """
    target = resolve_target(target)
    op = require_product(check(op, target))
    try:
        row = find_row(op, target)
    except NotModelled:
        if model is None:
            raise
        row = None
    if model is None and row is not None:
        return Arithmetic(op=op, target=target, model=row.model, row=row)
    if isinstance(model, str):
        if row is None:
            raise NotModelled(f"model={model!r}: {target} has no known arithmetic of {op} to change; give a tcemu.Model")
        model = change_model(row.model, model)
    if not isinstance(model, Model):
        raise TypeError(
            f"model: got {model!r}; expected a tcemu.Model, as tcemu.get_model(op, target) returns it, changes of it in words, such as "
            "'fraction_bits=13', or None for the target's own"
        )
    if model.result.is_integer != (op.d == S32):
        raise ValueError(f"model: its result is {model.result}, but {op} accumulates in {op.d}; give a model whose result fits")
    return Arithmetic(op=op, target=target, model=model, row=row)


@lru_cache(maxsize=65536)
def find_row(op: Instruction, target: str, *, toolkit: str | None = None) -> ModelRow:
    """Return the row that says how `target` computes `op`; the arguments are those of `get_model`.

    Raises:
        Unsupported: `op` computes nothing, or the target is unknown.
        NotModelled: No row fits.
        ValueError: The toolkit is unknown.
    """
    if toolkit not in (None, *TOOLKITS):
        raise ValueError(f"toolkit={toolkit!r}: expected one of {', '.join(TOOLKITS)}, or None")
    op = require_product(op)
    family = op.family
    for row in target_rows(target):
        shape_fits = op.shape in (row.shapes or (op.shape,)) and op.kind in (row.kinds or (op.kind,)) and row.k in (None, op.k)
        types_fit = {op.a, op.b} <= set(row.multiplicands) and op.d in row.accumulators and row.c in (None, op.accumulator)
        clamp_fits = op.satfinite or not row.satfinite
        if row.family == family and shape_fits and types_fit and clamp_fits and (not row.toolkits or toolkit in row.toolkits):
            return row
    modelled = family_targets(family)
    what_works = f"{family} is modelled on {', '.join(modelled)}" if modelled else f"no target's {family} is modelled yet"
    legal = f"there is no evidence of what {target} computes for it"
    name = resolve_target(target)
    if known := UNKNOWN.get(name) or (TARGETS[name].public if name in TARGETS else ""):
        raise NotModelled(f"{op}: {legal}; known is: {known}")
    raise NotModelled(f"{op}: {legal}; {what_works}. The rows, with their evidence: tcemu list --evidence")


def require_product(op: Instruction) -> MatrixMultiply:
    """Return an instruction that computes D = A·B + C; raises Unsupported for one that only moves words or orders others."""
    if isinstance(op, Tcgen05Mma):
        example = next(one for one in usual_products() if (one.kind, one.sparse) == (op.kind, op.sparse))
        raise Unsupported(
            f"{op}: its shape and types are in its instruction descriptor; write them behind it, as {example}. PTX ISA 9.7.16.4.2"
        )
    if not isinstance(op, MatrixMultiply):
        *most, last = COMPUTING_FAMILIES
        raise Unsupported(f"{op} computes nothing; {', '.join(most)} and {last} do. PTX ISA 9.7.14 to 9.7.16")
    return op


def target_rows(target: str) -> tuple[ModelRow, ...]:
    """Return the rows of one target in the order in which they are tried; raises Unsupported for an unknown target."""
    return _target_rows(resolve_target(target))


@cache
def _target_rows(target: str) -> tuple[ModelRow, ...]:
    return tuple(row for row in (*ROWS, *OTHER_ROWS) if target in row.targets)


@cache
def family_targets(family: str) -> tuple[str, ...]:
    """Return the targets with a modelled arithmetic for a family of instructions."""
    return tuple(dict.fromkeys(target for row in (*ROWS, *OTHER_ROWS) if row.family == family for target in row.targets))
