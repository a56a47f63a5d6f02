"""The instructions as functions on registers and memory; the common ones stand at the root of tcemu."""

from tcemu.engine.instructions import tcgen05 as tcgen05
from tcemu.engine.instructions.tcgen05_block import Tcgen05Block as Tcgen05Block
from tcemu.engine.instructions.warpgroup import Warpgroup as Warpgroup
from tcemu.engine.instructions.wgmma import uniform_descriptor as uniform_descriptor
