"""How long does a fingerprint take, beside the function that is asked? `python benchmarks/fingerprint.py torch-f16 64 64 8192`

That function computes as a profile says, by `tcemu.matmul`. The first fingerprint of a process compiles; the second one has what it
compiled.
"""

import argparse
import time
from typing import Any

import numpy as np

import tcemu
from tcemu.replay import get_kernel_recipe
from tcemu.uses.replay.black_box import DTYPES
from tcemu.uses.replay.fingerprinting import fingerprint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", default="torch-f16", help="of a profile without scales and bias")
    parser.add_argument("shape", nargs="*", type=int, default=[64, 64, 8192], help="M N K, as it was measured")
    args = parser.parse_args()
    m, n, k = args.shape
    kernel, within, wrong = get_kernel_recipe(args.library, m, n, k), 0.0, 0

    def box(a: Any, b: Any) -> np.ndarray:
        nonlocal within
        start = time.perf_counter()
        found = np.asarray(tcemu.matmul(a, b, recipe=kernel, dtype=DTYPES[kernel.dtype]))
        within += time.perf_counter() - start
        return found

    for what in ("the first", "the second"):
        within, start = 0.0, time.perf_counter()
        found = fingerprint(box, m, n, k, operand_dtype=(kernel.a, kernel.b))
        own = time.perf_counter() - start - within
        is_found = found.recipe == kernel
        wrong += not is_found
        outcome = "found" if is_found else "NOT the recipe"
        print(f"{args.library} {m} x {n} x {k}, {what}: {own:.1f} s, and {within:.1f} s in {found.calls} calls; {outcome}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
