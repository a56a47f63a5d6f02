"""PyTorch's attention on a GPU: words of an H200 (`torch_census.py`), the choice of a backend, and what is refused."""

import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.operations.functional.torch_cuda.attention import AttentionCall, attention, choose_backend
from tcemu.operations.functional.torch_cuda.fused_attention import split_count

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
        (lambda q, k, v: attention(q[:, :, :1], *(np.tile(x, (1, 1, 10, 1)) for x in (k, v)), backend="cudnn"), NotModelled, "four warps"),
        (lambda q, k, v: attention(*(x[:, :1] for x in (q, k, v)), backend="math"), NotModelled, "one head in all"),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call(*operands())
