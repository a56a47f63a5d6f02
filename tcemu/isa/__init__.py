"""PTX's tensor-core instructions: their fields and spelling, and the targets that have them."""

from tcemu.isa.families import Instruction as Instruction
from tcemu.isa.grammar import parse as parse
from tcemu.isa.legality import check as check
from tcemu.isa.legality import instructions as instructions
from tcemu.isa.legality import targets as targets
from tcemu.isa.targets import gpus as gpus

__all__ = ["Instruction", "check", "gpus", "instructions", "parse", "targets"]
