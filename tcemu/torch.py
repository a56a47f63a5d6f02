"""PyTorch: products by a recipe, modules whose products are replaced, models as a GPU computes them, and lists of products (extra `torch`).

A thin wrapper of `tcemu.matmul` and recipes: torch tensors go in and come out by DLPack, and the bits are those of JAX.
"""

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError(
        "tcemu.torch needs PyTorch, which is not installed here: pip install '.[torch]' in a clone of tcemu", name="torch"
    ) from error

from tcemu.faces.torch.gpu_emulation import GpuEmulation as GpuEmulation
from tcemu.faces.torch.kernel_policy import measured_policy as measured_policy
from tcemu.faces.torch.matrix_products import linear as linear
from tcemu.faces.torch.matrix_products import matmul as matmul
from tcemu.faces.torch.matrix_products import scaled_mm as scaled_mm
from tcemu.faces.torch.module_comparison import compare as compare
from tcemu.faces.torch.module_emulation import Emulation as Emulation
from tcemu.faces.torch.module_emulation import emulate as emulate
from tcemu.faces.torch.operation_report import OperationLine as OperationLine
from tcemu.faces.torch.operation_report import OperationReport as OperationReport
from tcemu.faces.torch.watching import watch as watch
