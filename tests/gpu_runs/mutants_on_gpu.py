"""Puts those mutants of the CUDA texts that CPUs do not find before a GPU: `python tests/gpu_runs/mutants_on_gpu.py TABLE OUT`.

TABLE is the file of `tests/mutate_step.py --subject cuda --table`. Each survivor gets a copy of the tree, in which the lattice of a step,
the recorded words and the tests of the kernels run until one of them fails; some mutants at a time. OUT gets a line of JSON for each.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from mutate_step import all_mutants, known_equivalents  # noqa: E402

AT_A_TIME, SECONDS = 7, 400.0
TESTS = "tests/engine/backends/test_gpu.py"
DETECTORS = {  # the fastest first
    "promoted sums": ["-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "gpu", TESTS, "-k", "promoted or scales or vmap"],
    "recorded words of mma.sp": ["tests/replay_golden.py", "mma_sp", "--execution", "emulated"],
    "registers": ["-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m", "gpu", TESTS, "-k", "registers or warpgroup"],
    "lattice of groups": ["tests/compare_lattice.py", "--paths", "cuda", "--only", "e2m1 in steps of 64"],
    "lattice of scales": ["tests/compare_lattice.py", "--paths", "cuda", "--only", "e4m3 in steps of 32 by 25, ue8m0"],
}


def examine(mutant, tree: Path) -> dict:
    """What becomes of a mutant, in a copy of the tree."""
    shutil.copytree(ROOT / "tcemu", tree / "repository/tcemu")
    for name in ("tests", "pyproject.toml", "tcemu_pytest.py"):
        (tree / "repository" / name).symlink_to(ROOT / name)
    if (ROOT.parent / "shared").exists():
        (tree / "shared").symlink_to(ROOT.parent / "shared")
    (tree / "repository" / mutant.path).write_text(mutant.source())
    # a script's own folder comes first on its path and is a link's target: the tree must be on it before
    environment = os.environ | {
        "PYTHONPATH": f"{tree / 'repository'}:{os.environ.get('PYTHONPATH', '')}",
        "TCEMU_KERNELS": str(tree / "kernels"),
    }
    environment |= {"TCEMU_COMPILATION_CACHE": "off", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    began = time.monotonic()
    for name, words in DETECTORS.items():
        try:
            run = subprocess.run(
                [sys.executable, *words], cwd=tree / "repository", env=environment, text=True, capture_output=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"name": mutant.name, "by": name, "how": "does not end", "seconds": time.monotonic() - began}
        if run.returncode:
            how = (run.stdout.strip() or run.stderr.strip()).splitlines()[-1][:300]
            return {"name": mutant.name, "by": name, "how": how, "seconds": time.monotonic() - began}
    return {"name": mutant.name, "by": "", "how": "", "seconds": time.monotonic() - began}


def main(table: Path, out: Path) -> int:
    rows = {row["name"]: row for row in map(json.loads, table.read_text().splitlines())}
    equivalent = known_equivalents()
    mutants = [m for m in all_mutants("cuda") if m.name in rows and not rows[m.name]["by"] and m.name not in equivalent]

    def run(mutant) -> bool:
        with tempfile.TemporaryDirectory() as tree:
            finding = examine(mutant, Path(tree))
        with out.open("a") as file:
            file.write(json.dumps(finding) + "\n")
        print(f"{mutant.diff()}\n  {finding['seconds']:.0f} s: {finding['by'] or 'survives'} {finding['how']}", flush=True)
        return bool(finding["by"])

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        found = list(pool.map(run, mutants))
    print(f"{sum(found)} of {len(found)} mutants are found on this GPU")
    return int(not all(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
