"""The kernel `fuzz/cuda/draw.cu` and what writes its arithmetic: against XLA, on a CPU and compiled for every GPU."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import cuda_on_cpu
from support.assembling import ARCHITECTURES, assemble, assembled_here
from support.drawn_ops import OPS
from support.sampling import sample_cases

import tcemu
from tcemu.engine.backends.cuda import scalar_functions as scalars
from tcemu.formats import E4M3, F16, F32
from tcemu.fuzz import KINDS, generate, get_implementation
from tcemu.uses.fuzz import case_generator as elements
from tcemu.uses.fuzz.comparison_loop import make_chunk_runner

compiled_here = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")
USUAL = (OPS[0],)
SMALL = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"


@pytest.fixture(autouse=True)
def programs_of_one_machine_alone():
    """A program that was traced with the kernel must not serve the next test; and none is for a real GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        jax.clear_caches()
        yield
    jax.clear_caches()
    make_chunk_runner.cache_clear()


def both_ways(call):
    """What it gives by XLA, and with the kernel; how often that was launched."""
    wanted = call()
    jax.clear_caches()
    make_chunk_runner.cache_clear()
    with cuda_on_cpu.kernels_on_cpu(), pytest.MonkeyPatch.context() as patch:
        launches, launch = [], elements.launch
        patch.setattr(elements, "launch", lambda *given: (launches.append(given[0].name), launch(*given))[1])
        return wanted, call(), len(launches)


# ---- the kernel


@compiled_here
@pytest.mark.parametrize("op", sample_cases(OPS, USUAL))
def test_the_kernel_draws_what_xla_draws(op):
    """Every kind of cases, twins and raw bits among them; 500 is no whole number of blocks."""
    wanted, found, launches = both_ways(lambda: generate(op, 12345, (1 << 40) + 7, 500))
    assert launches == 3
    for name, codes in wanted.items():
        wrong = int((found[name] != codes).sum())
        assert wrong == 0 and found[name].dtype == codes.dtype, f"{name}: {wrong} mismatches of {codes.size}"


@compiled_here
@pytest.mark.parametrize("kind", sample_cases([kind.name for kind in KINDS], ()))
def test_each_kind_alone(kind):
    """So that what the kernel leaves out for one kind shows."""
    wanted, found, _ = both_ways(lambda: generate(SMALL, 3, 0, 400, kinds=[kind]))
    assert all((found[name] == codes).all() for name, codes in wanted.items())
    assert all(len(np.unique(wanted[name])) > 2 for name in "abc")


@pytest.mark.full
@compiled_here
def test_the_loop_and_vmap_call_it():
    op = tcemu.parse(SMALL)
    sides = get_implementation(op, "sm_70"), get_implementation(op, "sm_70:fraction_bits=20")

    def compare():
        run = make_chunk_runner(op, *sides, KINDS, None, (jax.devices("cpu")[0],)).compare(5, 0, 700, 1)
        return run.wrong_cases, run.wrong_outputs, run.first

    wanted, found, launches = both_ways(compare)
    assert wanted == found and wanted[0] > 0 and launches > 0
    which = elements.ElementGrid(F16, 3, 4, 8, 1)

    def drawn(low):
        of_case = jnp.arange(6, dtype=jnp.int32)
        kind = {name: jnp.full(6, 40 if name in ("edge", "special", "zero") else 0, jnp.int32) for name in elements.PACKED}
        place = jnp.broadcast_to(jnp.arange(8, dtype=jnp.uint32), (6, 8))
        keys = low + of_case.astype(jnp.uint32), of_case.astype(jnp.uint32)
        return elements.draw_floats(
            which, (4, 8), elements.FloatInputs(keys, kind, of_case[:, None] + jnp.arange(8, dtype=jnp.int32) - 4, place)
        )

    many = jnp.arange(3, dtype=jnp.uint32) * 1000
    wanted, found, _ = both_ways(lambda: np.asarray(jax.jit(lambda many: jax.vmap(drawn)(many))(many)))
    assert wanted.shape == (3, 6, 4, 8) and (wanted == found).all() and len(np.unique(wanted)) > 200
    assert (wanted[1] == drawn(many[1])).all()


@pytest.mark.full
def test_doubles_and_integers_are_left_to_xla():
    for op in ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32"):
        wanted, found, launches = both_ways(lambda op=op: generate(op, 1, 0, 10))
        assert launches == 0 and all((found[name] == codes).all() for name, codes in wanted.items())


@assembled_here
@pytest.mark.parametrize("architecture", sample_cases(ARCHITECTURES, ["sm_90"]))
def test_the_texts_compile(architecture, tmp_path):
    for which in (
        elements.ElementGrid(F16, 3, 16, 16, 1),
        elements.ElementGrid(E4M3, 4, 1, 32, 24),
        elements.ElementGrid(F32, 5, 1, 1, 64),
    ):
        assemble(elements.draw_kernel_text(which), architecture, tmp_path)


# ---- functions of single numbers, written as C++


def every_operation(x, y, i, j):
    """Of two uint32 and two int32: each operation that a text may have, in one word."""
    shift = (y & 31).astype(jnp.uint32)
    unsigned = [x + y, x - y, x * y, x & y, x | y, x ^ y, ~x, x << shift, x >> shift, jnp.maximum(x, y), jnp.minimum(x, y)]
    signed = [
        i + j,
        i - j,
        i * j,
        i & j,
        ~i,
        i << shift.astype(jnp.int32),
        i >> shift.astype(jnp.int32),
        jnp.maximum(i, j),
        jnp.clip(i, -5, j),
    ]
    signed.append(lax.shift_right_logical(i, shift.astype(jnp.int32)))
    asked = [
        x < y,
        x <= y,
        i > j,
        i >= j,
        x == y,
        i != j,
        (x < y) & (i < j),
        (x < y) | (i < j),
        (x < y) ^ (i < j),
        ~(x < y),
        x.astype(bool),
    ]
    narrow = [x.astype(jnp.uint8), x.astype(jnp.uint16) * jnp.uint16(3), (i.astype(jnp.uint8) + jnp.uint8(200))]
    word = jnp.uint32(0)
    for value in (*unsigned, *signed, *narrow, *(jnp.where(one, x, np.uint32(77)) for one in asked), *asked):
        word = (word ^ value.astype(jnp.uint32)) * np.uint32(0x01000193)
    return word


@compiled_here
def test_a_function_in_c_is_that_of_jax():
    """At the ends of both types and between them."""
    rng = np.random.default_rng(0)
    ends = np.array(
        [0, 1, 2, 31, 32, 127, 128, 255, 256, 65535, 65536, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF]
    )
    words = np.concatenate([ends, rng.integers(0, 1 << 32, 60)]).astype(np.uint32)
    x, y = (v.ravel() for v in np.meshgrid(words, words))
    i, j = rng.permutation(x).view(np.int32), rng.permutation(y).view(np.int32)
    text = scalars.scalar_function_text("f", every_operation, np.uint32, np.uint32, np.int32, np.int32)
    head = "#define __device__\n#define __forceinline__ inline\n"
    loop = 'extern "C" void run(int n, const unsigned *x, const unsigned *y, const int *i, const int *j, unsigned *d) {'
    library = ctypes.CDLL(
        str(cuda_on_cpu.build_library(f"{head}{text}{loop} for (int v = 0; v < n; ++v) d[v] = f(x[v], y[v], i[v], j[v]); }}"))
    )
    found = np.zeros_like(x)
    library.run(len(x), *(v.ctypes.data_as(ctypes.c_void_p) for v in (x, y, i, j, found)))
    wanted = np.asarray(jax.jit(every_operation)(x, y, i, j))
    wrong = int((found != wanted).sum())
    assert wrong == 0 and len(np.unique(wanted)) > len(wanted) // 2, f"{wrong} mismatches of {len(x)}"


def test_other_operations_are_refused():
    with pytest.raises(TypeError, match="population_count of unsigned int is no operation"):
        scalars.scalar_function_text("f", lax.population_count, np.uint32)
    with pytest.raises(TypeError, match=r"float32\[\].*single numbers of bool, int32"):
        scalars.scalar_function_text("f", lambda x: x.astype(jnp.float32), np.uint32)
    with pytest.raises(TypeError, match="single numbers"):
        scalars.scalar_function_text("f", lambda x: jnp.full(3, x), np.uint32)
