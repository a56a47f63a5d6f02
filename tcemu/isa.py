"""PTX's tensor-core instructions: their fields and spelling, and the targets that have them."""

from tcemu.engine.isa.families import Instruction as Instruction
from tcemu.engine.isa.grammar import parse as parse
from tcemu.engine.isa.legality import check as check
from tcemu.engine.isa.legality import instructions as instructions
from tcemu.engine.isa.legality import targets as targets
from tcemu.engine.isa.targets import gpus as gpus

__all__ = ["Instruction", "check", "gpus", "instructions", "parse", "targets"]
