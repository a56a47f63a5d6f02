"""From a PTX spelling or a short name to an `Instruction`. Qualifiers fall into slots; slots may come in any order, as in the assembler."""

from dataclasses import replace
from functools import cache, lru_cache
from re import DOTALL, compile

from tcemu.errors import Unsupported
from tcemu.isa.diagnosis import Filling, Grammar, Legal, unknown_instruction, why_not, wrong_arguments
from tcemu.isa.instructions import FAMILIES, Instruction, head, slots, spell
from tcemu.isa.short_names import by_short_name
from tcemu.isa.syntax import syntax_rows

# guard, spelling; the operands follow
_STATEMENT = compile(r"\s*(?:@(!?[\w$%]+)\s+)?([^\s{\[;]+)")
_PART = compile(r"[^,{}\[\]()]+|.", DOTALL)


@cache
def grammars() -> dict[str, Grammar]:
    """The grammar of every instruction name, such as "mma" or "wmma.load.a", from the rows of `tcemu.isa.syntax`."""
    legal: dict[str, dict[Filling, Legal]] = {}
    order: dict[str, tuple[str, ...]] = {}
    for op, row in syntax_rows().items():
        name = head(op)
        order[name] = tuple(FAMILIES[op.family].order.split())
        for defaults in (False, True):
            legal.setdefault(name, {}).setdefault(slots(op, defaults=defaults), Legal(op=op, section=row.section))
    return {name: Grammar(name, order[name], legal[name]) for name in legal}


@cache
def _by_spelling() -> dict[str, Instruction]:
    return {spell(op, defaults=defaults): op for op in syntax_rows() for defaults in (False, True)}


def parse(text: str | Instruction) -> Instruction:
    """The instruction that a PTX spelling or a short name means; an `Instruction` comes back as it is.

    Short names are as "f16", "e4m3 wgmma", "bf16 sparse", "nvf4": the format of A and B, or a kind with block scales, and what is not a
    dense mma. The largest common shape is meant, with f32 sums; str() of the result says which. `tcemu list --short` has them all.

    Takes the qualifiers in any order that the assembler takes. Takes whole statements too: a guard, operands, a closing `;`. The guard and
    the operands are kept as text in `guard` and `arguments`; how many there are, and how many registers a `{...}` holds, is checked.
    `parse(str(op)) == op`. Cached.

    **Raises:** `Unsupported` if no target has such an instruction; `TypeError` if `text` is neither a string nor an `Instruction`.
    **Source:** PTX ISA 9.7.14, 9.7.15.
    """
    if isinstance(text, Instruction):
        return text
    if not isinstance(text, str):
        raise TypeError(f"parse: want a PTX spelling (str) or an Instruction, got {type(text).__name__}")
    return _parse(text)


@lru_cache(maxsize=65536)
def _parse(text: str) -> Instruction:
    op = _by_spelling().get(text) or (None if "." in text else by_short_name(text))
    if op is not None:
        return op
    if "." not in text and text.strip():
        raise unknown_instruction(text, [" ".join(text.split())], list(grammars()))
    match = _STATEMENT.match(text)
    guard, spelling = match.groups() if match else (None, text)
    rest = text[match.end() :].strip() if match else ""
    rest = rest.removesuffix(";").rstrip()
    op = _spelled(spelling)
    if not rest and guard is None:
        return op
    op = replace(op, guard=guard, arguments=arguments(rest) if rest else ())
    problem = wrong_arguments(op, syntax_rows()[op].section) if rest else None
    if problem:
        raise Unsupported(problem)
    return op


def _spelled(spelling: str) -> Instruction:
    grammar, qualifiers = _named(spelling)
    slots: list[list[str]] = [[] for _ in grammar.slots]
    for qualifier in qualifiers:
        slot = grammar.slot_of.get(qualifier)
        if slot is None:
            raise why_not(grammar, spelling, qualifiers)
        slots[slot].append(qualifier)
    legal = grammar.legal.get(tuple(map(tuple, slots)))
    if legal is None:
        raise why_not(grammar, spelling, qualifiers)
    return legal.op


def _named(spelling: str) -> tuple[Grammar, list[str]]:
    """The grammar of an instruction name, which has up to three parts, and the qualifiers after it."""
    parts = spelling.split(".")
    for count in (1, 2, 3):
        grammar = grammars().get(".".join(parts[:count]))
        if grammar is not None:
            return grammar, parts[count:]
    raise unknown_instruction(spelling, parts, list(grammars()))


def arguments(text: str) -> tuple[str, ...]:
    """The operands of a statement: split at the commas outside brackets, blanks around them dropped."""
    depth, operands = 0, [[]]
    for part in _PART.findall(text):
        depth += (part in "{[(") - (part in "}])")
        if part == "," and not depth:
            operands.append([])
        else:
            operands[-1].append(part)
    return tuple(" ".join("".join(parts).split()) for parts in operands)
