"""The same instruction on a real GPU: its PTX kernel, assembled by the driver and run on the words that the emulation takes."""

from tcemu.engine.backends.native.gpu_runner import Gpu as Gpu
from tcemu.engine.backends.native.gpu_runner import Runner as Runner
from tcemu.engine.backends.native.gpu_runner import gpu as gpu
from tcemu.engine.backends.native.native_statement import StatementKernel as StatementKernel
from tcemu.engine.backends.native.native_statement import statement_kernel as statement_kernel
from tcemu.uses.silicon.silicon_run import run as run
