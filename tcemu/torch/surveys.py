"""A run of a model in which nothing is computed, and the list of its products: those that are decided on, and those that nobody takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tcemu.emulation.report import Entry
from tcemu.torch.watching import Seen, Watcher, described


class Survey:
    """The products of one run."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.entries = watcher, []
        self._within = False
        self._added = 0

    def add(self, entry: Entry) -> None:
        """A product that was decided on; one that ran before runs once more."""
        self._added += 1
        for at, before in enumerate(self.entries):
            if before.name == entry.name and before.product is not None and entry.product is not None:
                runs = before.product.repeats or 1
                if replace(before.product, repeats=1) == replace(entry.product, repeats=1):
                    self.entries[at] = replace(before, product=replace(before.product, repeats=runs + 1))
                    return
        self.entries.append(entry)

    def listing(self, mode: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A function of torch in a mode of a module. Products in it on which nobody decided are listed as left."""
        if self._within or mode.opening:
            return mode.call(func, args, kwargs)
        self._within, added, first = True, self._added, len(self.watcher.seen)
        try:
            return mode.call(func, args, kwargs)
        finally:
            self._within = False
            if added == self._added:
                self._leave(mode.path, func, self.watcher.seen[first:])
            del self.watcher.seen[first:]

    def _leave(self, path: str, func: Callable, hidden: list[Seen]) -> None:
        for one in hidden:
            name = f"{path}/{func.__name__}" if path else func.__name__
            what = f"{one.name}, {one.why}" if one.why else one.name
            operands = " · ".join(described(x) for x in one.operands)
            self.entries.append(Entry(name, None, False, f"{what} of {operands}; emulate takes no such product"))
