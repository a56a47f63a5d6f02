"""Which model applies: from an instruction and a target to its row in `tcemu.architectures.rows`, its model, its evidence."""

from functools import cache, lru_cache
from typing import NamedTuple

from tcemu.architectures.evidence import Evidence
from tcemu.architectures.rows import ROWS, ModelRow
from tcemu.arithmetic.model import Model
from tcemu.errors import NotModelled, Unsupported
from tcemu.formats import S32
from tcemu.isa.catalog import check
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.isa.targets import named_target

COMPUTING = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")  # the families with an arithmetic
TOOLKITS = ("12.4", "12.6", "12.8", "12.9", "13.0", "13.5")  # whose machine code was read
UNITS = ("tcgen05",)  # which compute on operands of these instructions without being one of them


def rows_of(target: str) -> tuple[ModelRow, ...]:
    """The rows of one target, in the order in which they are tried. Raises Unsupported for an unknown target."""
    return _rows_of(named_target(target))


@cache
def _rows_of(target: str) -> tuple[ModelRow, ...]:
    return tuple(row for row in ROWS if target in row.targets)


def models(target: str) -> dict[str, Model]:
    """Every arithmetic of one target: from what it belongs to, such as "mma f16 to f32 (m8n8k4)", to the model.

    In the order in which they are tried: of those that fit an instruction, the first is its own. `tcemu.model` finds it.
    """
    return {row.key: row.model for row in rows_of(target)}


@lru_cache(maxsize=65536)
def row_for(op: Instruction, target: str, *, toolkit: str | None = None, unit: str | None = None) -> ModelRow:
    """The row that says how `target` computes `op`. Raises NotModelled if there is none, Unsupported if `op` computes nothing.

    toolkit: the version of ptxas that made the code, one of TOOLKITS; None is the newest. unit: "tcgen05" for the arithmetic of that unit
    on operands of this instruction's types, in place of the instruction's own.
    """
    if toolkit not in (None, *TOOLKITS) or unit not in (None, *UNITS):
        raise ValueError(f"toolkit={toolkit!r}, unit={unit!r}: want one of {', '.join(TOOLKITS)}, and of {', '.join(UNITS)}, or None")
    must_compute(op)
    family = unit or op.family
    for candidate in rows_of(target):
        shape_fits = op.shape in (candidate.shapes or (op.shape,)) and op.kind in (candidate.kinds or (op.kind,))
        types_fit = {op.a, op.b} <= set(candidate.multiplicands) and op.d in candidate.accumulators and candidate.c in (None, op.c)
        if candidate.family == family and shape_fits and types_fit and (not candidate.toolkits or toolkit in candidate.toolkits):
            return candidate
    modelled = targets_of(family)
    what_works = f"{family} is modelled on {', '.join(modelled)}" if modelled else f"no target's {family} is modelled yet"
    legal = (
        f"no evidence that {target} has a {unit}"
        if unit
        else f"legal on {target}, but there is no evidence of what {target} computes for it"
    )
    raise NotModelled(f"{op}: {legal}; {what_works}. The rows, with their evidence: tcemu list --evidence")


@cache
def targets_of(unit: str) -> tuple[str, ...]:
    """The targets that have a unit, one of UNITS, or a family of instructions, with an arithmetic that is known."""
    return tuple(dict.fromkeys(target for row in ROWS if row.family == unit for target in row.targets))


class Applied(NamedTuple):
    """The arithmetic that applies to an instruction on a target."""

    op: Instruction
    target: str  # as `tcemu.isa.targets.named_target` gives it
    model: Model
    row: ModelRow | None  # the target's own; None where that is not known, and a model was given in its place

    @property
    def clamped_metadata(self) -> bool:
        """See `sparsity.gather`."""
        return self.row is not None and self.row.clamped_metadata


def applied(
    op: str | Instruction, target: str, model: Model | None = None, *, toolkit: str | None = None, unit: str | None = None
) -> Applied:
    """The arithmetic of `op` on `target`: the target's own, or the model given in its place.

    toolkit, unit: as in `row_for`; with a unit, `op` need not be legal on the target.
    Raises Unsupported if PTX does not give `op` to `target` or `op` computes nothing, NotModelled if neither the target's arithmetic is
    known nor a model given, TypeError for what is no Model, ValueError for a model whose results cannot be those of `op`.
    """
    target = named_target(target)
    op = check(op, target) if unit is None else parse(op)
    try:
        own = row_for(op, target, toolkit=toolkit, unit=unit)
    except NotModelled:
        if model is None:
            raise
        own = None
    if model is None:
        assert own is not None
        return Applied(op=op, target=target, model=own.model, row=own)
    if not isinstance(model, Model):
        raise TypeError(f"model: got {model!r}; wanted a tcemu.Model, as tcemu.model(op, target) gives it, or None for the target's own")
    if model.result.is_integer != (op.d == S32):
        raise ValueError(f"model: its result is {model.result}, but {op} accumulates in {op.d}; give a model whose result fits")
    return Applied(op=op, target=target, model=model, row=own)


def must_compute(op: Instruction) -> None:
    """Raises Unsupported if `op` only moves words or orders others."""
    if op.a is None or op.b is None or op.d is None:
        *most, last = COMPUTING
        raise Unsupported(f"{op} computes nothing; {', '.join(most)} and {last} do. PTX ISA 9.7.14, 9.7.15")


def evidence(op: str | Instruction, target: str) -> Evidence:
    """How it is known what `target` computes for `op`: `level` is one of `tcemu.architectures.evidence.LEVELS`, `source` says it in words.

    Raises as `mma`.
    """
    op = check(op, target)
    return row_for(op, target).evidence


def model(op: str | Instruction, target: str, *, toolkit: str | None = None, unit: str | None = None) -> Model:
    """The arithmetic by which `target` computes `op`, to look at, to change, and to give to `model=`.

    toolkit: the version of ptxas that made the code, "12.4" to "13.5", which matters to FP8 `mma` on sm_90 before 12.8; None is the newest.
    unit: "tcgen05", the fifth-generation tensor core of sm_100f to sm_110a, on operands of the types of `op`, which may be illegal there.
    Raises as `mma`, and ValueError for another toolkit or unit.
    """
    op = check(op, target) if unit is None else parse(op)
    return row_for(op, target, toolkit=toolkit, unit=unit).model
