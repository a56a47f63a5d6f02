"""`tcemu.torch` on an NVIDIA GPU that torch and JAX share; skipped where there is none. It needs no network:

XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -m gpu tests/faces/pytorch/test_torch_gpu.py
"""

import time

import jax
import jax.numpy as jnp
import pytest
from support.systems import skip_file
from support.torch_helpers import MISSING, equal, torch, tt

import tcemu


def missing() -> str | None:
    if torch is None:
        return MISSING
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    try:
        jax.devices("gpu")
    except RuntimeError:
        return "JAX sees no GPU: pip install 'jax[cuda13]'"
    return None


skip_file(missing())
pytestmark = pytest.mark.gpu


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "deepseek", "mxfp8"])
def test_the_bits_are_those_of_the_cpu_and_tensors_stay(recipe):
    """Forward and the gradients by emulated products: 0 words differ from the CPU's."""
    results = {}
    for device in ("cpu", "cuda"):
        a, b, bias, g = (x.to(device).requires_grad_() for x in draw((64, 256), (256, 128), (128,), (64, 128)))
        y = tt.matmul(a, b, bias, recipe=recipe)
        results[device] = [y, *torch.autograd.grad(y, (a, b), g)]
        assert all(x.device.type == device for x in results[device])
    assert equal([x.cpu() for x in results["cuda"]], results["cpu"])


def test_a_stream_of_torch_is_waited_for():
    """Operands that a kernel of torch is still writing, on the current stream and on another: 0 of 20 products differ."""
    a, b = (x.cuda() for x in draw((2048, 2048), (2048, 256)))
    want = tt.matmul(a, b, recipe="bf16")
    for number in range(20):
        with torch.cuda.stream(torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            x = torch.zeros_like(a)
            for _ in range(20):
                x = x + a / 20 - a / 20
            x = torch.where(x.abs() >= 0, a, x)
            y = tt.matmul(x, b, recipe="bf16")
            x.fill_(7)
            assert torch.equal(y, want)


def test_a_model_trains_and_compiles_on_the_gpu():
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
    x = torch.randn(4, 16, 64, device="cuda")
    with tt.emulate(model, "fp8") as emulated:
        assert not emulated.report(x).unchanged
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        given = list(model.parameters())
        found, want = compiled(x), model(x)
        assert equal([found, *torch.autograd.grad(found.sum(), given)], [want, *torch.autograd.grad(want.sum(), given)])


def seconds(fn):
    fn()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


def test_it_is_as_fast_as_the_jax_face():
    """4096 cubed in bf16, with all copies and waits: at most 1.1 times."""
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    x, y = (jnp.from_dlpack(t) for t in (a, b))
    by_torch = seconds(lambda: (tt.matmul(a, b, recipe="bf16"), torch.cuda.synchronize()))
    by_jax = seconds(lambda: tcemu.matmul(x, y, recipe="bf16").block_until_ready())
    print(f"tcemu.torch {by_torch * 1e3:.2f} ms, tcemu {by_jax * 1e3:.2f} ms")
    assert by_torch <= 1.1 * by_jax
