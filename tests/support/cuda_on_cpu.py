"""The kernels' own text, compiled for a CPU wherever there is g++, and launched by the program that would launch them on a GPU."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.arithmetic.kernels import calls, cuda, elementwise, source, warp
from tcemu.arithmetic.kernels.launch import Route
from tcemu.fuzz import elements

MACHINE = Path(__file__).parent / "cuda_on_cpu" / "machine.cpp"
PARAMETERS = {  # types, in order; some are there where the text has them
    "walk": "Shape ACode BCode CCode SCALED BLOCK_SCALED DCode",
    "prepare": "Shape ACode BCode SCALED u8 u8",
    "tile": "Shape ACode BCode CCode SCALED BLOCK_SCALED u8 u8 DCode",
    "warp": "Sizes u32 u32 u32 SPARSE SCALED SELECTED u32",
    "quantize": "Places Source SCALES Target",
    "draw": "int Case u32 Code",
}
OPTIONAL = {"BLOCK_SCALED": "float float", "SCALED": "u8 u8", "SPARSE": "u32", "SELECTED": "int", "SCALES": "float"}


def compiler() -> str | None:
    return shutil.which("g++")


def assembled(whole: str, *options: str) -> Path:
    """C++ as a library, made once for all processes."""
    folder = Path(tempfile.gettempdir()) / "tcemu_cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    name = hashlib.sha256(" ".join((*options, whole)).encode()).hexdigest()
    path = folder / f"{name}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=folder, delete=False) as file:
            file.write(whole)
        flags = ["-std=c++17", "-O1", "-mfma", *options, "-fno-strict-aliasing", "-fPIC", "-shared", "-w"]
        done = subprocess.run(["g++", *flags, "-o", f"{file.name}.so", file.name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        Path(f"{file.name}.so").replace(path)
        Path(file.name).unlink()
    return path


@cache
def library(entry: str, text: str) -> ctypes.CDLL:
    machine, _, rest = text.partition(source.MACHINE_ENDS)
    assert machine
    rest = rest.replace("extern __shared__ __align__(16) u8 shared[];", "")
    types = PARAMETERS[entry]
    for name, own in OPTIONAL.items():
        types = types.replace(name, own if f"#define {name} 1" in rest else "")
    types = types.split()
    given = ", ".join(f"({one} *)p[{at}]" for at, one in enumerate(types))
    launcher = f'extern "C" void run(int grid, int threads, void **p) {{ launch(grid, threads, [=] {{ {entry}({given}); }}); }}'
    whole = MACHINE.read_text() + rest + launcher
    return ctypes.CDLL(str(assembled(whole, "-frounding-math")))


ROUTE = Route("sm", "90", "")
ONE_AT_A_TIME = Lock()  # the machine has one block, and one shared memory


def launch(entry, blocks, results, *operands):
    """In the place of `kernels.launch.launch`: the same kernels, the same operands, as a call back from the program."""

    def called(*given):
        given = [np.ascontiguousarray(v) for v in given]
        made = [np.full(one.shape, 0xA5A5A5A5 & np.iinfo(one.dtype).max, one.dtype) for one in wanted]
        pointers = (ctypes.c_void_p * (len(given) + len(made)))(*(v.ctypes.data for v in (*given, *made)))
        assert entry.shared_bytes <= ROUTE.shared_bytes
        with ONE_AT_A_TIME:
            library(entry.name, entry.text).run(blocks, entry.threads, pointers)
        return tuple(made)

    wanted = (results,) if isinstance(results, jax.ShapeDtypeStruct) else results
    return jax.pure_callback(called, wanted, *operands)


@contextmanager
def instead_of_a_gpu():
    """Within, `kernels.cuda` and `kernels.warp` have their kernels run here; quantisers and what is drawn too, on the platform "cpu"."""
    with (
        mock.patch.object(cuda, "launch", launch),
        mock.patch.object(warp, "launch", launch),
        mock.patch.object(elementwise, "launch", launch),
        mock.patch.object(elements, "launch", launch),
        mock.patch.object(cuda, "route", lambda: ROUTE),
        mock.patch.object(elementwise, "route", lambda: ROUTE),
        mock.patch.object(elementwise, "PLATFORM", "cpu"),
        mock.patch.object(calls, "_sharded", lambda call, alone: call),  # of which a call back would be lost
    ):
        yield


def run(entry, model, signature, a, b, c, scales=None):
    """D of codes [batch, M, K] and so on, as the kernels compute it; a batch of one serves all."""
    kernels = cuda.kernels_of(model, signature)
    assert kernels is not None and (entry == "walk" or (kernels.tiling is not None and min(c.shape[1:]) >= cuda.LEAST_TILE))
    with instead_of_a_gpu():
        return np.asarray(cuda.product(kernels if entry == "tile" else kernels._replace(tiling=None), *map(jnp.asarray, (a, b, c)), scales))
