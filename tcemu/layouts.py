"""Layouts: the positions of elements in the registers of a warp's lanes and in shared memory."""

from tcemu.engine.layouts.shared_memory import SharedLayout as SharedLayout
from tcemu.engine.layouts.shared_memory import descriptor as descriptor
from tcemu.engine.layouts.shared_memory import from_shared as from_shared
from tcemu.engine.layouts.shared_memory import to_shared as to_shared

__all__ = ["SharedLayout", "descriptor", "from_shared", "to_shared"]
