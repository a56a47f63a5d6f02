# ruff: noqa: E501
"""Products in float32 by PyTorch on a GPU: what cuBLASLt proposes for layers of small models, and kernels and words of products with a vector.

    python tests/gpu_runs/float32_products.py proposals OUT SECONDS,SECONDS,... PROCESSES layers,far,further,attention
    python tests/gpu_runs/float32_products.py vectors|labels OUT SECONDS
    python tests/gpu_runs/float32_products.py words OUT SECONDS
    python tests/gpu_runs/float32_products.py pack OUT FILE.json.xz    what tests/golden has of the words

layers, far, further: OUT/layers.npz, and so on. For each form and each (K, N) of the survey, the numbers of tokens from which the choice is
    another one. The tokens are M, and K of a weight's gradient. Every number up to `DENSE` is asked about, every fourth up to `MOST`, and
    every 32nd up to `FARTHEST`; numbers between two that differ are asked about too. `held_out` has other numbers, drawn by a seed.
attention: OUT/attention.npz, the choices for products of eager attention, in 16 bits too, for each number of tokens.
vectors: OUT/vectors.json.xz. Kernels with grids of products with one row or one column, as a profiler lists them.
labels: OUT/labels.npz and OUT/labels.json.xz, the same of layers with few outputs in 16 bits.
words: OUT/words.npz. Kernels, probes and words of some of these; words of attention in float32 and of its gradients. OUT/other_vectors.json.xz:
    kernels of other sizes, by which what holds between the first ones is judged.
"""

import collections
import functools
import hashlib
import itertools
import json
import lzma
import multiprocessing as mp
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

FORMS = (("f32", "rc", 0, 0), ("f32", "rc", 1, 0), ("f32", "rr", 0, 0), ("f32", "rr", 1, 0), ("f32", "cr", 0, 0))
DENSE, MOST, FARTHEST = 256, 1024, 4096
HIDDEN = (128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 960, 1024, 1280)
INNER = {256: (704, 768, 1088), 384: (1024,), 512: (1408, 1376, 1536), 576: (1536,), 640: (1728, 1792), 768: (2048,), 896: (2432, 4864),
         960: (2560,), 1024: (2816, 3072)}  # fmt: skip
MORE = ((2048, 2048), (2048, 8192), (8192, 2048), (1536, 1536), (1536, 8960), (8960, 1536), (4096, 4096), (4096, 14336), (14336, 4096))
OUTPUTS = (2, 3, 10, 320, 1000)
FURTHER = (448, 704, 832, 1088, 1152, 1216, 1536, 1600, 2048)
PUBLIC = (  # outputs and inputs of layers of public models
    (384, 30522), (768, 30522), (1024, 30522), (768, 50257), (1024, 50257), (768, 50265), (384, 51865), (512, 51865), (768, 51865), (512, 32128),
    (768, 32128), (576, 49152), (960, 49152), (640, 262144), (896, 151936), (1024, 151936), (896, 128), (896, 256), (640, 1024), (1024, 640),
    (640, 256), (256, 640), (640, 2048), (2048, 640), (1024, 2048), (1024, 3072), (3072, 1024), (2048, 256), (2048, 512), (2048, 5632),
    (5632, 2048), (1152, 6912), (6912, 1152), (1152, 256), (1152, 1024), (512, 1024), (768, 2), (768, 3), (384, 6), (1024, 2), (312, 312),
    (312, 1200), (1200, 312), (128, 30522), (128, 512), (512, 128), (4096, 1024), (1024, 4096), (768, 128), (128, 768), (4096, 128),
)  # fmt: skip


@functools.cache
def layers():
    """(K, N) of layers of models with up to 1,280 hidden units, and of their gradients."""
    found = []
    for h in HIDDEN:
        found += [(h, h), (h, 4 * h), (4 * h, h), (h, 3 * h), (3 * h, h), (h, h // 2), (h // 2, h), (h, 2 * h), (2 * h, h)]
        found += [(h, h // 3), (h // 3, h)] if h % 192 == 0 else []
        found += [(h, n) for n in OUTPUTS] + [pair for inner in INNER.get(h, ()) for pair in ((h, inner), (inner, h))]
    return list(dict.fromkeys((*found, *MORE)))


@functools.cache
def further_layers():
    """(K, N) of other layers."""
    found = []
    for h in FURTHER:
        found += [
            (h, h),
            (h, 4 * h),
            (4 * h, h),
            (h, 3 * h),
            (h, 2 * h),
            (2 * h, h),
            (h, 320),
            (h, 10),
            (h, 1000),
            (h, h // 2),
            (h, h // 4),
        ]
    outputs = [(n, k) for k, n in (*layers(), *PUBLIC, *found)]  # of the inputs' gradients
    return [pair for pair in dict.fromkeys((*PUBLIC, *found, *outputs)) if pair not in layers()]


def operands(form, k, n, tokens):
    """M, K and N of a layer's product for a number of tokens, and the batch."""
    return (k, tokens, n, 1) if form[1] == "cr" else (tokens, k, n, 1)


NEAR, FAR = (*range(1, DENSE), *range(DENSE, MOST, 4), MOST), tuple(range(MOST, FARTHEST + 1, 32))
LABELS, LABEL_ROWS = (2, 3, 4, 5, 6, 7, 9, 10, 11, 20, 100), (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
SHORT_FORMS = tuple((dt, *form[1:]) for dt in ("bf16", "f16") for form in FORMS[:3] + FORMS[4:])


@functools.cache
def label_layers():
    """(K, N) of layers whose outputs are a few labels, and of their inputs' gradients."""
    return [pair for h in HIDDEN for n in LABELS for pair in ((h, n), (n, h))]


SURVEYS = {
    "layers": (layers, NEAR, FORMS), "far": (layers, FAR, FORMS), "further": (further_layers, (*NEAR, *FAR[1:]), FORMS),
    "labels": (label_layers, tuple(range(1, 129)), SHORT_FORMS),
}  # fmt: skip
HEADS, BATCHES = (32, 64, 80, 96, 128, 256), (2, 4, 6, 8, 12, 16, 32, 64)


@functools.cache
def attention_rows():
    """(form, head size, batch, True for the gradient of keys that lie transposed) of products of eager attention and of its gradients."""
    forms = (("rc", False), ("rr", False), ("cr", False), ("cr", True))
    return [
        ((dt, layout, 0, 1), d, batch, turned)
        for dt in ("f32", "bf16", "f16")
        for layout, turned in forms
        for d in HEADS
        for batch in BATCHES
    ]


def attention_tokens(form):
    """Numbers of tokens that are asked about; in 16 bits those that no vectors of 16 bytes fit."""
    return [*range(1, DENSE + 1), *range(DENSE + 4, MOST + 1, 4)] if form[0] == "f32" else [t for t in range(1, DENSE + 1) if t % 8]


def attention_operands(row, tokens):
    form, d, batch, turned = row
    return (*((d, tokens, tokens) if turned else (tokens, d, tokens) if form[1] == "rc" else (tokens, tokens, d)), batch)


def ask_layer(asker, survey, number):
    """Return the tokens and choices at which a layer's choice changes, and those that are asked about apart."""
    (make, grid, forms), known = SURVEYS[survey], {}
    layer, which = divmod(number, len(forms))
    form, (k, n) = forms[which], make()[layer]

    def ask(tokens):
        if tokens not in known:
            known[tokens] = asker.ask(form, *operands(form, k, n, tokens))
        return known[tokens]

    pairs = list(itertools.pairwise(grid))
    while pairs:
        low, high = pairs.pop()
        if ask(low) != ask(high) and high - low > 1:
            pairs += [(low, (low + high) // 2), ((low + high) // 2, high)]
    changes, last = [], None
    for tokens in sorted(known):
        if known[tokens] != last:
            last = known[tokens]
            changes.append((tokens, last))
    others = np.random.default_rng(number).integers(grid[0], grid[-1], 16).tolist()
    return changes, [(tokens, asker.ask(form, *operands(form, k, n, tokens))) for tokens in others if tokens not in known]


def ask_attention(asker, _, number):
    row = attention_rows()[number]
    others = np.random.default_rng(number).integers(DENSE, MOST, 8).tolist() if row[0][0] == "f32" else []
    ask = lambda tokens: [(t, asker.ask(row[0], *attention_operands(row, t))) for t in tokens]
    return ask(attention_tokens(row[0])), ask(others)


def count_rows(survey):
    return len(attention_rows()) if survey == "attention" else len(SURVEYS[survey][2]) * len(SURVEYS[survey][0]())


def work(part, parts, until, surveys, queue):
    import torch_proposals

    asker, found = torch_proposals.Asker(torch_proposals.library()), {}
    for survey, limit in zip(surveys, until, strict=True):
        question = ask_attention if survey == "attention" else ask_layer
        found[survey] = {}
        for number in range(part, count_rows(survey), parts):
            if time.time() > limit:
                break
            found[survey][number] = question(asker, survey, number)
    queue.put(found)


def record_proposals(out, surveys, seconds, parts):
    """Ask about surveys, each until its number of seconds has passed."""
    until, context = [time.time() + each for each in seconds], mp.get_context("spawn")
    queue = context.Queue()
    workers = [context.Process(target=work, args=(part, parts, until, surveys, queue)) for part in range(parts)]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=seconds[-1] + 30) for _ in workers]
    for survey in surveys:
        found, table = {number: rows for answer in answers for number, rows in answer[survey].items()}, {}
        flat = [
            [(number, tokens, table.setdefault(choice, len(table))) for number in sorted(found) for tokens, choice in found[number][which]]
            for which in (0, 1)
        ]
        keep = {name: np.array(rows, np.int32).reshape(-1, 3) for name, rows in zip(("changes", "held_out"), flat, strict=True)}
        every = [] if survey == "attention" else SURVEYS[survey][0]()
        np.savez_compressed(f"{out}/{survey}.npz", **keep, choices=np.array(list(table), np.int64), layers=np.array(every))
        print(
            survey,
            len(found),
            "of",
            count_rows(survey),
            "rows,",
            {key: len(rows) for key, rows in keep.items()},
            len(table),
            "choices",
            flush=True,
        )


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
    kinds.append(
        [
            ("float32", 1, k, n, 1, layout, addend)
            for k in sizes
            for n in (1, 2, 3, 10, 1000)
            for layout, addend in (("rc", "columns"), ("rc", None))
        ]
    )
    kinds.append([("float32", m, k, 1, 1, "rc", addend) for k in sizes[:32] for m in (1, 2, 3, 8, 50, 128) for addend in (None, "columns")])
    rng = np.random.default_rng(3)
    for kind in kinds:
        rng.shuffle(kind)
    longest = max(map(len, kinds))
    every = [
        kind[i * len(kind) // longest]
        for i in range(longest)
        for kind in kinds
        if i == 0 or i * len(kind) // longest != (i - 1) * len(kind) // longest
    ]
    return list(dict.fromkeys(map(tuple, every)))


def other_vectors():
    """Products with one row of public layers, and of drawn sizes, a third each of multiples of 8, multiples of 4, and any."""
    rng, found = np.random.default_rng(5), []
    for layout in ("rc", "rr"):
        for addend in (None, "columns"):
            found += [
                ("float32", 1, k, n, 1, layout, addend)
                for k, n in dict.fromkeys((*PUBLIC, *further_layers(), *layers()))
                if k * n <= 1 << 27
            ]
            for number in range(450):
                k, n = (int(x) for x in np.exp(rng.uniform(np.log((24, 2)), np.log((4096, 12000)))))
                unit = (8, 4, 1)[number % 3]
                found.append(("float32", 1, -(-k // unit) * unit, -(-n // unit) * unit, 1, layout, addend))
    return list(dict.fromkeys(found))


def record_vectors(out, seconds, todo, name="vectors"):
    import record_operators
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    started, names, found = time.time(), {}, []
    for start in range(0, len(todo), 160):
        if time.time() - started > seconds:
            break
        group = todo[start : start + 160]
        for p, kernels in zip(group, record_operators.profiled(group), strict=True):
            found.append([*p, [[names.setdefault(kernel[0], len(names)), *kernel[1:]] for kernel in kernels]])
    content = {"gpu": torch.cuda.get_device_name(), "library": f"torch {torch.__version__}", "kernels": list(names), "products": found}
    Path(out, f"{name}.json.xz").write_bytes(lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=6))
    print(len(found), "of", len(todo), "products,", len(names), "kernels", round(time.time() - started), "s")
    print(collections.Counter((row[5], row[6], row[4] > 1) for row in found), flush=True)


def label_products():
    """Products of layers with a few labels, and of their gradients, in 16 bits."""
    found = []
    for dtype in ("bfloat16", "float16"):
        for h in HIDDEN:
            for n in LABELS:
                for m in LABEL_ROWS:
                    found += [
                        (dtype, m, h, n, 1, "rc", "columns"),
                        (dtype, m, h, n, 1, "rc", None),
                        (dtype, m, n, h, 1, "rr", None),
                        (dtype, n, m, h, 1, "cr", None),
                    ]
    return found


LINEAR = (
    (64, 64), (256, 1024), (512, 512), (576, 64), (576, 128), (704, 2944), (768, 768), (768, 2304), (768, 2752), (896, 128), (960, 2304),
    (1024, 2240), (1024, 4096), (1280, 1856), (1344, 1728), (1408, 1600), (1536, 1536), (2048, 1024), (2048, 2048), (2304, 1088), (3072, 768),
    (4096, 512), (4096, 1024), (64, 4096), (320, 2048), (512, 4096), (768, 10), (768, 2), (768, 1), (384, 10), (192, 10), (256, 3), (100, 77),
    (768, 1000), (4096, 1), (384, 384), (384, 1536), (1536, 384), (300, 500), (1000, 1000),
)  # fmt: skip
ROWS = (
    (64, 64), (64, 3072), (100, 64), (128, 64), (128, 512), (128, 3072), (192, 768), (320, 320), (384, 384), (384, 1152), (384, 1536),
    (512, 512), (512, 1536), (576, 4096), (768, 768), (768, 2304), (768, 3072), (3072, 768), (1024, 64), (1024, 512), (1024, 1024), (1024, 3072),
    (1024, 4096), (1280, 3840), (1280, 1280), (2048, 2048), (1536, 1536), (1600, 1600), (4096, 1024), (3456, 832), (4096, 64), (2048, 128),
    (640, 4096), (960, 4096), (1536, 384), (1000, 300), (777, 333),
)  # fmt: skip
DECODED = ((64, 100, 8), (64, 300, 12), (64, 700, 12), (64, 1000, 8), (128, 40, 4), (128, 300, 8), (128, 700, 12), (32, 77, 4), (32, 600, 12),
           (256, 90, 8), (256, 300, 8), (256, 700, 12), (64, 129, 4), (64, 393, 12), (64, 400, 12), (128, 400, 4), (32, 400, 8), (256, 60, 16),
           (256, 700, 16), (256, 700, 4), (64, 40, 6), (64, 1, 8), (80, 100, 8), (96, 50, 12))  # fmt: skip
ATTENTION = (  # batch, heads, queries, keys, size, causal, with a bias
    (1, 4, 20, 20, 64, False, False), (1, 2, 50, 50, 64, True, False), (2, 3, 70, 72, 32, False, True), (1, 2, 150, 150, 64, True, False),
    (1, 2, 40, 40, 128, True, False), (1, 2, 33, 140, 128, False, False), (1, 2, 130, 132, 96, False, True), (2, 2, 1, 77, 64, False, False),
    (1, 1, 64, 300, 32, False, False), (1, 2, 60, 60, 256, True, False), (1, 2, 48, 48, 80, False, False), (1, 2, 37, 37, 40, True, False),
    (1, 2, 45, 90, 160, False, False), (1, 2, 30, 30, 16, False, False), (1, 2, 64, 64, 48, False, False),
)  # fmt: skip


def drawn_vectors():
    found = [
        ("float32", 1, k, n, 1, layout, addend)
        for layout, sizes in (("rc", LINEAR), ("rr", ROWS))
        for k, n in sizes
        for addend in (None, "columns")
    ]
    found += [("float32", 1, head, t, heads, "rc", None) for head, t, heads in DECODED]
    found += [("float32", 1, t, head, heads, "rr", None) for head, t, heads in DECODED]
    found += [("float32", m, k, 1, 1, "rc", addend) for m, k in ((3, 768), (50, 512), (128, 1024)) for addend in (None, "columns")]
    return found


def record_words(out, seconds):
    import record_operators as operators
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    started, kept, A = time.time(), {}, torch.ops.aten
    for at, (b, h, s, keys, d, causal, biased) in enumerate(ATTENTION):
        name = f"attention{at}"
        q, k, v, g, bias = operators.normals(
            operators.rng(name), "float32", (b, h, s, d), (b, h, keys, d), (b, h, keys, d), (b, h, s, d), (b, 1, s, keys)
        )
        try:
            bias = bias.expand(b, h, s, keys) if biased else None
            o, lse, seed, offset = A._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
            grads = A._scaled_dot_product_efficient_attention_backward(
                g, q, k, v, bias, o, lse, seed, offset, 0.0, [True, True, True, False], causal
            )
            kept |= {
                f"{name}|{part}": operators.words(t, 4096)
                for part, t in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *grads), strict=False)
            }
        except Exception as error:
            print(name, str(error)[:200], flush=True)
    todo, numbers = drawn_vectors(), {}
    for start in range(0, len(todo), 24):
        group = todo[start : start + 24]
        for p, kernels in zip(group, operators.profiled(group), strict=True):
            numbers[p] = kernels
    print(len(numbers), "profiled", time.time() - started, flush=True)
    record_vectors(out, seconds / 3, other_vectors(), "other_vectors")
    for number, p in enumerate(todo):
        if time.time() - started > seconds:
            break
        _, m, k, n, batch, _, addend = p
        a = torch.from_numpy(operators.rng(f"a{m}x{k}x{n}").standard_normal((m, k), np.float32)).to(operators.DEVICE)
        b = torch.from_numpy(operators.rng(f"b{m}x{k}x{n}").standard_normal((k, n), np.float32) * np.float32(k**-0.5)).to(operators.DEVICE)
        given, f = operators.call(p, *((torch.stack([x] * batch) for x in (a, b)) if batch > 1 else (a, b)))
        y = operators.words(f(*given))
        index = np.unique(np.linspace(0, y.size - 1, min(y.size, 256)).astype(np.int64))
        kept |= {f"{number}_index": index, f"{number}_words": y[index], f"{number}_product": np.array(json.dumps([p, numbers[p]]))}
        if addend is None:
            first, places, counts = operators.probe(p)
            kept |= {f"{number}_first": np.array(first), f"{number}_places": np.array(places), f"{number}_counts": counts}
    np.savez_compressed(f"{out}/words.npz", **kept)
    print(len(kept), "arrays", time.time() - started, "s", flush=True)


def pack(folder, path):
    """Write digests of attention's words, and some words of each product with one row, with the names of its kernels."""
    file = np.load(Path(folder, "words.npz"))
    digests = {name: hashlib.sha256(file[name].tobytes()).hexdigest()[:16] for name in file.files if "|" in name}
    numbers = sorted({int(name.split("_")[0]) for name in file.files if name.endswith("_product")})
    products = []
    for number in numbers:
        product, index = json.loads(str(file[f"{number}_product"]))[0], file[f"{number}_index"]
        kept = np.unique(np.linspace(0, len(index) - 1, min(len(index), 12)).astype(int))
        products.append([product, index[kept].tolist(), file[f"{number}_words"][kept].tolist()])
    content = {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "attention": digests, "products": products}
    data = lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    Path(path).write_bytes(data)
    print(len(digests), "digests,", len(products), "products,", len(data), "bytes")


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        pack(*sys.argv[2:])
        sys.exit()
    what, out, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3].split(",")[0])
    if what == "proposals":
        record_proposals(out, sys.argv[5].split(","), list(map(float, sys.argv[3].split(","))), int(sys.argv[4]))
    else:
        record_words(out, seconds) if what == "words" else record_vectors(
            out, seconds, {"vectors": vectors, "labels": label_products}[what](), what
        )
