"""Mutants in processes of their own, in which detectors run until one finds the fault. No file of the tree changes.

A fault in a function's body is put into the imported module: the function gets the code of the mutated text, which takes no time. A fault
that an import executes is imported in place of the file; then the parent has only imported what it cannot reach. The parent starts no
backend of JAX, so that it can be forked.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pickle
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

from support.mutations import ROOT, Mutant

MOST_SECONDS = 240.0  # of one process
MOST_MEMORY = 12 << 30  # bytes of addresses of one process


class Finding(NamedTuple):
    """What became of a mutant."""

    by: str  # the detector that found it; "" where it survived
    how: str  # what the detector saw
    seconds: float


class Detector(NamedTuple):
    """Something that may find a fault. It is called in a process of its own."""

    name: str
    run: Callable[[], str]  # what it saw; "" for nothing


# ---- modules


def module_name(path: str) -> str:
    """The name of the module of a file of the repository."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _imports(module: str) -> frozenset[str]:
    """Modules of tcemu that a module imports when it is imported, its packages among them."""
    path = _file_of(module)
    if path is None:
        return frozenset()
    found = {module.rsplit(".", 1)[0]} if "." in module else set()
    for node in _executed(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in found if name.split(".")[0] == "tcemu" and _file_of(name) is not None)


def _executed(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that an import executes, without those for type checkers."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from _executed([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With):
            yield from _executed(node.body)


@cache
def _file_of(module: str) -> Path | None:
    base = ROOT / module.replace(".", "/")
    return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


def untouched_modules(names: Iterable[str], mutated: set[str]) -> list[str]:
    """Those of the modules that import none of the mutated ones, directly or not."""
    importers: dict[str, set[str]] = {}
    names = list(names)
    waiting, seen = list(names), set(names)
    while waiting:
        module = waiting.pop()
        for other in _imports(module):
            importers.setdefault(other, set()).add(module)
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    touched, waiting = set(mutated), list(mutated)
    while waiting:
        new = importers.get(waiting.pop(), set()) - touched
        touched |= new
        waiting += new
    return [name for name in names if name not in touched]


class _MutantLoader(SourceFileLoader):
    """Imports a file with another text."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class MutantFinder(MetaPathFinder):
    """Finds one module, with another text."""

    def __init__(self, path: str, source: str) -> None:
        self._module, self._path, self._source = module_name(path), str(ROOT / path), source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=_MutantLoader(fullname, self._path, self._source), submodule_search_locations=None
        )


def replace_function(mutant: Mutant) -> None:
    """From now on, the function that holds a fault has the code of the mutated text. Its module is imported."""
    module = sys.modules[module_name(mutant.path)]
    namespace = {"__name__": module.__name__, "__file__": module.__file__}
    exec(compile(mutant.source(), mutant.path, "exec", dont_inherit=True), namespace)
    _function(vars(module), mutant.place).__code__ = _function(namespace, mutant.place).__code__


def _function(namespace: dict[str, Any], place: str) -> Any:
    """The outermost function of a place, without its decorators."""
    names = iter(place.split("."))
    found: Any = namespace[next(names)]
    while isinstance(found, type):
        found = vars(found)[next(names)]
    found = found.fget if isinstance(found, property) else found
    while hasattr(found, "__wrapped__"):
        getattr(found, "cache_clear", lambda: None)()
        found = found.__wrapped__
    return found


def replace_text(path: str, source: str) -> None:
    """From now on, who reads a file of the repository gets another text."""
    read = Path.read_text

    def read_text(self: Path, *arguments: Any, **options: Any) -> str:
        return source if self == ROOT / path else read(self, *arguments, **options)

    Path.read_text = read_text  # type: ignore[method-assign]


# ---- processes


def call_in_child(function: Callable[[], Any], seconds: float = MOST_SECONDS) -> Any:
    """What a function returns in a forked process. Raises RuntimeError if the process dies or takes too long."""
    (result,) = run_children([function], 1, seconds)
    if isinstance(result, str):
        raise RuntimeError(result)
    return result[0]


def run_children(functions: Iterable[Callable[[], Any]], workers: int, seconds: float = MOST_SECONDS) -> Iterator[tuple[Any] | str]:
    """Runs each function in a forked process. Yields, in order, (its result,), or how the process ended."""
    waiting, running, done, at, following = iter(enumerate(functions)), {}, {}, 0, True
    while True:
        while following and len(running) < workers:
            following = next(waiting, None)
            if following is not None:
                index, function = following
                pid, pipe = _fork(function)
                running[pipe] = index, pid, time.monotonic() + seconds, bytearray()
        if not running and at not in done:
            return
        readable, _, _ = select.select(list(running), [], [], 0.5) if running else ([], [], [])
        for pipe in list(running):
            index, pid, limit, data = running[pipe]
            late = time.monotonic() > limit
            if pipe in readable and (part := os.read(pipe, 1 << 20)):
                data += part
            elif pipe in readable or late:
                if late:
                    os.kill(pid, signal.SIGKILL)
                os.close(pipe)
                del running[pipe]
                _, status = os.waitpid(pid, 0)
                code = os.waitstatus_to_exitcode(status)
                done[index] = (pickle.loads(data),) if code == 0 else f"took more than {seconds:g} s" if late else f"exit status {code}"
        while at in done:
            yield done.pop(at)
            at += 1


def _fork(function: Callable[[], Any]) -> tuple[int, int]:
    read, write = os.pipe()
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; it has no thread yet
        pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    status = 1
    try:
        import resource  # missing on Windows, as os.fork is

        os.close(read)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2) if "MUTANTS_VERBOSE" not in os.environ else (1,):
            os.dup2(null, stream)
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(function(), pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
    raise AssertionError("unreachable")


# ---- mutants


def examine(mutant: Mutant, detectors: Callable[[], Iterable[Detector]]) -> Finding:
    """Plants the fault and runs the detectors until one finds it. For a process of its own."""
    began = time.monotonic()
    finding = lambda by, how: Finding(by, how, round(time.monotonic() - began, 2))
    if not mutant.path.endswith(".py"):
        replace_text(mutant.path, mutant.source())
    elif not mutant.is_executed_by_import:
        replace_function(mutant)
    else:
        assert module_name(mutant.path) not in sys.modules, f"{mutant.path} is imported already"
        sys.meta_path.insert(0, MutantFinder(mutant.path, mutant.source()))
    name = "import"
    try:
        if mutant.path.endswith(".py"):  # at once: pytest has a finder of its own, which would import the file
            importlib.import_module(module_name(mutant.path))
        for detector in detectors():
            name = detector.name
            if how := detector.run():
                return finding(name, how)
    except Exception as error:
        return finding(name, f"{type(error).__name__}: {error}"[:200])
    return finding("", "")


def examine_all(
    mutants: list[Mutant], detectors: Callable[[Mutant, Counter[str]], Iterable[Detector]], workers: int, seconds: float = MOST_SECONDS
) -> Iterator[tuple[Mutant, Finding]]:
    """Examines each mutant in a process of its own.

    Args:
        mutants: The mutants.
        detectors: Called in the process, with the number of faults that each detector has found in the mutant's function so far.
        workers: Processes at a time.
        seconds: Of a process; one that takes longer has found the fault.
    """
    found: dict[tuple[str, str], Counter[str]] = {}

    def functions() -> Iterator[Callable[[], Finding]]:
        for mutant in mutants:
            before = found.setdefault((mutant.path, mutant.place), Counter())
            if mutant.path.endswith(".py"):
                compile(mutant.source(), mutant.path, "exec")  # a fault that is none of syntax
            yield lambda m=mutant, b=before: examine(m, lambda: detectors(m, b))

    for mutant, result in zip(mutants, run_children(functions(), workers, seconds), strict=True):
        finding = Finding("process", result, 0.0) if isinstance(result, str) else result[0]
        if finding.by:
            found[mutant.path, mutant.place][finding.by] += 1
        yield mutant, finding


def as_line(mutant: Mutant, finding: Finding) -> str:
    """A line of JSON."""
    fields = {"name": mutant.name, "line": mutant.line, "column": mutant.column, "kind": mutant.kind}
    return json.dumps(fields | finding._asdict(), ensure_ascii=False)
