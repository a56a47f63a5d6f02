"""The qualifiers of asynchronous instructions, mbarriers and fences: slots with their choices, and which target has them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tcemu.errors import Unsupported
from tcemu.isa.targets import named_target
from tcemu.ptx.context import Context
from tcemu.ptx.module import Integer, Operand, Statement


class Slot(NamedTuple):
    """A place for one qualifier. needed: it may not be left out."""

    name: str
    choices: tuple[str, ...]
    needed: bool = False


class Form(NamedTuple):
    """An instruction: the words that it begins with, its further qualifiers, how many operands it takes, and the first target with it.

    apart: the qualifiers that GPUs have and that are not run here, with the reason and what would work.
    """

    head: str
    slots: tuple[Slot, ...]
    operands: tuple[int, ...]
    target: int
    section: str
    apart: Mapping[str, str] = MappingProxyType({})


def slot(name: str, choices: str, *, needed: bool = False) -> Slot:
    """A slot whose choices are words."""
    return Slot(name, tuple(choices.split()), needed)


Choices = dict[str, str | None]  # what a statement says in each slot; None: left out


def chosen(statement: Statement, context: Context, forms: tuple[Form, ...]) -> tuple[Form, Choices]:
    """The form of a statement, and its qualifiers by slot.

    Raises Unsupported for a qualifier, a number of operands or a target that the form does not have.
    """
    words = statement.opcode.split(".")
    fitting = [form for form in forms if words[: form.head.count(".") + 1] == form.head.split(".")]
    if not fitting:
        known = ", ".join(dict.fromkeys(form.head for form in forms))
        raise Unsupported(f"it is not run by tcemu.ptx; of {statement.name} it runs {known}")
    form = max(fitting, key=lambda form: len(form.head))
    found = _by_slot(words[form.head.count(".") + 1 :], form)
    if len(statement.operands) not in form.operands:
        wanted = " or ".join(map(str, form.operands))
        raise Unsupported(f"it has {len(statement.operands)} operands; wanted {wanted}. {form.section}")
    target = named_target(context.target)
    if int("".join(filter(str.isdigit, target))) < form.target:
        raise Unsupported(f"it needs sm_{form.target} or later; the target is {target}. {form.section}")
    return form, found


def _by_slot(qualifiers: list[str], form: Form) -> Choices:
    found: Choices = {place.name: None for place in form.slots}
    for qualifier in qualifiers:
        if qualifier in form.apart:
            raise Unsupported(f".{qualifier} is not run: {form.apart[qualifier]}. {form.section}")
        place = next((place for place in form.slots if qualifier in place.choices and found[place.name] is None), None)
        if place is None:
            known = ", ".join(f".{choice}" for place in form.slots for choice in place.choices)
            raise Unsupported(f".{qualifier} is not a qualifier of {form.head} that tcemu.ptx runs; it knows {known}. {form.section}")
        found[place.name] = qualifier
    missing = [place for place in form.slots if place.needed and found[place.name] is None]
    if missing:
        wanted = " or ".join(f".{choice}" for choice in missing[0].choices)
        raise Unsupported(f"it lacks {wanted}. {form.section}")
    return found


def constant(operand: Operand, what: str, section: str) -> int:
    """The value of an operand that must be a constant."""
    if not isinstance(operand, Integer):
        raise Unsupported(f"{what} must be an integer constant. {section}")
    return operand.value
