"""The GPU that is here as one callable: words in, words out."""

import os
import subprocess
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.backends.native.native_statement import ENTRY, StatementKernel, statement_kernel
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.targets import capability_target

BLOCKS = 8192  # in a launch; each goes on to further cases
STATIC_SHARED = 48 << 10  # bytes of shared memory that a block has without asking
MOST_SHARED = 227 << 10  # that it may ask for, on sm_90: CUDA C++ Programming Guide, technical specifications
EXTRA = "running the instruction on a real GPU needs an NVIDIA GPU and the extra `silicon` (pip install '.[silicon]' in a clone of tcemu)"
Words = Mapping[str, Array]


class Runner(Protocol):
    """An executor of instructions: a GPU, or in tests an emulation of one."""

    target: str
    name: str

    def __call__(self, op: Instruction, form: int, immediates: Mapping[str, Any], words: Words) -> Array:
        """Run one instruction on many cases.

        Args:
            op: The instruction.
            form: Index into `op.operand_forms`.
            immediates: Immediates by the names of the manual.
            words: uint32 by the parameters of the kernel: [cases, lanes, n], [cases, n], or an image of memory [cases, n].

        Returns:
            The words of the operand that the instruction writes.
        """
        ...

    def facts(self) -> dict[str, str]:
        """Returns the facts about the executor that a record keeps."""
        ...


class Gpu:
    """An NVIDIA GPU through cuda-core, and the kernels that it has loaded.

    Unlike launches inside JAX programs (`program_runner`), it also runs where JAX has no GPU of its own, and on GPUs before 8.0.

    Arrays on the device of JAX that is the same GPU are used where they are; others are copied there and back.
    """

    def __init__(self, core: Any, number: int) -> None:
        self.device = core.Device(number)
        self.device.set_current()  # the primary context, which JAX uses too
        self.core, self.stream, self.kernels = core, self.device.create_stream(), {}
        self.name, self.target = str(self.device.name), capability_target(*self.device.compute_capability)

    def facts(self) -> dict[str, str]:
        version = call_driver("cuDriverGetVersion")
        return {
            "device": self.name,
            "target": self.target,
            "driver": _driver(),
            "compiler": f"the driver's, CUDA {version // 1000}.{version % 1000 // 10}",
            "cuda-core": self.core.__version__,
        }

    def __call__(self, op: Instruction, form: int, immediates: Mapping[str, Any], words: Words) -> Array:
        check(op, self.target)
        made = statement_kernel(op, self.target, form, immediates)
        image = words["memory"].shape[-1] if "memory" in words else 0
        if made.shared and 4 * image > MOST_SHARED:
            raise ValueError(f"{op}: an image of {4 * image} bytes; a block of {self.name} has at most {MOST_SHARED} of shared memory")
        inputs = {parameter.name: words[parameter.name] for parameter in made.parameters if parameter.name in words}
        shape = (*(n for n in next(iter(inputs.values())).shape[:1]), *self._output_shape(op, made, inputs))
        at = _of_jax(self.device.device_id)
        run = self._in_place if at is not None else self._copied
        try:
            return run(made, inputs, shape, image, at)
        except Exception as error:  # whatever the driver's bindings raise; after a fault nothing more runs in this process
            raise RuntimeError(f"{op} on {self.name}: {error}") from error

    def _output_shape(self, op: Instruction, made: StatementKernel, inputs: Words) -> tuple[int, ...]:
        if made.written in inputs:
            return inputs[made.written].shape[1:]
        return made.threads, op.register_count(made.written)

    def _in_place(self, made: StatementKernel, inputs: Words, shape: tuple[int, ...], image: int, device: Any) -> Array:
        """With JAX's own buffers; its work on them ends before the kernel's begins, and the kernel's before this returns."""
        held = {name: jax.device_put(x, device) for name, x in inputs.items()}
        with jax.default_device(device):
            held[made.written] = jnp.array(held[made.written], copy=True) if made.written in held else _zeros(shape)
        jax.block_until_ready(held)
        self._launch(made, shape[0], {name: x.unsafe_buffer_pointer() for name, x in held.items()}, image)
        return held[made.written]

    def _copied(self, made: StatementKernel, inputs: Words, shape: tuple[int, ...], image: int, _: Any) -> Array:
        host = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
        result = np.array(host[made.written]) if made.written in host else np.zeros(shape, np.uint32)
        host[made.written] = result
        pointers: dict[str, Any] = {}
        try:
            for name, x in host.items():
                pointers[name] = call_driver("cuMemAlloc", x.nbytes)
                call_driver("cuMemcpyHtoD", pointers[name], x.ctypes.data, x.nbytes)
            self._launch(made, shape[0], {name: int(p) for name, p in pointers.items()}, image)
            call_driver("cuMemcpyDtoH", result.ctypes.data, pointers[made.written], result.nbytes)
        finally:
            for pointer in pointers.values():
                call_driver("cuMemFree", pointer)
        return jnp.asarray(result)

    def _launch(self, made: StatementKernel, cases: int, pointers: Mapping[str, int], image: int) -> None:
        if not cases:
            return
        self.device.set_current()
        size = 4 * image if made.shared else 0
        config = self.core.LaunchConfig(grid=min(cases, BLOCKS), block=made.threads, shmem_size=size)
        arguments = [pointers[parameter.name] for parameter in made.parameters]
        self.core.launch(self.stream, config, self._loaded(made, size), *arguments, cases, image)
        self.stream.sync()

    def _loaded(self, made: StatementKernel, shared: int) -> Any:
        """The kernel as the driver's compiler makes it, once for each text."""
        dynamic = shared if shared > STATIC_SHARED else 0
        if (made.text, dynamic) not in self.kernels:
            loaded = self.core.ObjectCode.from_ptx(made.text.encode() + b"\0").get_kernel(ENTRY)
            if dynamic:
                from cuda.bindings import driver  # type: ignore[reportMissingImports]

                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                call_driver("cuKernelSetAttribute", attribute, shared, driver.CUkernel(int(loaded.handle)), self.device.device_id)
            self.kernels[made.text, dynamic] = loaded
        return self.kernels[made.text, dynamic]


@cache
def gpu() -> Gpu:
    """Return the GPU that JAX computes on, or the first one.

    Raises:
        Unsupported: There is no GPU, or cuda-core is not installed.
    """
    try:
        from cuda import core  # type: ignore[reportMissingImports]
    except ImportError as error:
        raise Unsupported(f"gpu: {EXTRA}, whose package cuda-core this installation does not have: {error}") from error
    try:
        return Gpu(core, _number())
    except Unsupported:
        raise
    except Exception as error:  # whatever the driver's bindings raise where there is no driver
        raise Unsupported(f"gpu: {EXTRA}; none answers here: {error}") from error


def _number() -> int:
    devices = _jax_devices()
    return devices[0].local_hardware_id if devices else 0


def _jax_devices() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def _of_jax(number: int) -> Any:
    return next((device for device in _jax_devices() if device.local_hardware_id == number), None)


@lru_cache(maxsize=256)
def _filled(shape: tuple[int, ...]) -> Any:
    return jax.jit(lambda: jnp.zeros(shape, jnp.uint32))


def _zeros(shape: tuple[int, ...]) -> Array:
    """A buffer of its own, which nothing else shows."""
    return _filled(shape)()


def call_driver(call: str, *arguments: Any) -> Any:
    """Returns the result of a call of the driver. Raises RuntimeError."""
    from cuda.bindings import driver  # type: ignore[reportMissingImports]

    status, *results = getattr(driver, call)(*arguments)
    if int(status):
        raise RuntimeError(f"{call}: {status}")
    return results[0] if results else None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        versions = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=20, env=os.environ
        ).stdout.split()
        return versions[0] if versions else "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"
