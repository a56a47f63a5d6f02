"""The kernels that draw cases and that compare on them, `fuzz/cuda` and `fuzz/llvm`: against XLA, and compiled for every GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cuda_on_cpu
from support.assembling import ARCHITECTURES, assemble, assembled_here
from support.drawn_ops import FUSED, OPS
from support.sampling import sample_cases

import tcemu
from tcemu.engine.backends.llvm import xla_call
from tcemu.formats import E4M3, F16, F32
from tcemu.fuzz import KINDS, Implementation, generate, get_implementation
from tcemu.uses.fuzz import case_generator as elements
from tcemu.uses.fuzz import comparison_loop, cuda_comparison
from tcemu.uses.fuzz.case_formulas import KindValues
from tcemu.uses.fuzz.comparison_loop import make_chunk_runner
from tcemu.uses.fuzz.llvm.kernel_calls import find_comparison_call

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
    with tcemu.execution("portable"):
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
        kind = KindValues(*(jnp.full(6, 40 if name in ("edge", "special", "zero") else 0, jnp.int32) for name in KindValues._fields))
        place = jnp.arange(8, dtype=jnp.int32)[:, None]
        keys = low + of_case.astype(jnp.uint32), of_case.astype(jnp.uint32)
        return elements.draw_floats(which, (4, 8), elements.FloatInputs(keys, kind, of_case + place - 4, jnp.broadcast_to(place, (8, 6))))

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
    with cuda_on_cpu.kernels_on_cpu():
        assemble(cuda_comparison.comparison_text(find_fused_call(FUSED[0])), architecture, tmp_path)


def find_fused_call(compared) -> Any:
    op, left, right = compared
    models = get_implementation(op, left).emulated, get_implementation(op, right).emulated
    return cuda_comparison.find_cuda_comparison(parsed(op), KINDS, models, True)


@compiled_here
@pytest.mark.parametrize("compared", sample_cases(FUSED, FUSED[:1]))
def test_the_fused_kernel_counts_what_the_portable_way_counts(compared):
    """Groups of 16 cases that fill no whole block; coverage reads the operands that the kernel returns."""
    with cuda_on_cpu.kernels_on_cpu(), pytest.MonkeyPatch.context() as patch:
        texts, launch = [], cuda_comparison.launch
        patch.setattr(cuda_comparison, "launch", lambda *given: (texts.append(given[0].name), launch(*given))[1])
        patch.setattr(comparison_loop, "find_comparison_call", cuda_comparison.find_cuda_comparison)
        wanted, found, _ = runs(compared, True, 700)
    assert_equal_counts(wanted, found)
    assert set(texts) == {"compare"} and found.coverage.cases[0] > 0


def test_models_that_share_no_products_are_compared_by_separate_kernels():
    bf16, f16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", FUSED[0][0]
    with cuda_on_cpu.kernels_on_cpu():
        assert find_fused_call(FUSED[0]) is not None
        for compared in ((bf16, "sm_80", "sm_90a"), (f16, "sm_90a:terms=6", "sm_90a:terms=4"), (E4M3_MMA, "sm_89", "sm_90a")):
            assert find_fused_call(compared) is None
    assert find_fused_call(FUSED[0]) is None  # no GPU


# ---- the kernels for CPUs

kernels_run = pytest.mark.skipif(bool(xla_call.missing()), reason=f"no kernel runs here: {xla_call.missing()}")
E4M3_MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
DRAWN = (*OPS, "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32")
COMPARED = (  # the steps of one side are parts of the other's, or not; with and without chains; wide formats
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a:terms=6", "sm_90a:terms=4"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_80", "sm_90a"),
    (E4M3_MMA, "sm_89", "sm_90a"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "sm_90a", "sm_80"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", "sm_80", "sm_90a"),
    (E4M3_MMA, "sm_90a", "sm_90a:fraction_bits=24"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.e5m2.e4m3.f32", "sm_120", "sm_120:terms=4"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m3.f32", "sm_120a", "sm_120a:fraction_bits=20"),
)


def parsed(op: str) -> Any:
    return tcemu.parse(op)


def by_portable(call):
    with tcemu.execution("portable"):
        return call()


def count_calls(call, name):
    """How often a CPU kernel of this name is called in what is returned."""
    kernels, build = [], xla_call.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_call, "call", lambda kernel, *given: (kernels.append(kernel.name), build(kernel, *given))[1])
        return call(), kernels.count(name)


@kernels_run
@pytest.mark.parametrize("op", sample_cases(DRAWN, (DRAWN[4],)))
def test_the_cpu_kernel_draws_what_xla_draws(op):
    """Every kind of cases; the last group of cases is not full."""
    wanted = by_portable(lambda: generate(op, 12345, (1 << 40) + 7, 500))
    found, calls = count_calls(lambda: generate(op, 12345, (1 << 40) + 7, 500), "draw")
    assert calls == (2 if "m64n24" in op else 3), "rows of 24 elements fill no vectors"
    for name, codes in wanted.items():
        wrong = int((found[name] != codes).sum())
        assert wrong == 0 and found[name].dtype == codes.dtype, f"{name}: {wrong} mismatches of {codes.size}"


@kernels_run
@pytest.mark.parametrize("op", sample_cases([E4M3_MMA, SMALL], [E4M3_MMA]))
@pytest.mark.parametrize("kind", sample_cases([kind.name for kind in KINDS], ("cancellation",)))
def test_the_cpu_kernel_draws_each_kind_alone(kind, op):
    draw = lambda: generate(op, 3, 0, 400, kinds=[kind])
    wanted, found = by_portable(draw), draw()
    assert all((found[name] == codes).all() for name, codes in wanted.items())
    assert all(len(np.unique(wanted[name])) > 2 for name in "abc")


@kernels_run
def test_the_cpu_kernel_under_vmap():
    keys = jnp.arange(60, dtype=jnp.uint32).reshape(3, 20) * np.uint32(0x9E3779B9)
    draw = lambda low: elements.draw_operands(parsed(SMALL), (low, low ^ 5), KINDS)["a"]
    found = jax.jit(jax.vmap(draw))(keys)
    assert found.shape == (3, 20, 8, 4) and (found[2] == draw(keys[2])).all() and len(np.unique(found)) > 100


@kernels_run
@pytest.mark.full
@pytest.mark.parametrize("op", DRAWN)
def test_the_cpu_kernel_draws_a_million_elements_and_more(op):
    cases = 1 + 4_000_000 // (parsed(op).m * parsed(op).k)
    draw = lambda: generate(op, 99, 1 << 50, cases)
    wanted, found = by_portable(draw), draw()
    assert sum(int((found[name] != codes).sum()) for name, codes in wanted.items()) == 0


def runs(compared, covering, cases):
    """The counts of a comparison by the portable way and by the kernel, and the calls of the kernel."""
    op, sides = parsed(compared[0]), [get_implementation(compared[0], target) for target in compared[1:]]

    def compare():
        make_chunk_runner.cache_clear()
        chunk = make_chunk_runner(op, *sides, KINDS, sides[0].model if covering else None, (jax.devices("cpu")[0],))
        iterations = -(-cases // chunk.cases_per_iteration)
        return chunk.compare(5, (1 << 40) + 3, cases, iterations)

    return by_portable(compare), *count_calls(compare, "compare")


def assert_equal_counts(wanted, found):
    assert found._replace(by_kind=0, coverage=0) == wanted._replace(by_kind=0, coverage=0) and wanted.wrong_cases > 0
    assert (found.by_kind == wanted.by_kind).all()
    assert all((x == y).all() for x, y in zip(*map(jax.tree.leaves, (found.coverage, wanted.coverage)), strict=True))


@kernels_run
@pytest.mark.parametrize("compared", sample_cases(COMPARED, COMPARED[2:3]))
def test_the_comparing_kernel_counts_what_the_portable_way_counts(compared):
    wanted, found, calls = runs(compared, True, 700)
    assert_equal_counts(wanted, found)
    assert calls > 0 and found.coverage.cases[0] > 0


@kernels_run
@pytest.mark.full
@pytest.mark.parametrize("compared", COMPARED)
def test_the_comparing_kernel_on_many_cases(compared):
    for covering in (False, True):
        wanted, found, calls = runs(compared, covering, 40_000)
        assert_equal_counts(wanted, found)
        assert calls > 0


@kernels_run
def test_what_no_kernel_compares_is_compared_without():
    """An implementation that is a function, and operands that no kernel draws."""
    op, true = parsed(SMALL), get_implementation(SMALL, "sm_70")
    faulty = Implementation("faulty", lambda given: true.fn(given) ^ 1, model=true.model)
    assert find_comparison_call(op, KINDS, (true.emulated, faulty.emulated), True) is None
    assert find_comparison_call(op, KINDS, (true.emulated, true.emulated), True) is not None
    for other, target in (("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32", "sm_90"), (OPS[1], "sm_90"), (OPS[8], "sm_90")):
        model = get_implementation(other, target).emulated
        assert model is not None and find_comparison_call(parsed(other), KINDS, (model, model), True) is None
