"""What cuBLASLt proposes for products of PyTorch: dtype, memory order, bias and batch; many shapes, nothing launched.

    SURVEY=more python tests/gpu_runs/torch_proposals.py OUT SECONDS

writes OUT/proposals.npz. The shapes are drawn by seeds, as in `shapes`, so that the file has only the number of each choice.
`benchmarks/torch_product_rules.py` fits trees on them.
"""

import ctypes
import json
import multiprocessing as mp
import os
import sys
import time
import zlib
from pathlib import Path

import numpy as np

FIELDS = (
    ("algorithm", 0, 4),
    ("tile", 1, 4),
    ("split_k", 2, 4),
    ("scheme", 3, 4),
    ("custom", 5, 4),
    ("stages", 6, 4),
    ("inner", 7, 2),
    ("cluster", 8, 2),
)
TYPES = {"f32": 0, "f16": 2, "bf16": 14}
ALL = [
    (dt, layout, bias, batch)
    for dt in ("f32", "bf16", "f16")
    for layout, bias, batch in (("rr", 0, 0), ("rc", 0, 0), ("cr", 0, 0), ("rc", 1, 0), ("rr", 1, 0), ("rr", 0, 1), ("rc", 0, 1))
]
SEED = os.environ.get("SURVEY", "")  # "": the first survey, of all forms
COUNTS = {"": 64000, "more": 112000}  # shapes of each form that are drawn; time bounds those that are asked about
FORMS = ALL if not SEED else [form for form in ALL if form[2] or (form[0] == "f32" and not form[3])]
MODEL = [
    64,
    80,
    96,
    128,
    192,
    256,
    320,
    384,
    512,
    576,
    640,
    768,
    896,
    1024,
    1152,
    1280,
    1536,
    1792,
    2048,
    2304,
    2560,
    2816,
    3072,
    3584,
    4096,
    4608,
    4864,
    5120,
    5632,
    6144,
    7168,
    8192,
    8960,
    9728,
    11008,
    12288,
    13824,
    14336,
    16384,
]


def form_name(form):
    dt, layout, bias, batch = form
    return f"{dt}-{layout}{'-bias' if bias else ''}{'-batch' if batch else ''}"


def shapes(form, count):
    """int32 [count, 4]: M, K, N, batch. A third of models' sizes, a third in multiples of 8, a third of any; M is seldom a multiple."""
    _, layout, _, batch = form
    r = np.random.Generator(np.random.PCG64(zlib.crc32(("proposals" + SEED + form_name(form)).encode())))
    out = np.zeros((count, 4), np.int32)
    kinds = r.integers(0, 4, count)
    logs = np.exp2(r.uniform(0, 1, (count, 3)) * np.array([11.6, 11.0, 11.0]) + np.array([0, 3.0, 3.0]))
    small = r.integers(1, 65, count)
    model = np.array(MODEL)[r.integers(0, len(MODEL), (count, 3))]
    few = r.random(count)
    for i in range(count):
        m, k, n = (int(v) for v in np.ceil(logs[i]))
        if kinds[i] < 2:
            k, n = int(model[i, 0]), int(model[i, 1])
            if few[i] < 0.35:
                m = int(small[i])
            elif few[i] < 0.5:
                m = int(model[i, 2])
        elif kinds[i] == 2:
            k, n = -(-k // 8) * 8, -(-n // 8) * 8
            if few[i] < 0.3:
                m = int(small[i])
        if layout == "cr" and few[i] < 0.7:
            m, k = k, m  # weight gradients: K is the number of tokens
        if batch:  # attention's: one of K and N is the head's size
            if few[i] < 0.6:
                head = (32, 64, 64, 80, 96, 128, 128, 256)[int(small[i]) % 8]
                tokens = max(1, m)
                if small[i] % 2:
                    k, n = head, (tokens if few[i] < 0.4 else n)
                else:
                    n, k = head, (tokens if few[i] < 0.4 else k)
            out[i] = m, min(k, 8192), min(n, 8192), (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)[int(logs[i, 0] * 7919) % 12]
        else:
            out[i] = m, k, n, 1
    return out


class Result(ctypes.Structure):
    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def library():
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublasLt.so" in line:
            return ctypes.CDLL(line.split()[-1])
    return ctypes.CDLL("libcublasLt.so.13")


class Asker:
    def __init__(self, lt):
        self.lt, self.handle = lt, ctypes.c_void_p()
        assert lt.cublasLtCreate(ctypes.byref(self.handle)) == 0
        self.descs, self.pref = {}, ctypes.c_void_p()
        assert lt.cublasLtMatmulPreferenceCreate(ctypes.byref(self.pref)) == 0
        self.workspace(32 << 20)
        for a in (5, 6, 7, 8):
            v = ctypes.c_uint32(256)
            lt.cublasLtMatmulPreferenceSetAttribute(self.pref, a, ctypes.byref(v), ctypes.c_size_t(4))

    def workspace(self, size):
        v = ctypes.c_uint64(size)
        self.lt.cublasLtMatmulPreferenceSetAttribute(self.pref, 1, ctypes.byref(v), ctypes.c_size_t(8))

    def desc(self, form):
        if form not in self.descs:
            d, (_dt, layout, bias, _) = ctypes.c_void_p(), form
            assert self.lt.cublasLtMatmulDescCreate(ctypes.byref(d), 68, 0) == 0
            for attribute, plain in ((3, layout[1] == "r"), (4, layout[0] == "r")):
                v = ctypes.c_int32(0 if plain else 1)
                self.lt.cublasLtMatmulDescSetAttribute(d, attribute, ctypes.byref(v), ctypes.c_size_t(4))
            if bias:
                v = ctypes.c_uint32(4)
                self.lt.cublasLtMatmulDescSetAttribute(d, 7, ctypes.byref(v), ctypes.c_size_t(4))
                p = ctypes.c_void_p(1 << 20)
                self.lt.cublasLtMatmulDescSetAttribute(d, 8, ctypes.byref(p), ctypes.c_size_t(8))
            self.descs[form] = d
        return self.descs[form]

    def matrix(self, dt, rows, cols, batch):
        x = ctypes.c_void_p()
        self.lt.cublasLtMatrixLayoutCreate(ctypes.byref(x), TYPES[dt], ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(rows))
        if batch > 1:
            v = ctypes.c_int32(batch)
            self.lt.cublasLtMatrixLayoutSetAttribute(x, 5, ctypes.byref(v), ctypes.c_size_t(4))
            s = ctypes.c_int64(rows * cols)
            self.lt.cublasLtMatrixLayoutSetAttribute(x, 6, ctypes.byref(s), ctypes.c_size_t(8))
        return x

    def ask(self, form, m, k, n, batch):
        dt, layout, bias, _ = form
        d = self.desc(form)
        lt = self.lt
        self.workspace(1 << 20 if bias else 32 << 20)  # PyTorch's for cuBLASLt, and for cuBLAS on Hopper
        first = self.matrix(dt, *((n, k) if layout[1] == "r" else (k, n)), batch)
        second = self.matrix(dt, *((k, m) if layout[0] == "r" else (m, k)), batch)
        result = self.matrix(dt, n, m, batch)
        answer, count = Result(), ctypes.c_int()
        status = lt.cublasLtMatmulAlgoGetHeuristic(
            self.handle, d, first, second, result, result, self.pref, 1, ctypes.byref(answer), ctypes.byref(count)
        )
        for x in (first, second, result):
            lt.cublasLtMatrixLayoutDestroy(x)
        if status or not count.value or answer.state:
            return (-1, status, count.value, 0, 0, 0, 0, 0)
        out = []
        for _, attribute, size in FIELDS:
            v, w = ctypes.c_uint32(0), ctypes.c_size_t()
            lt.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(answer.algo), attribute, ctypes.byref(v), ctypes.c_size_t(size), ctypes.byref(w)
            )
            out.append(int(v.value))
        return tuple(out)


def work(part, parts, count, until, known, queue):
    asker, answers = Asker(library()), {}
    for form in FORMS:
        name = form_name(form)
        mine = shapes(form, count)[part::parts]
        answers[name] = [mine, []]
    answers["known"] = [asker.ask(tuple(form), *s) for form, s in known[part::parts]]
    step = 250
    for start in range(0, 1 << 30, step):  # every form gets as many
        if time.time() > until or start >= max(len(answers[form_name(form)][0]) for form in FORMS):
            break
        for form in FORMS:
            every, got = answers[form_name(form)]
            got += [asker.ask(form, *map(int, row)) for row in every[start : start + step]]
    queue.put((part, {name: (v if name == "known" else v[1]) for name, v in answers.items()}))


def known_questions(path):
    """The shapes of a run of products by name, and of a fixed list."""
    listed = [tuple(s) for s in json.loads(path.read_text())] if path.exists() else []
    return [(form, (m, k, n, batch if form[3] else 1)) for m, k, n, batch in listed for form in FORMS]


def main(out, seconds, parts=16):
    count = COUNTS[SEED]
    until = time.time() + seconds
    known = known_questions(Path(__file__).with_name("known_shapes.json"))
    context = mp.get_context("spawn")
    queue = context.Queue()
    procs = [context.Process(target=work, args=(p, parts, count, until, known, queue)) for p in range(parts)]
    for p in procs:
        p.start()
    got = dict(queue.get(timeout=seconds + 60) for _ in procs)
    for p in procs:
        p.join(5)
    table, keep = {}, {}
    index = lambda row: table.setdefault(row, len(table))
    for form in FORMS:
        name = form_name(form)
        least = min(len(got[p][name]) for p in range(parts))
        rows = np.zeros((least, parts), np.int32)
        for p in range(parts):
            rows[:, p] = [index(row) for row in got[p][name][:least]]
        keep[name] = rows.reshape(-1).astype(np.uint16)  # i-th of `shapes`, in order
    answers = [None] * len(known)
    for p in range(parts):
        answers[p::parts] = got[p]["known"]
    keep["known"] = np.array([index(row) for row in answers], np.uint16)
    keep["choices"] = np.array(list(table), np.int64)
    np.savez_compressed(out + "/proposals.npz", **keep)
    print({name: len(values) for name, values in keep.items()})


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
