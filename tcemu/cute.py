"""CuTe DSL: compiled functions run without a GPU, as they are.

`run(compiled, a, b, c, target="B200")` calls what `cute.compile` returned on arrays of the host. Its own host code makes the grid and the
tensor maps, and the kernels run by `tcemu.ptx`, bit for bit.
"""

from tcemu.kernels.cute.emulation import CuteLaunch, CuteLaunches
from tcemu.kernels.cute.emulation import run_compiled as run

__all__ = ["CuteLaunch", "CuteLaunches", "run"]
