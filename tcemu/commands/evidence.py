"""`tcemu list --evidence`: how the arithmetic of each target is known, told from the rows of `tcemu.architectures`."""

from collections import Counter
from collections.abc import Iterator

from tcemu.architectures.evidence import LEVELS
from tcemu.architectures.lookup import COMPUTING, row_for, rows_of
from tcemu.arithmetic.model import Model
from tcemu.isa.catalog import instructions, targets
from tcemu.isa.instructions import Instruction


def summary() -> Iterator[str]:
    """For each target how many instructions are known at which level, and how many words were compared; alike targets on one line."""
    yield f"{'':32}{'instructions whose arithmetic is known by':^56}"
    yield f"{'targets':32}" + "".join(f"{level:>11}" for level in LEVELS) + f"{'words':>13}"
    lines: dict[tuple, list[str]] = {}
    for target in targets():
        known = [row_for(op, target).evidence for op in _computing(target)]
        counts = Counter(evidence.level for evidence in known)
        words = sum(evidence.recorded for evidence in set(known))
        lines.setdefault((*(counts[level] for level in LEVELS), words), []).append(target)
    for (*counts, words), names in lines.items():
        yield f"{_wrapped(names):32}" + "".join(f"{count or '-':>11}" for count in counts) + f"{f'{words:,}' if words else '-':>13}"
    yield ""
    for level, meaning in LEVELS.items():
        yield f"{level:11} {meaning}"


def details(target: str) -> Iterator[str]:
    """The rows of one target: what they belong to, the model, and how it is known."""
    used = {row_for(op, target).key for op in _computing(target)}
    for row in rows_of(target):
        if row.key in used or row.family == "tcgen05" or row.toolkits:
            known = row.evidence
            words = f", {known.recorded:,} words" if known.recorded else ""
            yield f"{row.key}: {_described(row.model)}"
            yield f"    {known.level}: {known.source}{words}"


def _computing(target: str) -> Iterator[Instruction]:
    return (op for family in COMPUTING for op in instructions(target, family))


def _wrapped(names: list[str]) -> str:
    """sm_103, sm_103f, sm_103a -> sm_103/f/a; many targets as the first and the last."""
    short: list[str] = []
    for name in names:
        base = short[-1].partition("/")[0] if short else ""
        if base and name.startswith(base) and len(name) == len(base) + 1:
            short[-1] += f"/{name[-1]}"
        else:
            short.append(name)
    return ", ".join(short)


def _described(model: Model) -> str:
    if model.result.is_integer:
        return "exact integers"
    if model.fraction_bits is None:
        return f"{model.result} multiply-adds, {model.rounding}" + ("" if model.chain is None else f", in chains of {model.chain}")
    parts = [f"steps of {model.terms}", f"{model.fraction_bits} fraction bits", f"floor {model.floor}", f"{model.result} {model.rounding}"]
    parts += [f"groups of {model.summed} summed exactly"] if model.summed else []
    parts += [f"{model.result_bits} bits of the result kept"] if model.result_bits else []
    parts += [f"as {model.multiplicand}, {model.groups} groups, C last"] if model.multiplicand else []
    return ", ".join(parts)
