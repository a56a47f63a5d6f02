"""Triton: kernels run without a GPU, as the user wrote them (extra `triton`).

`emulated("H100")` compiles every launch by Triton's own compiler for that GPU and runs its PTX by `tcemu.ptx`, bit for bit. `interpreted`
runs Triton's interpreter with `tl.dot` in the bits of the GPU's tensor cores, which is faster and less exact. `python -m tcemu.triton
--target H100 SCRIPT` runs a whole program.
"""

try:
    import triton as _triton
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ImportError(
        "tcemu.triton needs Triton, which is not installed here: pip install '.[triton]' in a clone of tcemu", name="triton"
    ) from error

from tcemu.kernels.triton.comparison import LaunchPair as LaunchPair
from tcemu.kernels.triton.comparison import OutputDifference as OutputDifference
from tcemu.kernels.triton.comparison import ProgramComparison as ProgramComparison
from tcemu.kernels.triton.comparison import compare as compare
from tcemu.kernels.triton.emulation import emulated as emulated
from tcemu.kernels.triton.interpretation import interpreted as interpreted
from tcemu.kernels.triton.launches import Launch as Launch
from tcemu.kernels.triton.launches import LaunchReport as LaunchReport
from tcemu.kernels.triton.tensors import as_tensor as as_tensor
