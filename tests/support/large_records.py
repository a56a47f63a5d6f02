"""Records of a run of a hundred operations, as large as one wants, with three drifts planted into one side."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.drift import record

F32 = np.float32
LAYERS = 10
PLANTED = {"dot_general": 14, "tanh": 6, "rsqrt": 9}  # which operation of a name is changed, counted from 1


def two_slices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products in f32 whose K is added in two slices, each in sequence, products rounded."""
    half, total = a.shape[1] // 2, None
    for part in (slice(0, half), slice(half, None)):
        rows = np.zeros((len(a), b.shape[1]), F32)
        for x, y in zip(a.T[part], b[part], strict=True):
            rows += x[:, None] * y
        total = rows if total is None else total + rows
    assert total is not None
    return total


def write_records(folder: Path, rows: int, width: int) -> tuple[Path, Path]:
    """Record a network without and with the drifts; each file has about 80 rows · width numbers and 40 width² of weights."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[0]), F32)
    weights = [(draw(width, 2 * width), draw(2 * width, width)) for _ in range(LAYERS)]
    x = jnp.asarray(rng.standard_normal((rows, width)), F32)

    def fn(x: Any) -> Any:
        for number, (up, down) in enumerate(weights):
            with jax.named_scope(f"layer{number}"):
                h = x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / width + F32(1e-5))
                x = x + jnp.tanh(h @ up) @ down
        return x

    counts = dict.fromkeys(PLANTED, 0)

    def plant(_: int, name: str, operands: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray] | None:
        if name not in PLANTED:
            return None
        counts[name] += 1
        if counts[name] != PLANTED[name]:
            return None
        return [two_slices(*operands) if name == "dot_general" else results[0].astype(ml_dtypes.bfloat16).astype(F32)]

    paths = folder / "left.drift", folder / "right.drift"
    record(fn, paths[0])(x)
    record(fn, paths[1], substitute=plant)(x)
    return paths
