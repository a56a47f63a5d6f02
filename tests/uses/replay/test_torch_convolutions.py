"""Convolutions and grouped products: words of an H200, at some places of each result (tests/gpu_runs/torch_products.py, seed 0)."""

import hashlib
import json
import lzma
import math
import zlib
from ast import literal_eval
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tcemu.base.errors import NotModelled
from tcemu.uses.replay.torch_convolutions import convolution, grouped_matmul

GOLDEN = Path(__file__).parents[2] / "golden/torch_patches_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
USUAL = ("patch_bias|f16|1,3,32,8,64", "patch_bias|f32|1,1,64,4,96", "grouped|bf16|3,17,64,96", "grouped|f16|4,64,128,128")


@cache
def recorded():
    return json.loads(lzma.decompress(GOLDEN.read_bytes()))


def draw(key, shape):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32)


def result_of(name):
    kind, dtype, sizes = name.split("|")
    to = DTYPES[dtype]
    if kind.startswith("patch"):
        batch, channels, height, size, outputs = map(int, sizes.split(","))
        x = draw(f"cx{batch}{channels}{height}{size}", (batch, channels, height, height)).astype(to)
        w = draw(f"cw{channels}{size}{outputs}", (outputs, channels, size, size)) * np.float32((channels * size * size) ** -0.5)
        bias = draw(f"cb{outputs}", outputs).astype(to)
        return convolution(x, w.astype(to), bias if kind == "patch_bias" else None, stride=(size, size))
    experts, m, k, n = map(int, sizes.split(","))
    x = draw(f"gx{experts}{m}{k}{n}", (m, k)).astype(to)
    w = (draw(f"gw{experts}{m}{k}{n}", (experts, n, k)) * np.float32(k**-0.5)).astype(to)
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"go{experts}{m}".encode())))
    offsets = np.sort(rng.integers(0, m + 1, experts))
    offsets[-1] = m
    return grouped_matmul(x, w.swapaxes(1, 2), offsets, transposed_b=kind == "grouped")


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in recorded()["words"]])
def test_words_of_an_h200(name):
    places, words = recorded()["words"][name]
    try:
        y = np.asarray(result_of(name)).reshape(-1)
    except NotModelled as error:
        assert "f32" in name or "probability" in str(error) or "no rule" in str(error)
        return
    assert y[places].view(f"i{y.dtype.itemsize}").tolist() == words


CONVOLUTIONS = json.loads(lzma.decompress((GOLDEN.parent / "torch_convolutions_h200.json.xz").read_bytes()))["cases"]
USUAL_CONVOLUTIONS = (
    "float16|((2, 8, 50), (16, 8, 5), 1, 2, 1, 1)", "bfloat16|((1, 256, 100), (256, 1, 4), 1, 3, 1, 256)",
    "float32|((2, 3, 32, 32), (64, 3, 4, 4), 4, 0, 1, 1)", "float16|((1, 32, 40, 40), (48, 32, 3, 3), 1, 2, 2, 1)",
)  # fmt: skip
MOST_WORK = 1 << 24  # products of a case that -m full computes on a CPU


def normals(key, dtype, *shapes):
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    return [
        rng.standard_normal(shape, np.float32).astype({"float16": np.float16, "float32": np.float32}.get(dtype, ml_dtypes.bfloat16))
        for shape in shapes
    ]


def spread(y, most):
    words = np.ascontiguousarray(y).reshape(-1).view(f"i{y.dtype.itemsize}")
    return words[np.unique(np.linspace(0, words.size - 1, min(words.size, most)).astype(np.int64))]


@pytest.mark.parametrize(
    "name", [name if name in USUAL_CONVOLUTIONS else pytest.param(name, marks=pytest.mark.full) for name in CONVOLUTIONS]
)
def test_convolutions_have_the_words_of_an_h200(name):
    """Of evenly spread words, with a bias and without, as tests/gpu_runs/dropout_and_convolutions.py makes them; float32 without TF32."""
    dtype, text = name.split("|")
    case = literal_eval(text)
    shape, weight_shape, stride, padding, dilation, groups = case
    axes = len(shape) - 2
    wide = lambda value: value if isinstance(value, tuple) else (value,) * axes
    places = math.prod((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in
                       zip(shape[2:], weight_shape[2:], wide(stride), wide(padding), wide(dilation), strict=True))  # fmt: skip
    if shape[0] * places * math.prod(weight_shape) > MOST_WORK and name not in USUAL_CONVOLUTIONS:
        pytest.skip("too many products for a CPU")
    x, weight, bias = normals(f"conv{case}", dtype, shape, weight_shape, weight_shape[:1])
    weight = (weight.astype(np.float32) * np.float32(float(math.prod(weight_shape[1:])) ** -0.5)).astype(x.dtype)
    options = {"stride": wide(stride), "padding": wide(padding), "dilation": wide(dilation), "groups": groups}
    try:
        found = [spread(np.asarray(convolution(x, weight, b, **options)), most) for b, most in ((None, 1024), (bias, 256))]
    except NotModelled:
        assert name not in USUAL_CONVOLUTIONS
        return
    assert [hashlib.sha256(words.tobytes()).hexdigest()[:16] for words in found] == CONVOLUTIONS[name]


def test_what_is_not_known_or_does_not_fit_is_refused():
    x = np.ones((1, 3, 8, 8), np.float16)
    with pytest.raises(NotModelled, match="no tensor core up to 384"):
        convolution(x, np.ones((448, 3, 4, 4), np.float16))
    for weight, said in (
        (np.ones((4, 3, 1, 1), np.float16), "product by cuBLAS"),
        (np.ones((4, 3, 2, 2), np.float32), "allow_tf32 = False"),
        (np.ones((3, 1, 3, 3), np.float16), "kernels of 1, 3 or 5 rows"),
    ):
        with pytest.raises(NotModelled, match=said):
            convolution(x.astype(weight.dtype), weight, groups=3 // weight.shape[1], tf32=True)
    with pytest.raises(ValueError, match=r"expected \[B, C, \.\.\.\]"):
        convolution(x, np.ones((4, 2, 4, 4), np.float16))
    with pytest.raises(ValueError, match="E offsets up to M"):
        grouped_matmul(np.ones((4, 8), np.float16), np.ones((2, 8, 8), np.float16), [1, 3])
    for bias in (np.ones(1, np.float16), np.ones(4, np.float32)):
        with pytest.raises(ValueError, match=r"bias: got .*; expected float16\[4\]"):
            convolution(x, np.ones((4, 3, 4, 4), np.float16), bias)


@pytest.mark.parametrize(("channels", "groups", "dtype"), [(3, 1, np.float32), (32, 1, ml_dtypes.bfloat16), (4, 4, np.float32)])
def test_a_batch_of_no_images_is_empty(channels, groups, dtype):
    x, weight, bias = (np.zeros(shape, dtype) for shape in ((0, channels, 8, 7), (4, channels // groups, 3, 3), 4))
    found = convolution(x, weight, bias, groups=groups)
    assert found.shape == (0, 4, 6, 5) and found.dtype == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": (1,)}, r"stride=\[1\].*each of 2 axes"), ({"stride": (0, 1)}, "1 or more"), ({"padding": (-1, 1)}, "0 or more"),
        ({"dilation": (1, 0)}, "dilation="), ({"groups": 0}, "in 0 groups"),
    ],
)  # fmt: skip
def test_numbers_that_no_convolution_has(options, message):
    with pytest.raises(ValueError, match=message):
        convolution(np.zeros((1, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32), **options)
