"""The kernel that takes registers, `cuda/warp.cu`: its text, compiled for a CPU, against matrices of codes and the portable backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cuda_on_cpu
from support.assembling import ARCHITECTURES, assemble, assembled_here
from support.device_processes import run_on_devices
from support.kernel_cases import CASES, HOPPER, codes, kernel_program, signature
from support.sampling import sample_cases
from support.warp_cases import F16_F16, F16_F32, MXF8, SPARSE, byte_words, mma_call, wgmma_call

import tcemu
from tcemu.base import stored_code as store
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.arithmetic.step.forms import step_numbers
from tcemu.engine.backends import batched_calls, dispatch
from tcemu.engine.backends.cuda import fragment_tables as held
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.engine.backends.cuda import register_kernel as warp
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.engine.backends.cuda.cuda_programs import find_instruction_kernel
from tcemu.engine.instructions import register_products as warps
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.fragment_layouts import Fragment, Layout
from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, convert

SHARDED_CALLS = batched_calls._sharded
compiled_here = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")


def spellings(*families, columns=None):
    """(spelling, target) of each kernel that the instructions of all targets have; columns: N of those that are looked at."""
    found = {}
    for target in TARGETS:
        for family in families:
            for op in tcemu.isa.instructions(target, family=family):
                kernel = warp_kernel(op, target) if columns is None or op.n in columns else None
                if kernel is not None:
                    found.setdefault(kernel, (str(op), target))
    return list(found.values())


def warp_kernel(op, target, **how):
    """None where no kernel takes it, or nothing is known of its arithmetic."""
    try:
        own = resolve_arithmetic(op, target)
    except tcemu.NotModelled:
        return None
    return find_instruction_kernel(own.op, own.model, warps.warp_operands(own.op, own.clamped_metadata, **how))


@pytest.fixture
def emulated(monkeypatch):
    """The kernel in place of every other way, its launches run on this CPU; yields the kernels' texts, in the order of their launches."""
    if launch.compute_capabilities():
        pytest.skip("here is a GPU, which would launch the kernels itself")
    texts = []

    library = cuda_on_cpu.library

    def library_of_launch(entry, text):  # called once for each launch that runs
        texts.append(text)
        return library(entry, text)

    monkeypatch.setattr(cuda_on_cpu, "library", library_of_launch)
    on_gpus, *_, portable = dispatch.EMULATORS
    monkeypatch.setattr(warp, "launch", cuda_on_cpu.launch)
    monkeypatch.setattr(launch, "route", lambda: launch.Route("sm", "90", ""))
    monkeypatch.setattr(dispatch, "EMULATORS", (on_gpus._replace(platform="cpu", matrices=portable.matrices), portable))
    monkeypatch.setattr(batched_calls, "_sharded", lambda call, alone: call)  # a call back has no sharding
    forget()
    yield texts
    forget()


def forget():
    jax.clear_caches()
    batched_calls._batched.cache_clear(), SHARDED_CALLS.cache_clear()


def agree(call, operands, emulated):
    """Without a mismatch, and by the kernel; the words of several kinds."""
    got = np.asarray(call(*operands))
    assert len(emulated) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "EMULATORS", dispatch.EMULATORS[-1:])
        forget()
        wanted = np.asarray(call(*operands))
    forget()
    wrong = int((got != wanted).sum())
    assert wrong == 0, f"{wrong} mismatches of {wanted.size}"
    return wanted


# ---- bits


@compiled_here
@pytest.mark.parametrize(
    "case",  # the last: any bits
    sample_cases(((F16_F32, "sm_80", True), (F16_F32, "sm_80", False), (SPARSE, "sm_80", False), (SPARSE, "sm_80", True),
                  (MXF8, "sm_120a", True), (MXF8, "sm_120a", False)), 4, str),
)  # fmt: skip
def test_registers_out_are_those_of_the_portable_backend(case, emulated):
    wanted = agree(*mma_call(*case), emulated)
    assert len(np.unique(wanted)) > 20


SHARES = 16  # every kernel's spelling takes a second to find, which a run without these tests need not spend


@pytest.mark.full
@compiled_here
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("raw", (False, True), ids=("near one", "any bits"))
def test_registers_of_every_kernel(share, raw, emulated):
    for case in spellings("mma", "mma.sp")[share::SHARES]:
        emulated.clear()
        wanted = agree(*mma_call(*case, raw), emulated)
        assert len(np.unique(wanted)) > (5 if raw else 20), case  # any bits in 8-bit formats with f16 sums: most of D is NaN and Inf


WGMMA = spellings("wgmma", "wgmma.sp", columns=(24,))


@compiled_here
@pytest.mark.parametrize("spelling", sample_cases([spelling for spelling, _ in WGMMA], [WGMMA[0][0]]))
@pytest.mark.parametrize("in_memory", (pytest.param(False, marks=pytest.mark.full), True), ids=("A in registers", "A in memory"))
def test_a_warpgroup(spelling, in_memory, emulated):
    for raw in (False, True):
        emulated.clear()
        agree(*wgmma_call(spelling, in_memory, raw), emulated)


ORDERS = {  # spelling, and a model in place of its own
    "chains added together": (F16_F32, HOPPER.replace(groups=2, chain=8, together=True)),
    "f32 steps, D in f16": (F16_F16, HOPPER),
    "a short last step": (F16_F32, HOPPER.replace(terms=12)),
    "short steps of two groups, a short last chain": (F16_F32, HOPPER.replace(terms=5, groups=2, chain=12)),
    "40 bits, rounded up": (F16_F32, Model(F32, 8, 40, -200, "RP", alignment="RM")),
    "3 bits, to nearest": (F16_F32, Model(F32, 16, 3, -20, "RN", result_bits=7, alignment="RN")),
    "rounded to nearest": (F16_F32, HOPPER.replace(rounding="RN")),
    "sparse, a short last step": (SPARSE, HOPPER.replace(terms=12)),
    "sparse, two groups": (SPARSE, HOPPER.replace(terms=4, groups=2, chain="k")),
    "a floor below f64": (F16_F32, HOPPER.replace(floor=-1000)),
}


@compiled_here
@pytest.mark.parametrize(
    "name",
    sample_cases(list(ORDERS), ["sparse, a short last step"]),
)
def test_every_order_of_steps(name, emulated):
    spelling, model = ORDERS[name]
    for raw in (False, True):
        call, operands = mma_call(spelling, "sm_90", raw)
        emulated.clear()
        agree(lambda *abc, call=call: call(*abc, model=model), operands, emulated)


def check_matrices(model, sig, batch, m, n):
    """By the program for matrices, to which one B serves all."""
    rng, kernels = np.random.default_rng(2), cuda.find_matrix_kernels(model, sig)
    assert kernels is not None and warp.find_small_matrix_kernel(kernels.numbers, sig, model.result, kernels.stored, m, n) is not None
    for raw in (False, True):
        shapes = (sig.a, (batch, m, sig.k)), (sig.b, (1, sig.k, n)), (model.result, (batch, m, n))
        a, b, c = (codes(rng, fmt, shape, raw) for fmt, shape in shapes)
        with cuda_on_cpu.kernels_on_cpu():
            got = cuda.multiply_by_kernels(kernels, a, b, c)
        wanted = reduce_k(model, sig, a, b, c, None)
        assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {wanted.size}"


@compiled_here
@pytest.mark.parametrize("size", sample_cases([(16, 8), (8, 8), (4, 16), (32, 8)], [(4, 16)], str))
@pytest.mark.parametrize("name", sample_cases(("bf16", "tf32", "e5m2 and e4m3", "e3m2 and e2m3, two sums", "few bits"), ["tf32"]))
def test_small_matrices(name, size):
    if name == "few bits" and size == (4, 16):
        pytest.skip("A of 4 x 16 has no word for every lane")
    check_matrices(CASES[name][0], signature(name), 5, *size)


@pytest.mark.full
@compiled_here
def test_chains_of_matrices():
    for name in ("chains of e4m3 as f16", "f16 chains", "long chains", "f16 results of few bits"):
        check_matrices(CASES[name][0], signature(name), 3, 16, 8)


ALONE = [name for name in CASES if signature(name).scale is None and step_numbers(CASES[name][0], signature(name)) is not None]


@compiled_here
@pytest.mark.parametrize("name", sample_cases(ALONE, []))
def test_subnormal_accumulators_alone(name):
    """Every product is zero, so that they are what terms are aligned to."""
    model, sig, rng = CASES[name][0], signature(name), np.random.default_rng(6)
    kernels = cuda.find_matrix_kernels(model, sig)
    a, fields = np.zeros((64, 16, sig.k), sig.a.dtype), (1 << sig.b.exponent_bits) - 1 << sig.b.mantissa_bits + sig.b.unused_bits
    b = (rng.integers(0, 1 << sig.b.bits, (64, sig.k, 8)) & ~(fields if sig.b.specials != "none" else 0)).astype(sig.b.dtype)
    bits = model.result.mantissa_bits
    c = (rng.integers(0, 1 << bits, (64, 16, 8)) >> rng.integers(0, bits, (64, 16, 8))).astype(model.result.dtype)
    with cuda_on_cpu.kernels_on_cpu():
        got = np.asarray(cuda.multiply_by_kernels(kernels, *map(jnp.asarray, (a, b, c))))
    wanted = np.asarray(reduce_k(model, sig, *map(jnp.asarray, (a, b, c)), None))
    assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {wanted.size}"


def codes_in_range(rng, fmt, batch, *shape):
    """Codes whose exponents lie, in each of the batch, within a range of their own; some are zeros, and in some of the batch Inf or NaN."""
    top, size = (1 << fmt.exponent_bits) - 1, (batch, *shape)
    first, width = rng.integers(0, top, (batch, 1, 1)), 1 + rng.integers(0, top, (batch, 1, 1)) // rng.choice((1, 4, 64), (batch, 1, 1))
    field = np.minimum(first + rng.integers(0, 1 << 16, size) % width, top - 1)
    field = np.where((rng.random((batch, 1, 1)) < 0.2) & (rng.random(size) < 0.02), top, field).astype(np.uint64)
    code = rng.integers(0, 1 << fmt.bits, size, dtype=np.uint64)
    at = np.uint64(fmt.mantissa_bits + fmt.unused_bits)
    code = (code & ~(np.uint64(top) << at)) | field << at
    return np.where(rng.random(size) < rng.choice((0, 0.1, 0.9), (batch, 1, 1)), 0, code).astype(fmt.dtype)


RANGES = {  # model, formats of A and B
    "bf16": (HOPPER, BF16, BF16),
    "tf32": (HOPPER.replace(terms=4), TF32, TF32),
    "f16": (HOPPER, F16, F16),
    "bf16 and f16, 28 bits": (HOPPER.replace(fraction_bits=28), BF16, F16),
    "bf16, 1 bit": (HOPPER.replace(fraction_bits=1, terms=8), BF16, BF16),
    "bf16, a low floor": (HOPPER.replace(floor=-140), BF16, BF16),
    "e5m2 and tf32, to f16": (Model(F16, 8, 25, -21, "RN"), E5M2, TF32),
}


@compiled_here
@pytest.mark.parametrize("name", sample_cases(list(RANGES), []))
def test_every_range_of_exponents(name, batch=192):
    (model, a, b), rng, k = RANGES[name], np.random.default_rng(4), 16
    sig = ProductSpec(a, b, model.result, model.result, k)
    kernels = cuda.find_matrix_kernels(model, sig)
    kernel = warp.find_small_matrix_kernel(kernels.numbers, sig, model.result, kernels.stored, 16, 8)
    assert held.keeps_floats(kernel.numbers, kernel.warp, (a, b))
    operands = codes_in_range(rng, a, batch, 16, k), codes_in_range(rng, b, batch, k, 8), codes_in_range(rng, model.result, batch, 16, 8)
    with cuda_on_cpu.kernels_on_cpu():
        got = np.asarray(cuda.multiply_by_kernels(kernels, *map(jnp.asarray, operands)))
    wanted = np.asarray(reduce_k(model, sig, *map(jnp.asarray, operands), None))
    assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {wanted.size}"
    assert len(np.unique(wanted)) > 1000


@compiled_here
@pytest.mark.parametrize("shape", sample_cases([(16, 8), (16, 24)], 2, ids=str))  # one instruction; by the integer kernel
def test_matrices_of_codes_that_are_converted(shape):
    """e4m3 and e5m2, multiplied as f16, in the sizes of a warp and in others."""
    (m, n), rng = shape, np.random.default_rng(5)
    model, sig = HOPPER.replace(groups=2, chain="k"), ProductSpec(F16, F16, F32, F32, 32)
    for raw in (False, True):
        a, b, c = (codes(rng, fmt, size, raw) for fmt, size in ((E4M3, (5, m, 32)), (E5M2, (1, 32, n)), (F32, (5, m, n))))
        with cuda_on_cpu.kernels_on_cpu():
            got = kernel_program(model, sig, None, (E4M3, E5M2))(a, b, c)
        wanted = reduce_k(model, sig, convert(E4M3, F16, a), convert(E5M2, F16, b), c, None)
        assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {wanted.size}"


def test_what_fits_no_warp_has_no_kernel():
    for m, n in ((1, 8), (16, 24), (64, 64), (2, 8)):
        assert warp.find_small_matrix_kernel(step_numbers(HOPPER, signature("f16")), signature("f16"), F32, (F16, F16), m, n) is None
    scaled, sig = CASES["mxf8"][0], signature("mxf8")
    assert warp.find_small_matrix_kernel(step_numbers(scaled, sig), sig, F32, (sig.a, sig.b), 16, 8) is None


# ---- batches


@compiled_here
def test_batch_axes_broadcast(emulated):
    call, (a, b, c) = mma_call(F16_F32, "sm_90", True, (3, 2))
    wanted = agree(call, (a, b, c), emulated)
    assert (np.asarray(call(a, b[:, :1], c)) == np.asarray(call(a, np.repeat(b[:, :1], 2, 1), c))).all()
    assert (np.asarray(call(a[0, 0], b[0, 0], c[0, 0])) == wanted[0, 0]).all()
    one = np.asarray(call(a, b[0, 0], c))  # which is not copied for each
    assert (one[0, 0] == wanted[0, 0]).all() and one.shape == wanted.shape


@pytest.mark.full
@compiled_here
def test_vmap_gives_a_longer_batch(emulated):
    _, (a, b, c) = mma_call(SPARSE, "sm_90", True, (2, 3))
    op = tcemu.parse(SPARSE)
    e = byte_words(np.random.default_rng(3), 0, 255, 2, 3, 32)
    plain = lambda a, b, c, e, s: tcemu.mma_sp(op, a, b, c, e, selector=s, target="sm_90")
    wanted = np.stack([np.asarray(plain(a[:, i], b[0, 0], c[:, i], e[:, i], s)) for i, s in enumerate((0, 1, 1))], 1)
    emulated.clear()
    got = np.asarray(jax.vmap(plain, (1, None, 1, 1, 0), 1)(a, b[0, 0], c, e, jnp.array([0, 1, 1])))
    assert (got == wanted).all() and len(emulated) == 1
    twice = jax.vmap(jax.vmap(plain, (0, None, 0, 0, None)), (0, None, 0, 0, None))(a, b[0, 0], c, e, jnp.int32(0))
    assert (np.asarray(twice) == np.asarray(plain(a, b[0, 0], c, e, 0))).all()


def test_an_empty_batch_asks_no_kernel(monkeypatch):
    monkeypatch.setattr(launch, "route", lambda: launch.Route("sm", "90", ""))
    forget()
    call, operands = mma_call(F16_F32, "sm_90", True, (0, 2))
    assert call(*operands).shape == (0, 2, 32, 4)
    forget()


@compiled_here
@pytest.mark.parametrize("case", sample_cases([(F16_F32, "sm_90"), (SPARSE, "sm_80")], 2, " on ".join))
def test_several_instructions_of_one_warp(case, emulated, monkeypatch):
    monkeypatch.setattr(warp, "MANY", 20)
    call, operands = mma_call(*case, True, (61,))
    agree(call, operands, emulated)
    assert warp.instructions_per_warp(61) == 3 and 61 % 3  # the last warp has fewer


def test_one_warp_takes_several_of_a_long_batch():
    kernel = warp_kernel(tcemu.parse(F16_F32), "sm_90")
    assert (
        warp.instructions_per_warp(100) == 1
        and warp.instructions_per_warp(1 << 16) == 4
        and warp.instructions_per_warp(1 << 30) == warp.MOST_EACH
    )
    assert warp.launch_sizes(kernel, 7, 2, (False, True, False)) == [7, 2, 1, 0, 1, 0, 0, 0, 0]


# ---- what has no kernel


def test_what_is_traced_or_not_fused_has_none():
    op, own = tcemu.parse(F16_F32), tcemu.get_model(F16_F32, "sm_90")
    tables = warps.warp_operands(op)
    assert find_instruction_kernel(op, own, tables) is not None
    for field in ("fraction_bits", "floor", "terms", "rounding"):
        assert find_instruction_kernel(op, own.replace(**{field: jnp.int32(1)}), tables) is None
    for spelling in ("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"):
        assert warp_kernel(tcemu.parse(spelling), "sm_90") is None


@pytest.mark.parametrize("stride", sample_cases([25, 1], [25]))
def test_every_instruction_whose_steps_have_numbers_has_a_kernel(stride):
    """The usual run asks for one instruction of 25, of each family."""
    for target in ("sm_70", "sm_90a", "sm_120a"):
        for family in ("mma", "mma.sp", "wgmma", "wgmma.sp"):
            for op in tcemu.isa.instructions(target, family=family)[::stride]:
                own = resolve_arithmetic(op, target)
                serves = own.model.result.is_integer or tcemu.backends.describe(op, target=target).get("cuda") is None
                fused = not own.model.result.is_integer and own.model.fraction_bits is not None
                assert serves or (warp_kernel(op, target) is not None) == fused, op


# ---- the tables


def test_a_table_is_a_sum_or_none():
    lanes = np.arange(32)[:, None]
    assert held.as_bit_sum(lanes * 3 + np.array([0, 7])) == held.BitSum((3, 6, 12, 24, 48), (0, 7))
    assert held.as_bit_sum((lanes * 3) % 31 + np.array([0, 7])) is None


def test_a_layout_changed_is_other_words():
    """With two digits of A exchanged, in its fragment and nowhere else, the tables change with it."""
    op = tcemu.parse(F16_F32)
    own = warps.warp_operands(op)
    layout = Layout("(w g t) (c m p)", "(w m g) (t c p)")
    other = own._replace(a=own.a._replace(fragment=Fragment(layout, own.a.fragment.sizes)))
    texts = [warp.register_kernel_text(find_instruction_kernel(op, tcemu.get_model(op, "sm_90"), one)) for one in (own, other)]
    assert texts[0] != texts[1]


# ---- compiling, and what is launched


@assembled_here
@pytest.mark.parametrize("architecture", sample_cases(ARCHITECTURES, ["sm_90"]))
def test_the_texts_compile(architecture, tmp_path):
    cases = ((F16_F32, "sm_90"), (F16_F16, "sm_80"), (SPARSE, "sm_90"), (MXF8, "sm_120a"))
    for spelling, target in cases if architecture != "sm_90" else cases[:1]:
        assemble(warp.register_kernel_text(warp_kernel(tcemu.parse(spelling), target)), architecture, tmp_path)


@pytest.mark.parametrize("spelling", [F16_F32, SPARSE])
def test_it_lowers_for_cuda_as_one_kernel(monkeypatch, spelling):
    here = launch.Route("sm", "90", "")
    for module in (launch, cuda):
        monkeypatch.setattr(module, "route", lambda: here)
    monkeypatch.setattr(store, "load_or_compile", lambda _, text, architecture: f"{architecture} {len(text)}".encode())
    forget()
    call, operands = mma_call(spelling, "sm_90", True)
    try:
        text = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    finally:
        forget()
    assert text.count(f"@{launch.TARGET}") == 1 and "transpose" not in text


# ---- on a mesh

SHARDED = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import tcemu
from support.warp_cases import F16_F32, mma_call
from tcemu.engine.backends import dispatch
from tcemu.engine.backends.cuda import register_kernel as warp, xla_launch
from tcemu.engine.instructions import mma
mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
call, (a, b, c) = mma_call(F16_F32, "sm_90", True, (8,))
wanted = call(a, b[:1], c)
jax.clear_caches()
by_matrices, shapes = mma._by_matrices, ((32, 4), (32, 2), (32, 4))
# a call back would not outlive the partitioning: the portable backend, which is traced, stands for the kernel
def call_kernel(kernel, *words):
    operands = mma.MmaOperands(*words, None, None, None)
    every = dispatch.EMULATORS
    dispatch.EMULATORS = every[-1:]
    d = by_matrices(tcemu.parse(F16_F32), False, tcemu.get_model(F16_F32, "sm_90"), operands)
    dispatch.EMULATORS = every
    return d
warp.RegisterKernel.__call__ = call_kernel
xla_launch.route = lambda: xla_launch.Route("sm", "90", "")
on_gpus, *_, portable = dispatch.EMULATORS
dispatch.EMULATORS = on_gpus._replace(platform="cpu"), portable
put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
given = put(a, "x"), put(b[:1]), put(c, "x")
compiled = jax.jit(call).lower(*given).compile()
d = compiled(*given)
assert d.sharding.spec[:1] == ("x",) or d.sharding.spec == P("x"), d.sharding
assert (np.asarray(d) == np.asarray(wanted)).all()
assert "all-gather" not in compiled.as_text()
print("sharded", len(jax.devices()))
"""


@pytest.mark.full
def test_a_batch_is_cut_over_devices():
    assert run_on_devices(4, SHARDED) == "sharded 4\n"
