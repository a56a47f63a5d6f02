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

from tcemu.engine.backends import batched_calls as calls
from tcemu.engine.backends import elementwise
from tcemu.engine.backends.cuda import kernel_text as source
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.engine.backends.cuda import quantize_kernel, xla_launch
from tcemu.engine.backends.cuda import register_kernel as warp
from tcemu.engine.backends.cuda.xla_launch import Route
from tcemu.uses.fuzz import case_generator as elements
from tcemu.uses.fuzz import cuda_comparison

MACHINE = Path(__file__).parent / "cuda_on_cpu" / "machine.cpp"
PARAMETERS = {  # types, in order; some are there where the text has them
    "integer": "Shape ACode BCode CCode SCALED BLOCK_SCALED DCode",
    "prepare": "Shape ACode BCode SCALED u8 u8",
    "tile": "Shape ACode BCode CCode SCALED BLOCK_SCALED u8 u8 DCode",
    "warp": "Sizes u32 u32 u32 SPARSE SCALED SELECTED u32",
    "quantize": "Places Source SCALES Target",
    "draw": "int Case u32 Code",
    "compare": "int Words4 u32 Words4 u32 Words4 u32 u32",
}
CHECKS = "-fsanitize=bounds", "-fsanitize-undefined-trap-on-error"  # an index outside of an array ends the process
OPTIONAL = {"BLOCK_SCALED": "float float", "SCALED": "u8 u8", "SPARSE": "u32", "SELECTED": "int", "SCALES": "Scale"}


def compiler() -> str | None:
    return shutil.which("g++")


def build_library(whole: str, *options: str, head: str = "") -> Path:
    """C++ as a library, made once for all processes. head: its beginning, which many texts share and which is compiled once."""
    folder = Path(tempfile.gettempdir()) / "tcemu_cuda_on_cpu"
    folder.mkdir(exist_ok=True)
    flags = ["-std=c++17", "-O1", "-mfma", *options, *CHECKS, "-fno-strict-aliasing", "-fPIC", "-w"]
    include = ["-include", str(_compile_head(folder, head, flags))] if head else []
    path = folder / f"{_hash(*flags, head, whole)}.so"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".cpp", dir=folder, delete=False) as file:
            file.write(whole)
        _compile(["-shared", *flags, *include, file.name], path)
        Path(file.name).unlink()
    return path


def _compile_head(folder: Path, head: str, flags: list[str]) -> Path:
    """The path of a header whose precompiled form stands beside it: the C++ library is half of a kernel's compilation."""
    path = folder / f"{_hash(*flags, head)}.h"
    compiled = path.with_suffix(".h.gch")
    if not compiled.exists():
        with tempfile.NamedTemporaryFile("w", suffix=".h", dir=folder, delete=False) as file:
            file.write(head)
        _compile(["-x", "c++-header", *flags, file.name], compiled)
        Path(file.name).replace(path)
    return path


def _compile(arguments: list[str], path: Path) -> None:
    """Runs g++ and moves what it made to `path` in one step, so that two processes may do so at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as made:
        done = subprocess.run(["g++", *arguments, "-o", made.name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    Path(made.name).replace(path)


def _hash(*texts: str) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()


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
    return ctypes.CDLL(str(build_library(rest + launcher, "-frounding-math", head=MACHINE.read_text())))


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
def kernels_on_cpu():
    """Within, `kernels.cuda` and `kernels.warp` have their kernels run here; quantisers and what is drawn too, on the platform "cpu"."""
    with (
        mock.patch.object(cuda, "launch", launch),
        mock.patch.object(warp, "launch", launch),
        mock.patch.object(quantize_kernel, "launch", launch),
        mock.patch.object(elements, "launch", launch),
        mock.patch.object(cuda_comparison, "launch", launch),
        mock.patch.object(cuda_comparison, "route", lambda: ROUTE),
        mock.patch.object(cuda, "route", lambda: ROUTE),
        mock.patch.object(quantize_kernel, "route", lambda: ROUTE),
        mock.patch.object(elements, "route", lambda: ROUTE),
        mock.patch.object(xla_launch, "route", lambda: ROUTE),
        mock.patch.object(elementwise, "KERNELS", {"cpu": elementwise.KERNELS["cuda"]}),
        mock.patch.object(elements, "PLATFORM", "cpu"),
        mock.patch.object(calls, "_sharded", lambda call, alone: call),  # of which a call back would be lost
    ):
        # JAX 0.12 traces a `custom_vmap` once: a program from before has the launches and the texts of before
        calls._batched.cache_clear()
        try:
            yield
        finally:
            calls._batched.cache_clear()


def run_kernel(entry, model, signature, a, b, c, scales=None):
    """D of codes [batch, M, K] and so on, as the kernels compute it; a batch of one serves all."""
    kernels = cuda.find_matrix_kernels(model, signature)
    assert kernels is not None and (entry == "integer" or (kernels.tiling is not None and min(c.shape[1:]) >= cuda.LEAST_TILE))
    with kernels_on_cpu():
        return np.asarray(
            cuda.multiply_by_kernels(kernels if entry == "tile" else kernels._replace(tiling=None), *map(jnp.asarray, (a, b, c)), scales)
        )
