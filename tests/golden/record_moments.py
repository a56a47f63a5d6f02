"""Record the means and reciprocal roots of PyTorch's normalisations on a GPU: `python tests/golden/record_moments.py moments_h100.json.xz`

The rows are drawn by `draw_rows`, from a number and a shape alone. A test asks which arithmetic of `tcemu.uses.drift.moments` gives the
words.
"""

import json
import lzma
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

EPS = 1e-5
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
# operator, dtype, shape: rows and K; images, channels, neighbours and groups; images, channels and neighbours
CASES = [
    *(
        ("layer_norm", dtype, shape)
        for dtype in DTYPES
        for shape in ((32, 64), (32, 100), (32, 513), (16, 768), (16, 1001), (8, 4096), (8, 4097))
    ),
    *(("group_norm", "float32", shape) for shape in ((4, 8, 64, 4), (4, 32, 49, 8), (2, 64, 256, 8), (2, 32, 1024, 4), (2, 16, 33, 4))),
    *(
        (operator, "float32", shape)
        for operator in ("batch_norm", "batch_norm_stats")
        for shape in ((8, 16, 49), (4, 8, 64), (16, 4, 256), (2, 8, 1000), (32, 6, 7), (8, 32, 30), (3, 64, 33), (4, 16, 3000))
    ),
]


def draw_rows(number: int) -> np.ndarray:
    """The input of a case, in its shape without the groups."""
    operator, dtype, shape = CASES[number]
    shape = shape[:3] if operator == "group_norm" else shape
    return (np.random.default_rng(number).standard_normal(shape) + 0.5).astype(np.float32).astype(DTYPES[dtype])


def record_words(number: int) -> dict[str, list[int]]:
    import torch  # pyright: ignore[reportMissingImports]

    operator, dtype, shape = CASES[number]
    x = torch.from_numpy(draw_rows(number).astype(np.float32)).to(getattr(torch, dtype)).cuda()
    if operator == "layer_norm":
        _, mean, root = torch.native_layer_norm(x, [shape[1]], None, None, EPS)
    elif operator == "group_norm":
        _, mean, root = torch.native_group_norm(x, None, None, *shape, EPS)
    elif operator == "batch_norm":
        _, mean, root = torch.native_batch_norm(x, None, None, None, None, True, 0.1, EPS)
    else:
        mean, root = torch.batch_norm_stats(x, EPS)
    return {name: v.float().cpu().numpy().ravel().view(np.uint32).tolist() for name, v in (("mean", mean), ("root", root))}


def main(path: str) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found = {"machine": machine, "words": [record_words(number) for number in range(len(CASES))]}
    Path(path).write_bytes(lzma.compress(json.dumps(found, separators=(",", ":")).encode(), preset=9))


if __name__ == "__main__":
    main(sys.argv[1])
