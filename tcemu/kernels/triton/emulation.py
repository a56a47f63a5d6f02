"""`tcemu.triton.emulated`: a driver for Triton whose GPU is `tcemu.ptx`.

Triton asks its active driver for a target, compiles a kernel to PTX for it, and hands the binary and the arguments to the driver's
launcher. `EmulationDriver` is such a driver. The stage that would assemble the PTX is replaced by one that keeps the text, by Triton's own
hook for stages (`knobs.runtime.add_stages_inspection_hook`), so that the "binary" which the driver loads is the PTX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import Autotuner
from triton.runtime import driver as triton_driver

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.targets import parse_target_name, resolve_target
from tcemu.kernels.ptx.cuda_source import parse_once
from tcemu.kernels.ptx.linker.statement_programs import store_programs
from tcemu.kernels.ptx.text.module import Function, Module
from tcemu.kernels.triton.cuda_redirection import cuda_on_cpu
from tcemu.kernels.triton.device_properties import MAX_THREADS, PROPERTIES, WARP_SIZE, triton_properties
from tcemu.kernels.triton.kernel_launches import CompiledKernel, LaunchData, launch_kernel
from tcemu.kernels.triton.launches import LaunchReport
from tcemu.kernels.triton.tensors import AddressBook, noted_addresses
from tcemu.kernels.triton.triton_versions import TRIED, describe_version, installed_version

STAGE_KEY = "tcemu: the PTX in place of machine code"  # part of the keys of Triton's cache
CACHE_FOLDER = "tcemu"  # within Triton's cache
PROGRAM_FOLDER = "statements"  # within that folder: compiled statements of PTX


@contextmanager
def emulated(
    target: str,
    *,
    config: Callable[[triton.Config], bool] | None = None,
    checked: bool = False,
    redirect_cuda: bool = True,
) -> Iterator[LaunchReport]:
    """Run every Triton kernel that is launched inside as the GPU would, bit for bit, on tensors of the CPU.

    Kernels are compiled by Triton's own compiler for the target and run by `tcemu.ptx`. Tensors are written in place. Autotuned kernels
    take their first config, since nothing is timed; a choice holds within one `with`. What `tl.device_print` prints is written to
    sys.stdout after the launch, thread by thread.

    Args:
        target: GPU, as "H100" or "sm_90a".
        config: Chooses the config of autotuned kernels: the first for which it returns True.
        checked: Raise for what PTX leaves undefined, such as races in shared memory.
        redirect_cuda: Let torch create tensors of the device "cuda" on the CPU meanwhile, and answer torch.cuda's questions about the
            device, so that programs that name the device run unchanged.

    Yields:
        The launches so far; a table as text.

    Raises:
        Unsupported: The target is unknown, or Triton has no code for it; or a kernel has a statement that `tcemu.ptx` does not support,
            when it is launched.
        OutOfBounds, Misaligned, Trapped, UndefinedBehaviour: As `tcemu.ptx.run` raises them.
    """
    name = resolve_target(target)
    installed_version()  # raises for a version that is too old
    report = LaunchReport(name, describe_version())
    driver = EmulationDriver(name, report, config, checked)
    with ExitStack() as stack:
        stack.enter_context(_active_driver(driver))
        driver.book = stack.enter_context(noted_addresses())
        stack.enter_context(store_programs(os.path.join(knobs.cache.dir, PROGRAM_FOLDER)))
        stack.enter_context(_own_tuning())
        if redirect_cuda:
            stack.enter_context(cuda_on_cpu(driver.capability, target, driver.book.note))
        yield report


@contextmanager
def _active_driver(driver: EmulationDriver) -> Iterator[None]:
    """Make a driver the active one, with a cache of its own: nothing of an emulated run is found by a real one."""
    previous = triton_driver._active
    with knobs.runtime.scope(), knobs.cache.scope():
        knobs.cache.dir = os.path.join(knobs.cache.dir, CACHE_FOLDER)
        knobs.runtime.add_stages_inspection_hook = _keep_ptx_stage(knobs.runtime.add_stages_inspection_hook)
        triton_driver.set_active(driver)
        try:
            yield
        finally:
            triton_driver._active = previous


@contextmanager
def _own_tuning() -> Iterator[None]:
    """Let autotuners forget the configs that they took outside, and outside those that they take inside."""
    outer, choices = Autotuner.run, dict[Autotuner, dict]()

    def run_with_own_choices(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
        kept, tuner.cache = tuner.cache, choices.setdefault(tuner, {})
        try:
            return outer(tuner, *args, **kwargs)
        finally:
            tuner.cache = kept

    with patch.object(Autotuner, "run", run_with_own_choices):
        yield


def _keep_ptx_stage(user_hook: Callable | None) -> Callable:
    """Return a hook of Triton's stages that keeps the PTX as the binary, after the user's own hook."""

    def hook(backend: Any = None, stages: Any = None, options: Any = None, language: Any = None, capability: Any = None) -> Any:
        if stages is None:
            key, digest = user_hook() if user_hook else ("", "")
            return key + STAGE_KEY, digest + STAGE_KEY
        if user_hook:
            user_hook(backend, stages, options, language, capability)
        stages["cubin"] = lambda text, metadata: text.encode()
        return None

    return hook


class EmulationDriver(DriverBase):
    """Triton's driver of an emulated GPU."""

    def __init__(self, target: str, report: LaunchReport, config: Callable[[triton.Config], bool] | None, checked: bool) -> None:
        self.capability = parse_target_name(target).number
        if self.capability not in PROPERTIES:
            raise Unsupported(f"target: got {target}; Triton's emulation has {', '.join(f'sm_{n}' for n in PROPERTIES)}")
        self.target, self.report, self.config, self.checked = target, report, config, checked
        self.observer: Callable[[LaunchData], None] | None = None  # called after each launch
        self.book = AddressBook()  # of the tensors to which kernels may find addresses in memory
        self.ranked = 0  # configs that an autotuner asked about
        self.utils = DeviceUtilities(self.capability)

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        """Return the launcher of a compiled kernel. Triton calls it as a class, and keeps the launcher with the kernel."""
        return Launcher(source, metadata)

    @classmethod
    def is_active(cls) -> bool:
        """False: Triton never chooses this driver by itself."""
        return False

    def get_current_target(self) -> GPUTarget:
        """The target for which Triton compiles."""
        return GPUTarget("cuda", self.capability, WARP_SIZE)

    def get_current_device(self) -> str:
        """The name of the device: a key of Triton's caches, which no real device has."""
        return f"tcemu:{self.target}"

    def set_current_device(self, device: Any) -> None:
        """There is one device."""

    def get_current_stream(self, device: Any = None) -> int:
        """The default stream."""
        return 0

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """The compute capability."""
        return divmod(self.capability, 10)

    def get_active_torch_device(self) -> Any:
        """The device of tensors: the CPU."""
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Raises Unsupported: streams and events are asked for to take times."""
        raise Unsupported("an emulated kernel has no time of a GPU: triton.testing.do_bench and CUDA events measure nothing here")

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Raises Unsupported: no C++ launcher is made."""
        raise Unsupported("an emulated kernel has no C++ launcher")

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a function that ranks configs without running them."""
        return _benchmark

    def rank_config(self, config: triton.Config) -> float:
        """Return a time for a config: the first chosen one is the fastest."""
        self.ranked += 1
        return float(self.ranked) if self.config is None or self.config(config) else float("inf")

    def clear_cache(self, cache: Any) -> None:
        """There is no cache of a GPU to clear."""

    def get_empty_cache_for_benchmark(self) -> None:
        """There is none."""


def _benchmark(kernel_call: Callable[[], Any], quantiles: Sequence[float] | None = None, **options: Any) -> Any:
    """Time a config by the driver that is active now: an autotuner keeps the function that its first driver gave."""
    driver = triton_driver.active
    if not isinstance(driver, EmulationDriver):
        return driver.get_benchmarker()(kernel_call, quantiles=quantiles, **options)
    return [driver.rank_config(_closure_config(kernel_call))] * len(quantiles or (0,))


def _closure_config(kernel_call: Callable) -> triton.Config:
    """Return the config that Triton's autotuner is about to time."""
    cells = dict(zip(kernel_call.__code__.co_freevars, kernel_call.__closure__ or (), strict=True))
    if "config" not in cells:
        raise Unsupported(f"Triton {triton.__version__} does not show which config it times; tcemu.triton was tried with {TRIED}")
    return cells["config"].cell_contents


class DeviceUtilities:
    """The part of Triton's driver that loads binaries and knows the device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_device_properties(self, device: Any = None) -> dict[str, int]:
        """Properties by Triton's names."""
        return triton_properties(self.capability)

    def load_binary(self, name: str, binary: bytes, shared: int, device: Any) -> tuple[Module, LoadedKernel, int, int, int]:
        """Parse the PTX. Returns module, function, registers, spills and the maximum number of threads, as Triton's own does."""
        module = parse_once(binary.decode())
        return module, LoadedKernel(module, module.entries[name]), 0, 0, MAX_THREADS

    def unload_module(self, module: Any) -> None:
        """There is nothing to free."""


class LoadedKernel(NamedTuple):
    """The value that Triton keeps as the handle of a loaded function."""

    module: Module
    function: Function


class Launcher:
    """Launches of one compiled kernel, by the driver that is active then."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: Any,
        function: LoadedKernel,
        kernel_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable | None,
        exit_hook: Callable | None,
        *arguments: Any,
    ) -> None:
        """Run the kernel; tensors are written in place."""
        grid = (grid_x, grid_y, grid_z)
        if enter_hook is not None:
            enter_hook(launch_metadata)
        if all(grid):
            self._run(grid, function, arguments)
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _run(self, grid: tuple[int, int, int], kernel: LoadedKernel, arguments: Sequence[Any]) -> None:
        driver: EmulationDriver = triton_driver.active
        compiled = CompiledKernel(*kernel, self.source.signature, self.metadata, _settings(self.source, self.metadata))
        data = launch_kernel(compiled, grid, arguments, driver.target, checked=driver.checked, known=driver.book.tensors())
        sys.stdout.write(data.launch.printed)
        driver.report.launches.append(data.launch)
        if driver.observer is not None:
            driver.observer(data)


def _settings(source: Any, metadata: Any) -> dict[str, Any]:
    names: Sequence[str] = getattr(getattr(source, "fn", None), "arg_names", ())
    constants: Mapping[tuple[int, ...], Any] = getattr(source, "constants", {})
    named = {names[path[0]]: value for path, value in constants.items() if len(path) == 1 and path[0] < len(names)}
    return named | {name: getattr(metadata, name) for name in ("num_warps", "num_stages")}
