"""Compilation by XLA: functions that are compiled once, compiled programs stored on disk, and the time that compiling took."""

import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, partial, wraps
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.extend.backend import backends

from tcemu.base.execution import PORTABLE, execution
from tcemu.base.jax_internals import (
    COMPILE_EVENTS,
    COMPILED_EVENT,
    call_with_replacement,
    is_tracing,
    name_compilation_unit,
    reset_compilation_cache,
    without_call_stacks,
)
from tcemu.base.stored_code import CACHE_VARIABLE, OFF_VALUES, default_cache_folder, make_private_folder, path_refusal, warn_of_folder

MIN_COMPILE_SECONDS = 0.1  # least compile time of a stored program: each is a file, and reading it takes some milliseconds
MAX_SPANS = 64  # spans that a CompileClock keeps apart: more than the depth to which traces nest
THRESHOLD_OPTION = "jax_persistent_cache_min_compile_time_secs"  # JAX's option for the least compile time of a stored program
_inside_unit: ContextVar[bool] = ContextVar("tcemu_inside_a_unit", default=False)  # True while a unit is traced


def compile_once(*static_argnums: int) -> Callable[[Callable], Callable]:
    """Decorate a function with `jax.jit` and make it a compilation unit, which XLA:CPU compiles once per program.

    Nested units hang XLA (jaxlib 0.10.2, observed with random bits between them), so a unit that is called inside another becomes a part of
    the outer one.

    XLA:CPU copies any other function into each of its callers and compiles each copy. A compilation unit is not copied, and equal units are
    compiled once. XLA does not fuse operations across the boundary of a unit, so a unit also ensures that a value is computed once instead
    of once per use. The name is attached to the function's results, since a context would pass it on to every operation inside.

    Args:
        *static_argnums: Positions of the static arguments, as for `jax.jit`.

    Returns:
        A decorator for a function of positional arguments.
    """

    def decorate(fn: Callable) -> Callable:
        name = fn.__name__.strip("_")
        traced = without_call_stacks(fn)

        def enter_unit(*args: Any) -> Any:
            before = _inside_unit.set(True)
            try:
                return traced(*args)
            finally:
                _inside_unit.reset(before)

        unnamed = jax.jit(wraps(fn)(enter_unit), static_argnums=static_argnums)

        def choose_unit(*args: Any) -> Any:
            def call_unnamed(*arrays: Any) -> Any:
                remaining = iter(arrays)
                return unnamed(*(arg if number in static_argnums else next(remaining) for number, arg in enumerate(args)))

            def call_unit(*arrays: Any) -> Any:
                return name_compilation_unit(call_unnamed(*arrays), name)

            arrays = [arg for number, arg in enumerate(args) if number not in static_argnums]
            return call_by_platform({"cpu": call_unit}, call_unnamed, *arrays) if _uses_one_device() else call_unnamed(*arrays)

        outermost = jax.jit(wraps(fn)(choose_unit), static_argnums=static_argnums)
        return wraps(fn)(lambda *args: unnamed(*args) if _inside_unit.get() else outermost(*args))

    return decorate


def call_by_platform(programs: Mapping[str, Callable], default: Callable, *operands: Any) -> Any:
    """Call the platform's own program, or the default.

    JAX traces the programs of all platforms. In a process that has CPUs alone, the program for CPUs alone is traced, which halves the time
    for tracing. A program that such a process exports to another platform (`jax.export`) is then that of CPUs, so all programs must give
    the same bits on every platform, and run there: `call_kernel_by_platform` is for those with kernels. `lax.platform_dependent` is for
    programs that lean on the arithmetic of one.

    Args:
        programs: Programs by the platform's name in `lax.platform_dependent`.
        default: The program for every other platform.
        *operands: Operands of the programs.
    """
    if not programs:
        return default(*operands)
    if set(programs) == {"cpu"} and set(backends()) == {"cpu"}:
        return programs["cpu"](*operands)
    return lax.platform_dependent(*operands, default=default, **programs)


def call_kernel_by_platform(kernels: Mapping[str, Callable], portable: Callable, *operands: Any) -> Any:
    """Call the platform's kernel, or the portable program where it has none, where a compiler refuses it, and under `jax.export`.

    A program that `jax.export` writes runs in processes that know nothing of kernels, on any platform.

    Args:
        kernels: Programs with kernels, as `call_by_platform` takes them. Each returns one array.
        portable: The program without kernels. It uses no tracer but its operands.
        *operands: Operands of the programs.
    """
    if not kernels:
        return portable(*operands)
    inside_unit = _inside_unit.get()

    def replacement(*operands: Any) -> Any:
        before = _inside_unit.set(inside_unit)  # it is traced later, and units do not nest
        try:
            with execution(PORTABLE):
                return portable(*operands)
        finally:
            _inside_unit.reset(before)

    return call_with_replacement(partial(call_by_platform, kernels, portable), replacement, *operands)


def _uses_one_device() -> bool:
    """Return whether the traced program runs on one CPU device: there is only one, or `jax.shard_map` has split all arrays already.

    On several devices XLA would gather a unit's operands on each device, since sharding does not propagate into a unit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names):
        return True
    try:
        return len(jax.devices("cpu")) == 1
    except RuntimeError:  # JAX is configured without its CPU backend
        return False


def outside_traces(fn: Callable) -> Callable:
    """Decorate a function so that a program that is being traced computes it at once where no argument is traced, as it does elsewhere.

    `jax.ensure_compile_time_eval` would evaluate constants of lowering rules too, which fails where JAX's compilation cache is on (0.11.2).
    """

    @wraps(fn)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, Tracer) for value in (*args, *kwargs.values())) or not is_tracing():
            return fn(*args, **kwargs)
        with ThreadPoolExecutor(1) as other:  # a thread in which nothing is being traced
            return other.submit(fn, *args, **kwargs).result()

    return compute


# ---- wide vectors


def jit_wide_vectors(*static_argnums: int) -> Callable[[Callable], Callable]:
    """Decorate a function with `jax.jit` and compile it for 512-bit vectors if the CPU has AVX-512.

    XLA:CPU uses 256 bits by default. The option applies only if the function is the outermost `jit`, since JAX allows compiler options
    nowhere else. Inside another function's trace, that function's options apply, which are the user's.

    Args:
        *static_argnums: Positions of the static arguments, as for `jax.jit`.

    Returns:
        A decorator for a function of positional arguments. The result has a method `lower`, as that of `jax.jit`.
    """

    def decorate(fn: Callable) -> Callable:
        traced = without_call_stacks(fn)
        plain = jax.jit(traced, static_argnums=static_argnums)
        wide = jax.jit(traced, static_argnums=static_argnums, compiler_options={"xla_cpu_prefer_vector_width": 512})

        @wraps(fn)
        def choose_width(*args: Any) -> Any:
            return (wide if _has_wide_vectors() and not is_tracing() else plain)(*args)

        choose_width.lower = lambda *args: (wide if _has_wide_vectors() else plain).lower(*args)  # type: ignore[attr-defined]
        return choose_width

    return decorate


@cache
def _has_wide_vectors() -> bool:
    """Return whether programs run on a CPU with AVX-512 and XLA_FLAGS leaves the vector width open."""
    if jax.default_backend() != "cpu" or "xla_cpu_prefer_vector_width" in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:  # not Linux
        return False


# ---- programs stored on disk


def cache_compilations(path: str | os.PathLike | None = None) -> Path | None:
    """Turn on JAX's persistent compilation cache, so that later processes need not compile the same programs again.

    The cache stores every program of the process, not only those of tcemu. tcemu itself turns it on only in its command line.

    Your own configuration of JAX takes precedence: the directory (jax_compilation_cache_dir, JAX_COMPILATION_CACHE_DIR) and the least
    compile time of a stored program (JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS). The default time here is 0.1 s; JAX's own is 1 s.

    With JAX for NVIDIA GPUs the cache stays off unless `path` or TCEMU_COMPILATION_CACHE names a directory: JAX 0.11.2 cannot read back
    programs that contain kernels in machine code, so it warns about each of them and compiles it again. The kernels themselves are stored
    in any case.

    The cache holds machine code. A directory that another user may write or replace is therefore not used.

    Args:
        path: Directory of the cache. By default the environment variable TCEMU_COMPILATION_CACHE names it. Without that variable, it is a
            folder per jaxlib version in the platform's cache folder, such as ~/.cache/tcemu/jaxlib-0.10.2 on Linux (XDG_CACHE_HOME).

    Returns:
        The directory in use. None if the cache is off (jax_enable_compilation_cache, or TCEMU_COMPILATION_CACHE=off), or if no path was
        given and the default directory is not writable, or another user may write it, of which a warning tells.

    Raises:
        OSError: The given path is not a writable directory, or another user may write it.
    """
    configured = jax.config.values
    if not configured["jax_enable_compilation_cache"]:
        return None
    if configured["jax_compilation_cache_dir"] is not None:
        return Path(configured["jax_compilation_cache_dir"])
    variable = os.environ.get(CACHE_VARIABLE)
    if path is None and (variable in OFF_VALUES or (variable is None and _has_cuda())):
        return None
    directory = Path() if path is None else Path(path)
    try:
        default = default_cache_folder() if path is None else None
        directory = default or directory.expanduser().absolute()
        make_private_folder(directory)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        if path is not None:
            raise
        return None
    if not writable:
        if path is not None:
            raise PermissionError(f"{directory}: the directory for compiled programs is not writable; name another directory")
        return None
    if reason := path_refusal(directory):
        if path is not None:
            raise PermissionError(f"{directory}: no directory for compiled programs, which are machine code: {reason}")
        warn_of_folder(directory, reason)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if THRESHOLD_OPTION.upper() not in os.environ and configured[THRESHOLD_OPTION] == 1.0:  # 1.0 is JAX's default
        jax.config.update(THRESHOLD_OPTION, MIN_COMPILE_SECONDS)
    reset_compilation_cache()  # JAX reads its configuration once, at the first compilation
    return directory


def _has_cuda() -> bool:
    """Return whether JAX's plugin for NVIDIA GPUs is installed."""
    return any(find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


class CompileClock:
    """Clock of the time that this process spends tracing, lowering and compiling, including reads from the compilation cache.

    Use `compile_clock` instead of making another: each clock registers a listener, and JAX never removes one.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # (start, stop) in seconds of the latest events, disjoint
        self._before = 0.0  # total length of the older spans, in seconds
        self._lock = Lock()
        self.programs = 0  # number of compiled programs
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith(COMPILE_EVENTS):
            stop = time.perf_counter()
            start = stop - duration_secs
            with self._lock:
                self.programs += event == COMPILED_EVENT
                while self._spans and self._spans[-1][1] > start:  # a trace inside this one, or in another thread
                    start = min(start, self._spans.pop()[0])
                self._spans.append((start, stop))
                if len(self._spans) > MAX_SPANS:
                    first = self._spans.pop(0)
                    self._before += first[1] - first[0]

    @property
    def seconds(self) -> float:
        """Seconds of wall-clock time spent so since the clock was made. Nested traces count once."""
        with self._lock:
            return self._before + sum(stop - start for start, stop in self._spans)


@cache
def compile_clock() -> CompileClock:
    """Return the clock of this process, which starts at the first call."""
    return CompileClock()
