"""Which slices of K does cuBLASLt propose? `python benchmarks/replay_proposals.py --out FILE.json.xz`: thousands of shapes, no product.

The shapes are those of torch's profiles, those of `replay_products.held_out_shapes` and `study_shapes`, layers of models with every M up to
512, and a random sample of aligned shapes and of others. FILE gets, for each data type, [m, n, k, algorithm, tile, split_k,
reduction_scheme, custom_option, stages, cluster_shape] a shape. It needs an NVIDIA GPU. `--seconds` bounds the time; the shapes come in an
order in which any beginning is useful. `--part I OF` takes a part of them.
"""

import argparse
import json
import lzma
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from replay_gpu import machine
from replay_products import LAYERS, held_out_shapes, study_shapes

from tcemu.uses.replay.cublaslt_heuristic import query_heuristic
from tcemu.uses.replay.kernel_profiles import list_profiles

FIELDS = ("algorithm", "tile", "split_k", "reduction_scheme", "custom_option", "stages", "cluster_shape")
STUDY = 700  # rounds of `study_shapes`
UNITS = (8, 1, 8, 2, 16, 4)  # numbers of which the sample's shapes are multiples
LIBRARIES = {"torch-f16": "f16", "torch-bf16": "bf16", "torch-e4m3": "e4m3", "torch-tf32": "tf32"}


def questions(count: int) -> list[tuple[str, int, int, int]]:
    """The shapes by library."""
    rng = np.random.default_rng(7)
    found = [(profile.library, *shape) for profile in list_profiles() if profile.library in LIBRARIES for shape in profile.shapes]
    found += [shape for shape in (*held_out_shapes(), *study_shapes(STUDY)) if shape[0] in LIBRARIES]
    layers = [
        (library, m, n, k) for library in ("torch-bf16", "torch-tf32") for m in range(1, 513) for model in LAYERS.values() for n, k in model
    ]
    sample = []
    for number in range(count):
        unit = UNITS[number % len(UNITS)]
        shape = np.ceil(np.exp2(rng.uniform(0, (13, 13, 16))) / unit).astype(int) * unit
        for library in LIBRARIES:
            m, n, k = (int(x) for x in shape)
            sample.append((library, m, *(-(-x // 16) * 16 if library == "torch-e4m3" else x for x in (n, k))))
    mixed = [shape for pair in zip_longest(sample, layers) for shape in pair if shape is not None]
    return list(dict.fromkeys([*found, *mixed]))


MORE_UNITS = {"torch-tf32": (1, 2, 4, 4, 16, 16), "torch-f16": (1, 2, 4, 8), "torch-bf16": (1, 2, 4, 8), "torch-e4m3": (16,)}


def more_questions(count: int, seed: int) -> list[tuple[str, int, int, int]]:
    """A random sample alone, with M of any alignment, and N and K multiples of one of `MORE_UNITS`."""
    rng, found = np.random.default_rng([seed, 11]), {}
    for _ in range(count):
        for library, units in MORE_UNITS.items():
            unit = int(rng.choice(units))
            m, n, k = (int(x) for x in np.rint(np.exp2(rng.uniform(1, (13, 13, 13.5)))))
            found[library, m, -(-n // unit) * unit, -(-k // unit) * unit] = None
    return list(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int, default=8000, help="shapes of the sample, for each data type")
    parser.add_argument("--more", type=int, metavar="SEED", help="a random sample alone, with M of any alignment")
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("I", "OF"), help="every OF-th shape, from the I-th on")
    args = parser.parse_args()
    part, parts = args.part
    asked = questions(args.count) if args.more is None else more_questions(args.count, args.more)
    known, asked = machine("cuda"), asked[part::parts]
    until = time.time() + args.seconds
    answers: dict[str, list[list[Any]]] = {name: [] for name in LIBRARIES}
    refused: dict[str, int] = {}
    for name, m, n, k in asked:
        if time.time() > until:
            break
        try:
            (found, *_) = query_heuristic(m, n, k, operand_dtype=LIBRARIES[name], fast_accumulation=name == "torch-e4m3").configurations
            answers[name].append([m, n, k, *(getattr(found, field) for field in FIELDS)])
        except (RuntimeError, ValueError) as error:
            refused[str(error)[:120]] = refused.get(str(error)[:120], 0) + 1
    said = {"machine": known, "fields": ["m", "n", "k", *FIELDS], "answers": answers, "refused": refused}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_bytes(lzma.compress(json.dumps(said).encode(), preset=9))
    print(f"{sum(map(len, answers.values()))} of {len(asked)} answered, {sum(refused.values())} refused: {refused}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
