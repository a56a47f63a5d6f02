"""Layouts: the positions of elements in the registers of a warp's lanes and in shared memory."""
