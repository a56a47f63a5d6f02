"""Normalisations whose mean and variance were computed by another kernel: the two algorithms are named.

The algorithms are written here once more, element by element, from PyTorch's sources.
"""

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from golden.record_moments import CASES as RECORDED
from golden.record_moments import draw_rows
from support.drift_records import recorded
from support.planted_drifts import F32, _fma, gpu_function
from support.sampling import sample_cases

from tcemu.drift import identify, locate, record
from tcemu.uses.drift.moments import Moments, mean_and_variance

RNG = np.random.default_rng(11)
EPS = 1e-5

# ---- moments of one row: mean, sum of squared differences, count


def welford(elements, *, reciprocal=False, fused=True):
    mean = squares = F32(0)
    for count, x in enumerate(elements, 1):
        delta = F32(x - mean)
        if not reciprocal:
            mean = F32(mean + F32(delta / F32(count)))
        else:
            share = F32(1) / F32(count)
            mean = _fma(delta, share, mean) if fused else F32(mean + F32(delta * share))
        rest = F32(x - mean)
        squares = _fma(delta, rest, squares) if fused else F32(squares + F32(delta * rest))
    return mean, squares, len(elements)


def join_welford_ops(a, b):
    if not a[2] or not b[2]:
        return a if a[2] else b
    delta, count = F32(b[0] - a[0]), a[2] + b[2]
    share = F32(b[2]) / F32(count)
    weighted = F32(F32(delta * delta) * F32(a[2]))
    return _fma(delta, share, a[0]), _fma(weighted, share, F32(a[1] + b[1])), count


def join_vectorised(own, other):
    count = own[2] + other[2]
    if not count:
        return own
    scale, delta = F32(1) / F32(count), F32(own[0] - other[0])
    a, b = F32(F32(other[2]) * scale), F32(F32(own[2]) * scale)
    weighted = F32(F32(delta * delta) * F32(other[2]))
    return _fma(a, other[0], F32(b * own[0])), _fma(weighted, b, F32(other[1] + own[1])), count


def join_batch_norm(own, other):
    count = own[2] + other[2]
    factor, delta = F32(1) / F32(max(count, 1)), F32(own[0] - other[0])
    weighted = F32(F32(F32(delta * delta) * F32(own[2])) * F32(other[2]))
    mean = F32(_fma(own[0], F32(own[2]), F32(other[0] * F32(other[2]))) * factor)
    return mean, F32(own[1] + _fma(factor, weighted, other[1])), count


def fold(parts, join, far=True):
    parts = list(parts)
    while len(parts) & (len(parts) - 1):
        parts.append((F32(0), F32(0), 0))
    while len(parts) > 1:
        half = len(parts) // 2
        pairs = zip(parts[:half], parts[half:], strict=True) if far else zip(parts[::2], parts[1::2], strict=True)
        parts = [join(*pair) for pair in pairs]
    return parts[0]


def by_warps(threads, join, far=True):
    return fold([fold(threads[i : i + 32], join, far) for i in range(0, len(threads), 32)], join, far)


def cuda_rows(row, inner):
    return by_warps([welford(row[thread::32]) for thread in range(32)], join_welford_ops)


def cuda_vectorised(row, inner):
    vectors = row.reshape(-1, 4)
    return by_warps([welford(vectors[t::128].reshape(-1), reciprocal=True) for t in range(128)], join_vectorised)


def cuda_batch_norm(row, inner):
    """For fewer than 32 neighbours: 32 threads across, 16 down. The 16 warps are joined like 32, of which 16 are empty."""
    images = row.reshape(-1, inner)
    threads = [welford(images[down::16, across::32].reshape(-1)) for down in range(16) for across in range(32)]
    return by_warps([*threads, *[(F32(0), F32(0), 0)] * len(threads)], join_batch_norm, far=False)


def cpu(row, inner, fused=True):
    """At most 16 vectors of eight."""
    vectors = row[: len(row) // 8 * 8].reshape(-1, 8)
    lanes = [welford(vectors[:, lane], reciprocal=True, fused=fused) for lane in range(8)]
    rest = row[vectors.size :]
    mean, squares, count = welford(rest, fused=False)
    for added, more, n in lanes:
        share = F32(n) / F32(count + n) if n else F32(0)
        delta = F32(added - mean)
        weighted = F32(F32(delta * delta) * share)
        if fused:
            mean, more = _fma(share, delta, mean), _fma(weighted, F32(count), more)
        else:
            mean, more = F32(mean + F32(share * delta)), F32(more + F32(weighted * F32(count)))
        squares, count = F32(squares + more), count + n
    return mean, squares, count


def two_passes(row, inner):
    total = F32(0)
    for x in row:
        total = F32(total + x)
    mean, squares = total / F32(len(row)), F32(0)
    for x in row:
        squares = F32(squares + F32(F32(x - mean) * F32(x - mean)))
    return mean, squares, len(row)


def sums_of_squares(row, inner):
    """Eight lanes, added in ascending order, as PyTorch's group norm before 2021."""
    total, squares = F32(0), F32(0)
    lanes = row.reshape(-1, 8)
    for lane in range(8):
        a = b = F32(0)
        for x in lanes[:, lane]:
            a, b = F32(a + x), _fma(x, x, b)
        total, squares = (a, b) if lane == 0 else (F32(total + a), F32(squares + b))
    scale = F32(1) / F32(len(row))
    mean = F32(total * scale)
    return mean, F32(F32(squares * scale) - F32(mean * mean)), 1  # the variance itself


def moments(rows, inner, algorithm):
    found = [algorithm(row, inner) for row in rows]
    return np.array([m for m, *_ in found], F32), np.array([s / F32(n) for _, s, n in found], F32)


# ---- roots and results

ROOTS = {
    "exact": lambda v: (1 / np.sqrt(v.astype(np.float64) + EPS)).astype(F32),
    "steps": lambda v: F32(1) / np.sqrt(v + F32(EPS)),
    "gpu": lambda v: gpu_function("rsqrt", v + F32(EPS)),
}
fma_arrays = np.vectorize(_fma, otypes=[F32])
GAIN, SHIFT = RNG.standard_normal((2, 40)).astype(F32)


def layer_norm(x, algorithm, root):
    mean, variance = moments(x, x.shape[1], algorithm)
    scale = ROOTS[root](variance)
    y = fma_arrays((x - mean[:, None]) * scale[:, None], GAIN, SHIFT)
    return [x, GAIN, SHIFT], [y, mean[:, None], scale[:, None]], "layer", ["#0", [40], "#1", "#2", EPS]


def linear(x, mean, scale, gain, shift):
    scale = scale * gain
    return fma_arrays(x, scale, fma_arrays(-mean, scale, shift))


def group_norm(x, algorithm, root):
    n, channels, *_ = x.shape
    mean, variance = moments(x.reshape(n * 2, -1), 0, algorithm)
    scale = ROOTS[root](variance)
    shaped = lambda v: v.reshape(n, 2, 1, 1)
    gain, shift = (v[:channels].reshape(1, 2, -1, 1) for v in (GAIN, SHIFT))
    y = linear(x.reshape(n, 2, channels // 2, -1), shaped(mean), shaped(scale), gain, shift).reshape(x.shape)
    pixels = x[0, 0].size
    return [x, GAIN[:channels], SHIFT[:channels]], [y], "group", ["#0", "#1", "#2", n, channels, pixels, 2, EPS]


def batch_norm(x, algorithm, root):
    channels = x.shape[1]
    mean, variance = moments(np.moveaxis(x, 1, 0).reshape(channels, -1), x[0, 0].size, algorithm)
    scale = ROOTS[root](variance)
    shaped = lambda v: v[:channels].reshape(1, -1, 1, 1)
    y = linear(x, *map(shaped, (mean, scale, GAIN, SHIFT)))
    return [x, GAIN[:channels], SHIFT[:channels]], [y], "batch", ["#0", "#1", "#2", None, None, True, 0.1, EPS]


def norm_record(norm, x, algorithm, root):
    operands, results, name, args = norm(x, algorithm, root)
    return recorded([(f"aten.native_{name}_norm", operands, results, {"args": args, "kwargs": {}})], "torch")


normal = lambda *shape: (RNG.standard_normal(shape) + 0.3).astype(F32)
ROWS, IMAGES, CHANNELS = normal(9, 40), normal(3, 4, 4, 4), normal(3, 14, 3, 3)
CPU, CUDA = "Welford's moments of PyTorch on a CPU", "Welford's moments of PyTorch's"
CASES = {  # norm, operand, both sides with their roots, and words of both
    "cuda rows": (layer_norm, ROWS, (cpu, "steps"), (cuda_rows, "gpu"), CPU, f"{CUDA} CUDA kernels for rows"),
    "cuda vectorised": (layer_norm, ROWS, (cpu, "steps"), (cuda_vectorised, "gpu"), CPU, f"{CUDA} vectorised CUDA kernel"),
    "two CUDA kernels": (layer_norm, ROWS, (cuda_rows, "gpu"), (cuda_vectorised, "gpu"), f"{CUDA} CUDA", f"{CUDA} vectorised"),
    "without fma": (layer_norm, ROWS, (cpu, "steps"), (lambda *row: cpu(*row, fused=False), "steps"), "fma", "products rounded"),
    "two passes": (layer_norm, ROWS, (cpu, "exact"), (two_passes, "exact"), CPU, "sequential sum"),
    "sums of squares": (layer_norm, ROWS, (cpu, "exact"), (sums_of_squares, "exact"), CPU, "times 1 / K; 8 lanes of 1, joined ascending"),
    "group norm": (group_norm, IMAGES, (cpu, "exact"), (cuda_rows, "gpu"), CPU, f"{CUDA} CUDA kernels for rows"),
    "group norm by squares": (group_norm, IMAGES, (cpu, "exact"), (sums_of_squares, "steps"), CPU, "sums of x and x²"),
    "batch norm": (batch_norm, CHANNELS, (two_passes, "exact"), (cuda_batch_norm, "gpu"), "sequential sum", "CUDA kernel of batch norm"),
}  # fmt: skip


@pytest.mark.parametrize("case", sample_cases(CASES, ["cuda rows"]))
def test_other_moments_are_found_and_named(case):
    norm, x, left, right, *words = CASES[case]
    drift = locate(norm_record(norm, x, *left), norm_record(norm, x, *right), targets=())
    (source,) = drift.sources
    assert "mean and variance" in source.cause.kinds, str(drift)
    assert words[0] in source.cause.left and words[1] in source.cause.right, str(drift)
    assert max(source.legitimate) <= 1


@pytest.mark.full
def test_a_mean_that_differs_alone_is_explained():
    """In a narrow result, y may be the same words, and the mean or the reciprocal root are not."""

    def side(algorithm):
        operands, (y, mean, scale), _, args = layer_norm(ROWS, algorithm, "steps")
        return recorded([("aten.native_layer_norm", operands, [0 * y, mean, scale], {"args": args, "kwargs": {}})], "torch")

    (source,) = locate(side(cpu), side(cuda_rows), targets=()).sources
    assert source.cause.kinds == ("mean and variance",) and CPU in source.cause.left and f"{CUDA} CUDA" in source.cause.right, str(source)


@pytest.mark.full
def test_moments_that_no_kernel_gives_are_unexplained():
    far = lambda row, inner: (F32(np.nextafter(cpu(row, inner)[0], F32(9)) + F32(1e-5)), *cpu(row, inner)[1:])
    drift = locate(norm_record(layer_norm, ROWS, cpu, "steps"), norm_record(layer_norm, ROWS, far, "steps"), targets=())
    assert CPU in drift.sources[0].cause.left and "unexplained" in drift.sources[0].cause.right


@pytest.mark.full
def test_the_norms_of_torch_on_this_machine_are_explained(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    norms = [(torch.nn.GroupNorm(2, 6), (3, 6, 5, 5)), (torch.nn.BatchNorm2d(6), (3, 6, 5, 5))]
    norms += [(torch.nn.LayerNorm(k), (7, k)) for k in (6, 40, 300, 1500)]  # a remainder alone, chunks, and cascades of chunks
    norms += [(torch.nn.LayerNorm(300).bfloat16(), (7, 300))]
    with record(tmp_path / "norms.drift"):
        for norm, shape in norms:
            for parameter in norm.parameters():
                torch.nn.init.normal_(parameter)
            norm(torch.randn(shape).to(norm.weight.dtype))
    names = [f"aten.native_{name}_norm" for name in ("layer", "group", "batch")]
    found = identify(tmp_path / "norms.drift", targets=(), names=names)
    assert len(found.operations) == len(norms) and found.unexplained == (), str(found)
    assert all(CPU in line.arithmetic for line in found.operations if "batch" not in line.name)


# ---- words of a GPU

WORDS = Path(__file__).parents[2] / "golden" / "moments_h100.json.xz"


@pytest.mark.parametrize("number", sample_cases(range(len(RECORDED)), (1, 22, 26, 34)))
def test_the_words_of_an_h100(number):
    """Means and reciprocal roots of PyTorch 2.11: every word, by the kernel that the shape gets."""
    operator, _, shape = RECORDED[number]
    x = draw_rows(number)
    if operator == "layer_norm":
        rows, inner, name = x, shape[1], "cuda vectorised" if shape[1] % 4 == 0 else "cuda"
    elif operator == "group_norm":
        rows, name = x.reshape(shape[0] * shape[3], -1), "cuda"
        inner = rows.shape[1]
    else:
        rows, inner, name = x.swapaxes(0, 1).reshape(shape[1], -1), shape[2], "cuda batch norm"
    mean, variance = mean_and_variance(Moments(name), rows, inner)
    root = ROOTS["exact" if operator == "batch_norm_stats" else "gpu"](variance)
    expected = json.loads(lzma.decompress(WORDS.read_bytes()))["words"][number]
    assert mean.view(np.uint32).tolist() == expected["mean"] and root.view(np.uint32).tolist() == expected["root"]
