"""The kernel `cuda/quantize.cu`: its text, compiled for a CPU, against the portable way and fractions; what it takes; its launch."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import reference
from support import cuda_on_cpu
from support.assembling import ARCHITECTURES, assemble, assembled_here
from support.device_processes import run_on_devices
from support.emulated_gpu import without_gpu
from support.quantizer_cases import BLOCKS, CASES, DEPTH, SPECIAL, block_matrix, matrix, operands, quantize_portably
from support.sampling import sample_cases
from support.traced_programs import equations

import tcemu
from tcemu.base import compilation
from tcemu.base import stored_code as store
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers, multiply_on_integers
from tcemu.engine.backends import elementwise
from tcemu.engine.backends.cuda import kernel_text as source
from tcemu.engine.backends.cuda import quantize_kernel
from tcemu.engine.backends.cuda import xla_launch as launch
from tcemu.engine.backends.elementwise_request import ElementwiseRequest
from tcemu.formats import BF16, E4M3, E4M3FNUZ, E5M2, F16, F32, F64, S8, UE8M0
from tcemu.operations.quantize import scaled_elements as kernels
from tcemu.operations.quantize.quantizer import Scheme, quantize
from tcemu.operations.quantize.scale_groups import GroupSizes
from tcemu.quantize import Quantizer, block_quantize

compiled_here = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")
USUAL = ["f32 to e4m3 saturated by scales"]


@pytest.fixture(autouse=True)
def programs_of_one_machine_alone():
    """A program that was traced with the kernel must not serve the next test; and none is for a real GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
    jax.clear_caches()


@pytest.fixture
def on_a_gpu():
    with cuda_on_cpu.kernels_on_cpu():
        yield


def quantize_by_kernel(case, x, scales):
    fmt, target, saturate, _ = CASES[case]
    return kernels.round_with_kernel(
        fmt, target, saturate, GroupSizes(1, DEPTH), "cpu", jnp.asarray(x), None if scales is None else jnp.asarray(scales)
    )


# ---- its bits


@compiled_here
@pytest.mark.parametrize("case", sample_cases(CASES, USUAL))
def test_elements_are_those_of_the_portable_way(on_a_gpu, case):
    """Numbers and scales of all exponents, subnormals, Inf, NaN, zeros; rows that are no whole pieces."""
    x, scales = operands(case, 300, 101)
    got, expected = np.asarray(quantize_by_kernel(case, x, scales)), np.asarray(quantize_portably(case, x, scales))
    wrong = int((got != expected).sum())
    assert wrong == 0 and got.dtype == expected.dtype, f"{wrong} mismatches of {expected.size}"
    assert len(np.unique(expected)) >= min(200, 2 ** CASES[case][1].bits)


@compiled_here
def test_elements_are_those_of_fractions(on_a_gpu):
    case = USUAL[0]
    x, scales = operands(case, 90, 24)
    got = np.asarray(quantize_by_kernel(case, x, scales))
    checked = 0
    for row, codes, (scale,) in zip(x.tolist(), got.tolist(), scales.tolist(), strict=True):
        divisor = reference.decode("f32", scale)
        for word, code in zip(row, codes, strict=True):
            value = reference.decode("f32", word)
            if isinstance(value, Fraction) and isinstance(divisor, Fraction) and value and divisor:
                negative = (word ^ scale) >> 31
                quotient = reference.encode("f32", value / divisor, zero_sign=negative)
                assert code == reference.convert("f32", "e4m3", quotient, saturate=True), (hex(word), hex(scale))
                checked += 1
    assert checked > 1500


@compiled_here
def test_products_and_quotients_are_those_of_the_portable_way(on_a_gpu):
    """Of all exponents, by a scale for all, for each row, for each element, and in batches."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 32, (2, 37, 1003), dtype=np.uint32)
    x[..., : len(SPECIAL)] = SPECIAL
    for shape in ((), (1, 1), (37, 1), (2, 37, 1), (37, 1003), (2, 1, 1003)):
        scales = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
        if scales.size > len(SPECIAL):
            scales.reshape(-1)[: len(SPECIAL)] = SPECIAL
        given = jnp.asarray(x), jnp.asarray(scales)
        for kernel, on_integers in ((elementwise.multiply_f32, multiply_on_integers), (elementwise.divide_f32, divide_on_integers)):
            got, expected = kernel("cpu", *given), on_integers(*given, F32)
            assert int((got != expected).sum()) == 0 and (np.asarray(expected) == F32.nan).any()


# ---- quantisers

SCHEMES = {
    "tensor": Quantizer("tensor", saturate=True),
    "row": Quantizer("row", saturate=True),
    "1 x 128": Quantizer("block", (1, 128), saturate=True),
    "128 x 128, powers of two": Quantizer("block", (128, 128), scale="power_of_two", saturate=True),
    "3 x 5": Quantizer("block", (3, 5), saturate=True),
}


def same(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype and (np.asarray(one) == np.asarray(other)).all()


@without_gpu
@compiled_here
@pytest.mark.parametrize("name", sample_cases(SCHEMES, ["3 x 5"]))
def test_quantisers_with_and_without_it(name):
    """A batch, `vmap`, scales of the user's."""
    scheme = Scheme(E4M3, SCHEMES[name])
    x = jnp.asarray(matrix(2, 150, 300))

    def calls():
        """Traced anew each time."""
        own = quantize(scheme, x)
        given = quantize(scheme, x[0], scales=jnp.full(own.scales.shape[1:], 0.7))
        return own, jax.vmap(lambda v: quantize(scheme, v), 1, 1)(x[:, None]), given

    with tcemu.execution("portable"):
        expected = jax.jit(lambda: calls())()
    with cuda_on_cpu.kernels_on_cpu():
        launched = jax.make_jaxpr(lambda: calls())()
        same(jax.jit(lambda: calls())(), expected)
    jax.clear_caches()
    assert [each.primitive.name for each in equations(launched.jaxpr)].count("pure_callback") == 5  # elements 3 times, scales twice


USUAL_BLOCKS = [name for name in BLOCKS if name.startswith("nvfp4 by modelopt, float32")]


@compiled_here
@pytest.mark.parametrize("name", sample_cases(BLOCKS, USUAL_BLOCKS))
def test_blocks_with_and_without_it(name):
    """Elements of all exponents, with zeros of both signs, Inf and NaN: codes and scales."""
    fmt, _, axis, rows = BLOCKS[name]
    x = jnp.asarray(block_matrix(name, 2, 150, 300))
    call = lambda v: block_quantize(v, fmt, axis=axis, rows=rows)
    with tcemu.execution("portable"):
        expected = jax.jit(lambda v: call(v))(x)
    with cuda_on_cpu.kernels_on_cpu():
        text = jax.jit(lambda v: call(v)).lower(x).as_text()
        same(jax.jit(lambda v: call(v))(x), expected)
    assert "callback" in text and len(np.unique(expected.codes)) > 10 and (expected.scales == fmt.scale.nan).any()


def product_and_gradients(recipe):
    """Of bf16 and f32 operands, B transposed: traced anew each time."""
    rng = np.random.default_rng(0)
    a, b = jnp.asarray(rng.normal(size=(40, 150)), jnp.bfloat16), jnp.asarray(rng.normal(size=(150, 33)), jnp.float32)

    def calls():
        d, pull = jax.vjp(lambda a, b: tcemu.matmul(a, b, recipe=recipe), a, b)
        return d, *pull(jnp.ones_like(d))

    return calls


@pytest.mark.full
@compiled_here
@pytest.mark.parametrize("name", ["fp8", "deepseek"])
def test_a_product_and_its_gradients_with_and_without_it(name):
    with tcemu.execution("portable"):
        expected = jax.jit(product_and_gradients(name))()
    with cuda_on_cpu.kernels_on_cpu():
        same(jax.jit(product_and_gradients(name))(), expected)


@pytest.mark.parametrize("case", sample_cases([("exact", 10), ("straight_through", 6), (("fp8_e4m3", "fp8_e4m3"), 18)], [], str))
def test_products_and_their_gradients_call_it(on_a_gpu, case):
    """Six times in a product: the scale and the elements of each operand, both scales together, and the sums under them. Four times in an
    exact gradient, which is of the rounded operands.
    """
    backward, calls = case
    recipe = tcemu.get_recipe("fp8", backward=backward)
    text = jax.jit(product_and_gradients(recipe)).lower().as_text()
    assert text.count("callback") == calls


SHARDED = """
import jax, numpy as np, jax.numpy as jnp, tcemu, test_quantize_kernel as t
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for name, along_k in (("tensor", 256), ("1 x 128", 512), ("128 x 128, powers of two", 512)):
    scheme, x = t.Scheme(t.E4M3, t.SCHEMES[name]), jnp.asarray(t.matrix(2, 256, 512))
    with tcemu.execution("portable"):
        expected = t.quantize(scheme, x)
    put = jax.device_put(x, NamedSharding(mesh, P(None, "x", "y")))
    shapes, compute = [], t.elementwise.ElementwiseCall.__call__
    def record(self, codes, *scales):
        if self.request.target != t.F32:
            shapes.append(codes.shape)
        return compute(self, codes, *scales)
    t.elementwise.ElementwiseCall.__call__ = record
    got = jax.jit(lambda v: t.quantize(scheme, v))(put)
    t.same(got, expected)
    assert shapes[-1] == (2, 128, along_k), shapes
    t.elementwise.ElementwiseCall.__call__ = compute
a, b = (jax.numpy.asarray(np.random.default_rng(seed).normal(size=(64, 64)).astype(np.float32)) for seed in (0, 1))
for name in ("fp8", "bf16"):
    split = lambda a, b: tcemu.matmul(a, b, recipe=tcemu.get_recipe(name, backward="exact"), axis_name="y")
    call = lambda: jax.shard_map(split, mesh=mesh, in_specs=(P("x", "y"), P("y", None)), out_specs=P(("x", "y"), None))(a, b)
    jax.clear_caches()
    before = len(shapes)
    with tcemu.execution("portable"):
        expected = jax.jit(lambda: call())()
    t.elementwise.ElementwiseCall.__call__ = record
    t.same(jax.jit(lambda: call())(), expected)
    t.elementwise.ElementwiseCall.__call__ = compute
    assert [(1, 32, 32), (1, 64, 32)] == shapes[before:before + 2], shapes
print("sharded", len(jax.devices()))
"""


@pytest.mark.full
def test_it_is_cut_over_devices():
    """Along the rows, and along K where no group lies along it."""
    assert run_on_devices(4, SHARDED) == "sharded 4\n"


# ---- what it takes, its text, its launch


def test_what_it_does_not_take_is_said(monkeypatch):
    x = jnp.zeros((4, 8), jnp.uint32)
    missing = lambda fmt, target, rounding="RN", codes=x: kernels.unsupported_reason(fmt, target, rounding, codes, scaled=True)
    assert missing(F32, E4M3) == missing(F16, F16) == ""
    assert kernels.unsupported_reason(F16, F16, "RN", x, scaled=False) == "f16 to f16 is no rounding of f32 numbers"
    assert missing(F64, E4M3) == "f64 to e4m3 is no rounding of f32 numbers"
    for target in (S8, UE8M0, F32, E4M3FNUZ):
        assert missing(F32, target) == f"{target} is no signed float format narrower than f32"
    assert missing(F32, E5M2, "SR") == "it rounds to nearest, not SR"
    assert missing(F32, E5M2, codes=x[0]) == "the operand's shape is [8]"
    here = quantize_kernel.route().missing
    assert quantize_kernel.unavailable_reason((4, 8)) == here
    monkeypatch.setattr(quantize_kernel, "route", lambda: cuda_on_cpu.ROUTE)
    assert quantize_kernel.unavailable_reason((4, 8)) == "" and "[65536, 524288]" in quantize_kernel.unavailable_reason((1 << 16, 1 << 19))
    (rows,) = jax.export.symbolic_shape("rows")
    assert set(elementwise.kernel_programs(lambda: None, x)) >= {"cuda"}
    assert elementwise.kernel_programs(lambda: None, jax.ShapeDtypeStruct((rows, 8), jnp.uint32)) == {}
    with tcemu.execution("portable"):
        assert elementwise.kernel_programs(lambda: None, x) == {}


@assembled_here
@pytest.mark.parametrize("architecture", sample_cases(ARCHITECTURES, ["sm_90"]))
def test_the_texts_compile(architecture, tmp_path):
    source_format, target, saturate, _ = CASES["f16 to tf32 by scales"]
    for request in (
        ElementwiseRequest(source_format, target, saturate, 32),
        ElementwiseRequest(F32, F32, False, 32, multiplied=True, scale=UE8M0),
        ElementwiseRequest(BF16, E4M3, True, None),
    ):
        assemble(source.quantizer_text(request), architecture, tmp_path)


def test_it_lowers_for_cuda(monkeypatch):
    """The scales and the elements of both operands; on other platforms no kernel is called."""
    here = launch.Route("sm", "90", "")
    monkeypatch.setattr(compilation, "backends", lambda: {"cpu": None, "cuda": None})
    for module in (launch, quantize_kernel):
        monkeypatch.setattr(module, "route", lambda: here)
    compile_text = store.load_or_compile
    only_cpu = lambda of, text, target: compile_text(of, text, target) if of != launch.COMPILER else f"{target} {len(text)}".encode()
    monkeypatch.setattr(store, "load_or_compile", only_cpu)
    scheme, x = Scheme(E4M3, SCHEMES["1 x 128"]), jnp.zeros((64, 256))
    call = jax.jit(lambda a, b: (quantize(scheme, a), quantize(scheme, b.T)))
    try:
        text = {platform: call.trace(x, x).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")}
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    assert text["cuda"].count(f"@{launch.TARGET}") == 4 and launch.TARGET not in text["cpu"]
    assert "grid_x = 8 " in text["cuda"]


@compiled_here
def test_empty_operands(on_a_gpu):
    for shape in ((0, 128), (3, 0), (0, 2, 128)):
        x = jnp.zeros(shape)
        same(quantize(Scheme(E4M3, SCHEMES["tensor"]), x).codes, jnp.zeros(shape, jnp.uint8))
