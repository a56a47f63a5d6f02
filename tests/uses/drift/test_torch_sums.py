"""The order in which PyTorch adds on a CPU."""

from math import prod

import numpy as np
import pytest

from tcemu.uses.drift.cpu_sums import torch_sum

torch = pytest.importorskip("torch")

SHAPES = [((6, 24), (0,)), ((6, 24), (1,)), ((3, 1000), (1,)), ((1000, 64), (0,)), ((100, 130), (0,)), ((37, 5), (0,)), ((4, 20000), (1,)),
          ((20000, 20), (0,)), ((3, 2, 5, 7), (2, 3)), ((7, 3), (0, 1)), ((5, 1), (0,))]  # fmt: skip


def sum_all(x, axes):
    """All elements of the result."""
    kept = [i for i in range(x.ndim) if i not in axes]
    rows = x.transpose(*kept, *axes).reshape(prod(x.shape[i] for i in kept), -1)
    return torch_sum(rows, axes, np.arange(len(rows)), len(rows), x.ndim)


@pytest.mark.parametrize(("shape", "axes"), SHAPES)
def test_sums_have_the_bits_of_torch(shape, axes):
    torch.set_num_threads(1)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    expected = torch.from_numpy(x).sum(axes).numpy()
    assert sum_all(x, axes).tobytes() == expected.tobytes()


def test_other_axes_have_no_order():
    assert sum_all(np.zeros((2, 3, 4), np.float32), (1,)) is None
