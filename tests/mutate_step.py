"""Changes the description of a step at one place at a time, and shows that the tests find it.

python tests/mutate_step.py                           every mutant of the description, by every detector
python tests/mutate_step.py --files tcemu/arithmetic/step/rounding.py --every 10
python tests/mutate_step.py --list                    the mutants with their diffs; nothing is run
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from zlib import crc32

os.environ.setdefault("JAX_PLATFORMS", "cpu")
from support import mutant_detectors, mutant_runs
from support.mutant_runs import Finding, as_line, call_in_child, examine_all, module_name, run_children, untouched_modules
from support.mutations import ROOT, Mutant, python_mutants

DESCRIPTION = tuple(sorted(f"tcemu/arithmetic/step/{p.name}" for p in (ROOT / "tcemu/arithmetic/step").glob("*.py") if p.name != "__init__.py"))
LOOPS = tuple(f"tcemu/backends/llvm/{name}.py" for name in ("bounded_lanes", "step_kernel", "general_steps", "grouped_kernel", "small_kernel", "blocks") if (ROOT / f"tcemu/backends/llvm/{name}.py").is_file())


def prepare(files: tuple[str, ...]) -> None:
    """Imports in this process what no mutant of the files reaches. It starts no backend of JAX."""
    import jax  # noqa: F401
    import llvmlite.binding  # noqa: F401
    import llvmlite.ir  # noqa: F401
    import numpy  # noqa: F401

    names = call_in_child(_modules_of_detectors)
    safe = untouched_modules([n for n in names if n.split(".")[0] == "tcemu"], {module_name(path) for path in files})
    import importlib
    for name in [n for n in names if n.split(".")[0] in ("jax", "chex", "numpy", "llvmlite", "ml_dtypes")] + safe:
        if name in sys.modules: continue
        importlib.import_module(name)
    import oracles.vectorised_reference
    assert not [p for p in files if module_name(p) in sys.modules]


def _modules_of_detectors():
    before = set(sys.modules)
    import support.lattice_paths
    import tcemu.backends.llvm.general_steps
    import tcemu.backends.llvm.grouped_kernel
    import tcemu.backends.llvm.small_kernel
    import tcemu.backends.llvm.step_kernel
    import tcemu.arithmetic.step.jax_values
    return [n for n in sys.modules if n not in before]


def choose(mutants, every):
    return [m for m in mutants if crc32(m.name.encode()) % every == 0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", default=DESCRIPTION)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--usual", action="store_true")
    parser.add_argument("--paths", nargs="+", default=["llvm"])
    parser.add_argument("--survivors", type=Path)
    given = parser.parse_args()
    files = tuple(given.files)
    mutants = choose([m for path in files for m in python_mutants(path)], given.every)
    if given.survivors:
        import json
        left = {v["name"] for v in map(json.loads, given.survivors.read_text().splitlines()) if not v["by"]}
        mutants = [m for m in mutants if m.name in left]
    if given.list:
        for m in mutants: print(m.diff())
        print(len(mutants)); return 0
    os.environ["TCEMU_KERNELS"] = tempfile.mkdtemp(prefix="tcemu-mutants-")
    prepare(files)
    import time
    t = time.time()
    quick = not given.usual
    cases = call_in_child(lambda: mutant_detectors.lattice_cases(quick, tuple(given.paths)), 1000)
    print(len(cases), "cases", round(time.time() - t, 1), flush=True)
    recorded = list(run_children([lambda c=c: mutant_detectors.record(c, files) for c in cases], given.workers))
    assert not [r for r in recorded if isinstance(r, str)], [r for r in recorded if isinstance(r, str)]
    cases = [c[0] for c in recorded if c[0] is not None]
    print(len(cases), "cases with kernels", round(time.time() - t, 1), flush=True)
    counts = Counter()
    with open(given.table or os.devnull, "w") as out:
        for m, f in examine_all(mutants, lambda m, before: mutant_detectors.lattice_detectors(cases, m, before), given.workers):
            counts[bool(f.by)] += 1
            print(as_line(m, f), file=out, flush=True)
            if not f.by: print(m.diff(), "SURVIVED", f.seconds, flush=True)
            else: print("found", m.kind, m.line, f, flush=True)
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
