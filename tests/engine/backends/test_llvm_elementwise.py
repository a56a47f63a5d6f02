"""The CPU kernel of quotients, products and roundings: the bits of the portable way, in XLA's threads and on vectors of any width."""

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.quantizer_cases import BLOCKS, CASES, DEPTH, SPECIAL, block_matrix, matrix, operands, quantize_portably
from support.sampling import sample_cases

import tcemu
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers, multiply_on_integers
from tcemu.engine.backends import elementwise, quotients
from tcemu.engine.backends.elementwise_request import EVERY, ElementwiseRequest, ScaleRequest
from tcemu.engine.backends.llvm import llvm_programs, machine_code, xla_call
from tcemu.formats import BF16, E4M3, F16, F32, UE4M3, convert
from tcemu.operations.quantize import scaled_elements
from tcemu.operations.quantize.quantizer import Scheme, quantize
from tcemu.operations.quantize.scale_groups import GroupSizes
from tcemu.quantize import Quantizer, block_quantize

pytestmark = pytest.mark.usefixtures("llvm")
LONG_TASK = 1 << 15  # elements of a task
EDGE, GUARD = 64, 0x5A  # elements before and after a result, and their codes


@pytest.fixture(scope="module")
def llvm():
    if reason := xla_call.missing():
        pytest.skip(reason)


def mismatches(got, expected):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    return int(np.count_nonzero(np.asarray(got) != np.asarray(expected)))


def run_alone(request, x, scales=None, target=None):
    """The kernel's functions, called without XLA, for a target that this machine executes too."""
    kernel = llvm_programs.elementwise_kernel(request, target)
    binary = machine_code.compile_text(kernel.text, str(target or machine_code.host_target()))
    code = machine_code.load_functions(binary, ["elements_tasks", "elements_task"])
    memory = np.full(x.size + 2 * EDGE, GUARD, request.target.dtype)
    out = memory[EDGE:-EDGE].reshape(x.shape)
    arrays = [v for v in (x, scales, out) if v is not None]
    sizes = [(ctypes.c_int64 * 3)(*v.shape) for v in arrays]
    buffers, dims = ((ctypes.c_void_p * len(arrays))(*at) for at in ([v.ctypes.data for v in arrays], map(ctypes.addressof, sizes)))
    tasks = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(code.addresses["elements_tasks"])
    task = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)(code.addresses["elements_task"])
    for number in range(tasks(dims)):
        task(number, buffers, dims)
    assert (memory[:EDGE] == GUARD).all() and (memory[-EDGE:] == GUARD).all(), "the kernel wrote beyond its result"
    return out


# ---- its bits


USUAL = ["f32 to e4m3 saturated by scales", "bf16 to e2m1 by scales", "f16 to e5m2 by scales", "f32 to tf32", "f32 to f16", "f16 to bf16"]


@pytest.mark.parametrize("case", sample_cases(CASES, USUAL))
def test_elements_are_those_of_the_portable_way(case):
    """Numbers and scales of all exponents, subnormals, Inf, NaN, zeros, ties; rows and groups that are no whole vectors."""
    x, scales = operands(case, 600, 101)
    fmt, target, saturate, _ = CASES[case]
    got = scaled_elements.round_with_kernel(
        fmt, target, saturate, GroupSizes(1, DEPTH), "cpu", jnp.asarray(x), None if scales is None else jnp.asarray(scales)
    )
    expected = quantize_portably(case, x, scales)
    assert mismatches(got, expected) == 0 and len(np.unique(expected)) >= min(200, 2**target.bits)


WIDTH_16 = [case for case, (source, *_) in CASES.items() if source in (F16, BF16)]


@pytest.mark.parametrize("case", sample_cases(WIDTH_16, ["f16 to e5m2 by scales", "bf16 to e4m3"]))
def test_every_code_of_16_bits(case):
    """Alone, or under a scale with a fraction."""
    source, target, saturate, scaled = CASES[case]
    codes = np.arange(1 << 16, dtype=np.uint16)[None, None]
    scale = np.full((1, 1, 1), np.float32(0.7).view(np.uint32)) if scaled else None
    got = run_alone(ElementwiseRequest(source, target, saturate, EVERY if scaled else None), codes, scale)
    numbers = convert(source, F32, codes)
    numbers = numbers if scale is None else divide_on_integers(numbers, jnp.broadcast_to(scale, codes.shape), F32)
    assert mismatches(got, convert(F32, target, numbers, saturate=saturate)) == 0


SHAPES = [(), (1, 1), (37, 1), (2, 37, 1), (37, 1003), (2, 1, 1003), (2, 1, 1), (2, 37, 1003)]


@pytest.mark.parametrize("shape", sample_cases(SHAPES, [(), (37, 1), (2, 1, 1003), (2, 37, 1003)], str))
def test_products_and_quotients_are_those_of_integers(shape):
    """f32 words of all exponents, in several tasks that begin within a row; a scale for all, for rows, for columns, for each element.

    XLA's threads flush subnormals, so this holds only if the kernel does not.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, (2, 37, 1003), dtype=np.uint32)
    x[..., : len(SPECIAL)] = SPECIAL
    y = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    if y.size > len(SPECIAL):
        y.reshape(-1)[: len(SPECIAL)] = SPECIAL
    given = jnp.asarray(x), jnp.asarray(y)
    assert x.size > 2 * LONG_TASK
    for kernel, on_integers in ((elementwise.multiply_f32, multiply_on_integers), (elementwise.divide_f32, divide_on_integers)):
        expected = np.asarray(on_integers(*given, F32))
        assert mismatches(jax.jit(kernel, static_argnums=0)("cpu", *given), expected) == 0
        magnitudes = expected & 0x7FFFFFFF
        small = (magnitudes > 0) & (magnitudes < 1 << 23)
        assert y.size <= len(SPECIAL) or (small.any() and (expected == F32.nan).any())


def test_subnormal_numbers_are_kept_in_every_thread_and_the_environment_is_restored():
    """Small numbers over 2 and times 2, in more tasks than there are threads; XLA's own product is flushed before and after."""
    words = jnp.arange(1, 20 * LONG_TASK + 1, dtype=jnp.uint32)[None]
    two = jnp.full((1, 1), np.float32(2).view(np.uint32))

    @jax.jit
    def compute(words, two):
        flushed = lambda v: jax.lax.bitcast_convert_type(v, jnp.float32) * jnp.float32(0.5)
        doubled = elementwise.multiply_f32("cpu", words, two)
        return doubled, elementwise.divide_f32("cpu", doubled, two), flushed(words), flushed(doubled)

    doubled, halved, before, after = compute(words, two)
    assert (halved == words).all() and (doubled[0, :4] == np.array([2, 4, 6, 8])).all()
    plain = jax.jit(lambda v: jax.lax.bitcast_convert_type(v, jnp.float32) * jnp.float32(0.5))
    assert (before == plain(words)).all() and (after == plain(doubled)).all()


NARROW = [(case, features) for features in ("avx512", "avx") for case in CASES]


@pytest.mark.parametrize("case", sample_cases(NARROW, [("f16 to e4m3 by scales", "avx512"), ("f32 to bf16", "avx")], " without ".join))
def test_narrower_vectors_give_the_same_bits(case):
    case, features = case
    target = machine_code.host_target().without(features, *(("f16c", "fma") if features == "avx" else ()))
    source, fmt, saturate, scaled = CASES[case]
    x, scales = operands(case, 90, 101)
    request = ElementwiseRequest(source, fmt, saturate, DEPTH if scaled else None)
    got = run_alone(request, x[None], None if scales is None else scales[None], target)
    assert mismatches(got[0], quantize_portably(case, x, scales)) == 0


@pytest.mark.parametrize("k", sample_cases([1, 15, 16, 17, 101], [17]))
def test_results_of_odd_sizes_are_written_whole_and_nothing_beyond_them(k):
    x = np.random.default_rng(k).integers(0, 1 << 32, (3, 5, k), dtype=np.uint32)
    scales = np.full((1, 5, -(-k // DEPTH)), np.float32(3).view(np.uint32))
    for request, given in (
        (ElementwiseRequest(F32, E4M3, True, DEPTH), scales),
        (ElementwiseRequest(F32, BF16, True, EVERY), scales[:, :1, :1].copy()),
        (ElementwiseRequest(F32, F16, True, None), None),
    ):
        quotients = x if given is None else divide_on_integers(x, jnp.full(x.shape, given[0, 0, 0]), F32)
        assert mismatches(run_alone(request, x, given), convert(F32, request.target, quotients, saturate=True)) == 0


MAGNITUDES = [(source, shape) for source in (F32, BF16, F16) for shape in ((3, 5, 101), (1, 70_000), (3000, 7), (64, 1024))]


@pytest.mark.parametrize("case", sample_cases(MAGNITUDES, [(F16, (3000, 7))], str))
def test_max_magnitudes_are_those_of_the_portable_way(case):
    """Of groups of some lengths, of rows and of all, with NaNs and without."""
    source, shape = case
    words = np.random.default_rng(0).integers(0, 1 << source.bits, shape).astype(source.dtype)
    for x in (words, np.where(words & source.infinity == source.infinity, 5, words)):
        x = jnp.asarray(x)

        def compute(x=x):
            by_group = [scaled_elements.max_magnitudes(source, x, depth) for depth in (None, 3, 16, 24)]
            return *by_group, scaled_elements.max_of_all(source, x)

        got = compute()
        with tcemu.execution("portable"):
            expected = compute()
        assert [mismatches(one, other) for one, other in zip(got, expected, strict=True)] == [0] * 5


@pytest.mark.parametrize("power_of_two", sample_cases([False, True], [True]))
def test_scales_of_max_magnitudes_are_those_of_the_portable_way(power_of_two):
    magnitudes = np.random.default_rng(0).integers(0, 1 << 31, (7, 300), dtype=np.uint32)
    magnitudes[0, : len(SPECIAL)] = SPECIAL
    magnitudes[1] = magnitudes[1] & 0x7F800000
    request = ScaleRequest(int(np.float32(448).view(np.uint32)), 1 << 23, power_of_two)
    x = jnp.asarray(magnitudes)
    compute = lambda: (scaled_elements.scales_of_magnitudes(request, x), scaled_elements.max_magnitudes(F32, x[:, :8], 4, request))
    got = compute()
    with tcemu.execution("portable"):
        expected = compute()
    assert [mismatches(one, other) for one, other in zip(got, expected, strict=True)] == [0, 0]


def test_codes_of_ue4m3_are_multiplied_and_made():
    """The kernel takes e4m3, whose codes without sign are those of ue4m3."""
    codes = jnp.arange(128, dtype=jnp.uint8)[:, None]
    words = jnp.asarray(np.concatenate([SPECIAL, np.random.default_rng(0).integers(0, 1 << 31, 500, dtype=np.uint32)]))[None]
    got = elementwise.multiply_codes(E4M3, F32, "cpu", codes, words)
    expected = multiply_on_integers(*jnp.broadcast_arrays(convert(UE4M3, F32, codes), words), F32)
    assert mismatches(got, expected) == 0
    near = jnp.asarray(np.float32(2.0) ** np.arange(-12, 12)).view(jnp.uint32)[:, None]
    got = elementwise.multiply_codes(F32, E4M3, "cpu", words, near)
    expected = convert(F32, UE4M3, multiply_on_integers(*jnp.broadcast_arrays(words, near), F32), saturate=True)
    assert mismatches(got, expected) == 0 and len(np.unique(expected)) > 100


# ---- its users


SCHEMES = {
    "tensor": Quantizer("tensor", saturate=True),
    "row": Quantizer("row", saturate=True),
    "128 x 128, powers of two": Quantizer("block", (128, 128), scale="power_of_two", saturate=True),
    "3 x 5": Quantizer("block", (3, 5), saturate=True),
}


TYPED_SCHEMES = [(name, dtype) for name in SCHEMES for dtype in ("float32", "float16", "bfloat16")]


@pytest.mark.parametrize("case", sample_cases(TYPED_SCHEMES, [("tensor", "float32"), ("3 x 5", "float16")], ", ".join))
def test_quantisers_with_and_without_kernels(case):
    """A batch and `vmap`."""
    name, dtype = case
    scheme = Scheme(E4M3, SCHEMES[name])
    x = jnp.asarray(matrix(2, 150, 300)).astype(dtype)

    def calls():
        return quantize(scheme, x), jax.vmap(lambda v: quantize(scheme, v), 1, 1)(x[:, None])

    got = jax.jit(calls)()
    with tcemu.execution("portable"):
        expected = jax.jit(lambda: calls())()
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mismatches(one, other) == 0


@pytest.mark.parametrize("name", sample_cases(BLOCKS, [name for name in BLOCKS if "nvfp4 by torchao, float32" in name]))
def test_blocks_with_and_without_kernels(name):
    fmt, _, axis, rows = BLOCKS[name]
    x = jnp.asarray(block_matrix(name, 2, 150, 300))
    call = lambda v: block_quantize(v, fmt, axis=axis, rows=rows)
    got = jax.jit(lambda v: call(v))(x)
    with tcemu.execution("portable"):
        expected = jax.jit(lambda v: call(v))(x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert mismatches(one, other) == 0


def test_a_kernel_computes_here_unless_the_execution_excludes_kernels():
    x = jnp.full((4, 64), 0x3F800000, jnp.uint32)
    text = lambda: jax.jit(lambda v: quotients.divide(v, v, F32)).lower(x).as_text()
    assert "@tcemu_" in text()
    with tcemu.execution("portable"):
        assert "@tcemu_" not in text()
