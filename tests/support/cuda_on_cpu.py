"""The kernels' own text, compiled for a CPU: `walk`, `tile` and `warp`, on NumPy arrays, wherever there is g++."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

from tcemu.arithmetic.kernels import source

MACHINE = Path(__file__).parent / "cuda_on_cpu" / "machine.cpp"
PARTS = {"walk": ("walk",), "tile": ("prepare", "tile")}
LAUNCHERS = {
    "walk": """
extern "C" void run_walk(int grid, const Shape *s, const ACode *a, const BCode *b, const CCode *c, const u8 *x, const u8 *y, DCode *d) {{
    launch(grid, ROWS * COLUMNS, [=] {{ walk(s, a, b, c, {scales} d); }});
}}
""",
    "prepare": """
extern "C" void run_prepare(int grid, const Shape *s, const ACode *a, const BCode *b, const u8 *x, const u8 *y, u8 *p, u8 *q) {{
    launch(grid, MOST_LINES, [=] {{ prepare(s, a, b, {scales} p, q); }});
}}
""",
    "tile": """
extern "C" void run_tile(int grid, const Shape *s, const ACode *a, const BCode *b, const u32 *c, const u8 *x, const u8 *y, const u8 *p,
                         const u8 *q, u32 *d) {{
    launch(grid, THREADS, [=] {{ tile(s, a, b, c, {scales} p, q, d); }});
}}
""",
    "warp": """
extern "C" void run_warp(int grid, const Sizes *s, const u32 *const *p, u32 *d) {{
    launch(grid, 32 * WARPS, [=] {{ warp(s, p[0], p[1], p[2], {more} d); }});
}}
""",
}


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def library(entry: str, text: str) -> ctypes.CDLL:
    machine, _, rest = text.partition(source.MACHINE_ENDS)
    assert machine
    scales = "x, y," if "#define SCALED 1" in rest else ""
    own = ["p[{}],"] * (("#define SPARSE 1" in rest) + 2 * bool(scales))
    more = " ".join([*own, "(const int *)p[{}],"] if own else []).format(*range(3, 7))
    rest = rest.replace("extern __shared__ __align__(16) u8 shared[];", "")
    whole = MACHINE.read_text() + rest + LAUNCHERS[entry].format(scales=scales, more=more)
    folder = Path(tempfile.gettempdir()) / "tcemu_cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    path = folder / f"{hashlib.sha256(whole.encode()).hexdigest()}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=folder, delete=False) as file:
            file.write(whole)
        options = ["-std=c++17", "-O1", "-mfma", "-frounding-math", "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]
        done = subprocess.run(["g++", *options, "-o", f"{file.name}.so", file.name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        Path(f"{file.name}.so").replace(path)
        Path(file.name).unlink()
    return ctypes.CDLL(str(path))


def run(entry, model, signature, a, b, c, scales=None):
    """D of codes [batch, M, K] and so on, as the kernels compute it; a batch of one serves all."""
    numbers = source.numbers(model, signature)
    tiles = source.tiling(model, signature) if entry == "tile" else None
    assert numbers is not None and (tiles is not None or entry == "walk")
    texts = {name: library(name, source.text(name, numbers, signature, model.result, tiles)) for name in PARTS[entry]}
    a, b, c = (np.ascontiguousarray(v, fmt.dtype) for v, fmt in ((a, signature.a), (b, signature.b), (c, model.result)))
    batch, m, n, k = *c.shape, a.shape[-1]
    share = 1 if scales is None else k // scales[0].shape[-1]
    shape = np.array([batch, m, n, k, len(a), len(b), share, source.limit(tiles, k) if tiles else 0], np.int32)
    x, y = (None, None) if scales is None else (np.ascontiguousarray(v, np.uint8) for v in scales)
    d = np.full(c.shape, 0xA5A5A5A5 & ((1 << signature.d.bits) - 1), signature.d.dtype)
    at = lambda v: None if v is None else v.ctypes.data_as(ctypes.c_void_p)  # noqa: E731
    if entry == "walk":
        texts[entry].run_walk(batch * -(-m // 16) * -(-n // 8), *map(at, (shape, a, b, c, x, y, d)))
        return d
    (rows, columns), bytes_of_line = tiles.lines, source.bytes_of_step(numbers.terms, tiles.wide)
    down, across, steps = -(-m // rows), -(-n // columns), k // numbers.terms
    sizes = (len(a) * down * steps, rows * bytes_of_line), (len(b) * across * steps, columns * bytes_of_line)
    p, q = (np.full(size, 0xA5, np.uint8) for size in sizes)
    texts["prepare"].run_prepare(len(p) + len(q), *map(at, (shape, a, b, x, y, p, q)))
    texts["tile"].run_tile(batch * down * across, *map(at, (shape, a, b, c, x, y, p, q, d)))
    return d


def run_warp(text, blocks, sizes, operands, d):
    """The words that `warp` writes to d, an array. operands: NumPy arrays, those that the text wants."""
    given = [np.ascontiguousarray(v) for v in operands]
    pointers = (ctypes.c_void_p * len(given))(*(v.ctypes.data for v in given))
    sizes = np.ascontiguousarray(sizes, np.int32)
    d.view(np.uint8)[...] = 0xA5
    library("warp", text).run_warp(blocks, ctypes.c_void_p(sizes.ctypes.data), pointers, ctypes.c_void_p(d.ctypes.data))
    return d
