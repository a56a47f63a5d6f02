"""Records, that is dataclasses and named tuples, as plain values of JSON and back, by the annotations of their fields."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tcemu.base.saved_files import DamagedFile, check_members

INFINITE = ("nan", "+inf", "-inf")  # numbers that JSON lacks, as `tcemu.base.results.to_json` writes them


class Codec(NamedTuple):
    """A way to save the values of one annotation."""

    write: Callable[[Any], Any]  # to plain values
    read: Callable[[Any], Any]  # from plain values, which are not trusted


Codecs = Mapping[Any, Codec]  # by annotation


def to_plain(value: Any, codecs: Codecs | None = None) -> Any:
    """Convert a record to plain values: an object of its fields, tuples as lists.

    Args:
        value: A record, or a list, tuple or mapping with some.
        codecs: Ways to save the fields of some annotations.
    """
    if is_dataclass(value) or hasattr(value, "_fields"):
        types, written = field_types(type(value)), codecs or {}
        values = {name: getattr(value, name) for name in types}
        return {name: written[types[name]].write(x) if types[name] in written else to_plain(x, codecs) for name, x in values.items()}
    if isinstance(value, Mapping):
        return {name: to_plain(part, codecs) for name, part in value.items()}
    return [to_plain(part, codecs) for part in value] if isinstance(value, list | tuple) else value


@cache
def field_types(kind: type) -> dict[str, Any]:
    """Return the annotation of each field.

    Args:
        kind: A type of records.
    """
    hints = get_type_hints(kind)
    return {name: hints[name] for name in getattr(kind, "_fields", None) or [field.name for field in fields(kind)]}


def from_plain(name: str, kind: Any, data: Any, codecs: Codecs | None = None) -> Any:
    """Convert the plain values of `to_plain`. A file is not trusted: other members and types are rejected, and numbers are not converted.

    Args:
        name: Name of the value in messages.
        kind: Its type: a record, int, float, str, bool, a Literal, a list, tuple or mapping of such types, a union of them, or Any.
        data: The plain values.
        codecs: Ways to save the fields of some annotations.

    Raises:
        DamagedFile: They are no value of this type.
    """
    origin, parts = _origin(kind), get_args(kind)
    read = lambda part, hint, value: from_plain(f"{name}{part}", hint, value, codecs)
    if codecs and kind in codecs:
        return codecs[kind].read(data)
    if origin is Any or (origin is Literal and data in parts):
        return data
    if origin in (Union, UnionType):
        members = [part for part in parts if part is not NoneType]
        if data is None and NoneType in parts:
            return None
        return read("", next((part for part in members if _is_like(part, data)), members[0]), data)
    if not _is_like(kind, data):
        words = {list: "a list", tuple: "a list", Literal: f"one of {', '.join(map(str, parts))}"}
        raise DamagedFile(f"{name}: got {repr(data)[:80]}; expected {words.get(origin) or getattr(origin, '__name__', origin)}")
    if origin is tuple and parts and parts[-1] is not ...:
        if len(parts) != len(data):
            raise DamagedFile(f"{name}: got {len(data)} values; expected {len(parts)}")
        return tuple(read("", part, value) for part, value in zip(parts, data, strict=True))
    if origin in (list, tuple):
        return origin(read("", parts[0] if parts else Any, value) for value in data)
    if not isinstance(data, dict):
        return float(data) if origin is float else data
    if origin in (dict, Mapping):
        return {key: read(f".{key}", parts[1] if parts else Any, value) for key, value in data.items()}
    types = field_types(kind)
    members = check_members(name, data, types)
    return kind(**{field: read(f".{field}", hint, members[field]) for field, hint in types.items()})


def _origin(kind: Any) -> Any:
    return get_origin(kind) or kind


def _is_like(kind: Any, data: Any) -> bool:
    """Return whether plain values have the outer form of a type's."""
    origin = _origin(kind)
    if origin in (list, tuple):
        return type(data) is list
    if origin in (int, float, str, bool):
        return type(data) is origin or (origin is float and data in INFINITE)
    return origin is not Literal and isinstance(data, dict)
