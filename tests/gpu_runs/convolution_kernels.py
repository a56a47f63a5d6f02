# ruff: noqa: B023, E501
"""Kernels, grids and words of convolutions and their gradients by PyTorch on a GPU.

    python convolution_kernels.py OUT words|orders|names

words: kernels with grids, and words of results and gradients, of the cases of `cases()` in each mode. orders: for each kernel that words saw,
the terms outside the least subtree of two terms. names: kernels of many shapes on zeros. Each part stops after LIMIT_S seconds.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import torch

START, LIMIT = time.time(), float(os.environ.get("LIMIT_S", "40"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DT = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "tf32": torch.float32}
A = torch.ops.aten
MODES = [(d, last) for d in ("tf32", "bfloat16", "float16", "float32") for last in (False, True)]
MOST = int(os.environ.get("MOST", "768"))
PARTS = ("y", "dx", "dw")


def draw(key, shape):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32)


def spread(y, most=MOST):
    """Words at evenly spread places in the order of the axes."""
    flat = y.detach().contiguous().reshape(-1)
    places = torch.from_numpy(np.unique(np.linspace(0, flat.numel() - 1, min(flat.numel(), most)).astype(np.int64))).to(flat.device)
    return flat[places].view(torch.int16 if flat.element_size() == 2 else torch.int32).cpu().numpy()


def case(x, w, stride=1, padding=0, dilation=1, groups=1, transposed=False, output_padding=0):
    n = len(x) - 2
    wide = lambda v: tuple(v) if isinstance(v, (tuple, list)) else (v,) * n
    return (tuple(x), tuple(w), wide(stride), wide(padding), wide(dilation), groups, transposed, wide(output_padding))


def cases():
    """Convolutions of vision and audio models, and small ones."""
    for batch, width, size, image in ((1, 768, 16, 224), (2, 768, 16, 224), (8, 768, 16, 224), (1, 1024, 14, 224), (2, 1152, 14, 224),
                                      (4, 192, 16, 224), (1, 768, 32, 224), (2, 768, 16, 64), (2, 64, 4, 32), (2, 32, 2, 30), (1, 96, 4, 224), (4, 128, 8, 64)):  # fmt: skip
        yield case((batch, 3, image, image), (width, 3, size, size), size)
    for b in (1, 8):  # ResNet
        yield case((b, 3, 224, 224), (64, 3, 7, 7), 2, 3)
        for c, n in ((64, 56), (128, 28), (256, 14), (512, 7)):
            yield case((b, c, n, n), (c, c, 3, 3), 1, 1)
        yield case((b, 64, 56, 56), (128, 64, 3, 3), 2, 1)
        yield case((b, 256, 14, 14), (512, 256, 3, 3), 2, 1)
        yield case((b, 64, 56, 56), (256, 64, 1, 1))
        yield case((b, 256, 56, 56), (64, 256, 1, 1))
        yield case((b, 256, 56, 56), (512, 256, 1, 1), 2)
        yield case((b, 1024, 14, 14), (256, 1024, 1, 1))
        yield case((b, 64, 56, 56), (128, 64, 1, 1), 2)
    yield case((2, 3, 32, 32), (64, 3, 3, 3), 1, 1)
    yield case((2, 64, 16, 16), (64, 64, 3, 3), 1, 1)
    yield case((2, 16, 16, 16), (32, 16, 3, 3), 2, 1)
    yield case((2, 32, 9, 11), (48, 32, 3, 3), 1, 1)
    yield case((2, 40, 9, 11), (24, 40, 3, 3), 1, 1)
    yield case((2, 12, 10, 10), (20, 12, 3, 3), 1, 0)
    yield case((2, 24, 20, 20), (24, 24, 5, 5), 1, 2)
    yield case((1, 1, 28, 28), (32, 1, 3, 3), 1, 0)
    yield case((4, 32, 26, 26), (64, 32, 3, 3), 1, 0)
    yield case((1, 32, 40, 40), (48, 32, 3, 3), 1, 2, 2)
    yield case((2, 96, 28, 28), (192, 96, 2, 2), 2)
    yield case((1, 384, 14, 14), (768, 384, 2, 2), 2)
    for b, c, n, k, s in ((1, 96, 56, 7, 1), (2, 384, 14, 7, 1), (2, 32, 28, 3, 1), (2, 144, 28, 3, 2), (1, 576, 14, 3, 1), (9, 16, 14, 5, 1), (2, 64, 9, 5, 2)):  # fmt: skip
        yield case((b, c, n, n), (c, 1, k, k), s, k // 2, 1, c)
    yield case((2, 8, 12, 12), (24, 1, 3, 3), 1, 1, 1, 8)
    yield case((1, 32, 40, 40), (64, 16, 3, 3), 1, 1, 1, 2)
    yield case((1, 128, 28, 28), (128, 4, 3, 3), 1, 1, 1, 32)
    yield case((1, 128, 28, 28), (256, 16, 3, 3), 2, 1, 1, 8)
    yield case((1, 80, 300), (384, 80, 3), 1, 1)
    yield case((1, 80, 3000), (384, 80, 3), 1, 1)
    yield case((1, 384, 3000), (384, 384, 3), 2, 1)
    yield case((1, 128, 3000), (1280, 128, 3), 1, 1)
    yield case((1, 1280, 3000), (1280, 1280, 3), 2, 1)
    yield case((1, 1, 16000), (512, 1, 10), 5)
    yield case((1, 512, 3199), (512, 512, 3), 2)
    yield case((1, 512, 199), (512, 512, 2), 2)
    yield case((1, 768, 49), (768, 48, 128), 1, 64, 1, 16)
    yield case((2, 64, 40), (64, 1, 4), 1, 3, 1, 64)
    yield case((2, 8, 50), (16, 8, 5), 1, 2)
    for c, o, n in ((4, 320, 64), (320, 320, 64), (640, 640, 32), (960, 320, 64), (320, 4, 64), (4, 4, 64)):  # SD's UNet and VAE
        yield case((1, c, n, n), (o, c, 1 if c == 4 == o else 3, 1 if c == 4 == o else 3), 1, 0 if c == 4 == o else 1)
    yield case((1, 320, 64, 64), (320, 320, 3, 3), 2, 1)
    yield case((1, 128, 128, 128), (128, 128, 3, 3), 1, 1)
    yield case((1, 64, 64, 64), (64, 64, 3, 3), 1, 1)
    yield case((1, 512, 16, 16), (512, 512, 3, 3), 1, 1)
    yield case((1, 128, 64, 64), (3, 128, 3, 3), 1, 1)
    yield case((1, 320, 64, 64), (320, 320, 1, 1))
    yield case((2, 64, 16, 16), (64, 32, 2, 2), 2, 0, 1, 1, True)
    yield case((1, 256, 14, 14), (256, 256, 2, 2), 2, 0, 1, 1, True)
    yield case((2, 128, 8, 8), (128, 64, 4, 4), 2, 1, 1, 1, True)
    yield case((4, 100, 1, 1), (100, 512, 4, 4), 1, 0, 1, 1, True)
    yield case((2, 32, 10, 10), (32, 16, 3, 3), 2, 1, 1, 1, True, 1)
    yield case((1, 64, 50), (64, 32, 16), 8, 4, 1, 1, True)
    yield case((2, 3, 4, 28, 28), (64, 3, 2, 14, 14), (2, 14, 14))
    yield case((1, 16, 8, 20, 20), (32, 16, 3, 3, 3), 1, 1)
    yield case((1, 3, 8, 32, 32), (96, 3, 2, 4, 4), (2, 4, 4))
    yield case((1, 32, 6, 10, 10), (32, 32, 3, 1, 1), 1, (1, 0, 0))


def set_mode(dtype):
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"


def lay(t, last):
    if not last or t.ndim == 3:
        return t
    return t.contiguous(memory_format=torch.channels_last if t.ndim == 4 else torch.channels_last_3d)


def forward(c, x, w, b=None):
    return A.convolution(x, w, b, list(c[2]), list(c[3]), list(c[4]), c[6], list(c[7]), c[5])


def gradient(c, x, w, g, which):
    mask = [which == "dx", which == "dw", which == "db"]
    outputs = w.shape[1] * c[5] if c[6] else w.shape[0]
    found = A.convolution_backward(g, x, w, [outputs], list(c[2]), list(c[3]), list(c[4]), c[6], list(c[7]), c[5], mask)
    return found[("dx", "dw", "db").index(which)]


def call(c, x, w, g, which):
    return forward(c, x, w) if which == "y" else gradient(c, x, w, g, which)


def output_shape(c):
    x, w, s, p, d, groups, transposed, o = c
    if transposed:
        sizes = [(n - 1) * s_ - 2 * p_ + d_ * (k - 1) + o_ + 1 for n, k, s_, p_, d_, o_ in zip(x[2:], w[2:], s, p, d, o, strict=True)]
        return (x[0], w[1] * groups, *sizes)
    return (x[0], w[0], *[(n + 2 * p_ - d_ * (k - 1) - 1) // s_ + 1 for n, k, s_, p_, d_ in zip(x[2:], w[2:], s, p, d, strict=True)])


class Watch:
    """Kernels between pairs of markers of one profile, in order of time."""

    def __init__(self):
        self.marks = []
        self.profile = None
        if DEVICE == "cuda":
            from torch.profiler import ProfilerActivity, profile

            self.profile = profile(activities=[ProfilerActivity.CUDA])
            self.profile.__enter__()

    def record(self, name, run):
        if DEVICE == "cuda":
            torch.cuda._sleep(10)
        try:
            found = run()
        finally:
            if DEVICE == "cuda":
                torch.cuda._sleep(10)
            self.marks.append(name)
        return found

    def close(self):
        if self.profile is None:
            return {mark: [] for mark in self.marks}
        torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        path = f"/tmp/trace_{os.getpid()}.json"
        self.profile.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
        os.remove(path)
        kinds = ("kernel", "gpu_memset", "gpu_memcpy")
        events = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
        parts = [[]]
        for e in events:
            if "spin_kernel" in e["name"]:
                parts.append([])
            else:
                a = e.get("args", {})
                parts[-1].append([e["name"], a.get("grid"), a.get("block"), a.get("shared memory")])
        inner = parts[1::2]
        if len(parts) != 2 * len(self.marks) + 1:
            print("markers:", len(parts), "parts for", len(self.marks), "calls")
            return {}
        return dict(zip(self.marks, inner, strict=True))


def record_words(out):
    kept, kernels, errors = {}, {}, {}
    watch = Watch()
    count = 0
    first, shard, shards = map(int, os.environ.get("CASES", "0,0,1").split(","))
    listed = list(cases())
    if seed := int(os.environ.get("SEED", "0")):  # shapes of which a CPU can compute the words
        listed = [c for c in dict.fromkeys(model_like(seed, 4000)) if np.prod(output_shape(c)) * np.prod(c[1][1:]) < 1 << 26]
    for c in listed[first:][shard::shards]:
        drawn = [
            draw(f"{part}{c}", shape) for part, shape in (("x", c[0]), ("w", c[1]), ("g", output_shape(c)), ("b", (output_shape(c)[1],)))
        ]
        drawn[1] *= np.float32(float(np.prod(c[1][1:])) ** -0.5)
        on = [torch.from_numpy(d).to(DEVICE) for d in drawn]
        for dtype, last in MODES:
            if (last and len(c[0]) == 3) or (dtype == "float32" and (last or seed) and count % 4):
                continue
            if time.time() - START > LIMIT:
                continue
            set_mode(dtype)
            x, w, g = (lay(t.to(DT[dtype]), last) for t in on[:3])
            b = on[3].to(DT[dtype])
            name = f"{dtype}|{'last' if last else 'first'}|{c}"
            for which in PARTS:
                try:
                    y = watch.record(f"{name}|{which}", lambda: call(c, x, w, g, which))
                    kept[f"{name}|{which}"] = spread(y)
                    again = call(c, x, w, g, which)
                    kept[f"{name}|{which}|facts"] = np.array([torch.equal(y, again), *y.stride()])
                except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
                    errors[f"{name}|{which}"] = f"{type(error).__name__}: {str(error)[:300]}"
            try:
                kept[f"{name}|yb"] = spread(watch.record(f"{name}|yb", lambda: forward(c, x, w, b)), 96)
                kept[f"{name}|db"] = spread(watch.record(f"{name}|db", lambda: gradient(c, x, w, g, "db")), 96)
            except (RuntimeError, NotImplementedError) as error:
                errors[f"{name}|bias"] = f"{type(error).__name__}: {str(error)[:300]}"
        count += 1
        if count % 12 == 0:
            kernels |= watch.close()
            watch = Watch()
            save_words(out, kept, kernels, errors)
    kernels |= watch.close()
    save_words(out, kept, kernels, errors)
    print(len(kept), "arrays,", len(kernels), "calls,", len(errors), "errors", list(errors.items())[:5], round(time.time() - START, 1), "s")


def save_words(out, kept, kernels, errors):
    np.savez_compressed(f"{out}/words.npz", **kept)
    Path(f"{out}/words_kernels.json").write_text(json.dumps([kernels, errors]))
    print(len(kernels), "calls at", round(time.time() - START, 1), "s", flush=True)


# ---- orders


def terms_of(c, which):
    """The terms of one result as places of the operand that varies, and the axis of results that tells which pair was set.

    For y: places of w, its outputs; for dx: places of w, its input channels; for dw: places of g, its channels.
    """
    x, w, s, p, d, *_ = c
    y = output_shape(c)
    n = len(x) - 2
    if which == "y":
        middle = tuple(v // 2 for v in y[2:])
        return [(ch, *tap) for ch in range(w[1]) for tap in np.ndindex(*w[2:])], middle
    if which == "dx":
        best, found = None, []
        for shift in np.ndindex(*s):  # of the places near the middle, the one with most taps
            middle = tuple(v // 2 + t for v, t in zip(x[2:], shift, strict=True))
            if any(m >= v for m, v in zip(middle, x[2:], strict=True)):
                continue
            taps = [t for t in np.ndindex(*w[2:]) if all((middle[i] + p[i] - t[i] * d[i]) % s[i] == 0
                    and 0 <= (middle[i] + p[i] - t[i] * d[i]) // s[i] < y[2 + i] for i in range(n))]  # fmt: skip
            if len(taps) > len(found):
                best, found = middle, taps
        return [(k, *tap) for k in range(w[0]) for tap in found], best
    tap = tuple(v // 2 for v in w[2:])
    places = [q for q in np.ndindex(*y[2:]) if all(0 <= q[i] * s[i] - p[i] + tap[i] * d[i] < x[2 + i] for i in range(n))]
    return [(b, *q) for b in range(x[0]) for q in places], tap


def order(c, dtype, last, which):
    unit, big = (2.0**-12, 2.0**15) if dtype == "float16" else (1.0, 2.0**60)
    x, w = c[0], c[1]
    y = output_shape(c)
    terms, at = terms_of(c, which)
    depth = len(terms)
    width = {"y": y[1], "dx": x[1], "dw": y[1]}[which]
    firsts = [i for i in dict.fromkeys((0, 1, 2, 4, 8, 16, 32, 64, 128, depth // 3, depth // 2, depth - 1)) if i < depth][:9]
    wanted = (*range(0, 40), *range(40, 160, 4), *range(160, min(depth, 1200), 16), *range(0, depth, max(1, depth // 192)), depth - 1)
    js = [j for j in dict.fromkeys(wanted) if j < depth][: max(320, width)]
    if width < 8:
        firsts, js = firsts[:4], js[: 12 * width]
    full = lambda shape: torch.full(shape, unit, device=DEVICE)
    index = torch.tensor(terms, device=DEVICE)
    rows = []
    for i in firsts:
        row = []
        for start in range(0, len(js), width):
            part = js[start : start + width]
            numbers = torch.arange(len(part), device=DEVICE)
            ends = index[torch.tensor(part, device=DEVICE)]
            tx, tw, tg = full(x), full(w), full(y)
            if which == "dw":
                tg[(terms[i][0], slice(None), *terms[i][1:])] = big
                tg[(ends[:, 0], numbers, *ends[:, 1:].T)] = -big
            elif which == "dx":
                tw[(terms[i][0], slice(None), *terms[i][1:])] = big
                tw[(ends[:, 0], numbers, *ends[:, 1:].T)] = -big
            else:
                tw[(slice(None), *terms[i])] = big
                tw[(numbers, *ends.T)] = -big
            tx, tw, tg = (lay(t.to(DT[dtype]), last) for t in (tx, tw, tg))
            found = call(c, tx, tw, tg, which)
            found = found[(slice(None), 0, *at)] if which == "dw" else found[(0, slice(None), *at)]
            row += (found.float()[: len(part)] / unit**2).tolist()
        rows.append(row)
    return {"first": np.array(firsts), "js": np.array(js), "counts": np.array(rows, np.float32), "depth": np.array(depth)}


def depthwise_order(c, dtype, last, which):
    """Terms outside the least subtree of taps i and j: each channel has a pair of its own."""
    unit, big = (2.0**-12, 2.0**15) if dtype == "float16" else (1.0, 2.0**60)
    window, channels, y = int(np.prod(c[1][2:])), c[0][1], output_shape(c)
    pairs = [(i, j) for i in range(window) for j in range(window) if i != j]
    middle = tuple(n // 2 // s * s for n, s in zip((y if which == "y" else c[0])[2:], c[2], strict=True))
    found = []
    for start in range(0, len(pairs), channels):
        part = pairs[start : start + channels]
        w = torch.full((c[1][0], window), unit, device=DEVICE)
        for channel, (i, j) in enumerate(part):
            w[channel, i], w[channel, j] = big, -big
        x, g = (torch.full(shape, unit, device=DEVICE) for shape in (c[0], y))
        x, w, g = (lay(t.to(DT[dtype]), last) for t in (x, w.reshape(c[1]), g))
        found += (call(c, x, w, g, which).float()[(0, slice(None), *middle)][: len(part)] / unit**2).tolist()
    return {"first": np.array(pairs), "js": np.array(middle), "counts": np.array(found, np.float32), "depth": np.array(window)}


def record_orders(out):
    kernels = json.loads(Path(f"{out}/words_kernels.json").read_text())[0]
    seen, kept, errors = set(), {}, {}
    by_name = {f"{d}|{'last' if last else 'first'}|{c}": (c, d, last) for c in cases() for d, last in MODES}
    for full, found in kernels.items():
        name, _, which = full.rpartition("|")
        if which not in PARTS or time.time() - START > LIMIT:
            continue
        c, dtype, last = by_name[name]
        key = (which, tuple((n[0], n[1] and (n[1][2] > 1)) for n in found))
        depthwise = c[5] > 1 and c[1][1] == 1 and c[0][1] == c[1][0] and which != "dw"
        if key in seen or (c[5] > 1 and not depthwise) or c[6]:
            continue
        seen.add(key)
        set_mode(dtype)
        try:
            for k, value in (depthwise_order if depthwise else order)(c, dtype, last, which).items():
                kept[f"{full}#{k}"] = value
        except (RuntimeError, IndexError) as error:
            errors[full] = f"{type(error).__name__}: {str(error)[:200]}"
    np.savez_compressed(f"{out}/orders.npz", **kept)
    print(len(kept) // 4, "orders of", len(seen), errors, round(time.time() - START, 1), "s")


# ---- names


def layers():
    """Layers of models by worth: (x without its batch, w, ...), with batches."""
    batches = (1, 2, 4, 8, 16, 32)
    for b in batches:
        for c, n in ((64, 56), (128, 28), (256, 14), (512, 7)):
            yield case((b, c, n, n), (c, c, 3, 3), 1, 1)
        yield case((b, 3, 224, 224), (64, 3, 7, 7), 2, 3)
        for c, n in ((64, 56), (128, 28), (256, 14)):
            yield case((b, c, n, n), (2 * c, c, 3, 3), 2, 1)
            yield case((b, c, n, n), (2 * c, c, 1, 1), 2)
        for c, n in ((64, 56), (128, 28), (256, 14), (512, 7)):
            yield case((b, c, n, n), (4 * c, c, 1, 1))
            yield case((b, 4 * c, n, n), (c, 4 * c, 1, 1))
            if n > 7:
                yield case((b, 4 * c, n, n), (2 * c, 4 * c, 1, 1))
                yield case((b, 4 * c, n, n), (8 * c, 4 * c, 1, 1), 2)
                yield case((b, 2 * c, n, n), (2 * c, 2 * c, 3, 3), 2, 1)
        yield case((b, 64, 56, 56), (64, 64, 1, 1))
        for width, size, image in ((192, 16, 224), (384, 16, 224), (768, 16, 224), (1024, 16, 224), (1280, 16, 224), (768, 32, 224), (1024, 14, 224), (1152, 14, 224), (1280, 14, 224),
                                   (384, 14, 224), (768, 14, 224), (768, 16, 384), (1152, 14, 384), (1024, 14, 336), (768, 14, 518), (1152, 16, 256), (768, 16, 512), (1024, 16, 512)):  # fmt: skip
            yield case((b, 3, image, image), (width, 3, size, size), size)
        for width in (96, 128, 192):
            yield case((b, 3, 224, 224), (width, 3, 4, 4), 4)
        for c, n in ((96, 56), (192, 28), (384, 14)):
            yield case((b, c, n, n), (2 * c, c, 2, 2), 2)
        for c, d in ((80, 384), (80, 512), (80, 768), (80, 1024), (128, 1280)):
            yield case((b, c, 3000), (d, c, 3), 1, 1)
            yield case((b, d, 3000), (d, d, 3), 2, 1)
        n = 16000
        for k, s in ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2)):
            yield case((b, 1 if k == 10 else 512, n), (512, 1 if k == 10 else 512, k), s)
            n = (n - k) // s + 1
        yield case((b, 768, n), (768, 48, 128), 1, 64, 1, 16)
    for b in (1, 2):  # Stable Diffusion's UNet and VAE
        for c, o, n in ((4, 320, 64), (320, 320, 64), (320, 640, 32), (640, 640, 32), (640, 1280, 16), (1280, 1280, 16), (1280, 1280, 8), (2560, 1280, 8), (2560, 1280, 16), (1920, 1280, 16),
                        (1920, 640, 32), (1280, 640, 32), (960, 640, 32), (960, 320, 64), (640, 320, 64), (320, 4, 64), (640, 640, 64), (1280, 1280, 32)):  # fmt: skip
            yield case((b, c, n, n), (o, c, 3, 3), 1, 1)
            if c != o and 4 not in (c, o):
                yield case((b, c, n, n), (o, c, 1, 1))
        for c, n in ((320, 64), (640, 32), (1280, 16)):
            yield case((b, c, n, n), (c, c, 3, 3), 2, 1)
            yield case((b, c, n, n), (c, c, 1, 1))
        for c, o, n in (
            (4, 512, 64),
            (512, 512, 64),
            (512, 512, 128),
            (512, 512, 256),
            (512, 256, 256),
            (256, 256, 256),
            (256, 256, 512),
            (256, 128, 512),
            (128, 128, 512),
            (128, 3, 512),
        ):
            yield case((b, c, n, n), (o, c, 3, 3), 1, 1)
    for b in (1, 8):  # VGG, MobileNet, DCGAN, U-Net, small images
        for c, o, n in (
            (3, 64, 224),
            (64, 64, 224),
            (64, 128, 112),
            (128, 128, 112),
            (128, 256, 56),
            (256, 256, 56),
            (256, 512, 28),
            (512, 512, 28),
            (512, 512, 14),
        ):
            yield case((b, c, n, n), (o, c, 3, 3), 1, 1)
        yield case((b, 3, 224, 224), (32, 3, 3, 3), 2, 1)
        yield case((b, 3, 224, 224), (16, 3, 3, 3), 2, 1)
        for c, o, n in ((32, 16, 112), (16, 96, 112), (96, 24, 56), (24, 144, 56), (144, 24, 56), (144, 32, 28), (32, 192, 28), (192, 32, 28), (192, 64, 14), (64, 384, 14), (384, 64, 14), (384, 96, 14),
                        (96, 576, 14), (576, 96, 14), (576, 160, 7), (160, 960, 7), (960, 160, 7), (960, 320, 7), (320, 1280, 7)):  # fmt: skip
            yield case((b, c, n, n), (o, c, 1, 1))
        for c, n, s in (
            (32, 112, 1),
            (96, 112, 2),
            (144, 56, 1),
            (144, 56, 2),
            (192, 28, 1),
            (192, 28, 2),
            (384, 14, 1),
            (576, 14, 1),
            (576, 14, 2),
            (960, 7, 1),
        ):
            yield case((b, c, n, n), (c, 1, 3, 3), s, 1, 1, c)
        for c, n in ((96, 56), (192, 28), (384, 14), (768, 7)):
            yield case((b, c, n, n), (c, 1, 7, 7), 1, 3, 1, c)
        for c, o, n in ((100, 512, 1), (512, 256, 4), (256, 128, 8), (128, 64, 16), (64, 3, 32)):
            yield case((b, c, n, n), (c, o, 4, 4), 1 if n == 1 else 2, 0 if n == 1 else 1, 1, 1, True)
        for c, n in ((1024, 14), (512, 28), (256, 56), (128, 112)):
            yield case((b, c, n, n), (c, c // 2, 2, 2), 2, 0, 1, 1, True)
        for c, n in ((64, 32), (128, 16), (256, 8), (512, 4)):
            yield case((b, c, n, n), (c, c, 3, 3), 1, 1)
            yield case((b, c, n, n), (2 * c, c, 3, 3), 2, 1)
        yield case((b, 3, 32, 32), (64, 3, 3, 3), 1, 1)
        yield case((b, 1, 28, 28), (32, 1, 3, 3))
        yield case((b, 32, 26, 26), (64, 32, 3, 3))
        yield case((b, 1, 28, 28), (6, 1, 5, 5), 1, 2)
        yield case((b, 6, 14, 14), (16, 6, 5, 5))


def drawn_layers(seed, count):
    """Shapes drawn at random: channels and sizes as models have them, and odd ones."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        pick = lambda values: int(rng.choice(values))
        usual = (3, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)
        c = pick(usual) if rng.random() < 0.85 else int(rng.integers(1, 300))
        o = pick(usual) if rng.random() < 0.85 else int(rng.integers(1, 300))
        b = pick((1, 1, 1, 2, 2, 4, 8, 16, 32))
        n = pick((4, 7, 8, 10, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64))
        kind = rng.random()
        if kind < 0.55:
            k = pick((1, 2, 3, 3, 3, 4, 5, 7))
            s = pick((1, 1, 1, 2))
            yield case((b, c, n, n), (o, c, k, k), s, k // 2 if rng.random() < 0.8 else 0)
        elif kind < 0.8:
            k = pick((4, 7, 8, 14, 16, 32))
            c = pick((1, 3, 3, 3, 4, 12, 16))
            yield case((b, c, k * pick((2, 3, 4, 7, 8, 14, 16)), k * pick((2, 4, 7, 8, 14, 16))), (o, c, k, k), k)
        else:
            k = pick((2, 3, 3, 4, 5, 8, 10))
            s = pick((1, 1, 2, 2, 4))
            yield case((b, c, pick((50, 100, 199, 400, 799, 1500, 3000))), (o, c, k), s, k // 2 if rng.random() < 0.7 else 0)


def model_like(seed, count):
    """Shapes drawn as models of images and sound have them."""
    rng = np.random.default_rng(seed)
    pick = lambda values: int(rng.choice(values))
    channels = (
        8,
        16,
        24,
        32,
        40,
        48,
        64,
        64,
        72,
        80,
        96,
        112,
        128,
        128,
        144,
        160,
        192,
        192,
        240,
        256,
        256,
        288,
        320,
        320,
        384,
        384,
        480,
        512,
        512,
        576,
        640,
        672,
        768,
        768,
        960,
        1024,
        1024,
        1152,
        1280,
        1536,
        1920,
        2048,
        2560,
    )
    widths = (96, 128, 192, 256, 320, 384, 512, 640, 768, 768, 1024, 1024, 1152, 1280, 1408, 1536)
    sizes = (4, 5, 6, 7, 7, 8, 9, 10, 12, 13, 14, 14, 16, 16, 18, 20, 24, 26, 28, 28, 32, 32, 36, 40, 48, 56, 56, 64, 64, 80, 96, 112, 128)
    batches = (1, 1, 1, 1, 2, 2, 3, 4, 4, 8, 8, 16, 16, 32, 64)
    found = 0
    while found < count:
        kind, b, c = rng.random(), pick(batches), pick(channels)
        o = c if rng.random() < 0.45 else pick(channels) if rng.random() < 0.5 else max(8, int(c * rng.choice([2, 4, 6, 0.5, 0.25])))
        n = pick(sizes)
        m = n if rng.random() < 0.9 else pick(sizes)
        if kind < 0.5:
            k = int(rng.choice([1, 3, 5, 7, 2, 4], p=[0.3, 0.54, 0.06, 0.04, 0.03, 0.03]))
            s = 2 if rng.random() < 0.22 else 1
            one = case((b, c, n, m), (o, c, k, k), s, 0 if k in (2, 4) else k // 2 if rng.random() < 0.93 else 0)
        elif kind < 0.68:
            k = pick((2, 4, 4, 8, 14, 14, 16, 16, 16, 32))
            n, m = (max(1, pick((224, 224, 224, 256, 336, 384, 448, 512, 518, 64, 96, 128, 32, 28)) // k) * k for _ in range(2))
            one = case((b, pick((1, 3, 3, 3, 3, 3, 4)), n, n if rng.random() < 0.9 else m), (pick(widths), 0, k, k), k)
            one = (one[0], (one[1][0], one[0][1], k, k), *one[2:])
        elif kind < 0.82:
            k, s = pick((3, 3, 3, 5, 7, 2, 4, 9, 1)), pick((1, 1, 1, 2))
            one = case(
                (b, c, pick((50, 64, 100, 128, 150, 199, 200, 256, 300, 400, 500, 512, 750, 799, 1000, 1024, 1500, 1599, 2000, 3000))),
                (o, c, k),
                s,
                k // 2 if rng.random() < 0.8 else 0,
            )
        elif kind < 0.9:
            k = pick((3, 3, 3, 5, 7, 7))
            one = case((b, c, n, m), (c, 1, k, k), pick((1, 1, 1, 2)), k // 2, 1, c)
        elif kind < 0.96:
            k, s = pick((3, 3, 5, 7, 7)), pick((1, 2, 2))
            c = pick((1, 3, 3, 3, 4))
            n = pick((28, 32, 64, 96, 128, 160, 192, 224, 224, 256))
            one = case((b, c, n, n), (pick((6, 16, 24, 32, 32, 40, 64, 64, 64, 96, 128, 320)), c, k, k), s, k // 2)
        else:
            g = pick((2, 4, 8, 16, 32))
            c, o = (max(g, v // g * g) for v in (c, o))
            one = case((b, c, n, m), (o, c // g, 3, 3), pick((1, 1, 2)), 1, 1, g)
        work = np.prod(output_shape(one), dtype=float) * np.prod(one[1][1:], dtype=float)
        if (
            min(output_shape(one)) >= 1
            and np.prod(one[0], dtype=float) < 1 << 26
            and np.prod(output_shape(one), dtype=float) < 1 << 26
            and work < 1 << 37
        ):
            found += 1
            yield one


def short_names(found):
    """The calls with numbers of kernels, and the kernels with their names."""
    names = list(dict.fromkeys(k[0] for kernels in found.values() for k in kernels))
    numbers = {name: i for i, name in enumerate(names)}
    return [names, {call: [[numbers[k[0]], *k[1:3]] for k in kernels] for call, kernels in found.items()}]


def record_names(out, chosen=None):
    found, errors = {}, {}
    shard, shards = map(int, os.environ.get("SHARD", "0/1").split("/"))
    path = Path(f"{out}/names{shard}.json")
    listed = list(chosen) if chosen is not None else [*dict.fromkeys([*layers(), *drawn_layers(1, 360)])]
    if seed := int(os.environ.get("SEED", "0")):
        listed = chosen = list(dict.fromkeys(model_like(seed, 6000)))
    listed = listed[shard::shards]
    if chosen is None:  # every third first, so that a time limit leaves a fair part of each family
        listed = [c for start in range(3) for c in listed[start::3]]
    done = 0
    watch = Watch()
    for number, c in enumerate(listed):
        if np.prod(output_shape(c)) > 1 << 27 or min(output_shape(c)) < 1:
            continue
        for dtype, last in MODES[:6]:
            if (last and len(c[0]) == 3) or time.time() - START > LIMIT:
                continue
            set_mode(dtype)
            x, w, g = (lay(torch.zeros(s, device=DEVICE, dtype=DT[dtype]), last) for s in (c[0], c[1], output_shape(c)))
            name = f"{dtype}|{'last' if last else 'first'}|{c}"
            for which in PARTS:
                try:
                    watch.record(f"{name}|{which}", lambda: call(c, x, w, g, which))
                except (RuntimeError, NotImplementedError) as error:
                    errors[f"{name}|{which}"] = f"{type(error).__name__}: {str(error)[:200]}"
            done += 1
        if number % 60 == 59 or time.time() - START > LIMIT:
            found |= watch.close()
            path.write_text(json.dumps([short_names(found), errors]))
            watch = Watch()
            if time.time() - START > LIMIT:
                break
    found |= watch.close()
    path.write_text(json.dumps([short_names(found), errors]))
    print(done, "of", 6 * len(listed), "calls,", len(errors), "errors", list(errors.items())[:4], round(time.time() - START, 1), "s")


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    {"words": record_words, "orders": record_orders, "names": record_names}[sys.argv[2]](sys.argv[1])
