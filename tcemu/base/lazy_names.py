"""Public names of a package that are imported at their first use, so that `import tcemu` and `tcemu --help` need no JAX."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import isfunction
from typing import Any


def lazy_names(package: str, homes: Sequence[tuple[str, str]]) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Makes the `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Name of the package.
        homes: Pairs of a module and the public names that it defines, with spaces between. A name that it does not define is its submodule.

    Returns:
        The three values, for `__all__, __getattr__, __dir__ = lazy_names(__name__, HOMES)`.
    """
    module_by_name = {name: module for module, names in homes for name in names.split()}

    def get_name(name: str) -> Any:
        module = module_by_name.get(name)
        if module is None:
            if not name.startswith("__"):
                try:
                    return import_module(f"{package}.{name}")
                except ModuleNotFoundError as error:
                    if error.name != f"{package}.{name}":
                        raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}; dir({package}) has the public names")
        value = import_module(f"{module}.{name}") if module == package else getattr(import_module(module), name, None)
        if value is None:
            value = import_module(f"{module}.{name}")
        if isfunction(value):
            from tcemu.base.text import readable_signature

            value.__signature__ = readable_signature(value)  # type: ignore[attr-defined]
        setattr(sys.modules[package], name, value)
        return value

    names = list(module_by_name)
    return names, get_name, lambda: [*names, "__version__", "__doc__", "__file__", "__name__", "__path__"]
