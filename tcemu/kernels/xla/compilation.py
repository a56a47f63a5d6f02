"""JAX functions compiled by XLA for a GPU that is not here, and run.

XLA's compiler for CUDA is in the wheels of JAX's plugin and compiles for a described GPU. What XLA would choose by timing kernels on the
GPU, products and some reductions, it then chooses by its own defaults: a program from a dump of a run on the GPU has the GPU's choices.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from tcemu.base.errors import NotModelled
from tcemu.kernels.xla.xla_programs import StepReport, XlaProgram, read

PLUGINS = ("xla_cuda13", "xla_cuda12")
SKIP_LIBRARIES = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"  # JAX's own variable: the plugin then needs no cuDNN, which the compiler does not use
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")  # of JAX, on which a program depends
DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_large_constants": True, "xla_dump_emitter_re": "ptx"}


class Device(NamedTuple):
    """A GPU as XLA's compiler needs it described: the facts that GPUs of one architecture do not share."""

    name: str
    capability: str
    cores: int
    memory_bytes: int
    bandwidth: int  # bytes a second
    cache_bytes: int  # of level 2
    clock: float  # GHz


# Source: XLA's own descriptions on one of each (tests/gpu_runs/xla_programs.py)
DEVICES = {
    "H100": Device("NVIDIA H100 80GB HBM3", "9.0", 132, 85_017_493_504, 3_352_320_000_000, 52_428_800, 1.98),
    "H200": Device("NVIDIA H200", "9.0", 132, 150_109_880_320, 4_814_304_000_000, 62_914_560, 1.98),
}
# Of compute capability 9.0. Units: for XLA's number of a type, clock in GHz (None: the GPU's), units of a core, operations a clock
HOPPER = """
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" device_address_bits: 64
  pcie_bandwidth: 68719476736 ecc_enabled: true driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
"""
SCALAR_UNITS = {4: (None, 64, 1), 8: (None, 64, 1), 10: (None, 128, 2), 11: (None, 128, 1), 12: (None, 64, 1), 16: (None, 128, 2)}
MATRIX_CLOCK = 1.8295201
MATRIX_UNITS = {
    10: (MATRIX_CLOCK, 4, 512), 11: (MATRIX_CLOCK, 4, 256), 12: (None, 4, 32), 16: (MATRIX_CLOCK, 4, 512),
    **dict.fromkeys((2, 6, 19, 20, 23, 24, 25, 28, 29, 33, 35, 36), (MATRIX_CLOCK, 4, 1024)),
}  # fmt: skip


def device_description(gpu: str) -> str:
    """Return XLA's description of a GPU (`GpuTargetConfigProto`, as text).

    Raises:
        NotModelled: There is none for this GPU.
    """
    if gpu not in DEVICES:
        raise NotModelled(
            f"gpu={gpu!r}: tcemu.xla describes {' and '.join(DEVICES)}. Give another GPU's description as description=: XLA writes it "
            "to a dump on that GPU, as *.gpu_target_config.pbtxt"
        )
    device = DEVICES[gpu]

    def units(name: str, rates: Mapping[int, tuple[float | None, int, int]]) -> str:
        text = "rate_infos {{ key: {} value {{ clock_rate_ghz: {} units_per_core: {} ops_per_clock: {} }} }}"
        rows = (text.format(kind, clock or device.clock, count, each) for kind, (clock, count, each) in sorted(rates.items()))
        return f"{name} {{ {' '.join(rows)} }}"

    return f"""gpu_device_info {{{HOPPER}
  core_count: {device.cores} memory_bandwidth: {device.bandwidth} l2_cache_size: {device.cache_bytes} clock_rate_ghz: {device.clock}
  device_memory_size: {device.memory_bytes} name: "{device.name}" platform_version: "Compute Capability {device.capability}a"
  {units("scalar_unit_description", SCALAR_UNITS)}
  {units("matrix_unit_description", MATRIX_UNITS)}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }} device_description_str: "{device.name}"
"""


def compile(
    fn: Callable,
    *args: Any,
    gpu: str,
    description: str | None = None,
    options: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
) -> XlaProgram:
    """Compile a function for a GPU that need not be here, with JAX's CUDA plugin.

    Args:
        fn: A function of arrays, as `jax.jit` takes it.
        *args: Its arguments, pytrees of arrays or of `jax.ShapeDtypeStruct`. Arrays that the function closes over become constants of the
            program, which makes it slow to read: give parameters as arguments.
        gpu: The GPU, "H100" or "H200"; another one with `description`.
        description: XLA's description of the GPU, as text.
        options: Further options of XLA by name, as `xla_gpu_autotune_level`.
        folder: Where XLA's dump is kept. None: it is deleted.

    Returns:
        The program. Its operands are the leaves of `args`, its results those of the function's result.

    Raises:
        NotModelled: There is no description of the GPU, JAX has no CUDA plugin here, or the program has a part that is not known.
    """
    return _compile(fn, args, gpu, description, options, folder)[0]


def _compile(
    fn: Callable, args: Any, gpu: str, description: str | None, options: Mapping[str, Any] | None, folder: str | Path | None = None
) -> tuple[XlaProgram, Any]:
    """Return the program, and the structure of the function's result."""
    leaves, tree = jax.tree.flatten(args)
    device = _described_device(description or device_description(gpu))
    sharding = jax.sharding.SingleDeviceSharding(device)
    types = [jax.typeof(_as_array(x)) for x in leaves]
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type) for x in types]
    named = update_wrapper(lambda *leaves: fn(*jax.tree.unflatten(tree, leaves)), fn)
    with contextlib.ExitStack() as stack:
        kept = Path(folder) if folder is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if any(kept.glob("*")):
            raise ValueError(f"folder={str(kept)!r}: expected a folder that is empty or not there; nothing is overwritten")
        place: dict[str, Any] = {} if avals else {"out_shardings": sharding}  # arguments bring the device with them
        traced = jax.jit(named, keep_unused=True, **place).trace(*avals)
        try:
            lowered = traced.lower(lowering_platforms=("cuda",))
        except RuntimeError as error:  # a callback asks for the GPU
            raise NotModelled(
                f"calls of Python, as jax.pure_callback and jax.debug.print, need the GPU itself; leave them out: {error}"
            ) from error
        lowered.compile(compiler_options={**DUMP, **(options or {}), "xla_dump_to": str(kept)})
        (program,) = read(kept, target=gpu)
    return program, lowered.out_tree


class Emulated:
    """A function whose calls run as XLA compiles them for a GPU. Made by `emulate`.

    Attributes:
        programs: The compiled programs, each with the structure of its result, by the types of the arguments and JAX's settings.
    """

    def __init__(self, fn: Callable, settings: Mapping[str, Any], checked: bool) -> None:
        self.fn, self.settings, self.checked = fn, settings, checked
        self.programs: dict[Any, tuple[XlaProgram, Any]] = {}
        self._last: StepReport | None = None
        update_wrapper(self, fn)

    def __call__(self, *args: Any) -> Any:
        """Compute the function's result, in arrays of NumPy. Random keys in it are their words."""
        leaves, tree = jax.tree.flatten(args)
        arrays = [_as_array(x) for x in leaves]
        key = tree, tuple(map(jax.typeof, arrays)), tuple(getattr(jax.config, name) for name in SETTINGS)
        if key not in self.programs:
            self.programs[key] = _compile(self.fn, jax.tree.unflatten(tree, arrays), **self.settings)
        program, results = self.programs[key]
        found, self._last = program.run(*map(_words, arrays), checked=self.checked)
        return jax.tree.unflatten(results, jax.tree.leaves(found))

    def report(self) -> StepReport:
        """Return the steps of the last call.

        Raises:
            ValueError: There was no call yet.
        """
        if self._last is None:
            raise ValueError("report: the function was not called yet")
        return self._last


def emulate(
    fn: Callable, *, gpu: str, description: str | None = None, options: Mapping[str, Any] | None = None, checked: bool = False
) -> Emulated:
    """Return a function that computes what `jax.jit(fn)` computes on a GPU, bit for bit, without that GPU.

    Each call compiles the function for the GPU, once for the shapes of its arguments, and runs XLA's kernels by `tcemu.ptx`. It is no
    function of traced arrays: `jax.grad` and `jax.vmap` go inside, as `emulate(jax.grad(loss), gpu="H200")`.

    Args:
        fn: A function of arrays, as `jax.jit` takes it.
        gpu: The GPU, "H100" or "H200"; another one with `description`.
        description: XLA's description of the GPU, as text.
        options: Further options of XLA by name.
        checked: Raise for what PTX leaves undefined.

    Returns:
        The function; its `report()` lists the steps of the last call.

    Raises:
        NotModelled: In the call: see `compile`, and what the program does that has no rule.
    """
    return Emulated(fn, {"gpu": gpu, "description": description, "options": options}, checked)


def _as_array(x: Any) -> Any:
    """Return an argument as `jax.jit` takes it: without x64 mode in 32 bits, and Python's numbers of a weak type."""
    return x if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def _words(x: Any) -> Any:
    """Return an array, and of a random key its words, which the program takes."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _described_device(description: str) -> Any:
    """Return a device of JAX for compiling alone."""
    with _without_libraries():
        jax.devices()  # JAX looks for plugins once
        try:
            topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
        except NotImplementedError:
            for name in PLUGINS:
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"jax_plugins.{name}").initialize()
                    topology = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
                    break
            else:
                version = jax.__version__
                raise NotModelled(
                    "tcemu.xla needs XLA's compiler for CUDA, which needs no GPU: "
                    f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
                ) from None
    return topology.devices[0]


@contextlib.contextmanager
def _without_libraries() -> Iterator[None]:
    before = os.environ.get(SKIP_LIBRARIES)
    os.environ[SKIP_LIBRARIES] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SKIP_LIBRARIES]
        else:
            os.environ[SKIP_LIBRARIES] = before
