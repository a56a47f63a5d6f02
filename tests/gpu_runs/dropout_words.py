"""Words of PyTorch's dropout and cuDNN's attention with one query on a GPU.

    python dropout_words.py OUT dropout|attention

dropout: results, masks and the generator's offset after each call of dropout in its forms. attention: masks of attention's dropout by
backend, of which values of one show each element; one query of cuDNN, and pairs of keys that show its order.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

START, LIMIT = time.time(), float(os.environ.get("LIMIT_S", "40"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
A = torch.ops.aten
MOST = 1024


def rng(key):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))


def normals(key, dtype, *shapes):
    r = rng(key)
    return [torch.from_numpy(r.standard_normal(shape, np.float32)).to(DT[dtype]).to(DEVICE) for shape in shapes]


def raw(y):
    """All words of a tensor in the order of its axes."""
    y = y.detach().contiguous().cpu()
    kinds = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.bool: torch.uint8}
    return y.view(kinds.get(y.dtype, y.dtype)).numpy().reshape(-1)


def spread(y, most=MOST):
    """Words at evenly spread places, which `places` gives too."""
    found = raw(y)
    return found[places(found.size, most)]


def places(size, most=MOST):
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def offset():
    return int(torch.cuda.default_generators[0].get_offset()) if DEVICE == "cuda" else 0


def attempt(kept, name, run):
    """Store what `run` gives, an array for each name, or its error."""
    try:
        for key, value in run().items():
            kept[f"{name}#{key}"] = np.asarray(value)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        kept[f"{name}#error"] = np.array(f"{type(error).__name__}: {str(error)[:300]}")


# ---- dropout

SIZES = ((6,), (12,), (20,), (7, 9), (130, 768), (3, 5, 64, 31), (1 << 19,), (2_200_000,))


def dropout_forms(x, p):
    channels = x.reshape(-1, *x.shape[-2:])[None] if x.ndim > 1 else None
    yield "dropout", lambda: F.dropout(x, p)
    yield "inplace", lambda: F.dropout(x.clone(), p, inplace=True)
    yield "alpha", lambda: F.alpha_dropout(x, p)
    yield "bernoulli", lambda: torch.bernoulli(torch.full_like(x, 1 - p))
    yield "bernoulli_", lambda: torch.empty_like(x).bernoulli_(1 - p)
    yield "rand", lambda: torch.rand(x.shape, device=DEVICE, dtype=x.dtype)
    yield "uniform", lambda: torch.empty_like(x).uniform_(-0.3, 1.7)
    if x.ndim > 1:
        yield "turned", lambda: F.dropout(x.transpose(-1, -2), p)
        yield "strided", lambda: F.dropout(x[..., ::2], p)
        yield "turned_inplace", lambda: F.dropout(x.transpose(-1, -2).clone(), p, inplace=True)
        yield "feature", lambda: F.dropout2d(channels, p)
        yield "begins", lambda: F.dropout(x.reshape(-1)[1:], p)


SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("-inf"), float("nan"), 1e-8, 3.0)
LIMITS = ("maximum", "minimum", "clamp_min", "clamp_max")


def record_limits(kept):
    """Foreach forms of maximum and minimum on pairs of special values."""
    for dtype in DT:
        values = torch.tensor(SPECIAL, device=DEVICE).to(DT[dtype])
        x, y = (v.reshape(-1).contiguous() for v in torch.meshgrid(values, values, indexing="ij"))
        for name in LIMITS:
            run = getattr(torch, f"_foreach_{name}")
            attempt(kept, f"foreach|{name}|{dtype}", lambda run=run, x=x, y=y: {"list": raw(run([x], [y])[0])})
            for i, number in enumerate(SPECIAL):
                attempt(kept, f"foreach|{name}|{dtype}|{i}", lambda run=run, x=values, n=number: {"number": raw(run([x], n)[0])})


def two_calls(run):
    """Words of two calls after a seed, and the generator's offset after each."""
    torch.manual_seed(77)
    first, middle = run(), offset()
    second = run()
    return {"first": spread(first), "second": spread(second), "offsets": [middle, offset()]}


def gradient_of_dropout(x, p):
    torch.manual_seed(5)
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.dropout(leaf, p), leaf, x * 3)
    y, mask = A.native_dropout(x, p, True)
    return {"grad": spread(grad), "y": spread(y), "mask": spread(mask)}


def record_dropout(out):
    kept = {}
    record_limits(kept)
    for dtype in DT:
        for shape in SIZES:
            (x,) = normals("drop", dtype, shape)
            for p in (0.1, 0.5, 0.35):
                facts = f"{dtype}|{'x'.join(map(str, shape))}|{p}"
                for form, run in dropout_forms(x, p):
                    attempt(kept, f"{form}|{facts}", lambda run=run: two_calls(run))
                attempt(kept, f"gradient|{facts}", lambda x=x, p=p: gradient_of_dropout(x, p))
    np.savez_compressed(f"{out}/dropout.npz", **kept)
    print(len(kept), "arrays of dropout", [k for k in kept if k.endswith("error")][:4])


# ---- attention

MASKS = ((1, 2, 2, 40, 64, 64), (2, 3, 3, 130, 128, 128), (1, 2, 2, 33, 256, 256), (1, 4, 2, 70, 96, 96), (3, 4, 4, 300, 64, 64))
WORDS = ((1, 2, 2, 48, 48, 64), (2, 2, 2, 130, 304, 64), (1, 2, 2, 200, 200, 128))
CALLS = {
    "cudnn": lambda q, k, v, p, c: A._scaled_dot_product_cudnn_attention(q, k, v, None, True, p, c, False),
    "flash": lambda q, k, v, p, c: A._scaled_dot_product_flash_attention(q, k, v, p, c, False),
    "efficient": lambda q, k, v, p, c: A._scaled_dot_product_efficient_attention(q, k, v, None, True, p, c),
    "math": lambda q, k, v, p, c: A._scaled_dot_product_attention_math(q, k, v, None, p, c),
}
ONE_QUERY = (
    (1, 2, 2, 40, 64), (1, 2, 2, 128, 64), (1, 2, 2, 129, 64), (2, 4, 2, 257, 64), (1, 8, 2, 700, 128), (1, 2, 2, 300, 128),
    (64, 32, 32, 2048, 128), (1, 4, 4, 512, 128), (8, 12, 12, 1000, 64), (1, 2, 2, 200, 256), (1, 2, 2, 100, 96), (16, 32, 8, 1024, 128),
    (1, 16, 8, 48, 128), (32, 8, 8, 4096, 64), (1, 2, 2, 64, 32), (2, 16, 2, 33, 64),
)  # fmt: skip
FIRST = (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 300, 511, 512, 1000)


def seeds_of(found):
    return [
        [int(n) for n in t.reshape(-1).tolist()] for t in found if isinstance(t, torch.Tensor) and t.dtype in (torch.int64, torch.uint64)
    ]


def kernel_names(run):
    if DEVICE == "cpu":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as p:
        run()
        torch.cuda.synchronize()
    return [e.key[:240] for e in p.key_averages() if not e.key.startswith(("cuda", "cuLaunch", "Memset", "Activity"))]


def dropped(backend, shape, p, dtype, causal):
    """The results with V = 1 at (key, key): each element is a weight, so that zeros are the mask."""
    b, h, hk, s, sk, d = shape
    torch.manual_seed(91)
    q, k = (torch.zeros(size, device=DEVICE, dtype=DT[dtype]) for size in ((b, h, s, d), (b, hk, sk, d)))
    v = torch.eye(sk, d, device=DEVICE, dtype=DT[dtype]).expand(b, hk, sk, d).contiguous()
    found = CALLS[backend](q, k, v, p, causal)
    y = found[0]
    values = raw(y.float()).view(np.float32)
    middle = offset()
    again = CALLS[backend](q, k, v, p, causal)[0]
    return {
        "mask": np.packbits(values != 0),
        "again": np.packbits(raw(again.float()).view(np.float32) != 0)[:4096],
        "values": np.unique(values)[:64],
        "offsets": [middle, offset()],
        "seeds": json.dumps(seeds_of(found[1:])),
    }


def dropout_words(backend, shape, p, dtype, causal):
    b, h, hk, s, sk, d = shape
    torch.manual_seed(13)
    leaves = [x.requires_grad_() for x in normals(f"w{shape}", dtype, (b, h, s, d), (b, hk, sk, d), (b, hk, sk, d))]
    (grad,) = normals(f"g{shape}", dtype, (b, h, s, d))
    found = CALLS[backend](*leaves, p, causal)
    kept = {"o": spread(found[0]), "lse": spread(found[1])}
    for name, t in zip(("dq", "dk", "dv"), torch.autograd.grad(found[0], leaves, grad), strict=True):
        kept[name] = spread(t)
    return kept


def one_query(shape, dtype):
    b, h, hk, sk, d = shape
    q, k, v = normals(f"one{shape}", dtype, (b, h, 1, d), (b, hk, sk, d), (b, hk, sk, d))
    run = lambda: A._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False)
    found = run()
    return {"o": spread(found[0], 4096), "lse": spread(found[1], 1024), "kernels": json.dumps(kernel_names(run))}


def one_query_order(shape, dtype):
    """Sums over keys left outside the least subtree of keys i and j: equal weights, V of one column 2^60 at i, -2^60 at j, 1 elsewhere."""
    b, h, hk, sk, d = shape
    first = [i for i in FIRST if i < sk]
    js = [j for j in dict.fromkeys((*range(0, min(sk, 72)), *range(72, sk, 8), sk - 2, sk - 1)) if j < sk]
    rows = []
    for i in first:
        row = []
        for start in range(0, len(js), d):
            part = torch.tensor(js[start : start + d], device=DEVICE)
            v = torch.ones((b, hk, sk, d), device=DEVICE)
            numbers = torch.arange(len(part), device=DEVICE)
            big = 2.0**60 if dtype == "bfloat16" else 2.0**15
            if dtype == "float16":
                v *= 2.0**-12
            v[:, :, i, :] = big
            v[:, :, part, numbers] = -big
            q, k = (torch.zeros(size, device=DEVICE, dtype=DT[dtype]) for size in ((b, h, 1, d), (b, hk, sk, d)))
            y = A._scaled_dot_product_cudnn_attention(q, k, v.to(DT[dtype]), None, True, 0.0, False, False)[0]
            row += (y.float()[0, 0, 0, : len(part)] * sk).tolist()
        rows.append(row)
    return {"first": first, "js": js, "counts": np.array(rows, np.float32)}


def record_attention(out):
    kept = {}
    for backend in CALLS:
        for shape in MASKS:
            for p in (0.1, 0.5):
                for dtype in DT if backend in ("efficient", "math") else ("bfloat16", "float16"):
                    for causal in (False, True):
                        if (causal or dtype != "bfloat16") and (p != 0.1 or shape != (2, 3, 3, 130, 128, 128)):
                            continue
                        name = f"mask|{backend}|{dtype}|{shape}|{p}|{causal}"
                        attempt(kept, name, lambda s=shape, p=p, t=dtype, c=causal, b=backend: dropped(b, s, p, t, c))
        for shape in WORDS:
            for dtype in ("bfloat16", "float16"):
                for causal in (False, True):
                    name = f"words|{backend}|{dtype}|{shape}|0.1|{causal}"
                    attempt(kept, name, lambda s=shape, t=dtype, c=causal, b=backend: dropout_words(b, s, 0.1, t, c))
    if DEVICE == "cuda":  # the numbers that PyTorch's own operator gives for CUTLASS's mask
        mask = torch.empty((2, 3, 130, 128), device=DEVICE)
        attempt(kept, "filled", lambda: {"words": spread(A._fill_mem_eff_dropout_mask_(mask, 0.1, 91, 0), 8192)})
    for shape in ONE_QUERY:
        for dtype in ("bfloat16", "float16"):
            attempt(kept, f"one|{dtype}|{shape}", lambda s=shape, t=dtype: one_query(s, t))
    for shape in ((1, 2, 2, 128, 64), (1, 2, 2, 300, 128), (16, 32, 8, 1024, 128), (1, 2, 2, 200, 256), (2, 4, 2, 257, 64)):
        if time.time() - START < LIMIT:
            attempt(kept, f"order|bfloat16|{shape}", lambda s=shape: one_query_order(s, "bfloat16"))
    np.savez_compressed(f"{out}/attention_dropout.npz", **kept)
    print(len(kept), "arrays of attention", [f"{k} {kept[k]}" for k in kept if k.endswith("error")][:6], round(time.time() - START, 1), "s")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    {"dropout": record_dropout, "attention": record_attention}[sys.argv[2]](sys.argv[1])
