"""`tcemu.torch`: the operators and functions, bit for bit those of the JAX face, under every transformation of torch."""

import gc
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases
from support.systems import resource_limits, skip_file
from support.torch_helpers import MISSING, equal, run_through_jax, torch, tt

import tcemu
from tcemu import replay
from tcemu.operations.products.recipes import RECIPES

skip_file(MISSING if torch is None else "")
matrix_products = importlib.import_module("tcemu.faces.torch.matrix_products")
ROOT = Path(__file__).parents[3]
M, K, N = 8, 128, 128  # the blocks of deepseek are 128 wide


def draw(*shapes, seed=0, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype or torch.float32) for shape in shapes]


@pytest.mark.parametrize("recipe", sample_cases(RECIPES, ["mxfp8"]))
def test_every_recipe_is_that_of_jax(recipe):
    """Forward and the gradients of a, b and bias: 0 words differ."""
    a, b, bias, g = (x.requires_grad_() for x in draw((2, M, K), (K, N), (N,), (2, M, N)))
    seed, key = (5, jax.random.key(5)) if tcemu.get_recipe(recipe).is_stochastic else (None, None)
    y = tt.matmul(a, b, bias, recipe=recipe, seed=seed)
    found = [y, *torch.autograd.grad(y, (a, b, bias), g)]
    want = run_through_jax(lambda a, b, bias: tcemu.matmul(a, b, bias, recipe=recipe, key=key), a, b, bias)
    assert equal(found, [want, *torch.autograd.grad(want, (a, b, bias), g)])


@pytest.mark.parametrize("name", sample_cases(["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"], ["float16", "float8_e5m2"]))
def test_every_dtype_goes_in_and_comes_out(name):
    dtype = getattr(torch, name)
    a, b = draw((M, K), (K, 16), dtype=dtype)
    y = tt.matmul(a, b, recipe="fp8", dtype=dtype)
    numpy = lambda x: x.view(torch.uint8).numpy().view(jnp.dtype(name))
    want = tcemu.matmul(numpy(a), numpy(b), recipe="fp8", dtype=jnp.dtype(name))
    assert y.dtype == dtype and y.view(torch.uint8).numpy().tobytes() == np.asarray(want).tobytes()


def test_scales_biases_and_their_gradients():
    recipe = tcemu.get_recipe("fp8_rows").replace(backward="exact")
    a, b, bias, scale_a, scale_b = (x.requires_grad_() for x in draw((M, K), (K, 16), (16,), (M, 1), (1, 16)))
    scale_a, scale_b = (x.detach().abs().add(0.1).requires_grad_() for x in (scale_a, scale_b))
    given = (a, b, bias, scale_a, scale_b)
    y = tt.matmul(a, b, bias, recipe=recipe, scale_a=scale_a, scale_b=scale_b)
    want = run_through_jax(lambda a, b, c, s, t: tcemu.matmul(a, b, c, recipe=recipe, scale_a=s, scale_b=t), *given)
    g = draw((M, 16), seed=1)[0]
    assert equal([y, *torch.autograd.grad(y, given, g)], [want, *torch.autograd.grad(want, given, g)])


def test_kernel_recipes_are_taken():
    order = replay.get_kernel_recipe("torch-f16", 64, 64, 8192)
    a, b = draw((64, 8192), (8192, 64), dtype=torch.float16)
    want = tcemu.matmul(a.numpy(), b.numpy(), recipe=order, dtype=np.float16)
    assert equal([tt.matmul(a, b, recipe=order, dtype=torch.float16)], [torch.from_numpy(np.array(want))])


def test_layouts_change_no_bit():
    """Transposes, strides, expanded and misaligned memory."""
    (a,), (b,) = draw((M, K)), draw((K, 16), seed=1)
    want = tt.matmul(a, b, recipe="bf16")
    wide = torch.zeros(M, 2 * K)
    wide[:, ::2] = a
    odd = torch.zeros(M * K + 1)
    odd[1:] = a.reshape(-1)
    for other in (a.t().contiguous().t(), wide[:, ::2], odd[1:].reshape(M, K)):
        assert equal([tt.matmul(other, b.t().contiguous().t(), recipe="bf16")], [want])
    row = a[:1].expand(M, K)
    assert equal([tt.matmul(row, b, recipe="bf16")], [want[:1].expand(M, 16)])
    assert tt.matmul(a[:0], b, recipe="bf16").shape == (0, 16) and not tt.matmul(a[:, :0], b[:0], recipe="bf16").any()


def test_an_operand_may_be_overwritten_after_the_call():
    """JAX has read it by then: 20 of 20 products are whole."""
    a, b = draw((256, 256), (256, 256))
    want = tt.matmul(a, b, recipe="bf16")
    for _ in range(20):
        x = a.clone()
        y = tt.matmul(x, b, recipe="bf16")
        x.fill_(7)
        assert torch.equal(y, want)


def test_results_are_memory_of_their_own():
    """The gradient of a bias is the cotangent itself, where shapes are equal; writing into one must not change the other."""
    a, b, bias, g = (x.requires_grad_() for x in draw((M, K), (K, 16), (M, 16), (M, 16)))
    (found,) = torch.autograd.grad(tt.matmul(a, b, bias, recipe="bf16"), bias, g)
    before = g.detach().clone()
    found.fill_(0)
    assert torch.equal(g, before)


def test_stochastic_rounding_comes_from_the_seed():
    recipe = tcemu.get_recipe("fp8").replace(a=tcemu.quantize.Quantizer("tensor", rounding="SR", saturate=True), backward="exact")
    a, b = draw((M, K), (K, 16))
    want = run_through_jax(lambda a, b: tcemu.matmul(a, b, recipe=recipe, key=jax.random.key(5)), a, b)
    five, six = tt.matmul(a, b, recipe=recipe, seed=5), tt.matmul(a, b, recipe=recipe, seed=6)
    assert equal([tt.matmul(a, b, recipe=recipe, seed=torch.tensor(5)), five], [want, want]) and not torch.equal(five, six)
    with pytest.raises(ValueError, match="seed"):
        tt.matmul(a, b, recipe=recipe)


# ---- scaled_mm


@pytest.mark.parametrize("library", sample_cases(["torch-e4m3", "torch-e4m3-slow"], ["torch-e4m3"]))
def test_scaled_mm_is_what_torch_gave_on_an_h200(library):
    """By the orders that were measured of torch._scaled_mm there, in shapes whose K is one slice: 0 of all outputs differ."""
    (profile,) = [p for p in replay.list_profiles() if p.library == library]
    shapes = [s for s in profile.shapes if 200 < s[2] < 900 and np.prod(s) < 2e6 and len(profile.kernel_recipe(s).slices.edges) == 2][:2]
    assert shapes
    for m, n, k in shapes:
        a, b = draw((m, k), (n, k), dtype=torch.float8_e4m3fn)
        y = tt.scaled_mm(a, b.t(), torch.ones(()), torch.ones(1), out_dtype=torch.bfloat16, use_fast_accum=library == "torch-e4m3")
        want = tcemu.matmul(a.float().numpy(), b.float().numpy().T, recipe=profile.kernel_recipe((m, n, k)), dtype=jnp.float32)
        assert torch.equal(y, torch.from_numpy(np.array(want)).to(torch.bfloat16))


def test_scaled_mm_takes_every_kind_of_scale():
    """Beside float64: with small whole numbers and powers of two every sum is exact."""
    m, n, k = 4, 256, 256
    generator = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-3, 4, shape, generator=generator).float()
    power = lambda *shape: 2.0 ** torch.randint(-2, 3, shape, generator=generator)
    a, b, bias = whole(m, k).to(torch.float8_e5m2), whole(k, n).to(torch.float8_e4m3fn), whole(n)
    for shape_a, shape_b in [((), (1,)), ((m, 1), (1, n)), ((m, 2), (2, 2)), ((m, 2), (2, n)), ((1, 2), (2, n))]:
        scale_a, scale_b = power(*shape_a), power(*shape_b)
        y = tt.scaled_mm(a, b, scale_a, scale_b, bias, out_dtype=torch.float32, use_fast_accum=True)
        wide_a = scale_a.reshape(-1, scale_a.shape[-1] if shape_a else 1)
        wide_b = scale_b.reshape(scale_b.shape[0] if len(shape_b) == 2 else 1, -1)
        wide_a = wide_a.repeat_interleave(k // wide_a.shape[1], 1).expand(m, k).double()
        wide_b = wide_b.repeat_interleave(k // wide_b.shape[0], 0).repeat_interleave(n // wide_b.shape[1], 1).double()
        assert torch.equal(y.double(), (a.double() * wide_a) @ (b.double() * wide_b) + bias.double()), (shape_a, shape_b)
    y = tt.scaled_mm(a, b, torch.ones(()), torch.ones(()), scale_result=torch.tensor(1e6))
    assert y.dtype == torch.float8_e5m2 and y.float().abs().max() == 57344  # it saturates


# ---- torch's own transformations


def checked_tests(fp8=False):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return tests[1:] if fp8 else tests  # torch.allclose, by which the first compares, takes no FP8


def checked_call(operator):
    """The arguments with which `torch.library.opcheck` calls an operator."""
    from tcemu.faces.torch.operators import register_name

    a, b, x, w = (t.requires_grad_() for t in draw((M, K), (K, 16), (2, 4, 5, 5), (8, 2, 3, 3)))
    run = register_name(tcemu.dot_general("bf16"))
    narrow = draw((M, K), (K, 16), dtype=torch.float8_e4m3fn)
    return {
        "matmul": (a, b, None, None, None, None, "bf16", torch.float32),
        "dot_general": (a, b, None, run, [1], [0], [], [], torch.float32),
        "convolution": (x, w, None, run, [2, 1], [0, 1, 1, 1], [1, 1], 2, torch.float32),
        "scaled_mm": (*narrow, torch.ones(()), torch.ones(()), None, None, None, torch.bfloat16, True, "H100"),
    }[operator]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, within opcheck
@pytest.mark.parametrize("operator", sample_cases(["matmul", "dot_general", "convolution", "scaled_mm"], ["dot_general", "scaled_mm"]))
def test_torch_checks_the_operators(operator):
    options = {"test_utils": checked_tests(fp8=True)} if operator == "scaled_mm" else {}
    torch.library.opcheck(getattr(torch.ops.tcemu, operator).default, checked_call(operator), **options)


@pytest.mark.filterwarnings(r"ignore:.torch\.jit\.script_method. is:DeprecationWarning")  # inductor's own import, torch 2.13
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_whole_and_once(backend):
    """Recipes by name and, where torch can, as themselves; another recipe in the same place is another program."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe = tcemu.get_recipe("fp8", "H100") if matrix_products.COMPILES_OBJECTS else "fp8 on H100"
    a, b, bias = (x.requires_grad_() for x in draw((M, K), (16, K), (16,)))

    def step(a, b, bias):
        return tt.linear(torch.relu(a), b, bias, recipe=recipe).sum() + tt.matmul(a, b.t(), recipe="bf16").sum()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(4):
        found, want = compiled(a, b, bias), step(a, b, bias)
        assert equal(torch.autograd.grad(found, (a, b, bias)), torch.autograd.grad(want, (a, b, bias)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and not torch._dynamo.utils.counters["graph_break"]
    recipe = tcemu.get_recipe("bf16", "A100") if matrix_products.COMPILES_OBJECTS else "bf16 on A100"
    assert equal(torch.autograd.grad(compiled(a, b, bias), b), torch.autograd.grad(step(a, b, bias), b))


def test_a_compiler_that_stops_at_a_recipe(monkeypatch):
    """That of PyTorch 2.11: a clear error where all is one graph, and the same bits where it may break."""
    monkeypatch.setattr(matrix_products, "COMPILES_OBJECTS", False)
    torch._dynamo.reset()
    (a, b), recipe = draw((M, K), (K, 16)), tcemu.get_recipe("fp8", "H100")
    step = lambda a: tt.matmul(torch.relu(a), b, recipe=recipe)
    with pytest.raises(Exception, match="takes a recipe by its name alone"):
        torch.compile(step, fullgraph=True, backend="eager")(a)
    assert torch.equal(torch.compile(step, backend="eager")(a), step(a))


def test_functions_of_functions():
    """torch.func.grad, vmap and both, and what is refused."""
    a, b = draw((3, M, K), (K, 16))
    loss = lambda a: tt.matmul(a, b, recipe="fp8").sum()
    one = a[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(one), one)
    assert torch.equal(torch.func.grad(loss)(a[0]), want)
    members = [tt.matmul(x, b, recipe="fp8") for x in a]  # a scale is of one member
    assert torch.equal(torch.vmap(lambda x: tt.matmul(x, b, recipe="fp8"))(a), torch.stack(members))
    assert torch.equal(torch.vmap(torch.func.grad(loss))(a), torch.stack([torch.func.grad(loss)(x) for x in a]))
    first = torch.autograd.grad(loss(one), one, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="no gradients of their own"):
        first.sum().backward()


# ---- processes, threads, memory


def test_threads_do_not_disturb_each_other():
    a, b = draw((64, 256), (256, 64))
    want = [tt.matmul(a * n, b, recipe="bf16") for n in range(8)]
    found = [None] * 8

    def work(n):
        for _ in range(10):
            found[n] = tt.matmul(a * n, b, recipe="bf16")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(found, want)


def test_hundreds_of_calls_leave_nothing():
    resource = resource_limits()
    a, b = (x.requires_grad_() for x in draw((64, 256), (256, 64)))

    def calls(count):
        for _ in range(count):
            tt.matmul(a, b, recipe="bf16").sum().backward()
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(jax.live_arrays())

    before = calls(50)
    after = calls(400)
    assert after[1] == before[1] and after[0] - before[0] < 6 * 1024  # kilobytes; 400 results are 6.4 MB, their gradients 51 MB


FORKED = """
import sys, warnings, torch, tcemu.torch as tt
warnings.simplefilter("ignore")
a = torch.ones(8, 32)
multiply = lambda: tt.matmul(a, a.t(), recipe="bf16")
class Data(torch.utils.data.Dataset):
    def __init__(self, make):
        self.make = make
    __len__ = lambda self: 4
    __getitem__ = lambda self, number: self.make()
load = lambda make: torch.utils.data.DataLoader(Data(make), num_workers=1, multiprocessing_context="fork")
if sys.argv[1] == "used":
    multiply()
    print(sum(batch.sum().item() for batch in load(lambda: a)), flush=True)
print(sum(batch.sum().item() for batch in load(multiply)))
"""


@pytest.mark.parametrize(("before", "said"), [("used", ["1024.0", "was forked from one that had used JAX"]), ("not used", ["8192.0"])])
def test_forked_workers_do_not_hang(before, said):
    """A worker that computes nothing by JAX works; a product in one is refused after JAX was used, and works before."""
    command, environment = [sys.executable, "-c", FORKED, before], os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
    assert all(each in ran.stdout + ran.stderr for each in said), ran.stderr


# ---- refusals


def test_errors_say_what_is_wanted():
    a, b = draw((M, K), (K, 16))
    for call, error, said in [
        (lambda: tt.matmul(a.double(), b, recipe="bf16"), TypeError, "a: got torch.float64.*float32, float16"),
        (lambda: tt.matmul(a.numpy(), b, recipe="bf16"), TypeError, "a: got ndarray"),
        (lambda: tt.matmul(a, b[1:], recipe="bf16"), ValueError, "K"),
        (lambda: tt.matmul(a, b, recipe="bf17"), ValueError, "did you mean"),
        (lambda: tt.matmul(a, b, recipe="bf16", dtype=torch.int32), TypeError, "dtype: got torch.int32"),
        (lambda: tt.matmul(a, b, recipe=tcemu.get_recipe("bf16").what_if(fraction_bits=jnp.int32(8))), TypeError, "does not hash"),
        (lambda: tt.matmul(a, b.to("meta"), recipe="bf16"), ValueError, "b is on meta"),
        (lambda: tt.linear(a, b, recipe="bf16"), ValueError, r"\[..., K\] and \[N, K\]"),
        (lambda: tt.scaled_mm(a, b, torch.ones(()), torch.ones(())), TypeError, "a: got torch.float32"),
        (lambda: torch.ops.tcemu.matmul(a, b, None, None, None, None, "bf16 #77", torch.float32), ValueError, "in this process"),
    ]:
        with pytest.raises(error, match=said):
            call()
    x, w = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scale_a is \[5, 5\]"):
        tt.scaled_mm(x, w, torch.ones(5, 5), torch.ones(()))
    with pytest.raises(ValueError, match="sm_80"):
        tt.scaled_mm(x, w, torch.ones(()), torch.ones(()), target="A100")


def test_the_package_does_not_import_torch():
    """Nor does it name the face among its public names, which `from tcemu import *` would import."""
    seen = "assert 'torch' not in sys.modules"
    code = f"import sys, tcemu; from tcemu import *; {seen}; import tcemu.replay, tcemu.cli; {seen}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


def test_a_wide_recipe_by_its_name():
    """A product and a module, with the bits of `tcemu.matmul`; the gradient is the plain one."""
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 40), (40, 5)))
    wide = np.asarray(tcemu.matmul(a, b, recipe="bf16x3 on A100"))
    x = torch.from_numpy(a).requires_grad_()
    d = tcemu.torch.matmul(x, torch.from_numpy(b), recipe="bf16x3 on A100")
    d.sum().backward()
    assert (d.detach().numpy() == wide).all()
    np.testing.assert_allclose(x.grad.numpy(), np.broadcast_to(b.sum(1), a.shape), rtol=1e-5)
    layer = torch.nn.Linear(40, 5, bias=False)
    layer.weight.data = torch.from_numpy(b.T.copy())
    with tcemu.torch.emulate(layer, "bf16x3 on A100") as emulation:
        assert (emulation(torch.from_numpy(a)).detach().numpy() == wide).all()
