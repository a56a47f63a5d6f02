"""Elements divided by scales or multiplied by them, and rounded, on a CPU: the call of the kernel in `elementwise_kernel`."""

import jax
from jax import Array

from tcemu.backends.elementwise_request import ElementwiseRequest
from tcemu.backends.llvm import machine_code, xla_call
from tcemu.backends.llvm.xla_call import Kernel


def unavailable_reason(shape: tuple[int, ...]) -> str:
    """Returns the reason why the kernel cannot run here; "" if it can. Any shape will do."""
    return xla_call.missing()


def run(request: ElementwiseRequest, result: jax.ShapeDtypeStruct, codes: Array, *scales: Array) -> Array:
    """Computes a request by one call."""
    return xla_call.call(build_kernel(request), result, codes, *scales)[0]


def build_kernel(request: ElementwiseRequest, target: machine_code.Target | None = None) -> Kernel:
    """Returns the kernel of a request. target: the CPU; None: this machine's."""
    from tcemu.backends.llvm.elementwise_kernel import kernel_text  # it needs llvmlite

    return Kernel("elements", kernel_text("elements", request), target)
