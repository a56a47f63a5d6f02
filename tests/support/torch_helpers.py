"""What the tests of `tcemu.torch` share. Without torch, `torch` and `tt` are None, and the tests say why they are skipped."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

try:
    torch: Any = import_module("torch")
    tt: Any = import_module("tcemu.faces.torch")
except ImportError:
    torch = tt = None

MISSING = "torch is not installed: pip install -e '.[test,torch]', then pytest tests/faces/pytorch"


def run_through_jax(fn, *tensors):
    """fn, a function of JAX arrays, of tensors, with its gradients by `jax.vjp`: through NumPy, and by nothing of tcemu.torch."""
    gradients = jax.jit(lambda given, g: jax.vjp(fn, *given)[1](g))

    class ByJax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.given = [jnp.asarray(x.detach().numpy()) for x in tensors]
            return torch.from_numpy(np.array(fn(*ctx.given)))

        @staticmethod
        def backward(ctx, g):
            return tuple(torch.from_numpy(np.array(x)) for x in gradients(ctx.given, jnp.asarray(g.contiguous().numpy())))

    return ByJax.apply(*tensors)


def equal(found, wanted) -> bool:
    """Every tensor has the wanted one's dtype, shape and words."""
    words = lambda x: x.detach().contiguous().reshape(-1).view(torch.uint8)
    return len(found) == len(wanted) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(words(x), words(y)) for x, y in zip(found, wanted, strict=True)
    )
