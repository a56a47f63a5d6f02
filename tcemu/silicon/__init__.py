"""The same instruction on a real GPU: its PTX kernel, assembled by the driver and run on the words that the emulation takes."""

from tcemu.native.text import Kernel as Kernel
from tcemu.native.text import kernel as kernel
from tcemu.silicon.gpu import Gpu as Gpu
from tcemu.silicon.gpu import Runner as Runner
from tcemu.silicon.gpu import gpu as gpu
from tcemu.silicon.launch import run as run
