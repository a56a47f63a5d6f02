"""JSON values with one place changed, for tests that read damaged files."""

import copy
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


def json_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value within a JSON value: keys and indices from the outside in."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from json_paths(inner, (*path, key))


def replace_at(plain: Any, path: Path, replacement: Any) -> Any:
    """Return a copy of a JSON value with the value at a path replaced."""
    changed = copy.deepcopy(plain)
    *above, last = path
    place = changed
    for key in above:
        place = place[key]
    place[last] = replacement
    return changed
