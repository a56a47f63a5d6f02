"""Changes the description of a step at one place at a time and shows that the usual tests find it.

python tests/mutate_step.py                              mutants of the description: found by what, or survived
python tests/mutate_step.py --subject loops              of the loops of the kernels for CPUs
python tests/mutate_step.py --every 1 --only rounding    all of those whose name has this text
python tests/mutate_step.py --list                       only prints them, with their diffs
python tests/mutate_step.py --table found.jsonl          also writes a line of JSON for each, and goes on where an earlier run stopped

A mutant runs in a process of its own, and no file changes. First come small lattices by the kernels for CPUs, which take a second, and
by JAX; for the CUDA texts by the kernels that g++ compiles for a CPU. What these do not find goes through those test files of the usual
run that `TESTS` names. tests/mutants_equivalent.json says of each other survivor why it computes the same. The script fails if one
survives that is not there, or if the file names one that does not exist or is found.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

from support import mutant_detectors
from support.mutant_detectors import LatticeCase
from support.mutant_runs import Finding, as_line, call_in_child, examine_all, module_name, run_children, untouched_modules
from support.mutations import ROOT, Mutant, cuda_mutants, python_mutants

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
# by the pages of the description, and by subjects: test files that find what the small lattices do not
TESTS = {
    "anchored": (
        "arithmetic/test_step_formulas",
        "arithmetic/test_whole_steps",
        "proofs/test_anchored_proofs",
        "arithmetic/test_anchored_form",
    ),
    "bounded": ("proofs/test_float_sum_proofs", "proofs/test_bounded_proofs", "arithmetic/test_bounded_steps"),
    "decoding": ("proofs/test_decoding_proofs", "proofs/test_quantizing_proofs", "arithmetic/test_whole_steps"),
    "forms": ("proofs/test_tight_guards", "proofs/test_guard_proofs", "arithmetic/test_anchored_form", "arithmetic/test_whole_steps"),
    "general": ("arithmetic/test_step_formulas", "proofs/test_general_proofs", "arithmetic/test_whole_steps"),
    "groups": ("arithmetic/test_step_formulas",),
    "kept_floats": ("arithmetic/test_whole_steps",),
    "quantizing": ("proofs/test_quantizing_proofs",),
    "rounding": ("proofs/test_rounding_proofs", "arithmetic/test_step_formulas", "proofs/test_bounded_proofs"),
    "specials": ("proofs/test_decoding_proofs", "arithmetic/test_whole_steps"),
    "values": ("proofs/test_renderers", "arithmetic/test_step_formulas", "proofs/test_quantizing_proofs", "proofs/test_general_proofs"),
    "loops": ("backends/test_llvm_small", "../uses/fuzz/test_draw_kernel", "backends/test_llvm_groups", "backends/test_llvm_steps"),
    "cuda": ("backends/test_cuda_registers", "backends/test_cuda"),
}
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")
OUTSIDE = ("jax", "chex", "numpy", "llvmlite", "ml_dtypes", "pytest", "bitwuzla")  # packages that are imported before a process forks
EVERY = {"description": 16, "loops": 21, "cuda": 45}  # one of so many mutants: see `choose`
SAMPLE = 6  # mutants of the usual run
SECONDS, LATTICE_SECONDS = 900.0, 120.0  # of a process that runs tests, or lattices


def all_mutants(subject: str) -> list[Mutant]:
    """The mutants of a subject, in the order of its files."""
    return [mutant for path in SUBJECTS[subject] for mutant in (python_mutants if path.endswith(".py") else cuda_mutants)(path)]


def choose(mutants: Iterable[Mutant], every: int, only: str = "") -> list[Mutant]:
    """One of every so many mutants of each function of the description and of each other file, at least one: the least hashes.

    only: What their names have.
    """
    mutants = [mutant for mutant in mutants if only in mutant.name]
    place_of = lambda mutant: (mutant.path, mutant.place if mutant.path.startswith(STEP) else "")
    of_place = Counter(map(place_of, mutants))
    chosen: Counter[tuple[str, str]] = Counter()
    names = set()
    for mutant in sorted(mutants, key=_hash):
        place = place_of(mutant)
        if chosen[place] < -(-of_place[place] // every):
            chosen[place] += 1
            names.add(mutant.name)
    return [mutant for mutant in mutants if mutant.name in names]


def sample(mutants: list[Mutant]) -> list[Mutant]:
    """`SAMPLE` mutants, the same ones each time: of those without a reason the ones with the least hashes."""
    known = known_equivalents()
    return sorted((mutant for mutant in mutants if mutant.name not in known), key=_hash)[:SAMPLE]


def _hash(mutant: Mutant) -> int:
    # without the wing, so that the choice outlives a move of the folders
    return crc32(mutant.name.replace("tcemu/engine/", "tcemu/", 1).encode())


def import_modules(mutated: set[str]) -> None:
    """Imports what the detectors need and no fault in the mutated modules reaches. It starts no backend of JAX."""
    names = call_in_child(_names_of_imports)
    packages = [name for name in names if name.split(".")[0] in OUTSIDE]
    for name in [*packages, *untouched_modules((name for name in names if name.split(".")[0] == "tcemu"), mutated)]:
        importlib.import_module(name)
    assert not mutated & set(sys.modules)


def _names_of_imports() -> list[str]:
    """The modules that detectors import. For a process of its own."""
    for name in ("support.lattice_paths", *(module_name(path) for path in SUBJECTS["description"] + SUBJECTS["loops"])):
        importlib.import_module(name)
    specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
    return [name for name, spec in specs.items() if spec is not None and spec.name == name]  # others are names of another module


def recorded_cases(lattices: Callable[[], list[LatticeCase]], files: tuple[str, ...], workers: int) -> list[LatticeCase]:
    """Lattices with what each executes without a fault."""
    found, cases = [], call_in_child(lattices, SECONDS)
    for result in run_children([lambda c=c: mutant_detectors.record(c, files) for c in cases], workers, SECONDS):
        if isinstance(result, str):
            raise RuntimeError(f"without a fault: {result}; MUTANTS_VERBOSE=1 shows what it printed")
        found += result if result[0] is not None else ()
    return found


def examine(
    mutants: list[Mutant],
    files: tuple[str, ...],
    workers: int,
    lattices: Callable[[], list[LatticeCase]],
    with_tests: bool = True,
    table: Path | None = None,
) -> list[tuple[Mutant, Finding]]:
    """What becomes of each mutant, in their order.

    Args:
        mutants: The mutants.
        files: All files that are mutated.
        workers: Processes at a time.
        lattices: Returns the small lattices. It is called in a process of its own.
        with_tests: Tests look at what the small lattices do not find.
        table: A file to which a line is added for each finding. Of mutants that are there, only survivors go through the tests again.
    """
    known = _read_table(table)
    os.environ["TCEMU_KERNELS"] = tempfile.mkdtemp(prefix="tcemu-mutants-")
    os.environ["JAX_PLATFORMS"] = "cpu"
    import_modules({module_name(path) for path in files if path.endswith(".py")})
    found: dict[str, Finding] = dict(known)

    def run(chosen: list[Mutant], detectors: Any, seconds: float) -> None:
        for mutant, finding in examine_all(chosen, detectors, workers, seconds):
            found[mutant.name] = finding
            _show(mutant, finding, table)

    cases = recorded_cases(lattices, files, workers) if any(mutant.name not in known for mutant in mutants) else []
    passing: set[tuple[str, ...]] = set()
    by_subject = next((TESTS[name] for name in ("loops", "cuda") if files == SUBJECTS[name]), ())
    tests_of = lambda mutant: by_subject or TESTS[Path(mutant.path).stem]
    for by_import in (True, False):
        chosen = [mutant for mutant in mutants if mutant.is_executed_by_import == by_import]
        if not by_import:
            import_modules(set())
            importlib.import_module("support.llvm_products").arithmetics()  # which takes half a second
        rest = [mutant for mutant in chosen if mutant.name not in known]
        run(rest, lambda mutant, before: mutant_detectors.lattice_detectors(cases, mutant, before), LATTICE_SECONDS)
        survivors = [mutant for mutant in chosen if not found[mutant.name].by]
        if with_tests:
            require_passing_tests({tests_of(mutant) for mutant in survivors} - passing, workers)
            passing |= {tests_of(mutant) for mutant in survivors}
            run(survivors, lambda mutant, _: map(mutant_detectors.by_tests, tests_of(mutant)), SECONDS)
    return [(mutant, found[mutant.name]) for mutant in mutants]


def require_passing_tests(lists: set[tuple[str, ...]], workers: int) -> None:
    """Run each list of test files in a process without a fault. Raises RuntimeError if one fails: it would find every mutant."""
    chosen = sorted(lists)
    runs = [lambda names=names: [seen for name in names if (seen := mutant_detectors.by_tests(name).run())] for names in chosen]
    for names, result in zip(chosen, run_children(runs, workers, SECONDS), strict=True):
        if isinstance(result, str) or result[0]:
            raise RuntimeError(f"without a fault: {', '.join(names)}: {result if isinstance(result, str) else result[0]}")


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
    parser.add_argument("--every", type=int, metavar="N", help=f"one of every N mutants; as it is: {EVERY}")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose name has this text")
    parser.add_argument("--sample", action="store_true", help=f"{SAMPLE} mutants of the description")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--without-tests", action="store_true", help="small lattices alone")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--table", type=Path, metavar="FILE", help="write a line of JSON for each mutant")
    given = parser.parse_args(words)
    every = all_mutants(given.subject)
    mutants = sample(every) if given.sample else choose(every, given.every or EVERY[given.subject], given.only)
    if given.list:
        print("\n".join(mutant.diff() for mutant in mutants))
        print(f"{len(mutants)} of {len(every)} mutants")
        return 0
    began = time.monotonic()
    lattices = mutant_detectors.cuda_lattices if given.subject == "cuda" else mutant_detectors.small_lattices
    lattices = mutant_detectors.few_lattices if given.sample else lattices
    findings = examine(mutants, SUBJECTS[given.subject], given.workers, lattices, not given.without_tests, given.table)
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
