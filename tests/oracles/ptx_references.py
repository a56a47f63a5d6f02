"""What the kernels of ptx_kernels/ should compute, by NumPy in float64: a corpus that computes something else would prove little.

`expected(kernel)` gives for some of its buffers the values and how far the GPU's may be from them: 0 for bits.
"""

import numpy as np
from ptx_kernels.manifest import Kernel

from . import ptx_references_products, ptx_references_threads
from .ptx_expected import REFERENCES, ExpectedBuffer, values

__all__ = ["REFERENCES", "expected_buffers", "ptx_references_products", "ptx_references_threads", "values"]


def expected_buffers(kernel: Kernel) -> dict[int, ExpectedBuffer]:
    """By the number of the buffer."""
    buffers = [values(operand.kind, codes) for operand, codes in zip(kernel.operands, kernel.draw_buffers(), strict=True)]
    numbers = [argument.item() for argument in kernel.arguments if isinstance(argument, np.generic)]
    with np.errstate(all="ignore"):
        return REFERENCES[kernel.entry](buffers, numbers)
