"""Where the recorded words are and how to read them; the files are described in the README beside them."""

import json
from functools import cache
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
SAMPLE = TESTS / "golden"


def root() -> Path:
    """The whole recording beside the repository where it is present, else the sample that is kept in the tests."""
    whole = TESTS.parents[1] / "shared" / "golden"
    return whole if (whole / "index.json").is_file() else SAMPLE


@cache
def _index() -> list[dict]:
    return json.loads((root() / "index.json").read_text())


def cases(family: str) -> list[dict]:
    """The index entries of one family (mma, mma_sp, wmma, movement, wgmma, wgmma_sp), in the order of the index."""
    found = [case for case in _index() if case["family"] == family]
    if not found:
        raise LookupError(f"{root() / 'index.json'} holds no case of family {family!r}")
    return found


def arrays(case: dict) -> dict[str, np.ndarray]:
    """The recorded arrays of one case by their short names (`a`, `b`, `c`, `d`, ...), uint32."""
    prefix = f"{case['i']:04d}_"
    with np.load(root() / f"{case['family']}.npz") as file:
        return {name.removeprefix(prefix): file[name] for name in file.files if name.startswith(prefix)}


def published_arrays() -> dict[str, np.ndarray]:
    """The words of eight GPUs that others recorded, by `{GPU}_{format}_{operand}`, uint32."""
    with np.load(root() / "published.npz") as file:
        return {name: file[name] for name in file.files}
