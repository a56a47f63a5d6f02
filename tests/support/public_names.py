"""Everything public that is called, so that a test finds what is new."""

import inspect
import types
from collections.abc import Callable

import tcemu


def public_objects() -> dict[str, Callable]:
    """Every public function, method and class by its name, as a user writes it; what a module borrows counts where it is from."""
    values = {name: getattr(tcemu, name) for name in tcemu.__all__}
    for name, face in [(n, v) for n, v in values.items() if isinstance(v, types.ModuleType)]:
        folder = face.__name__ == f"tcemu.{name}"  # a file that lists names of others
        members = {n: getattr(face, n) for n in {*vars(face), *getattr(face, "__all__", ())}}  # also those that nobody has used yet
        values |= {f"{name}.{n}": v for n, v in members.items() if folder or getattr(v, "__module__", "") == face.__name__}
    own = {name: v for name, v in values.items() if callable(v) and not name.split(".")[-1].startswith("_") and not is_error(v)}
    for name, value in tuple(own.items()):
        if isinstance(value, type):
            own |= {f"{name}.{m}": f for m, f in vars(value).items() if inspect.isfunction(f) and not m.startswith("_")}
    first = {id(value): name for name, value in reversed(own.items())}
    return {name: own[name] for name in first.values()}


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)
