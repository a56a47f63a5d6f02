"""Layouts: the positions of elements in the registers of a warp's lanes and in shared memory."""

from tcemu.engine.layouts.shared_memory import SharedLayout, descriptor, from_shared, to_shared

__all__ = ["SharedLayout", "descriptor", "from_shared", "to_shared"]
