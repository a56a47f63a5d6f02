"""What tcemu asks of XLA's compiler: functions compiled once, compiled programs kept on disk, and how long it took."""

import os
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, wraps
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache
from jax.experimental.xla_metadata import set_xla_metadata

VARIABLE = "TCEMU_COMPILATION_CACHE"  # a directory, or one of OFF
OFF = ("", "0", "off")
LEAST_SECONDS = 0.1  # programs that took less to compile are not kept: reading one takes some milliseconds, and each is a file
KEPT_SPANS = 64  # of a CompileClock: as deep as traces lie within traces, and more
THRESHOLD = "jax_persistent_cache_min_compile_time_secs"
_inside: ContextVar[bool] = ContextVar("tcemu_inside_a_unit", default=False)  # what is being traced belongs to a unit already


def compiled_once(*static_argnums: int) -> Callable[[Callable], Callable]:
    """A decorator: `jax.jit`, and on a CPU a function that is compiled once in a program, however often it is called there.

    XLA:CPU copies every other function into each of its callers, and compiles each copy. One that is named a compilation unit stays whole,
    and equal ones are one. jaxlib before 0.10.1 does not know the name. Nothing fuses across
    a unit's border: so it is also the way to have a value computed once and not anew for each of its uses.
    The name is tied to the function's results: a context would pass it on to every operation within. A unit within a unit is part of the
    outer one, since XLA does not come to an end with some of those that are nested (jaxlib 0.10.2, seen with random bits between them).
    """

    def decorated(fn: Callable) -> Callable:
        name = fn.__name__.strip("_")

        def within(*args: Any) -> Any:
            before = _inside.set(True)
            try:
                return fn(*args)
            finally:
                _inside.reset(before)

        whole = jax.jit(wraps(fn)(within), static_argnums=static_argnums)

        def named(*args: Any) -> Any:
            def call(*arrays: Any) -> Any:
                given = iter(arrays)
                return whole(*(arg if at in static_argnums else next(given) for at, arg in enumerate(args)))

            def unit(*arrays: Any) -> Any:
                return set_xla_metadata(call(*arrays), compilation_unit=name)

            arrays = [arg for at, arg in enumerate(args) if at not in static_argnums]
            return lax.platform_dependent(*arrays, cpu=unit, default=call) if _on_one_device() else call(*arrays)

        apart = jax.jit(wraps(fn)(named), static_argnums=static_argnums)
        return wraps(fn)(lambda *args: whole(*args) if _inside.get() else apart(*args))

    return decorated


def _on_one_device() -> bool:
    """Whether what is traced runs on one CPU device: there is but one, or `jax.shard_map` has cut everything already.

    Elsewhere XLA would bring a unit's operands together on each device: their sharding ends at its border.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names):
        return True
    try:
        return len(jax.devices("cpu")) == 1
    except RuntimeError:  # JAX was told to use no CPU
        return False


# ---- wide vectors


def wide_vectors(*static_argnums: int) -> Callable[[Callable], Callable]:
    """A decorator: `jax.jit`, compiled for vectors of 512 bits where tcemu's call is the whole program and the CPU has AVX-512.

    XLA:CPU takes 256 bits of itself. A function within another's trace is compiled as that
    one's options say, which are the user's: JAX allows options at the outermost `jit` alone.
    """

    def decorated(fn: Callable) -> Callable:
        plain = jax.jit(fn, static_argnums=static_argnums)
        wide = jax.jit(fn, static_argnums=static_argnums, compiler_options={"xla_cpu_prefer_vector_width": 512})

        @wraps(fn)
        def called(*args: Any) -> Any:
            return (wide if _has_wide_vectors() and not _traced() else plain)(*args)

        return called

    return decorated


def _traced() -> bool:
    """Whether what is computed here becomes part of a program that is being traced."""
    return isinstance(jax.device_put(np.float32(0)), Tracer)  # which compiles nothing outside a trace, as jnp.zeros would


@cache
def _has_wide_vectors() -> bool:
    """Whether programs run on a CPU with AVX-512, and nobody has chosen the width of vectors."""
    if jax.default_backend() != "cpu" or "xla_cpu_prefer_vector_width" in os.environ.get("XLA_FLAGS", ""):
        return False
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text(errors="replace").split()
    except OSError:  # not Linux
        return False


# ---- programs kept on disk


def cache_compilations(path: str | os.PathLike | None = None) -> Path | None:
    """Keeps compiled programs in a directory, by JAX's persistent compilation cache, so that later processes need not compile them again.

    path: the directory. None: what the environment variable TCEMU_COMPILATION_CACHE names, or else the platform's place for caches, as
    ~/.cache/tcemu/jaxlib-0.10.2 on Linux (XDG_CACHE_HOME), apart for each jaxlib.
    What you have configured stays: a directory (jax_compilation_cache_dir, JAX_COMPILATION_CACHE_DIR), and the time from which on programs
    are kept (JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS). Without it, those are kept that took 0.1 s to compile; JAX's own limit is 1 s.
    The cache is of the whole process, not only of tcemu's programs. tcemu itself turns it on in its command line only.
    With JAX for NVIDIA GPUs it is off unless a directory is named, here or by the variable: JAX 0.11.2 cannot read back programs that hold
    kernels in machine code, warns of each, and compiles it again. The kernels themselves are kept in any case.
    Returns the directory that serves, or None: the cache is off (jax_enable_compilation_cache, or TCEMU_COMPILATION_CACHE=off), or no path
    was given and nothing can be written at the default one. Raises OSError if nothing can be written at the path that was given.
    """
    configured = jax.config.values
    if not configured["jax_enable_compilation_cache"]:
        return None
    if configured["jax_compilation_cache_dir"] is not None:
        return Path(configured["jax_compilation_cache_dir"])
    named = os.environ.get(VARIABLE)
    if path is None and (named in OFF or (named is None and _has_cuda())):
        return None
    directory = Path(path) if path is not None else Path(named or user_cache() / f"jaxlib-{version('jaxlib')}")
    try:
        directory = directory.expanduser().absolute()
        directory.mkdir(parents=True, exist_ok=True)
        writable = os.access(directory, os.W_OK | os.X_OK)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        if path is not None:
            raise
        return None
    if not writable:
        if path is not None:
            raise PermissionError(f"{directory}: compiled programs cannot be kept there, it is not writable; name another directory")
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if THRESHOLD.upper() not in os.environ and configured[THRESHOLD] == 1.0:  # 1.0 is JAX's own
        jax.config.update(THRESHOLD, LEAST_SECONDS)
    compilation_cache.reset_cache()  # JAX looks at its configuration once, at the first compilation
    return directory


def _has_cuda() -> bool:
    """Whether JAX has its plugin for NVIDIA GPUs."""
    return any(find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


def user_cache() -> Path:
    """Where tcemu keeps what can be made again, as this platform has it. Raises RuntimeError if there is no home."""
    if sys.platform == "win32":
        place = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        place = Path.home() / "Library" / "Caches"
    else:
        place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return place / "tcemu"


class CompileClock:
    """How long this process has traced, lowered and compiled since the clock was made, read from cache included.

    `compile_clock` gives the one of the process: JAX forgets no listener.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []  # apart from each other, the last ones
        self._before = 0.0  # the length of those that were dropped
        self._lock = Lock()
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            stop = time.perf_counter()
            start = stop - duration_secs
            with self._lock:
                while self._spans and self._spans[-1][1] > start:  # a trace within this one, or another thread's
                    start = min(start, self._spans.pop()[0])
                self._spans.append((start, stop))
                if len(self._spans) > KEPT_SPANS:
                    first = self._spans.pop(0)
                    self._before += first[1] - first[0]

    @property
    def seconds(self) -> float:
        """Of the clock on the wall; traces within traces count once."""
        with self._lock:
            return self._before + sum(stop - start for start, stop in self._spans)


@cache
def compile_clock() -> CompileClock:
    """The clock of this process, which runs from the first call on."""
    return CompileClock()
