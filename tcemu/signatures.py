"""Signatures as `help()` shows them: a parameter a line where they are long, and annotations as they are written."""

import inspect
from collections.abc import Callable

WIDTH = 100  # characters of a signature that stands on one line


class Readable(inspect.Signature):
    """A signature whose text is for people."""

    def __str__(self) -> str:
        return self.format()

    def format(self, *, max_width: int | None = None, **_: object) -> str:
        """The text; a parameter a line if it is longer than max_width."""
        parts, star = [], False
        parameters = list(self.parameters.values())
        for number, parameter in enumerate(parameters):
            if parameter.kind is parameter.KEYWORD_ONLY and not star:
                parts.append("*")
            star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
            parts.append(_written(parameter))
            after = parameters[number + 1].kind if number + 1 < len(parameters) else None
            if parameter.kind is parameter.POSITIONAL_ONLY and after is not parameter.POSITIONAL_ONLY:
                parts.append("/")
        gives = "" if self.return_annotation is self.empty else f" -> {_named(self.return_annotation)}"
        line = f"({', '.join(parts)}){gives}"
        if len(line) <= (WIDTH if max_width is None else max_width):
            return line
        return "(" + "".join(f"\n    {part}," for part in parts) + f"\n){gives}"


def _written(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {_named(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    return f"{parameter.name}{kind}{' = ' if kind else '='}{_value(parameter.default)}"


def _named(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _value(default: object) -> str:
    return getattr(default, "__name__", None) or repr(default)


def readable(function: Callable) -> inspect.Signature:
    """The signature of a function, for its `__signature__`."""
    own = inspect.signature(function)
    return Readable(list(own.parameters.values()), return_annotation=own.return_annotation)
