"""Kernels of tests/ptx_kernels/functional_manifest.py, run by `tcemu.ptx`, and the same by `tcemu.functional`."""

from __future__ import annotations

from zlib import crc32

import ml_dtypes
import numpy as np
from ptx_kernels.functional_manifest import Case, compiled_texts

from tcemu import functional, ptx

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
EPS, OFFSET, COUNT = 1e-5, 0.25, 3
ROWS = 5
ACTIVATIONS = {"silu_mul_rows": functional.silu_mul, "gelu_mul_rows": functional.gelu_mul}


def draw_rows(case: Case, seed: int = 0, ordinary: int = 0) -> np.ndarray:
    """Return ROWS rows: ordinary; of a wide range; tiny, subnormals among them; zeros of both signs; with -Inf, and NaN or +Inf.

    ordinary: number of rows of normal deviates, instead of these.
    """
    rng = np.random.default_rng(crc32(f"{case.name} {seed}".encode()))
    if ordinary:
        return rng.standard_normal((ordinary, case.columns)).astype(DTYPES[case.kind])
    x = rng.standard_normal((ROWS, case.columns))
    x[1] *= 30
    x[2] *= np.exp2(rng.integers(-142, -118, case.columns)) if case.kind != "f16" else np.exp2(rng.integers(-24, -14, case.columns))
    x[3] = np.where(rng.random(case.columns) < 0.5, -0.0, 0.0)
    x[4, :: case.columns // 7] = -np.inf
    x[4, 3] = -np.inf if case.kernel == "softmax_rows" else rng.choice([np.nan, np.inf])
    return x.astype(DTYPES[case.kind])


def words(x) -> np.ndarray:
    """Return the raw words of a float array."""
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def count_differences(case: Case, ordinary: int = 0) -> tuple[int, int]:
    """Return the words in which `tcemu.functional` differs from the kernel's PTX, and all words; rows as `draw_rows` has them."""
    expected, computed = by_ptx(case, ordinary), by_functional(case, ordinary)
    assert expected.dtype == np.asarray(computed).dtype and expected.shape == computed.shape
    return int((words(expected) != words(computed)).sum()), expected.size


def by_ptx(case: Case, ordinary: int = 0) -> np.ndarray:
    """Run the kernel statement by statement, one program a row."""
    x, i, f, rows = draw_rows(case, 0, ordinary), np.int32, np.float32, ordinary or ROWS
    out, n = np.zeros_like(x), np.int32(case.columns)
    weight, bias = vectors(case)
    if case.kernel == "softmax_rows":
        args, result = [out, x, n, n, i(rows), n], 0
    elif case.kernel == "log_softmax_rows":
        args, result = [out, x, n, n], 0
    elif case.kernel == "layer_norm_rows":
        args, result = [out, x, n, weight, bias, n, f(EPS)], 0
    elif case.kernel == "rms_norm_rows":
        args, result = [out, n, x, n, weight, n, f(EPS), f(OFFSET if case.variant else 0)], 0
    elif case.kernel == "cross_entropy_rows":
        args, result = [x, n, labels(case, rows), np.zeros(rows, np.float32), n, i(COUNT)], 2
    elif case.kernel == "rotary_rows":
        args, result = [heads(case, ordinary), i(4 * case.columns), *angles(case, rows), i(case.columns // 2)], 0
    else:
        args, result = [x, draw_rows(case, 1, ordinary), out, n], 2
    compiled = compiled_texts()[case.name]
    launch = {"grid": rows - (case.kernel == "softmax_rows"), "block": 32 * case.warps, "shared_bytes": compiled["shared"]}
    outputs = ptx.run(compiled["text"], args=[*args, np.uint64(0), np.uint64(0)], target="sm_90a", **launch)
    return np.asarray(outputs[result])


def by_functional(case: Case, ordinary: int = 0) -> np.ndarray:
    """Compute the same by the ready rows."""
    x, rows = draw_rows(case, 0, ordinary), ordinary or ROWS
    weight, bias = vectors(case)
    if case.kernel == "softmax_rows":
        return np.asarray(functional.softmax(x, kernel="triton"))
    if case.kernel == "log_softmax_rows":
        return np.asarray(functional.log_softmax(x, kernel="triton"))
    if case.kernel == "layer_norm_rows":
        return np.asarray(functional.layer_norm(x, weight, bias, eps=EPS, kernel="triton"))
    if case.kernel == "rms_norm_rows":
        name = "liger_gemma" if case.variant else "liger"
        return np.asarray(functional.rms_norm(x, weight, eps=EPS, kernel=name, offset=OFFSET if case.variant else 0.0))
    if case.kernel == "cross_entropy_rows":
        kernel = functional.get_kernel("cross_entropy", "liger", columns=512 if case.variant else case.columns, dtype=x.dtype)
        return np.asarray(functional.cross_entropy(x, labels(case, rows), kernel=kernel, count=COUNT))
    if case.kernel == "rotary_rows":
        cos, sin = angles(case, rows)
        return np.asarray(functional.rotary(heads(case, ordinary), cos[:, None], sin[:, None], kernel="liger"))
    name = {"": "liger", "tanh": "liger", "erf": "triton_erf", "sigmoid": "triton_sigmoid"}[case.variant]
    return np.asarray(ACTIVATIONS[case.kernel](x, draw_rows(case, 1, ordinary), kernel=name))


def labels(case: Case, rows: int) -> np.ndarray:
    """Return the label of each row."""
    return np.random.default_rng(case.columns).integers(0, case.columns, rows).astype(np.int32)


def heads(case: Case, ordinary: int = 0) -> np.ndarray:
    """Return rows of four heads, [rows, 4, columns]."""
    return np.stack([draw_rows(case, head, ordinary) for head in range(4)], axis=1)


def angles(case: Case, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines and sines, [rows, columns / 2]."""
    angle = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(case.columns // 2) / (case.columns // 2))
    return np.cos(angle).astype(DTYPES[case.kind]), np.sin(angle).astype(DTYPES[case.kind])


def vectors(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return weight and bias; some weights are -0."""
    rng = np.random.default_rng(case.columns)
    weight, bias = rng.standard_normal((2, case.columns))
    weight[::11] = -0.0
    return weight.astype(DTYPES[case.kind]), bias.astype(DTYPES[case.kind])
