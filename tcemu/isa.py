"""PTX's tensor-core instructions: their fields and spelling, and the targets that have them."""

from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, instructions, targets
from tcemu.engine.isa.targets import gpus

__all__ = ["Instruction", "check", "gpus", "instructions", "parse", "targets"]
