"""Kernels of the corpus, run by `tcemu.ptx.run`."""

from __future__ import annotations

import numpy as np

from tcemu.kernels.ptx.runtime.kernel_runner import run
from tcemu.kernels.ptx.simt.tensor_maps import TensorMap as Map

from .manifest import Kernel, TensorMap


def replay_kernel(kernel: Kernel, compiled: str, *, target: str = "sm_90a", **options) -> list[np.ndarray]:
    """Run the text compiled for sm_80 or sm_90a, by default with the recording GPU's arithmetic; return the buffers."""
    buffers = kernel.draw_buffers()
    pointers, args, places = iter(range(len(buffers))), [], []
    for argument in kernel.arguments:
        if isinstance(argument, TensorMap):
            places.append(argument.of)
            args.append(Map(buffers[argument.of], argument.kind, argument.sizes, argument.box, swizzle=argument.swizzle))
        elif isinstance(argument, np.generic):
            args.append(argument)
        else:
            places.append(next(pointers))
            args.append(buffers[places[-1]])
    launch = {"grid": kernel.grid, "block": kernel.block, "args": args, "shared_bytes": kernel.shared}
    made = run(kernel.text(compiled), entry=kernel.entry, target=target, **launch, **options)
    after = dict(zip(places, made, strict=True))
    return [np.asarray(after[i]) for i in range(len(buffers))]
