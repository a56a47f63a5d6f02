"""PTX files run without a GPU, bit for bit: `parse` reads one, `run` launches a kernel. What is wrong with a text is a `PtxError`.

`run(trace=Keep(...))` keeps registers and memory at a line; `compare` finds the first line at which two targets part.
"""

from tcemu.errors import PtxError as PtxError
from tcemu.ptx.comparing import Comparison as Comparison
from tcemu.ptx.comparing import Parting as Parting
from tcemu.ptx.comparing import compare as compare
from tcemu.ptx.faults import Misaligned as Misaligned
from tcemu.ptx.faults import OutOfBounds as OutOfBounds
from tcemu.ptx.faults import Trapped as Trapped
from tcemu.ptx.module import Function as Function
from tcemu.ptx.module import Module as Module
from tcemu.ptx.module import Statement as Statement
from tcemu.ptx.module import Variable as Variable
from tcemu.ptx.parser import parse as parse
from tcemu.ptx.run import run as run
from tcemu.ptx.scheduler import StepLimit as StepLimit
from tcemu.ptx.tensor_maps import TensorMap as TensorMap
from tcemu.ptx.tracing import Arrays as Arrays
from tcemu.ptx.tracing import Keep as Keep
from tcemu.ptx.tracing import Visit as Visit

__all__ = [
    "Arrays", "Comparison", "Function", "Keep", "Misaligned", "Module", "OutOfBounds", "Parting", "PtxError", "Statement", "StepLimit",
    "TensorMap", "Trapped", "Variable", "Visit", "compare", "parse", "run",
]  # fmt: skip
