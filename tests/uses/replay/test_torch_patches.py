"""Patch convolutions and grouped products: words of an H200, at some places of each result (tests/gpu_runs/torch_products.py, seed 0)."""

import json
import lzma
import zlib
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tcemu.base.errors import NotModelled
from tcemu.uses.replay.torch_patches import grouped_matmul, patch_convolution

GOLDEN = Path(__file__).parents[2] / "golden/torch_patches_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
USUAL = ("patch_bias|f16|1,3,32,8,64", "grouped|bf16|3,17,64,96")


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
        return patch_convolution(x, w.astype(to), bias if kind == "patch_bias" else None)
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


def test_what_is_not_known_or_does_not_fit_is_refused():
    x = np.ones((1, 3, 8, 8), np.float16)
    with pytest.raises(NotModelled, match="would teach the shapes between"):
        patch_convolution(x, np.ones((512, 3, 4, 4), np.float16))
    with pytest.raises(ValueError, match="expected \\[B, C, H, W\\]"):
        patch_convolution(x, np.ones((4, 2, 4, 4), np.float16))
    with pytest.raises(ValueError, match="E offsets up to M"):
        grouped_matmul(np.ones((4, 8), np.float16), np.ones((2, 8, 8), np.float16), [1, 3])
    for bias in (np.ones(1, np.float16), np.ones(4, np.float32)):
        with pytest.raises(ValueError, match=r"bias: got .*; expected float16\[4\]"):
            patch_convolution(x, np.ones((4, 3, 4, 4), np.float16), bias)
