"""What finds a fault in the arithmetic of a step: the lattice by every path, the proofs, the recorded words, and the tests of quantisers.

The functions import tcemu when they are called, in the process of a mutant. Operands and the words of the exact reference are computed once.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from support.mutant_runs import Detector
from support.mutations import Mutant

# an arithmetic for each form of the step; the lattices of these are small
QUICK = (
    "f16 in steps of 16 by 25", "e4m3 in steps of 32 by 13", "f16 in steps of 16 by 25 to f16", "bf16 in steps of 16 by 25",
    "e4m3 in steps of 32 by 25, ue8m0 scales of 32", "e5m2 as f16 in steps of 16 by 25",
    "f16 in steps of 16 by 25, C f32, D f16", "tf32 in steps of 8 by 25",
)  # fmt: skip


class LatticeCase(NamedTuple):
    """One lattice, by one path."""

    name: str
    path: str  # in `lattice_paths.PATHS`
    arithmetic: bytes  # pickled
    operands: tuple[Any, ...]
    expected: Any
    unchanged: frozenset[str]  # hashes of the kernels that the unmutated code compiles for it


class _Unchanged(Exception):
    """A kernel is the one of the unmutated code."""


def lattice_cases(quick: bool) -> list[LatticeCase]:
    """The lattices of the kernels for CPUs, and their words. For a process of its own. quick: small ones, of fewer arithmetics."""
    from support.lattice_paths import PATHS, build
    from support.llvm_products import arithmetics
    from support.step_lattice import LatticeBuilder, expected

    found, names = [], QUICK if quick else usual_names()
    for name in names:
        arithmetic = arithmetics()[name]
        for kind in ("tight", "spread", "small"):
            small = LatticeBuilder(arithmetic, seed=1)
            if kind == "small":
                lattice = build(arithmetic, kind)
            elif quick:
                lattice = small.tight(2) if kind == "tight" else small.spread(1, 24, 80)
            else:
                lattice = build(arithmetic, kind)
            words = expected(arithmetic, lattice)
            for path in ("llvm", "llvm without AVX-512", "llvm by columns"):
                if kind in PATHS[path].lattices and not (quick and path == "llvm by columns"):
                    found.append(LatticeCase(f"{path}, {kind}: {name}", path, pickle.dumps(arithmetic), lattice.operands, words, frozenset()))
    return found


def usual_names() -> tuple[str, ...]:
    """The arithmetics whose lattices the usual run has."""
    import sys

    sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(__file__)), "backends"))
    from test_step_lattice import USUAL

    return USUAL


def record_kernels(case: LatticeCase) -> LatticeCase | None:
    """The case with the kernels of the unmutated code; None if it has no kernel. For a process of its own. Raises AssertionError."""
    from tcemu.base.errors import Unsupported

    seen: set[str] = set()
    try:
        differ = _count(case, lambda key: seen.add(key))
    except Unsupported:
        return None
    assert differ == 0, f"{case.name}: {differ} words differ without a fault"
    return case._replace(unchanged=frozenset(seen))


def _count(case: LatticeCase, see: Callable[[str], None]) -> int:
    """Words of a lattice that differ from the exact reference. see: called with the hash of each kernel that is to be compiled."""
    import numpy as np
    from support.lattice_paths import PATHS

    from tcemu.backends import kernel_store
    from tcemu.backends.llvm import xla_call

    assert not xla_call.missing()
    start = kernel_store.start_compilation

    def watched(compiler: Any, text: str, target: str) -> Any:
        see(hashlib.sha256(f"{target}\n{text}".encode()).hexdigest()[:16])
        return start(compiler, text, target)

    kernel_store.start_compilation = watched
    try:
        got = PATHS[case.path].multiply(pickle.loads(case.arithmetic), case.operands)
    finally:
        kernel_store.start_compilation = start
    return int((np.asarray(got).astype(np.int64) != case.expected).sum())


def by_lattice(case: LatticeCase) -> Detector:
    """A lattice by a kernel. A kernel that the fault has not changed is not run again."""

    def see(key: str) -> None:
        if key in case.unchanged:
            raise _Unchanged

    def run() -> str:
        try:
            differ = _count(case, see)
        except _Unchanged:
            return ""
        return f"{differ} of {case.expected.size} words" if differ else ""

    return Detector(case.name, run)


def lattice_detectors(cases: list[LatticeCase], before: Counter[str]) -> list[Detector]:
    """Detectors, first those that have found the most faults of the same function."""
    return [by_lattice(case) for case in sorted(cases, key=lambda case: -before[case.name])]
