"""Convolutions, their gradients and grouped products: words of an H200, at some places of each result.

Patches and grouped products are those of tests/gpu_runs/torch_products.py, seed 0; the others are made by
tests/gpu_runs/convolution_kernels.py.
"""

import hashlib
import json
import lzma
import math
import zlib
from ast import literal_eval
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.operations.functional.torch_cuda.convolution_kernels import ConvolutionOrder
from tcemu.operations.functional.torch_cuda.product_kernels import Launch
from tcemu.uses.replay.torch_convolutions import ConvolutionCall, choose_order, convolution, convolution_gradients, grouped_matmul

GOLDEN = Path(__file__).parents[2] / "golden/torch_patches_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
USUAL = ("patch_bias|f16|1,3,32,8,64", "patch_bias|f32|1,1,64,4,96", "grouped|bf16|3,17,64,96", "grouped|f16|4,64,128,128")


@cache
def recorded():
    return json.loads(lzma.decompress(GOLDEN.read_bytes()))


def draw(key, shape):
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32)


def result_of(name):
    kind, dtype, sizes = name.split("|")
    to = DTYPES[dtype]
    if kind.startswith("patch"):
        batch, channels, height, size, outputs = map(int, sizes.split(","))
        x = draw(f"cx{batch}{channels}{height}{size}", (batch, channels, height, height)).astype(to)
        w = draw(f"cw{channels}{size}{outputs}", (outputs, channels, size, size)) * np.float32((channels * size * size) ** -0.5)
        bias = draw(f"cb{outputs}", outputs).astype(to)
        return convolution(x, w.astype(to), bias if kind == "patch_bias" else None, stride=(size, size))[0]
    experts, m, k, n = map(int, sizes.split(","))
    x = draw(f"gx{experts}{m}{k}{n}", (m, k)).astype(to)
    w = (draw(f"gw{experts}{m}{k}{n}", (experts, n, k)) * np.float32(k**-0.5)).astype(to)
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(f"go{experts}{m}".encode())))
    offsets = np.sort(rng.integers(0, m + 1, experts))
    offsets[-1] = m
    return grouped_matmul(x, w.swapaxes(1, 2), offsets, transposed_b=kind == "grouped")


@pytest.mark.parametrize("name", [n if n in USUAL else pytest.param(n, marks=pytest.mark.full) for n in recorded()["words"]])
def test_words_of_an_h200(name):
    places, words = recorded()["words"][name]
    try:
        y = np.asarray(result_of(name)).reshape(-1)
    except NotModelled as error:
        assert "f32" in name or "probability" in str(error) or "no rule" in str(error)
        return
    assert y[places].view(f"i{y.dtype.itemsize}").tolist() == words


CONVOLUTIONS = json.loads(lzma.decompress((GOLDEN.parent / "torch_convolutions_h200.json.xz").read_bytes()))["cases"]
MOST_WORK = 1 << 25  # products of a call that -m full computes on a CPU
SMALL = "((2, 16, 16, 16), (32, 16, 3, 3), (2, 2), (1, 1), (1, 1), 1, False, (0, 0))"
DEEP = "((2, 64, 9, 9), (64, 1, 5, 5), (2, 2), (2, 2), (1, 1), 64, False, (0, 0))"
TRANSPOSED = "((2, 32, 10, 10), (32, 16, 3, 3), (2, 2), (1, 1), (1, 1), 1, True, (1, 1))"
SPLIT = "((1, 512, 7, 7), (512, 512, 3, 3), (1, 1), (1, 1), (1, 1), 1, False, (0, 0))"
USUAL_CALLS = {
    (SMALL, "tf32|first", "y"), (SMALL, "tf32|last", "y"), (SMALL, "bfloat16|last", "dx"), (SMALL, "tf32|last", "dx"),
    (SMALL, "float32|first", "yb"), (SMALL, "float16|first", "dw"), (DEEP, "bfloat16|first", "yb"), (DEEP, "float32|first", "dx"),
    (DEEP, "tf32|first", "dw"), (DEEP, "tf32|last", "y"), (DEEP, "bfloat16|last", "dx"), (TRANSPOSED, "tf32|first", "y"),
    (TRANSPOSED, "bfloat16|last", "dw"),
}  # fmt: skip
CALLS = [
    pytest.param(case, mode, which, marks=() if (case, mode, which) in USUAL_CALLS else pytest.mark.full)
    for case, modes in CONVOLUTIONS.items() for mode, found in modes.items() for which in found if which != "db"
]  # fmt: skip


def spread(y, most):
    words = np.ascontiguousarray(y).reshape(-1).view(f"i{y.dtype.itemsize}")
    return words[np.unique(np.linspace(0, words.size - 1, min(words.size, most)).astype(np.int64))]


def operands_of(case, dtype):
    """Input, weight, gradient of the result, bias and options of a recorded convolution."""
    shape, weight_shape, stride, padding, dilation, groups, transposed, output_padding = literal_eval(case)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    options |= {"transposed": transposed, "output_padding": output_padding}
    sizes = [
        (n - 1) * s - 2 * p + d * (k - 1) + more + 1 if transposed else (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d, more in zip(shape[2:], weight_shape[2:], stride, padding, dilation, output_padding, strict=True)
    ]
    outputs = weight_shape[1] * groups if transposed else weight_shape[0]
    to = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}.get(dtype, np.float32)
    x, weight, grad, bias = (
        draw(f"{part}{case}", part_shape)
        for part, part_shape in (("x", shape), ("w", weight_shape), ("g", (shape[0], outputs, *sizes)), ("b", (outputs,)))
    )
    weight = weight * np.float32(float(math.prod(weight_shape[1:])) ** -0.5)
    return *(part.astype(to) for part in (x, weight, grad, bias)), options


def recorded_words(case, mode, which):
    """The digest of the words that are predicted, and the recorded one."""
    dtype, layout = mode.split("|")
    x, weight, grad, bias, options = operands_of(case, dtype)
    options |= {"channels_last": layout == "last", "tf32": dtype == "tf32"}
    if which in ("y", "yb"):
        found = convolution(x, weight, bias if which == "yb" else None, **options)[0]
    else:
        requested = (which == "dx", which == "dw")
        found = convolution_gradients(grad, x, weight, **options, requested=requested)[int(which == "dw")]
    words = spread(found, 96 if which == "yb" else 768)
    return hashlib.sha256(words.tobytes()).hexdigest()[:12], CONVOLUTIONS[case][mode][which]


def work_of(case):
    shape, weight_shape, *_, transposed, _ = literal_eval(case)
    x, _, grad, *_ = operands_of(case, "float32")
    return math.prod(weight_shape) * shape[0] * math.prod((x if transposed else grad).shape[2:])


@pytest.mark.parametrize(("case", "mode", "which"), CALLS)
def test_words_of_a_convolution_and_its_gradients(case, mode, which):
    """Of evenly spread words: results without and with a bias, and gradients of input and weight, in both layouts."""
    if (case, mode, which) not in USUAL_CALLS and work_of(case) > MOST_WORK:
        pytest.skip("too many products for a CPU")
    try:
        found, expected = recorded_words(case, mode, which)
    except NotModelled:
        assert (case, mode, which) not in USUAL_CALLS and which == "yb"
        return
    assert found == expected


def test_a_recording_of_kernels_tells_the_order():
    """Slices of the kernel's grid, kernels that a row does not know, and several that add."""
    call = ConvolutionCall("forward", "float32", (1, 512, 7, 7), (512, 512, 3, 3), (1, 1), (1, 1), (1, 1), tf32=True)
    name = "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize64x32x64_stage5_g1_tensor16x8x8_execute_kernel"
    chosen = choose_order(call, launches=[Launch("void cudnn::nchwToNhwcKernel<float>"), Launch(name, (16, 1, 5))])
    assert chosen.order == ConvolutionOrder("tensor core", "RNA", 64, cut="blocks", slices=5) and chosen.source == "recorded kernels"
    assert choose_order(call).order == chosen.order
    for launches, message in (
        ([Launch(name), Launch(name)], "expected one kernel"), ([Launch("winogradForwardData4x4<float>")], "no row of ROWS"),
        ([Launch(name.replace("fprop_implicit_gemm", "fprop_implicit_gemm_indexed"), (1, 1, 2))], "order of 2 slices is not known"),
    ):  # fmt: skip
        with pytest.raises(NotModelled, match=message):
            choose_order(call, launches=launches)


def test_what_is_not_known_or_does_not_fit_is_refused():
    x = np.ones((1, 3, 8, 8), np.float16)
    with pytest.raises(NotModelled, match="no rule knows which kernel"):
        convolution(x, np.ones((13, 3, 3, 5), np.float16))
    with pytest.raises(Unsupported, match="gpu='A100'"):
        convolution(x, np.ones((4, 3, 4, 4), np.float16), gpu="A100")
    with pytest.raises(NotModelled, match="three axes was not recorded"):
        convolution(np.ones((1, 2, 4, 4, 4), np.float32), np.ones((2, 1, 2, 2, 2), np.float32), groups=2)
    with pytest.raises(ValueError, match=r"expected \[B, C, \.\.\.\]"):
        convolution(x, np.ones((4, 2, 4, 4), np.float16))
    with pytest.raises(ValueError, match="expected one dtype"):
        convolution(x, np.ones((4, 3, 4, 4), np.float32))
    with pytest.raises(ValueError, match=r"grad: got shape \[1, 4, 5, 6\]; expected \[1, 4, 5, 5\]"):
        convolution_gradients(np.ones((1, 4, 5, 6), np.float16), x, np.ones((4, 3, 4, 4), np.float16))
    with pytest.raises(ValueError, match="output_padding="):
        convolution(x, np.ones((3, 4, 2, 2), np.float16), transposed=True, output_padding=(1, 0))
    with pytest.raises(ValueError, match="E offsets up to M"):
        grouped_matmul(np.ones((4, 8), np.float16), np.ones((2, 8, 8), np.float16), [1, 3])
    for bias in (np.ones(1, np.float16), np.ones(4, np.float32)):
        with pytest.raises(ValueError, match=r"bias: got .*; expected float16\[4\]"):
            convolution(x, np.ones((4, 3, 4, 4), np.float16), bias)


@pytest.mark.parametrize(("channels", "groups", "dtype"), [(3, 1, np.float32), (32, 1, ml_dtypes.bfloat16), (4, 4, np.float32)])
def test_a_batch_of_no_images_is_empty(channels, groups, dtype):
    x, weight, bias = (np.zeros(shape, dtype) for shape in ((0, channels, 8, 7), (4, channels // groups, 3, 3), 4))
    found, _ = convolution(x, weight, bias, groups=groups)
    assert found.shape == (0, 4, 6, 5) and found.dtype == dtype
    of_input, of_weight, _ = convolution_gradients(found, x, weight, groups=groups)
    assert of_input.shape == x.shape and of_weight.shape == weight.shape and not of_weight.any()


def test_taps_that_a_depthwise_result_does_not_reach_are_left_out():
    """An infinite weight beside the image gives no NaN, as PyTorch's kernel leaves it out."""
    x, weight = np.ones((1, 2, 2, 2), np.float32), np.ones((2, 1, 3, 3), np.float32)
    weight[:, :, 0] = np.inf
    found, (chosen,) = convolution(x, weight, groups=2, padding=(1, 1))
    assert chosen.order is None and np.isfinite(found[:, :, 0]).all() and np.isinf(found[:, :, 1]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": (1,)}, r"stride=\[1\].*each of 2 axes"), ({"stride": (0, 1)}, "1 or more"), ({"padding": (-1, 1)}, "0 or more"),
        ({"dilation": (1, 0)}, "dilation="), ({"groups": 0}, "in 0 groups"),
    ],
)  # fmt: skip
def test_numbers_that_no_convolution_has(options, message):
    with pytest.raises(ValueError, match=message):
        convolution(np.zeros((1, 3, 8, 8), np.float32), np.zeros((4, 3, 3, 3), np.float32), **options)
