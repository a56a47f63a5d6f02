"""JAX functions as XLA compiles them for a GPU, run bit for bit without it.

`emulate(fn, gpu="H200")` compiles with JAX's CUDA plugin, which needs no GPU, and runs the kernels as PTX. `read` takes XLA's dump of a
run on a GPU.
"""

from tcemu.kernels.xla.compilation import Emulated as Emulated
from tcemu.kernels.xla.compilation import compile as compile
from tcemu.kernels.xla.compilation import device_description as device_description
from tcemu.kernels.xla.compilation import emulate as emulate
from tcemu.kernels.xla.xla_programs import Step as Step
from tcemu.kernels.xla.xla_programs import StepReport as StepReport
from tcemu.kernels.xla.xla_programs import XlaProgram as XlaProgram
from tcemu.kernels.xla.xla_programs import read as read
