"""The CUDA kernels without a GPU: their text, compiled for a CPU, against the portable walk; the compiler, the store, what is launched."""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cuda_on_cpu
from support.kernel_cases import CASES, HOPPER, codes, operands, signature
from support.sampling import sampled

import tcemu
from tcemu.architectures.rows import ROWS
from tcemu.arithmetic.kernels import cuda, launch, nvrtc, source, store
from tcemu.arithmetic.model import Model, Signature
from tcemu.arithmetic.walk import walk
from tcemu.formats import BF16, E4M3, F16, F32, UE8M0

compiled_here = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")
TILED = [name for name in CASES if source.tiling(CASES[name][0], signature(name)) is not None]
WALKED = [name for name in CASES if source.numbers(CASES[name][0], signature(name)) is not None]
ORDERS = {  # steps in other orders and with other ends, which `walk` alone takes
    "chains of two groups": (HOPPER.replace(groups=2, chain="k"), Signature(F16, F16, F32, F32, 32)),
    "chains added together": (HOPPER.replace(groups=2, chain=16, together=True), Signature(F16, F16, F32, F32, 32)),
    "chains of two instructions": (HOPPER.replace(chain=32), Signature(F16, F16, F32, F32, 16)),
    "an f16 result": (Model(F16, 16, 25, -21, "RN"), Signature(F16, F16, F16, F16, 16)),
    "f16 chains": (Model(F16, 16, 25, -21, "RN", groups=2, chain="k"), Signature(F16, F16, F16, F16, 32)),
    "f32 steps, D in f16": (HOPPER, Signature(F16, F16, F32, F16, 16)),
    "a short last step": (HOPPER.replace(terms=12), Signature(BF16, BF16, F32, F32, 16)),
    "40 bits, rounded up": (Model(F32, 8, 40, -200, "RP", alignment="RM"), Signature(F16, E4M3, F32, F32, 16)),
    "3 bits, to nearest": (Model(F32, 16, 3, -20, "RN", result_bits=7, alignment="RN"), Signature(E4M3, E4M3, F32, F32, 32)),
}


def codes_of(name, raw, m, n, k):
    """a, b, c and the scales of a case, as NumPy arrays with a batch of one."""
    a, b, c, scales = operands(name, raw, m, n, k)
    batched = lambda v: np.asarray(v)[None]  # noqa: E731
    return batched(a), batched(b), batched(c), None if scales is None else tuple(map(batched, scales))


def check(entry, model, sig, raw, given):
    got = cuda_on_cpu.run(entry, model, sig, *given)
    wanted = np.asarray(walk(model, sig, *map(jnp.asarray, given[:3]), given[3]))
    wrong = int((got != wanted).sum())
    assert wrong == 0, f"{wrong} mismatches of {wanted.size}, raw={raw}"
    assert len(np.unique(wanted)) > (1 if raw else 50)


@compiled_here
@pytest.mark.parametrize("name", sampled(TILED, ["e4m3"]))
def test_tiles_are_the_walk(name):
    """More than a block each way, neither whole."""
    for raw in (False, True):
        check("tile", CASES[name][0], signature(name), raw, codes_of(name, raw, 150, 140, 3 * signature(name).k))


@compiled_here
@pytest.mark.parametrize("name", sampled(WALKED, ["f16"]))
def test_the_walk_in_integers_is_the_walk(name):
    for raw in (False, True):
        check("walk", CASES[name][0], signature(name), raw, codes_of(name, raw, 40, 20, 2 * signature(name).k))


@compiled_here
@pytest.mark.parametrize("name", sampled(list(ORDERS), ["chains of two groups", "an f16 result"]))
def test_every_order_of_steps(name):
    model, sig = ORDERS[name]
    rng = np.random.default_rng(5)
    for raw in (False, True):
        shapes = (sig.a, (1, 17, 3 * sig.k)), (sig.b, (1, 3 * sig.k, 21)), (model.result, (1, 17, 21))
        check("walk", model, sig, raw, (*(np.asarray(codes(rng, fmt, shape, raw)) for fmt, shape in shapes), None))


@compiled_here
def test_steps_are_not_all_careful(monkeypatch):
    """With the careful step broken, ordinary operands still give the right words: so they take the fast one."""
    whole = source.text

    def broken(entry, *arguments):
        text = whole(entry, *arguments)
        return text.replace("plain &= is_plain(codes[i][j]);", "codes[i][j] = 0x12345678;") if entry == "tile" else text

    monkeypatch.setattr(source, "text", broken)
    for name in ("e4m3", "bf16"):
        model, sig = CASES[name][0], signature(name)
        a, b, c, _ = codes_of(name, False, 40, 40, 2 * sig.k)
        got, wanted = cuda_on_cpu.run("tile", model, sig, a, b, c), np.asarray(walk(model, sig, *map(jnp.asarray, (a, b, c)), None))
        assert (got == wanted).all()
        a = a.copy()
        a[0, 3, 5] = sig.a.nan
        assert (cuda_on_cpu.run("tile", model, sig, a, b, c)[0, 3] != F32.nan).all()


@compiled_here
def test_a_batch_and_one_b_for_all_of_it():
    rng = np.random.default_rng(1)
    draw = lambda *shape: (rng.integers(0, 128, shape) + 0x3C00 - 64).astype(np.uint16)  # noqa: E731
    a, b, c = draw(3, 33, 32), draw(1, 32, 34), np.zeros((3, 33, 34), np.uint32)
    wanted = walk(HOPPER, signature("f16"), *map(jnp.asarray, (a, b, c)), None)
    for entry in ("walk", "tile"):
        assert (cuda_on_cpu.run(entry, HOPPER, signature("f16"), a, b, c) == np.asarray(wanted)).all()


# ---- which arithmetics have one


def test_which_rows_have_kernels():
    """Every fused dot-add of single products; a large tile where results are f32, cut, and follow each other."""
    for row in ROWS:
        for a in row.multiplicands:
            model = row.model
            sig = Signature(
                model.common or a, model.common or a, model.result, row.accumulators[0], 64, scale=UE8M0 if model.summed else None
            )
            fused = model.fraction_bits is not None and model.summed is None and not model.result.is_integer
            assert (source.numbers(model, sig) is not None) == fused, (row, a)
            plain = fused and row.accumulators == (F32,) and model.chain is None
            assert (source.tiling(model, sig) is not None) == plain, (row, a)


def test_what_is_traced_has_none():
    for field in ("fraction_bits", "floor", "terms", "result_bits", "rounding", "alignment"):
        assert cuda.kernels_of(HOPPER.replace(**{field: jnp.int32(1)}), signature("f16")) is None


def test_less_shared_memory_gives_a_smaller_ring_or_none():
    n, tiles = (make(HOPPER, signature("f16")) for make in (source.numbers, source.tiling))
    assert n is not None and tiles is not None
    assert source.within(n, tiles, 227 << 10) == tiles
    assert source.within(n, tiles, 64 << 10) == tiles._replace(ring=1)
    assert source.within(n, tiles, 16 << 10) is None


# ---- compiling


ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")


def assemble(text, architecture, folder):
    """By NVRTC or by nvcc, whichever is here."""
    if nvrtc.library() is not None:
        assert len(nvrtc.compiled(text, architecture)) > 1000
        return
    (folder / "kernel.cu").write_text(text)
    command = ["nvcc", "--cubin", f"-arch={architecture}", "-Werror", "all-warnings", "-o", str(folder / "out"), str(folder / "kernel.cu")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(shutil.which("nvcc") is None and nvrtc.library() is None, reason="neither nvcc nor NVRTC is installed here")
@pytest.mark.parametrize("architecture", sampled(ARCHITECTURES, ["sm_90"]))
def test_the_texts_compile(architecture, tmp_path):
    cases = ("f16", "e4m3", "mxf8") if architecture != "sm_90" else ("f16",)
    for name in cases:
        model, sig = CASES[name][0], signature(name)
        n, tiles = source.numbers(model, sig), source.tiling(model, sig)
        for entry in source.FILES:
            assemble(source.text(entry, n, sig, model.result, tiles if entry != "walk" else None), architecture, tmp_path)


# ---- the store


class Compiler:
    """In NVRTC's place."""

    def __init__(self, monkeypatch, version=(13, 0)):
        self.calls = []
        monkeypatch.setattr(nvrtc, "version", lambda: version)
        monkeypatch.setattr(nvrtc, "compiled", self.compiled)

    def compiled(self, text, architecture):
        self.calls.append(architecture)
        return f"{architecture} {text}".encode()


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "kernels"))
    store.binary.cache_clear()
    yield tmp_path / "kernels"
    store.binary.cache_clear()


def fresh(*arguments):
    store.binary.cache_clear()
    return store.binary(*arguments)


def test_a_kernel_is_compiled_once_a_machine(monkeypatch, kept):
    compiler = Compiler(monkeypatch)
    assert fresh("text", "sm_90") == fresh("text", "sm_90") == b"sm_90 text"
    assert compiler.calls == ["sm_90"]
    fresh("text", "sm_100"), fresh("other", "sm_90"), fresh("other", "sm_90")
    assert compiler.calls == ["sm_90", "sm_100", "sm_90"]
    Compiler(monkeypatch, (13, 5))
    assert len(list(kept.iterdir())) == 3
    fresh("text", "sm_90")
    assert len(list(kept.iterdir())) == 4


@pytest.mark.parametrize("damage", [lambda v: b"", lambda v: v[:-1], lambda v: v[:40] + b"!" + v[41:], lambda v: bytes(100)])
def test_a_damaged_entry_is_compiled_again(monkeypatch, kept, damage):
    compiler = Compiler(monkeypatch)
    fresh("a longer text than that", "sm_90")
    (entry,) = kept.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    assert fresh("a longer text than that", "sm_90") == b"sm_90 a longer text than that"
    assert len(compiler.calls) == 2
    data = entry.read_bytes()
    assert hashlib.sha256(data[store.CHECKSUM :]).digest() == data[: store.CHECKSUM]


def test_where_nothing_can_be_written_it_is_compiled(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.FOLDER, str(tmp_path / "file" / "kernels"))
    assert fresh("text", "sm_90") == b"sm_90 text" and fresh("text", "sm_90") == b"sm_90 text"
    assert len(compiler.calls) == 2
    store.binary.cache_clear()


TWO = """
import sys
from tcemu.arithmetic.kernels import nvrtc, store
nvrtc.version = lambda: (13, 0)
nvrtc.compiled = lambda text, architecture: text.encode() * 100000
for number in range(30):
    assert store.binary(f"text {number}", "sm_90") == f"text {number}".encode() * 100000
print("done")
"""


def test_two_processes_at_once_lose_nothing(kept):
    run = lambda _: subprocess.run([sys.executable, "-c", TWO], env=os.environ, capture_output=True, text=True, check=False)  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, range(2)))
    assert [one.stdout for one in ended] == ["done\n"] * 2, ended[0].stderr + ended[1].stderr
    entries = list(kept.iterdir())
    assert len(entries) == 30 and all(len(entry.read_bytes()) > 100000 for entry in entries)


# ---- what is launched


def test_without_a_gpu_it_says_so():
    if launch.capabilities():
        pytest.skip("here is a GPU")
    assert cuda.missing() == "JAX finds no NVIDIA GPU"
    said = tcemu.backends("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", target="sm_90a")
    assert list(said) == ["native", "cuda", "triton", "walk"] and said["walk"] == ""
    assert said["native"] == said["cuda"] == "JAX finds no NVIDIA GPU"


def test_backends_say_which_serves(monkeypatch):
    from tcemu.arithmetic import backends

    able = tuple(backend._replace(missing=lambda: "") for backend in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", able)
    f16, nvf4 = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X",
    )
    emulating = lambda op, target: {name: why for name, why in tcemu.backends(op, target=target).items() if name != "native"}  # noqa: E731
    assert emulating(f16, "sm_90a") == {"cuda": "", "triton": "cuda comes first", "walk": ""}
    said = emulating(f"{nvf4}.f32.e2m1.e2m1.f32.ue4m3", "sm_120a")
    assert said == {"cuda": "it does not take this arithmetic", "triton": "", "walk": ""}
    assert emulating("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "sm_90a") == {"walk": ""}


@pytest.mark.parametrize(("name", "size", "calls"), [("f16", (64, 64, 64), 2), ("f16", (16, 8, 32), 1), ("mxf8", (128, 128, 64), 2)])
def test_it_lowers_for_cuda(monkeypatch, name, size, calls):
    here = launch.Route("sm", "90", "")
    for module in (launch, cuda):
        monkeypatch.setattr(module, "route", lambda: here)
    monkeypatch.setattr(store, "binary", lambda text, architecture: f"{architecture} {len(text)}".encode())
    call = jax.jit(cuda.program(CASES[name][0], signature(name)))
    try:
        text = call.trace(*operands(name, True, *size)).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    assert text.count(f"@{launch.TARGET}") == calls
