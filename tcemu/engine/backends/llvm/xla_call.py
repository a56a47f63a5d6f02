"""A kernel in LLVM IR inside a JAX program on a CPU, called by XLA's typed FFI (`jax.ffi`).

XLA looks for a call's handler by its name when it compiles or loads a program, so a kernel is registered before: when JAX lowers the call.
The name is a hash of the kernel, the same in every process. A program that another process has stored brings its kernels along, which are
registered before it is loaded (`tcemu.base.stored_code`).
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from tcemu.base import stored_code as store
from tcemu.base.errors import KernelRefused
from tcemu.base.jax_internals import lowers_late_attributes
from tcemu.base.meshes import on_local_device
from tcemu.base.stored_code import HOST_CALL_PREFIX, note_host_call
from tcemu.base.xla_ffi import API_MAJOR, installed_version
from tcemu.engine.backends.llvm import machine_code
from tcemu.engine.backends.llvm.ffi_handler import handler_text

NAME_DIGITS = 16
MAX_NAMES = 4096  # kernels whose names are remembered
PROBE = """
define i64 @probe_tasks(ptr %dims) {
  %sizes = load ptr, ptr %dims
  %size = load i64, ptr %sizes
  ret i64 %size
}
define void @probe_task(i64 %task, ptr %buffers, ptr %dims) {
  %x = load ptr, ptr %buffers
  %second = getelementptr ptr, ptr %buffers, i64 1
  %y = load ptr, ptr %second
  %from = getelementptr i32, ptr %x, i64 %task
  %value = load i32, ptr %from
  %product = mul i32 %value, 3
  %to = getelementptr i32, ptr %y, i64 %task
  store i32 %product, ptr %to
  ret void
}
"""

Results = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


class Kernel(NamedTuple):
    """A kernel: two functions, NAME_tasks and NAME_task, as `tcemu.engine.backends.llvm.ffi_handler` calls them."""

    name: str
    text: str  # a module in LLVM IR
    target: machine_code.Target | None = None  # the CPU whose machine code runs; None: this machine's

    def register(self) -> None:
        """Load the kernel and register it with XLA, once a process. Raises KernelRefused if LLVM does not take it."""
        name = call_name(self)
        if name in _registered:
            return
        try:
            code = machine_code.load_functions(start_compilation(self).result(), [f"{self.name}_handler"])
        except RuntimeError as error:  # as llvmlite passes on what LLVM says
            said = str(error).strip()
            summary = f"{machine_code.compiler_name()} does not take the kernel {self.name!r} ({said.partition(chr(10))[0]})"
            raise KernelRefused(summary, said) from error
        with _guard:
            if name not in _registered:
                jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(code.addresses[f"{self.name}_handler"]), platform="cpu")
                _registered[name] = code
                note_host_call(name, self)


_registered: dict[str, machine_code.LoadedFunctions] = {}  # by the call's name
_guard = Lock()  # guards _registered


@dataclass(frozen=True)
class LateKernel:
    """A kernel as an attribute of its call. It is compiled in another thread from now on; JAX asks for it when it lowers the call."""

    kernel: Kernel
    platform = "cpu"

    def __post_init__(self) -> None:
        if call_name(self.kernel) not in _registered:
            start_compilation(self.kernel)

    def __repr__(self) -> str:
        return f"LateKernel({self.kernel.name}, {len(self.kernel.text)} characters)"

    def __jax_array__(self) -> bytes:
        """The protocol by which JAX turns an object into what it can lower."""
        self.kernel.register()
        return self.kernel.name.encode()


@lru_cache(maxsize=MAX_NAMES)
def call_name(kernel: Kernel) -> str:
    """Returns the name under which XLA finds a kernel: a hash of its text, and of its target if that is not this machine."""
    return HOST_CALL_PREFIX + sha256("\0".join((kernel.name, kernel.text, str(kernel.target or ""))).encode()).hexdigest()[:NAME_DIGITS]


def start_compilation(kernel: Kernel) -> Future[bytes]:
    """The kernel's machine code with its handler, an object file, from another thread."""
    text = kernel.text + machine_code.SEPARATOR + handler_text(kernel.name)
    return store.start_compilation(machine_code.COMPILER, text, str(kernel.target or machine_code.host_target()))


def call(kernel: Kernel, results: Results, *operands: Array) -> tuple[Array, ...]:
    """Call a kernel in a program for CPUs.

    Args:
        kernel: The kernel.
        results: Shape and dtype of each result.
        *operands: Arrays of any shapes and dtypes. The kernel sees them in row-major order.
    """
    if lowers_late_attributes():
        code: Any = LateKernel(kernel)
    else:
        kernel.register()
        code = kernel.name.encode()
    given: Any = jax.ffi.ffi_call(call_name(kernel), results)(*operands, kernel=code)
    return (given,) if isinstance(results, jax.ShapeDtypeStruct) else tuple(given)


@cache
def missing() -> str:
    """Returns why kernels cannot be called in this process; "" if a small one ran and had the right result."""
    if said := machine_code.missing_compiler():
        return said
    try:
        major, minor = installed_version()
        if major != API_MAJOR:
            return f"jaxlib has version {major}.{minor} of XLA's FFI, and version {API_MAJOR} is needed"
        with ThreadPoolExecutor(1) as other:  # a thread in which nothing is being traced
            right = other.submit(_probe).result()
    except Exception as error:  # whatever XLA or LLVM says
        return f"XLA did not call the probe ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    return "" if right else "XLA's call of the probe gave a wrong result"


def _probe() -> bool:
    x = np.arange(32, dtype=np.uint32) * 0x01234567
    run: Callable[..., Any] = jax.jit(lambda v: call(Kernel("probe", PROBE), jax.ShapeDtypeStruct(x.shape, x.dtype), v)[0])
    with on_local_device("cpu"):
        return bool((np.asarray(run(x)) == 3 * x).all())
