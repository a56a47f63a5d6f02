"""Cuts the words of library products for tests/golden from a survey's: `python tests/golden/replay_sample.py words.json.xz`.

words.json.xz is what `benchmarks/replay_distil.py` writes. Kept are the shapes of the survey's list and a few of its random sample,
beside what was kept before.
"""

import json
import lzma
import sys
from pathlib import Path

KEPT = 4  # shapes of the random sample, of each survey
LISTED = {
    (128, 128, 128), (64, 64, 8192), (16, 4096, 4096), (256, 256, 1024), (100, 300, 700), (333, 77, 1000), (333, 78, 1000), (129, 130, 131),
    (1, 4096, 4096), (4096, 1, 4096), (2, 4096, 45), (8, 32, 30), (128, 128, 16384), (64, 64, 11528), (1023, 1025, 8192), (1, 8449, 4096),
}  # fmt: skip
KEPT_OF_FORMS = 1  # of products with scales or a bias, which have up to five times the words, and with two formats
LISTED_OF_FORMS = {(128, 128, 128), (64, 64, 8192), (100, 300, 700)}


def shape_of(word: dict) -> tuple:
    return word["survey"], word["m"], word["n"], word["k"]


def main() -> None:
    held = json.loads(lzma.decompress(Path(sys.argv[1]).read_bytes()))
    path = Path(__file__).parent / "replay.json.xz"
    before = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {"words": []}
    every = {shape_of(word): word for word in [*before["words"], *held["words"]]}  # asked again: the later words, in the earlier place
    kept, counts = [], {}
    for (survey, *shape), word in every.items():
        of_forms = "more_words" in word or word["recipe"]["a"] != word["recipe"]["b"]
        known, most = (LISTED_OF_FORMS, KEPT_OF_FORMS) if of_forms else (LISTED, KEPT)
        listed = tuple(shape) in known
        counts[survey] = counts.get(survey, 0) + (not listed)
        if listed or counts[survey] <= most:
            kept.append(word)
    content = lzma.compress(json.dumps(before | held | {"words": kept}).encode(), preset=9)
    path.write_bytes(content)
    print(f"{len(kept)} shapes, of which {len(held['words'])} were offered, {len(content):,} bytes")


if __name__ == "__main__":
    main()
