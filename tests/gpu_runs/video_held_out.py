"""Statements and words of video instructions that their rules have never seen, for a GPU; and the count of words that differ.

`python tests/gpu_runs/video_held_out.py FOLDER` writes statements.json and inputs.npz: 3,880 statements that tests/golden does not have, on
512 words of other seeds. On a machine with an NVIDIA GPU `python tests/gpu_runs/video_and_carry.py FOLDER FOLDER` adds the GPU's words,
video.npz. Called again, this script compares them.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels.ptx.test_ptx_video import HEAD, drawn_statement
from support.ptx_scalars import HERE, draw, run_operations
from support.tensor_map_bits import recording

from tcemu.kernels.ptx.scalar.video_instructions import PACKED, SCALAR, prepare_video
from tcemu.ptx import parse

SEEDS = 20261127, 987654321  # of statements and of words
SCALAR_COUNT, PACKED_COUNT, WORDS = 260, 110, 512


def draw_inputs(folder: Path) -> None:
    """Write the statements and their operands."""
    seen, pick, statements = set(recording()["video"]["statements"]), random.Random(SEEDS[0]), []
    for name in (*SCALAR, *PACKED):
        end = len(statements) + (SCALAR_COUNT if name in SCALAR else PACKED_COUNT)
        while len(statements) < end:
            opcode, operands = drawn_statement(name, pick)
            statement = f"{opcode} {', '.join(operands)};"
            if statement not in seen:
                seen.add(statement)
                statements.append(statement)
    rng = np.random.default_rng(SEEDS[1])
    words = np.stack([draw("u32", WORDS, rng) for _ in range(3)], 1).astype(np.uint32)
    words[WORDS // 2 :] = rng.integers(0, 2**32, (WORDS // 2, 3), dtype=np.uint32)
    words[WORDS // 4 * 3 :, 1] &= 63  # counts of shifts
    (folder / "statements.json").write_text(json.dumps({"video": statements, "triples": []}))
    np.savez(folder / "inputs.npz", video=words, carry32=np.zeros((1, 10), np.uint32), carry64=np.zeros((1, 10), np.uint64))


def compare(folder: Path) -> int:
    """Print the words that differ, and return their number."""
    statements, words = json.loads((folder / "statements.json").read_text())["video"], np.load(folder / "inputs.npz")["video"]
    found = np.load(folder / "video.npz")
    module = parse(HEAD + "\n".join(statements[place] for place in found["places"]) + "\nret; }")
    made = [prepare_video(statement, HERE) for statement in module.functions["k"].statements[:-1]]
    computed = run_operations(made, [[words[:, i] for i in range(len(each.sources))] for each in made])
    wrong = 0
    for place, (result,), recorded in zip(found["places"], computed, found["words"], strict=True):
        count = int((np.asarray(result) != recorded).sum())
        wrong += count
        if count:
            print(count, statements[place])
    print(f"{wrong} of {found['words'].size} words of {len(made)} statements differ")
    return wrong


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.exit(compare(where) != 0 if (where / "video.npz").exists() else draw_inputs(where))
