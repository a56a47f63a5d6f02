"""Replay the recorded words through tcemu and count what differs: `python tests/replay.py [FAMILY ...]`.

Runs on whatever device JAX has, so the same command holds a CPU and a GPU to the words.
"""

import sys
import time

import golden
import jax
import numpy as np

import tcemu

TARGET = "sm_90a"  # of the GPU that was recorded


def wgmma(case: dict, words: dict) -> jax.Array:
    names = {4: ("imm_scale_a", "imm_scale_b", "imm_trans_a", "imm_trans_b"), 3: ("imm_scale_a", "imm_scale_b", "imm_trans_b")}
    immediates = case["immediates"]
    given = dict(zip(names.get(len(immediates), names[4]), immediates, strict=False))
    given |= {"a": words["a"]} if case["a"] == "registers" else {"a_desc": case["a_desc"]}
    if case["sp_sel"] is not None:
        given |= {"sp_meta": words["sp_meta"], "sp_sel": case["sp_sel"]}
    scale_d = bool(case["scale_d"])
    return tcemu.wgmma(case["ptx"], words["d_in"], case["b_desc"], words["shared"], scale_d=scale_d, target=TARGET, **given)


REPLAYS = {
    "mma": lambda case, words: tcemu.mma(case["ptx"], words["a"], words["b"], words["c"], target=TARGET),
    "mma_sp": lambda case, words: tcemu.mma_sp(case["ptx"], *(words[name] for name in "abce"), selector=case["selector"], target=TARGET),
    "wgmma": wgmma,
    "wgmma_sp": wgmma,
}
RESULTS = ("d", "d_out")  # what a case calls its result


def compare(case: dict) -> tuple[int, int]:
    """How many result words of one case differ, and how many there are."""
    words = golden.arrays(case)
    recorded = next(words[name] for name in RESULTS if name in words)
    d = np.asarray(REPLAYS[case["family"]](case, words))
    assert d.shape == recorded.shape
    return int((d != recorded).sum()), d.size


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
