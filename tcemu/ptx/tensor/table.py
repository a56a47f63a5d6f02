"""The instructions of this folder, by the first part of their opcodes."""

from tcemu.ptx.context import Prepare
from tcemu.ptx.tensor import barriers, control, copies, movement, products, wgmma

FAMILIES = (products.PREPARE, movement.PREPARE, wgmma.PREPARE, copies.PREPARE, barriers.PREPARE, control.PREPARE)
PREPARE: dict[str, Prepare] = {name: prepare for family in FAMILIES for name, prepare in family.items()}
