"""Fuzzing: operands that reach the corners, any two sides compared, mismatches made small, and the arithmetic of a black box found out."""

from tcemu.fuzz.counts import Coverage as Coverage
from tcemu.fuzz.generators import generate as generate
from tcemu.fuzz.inference.findings import Inferred as Inferred
from tcemu.fuzz.inference.infer import infer as infer
from tcemu.fuzz.kinds import KINDS as KINDS
from tcemu.fuzz.outcome import Run as Run
from tcemu.fuzz.runs import run as run
from tcemu.fuzz.sides import Side as Side
from tcemu.fuzz.sides import emulated as emulated
from tcemu.fuzz.sides import side as side
