"""Why a spelling is not an instruction, and the nearest one that is.

A spelling is cut into slots. Each holds the qualifiers that belong together, such as the element types. Spellings are compared slot by
slot.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from re import findall, fullmatch
from typing import NamedTuple

from tcemu.errors import Unsupported
from tcemu.isa.instructions import Instruction
from tcemu.isa.short_names import near_short_names

Slot = tuple[str, ...]  # the qualifiers in one slot
Filling = tuple[Slot, ...]  # one for each slot of an instruction name
LONGEST = 160  # characters of the user's text that a message repeats
TCGEN05 = (
    "tcgen05 is PTX ISA 9.7.16, and tcemu has the instructions of 9.7.14 and 9.7.15. Of tcgen05 it has the arithmetic, on sm_100f, sm_100a "
    "and the same of sm_103 and sm_110: tcemu.matmul(a, b, recipe='fp8 on B200') and tcemu gemm --recipe 'fp8 on B200' multiply by it; "
    "tcemu.model(op, 'B200', unit='tcgen05') gives it for model=, with an mma of the same types; B200@tcgen05 is a side of tcemu fuzz. "
    "How it is known: tcemu list --evidence --target B200"
)
FIRST = ("type", "shape", "kind")  # the slots that say most about what was meant


class Legal(NamedTuple):
    """What a filling spells: the instruction, and its section of the manual."""

    op: Instruction
    section: str


@dataclass(frozen=True, eq=False)
class Grammar:
    """Every legal filling of the slots of one instruction name."""

    head: str
    slots: tuple[str, ...]  # their names, in the canonical order
    legal: dict[Filling, Legal]

    @cached_property
    def slot_of(self) -> dict[str, int]:
        """qualifier -> the position of its slot."""
        return {q: i for filling in self.legal for i, slot in enumerate(filling) for q in slot}

    @cached_property
    def required(self) -> tuple[int, ...]:
        """The slots that every spelling fills."""
        return tuple(i for i in range(len(self.slots)) if all(filling[i] for filling in self.legal))

    @cached_property
    def but_one(self) -> dict[tuple[int, Filling], list[Slot]]:
        """(slot, the filling of all others) -> what that slot may hold."""
        index: dict[tuple[int, Filling], list[Slot]] = {}
        for filling in self.legal:
            for i, slot in enumerate(filling):
                index.setdefault((i, (*filling[:i], (), *filling[i + 1 :])), []).append(slot)
        return index

    @cached_property
    def priority(self) -> list[int]:
        """The slots, those first that say most about what was meant."""
        return sorted(range(len(self.slots)), key=lambda i: (FIRST.index(self.slots[i]) if self.slots[i] in FIRST else len(FIRST), i))

    @cached_property
    def tree(self) -> dict:
        """The fillings as nested dicts in the order of `priority`."""
        root: dict = {}
        for filling in self.legal:
            node = root
            for i in self.priority:
                node = node.setdefault(filling[i], {})
        return root

    @cached_property
    def misspelled(self) -> dict[str, str]:
        """Every qualifier with one letter left out -> the qualifier."""
        return {shorter: q for q in self.slot_of for shorter in shortened(q)} | {q: q for q in self.slot_of}

    def spelling(self, filling: Filling) -> str:
        """In the canonical order."""
        return ".".join([self.head, *(q for slot in filling for q in slot)])

    def nearest(self, filling: Filling) -> Filling:
        """A legal filling close to this one: slot by slot, the value that differs least among those still possible."""
        node, chosen = self.tree, {}
        for i in self.priority:
            slot = filling[i]
            chosen[i] = slot if slot in node else min(node, key=lambda other, slot=slot: difference(slot, other))
            node = node[chosen[i]]
        return tuple(chosen[i] for i in range(len(filling)))

    def meant(self, word: str) -> str | None:
        """The qualifier that a word becomes with one letter added, left out or changed."""
        if len(word) > 40:
            return None
        return next((self.misspelled[w] for w in (word, *shortened(word)) if w in self.misspelled), None)

    def fill(self, qualifiers: Iterable[str]) -> Filling:
        """The qualifiers in their slots; a shape that no instruction has goes to the shape's slot, other unknown ones nowhere."""
        filling: list[list[str]] = [[] for _ in self.slots]
        for q in qualifiers:
            slot = self.slots.index("shape") if q not in self.slot_of and self.is_shape(q) else self.slot_of.get(q)
            if slot is not None:
                filling[slot].append(q)
        return tuple(map(tuple, filling))

    def is_shape(self, word: str) -> bool:
        return "shape" in self.slots and fullmatch(r"m\d{1,6}n\d{1,6}(k\d{1,6})?", word) is not None


def shortened(word: str) -> Iterator[str]:
    """The word with each of its letters left out in turn."""
    return (word[:i] + word[i + 1 :] for i in range(len(word)))


@lru_cache(maxsize=16384)
def difference(slot: Slot, other: Slot) -> tuple[int, int]:
    """How unlike two slots are: qualifiers to change, then numbers and letters."""
    changed = abs(len(slot) - len(other))
    detail = 0
    for x, y in zip(slot, other, strict=False):
        if x != y:
            changed += 1
            detail += sum(abs(p - q) for p, q in zip(_numbers(x), _numbers(y), strict=False)) if x[:1] == y[:1] else 64
    return changed, detail


@lru_cache(maxsize=4096)
def _numbers(word: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in findall(r"\d{1,6}", word))


def shown(text: str) -> str:
    """The user's text, short enough for a message and without line breaks."""
    text = " ".join(text[: 4 * LONGEST].split()) + (" " if len(text) > 4 * LONGEST else "")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def listed(values: Iterable[Slot]) -> str:
    """The first six, as they are spelled, and how many more there are."""
    names = ["".join(f".{q}" for q in value) or "left out" for value in values]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def unknown_instruction(spelling: str, parts: list[str], heads: list[str]) -> Unsupported:
    """The error for a name that no instruction has."""
    asked = shown(spelling) or "an empty string"
    if parts[0] == "tcgen05":
        return Unsupported(f"{asked}: {TCGEN05}")
    same = [name for name in heads if name.split(".")[0] == parts[0]]
    if same:
        head = shown(".".join(parts[:2]))
        return Unsupported(f"{asked}: unknown instruction {head!r}; {parts[0]} comes as {', '.join(same)}. PTX ISA 9.7.14, 9.7.15.")
    first = list(dict.fromkeys(name.split(".")[0] for name in heads))
    forms = {shorter: name for name in first for shorter in (name, *shortened(name))}
    close = next((forms[w] for w in (parts[0], *shortened(parts[0][:20])) if w in forms), None)
    near = [close] if close else near_short_names(spelling) if len(parts) == 1 else []
    hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
    known = f"known are {', '.join(first)}, and short names as 'f16' or 'e4m3 wgmma' (tcemu list --short)"
    return Unsupported(f"{asked}: unknown instruction {shown(parts[0])!r}{hint}; {known}. PTX ISA 9.7.14, 9.7.15.")


class Fix(NamedTuple):
    """A change of one slot that makes a spelling legal; small differences sort first."""

    difference: tuple[int, int]
    slot: int
    value: Slot


def why_not(grammar: Grammar, spelling: str, qualifiers: list[str]) -> Unsupported:
    """The error for a spelling that is no instruction on any target: an unknown or a missing qualifier, or an impossible combination."""
    unknown = next((q for q in qualifiers if q not in grammar.slot_of and not grammar.is_shape(q)), None)
    meant = None if unknown is None else grammar.meant(unknown)
    filling = grammar.fill(meant if q == unknown and meant else q for q in qualifiers)
    fixes = []
    for i, slot in enumerate(filling):
        values = grammar.but_one.get((i, (*filling[:i], (), *filling[i + 1 :])), ())
        fixes += [Fix(difference=difference(slot, value), slot=i, value=value) for value in values if value != slot]
    # dense in place of sparse comes last: that is another instruction
    fixes.sort(key=lambda fix: (grammar.slots[fix.slot] == "sparsity", fix))
    if filling in grammar.legal:
        nearest = filling
    elif fixes:
        nearest = (*filling[: fixes[0].slot], fixes[0].value, *filling[fixes[0].slot + 1 :])
    else:
        nearest = grammar.nearest(filling)
    end = f"nearest legal spelling: {grammar.spelling(nearest)}. PTX ISA {grammar.legal[nearest].section}."
    asked = shown(spelling)

    if unknown is not None:
        hint = f", did you mean .{meant}?" if meant else ""
        return Unsupported(f"{asked}: unknown qualifier {shown('.' + unknown)!r} for {grammar.head}{hint}; {end}")
    missing = [i for i in grammar.required if not filling[i]]
    if not missing and fixes and _extends(filling[fixes[0].slot], fixes[0].value):
        missing = [fixes[0].slot]
    if missing:
        i = missing[0]
        wanted = [fix.value for fix in fixes if fix.slot == i] or [nearest[i]]
        lacking = f" {listed(wanted)}" if len(wanted) == 1 and not filling[i] else f": {_named(grammar.slots[i])}, one of {listed(wanted)}"
        return Unsupported(f"{asked}: missing qualifier{lacking}; {end}")
    return Unsupported(f"{asked}: impossible combination: {_clash(grammar, filling, fixes)}; {end}")


def _clash(grammar: Grammar, filling: Filling, fixes: list[Fix]) -> str:
    """What does not go together."""
    if not fixes:
        slots = [slot for slot, name in zip(filling, grammar.slots, strict=True) if slot and name not in ("sync", "aligned")]
        return f"no {grammar.head} has all of {shown(' '.join(listed([slot]) for slot in slots))}"
    i = fixes[0].slot
    wanted = [fix.value for fix in fixes if fix.slot == i]
    if wanted == [()]:
        return f"{shown(listed([filling[i]]))} has no place with the rest"
    return f"with the rest, {_named(grammar.slots[i])} may be {listed(wanted)}, not {shown(listed([filling[i]]))}"


def _extends(slot: Slot, value: Slot) -> bool:
    """Whether `value` is `slot` with qualifiers added."""
    rest = iter(value)
    return len(value) > len(slot) and all(q in rest for q in slot)


def _named(slot: str) -> str:
    words = {"type": "the element types", "layout": "the layouts", "bit_op": "the bit operation", "space": "the state space"}
    return words.get(slot, f"the {slot}")


def wrong_arguments(op: Instruction, section: str) -> str | None:
    """What is wrong with the operands that a statement gives: their number, or the registers in a `{...}`."""
    forms = [form for form in op.forms if len(form) == len(op.arguments)]
    # wgmma's two forms may have one length; braces tell registers from a descriptor
    forms = [form for form in forms if "a_desc" not in form or not op.arguments[1].startswith("{")] or forms
    if not forms:
        wanted = " or ".join(", ".join(form) or "no operand" for form in op.forms)
        return f"{op}: impossible combination: {len(op.arguments)} operands, but the statement takes {wanted}. PTX ISA {section}."
    for name, text in zip(forms[0], op.arguments, strict=True):
        if not text.startswith("{") or name.startswith("selector"):
            continue
        count = len(text.strip("{}").split(","))
        wanted = _vector(op, name)
        if count != wanted:
            return f"{op}: impossible combination: operand {name} has {count} registers, but takes {wanted or 'none'}. PTX ISA {section}."
    return None


def _vector(op: Instruction, operand: str) -> int:
    """Registers as PTX counts them, where an .f64 is one; 0 for an operand that is no vector."""
    try:
        return op.registers(operand) // (2 if op.container_bits(operand) == 64 else 1)
    except ValueError:
        return 0
