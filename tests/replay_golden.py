"""Replay the recorded words through tcemu and count what differs: `replay_golden.py [FAMILY ...] [--execution portable] [--share 1/24]`.

Runs on whatever device JAX has, so the same command holds a CPU and a GPU, with kernels and without, to the words.
"""

import argparse
import sys
import time

import jax
import numpy as np
from support import golden
from support.sampling import in_share

import tcemu
from tcemu.base.execution import CHOICES

TARGET = "sm_90a"  # of the GPU that was recorded


def wgmma(case: dict, words: dict) -> dict:
    names = {4: ("imm_scale_a", "imm_scale_b", "imm_trans_a", "imm_trans_b"), 3: ("imm_scale_a", "imm_scale_b", "imm_trans_b")}
    immediates = case["immediates"]
    given = dict(zip(names.get(len(immediates), names[4]), immediates, strict=False))
    given |= {"a": words["a"]} if case["a"] == "registers" else {"a_desc": case["a_desc"]}
    if case["sp_sel"] is not None:
        given |= {"sp_meta": words["sp_meta"], "sp_sel": case["sp_sel"]}
    scale_d = bool(case["scale_d"])
    d = tcemu.wgmma(case["ptx"], words["d_in"], case["b_desc"], words["shared"], scale_d=scale_d, target=TARGET, **given)
    return {"d_out": d}


def wmma(case: dict, words: dict) -> dict:
    """Matrices loaded from memory, multiplied, and stored into memory that held something else."""
    op, made = tcemu.parse(case["ptx"]), {}
    for name, layout in (("a", op.alayout), ("b", op.blayout), ("c", case["c_layout"])):
        load = f"wmma.load.{name}.sync.aligned.{layout}.{op.shape}.{getattr(op, name)}"
        made[f"frag_{name}"] = tcemu.wmma_load(load, words[name], target=TARGET)
    made["frag_d"] = tcemu.wmma_mma(op, *(made[f"frag_{name}"] for name in "abc"), target=TARGET)
    store = f"wmma.store.d.sync.aligned.{case['d_layout']}.{op.shape}.{op.d}"
    return made | {"d": tcemu.wmma_store(store, ~words["d"], made["frag_d"], target=TARGET)}


def movement(case: dict, words: dict) -> dict:
    if case["ptx"].startswith("ldmatrix"):
        return {"registers_out": tcemu.ldmatrix(case["ptx"], words["shared_in"], words["address"], target=TARGET)}
    if case["ptx"].startswith("stmatrix"):
        return {"shared_out": tcemu.stmatrix(case["ptx"], words["shared_in"], words["address"], words["registers_in"], target=TARGET)}
    return {"registers_out": tcemu.movmatrix(case["ptx"], words["registers_in"])}


REPLAYS = {  # the family -> what a case makes, by the name of the recorded array
    "mma": lambda case, words: {"d": tcemu.mma(case["ptx"], words["a"], words["b"], words["c"], target=TARGET)},
    "mma_sp": lambda case, words: {
        "d": tcemu.mma_sp(case["ptx"], *(words[name] for name in "abce"), selector=case["selector"], target=TARGET)
    },
    "wmma": wmma,
    "movement": movement,
    "wgmma": wgmma,
    "wgmma_sp": wgmma,
}


def compare(case: dict) -> tuple[int, int]:
    """How many result words of one case differ, and how many there are."""
    words = golden.arrays(case)
    wrong = total = 0
    for name, made in REPLAYS[case["family"]](case, words).items():
        assert made.shape == words[name].shape
        wrong, total = wrong + int((np.asarray(made) != words[name]).sum()), total + made.size
    return wrong, total


def main(families: list[str], share: str) -> int:
    start, wrong, total = time.perf_counter(), 0, 0
    device = jax.devices()[0]
    for family in families or list(REPLAYS):
        for case in (case for case in golden.cases(family) if in_share(f"{family} {case['i']}", share)):
            bad, words = compare(case)
            wrong, total = wrong + bad, total + words
            print(f"{bad:6d} of {words:6d}  {case['ptx']}")
    where = f"{device.platform} ({device.device_kind}), JAX {jax.__version__}"
    by = tcemu.backends.describe("f16", target=TARGET)
    where += f", by {next(name for name in list(by)[1:] if by[name] == '')}"
    print(f"{wrong} mismatches of {total} words from {golden.root()}, on {where}, {time.perf_counter() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replays recorded words.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(REPLAYS)}; all by default")
    parser.add_argument("--execution", choices=CHOICES, default=CHOICES[0], help="who computes: see tcemu.execution")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="only the share I of N of the recorded cases")
    args = parser.parse_args()
    with tcemu.execution(args.execution):
        sys.exit(main(args.families, args.share))
