"""The CUDA kernels without a GPU: their text, compiled for a CPU, against the portable backend; the compiler, the store, launches."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cuda_on_cpu
from support.assembling import ARCHITECTURES, assemble, assembled_here
from support.device_processes import run_on_devices
from support.kernel_cases import CASES, GROUPED, HOPPER, codes, kernel_program, operands, signature
from support.sampling import sample_cases

import tcemu
from tcemu.base import stored_code as store
from tcemu.engine.architectures.model_rows import ROWS
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.arithmetic.step.forms import anchored_form, step_numbers
from tcemu.engine.backends import batched_calls, dispatch
from tcemu.engine.backends.cuda import kernel_text as source
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.engine.backends.cuda import nvrtc
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.formats import BF16, E2M1, E2M3, E4M3, F16, F32, UE4M3, UE8M0
from tcemu.operations.products.accumulation import Factors, ScaleBlockShape, partial_sums

compiled_here = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")
TILED = [name for name in CASES if anchored_form(CASES[name][0], signature(name)) is not None]
SUPPORTED = [name for name in CASES if step_numbers(CASES[name][0], signature(name)) is not None]
ORDERS = {  # steps in other orders and with other ends, which `integer` alone takes
    "chains of two groups": (HOPPER.replace(groups=2, chain="k"), ProductSpec(F16, F16, F32, F32, 32)),
    "chains added together": (HOPPER.replace(groups=2, chain=16, together=True), ProductSpec(F16, F16, F32, F32, 32)),
    "chains of two instructions": (HOPPER.replace(chain=32), ProductSpec(F16, F16, F32, F32, 16)),
    "f32 steps, D in f16": (HOPPER, ProductSpec(F16, F16, F32, F16, 16)),
    "a short last step": (HOPPER.replace(terms=12), ProductSpec(BF16, BF16, F32, F32, 16)),
    "40 bits, rounded up": (Model(F32, 8, 40, -200, "RP", alignment="RM"), ProductSpec(F16, E4M3, F32, F32, 16)),
    "groups, a short last step": (GROUPED.replace(terms=96), ProductSpec(E2M1, E2M1, F32, F32, 128, scale=UE4M3)),
    "each product by itself, under its scale": (GROUPED.replace(summed=1), ProductSpec(E2M1, E2M3, F32, F32, 64, scale=UE8M0)),
    "groups of 8, in chains": (GROUPED.replace(summed=8, chain="k"), ProductSpec(E2M1, E2M1, F32, F32, 64, scale=UE4M3)),
    "3 bits, to nearest": (Model(F32, 16, 3, -20, "RN", result_bits=7, alignment="RN"), ProductSpec(E4M3, E4M3, F32, F32, 32)),
}


def case_codes(name, raw, m, n, k):
    """a, b, c and the scales of a case, as NumPy arrays with a batch of one."""
    a, b, c, scales = operands(name, raw, m, n, k)
    batched = lambda v: np.asarray(v)[None]
    return batched(a), batched(b), batched(c), None if scales is None else tuple(map(batched, scales))


BROKEN = 0x12345678  # what a careful step leaves once it is broken: no result of the cases here


def with_broken_careful_steps(monkeypatch):
    whole = source.kernel_text

    def broken(entry, *arguments):
        text = whole(entry, *arguments)
        changed = text.replace("plain &= is_plain(codes[i][j]);", f"codes[i][j] = {BROKEN};")
        assert changed != text or entry != "tile"
        return changed

    monkeypatch.setattr(source, "kernel_text", broken)


def check(entry, model, sig, raw, given):
    got = cuda_on_cpu.run_kernel(entry, model, sig, *given)
    wanted = np.asarray(reduce_k(model, sig, *map(jnp.asarray, given[:3]), given[3]))
    wrong = int((got != wanted).sum())
    assert wrong == 0, f"{wrong} mismatches of {wanted.size}, raw={raw}"
    assert len(np.unique(wanted)) > (1 if raw else 50)


@compiled_here
@pytest.mark.parametrize("name", sample_cases(TILED, ["e4m3"]))
def test_tiles_are_the_portable_backend(name):
    """More than a block each way, neither whole."""
    for raw in (False, True):
        check("tile", CASES[name][0], signature(name), raw, case_codes(name, raw, 150, 140, 3 * signature(name).k))


@compiled_here
@pytest.mark.parametrize("capability", ["120", pytest.param("80", marks=pytest.mark.full)])
def test_products_of_gpus_whose_own_steps_are_not_verified(monkeypatch, capability):
    """They are added one by one."""
    monkeypatch.setattr(cuda_on_cpu, "ROUTE", launch.Route("sm", capability, "", 132))
    name = "e4m3"
    with cuda_on_cpu.kernels_on_cpu():
        tiles = cuda._tiles(cuda.find_matrix_kernels(CASES[name][0], signature(name)), 1, 512, 512)
    assert (cuda.own_fraction_bits(capability), cuda.own_fraction_bits("90"), tiles.own_bits) == (0, 25, 0)
    if capability == "80":
        check("tile", CASES[name][0], signature(name), True, case_codes(name, True, 70, 40, 2 * signature(name).k))


@compiled_here
@pytest.mark.parametrize("name", sample_cases(SUPPORTED, []))  # the usual run has the lattice of a step
def test_the_integer_kernel_is_the_portable_backend(name):
    for raw in (False, True):
        check("integer", CASES[name][0], signature(name), raw, case_codes(name, raw, 40, 20, 2 * signature(name).k))


@compiled_here
@pytest.mark.parametrize("name", sample_cases(list(ORDERS), ["groups, a short last step"]))
def test_every_order_of_steps(name):
    model, sig = ORDERS[name]
    rng = np.random.default_rng(5)
    for raw in (False, True):
        shapes = (sig.a, (1, 17, 3 * sig.k)), (sig.b, (1, 3 * sig.k, 21)), (model.result, (1, 17, 21))
        scales = None
        if sig.scale is not None:  # a scale for each 16 products
            draw = lambda *shape: rng.integers(0 if raw else 100, 128 if raw else 110, shape).astype(np.uint8)  # noqa: B023
            scales = draw(1, 17, 3 * sig.k // 16), draw(1, 3 * sig.k // 16, 21)
        check("integer", model, sig, raw, (*(np.asarray(codes(rng, fmt, shape, raw)) for fmt, shape in shapes), scales))


@compiled_here
@pytest.mark.parametrize("name", sample_cases(TILED, []))
def test_steps_are_not_all_careful(monkeypatch, name):
    """With the careful step broken, ordinary operands still give the right words: so they take the fast one. A NaN then gives no NaN."""
    with_broken_careful_steps(monkeypatch)
    model, sig = CASES[name][0], signature(name)
    a, b, c, scales = case_codes(name, False, 40, 40, 2 * sig.k)
    c = c & ~c.dtype.type((1 << sig.d.mantissa_bits) - 1)  # whole units of every step
    got, wanted = (
        cuda_on_cpu.run_kernel("tile", model, sig, a, b, c, scales),
        np.asarray(reduce_k(model, sig, *map(jnp.asarray, (a, b, c)), scales)),
    )
    assert (got == wanted).all()
    if scales is None and sig.a.specials == "none":
        return
    first, at, nan = (a.copy(), (0, 3, 5), sig.a.nan) if scales is None else (scales[0].copy(), (0, 3, 0), sig.scale.nan)
    first[at] = nan
    got = cuda_on_cpu.run_kernel("tile", model, sig, *((first, b, c) if scales is None else (a, b, c, (first, scales[1]))))
    assert (got[0, 3] != sig.d.nan).all() and (got[0, 3] != wanted[0, 3]).any()


@pytest.mark.full
@compiled_here
def test_products_far_below_the_greatest_factors_are_careful(monkeypatch):
    """One factor of each row is large. Where those of the columns meet it, a step is fast; else all products are too small for that."""
    model, sig = CASES["bf16"][0], signature("bf16")
    rng = np.random.default_rng(4)
    draw = lambda *shape: (rng.integers(0, 1 << 16, shape) & 0x807F | (127 - 14) << 7).astype(np.uint16)
    a, c = draw(1, 40, sig.k), np.zeros((1, 40, 40), np.uint32)
    a[..., 0] += 14 << 7
    for at in (0, 1):
        b = draw(1, sig.k, 40)
        b[:, at] += 14 << 7
        wanted = np.asarray(reduce_k(model, sig, *map(jnp.asarray, (a, b, c)), None))
        assert (cuda_on_cpu.run_kernel("tile", model, sig, a, b, c) == wanted).all()
        with monkeypatch.context() as context:
            with_broken_careful_steps(context)
            assert (cuda_on_cpu.run_kernel("tile", model, sig, a, b, c) == (wanted if at == 0 else BROKEN)).all()


@compiled_here
@pytest.mark.parametrize("name", sample_cases(["f16 results", "f16 chains"], []))
def test_f16_results_among_the_subnormals_and_at_the_end(monkeypatch, name):
    """Fast steps whose results are subnormal, or zero; and results that become infinite, after which steps are careful."""
    model, sig = CASES[name][0], signature(name)
    rng = np.random.default_rng(3)
    for exponents, careful in (((2, 9), False), ((17, 22), True)):
        shapes = (1, 70, 4 * sig.k), (1, 4 * sig.k, 70), (1, 70, 70)
        a, b, c = ((rng.integers(0, 1 << 16, shape) & 0x83FF | rng.integers(*exponents, shape) << 10).astype(np.uint16) for shape in shapes)
        if not careful:
            c &= 0x83FF
            with_broken_careful_steps(monkeypatch)
        got, wanted = (
            cuda_on_cpu.run_kernel("tile", model, sig, a, b, c),
            np.asarray(reduce_k(model, sig, *map(jnp.asarray, (a, b, c)), None)),
        )
        monkeypatch.undo()
        assert (got == wanted).all()
        fields = wanted >> 10 & 31
        assert (fields == (31 if careful else 0)).any() and (fields != (31 if careful else 0)).any()


# ---- batches, meshes, a long K


@pytest.fixture
def called():
    with cuda_on_cpu.kernels_on_cpu():
        yield kernel_program


@compiled_here
@pytest.mark.parametrize(
    "case", sample_cases([("nvf4", 33, 34), ("f16", 16, 8), ("f16", 33, 34), ("nvf4", 16, 8)], [("nvf4", 33, 34)], str)
)
def test_batches_broadcast_and_vmap(called, case):
    """By tiles, and by the integer kernel."""
    name, m, n = case
    model, sig = CASES[name][0], signature(name)
    call = jax.jit(called(model, sig))  # else each of its small operations is a program
    a, b, c, scales = operands(name, True, m, n, 2 * sig.k, (3, 2))
    wanted = np.asarray(reduce_k(model, sig, a, b, c, scales))
    assert (np.asarray(call(a, b, c, scales)) == wanted).all()
    assert (np.asarray(jax.vmap(call, (1, 1, 1, 1), 1)(a, b, c, scales)) == wanted).all()
    shared = None if scales is None else (scales[0], scales[1][0, 0])
    one = np.asarray(reduce_k(model, sig, a, b[0, 0], c, shared))
    assert (np.asarray(call(a, b[0, 0], c, shared)) == one).all()
    by_axis = None if scales is None else (0, None)
    assert (np.asarray(jax.vmap(call, (0, None, 0, by_axis))(a, b[0, 0], c, shared)) == one).all()


@compiled_here
@pytest.mark.parametrize("shared", sample_cases((True, False), ()))
def test_each_matrix_of_a_batch_has_special_steps_of_its_own(called, shared):
    """Inf in the first step of one A, in the third of another; and in the second of a B that all of them share."""
    a, b, c, _ = operands("f16", False, 33, 34, 48, (4,))
    a = a.at[1, 3, 5].set(F16.infinity).at[2, 1, 40].set(F16.infinity)
    b = b[0].at[20, 2].set(F16.infinity) if shared else b
    wanted = reduce_k(HOPPER, signature("f16"), a, b, c, None)
    assert (called(HOPPER, signature("f16"))(a, b, c, None) == wanted).all()
    finite = (wanted & 0x7FFFFFFF) < F32.infinity
    assert (~finite).any((1, 2)).tolist() == ([True] * 4 if shared else [False, True, True, False]) and finite.any()


@compiled_here
@pytest.mark.parametrize(
    ("m", "n", "in_parts"), [(70, 40, False), *(pytest.param(*size, marks=pytest.mark.full) for size in ((33, 34, True), (17, 9, False)))]
)
@pytest.mark.parametrize("name", sample_cases(["e4m3", "f16", "f16 results", "nvf4", "chains of e4m3 as f16"], ["e4m3"]))
def test_promotion_is_the_sum_of_parts(monkeypatch, name, m, n, in_parts):
    """Tiles, the integer kernel, and a long K part after part. Scales of every row and of 16 columns, Inf and NaN among them; or none."""
    model, sig = CASES[name][0], signature(name)
    a, b, _, scales = operands(name, m < cuda.LEAST_TILE, m, n, 6 * sig.k, (2,))
    rng = np.random.default_rng(8)
    some = np.array([1.0, -0.0, 0.7, 1e-30, 3e38, np.inf, np.nan, 1.5], np.float32)
    of_blocks = tuple(
        jnp.asarray(rng.choice(some, shape, p=[0.4, 0.05, 0.3, 0.05, 0.02, 0.02, 0.01, 0.15]).view(np.uint32))
        for shape in ((2, m, 3), (3, -(-n // 16)))
    )
    if in_parts:
        monkeypatch.setattr(cuda, "MOST_PREPARED", 1)

    def sums(block_scales):
        def parts(a, b, scales, block_scales):
            blocks = ScaleBlockShape((1, 16), 2) if block_scales is not None else ScaleBlockShape()
            return partial_sums(model, sig, Factors((a, b), scales, block_scales), promote=2, split_k=1, blocks=blocks)[0]

        return np.asarray(jax.jit(parts)(a, b, scales, block_scales))

    wanted = [sums(given) for given in (None, of_blocks)]
    on_gpus, *_, portable = dispatch.EMULATORS
    with cuda_on_cpu.kernels_on_cpu():
        monkeypatch.setattr(dispatch, "EMULATORS", (on_gpus._replace(platform="cpu"), portable))
        got = [sums(given) for given in (None, of_blocks)]
    assert (got[0] == wanted[0]).all() and (got[1] == wanted[1]).all()
    assert len(np.unique(wanted[1])) > (20 if m >= cuda.LEAST_TILE else 2)


@compiled_here
@pytest.mark.parametrize("name", sample_cases(["long chains", "mxf8"], []))
def test_a_long_k_goes_in_parts(called, monkeypatch, name):
    """Parts are whole instructions, and whole chains."""
    model, sig = CASES[name][0], signature(name)
    monkeypatch.setattr(cuda, "MOST_PREPARED", 1)
    given = operands(name, False, 33, 34, 5 * sig.k)
    assert (called(model, sig)(*given) == reduce_k(model, sig, *given)).all()


SHARDED = """
import jax, numpy as np, jax.numpy as jnp, test_cuda as t
from unittest import mock  # refuses a name that is not there
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
for name in ("f16", "mxf8"):
    model, sig = t.CASES[name][0], t.signature(name)
    a, b, c, scales = t.operands(name, True, 64, 64, 64)
    wanted = t.reduce_k(model, sig, a, b, c, scales)
    if scales is not None:
        scales = put(scales[0], "x", None), put(scales[1], None, "y")
    given = put(a, "x", None), put(b, None, "y"), put(c, "x", "y"), scales
    mock.patch.object(t.cuda, "route", lambda: t.cuda_on_cpu.ROUTE).start()
    # a callback would not outlive the partitioning: the portable backend, which is traced, stands for the kernels
    portable = lambda kernels, tiles, a, b, c, *scales: t.reduce_k(model, sig, a, b, c, scales or None)
    mock.patch.object(t.cuda, "_multiply_by_tiles", portable).start()
    call = jax.jit(t.kernel_program(model, sig)).lower(*given).compile()
    d = call(*given)
    assert d.sharding.spec == P("x", "y"), d.sharding
    assert (np.asarray(d) == np.asarray(wanted)).all()
    assert "all-gather" not in call.as_text()
    for of_a, of_b in ((("x", "y"), ("y", None)), ((None, "x"), (None, None))):  # cut along K, which is brought together
        d = jax.jit(t.kernel_program(model, sig))(put(a, *of_a), put(b, *of_b), c, scales)
        assert (np.asarray(d) == np.asarray(wanted)).all()
print("sharded", len(jax.devices()))
"""


@pytest.mark.full
def test_the_kernel_is_cut_along_m_and_n_over_devices():
    assert run_on_devices(4, SHARDED) == "sharded 4\n"


class ScaledRows(NamedTuple):
    """A call on one device: matrices times scales, of which each batch element has its own; `c` has the whole batch."""

    axes: tuple[str, ...] = ("m k", "m s", "m k", "m k")
    sharing: tuple[str, ...] = ("a", "a", "")

    def __call__(self, a, scales, c):
        assert len(a) == len(scales)
        return a * scales + c


@pytest.mark.full
def test_operands_that_share_a_batch_get_a_longer_one_together(monkeypatch):
    """Also where `vmap` maps only one of them."""
    monkeypatch.setattr(batched_calls, "_sharded", lambda call, alone: call)
    call = lambda a, scales, c: batched_calls.call_batched(ScaledRows(), a, scales, c)
    a, scales, c = jnp.arange(6.0).reshape(2, 3), jnp.arange(8.0).reshape(4, 2, 1), jnp.ones((5, 2, 3))
    assert (call(a, scales[0], c) == a * scales[0] + c).all()
    assert (jax.vmap(lambda one: call(a, one, c))(scales) == a * scales[:, None] + c).all()
    assert (jax.vmap(lambda one: call(one, scales[1], c))(jnp.stack([a, a + 1])) == jnp.stack([a, a + 1])[:, None] * scales[1] + c).all()
    assert (jax.vmap(lambda one: call(a, scales[2], one))(c) == a * scales[2] + c).all()


# ---- which arithmetics have one


def test_which_rows_have_kernels():
    """Every fused dot-add; a large tile where D has the format of the steps, and chains are not added to each other."""
    for row in ROWS:
        for a in row.multiplicands:
            model = row.model
            sig = ProductSpec(
                model.common_format or a,
                model.common_format or a,
                model.result,
                row.accumulators[0],
                64,
                scale=UE8M0 if model.summed else None,
            )
            fused = model.fraction_bits is not None and not model.result.is_integer
            assert (step_numbers(model, sig) is not None) == fused, (row, a)
            assert (anchored_form(model, sig) is not None) == (fused and not model.together and sig.d == model.result), (row, a)


def test_what_is_traced_has_none():
    for field in ("fraction_bits", "floor", "terms", "result_bits", "rounding", "alignment"):
        assert cuda.find_matrix_kernels(HOPPER.replace(**{field: jnp.int32(1)}), signature("f16")) is None


def test_less_shared_memory_gives_a_smaller_ring_a_smaller_tile_or_none():
    n, tiles = step_numbers(HOPPER, signature("f16")), source.tile_numbers(anchored_form(HOPPER, signature("f16")))
    assert n is not None and tiles is not None
    assert source.fit_shared_memory(n, tiles, 227 << 10) == tiles
    assert source.fit_shared_memory(n, tiles, 99 << 10) == tiles._replace(ring=1)
    alone = tiles._replace(ring=1, warps_across=4, blocks=1)
    assert source.fit_shared_memory(n, tiles, 64 << 10) == alone
    assert source.fit_shared_memory(n, tiles, 40 << 10) == alone._replace(row_tiles=2)
    assert source.fit_shared_memory(n, tiles, 16 << 10) is None
    promoted = n._replace(promoted=4)  # whose sums lie there too
    assert source.fit_shared_memory(promoted, tiles, 227 << 10) == tiles
    assert source.fit_shared_memory(promoted, tiles, 99 << 10) == alone._replace(row_tiles=2)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("most", sorted({launch.LEAST_SHARED_KIB, *launch.SHARED_KIB.values()}))
def test_the_blocks_of_a_multiprocessor_share_its_memory(name, most):
    """A block may have all of it but OF_BLOCK bytes. Each arithmetic has a large or a small tile on each GPU."""
    n, tiles = step_numbers(CASES[name][0], signature(name)), source.tile_numbers(anchored_form(CASES[name][0], signature(name)))
    for promoted in (0, 4):
        whole = n._replace(promoted=promoted)
        found = [one for small in (False, True) if (one := source.fit_shared_memory(whole, tiles, most << 10, small)) is not None]
        assert len(found) == 2 or (found and promoted and most < 100)
        assert all(one.blocks * (source.shared_bytes(whole, one) + 1024) <= (most + 1) << 10 for one in found)


@compiled_here
@pytest.mark.parametrize("name", TILED)
def test_small_products_have_small_tiles(monkeypatch, name):
    """Their bits: test_step_lattice.py."""
    monkeypatch.setattr(cuda_on_cpu, "ROUTE", launch.Route("sm", "90", "", 132))
    kernels = cuda.find_matrix_kernels(CASES[name][0], signature(name))
    with cuda_on_cpu.kernels_on_cpu():
        small, large = (cuda._tiles(kernels, batch, 512, 512) for batch in (1, 64))
    assert (small.lines < large.lines) == (not kernels.numbers.summed)


@pytest.mark.full
@compiled_here
def test_a_smaller_tile_is_the_portable_backend(monkeypatch):
    monkeypatch.setattr(cuda_on_cpu, "ROUTE", launch.Route("sm", "120", ""))
    check("tile", *ORDERS["chains of two groups"], False, case_codes("chains of e4m3 as f16", False, 150, 140, 96))


# ---- compiling


@assembled_here
@pytest.mark.parametrize("architecture", sample_cases(ARCHITECTURES, []))
def test_the_texts_compile(architecture, tmp_path):
    names = ("f16", "mxf8", "mxf4", "f16 chains") if architecture != "sm_90" else ("nvf4",)
    cases = [(name, None) for name in names] + [("e4m3", Promotion(4, (1, 128)))]
    for name, promotion in cases:
        kernels = cuda.find_matrix_kernels(CASES[name][0], signature(name), promotion)
        for entry in ("integer", "prepare", "tile"):
            tiles = (
                None if entry == "integer" else source.fit_shared_memory(kernels.numbers, kernels.tiling, 227 << 10, small=name == "f16")
            )
            assemble(source.kernel_text(entry, kernels.numbers, kernels.spec, kernels.result, tiles), architecture, tmp_path)


# ---- the store


class Compiler:
    """In NVRTC's place."""

    def __init__(self, monkeypatch, version=(13, 0)):
        self.calls = []
        monkeypatch.setattr(nvrtc, "version", lambda: version)
        monkeypatch.setattr(nvrtc, "compile_text", self.compiled)

    def compiled(self, text, architecture):
        self.calls.append(architecture)
        return f"{architecture} {text}".encode()


@pytest.fixture
def kept(monkeypatch, tmp_path):
    monkeypatch.setenv(store.KERNEL_VARIABLE, str(tmp_path / "kernels"))
    store.load_or_compile.cache_clear()
    yield tmp_path / "kernels"
    store.load_or_compile.cache_clear()


def fresh(*arguments):
    store.load_or_compile.cache_clear()
    return store.load_or_compile(launch.COMPILER, *arguments)


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
    assert fresh("a longer text than that", "sm_90") and len(compiler.calls) == 2


def test_a_kernel_under_the_name_of_another_is_compiled_again(monkeypatch, kept):
    """With its checksum, which is right for the content alone."""
    compiler = Compiler(monkeypatch)
    fresh("the arithmetic of an A100", "sm_90")
    (first,) = kept.iterdir()
    fresh("the arithmetic of an H100", "sm_90")
    (second,) = set(kept.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert fresh("the arithmetic of an H100", "sm_90") == b"sm_90 the arithmetic of an H100" and len(compiler.calls) == 3


def test_where_nothing_can_be_written_it_is_compiled(monkeypatch, tmp_path):
    compiler = Compiler(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.KERNEL_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert fresh("text", "sm_90") == b"sm_90 text" and fresh("text", "sm_90") == b"sm_90 text"
    assert len(compiler.calls) == 2
    store.load_or_compile.cache_clear()


def test_kernels_are_compiled_side_by_side(monkeypatch, kept):
    """Each waits for the other one to be asked for; what is asked for twice meanwhile is compiled once."""
    both = Barrier(2)
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    calls = []

    def compiled(text, architecture):
        calls.append(text)
        both.wait(60)
        return text.encode()

    monkeypatch.setattr(nvrtc, "compile_text", compiled)
    first, other = store.start_compilation(launch.COMPILER, "first", "sm_90"), store.start_compilation(launch.COMPILER, "other", "sm_90")
    again = store.start_compilation(launch.COMPILER, "first", "sm_90")
    assert [one.result(60) for one in (first, other, again)] == [b"first", b"other", b"first"]
    assert sorted(calls) == ["first", "other"] and store.start_compilation(launch.COMPILER, "first", "sm_90").result(60) == b"first"


TWO = """
import sys
from tcemu.base import stored_code as store
from tcemu.engine.backends.cuda import nvrtc, xla_launch as launch
nvrtc.version = lambda: (13, 0)
nvrtc.compile_text = lambda text, architecture: text.encode() * 100000
for number in range(30):
    assert store.load_or_compile(launch.COMPILER, f"text {number}", "sm_90") == f"text {number}".encode() * 100000
print("done")
"""


def test_two_processes_at_once_lose_nothing(kept):
    run = lambda _: subprocess.run([sys.executable, "-c", TWO], env=os.environ, capture_output=True, text=True, check=False)
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, range(2)))
    assert [one.stdout for one in ended] == ["done\n"] * 2, ended[0].stderr + ended[1].stderr
    entries = list(kept.iterdir())
    assert len(entries) == 30 and all(len(entry.read_bytes()) > 100000 for entry in entries)


# ---- what is launched


def test_without_a_gpu_it_says_so():
    if launch.compute_capabilities():
        pytest.skip("here is a GPU")
    assert launch.route().missing == "JAX finds no NVIDIA GPU"
    said = tcemu.backends.describe("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", target="sm_90a")
    assert list(said) == ["native", "cuda", "llvm", "portable"] and said["portable"] == ""
    assert said["native"] == said["cuda"] == "JAX finds no NVIDIA GPU"


def test_backends_say_which_serves(monkeypatch):
    monkeypatch.setattr(launch, "route", lambda: launch.Route("sm", "90", ""))
    f16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    f64, s8 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    nvf4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    describe = lambda op, target: tcemu.backends.describe(op, target=target)
    emulating = lambda op, target: {name: why for name, why in describe(op, target).items() if name in ("cuda", "portable")}
    assert emulating(f16, "sm_90a") == emulating(nvf4, "sm_120a") == {"cuda": "", "portable": ""}
    assert emulating(f64, "sm_90a") == {"cuda": "it does not take this arithmetic", "portable": ""}
    assert emulating(s8, "sm_90a") == emulating(f64, "sm_90a")


PROBED = launch.KernelEntry("probe", launch.PROBE, 32)


def probe(*, late, monkeypatch):
    """A program with one kernel, and what stands in it."""
    monkeypatch.setattr(launch, "lowers_late_attributes", lambda: late)
    call = jax.jit(lambda v: launch._call(PROBED, "sm_90", 1, jax.ShapeDtypeStruct((32,), jnp.uint32), (v,)))
    return call.trace(jnp.zeros(32, jnp.uint32))


@pytest.mark.parametrize("late", [True, False])
def test_a_program_holds_the_code(monkeypatch, late):
    """Also where JAX wants it before it lowers, as one that does not ask late would."""
    assert launch.lowers_late_attributes()
    monkeypatch.setattr(store, "load_or_compile", lambda _, text, architecture: f"{architecture} {len(text)}".encode())
    try:
        text = probe(late=late, monkeypatch=monkeypatch).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    assert f'kernel_data = "sm_90 {len(launch.PROBE)}"' in text


def test_a_text_that_does_not_compile_is_said_when_the_program_is_lowered(monkeypatch):
    def refused(compiler, text, architecture):
        raise nvrtc.CompilationError("the log")

    monkeypatch.setattr(store, "load_or_compile", refused)
    traced = probe(late=True, monkeypatch=monkeypatch)
    assert f"Code(sm_90, {len(launch.PROBE)} characters)" in str(traced.jaxpr)
    with pytest.raises(RuntimeError) as caught:
        traced.lower(lowering_platforms=("cuda",))
    if not isinstance(caught.value, nvrtc.CompilationError):  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {caught.value}")
    assert str(caught.value) == "the log"


@pytest.mark.parametrize(("name", "size", "calls"), [("f16", (64, 64, 64), 2), ("f16", (16, 8, 32), 1), ("mxf8", (128, 128, 64), 2)])
def test_it_lowers_for_cuda(monkeypatch, name, size, calls):
    here = launch.Route("sm", "90", "")
    for module in (launch, cuda):
        monkeypatch.setattr(module, "route", lambda: here)
    monkeypatch.setattr(store, "load_or_compile", lambda _, text, architecture: f"{architecture} {len(text)}".encode())
    call = jax.jit(kernel_program(CASES[name][0], signature(name)))
    try:
        text = call.trace(*operands(name, True, *size)).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    assert text.count(f"@{launch.TARGET}") == calls
