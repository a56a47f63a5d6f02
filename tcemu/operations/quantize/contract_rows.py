"""`CONTRACTS`: who rounds how. One row for each rule that libraries quantise by; libraries with equal words share a row.

Facts were read from public sources; a source names the repository, the release or the commits that were read, and the file. `ue8m0` scales
that a library keeps as f32 powers of two have a row of f32 scales. Scale layouts are in `scale_layouts`.
"""

from __future__ import annotations

from difflib import get_close_matches
from itertools import product
from typing import Any

from tcemu.engine.formats.number_formats import BF16, E2M1, E4M3, E4M3FNUZ, F32, Format
from tcemu.operations.quantize.contracts import Application, FloatScale, PowerScale, QuantizerContract, Ratio
from tcemu.operations.quantize.two_level_scales import FourOverSixScale, TwoLevelScale

TO_S, TO_E, BY_INVERSE = Ratio.STORED, Ratio.RECIPROCAL, Ratio.STORED_BY_INVERSE
DIVIDE, MULTIPLY, MULTIPLY_BY_POWER = Application.DIVIDE, Application.MULTIPLY, Application.MULTIPLY_BY_POWER
INVERSE, INVERSE_OR_ZERO = Application.MULTIPLY_BY_INVERSE, Application.MULTIPLY_BY_INVERSE_OR_ZERO
UP, DOWN = "2^ceil(log2 s)", "2^floor(log2 e)"
MAX_E4M3, MIN_E4M3 = 0x7E, 0xFE  # codes of 448 and -448
MAX_VLLM_FNUZ = 0x7E  # code of 224 in e4m3fnuz
TORCH_NAN_OF_SCALE = 0x4  # the same of the NaN that comes from a scale of e4m3, 0x7FF00000
TORCH_NAN = 0x3  # torchao's bit arithmetic makes the quiet NaN 0x7FC00000 this code of e2m1

_TORCHAO = "pytorch/ao 0.18.0, torchao/"
_TE = "NVIDIA/TransformerEngine, transformer_engine/common/"
_DEEPGEMM = "deepseek-ai/DeepGEMM 38939a4, deep_gemm/utils/math.py"
_VLLM = "vllm-project/vllm, csrc/quantization/w8a8/fp8/"
_SGLANG = "sgl-project/sglang, sgl-kernel/csrc/gemm/"
_FLASHINFER = "flashinfer-ai/flashinfer 014327a, csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh; built with -use_fast_math"
_AITER = "ROCm/aiter 0164c2f, aiter/ops/quant.py and aiter/utility/fp4_utils.py"
_COMPRESSED = "vllm-project/compressed-tensors 04a58ff, quantization/utils/helpers.py, lifecycle/forward.py"
_MSLK = "meta-pytorch/MSLK, mslk/quantize/triton/"
_TRTLLM = (
    "NVIDIA/TensorRT-LLM 0193dbd, cpp/tensorrt_llm/kernels/quantization.cuh; without fast math, whose option is off in 02fbea2, "
    "cpp/CMakeLists.txt"
)
_MLX = "mlx 0.32.4, mlx.core.quantize on an x86-64 CPU, by its words; ml-explore/mlx 0087b78, mlx/ops.cpp, fp_quantize"
_MLX_CUDA = (
    "ml-explore/mlx 252c686, mlx/backend/cuda/quantized/fp_quantize.cuh; 182b4f2, nvfp4_quantize.cuh; 08d49af, quantized_utils.cuh; "
    "built without fast math, 00703ea, mlx/backend/cuda/CMakeLists.txt; cuda_fp8.hpp of CUDA 13.0"
)
_MLX_OPEN = "The exponent of a block with Inf or NaN is converted to an integer, which C++ leaves undefined."
_MLX_ROUNDING = "At 0087b78 the exponent was rounded to nearest by log2. 16-bit inputs are divided in their own format."
_MLX_CUDA_NOTE = "On sm_100 and later. mx.quantize without a global scale."
_TRITON_NAN = "NaN: Triton's max and clamp leave it open; here max drops it, and clamp gives the lower bound."
_SM90 = "The words are those of the build without fast math (sm_100 and later); the build for sm_90 has -use_fast_math."


Texts = str | tuple[str, ...]  # one of them, or several


def _row(name: str, libraries: Texts, element: Format, extents: Texts, scale: Any, source: str, **more: Any) -> QuantizerContract:
    as_tuple = lambda texts: texts if isinstance(texts, tuple) else (texts,)
    return QuantizerContract(name, as_tuple(libraries), element, as_tuple(extents), scale, source=source, **more)


def _fp8(name: str, libraries: Texts, extents: Texts, scale: FloatScale, source: str, **more: Any) -> QuantizerContract:
    return _row(name, libraries, more.pop("element", E4M3), extents, scale, source, **more)


def _mx(name: str, libraries: Texts, element: Format, scale: PowerScale, source: str, **more: Any) -> QuantizerContract:
    return _row(name, libraries, element, "1 x 32", scale, source, **more)


def _nvfp4(name: str, libraries: Texts, scale: TwoLevelScale | FourOverSixScale, source: str, **more: Any) -> QuantizerContract:
    return _row(name, libraries, E2M1, "1 x 16", scale, source, **more)


FP8_ROWS = (
    _fp8("torchao_float8", ("torchao: float8 training, tensorwise and rowwise", "torchao: prototype.blockwise_fp8_training"),
        ("tensor", "row", "1 x 128", "128 x 128"), FloatScale(TO_E, MULTIPLY, least_amax=1e-12, in_f64=True),
        _TORCHAO + "float8/float8_utils.py, amax_to_scale and to_fp8_saturated; prototype/blockwise_fp8_training/kernels.py",
        ignores_nan=False),
    _fp8("torchao_float8_power_of_two", "torchao: float8 training, round_scales_to_power_of_2", ("tensor", "row"),
        FloatScale(TO_E, MULTIPLY, least_amax=1e-12, in_f64=True, power="2^floor(log2 e), log2 rounded to f32"),
        _TORCHAO + "float8/float8_utils.py, _round_scale_down_to_power_of_2", ignores_nan=False,
        note="A scale just below a power of two is rounded up to it, because its log2 is."),
    _fp8("torchao_inference", "torchao: _choose_scale_float8 and _quantize_affine_float8", ("tensor", "row", "1 x 128", "128 x 128"),
        FloatScale(TO_S, DIVIDE, in_input_dtype=True), _TORCHAO + "quantization/quant_primitives.py", ignores_nan=False,
        note="hp_value_lb and hp_value_ub, which bound amax, are None."),
    _fp8("te_current", "Transformer Engine: Float8CurrentScaling", "tensor", FloatScale(TO_E, MULTIPLY, special_is_one=True),
        _TE + "recipe/recipe_common.cuh 01c24fe and current_scaling.cu 0064fbd", note="amax_epsilon is 0."),
    _fp8("te_delayed", "Transformer Engine: DelayedScaling", "tensor", FloatScale(TO_E, MULTIPLY, special_is_one=True, delayed=True),
        _TE + "recipe/delayed_scaling.cu and recipe.DelayedScaling, release 1.3 and release 1.12",
        note="The amax is the largest of the last amax_history_len = 1024 steps, or the most recent one; margin is 0: else divide max by "
        "2^margin. Where amax is 0 or Inf the scale stays what it was, at first 1, which is what this row gives. Release 1.3 recomputes "
        "scales every `interval` steps, by default 1; 1.12 has no such argument. `tcemu.products.delayed_matmul` keeps the history."),
    _fp8("te_power_of_two", ("Transformer Engine: Float8BlockScaling", "Transformer Engine: Float8CurrentScaling, use_power_2_scales"),
        ("1 x 128", "128 x 128", "tensor"), FloatScale(TO_E, MULTIPLY, special_is_one=True, power=DOWN),
        _TE + "recipe/recipe_common.cuh 01c24fe, force_pow_2_scales",
        note="For bf16, Float8BlockScaling replaces an overflowed quotient by the largest bf16, which has the same power of two."),
    _fp8("deepgemm", ("DeepGEMM: per_token_cast_to_fp8", "DeepGEMM: per_block_cast_to_fp8", "DeepGEMM: per_channel_cast_to_fp8"),
        ("1 x 128", "128 x 128", "128 x 1", "1 x 32"), FloatScale(TO_S, INVERSE, least_amax=1e-4), _DEEPGEMM, ignores_nan=False,
        note="The cast is torch's, which saturates from 2.12 on; before, Inf became NaN."),
    _fp8("deepgemm_ue8m0", ("DeepGEMM: per_token_cast_to_fp8, use_ue8m0", "DeepGEMM: per_block_cast_to_fp8, use_ue8m0"),
        ("1 x 128", "128 x 128", "128 x 1", "1 x 32"), FloatScale(TO_S, INVERSE, least_amax=1e-4, power=UP + ", 2^-126 to 2^127"),
        _DEEPGEMM + ", ceil_to_ue8m0", ignores_nan=False,
        note="use_packed_ue8m0 packs the exponents of four neighbours along K in an int32."),
    _fp8("vllm_per_token", "vLLM: dynamic_per_token_scaled_fp8_quant", "row", FloatScale(TO_S, DIVIDE, least_scale=1 / (448 * 512)),
        _VLLM + "common.cu 096d3dc and common.cuh 0f5257e", nan_element=MAX_E4M3, note="scale_ub, which bounds amax, is not given."),
    _fp8("vllm_per_tensor",
        ("vLLM: dynamic_scaled_fp8_quant", "SGLang: sgl_per_tensor_quant_fp8",
        "SGLang: sgl_per_token_quant_fp8, its kernel for few tokens"), ("tensor", "row"), FloatScale(TO_S, INVERSE),
        _VLLM + "common.cu 096d3dc; " + _SGLANG + "per_tensor_quant_fp8.cu 28f9412 and per_token_quant_fp8.cu 0490047",
        nan_element=MAX_E4M3, note=_SM90),
    _fp8("sglang_per_token", "SGLang: sgl_per_token_quant_fp8, its kernel for many tokens", "row", FloatScale(TO_S, INVERSE_OR_ZERO),
        _SGLANG + "per_token_quant_fp8.cu 0490047", nan_element=MAX_E4M3, note="From 16 tokens per SM on. " + _SM90),
    _fp8("vllm_group", "vLLM: per_token_group_quant_fp8", ("1 x 128", "1 x 64", "1 x 32"), FloatScale(TO_S, DIVIDE, least_amax=1e-10),
        _VLLM + "per_token_group_quant.cu 0f5257e; eps 1e-10", nan_element=MIN_E4M3),
    _fp8("vllm_group_ue8m0", "vLLM: per_token_group_quant_fp8, use_ue8m0", ("1 x 128", "1 x 64", "1 x 32"),
        FloatScale(TO_S, INVERSE, least_amax=1e-10, least_scale=1e-10, power=UP),
        _VLLM + "per_token_group_quant.cu 0f5257e, the register kernel", nan_element=MIN_E4M3,
        note="The shared-memory kernel computes exp2f(ceilf(log2f(s))), whose log2f is CUDA's; its words near powers of two are unknown."),
    _fp8("sglang_group", "SGLang: sgl_per_token_group_quant_fp8, v2", ("1 x 128", "1 x 64", "1 x 32"),
        FloatScale(BY_INVERSE, MULTIPLY, least_amax=1e-10), _SGLANG + "per_token_group_quant_8bit_v2.cu 037cd6e", nan_element=MIN_E4M3,
        note=_SM90),
    _fp8("sglang_group_v1", "SGLang: sgl_per_token_group_quant_fp8, v1", "1 x 128", FloatScale(BY_INVERSE, MULTIPLY, least_amax=1e-10),
        _SGLANG + "per_token_group_quant_8bit.cu 00568d9", note=_SM90),
    _fp8("sglang_group_ue8m0", "SGLang: sgl_per_token_group_quant_fp8, v2, scale_ue8m0, column-major scales",
        ("1 x 128", "1 x 64", "1 x 32"), FloatScale(BY_INVERSE, MULTIPLY_BY_POWER, least_amax=1e-10, power=UP),
        _SGLANG + "per_token_group_quant_8bit_v2.cu 037cd6e", nan_element=MIN_E4M3,
        note="For amax Inf the integer arithmetic makes the factor -Inf, which flips every sign."),
    _fp8("sglang_group_ue8m0_rows", "SGLang: sgl_per_token_group_quant_fp8, v2, scale_ue8m0, row-major scales",
        ("1 x 128", "1 x 64", "1 x 32"), FloatScale(BY_INVERSE, MULTIPLY, least_amax=1e-10, power=UP, exact_elements=True),
        _SGLANG + "per_token_group_quant_8bit_v2.cu 037cd6e", nan_element=MIN_E4M3,
        note="Elements are rounded by the exact scale, while the stored scale is rounded up: their product is up to twice x."),
    _fp8("compressed_tensors_fp8", "compressed-tensors: dynamic FP8, token and tensor", ("row", "tensor", "1 x 128"),
        FloatScale(TO_S, DIVIDE, zero_scale=2.0**-23), _COMPRESSED, ignores_nan=False, drops_zero_sign=True, only=F32),
    _fp8("aiter_per_token", ("aiter: pertoken_quant", "aiter: per_block_quant_wrapper(1, 128)"), ("row", "1 x 128"),
        FloatScale(TO_S, DIVIDE, zero_scale=1.0), _AITER, ignores_nan=False,
        note="Elsewhere than on gfx942, whose FP8 is e4m3fnuz. The cast is torch's."),
    _fp8("aiter_per_tensor", "aiter: per_tensor_quant", "tensor", FloatScale(TO_S, DIVIDE), _AITER, ignores_nan=False,
        note="Elsewhere than on gfx942, whose FP8 is e4m3fnuz. The cast is torch's."),
    _fp8("mslk_row", "MSLK: triton_quantize_fp8_row", "row", FloatScale(TO_S, DIVIDE, least_amax=1 / 512),
        _MSLK + "fp8_quantize.py 0017d3d; eps_opt 1 / 512", nan_element=MIN_E4M3, note=_TRITON_NAN),
)  # fmt: skip

FNUZ_ROWS = (  # gfx942: MI300A, MI300X, MI325X
    _fp8("vllm_per_token_fnuz", "vLLM on gfx942: dynamic_per_token_scaled_fp8_quant", "row",
        FloatScale(TO_S, DIVIDE, least_scale=1 / (224 * 512), largest=224.0),
        _VLLM + "common.cu 096d3dc and common.cuh 0f5257e; csrc/quantization/utils.cuh 1f89a92: 224, not 240", nan_element=MAX_VLLM_FNUZ,
        element=E4M3FNUZ, note="scale_ub, which bounds amax, is not given. Fast math of the ROCm build was not read."),
    _fp8("vllm_per_tensor_fnuz", "vLLM on gfx942: dynamic_scaled_fp8_quant", "tensor", FloatScale(TO_S, INVERSE, largest=224.0),
        _VLLM + "common.cu 096d3dc and common.cuh 0f5257e; csrc/quantization/utils.cuh 1f89a92: 224, not 240", nan_element=MAX_VLLM_FNUZ,
        element=E4M3FNUZ, note="Fast math of the ROCm build was not read."),
    _fp8("aiter_per_token_fnuz", ("aiter on gfx942: pertoken_quant", "aiter on gfx942: per_block_quant_wrapper(1, 128)"),
        ("row", "1 x 128"), FloatScale(TO_S, DIVIDE, zero_scale=1.0), _AITER + "; aiter/utility/dtypes.py 02d69c3", ignores_nan=False,
        overflows_to_nan=True, element=E4M3FNUZ, note="The cast is torch's: x / s is 240 at most, unless Inf is among the elements."),
    _fp8("aiter_per_tensor_fnuz", "aiter on gfx942: per_tensor_quant", "tensor", FloatScale(TO_S, DIVIDE),
        _AITER + "; aiter/utility/dtypes.py 02d69c3", ignores_nan=False, overflows_to_nan=True, element=E4M3FNUZ,
        note="The cast is torch's. A tensor of zeros becomes NaN, 0 / 0."),
)  # fmt: skip

_MX_TO_MX = _TORCHAO + "prototype/mx_formats/mx_tensor.py, to_mx"
_AT_LEAST_NORMAL = "x / max(2^e, 2^-126)"
MXFP8_ROWS = (
    _mx("ocp_mxfp8", ("OCP MX 1.0: 6.3", "tcemu: mxfp8_e4m3"), E4M3, PowerScale("amax", "floor", "x / 2^e", of_infinity=255),
        "OCP MX 1.0, 5.2 and 6.3", ignores_nan=False, note="Inf or NaN in a block makes its scale NaN, as tcemu reads 5.1."),
    _mx("torchao_mxfp8_floor", "torchao: to_mx, FLOOR", E4M3, PowerScale("amax", "floor", _AT_LEAST_NORMAL), _MX_TO_MX, ignores_nan=False),
    _mx("torchao_mxfp8_ceil", "torchao: to_mx, CEIL", E4M3, PowerScale("amax", "ceil", _AT_LEAST_NORMAL), _MX_TO_MX, ignores_nan=False),
    _mx("torchao_mxfp8_even", "torchao: to_mx, EVEN", E4M3, PowerScale("amax", "half up to 3 bits", _AT_LEAST_NORMAL), _MX_TO_MX,
        ignores_nan=False),
    _mx("torchao_mxfp8_rceil", "torchao: to_mx, RCEIL, eager", E4M3,
        PowerScale("amax / max", "ceil of log2 rounded to f32", "x * 2^-e, 1 for code 0", of_infinity=254), _MX_TO_MX, ignores_nan=False,
        note="Compiled for Blackwell, torchao uses cvt.rp.satfinite.ue8m0x2.f32 instead."),
    _mx("te_mxfp8", "Transformer Engine: MXFP8BlockScaling", E4M3,
        PowerScale("amax * (1 / max)", "ceil by cvt.rp.satfinite", "x * (254 - code) << 23, 1 for code 0"),
        _TE + "cast/mxfp8/quantize_mxfp8.cuh and util/ptx.cuh 03198ae",
        note="A specialised kernel for 16-bit inputs may round the product otherwise."),
    _mx("flashinfer_mxfp8", "FlashInfer: mxfp8_quantize", E4M3,
        PowerScale("amax * rcp.approx.ftz(max)", "ceil by cvt.rp.satfinite", "x * rcp.approx.ftz(2^e), 0 for code 0"), _FLASHINFER),
    _mx("mslk_mxfp8", "MSLK: triton_quantize_mxfp8", E4M3, PowerScale("amax / max", "ceil of normal numbers", "x * 2^-e, 1 for code 0"),
        _MSLK + "mxfp8_quantize.py 35068bd", nan_element=MIN_E4M3, note=_TRITON_NAN),
    _mx("compressed_tensors_mxfp8", "compressed-tensors: MXFP8", E4M3,
        PowerScale("amax", "half up to 1 bit", "x / 2^e, Inf for e = 128", of_nan=255, of_infinity=255),
        "vllm-project/compressed-tensors 4b993cb, quantization/utils/mxfp_utils.py, generate_mx_scales", ignores_nan=False,
        drops_zero_sign=True, only=F32, note="Rounds amax to the bits of e2m1 for e4m3 too."),
    _mx("trtllm_mxfp8", "TensorRT-LLM: mxfp8_quantize", E4M3,
        PowerScale("amax * rcp.approx.ftz(max), subnormal numbers kept", "ceil by cvt.rp.satfinite",
            "x * rcp.approx.ftz(2^e), 0 for amax 0"), _TRTLLM, note="The factor of the scale 2^-127, whose reciprocal is flushed, is Inf."),
    _mx("mlx_mxfp8", 'MLX on a CPU: quantize, mode="mxfp8"', E4M3,
        PowerScale("amax / max", "ceil, 2^0 for 0", "x / 2^e, e from -149", codes=(-22, 254)), _MLX, ignores_nan=False,
        nan_element=MAX_E4M3, only=F32, open_specials=True,
        note=f"{_MLX_OPEN} Exponents below -127 wrap: the stored code is that of e + 256. {_MLX_ROUNDING}"),
    _mx("aiter_mxfp8", "aiter: per_1x32_f8_scale_f8_quant, e8m0", E4M3, PowerScale("amax / max", "ceil", "x / 2^e", of_infinity=255),
        _AITER, ignores_nan=False),
)  # fmt: skip
MXFP4_ROWS = (
    _mx("ocp_mxfp4", ("OCP MX 1.0: 6.3", "tcemu: mxfp4"), E2M1, PowerScale("amax", "floor", "x / 2^e", of_infinity=255),
        "OCP MX 1.0, 5.2 and 6.3", ignores_nan=False),
    _mx("torchao_mxfp4_floor", "torchao: to_mx, FLOOR", E2M1, PowerScale("amax", "floor", _AT_LEAST_NORMAL), _MX_TO_MX, ignores_nan=False,
        nan_element=TORCH_NAN),
    _mx("torchao_mxfp4_ceil", "torchao: to_mx, CEIL", E2M1, PowerScale("amax", "ceil", _AT_LEAST_NORMAL), _MX_TO_MX, ignores_nan=False,
        nan_element=TORCH_NAN),
    _mx("torchao_mxfp4_even", "torchao: to_mx, EVEN", E2M1, PowerScale("amax", "half up to 1 bit", _AT_LEAST_NORMAL), _MX_TO_MX,
        ignores_nan=False, nan_element=TORCH_NAN),
    _mx("torchao_mxfp4_rceil", "torchao: to_mx, RCEIL, eager", E2M1,
        PowerScale("amax / max", "ceil of log2 rounded to f32", "x * 2^-e, 1 for code 0", of_infinity=254), _MX_TO_MX, ignores_nan=False,
        nan_element=TORCH_NAN),
    _mx("flashinfer_mxfp4", "FlashInfer: fp4_quantize, sf_use_ue8m0", E2M1,
        PowerScale("amax * rcp.approx.ftz(max)", "ceil by cvt.rp.satfinite", "x * 2^-e by ex2, 1 for code 0, 0 for amax 0"), _FLASHINFER),
    _mx("trtllm_mxfp4", "TensorRT-LLM: fp4_quantize, sf_use_ue8m0, without a global scale", E2M1,
        PowerScale("amax * rcp.approx.ftz(max), subnormal numbers kept", "ceil by cvt.rp.satfinite",
            "x * rcp.approx.ftz(2^e), 0 for amax 0"), _TRTLLM, note="The factor of the scale 2^-127, whose reciprocal is flushed, is Inf."),
    _mx("mlx_mxfp4", 'MLX on a CPU: quantize, mode="mxfp4"', E2M1,
        PowerScale("amax / max", "ceil, 2^0 for 0", "x / 2^e, e from -149", codes=(-22, 254)), _MLX, ignores_nan=False, first_nearest=True,
        only=F32, open_specials=True,
        note=f"{_MLX_OPEN} Exponents below -127 wrap: the stored code is that of e + 256. Ties go to the smaller magnitude, and zeros lose "
        f"their sign. {_MLX_ROUNDING}"),
    _mx("mlx_cuda_mxfp4", 'MLX on CUDA: quantize, mode="mxfp4"', E2M1,
        PowerScale("amax / max", "ceil by cvt.rp.satfinite", "x * (1 / 2^e)"), _MLX_CUDA, note=_MLX_CUDA_NOTE),
    _mx("vllm_mxfp4", "vLLM: quant_dequant_mxfp4 (amd-quark), scale_calculation_mode even", E2M1,
        PowerScale("amax", "half up to 1 bit", "x / 2^e"),
        "vllm-project/vllm 337f2bd, tests/quantization/reference_mxfp4.py, against which its tests hold the kernel; 01b817d, "
        "model_executor/layers/quantization/utils/mxfp4_utils.py", ignores_nan=False, only=BF16, open_specials=True,
        note="The library returns values, not codes. On float16 it computes scales and quotients in float16, which is not modelled. Inf, "
        "NaN and an amax of 1.75 * 2^127 or more are left open: their exponent is an undefined conversion."),
    _mx("deepgemm_fp4", "DeepGEMM: per_token_cast_to_fp4, use_ue8m0", E2M1,
        PowerScale("amax / max", "ceil", "x * (1 / 2^e)", least_amax=1e-4, codes=(1, 254), of_nan=254), _DEEPGEMM, ignores_nan=False,
        drops_sign_of_small=True, note="Midpoints are rounded toward zero: see `ties_to_zero`.", ties_to_zero=True),
    _mx("mslk_mx4_even", "MSLK: MX4, RoundingMode.even", E2M1,
        PowerScale("amax", "half down to 1 bit", "x / 2^e", zero_amax=2.0**-126, codes=(0, 252), of_nan=None),
        _MSLK + "fp4_primitives/scale.py 09a7aa8", note=_TRITON_NAN),
    _mx("mslk_mx4_floor", "MSLK: MX4, RoundingMode.floor", E2M1,
        PowerScale("amax", "floor", "x / 2^e", zero_amax=2.0**-126, codes=(0, 252), of_nan=None), _MSLK + "fp4_primitives/scale.py 09a7aa8",
        note=_TRITON_NAN),
    _mx("mslk_mx4_ceil", "MSLK: MX4, RoundingMode.ceil", E2M1,
        PowerScale("amax", "ceil", "x / 2^e", zero_amax=2.0**-126, codes=(0, 252), of_nan=None), _MSLK + "fp4_primitives/scale.py 09a7aa8",
        note="The default of quantize_mx4 at 0017d3d. " + _TRITON_NAN),
    _mx("mslk_mx4_stochastic", "MSLK: MX4, RoundingMode.stochastic", E2M1,
        PowerScale("amax", "floor", "x / 2^e", zero_amax=2.0**-126, codes=(0, 252), of_nan=None),
        _MSLK + "fp4_primitives/scale.py 09a7aa8, quantize_kernels/mx4.py and __init__.py 0017d3d; triton/language/random.py",
        noise_bits=22,
        note="Noise is added to the code as an integer: about half of all zeros wrap to NaN, which the cast makes 6; -Inf may become 6. "
        "quantize_mx4 draws in this order; other kernels were not read. Matrices take the seed 0. " + _TRITON_NAN),
    _mx("compressed_tensors_mxfp4", "compressed-tensors: MXFP4", E2M1,
        PowerScale("amax", "half up to 1 bit", "x / 2^e, Inf for e = 128", of_nan=255, of_infinity=255),
        "vllm-project/compressed-tensors 4b993cb, quantization/utils/mxfp_utils.py, generate_mx_scales", ignores_nan=False,
        drops_zero_sign=True, only=F32, note="A NaN element stays NaN, which has no code."),
    _mx("aiter_mxfp4_round_up", "aiter: per_1x32_f4_quant, RoundUp", E2M1, PowerScale("amax / max", "ceil", "x / 2^e", of_infinity=255),
        _AITER, ignores_nan=False, nan_element=TORCH_NAN, note="The default."),
    _mx("aiter_mxfp4_round_down", "aiter: per_1x32_f4_quant, RoundDown", E2M1,
        PowerScale("amax / 2^emax", "floor", "x / 2^e", of_infinity=255), _AITER, ignores_nan=False, nan_element=TORCH_NAN),
    _mx("aiter_mxfp4_even", "aiter: per_1x32_f4_quant, Even", E2M1, PowerScale("amax", "half up to 1 bit", "x / 2^e", of_infinity=255),
        _AITER, ignores_nan=False, nan_element=TORCH_NAN),
    _mx("aiter_mxfp4_ceil", "aiter: per_1x32_f4_quant, Ceil", E2M1, PowerScale("amax / 2^emax", "ceil", "x / 2^e", of_infinity=255), _AITER,
        ignores_nan=False, nan_element=TORCH_NAN),
)  # fmt: skip

_TE_4OVER6 = _TE + "cast/nvfp4/quantize_4over6_nvfp4.cuh 124d874 and core_nvfp4.cuh 0718c01"
_FLASHINFER_4OVER6 = (
    "flashinfer-ai/flashinfer, tests/test_helpers/utils_fp4.py, ref_fp4_quant_4over6_te, against which its tests hold the kernels; "
    "flashinfer/quantization/nvfp4_quantization_utils.py 0daa58b"
)


def _four_over_six(squared: bool, largest: int, error: str) -> QuantizerContract:
    """Returns the row of a rule: Transformer Engine's where errors are scaled by amax, FlashInfer's by the tensor's scale, both in f16."""
    mode, fast = "MSE" if squared else "MAE", error == "f16"
    te = f"Transformer Engine: NVFP4BlockScaling, nvfp4_4over6, {mode}, e4m3 max {largest}" + (", err_use_fast_math" if fast else "")
    flashinfer = f"FlashInfer: NVFP44Over6Config({largest}, {mode}" + (", err_use_fast_math)" if fast else ")")
    name = "flashinfer" if error == "tensor scale" else "te"
    parts = [f"{name}_nvfp4_4over6", *(["mse"] if squared else []), *(["256"] if largest == 256 else []), *(["fast"] if fast else [])]
    libraries: Texts = {"amax": te, "tensor scale": flashinfer, "f16": (te, flashinfer)}[error]
    sources = {"amax": _TE_4OVER6, "tensor scale": _FLASHINFER_4OVER6, "f16": f"{_TE_4OVER6}; {_FLASHINFER_4OVER6}"}[error]
    note = "Blocks of 1 x 16. " + ("FlashInfer's quantiser of rows with a scale each is not modelled." if error != "amax" else "")
    return _nvfp4("_".join(parts), libraries, FourOverSixScale(error, squared, largest), sources, note=note.strip())


NVFP4_ROWS = (
    _nvfp4("te_nvfp4", ("Transformer Engine: NVFP4BlockScaling", "tcemu: nvfp4"), TwoLevelScale("transformer_engine"),
        _TE + "cast/nvfp4/core_nvfp4.cuh 0718c01", note="Of one dimension, rounding to nearest."),
    _nvfp4("modelopt_nvfp4", "Model Optimizer: NVFP4QTensor.quantize", TwoLevelScale("modelopt"),
        "NVIDIA/Model-Optimizer 211c6b3, qtensor/nvfp4_tensor.py", ignores_nan=False),
    _nvfp4("torchao_nvfp4", "torchao: nvfp4_quantize, per_tensor_scale", TwoLevelScale("torchao 0.18"),
        _TORCHAO + "prototype/mx_formats/nvfp4_tensor.py", ignores_nan=False, nan_element=TORCH_NAN_OF_SCALE),
    _nvfp4("torchao_nvfp4_one_level", "torchao: nvfp4_quantize without a scale of the tensor", TwoLevelScale("one level"),
        _TORCHAO + "prototype/mx_formats/nvfp4_tensor.py", ignores_nan=False, nan_element=TORCH_NAN_OF_SCALE),
    _nvfp4("torchao_nvfp4_before_0_18", "torchao 02a1bc4: nvfp4_quantize, per_tensor_scale", TwoLevelScale("torchao"),
        "pytorch/ao 02a1bc4, mx_formats/nvfp4_tensor.py", ignores_nan=False, nan_element=TORCH_NAN_OF_SCALE),
    *(_four_over_six(squared, largest, error)
      for error, squared, largest in product(("amax", "f16", "tensor scale"), (False, True), (448, 256))),
    _nvfp4("trtllm_nvfp4", "TensorRT-LLM: fp4_quantize", TwoLevelScale("rcp.approx, guard before rounding"), _TRTLLM,
        note="Where s is rounded to 0 the factor is Inf."),
    _nvfp4("mlx_nvfp4", 'MLX on a CPU: quantize, mode="nvfp4"', TwoLevelScale("one level, division"), _MLX, ignores_nan=False,
        first_nearest=True, only=F32, open_specials=True,
        note="Ties go to the smaller magnitude, and zeros lose their sign. Where the scale saturates, a number far beyond 6 is equally "
        "near to all codes, and becomes 0. 16-bit inputs are divided in their own format. Blocks with NaN were not compared."),
    _nvfp4("mlx_cuda_nvfp4", 'MLX on CUDA: quantize, mode="nvfp4"', TwoLevelScale("one level, reciprocal"), _MLX_CUDA, note=_MLX_CUDA_NOTE),
    _nvfp4("flashinfer_nvfp4", "FlashInfer: nvfp4_quantize", TwoLevelScale("rcp.approx, fast math"), _FLASHINFER),
    _nvfp4("flashinfer_nvfp4_te_exact", "FlashInfer: nvfp4_quantize, TE_EXACT_NVFP4", TwoLevelScale("exact, fast math"), _FLASHINFER),
    _nvfp4("vllm_nvfp4", ("vLLM: scaled_fp4_quant", "SGLang: scaled_fp4_quant"), TwoLevelScale("rcp.approx"),
        "vllm-project/vllm 07c13c7, csrc/quantization/fp4/nvfp4_utils.cuh; " + _SGLANG + "nvfp4_quant_kernels.cu 1636e19"),
    _nvfp4("mslk_nvfp4", "MSLK: quantize_nvfp4, use_precise_math", TwoLevelScale("mslk"), _MSLK + "quantize_kernels/nvfp4.py 0a3397c",
        note=_TRITON_NAN),
    _nvfp4("mslk_nvfp4_reciprocals", "MSLK: quantize_nvfp4 without use_precise_math", TwoLevelScale("mslk, reciprocals"),
        _MSLK + "quantize_kernels/nvfp4.py 0a3397c", note=_TRITON_NAN),
    _nvfp4("compressed_tensors_nvfp4", "compressed-tensors: NVFP4, tensor_group", TwoLevelScale("compressed-tensors"),
        _COMPRESSED + ", generate_gparam", ignores_nan=False, drops_zero_sign=True, only=F32),
)  # fmt: skip

CONTRACTS = {row.name: row for row in (*FP8_ROWS, *FNUZ_ROWS, *MXFP8_ROWS, *MXFP4_ROWS, *NVFP4_ROWS)}


def get_contract(name: str) -> QuantizerContract:
    """Return the contract of a name of `CONTRACTS`.

    Args:
        name: The name, as "vllm_per_token". Case, hyphens and spaces make no difference.

    Returns:
        The contract.

    Raises:
        ValueError: The name is unknown.

    Source: the contract's `source`.
    """
    key = "_".join(name.lower().replace("-", "_").split())
    if key not in CONTRACTS:
        near = get_close_matches(key, CONTRACTS, n=2, cutoff=0.5)
        hint = f", did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"contract {name!r}{hint}; expected one of {', '.join(CONTRACTS)}")
    return CONTRACTS[key]
