"""Attention as a user of PyTorch calls it on a GPU: the backend of drawn calls, their words, gradients in deterministic mode, dropout.

    python attention_calls.py OUT FIRST_SEED [choice] [calls] [gradients] [drawn] [dropout] ["one query"]

writes OUT/attention_calls.json (entries by part) and OUT/attention_calls.npz (words at evenly spread places, for counts). choice: what
`_fused_sdp_choice` gives for drawn calls. calls: `scaled_dot_product_attention` and its gradients of such calls. gradients: those of one
backend, in deterministic mode or by several runs. drawn: such gradients of drawn cases. dropout: the masks of cuDNN, and which 16-bit
numbers of Philox it keeps. one query: the order in which cuDNN adds weights and values of one query.
"""

import contextlib
import hashlib
import json
import math
import os
import random
import sys
import time
import warnings

import numpy as np
import torch
from dropout_words import DEVICE, kernel_names, normals, offset, raw, spread

START, LIMIT = time.time(), float(os.environ.get("LIMIT_S", "80"))
A = torch.ops.aten
BACKENDS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", -1: "error"}


def digest(words):
    return hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()[:16]


# ---- drawn calls


def draw_call(seed):
    """Draw the facts of one call. Most calls differ from a plain one in a few facts."""
    r = random.Random(seed)
    pick = lambda *pairs: r.choices([value for value, _ in pairs], [weight for _, weight in pairs])[0]
    heads = r.choice((1, 2, 3, 4, 6, 8))
    key_heads = pick((heads, 12), (r.choice([n for n in range(1, heads + 1) if heads % n == 0]), 6), (1, 1), (3, 1))
    queries = r.choice((1, 2, 7, 16, 33, 64, 100, 128, 150))
    keys = pick((queries, 6), (r.choice((1, 2, 8, 20, 64, 77, 130, 200)), 4))
    size = r.choice((1, 3, 8, 16, 24, 32, 40, 60, 64, 64, 72, 80, 96, 100, 128, 128, 160, 192, 200, 256, 264))
    causal = r.random() < 0.35
    mask = None if causal else pick((None, 6), ("bool", 3), ("own", 2), ("float32", 1))
    return {
        "dtype": pick(("bfloat16", 9), ("float16", 6), ("float32", 4)),
        "other_dtype": r.random() < 0.03,
        "axes": pick((4, 24), (3, 1)),
        "batch": r.choice((1, 1, 2, 3)),
        "key_batch": pick((None, 30), (1, 1)),
        "heads": heads,
        "key_heads": key_heads,
        "value_heads": pick((key_heads, 30), (1, 1)),
        "queries": queries,
        "keys": keys,
        "size": size,
        "value_size": pick((size, 9), (r.choice((16, 64, 72, 128)), 1)),
        "causal": causal,
        "mask": mask,
        "mask_axes": pick(("qk", 3), ("bhqk", 2), ("11qk", 2), ("b11k", 2), ("1hqk", 1), ("1k", 1), ("hqk", 1)),
        "mask_memory": pick(("dense", 8), ("transposed", 1), ("expanded", 1)),
        "mask_grad": r.random() < 0.1,
        "p": pick((0.0, 7), (0.1, 1), (0.5, 1)),
        "grad": r.random() < 0.4,
        "gqa": r.random() < (0.75 if key_heads != heads else 0.1),
        "memory": pick(("dense", 5), ("bshd", 3), ("strided", 1), ("begins", 1), ("repeated", 1)),
        "mode": pick(("", 8), ("deterministic", 3), ("warn", 1)),
        "backends": pick((None, 7), (("flash",), 1), (("efficient",), 1), (("cudnn",), 1), (("flash", "efficient", "math"), 1)),
        "scale": pick((None, 6), (0.3, 1)),
    }


def lay_out(x, memory):
    """Return a tensor's elements in another memory order."""
    if x.ndim == 4 and memory == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    if memory == "begins":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    if x.ndim == 4 and memory == "repeated":
        return x[:, :1].expand(x.shape)
    return x


def make_call(seed):
    """Return a drawn call's facts, operands, mask and the gradient of its result."""
    facts = draw_call(seed)
    lead = (facts["batch"],) if facts["axes"] == 4 else ()
    key_lead = lead if facts["key_batch"] is None or not lead else (facts["key_batch"],)
    shapes = (
        (*lead, facts["heads"], facts["queries"], facts["size"]),
        (*key_lead, facts["key_heads"], facts["keys"], facts["size"]),
        (*key_lead, facts["value_heads"], facts["keys"], facts["value_size"]),
        (*lead, facts["heads"], facts["queries"], facts["value_size"]),
    )
    q, k, v, grad = normals(f"call{seed}", facts["dtype"], *shapes)
    if facts["other_dtype"]:
        k = k.float() if facts["dtype"] != "float32" else k.bfloat16()
    q, k, v = (lay_out(x, facts["memory"]) for x in (q, k, v))
    mask = None
    if facts["mask"] is not None:
        sizes = {"b": facts["batch"], "h": facts["heads"], "q": facts["queries"], "k": facts["keys"], "1": 1}
        shape = [sizes[axis] for axis in facts["mask_axes"]]
        dtype = facts["dtype"] if facts["mask"] == "own" else "float32"
        (mask,) = normals(f"mask{seed}", dtype, shape)
        if facts["mask"] == "bool":
            mask = mask > -1
        if facts["mask_memory"] == "transposed":
            mask = mask.mT.contiguous().mT
        if facts["mask_memory"] == "expanded":
            mask = mask[..., :1].expand(mask.shape)
        if facts["mask_grad"] and mask.is_floating_point():
            mask = mask.detach().requires_grad_()
    if facts["grad"]:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return facts, (q, k, v), mask, grad


@contextlib.contextmanager
def settings(facts):
    """The switches of a call."""
    kinds = facts["backends"]
    named = [getattr(torch.nn.attention.SDPBackend, BACKENDS[kind]) for kind in kinds or ()]
    torch.use_deterministic_algorithms(facts["mode"] != "", warn_only=facts["mode"] == "warn")
    try:
        with torch.nn.attention.sdpa_kernel(named) if kinds else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def record_choice(seed):
    facts, (q, k, v), mask, _ = make_call(seed)
    with settings(facts):
        chosen = torch._fused_sdp_choice(
            q, k, v, attn_mask=mask, dropout_p=facts["p"], is_causal=facts["causal"], scale=facts["scale"], enable_gqa=facts["gqa"]
        )
    return {"choice": NUMBERS.get(chosen, str(chosen))}


def record_call(seed, kept):
    """The words of a call and of its gradients."""
    facts, operands, mask, grad = make_call(seed)
    if facts["memory"] == "begins":
        raise ValueError("left out: kernels that load vectors would end the process")
    torch.manual_seed(seed)
    with settings(facts):
        out = torch.nn.functional.scaled_dot_product_attention(
            *operands, attn_mask=mask, dropout_p=facts["p"], is_causal=facts["causal"], scale=facts["scale"], enable_gqa=facts["gqa"]
        )
        found = {"o": out}
        if out.requires_grad:
            leaves = [x for x in (*operands, mask) if x is not None and x.requires_grad]
            names = [n for n, x in zip(("dq", "dk", "dv", "dm"), (*operands, mask), strict=True) if x is not None and x.requires_grad]
            found |= zip(names, torch.autograd.grad(out, leaves, grad), strict=True)
    return keep(f"call{seed}", found, kept) | {"offset": offset()}


def keep(name, found, kept, most=512):
    kept |= {f"{name}_{part}": spread(x, most) for part, x in found.items()}
    return {part: digest(raw(x)) for part, x in found.items()}


# ---- gradients of one backend

# (batch, heads, key heads, queries, keys, head size)
GRADIENTS = {
    "flash": (
        (1, 2, 2, 300, 300, 64), (2, 4, 2, 777, 777, 64), (1, 2, 2, 1000, 1000, 32), (1, 2, 1, 640, 640, 96), (1, 4, 4, 900, 900, 128),
        (2, 8, 2, 530, 530, 128), (1, 2, 2, 700, 700, 160), (1, 2, 2, 450, 450, 192), (1, 2, 2, 300, 300, 256), (1, 2, 2, 450, 450, 40),
        (1, 2, 2, 200, 1111, 64), (4, 16, 16, 420, 420, 64), (2, 70, 70, 300, 300, 32), (1, 1, 1, 2500, 2500, 64), (3, 25, 5, 513, 513, 64),
    ),
    "efficient": (
        (1, 2, 2, 300, 300, 64), (1, 2, 2, 200, 333, 32), (1, 2, 2, 520, 520, 128), (2, 3, 3, 260, 700, 96), (1, 2, 2, 150, 400, 40),
        (1, 2, 2, 256, 256, 64), (1, 2, 2, 256, 256, 128), (1, 2, 2, 200, 200, 160), (1, 2, 2, 130, 130, 256), (4, 70, 70, 128, 128, 64),
        (2, 4, 4, 64, 500, 64), (1, 2, 2, 500, 64, 128),
    ),
    "cudnn": (
        (1, 2, 2, 300, 300, 64), (2, 4, 2, 600, 600, 64), (1, 2, 2, 700, 700, 128), (8, 16, 16, 512, 512, 128), (1, 2, 2, 400, 400, 256),
        (1, 4, 1, 450, 450, 96), (2, 2, 2, 513, 1000, 32), (1, 2, 2, 64, 384, 64),
    ),
}  # fmt: skip
RUN = {
    "cudnn": lambda q, k, v, mask, p, causal: A._scaled_dot_product_cudnn_attention(q, k, v, mask, True, p, causal, False),
    "flash": lambda q, k, v, mask, p, causal: A._scaled_dot_product_flash_attention(q, k, v, p, causal, False),
    "efficient": lambda q, k, v, mask, p, causal: A._scaled_dot_product_efficient_attention(q, k, v, mask, True, p, causal),
}


def gradient_cases():
    """Yield backend, shape, dtype, causal, form of the mask, probability of dropout, and whether the mode is deterministic."""
    for kind, shapes in GRADIENTS.items():
        for number, shape in enumerate(shapes):
            is_square = shape[3] == shape[4]
            for causal in (False, True)[: 1 + is_square]:
                dtype = ("bfloat16", "float16")[(number + causal) % 2]
                for deterministic in (True, False):
                    if kind != "cudnn" or not deterministic:
                        yield kind, shape, dtype, causal, None, 0.0, deterministic
                if number == 0:
                    yield kind, shape, ("float16", "bfloat16")[causal], causal, None, 0.0, kind != "cudnn"
    for shape in ((1, 2, 2, 48, 48, 64), (2, 2, 2, 130, 304, 64), (1, 4, 4, 200, 200, 128), (1, 2, 2, 100, 300, 32)):
        for kind in RUN:
            for p in (0.1, 0.5):
                yield kind, shape, "bfloat16", False, None, p, kind != "cudnn"
                if shape[3] == shape[4]:
                    yield kind, shape, "float16", True, None, p, kind != "cudnn"
    for shape in ((1, 2, 2, 64, 64, 64), (1, 2, 2, 128, 304, 64), (1, 2, 2, 200, 200, 128)):
        yield "efficient", shape, "bfloat16", False, "own", 0.0, True
        yield "efficient", shape, "float16", False, "own", 0.0, True
        yield "efficient", shape, "bfloat16", False, "own", 0.1, True
        yield "cudnn", shape, "bfloat16", False, "own", 0.0, False


def draw_gradient(seed):
    """Draw a case of `gradient_cases`."""
    r = random.Random(seed)
    kind, heads = r.choice(("flash", "efficient", "cudnn")), r.choice((1, 2, 3, 4, 6))
    key_heads = heads if kind == "efficient" else r.choice([n for n in range(1, heads + 1) if heads % n == 0])
    queries, size = r.randint(2, 400), 8 * r.randint(2, r.choice((8, 16, 32)))
    keys = queries if r.random() < 0.5 else r.randint(2, 600)
    causal = r.random() < 0.4 and (kind != "flash" or queries == keys)
    mask = "own" if kind != "flash" and not causal and r.random() < 0.4 else None
    keys += -keys % 8 if mask else 0
    shape = (r.choice((1, 1, 2)), heads, key_heads, queries, keys, size)
    p = r.choice((0.0, 0.0, 0.1, 0.25, 0.5))
    return kind, shape, r.choice(("bfloat16", "float16")), causal, mask, p, kind != "cudnn" and r.random() < 0.8


def record_gradient(case, seed, kept, runs=6):
    kind, shape, dtype, causal, mask_kind, p, deterministic = case
    b, h, hk, s, sk, d = shape
    name = "|".join(map(str, case)) + f"|{seed}"
    operands = [x.requires_grad_() for x in normals(f"g{seed}{shape}", dtype, (b, h, s, d), (b, hk, sk, d), (b, hk, sk, d))]
    grad, mask = (*normals(f"o{seed}{shape}", dtype, (b, h, s, d)), None)
    if mask_kind:
        (mask,) = normals(f"m{seed}{shape}", dtype, (b, h, s, sk))
        if kind == "efficient":
            mask.requires_grad_()
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = RUN[kind](*operands, mask, p, causal)
        leaves = [x for x in (*operands, mask) if x is not None and x.requires_grad]
        results = [torch.autograd.grad(found[0], leaves, grad, retain_graph=True) for _ in range(runs)]
    finally:
        torch.use_deterministic_algorithms(False)
    names = ("dq", "dk", "dv", "dm")[: len(leaves)]
    entry = keep(name, {"o": found[0], "lse": found[1], **dict(zip(names, results[0], strict=True))}, kept)
    return entry | {"distinct": [len({digest(raw(r[i])) for r in results}) for i in range(len(leaves))]}


# ---- cuDNN's dropout


def cudnn_mask(shape, p, seed, begin, causal=False, kind="cudnn"):
    """Return which weights are kept, [batch, heads, queries, keys], by values of one, a head size of keys at a time."""
    b, h, s, sk, d = shape
    parts = []
    for first in range(0, sk, d):
        torch.cuda.manual_seed(seed)
        torch.cuda.default_generators[0].set_offset(begin)
        q, k, v = (torch.zeros(n, device=DEVICE, dtype=torch.bfloat16) for n in ((b, h, s, d), (b, h, sk, d), (b, h, sk, d)))
        width = min(d, sk - first)
        v[:, :, first : first + width, :width] = torch.eye(width, device=DEVICE, dtype=torch.bfloat16)
        parts.append((RUN[kind](q, k, v, None, p, causal)[0][..., :width] != 0).cpu().numpy())
    return np.concatenate(parts, axis=-1)


def philox(counters, key, rounds):
    words, (k0, k1) = [np.asarray(x, np.uint64) for x in counters], key
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(rounds):
        p0, p1 = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [(p1 >> shift) ^ words[1] ^ np.uint64(k0), p1 & low, (p0 >> shift) ^ words[3] ^ np.uint64(k1), p0 & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(*words), -1).astype(np.uint32)


def cudnn_numbers(shape, seed, begin):
    """Return the 16-bit number of each weight by the rule that is tried, [batch, heads, queries, keys]."""
    b, h, s, sk, _ = shape
    rows, columns = -(-s // 16), -(-sk // 16)
    first = begin // 4 + 8 * np.arange(b * h, dtype=np.uint64)[:, None, None, None] + np.arange(8, dtype=np.uint64)
    tiles = np.arange(columns, dtype=np.uint64)[None, :] * np.uint64(rows) + np.arange(rows, dtype=np.uint64)[:, None]
    counters = (first & np.uint64(0xFFFFFFFF), first >> np.uint64(32), tiles[None, :, :, None], np.zeros(1, np.uint64))
    parts = philox(counters, (seed & 0xFFFFFFFF, seed >> 32), 7).view(np.uint16)
    parts = parts.reshape(b * h, rows, columns, 8, 2, 2, 2)  # half of the rows, half of the columns, odd row
    laid = parts.transpose(0, 1, 4, 6, 2, 5, 3)
    laid = np.broadcast_to(laid[:, :, :, None], (b * h, rows, 2, 4, 2, columns, 2, 8)).reshape(b, h, rows * 16, columns * 16)
    return laid[:, :, :s, :sk]


MASKS = (  # shape with a head size that is a power of two; probability, seed, offset
    ((1, 1, 128, 128, 64), 0.5, 0, 0), ((1, 2, 64, 80, 128), 0.25, 7, 4), ((2, 3, 129, 100, 64), 0.1, (1 << 33) + 5, 8),
    ((1, 1, 33, 200, 64), 0.75, (1 << 63) + 11, 1 << 20), ((1, 2, 17, 24, 32), 0.5, 3, (1 << 34) - 8), ((1, 2, 1000, 64, 64), 0.5, 1, 0),
    ((1, 2, 64, 1000, 128), 0.5, 2, 12), ((2, 2, 2, 40, 64), 0.5, 4, 0), ((1, 2, 5, 9, 64), 0.5, 5, 16),
)  # fmt: skip
PROBABILITIES = (0.1, 0.2, 0.3, 1 / 3, 0.4, 0.0625, 0.9, 0.05, 0.01, 0.001, 0.0001, 0.6180339, 0.99, 0.123456789)


def record_masks():
    entries = []
    for shape, p, seed, begin in MASKS:
        kept = cudnn_mask(shape, p, seed, begin)
        wrong = int((kept != (cudnn_numbers(shape, seed, begin) <= 65536 * (1 - p))).sum())
        entries.append({"shape": shape, "p": p, "seed": seed, "begin": begin, "mask": digest(np.packbits(kept)), "wrong": wrong})
    numbers = cudnn_numbers((1, 16, 4096, 64, 64), 17, 0)
    for p in PROBABILITIES:
        kept = cudnn_mask((1, 16, 4096, 64, 64), p, 17, 0)
        most, least = int(numbers[kept].max()), int(numbers[~kept].min()) if not kept.all() else 65536
        entries.append({"p": p, "most kept": most, "least dropped": least, "share": float(kept.mean())})
    return entries


# ---- cuDNN with one query


ONE_QUERY = (
    (4, 8, 201, 64), (4, 8, 256, 64), (4, 8, 257, 64), (4, 8, 300, 64), (4, 8, 512, 64), (4, 8, 700, 128), (1, 8, 700, 128),
    (1, 2, 1500, 64), (4, 8, 300, 32), (4, 8, 300, 256), (4, 8, 300, 96),
)  # fmt: skip
TINY = 0.9 * 2.0**-24  # a weight that is lost beside 1, but whose sums are not


def one_query_sums(shape):
    """Log-sum-exps of one large weight, at each key in turn, and of tiny ones: they say which of these were added before the large one."""
    b, h, sk, d = shape
    root, found = d**0.5, []
    q = torch.zeros((b, h, 1, d), device=DEVICE, dtype=torch.float16)
    q[..., 0] = 1
    low = torch.tensor(math.log(TINY) * root, dtype=torch.float16)
    v = torch.zeros((b, h, sk, d), device=DEVICE, dtype=torch.float16)
    for first in range(0, sk, b * h):
        k = torch.zeros((b, h, sk, d), device=DEVICE, dtype=torch.float16)
        k[..., 0] = low
        numbers = torch.arange(first, min(first + b * h, sk), device=DEVICE)
        k.view(b * h, sk, d)[torch.arange(len(numbers), device=DEVICE), numbers, 0] = 0
        lse = RUN["cudnn"](q, k, v, None, 0.0, False)[1]
        found.append(raw(lse.float()).view(np.float32)[: len(numbers)])
    return np.concatenate(found)


def one_query_values(shape, firsts):
    """Results of equal weights and of values of 1, but 2^60 at one key and -2^60 at another, by columns: the values lost beside them."""
    b, h, sk, d = shape
    rows = []
    for i in (i for i in firsts if i < sk):
        row = []
        for first in range(0, sk, d):
            part = torch.arange(first, min(first + d, sk), device=DEVICE)
            v = torch.ones((b, h, sk, d), device=DEVICE, dtype=torch.bfloat16)
            v[:, :, i] = 2.0**60
            v[:, :, part, torch.arange(len(part), device=DEVICE)] = -(2.0**60)
            q, k = (torch.zeros(n, device=DEVICE, dtype=torch.bfloat16) for n in ((b, h, 1, d), (b, h, sk, d)))
            row.append(RUN["cudnn"](q, k, v, None, 0.0, False)[0].float()[0, 0, 0, : len(part)].cpu().numpy() * sk)
        rows.append(np.concatenate(row))
    return np.stack(rows).astype(np.float32)


def record_one_query(shape, kept):
    b, h, sk, d = shape
    kept[f"sums{shape}"] = one_query_sums(shape)
    kept[f"values{shape}"] = one_query_values(shape, (0, 1, 8, 16, 32, 64, 130, 200, 256))
    q, k, v = normals(f"one{shape}", "bfloat16", (b, h, 1, d), (b, h, sk, d), (b, h, sk, d))
    entry = {"kernels": kernel_names(lambda: RUN["cudnn"](q, k, v, None, 0.0, False))}
    for dtype in ("bfloat16", "float16"):
        q, k, v = normals(f"one{shape}", dtype, (b, h, 1, d), (b, h, sk, d), (b, h, sk, d))
        out = RUN["cudnn"](q, k, v, None, 0.0, False)
        entry[dtype] = keep(f"one{shape}{dtype}", {"o": out[0], "lse": out[1]}, kept, 4096)
        runs = [RUN["cudnn"](q, k, v, None, 0.0, False) for _ in range(20)]
        entry[f"{dtype} distinct"] = [len({digest(raw(run[i])) for run in runs}) for i in (0, 1)]
    return entry


def main(out, first, parts):
    kept, entries = {}, {}
    warnings.simplefilter("ignore")
    if DEVICE == "cuda":
        torch.cuda.init()

    def attempt(part, label, run):
        if time.time() - START > LIMIT:
            return
        try:
            entries[part].append({"case": label} | run())
        except (RuntimeError, NotImplementedError, ValueError) as error:
            entries[part].append({"case": label, "error": f"{type(error).__name__}: {str(error)[:160]}"})

    seeds = range(first, first + 400)
    work = {
        "dropout": [("masks", lambda: {"found": record_masks()})],
        "choice": [(seed, lambda s=seed: record_choice(s)) for seed in seeds],
        "gradients": [(case, lambda c=case: record_gradient(c, first, kept)) for case in gradient_cases()],
        "drawn": [(draw_gradient(seed), lambda s=seed: record_gradient(draw_gradient(s), s, kept)) for seed in seeds[:60]],
        "one query": [(shape, lambda s=shape: record_one_query(s, kept)) for shape in ONE_QUERY],
        "calls": [(seed, lambda s=seed: record_call(s, kept)) for seed in seeds[:200]],
    }
    for part in parts:
        entries[part] = []
        for label, run in work[part]:
            attempt(part, label, run)
        np.savez_compressed(f"{out}/attention_calls.npz", **kept)
        with open(f"{out}/attention_calls.json", "w") as file:
            json.dump(entries, file)
        errors = sum("error" in e for e in entries[part])
        print(part, len(entries[part]), "errors", errors, torch.__version__, round(time.time() - START, 1), "s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
