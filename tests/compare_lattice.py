"""Computes the lattice of a step on every path of this machine and counts the words that differ from the exact reference.

python tests/compare_lattice.py                    all arithmetics of every target, by the kernels for CPUs and the portable backend
python tests/compare_lattice.py --paths cuda       by the CUDA kernels; needs a GPU
python tests/compare_lattice.py --paths "cuda tile on a CPU"     by the text of a CUDA kernel, compiled by g++: ten seconds each
python tests/compare_lattice.py --repeats 10       ten times as many entries
"""

import argparse
import sys
import time
from collections import Counter

from support.lattice_paths import PATHS, count_differences
from support.llvm_products import arithmetics
from support.sampling import in_share

OF_CPUS = [path for path in PATHS if not path.startswith("cuda")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--paths", nargs="+", choices=PATHS, default=[path for path in PATHS if not path.startswith("cuda")], metavar="PATH"
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="", help="arithmetics whose name has this text")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="only the share I of N of the arithmetics")
    given = parser.parse_args()
    chosen = {name: arithmetic for name, arithmetic in arithmetics().items() if given.only in name and in_share(name, given.share)}
    wrong_words = 0
    for path in given.paths:
        words: Counter[str] = Counter()
        began = time.monotonic()
        for name, arithmetic in chosen.items():
            for kind, differ, count in count_differences(arithmetic, path, given.repeats):
                words["differ"] += differ
                words["all"] += count
                if differ:
                    print(f"{path}, {kind}: {name}: {differ} of {count} words differ", flush=True)
        wrong_words += words["differ"]
        seconds = time.monotonic() - began
        print(f"{path}: {words['differ']} of {words['all']} words differ, {len(chosen)} arithmetics, {seconds:.0f} s", flush=True)
    return int(wrong_words > 0)


if __name__ == "__main__":
    sys.exit(main())
