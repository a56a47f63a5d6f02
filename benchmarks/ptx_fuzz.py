"""How long do 10,000 inputs to one kernel under two targets take? `python benchmarks/ptx_fuzz.py`: one call of `tcemu.ptx.compare`.

The kernel is mma_f16_trans of tests/ptx_kernels/sources/mma_gemm.cu: a warp multiplies by ldmatrix and mma.sync. Each case has operands of
its own, of a normal distribution. Printed are how many cases differ, the first statement at which the targets part, and `explain` of it.
The first and the last case are then run alone, and must give the same words.
"""

import sys
import time
from pathlib import Path

import numpy as np
from harness import arguments, describe_machine, finish

from tcemu import ptx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ptx_kernels.manifest import KERNELS
from ptx_kernels.operands import storage

TARGETS = "sm_80", "sm_90a"


def main() -> int:
    parser = arguments(__doc__, repeats=0)
    parser.add_argument("--cases", type=int, default=10_000)
    args = parser.parse_args()
    machine = describe_machine()
    kernel = next(each for each in KERNELS if each.name == "mma_f16_trans")
    rng = np.random.default_rng(0)
    given = []
    for argument in kernel.arguments:
        if isinstance(argument, np.generic):
            given.append(np.full(args.cases, argument))
        elif argument.kind == "f16":
            given.append(rng.standard_normal((args.cases, *argument.shape), np.float32).astype(np.float16))
        else:
            given.append(np.zeros((args.cases, *argument.shape), storage(argument.kind)))
    launch = {"entry": kernel.entry, "grid": kernel.grid, "block": kernel.block, "shared_bytes": kernel.shared}
    start = time.perf_counter()
    found = ptx.compare(kernel.text("sm_80"), targets=TARGETS, args=given, cases=args.cases, **launch)
    seconds = time.perf_counter() - start
    print(found)
    print(f"\n{args.cases:,} cases, {found.steps:,} statements, {seconds:.1f} s, compilation included")
    wrong = 0
    for case in (0, args.cases - 1):
        for side, target in enumerate(TARGETS):
            alone = ptx.run(kernel.text("sm_80"), target=target, args=[each[case] for each in given], **launch)
            wrong += sum(int((x.view(np.uint8) != y[case].view(np.uint8)).sum()) for x, y in zip(alone, found.outputs[side], strict=True))
    line = {"cases": args.cases, "seconds": seconds, "differing_cases": found.differing_cases, "differing": sum(found.differing_elements)}
    return finish(args, machine, [line], wrong, "cases that were run alone", "bytes that differ")


if __name__ == "__main__":
    raise SystemExit(main())
