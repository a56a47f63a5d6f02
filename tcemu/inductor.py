"""Models that `torch.compile` has compiled for a GPU, run without it: their Triton kernels as PTX, from inductor's cache folder.

`read` lists the graphs of a folder, with what is a kernel and what a call of a library. `tcemu.torch.emulate(model, gpu=..., compiled=...)`
runs and trains a model by them.
"""

from tcemu.kernels.triton.inductor_graphs import CompiledGraph as CompiledGraph
from tcemu.kernels.triton.inductor_graphs import CompiledGraphs as CompiledGraphs
from tcemu.kernels.triton.inductor_graphs import GraphKernel as GraphKernel
from tcemu.kernels.triton.inductor_graphs import GraphPart as GraphPart
from tcemu.kernels.triton.inductor_graphs import TensorType as TensorType
from tcemu.kernels.triton.inductor_graphs import TrainingGraphs as TrainingGraphs
from tcemu.kernels.triton.inductor_graphs import read as read
