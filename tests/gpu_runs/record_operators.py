"""Kernels and words of PyTorch on a GPU by which rules of its operators were found, and to which they were held. Inputs are made by seeds.

    python record_operators.py OUT products|attention|rows

products: kernels with grids of the layers of usual models and of the census' products, and probes and words of those whose order no row of
    `product_kernels.KERNELS` tells. The file launches.json.xz is the package's torch_product_launches.json.xz.
attention: which elements of grad * out cuDNN's backward adds first, and words of its backward with large heads and with grouped queries.
rows: words of batch norm and of mean squared error.
"""

import json
import lzma
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

START, LIMIT = time.time(), float(os.environ.get("LIMIT_S", "80"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
A = torch.ops.aten
CENSUS = (
    (1, 64, 64), (5, 64, 192), (16, 256, 256), (48, 256, 704), (96, 704, 256), (96, 256, 320), (32, 1024, 1024), (1, 1024, 4096),
    (17, 1024, 3072), (128, 4096, 1024), (128, 4096, 4096), (256, 896, 4864), (256, 4864, 896), (77, 768, 3072), (197, 192, 768),
    (512, 2048, 2048), (1024, 1024, 1024), (2048, 4096, 1024), (33, 100, 77), (7, 999, 513), (64, 8192, 64), (3, 16384, 8),
)  # fmt: skip
LAYERS = (
    (768, 768), (768, 2304), (768, 3072), (3072, 768), (768, 50257), (384, 384), (384, 1536), (1536, 384), (1024, 1024), (1024, 2048),
    (2048, 1024), (1024, 3072), (3072, 1024), (1024, 4096), (4096, 1024), (896, 896), (896, 128), (896, 4864), (4864, 896), (2048, 2048),
    (2048, 512), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 14336), (14336, 4096), (512, 512), (512, 2048), (2048, 5632),
    (5632, 2048), (1536, 1536), (1536, 256), (1536, 8960), (8960, 1536), (192, 192), (192, 768), (256, 256), (256, 1024), (1024, 256),
)  # fmt: skip
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 197, 256, 512, 1024, 2048, 5, 10, 20, 50, 77, 100, 384)
TRAINED = (64, 128, 256, 512, 1024)
ONE_HEAD = (
    (1, 257, 128), (2048, 2048, 128), (1, 100, 64), (128, 128, 64), (512, 512, 64), (1024, 1024, 64), (1024, 1024, 128), (1, 1024, 64),
    (1, 2048, 128), (300, 300, 64),
)  # fmt: skip
FIRST = (0, 1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 256, 257, 400, 511, 512, 1000)
CUDNN = (
    (1, 2, 1, 64, 64, 64), (1, 4, 1, 64, 64, 64), (2, 8, 2, 100, 100, 64), (1, 6, 2, 48, 128, 32), (1, 2, 2, 64, 64, 80),
    (1, 2, 2, 64, 64, 96), (1, 2, 2, 96, 64, 128), (1, 2, 2, 100, 120, 128), (1, 2, 2, 64, 60, 256), (1, 2, 2, 64, 128, 160),
    (1, 2, 2, 70, 64, 192), (1, 4, 2, 64, 64, 128), (1, 2, 1, 100, 128, 128), (1, 8, 1, 64, 64, 64),
)  # fmt: skip
BATCHES = (
    (4, 6, 5), (7, 12, 9, 9), (64, 96), (2, 3, 1), (5, 24, 30, 30), (16, 5, 2000), (1500, 33), (3, 64, 40, 41), (32, 16, 8, 8),
    (128, 256, 4, 4), (2, 1024, 3),
)  # fmt: skip


def rng(key):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))


def normals(r, dtype, *shapes):
    return [torch.from_numpy(r.standard_normal(shape, np.float32)).to(DT[dtype]).to(DEVICE) for shape in shapes]


def words(y, most=None):
    y = y.detach().contiguous().reshape(-1)[:most]
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()]).cpu().numpy()


# ---- products: (dtype, m, k, n, batch, layout, addend)


def products():
    for m, k, n in CENSUS:
        for dt in DT:
            yield from ((dt, m, k, n, 1, "rr", None), (dt, m, k, n, 1, "rc", None), (dt, m, k, n, 1, "rc", "columns"))
            yield from ((dt, m, k, n, 3, "rr", None), (dt, n, m, k, 1, "cr", None), (dt, m, n, k, 1, "rr", None))
    for m in TOKENS:
        for k, n in LAYERS:
            for dt in DT if m * k * n <= 1 << 36 else ():
                yield from ((dt, m, k, n, 1, "rc", None), (dt, m, k, n, 1, "rc", "columns"))
                if m in TRAINED:
                    yield from ((dt, n, m, k, 1, "cr", None), (dt, m, n, k, 1, "rr", None))
                if k in (768, 3072) and n <= 3072:
                    yield dt, m, k, n, 1, "rr", "columns"
    for q, k, d in ONE_HEAD:  # of the math backend of attention
        yield from (("float32", q, d, k, 1, "rc", None), ("float32", q, k, d, 1, "rr", None))
        yield from (("float32", k, q, d, 1, "cr", None), ("float32", d, q, k, 1, "cr", None))


def call(p, a=None, b=None):
    """The operands of a product, in memory as its layout says, and the function."""
    dt, m, k, n, batch, layout, addend = p

    def make(rows, columns, order, value):
        if value is None:
            value = torch.zeros((*((batch,) if batch > 1 else ()), rows, columns), device=DEVICE)
        value = value.to(DT[dt])
        return value.contiguous() if order == "r" else value.transpose(-1, -2).contiguous().transpose(-1, -2)

    x, y = make(m, k, layout[0], a), make(k, n, layout[1], b)
    c = torch.zeros(n, device=DEVICE, dtype=DT[dt])
    if batch > 1:
        return (x, y), torch.bmm
    if layout == "rc":
        return (x, y.t(), c) if addend else (x, y.t()), F.linear
    return ((c, x, y), torch.addmm) if addend else ((x, y), torch.mm)


def profiled(group):
    """The kernels of each product: those between its two markers."""
    calls = [call(p) for p in group]
    for operands, f in calls:
        f(*operands)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for operands, f in calls:
            torch.cuda._sleep(50)
            f(*operands)
            torch.cuda._sleep(50)
        torch.cuda.synchronize()
    path = f"/tmp/trace_{os.getpid()}.json"
    prof.export_chrome_trace(path)
    events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    found = []
    for event in sorted(events, key=lambda e: e["ts"]):
        if "spin_kernel" in event["name"]:
            found.append([])
        elif event["cat"] == "kernel":
            found[-1].append([event["name"][:400], event["args"]["grid"], event["args"]["block"]])
        else:
            found[-1].append([event["cat"]])
    return found[: 2 * len(group) : 2]


def probe(p):
    """Terms left outside the least subtree of terms i and j: a large one at i, its negative at j, ones elsewhere."""
    dt, m, k, n, batch, *_ = p
    unit, big = (2.0**-12, 2.0**15) if dt == "float16" else (1.0, 2.0**60)
    first = [i for i in dict.fromkeys((*FIRST, k // 2, k - 2)) if i < k]
    spread = [*range(0, 72), *range(72, 300, 8), *range(256, 1100, 32), *range(1024, k, max(1, k // 24)), *(k * i // 16 for i in range(16))]
    places = [j for j in dict.fromkeys((*spread, k - 2, k - 1, *rng(f"j{k}").integers(0, k, 40).tolist())) if j < k][:224]
    out, wide = np.full((len(first), len(places)), np.nan, np.float32), n >= m  # the probes lie along N, or along M
    for row, i in enumerate(first if max(m, n) >= 64 else first[:8]):
        for start in range(0, len(places), max(m, n)):
            js = torch.tensor(places[start : start + max(m, n)], device=DEVICE)
            a, b = torch.full((m, k), unit, device=DEVICE), torch.full((k, n), unit, device=DEVICE)
            numbers = torch.arange(len(js), device=DEVICE)
            if wide:
                a[:, i], b[js, numbers] = big, -big
            else:
                b[i, :], a[numbers, js] = big, -big
            operands, f = call(p, *((torch.stack([x] * batch) for x in (a, b)) if batch > 1 else (a, b)))
            y = f(*operands).reshape(-1, m, n)[0]
            out[row, start : start + len(js)] = (y[0] if wide else y[:, 0]).float().cpu().numpy()[: len(js)] / unit**2
    return first, places, out


def record_products(out):
    from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct, order_of_kernels

    torch.backends.cuda.matmul.allow_tf32 = False
    todo, names, found, unknown, kept = list(dict.fromkeys(products())), {}, [], [], {}
    for start in range(0, len(todo), 24):
        group = todo[start : start + 24]
        for p, kernels in zip(group, profiled(group), strict=True):
            found.append([*p, [[names.setdefault(kernel[0], len(names)), *kernel[1:]] for kernel in kernels]])
            try:
                order_of_kernels([Launch(kernel[0], *map(tuple, kernel[1:])) for kernel in kernels], TorchProduct(*p))
            except ValueError as error:
                unknown += [] if "order is open" in str(error) else [p]
    file = {
        "kind": "tcemu torch product launches",
        "version": 1,
        "gpu": torch.cuda.get_device_name(),
        "library": f"torch {torch.__version__}",
    }
    file |= {"date": time.strftime("%Y-%m-%d"), "kernels": list(names), "products": found}
    content = json.dumps(file, separators=(",", ":")).encode()
    Path(out, "launches.json.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    for number, p in enumerate(sorted(unknown, key=lambda p: p[1] * p[2] * p[3])):
        if time.time() - START > LIMIT:
            break
        _, m, k, n, batch, *_ = p
        first, places, counts = probe(p)
        a = torch.from_numpy(rng(f"a{m}x{k}x{n}").standard_normal((m, k), np.float32)).to(DEVICE)
        b = torch.from_numpy(rng(f"b{m}x{k}x{n}").standard_normal((k, n), np.float32) * np.float32(k**-0.5)).to(DEVICE)
        operands, f = call(p, *((torch.stack([x] * batch) for x in (a, b)) if batch > 1 else (a, b)))
        y = words(f(*operands))
        index = np.unique(np.linspace(0, y.size - 1, min(y.size, 256)).astype(np.int64))
        values = {"first": first, "places": places, "counts": counts, "index": index, "words": y[index], "product": str(p)}
        kept |= {f"{number}_{name}": np.array(value) for name, value in values.items()}
    np.savez_compressed(f"{out}/probes.npz", **kept)


# ---- attention


def cudnn_backward(grad, q, k, v, out, lse, causal=False, scale=None):
    zero = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return A._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, zero, zero, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )


def probe_row_sums(size, queries=128, keys=64):
    """Terms of grad * out left outside the least subtree of i and j: P is 1, V is 0, and K picks dS of the first key."""
    pairs = [(i, j) for i in range(size) for j in range(i + 1, size)]
    if len(pairs) > 1 << 14:
        pairs = [pairs[int(n)] for n in np.sort(rng(f"pairs{size}").choice(len(pairs), 1 << 14, replace=False))]
    heads = -(-len(pairs) // queries)
    out = torch.ones((heads * queries, size), device=DEVICE)
    rows, (i, j) = torch.arange(len(pairs), device=DEVICE), torch.tensor(pairs, device=DEVICE).t()
    out[rows, i], out[rows, j] = 2.0**60, -(2.0**60)
    out = out.reshape(1, heads, queries, size).bfloat16()
    key = torch.zeros((1, heads, keys, size), device=DEVICE, dtype=torch.bfloat16)
    value = torch.zeros_like(key)
    key[:, :, 0, 0] = 1.0
    lse = torch.zeros((1, heads, queries, 1), device=DEVICE)
    dq, _, _ = cudnn_backward(torch.ones_like(out), torch.zeros_like(out), key, value, out, lse, scale=1.0)
    return np.array(pairs, np.int16), -dq[..., 0].float().reshape(-1)[: len(pairs)].cpu().numpy()


def record_attention(out):
    kept = {}
    for size in (64, 72, 80, 96, 104, 128, 160, 192, 256):
        kept[f"pairs_{size}"], kept[f"counts_{size}"] = probe_row_sums(size)
    for b, h, hk, s, sk, d in CUDNN:
        for causal in (False, True):
            for dtype in ("bfloat16", "float16"):
                name = f"{b},{h},{hk},{s},{sk},{d},{causal},{dtype}"
                q, k, v, grad = normals(rng(name), dtype, (b, h, s, d), (b, hk, sk, d), (b, hk, sk, d), (b, h, s, d))
                o, lse, *_ = A._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
                found = (*cudnn_backward(grad, q, k, v, o, lse, causal), o, lse)
                kept |= {f"{name}|{n}": words(t, 8192) for n, t in zip(("dq", "dk", "dv", "o", "lse"), found, strict=True)}
    np.savez_compressed(f"{out}/attention.npz", **kept)


# ---- rows


def record_rows(out):
    kept = {}
    for dtype in DT:
        for shape in BATCHES:
            name, channels = "x".join(map(str, shape)), shape[1]
            x, w, b, g, mean, var = normals(rng("bn" + name), dtype, shape, channels, channels, shape, channels, channels)
            x, var = x * 2, var.abs()
            y, m, s = A.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)
            found = (y, m, s, mean, var, *A.native_batch_norm_backward(g, x, w, mean, var, m, s, True, 1e-5, [True] * 3))
            kept |= {f"batch|{dtype}|{name}#{i}": words(t, 6000) for i, t in enumerate(found)}
        for size in (10, 1000, 50257):
            x, y = normals(rng(f"mse{size}"), dtype, size, size)
            one = torch.ones((), dtype=DT[dtype], device=DEVICE)
            found = (F.mse_loss(x, y), F.mse_loss(x, y, reduction="sum"))
            found += (A.mse_loss_backward(one, x, y, 1), A.mse_loss_backward(one * 0.7, x, y, 2))
            kept |= {f"mse|{dtype}|{size}#{i}": words(t, 6000) for i, t in enumerate(found)}
    np.savez_compressed(f"{out}/rows.npz", **kept)


if __name__ == "__main__":
    {"products": record_products, "attention": record_attention, "rows": record_rows}[sys.argv[2]](sys.argv[1])
