"""Facts of a recipe for the results that it computed: GPU, instruction, changes of the arithmetic, and evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import fields

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.provenance import Provenance, installed_versions
from tcemu.engine.architectures.lookup import find_row, resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.operations.products.recipe_kinds import AnyRecipe, Evidence, RecipeFacts, find_kind
from tcemu.operations.products.recipes import Recipe
from tcemu.operations.products.unit_choice import describe_unit

RECIPE_COLUMNS = ("target", "instruction", "model", "evidence")  # columns of result tables
WHAT_IF = "what-if"  # in the place of a level of evidence where the arithmetic is not the target's own
NO_FACTS: RecipeFacts = (None, None, None, None)


def recipe_facts(recipe: AnyRecipe | None, evidence: Evidence = None) -> RecipeFacts:
    """Return the values of RECIPE_COLUMNS for what computed a product.

    The model's column has the fields that the recipe changes in the target's own arithmetic, "" where it changes none. Evidence is a level
    of `tcemu.evidence`, or "what-if" for a changed arithmetic.

    Args:
        recipe: The recipe, of any kind; None for a function, of which nothing is known.
        evidence: Evidence as it was recorded, as `evidence_texts` returns it; None or without this arithmetic: as it is known now.
    """
    kind = find_kind(recipe)
    return NO_FACTS if kind is None else kind.facts(recipe, evidence)


def plain_facts(recipe: Recipe, evidence: Evidence = None) -> RecipeFacts:
    """Return `recipe_facts` of a `Recipe`."""
    return recipe.target, str(recipe.op), model_changes(recipe), evidence_level(recipe, evidence)


def evidence_level(recipe: Recipe, evidence: Evidence) -> str:
    """Return the level of the evidence of a recipe's arithmetic, as it was recorded or as it is known now."""
    recorded = (evidence or {}).get(arithmetic_name(recipe)) or _evidence_text(recipe)
    return recorded.partition(":")[0]


def unit_sentences(facts: Iterable[Sequence[str | None]]) -> list[str]:
    """Return the different sentences of `describe_unit` on what computed a result.

    Args:
        facts: Values of RECIPE_COLUMNS. They may come from a file, so an instruction that tcemu does not know has no sentence.
    """
    pairs = dict.fromkeys((instruction, target) for target, instruction, *_ in facts if target and instruction)
    sentences = []
    for instruction, target in pairs:
        with suppress(Unsupported):
            sentences.append(describe_unit(instruction, target))
    return [sentence for sentence in dict.fromkeys(sentences) if sentence]


def arithmetic_name(recipe: Recipe) -> str:
    """Return the name of a recipe's arithmetic: the instruction, the target, and what is changed."""
    changes = model_changes(recipe)
    return f"{recipe.op} on {recipe.target}" + (f", {changes}" if changes else "")


def model_changes(recipe: Recipe) -> str:
    """Return the fields that a recipe changes in its target's own arithmetic, as "fraction_bits=20, rounding=RN"; "" for none."""
    if recipe.model is None:
        return ""
    try:
        own = resolve_arithmetic(recipe.op, recipe.target).model
    except NotModelled:
        own = None
    names, model = (f.name for f in fields(Model)), recipe.model
    assert isinstance(model, Model)  # a recipe resolves words when it is made
    return ", ".join(f"{name}={getattr(model, name)}" for name in names if own is None or _fields_differ(name, model, own))


def _fields_differ(name: str, model: Model, other: Model) -> bool:
    mine, theirs = getattr(model, name), getattr(other, name)
    return type(mine) is not type(theirs) or mine != theirs


def _evidence_text(recipe: Recipe) -> str:
    if recipe.model is not None and model_changes(recipe):
        return f"{WHAT_IF}: not the target's own arithmetic"
    known = find_row(recipe.op, recipe.target).evidence
    return f"{known.level}: {known.source}"


def evidence_texts(recipes: Iterable[AnyRecipe | None]) -> dict[str, str]:
    """Return the evidence of each arithmetic by its name, as "silicon: one NVIDIA H200, ..."."""
    plain = (kind.plain(recipe) for recipe in recipes if (kind := find_kind(recipe)) is not None)
    return {arithmetic_name(recipe): _evidence_text(recipe) for recipe in plain if recipe is not None}


def make_provenance(recipes: Iterable[AnyRecipe | None], inputs: str = "") -> Provenance:
    """Return the provenance of a result that these recipes compute now."""
    return Provenance(versions=installed_versions(), evidence=evidence_texts(recipes), inputs=inputs)
