"""`execution("native")` without a GPU: the choice and what compiled programs know of it, refusals, the table of equalities."""

import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import native_gpu
from support.sampling import sample_cases
from support.unit_equalities import equalities

import tcemu
from tcemu.base import execution as executing
from tcemu.engine.architectures.lookup import target_rows
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.backends.cuda import nvrtc
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.engine.backends.native import units
from tcemu.formats import BF16, E4M3, F16, F32, S32, from_float

F16_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
F16_WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
FP8_WGMMA = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
FP8_MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
SPARSE = "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
LOAD = "ldmatrix.sync.aligned.m8n8.x1.b16"
compiled_here = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed here")
assembled_here = pytest.mark.skipif(shutil.which("ptxas") is None or shutil.which("nvcc") is None, reason="no nvcc here")


@pytest.fixture(autouse=True)
def programs_of_one_gpu_alone():
    """A program that was traced for one GPU must not serve the next test, which has another; and none is a real one."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()


def words(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, dtype=np.uint32)


def registers(op, batch=(), names="abc"):
    return [words(*batch, 32, tcemu.parse(op).register_count(name), seed=at) for at, name in enumerate(names)]


# ---- the choice


def test_the_choice_holds_within():
    assert executing.current_execution() == "emulated"
    with tcemu.execution("auto"):
        with tcemu.execution("native"):
            assert executing.current_execution() == "native"
        assert executing.current_execution() == "auto"

        @tcemu.execution("emulated")
        def inside():
            return executing.current_execution()

        assert inside() == "emulated" and executing.current_execution() == "auto"
    with pytest.raises(RuntimeError), tcemu.execution("native"):
        raise RuntimeError
    assert executing.current_execution() == "emulated"
    with pytest.raises(ValueError, match="emulated, portable, native, auto"), tcemu.execution("gpu"):
        pass


def mma_of(a, b, c):
    return tcemu.mma(F16_MMA, a, b, c, target="sm_90a")


TRANSFORMED = {
    "plain": lambda: mma_of,
    "jit": lambda: jax.jit(mma_of),
    "vmap": lambda: jax.jit(jax.vmap(mma_of)),
    "scan": lambda: jax.jit(lambda a, b, c: jax.lax.scan(lambda s, ab: (s, mma_of(*ab, s)), c[0], (a, b))[1]),
    "map": lambda: jax.jit(lambda a, b, c: jax.lax.map(lambda abc: mma_of(*abc), (a, b, c))),
}


@pytest.mark.parametrize("name", sample_cases(TRANSFORMED, ["jit"]))
def test_what_was_compiled_under_one_choice_does_not_serve_another(monkeypatch, name):
    """Neither by `jit` nor within loops, maps and derivatives, in any order."""
    launched = native_gpu.emulate_gpu(monkeypatch)
    operands, fn = registers(F16_MMA, (3,)), TRANSFORMED[name]()
    for choice in ("emulated", "native", "emulated", "native"):
        before = len(launched)
        with tcemu.execution(choice):
            text = str(jax.make_jaxpr(fn)(*operands))
            fn(*operands)
        assert (len(launched) > before or "custom_vmap" in text) == (choice == "native"), choice


def test_gradients_are_computed_as_chosen(monkeypatch):
    launched = native_gpu.emulate_gpu(monkeypatch)
    recipe = tcemu.get_recipe("bf16", "sm_90")
    loss = jax.jit(jax.grad(lambda a, b: tcemu.matmul(a, b, recipe=recipe).sum(), (0, 1)))
    a, b = jnp.ones((16, 32)), jnp.ones((32, 8))
    emulated = loss(a, b)
    assert not launched
    with tcemu.execution("native"):
        native = loss(a, b)
    assert len(launched) >= 2
    assert all((x == y).all() for x, y in zip(emulated, native, strict=True))


# ---- refusals


def refusal(fn):
    """What `native` says; under `auto` the same call gives the emulation's bits."""
    expected = jax.tree.map(np.asarray, fn())
    with tcemu.execution("auto"):
        assert (np.asarray(fn()) == expected).all()
    with tcemu.execution("native"), pytest.raises(tcemu.Unsupported) as error:
        fn()
    return str(error.value)


def product(op, target, **keywords):
    a, b = (np.random.default_rng(at).normal(size=shape).astype(np.float32) for at, shape in enumerate(((16, 32), (32, 16))))
    return lambda: tcemu.gemm(a, b, op=op, target=target, **keywords)


@pytest.mark.skipif(bool(launch.compute_capabilities()), reason="there is a GPU here")
def test_without_a_gpu():
    said = refusal(lambda: tcemu.mma(F16_MMA, *registers(F16_MMA), target="sm_90a"))
    assert "JAX finds no NVIDIA GPU" in said and 'execution("auto")' in said and F16_MMA in said
    assert "JAX finds no NVIDIA GPU" in refusal(product(F16_WGMMA, "sm_90a"))
    assert "JAX finds no NVIDIA GPU" in refusal(lambda: tcemu.movmatrix("movmatrix.sync.aligned.m8n8.trans.b16", words(32, 1)))


FAR = tcemu.get_model(F16_MMA, "sm_90a").replace(fraction_bits=20)
REFUSED = {  # what is asked -> what is said
    "another row": (product(F16_MMA, "sm_80"), "no instruction of the GPU here, sm_90a, computes by Model(result=f32, terms=8"),
    "a what-if model": (product(F16_MMA, "sm_90a", model=FAR), "fraction_bits=20"),
    "what-if, in registers": (lambda: tcemu.mma(F16_MMA, *registers(F16_MMA), target="sm_90a", model=FAR), "fraction_bits=20"),
    "no unit of the types": (product("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32", "sm_120a"), "multiplies no e2m1"),
    "rounded each time": (product("wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32", "sm_90a"), "rounded to f16 after each instruction"),
    "fragments of old": (
        lambda: tcemu.wmma_load("wmma.load.a.sync.aligned.row.m16n16k16.f16", words(128), target="sm_70"),
        "fragments of sm_70 hold elements elsewhere",
    ),
}


@pytest.mark.parametrize("name", sample_cases(REFUSED, 4))
def test_refusals_say_why(monkeypatch, name):
    native_gpu.pretend_gpu(monkeypatch)
    call, wanted = REFUSED[name]
    assert wanted in refusal(call)


@pytest.mark.full
def test_a_sparse_instruction_with_another_row(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    a, b, c = registers(SPARSE)
    said = refusal(lambda: tcemu.mma_sp(SPARSE, a, b, c, np.full(32, 0x4444, np.uint32), selector=0, target="sm_80"))
    assert "the GPU here, sm_90a, computes it by" in said and "terms=8" in said


def test_what_is_traced_is_refused(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    own = tcemu.get_model(F16_MMA, "sm_90a")
    call = jax.jit(lambda n: product(F16_MMA, "sm_90a", model=own.replace(fraction_bits=n))())
    assert "fraction_bits of the model is an array" in refusal(lambda: call(jnp.int32(25)))
    a, b, c = registers(SPARSE)
    e = np.full(32, 0x4444, np.uint32)
    assert "selector is traced" in refusal(jax.jit(lambda s=0: tcemu.mma_sp(SPARSE, a, b, c, e, selector=jnp.int32(s), target="sm_90a")))
    address = np.arange(32, dtype=np.int32) * 16
    assert "address is traced" in refusal(lambda: jax.jit(lambda v: tcemu.ldmatrix(LOAD, words(128), v))(address))
    load = "wmma.load.a.sync.aligned.row.m16n16k16.f16"
    assert "offset is traced" in refusal(lambda: jax.jit(lambda v: tcemu.wmma_load(load, words(256), offset=v))(16))


@pytest.mark.full
def test_a_gpu_that_nobody_verified(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch, "sm_80")
    assert "is not verified: its evidence is 'published'. tcemu verify compares the two" in refusal(product(F16_MMA, "sm_80"))
    assert "is not verified" in refusal(lambda: tcemu.ldmatrix(LOAD, words(128), np.zeros(32, np.int32)))
    native_gpu.pretend_gpu(monkeypatch, "sm_120a")
    assert "evidence is 'literature'" in refusal(product(FP8_MMA, "sm_120a"))


def test_what_ptx_leaves_open_is_left_to_the_emulation(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    store, fragment = "wmma.store.d.sync.aligned.row.m16n16k16.f32", words(32, 8)
    assert "stride 8 is below 16" in refusal(lambda: tcemu.wmma_store(store, words(300), fragment, stride=8))
    address = np.arange(32, dtype=np.int32) // 2 * 16
    said = refusal(lambda: tcemu.stmatrix("stmatrix.sync.aligned.m8n8.x4.b16", words(200), address, words(32, 4)))
    assert "two lanes have one address" in said


def test_a_memory_that_no_block_has(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    said = refusal(lambda: tcemu.ldmatrix(LOAD, np.zeros(60_000, np.uint32), np.zeros(32, np.int32)))
    assert "a memory of 240000 bytes; a block of the GPU here has 232448" in said


@pytest.mark.full
def test_sizes_that_are_symbols(monkeypatch):
    native_gpu.pretend_gpu(monkeypatch)
    rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 32"), jnp.float32)
    for op in (F16_WGMMA, F16_MMA):
        call = jax.jit(lambda a, op=op: tcemu.gemm(a, np.ones((32, 8), np.float32), op=op, target="sm_90a"))
        with tcemu.execution("native"), pytest.raises(tcemu.Unsupported, match="b is a symbol"):
            jax.export.export(call)(rows)
        with tcemu.execution("auto"):
            program = jax.export.export(call)(rows)
        assert (program.call(np.ones((3, 32), np.float32)) == 32).all()


@pytest.mark.full
def test_code_of_old_compilers(monkeypatch):
    """FP8 mma of sm_90 is software, which ptxas made otherwise before 12.8."""
    native_gpu.pretend_gpu(monkeypatch)
    monkeypatch.setattr(units, "driver_version", lambda: (12, 6))
    monkeypatch.setattr(nvrtc, "library", lambda: 1)
    monkeypatch.setattr(nvrtc, "version", lambda: (12, 6))
    said = refusal(lambda: tcemu.mma(FP8_MMA, *registers(FP8_MMA), target="sm_90a"))
    assert "NVRTC is of CUDA 12.6, which made other code of it; 12.8 or later is needed" in said
    assert units.find_product_unit(product_spec(tcemu.parse(F16_MMA)), tcemu.get_model(F16_MMA, "sm_90a"), "sm_90a").op == tcemu.parse(
        F16_MMA
    )
    op = tcemu.parse(FP8_MMA)
    with pytest.raises(tcemu.Unsupported, match=r"the driver is of CUDA 12\.6"):
        units.find_statement_unit(op, tcemu.get_model(op, "sm_90a"), False, product_spec(op), "sm_90a")


def test_integer_sums_are_clamped_after_as_many_products():
    """An H200's K = 32 clamps once, an RTX 3060's twice; their K = 16 are the same."""
    long, short = (tcemu.parse(f"mma.sync.aligned.m16n8k{k}.row.col.satfinite.s32.s8.s8.s32") for k in (32, 16))
    halves, whole = tcemu.get_model(long, "sm_86"), tcemu.get_model(long, "sm_90a")
    for find in (units.find_product_unit, lambda *asked: units.find_statement_unit(long, halves, False, product_spec(long), asked[-1])):
        with pytest.raises(tcemu.Unsupported, match="clamp_step=16"):
            find(product_spec(long), halves, "sm_90a")
    assert units.find_statement_unit(long, whole, False, product_spec(long), "sm_90a").op == long
    assert units.find_product_unit(product_spec(long), whole, "sm_90a").op.k == 32
    assert units.find_product_unit(product_spec(short), tcemu.get_model(short, "sm_86"), "sm_90a").op == short
    key = lambda op, step: units.ArithmeticKey.from_model(Model(S32, clamp_step=step), product_spec(op))
    assert key(long, 16) == key(short, None) == key(short, 16) == key(short, 32) != key(long, 12) != key(short, 12)
    wrapped = product_spec(replace(long, satfinite=False))
    assert units.find_product_unit(wrapped, halves, "sm_90a").op.k == 32  # nothing is clamped


def test_a_gpu_that_reads_padding_otherwise_is_refused():
    op = tcemu.parse("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e4m3.f32")
    units.require_same_padding(op, replace(op, a=tcemu.formats.E2M3), "sm_120a")
    with pytest.raises(tcemu.Unsupported, match="padding of e2m1"):
        units.require_same_padding(op, op, "sm_120a")


# ---- the table of equalities


def test_every_row_of_a_gpu_is_its_own():
    table = equalities("sm_90a")
    own = {(e.row, e.unit) for e in table if e.target == "sm_90a" and e.how == units.EQUAL}
    assert {(row.label, row.label) for row in target_rows("sm_90a") if not row.toolkits} <= own
    assert {e.evidence for e in table} == {"silicon"}


def test_what_serves_other_targets():
    found = {(e.target, e.row, e.multiplicands): set() for e in equalities("sm_90a")}
    for e in equalities("sm_90a"):
        found[e.target, e.row, e.multiplicands].add((e.unit.split()[0], e.how))
    assert ("sm_80", "mma f16 to f32", (F16, F16)) not in found  # 24 fraction bits
    assert found["sm_89", "mma e4m3/e5m2 to f32", (E4M3, E4M3)] == {("wgmma", units.FILLED)}
    assert found["sm_100", "mma f16 to f32", (F16, F16)] == {("mma", units.EQUAL), ("wgmma", units.EQUAL)}
    assert found["sm_100a", "tcgen05.mma bf16 to f32", (BF16, BF16)] == {("mma", units.EQUAL), ("wgmma", units.EQUAL)}
    assert found["sm_100a", "mma e4m3/e5m2 to f32", (E4M3, E4M3)] == {("mma", units.EQUAL)}
    assert not any(target == "sm_120a" and row.startswith("mma e4m3/e5m2") for target, row, _ in found)
    e5m2 = tcemu.formats.E5M2
    assert ("sm_89", "mma e4m3/e5m2 to f16", (e5m2, e5m2)) not in found  # their products reach below the floor
    assert ("sm_89", "mma e4m3/e5m2 to f16", (E4M3, e5m2)) in found


def test_floors_matter_where_exponents_reach_them():
    def alike(fmt, **changes):
        model = tcemu.get_model(F16_MMA, "sm_90a")
        signature = ProductSpec(fmt, fmt, F32, F32, 16)
        return units.match_arithmetic(
            units.ArithmeticKey.from_model(model, signature), units.ArithmeticKey.from_model(model.replace(**changes), signature)
        )

    assert alike(F16, floor=-132) == alike(F16, floor=-126) == alike(BF16) == units.EQUAL
    assert alike(BF16, floor=-132) == alike(F16, floor=-125) == alike(F16, rounding="RN") == alike(F16, fraction_bits=24) == ""
    assert alike(F16, terms=32) == units.EQUAL  # no step reaches into the next instruction
    assert alike(F16, terms=8) == ""


def entries():
    """The entries of the table whose models are no equal values: (row's model, unit's model, multiplicands, how)."""
    own, found = {row.label: row for row in target_rows("sm_90a")}, {}
    for e in equalities("sm_90a"):
        (model,), unit = {row.model for row in target_rows(e.target) if row.label == e.row}, own[e.unit].model
        if not model.result.is_integer and (model != unit or e.how == units.FILLED):
            found[f"{e.row} by {e.unit}, {e.multiplicands[0]} {e.multiplicands[1]}"] = (model, unit, e.multiplicands, e.how)
    return found


ENTRIES = entries()


@pytest.mark.parametrize("cases", sample_cases([40, 200], [40]))
@pytest.mark.parametrize("name", sample_cases(ENTRIES, 12))
def test_entries_that_are_not_the_same_value_give_the_same_bits(name, cases):
    model, unit, (a, b), how = ENTRIES[name]
    k = max(256 // max(a.bits, 8), 4)
    rng, size, along = np.random.default_rng(0), 40, 4 * k
    asked, own = (ProductSpec(a, b, one.result, one.result, k) for one in (model, unit))
    step = units.ArithmeticKey.from_model(model, asked).step
    bits = lambda fmt, *shape: rng.integers(0, 1 << fmt.bits, shape, dtype=np.uint64).astype(fmt.dtype)
    near = lambda fmt, *shape: np.asarray(from_float(fmt, rng.normal(size=shape).astype(np.float32)))
    for draw in (bits, near):
        x, y, c = draw(a, cases, size, along), draw(b, cases, along, size), bits(unit.result, cases, size, size)
        wanted = reduce_k(model, asked, x, y, c, None)
        if how == units.FILLED:
            x, y = x.reshape(cases, size, -1, step), y.reshape(cases, -1, step, size)
            x = np.pad(x, [(0, 0)] * 3 + [(0, k - step)]).reshape(cases, size, -1)
            y = np.pad(y, [(0, 0)] * 2 + [(0, k - step), (0, 0)]).reshape(cases, -1, size)
        got = reduce_k(unit, own, x, y, c, None)
        assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {got.size}"
    assert len(np.unique(np.asarray(got))) > 100
