"""`functions=` of `emulate` and `compare`: softmax, norms and activations found by their formulas, and computed by kernels."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from support.functional_cases import words

import tcemu
from tcemu import functional
from tcemu.uses.emulation.function_patterns import find_functions
from tcemu.uses.emulation.product_errors import Comparison
from tcemu.uses.emulation.report import Report
from tcemu.uses.emulation.survey import Function

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(7)
X = RNG.standard_normal((3, 5, 16)).astype(np.float32)
SQUARE = RNG.standard_normal((16, 16)).astype(np.float32)
WEIGHT, BIAS = RNG.standard_normal((2, 16)).astype(np.float32)
POLICY = {"*softmax": "triton", "rms_norm": "liger", "layer_norm": "triton", "silu": "liger", "gelu": lambda function: None}
KERNELS = {
    "softmax": "triton", "log_softmax": "triton", "rms_norm": "liger", "layer_norm": "triton", "silu": "liger",
    "gelu": functional.GeluKernel("tanh"),
}  # fmt: skip
ERF = functional.GeluKernel("erf")


def by_kernels(function: Function):
    return ERF if function.form == "erf" else KERNELS[function.kind]


def llama(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * WEIGHT.astype(x.dtype)


def gemma(x):
    wide = x.astype(jnp.float32)
    return (wide / jnp.sqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * (1 + WEIGHT)).astype(x.dtype)


def linen(module):
    def apply(x):
        return module.apply({"params": {name: value for name, value in VECTORS.items() if getattr(module, f"use_{name}", False)}}, x)

    return apply


VECTORS = {"scale": WEIGHT, "bias": BIAS}
FORMULAS = {  # name: the function and the kinds that are found in it
    "jax.nn.softmax": (jax.nn.softmax, ["softmax"]),
    "jax.nn.softmax along another axis": (lambda x: jax.nn.softmax(x, 1), ["softmax"]),
    "jax.nn.softmax under vmap": (jax.vmap(jax.nn.softmax), ["softmax"]),
    "jax.nn.log_softmax": (jax.nn.log_softmax, ["log_softmax"]),
    "jax.nn.silu": (jax.nn.silu, ["silu"]),
    "silu by a quotient": (lambda x: x / (1 + jnp.exp(-x)), ["silu"]),
    "jax.nn.gelu": (jax.nn.gelu, ["gelu"]),
    "jax.nn.gelu by erf": (lambda x: jax.nn.gelu(x, approximate=False), ["gelu"]),
    "gelu in another association": (lambda x: 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x * x * x))), ["gelu"]),
    "gelu by 1 + erf": (lambda x: x * 0.5 * (1 + jax.lax.erf(x / np.sqrt(2).astype(x.dtype))), ["gelu"]),
    "linen.LayerNorm": (linen(nn.LayerNorm()), ["layer_norm"]),
    "linen.LayerNorm in two passes": (linen(nn.LayerNorm(use_fast_variance=False, use_bias=False)), ["layer_norm"]),
    "linen.LayerNorm without parameters": (linen(nn.LayerNorm(use_scale=False, use_bias=False)), ["layer_norm"]),
    "linen.LayerNorm without a scale": (linen(nn.LayerNorm(use_scale=False)), ["layer_norm"]),
    "linen.RMSNorm": (linen(nn.RMSNorm()), ["rms_norm"]),
    "nnx.RMSNorm": (nnx.RMSNorm(16, rngs=nnx.Rngs(0)), ["rms_norm"]),
    "nnx.LayerNorm": (nnx.LayerNorm(16, rngs=nnx.Rngs(0)), ["layer_norm"]),
    "jax.nn.standardize": (jax.nn.standardize, ["layer_norm"]),
    "jnp.var": (lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + 1e-5), ["layer_norm"]),
    "a norm of a row alone": (lambda x: jax.vmap(jax.vmap(llama))(x), ["rms_norm"]),
    "Llama's norm": (llama, ["rms_norm"]),
    "Gemma's norm": (gemma, ["rms_norm"]),
    "one function of another": (lambda x: jax.nn.softmax(jax.nn.gelu(llama(x))), ["gelu", "rms_norm", "softmax"]),
    "a gate": (lambda x: jax.nn.silu(x * 2) * x, ["silu"]),
    "attention": (lambda x: jax.nn.dot_product_attention(x[None], x[None], x[None], is_causal=True), ["softmax"]),
    # formulas that look alike
    "no maximum": (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), []),
    "two axes": (lambda x: jax.nn.softmax(x, (1, 2)), []),
    "where": (lambda x: jax.nn.softmax(x, where=x > 0), []),
    "another sum": (lambda x: jnp.exp(x - x.max(-1, keepdims=True)) / jnp.exp(x - x.max(1, keepdims=True)).sum(-1, keepdims=True), []),
    "groups": (nn.GroupNorm(4).bind({"params": VECTORS}), []),
    "another operand": (lambda x: x[::-1] * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), []),
    "another mean": (lambda x: x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) / 15 + 1e-6), []),
    "an exponent": (lambda x: 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x * x))), []),
    "rounded before the root": (
        lambda x: x.astype(jnp.float32) * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float16).astype(jnp.float32) ** 2, -1, keepdims=True) + 1e-6),
        [],
    ),
}  # fmt: skip


def functions_of(fn, *args):
    report = tcemu.emulate(fn, None, functions=by_kernels).report(*args)
    return [entry.function for entry in report if entry.function is not None]


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_is_found_and_what_looks_alike_is_not(name, dtype):
    fn, kinds = FORMULAS[name]
    found = functions_of(fn, X.astype(dtype))
    assert sorted(function.kind for function in found) == kinds
    # a norm of a framework may have its own dtype; the functions of jax.nn have their operand's
    assert all(function.operand_dtype == np.dtype(dtype) for function in found[:1] if name != "attention")


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, (_, kinds) in FORMULAS.items() if kinds])
def test_what_is_found_is_that_function(name):
    """A kernel's value is the formula's but for rounding."""
    fn, _ = FORMULAS[name]
    np.testing.assert_allclose(jax.jit(tcemu.emulate(fn, None, functions=by_kernels))(X), fn(X), rtol=3e-5, atol=3e-6)


def test_rows_and_columns_of_a_square_are_told_apart():
    """The moments of columns, or of rows along the wrong axis, have shapes that fit."""
    by_columns = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, 0) + 1e-6)
    crosswise = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1) + 1e-6)
    softmax = lambda x: jnp.exp(x - x.max(-1)) / jnp.exp(x - x.max(-1)).sum(-1)
    assert [functions_of(fn, SQUARE) for fn in (by_columns, crosswise, softmax)] == [[], [], []]


CALLS = {  # what `functions` computes, and the function of `tcemu.functional` that it is
    "rms_norm": (linen(nn.RMSNorm()), lambda x: functional.rms_norm(x, WEIGHT, eps=1e-6, kernel="liger", dtype="float32")),
    "layer_norm": (
        linen(nn.LayerNorm(dtype=BF16)),
        lambda x: functional.layer_norm(x, WEIGHT, BIAS, eps=1e-6, kernel="triton", dtype=BF16),  # linen rounds the result alone
    ),
    "softmax": (lambda x: jax.nn.softmax(x, 1), lambda x: functional.softmax(x, 1, kernel="triton")),
    "log_softmax": (jax.nn.log_softmax, lambda x: functional.log_softmax(x, kernel="triton")),
    "silu": (jax.nn.silu, lambda x: functional.silu(x, kernel="liger")),
    "gelu": (jax.nn.gelu, lambda x: functional.gelu(x, kernel="liger")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) == ("silu", BF16) else pytest.mark.full)
        for name in CALLS
        for dtype in (np.float32, BF16)
    ],
)
def test_the_words_and_the_gradient_are_those_of_functional(name, dtype):
    fn, same = CALLS[name]
    emulated, x = tcemu.emulate(fn, None, functions=by_kernels), X.astype(dtype)
    assert (words(jax.jit(emulated)(x)) == words(same(x))).all()
    loss = lambda fn: jax.jit(jax.grad(lambda x: jnp.sum(fn(x).astype(jnp.float32) * jnp.cos(jnp.arange(16)))))(x)
    assert (words(loss(emulated)) == words(loss(same))).all()


@pytest.mark.full
def test_a_norm_without_parameters_has_a_neutral_weight_and_bias():
    x = X.copy()
    x[0, 0] = -0.0
    emulated = jax.jit(tcemu.emulate(jax.nn.standardize, None, functions="triton"))(x)
    bare = functional.layer_norm(x, np.ones(16, np.float32), np.full(16, -0.0, np.float32), eps=1e-5, kernel="triton")
    assert (words(emulated) == words(bare)).all()


class Block(nn.Module):
    """A block with a scan, a branch, a checkpoint and a derivative rule around functions."""

    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm()(x)
        h, _ = jax.lax.scan(lambda h, _: (jax.nn.silu(h), None), h, None, length=2)
        h = jax.lax.cond(h.sum() > 1e9, lambda h: h, lambda h: jax.nn.softmax(h), h)
        h = jax.checkpoint(jax.nn.silu)(h)
        return nn.Dense(8)(with_rule(h))


@jax.custom_vjp
def with_rule(x):
    return jax.nn.silu(x)


with_rule.defvjp(lambda x: (jax.nn.silu(x), x), lambda x, g: (g * jax.nn.silu(x),))


def test_functions_are_found_within_loops_branches_and_rules():
    block, x = Block(), X[0]
    v = block.init(jax.random.key(0), x)
    emulated = tcemu.emulate(block.apply, "bf16", functions={"*softmax": "triton", "rms_norm": "liger", "silu": "liger"})
    report = emulated.report(v, x)
    kinds = [(entry.function.kind, entry.function.repeats) for entry in report if entry.function is not None]
    assert kinds == [("rms_norm", 1), ("silu", 2), ("softmax", 1), ("silu", 1), ("silu", 1)]
    assert len(report.replaced) == 1 and len(report.replaced_functions) == 5
    assert report[0].name == "Block/RMSNorm_0/rms_norm" and report[0].function.parameters == ("params/RMSNorm_0/scale",)
    assert report[0].function.eps == pytest.approx(1e-6) and report[0].function.has_weight and not report[0].function.has_bias
    assert "1 of 1 products and 5 of 5 functions replaced" in str(report) and "float32[5,16]" in str(report)
    assert Report.from_json(report.to_json()) == report
    dense = v["params"]["Dense_0"]
    silu = lambda x: functional.silu(x, kernel="liger")
    by_hand = functional.rms_norm(x, v["params"]["RMSNorm_0"]["scale"], eps=1e-6, kernel="liger")
    by_hand = silu(silu(functional.softmax(silu(silu(by_hand)), kernel="triton")))
    by_hand = tcemu.matmul(by_hand, dense["kernel"], recipe="bf16") + dense["bias"]
    assert (words(jax.jit(emulated)(v, x)) == words(by_hand)).all()


def test_a_rule_of_its_own_is_kept_and_its_functions_are_replaced():
    """The backward rule multiplies by SiLU, wrongly as a derivative, so that the gradient shows which rule was taken."""
    gradient = jax.jit(jax.grad(lambda x: tcemu.emulate(with_rule, None, functions="liger")(x).sum()))(X[0])
    assert (words(gradient) == words(functional.silu(X[0], kernel="liger"))).all()


@pytest.mark.full
def test_in_a_differentiated_program_the_values_are_the_kernels():
    fn = lambda x: jnp.sum(jax.nn.silu(x) * jnp.cos(jnp.arange(16)))
    value, gradient = jax.jit(tcemu.emulate(jax.value_and_grad(fn), None, functions="liger"))(X)
    plain_value, plain = jax.jit(jax.value_and_grad(fn))(X)
    np.testing.assert_allclose((value, gradient[0, 0, 0]), (plain_value, plain[0, 0, 0]), rtol=1e-4)
    report = tcemu.emulate(jax.value_and_grad(fn), None, functions="liger").report(X)
    assert [entry.function.kind for entry in report if entry.function is not None] == ["silu"]


def test_only_what_is_needed_is_computed():
    """The formula's own equations are gone, unless something else reads them."""

    def fn(x):
        power = jnp.exp(x - x.max(-1, keepdims=True))
        return power / power.sum(-1, keepdims=True), power

    program = jax.make_jaxpr(tcemu.emulate(lambda x: fn(x)[0], None, functions="triton"))(X)
    assert not {"exp", "reduce_max", "div"} & {equation.primitive.name for equation in program.eqns}
    both = jax.jit(tcemu.emulate(fn, None, functions="triton"))(X)
    np.testing.assert_array_equal(both[1], jax.jit(fn)(X)[1])
    assert len(find_functions(jax.make_jaxpr(fn)(X).jaxpr)) == 1


def test_rules_choose_and_what_they_leave_is_said():
    fn = lambda x: jax.nn.silu(llama(jax.nn.gelu(x, approximate=False)))
    reasons = lambda functions, x=X: {
        e.function.kind: (e.replaced, e.reason) for e in tcemu.emulate(fn, None, functions=functions).report(x)
    }
    assert reasons("liger") == {
        "gelu": (False, "GELU by erf, and the kernel's form is tanh"), "rms_norm": (True, "liger"), "silu": (True, "liger"),
    }  # fmt: skip
    rules = [("silu", None), (re.compile("norm"), functional.RmsNormKernel()), (lambda function: function.form == "erf", "triton_erf")]
    assert reasons(rules) == {
        "gelu": (True, "triton_erf"), "rms_norm": (True, "RmsNormKernel"), "silu": (False, "the rule for 'silu' leaves it"),
    }  # fmt: skip
    assert reasons({"gelu": ERF})["silu"] == (False, "no rule matches")
    with jax.enable_x64(True):
        report = tcemu.emulate(jax.nn.silu, None, functions="liger").report(X.astype(np.float64))
        assert report[0].reason == "of float64, which kernels do not load and store"


@pytest.mark.parametrize(
    ("functions", "error", "said"),
    [
        ("cudnn", ValueError, "'cudnn'.*softmax: triton"),
        ({"softmax": "liger"}, ValueError, "'liger'.*softmax: triton"),
        ({"silu": 3}, TypeError, "functions: got.*'liger'"),
        (3, TypeError, "functions: got 3"),
        ({"*": "triton_erf"}, ValueError, "silu has the kernels liger; or give a SiluKernel"),
        ({"*": functional.SoftmaxKernel()}, TypeError, "expected a SiluKernel"),
        (lambda function: 4, TypeError, "it gave 4"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(functions, error, said):
    with pytest.raises(error, match=said):
        tcemu.emulate(jax.nn.silu, None, functions=functions).report(X)


def test_another_form_of_gelu_is_refused():
    with pytest.raises(ValueError, match="GELU by tanh, and the kernel's form is erf"):
        tcemu.emulate(jax.nn.gelu, None, functions={"gelu": "triton_erf"}).report(X)


def test_warnings():
    with pytest.warns(UserWarning, match="the rule for 'softmax' matches no function; the functions are silu/silu"):
        jax.eval_shape(tcemu.emulate(jax.nn.silu, None, functions={"softmax": "triton"}), X)
    with pytest.warns(UserWarning, match="no function is replaced"):
        jax.eval_shape(tcemu.emulate(jax.nn.silu, None, functions="triton"), X)


@pytest.mark.full
def test_compare_measures_functions():
    def fn(w, x):
        return jax.nn.softmax(llama(x @ w))

    functions = {"rms_norm": "liger", "softmax": functional.SoftmaxKernel(division="rcp.approx.ftz")}
    found = tcemu.compare(fn, {"bf16": "bf16"}, (SQUARE, X[0]), functions=functions)
    rows = {row.product.name: row for row in found}
    assert list(rows) == ["dot_general", "rms_norm", "softmax"] and rows["softmax"].policy == "functions"
    assert 0 < rows["softmax"].relative_error < 2e-7 and rows["rms_norm"].runs == 1
    assert rows["softmax"].recipe is None and rows["softmax"].choice == functions["softmax"]
    assert "softmax: softmax of [5,16], 1 run" in str(found)
    assert Comparison.from_json(found.to_json()).to_json() == found.to_json()
    with pytest.raises(TypeError, match="function's, which no instruction computes"):
        rows["softmax"].worst.explain()


@pytest.mark.full
def test_sensitivity_selects_functions_too():
    fn = lambda w, x: jax.nn.silu(x @ w)
    found = tcemu.compare(fn, {"bf16": "bf16"}, (SQUARE, X[0]), functions="liger", sensitivity=True)
    product, function = found
    assert 1e-4 < product.output_error < 1e-2 and 0 < function.output_error < 1e-6


@pytest.mark.full
def test_a_batch_has_the_words_of_its_rows():
    """With recipes for the products and kernels for the functions a row has the same words in any batch, without `rows`."""

    def fn(w, x):
        return jax.nn.log_softmax(llama(jax.nn.silu(x @ w)) @ w)

    emulated = jax.jit(tcemu.emulate(fn, "f16 on A100", functions=by_kernels))
    by_row = jax.jit(tcemu.emulate(fn, "f16 on A100", functions=by_kernels, rows="x"))
    x = RNG.standard_normal((16, 16)).astype(np.float32)
    assert (words(emulated(SQUARE, x[:1])) == words(emulated(SQUARE, x)[:1])).all()
    assert (words(by_row(SQUARE, x)) == words(emulated(SQUARE, x))).all()
