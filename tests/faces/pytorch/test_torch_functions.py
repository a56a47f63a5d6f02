"""`functions=` of `tcemu.torch.emulate`: softmax, norms and activations of torch by kernels, beside `tcemu.functional` and JAX's own."""

from functools import partial
from importlib import import_module

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.systems import skip_file
from support.torch_helpers import MISSING, equal, torch, tt

import tcemu
from tcemu import functional

skip_file(MISSING if torch is None else "")
FunctionCall = None if torch is None else import_module("tcemu.faces.torch.kernel_functions").FunctionCall
nn = None if torch is None else torch.nn
F = None if torch is None else torch.nn.functional
COLUMNS, RMS_EPS, LAYER_EPS = 16, 2.0**-23, 1e-5
ERF = functional.GeluKernel("erf")
CHOICES = {"softmax": "triton", "log_softmax": "triton", "rms_norm": "liger", "layer_norm": "triton", "silu": "liger"}


def vectors(dtype):
    rng = np.random.default_rng(3)
    return tuple(torch.tensor(1 + rng.standard_normal(COLUMNS) / 4).to(dtype) for _ in range(2))


def to_jax(x):
    return jnp.asarray(x.detach().float().numpy()).astype(str(x.dtype).removeprefix("torch."))


def to_torch(x):
    return torch.from_numpy(np.array(x.astype(np.float32))).to(getattr(torch, x.dtype.name))


def operand(dtype):
    return torch.tensor(np.random.default_rng(4).standard_normal((3, 5, COLUMNS))).to(dtype)


softmax = partial(functional.softmax, kernel="triton")
layer_norm = partial(functional.layer_norm, eps=LAYER_EPS, kernel="triton")
rms_norm = partial(functional.rms_norm, eps=RMS_EPS, kernel="liger")
CASES = {  # name: torch's function of x, weight and bias, the same by tcemu.functional, and the kernel of its kind if CHOICES has none
    "F.softmax": (lambda x, w, b: F.softmax(x, -1), lambda x, w, b: softmax(x)),
    "along another axis": (lambda x, w, b: x.softmax(dim=1), lambda x, w, b: softmax(x, 1)),
    "of another dtype": (lambda x, w, b: torch.softmax(x, 2, dtype=torch.float32), lambda x, w, b: softmax(x, dtype=np.float32)),
    "rounded first": (lambda x, w, b: F.softmax(x, -1, dtype=torch.float16), lambda x, w, b: softmax(x.astype(np.float16))),
    "log_softmax": (lambda x, w, b: torch.special.log_softmax(x, -1), lambda x, w, b: functional.log_softmax(x, kernel="triton")),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b), lambda x, w, b: layer_norm(x, w, b)),
    "without a bias": (lambda x, w, b: torch.layer_norm(x, [COLUMNS], w, eps=0.5), lambda x, w, b: layer_norm(x, w, -0.0 * b, eps=0.5)),
    "of two axes": (
        lambda x, w, b: F.layer_norm(x.reshape(3, 5, 4, 4), (4, 4), w.reshape(4, 4), b.reshape(4, 4)),
        lambda x, w, b: layer_norm(x, w, b).reshape(3, 5, 4, 4),
    ),
    "rms_norm": (lambda x, w, b: F.rms_norm(x, (COLUMNS,), w), lambda x, w, b: rms_norm(x, w)),
    "without a weight": (lambda x, w, b: F.rms_norm(x, (COLUMNS,), eps=0.5), lambda x, w, b: rms_norm(x, jnp.ones(COLUMNS), eps=0.5)),
    "silu": (lambda x, w, b: F.silu(x), lambda x, w, b: functional.silu(x, kernel="liger")),
    "gelu": (lambda x, w, b: F.gelu(x), lambda x, w, b: functional.gelu(x, kernel=ERF), ERF),
    "gelu by tanh": (lambda x, w, b: F.gelu(x, approximate="tanh"), lambda x, w, b: functional.gelu(x, kernel="liger"), "liger"),
}  # fmt: skip
USUAL = {("rms_norm", "bfloat16")}


class Weighted(nn.Module if torch is not None else object):
    """A function of x, a weight and a bias as a module."""

    def __init__(self, fn, weight, bias):
        super().__init__()
        self.fn, self.weight, self.bias = fn, nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x):
        return self.fn(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in USUAL else pytest.mark.full)
        for name in CASES
        for dtype in ("float32", "bfloat16")
    ],
)
def test_a_function_has_the_words_of_its_kernel_and_the_gradients_of_its_formula(name, dtype):
    fn, by_kernel, *kernel = CASES[name]
    dtype = getattr(torch, dtype)
    x, module = operand(dtype).requires_grad_(), Weighted(fn, *vectors(dtype))
    with tt.emulate(module, None, functions=lambda function: kernel[0] if kernel else CHOICES[function.kind]) as emulated:
        result = emulated(x)
        result.float().square().sum().backward()
    value, pull = jax.vjp(by_kernel, *map(to_jax, (x, module.weight, module.bias)))
    assert equal([result], [to_torch(value)])
    gradients = pull((2 * value.astype(np.float32)).astype(value.dtype))
    for own, wanted in zip((x.grad, module.weight.grad, module.bias.grad), map(to_torch, gradients), strict=True):
        if own is not None:
            torch.testing.assert_close(own, wanted)
    if result.dtype == x.dtype == torch.float32:  # the kernel did compute it
        assert (result != fn(x, module.weight, module.bias)).any()


class Block(nn.Module if torch is not None else object):
    """A layer of a transformer with a gate, whose two softmaxes are in attention and in the end."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(COLUMNS, eps=1e-6), nn.LayerNorm(COLUMNS)
        self.up, self.down = nn.Linear(COLUMNS, 32), nn.Linear(32, COLUMNS)

    def forward(self, x):
        h = self.norm1(x)
        x = x + F.scaled_dot_product_attention(h, h, h, is_causal=True)
        return torch.softmax(x + self.down(F.silu(self.up(self.norm2(x)))), -1)


FUNCTIONS = {"*rms_norm": "liger", "layer_norm": "triton", "silu": "liger", "*softmax": "triton"}
REPORTED = [
    ("norm1/rms_norm", "liger"), ("scores", "bf16"), ("softmax", "triton"), ("values", "bf16"), ("norm2/layer_norm", "triton"),
    ("up/linear", "bf16"), ("silu", "liger"), ("down/linear", "bf16"), ("softmax.1", "triton"),
]  # fmt: skip


def block_by_jax(block, x):
    """The block, a product and a function at a time."""
    params = {name: to_jax(value) for name, value in block.named_parameters()}
    matmul = partial(tcemu.matmul, recipe="bf16")

    def fn(x):
        h = functional.rms_norm(x, params["norm1.weight"], eps=1e-6, kernel="liger")
        q = h * np.float32(0.5)  # the fourth root of 1 / 16
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), matmul(q, q.mT), -np.inf)
        x = x + matmul(softmax(scores), h)
        h = layer_norm(x, params["norm2.weight"], params["norm2.bias"])
        linear = lambda x, name: matmul(x.reshape(-1, x.shape[-1]), params[f"{name}.weight"].T, params[f"{name}.bias"]).reshape(
            *x.shape[:-1], -1
        )
        h = linear(functional.silu(linear(h, "up"), kernel="liger"), "down")
        return softmax(x + h)

    return to_torch(fn(to_jax(x)))


def test_a_block_with_all_kinds_is_reported_in_order():
    x = operand(torch.float32)
    with tt.emulate(Block(), "bf16", functions=FUNCTIONS) as emulated:
        report = emulated.report(x)
    assert [(entry.name, entry.reason) for entry in report] == REPORTED
    functions = {entry.name: entry.function for entry in report if entry.function is not None}
    assert functions["norm2/layer_norm"].parameters == ("norm2.weight", "norm2.bias") and functions["norm1/rms_norm"].eps == 1e-6
    assert functions["softmax"].shape == (3, 5, 5) and functions["softmax.1"].index == 1
    assert "4 of 4 products and 5 of 5 functions replaced" in str(report)
    assert type(report).from_json(report.to_json()).entries == report.entries


@pytest.mark.full
def test_a_block_has_the_words_of_its_products_and_functions():
    torch.manual_seed(0)
    block, x = Block(), operand(torch.float32)
    names = list(block.state_dict())
    with tt.emulate(block, "bf16", functions=FUNCTIONS) as emulated, torch.no_grad(), tt.watch() as watched:
        result = emulated(x)
    assert equal([result], [block_by_jax(block, x)])
    assert len(watched) == 4 and not any("kernel_function" in line.name for line in watched)
    assert list(block.state_dict()) == names and not (block(x) == result).all()


@pytest.mark.full
def test_a_compiled_block_has_the_same_words():
    torch.manual_seed(0)
    block, x = Block(), operand(torch.float32)
    with tt.emulate(block, "bf16", functions=FUNCTIONS) as emulated:
        expected = emulated(x)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        assert equal([compiled(x)], [expected])
        gradients = [torch.autograd.grad(fn(x).square().sum(), list(block.parameters())) for fn in (block, compiled)]
        assert equal(*gradients)


@pytest.mark.full
def test_multi_head_attention_and_flax_agree_in_words():
    """The same encoder layer by torch and by JAX's `emulate`, which finds the functions by their formulas."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(COLUMNS, 2, 32, 0.0, activation=F.silu, batch_first=True)
    x = operand(torch.float32)
    with tt.emulate(layer, "bf16", functions={"layer_norm": "triton", "silu": "liger", "softmax": "triton"}) as emulated, torch.no_grad():
        names = [entry.name for entry in emulated.report(x) if entry.function is not None]
        assert names == ["self_attn/softmax", "norm1/layer_norm", "silu", "norm2/layer_norm"]
        assert all(entry.replaced for entry in emulated.report(x))
        after_attention = []
        layer.norm1.register_forward_hook(lambda module, args, result: after_attention.append(result))
        result = emulated(x)

    def rest(params, x):  # of the layer, after the first norm
        h = jax.nn.silu(x @ params["linear1.weight"].T + params["linear1.bias"])
        y = x + (h @ params["linear2.weight"].T + params["linear2.bias"])
        norm = linen.LayerNorm(epsilon=1e-5)
        return norm.apply({"params": {"scale": params["norm2.weight"], "bias": params["norm2.bias"]}}, y)

    params = {name: to_jax(value) for name, value in layer.named_parameters()}
    by_jax = tcemu.emulate(rest, "bf16", functions={"layer_norm": "triton", "silu": "liger"})
    assert equal([result], [to_torch(jax.jit(by_jax)(params, to_jax(after_attention[0])))])


def reasons(fn, functions, x):
    module = Weighted(fn, *vectors(torch.float32))
    with tt.emulate(module, None, functions=functions) as emulated:
        return {entry.function.kind: (entry.replaced, entry.reason) for entry in emulated.report(x)}


def test_what_is_left_is_said():
    x = operand(torch.float32)
    fn = lambda x, w, b: F.rms_norm(F.silu(F.gelu(x)), (COLUMNS,), w)
    assert reasons(fn, "liger", x) == {
        "gelu": (False, "GELU by erf, and the kernel's form is tanh"), "silu": (True, "liger"), "rms_norm": (True, "liger"),
    }  # fmt: skip
    wide = reasons(lambda x, w, b: F.silu(x.double()) + F.rms_norm(x.double(), (COLUMNS,), w.double()), lambda function: "liger", x)
    assert not any(replaced for replaced, _ in wide.values()) and "operands of float64; kernels take" in wide["silu"][1]
    assert reasons(lambda x, w, b: F.silu(x.clone(), inplace=True) + F.gelu(x), {"gelu": None}, x) == {
        "gelu": (False, "the rule for 'gelu' leaves it")
    }


def test_operands_are_widened_where_autocast_widens_them():
    """On a GPU autocast computes softmax and norms in f32, on a CPU in the operand's dtype; the original function tells."""
    bf16 = operand(torch.bfloat16)
    as_on_a_gpu = FunctionCall("rms_norm", bf16, lambda x: x.float(), weight=bf16[0, 0])
    as_on_a_cpu = as_on_a_gpu._replace(original=lambda x: x)
    assert as_on_a_gpu.widen() is as_on_a_gpu
    with torch.autocast("cpu", torch.bfloat16):
        wide = as_on_a_gpu.widen()
        assert wide.x.dtype == wide.weight.dtype == torch.float32 and wide.bias is None and torch.equal(wide.x.bfloat16(), bf16)
        assert as_on_a_cpu.widen() is as_on_a_cpu


def test_without_a_policy_for_functions_none_is_listed():
    block, x = Block(), operand(torch.float32)
    with tt.emulate(block, "bf16") as emulated:
        assert [entry.name for entry in emulated.report(x)] == ["scores", "values", "up/linear", "down/linear"]


def test_wrong_choices_name_the_argument():
    block, x = Block(), operand(torch.float32)
    for functions, error, message in (
        ("cudnn", ValueError, "'cudnn'.*softmax: triton"),
        (3, TypeError, "functions: got 3"),
        (lambda function: functional.GeluKernel(), TypeError, "expected a RmsNormKernel"),
    ):
        with pytest.raises(error, match=message), tt.emulate(block, None, functions=functions) as emulated:
            emulated(x)
    with (
        pytest.warns(UserWarning, match="the rule for 'gelu' matches no function"),
        tt.emulate(block, None, functions={"gelu": ERF}) as emulated,
    ):
        emulated(x)


@pytest.mark.full
def test_attention_alone_is_decomposed_for_its_softmax():
    q = operand(torch.float32)
    module = Weighted(lambda x, w, b: F.scaled_dot_product_attention(x, x, x), *vectors(torch.float32))
    with tt.emulate(module, None, functions={"softmax": "triton"}) as emulated, torch.no_grad():
        result = emulated(q)
    half = q * 0.5
    assert equal([result], [to_torch(softmax(to_jax(half @ half.mT))) @ q])
