"""Parsing: from a PTX spelling or a short name to an `Instruction`, or to an error that names the nearest legal spelling.

The qualifiers of a spelling fall into slots. Each slot holds qualifiers that belong together, such as the element types. Slots may come in
any order, as in the assembler. An illegal spelling is compared with the legal ones slot by slot.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from re import DOTALL, compile, findall, fullmatch
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.number_formats import FORMATS
from tcemu.engine.isa.families import Instruction, qualifier_slots, spellings
from tcemu.engine.isa.other_makers import find_unit
from tcemu.engine.isa.short_names import describe_other_word, find_short_name, nearest_short_names
from tcemu.engine.isa.syntax_table import parse_shape, syntax_row, syntax_rows
from tcemu.engine.isa.tcgen05 import Tcgen05Mma, Tcgen05Product, make_product, product_problem

Slot = tuple[str, ...]  # the qualifiers in one slot
Filling = tuple[Slot, ...]  # the contents of every slot of an instruction name
MAX_TEXT = 160  # characters of the user's text that a message repeats
PRIORITY_SLOTS = ("type", "shape", "kind")  # the slots that reveal most about the intended instruction, in this order


class LegalForm(NamedTuple):
    op: Instruction
    section: str  # section of the PTX ISA manual


@dataclass(frozen=True, eq=False)
class Grammar:
    """Every legal filling of the slots of one instruction name."""

    head: str  # instruction name, such as "mma" or "wmma.load.a"
    slots: tuple[str, ...]  # names of the slots, in the canonical order
    legal: dict[Filling, LegalForm]

    @cached_property
    def slot_indices(self) -> dict[str, int]:
        """The index of the slot of every qualifier."""
        return {q: i for filling in self.legal for i, slot in enumerate(filling) for q in slot}

    @cached_property
    def required_slots(self) -> tuple[int, ...]:
        """The indices of the slots that are filled in every legal spelling."""
        return tuple(i for i in range(len(self.slots)) if all(filling[i] for filling in self.legal))

    @cached_property
    def values_by_context(self) -> dict[tuple[int, Filling], list[Slot]]:
        """The legal contents of a slot, by the slot's index and the filling with that slot emptied."""
        index: dict[tuple[int, Filling], list[Slot]] = {}
        for filling in self.legal:
            for i, slot in enumerate(filling):
                index.setdefault((i, (*filling[:i], (), *filling[i + 1 :])), []).append(slot)
        return index

    @cached_property
    def priority(self) -> list[int]:
        """The indices of the slots, with PRIORITY_SLOTS first."""
        return sorted(
            range(len(self.slots)),
            key=lambda i: (PRIORITY_SLOTS.index(self.slots[i]) if self.slots[i] in PRIORITY_SLOTS else len(PRIORITY_SLOTS), i),
        )

    @cached_property
    def tree(self) -> dict:
        """The legal fillings as nested dicts: one level per slot, in the order of `priority`."""
        root: dict = {}
        for filling in self.legal:
            node = root
            for i in self.priority:
                node = node.setdefault(filling[i], {})
        return root

    @cached_property
    def typos(self) -> dict[str, str]:
        """The qualifiers by their own text and by their text with one letter left out."""
        return {shorter: q for q in self.slot_indices for shorter in letter_deletions(q)} | {q: q for q in self.slot_indices}

    def spelling(self, filling: Filling) -> str:
        """Return the spelling of a filling, in the canonical order.

        Args:
            filling: Contents of every slot.
        """
        return ".".join([self.head, *(q for slot in filling for q in slot)])

    def nearest(self, filling: Filling) -> Filling:
        """Return a legal filling close to an illegal one.

        The slots are decided in the order of `priority`. Each keeps its contents where the slots before it allow them, and takes the
        nearest allowed contents elsewhere.

        Args:
            filling: Contents of every slot.
        """
        node, chosen = self.tree, {}
        for i in self.priority:
            slot = filling[i]
            chosen[i] = slot if slot in node else min(node, key=lambda other, slot=slot: slot_distance(slot, other))
            node = node[chosen[i]]
        return tuple(chosen[i] for i in range(len(filling)))

    def correct_typo(self, word: str) -> str | None:
        """Return the qualifier that differs from a word by one letter added, left out or changed.

        Args:
            word: Unknown qualifier.

        Returns:
            The qualifier, or None if no qualifier is that near.
        """
        if len(word) > 40:
            return None
        return next((self.typos[w] for w in (word, *letter_deletions(word)) if w in self.typos), None)

    def fill(self, qualifiers: Iterable[str]) -> Filling:
        """Sort qualifiers into their slots.

        Args:
            qualifiers: Qualifiers in any order. An unknown shape goes to the slot of shapes; other unknown qualifiers are dropped.

        Returns:
            The contents of every slot.
        """
        filling: list[list[str]] = [[] for _ in self.slots]
        for q in qualifiers:
            slot = self.slots.index("shape") if q not in self.slot_indices and self.is_shape(q) else self.slot_indices.get(q)
            if slot is not None:
                filling[slot].append(q)
        return tuple(map(tuple, filling))

    def is_shape(self, word: str) -> bool:
        """Return True if the instruction has shapes and a word is written as one, such as "m16n8k16".

        Args:
            word: Qualifier.
        """
        return "shape" in self.slots and fullmatch(r"m\d{1,6}n\d{1,6}(k\d{1,6})?", word) is not None


def letter_deletions(word: str) -> Iterator[str]:
    """Return the words made by leaving out each letter in turn.

    Args:
        word: Any text.
    """
    return (word[:i] + word[i + 1 :] for i in range(len(word)))


@lru_cache(maxsize=16384)
def slot_distance(slot: Slot, other: Slot) -> tuple[int, int]:
    """Return the distance between the contents of two slots.

    Args:
        slot: Contents of a slot.
        other: Contents to compare with.

    Returns:
        The number of qualifiers to change, then the difference of the numbers in them. Qualifiers with different first letters add 64.
    """
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


def shorten_text(text: str) -> str:
    """Return the user's text in one line, shortened to MAX_TEXT characters for a message.

    Args:
        text: Any text.
    """
    text = " ".join(text[: 4 * MAX_TEXT].split()) + (" " if len(text) > 4 * MAX_TEXT else "")
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def join_values(values: Iterable[Slot]) -> str:
    """Return the first six values as they are spelled, and the number of the others.

    Args:
        values: Alternative contents of one slot.
    """
    names = ["".join(f".{q}" for q in value) or "left out" for value in values]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def unknown_instruction_error(spelling: str, parts: list[str], heads: list[str]) -> Unsupported:
    """Return the error for an unknown instruction name.

    Args:
        spelling: The whole spelling.
        parts: The spelling split at its dots.
        heads: Known instruction names.
    """
    given = shorten_text(spelling) or "an empty string"
    same = [name for name in heads if name.split(".")[0] == parts[0]]
    if len(parts) == 1 and same:  # the name alone
        what = "missing qualifiers" if same == parts else f"unknown instruction; the family has {', '.join(same)}"
        return Unsupported(
            f"{given}: {what}; give a whole spelling, or a short name such as 'f16' or 'e4m3 wgmma' (tcemu list --short). "
            "PTX ISA 9.7.14 to 9.7.16."
        )
    if same:
        head = shorten_text(".".join(parts[:2]))
        return Unsupported(f"{given}: unknown instruction {head!r}; expected one of {', '.join(same)}. PTX ISA 9.7.14 to 9.7.16.")
    first = list(dict.fromkeys(name.split(".")[0] for name in heads))
    forms = {shorter: name for name in first for shorter in (name, *letter_deletions(name))}
    close = next((forms[w] for w in (parts[0], *letter_deletions(parts[0][:20])) if w in forms), None)
    near = [close] if close else nearest_short_names(spelling) if len(parts) == 1 else []
    hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
    if other := describe_other_word(spelling):
        hint = f": {other} (a recipe, such as 'fp8', is given as recipe=, in the shell as --recipe)"
    known = f"known are {', '.join(first)}, and short names such as 'f16' or 'e4m3 wgmma' (tcemu list --short)"
    return Unsupported(f"{given}: unknown instruction {shorten_text(parts[0])!r}{hint}; {known}. PTX ISA 9.7.14 to 9.7.16.")


class Fix(NamedTuple):
    """A change of one slot that makes a spelling legal. Small differences sort first."""

    difference: tuple[int, int]  # distance between the old and the new contents: `slot_distance`
    slot: int  # index of the slot
    value: Slot  # new contents


def illegal_spelling_error(grammar: Grammar, spelling: str, qualifiers: list[str]) -> Unsupported:
    """Return the error for a spelling that is illegal on every target.

    The message names an unknown qualifier, a missing qualifier or an impossible combination, and the nearest legal spelling.

    Args:
        grammar: Grammar of the instruction name.
        spelling: The whole spelling.
        qualifiers: Qualifiers after the instruction name.
    """
    unknown = next((q for q in qualifiers if q not in grammar.slot_indices and not grammar.is_shape(q)), None)
    corrected = None if unknown is None else grammar.correct_typo(unknown)
    filling = grammar.fill(corrected if q == unknown and corrected else q for q in qualifiers)
    fixes = []
    for i, slot in enumerate(filling):
        values = grammar.values_by_context.get((i, (*filling[:i], (), *filling[i + 1 :])), ())
        fixes += [Fix(difference=slot_distance(slot, value), slot=i, value=value) for value in values if value != slot]
    # a change between dense and sparse comes last: the result is another instruction. Of equal changes an addition comes first
    fixes.sort(key=lambda fix: (grammar.slots[fix.slot] == "sparsity", fix.difference, bool(filling[fix.slot]), fix))
    if filling in grammar.legal:
        nearest = filling
    elif fixes:
        nearest = (*filling[: fixes[0].slot], fixes[0].value, *filling[fixes[0].slot + 1 :])
    else:
        nearest = grammar.nearest(filling)
    end = f"nearest legal spelling: {grammar.spelling(nearest)}. PTX ISA {grammar.legal[nearest].section}."
    given = shorten_text(spelling)

    if unknown is not None:
        hint = f", did you mean .{corrected}?" if corrected else ""
        return Unsupported(f"{given}: unknown qualifier {shorten_text('.' + unknown)!r} for {grammar.head}{hint}; {end}")
    missing = [i for i in grammar.required_slots if not filling[i]]
    if not missing and fixes and _extends(filling[fixes[0].slot], fixes[0].value):
        missing = [fixes[0].slot]
    if missing:
        i = missing[0]
        values = [fix.value for fix in fixes if fix.slot == i] or [nearest[i]]
        expected = (
            f" {join_values(values)}"
            if len(values) == 1 and not filling[i]
            else f": {_describe_slot(grammar.slots[i])}, one of {join_values(values)}"
        )
        return Unsupported(f"{given}: missing qualifier{expected}; {end}")
    return Unsupported(f"{given}: impossible combination: {_describe_conflict(grammar, filling, fixes)}; {end}")


def _describe_conflict(grammar: Grammar, filling: Filling, fixes: list[Fix]) -> str:
    """Name the qualifiers that cannot be combined."""
    if not fixes:
        slots = [slot for slot, name in zip(filling, grammar.slots, strict=True) if slot and name not in ("sync", "aligned")]
        return f"no {grammar.head} has all of {shorten_text(' '.join(join_values([slot]) for slot in slots))}"
    i = fixes[0].slot
    found, values = shorten_text(join_values([filling[i]])), [fix.value for fix in fixes if fix.slot == i]
    if values == [()]:
        return f"the other qualifiers do not allow {found}"
    return f"with the other qualifiers, {_describe_slot(grammar.slots[i])} may be {join_values(values)}, not {found}"


def _extends(slot: Slot, value: Slot) -> bool:
    """Return True if `value` is `slot` with qualifiers added."""
    rest = iter(value)
    return len(value) > len(slot) and all(q in rest for q in slot)


def _describe_slot(slot: str) -> str:
    names = {"type": "the element types", "layout": "the layouts", "bit_op": "the bit operation", "space": "the state space"}
    return names.get(slot, f"the {slot}")


def operand_problem(op: Instruction, section: str) -> str | None:
    """Check the operands of a statement: their number, and the number of registers in each `{...}`.

    Args:
        op: Instruction with `arguments`.
        section: Section of the manual that the message names.

    Returns:
        The error message, or None if the operands are right.
    """
    form = op.argument_form
    if len(form) != len(op.arguments):
        expected = " or ".join(", ".join(form) or "no operand" for form in op.operand_forms)
        return f"{op}: impossible combination: {len(op.arguments)} operands, but the statement takes {expected}. PTX ISA {section}."
    for name, text in zip(form, op.arguments, strict=True):
        if problem := op.operand_problem(name, text):
            return f"{op}: impossible combination: {problem}. PTX ISA {section}."
        if not text.startswith("{") or name.startswith("selector"):
            continue
        count = len(text.strip("{}").split(","))
        length = _vector_length(op, name)
        if count != length:
            return f"{op}: impossible combination: operand {name} has {count} registers, but takes {length or 'none'}. PTX ISA {section}."
    return None


def _vector_length(op: Instruction, operand: str) -> int:
    """Return the number of registers in PTX's count, where an .f64 is one; 0 for an operand that is no vector."""
    try:
        return op.register_count(operand) * 32 // op.register_bits(operand)
    except ValueError:
        return 0


# ---- parsing

_STATEMENT = compile(r"\s*(?:@(!?[\w$%]+)\s+)?([^\s{\[;]+)")  # guard and spelling; the operands follow
_PART = compile(r"[^,{}\[\]()]+|.", DOTALL)  # a comma, a bracket, or the text between two of them


@cache
def grammars() -> dict[str, Grammar]:
    """Return the grammar of every instruction name, such as "mma" or "wmma.load.a", from the rows of `tcemu.engine.isa.syntax_table`."""
    legal: dict[str, dict[Filling, LegalForm]] = {}
    order: dict[str, tuple[str, ...]] = {}
    for op, row in syntax_rows().items():
        name = op.opcode
        order[name] = tuple(op.slots)
        for defaults in (False, True):
            legal.setdefault(name, {}).setdefault(qualifier_slots(op, defaults=defaults), LegalForm(op=op, section=row.section))
    return {name: Grammar(name, order[name], legal[name]) for name in legal}


@cache
def _spelling_index() -> dict[str, Instruction]:
    return {spelling: op for op in syntax_rows() for spelling in spellings(op)}


def parse(text: str | Instruction) -> Instruction:
    """Return the instruction that a PTX spelling or a short name means.

    `parse(str(op)) == op`. Results are cached.

    Args:
        text: One of these. An `Instruction` is returned unchanged.

            A PTX spelling, with its qualifiers in any order that the assembler accepts. It may be a whole statement with a guard, operands
            and a closing `;`. The guard and the operands become the text in `guard` and `arguments`. The number of operands and the number
            of registers in each `{...}` are checked.

            A short name, such as "f16", "e4m3 wgmma", "bf16 sparse" or "nvf4": the format of A and B, or a kind with block scales, then the
            words that tell it from a dense mma. It means the largest common shape with f32 sums (f64 for f64, s32 for integers).
            Functions with a target take the largest shape of that target where it lacks the common one: "f16" is m16n8k8 on a T4.
            `tcemu list --short` lists all short names with their spellings.

            For `tcgen05.mma`, whose shape and types are in its instruction descriptor: PTX's spelling, or this with the shape and the types
            of D, A and B behind it, as "tcgen05.mma.cta_group::1.kind::f16.m128n256k16.f32.f16.f16".

    Raises:
        Unsupported: No target has such an instruction.
        TypeError: `text` is neither a string nor an `Instruction`.

    Source: PTX ISA 9.7.14 to 9.7.16.

    Example:
        >>> import tcemu
        >>> tcemu.parse("f16").shape
        'm16n8k16'
        >>> tcemu.parse("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16").warps
        4
    """
    if isinstance(text, Instruction):
        return text
    if not isinstance(text, str):
        raise TypeError(f"parse: expected a PTX spelling (str) or an Instruction, got {type(text).__name__}")
    return _parse(text)


@lru_cache(maxsize=65536)
def _parse(text: str) -> Instruction:
    op = _spelling_index().get(text) or (None if "." in text else find_short_name(text) or find_unit(text))
    if op is not None:
        return op
    if "." not in text and text.strip():
        raise unknown_instruction_error(text, [" ".join(text.split())], list(grammars()))
    match = _STATEMENT.match(text)
    guard, spelling = match.groups() if match else (None, text)
    rest = text[match.end() :].strip() if match else ""
    rest = rest.removesuffix(";").rstrip()
    op = _parse_spelling(spelling)
    if not rest and guard is None:
        return op
    op = replace(op, guard=guard, arguments=split_operands(rest) if rest else ())
    problem = operand_problem(op, syntax_row(op).section) if rest else None
    if problem:
        raise Unsupported(problem)
    return op


def _parse_spelling(spelling: str) -> Instruction:
    grammar, qualifiers = _split_spelling(spelling)
    if grammar.head in ("tcgen05.mma", "tcgen05.mma.ws") and any(map(_is_product_shape, qualifiers)):
        return _parse_product(grammar, spelling, qualifiers)
    slots: list[list[str]] = [[] for _ in grammar.slots]
    for qualifier in qualifiers:
        slot = grammar.slot_indices.get(qualifier)
        if slot is None:
            raise illegal_spelling_error(grammar, spelling, qualifiers)
        slots[slot].append(qualifier)
    legal = grammar.legal.get(tuple(map(tuple, slots)))
    if legal is None:
        raise illegal_spelling_error(grammar, spelling, qualifiers)
    return legal.op


def _is_product_shape(qualifier: str) -> bool:
    return fullmatch(r"m\d{1,6}n\d{1,6}k\d{1,6}", qualifier) is not None


def _parse_product(grammar: Grammar, spelling: str, qualifiers: list[str]) -> Tcgen05Product:
    """Parse a tcgen05.mma with the shape and the types that PTX leaves to its instruction descriptor."""
    shapes = [q for q in qualifiers if _is_product_shape(q)]
    types = [FORMATS[q] for q in qualifiers if q in FORMATS]
    rest = [q for q in qualifiers if q not in FORMATS and q not in shapes and q != "satfinite"]
    op = _parse_spelling(".".join([grammar.head, *rest]))
    assert isinstance(op, Tcgen05Mma)
    given, section = shorten_text(spelling), syntax_row(op).section
    wanted = (4, 3) if op.scaled else (3,)
    if len(shapes) != 1 or len(types) not in wanted:
        scale = ", and optionally that of the scales" if op.scaled else ""
        raise Unsupported(
            f"{given}: impossible combination: a tcgen05.mma with a shape takes one shape and the types of D, A and B{scale}. "
            f"PTX ISA {section}."
        )
    size = parse_shape(shapes[0])
    d, a, b = types[:3]
    scale_format = types[3] if len(types) > 3 else None
    product = make_product(op, size["m"], size["n"], d, a, b, scale=scale_format, satfinite="satfinite" in qualifiers, k=size["k"])
    if problem := product_problem(product):
        raise Unsupported(f"{given}: impossible combination: {problem}. PTX ISA 9.7.16.4.2, table 39.")
    return product


def _split_spelling(spelling: str) -> tuple[Grammar, list[str]]:
    """Return the grammar of the instruction name, the longest that fits of up to three parts, and the qualifiers after the name."""
    parts = spelling.split(".")
    for count in (3, 2, 1):
        grammar = grammars().get(".".join(parts[:count]))
        if grammar is not None:
            return grammar, parts[count:]
    raise unknown_instruction_error(spelling, parts, list(grammars()))


def split_operands(text: str) -> tuple[str, ...]:
    """Split the operands of a statement at the commas outside brackets.

    Args:
        text: Operands as the statement has them.

    Returns:
        The operands, with runs of blanks reduced to one blank and none at the ends.
    """
    depth, operands = 0, [[]]
    for part in _PART.findall(text):
        depth += (part in "{[(") - (part in "}])")
        if part == "," and not depth:
            operands.append([])
        else:
            operands[-1].append(part)
    return tuple(" ".join("".join(parts).split()) for parts in operands)
