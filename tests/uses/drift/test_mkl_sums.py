"""A batch of one row in f32, which MKL multiplies by its sgemv, and the same row in a larger batch."""

import numpy as np
import pytest
from support.drift_records import recorded_product

from tcemu.drift import locate, record
from tcemu.uses.drift.cpu_sums import multiply_row

RNG = np.random.default_rng(17)
F32 = np.float32
normal = lambda *shape: RNG.standard_normal(shape).astype(F32)


def has_these_kernels(torch):
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


@pytest.mark.parametrize("columns", [1, 2, 7, 96])
def test_products_of_one_row_have_the_bits_of_mkl(columns):
    torch = pytest.importorskip("torch")
    if not has_these_kernels(torch):
        pytest.skip("the order is that of MKL with AVX-512")
    torch.set_num_threads(1)
    for k in (1, 2, 17, 40, 64, 333, 1024):
        x, w = normal(1, k), normal(columns, k)
        expected = torch.nn.functional.linear(torch.from_numpy(x), torch.from_numpy(w)).numpy()[0]
        assert multiply_row(x, w, np.arange(columns), columns).tobytes() == expected.tobytes(), k


@pytest.mark.full
def test_a_batch_of_one_against_a_larger_batch_is_explained(tmp_path):
    torch = pytest.importorskip("torch")
    if not has_these_kernels(torch):
        pytest.skip("the order is that of MKL with AVX-512")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 47))
    x = torch.randn(32, 64)
    for name, rows in (("one", x[:1]), ("all", x)):
        with record(tmp_path / f"{name}.drift", model), torch.no_grad():
            model(rows)
    drift = locate(tmp_path / "one.drift", tmp_path / "all.drift", targets=())
    first, second = drift.sources
    assert (first.path, second.path) == ("1", "3"), str(drift)
    for line in (first, second):
        assert "sgemv" in line.cause.left and "sequential sum, fma" in line.cause.right and line.cause.explained, str(drift)


@pytest.mark.full
def test_an_order_of_mkl_that_was_planted_is_named():
    """By the formula written once more, with scalars: 4 columns, 40 products."""
    from support.planted_drifts import _fma, fused_chain

    a, b = normal(1, 40), normal(40, 4)

    def column(products):
        total = F32(0)
        for start, stop in ((0, 1), (1, 33), (33, 40)):
            lanes = [total] + [F32(0)] * 15
            for i in range(start, stop):
                lanes[(i - start) % 16] = _fma(*products[i], lanes[(i - start) % 16])
            while len(lanes) > 1:
                lanes = [F32(lanes[i] + lanes[i + len(lanes) // 2]) for i in range(len(lanes) // 2)]
            (total,) = lanes
        return total

    planted = np.array([[column(list(zip(a[0], b[:, j], strict=True))) for j in range(4)]], F32)
    chain = fused_chain(np.repeat(a, 4, 0), b.T).reshape(1, 4)
    (source,) = locate(recorded_product(a, b, chain), recorded_product(a, b, planted), targets=()).sources
    assert source.cause.kinds == ("order of the sum",) and "sgemv" in source.cause.right, str(source)
