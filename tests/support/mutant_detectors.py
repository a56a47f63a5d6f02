"""Detectors of faults: files of tests, and small lattices of a step by the kernels for CPUs, by JAX and by the CUDA kernels on a CPU.

The functions import tcemu when they are called, in the process of a mutant. Operands and the reference's words are computed once.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

from support.mutant_runs import Detector
from support.mutations import ROOT, Mutant

# an arithmetic for each form of the step; the lattices of these are small
QUICK = (
    "f16 in steps of 16 by 25", "e4m3 in steps of 32 by 13", "f16 in steps of 16 by 25 to f16", "bf16 in steps of 16 by 25",
    "e4m3 in steps of 32 by 25, ue8m0 scales of 32", "e2m1 in steps of 64 by 35, ue4m3 scales of 16", "e5m2 as f16 in steps of 16 by 25",
    "f16 in steps of 16 by 25, C f32, D f16", "tf32 in steps of 8 by 25", "e5m2 in steps of 32 by 25, ue8m0 scales of 32",
    "e2m3 in steps of 32 by 25, ue8m0 scales of 32",
)  # fmt: skip
# arithmetics that no instruction has: one of these, what its model has instead, and the format of A and B
WHAT_IFS: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    (QUICK[0], {"rounding": "RN", "alignment": "RZ", "result_bits": 6}, None),
    (QUICK[3], {"rounding": "RM", "alignment": "RN"}, None),
    (QUICK[3], {"rounding": "RP", "alignment": "RM", "result_bits": 6}, None),
    (QUICK[0], {"rounding": "RZ", "alignment": "RP"}, None),
    (QUICK[3], {"rounding": "RN", "alignment": "RZ"}, None),
    (QUICK[9], {"rounding": "RN"}, None),
    (QUICK[0], {"fraction_bits": 40}, None),
    (QUICK[0], {"terms": 6}, None),
    (QUICK[1], {}, "e4m3fnuz"),
    (QUICK[1], {}, "e5m2fnuz"),
)
OTHERS = tuple(f"{base} {changes} {fmt or ''}" for base, changes, fmt in WHAT_IFS)
KINDS = (("tight", "special", "spread", "tile", "guards", "lone", "few", "warp"), ("small",))
LLVM = ("llvm",)
CUDA = ("cuda integer on a CPU", "cuda tile on a CPU", "cuda warp on a CPU")
CUDA_NAMES = (QUICK[0], QUICK[1], QUICK[3], QUICK[4], QUICK[5], "f16 in steps of 16 by 25 to f16")


class Words(NamedTuple):
    """Operands, and the words of the exact reference."""

    operands: tuple[Any, ...]
    expected: Any


class LatticeCase(NamedTuple):
    """The lattices of one arithmetic, by one path."""

    name: str
    path: str  # in `lattice_paths.PATHS`
    arithmetic: bytes  # pickled
    lattices: tuple[Words, ...]
    unchanged: frozenset[str] = frozenset()  # hashes of the kernels that the unmutated code makes for it
    reached: frozenset[tuple[str, int]] = frozenset()  # lines that the unmutated code executes for it


class _Unchanged(Exception):
    """A kernel is the one of the unmutated code."""


def lattice_cases(paths: tuple[str, ...], names: tuple[str, ...]) -> list[LatticeCase]:
    """The small lattices of some arithmetics by some paths. For a process of its own."""
    from support.lattice_paths import PATHS, build
    from support.llvm_products import Arithmetic, arithmetics
    from support.step_lattice import LatticeBuilder, expected
    from tcemu.engine.formats.number_formats import FORMATS

    every = dict(arithmetics())
    for name, (base, changes, fmt) in zip(OTHERS, WHAT_IFS, strict=True):
        model, spec, block = arithmetics()[base]
        spec = spec if fmt is None else spec._replace(a=FORMATS[fmt], b=FORMATS[fmt])
        every[name] = Arithmetic(model.replace(**changes), spec, block)
    found = []
    for name in names:
        arithmetic = every[name]
        builder = LatticeBuilder(arithmetic, seed=1)
        words: dict[str, Words] = {}
        for kind in sorted({kind for path in paths for kind in PATHS[path].lattices}, key=(KINDS[0] + KINDS[1]).index):
            sizes = {"tight": (2,), "special": (2,), "spread": (1, 24, 80), "lone": (8,)}
            lattice = getattr(builder, kind)(*sizes[kind]) if kind in sizes else build(arithmetic, kind)
            words[kind] = Words(lattice.operands, expected(arithmetic, lattice))
        for path in paths:
            for kinds in KINDS:
                chosen = tuple(words[kind] for kind in kinds if kind in PATHS[path].lattices)
                if chosen:
                    found.append(LatticeCase(f"{path}{', small' * (kinds[0] == 'small')}: {name}", path, pickle.dumps(arithmetic), chosen))
    return found


def small_lattices() -> list[LatticeCase]:
    """Small lattices by the kernels for CPUs and by JAX. For a process of its own."""
    by_jax = {"portable": (QUICK[0], OTHERS[0]), "portable, bounded": (QUICK[1], QUICK[4])}  # XLA takes seconds to compile each
    jax_cases = [case for path, names in by_jax.items() for case in lattice_cases((path,), names)]
    return lattice_cases(LLVM, QUICK + OTHERS) + [case for case in jax_cases if "small" not in case.name]


def few_lattices() -> list[LatticeCase]:
    """The fastest of them. For a process of its own."""
    return lattice_cases(LLVM, (QUICK[0], QUICK[1], QUICK[4], QUICK[5]))


def cuda_lattices() -> list[LatticeCase]:
    """Lattices by the CUDA kernels, which g++ compiles for this CPU. For a process of its own."""
    return [case for path in CUDA for case in lattice_cases((path,), CUDA_NAMES)]


def record(case: LatticeCase, files: tuple[str, ...]) -> LatticeCase | None:
    """The case with the kernels and the lines of the unmutated code; None if it has no kernel. For a process of its own.

    Args:
        case: The case.
        files: Those whose lines are noted.

    Raises:
        AssertionError: A word differs without a fault.
    """
    from tcemu.base.errors import Unsupported
    from tcemu.engine.backends.llvm import xla_call

    assert not xla_call.missing(), xla_call.missing()
    kernels: set[str] = set()
    lines: set[tuple[str, int]] = set()
    try:
        with executed_lines(files, lines):
            for at, _ in enumerate(case.lattices):
                differ = _count(case, at, kernels.add)
                assert differ == 0, f"{case.name}: {differ} words differ without a fault"
    except Unsupported:
        return None
    return case._replace(unchanged=frozenset(kernels), reached=frozenset(lines))


@contextmanager
def executed_lines(files: tuple[str, ...], into: set[tuple[str, int]]) -> Any:
    """Within, the lines of the files that this thread executes are noted."""
    paths = {str(ROOT / path): path for path in files}

    def trace(frame: Any, event: str, _: Any) -> Any:
        path = paths.get(frame.f_code.co_filename)
        if path is None:
            return None
        into.add((path, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def _count(case: LatticeCase, at: int, see: Callable[[str], None]) -> int:
    """Words of a lattice that differ from the exact reference. see: called with the hash of each kernel that is made."""
    import numpy as np

    from support.compiling import compile_in_short_time
    from support.lattice_paths import PATHS
    from tcemu.engine.backends.llvm import machine_code, xla_call

    lattice = case.lattices[at]
    xla_call.missing = lambda: ""  # record has called kernels here
    if case.path in LLVM:
        machine_code.OPTIMISATION = 0  # a quarter of the time
        made = xla_call.Kernel.__new__

        def watched(kernel: Any, name: str, text: str, target: Any = None) -> Any:
            see(hashlib.sha256(f"{target}\n{text}".encode()).hexdigest()[:16])
            return made(kernel, name, text, target)

        xla_call.Kernel.__new__ = watched  # type: ignore[method-assign]
        try:
            got = PATHS[case.path].multiply(pickle.loads(case.arithmetic), lattice.operands)
        finally:
            xla_call.Kernel.__new__ = made  # type: ignore[method-assign]
    else:
        compile_in_short_time(True)
        got = PATHS[case.path].multiply(pickle.loads(case.arithmetic), lattice.operands)
    return int((np.asarray(got).astype(np.int64) != lattice.expected).sum())


def by_lattice(case: LatticeCase) -> Detector:
    """The lattices of a case. A kernel that the fault has not changed is not run again."""

    def see(key: str) -> None:
        if key in case.unchanged:
            raise _Unchanged

    def run() -> str:
        for at, lattice in enumerate(case.lattices):
            try:
                differ = _count(case, at, see)
            except _Unchanged:
                return ""
            if differ:
                return f"{differ} of {lattice.expected.size} words"
        return ""

    return Detector(case.name, run)


def lattice_detectors(cases: list[LatticeCase], mutant: Mutant, before: Counter[str]) -> list[Detector]:
    """Detectors, first those that have found the most faults of the same function. A fault that a case does not reach is not looked for."""
    lines = {(mutant.path, line) for line in range(mutant.first_line, mutant.last_line + 1)}
    chosen = [case for case in cases if mutant.is_executed_by_import or lines & case.reached]
    return [by_lattice(case) for case in sorted(chosen, key=lambda case: -before[case.name])]


class _FirstFailure:
    """Notes the first test that fails."""

    def __init__(self) -> None:
        self.seen = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.seen:
            crash = getattr(report.longrepr, "reprcrash", None)
            print(report.longrepr, file=sys.stderr)  # for MUTANTS_VERBOSE=1
            self.seen = f"{report.nodeid}: {' '.join(str(crash.message if crash else report.longrepr).split())}"[:300]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.seen:
            self.seen = f"{report.nodeid} cannot be collected"


def by_tests(name: str) -> Detector:
    """The tests of the usual run in a file."""

    def run() -> str:
        import pytest

        first = _FirstFailure()
        # pytest would rewrite the asserts of all of tcemu, which has a plugin
        options = "-q", "-x", "--assert=plain", "--tb=line", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"
        status = int(pytest.main([*options, str(ROOT / f"tests/engine/{name}.py")], plugins=[first]))
        return first.seen or ("" if status in (0, 5) else f"{name}: pytest ended with status {status}")

    return Detector("tests", run)
