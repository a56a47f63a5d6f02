"""Runs the corpus: `python tests/kernels/corpus/run_corpus.py [NAME or KIND ...]`.

Prints which kernels are right, wrong and refused, and the CPU seconds of each. Kinds: "inline PTX", "CUDA C++" (extra `cuda`), "Triton"
(extra `triton`), "CuTe DSL" (extra `cute`); one without its package is left out. The exit status is 0 if all are right.
"""

import importlib
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from kernels.corpus.corpus_table import CASES, check

MODULES = ("cuda_kernels", "inline_ptx_kernels", "triton_functions", "cute_functions")


def load_cases() -> dict[str, str]:
    """Import the kernels of each kind whose package is installed. Returns the reasons why others are left out."""
    missing = {}
    for name in MODULES:
        try:
            importlib.import_module(f"kernels.corpus.{name}")
        except ImportError as error:
            missing[name] = str(error)
    return missing


def main() -> int:
    for name, reason in load_cases().items():
        print(f"left out: {name} ({reason})")
    asked = sys.argv[1:]
    counts = Counter()
    for name, case in CASES.items():
        if asked and name not in asked and case.kind not in asked:
            continue
        start, said = time.process_time(), ""
        try:
            check(name)
            verdict = "right"
        except AssertionError as error:
            verdict, said = "WRONG", str(error)
        except Exception as error:
            verdict, said = "REFUSED", f"{type(error).__name__}: {error}"
        counts[case.kind, verdict] += 1
        print(f"{verdict:8} {case.kind:10} {name:48} {time.process_time() - start:6.2f} s {said[:300]}", flush=True)
    print(*(f"{kind}: {count} {verdict}" for (kind, verdict), count in sorted(counts.items())), sep="\n")
    return int(any(verdict != "right" for _, verdict in counts))


if __name__ == "__main__":
    sys.exit(main())
