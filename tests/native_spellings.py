"""Every spelling that computes, by the GPU's own instruction inside a compiled loop, against its emulation, on the GPU that is here.

`python tests/native_spellings.py --outputs 1e9 --jobs 14 --out spellings.jsonl`: so many outputs of each family, shared evenly by its
spellings; a line of JSON for each spelling, then one line for each family. The same words go on where it stopped. Exit status 1 if
anything differs. Most of the time compiles.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

FAMILIES = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")
FIRST = (8, 24, 256)  # of wgmma's sizes N, those that come first where the time ends before the rest


def compare_spelling(spelling: str, target: str, outputs: int) -> dict:
    """The outputs of one spelling that were compared, and how many differ."""
    from tcemu import fuzz, parse

    op = parse(spelling)
    side = fuzz.get_implementation(op, "gpu")
    assert side.traceable, f"{spelling}: the GPU's side is not part of the compiled loop"
    start = time.perf_counter()
    run = fuzz.find_mismatches(op, target, side, cases=-(-outputs // (op.m * op.n)), coverage=False, shrink=False)
    seconds = round(time.perf_counter() - start, 1)
    return {
        "op": spelling,
        "family": op.family,
        "outputs": run.done * op.m * op.n,
        "wrong": run.wrong_outputs,
        "s": seconds,
    }


def spellings(target: str, families: list[str]) -> dict[str, list[str]]:
    """The spellings of each family that `target` has and tcemu models, wgmma's most different sizes first."""
    from tcemu.uses.fuzz.verification import list_spellings

    return {family: sorted(map(str, list_spellings(target, family, None)), key=_priority) for family in families}


def _priority(spelling: str) -> int:
    from tcemu import parse

    op = parse(spelling)
    return 0 if op.warps == 1 else 1 if op.n in FIRST else 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--outputs", type=float, default=1e9, help="of each family")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no spelling begins after so many")
    parser.add_argument("--out", type=Path, required=True, help="the file of lines; those that stand there are not done again")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share one GPU's memory
    from tcemu.engine.backends.native.units import gpu_target

    target, stop = gpu_target(), time.monotonic() + args.seconds
    by_family = spellings(target, args.families)
    held = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    done = {row["op"] for row in held}
    asked = [(op, -(-int(args.outputs) // len(ops))) for ops in by_family.values() for op in ops if op not in done]
    left = sorted(asked, key=lambda one: _priority(one[0]))
    failed = 0
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool, args.out.open("a") as file:
        running, waiting = {}, iter(left)
        while True:
            while len(running) < args.jobs and time.monotonic() < stop and (one := next(waiting, None)) is not None:
                running[pool.submit(compare_spelling, one[0], target, one[1])] = one[0]
            if not running:
                break
            future = next(as_completed(running))
            op = running.pop(future)
            try:
                held.append(future.result())
            except Exception as error:  # the others go on; the failure is printed and counted
                failed += 1
                print(f"{op}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            file.write(json.dumps(held[-1]) + "\n")
            file.flush()
            if held[-1]["wrong"]:
                print(held[-1], flush=True)
    outputs, wrong, count = Counter(), Counter(), Counter()
    for row in held:
        outputs[row["family"]] += row["outputs"]
        wrong[row["family"]] += row["wrong"]
        count[row["family"]] += 1
    for family, ops in by_family.items():
        print(f"{family}: {count[family]} of {len(ops)} spellings, {wrong[family]:,} mismatches of {outputs[family]:,} outputs")
    return int(failed > 0 or sum(wrong.values()) > 0)


if __name__ == "__main__":
    sys.exit(main())
