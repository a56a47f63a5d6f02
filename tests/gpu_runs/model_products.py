"""Products in 16 bits of layers of public models: what cuBLASLt proposes over the number of tokens, and what PyTorch launches and computes.

    python tests/gpu_runs/model_products.py OUT SECONDS [PROCESSES]

A curve is a layer in one use: dtype, memory order, bias, and two of the sizes; the third is the number of tokens. Each of PROCESSES asks
cuBLASLt's heuristic about its curves and launches nothing: OUT/curves_PHASE_PART.npz. This process launches products drawn from the curves,
with words of some of their outputs, and every layer's product of one token: OUT/launches.jsonl.
`benchmarks/torch_product_proposals.py` makes the package's table from the curves and holds it to the launches.
"""

import ctypes
import json
import multiprocessing as mp
import os
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np

START = time.time()

# ---- layers of public models

DECODERS = {  # width, width of q, of k and v, of the feed-forward, vocabulary
    "Llama 2 7B": (4096, 4096, 4096, 11008, 32000), "Llama 3 8B": (4096, 4096, 1024, 14336, 128256),
    "Qwen3 0.6B": (1024, 2048, 1024, 3072, 151936), "Qwen3 8B": (4096, 4096, 1024, 12288, 151936),
    "Llama 3.2 1B": (2048, 2048, 512, 8192, 128256), "Llama 3.2 3B": (3072, 3072, 1024, 8192, 128256),
    "Qwen2.5 0.5B": (896, 896, 128, 4864, 151936), "Qwen2.5 1.5B": (1536, 1536, 256, 8960, 151936),
    "Qwen2.5 3B": (2048, 2048, 256, 11008, 151936), "Qwen2.5 7B": (3584, 3584, 512, 18944, 152064),
    "Qwen3 1.7B": (2048, 2048, 1024, 6144, 151936), "Qwen3 4B": (2560, 4096, 1024, 9728, 151936),
    "Mistral 7B": (4096, 4096, 1024, 14336, 32768), "Llama 2 13B": (5120, 5120, 5120, 13824, 32000),
    "TinyLlama 1.1B": (2048, 2048, 256, 5632, 32000), "Gemma 3 270M": (640, 1024, 256, 2048, 262144),
    "Gemma 3 1B": (1152, 1024, 256, 6912, 262144), "Gemma 3 4B": (2560, 2048, 1024, 10240, 262208),
    "SmolLM2 135M": (576, 576, 192, 1536, 49152), "SmolLM2 360M": (960, 960, 320, 2560, 49152),
    "SmolLM2 1.7B": (2048, 2048, 2048, 8192, 49152), "Gemma 2B": (2048, 2048, 256, 16384, 256000),
    "Gemma 2 2B": (2304, 2048, 1024, 9216, 256000), "Phi-2": (2560, 2560, 2560, 10240, 51200), "Phi-1.5": (2048, 2048, 2048, 8192, 51200),
    "OLMo 1B": (2048, 2048, 2048, 8192, 50304), "OLMo 2 7B": (4096, 4096, 4096, 11008, 100352),
    "OLMo 2 1B": (2048, 2048, 2048, 8192, 100352), "Phi-3 mini": (3072, 3072, 3072, 8192, 32064),
    "Phi-4 mini": (3072, 3072, 1024, 8192, 200064), "Phi-4": (5120, 5120, 1280, 17920, 100352),
    "Qwen3 14B": (5120, 5120, 1024, 17408, 151936), "Qwen2.5 14B": (5120, 5120, 1024, 13824, 152064),
    "Gemma 7B": (3072, 4096, 4096, 24576, 256000), "Gemma 2 9B": (3584, 4096, 2048, 14336, 256000),
    "Gemma 3 12B": (3840, 4096, 2048, 15360, 262208), "Mistral Nemo": (5120, 4096, 1024, 14336, 131072),
    "Mistral Small 24B": (5120, 4096, 1024, 32768, 131072), "Qwen2.5 32B": (5120, 5120, 1024, 27648, 152064),
    "Qwen3 32B": (5120, 8192, 1024, 25600, 151936), "Llama 3 70B": (8192, 8192, 1024, 28672, 128256),
    "Qwen2.5 72B": (8192, 8192, 1024, 29568, 152064), "Gemma 3 27B": (5376, 4096, 2048, 21504, 262208),
    "Gemma 2 27B": (4608, 4096, 2048, 36864, 256000), "Mixtral 8x22B": (6144, 6144, 1024, 16384, 32768),
    "OLMo 2 13B": (5120, 5120, 5120, 13824, 100352), "DeepSeek LLM 7B": (4096, 4096, 4096, 11008, 102400),
    "DeepSeek LLM 67B": (8192, 8192, 1024, 22016, 102400), "DeepSeek Coder 1.3B": (2048, 2048, 2048, 5504, 32256),
    "DeepSeek Coder 33B": (7168, 7168, 1024, 19200, 32256), "Falcon 7B": (4544, 4544, 64, 18176, 65024),
}  # fmt: skip
OTHERS = (  # outputs and inputs of layers of mixtures of experts, and of latent attention
    (768, 2048), (2048, 768), (128, 2048), (4096, 2048), (2048, 4096), (512, 2048), (8, 4096), (1024, 2048), (2048, 1024), (64, 2048),
    (1408, 2048), (2048, 1408), (2816, 2048), (2048, 2816), (10944, 2048), (2048, 10944), (3072, 2048), (576, 2048), (4096, 512),
    (1536, 4096), (4096, 1536), (8192, 4096), (4096, 8192), (512, 4096), (128, 4096), (8, 6144), (1536, 7168), (24576, 1536), (576, 7168),
    (32768, 512), (7168, 16384), (18432, 7168), (7168, 18432), (2048, 7168), (7168, 2048), (256, 7168), (129280, 7168),
    (5760, 2880), (2880, 2880), (4096, 2880), (512, 2880), (2880, 4096), (201088, 2880), (32, 2880), (60, 2048), (1, 4096), (2, 768),
)  # fmt: skip
ENCODERS = {  # width, feed-forward, other outputs; their layers have a bias
    "ViT tiny": (192, 768, (1000,)), "ViT small, MiniLM, Whisper tiny": (384, 1536, (1000, 51865)),
    "Whisper base": (512, 2048, (51865, 512)), "BERT base, ViT base": (768, 3072, (1000, 2, 30522, 50265, 50272, 768, 2304)),
    "BERT large, ViT large": (1024, 4096, (1000, 30522, 50265)),
    "Whisper large, ViT huge": (1280, 5120, (1000, 51866)), "SigLIP": (1152, 4304, ()), "DINOv2 giant": (1536, 4096, ()),
    "Pythia 1.4B, OPT 1.3B": (2048, 8192, (50304, 50272)), "Pythia 2.8B": (2560, 10240, (50304,)), "OPT 6.7B": (4096, 16384, (50272,)),
}  # fmt: skip
T5 = ((512, 2048, 512), (768, 3072, 768), (768, 2048, 768), (1024, 4096, 1024), (1024, 2816, 1024), (1024, 16384, 4096),
      (2048, 5120, 2048), (4096, 10240, 4096))  # width, feed-forward, width of q  # fmt: skip
GPT2 = (768, 1024, 1280, 1600)
TAIL = {"Qwen2.5": ("q", "kv", "qkv"), "Phi-1": "all", "Phi-2": "all"}  # decoders whose layers have a bias, by the beginning of their name


def decoder_layers(name):
    """(outputs, inputs, True for a bias) of a decoder's layers, of fused ones too."""
    width, q, kv, wide, vocabulary = DECODERS[name]
    biased = next((parts for start, parts in TAIL.items() if name.startswith(start)), ())
    parts = {"q": (q, width), "kv": (kv, width), "o": (width, q), "up": (wide, width), "down": (width, wide), "head": (vocabulary, width),
             "qkv": (q + 2 * kv, width), "gate up": (2 * wide, width)}  # fmt: skip
    return [(*sizes, biased == "all" or part in biased) for part, sizes in parts.items()]


def layers():
    """(outputs, inputs, layout, bias) of every layer, each once."""
    found = [(n, k, "rc", bias) for name in DECODERS for n, k, bias in decoder_layers(name)]
    for width, wide, others in ENCODERS.values():
        sizes = ((width, width), (3 * width, width), (wide, width), (width, wide), *((other, width) for other in others))
        found += [(n, k, "rc", bias) for n, k in sizes for bias in (True, False)]
    for width in GPT2:
        found += [(n, k, "rr", True) for n, k in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))]
        found.append((50257, width, "rc", False))
    for width, wide, q in T5:
        found += [(n, k, "rc", False) for n, k in ((q, width), (width, q), (wide, width), (width, wide), (32128, width))]
    return list(dict.fromkeys([*found, *((n, k, "rc", False) for n, k in OTHERS)]))


def curves():
    """(layout, bias, x, y) of every use of a layer: forwards (N, K), gradients of the input (N, K), gradients of the weight (M, N)."""
    forward = [(layout, bias, n, k) for n, k, layout, bias in layers()]
    inputs = [("rr" if layout == "rc" else "rc", False, k, n) for n, k, layout, _ in layers()]
    weights = [("cr", False, *((n, k) if layout == "rc" else (k, n))) for n, k, layout, _ in layers()]
    return list(dict.fromkeys([*forward, *inputs, *weights]))


def product(curve, dtype, tokens):
    """(dtype, m, k, n, layout, addend)."""
    layout, bias, x, y = curve
    m, k, n = (x, tokens, y) if layout == "cr" else (tokens, y, x)
    return dtype, m, k, n, layout, "columns" if bias else None


# ---- what cuBLASLt proposes

FIELDS = (("algorithm", 0, 4), ("tile", 1, 4), ("split_k", 2, 4), ("scheme", 3, 4), ("custom", 5, 4), ("stages", 6, 4), ("inner", 7, 2),
          ("cluster", 8, 2))  # fmt: skip
TYPES, DTYPES = {"float16": 2, "bfloat16": 14}, ("bfloat16", "float16")
COLUMNS, LT_WORKSPACE, WORKSPACE = 3, 1 << 20, 32 << 20  # PyTorch's workspaces for cuBLASLt, and for cuBLAS on Hopper
NVJET = 66
GRID = (*range(1, 17), *range(24, 257, 8), *range(272, 513, 16), *range(544, 1025, 32), *range(1088, 2049, 64), *range(2176, 4097, 128),
        *range(4608, 16385, 512))  # fmt: skip
SHORT_GRID = (*range(1, 10), 16, 17, 32, 33, 64, 65, 128, 129, 256, 512, 1024, 2048, 4096, 8192, 16384)
LONG_K = 42 * 64  # from which nvjet may cut K
MOST_OUTPUTS = 153600  # outputs for each of the slices that K may have, above which H200's nvjet was never seen to cut it
DENSE = 1024


def may_be_cut(m, n, k, slack=1):
    """True where nvjet may cut K as far as is known, with some slack."""
    return k >= LONG_K and m * n <= slack * MOST_OUTPUTS * max(1, (-(-k // 64) - 1) // 20)


def grid(curve):
    """Return the numbers of tokens to ask about before changes are bisected, and those to ask about each."""
    layout, _, x, y = curve
    aligned = not (y % 8 or x % 8)
    if layout == "cr":
        if not aligned:
            return GRID, range(1, DENSE + 1)
        every = [k for k in range(LONG_K, GRID[-1] + 1, 8) if may_be_cut(x, y, k, 4)]
        return (*SHORT_GRID[:-3], *range(2048, GRID[-1] + 1, 2048)), every
    if not aligned:
        return GRID, range(1, 2 * DENSE + 1)
    if y < LONG_K - 64:
        return SHORT_GRID, ()
    most = 4 * MOST_OUTPUTS * max(1, (-(-y // 64) - 1) // 20) // x
    return GRID, range(1, max(64, min(4 * DENSE, most)) + 1)


class Result(ctypes.Structure):
    _fields_ = (("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
                ("reserved", ctypes.c_int * 4))  # fmt: skip


class Curve:
    """One curve's question to cuBLASLt, of which the number of tokens alone changes."""

    def __init__(self, lt, handle, curve, dtype, alignment=256):
        self.lt, self.handle, self.made = lt, handle, []
        layout, bias, _, _ = curve
        _, m, k, n, _, _ = product(curve, dtype, 1)
        make = lambda name, *arguments: self.make(name, *arguments)
        self.desc, self.preference = make("MatmulDesc", 68, 0), make("MatmulPreference")
        for attribute, plain in ((3, layout[1] == "r"), (4, layout[0] == "r")):
            self.set("MatmulDesc", self.desc, attribute, ctypes.c_int32(0 if plain else 1))
        if bias:
            self.set("MatmulDesc", self.desc, 7, ctypes.c_uint32(4))
            self.set("MatmulDesc", self.desc, 8, ctypes.c_void_p(1 << 20))
        self.set("MatmulPreference", self.preference, 1, ctypes.c_uint64(LT_WORKSPACE if bias else WORKSPACE))
        for attribute in (5, 6, 7, 8):
            self.set("MatmulPreference", self.preference, attribute, ctypes.c_uint32(alignment))
        matrix = lambda rows, columns: make(
            "MatrixLayout", TYPES[dtype], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        )
        self.first = matrix(*((n, k) if layout[1] == "r" else (k, n)))
        self.second = matrix(*((k, m) if layout[0] == "r" else (m, k)))
        self.result = matrix(n, m)
        self.along = (self.first, self.second) if layout == "cr" else (self.second, self.result)
        self.answer, self.count = Result(), ctypes.c_int()

    def make(self, name, *arguments):
        made = ctypes.c_void_p()
        assert getattr(self.lt, f"cublasLt{name}Create")(ctypes.byref(made), *arguments) == 0
        self.made.append((name, made))
        return made

    def set(self, name, handle, attribute, value):
        size = ctypes.c_size_t(ctypes.sizeof(value))
        status = getattr(self.lt, f"cublasLt{name}SetAttribute")(handle, attribute, ctypes.byref(value), size)
        assert status == 0, (name, attribute, status)

    def ask(self, tokens):
        """The numbers of FIELDS, and how many waves, in thousandths."""
        for matrix in self.along:
            self.set("MatrixLayout", matrix, COLUMNS, ctypes.c_uint64(tokens))
        status = self.lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.desc, self.first, self.second, self.result, self.result, self.preference, 1, ctypes.byref(self.answer),
            ctypes.byref(self.count),
        )  # fmt: skip
        if status or not self.count.value or self.answer.state:
            return (-1, status, self.count.value, 0, 0, 0, 0, 0)
        return self.read()

    def read(self, known={}):  # noqa: B006
        key = bytes(self.answer.algo)
        if key not in known:
            value, written, row = ctypes.c_uint32(0), ctypes.c_size_t(), []
            for _, attribute, size in FIELDS:
                value.value = 0
                self.lt.cublasLtMatmulAlgoConfigGetAttribute(
                    ctypes.byref(self.answer.algo), attribute, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
                )
                row.append(int(value.value))
            known[key] = tuple(row)
        return known[key]

    def close(self):
        for name, made in self.made:
            getattr(self.lt, f"cublasLt{name}Destroy")(made)


def order_class(row):
    """What of a choice the order depends on, at most."""
    algorithm, tile, split, scheme, custom, stages, *_ = row
    return (algorithm, split, scheme) if algorithm == NVJET else (algorithm, tile, split, scheme, custom, stages)


def library():
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt.so" in line}
    return ctypes.CDLL(min(paths))


class Survey:
    """One process's answers."""

    def __init__(self, out, part, lt):
        self.out, self.part, self.lt, self.handle = out, part, lt, ctypes.c_void_p()
        assert lt.cublasLtCreate(ctypes.byref(self.handle)) == 0
        self.choices, self.rows = {}, {}

    def save(self, phase):
        """Write the answers since the last time: numbers of curves, dtypes, tokens and choices."""
        rows = np.array([(*key, tokens, self.choices.setdefault(answer, len(self.choices)))
                         for key, answers in self.rows.items() for tokens, answer in sorted(answers.items())], np.int32)  # fmt: skip
        choices = np.array(list(self.choices), np.int64)
        np.savez_compressed(f"{self.out}/curves_{phase}_{self.part}.npz", rows=rows.reshape(-1, 4), choices=choices)

    def refine(self, question, answers, points):
        """Ask at these points, and between two that differ until they are neighbours."""
        points = sorted(points)
        for tokens in points:
            if tokens not in answers:
                answers[tokens] = question.ask(tokens)
        todo = list(pairwise(points))
        while todo:
            low, high = todo.pop()
            if high - low > 1 and order_class(answers[low]) != order_class(answers[high]):
                middle = (low + high) // 2
                if middle not in answers:
                    answers[middle] = question.ask(middle)
                todo += [(low, middle), (middle, high)]

    def first(self, every, until):
        for number, curve in every:
            for coded, dtype in enumerate(DTYPES):
                if time.time() > until:
                    return
                question = Curve(self.lt, self.handle, curve, dtype)
                self.rows[number, coded] = {}
                self.refine(question, self.rows[number, coded], grid(curve)[0])
                question.close()

    def expected(self, known, found, tokens):
        """True for an answer that both neighbours have, False for another one, None where the neighbours differ."""
        at = np.searchsorted(known, tokens)
        low, high = (order_class(found[known[i]]) for i in (at - 1, at))
        return None if low != high else order_class(found[tokens]) == low

    def dense(self, every, until):
        """Ask about each number of tokens where K may be cut. Returns how many between equal neighbours are equal, and are not."""
        news = [0, 0]
        for number, curve in every:
            for coded, dtype in enumerate(DTYPES):
                if time.time() > until or (number, coded) not in self.rows:
                    return news
                found, question = self.rows[number, coded], Curve(self.lt, self.handle, curve, dtype)
                known = sorted(found)
                for tokens in grid(curve)[1]:
                    if tokens not in found:
                        found[tokens] = question.ask(tokens)
                        same = self.expected(known, found, tokens)
                        if same is not None:
                            news[not same] += 1
                question.close()
        return news

    def spots(self, every, count, until):
        """Ask at drawn numbers of tokens. Returns how many between equal neighbours are equal, and are not; then those by alignment 16."""
        r, news, moved = np.random.Generator(np.random.PCG64(self.part)), [0, 0], [0, 0]
        for _ in range(count):
            number, curve = every[r.integers(len(every))]
            coded, tokens = int(r.integers(2)), int(2 ** r.uniform(1, 14))
            found = self.rows.get((number, coded))
            if time.time() > until or found is None:
                break
            question = Curve(self.lt, self.handle, curve, DTYPES[coded])
            if tokens not in found:
                known = sorted(found)
                found[tokens] = question.ask(tokens)
                same = self.expected(known, found, tokens)
                if same is not None:
                    news[not same] += 1
            question.close()
            question = Curve(self.lt, self.handle, curve, DTYPES[coded], alignment=16)
            moved[order_class(question.ask(tokens)) != order_class(found[tokens])] += 1
            question.close()
        return news, moved


LONG = (2816, 2880, 3072, 3584, 4096, 4608, 4864, 5120, 5376, 5632, 6144, 6912, 7168, 8192, 8960, 9216, 9728, 10240, 11008, 12288, 13824,
        14336, 15360, 16384, 17408, 18944, 20480, 21504, 24576, 25600, 27648, 28672)  # fmt: skip


FORMS = [(layout, bias, dtype) for layout, bias in (("rc", 0), ("rr", 0), ("cr", 0), ("rc", 1), ("rr", 1)) for dtype in DTYPES]


def random_shapes(form, block):
    """int64 [shapes, 3]: M, K and N where K may be cut, whether or not a layer has them; a block for each number."""
    layout = FORMS[form][0]
    u = np.random.Generator(np.random.PCG64(zlib.crc32(f"model products, {FORMS[form]}, {block}".encode()))).random((2048, 6))
    unit = np.array((8, 64, 64, 128, 128))[(5 * u[:, 0]).astype(int)]
    k = 8 * np.ceil(2688 * 8 ** (2 * u[:, 1] - 1).clip(0) / 8).astype(np.int64)
    k = np.where(u[:, 1] < 0.5, np.array(LONG)[(2 * len(LONG) * u[:, 1].clip(0, 0.4999)).astype(int)], k)
    n = unit * np.ceil(2 ** (3 + 12.5 * u[:, 2]) / unit).astype(np.int64)
    m = np.ceil(2 ** (11.5 * u[:, 3])).astype(np.int64)
    m = np.where((u[:, 4] < 0.25) | (layout == "cr"), -(-m // 8) * 8, m)
    most = np.maximum(1, (-(-k // 64) - 1) // 20)
    return np.stack([m, k, n], 1)[m * n <= 4 * MOST_OUTPUTS * most]


def ask_random(survey, form, until):
    """The numbers of the choices of the first shapes, and a row of numbers of the choices."""
    layout, bias, dtype = FORMS[form]
    numbers, block = [], 0
    while time.time() < until:
        for m, k, n in random_shapes(form, block).tolist():
            if time.time() > until:
                break
            curve, tokens = ((layout, bias, m, n), k) if layout == "cr" else ((layout, bias, n, k), m)
            question = Curve(survey.lt, survey.handle, curve, dtype)
            numbers.append(survey.choices.setdefault(question.ask(tokens), len(survey.choices)))
            question.close()
        block += 1
    return np.array(numbers, np.uint16), np.array(list(survey.choices), np.int64)


def work(out, part, parts, until):
    try:
        survey = Survey(out, part, library())
        every = list(enumerate(curves()))[part::parts]
        survey.first(every, until - 20)
        print(part, "first", len(survey.rows), sum(map(len, survey.rows.values())), time.time() - START, flush=True)
        news = survey.dense(every, until - 20)
        print(part, "dense: equal to equal neighbours, not", news, sum(map(len, survey.rows.values())), time.time() - START, flush=True)
        news, moved = survey.spots(every, 300, until - 18)
        print(part, "drawn: equal to equal neighbours, not", news, "by 16 bytes: equal, not", moved, time.time() - START, flush=True)
        survey.save("dense")
        form = part % len(FORMS)
        if part < len(FORMS):
            numbers, choices = ask_random(survey, form, until - 2)
            np.savez_compressed(f"{out}/random_{part}.npz", numbers=numbers, choices=choices)
            print(part, FORMS[form], "random", len(numbers), time.time() - START, flush=True)
    except Exception as error:
        print(part, "failed", repr(error), flush=True)
        raise


# ---- what PyTorch launches and computes

WORD_ROWS, WORD_COLUMNS = 4, 16
DRAWN = int(os.environ.get("DRAWN", "480"))
SEED = os.environ.get("SEED", "0")


def drawn_products():
    """Products drawn from the curves: a fifth with one token, the others with up to 1,024, or 16,384; then gradients of weights whose K,
    the tokens, may be cut and leaves a few products to the last tile."""
    r = np.random.Generator(np.random.PCG64(zlib.crc32(f"model products, words, {SEED}".encode())))
    every, found = curves(), {}
    forward = [curve for curve in every if curve[0] == "rc" or curve[1]]
    while len(found) < DRAWN:
        kind = r.random()
        curve = forward[r.integers(len(forward))] if kind < 0.6 else every[r.integers(len(every))]
        tokens = 1 if kind < 0.15 else int(np.ceil(2 ** r.uniform(0, 10 if kind < 0.95 else 14)))
        dtype = DTYPES[r.integers(2)]
        p = product(curve, dtype, max(tokens, 2) if curve[0] == "cr" else tokens)
        if p[1] * p[3] < 1 << 30 and max(p[1], p[3]) * p[2] < 1 << 30:
            found[p] = None
    cut = [curve for curve in every if curve[0] == "cr" and may_be_cut(curve[2], curve[3], 8192)]
    while len(found) < DRAWN * 9 // 8:
        tokens = 64 * int(r.integers(42, 129)) + int(r.integers(5))
        found[product(cut[r.integers(len(cut))], DTYPES[r.integers(2)], tokens)] = None
    return list(found)


def operands(p):
    """Numbers of rows and columns of the result, rows of A, columns of B, the bias there; every exact sum without the bias is 0.

    The terms cancel in pairs, so that a word is what the order of the sum rounds away.
    """
    _, m, k, n, _, addend = p
    r = np.random.Generator(np.random.PCG64(zlib.crc32(str(p).encode())))
    rows = np.sort(r.choice(m, min(m, WORD_ROWS), replace=False))
    columns = np.sort(r.choice(n, min(n, WORD_COLUMNS), replace=False))
    a = 8 * r.standard_normal((len(rows), k), np.float32)
    b = 8 * r.standard_normal((k, len(columns)), np.float32)
    one, other = r.permutation(k)[: k // 2 * 2].reshape(2, -1)
    a[:, other], b[other] = a[:, one], -b[one]
    if k % 2:
        last = np.setdiff1d(np.arange(k), np.concatenate([one, other]))
        a[:, last] = 0
    bias = r.standard_normal(len(columns)).astype(np.float32) / 256 if addend else None
    return rows, columns, a, b, bias


def profiled(torch, group, pools, with_words):
    """Kernels and words of each product."""
    from torch.profiler import ProfilerActivity, profile

    F = torch.nn.functional
    on_gpu = torch.cuda.is_available()
    dt = {"bfloat16": torch.bfloat16, "float16": torch.float16}

    def view(pool, rows, columns, order, dtype):
        flat = pools[pool][: rows * columns].view(dt[dtype])
        return flat.view(rows, columns) if order == "r" else flat.view(columns, rows).t()

    def call(p):
        dtype, m, k, n, layout, addend = p
        x, y = view(0, m, k, layout[0], dtype), view(1, k, n, layout[1], dtype)
        c = view(2, 1, n, "r", dtype)[0]
        if layout == "rc":
            return x, y, c, (lambda: F.linear(x, y.t(), c)) if addend else (lambda: F.linear(x, y.t()))
        return x, y, c, (lambda: torch.addmm(c, x, y)) if addend else (lambda: torch.mm(x, y))

    calls = [call(p) for p in group]
    for *_, f in calls:
        f()
    words = []
    mark = (lambda: torch.cuda._sleep(50)) if on_gpu else (lambda: None)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as prof:
        for p, (x, y, c, f) in zip(group, calls, strict=True):
            if with_words:
                rows, columns, a, b, bias = operands(p)
                at, across = (torch.tensor(v.tolist(), device=x.device) for v in (rows, columns))
                x[at], y[:, across] = (torch.from_numpy(v).to(x.device).to(x.dtype) for v in (a, b))
                if bias is not None:
                    c[across] = torch.from_numpy(bias).to(x.device).to(x.dtype)
            mark()
            result = f()
            mark()
            if with_words:
                words.append(result[at][:, across].contiguous().view(torch.int16).cpu().tolist())
                x[at], y[:, across] = 0, 0
                if bias is not None:
                    c[across] = 0
            del result
        if on_gpu:
            torch.cuda.synchronize()
    path = f"/tmp/trace_{os.getpid()}.json"
    prof.export_chrome_trace(path)
    events = [e for e in json.loads(Path(path).read_text())["traceEvents"] if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    found = []
    for event in sorted(events, key=lambda e: e["ts"]):
        if "spin_kernel" in event["name"]:
            found.append([])
        elif not found:
            continue
        elif event["cat"] == "kernel":
            found[-1].append([event["name"][:400], event["args"]["grid"], event["args"]["block"]])
        else:
            found[-1].append([event["cat"]])
    kernels = found[: 2 * len(group) : 2] if on_gpu else [[] for _ in group]
    return list(zip(kernels, words or [None] * len(group), strict=True))


def record(out, until, device):
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    sizes = (1 << 30, 3 << 29, 1 << 19) if device == "cuda" else (1 << 22,) * 3  # elements of A, of B, and of a bias
    pools = [torch.zeros(size, dtype=torch.int16, device=device) for size in sizes]
    if device == "cuda":
        drawn = drawn_products()
        single = [product(curve, dtype, 1) for curve in curves() if curve[0] == "rc" or curve[1] for dtype in ("bfloat16", "float16")]
    else:
        drawn = [("bfloat16", 5, 64, 48, "rc", "columns"), ("float16", 16, 99, 24, "cr", None), ("float16", 1, 64, 24, "rr", "columns")]
        single = [("bfloat16", 1, 64, 48, "rc", None)]
    with open(f"{out}/launches.jsonl", "w") as file:
        file.write(json.dumps({"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda, "seed": SEED}) + "\n")
        for todo, with_words, step in ((drawn, True, 24), (single, False, 48)):
            done = 0
            for start in range(0, len(todo), step):
                if time.time() > until:
                    break
                group = todo[start : start + step]
                for p, (kernels, words) in zip(group, profiled(torch, group, pools, with_words), strict=True):
                    file.write(json.dumps([p, kernels, words], separators=(",", ":")) + "\n")
                file.flush()
                done += len(group)
            print(name, done, "of", len(todo), "products", "with words" if with_words else "of one token", time.time() - START, flush=True)


def main(out, seconds, parts, worker=work):
    until = START + seconds
    if parts == 0:  # a try without a GPU
        record(out, until, "cpu")
        return
    context = mp.get_context("spawn")
    processes = [context.Process(target=worker, args=(out, part, parts, until), daemon=True) for part in range(parts)]
    for process in processes:
        process.start()
    try:
        record(out, until - 5, "cuda")
    except Exception as error:
        print("record failed", repr(error), flush=True)
    for process in processes:
        process.join(max(0.1, until + 6 - time.time()))
    print(subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 14)
