"""The table of tensor-core and asynchronous instructions by the first part of their opcodes."""

from tcemu.kernels.ptx.instruction_interface import Prepare
from tcemu.kernels.ptx.tensor import (
    async_stores,
    launch_control,
    mbarriers,
    tcgen05_statements,
    tensor_copies,
    tensor_map_edits,
    warp_matrices,
    warpgroup_products,
)

MODULES = (
    warp_matrices,
    warpgroup_products,
    tensor_copies,
    async_stores,
    mbarriers,
    launch_control,
    tcgen05_statements,
    tensor_map_edits,
)
PREPARE: dict[str, Prepare] = {name: prepare for module in MODULES for name, prepare in module.PREPARE.items()}
