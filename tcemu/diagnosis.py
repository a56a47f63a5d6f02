"""Why a spelling is not an instruction, and the nearest one that is. Works on slots: the qualifiers that belong together."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from tcemu.errors import Unsupported
from tcemu.instructions import Instruction

Slots = tuple[tuple[str, ...], ...]
LONGEST = 160  # characters of the user's text that a message repeats


@dataclass(frozen=True, eq=False)
class Grammar:
    """Every legal filling of the slots of one instruction name."""

    head: str
    slots: tuple[str, ...]  # their names, in the canonical order
    legal: dict[Slots, tuple[Instruction, str]]  # filling -> the instruction and its section of the manual

    @cached_property
    def slot_of(self) -> dict[str, int]:
        """qualifier -> the position of its slot."""
        return {q: i for filling in self.legal for i, slot in enumerate(filling) for q in slot}

    @cached_property
    def required(self) -> tuple[int, ...]:
        """The slots that every spelling fills."""
        return tuple(i for i in range(len(self.slots)) if all(filling[i] for filling in self.legal))

    @cached_property
    def but_one(self) -> dict[tuple[int, Slots], list[tuple[str, ...]]]:
        """(slot, the filling of all others) -> what that slot may hold."""
        index: dict[tuple[int, Slots], list[tuple[str, ...]]] = {}
        for filling in self.legal:
            for i, slot in enumerate(filling):
                index.setdefault((i, (*filling[:i], (), *filling[i + 1 :])), []).append(slot)
        return index

    @cached_property
    def tree(self) -> dict:
        """The fillings as nested dicts, last slot first: types and shape before what goes with them."""
        root: dict = {}
        for filling in self.legal:
            node = root
            for slot in reversed(filling):
                node = node.setdefault(slot, {})
        return root

    def spelling(self, filling: Slots) -> str:
        return ".".join([self.head, *(q for slot in filling for q in slot)])

    def nearest(self, filling: Slots) -> Slots:
        """A legal filling close to this one: slot by slot, the value that differs least among those still possible."""
        node, chosen = self.tree, []
        for slot in reversed(filling):
            value = slot if slot in node else min(node, key=lambda other, slot=slot: difference(slot, other))
            node = node[value]
            chosen.append(value)
        return tuple(reversed(chosen))


def difference(given: tuple[str, ...], other: tuple[str, ...]) -> tuple[int, int]:
    """How unlike two slots are: qualifiers to change, then letters."""
    changed = sum(x != y for x, y in zip(given, other, strict=False)) + abs(len(given) - len(other))
    letters = sum(x != y for x, y in zip(".".join(given), ".".join(other), strict=False)) + abs(len(given) - len(other))
    return changed, letters


def shown(text: str) -> str:
    """The user's text, short enough for a message and without line breaks."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def listed(values: Iterable[tuple[str, ...]]) -> str:
    names = ["".join(f".{q}" for q in value) or "nothing" for value in values]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def unknown_instruction(text: str, head: str, heads: Iterable[str]) -> Unsupported:
    close = get_close_matches(head[:40], list(heads), 1)
    hint = f", did you mean {close[0]!r}?" if close else ""
    asked = shown(text) or "an empty string"
    return Unsupported(f"{asked}: unknown instruction {shown(head)!r}{hint}; known are {', '.join(heads)}. PTX ISA 9.7.14, 9.7.15.")


def why_not(grammar: Grammar, spelling: str, qualifiers: list[str]) -> Unsupported:
    """The error for a spelling that is no instruction on any target: an unknown or a missing qualifier, or an impossible combination."""
    unknown = [q for q in qualifiers if q not in grammar.slot_of]
    given: list[tuple[str, ...]] = [()] * len(grammar.slots)
    for q in qualifiers:
        if q in grammar.slot_of:
            given[grammar.slot_of[q]] += (q,)
    fixes = []
    for i, slot in enumerate(given):
        for value in grammar.but_one.get((i, (*given[:i], (), *given[i + 1 :])), ()):
            fixes.append((difference(slot, value), i, value))
    fixes.sort(key=lambda fix: fix[0])
    filled = tuple(given)
    nearest = (*given[: fixes[0][1]], fixes[0][2], *given[fixes[0][1] + 1 :]) if fixes else grammar.nearest(filled)
    near, section = grammar.spelling(nearest), grammar.legal[nearest][1]
    end = f"nearest legal spelling: {near}. PTX ISA {section}."

    if unknown:
        close = get_close_matches(unknown[0][:40], list(grammar.slot_of), 1)
        hint = f", did you mean .{close[0]}?" if close else ""
        return Unsupported(f"{shown(spelling)}: unknown qualifier {shown('.' + unknown[0])!r} for {grammar.head}{hint}; {end}")
    missing = [i for i in grammar.required if not given[i]]
    if not missing and fixes and _extends(given[fixes[0][1]], fixes[0][2]):
        missing = [fixes[0][1]]
    if missing:
        i = missing[0]
        wanted = [value for _, j, value in fixes if j == i] or [nearest[i]]
        return Unsupported(f"{shown(spelling)}: missing qualifier: {_words(grammar.slots[i])} must be {listed(wanted)}; {end}")
    if fixes:
        _, i, _ = fixes[0]
        wanted = [value for _, j, value in fixes if j == i]
        what = f"{_words(grammar.slots[i])} is {listed([given[i]])}, but with the rest it may be {listed(wanted)}"
    else:
        what = f"no spelling has {' with '.join(listed([slot]) for slot in given if slot and slot not in (('sync',), ('aligned',)))}"
    return Unsupported(f"{shown(spelling)}: impossible combination: {what}; {end}")


def _extends(given: tuple[str, ...], value: tuple[str, ...]) -> bool:
    """Whether `value` is `given` with qualifiers added."""
    rest = iter(value)
    return len(value) > len(given) and all(q in rest for q in given)


def _words(slot: str) -> str:
    return {"type": "the element types", "layout": "the layouts", "bit_op": "the bit operation"}.get(slot, f".{slot}")
