"""Replay the recorded words of `mma` through tcemu and count what differs: `python tests/replay.py [FAMILY ...]`.

Runs on whatever device JAX has, so the same command holds a CPU and a GPU to the words.
"""

import sys
import time

import golden
import jax
import numpy as np

import tcemu

TARGET = "sm_90a"  # of the GPU that was recorded
REPLAYS = {
    "mma": lambda case, words: tcemu.mma(case["ptx"], words["a"], words["b"], words["c"], target=TARGET),
    "mma_sp": lambda case, words: tcemu.mma_sp(case["ptx"], *(words[name] for name in "abce"), selector=case["selector"], target=TARGET),
}


def compare(case: dict) -> tuple[int, int]:
    """How many result words of one case differ, and how many there are."""
    words = golden.arrays(case)
    d = np.asarray(REPLAYS[case["family"]](case, words))
    assert d.shape == words["d"].shape
    return int((d != words["d"]).sum()), d.size


def main(families: list[str]) -> int:
    start, wrong, total = time.perf_counter(), 0, 0
    device = jax.devices()[0]
    for family in families or list(REPLAYS):
        for case in golden.cases(family):
            bad, words = compare(case)
            wrong, total = wrong + bad, total + words
            print(f"{bad:6d} of {words:6d}  {case['ptx']}")
    where = f"{device.platform} ({device.device_kind}), JAX {jax.__version__}"
    print(f"{wrong} mismatches of {total} words from {golden.root()}, on {where}, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
