"""PyTorch's attention on a GPU: words of an H200 (`torch_census.py`, tests/gpu_runs/attention_calls.py), and what is refused."""

import hashlib
import json
import lzma
import sys
import zlib
from ast import literal_eval
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.operations.functional.torch_cuda.attention import AttentionCall, attention, attention_backward, choose_backend, find_open_order
from tcemu.operations.functional.torch_cuda.attention_backward import cutlass_splits
from tcemu.operations.functional.torch_cuda.fused_attention import split_count
from tcemu.operations.functional.torch_cuda.random_numbers import AttentionDropout, attention_mask

sys.path.insert(0, str(Path(__file__).parent))
from torch_census import is_equal, recorded

# one a kernel: several blocks of keys, splits that are combined, grouped queries, a head that is padded; a gradient needs its forward
USUAL = (
    "sdpa|FLASH_ATTENTION|fwd|bf16|1,2,2,300,300,64,False",
    "sdpa|CUDNN_ATTENTION|fwd|bf16|1,2,2,64,512,128,True",
    "sdpa|FLASH_ATTENTION|bwd|bf16|2,4,2,48,48,64,True",
    "sdpa|MATH|bwd|bf16|1,2,2,77,77,80,False",
    "sdpa|EFFICIENT_ATTENTION|bwd|bf16|1,2,2,197,197,32,False",
    "sdpa|CUDNN_ATTENTION|bwd|bf16|2,4,2,48,48,64,False",
)
UNKNOWN = ("got 1 query", "is open", "known are equal ones", "no row of KERNELS", "took K in two ways")


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in recorded() if n.startswith("sdpa")])
def test_a_case_of_the_census_has_the_words_of_an_h200(name):
    try:
        assert is_equal(name)
    except NotModelled as error:
        assert any(said in str(error) for said in UNKNOWN)


# ---- gradients, and masks of cuDNN

GOLDEN = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden/torch_attention_h200.json.xz").read_bytes()))
USUAL_GRADIENTS = (
    "flash|(1, 2, 2, 300, 300, 64)|bfloat16|False|None|0.0|True|0",
    "efficient|(1, 2, 2, 128, 304, 64)|bfloat16|False|own|0.1|True|0",
    "cudnn|(1, 2, 2, 100, 300, 32)|bfloat16|False|None|0.5|False|0",
)


DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def digest(words):
    return hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()[:16]


def normals(key, dtype, shape):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32).astype(DTYPES[dtype])


def gradient_case(name):
    """Backend, shape, dtype, whether causal, form of the bias, probability of dropout, whether deterministic, and seed."""
    backend, shape, dtype, causal, bias, p, deterministic, seed = name.split("|")
    return backend, literal_eval(shape), dtype, causal == "True", bias != "None", float(p), deterministic == "True", int(seed)


def open_order_of(name):
    backend, (b, h, _, s, keys, d), *_, deterministic, _ = gradient_case(name)
    return find_open_order(backend, (b, h, s, d), keys, deterministic=deterministic)


@pytest.mark.parametrize("name", [n if n in USUAL_GRADIENTS else pytest.param(n, marks=pytest.mark.full) for n in GOLDEN["gradients"]])
def test_a_gradient_has_the_words_of_an_h200(name):
    """Whole tensors. Where the order is open, the gradients of keys and values."""
    backend, shape, dtype, causal, has_bias, p, deterministic, seed = gradient_case(name)
    b, h, key_heads, s, keys, d = shape
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"g{seed}{shape}".encode())))
    sizes = ((b, h, s, d), *[(b, key_heads, keys, d)] * 2)
    q, k, v = (rng.standard_normal(size, np.float32).astype(DTYPES[dtype]) for size in sizes)
    grad = normals(f"o{seed}{shape}", dtype, (b, h, s, d))
    bias = normals(f"m{seed}{shape}", dtype, (b, h, s, keys)) if has_bias else None
    options = {"backend": backend, "causal": causal, "bias": bias, "dropout": AttentionDropout(p, seed, 0) if p else None}
    out, logarithms = attention(q, k, v, **options)
    stored = np.pad(logarithms, [(0, 0), (0, 0), (0, -s % 32 if backend == "efficient" else 0)], constant_values=np.inf)
    gradients = attention_backward(grad, q, k, v, out, logarithms, open_order="lockstep", deterministic=deterministic, **options)
    found = {"o": out, "lse": stored} | dict(zip(("dq", "dk", "dv", "dm"), gradients, strict=True))
    if open_order_of(name):
        del found["dq"]
    recorded = GOLDEN["gradients"][name]
    words = {part: np.ascontiguousarray(y).view(f"i{y.dtype.itemsize}") for part, y in found.items() if part in recorded}
    assert {part: digest(y) for part, y in words.items()} == {part: recorded[part] for part in words} and len(words) >= 4


def test_sums_that_are_said_to_have_one_order_repeat_on_an_h200():
    """Six runs of each gradient: results with other words, by number."""
    for name, entry in GOLDEN["gradients"].items():
        assert entry["distinct"][1:] == [1] * len(entry["distinct"][1:]), name
        assert entry["distinct"][0] == 1 or open_order_of(name), name


def test_enough_heads_leave_a_head_to_one_thread_block():
    assert cutlass_splits(256, 128, 64, deterministic=False) == 1 and cutlass_splits(256, 129, 64, deterministic=False) == 3
    assert cutlass_splits(4, 500, 160, deterministic=False) == 8 and cutlass_splits(150, 500, 160, deterministic=False) == 1


@pytest.mark.parametrize("name", GOLDEN["one query"])
def test_one_query_of_cudnn_over_up_to_256_keys_has_the_words_of_an_h200(name):
    dtype, text, _ = name.split("|")
    b, h, keys, d = literal_eval(text)
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"one{text}".encode())))
    q, k, v = (rng.standard_normal((b, h, n, d), np.float32).astype(DTYPES[dtype]) for n in (1, keys, keys))
    out, logarithms = attention(q, k, v, backend="cudnn")
    words = {"o": np.asarray(out).view(np.int16), "lse": np.asarray(logarithms).view(np.int32)}
    assert {part: digest(y) for part, y in words.items()} == GOLDEN["one query"][name]


@pytest.mark.parametrize("entry", [x for x in GOLDEN["masks"] if "mask" in x], ids=lambda entry: str(entry["shape"]))
def test_cudnn_drops_the_weights_that_an_h200_drops(entry):
    kept = attention_mask("cudnn", AttentionDropout(entry["p"], entry["seed"], entry["begin"]), tuple(entry["shape"][:4]))
    assert digest(np.packbits(kept)) == entry["mask"]


def test_cudnn_keeps_the_numbers_that_an_h200_keeps():
    """The largest one that is kept and the least one that is dropped, of a million numbers, which has each of the 65,536 numbers."""
    for entry in GOLDEN["masks"]:
        if "most kept" in entry:
            limit = int((1.0 - entry["p"]) * 65536)
            assert (limit, limit + 1) == (entry["most kept"], entry["least dropped"])


def operands(shape=(1, 2, 24, 64), keys=24, heads=2, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(0)
    key = (shape[0], heads, keys, shape[-1])
    return [rng.standard_normal(s).astype(dtype) for s in (shape, key, key)]


@pytest.mark.parametrize("backend", sample_cases(["flash", "cudnn", "efficient", "math"], ["flash", "math"]))
def test_a_forward_is_near_the_exact_one(backend):
    q, k, v = operands()
    out, logsumexp = attention(q, k, v, backend=backend, causal=True)
    scores = np.einsum("bhqd,bhkd->bhqk", q.astype(float), k.astype(float)) / 8
    scores = np.where(np.tri(24, dtype=bool), scores, -np.inf)
    weights = np.exp(scores)
    exact = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), v.astype(float))
    assert np.abs(np.asarray(out, np.float64) - exact).max() < 0.02
    if backend == "math":
        assert np.allclose(logsumexp, weights / weights.sum(-1, keepdims=True), atol=1e-5)
    else:
        assert np.allclose(logsumexp, np.log(weights.sum(-1)), atol=1e-5)


def test_a_forward_is_the_same_under_jit():
    q, k, v = operands()
    plain = attention(q, k, v, backend="cudnn")
    traced = jax.jit(lambda *x: attention(*x, backend="cudnn"))(q, k, v)
    for x, y in zip(plain, traced, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "cudnn"),
        ({"mask": (8, 8)}, "cudnn"),
        ({"query": (1, 2, 8, 60), "key": (1, 2, 8, 60), "value": (1, 2, 8, 60)}, "flash"),
        ({"query": (1, 2, 8, 60), "key": (1, 2, 8, 60), "value": (1, 2, 8, 60), "mask": (8, 8)}, "math"),
        ({"key": (1, 2, 1, 64)}, "flash"),
        ({"key": (1, 2, 1, 64), "causal": True}, "efficient"),
        ({"key": (1, 1, 1, 64), "causal": True}, "math"),
        ({"dtype": np.float32}, "efficient"),
        ({"deterministic": True}, "flash"),
    ],
)
def test_the_choice_of_a_backend(changes, backend):
    call = AttentionCall((1, 2, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64), ml_dtypes.bfloat16)
    assert choose_backend(call._replace(**changes)) == backend


def test_the_number_of_splits():
    """Of FlashAttention 2's heuristic, as an H200's words confirm: the census has 2, 3, 4 and 8 splits."""
    assert [split_count(n, 264, blocks) for n, blocks in ((10, 2), (1, 3), (2, 4), (32, 16), (220, 16))] == [2, 3, 4, 8, 1]


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda q, k, v: attention(q, k, v, backend="triton"), ValueError, "expected one of cudnn, flash"),
        (lambda q, k, v: attention(q, k, v[:, :, :3], backend="flash"), ValueError, "expected .batch, heads, queries, size"),
        (lambda q, k, v: attention(q, k, v, backend="flash", bias=np.zeros((24, 24), bool)), Unsupported, "there is no mask"),
        (lambda q, k, v: attention(q[:, :, :3], k, v, backend="flash", causal=True), Unsupported, "equally many"),
        (lambda q, k, v: attention(*(x.astype(np.float32) for x in (q, k, v)), backend="cudnn"), NotModelled, "known are bf16 and f16"),
        (lambda q, k, v: attention(q, k, v, backend="flash", gpu="B200"), NotModelled, "B200"),
        (lambda q, k, v: attention(q, k, v, backend="flash", scale=-1.0), NotModelled, "positive scales"),
        (lambda q, k, v: attention(q[:, :, :1], *(np.tile(x, (1, 1, 11, 1)) for x in (k, v)), backend="cudnn"), NotModelled, "four warps"),
        (lambda q, k, v: attention(*(x[:, :1] for x in (q, k, v)), backend="math"), NotModelled, "one head in all"),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(*operands())
