"""`tcemu list --evidence`: how the arithmetic of each target is known, told from the rows of `models`."""

from collections import Counter
from collections.abc import Iterator

from tcemu.architectures.evidence import LEVELS
from tcemu.architectures.lookup import COMPUTING, models, row
from tcemu.architectures.rows import ModelRow
from tcemu.isa.catalog import instructions, targets
from tcemu.isa.instructions import Instruction


def summary() -> Iterator[str]:
    """For each target how many instructions are known at which level, and how many words were compared; alike targets on one line."""
    yield f"{'':32}{'instructions whose arithmetic is known by':^56}"
    yield f"{'targets':32}" + "".join(f"{level:>11}" for level in LEVELS) + f"{'words':>13}"
    lines: dict[tuple, list[str]] = {}
    for target in targets():
        found = [row(op, target).evidence for op in _computing(target)]
        counts = Counter(known.level for known in found)
        words = sum(known.words for known in set(found))
        lines.setdefault((*(counts[level] for level in LEVELS), words), []).append(target)
    for (*counts, words), names in lines.items():
        yield f"{_wrapped(names):32}" + "".join(f"{count or '-':>11}" for count in counts) + f"{f'{words:,}' if words else '-':>13}"
    yield ""
    for level, meaning in LEVELS.items():
        yield f"{level:11} {meaning}"


def details(target: str) -> Iterator[str]:
    """The rows of one target: what they belong to, the model, and how it is known."""
    used = {id(row(op, target)) for op in _computing(target)}
    for one in models(target):
        if id(one) in used or one.family == "tcgen05" or one.toolkits:
            known = one.evidence
            words = f", {known.words:,} words" if known.words else ""
            yield f"{_belongs(one)}: {_model(one)}"
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


def _belongs(one: ModelRow) -> str:
    types = "/".join(map(str, one.multiplicands)) + " to " + "/".join(map(str, one.accumulators))
    rest = [*one.shapes, *(f"kind::{kind}" for kind in one.kinds if kind), *([f"C {one.c}"] if one.c else [])]
    rest += [f"ptxas {version}" for version in one.toolkits]
    return " ".join([one.family, types, *([f"({', '.join(rest)})"] if rest else [])])


def _model(one: ModelRow) -> str:
    model = one.model
    if model.result.is_integer:
        return "exact integers"
    if model.fraction_bits is None:
        return f"{model.result} multiply-adds, {model.rounding}" + ("" if model.chain is None else f", in chains of {model.chain}")
    parts = [f"steps of {model.terms}", f"{model.fraction_bits} fraction bits", f"floor {model.floor}", f"{model.result} {model.rounding}"]
    parts += [f"groups of {model.summed} summed exactly"] if model.summed else []
    parts += [f"{model.result_bits} bits of the result kept"] if model.result_bits else []
    parts += [f"as {model.multiplicand}, {model.groups} groups, C last"] if model.multiplicand else []
    return ", ".join(parts)
