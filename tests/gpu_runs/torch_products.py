"""Products of PyTorch on a GPU, shape by shape: kernels' names and grids, digests, spread words, and a probe of the order of sums.

    SEED=1 python tests/gpu_runs/torch_products.py OUT [cpu]

writes OUT/products.json (kernels, digests) and OUT/products.npz (words). Shapes and inputs are drawn by seeds. The rows of
`tcemu.operations.functional.torch_cuda.product_kernels` were found on seed 0 and tried on seed 1.
"""

import collections
import hashlib
import json
import os
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

DT = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
KINDS = ("mm", "linear", "linear_bias", "dw", "bmm", "bmm_t", "addmm", "addmm2", "baddbmm")
LIMIT = float(os.environ.get("LIMIT_S", "84"))
START = time.time()
SEED = int(os.environ.get("SEED", "0"))


def rng(key):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))


def shapes():
    """(M, K, N), 126 of them, drawn by a seed, interleaved so that a run cut short has some of each class."""
    r = np.random.Generator(np.random.PCG64(20261127 + SEED))
    pick = lambda xs: int(xs[r.integers(len(xs))])
    model = [
        64,
        96,
        128,
        192,
        320,
        384,
        512,
        640,
        896,
        1024,
        1152,
        1280,
        1536,
        2048,
        2560,
        2816,
        3072,
        3584,
        4096,
        5120,
        5632,
        8192,
        11008,
        14336,
        16384,
    ]
    out = []

    def decode():
        while True:
            m, k, n = (1 if r.random() < 0.3 else int(r.integers(2, 33))), pick(model), pick(model)
            if k * n <= 1 << 24:
                return m, k, n

    def middle():
        while True:
            m, k, n = int(r.integers(33, 257)), pick(model), pick(model)
            if k * n <= 12 << 20:
                return m, k, n

    def prefill():
        while True:
            m, k, n = pick([257, 300, 384, 512, 577, 768, 1000, 1024, 1500, 2048]), pick(model), pick(model)
            if k * n <= 8 << 20 and m * k <= 6 << 20 and m * n <= 4 << 20:
                return m, k, n

    def odd():
        m = int(np.exp(r.uniform(0, np.log(300))))
        k = int(np.exp(r.uniform(np.log(16), np.log(5000))))
        n = int(np.exp(r.uniform(np.log(8), np.log(3000))))
        return m, k, n

    def even():
        m = int(np.exp(r.uniform(0, np.log(512))))
        k = 8 * int(np.exp(r.uniform(np.log(2), np.log(1024))))
        n = 8 * int(np.exp(r.uniform(np.log(2), np.log(512))))
        return m, k, n

    for i in range(126 if SEED == 0 else 220):
        out.append((decode, odd, middle, even, prefill)[i % 5]())
    return list(dict.fromkeys(out))


def inputs(m, k, n):
    """Logical A [M, K], B [K, N], bias [N], addend [M, N], in f32; a case rounds them to its type."""
    key = f"{m}x{k}x{n}"
    return (
        rng("a" + key).standard_normal((m, k), np.float32),
        rng("b" + key).standard_normal((k, n), np.float32) * np.float32(k**-0.5),
        rng("c" + key).standard_normal(n, np.float32),
        rng("d" + key).standard_normal((m, n), np.float32) if m * n < 1 << 21 else None,
    )


def batches(m, k, n):
    """The number of products of a batch; 3 in the first run."""
    if SEED == 0:
        return 3
    most = max(1, (8 << 20) // (m * k + k * n + m * n))
    return min(most, (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)[zlib.crc32(f"batch{m}x{k}x{n}".encode()) % 10])


def layout(kind, a, b, c, d):
    """Operands as the kind has them in memory, and the call."""
    if kind == "mm":
        return (a, b), torch.mm
    if kind == "linear":
        return (a, b.t().contiguous()), F.linear
    if kind == "linear_bias":
        return (a, b.t().contiguous(), c), F.linear
    if kind == "dw":
        return (a.t().contiguous(), b), lambda g, x: g.t() @ x
    count = batches(a.shape[0], a.shape[1], b.shape[1])
    three = lambda x: torch.stack([(x, -x, x.flip(0))[i % 3] for i in range(count)])
    if kind == "bmm":
        return (three(a), torch.stack([b] * count)), torch.bmm
    if kind == "bmm_t":
        return (three(a), torch.stack([b.t().contiguous()] * count)), lambda x, y: torch.bmm(x, y.transpose(1, 2))
    if kind == "addmm":
        return (c, a, b), torch.addmm
    if kind == "addmm2":
        return (d, a, b), torch.addmm
    if kind == "baddbmm":
        return (torch.stack([d] * count), three(a), torch.stack([b] * count)), torch.baddbmm
    raise KeyError(kind)


def words(y):
    y = y.detach().contiguous().reshape(-1)
    return y.view({2: torch.int16, 4: torch.int32}[y.element_size()])


def spread(n, count=192 if SEED else 512):
    return np.unique(np.linspace(0, n - 1, min(n, count)).astype(np.int64))


def js(k):
    """Places of the cancelling term in a probe."""
    s = (
        list(range(1, 41))
        + list(range(40, 136, 8))
        + list(range(128, 520, 32))
        + [k * i // 32 for i in range(1, 33)]
        + [k // 2 + 1, k // 4 + 1, k - 2, k - 1]
    )
    s += rng(f"j{k}").integers(1, k, 60).tolist()
    return [j for j in dict.fromkeys(s) if 0 < j < k][:160]


def probe(kind, m, k, n, dt, device):
    """How many terms are left outside the smallest subtree of terms i and j: rows i = 0, 1, 2, 3; columns j by `js`."""
    unit, big = (2.0**-12, 2.0**15) if dt == "f16" else (1.0, 2.0**60)
    a = torch.full((m, k), unit, device=device)
    rows = min(m, 4, k)
    for i in range(rows):
        a[i, i] = big
    places = js(k)
    out = np.zeros((rows, len(places)), np.float32)
    for start in list(range(0, len(places), n))[:10]:
        js_ = places[start : start + n]
        b = torch.full((k, n), unit, device=device)
        b[torch.tensor(js_, device=device), torch.arange(len(js_), device=device)] = -big
        ops, f = layout(
            kind, a.to(DT[dt]), b.to(DT[dt]), torch.zeros(n, device=device, dtype=DT[dt]), torch.zeros((m, n), device=device, dtype=DT[dt])
        )
        y = f(*ops)
        y = y[0] if y.dim() == 3 else y
        out[:, start : start + n] = y[:rows, : len(js_)].float().cpu().numpy() / unit**2
    return out


def marker(device):
    if device == "cuda":
        torch.cuda._sleep(50)


def kernels(trace):
    """Kernels of a trace, between markers."""
    events = [e for e in trace["traceEvents"] if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    out, _at = [], None
    for e in sorted(events, key=lambda e: e["ts"]):
        if "spin_kernel" in e["name"]:
            out.append([])
            continue
        if out:
            g = e["args"]
            out[-1].append(
                [e["name"][:400], g.get("grid"), g.get("block"), g.get("shared memory"), g.get("registers per thread")]
                if e["cat"] == "kernel"
                else [e["cat"], g.get("bytes")]
            )
    return out


def main(out, device):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    res = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cublas": str(torch.version.cuda),
        "cases": {},
    }
    keep = {}
    todo = shapes() if device == "cuda" else [(5, 64, 48), (3, 33, 20), (1, 64, 8)]
    pool = ThreadPoolExecutor(4)
    ahead = collections.deque()
    it = iter(todo)

    def feed():
        s = next(it, None)
        if s:
            ahead.append((s, pool.submit(inputs, *s)))

    for _ in range(6):
        feed()
    acts = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])

    def run_group(pending):
        """pending: (name, operands, call); one profile, one marker a case."""
        for name, ops, f in pending:  # warm: lazy loading and heuristics outside the profile
            try:
                f(*ops)
            except Exception as e:
                res["cases"][name] = {"error": f"{type(e).__name__}: {str(e)[:160]}"}
        live = [p for p in pending if "error" not in res["cases"].get(p[0], {})]
        ys = []
        with profile(activities=acts) as prof:
            for _, ops, f in live:
                marker(device)
                ys.append(f(*ops))
            marker(device)
            if device == "cuda":
                torch.cuda.synchronize()
        path = f"/tmp/products_trace_{os.getpid()}.json"
        prof.export_chrome_trace(path)
        names = kernels(json.loads(Path(path).read_text()))
        for i, ((name, _, _), y) in enumerate(zip(live, ys, strict=False)):
            w = words(y)
            idx = spread(w.numel())
            row = {"shape": list(y.shape), "kernels": names[i] if i < len(names) else None}
            keep[name] = w[torch.from_numpy(idx).to(w.device)].cpu().numpy()
            if w.numel() <= 1 << 20:
                row["digest"] = hashlib.sha256(w.cpu().numpy().tobytes()).hexdigest()[:32]
            res["cases"][name] = row

    done = 0
    while ahead and time.time() - START < LIMIT:
        (m, k, n), future = ahead.popleft()
        feed()
        a, b, c, d = (None if x is None else torch.from_numpy(x).to(device) for x in future.result())
        pending = []
        for dt in DT:
            ops = [None if x is None else x.to(DT[dt]) for x in (a, b, c, d)]
            for kind in KINDS:
                if d is None and kind in ("addmm2", "baddbmm"):
                    continue
                pending.append((f"{kind}|{dt}|{m}x{k}x{n}", *layout(kind, *ops)))
        run_group(pending)
        for dt in DT:
            for kind in KINDS[:6]:
                try:
                    keep[f"probe|{kind}|{dt}|{m}x{k}x{n}"] = probe(kind, m, k, n, dt, device)
                except Exception as e:
                    res["cases"][f"probe|{kind}|{dt}|{m}x{k}x{n}"] = {"error": f"{type(e).__name__}: {str(e)[:160]}"}
        done += 1
    res["done"] = done
    print(done, "shapes of", len(todo), time.time() - START, "s", flush=True)
    pending = []
    for dt in DT:
        for g, m, k, n in ((4, 64, 128, 128), (8, 40, 256, 512), (4, 96, 1024, 768), (8, 256, 2048, 256), (3, 17, 64, 96))[
            : 5 if device == "cuda" else 1
        ]:
            x = torch.from_numpy(rng(f"gx{g}{m}{k}{n}").standard_normal((m, k), np.float32)).to(device).to(DT[dt])
            w = torch.from_numpy(rng(f"gw{g}{m}{k}{n}").standard_normal((g, n, k), np.float32) * np.float32(k**-0.5)).to(device).to(DT[dt])
            cuts = np.sort(rng(f"go{g}{m}").integers(0, m + 1, g))
            cuts[-1] = m
            offs = torch.from_numpy(cuts.astype(np.int32)).to(device)
            pending.append((f"grouped|{dt}|{g},{m},{k},{n}", (x, w, offs), lambda x, w, o: torch._grouped_mm(x, w.transpose(1, 2), offs=o)))
            pending.append(
                (
                    f"grouped_nn|{dt}|{g},{m},{k},{n}",
                    (x, w.transpose(1, 2).contiguous(), offs),
                    lambda x, w, o: torch._grouped_mm(x, w, offs=o),
                )
            )
        for b, c, h, p, o in (
            (1, 3, 32, 8, 64),
            (2, 3, 224, 16, 192),
            (1, 3, 224, 16, 768),
            (1, 3, 224, 14, 1024),
            (3, 3, 224, 32, 768),
            (1, 1, 64, 4, 96),
            (2, 4, 64, 2, 320),
        )[: 7 if device == "cuda" else 1]:
            x = torch.from_numpy(rng(f"cx{b}{c}{h}{p}").standard_normal((b, c, h, h), np.float32)).to(device).to(DT[dt])
            w = (
                torch.from_numpy(rng(f"cw{c}{p}{o}").standard_normal((o, c, p, p), np.float32) * np.float32((c * p * p) ** -0.5))
                .to(device)
                .to(DT[dt])
            )
            bias = torch.from_numpy(rng(f"cb{o}").standard_normal(o, np.float32)).to(device).to(DT[dt])
            pending.append((f"patch|{dt}|{b},{c},{h},{p},{o}", (x, w), lambda x, w, p=p: F.conv2d(x, w, stride=p)))
            pending.append((f"patch_bias|{dt}|{b},{c},{h},{p},{o}", (x, w, bias), lambda x, w, b, p=p: F.conv2d(x, w, b, stride=p)))
    run_group(pending)
    table = {}
    for row in res["cases"].values():
        for kernel in row.get("kernels") or []:
            kernel[0] = table.setdefault(kernel[0], len(table))
    res["names"] = list(table)
    Path(out, "products.json").write_text(json.dumps(res, separators=(",", ":")))
    np.savez_compressed(out + "/products.npz", **keep)
    print(
        len(res["cases"]),
        "cases",
        sum("error" in v for v in res["cases"].values()),
        "errors",
        len(table),
        "names",
        time.time() - START,
        "s",
    )
    print(collections.Counter(v["error"][:90] for v in res["cases"].values() if "error" in v).most_common(8))
    print([n[:70] for n in table][:60])


if __name__ == "__main__":
    main(sys.argv[1], "cpu" if len(sys.argv) > 2 else "cuda")
