"""A compiled kernel inside a JAX program, launched by XLA's custom call for kernels in text.

XLA's name for it is internal, and it is said to take PTX. In truth the driver looks what it is given, and takes machine code too. That
needs no compiling at run time, and no driver as new as the compiler. So two routes are tried once a process, machine code and PTX, on a
small kernel whose result is compared. Where neither works, nothing here is used.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from tcemu.base import stored_code as store
from tcemu.base.jax_internals import lowers_late_attributes
from tcemu.base.meshes import on_local_device
from tcemu.engine.backends.cuda import nvrtc

PLATFORM = "cuda"  # as `lax.platform_dependent` names it
TARGET = "__gpu$xla.gpu.ptx"
ROUTES = ("sm", "compute")  # machine code; PTX
LEAST_CAPABILITY = (8, 0)  # least compute capability: `cp.async`, `mma` of bf16
SHARED_KIB = {"80": 163, "87": 163, "90": 227, "100": 227, "103": 227, "110": 227}  # shared memory that a block may have, by capability
LEAST_SHARED_KIB = 99  # elsewhere
PROBE = """
extern "C" __global__ void probe(const unsigned *x, unsigned *y) { y[threadIdx.x] = 3 * x[threadIdx.x] + blockIdx.x; }
"""


COMPILER = store.KernelCompiler(
    lambda: (*nvrtc.OPTIONS, ".".join(map(str, nvrtc.version()))), lambda text, architecture: nvrtc.compile_text(text, architecture)
)
Results = jax.ShapeDtypeStruct | tuple[jax.ShapeDtypeStruct, ...]


class KernelEntry(NamedTuple):
    """A kernel of a text, and how its threads are arranged."""

    name: str
    text: str
    threads: int  # threads of a block
    shared_bytes: int = 0  # dynamic
    features: str = ""  # after the architecture's number: "a" for instructions that it alone has
    is_ptx: bool = False  # the text is PTX, which the driver assembles; else CUDA C++
    in_place: int | None = None  # the operand that is the first result's buffer too


@dataclass(frozen=True)
class Code:
    """A kernel's code as an attribute of its call. It is compiled in another thread from now on; JAX asks for it when it lowers the call.

    So all kernels of a program are compiled at once, while the program is still being traced.
    """

    text: str
    architecture: str
    platform = PLATFORM

    def __post_init__(self) -> None:
        store.start_compilation(COMPILER, self.text, self.architecture)

    def __repr__(self) -> str:
        return f"Code({self.architecture}, {len(self.text)} characters)"

    def __jax_array__(self) -> bytes:
        """The protocol by which JAX turns an object into what it can lower."""
        return store.start_compilation(COMPILER, self.text, self.architecture).result()


class Route(NamedTuple):
    """The way in which kernels get into programs on this machine."""

    kind: str  # one of ROUTES; "" for none
    capability: str  # compute capability of the GPUs, as "90"
    missing: str  # why there is none; "" if there is one
    multiprocessors: int = 0  # multiprocessors of a GPU

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a block may have."""
        return SHARED_KIB.get(self.capability, LEAST_SHARED_KIB) << 10


def compute_capabilities() -> set[tuple[int, int]]:
    """Returns the compute capabilities of JAX's NVIDIA GPUs, those of other processes too; empty where it has none."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return set()
    return {(int(major), int(minor)) for major, _, minor in (str(d.compute_capability).partition(".") for d in devices)}


@cache
def route() -> Route:
    """The first of ROUTES that gives the right result, or why none does."""
    found = compute_capabilities()
    if not found:
        return Route("", "", "JAX finds no NVIDIA GPU")
    if len(found) > 1 or min(found) < LEAST_CAPABILITY:
        have = ", ".join(f"{major}.{minor}" for major, minor in sorted(found))
        least = ".".join(map(str, LEAST_CAPABILITY))
        return Route("", "", f"the GPUs have compute capability {have}; a single one, of {least} or later, is needed")
    if nvrtc.library() is None:
        return Route("", "", "there is no NVRTC: libnvrtc.so comes with jax[cuda13], as the package nvidia-cuda-nvrtc")
    ((major, minor),) = found
    capability, said = f"{major}{minor}", []
    for kind in ROUTES:
        try:
            with ThreadPoolExecutor(1) as other:  # a thread in which nothing is being traced
                right = other.submit(_probe, f"{kind}_{capability}").result()
        except Exception as error:  # whatever XLA, the driver or NVRTC says: the next route
            said.append(f"{kind}_{capability}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        if right:
            return Route(kind, capability, "", min(getattr(device, "core_count", 0) for device in jax.devices("cuda")))
        said.append(f"{kind}_{capability}: a wrong result")
    return Route("", capability, f"XLA's call for kernels did not run the probe ({'; '.join(said)})")


def _probe(architecture: str) -> bool:
    entry = KernelEntry("probe", PROBE, 32)
    x = np.arange(32, dtype=np.uint32) * 0x01234567
    run = jax.jit(lambda v: _call(entry, architecture, 1, jax.ShapeDtypeStruct(x.shape, x.dtype), (v,)))
    with on_local_device(PLATFORM):
        return bool((np.asarray(run(x)) == 3 * x).all())


def launch(entry: KernelEntry, blocks: int, results: Results, *operands: Array) -> tuple[Array, ...]:
    """The kernel on `blocks` blocks of threads, at least one; its parameters are the operands, then the results."""
    assert blocks > 0
    here = route()
    given = _call(entry, f"{here.kind}_{here.capability}{entry.features}", blocks, results, operands)
    return (given,) if isinstance(results, jax.ShapeDtypeStruct) else tuple(given)


def _call(entry: KernelEntry, architecture: str, blocks: int, results: Results, operands: tuple[Array, ...]) -> Any:
    sizes = {"grid_x": blocks, "block_x": entry.threads, "shared_mem_bytes": entry.shared_bytes}
    sizes |= dict.fromkeys(("grid_y", "grid_z", "block_y", "block_z"), 1)
    numbers = {name: np.int32(size) for name, size in sizes.items()}
    ffi_call: Any = jax.ffi.ffi_call
    if entry.is_ptx:
        code: Any = entry.text.encode() + bytes(1)
    else:
        code = Code(entry.text, architecture) if lowers_late_attributes() else store.load_or_compile(COMPILER, entry.text, architecture)
    aliases = None if entry.in_place is None else {entry.in_place: 0}
    call = ffi_call(TARGET, results, input_output_aliases=aliases)
    return call(*operands, name=entry.name, kernel_type="ptx", kernel_data=code, **numbers)
