"""PyTorch: products of tensors by a recipe, modules whose products are replaced, and a list of all products of a run (extra `torch`).

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

from tcemu.torch.kernel_policy import measured_policy as measured_policy
from tcemu.torch.matrix_products import linear as linear
from tcemu.torch.matrix_products import matmul as matmul
from tcemu.torch.matrix_products import scaled_mm as scaled_mm
from tcemu.torch.module_comparison import compare as compare
from tcemu.torch.module_emulation import Emulation as Emulation
from tcemu.torch.module_emulation import emulate as emulate
from tcemu.torch.watching import watch as watch
