"""Fuzzing: compare two implementations of an instruction on generated operands, and infer the arithmetic of a black box."""

from tcemu.fuzz.case_generator import KINDS as KINDS
from tcemu.fuzz.case_generator import generate as generate
from tcemu.fuzz.coverage import Coverage as Coverage
from tcemu.fuzz.differential_run import FuzzRun as FuzzRun
from tcemu.fuzz.differential_run import find_mismatches as find_mismatches
from tcemu.fuzz.implementations import Implementation as Implementation
from tcemu.fuzz.implementations import emulator as emulator
from tcemu.fuzz.implementations import get_implementation as get_implementation
from tcemu.fuzz.model_inference import InferredModel as InferredModel
from tcemu.fuzz.model_inference import infer_model as infer_model
