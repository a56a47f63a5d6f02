"""Changes the description of a step at one place at a time and shows that the usual tests find it.

python tests/mutate_step.py                              mutants of the description: found by what, or survived
python tests/mutate_step.py --subject loops              of the loops of the kernels for CPUs
python tests/mutate_step.py --every 10 --only rounding   a tenth of those whose name has this text
python tests/mutate_step.py --list                       only prints them, with their diffs
python tests/mutate_step.py --table found.jsonl          also writes a line of JSON for each, and goes on where an earlier run stopped

A mutant runs in a process of its own, and no file changes. First come small lattices by the kernels for CPUs, which take a
second, and by JAX. Survivors
go through those tests of the usual run that execute the changed statement. tests/mutants_equivalent.json says of each other survivor why
it computes the same. The script fails if one survives that is not there, or if the file names one that does not exist or is found.
"""

import argparse
import hashlib
import importlib
import json
import os
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from support import mutant_detectors, mutant_tests
from support.mutant_detectors import LatticeCase
from support.mutant_runs import Finding, as_line, call_in_child, examine_all, module_name, run_children, untouched_modules
from support.mutant_tests import TestCase
from support.mutations import ROOT, Mutant, cuda_mutants, python_mutants

from tcemu.base.files import replace_file

STEP, LLVM, CUDA = "tcemu/engine/arithmetic/step", "tcemu/engine/backends/llvm", "tcemu/engine/backends/cuda/kernels"
NOT_RUN = ("machine", "quantize")  # files of CUDA C++ that no lattice executes
SUBJECTS = {
    "description": tuple(
        f"{STEP}/{name}.py"
        for name in (
            "anchored", "bounded", "decoding", "forms", "general", "groups", "kept_floats", "quantizing", "rounding", "specials", "values",
        )
    ),
    "loops": tuple(
        f"{LLVM}/{name}.py" for name in ("bounded_lanes", "step_kernel", "general_steps", "grouped_kernel", "small_kernel", "blocks")
    ),
    "cuda": tuple(sorted(str(path.relative_to(ROOT)) for path in (ROOT / CUDA).glob("*.cu") if path.stem not in NOT_RUN)),
}  # fmt: skip
TEST_FILES = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/engine/proofs").glob("test_*.py") if path.stem != "test_proof_table"),
    "tests/engine/arithmetic/test_bounded_steps.py", "tests/engine/arithmetic/test_small_products.py", "tests/engine/backends/test_llvm_elementwise.py",
    "tests/operations/quantize/test_quantize_kernel.py", "tests/engine/backends/test_llvm_small.py", "tests/engine/backends/test_llvm_groups.py",
    "tests/engine/backends/test_step_lattice.py",
)  # fmt: skip
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
OUTSIDE = ("jax", "chex", "numpy", "llvmlite", "ml_dtypes", "pytest", "bitwuzla")  # packages that are imported before a process forks
SAMPLE = 12  # mutants of the usual run
SECONDS = 900.0  # of a process that runs tests


def all_mutants(subject: str) -> list[Mutant]:
    """The mutants of a subject, in the order of its files."""
    return [mutant for path in SUBJECTS[subject] for mutant in (python_mutants if path.endswith(".py") else cuda_mutants)(path)]


def choose(mutants: Iterable[Mutant], every: int, only: str = "") -> list[Mutant]:
    """One of every so many mutants, the same ones each time, of those whose names have a text."""
    return [mutant for mutant in mutants if only in mutant.name and crc32(mutant.name.encode()) % every == 0]


def sample(mutants: list[Mutant]) -> list[Mutant]:
    """`SAMPLE` mutants, the same ones each time: of those without a reason the ones with the least hashes."""
    known = known_equivalents()
    least = sorted((mutant for mutant in mutants if mutant.name not in known), key=lambda mutant: crc32(mutant.name.encode()))
    return least[:SAMPLE]


def import_untouched(files: tuple[str, ...]) -> None:
    """Imports what the detectors need and no fault in the files reaches. It starts no backend of JAX."""
    names = call_in_child(_names_of_imports)
    packages = [name for name in names if name.split(".")[0] in OUTSIDE]
    mutated = {module_name(path) for path in files if path.endswith(".py")}
    own = untouched_modules((name for name in names if name.split(".")[0] == "tcemu"), mutated)
    for name in [*packages, *own]:
        importlib.import_module(name)
    assert not mutated & set(sys.modules)


def _names_of_imports() -> list[str]:
    """The modules that detectors import. For a process of its own."""
    for name in ("support.lattice_paths", *(module_name(path) for path in SUBJECTS["description"] + SUBJECTS["loops"])):
        importlib.import_module(name)
    specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
    return [name for name, spec in specs.items() if spec is not None and spec.name == name]  # others are names of another module


def recorded_cases(files: tuple[str, ...], workers: int) -> list[LatticeCase]:
    """The small lattices, with what each executes without a fault."""
    lattices = mutant_detectors.small_lattices if files != SUBJECTS["cuda"] else mutant_detectors.cuda_lattices
    cases = call_in_child(lattices, SECONDS)
    return [case for case in _results([lambda c=c: mutant_detectors.record(c, files) for c in cases], workers) if case is not None]


def recorded_tests(files: tuple[str, ...], workers: int) -> list[TestCase]:
    """The tests of the usual run, with what each executes without a fault: kept in a folder for the same sources."""
    digest = hashlib.sha256(json.dumps(files).encode())
    for path in sorted([*(ROOT / "tcemu").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"tcemu-mutants-{os.getuid()}-{digest.hexdigest()[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    assert folder.stat().st_uid == os.getuid()

    def record(test_file: str) -> list[TestCase]:
        kept = folder / f"{Path(test_file).stem}.pickle"
        if not kept.is_file():
            replace_file(kept, pickle.dumps(mutant_tests.record_tests(test_file, files)))
        return pickle.loads(kept.read_bytes())

    return [case for cases in _results([lambda f=f: record(f) for f in TEST_FILES], workers) for case in cases]


def _results(functions: list, workers: int) -> list:
    found = []
    for result in run_children(functions, workers, SECONDS):
        if isinstance(result, str):
            raise RuntimeError(f"without a fault: {result}; MUTANTS_VERBOSE=1 shows what it printed")
        found.append(result[0])
    return found


def examine(
    mutants: list[Mutant], files: tuple[str, ...], workers: int, with_tests: bool = True, table: Path | None = None
) -> list[tuple[Mutant, Finding]]:
    """What becomes of each mutant, in their order.

    Args:
        mutants: The mutants.
        files: All files that are mutated.
        workers: Processes at a time.
        with_tests: Tests look at what the small lattices do not find.
        table: A file to which a line is added for each finding. Of mutants that are there, only survivors go through the tests again.
    """
    known = _read_table(table)
    os.environ["TCEMU_KERNELS"] = tempfile.mkdtemp(prefix="tcemu-mutants-")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import_untouched(files)
    cases = recorded_cases(files, workers)
    found: dict[str, Finding] = {}
    rest = [mutant for mutant in mutants if mutant.name not in known]
    found.update(known)
    by_lattice = lambda mutant, before: mutant_detectors.lattice_detectors(cases, mutant, before)
    for mutant, finding in examine_all(rest, by_lattice, workers):
        found[mutant.name] = finding
        _show(mutant, finding, table)
    survivors = [mutant for mutant in mutants if not found[mutant.name].by]
    if with_tests and survivors and files != SUBJECTS["cuda"]:
        print(f"{len(survivors)} of {len(mutants)} survive the small lattices", flush=True)
        tests = recorded_tests(files, workers)
        for mutant, finding in examine_all(survivors, lambda mutant, _: mutant_tests.test_detectors(tests, mutant), workers, SECONDS):
            found[mutant.name] = finding
            _show(mutant, finding, table)
    return [(mutant, found[mutant.name]) for mutant in mutants]


def _read_table(table: Path | None) -> dict[str, Finding]:
    """The last findings of earlier runs, by the names of the mutants."""
    rows = map(json.loads, table.read_text().splitlines()) if table is not None and table.is_file() else ()
    return {row["name"]: Finding(row["by"], row["how"], row["seconds"]) for row in rows}


def _show(mutant: Mutant, finding: Finding, table: Path | None) -> None:
    if table is not None:
        with table.open("a") as file:
            file.write(f"{as_line(mutant, finding)}\n")
    print(f"{mutant.diff()}\n  {finding.seconds} s: {f'{finding.by}: {finding.how}' if finding.by else 'survives'}", flush=True)


def known_equivalents() -> dict[str, str]:
    """The reason why a mutant computes the same, by its name."""
    return json.loads(EQUIVALENT.read_text())


def complaints(findings: list[tuple[Mutant, Finding]], equivalent: dict[str, str]) -> list[str]:
    """What is wrong with the findings: mutants that survive without a reason, and reasons for mutants that are found."""
    survive = [f"survives: {mutant.diff()}" for mutant, finding in findings if not finding.by and mutant.name not in equivalent]
    return survive + [f"is found, so it is not equivalent: {m.name}" for m, finding in findings if finding.by and m.name in equivalent]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", choices=SUBJECTS, default="description")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one of every N mutants")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name has this text")
    parser.add_argument("--sample", action="store_true", help=f"{SAMPLE} mutants of the description, which small lattices find")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--without-tests", action="store_true", help="small lattices alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a line of JSON for each mutant")
    given = parser.parse_args(words)
    every = all_mutants(given.subject)
    mutants = sample(every) if given.sample else choose(every, given.every, given.only)
    if given.list:
        print("\n".join(mutant.diff() for mutant in mutants))
        print(f"{len(mutants)} of {len(every)} mutants")
        return 0
    began = time.monotonic()
    findings = examine(mutants, SUBJECTS[given.subject], given.workers, not given.without_tests, given.table)
    equivalent = known_equivalents()
    wrong = complaints(findings, equivalent)
    print("\n".join(wrong))
    for by, count in Counter(_family(finding) for _, finding in findings).most_common():
        print(f"{count:6} {by}")
    reasons = sum(mutant.name in equivalent for mutant, finding in findings if not finding.by)
    print(f"{len(findings)} mutants, {reasons} of the survivors are equivalent; {time.monotonic() - began:.0f} s")
    return int(bool(wrong))


def _family(finding: Finding) -> str:
    if not finding.by:
        return "survive"
    if finding.by == "tests":
        return f"found by {finding.how.split('::')[0]}"
    return "found by an error" if "Error" in finding.how else f"found by {finding.by}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
