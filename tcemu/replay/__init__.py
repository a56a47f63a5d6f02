"""How a library multiplies, found by probes and computed again bit for bit on any machine.

`fingerprint` asks a black box and returns a `tcemu.KernelRecipe`, or says why there is none; `tcemu.matmul` computes by it. `dumps` and
`loads` write and read recipes as JSON. `parting` says where two recipes part.
`recipe` has the recipes that were measured on a GPU, `profiles` says which those are; `policy` has `tcemu.emulate` take them by shape.
"""

from tcemu.linalg.kernel_json import dumps as dumps
from tcemu.linalg.kernel_json import loads as loads
from tcemu.linalg.kernel_recipes import Conditions as Conditions
from tcemu.linalg.kernel_recipes import Epilogue as Epilogue
from tcemu.linalg.kernel_recipes import Lanes as Lanes
from tcemu.linalg.kernel_recipes import Merge as Merge
from tcemu.linalg.kernel_recipes import Slices as Slices
from tcemu.linalg.kernel_recipes import Steps as Steps
from tcemu.replay.findings import Finding as Finding
from tcemu.replay.findings import Fingerprint as Fingerprint
from tcemu.replay.fingerprint import fingerprint as fingerprint
from tcemu.replay.forms import Form as Form
from tcemu.replay.heuristic import Configuration as Configuration
from tcemu.replay.heuristic import Heuristic as Heuristic
from tcemu.replay.heuristic import heuristic as heuristic
from tcemu.replay.parting import Parting as Parting
from tcemu.replay.parting import parting as parting
from tcemu.replay.policy import policy as policy
from tcemu.replay.profiles import Profile as Profile
from tcemu.replay.profiles import profiles as profiles
from tcemu.replay.profiles import recipe as recipe
