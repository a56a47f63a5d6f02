"""What `execution("native")` launches: statements and products reach it whole, its kernels on a CPU, its texts through the assembler."""

import random
import shutil
import subprocess
from dataclasses import replace

import jax
import numpy as np
import pytest
import replay_golden as replay
from support import golden, native_gpu
from support.device_processes import run_on_devices
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz, silicon
from tcemu.base import stored_code as store
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.engine.backends.native import native_text as sources
from tcemu.engine.backends.native import wgmma_products as wgmma
from tcemu.engine.backends.native.native_statement import has_kernel, statement_kernel
from tcemu.engine.backends.native.units import find_product_unit
from tcemu.uses.fuzz import implementations, verification
from tcemu.uses.silicon.operand_variants import operand_variants

F16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64"
FP8_WGMMA = f"{WGMMA}k32.f32.e4m3.e4m3"
compiled_here = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed here")
ptxas_here = pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas here")
nvcc_here = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.fixture(autouse=True)
def programs_of_one_gpu_alone():
    """A program that was traced for one GPU must not serve the next test, which has another; and none is a real one."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()


@pytest.fixture
def gpu(monkeypatch):
    return native_gpu.emulate_gpu(monkeypatch)


def words(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


def whole(*shape, seed=0, most=2):
    """Small whole numbers, which every format holds, and whose sums are exact."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(np.float32)


def native(fn, *operands):
    with tcemu.execution("native"):
        return fn(*operands)


# ---- statements


@pytest.mark.parametrize("family", sample_cases(replay.REPLAYS, ["mma_sp"]))
def test_recorded_words_come_back_through_statements(gpu, family):
    cases = list(golden.cases(family))
    for case in cases[:: max(1, len(cases) // 5)]:
        wrong, total = native(replay.compare, case)
        assert wrong == 0 and total > 0
    assert set(gpu) >= {case["ptx"] for case in cases[:1]}


def test_statements_under_jit_and_vmap(gpu):
    a, b, c = words(2, 3, 32, 4), words(3, 32, 2, seed=1), words(2, 1, 32, 4, seed=2)
    call = lambda a, b, c: tcemu.mma(F16_MMA, a, b, c, target="sm_90a")
    wanted = call(a, b, c)
    assert (native(jax.jit(call), a, b, c) == wanted).all() and gpu == [F16_MMA]
    mapped = jax.jit(jax.vmap(jax.vmap(call, (0, 0, None)), (0, None, 0)))
    assert (native(mapped, a, b, c[:, 0]) == wanted).all() and set(gpu) == {F16_MMA}
    assert native(call, a[:0], b, c[:0]).shape == (0, 3, 32, 4)
    assert (jax.jit(lambda a, b, c: silicon.run(F16_MMA, a, b, c))(a, b, c) == wanted).all() and gpu[-1] == F16_MMA
    with pytest.raises(TypeError, match="a runner is given arrays, outside jit"):
        jax.jit(lambda a: silicon.run(F16_MMA, a, b, c, runner=native_gpu.EmulatedGpu()))(a)


def test_lanes_without_a_row_may_hold_any_address(gpu):
    load, memory = "ldmatrix.sync.aligned.m8n8.x1.b16", words(2, 64)
    address = np.where(np.arange(32) < 8, np.arange(32) * 16, 1 << 20)
    wanted = tcemu.ldmatrix(load, memory, address)
    assert (native(lambda: tcemu.ldmatrix(load, memory, address)) == wanted).all() and gpu == [load]


@pytest.mark.parametrize("op", sample_cases([F16_MMA, F16_MMA.replace("mma.", "mma.sp.", 1), f"{WGMMA[:-2]}8k16.f32.f16.f16"], []))
def test_fuzzing_a_gpu_runs_in_the_compiled_loop(gpu, monkeypatch, op):
    monkeypatch.setattr(implementations, "gpu_target", lambda: "sm_90a")
    monkeypatch.setattr(implementations, "gpu_name", lambda: "an emulation")
    implementations._implementation_from_spec.cache_clear()
    one = fuzz.get_implementation(op, "gpu")
    assert one.traceable and "an emulation, target sm_90a" in one.identity
    assert fuzz.find_mismatches(op, "sm_90a", one, cases=100, shrink=False, coverage=False).wrong_cases == 0
    with tcemu.execution("native"):  # the emulated side stays emulated
        found = fuzz.find_mismatches(op, "sm_90a:fraction_bits=12", one, cases=100, shrink=False, coverage=False)
    assert found.wrong_cases > 0 and set(gpu) == {op}
    implementations._implementation_from_spec.cache_clear()


# ---- products

TILED = ("k16.f32.f16.f16", "k16.f16.f16.f16", "k16.f32.bf16.bf16", "k8.f32.tf32.tf32", "k32.f32.e4m3.e4m3", "k32.s32.s8.s8")
SHAPES = ((70, 200, 83), (2, 130, 129, 64), (2, 1, 1, 3, 1))

DENSE = sorted({str(op) for op in tcemu.isa.instructions("sm_90a", "mma") if op.a is not None and op.d is not None and has_kernel(op)})
USUAL = ("m16n8k8.row.col.f32.tf32",)


@pytest.mark.parametrize("spelling", sample_cases(DENSE, [next(s for s in DENSE if part in s) for part in USUAL]))
def test_products_by_fragments_are_the_emulation(gpu, spelling):
    """Every mma: a K that is not whole, more than a fragment each way, raw bits."""
    op = tcemu.parse(spelling)
    if (op.matrix_count > 1 and op.d != op.accumulator) or (op.matrix_count > 1 and str(op.d) == "f16"):
        pytest.skip("its sums are rounded after each instruction")
    rng = np.random.default_rng(0)
    m, n, k = 2 * op.m - 3, 3 * op.n - 1, 2 * op.k - (1 if op.d == tcemu.formats.F64 or op.a.is_integer else 0)
    draw = lambda *shape: rng.integers(-(1 << 20), 1 << 20, shape) if op.a.is_integer else rng.normal(size=shape)
    a, b, c = draw(2, m, k), draw(k, n), draw(2, m, n)
    call = lambda: np.asarray(tcemu.gemm(a, b, c, op=op, target="sm_90a"))
    wanted = call()
    got = native(call)
    assert got.tobytes() == wanted.tobytes()
    (used,) = map(tcemu.parse, set(gpu))
    assert replace(used, m=op.m) == op  # m8n8k4 of f64 has the sums of m16n8k4, which computes more at once


@compiled_here
@pytest.mark.parametrize("case", sample_cases([(types, shape) for types in TILED for shape in SHAPES], [], ids=str))
def test_products_by_wgmma(gpu, case):
    types, (*batch, m, n, k) = case
    a, b, c = whole(*batch, m, k), whole(k, n, seed=1), whole(*batch, m, n, seed=2, most=3)
    call = jax.jit(lambda a, b, c: tcemu.gemm(a, b, c, op=f"{WGMMA}{types}", target="sm_90a"))
    assert (native(call, a, b, c) == a @ b + c).all() and gpu == [f"{WGMMA}{types}"]


@compiled_here
@pytest.mark.parametrize("busy", sample_cases((1, 10**9), 2))
def test_wide_blocks_and_vmap(gpu, monkeypatch, busy):
    a, b = whole(3, 2, 100, 40), whole(3, 40, 300, seed=1)
    call = lambda a, b: tcemu.gemm(a, b, op=f"{WGMMA}k32.s32.s8.s8", target="sm_90a")
    monkeypatch.setattr(wgmma, "BUSY", busy)
    assert (native(jax.jit(jax.vmap(call)), a, b[:, None]) == a @ b[:, None]).all()
    assert (native(jax.jit(jax.vmap(call, (0, None))), a, b[0]) == a @ b[0]).all()


@compiled_here
def test_steps_filled_with_zeros(gpu):
    """sm_89 adds 16 products of FP8 at once, and wgmma of sm_90a 32."""
    op = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
    unit = find_product_unit(product_spec(tcemu.parse(op)), tcemu.get_model(op, "sm_89"), "sm_90a")
    assert (unit.how, unit.step, unit.own_step, unit.op.family) == ("filled with zeros", 16, 32, "wgmma")
    a, b = whole(40, 100), whole(100, 30, seed=1)
    assert (native(lambda: tcemu.gemm(a, b, op=op, target="sm_89")) == a @ b).all()
    registers = [(words(32, n, seed=n) & 0x01010101) * 0x38 for n in (4, 2)]  # 1 and 0: sums are whole
    call = lambda: tcemu.mma(op, *registers, np.zeros((32, 4), np.uint32), target="sm_89")
    assert (native(call) == call()).all() and len(gpu) == 2


@compiled_here
@pytest.mark.parametrize("name", sample_cases(["deepseek", "fp8", "f16", "bf16", "tf32"], ["deepseek"]))
def test_recipes_and_their_gradients(gpu, name):
    """Scales of one, so that whole numbers stay whole."""
    recipe = tcemu.get_recipe(name, backward="exact")
    a, b = whole(20, 140), whole(140, 130, seed=1)  # two blocks of scales along K and N
    scales = {}
    if name == "deepseek":
        scales = {"scale_a": 2.0 ** whole(20, 2, seed=2), "scale_b": 2.0 ** whole(2, 2, seed=3)}
        a, b = a * np.repeat(scales["scale_a"], 128, 1)[:, :140], b * np.repeat(np.repeat(scales["scale_b"], 128, 0), 128, 1)[:140, :130]
    elif name == "fp8":
        scales = {"scale_a": np.float32(1), "scale_b": np.float32(1)}
    call = jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe, **scales))
    assert (native(call, a, b) == a @ b).all() and gpu == [native_gpu.launched_name(recipe.op)]
    wanted = tcemu.matmul(a, b, recipe=recipe.replace(split_k=2), **scales)
    assert (native(lambda: tcemu.matmul(a, b, recipe=recipe.replace(split_k=2), **scales)) == wanted).all()


@compiled_here
@pytest.mark.parametrize("case", sample_cases([(promote, split) for promote in (1, 3, 4) for split in (1, 3)], [], ids=str))
def test_promoted_sums(gpu, case):
    promote, split = case
    recipe = tcemu.get_recipe("fp8", backward="exact").replace(promote=promote, split_k=split)
    a, b = whole(2, 40, 200), whole(200, 30, seed=1)
    call = lambda: tcemu.matmul(a, b, recipe=recipe, scale_a=1.0, scale_b=1.0)
    wanted = call()
    assert (native(call) == wanted).all() and gpu == [native_gpu.launched_name(recipe.op)]


@pytest.mark.full
def test_promoted_sums_chunk_by_chunk(gpu):
    """Where no kernel promotes: an instruction of one warp."""
    recipe = tcemu.get_recipe("deepseek", "sm_90", backward="exact")
    a, b = (np.random.default_rng(at).normal(size=shape).astype(np.float32) for at, shape in enumerate(((20, 256), (256, 12))))
    wanted = tcemu.matmul(a, b, recipe=recipe)
    assert (native(lambda: tcemu.matmul(a, b, recipe=recipe)) == wanted).all() and set(gpu) == {native_gpu.launched_name(recipe.op)}


@compiled_here
def test_emulate_and_ragged_products(gpu):
    recipe = tcemu.get_recipe("bf16", backward="exact")
    a, b = whole(24, 40), whole(40, 16, seed=1)
    assert (native(tcemu.emulate(lambda a, b: a @ b, recipe), a, b) == a @ b).all() and len(gpu) == 1
    found = native(lambda: tcemu.dot_general(recipe)(a, b, (((1,), (0,)), ((), ()))))
    assert (found == a @ b).all() and {*gpu} == {native_gpu.launched_name(recipe.op)}


# ---- several devices

SHARDED = """
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import tcemu
from support import native_gpu
from tcemu.engine.backends.native import native_statement as instruction, wgmma_products as wgmma

class Patch:
    setattr = staticmethod(setattr)

def product(self, a, b, c):
    shapes.append(c.shape)
    a, b = (jax.lax.bitcast_convert_type(v, jnp.int8).astype(jnp.int32) for v in (a, b))
    return (jnp.matmul(a, b.mT) + c.astype(jnp.int32)).astype(jnp.uint32)

def statement(entry, blocks, result, numbers, a, b, c):
    shapes.append(c.shape)
    return (a + c,)

native_gpu.pretend_gpu(Patch)
wgmma.WgmmaReduction.__call__, instruction.launch, shapes = product, statement, []
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
whole = lambda seed, *shape: np.random.default_rng(seed).integers(-9, 10, shape).astype(np.int8)
a, b = whole(0, 2, 8, 40), whole(1, 2, 40, 16)
op = "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8"
gemm = lambda a, b: tcemu.gemm(a, b, op=op, target="sm_90a")
for specs in ((("x",), ("x",), ("x",)), ((None, "x"), (None, None, "y"), (None, "x", "y"))):
    with tcemu.execution("native"):
        call = jax.jit(gemm).lower(put(a, *specs[0]), put(b, *specs[1])).compile()
        d = call(put(a, *specs[0]), put(b, *specs[1]))
    assert d.sharding.is_equivalent_to(NamedSharding(mesh, P(*specs[2])), 3), d.sharding
    assert (np.asarray(d) == np.matmul(a.astype(np.int32), b)).all()
    assert "all-gather" not in call.as_text()
with tcemu.execution("native"):
    across = jax.shard_map(gemm, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    assert (np.asarray(jax.jit(across)(a, b)) == np.matmul(a.astype(np.int32), b)).all()
op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
words = [put(np.arange(16 * 32 * n, dtype=np.uint32).reshape(16, 32, n), ("x", "y")) for n in (4, 2, 4)]
with tcemu.execution("native"):
    call = jax.jit(lambda *abc: tcemu.mma(op, *abc, target="sm_90a")).lower(*words).compile()
assert (np.asarray(call(*words)) == np.asarray(words[0]) * 2).all() and "all-gather" not in call.as_text()
assert {(1, 8, 16), (2, 4, 4), (2, 32, 4)} <= {*shapes}, shapes
print("sharded", len(jax.devices()))
"""


@pytest.mark.full
def test_a_mesh_cuts_batch_rows_and_columns():
    assert run_on_devices(8, SHARDED) == "sharded 8\n"


# ---- lowering and texts


def lower_for_gpu(monkeypatch, fn, *operands):
    """The program for a GPU."""
    native_gpu.pretend_gpu(monkeypatch)
    monkeypatch.setattr(store, "load_or_compile", lambda _, text, architecture: f"{architecture} {len(text)}".encode())
    with tcemu.execution("native"):
        try:
            return jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        except RuntimeError as error:  # JAX 0.11
            pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")


def test_a_statement_lowers_to_one_call(monkeypatch):
    operands = [words(5, 32, n) for n in (4, 2, 4)]
    text = lower_for_gpu(monkeypatch, lambda *abc: tcemu.mma(F16_MMA, *abc, target="sm_90a"), *operands)
    assert text.count(f"@{launch.TARGET}") == 1 and ".target sm_90a" in text and "grid_x = 5" in text


def test_a_batch_by_vmap_is_one_launch(monkeypatch):
    operands = [words(7, 5, 32, n) for n in (4, 2, 4)]
    call = jax.vmap(jax.vmap(lambda *abc: tcemu.mma(F16_MMA, *abc, target="sm_90a")))
    text = lower_for_gpu(monkeypatch, call, *operands)
    assert text.count(f"@{launch.TARGET}") == 1 and "grid_x = 35" in text


def test_products_lower_to_three_calls(monkeypatch):
    """Both operands placed, and the product; of 8192 columns in wide blocks."""
    a, b = np.zeros((512, 64), np.float16), np.zeros((64, 16384), np.float16)
    text = lower_for_gpu(monkeypatch, lambda a, b: tcemu.gemm(a, b, op=f"{WGMMA}k16.f32.f16.f16", target="sm_90a"), a, b)
    assert text.count(f"@{launch.TARGET}") == 3 and text.count('kernel_data = "sm_90a ') == 1 and "grid_x = 256" in text


def test_auto_keeps_the_emulation_for_other_devices(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    monkeypatch.setattr(store, "load_or_compile", lambda _, text, architecture: b"")
    a, b = whole(16, 32), whole(32, 8, seed=1)
    registers = [words(3, 32, n) for n in (4, 2, 4)]
    wanted = tcemu.mma(F16_MMA, *registers, target="sm_90a")
    with tcemu.execution("auto"):
        assert (tcemu.mma(F16_MMA, *registers, target="sm_90a") == wanted).all()
        assert (jax.jit(jax.vmap(lambda *abc: tcemu.mma(F16_MMA, *abc, target="sm_90a")))(*registers) == wanted).all()
        call = jax.jit(lambda a, b: tcemu.gemm(a, b, op=F16_MMA, target="sm_90a"))
        assert (call(a, b) == a @ b).all()
        assert "custom_vmap" in str(jax.make_jaxpr(call)(a, b))


SPELLED = [op for family in verification.FAMILIES for op in tcemu.isa.instructions("sm_90a", family) if has_kernel(op)]


def assemble_text(text, folder, tool, suffix, *options):
    path = folder / f"kernel.{suffix}"
    path.write_text(text)
    done = subprocess.run([tool, *options, str(path), "-o", str(folder / "out")], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode or "serialized" in done.stderr + done.stdout else ""


@ptxas_here
@pytest.mark.parametrize("count", sample_cases([8, len(SPELLED)], [8]))
def test_statements_with_pointers_assemble(count, tmp_path):
    for op in random.Random(count).sample(SPELLED, count):
        ways = operand_variants(op) if op.family in verification.COMPUTING_FAMILIES else [None] * len(op.operand_forms)
        for form, way in enumerate(ways):
            made = statement_kernel(op, "sm_90a", form if way is None else way.form, {} if way is None else way.values, pointers=True)
            assert not (said := assemble_text(made.text, tmp_path, "ptxas", "ptx", "-arch=sm_90a")), said


def kernels() -> dict[str, str]:
    """The texts of every kind of product on sm_90a."""
    made = {}
    for op in tcemu.isa.instructions("sm_90a", "wgmma"):
        if op.n == 8 and op.a is not None and op.a.bits >= 8:
            for columns in (wgmma.NARROW, wgmma.WIDE):
                made[f"{op} {columns}"] = sources.wgmma_kernel_text(sources.WgmmaKernelSpec(op, columns))
            if op.d == tcemu.formats.F32:
                for scaled in (False, True):
                    made[f"{op} promoted, scaled {scaled}"] = sources.wgmma_kernel_text(
                        sources.WgmmaKernelSpec(op, wgmma.NARROW, True, scaled)
                    )
    for op in tcemu.isa.instructions("sm_90a", "mma"):
        for count in (1, 100) if op.c == op.d else ():  # no product runs the others: its sums would be rounded after each instruction
            made[f"{op} {count}"] = sources.mma_kernel_text(sources.MmaKernelSpec.choose(op, count, count))
    return made | {
        f"place {size} {lines}": sources.place_kernel_text(size, lines) for size in (1, 2, 4) for lines in (wgmma.NARROW, wgmma.WIDE)
    }


KERNELS = kernels()
FEW = [f"{FP8_WGMMA.replace('n64', 'n8')} promoted, scaled True", f"{F16_MMA} 100"]


@nvcc_here
@pytest.mark.parametrize("name", sample_cases(KERNELS, FEW))
def test_kernels_compile(name, tmp_path):
    """And no wgmma waits for another, which the assembler would say."""
    options = ("--cubin", "-arch=sm_90a", "-std=c++17", "--fmad=false", "-Werror", "all-warnings")
    assert not (said := assemble_text(KERNELS[name], tmp_path, "nvcc", "cu", *options)), said
