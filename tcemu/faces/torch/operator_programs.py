"""Compiled programs of torch's operators on a CPU: one for each function and shapes in a process, shared by all modules, and on disk.

They are stored beside JAX's persistent compilation cache, if that is on (`tcemu.cache_compilations`, JAX_COMPILATION_CACHE_DIR). A stored
program spares a later process tracing and lowering too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import jax
from jax import Array

from tcemu.base.execution import current_execution, execution
from tcemu.base.jax_internals import caches_were_cleared, compilation_cache_hits, without_source_locations
from tcemu.base.stored_code import cache_subfolder, load_program, program_entry, store_program

SUBFOLDER = "tcemu-torch"  # of the folder of JAX's persistent compilation cache
MAX_PROGRAMS = 4096  # programs that a process keeps

ArrayTypes = tuple[Any, ...]  # (shape, dtype) of each array, or None


class ProgramKey(NamedTuple):
    """All that a program depends on."""

    function: Callable[..., Any]  # of (*static, list of arrays, array, ...), with a method `lower`
    static: tuple[Hashable, ...]
    arrays: ArrayTypes  # of the list
    others: ArrayTypes
    device: Any
    execution: str
    x64: bool


class OperatorProgram:
    """The compiled function of an operator for arrays of fixed shapes."""

    def __init__(self, key: ProgramKey, stored_as: str | None) -> None:
        self._key, self._stored_as, self._lock = key, stored_as, Lock()
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """True if the next call compiles nothing."""
        return self._compiled is not None

    def compile(self) -> None:
        """Load the program, or trace and compile it."""
        key = self._key
        with self._lock:
            if self._compiled is not None:
                return
            folder = cache_subfolder(SUBFOLDER) if self._stored_as else None
            entry = program_entry((self._stored_as, *key[2:]))
            if (loaded := load_program(folder, entry, key.device)) is not None:
                self._compiled = loaded[0]
                return
            hits = compilation_cache_hits()
            with jax.default_device(key.device), without_source_locations(), execution(key.execution), jax.enable_x64(key.x64):
                structs = [[None if t is None else jax.ShapeDtypeStruct(*t) for t in types] for types in (key.arrays, key.others)]
                compiled = key.function.lower(*key.static, structs[0], *structs[1]).compile()  # type: ignore[attr-defined]
            if folder is not None and compilation_cache_hits() == hits:
                store_program(folder, entry, compiled)
            self._compiled = compiled

    def __call__(self, arrays: Sequence[Array | None], *others: Array | None) -> Any:
        """Run the program."""
        self.compile()
        return self._compiled(list(arrays), *others)


def find_program(
    function: Callable[..., Any],
    static: tuple[Hashable, ...],
    arrays: Sequence[Array | None],
    others: Sequence[Array | None],
    stored_as: str | None,
) -> Callable[..., Any]:
    """Return the program of a function for arrays like these: a function of (arrays, *others).

    Args:
        function: A function of (*static, arrays, *others), decorated by `jit_wide_vectors`.
        static: Its static arguments.
        arrays: A list of arrays, some of them None.
        others: Further arrays, some of them None.
        stored_as: A text that says in every process what the function and its static arguments are. None: the program is not stored.
    """
    (device, *_) = next(array for array in arrays if array is not None).devices()
    if device.platform != "cpu" or jax.config.values["jax_disable_jit"]:
        return lambda arrays, *others: function(*static, arrays, *others)
    if caches_were_cleared("torch"):
        _program.cache_clear()
    x64 = jax.config.values["jax_enable_x64"]
    return _program(ProgramKey(function, static, _types(arrays), _types(others), device, current_execution(), x64), stored_as)


def _types(arrays: Sequence[Array | None]) -> ArrayTypes:
    return tuple(None if array is None else (array.shape, array.dtype) for array in arrays)


@lru_cache(MAX_PROGRAMS)
def _program(key: ProgramKey, stored_as: str | None) -> OperatorProgram:
    return OperatorProgram(key, stored_as)


def compile_together(programs: Sequence[Any]) -> None:
    """Compile the programs that are not compiled yet, side by side."""
    missing = [program for program in programs if isinstance(program, OperatorProgram) and not program.is_compiled]
    if len(missing) > 1:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(OperatorProgram.compile, missing))
