"""Programs of statements: executed by NumPy at first, compiled when they have done much work, and stored on disk between processes.

Most statements of a kernel run a few times on a few thousand threads, so that compiling them takes longer than running them. On a CPU NumPy
therefore executes a program until it has taken as long as compiling it would, if it knows all its operations. Others are first compiled
without most of XLA's optimisations, which change no bit, and again with those of LLVM once they have done so much work that the faster code
pays. A stored program also spares the next process tracing and lowering.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax

from tcemu.base.execution import execution
from tcemu.base.jax_internals import compilation_cache_hits, compile_in_short_time
from tcemu.base.numpy_programs import NumpyProgram, UnknownOperation
from tcemu.base.stored_code import Entry, cache_subfolder, load_program, program_entry, read_entry, store_program, write_entry
from tcemu.kernels.ptx.simt.faults import known_messages, restore_messages

SUBFOLDER = "tcemu-ptx"  # of the folder of JAX's persistent compilation cache
OPTIMISED, QUICK, BY_NUMPY = "optimised", "quick", "numpy"
# time of NumPy after which a program is compiled: XLA takes some 20 ms, and 1 to 3 ms for each operation of NumPy's
NUMPY_SECONDS, OPERATIONS_OF_EMPTY = 0.002, 10
_folder: ContextVar[Path | None] = ContextVar("tcemu_statement_programs", default=None)


@contextmanager
def store_programs(folder: str | os.PathLike) -> Iterator[None]:
    """Store the programs that are compiled meanwhile in a folder, and take from it those that another process has stored.

    Without it they are stored in a folder within that of JAX's persistent compilation cache, or, where JAX has none, within the user's
    cache folder; see `tcemu.base.stored_code.cache_subfolder`.
    """
    token = _folder.set(Path(folder))
    try:
        yield
    finally:
        _folder.reset(token)


def _program_folder() -> Path | None:
    return _folder.get() or cache_subfolder(SUBFOLDER, always=True)


class TracedStatement(NamedTuple):
    """A statement as a function that JAX can trace."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]  # its arguments as trees of `jax.ShapeDtypeStruct`
    donates: bool = False  # the arrays of the first argument are changed in place
    facts: Any = None  # what the caller must know of the program, as values that can be pickled


class StatementProgram:
    """The compiled function of a statement, for arrays of fixed shapes."""

    facts: Any  # as the trace gave them

    def __init__(self, key: object, trace: Callable[[], TracedStatement], device: Any, *, chosen: str, threads: int, patience: int) -> None:
        """Load the program, or trace and compile it.

        Args:
            key: All that the program depends on, as a value whose `repr` is the same in each process.
            trace: Returns the function; called before each compilation.
            device: The device of the arrays.
            chosen: The choice of `tcemu.execution`, a part of the key. The thread that compiles may have another one.
            threads: Threads that execute the statement together.
            patience: Executions, each of one thread, after which the program is optimised; 0: at once.
        """
        self._make, self._device, self._threads, self._remaining = trace, device, threads, patience or None
        self._key, self._chosen = (key, device), chosen
        self._numpy: NumpyProgram | None = None
        self._numpy_seconds = 0.0  # that NumPy may still take
        if self._load(OPTIMISED):
            self._remaining = None
        elif not patience:
            self._compile(OPTIMISED)
        elif not self._load(QUICK) and not self._interpret():
            self._compile(QUICK)

    def __call__(self, *arguments: Any) -> Any:
        """Run the program."""
        numpy = self._numpy  # another thread may compile the program meanwhile
        if numpy is not None:
            start = time.thread_time()
            found = numpy(*jax.tree.leaves(arguments))
            self._numpy_seconds -= time.thread_time() - start
            if self._numpy_seconds < 0:
                self._compile(OPTIMISED)
                self._numpy, self._remaining = None, None
            return found
        if self._remaining is not None:
            self._remaining -= self._threads
            if self._remaining < 0:
                self._remaining = None
                self._compile(OPTIMISED)
        return self._compiled(*arguments)

    def _compile(self, effort: str) -> None:
        hits = compilation_cache_hits()
        with execution(self._chosen), jax.enable_x64(True), jax.default_device(self._device):
            traced = self._make()
            lowered = jax.jit(traced.function, donate_argnums=0 if traced.donates else ()).lower(*traced.shapes)
            self._compiled = compile_in_short_time(lowered, optimised=effort == OPTIMISED)
        self.facts = traced.facts
        if compilation_cache_hits() == hits:
            store_program(*self._place(effort), self._compiled, (traced.facts, known_messages()))

    def _load(self, effort: str) -> bool:
        loaded = load_program(*self._place(effort), self._device)
        if loaded is None:
            return False
        self._compiled, (self.facts, messages) = loaded
        restore_messages(messages)
        return True

    def _interpret(self) -> bool:
        """Let NumPy execute the program. Returns False if it does not know all its operations."""
        if self._device.platform != "cpu":
            return False
        place = self._place(BY_NUMPY)
        stored = read_entry(*place)
        if stored is not None:
            numpy, self.facts, messages = pickle.loads(stored)
            restore_messages(messages)
            self._set_numpy(numpy)
            return True
        with execution(self._chosen), jax.enable_x64(True), jax.default_device(self._device):
            traced = self._make()
            closed = jax.make_jaxpr(traced.function)(*traced.shapes)
        try:
            self._set_numpy(NumpyProgram(closed.jaxpr, closed.consts))
        except UnknownOperation:
            return False
        self.facts = traced.facts
        write_entry(*place, pickle.dumps((self._numpy, self.facts, known_messages())))
        return True

    def _set_numpy(self, program: NumpyProgram) -> None:
        self._numpy, self._numpy_seconds = program, NUMPY_SECONDS * (OPERATIONS_OF_EMPTY + len(program))

    def _place(self, effort: str) -> tuple[Path | None, Entry]:
        return _program_folder() if self._device.platform == "cpu" else None, program_entry(self._key, effort)
