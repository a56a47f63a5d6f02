"""The host code of a compiled CuTe DSL function, with functions of ours in place of CUDA's.

CuTe DSL compiles a function to host code in LLVM's dialect of MLIR, which encodes tensor maps, computes the grid, and calls CUDA's runtime
by a few functions whose names begin with an underscore. Here the same code is loaded by CuTe DSL's own execution engine, and those
functions are Python's. The kernels' PTX is beside it.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.targets import TARGETS, parse_target_name
from tcemu.kernels.ptx.runtime.launch_shape import Dimensions
from tcemu.kernels.ptx.simt.special_registers import SM_COUNT

CONFIG = struct.Struct("<6IQQQI")  # cudaLaunchConfig_t: grid, block, dynamic shared bytes, stream, attributes, their number
ATTRIBUTE = struct.Struct("<i4x3I52x")  # cudaLaunchAttribute: the id, and as far as it is read here the value
COOPERATIVE, CLUSTER_DIMENSION = 2, 4  # cudaLaunchAttributeID
INVALID_VALUE = 1  # cudaError_t
_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
FUNCTIONS = {  # CUDA's functions in host code, by their arguments
    "_cudaLaunchKernelEx": (_POINTER,) * 3,
    "_cudaLaunchKernel": (_POINTER, *(_INT,) * 6, _POINTER, _LONG, _POINTER),
    "_cudaLibraryLoadData": (*(_POINTER,) * 4, _INT, _POINTER, _POINTER, _INT),
    "_cudaLibraryGetKernel": (_POINTER,) * 3,
    "_cudaGetDevice": (_POINTER,),
    "_cudaDeviceGetAttribute": (_POINTER, _INT, _INT),
    "_cuKernelGetAttribute": (_POINTER, _INT, _POINTER, _INT),
    "_cudaKernelSetAttributeForDevice": (_POINTER, _INT, _INT, _INT),
    "_cudaFuncSetAttribute": (_POINTER, _INT, _INT),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (_POINTER, _POINTER, _INT, _LONG),
}
# cudaDeviceAttr: shared memory of a block on request, multiprocessors, version of the compute capability
SHARED_OPTIN, MULTIPROCESSORS, MAJOR, MINOR = 97, 16, 75, 76
STATIC_SHARED = 1  # CUfunction_attribute


class HostLaunch(NamedTuple):
    """A launch that host code makes."""

    kernel: str  # name of the entry
    grid: Dimensions
    block: Dimensions
    cluster: Dimensions | None
    shared_bytes: int  # dynamic
    cooperative: bool
    arguments: int  # address of the array of pointers to the arguments


class HostProgram:
    """The host code of a compiled function."""

    def __init__(self, compiled: Any, target: str, launch: Callable[[HostLaunch], None]) -> None:
        """Load the code.

        Args:
            compiled: What `cute.compile` returned.
            target: GPU whose properties the code is told.
            launch: Function that is called with each launch. What it raises ends the call of the code and is raised by `__call__`.

        Raises:
            Unsupported: `compiled` has no code, or the code calls functions of CUDA that have no counterpart here.
        """
        if not hasattr(compiled, "ir_module"):
            raise Unsupported(f"{compiled!r} has no host code: expected what cute.compile returned")
        self.compiled, self.launch, self._error = compiled, launch, None
        self.kernels: list[str] = []  # names by the handles of kernels, which count from 1
        name = parse_target_name(target)
        self.properties = {
            SHARED_OPTIN: 1024 * TARGETS[target].shared_kib,
            MULTIPROCESSORS: SM_COUNT, MAJOR: name.number // 10, MINOR: name.number % 10,
        }  # fmt: skip
        declared = set(re.findall(r"llvm\.func @(_cu\w+)\(", str(compiled.ir_module)))
        if unknown := sorted(declared - FUNCTIONS.keys()):
            raise Unsupported(f"{compiled.function_name}: its host code calls {', '.join(unknown)}; known are {', '.join(FUNCTIONS)}")
        self.engine = _engine_class(compiled)(compiled.ir_module, opt_level=2, shared_libs=[])
        self.callbacks = [self._register(name, kinds) for name, kinds in FUNCTIONS.items()]  # the engine has only their addresses

    def _register(self, name: str, kinds: Sequence[Any]) -> Any:
        method = getattr(self, name, lambda *_: 0)  # loading and attributes of kernels need nothing here

        def call(*arguments: Any) -> int:
            try:
                return method(*arguments) or 0
            except BaseException as error:  # it must not leave a function that machine code calls
                self._error = self._error or error
                return INVALID_VALUE

        callback = ctypes.CFUNCTYPE(_INT, *kinds)(call)
        self.engine.raw_register_runtime(name, ctypes.cast(callback, _POINTER))
        return callback

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the code with the arguments of the compiled function. Raises what `launch` raised, or RuntimeError."""
        library, status = ctypes.c_void_p(), ctypes.c_int32()
        place, device = ctypes.pointer(ctypes.pointer(library)), ctypes.c_int32()
        self._invoke("cuda_init", status, place)
        self._invoke("cuda_load_to_device", status, place, ctypes.pointer(device))
        values, _kept = self.compiled.generate_execution_args(*args, **kwargs)
        packed = (ctypes.c_void_p * (len(values) + 1))(*values, ctypes.addressof(status))
        self.engine.lookup(self.compiled.function_name)(packed)
        self._check(status)

    def _invoke(self, name: str, status: Any, *arguments: Any) -> None:
        pointers = [ctypes.cast(each, _POINTER) for each in (*arguments, ctypes.pointer(status))]
        ctypes.CFUNCTYPE(None, _POINTER)(self.engine.raw_lookup(name))((_POINTER * len(pointers))(*pointers))
        self._check(status)

    def _check(self, status: Any) -> None:
        if self._error is not None:
            raise self._error
        if status.value:
            raise RuntimeError(f"{self.compiled.function_name}: its host code ended with CUDA's error {status.value}")

    # ---- CUDA's functions

    def _cudaLibraryGetKernel(self, kernel: int, _library: int, name: int) -> None:
        self.kernels.append(ctypes.string_at(name).decode())
        ctypes.c_void_p.from_address(kernel).value = len(self.kernels)

    def _cudaGetDevice(self, device: int) -> None:
        _write_int(device, 0)

    def _cudaDeviceGetAttribute(self, value: int, attribute: int, _device: int) -> None:
        if attribute not in self.properties:
            known = ", ".join(map(str, self.properties))
            raise Unsupported(f"the host code asks for attribute {attribute} of the device (cudaDeviceAttr); known are {known}")
        _write_int(value, self.properties[attribute])

    def _cuKernelGetAttribute(self, value: int, attribute: int, _kernel: int, _device: int) -> None:
        if attribute != STATIC_SHARED:
            raise Unsupported(f"the host code asks for attribute {attribute} of a kernel (CUfunction_attribute); known is {STATIC_SHARED}")
        _write_int(value, 0)  # CuTe DSL allocates all shared memory dynamically

    def _cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, value: int, _kernel: int, _threads: int, _shared: int) -> None:
        _write_int(value, 1)

    def _cudaLaunchKernel(
        self, kernel: int, x: int, y: int, z: int, block_x: int, block_y: int, block_z: int, arguments: int, shared: int, _stream: int
    ) -> None:
        self.launch(HostLaunch(self.kernels[kernel - 1], (x, y, z), (block_x, block_y, block_z), None, shared, False, arguments))

    def _cudaLaunchKernelEx(self, config: int, kernel: int, arguments: int) -> None:
        *sizes, shared, _stream, first, count = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        attributes = {}
        for number in range(count):
            name, *value = ATTRIBUTE.unpack(ctypes.string_at(first + number * ATTRIBUTE.size, ATTRIBUTE.size))
            attributes[name] = tuple(value)
        cooperative = bool(attributes.get(COOPERATIVE, (0,))[0])
        cluster = attributes.get(CLUSTER_DIMENSION)
        self.launch(
            HostLaunch(self.kernels[kernel - 1], tuple(sizes[:3]), tuple(sizes[3:]), cluster, shared, cooperative, arguments)  # type: ignore[arg-type]
        )


def _engine_class(compiled: Any) -> Any:
    """Return CuTe DSL's class of execution engines. A function that was compiled for a GPU that is not here has no engine."""
    if compiled.engine is not None:
        return type(compiled.engine)
    from cutlass._mlir.execution_engine import ExecutionEngine  # type: ignore[reportMissingImports]

    return ExecutionEngine


def _write_int(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value
