"""`tcemu.triton.emulated`: launches of Triton functions without a GPU, on NumPy arrays and torch tensors."""

import ctypes

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels import kernels  # noqa: E402

import tcemu  # noqa: E402
import tcemu.triton  # noqa: E402
from tcemu.kernels.triton.arguments import KernelValue  # noqa: E402
from tcemu.kernels.triton.kernel_launches import ArgumentMemory, bit_doubts  # noqa: E402
from tcemu.ptx import OutOfBounds  # noqa: E402
from tcemu.triton import as_tensor, emulated  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
RNG = np.random.default_rng(0)


def floats(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


@pytest.mark.parametrize("target", ("A100", "sm_90a"))
def test_a_launch_writes_in_place(target):
    x, y, out = floats(300), floats(300), np.full(310, np.nan, np.float32)
    with emulated(target) as report:
        kernels.add_kernel[lambda meta: (triton.cdiv(300, meta["BLOCK"]),)](as_tensor(x), as_tensor(y), as_tensor(out), 300, BLOCK=128)
        kernels.scale_kernel[(1,)](as_tensor(out), 0.5, -1.0, 10, BLOCK=16)
    expected = x + y
    expected[:10] = expected[:10] * np.float32(0.5) - np.float32(1)  # exact products: no fusion can differ
    assert np.array_equal(out[:300], expected) and np.isnan(out[300:]).all()
    assert [launch.kernel for launch in report.launches] == ["add_kernel", "scale_kernel"]
    assert report.launches[0].grid == (3, 1, 1) and report.launches[0].settings["BLOCK"] == 128 and not report.launches[0].inexact
    assert "add_kernel" in str(report) and report.records()[1]["bits"] == "exact"


def test_views_of_one_array_alias():
    """Overlapping views share memory, and a view that begins inside an array reaches only what the kernel addresses."""
    memory = np.arange(40, dtype=np.int32)
    with emulated("A100"):
        kernels.shift_kernel[(1,)](as_tensor(memory[3:]), as_tensor(memory[5:]), 8, BLOCK=8)
    expected = np.arange(40)
    expected[5:13] = np.arange(3, 11) + 1
    assert np.array_equal(memory, expected)


def test_grids_of_three_axes_and_helpers():
    out = np.zeros((2, 3, 4), np.int32)
    with emulated("A100"):
        kernels.place_kernel[(4, 3, 2)](as_tensor(out), 4, 3)
        kernels.place_kernel[(0, 3, 2)](as_tensor(out), 4, 3)  # an empty grid runs nothing
    z, y, x = np.indices((2, 3, 4))
    assert np.array_equal(out, x + 10 * y + 100 * z)


def test_autotuned_products_have_the_bits_of_the_instruction():
    a, b = floats(32, 64, dtype=np.float16), floats(64, 64, dtype=np.float16)
    results = []
    for config, block in ((None, 32), (lambda config: config.num_warps == 2, 64)):
        c = np.zeros((32, 64), np.float32)
        with emulated("A100", config=config) as report:
            kernels.matmul_kernel[lambda meta: (32 // meta["BLOCK_M"], 64 // meta["BLOCK_N"])](
                as_tensor(a), as_tensor(b), as_tensor(c), 64, 64, 1, 64, 1, 64, 1
            )
        assert report.launches[0].settings["BLOCK_N"] == block and report.launches[0].settings["EVEN_K"]
        results.append(c)
    expected = np.asarray(tcemu.gemm(a, b, op="f16", target="A100"))
    for result in results:
        assert (result.view(np.uint32) != expected.view(np.uint32)).sum() == 0


def test_tensor_descriptors_of_the_host():
    from triton.tools.tensor_descriptor import TensorDescriptor

    source, copy = floats(16, 32, dtype=np.float16), np.zeros((16, 32), np.float16)
    left, right = (TensorDescriptor(as_tensor(x), [16, 32], [32, 1], [8, 16]) for x in (source, copy))
    for target in ("H100", "A100"):  # with tensor maps, and without
        copy[...] = 0
        with emulated(target):
            kernels.descriptor_kernel[(2, 2)](left, right, ROWS=8, COLUMNS=16)
        assert np.array_equal(copy, 2 * source)


@pytest.mark.full
def test_tensor_descriptors_that_pad_with_nan():
    from triton.tools.tensor_descriptor import TensorDescriptor

    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tcemu[torch]'")
    source, copy = floats(12, 24, dtype=np.float16), np.zeros((16, 32), np.float16)
    left = TensorDescriptor(torch.from_numpy(source), [12, 24], [24, 1], [8, 16], padding="nan")
    with emulated("H100"):
        kernels.descriptor_kernel[(2, 2)](left, TensorDescriptor(as_tensor(copy), [16, 32], [32, 1], [8, 16]), ROWS=8, COLUMNS=16)
    assert np.array_equal(copy[:12, :24], 2 * source) and np.isnan(copy[12:]).all() and np.isnan(copy[:, 24:]).all()


def array_at(residue: int, size: int) -> np.ndarray:
    """Zeros of `size` bytes at an address of the CPU that is `residue` above a multiple of 256."""
    memory = ctypes.create_string_buffer(size + 512)
    start = -ctypes.addressof(memory) % 256 + residue
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_buffer(memory, start))


def test_buffers_begin_where_cuda_malloc_lets_them_begin():
    for residue in (0, 16, 48, 64, 128, 240, 8, 3):
        (argument,) = ArgumentMemory([KernelValue(tensor=as_tensor(array_at(residue, 64)))]).arguments()
        assert argument.offset == residue % 16, residue  # below 16 it is kept, since Triton compiles another kernel then


def test_tensor_descriptors_of_the_kernel_wherever_its_scratch_memory_lies(monkeypatch):
    """Triton keeps tensor maps in scratch memory, at multiples of 128."""
    scratch = []

    def zeros(shape, dtype=float):
        if dtype is not np.uint8 or not isinstance(shape, int) or shape < 128:
            return np_zeros(shape, dtype)
        scratch.append(shape)
        return array_at(16 * len(scratch) % 256, shape)

    np_zeros, source = np.zeros, floats(16, 32, dtype=np.float16)
    monkeypatch.setattr("tcemu.kernels.triton.kernel_launches.np.zeros", zeros)
    for _ in range(3):
        copy = np_zeros((16, 32), np.float16)
        with emulated("H100"):
            kernels.device_descriptor_kernel[(2, 2)](as_tensor(source), as_tensor(copy), 16, 32, ROWS=8, COLUMNS=16)
        assert np.array_equal(copy, 2 * source)
    assert len(scratch) >= 3


def test_errors_name_the_kernel():
    with (
        emulated("A100"),
        pytest.raises(OutOfBounds, match=r"line \d+ \(.*kernels\.py:\d+\): .*block.* of the argument x_ptr, which has 64 bytes"),
    ):
        kernels.outside_kernel[(1,)](as_tensor(np.zeros(16, np.float32)), BLOCK=16)
    with emulated("A100"), pytest.raises(TypeError):
        kernels.outside_kernel[(1,)](np.zeros(16, np.float32), BLOCK=16)
    with pytest.raises(tcemu.Unsupported), emulated("sm_91"):
        pass
    with pytest.raises(TypeError, match="read-only"):
        as_tensor(np.broadcast_to(np.float32(1), 3))


def test_statements_that_nobody_has_measured_are_in_doubt():
    for opcode in ("cvt.rn.scaled::n2::ue8m0.bf16x2.e4m3x2", "vadd.u32.u32.u32"):
        assert "no words of a GPU" in bit_doubts([opcode], [], "sm_100a")[0]
    assert not bit_doubts(["cvt.rn.bf16x2.e2m1x2", "add.u32"], [], "sm_100a")


def test_the_driver_of_before_comes_back():
    driver, cache = triton.runtime.driver._active, triton.knobs.cache.dir
    with pytest.raises(KeyError), emulated("A100"):
        assert triton.runtime.driver.active.get_current_target().arch == 80
        raise KeyError
    assert triton.runtime.driver._active is driver and triton.knobs.cache.dir == cache
    assert triton.knobs.runtime.add_stages_inspection_hook is None


def test_torch_programs_that_name_cuda():
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'tcemu[torch]'")
    host = torch.arange(8, dtype=torch.float32)
    with emulated("H100"):
        x = host.to("cuda")
        assert x.is_cuda and torch.cuda.get_device_capability() == (9, 0)
        kernels.scale_kernel[(1,)](x[::2].contiguous(), 2.0, 0.0, 4, BLOCK=4)
        kernels.scale_kernel[(1,)](x, 2.0, 0.0, 8, BLOCK=8)
        back = x.cpu()
        y = torch.zeros(3, device="cuda")
        torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(8.0)) and torch.equal(back, 2 * torch.arange(8.0)) and y.device.type == "cpu"
    assert not torch.zeros(1).is_cuda
