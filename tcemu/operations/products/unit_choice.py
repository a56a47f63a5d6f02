"""The unit of a product, where a target has two whose sums differ: which one an instruction or a recipe takes, and how to get the other.

FP8 on sm_90a is the case that surprises: `mma` multiplies e4m3 through f16, and `wgmma`, which libraries use, keeps 13 fraction bits.
"""

from functools import lru_cache

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.number_formats import F32
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import instructions, min_version, recipe_name
from tcemu.engine.isa.short_names import instructions_by_name
from tcemu.engine.isa.targets import library_unit, resolve_target
from tcemu.engine.isa.tcgen05 import find_counterpart

UNIT_NAMES = {"mma": "mma.sync", "mma.sp": "mma.sp", "wmma.mma": "wmma.mma"}  # units by family; the others are called as their family


@lru_cache(maxsize=1024)
def describe_unit(op: str | Instruction, target: str) -> str:
    """Return a sentence on the unit of a product; "" where the target has one unit for these operands, or two with the same sums.

    Args:
        op: PTX spelling, short name or `Instruction` that computes.
        target: GPU name or target.

    Returns:
        The unit that computes, the unit that libraries use on the target, and how to ask for the other one.

    Source: CUTLASS and cuBLAS use wgmma on sm_90a and tcgen05 on sm_100 to sm_110, which `tcemu.get_recipe` takes too.
    """
    op, target = parse(op), resolve_target(target)
    library = library_unit(target)
    if library not in ("wgmma", "tcgen05") or not isinstance(op, MatrixMultiply) or op.d.is_integer:
        return ""
    taken = "tcgen05" if op.family.startswith("tcgen05") else op.family.removesuffix(".sp")
    other = _other_instruction(op, target, library, taken)
    own, others = _model(op, target), None if other is None else _model(other, target)
    if other is None or own is None or others is None or own == others:
        return ""
    through = f" It multiplies {op.a} as {own.multiplicand} there." if own.multiplicand is not None else ""
    names = _ways_to_ask(other, target)
    if taken == library:
        return f"Unit: {library}, which libraries use on {target}. {UNIT_NAMES[other.family]} has other sums there: {names}."
    recipe = recipe_name(op) if op.d == F32 else None  # recipes have f32 sums
    asks = [names, *([f"recipe='{recipe} on {target}'"] if recipe else [])]
    unit = UNIT_NAMES.get(op.family, op.family)
    return f"Unit: {unit}.{through} Libraries use {library} on {target}, whose sums differ: {' or '.join(asks)}."


def _other_instruction(op: MatrixMultiply, target: str, library: str, taken: str) -> MatrixMultiply | None:
    """Return the instruction that multiplies the same operands by the other unit; None if the target has no such instruction."""
    if library == "tcgen05" and taken != library:
        return find_counterpart(op)
    family = ("mma" if taken == library else library) + (".sp" if op.sparse else "")
    formats = lambda one: (one.a, one.b, one.d, one.scaling)
    same = [one for one in instructions(target, family) if isinstance(one, MatrixMultiply) and formats(one) == formats(op)]
    return max(same, key=lambda one: (one.m * one.n * one.k, one.accumulator == one.d, one.kind is None), default=None)


def _model(op: MatrixMultiply, target: str) -> Model | None:
    try:
        return find_row(op, target).model
    except NotModelled:
        return None


def _ways_to_ask(op: MatrixMultiply, target: str) -> str:
    """Return the `op=` that takes an instruction on a target: a short name if there is one."""
    has = min_version(op, target) is not None
    # the target's own instruction of a name without a family is mma's wherever there is one
    named = (name for name, ops in reversed(instructions_by_name().items()) if op in ops)
    name = next(named, None) if has else None
    return f"op='{name or op}'"
