"""`tcemu.torch.emulate(model, gpu=...)` on convolutions: forward, gradients and memory formats."""

import numpy as np
import pytest
from support.torch_helpers import MISSING, torch

import tcemu
from tcemu.uses.replay.torch_convolutions import convolution, convolution_gradients

pytestmark = pytest.mark.skipif(torch is None, reason=MISSING)


def drawn(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


@pytest.mark.parametrize("last", [False, True])
def test_a_training_step_in_both_memory_formats(last):
    """The results are those of the recorded kernels, and lie in memory as on a GPU; the bias's gradient is a sum."""
    layer = torch.nn.Conv2d(38, 122, 2, padding=1)
    x, grad = drawn(0, 1, 38, 8, 8), drawn(1, 1, 122, 9, 9)
    with torch.no_grad():
        layer.weight.copy_(drawn(2, 122, 38, 2, 2))
        layer.bias.copy_(drawn(3, 122))
    if last:
        layer.to(memory_format=torch.channels_last)
        x, grad = (t.contiguous(memory_format=torch.channels_last) for t in (x, grad))
    x.requires_grad_()
    with tcemu.torch.emulate(layer, gpu="H200") as emulated:
        y = layer(x)
        y.backward(grad)
    arrays = [t.detach().contiguous().numpy() for t in (x, layer.weight, layer.bias)]
    options = {"padding": (1, 1), "channels_last": last, "tf32": True}
    expected, (chosen,) = convolution(*arrays, **options)
    of_input, of_weight, _ = convolution_gradients(grad.contiguous().numpy(), *arrays[:2], **options)
    assert chosen.order.unit == ("tensor core" if last else "f32 fma")  # TF32, PyTorch's default, is cuDNN's choice by shape
    assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    for found, array in ((y, expected), (x.grad, of_input), (layer.weight.grad, of_weight)):
        assert np.array_equal(found.detach().contiguous().numpy().view(np.int32), array.view(np.int32))
    assert torch.allclose(layer.bias.grad, grad.sum((0, 2, 3)), atol=1e-4)
    assert emulated.report().counts()["not known"] == 0


def test_without_tf32_and_a_channel_a_group():
    """Other kernels: a chain of f32 fma, and PyTorch's own for channels that are groups of their own."""
    x, weight, own = drawn(0, 2, 16, 16, 16), drawn(1, 32, 16, 3, 3), drawn(2, 16, 1, 3, 3)
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200") as emulated, torch.backends.cudnn.flags(allow_tf32=False):
        y = torch.nn.functional.conv2d(x, weight, None, 2, 1)
        z = torch.nn.functional.conv2d(x, own, None, 1, 1, 1, 16)
    assert np.array_equal(y.numpy(), convolution(x.numpy(), weight.numpy(), stride=(2, 2), padding=(1, 1))[0])
    assert np.array_equal(z.numpy(), convolution(x.numpy(), own.numpy(), padding=(1, 1), groups=16)[0])
    kernels = " ".join(line.kernel for line in emulated.report())
    assert "f32 fma" in kernels and "groups of their own" in kernels


def test_a_transposed_convolution_is_a_gradient():
    x, weight = drawn(0, 2, 32, 15, 15), drawn(1, 32, 3, 2, 2)
    with tcemu.torch.emulate(torch.nn.Identity(), gpu="H200"):
        y = torch.nn.functional.conv_transpose2d(x, weight, stride=2)
    assert np.array_equal(y.numpy(), convolution(x.numpy(), weight.numpy(), stride=(2, 2), transposed=True, tf32=True)[0])
    assert torch.allclose(y, torch.nn.functional.conv_transpose2d(x, weight, stride=2), rtol=0.02, atol=0.3)
