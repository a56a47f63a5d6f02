"""PTX files run without a GPU, bit for bit: `parse` reads one, `run` launches a kernel. What is wrong with a text is a `PtxError`."""

from tcemu.errors import PtxError as PtxError
from tcemu.ptx.module import Function as Function
from tcemu.ptx.module import Module as Module
from tcemu.ptx.module import Statement as Statement
from tcemu.ptx.module import Variable as Variable
from tcemu.ptx.parser import parse as parse
from tcemu.ptx.run import run as run
from tcemu.ptx.tensor_maps import TensorMap as TensorMap

__all__ = ["Function", "Module", "PtxError", "Statement", "TensorMap", "Variable", "parse", "run"]
