"""The order in which a library's kernel adds, found by probes and computed again bit for bit on any machine.

`fingerprint` probes a black box and returns a `KernelRecipe`, or the reason why there is none. `tcemu.matmul` computes by a recipe. `dumps`
and `loads` write and read recipes as JSON. `find_divergence` finds the first sum in which two recipes differ. `get_kernel_recipe` returns
recipes that were measured on a GPU, `list_profiles` lists the measurements, and `library_policy` applies them in `tcemu.emulate` by shape.
Both predict the order of other shapes on request, with its probability. `find_order_changes` finds at which numbers of rows the order of a
layer changes. `attribute` says which orders, formats of partial sums and GPUs give a reported rate of differing outputs.
"""

from tcemu.operations.products.library.kernel_json import dumps as dumps
from tcemu.operations.products.library.kernel_json import loads as loads
from tcemu.operations.products.library.kernel_recipe import Conditions as Conditions
from tcemu.operations.products.library.kernel_recipe import Epilogue as Epilogue
from tcemu.operations.products.library.kernel_recipe import KernelRecipe as KernelRecipe
from tcemu.operations.products.library.kernel_recipe import Lanes as Lanes
from tcemu.operations.products.library.kernel_recipe import Merge as Merge
from tcemu.operations.products.library.kernel_recipe import Slices as Slices
from tcemu.operations.products.library.kernel_recipe import Steps as Steps
from tcemu.uses.replay.attribution import AttributedPair as AttributedPair
from tcemu.uses.replay.attribution import Attribution as Attribution
from tcemu.uses.replay.attribution import attribute as attribute
from tcemu.uses.replay.black_box import ProductForm as ProductForm
from tcemu.uses.replay.cublaslt_heuristic import AlgorithmConfiguration as AlgorithmConfiguration
from tcemu.uses.replay.cublaslt_heuristic import HeuristicProposals as HeuristicProposals
from tcemu.uses.replay.cublaslt_heuristic import query_heuristic as query_heuristic
from tcemu.uses.replay.fingerprinting import Fingerprint as Fingerprint
from tcemu.uses.replay.fingerprinting import OrderFinding as OrderFinding
from tcemu.uses.replay.fingerprinting import fingerprint as fingerprint
from tcemu.uses.replay.kernel_profiles import Profile as Profile
from tcemu.uses.replay.kernel_profiles import get_kernel_recipe as get_kernel_recipe
from tcemu.uses.replay.kernel_profiles import library_policy as library_policy
from tcemu.uses.replay.kernel_profiles import list_profiles as list_profiles
from tcemu.uses.replay.order_changes import OrderChanges as OrderChanges
from tcemu.uses.replay.order_changes import RowRange as RowRange
from tcemu.uses.replay.order_changes import find_order_changes as find_order_changes
from tcemu.uses.replay.recipe_divergence import RecipeDivergence as RecipeDivergence
from tcemu.uses.replay.recipe_divergence import find_divergence as find_divergence
