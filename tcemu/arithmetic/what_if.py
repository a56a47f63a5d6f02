"""A model with some of its fields changed by words: "fraction_bits=24,terms=8"."""

from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_type_hints

from tcemu.arithmetic.model import MODES, Model
from tcemu.formats import FORMATS, Format, Rounding

CHAIN_OF_AN_INSTRUCTION = "k"  # the one word that a number of products may be


class Field:
    """One field of `Model` as text: the values that its words stand for, and whether it may be any whole number."""

    def __init__(self, name: str, kind: Any) -> None:
        kinds = get_args(kind) or (kind,)
        self.name, self.is_number = name, int in kinds
        self.is_format = Format in kinds
        self.values: dict[str, Any] = {}
        if self.is_format:
            self.values |= FORMATS
        if kind == Rounding:
            self.values |= {word: word for word in MODES}
        elif str in kinds:
            self.values[CHAIN_OF_AN_INSTRUCTION] = CHAIN_OF_AN_INSTRUCTION
        if bool in kinds:
            self.values |= {"True": True, "False": False}
        if type(None) in kinds:
            self.values["None"] = None

    def value(self, word: str) -> Any:
        """What a word means in this field. Raises ValueError."""
        if word in self.values:
            return self.values[word]
        if self.is_number and word.removeprefix("-").isdecimal():
            return int(word)
        raise ValueError(f"{self.name}: got {word!r}; wanted {self.wanted}")

    @property
    def wanted(self) -> str:
        """What may stand in this field, for people."""
        allowed = [*(["a whole number"] if self.is_number else []), *self.values]
        return allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"


@cache
def known_fields() -> dict[str, Field]:
    """Every field of `Model` by its name, the formats last."""
    kinds = get_type_hints(Model)
    known = [Field(field.name, kinds[field.name]) for field in fields(Model)]
    return {field.name: field for field in sorted(known, key=lambda field: field.is_format)}


def what_if(model: Model, text: str) -> Model:
    """The model with the fields that stand in `text` changed.

    text: FIELD=VALUE[,FIELD=VALUE...], such as "fraction_bits=24,terms=8", "from_zero=False" or "multiplicand=f16". The fields are those of
    `Model`, the values are as Python writes them, formats by their names.
    Raises ValueError for an unknown field, for a value that the field does not take, and for a model that cannot be.
    """
    known, changes = known_fields(), {}
    for part in text.split(","):
        name, _, word = part.partition("=")
        if name not in known or not word:
            raise ValueError(f"{part!r} is no FIELD=VALUE; the fields are {', '.join(known)}")
        changes[name] = known[name].value(word)
    return model.replace(**changes)
