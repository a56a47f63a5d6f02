"""With an NVIDIA GPU of sm_90a: `execution("native")` has the recorded words and the bits of the emulation; skipped elsewhere."""

import jax
import numpy as np
import pytest
import replay_golden as replay
from support import golden
from support.sampling import sample_cases
from support.systems import skip_file

import tcemu
from tcemu import fuzz
from tcemu.engine.backends.native.native_statement import has_kernel
from tcemu.engine.backends.native.units import gpu_target


def missing():
    """Why there is nothing to run on, or ""."""
    try:
        return "" if gpu_target() == replay.TARGET else f"this GPU is {gpu_target()}, the recorded one {replay.TARGET}"
    except tcemu.Unsupported as error:
        return str(error)


skip_file(missing())
pytestmark = pytest.mark.gpu
DENSE = [
    str(op)
    for op in tcemu.isa.instructions("sm_90a", "mma")
    if has_kernel(op) and op.d == op.accumulator and (op.matrix_count == 1 or op.d.name == "f32")
]
RECIPES = [name for name in tcemu.recipes.RECIPES if (row := tcemu.recipes.ROWS[name]).block_scale is None and not row.sparse]
SHAPES = [tuple(map(int, np.random.default_rng(seed).integers(1, 700, 3))) for seed in range(26)]
SHAPES += [(1, 1, 1), (2048, 1024, 512), (129, 257, 1025), (512, 2048, 4096)]
FUZZED = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
    "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32",
    "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16",
    "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2",
    "wgmma.mma_async.sp.sync.aligned.m64n8k64.f32.e4m3.e4m3",
)


def native(fn, *operands):
    with tcemu.execution("native"):
        return fn(*operands)


def same(got, wanted):
    got, wanted = (np.ascontiguousarray(v) for v in (got, wanted))
    wrong = int((got.view(f"u{got.itemsize}") != wanted.view(f"u{wanted.itemsize}")).sum())
    assert got.shape == wanted.shape and wrong == 0, f"{wrong} mismatches of {wanted.size}"


@pytest.mark.parametrize("family", replay.REPLAYS)
def test_recorded_words_come_back(family):
    counts = [native(replay.compare, case) for case in golden.cases(family)]
    assert sum(wrong for wrong, _ in counts) == 0, f"mismatches of {sum(words for _, words in counts)} words"


@pytest.mark.parametrize("op", FUZZED)
def test_the_emulation_against_the_gpu_in_one_loop(op):
    """10^8 outputs each; the side is part of the compiled loop."""
    one = fuzz.get_implementation(op, "gpu")
    assert one.traceable
    cases = 10**8 // (tcemu.parse(op).m * tcemu.parse(op).n)
    assert fuzz.find_mismatches(op, replay.TARGET, one, cases=cases, shrink=False).wrong_outputs == 0


@pytest.mark.parametrize("spelling", sample_cases(DENSE, 9))
def test_gemm_by_mma(spelling):
    op, rng = tcemu.parse(spelling), np.random.default_rng(0)
    draw = lambda *shape: rng.integers(-(1 << 20), 1 << 20, shape) if op.a.is_integer else rng.normal(size=shape)
    a, b, c = draw(2, 130, 7 * op.k - 1), draw(7 * op.k - 1, 75), draw(2, 130, 75)
    call = lambda: tcemu.gemm(a, b, c, op=op, target=replay.TARGET)
    same(native(call), call())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", sample_cases(SHAPES, 10, ids=str))
def test_recipes_at_many_shapes(name, shape):
    rng, recipe, (m, n, k) = np.random.default_rng(0), tcemu.get_recipe(name, backward="exact"), shape
    a, b = (rng.normal(size=s) * np.exp2(rng.integers(-8, 8, s)) for s in ((m, k), (k, n)))
    call = jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe))
    operands = a.astype(np.float32), b.astype(np.float32)
    same(native(call, *operands), call(*operands))


def test_rows_of_other_targets():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(200, 300)), rng.normal(size=(300, 100))
    for op, target in (
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_89"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_100"),
        ("wmma.mma.sync.aligned.row.col.m16n16k8.f32.tf32.tf32.f32", "sm_90a"),
    ):
        call = lambda op=op, target=target: tcemu.gemm(a, b, op=op, target=target)
        same(native(call), call())


def test_other_devices_are_left_to_the_emulation():
    op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    a, b = np.ones((16, 32), np.float16), np.ones((32, 8), np.float16)
    with tcemu.execution("auto"), jax.default_device(jax.devices("cpu")[0]):
        same(tcemu.gemm(a, b, op=op, target=replay.TARGET), np.full((16, 8), 32, np.float32))
