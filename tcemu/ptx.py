"""PTX kernels run without a GPU, bit for bit.

`parse` reads PTX, `compile` makes it from CUDA C++, `run` launches a kernel, `compare` finds where two targets diverge. `record_launches`
keeps launches in files, and `replay_launches` repeats them on a GPU.

`run(trace=Tracepoint(...))` records registers and memory at a line. Text that is not PTX raises `PtxError`.
"""

from tcemu.base.errors import PtxError as PtxError
from tcemu.kernels.ptx.cuda_source import compile as compile
from tcemu.kernels.ptx.runtime.kernel_arguments import BufferPointer as BufferPointer
from tcemu.kernels.ptx.runtime.kernel_arguments import PointerTable as PointerTable
from tcemu.kernels.ptx.runtime.kernel_arguments import Struct as Struct
from tcemu.kernels.ptx.runtime.kernel_runner import run as run
from tcemu.kernels.ptx.runtime.launch_records import LaunchRecorder as LaunchRecorder
from tcemu.kernels.ptx.runtime.launch_records import RecordedLaunch as RecordedLaunch
from tcemu.kernels.ptx.runtime.launch_records import read_launch as read_launch
from tcemu.kernels.ptx.runtime.launch_records import record_launches as record_launches
from tcemu.kernels.ptx.runtime.launch_replay import LaunchReplays as LaunchReplays
from tcemu.kernels.ptx.runtime.launch_replay import ReplayedLaunch as ReplayedLaunch
from tcemu.kernels.ptx.runtime.launch_replay import replay_launches as replay_launches
from tcemu.kernels.ptx.runtime.schedule_comparison import WordDifferences as WordDifferences
from tcemu.kernels.ptx.runtime.scheduler import StepLimit as StepLimit
from tcemu.kernels.ptx.runtime.target_comparison import Comparison as Comparison
from tcemu.kernels.ptx.runtime.target_comparison import Divergence as Divergence
from tcemu.kernels.ptx.runtime.target_comparison import ElementDifference as ElementDifference
from tcemu.kernels.ptx.runtime.target_comparison import compare as compare
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement as ExecutedStatement
from tcemu.kernels.ptx.runtime.tracing import KernelOutputs as KernelOutputs
from tcemu.kernels.ptx.runtime.tracing import Snapshot as Snapshot
from tcemu.kernels.ptx.runtime.tracing import Tracepoint as Tracepoint
from tcemu.kernels.ptx.simt.faults import Misaligned as Misaligned
from tcemu.kernels.ptx.simt.faults import OutOfBounds as OutOfBounds
from tcemu.kernels.ptx.simt.faults import Trapped as Trapped
from tcemu.kernels.ptx.simt.tensor_maps import TensorMap as TensorMap
from tcemu.kernels.ptx.text.module import Function as Function
from tcemu.kernels.ptx.text.module import Module as Module
from tcemu.kernels.ptx.text.module import Statement as Statement
from tcemu.kernels.ptx.text.module import Variable as Variable
from tcemu.kernels.ptx.text.parser import parse as parse

__all__ = [
    "BufferPointer",
    "Comparison",
    "Divergence",
    "ElementDifference",
    "ExecutedStatement",
    "Function",
    "KernelOutputs",
    "LaunchRecorder",
    "LaunchReplays",
    "Misaligned",
    "Module",
    "OutOfBounds",
    "PointerTable",
    "PtxError",
    "RecordedLaunch",
    "ReplayedLaunch",
    "Snapshot",
    "Statement",
    "StepLimit",
    "Struct",
    "TensorMap",
    "Tracepoint",
    "Trapped",
    "Variable",
    "WordDifferences",
    "compare",
    "compile",
    "parse",
    "read_launch",
    "record_launches",
    "replay_launches",
    "run",
]
