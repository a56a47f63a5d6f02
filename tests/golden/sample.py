"""Makes the sample of the golden data that stands beside this file: `python tests/golden/sample.py [FOLDER]`.

FOLDER holds the whole recordings (default: `../shared/golden` beside the repository). The same input gives the same arrays.
What is kept, and why, is said in README.md here.
"""

import json
import re
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
LIMIT = 3_000_000  # bytes, all files of the folder together
X86_TILES, X86_VECTORS = 8, 160  # of TDPBF16PS and of VDPBF16PS, evenly spread over the four classes of operands
PUBLISHED_ROWS = 20  # of each GPU and format, evenly spread
DENSE_WARPS = {"s32": 2, "f64": 4}  # of each dense case by its accumulator; 8, which is all, for the other floats


def warps_kept(case: dict, recorded: int) -> list[int]:
    """Which of the recorded warps stay: from warp i on, so that a family shows every class of operands even at one warp a case."""
    count = next((n for kind, n in DENSE_WARPS.items() if f".{kind}" in case["ptx"]), recorded) if case["family"] == "mma" else 1
    return sorted((case["i"] + step) % recorded for step in range(count))


def columns(case: dict) -> int:
    """N of a wgmma case, which is about what it costs to keep."""
    return int(re.search(r"m64n(\d+)", case["ptx"])[1])


def traits(case: dict) -> set[tuple]:
    """What a wgmma case shows: each of its types, saturation, where A lies, the swizzle, N, each immediate, the selector."""
    types = re.findall(r"\.((?:[esu]|bf|tf|f)\d+(?:m\d)?|b1)(?=\.|$)", case["ptx"].split("m64n")[1])
    shown = {("type", place, name) for place, name in enumerate(types)}
    shown |= {("immediate", place, value) for place, value in enumerate(case["immediates"])}
    places = {"satfinite": ".satfinite" in case["ptx"], "a": case["a"], "swizzle": case["b_desc"] >> 62, "n": columns(case)}
    return shown | set(places.items()) | {("selector", case["sp_sel"])}


def covering(cases: list[dict]) -> list[dict]:
    """Few and small cases that together show every trait: at each turn the one that shows most new traits for its size."""
    missing = set().union(*map(traits, cases))
    kept = []
    while missing:
        best = max(cases, key=lambda case: (len(traits(case) & missing) / (16 + columns(case)), -case["i"]))
        kept.append(best)
        missing -= traits(best)
    return sorted(kept, key=lambda case: case["i"])


def sample(source: Path, target: Path) -> None:
    index = json.loads((source / "index.json").read_text())
    kept = []
    for family in dict.fromkeys(case["family"] for case in index):
        cases = [case for case in index if case["family"] == family]
        by_warp = not family.startswith("wgmma")
        cases = cases if by_warp else covering(cases)
        arrays = {}
        with np.load(source / f"{family}.npz") as whole:
            for case in cases:
                names = [name for name in whole.files if name.startswith(f"{case['i']:04d}_")]
                keep = warps_kept(case, len(whole[names[0]])) if by_warp else None
                kept.append(case | {"warps": keep} if by_warp else case)
                arrays |= {name: whole[name][keep] if by_warp else whole[name] for name in names}
        np.savez_compressed(target / f"{family}.npz", **arrays)
        print(f"{family}: {len(cases)} of {len([c for c in index if c['family'] == family])} cases")
    lines = ",\n".join(json.dumps(case) for case in kept)
    (target / "index.json").write_text(f"[\n{lines}\n]\n")
    with np.load(source / "published.npz") as whole:
        rows = {name: np.linspace(0, len(whole[name]) - 1, PUBLISHED_ROWS).astype(int) for name in whole.files}
        np.savez_compressed(target / "published.npz", **{name: whole[name][rows[name]] for name in whole.files})
    with np.load(source / "x86_bf16.npz") as whole:
        count = {"tdp": X86_TILES, "vdp": X86_VECTORS}
        rows = {name: np.linspace(0, len(whole[name]) - 1, count[name[:3]]).astype(int) for name in whole.files}
        np.savez_compressed(target / "x86_bf16.npz", **{name: whole[name][rows[name]] for name in whole.files})
    for path in sorted(target.glob("*.npz")):
        print(f"{path.stat().st_size:>9} {path.name}")
    size = sum(path.stat().st_size for path in target.iterdir() if path.is_file())
    print(f"{size:>9} in all, of {LIMIT} allowed")
    if size > LIMIT:
        raise SystemExit(f"The sample is {size - LIMIT} bytes over its limit.")


if __name__ == "__main__":
    sample(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1].parent / "shared" / "golden", HERE)
