"""Backends: who computes an instruction or a product, on which device. All give the same bits."""

from typing import TYPE_CHECKING

from tcemu.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tcemu.engine.backends.dispatch import describe as describe

PUBLIC_NAMES = (("tcemu.engine.backends.dispatch", "describe"),)

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC_NAMES)
