"""With an NVIDIA GPU as JAX's device, the recorded words again, and the kernels against the portable backend; else skipped."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replay_golden as replay
from support import golden, kernel_cases, quantizer_cases, warp_cases
from support.drawn_ops import FUSED, OPS
from support.systems import skip_file

import tcemu
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers, multiply_on_integers
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.backends import dispatch, elementwise
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.formats import F32
from tcemu.fuzz import KINDS, generate, get_implementation
from tcemu.operations.quantize import scaled_elements as kernels
from tcemu.operations.quantize.scale_groups import GroupSizes
from tcemu.quantize import block_quantize
from tcemu.uses.fuzz.comparison_loop import make_chunk_runner


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


skip_file("" if gpus() else "JAX finds no NVIDIA GPU here")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", replay.REPLAYS)
def test_recorded_words_on_a_gpu(family):
    with jax.default_device(gpus()[0]):
        counts = [replay.compare(case) for case in golden.cases(family)]
    assert sum(wrong for wrong, _ in counts) == 0, f"mismatches of {sum(words for _, words in counts)} words"


@pytest.mark.parametrize("entry", ["tile", "small tile", "integer"])
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_the_cuda_kernels_are_the_portable_backend(monkeypatch, name, entry):
    """10^8 outputs of each by tiles of either size, a tenth in integers. Half with all exponents, Inf and NaN, half with near ones."""
    model, signature = kernel_cases.CASES[name][0], kernel_cases.signature(name)
    kernels = cuda.find_matrix_kernels(model, signature)
    if kernels is None or (entry != "integer" and kernels.tiling is None):
        pytest.skip("no such kernel takes it")
    kernels = kernels._replace(tiling=None) if entry == "integer" else kernels
    monkeypatch.setattr(cuda, "FEW_TILES", 1 << 30 if entry == "small tile" else 0)

    @jax.jit
    def mismatches(*operands):
        got, wanted = cuda.multiply_by_kernels(kernels, *operands), reduce_k(model, signature, *operands)
        return (got != wanted).sum(), wanted.size

    size = (2560, 2048) if entry == "integer" else (5120, 10240)
    with jax.default_device(gpus()[0]):
        for raw in (True, False):
            wrong, words = mismatches(*kernel_cases.operands(name, raw, *size, 2 * signature.k))
            assert wrong == 0, f"{wrong} mismatches of {words}, raw={raw}"


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (1, 300, 48), (33, 34, 16), (129, 127, 4096), (64, 64, 100_000)])
def test_odd_shapes(m, n, k):
    model, signature = kernel_cases.CASES["f16"][0], kernel_cases.signature("f16")
    with jax.default_device(gpus()[0]):
        given = kernel_cases.operands("f16", False, m, n, k)
        assert (jax.jit(kernel_cases.kernel_program(model, signature))(*given) == reduce_k(model, signature, *given)).all()


@pytest.mark.parametrize(("m", "n"), [(16, 8), (64, 64)])
def test_the_cuda_kernels_under_vmap(m, n):
    model, signature = kernel_cases.CASES["e4m3"][0], kernel_cases.signature("e4m3")
    call = kernel_cases.kernel_program(model, signature)
    with jax.default_device(gpus()[0]):
        a, b, c, _ = kernel_cases.operands("e4m3", True, m, n, 64, (3, 2))
        wanted = reduce_k(model, signature, a, b, c, None)
        assert (jax.vmap(lambda a, b, c: call(a, b, c, None), (1, 1, 1), 1)(a, b, c) == wanted).all()
        one = reduce_k(model, signature, a, b[0, 0], c, None)
        assert (jax.jit(jax.vmap(jax.vmap(lambda a, c: call(a, b[0, 0], c, None))))(a, c) == one).all()


def test_scales_for_one_and_codes_for_many():
    """As sparse instructions have them: each row of A meets a B of its own, under scales that all rows share."""
    model, signature = kernel_cases.CASES["nvf4"][0], kernel_cases.signature("nvf4")
    with jax.default_device(gpus()[0]):
        a, b, c, (scale_a, scale_b) = kernel_cases.operands("nvf4", False, 8, 16, 128, (5,))
        operands = a, b, c, (scale_a, scale_b[0])
        got = kernel_cases.kernel_program(model, signature)(*operands)
        assert (got == reduce_k(model, signature, *operands)).all()


@pytest.mark.parametrize(
    ("spelling", "target", "calls"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_90a", 2),
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "sm_90a", 2),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", "sm_90a", 2),
        ("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", "sm_90a", 2),
        ("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0", "sm_120a", 2),
    ],
)
def test_gemm_runs_as_the_kernels(spelling, target, calls):
    """Not by the portable backend, whose bits are the same: one kernel prepares both operands, one multiplies."""
    op = tcemu.parse(spelling)
    with jax.default_device(gpus()[0]):
        a, b = jnp.zeros((64, 128), jnp.float16), jnp.zeros((128, 64), jnp.float16)
        scales = {"scale_a": jnp.ones((64, 4)), "scale_b": jnp.ones((4, 64))} if op.scaling else {}
        compiled = jax.jit(lambda a, b: tcemu.gemm(a, b, op=op, target=target, **scales)).lower(a, b).compile().as_text()
    assert compiled.count(f'custom_call_target="{launch.TARGET}"') == calls


def test_promoted_sums_are_kernels_and_have_the_bits_of_a_scan():
    """One finds the scales of each operand, one quantises it, one prepares both for the sums, one adds."""
    recipe = tcemu.get_recipe("deepseek", backward="exact")
    with jax.default_device(gpus()[0]):
        a, b = (jax.random.normal(jax.random.key(seed), (1024, 1024)) for seed in (0, 1))
        compiled = jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe)).lower(a, b).compile()
        got = compiled(a, b)
        assert compiled.as_text().count(f'custom_call_target="{launch.TARGET}"') == 6
        with tcemu.execution("portable"):
            assert (got == tcemu.matmul(a, b, recipe=recipe)).all()


@pytest.mark.parametrize("shapes", [((3, 64, 256), (256, 128)), ((64, 256), (3, 256, 128)), ((3, 64, 256), (3, 256, 128))], ids=str)
def test_promoted_sums_of_batches(shapes):
    recipe = tcemu.get_recipe("deepseek", backward="exact")
    with jax.default_device(gpus()[0]):
        a, b = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in enumerate(shapes))
        got = jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=recipe))(a, b)
        with tcemu.execution("portable"):
            assert (got == tcemu.matmul(a, b, recipe=recipe)).all()


@pytest.mark.parametrize("raw", (False, True))
@pytest.mark.parametrize("case", warp_cases.KINDS, ids=" on ".join)
def test_registers_out_are_those_of_the_portable_backend(monkeypatch, case, raw):
    """10^7 outputs of each; `mma` by the kernel that takes registers, and by matrices of codes and the portable backend."""
    call, operands = warp_cases.mma_call(*case, raw, (80_000,))
    with jax.default_device(gpus()[0]):
        got = call(*operands)
        monkeypatch.setattr(dispatch, "EMULATORS", dispatch.EMULATORS[-1:])
        jax.clear_caches()
        wanted = call(*operands)
    jax.clear_caches()
    assert (got == wanted).all(), f"{int((got != wanted).sum())} mismatches of {wanted.size}"


@pytest.mark.parametrize("in_memory", (False, True))
def test_a_warpgroup_is_the_portable_backend(monkeypatch, in_memory):
    spelling = "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16"
    call, operands = warp_cases.wgmma_call(spelling, in_memory, True)
    with jax.default_device(gpus()[0]):
        got = call(*operands)
        without = dispatch.EMULATORS[0]._replace(registers=None)
        monkeypatch.setattr(dispatch, "EMULATORS", (without, dispatch.EMULATORS[-1]))
        jax.clear_caches()
        assert (got == call(*operands)).all()
    jax.clear_caches()


@pytest.mark.parametrize("case", quantizer_cases.CASES)
def test_quantisers_round_as_the_portable_way(case):
    """10^7 elements of each: all exponents, subnormals, Inf, NaN, zeros, borders of the formats; half under scales of all kinds."""
    source, target, saturate, _ = quantizer_cases.CASES[case]
    sizes = GroupSizes(1, quantizer_cases.DEPTH)
    with jax.default_device(gpus()[0]):
        x, scales = (None if v is None else jnp.asarray(v) for v in quantizer_cases.operands(case, 2500, 4001))
        assert kernels.unsupported_reason(source, target, "RN", x, scaled=scales is not None) == ""
        got = jax.jit(lambda x, scales: kernels.round_with_kernel(source, target, saturate, sizes, "cuda", x, scales))(x, scales)
        wanted = jax.jit(lambda x, scales: quantizer_cases.quantize_portably(case, x, scales))(x, scales)
        wrong = int((got != wanted).sum())
    assert wrong == 0, f"{wrong} mismatches of {wanted.size}"


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_attention_has_the_bits_of_the_cpu(recipe):
    """0 of 0.5 million, in blocks with everything that a block can do, and whole."""
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(2, size, heads, 128)).astype(np.float32) for size, heads in ((500, 4), (700, 2), (700, 2))]
    blocks = tcemu.products.Flash(scales="block", hadamard=True, promote=256, p_scale=256)
    for flash in (blocks, None):
        call = functools.partial(tcemu.attention, recipe=recipe, flash=flash, is_causal=True, random_key=jax.random.key(0))
        results = []
        for device in (gpus()[0], jax.devices("cpu")[0]):
            with jax.default_device(device):
                results.append(np.asarray(call(*operands)).view(np.uint32))
        assert np.count_nonzero(results[0] != results[1]) == 0


@pytest.mark.parametrize("name", ["long-context-pv", "long-context-attention"])
def test_the_claim_of_131072_keys_takes_less_than_two_minutes(name):
    claim = tcemu.study.get_claim(name)
    with jax.default_device(gpus()[0]):
        start = time.perf_counter()
        claim.reproduce(1)
        assert time.perf_counter() - start < 120


@pytest.mark.parametrize("shape", [(1, 1), (2500, 1), (2500, 4001)])
@pytest.mark.parametrize("operation", ["multiply_f32", "divide_f32"])
def test_products_and_quotients_are_those_of_the_portable_way(operation, shape):
    """10^7 of any f32 words."""
    on_integers = {"multiply_f32": multiply_on_integers, "divide_f32": divide_on_integers}[operation]
    with jax.default_device(gpus()[0]):
        x, scale = (jax.random.bits(jax.random.key(seed), of, jnp.uint32) for seed, of in ((0, (2500, 4001)), (1, shape)))
        wrong = int((jax.jit(functools.partial(getattr(elementwise, operation), "cuda"))(x, scale) != on_integers(x, scale, F32)).sum())
    assert wrong == 0, f"{wrong} mismatches of {x.size}"


@pytest.mark.parametrize("name", quantizer_cases.BLOCKS)
def test_blocks_have_the_words_of_the_cpu(name):
    """1.2 million elements of each, and their scales."""
    fmt, _, axis, rows = quantizer_cases.BLOCKS[name]
    x, results = quantizer_cases.block_matrix(name, 2, 1000, 600), []
    for device in (gpus()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            q = jax.jit(lambda v: block_quantize(v, fmt, axis=axis, rows=rows))(jax.device_put(x, device))
            results.append([np.asarray(v) for v in (q.codes, q.scales, *([] if q.tensor_scale is None else [q.tensor_scale]))])
    assert all(one.tobytes() == other.tobytes() for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_cases_are_those_of_the_cpu(op):
    """20,000 of each instruction, drawn by the kernel."""
    found = []
    for device in (gpus()[0], jax.devices("cpu")[0]):
        with jax.default_device(device):
            found.append({name: np.asarray(codes) for name, codes in generate(op, 7, 1 << 33, 20_000).items()})
    wrong = {name: int((codes != found[1][name]).sum()) for name, codes in found[0].items()}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(("op", "left", "right"), FUSED)
def test_a_differential_run_counts_what_the_cpu_counts(op, left, right):
    sides, found = (get_implementation(op, left), get_implementation(op, right)), []
    for device in (gpus()[0], jax.devices("cpu")[0]):
        chunk = make_chunk_runner(tcemu.parse(op), *sides, KINDS, sides[0].model, (device,))
        found.append(chunk.compare(5, 1 << 33, 20_000, -(-20_000 // chunk.cases_per_iteration)))
    assert found[0]._replace(by_kind=0, coverage=0) == found[1]._replace(by_kind=0, coverage=0) and found[0].wrong_cases > 0
    counts = [[run.by_kind, *jax.tree.leaves(run.coverage)] for run in found]
    assert all((x == y).all() for x, y in zip(*counts, strict=True))
