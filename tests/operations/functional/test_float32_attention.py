"""Attention in float32 by PyTorch's memory-efficient kernel: digests of words of an H200 (tests/gpu_runs/float32_products.py, `words`)."""

import hashlib
import json
import lzma
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.attention import attention, attention_backward, find_open_order

GOLDEN = Path(__file__).parents[2] / "golden/torch_float32_h200.json.xz"
CASES = {  # number of the record: batch, heads, queries, keys, size, causal
    0: (1, 4, 20, 20, 64, False), 1: (1, 2, 50, 50, 64, True), 3: (1, 2, 150, 150, 64, True), 4: (1, 2, 40, 40, 128, True),
    5: (1, 2, 33, 140, 128, False), 7: (2, 2, 1, 77, 64, False), 8: (1, 1, 64, 300, 32, False),
}  # fmt: skip


def digest(x):
    return hashlib.sha256(np.asarray(x).reshape(-1)[:4096].tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("number", sample_cases(sorted(CASES), [0]))
def test_attention_and_its_gradients_have_the_words_of_an_h200(number):
    recorded = json.loads(lzma.decompress(GOLDEN.read_bytes()))["attention"]
    b, h, queries, keys, size, causal = CASES[number]
    r = np.random.Generator(np.random.PCG64(zlib.crc32(f"attention{number}".encode())))
    q, k, v, grad = (r.standard_normal((b, h, rows, size), np.float32) for rows in (queries, keys, keys, queries))
    out, lse = attention(q, k, v, backend="efficient", causal=causal)
    assert digest(out) == recorded[f"attention{number}|o"]
    gradients = attention_backward(grad, q, k, v, out, lse, backend="efficient", causal=causal, open_order="lockstep")
    is_open = find_open_order("efficient", (b, h, queries, size), keys, wide=True)
    for name, found in zip(("dq", "dk", "dv"), gradients[:3], strict=True):
        if not (is_open and name == "dq"):
            assert digest(found) == recorded[f"attention{number}|{name}"], name


@pytest.mark.parametrize(("size", "said"), [(40, "head size 40"), (16, "multiples of 32")])
def test_head_sizes_whose_tiles_are_not_whole_are_not_known(size, said):
    q = np.zeros((1, 1, 4, size), np.float32)
    with pytest.raises(NotModelled, match=said):
        attention(q, q, q, backend="efficient")
