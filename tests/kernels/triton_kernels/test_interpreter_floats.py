"""`tcemu.triton.interpreted`: bf16 and FP8 have the bits of compiled kernels, and of exact arithmetic."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels import kernels  # noqa: E402

from tcemu.triton import as_tensor, emulated, interpreted  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
RNG = np.random.default_rng(2)
FLOATS = (RNG.normal(size=4096) * np.exp2(RNG.integers(-30, 18, size=4096))).astype(np.float32)
TIES = ((np.arange(4096, dtype=np.uint32) << 20) | 0x8000).view(np.float32)
NUMBERS = np.concatenate([FLOATS, np.where(np.isnan(TIES), np.float32(1), TIES)])
INTEGERS = np.concatenate([RNG.integers(-(2**31), 2**31, 4096), RNG.integers(-70000, 70000, 4096)]).astype(np.int32)
HALVES = np.where(np.isnan(np.arange(65536, dtype=np.uint16).view(np.float16)), 0, np.arange(65536, dtype=np.uint16)).astype(np.uint16)
CASTS = [  # operands, result, target
    (NUMBERS, BF16, "A100"), (NUMBERS, E5M2, "A100"), (NUMBERS, E4M3, "H100"), (NUMBERS, E5M2, "H100"), 
    (NUMBERS.astype(BF16), E5M2, "A100"),
    (NUMBERS.astype(BF16), E4M3, "H100"), (HALVES.view(np.float16), E5M2, "A100"), (HALVES.view(np.float16), E4M3, "H100"),
    (np.arange(1024).astype(np.uint8).view(E5M2), BF16, "H100"), (INTEGERS, BF16, "A100"), (INTEGERS, BF16, "H100"),
]  # fmt: skip


def nearest_bf16(exact):
    """The bf16 nearest a Fraction, ties to even, by comparing with both neighbours."""
    start = np.array(float(exact), np.float32).astype(BF16).view(np.uint16)
    codes = [(int(start) + step) & 0xFFFF for step in (-1, 0, 1)]
    values = {code: Fraction(float(np.uint16(code).view(BF16))) for code in codes}
    return min(codes, key=lambda code: (abs(values[code] - exact), code & 1))


@pytest.mark.full
@pytest.mark.parametrize(("x", "dtype", "target"), CASTS)
def test_casts_have_the_bits_of_the_compiled_kernel(x, dtype, target):
    results = []
    for run in (emulated, interpreted):
        out = np.zeros(x.shape, dtype)
        with run(target):
            kernels.cast_kernel[(x.size // 1024,)](as_tensor(x.copy()), as_tensor(out), BLOCK=1024)
        results.append(out.view(f"u{out.itemsize}"))
    assert (results[0] != results[1]).sum() == 0 and len(np.unique(results[0])) > 100


@pytest.mark.parametrize("way", [interpreted, pytest.param(emulated, marks=pytest.mark.full)])
def test_bf16_arithmetic_is_rounded_once(way):
    """The sums of every fourth triple are next to ties, where two roundings would go wrong."""
    n = 512
    x, y, z = (RNG.uniform(1, 2, n).astype(BF16) for _ in range(3))
    x[::4], y[::4] = np.float32(1.75).astype(BF16), np.float32(37 / 32).astype(BF16)  # 259/128, a tie
    z[::4] = (RNG.choice([-1, 1], n // 4) * np.exp2(RNG.integers(-70, -20, n // 4))).astype(BF16)
    out = np.zeros((3, n), BF16)
    with way("H100"):
        kernels.bf16_arithmetic_kernel[(1,)](*map(as_tensor, (x, y, z, out)), BLOCK=n)
    exact = [[Fraction(float(value)) for value in each] for each in (x, y, z)]
    triples = list(zip(*exact, strict=True))
    expected = [[a + b for a, b, c in triples], [a * b for a, b, c in triples], [a * b + c for a, b, c in triples]]
    codes = np.array([[nearest_bf16(value) for value in row] for row in expected], np.uint16)
    assert (out.view(np.uint16) != codes).sum() == 0


def test_a_library_function_without_an_exact_result_is_refused():
    x = np.ones(16, np.float32)
    with interpreted("A100"), pytest.raises(Exception, match=r"libdevice\.exp: not interpreted"):
        kernels.library_kernel[(1,)](as_tensor(x), BLOCK=16)
    codes = np.ones(16, E5M2)
    with interpreted("H100"), pytest.raises(Exception, match="Triton does not compile it"):
        kernels.scale_kernel[(1,)](as_tensor(codes), 2.0, 1.0, 16, BLOCK=16)
    with interpreted("A100"):  # the language is restored, so that compiled kernels see their own library
        pass
    assert triton.language.extra.libdevice.exp.__module__ == "triton.language.extra.libdevice"


def test_atomic_sums_of_bf16():
    out = np.zeros(1, BF16)
    with interpreted("H100"):
        kernels.bf16_atomic_kernel[(1,)](as_tensor(np.arange(16, dtype=np.float32).astype(BF16)), as_tensor(out), BLOCK=16)
    assert out[0] == 120
