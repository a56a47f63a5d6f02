"""Elements scaled and rounded, and max magnitudes, on a CPU: the calls of the kernels in `elementwise_kernel`."""

import jax
from jax import Array

from tcemu.engine.backends.elementwise_request import ElementwiseRequest, MagnitudeRequest
from tcemu.engine.backends.llvm import machine_code, xla_call
from tcemu.engine.backends.llvm.xla_call import Kernel


def unavailable_reason(shape: tuple[int, ...]) -> str:
    """Returns the reason why the kernel cannot run here; "" if it can. Any shape will do."""
    return xla_call.missing()


def run(request: ElementwiseRequest | MagnitudeRequest, result: jax.ShapeDtypeStruct, codes: Array, *scales: Array) -> Array:
    return xla_call.call(build_kernel(request), result, codes, *scales)[0]


def build_kernel(request: ElementwiseRequest | MagnitudeRequest, target: machine_code.Target | None = None) -> Kernel:
    """Returns the kernel of a request. target: the CPU; None: this machine's."""
    from tcemu.engine.backends.llvm.elementwise_kernel import elements_text, magnitudes_text  # they need llvmlite

    if isinstance(request, MagnitudeRequest):
        return Kernel("magnitudes", magnitudes_text("magnitudes", request), target)
    return Kernel("elements", elements_text("elements", request), target)
