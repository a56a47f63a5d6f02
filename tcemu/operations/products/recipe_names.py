"""Names of recipes as users write them: "bf16x6 on H100" is a name of a row and a target."""

from collections.abc import Collection
from difflib import get_close_matches

from tcemu.engine.isa.grammar import shorten_text


def split_target(name: str, target: str | None) -> tuple[str, str | None]:
    """Split "fp8 on H100" into the name before the target and the target, which may also be given apart.

    Raises:
        TypeError: The name is no text.
        ValueError: The target is missing after " on ", or there are two targets.
    """
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name such as 'bf16', got {type(name).__name__}")
    named, separator, on = name.partition(" on ")
    if separator and not on.strip():
        raise ValueError(f"recipe {name!r}: the target is missing, as in {named.strip() + ' on H100'!r}")
    if on and target is not None:
        raise ValueError(f"recipe {name!r}: the name contains a target, and target={target!r} is another; give one")
    return named, on or target


def normal_name(name: str) -> str:
    """Return a name as tables of recipes have it: in lower case, with underscores for hyphens and blanks."""
    return "_".join(name.lower().replace("-", "_").split())


def unknown_recipe(kind: str, name: str, key: str, rows: Collection[str], example: str) -> ValueError:
    """Return the error for a name that no row has, with the nearest ones."""
    near = get_close_matches(key, rows, n=2, cutoff=0.6)
    hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ValueError(f"{kind} {shorten_text(name)!r}{hint}; expected one of {', '.join(rows)}, also with a target, as {example!r}")
