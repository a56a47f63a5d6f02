"""Which kernels PyTorch's products in float32 get on a GPU: cuBLASLt's proposals for layers of usual models, and kernels of products with a vector.

    python tests/gpu_runs/float32_products.py proposals OUT SECONDS PROCESSES
    python tests/gpu_runs/float32_products.py vectors OUT SECONDS

proposals: OUT/layers.npz. For each form and each (K, N) of `layers`, the numbers of tokens from which the choice is another one. The tokens
    are M, and K of a weight's gradient. Every number up to `DENSE` is asked about, and every fourth up to `MOST`; numbers between two that
    differ are asked about too. `held_out` has other numbers, drawn by a seed.
vectors: OUT/vectors.json.xz. Kernels with grids of products with one row or one column, as a profiler lists them.
"""

import collections
import json
import lzma
import multiprocessing as mp
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

FORMS = (("f32", "rc", 0, 0), ("f32", "rc", 1, 0), ("f32", "rr", 0, 0), ("f32", "rr", 1, 0), ("f32", "cr", 0, 0))
DENSE, MOST = 256, 1024
HIDDEN = (128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 960, 1024, 1280)
INNER = {256: (704, 768, 1088), 384: (1024,), 512: (1408, 1376, 1536), 576: (1536,), 640: (1728, 1792), 768: (2048,), 896: (2432, 4864),
         960: (2560,), 1024: (2816, 3072)}  # fmt: skip
MORE = ((2048, 2048), (2048, 8192), (8192, 2048), (1536, 1536), (1536, 8960), (8960, 1536), (4096, 4096), (4096, 14336), (14336, 4096))
OUTPUTS = (2, 3, 10, 320, 1000)


def layers():
    """(K, N) of layers of models with up to 1,280 hidden units, and of their gradients."""
    found = []
    for h in HIDDEN:
        found += [(h, h), (h, 4 * h), (4 * h, h), (h, 3 * h), (3 * h, h), (h, h // 2), (h // 2, h), (h, 2 * h), (2 * h, h)]
        found += [(h, h // 3), (h // 3, h)] if h % 192 == 0 else []
        found += [(h, n) for n in OUTPUTS] + [pair for inner in INNER.get(h, ()) for pair in ((h, inner), (inner, h))]
    return list(dict.fromkeys((*found, *MORE)))


def operands(form, k, n, tokens):
    """M, K and N of a layer's product for a number of tokens, and the batch."""
    return (k, tokens, n, 1) if form[1] == "cr" else (tokens, k, n, 1)


def work(part, parts, until, queue):
    import torch_proposals

    asker, found = torch_proposals.Asker(torch_proposals.library()), {}
    for number in range(part, len(FORMS) * len(layers()), parts):
        if time.time() > until:
            break
        layer, which = divmod(number, len(FORMS))
        form, (k, n) = FORMS[which], layers()[layer]
        known = {}

        def ask(tokens, form=form, k=k, n=n, known=known):
            if tokens not in known:
                known[tokens] = asker.ask(form, *operands(form, k, n, tokens))
            return known[tokens]

        for tokens in range(1, DENSE + 1):
            ask(tokens)
        for tokens in range(DENSE, MOST, 4):
            if ask(tokens) != ask(tokens + 4):
                for between in range(tokens + 1, tokens + 4):
                    ask(between)
        changes, last = [], None
        for tokens in sorted(known):
            if known[tokens] != last:
                last = known[tokens]
                changes.append((tokens, last))
        others = np.random.default_rng(number).integers(DENSE, MOST, 12).tolist()
        held_out = [(tokens, asker.ask(form, *operands(form, k, n, tokens))) for tokens in others if tokens not in known]
        found[number] = changes, held_out
    queue.put(found)


def record_proposals(out, seconds, parts):
    until, context = time.time() + seconds, mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=work, args=(part, parts, until, queue)) for part in range(parts)]
    for worker in workers:
        worker.start()
    found = {number: rows for _ in workers for number, rows in queue.get(timeout=seconds + 30).items()}
    table = {}
    flat = [
        [(number, tokens, table.setdefault(choice, len(table))) for number in sorted(found) for tokens, choice in found[number][which]]
        for which in (0, 1)
    ]
    keep = {name: np.array(rows, np.int32).reshape(-1, 3) for name, rows in zip(("changes", "held_out"), flat, strict=True)}
    np.savez_compressed(f"{out}/layers.npz", **keep, choices=np.array(list(table), np.int64), layers=np.array(layers()))
    print(len(found), "of", len(FORMS) * len(layers()), "rows,", {name: len(rows) for name, rows in keep.items()}, len(table), "choices")


# ---- products with a vector: (dtype, m, k, n, batch, layout, addend)


def vectors():
    """Products in an order in which a run that ends early has some of each kind."""
    sizes, tokens = [64 * i for i in range(1, 65)], [*range(1, 97), *range(97, 1025, 9)]
    square = [(k, n) for k in sizes for n in sizes if k * n <= 1 << 22]
    kinds = [
        [("float32", 1, k, n, 1, layout, addend) for k, n in square]
        for layout, addend in (("rc", None), ("rc", "columns"), ("rr", None), ("rr", "columns"))
    ]
    for head in (64, 128, 32, 256):  # a step of decoding
        for heads in (1, 2, 4, 6, 8, 9, 12, 16):
            kinds.append([("float32", 1, head, t, heads, "rc", None) for t in tokens])
            kinds.append([("float32", 1, t, head, heads, "rr", None) for t in tokens])
    kinds.append([("float32", 1, k, n, 1, layout, addend) for k in sizes for n in (1, 2, 3, 10, 1000) for layout, addend in (("rc", "columns"), ("rc", None))])
    kinds.append([("float32", m, k, 1, 1, "rc", addend) for k in sizes[:32] for m in (1, 2, 3, 8, 50, 128) for addend in (None, "columns")])
    rng = np.random.default_rng(3)
    for kind in kinds:
        rng.shuffle(kind)
    longest = max(map(len, kinds))
    every = [kind[i * len(kind) // longest] for i in range(longest) for kind in kinds if i == 0 or i * len(kind) // longest != (i - 1) * len(kind) // longest]
    return list(dict.fromkeys(map(tuple, every)))


def record_vectors(out, seconds):
    import torch
    import record_operators

    torch.backends.cuda.matmul.allow_tf32 = False
    started, names, found, todo = time.time(), {}, [], vectors()
    for start in range(0, len(todo), 160):
        if time.time() - started > seconds:
            break
        group = todo[start : start + 160]
        for p, kernels in zip(group, record_operators.profiled(group), strict=True):
            found.append([*p, [[names.setdefault(kernel[0], len(names)), *kernel[1:]] for kernel in kernels]])
    content = {"gpu": torch.cuda.get_device_name(), "library": f"torch {torch.__version__}", "kernels": list(names), "products": found}
    Path(out, "vectors.json.xz").write_bytes(lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=6))
    print(len(found), "of", len(todo), "products,", len(names), "kernels", round(time.time() - started), "s")
    print(collections.Counter((row[5], row[6], row[4] > 1) for row in found))


if __name__ == "__main__":
    what, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    record_proposals(out, seconds, int(sys.argv[4])) if what == "proposals" else record_vectors(out, seconds)
