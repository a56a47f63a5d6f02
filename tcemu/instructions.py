"""The instructions as functions on registers and memory; the common ones stand at the root of tcemu."""

from typing import TYPE_CHECKING

from tcemu.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from tcemu.engine.instructions.tcgen05_block import Tcgen05Block as Tcgen05Block
    from tcemu.engine.instructions.warpgroup import Warpgroup as Warpgroup
    from tcemu.engine.instructions.wgmma import uniform_descriptor as uniform_descriptor

PUBLIC_NAMES = (
    ("tcemu.engine.instructions.tcgen05_block", "Tcgen05Block"),
    ("tcemu.engine.instructions.warpgroup", "Warpgroup"),
    ("tcemu.engine.instructions.wgmma", "uniform_descriptor"),
)

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC_NAMES)
