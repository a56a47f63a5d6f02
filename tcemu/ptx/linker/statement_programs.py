"""Compiled programs of statements: compiled fast at first, optimised when they have done much work, and stored on disk between processes.

Most statements of a kernel run a few times on a few thousand threads, so that compiling them takes longer than running them. A program is
therefore first compiled without most of XLA's optimisations, which change no bit, and again with all of them once it has done so much work
that the faster code pays. A stored program also spares the next process tracing and lowering.
"""

from __future__ import annotations

import os
import pickle
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, NamedTuple

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import tcemu.base
from tcemu.base.jax_internals import compilation_cache_hits, compile_in_short_time
from tcemu.ptx.simt.faults import known_messages, restore_messages

SUBFOLDER = "tcemu-ptx"  # of the folder of JAX's persistent compilation cache
OPTIMISED, QUICK = "optimised", "quick"
_load_lock = Lock()
_folder: ContextVar[Path | None] = ContextVar("tcemu_statement_programs", default=None)


@contextmanager
def store_programs(folder: str | os.PathLike) -> Iterator[None]:
    """Store the programs that are compiled meanwhile in a folder, and take from it those that another process has stored.

    Without it they are stored beside JAX's persistent compilation cache, if that is on; see `tcemu.cache_compilations`.
    """
    token = _folder.set(Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


def _program_folder() -> Path | None:
    folder = _folder.get()
    if folder is None and jax.config.values["jax_enable_compilation_cache"] and jax.config.values["jax_compilation_cache_dir"]:
        folder = Path(jax.config.values["jax_compilation_cache_dir"]) / SUBFOLDER
    return folder


class TracedStatement(NamedTuple):
    """A statement as a function that JAX can trace."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]  # its arguments as trees of `jax.ShapeDtypeStruct`
    donates: bool = False  # the arrays of the first argument are changed in place
    facts: Any = None  # what the caller must know of the program, as values that can be pickled


class StatementProgram:
    """The compiled function of a statement, for arrays of fixed shapes."""

    facts: Any  # as the trace gave them

    def __init__(self, key: object, trace: Callable[[], TracedStatement], device: Any, *, threads: int, patience: int) -> None:
        """Load the program, or trace and compile it.

        Args:
            key: All that the program depends on, as a value whose `repr` is the same in each process.
            trace: Returns the function; called before each compilation.
            device: The device of the arrays.
            threads: Threads that execute the statement together.
            patience: Executions, each of one thread, after which the program is compiled with all optimisations.
        """
        self._make, self._device, self._threads, self._remaining = trace, device, threads, patience
        self._name = f"{_environment()}-{blake2b(repr((key, device)).encode(), digest_size=20).hexdigest()}"
        if self._load(OPTIMISED):
            self._remaining = None
        elif not self._load(QUICK):
            self._compile(QUICK)

    def __call__(self, *arguments: Any) -> Any:
        """Run the program."""
        if self._remaining is not None:
            self._remaining -= self._threads
            if self._remaining < 0:
                self._remaining = None
                self._compile(OPTIMISED)
        return self._compiled(*arguments)

    def _compile(self, effort: str) -> None:
        hits = compilation_cache_hits()
        with jax.enable_x64(True), jax.default_device(self._device):
            traced = self._make()
            lowered = jax.jit(traced.function, donate_argnums=0 if traced.donates else ()).lower(*traced.shapes)
            self._compiled = compile_in_short_time(lowered) if effort == QUICK else lowered.compile()
        self.facts = traced.facts
        path = self._path(effort)
        if path is None or compilation_cache_hits() != hits:
            return
        with suppress(OSError, ValueError):  # ValueError: this backend cannot serialise programs
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{get_ident()}")
            temporary.write_bytes(pickle.dumps((serialize(self._compiled), traced.facts, known_messages())))
            os.replace(temporary, path)  # without fsync: a file that a power failure cuts short is not read back

    def _load(self, effort: str) -> bool:
        path = self._path(effort)
        if path is None or not path.exists():
            return False
        try:
            program, facts, messages = pickle.loads(path.read_bytes())
            with _load_lock:
                self._compiled, self.facts = deserialize_and_load(*program, execution_devices=[self._device]), facts
            restore_messages(messages)
        except Exception:  # a file of a killed or foreign process is compiled anew, whatever is wrong with it
            return False
        return True

    def _path(self, effort: str) -> Path | None:
        folder = _program_folder() if self._device.platform == "cpu" else None
        return None if folder is None else folder / f"{self._name}-{effort}"


@cache
def _environment() -> str:
    """Return a digest of all that stored programs depend on besides their statement: this package, jaxlib, the processor, XLA's flags."""
    digest = blake2b(digest_size=8)
    facts = (version("jax"), version("jaxlib"), platform.machine(), _processor(), os.environ.get("XLA_FLAGS"), jax.device_count())
    digest.update(repr((facts, jax.config.values["jax_disable_most_optimizations"])).encode())
    package = Path(tcemu.base.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Return the features of the processor, for which XLA compiles."""
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return platform.processor()
