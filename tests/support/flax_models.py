"""A transformer's encoder in flax linen, as users write it."""

import pytest


def linen_encoder():
    """Of width 16, with two heads."""
    nn = pytest.importorskip("flax.linen", reason="flax is not installed (pip install 'tcemu[flax]')")

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(y, y)
            return x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(16, name="up")(nn.LayerNorm()(x))))

    return Encoder()
