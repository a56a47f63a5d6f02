"""From a PTX spelling to an `Instruction`. Qualifiers fall into slots; slots may come in any order, as the assembler takes them."""

from collections.abc import Mapping
from functools import cache, lru_cache
from re import DOTALL, compile

from tcemu.diagnosis import Grammar, unknown_instruction, why_not
from tcemu.instructions import HEAD, ORDER, Instruction, slots, spell
from tcemu.rows import row_of

# guard, spelling, operands; everything after the spelling is kept as text
_STATEMENT = compile(r"\s*(?:@!?[\w$%]+\s+)?([^\s{\[;]+)\s*(.*?)\s*;?\s*", DOTALL)


@cache
def grammar(head: str) -> Grammar:
    """The words of all instructions that begin with one name, such as "mma", from the rows."""
    legal = {}
    for op, row in row_of().items():
        if HEAD[op.family] == head:
            for defaults in (False, True):
                legal.setdefault(slots(op, defaults=defaults), (op, row.section))
    return Grammar(head, tuple(ORDER[head].split()), legal)


@cache
def _by_spelling() -> Mapping[str, Instruction]:
    return {spell(op, defaults=defaults): op for op in row_of() for defaults in (False, True)}


def parse(text: str | Instruction) -> Instruction:
    """The instruction that a PTX spelling names; an `Instruction` comes back as it is.

    Takes the qualifiers in any order that the assembler takes, and whole statements with a guard, operands and `;`, of which only the
    spelling is read. `parse(str(op)) == op`. Cached.

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
    found = _by_spelling().get(text)
    if found is not None:
        return found
    match = _STATEMENT.fullmatch(text)
    spelling = match.group(1) if match else text
    head, *qualifiers = spelling.split(".")
    if head not in ORDER:
        raise unknown_instruction(text, head, ORDER)
    words = grammar(head)
    given: list[list[str]] = [[] for _ in words.slots]
    for qualifier in qualifiers:
        slot = words.slot_of.get(qualifier)
        if slot is None:
            raise why_not(words, spelling, qualifiers)
        given[slot].append(qualifier)
    legal = words.legal.get(tuple(map(tuple, given)))
    if legal is None:
        raise why_not(words, spelling, qualifiers)
    return legal[0]
