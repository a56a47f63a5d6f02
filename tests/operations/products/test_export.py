"""Products in `jax.export`: the bits of the same call, in programs that run anywhere, also with sizes that are symbols; or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.sampling import sample_cases

import tcemu
from tcemu.base.stored_code import HOST_CALL_PREFIX
from tcemu.engine.backends.llvm import xla_call

BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
RNG = np.random.default_rng(0)
W = RNG.standard_normal((64, 9)).astype(np.float32)
FACES = {
    "emulate": tcemu.emulate(lambda x: jnp.tanh(x @ W), tcemu.get_recipe("fp8", "sm_89")),
    "matmul": lambda x: tcemu.matmul(x, W, recipe=tcemu.get_recipe("nvfp4", "sm_120a")),
    "gemm": lambda x: tcemu.gemm(x, W, op=BF16, target="sm_80"),
    "gradient": jax.grad(lambda x: jnp.sum(tcemu.matmul(x, W, recipe=tcemu.get_recipe("bf16", "sm_80", backward="exact")) ** 2)),
}


def export_call(fn, shape):
    return export.export(jax.jit(fn))(jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("name", sample_cases(list(FACES), ["gemm", "gradient"]))
def test_an_exported_program_has_no_kernels_and_the_same_bits(name):
    """Also where the same function has run with kernels before, and for platforms that are not here."""
    x = RNG.standard_normal((21, 64)).astype(np.float32)
    product = jax.jit(FACES[name])
    expected = product(x)
    assert xla_call.missing() or HOST_CALL_PREFIX in product.lower(x).compile().as_text()
    program = export.export(product)(x)
    assert "custom_call" not in program.mlir_module()
    np.testing.assert_array_equal(program.call(x), expected)
    for platforms in (["cuda"], ["tpu"], ["cpu", "cuda"]):
        assert "custom_call" not in export.export(product, platforms=platforms)(x).mlir_module()
    np.testing.assert_array_equal(product(x), expected)


CASES = [(name, shape) for name in FACES for shape in ("b, 64", "b, 3, 64")]


@pytest.mark.parametrize("case", sample_cases(CASES, [("gemm", "b, 3, 64")], str))
def test_rows_and_batches_may_be_symbols(case):
    name, shape = case
    program = export_call(FACES[name], export.symbolic_shape(shape))
    for size in (1, 21):
        x = RNG.standard_normal((size, *(3,) * shape.count("3"), 64)).astype(np.float32)
        np.testing.assert_array_equal(program.call(x), jax.jit(FACES[name])(x))


@pytest.mark.parametrize("name", sample_cases(["gemm", "matmul", "emulate", "the gradient of B"], ["gemm", "matmul", "emulate"]))
def test_a_symbol_for_k_is_refused_with_what_works(name):
    recipe = tcemu.get_recipe("bf16", "sm_80")
    faces = {
        "gemm": lambda x: tcemu.gemm(x.T, x, op=BF16, target="sm_80"),
        "matmul": lambda x: tcemu.matmul(x.T, x, recipe=recipe),
        "emulate": tcemu.emulate(lambda x: x.T @ x, recipe),
        "the gradient of B": lambda x: jax.grad(lambda w: jnp.sum(tcemu.matmul(x, w, recipe=recipe) ** 2))(jnp.asarray(W)),
    }
    with pytest.raises(ValueError, match=r"a: K is b, a symbol of jax.export.* export with K as a number .*backward=.exact"):
        export_call(faces[name], export.symbolic_shape("b, 64"))
