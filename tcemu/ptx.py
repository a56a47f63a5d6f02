"""PTX kernels run without a GPU, bit for bit.

`parse` reads PTX, `compile` makes it from CUDA C++, `run` launches a kernel, `compare` finds where two targets diverge. `record_launches`
keeps launches in files, and `replay_launches` repeats them on a GPU.

`run(trace=Tracepoint(...))` records registers and memory at a line. Text that is not PTX raises `PtxError`.
"""

from tcemu.base.errors import PtxError
from tcemu.kernels.ptx.cuda_source import compile
from tcemu.kernels.ptx.runtime.kernel_arguments import BufferPointer, PointerTable, Struct
from tcemu.kernels.ptx.runtime.kernel_runner import run
from tcemu.kernels.ptx.runtime.launch_records import LaunchRecorder, RecordedLaunch, read_launch, record_launches
from tcemu.kernels.ptx.runtime.launch_replay import LaunchReplays, ReplayedLaunch, replay_launches
from tcemu.kernels.ptx.runtime.scheduler import StepLimit
from tcemu.kernels.ptx.runtime.target_comparison import Comparison, Divergence, ElementDifference, compare
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, KernelOutputs, Snapshot, Tracepoint, WordDifferences
from tcemu.kernels.ptx.simt.faults import Misaligned, OutOfBounds, Trapped
from tcemu.kernels.ptx.simt.tensor_maps import TensorMap
from tcemu.kernels.ptx.text.module import Function, Module, Statement, Variable
from tcemu.kernels.ptx.text.parser import parse

__all__ = [
    "BufferPointer", "Comparison", "Divergence", "ElementDifference", "ExecutedStatement", "Function", "KernelOutputs", "LaunchRecorder",
    "LaunchReplays", "Misaligned", "Module", "OutOfBounds", "PointerTable", "PtxError", "RecordedLaunch", "ReplayedLaunch", "Snapshot",
    "Statement", "StepLimit", "Struct", "TensorMap", "Tracepoint", "Trapped", "Variable", "WordDifferences", "compare", "compile",
    "parse", "read_launch", "record_launches", "replay_launches", "run",
]  # fmt: skip
