"""Fuzzing: compare two implementations of an instruction on generated operands, and infer the arithmetic of a black box."""

from tcemu.uses.fuzz.case_generator import generate as generate
from tcemu.uses.fuzz.case_kinds import KINDS as KINDS
from tcemu.uses.fuzz.coverage import Coverage as Coverage
from tcemu.uses.fuzz.differential_run import FuzzRun as FuzzRun
from tcemu.uses.fuzz.differential_run import find_mismatches as find_mismatches
from tcemu.uses.fuzz.implementations import Implementation as Implementation
from tcemu.uses.fuzz.implementations import emulator as emulator
from tcemu.uses.fuzz.implementations import get_implementation as get_implementation
from tcemu.uses.fuzz.model_inference import InferredModel as InferredModel
from tcemu.uses.fuzz.model_inference import infer_model as infer_model
