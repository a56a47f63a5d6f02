"""PyTorch: products of tensors by a recipe, modules whose products are replaced, and a list of all products of a run (extra `torch`).

A thin face over `tcemu.matmul` and recipes: torch tensors go in and come out, by DLPack, and the bits are JAX's.
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError("tcemu.torch needs PyTorch, which is not installed here: pip install 'tcemu[torch]'", name="torch") from error

from tcemu.torch.compare import compare as compare
from tcemu.torch.emulate import Emulation as Emulation
from tcemu.torch.emulate import emulate as emulate
from tcemu.torch.measured import as_measured as as_measured
from tcemu.torch.products import linear as linear
from tcemu.torch.products import matmul as matmul
from tcemu.torch.scaled import scaled_mm as scaled_mm
from tcemu.torch.watching import watch as watch
