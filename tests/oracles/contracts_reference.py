"""Quantisers of libraries, transcribed from their public code in NumPy float32, one function for each library function.

Nothing here is shared with tcemu. x is float32 [blocks, n], each row a group that shares a scale; t is the tensor's max magnitude
[blocks, 1]. A function returns the values before the cast, the way of the cast, and the scales: float32, or uint8 codes of ue8m0, or
float32 values of e4m3. Products, quotients and comparisons are IEEE's, which NumPy has with subnormal numbers.
"""

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from oracles import special_functions_reference as special

F = np.float32
MAX8, MAX4 = F(448), F(6)
F32_MAX = np.finfo(F).max


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, F).view(np.uint32)


def floats(codes) -> np.ndarray:
    return np.asarray(codes).astype(np.uint32).view(F)


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -MAX8, MAX8).astype(ml_dtypes.float8_e4m3fn)


def torch_amax(x: np.ndarray) -> np.ndarray:
    return np.max(np.abs(x), axis=-1, keepdims=True)


def fmax(x: np.ndarray, start: float = 0.0) -> np.ndarray:
    return np.fmax(np.fmax.reduce(np.abs(x), axis=-1, keepdims=True), F(start))


def rcp(x) -> np.ndarray:
    """rcp.approx.ftz.f32, by the reference of special functions."""
    return floats(special.unary("rcp", bits(x), True))


def ftz(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, F)
    return np.where(np.abs(x) < F(2.0**-126), np.copysign(F(0), x), x)


def mul_ftz(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x * y with subnormal operands and results flushed; a result that rounds up to 2^-126 from below is flushed too."""
    exact = ftz(x).astype(np.float64) * ftz(y).astype(np.float64)
    with np.errstate(over="ignore"):
        rounded = exact.astype(F)
    tiny = np.abs(exact) < 2.0**-126 * (1 - 2.0**-25)
    return np.where(tiny, np.copysign(F(0), rounded), rounded).astype(F)


# ---- FP8 with f32 scales: returns (values, cast, scales)


def torchao_float8(x, t):
    amax = np.maximum(torch_amax(x).astype(np.float64), 1e-12)
    scale = (448.0 / amax).astype(F)
    return np.clip(x * scale, -MAX8, MAX8), "torch", F(1) / scale


def torchao_float8_power_of_two(x, t):
    amax = np.maximum(torch_amax(x).astype(np.float64), 1e-12)
    scale = (448.0 / amax).astype(F)
    scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)).astype(F)).astype(np.float64)).astype(F)
    return np.clip(x * scale, -MAX8, MAX8), "torch", F(1) / scale


def torchao_inference(x, t):
    scale = torch_amax(x) / MAX8
    return np.clip(x / scale, -MAX8, MAX8), "torch", scale


def _te_scale(amax, pow2):
    with np.errstate(over="ignore"):
        scale = MAX8 / amax
    scale = np.where(np.isinf(scale), F32_MAX, scale)
    scale = floats(bits(scale) & 0xFF800000) if pow2 else scale
    return np.where(np.isinf(amax) | (amax == 0) | np.isnan(amax), F(1), scale).astype(F)


def te_current(x, t):
    scale = _te_scale(fmax(x), False)
    return x * scale, "satfinite", F(1) / scale


def te_power_of_two(x, t):
    scale = _te_scale(fmax(x), True)
    return x * scale, "satfinite", F(1) / scale


def _ceil_to_ue8m0(x):
    code = bits(np.abs(x))
    exponent = ((code >> 23) & 0xFF) + ((code & 0x7FFFFF) != 0)
    return floats(np.clip(exponent, 1, 254) << 23)


def deepgemm(x, t):
    sf = np.maximum(torch_amax(x), F(1e-4)) / MAX8
    return x * (F(1) / sf), "torch", sf


def deepgemm_ue8m0(x, t):
    sf = _ceil_to_ue8m0(np.maximum(torch_amax(x), F(1e-4)) / MAX8)
    return x * (F(1) / sf), "torch", sf


def vllm_per_token(x, t):
    scale = np.fmax(fmax(x) / MAX8, F(1) / (MAX8 * F(512)))
    return np.fmax(-MAX8, np.fmin(x / scale, MAX8)), "satfinite", scale


def vllm_per_tensor(x, t):
    scale = fmax(x) / MAX8
    inverse = F(1) / scale
    return np.fmax(-MAX8, np.fmin(x * inverse, MAX8)), "satfinite", scale


def sglang_per_token_many(x, t):
    scale = fmax(x) / MAX8
    inverse = np.where(scale == 0, F(0), F(1) / scale)
    return np.fmax(np.fmin(x * inverse, MAX8), -MAX8), "satfinite", scale


def vllm_group(x, t):
    scale = fmax(x, 1e-10) / MAX8
    return np.fmin(np.fmax(x / scale, -MAX8), MAX8), "satfinite", scale


def vllm_group_ue8m0(x, t):
    code = bits(np.fmax(np.abs(fmax(x, 1e-10) / MAX8), F(1e-10)))
    scale = floats(((code >> 23 & 0xFF) + ((code & 0x7FFFFF) != 0)) << 23)
    return np.fmin(np.fmax(x * (F(1) / scale), -MAX8), MAX8), "satfinite", scale


def sglang_group(x, t):
    amax = fmax(x, 1e-10)
    return np.fmin(np.fmax(x * (MAX8 / amax), -MAX8), MAX8), "satfinite", amax * (F(1) / MAX8)


def sglang_group_v1(x, t):
    amax = fmax(x, 1e-10)
    return x * (MAX8 / amax), "satfinite", amax * (F(1) / MAX8)


def _fast_log2_ceil(x):
    code = bits(x)
    return ((code >> 23) & 0xFF).astype(np.int64) - 127 + ((code & 0x7FFFFF) != 0)


def _fast_pow2(exponent):
    return floats(((exponent + 127) << 23) & 0xFFFFFFFF)


def sglang_group_ue8m0(x, t):
    exponent = _fast_log2_ceil(fmax(x, 1e-10) * (F(1) / MAX8))
    return np.fmin(np.fmax(x * _fast_pow2(-exponent), -MAX8), MAX8), "satfinite", _fast_pow2(exponent)


def sglang_group_ue8m0_rows(x, t):
    amax = fmax(x, 1e-10)
    scale = _fast_pow2(_fast_log2_ceil(amax * (F(1) / MAX8)))
    return np.fmin(np.fmax(x * (MAX8 / amax), -MAX8), MAX8), "satfinite", scale


def compressed_tensors_fp8(x, t):
    low, high = np.minimum(x.min(-1, keepdims=True), F(0)), np.maximum(x.max(-1, keepdims=True), F(0))
    scale = np.maximum(np.abs(low), np.abs(high)) / F(448.0 * 2 / 2)
    scale = np.where(scale == 0, np.finfo(F).eps, scale)
    return np.clip(x / scale + F(0), -MAX8, MAX8), "torch", scale


def aiter_per_token(x, t):
    scale = torch_amax(x) / MAX8
    scale = np.where(scale == 0, F(1), scale)
    return x / scale, "torch", scale


def aiter_per_tensor(x, t):
    scale = torch_amax(x) / MAX8
    return x / scale, "torch", scale


def te_delayed(x, t):
    scale = F(448) / t
    scale = np.where(np.isinf(scale), np.finfo(F).max, scale)
    scale = np.where((t == 0) | ~np.isfinite(t), F(1), scale).astype(F)
    return x * scale, "satfinite", F(1) / scale


def aiter_per_token_fnuz(x, t):
    scale = torch_amax(x) / F(240)
    scale = np.where(scale == 0, F(1), scale)
    return x / scale, "torch", scale


def aiter_per_tensor_fnuz(x, t):
    scale = torch_amax(x) / F(240)
    return x / scale, "torch", scale


def vllm_per_token_fnuz(x, t):
    scale = np.fmax(fmax(x) / F(224), F(1) / (F(224) * F(512)))
    return np.fmax(F(-224), np.fmin(x / scale, F(224))), "clamped", scale


def vllm_per_tensor_fnuz(x, t):
    scale = fmax(x) / F(224)
    return np.fmax(F(-224), np.fmin(x * (F(1) / scale), F(224))), "clamped", scale


def mslk_row(x, t):
    scale = fmax(x, 1 / 512) / MAX8
    return np.fmin(np.fmax(x / scale, -MAX8), MAX8), "satfinite", scale


# ---- MX: scales are codes of ue8m0


def _constants(element):
    return (8, MAX8, 3) if element == "e4m3" else (2, MAX4, 1)


def ocp(x, t, element):
    amax = torch_amax(x).astype(np.float64)
    emax, _, _ = _constants(element)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.clip(np.where(amax == 0, -127, np.floor(np.log2(amax)) - emax), -127, 127)
    special = ~np.isfinite(amax)
    scale = np.where(special, np.nan, np.exp2(exponent))
    # exact: the quotient is scaled in f64; what f32 cannot hold is zero in the element
    values = x.astype(np.float64) / scale
    return values, "satfinite", np.where(special, 255, exponent + 127).astype(np.uint8)


def _torchao_mx(x, element, mode):
    emax, largest, mbits = _constants(element)
    amax = torch_amax(x)
    nan = np.isnan(amax)
    if mode == "rceil":
        descale = amax / largest
        log2 = np.log2(descale.astype(np.float64)).astype(F)
        code = np.where(np.isnan(descale), 255, np.where(np.isinf(descale), 254, np.clip(np.ceil(log2), -127, 127) + 127))
        code = np.where(nan, 255, code).astype(np.int64)
        rcp32 = np.where(code == 255, descale, np.where(code == 254, F(2.0**-127), np.where(code == 0, F(1), np.exp2(127.0 - code))))
        return np.clip(x * rcp32.astype(F), -largest, largest), "torch", code.astype(np.uint8)
    code = bits(amax).view(np.int32)
    if mode == "even":
        code = (code + (1 << (22 - mbits))) & np.int32(-(1 << 23))
    exponent = ((code >> 23) & 0xFF) - 127
    if mode == "ceil":
        exponent = exponent + ((code & 0x7FFFFF) > 0)
    scale = np.where(nan, 255, np.clip(exponent - emax, -127, 128) + 127).astype(np.uint8)
    scale32 = np.maximum(floats(scale.astype(np.uint32) << 23), F(2.0**-126))
    return np.clip(x / scale32, -largest, largest), "torch", scale


def torchao_floor(x, t, element):
    return _torchao_mx(x, element, "floor")


def torchao_ceil(x, t, element):
    return _torchao_mx(x, element, "ceil")


def torchao_even(x, t, element):
    return _torchao_mx(x, element, "even")


def torchao_rceil(x, t, element):
    return _torchao_mx(x, element, "rceil")


def _float_to_e8m0(x):
    code = bits(x)
    exponent, mantissa = code >> 23, code & 0x7FFFFF
    up = ((mantissa > 0) & (exponent != 0xFE)) & ~((exponent == 0) & (mantissa <= 0x400000))
    found = np.where(x == 0, 0, exponent + up)
    return np.where(np.isnan(x), 0xFF, np.where(np.isinf(x), 0xFE, found)).astype(np.int64)


def te_mxfp8(x, t, element):
    code = _float_to_e8m0(fmax(x) * (F(1) / MAX8))
    factor = np.where(code == 0, F(1), floats(((254 - code) << 23) & 0xFFFFFFFF))
    return x * factor, "satfinite", code.astype(np.uint8)


def flashinfer_mxfp8(x, t, element):
    code = _float_to_e8m0(mul_ftz(fmax(x), rcp(F(448))))
    scale = np.where(code == 0, F(2.0**-127), floats(code << 23))
    factor = np.where(np.abs(scale) < 2.0**-126, F(0), rcp(scale))
    return mul_ftz(x, factor), "satfinite", code.astype(np.uint8)


def flashinfer_mxfp4(x, t, element):
    vec_max = mul_ftz(fmax(x), rcp(F(6)))
    code = _float_to_e8m0(vec_max)
    factor = np.where(vec_max == 0, F(0), np.where(code == 0, F(1), np.exp2(127.0 - code).astype(F)))
    return mul_ftz(x, factor), "satfinite", code.astype(np.uint8)


def mslk_mxfp8(x, t, element):
    code = bits(fmax(x) / MAX8)
    exponent, mantissa = (code >> 23) & 0xFF, (code & 0x7FFFFF) != 0
    biased = np.minimum(np.where(exponent > 0, exponent + mantissa, 0), 254).astype(np.int64)
    factor = np.where(biased == 0, F(1), np.exp2(127.0 - biased).astype(F))
    return np.fmin(np.fmax(x * factor, -MAX8), MAX8), "satfinite", biased.astype(np.uint8)


def compressed_tensors_mx(x, t, element):
    emax, largest, _ = _constants(element)
    low, high = np.minimum(x.min(-1, keepdims=True), F(0)), np.maximum(x.max(-1, keepdims=True), F(0))
    amax = np.maximum(np.abs(low), np.abs(high))
    power = floats((bits(amax) + (1 << 21)) & 0xFF800000).astype(np.float64)
    code = np.clip(127 + np.floor(np.log2(power)) - emax, 0, 255).astype(np.int64)
    with np.errstate(over="ignore"):
        scale = np.exp2(code - 127.0).astype(F)
    return np.clip(x / scale + F(0), -largest, largest), "cast_to_fp4", code.astype(np.uint8)


def _aiter(x, element, mode):
    emax, largest, mbits = _constants(element)
    amax = torch_amax(x)
    if mode == "round_up":
        ratio = bits(amax / largest)
    elif mode == "ceil":
        ratio = bits(amax / F(2.0**emax))
    elif mode == "even":
        ratio = bits(floats((bits(amax) + (1 << (22 - mbits))) & 0xFF800000) / F(2.0**emax))
    else:
        ratio = bits(amax / F(2.0**emax))
    code = ((ratio >> 23) & 0xFF).astype(np.int64)
    if mode in ("round_up", "ceil"):
        code = np.where(code < 255, code + ((ratio & 0x7FFFFF) != 0), code)
    scale = np.where(code == 0, F(2.0**-127), np.where(code == 255, F(np.nan), floats(code << 23)))
    return x / scale, "torch", code.astype(np.uint8)


def aiter_round_up(x, t, element):
    return _aiter(x, element, "round_up")


def aiter_round_down(x, t, element):
    return _aiter(x, element, "round_down")


def aiter_even(x, t, element):
    return _aiter(x, element, "even")


def aiter_ceil(x, t, element):
    return _aiter(x, element, "ceil")


def deepgemm_fp4(x, t, element):
    sf = _ceil_to_ue8m0(np.maximum(torch_amax(x), F(1e-4)) / MAX4)
    return x * (F(1) / sf), "bucketize", (bits(sf) >> 23).astype(np.uint8)


def _mslk_mx4(x, added):
    amax = fmax(x)
    amax = np.where(amax == 0, F(2.0**-126), amax)
    exponent = (((bits(amax) + added) & 0x7F800000) >> 23).astype(np.int64) - 127 - 2
    exponent = np.clip(exponent, -127, 125)
    return x / np.exp2(exponent.astype(np.float64)).astype(F), "satfinite", (exponent + 127).astype(np.uint8)


def mslk_mx4_even(x, t, element):
    return _mslk_mx4(x, (1 << 21) - 1)


def mslk_mx4_floor(x, t, element):
    return _mslk_mx4(x, 0)


def philox(counter, key, rounds):
    """The first word of Philox4x32 for counters (counter, 0, 0, 0), in 64-bit integers."""
    word = np.uint64(0xFFFFFFFF)
    a, b, c, d = np.asarray(counter, np.uint64), np.uint64(0), np.uint64(0), np.uint64(0)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(rounds):
        left, right = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b, c, d = (right >> np.uint64(32)) ^ b ^ np.uint64(k0), right & word, (left >> np.uint64(32)) ^ d ^ np.uint64(k1), left & word
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a.astype(np.uint32)


def mslk_mx4_stochastic(x, t, element, seed=0):
    """Blocks [groups, size]: with N = size, a group is a row of the kernel's matrix."""
    groups = np.arange(len(x))[:, None]
    offsets = groups * x.shape[1] + np.arange(x.shape[1])
    mask = (1 << 22) - 1
    values, cast, scales = _mslk_mx4(x, (philox(groups, seed, 7) & mask).astype(np.uint32))
    noise = (philox(offsets, seed ^ 0x5A5A5A5A, 7) & mask).astype(np.int64) - (mask >> 1)
    words = np.where(np.isnan(values), np.uint32(0x7FFFFFFF), bits(values))  # PTX's division gives this NaN
    return (words.astype(np.int64) + noise & 0xFFFFFFFF).astype(np.uint32).view(F), cast, scales


def mslk_mx4_ceil(x, t, element):
    return _mslk_mx4(x, (1 << 23) - 1)


# ---- NVFP4: scales are values of e4m3; a fourth result is the tensor's scale


def te_nvfp4(x, t):
    encode = np.where(t == 0, F(1), np.minimum(F(448) * F(6) / t, F32_MAX))
    encode = np.where(encode == 0, F(1), encode)
    decode = F(1) / encode
    scale = e4m3(np.minimum(fmax(x) * (encode * (F(1) / F(6))), F32_MAX))
    factor = np.minimum(F(1) / (scale.astype(F) * decode), F32_MAX)
    return x * factor, "satfinite", scale, decode


def modelopt_nvfp4(x, t):
    tensor = t / F(448 * 6)
    ratio = torch_amax(x) / (F(6) * tensor)
    scale = e4m3(np.maximum(np.where(ratio == 0, F(1), ratio), F(2.0**-9)))
    return x / (scale.astype(F) * tensor), "satfinite", scale, tensor


def torchao_nvfp4(x, t):
    tensor = t / F(448 * 6)
    scale = np.clip(torch_amax(x) / F(6) / tensor, F(2.0**-6), F(448)).astype(ml_dtypes.float8_e4m3fn)
    return np.clip(x * ((F(1) / tensor) / scale.astype(F)), -MAX4, MAX4), "torch, NaN of e4m3", scale, tensor


def torchao_nvfp4_one_level(x, t):
    scale = np.clip(torch_amax(x) / F(6), F(2.0**-6), F(448)).astype(ml_dtypes.float8_e4m3fn)
    return np.clip(x * (F(1) / scale.astype(F)), -MAX4, MAX4), "torch, NaN of e4m3", scale, None


def torchao_nvfp4_before_0_18(x, t):
    tensor = t / F(448 * 6)
    scale = np.clip(torch_amax(x) / F(6) / tensor, F(2.0**-6), F(448)).astype(ml_dtypes.float8_e4m3fn)
    return np.clip(x / (tensor * scale.astype(F)), -MAX4, MAX4), "torch, NaN of e4m3", scale, tensor


def flashinfer_nvfp4(x, t):
    g = F(448 * 6) / t
    vec_max = fmax(x)
    scale = e4m3(mul_ftz(g, mul_ftz(vec_max, rcp(F(6)))))
    factor = np.where(ftz(vec_max) != 0, rcp(mul_ftz(scale.astype(F), rcp(g))), F(0))
    return mul_ftz(x, factor), "satfinite", scale, F(1) / g


def flashinfer_nvfp4_te_exact(x, t):
    g = F(448 * 6) / t
    vec_max = ftz(fmax(x))
    scale = e4m3(np.where(vec_max != 0, mul_ftz(vec_max, mul_ftz(g, F(1 / 6))), F(0)))
    factor = np.where(vec_max != 0, F(1) / mul_ftz(scale.astype(F), F(1) / g), F(0))
    return mul_ftz(x, factor), "satfinite", scale, F(1) / g


def vllm_nvfp4(x, t):
    g = F(448 * 6) / t
    scale = e4m3(g * (fmax(x) * rcp(F(6))))
    value = scale.astype(F)
    factor = np.where(value != 0, rcp(value * rcp(g)), F(0))
    return x * factor, "satfinite", scale, F(1) / g


def _mslk_nvfp4(x, t, sixth):
    g = F(448 * 6) / t
    scale = np.clip(sixth * g, F(1.5258789e-05), MAX8).astype(ml_dtypes.float8_e4m3fn)
    return x * (g / scale.astype(F)), "satfinite", scale, F(1) / g


def mslk_nvfp4(x, t):
    return _mslk_nvfp4(x, t, fmax(x) / F(6))


def mslk_nvfp4_reciprocals(x, t):
    return _mslk_nvfp4(x, t, fmax(x) * F(1 / 6))


def compressed_tensors_nvfp4(x, t):
    g = F(448 * 6) / np.maximum(t, np.finfo(F).tiny)
    low, high = np.minimum(x.min(-1, keepdims=True), F(0)), np.maximum(x.max(-1, keepdims=True), F(0))
    scale = e4m3(g * (np.maximum(np.abs(low), np.abs(high)) / F(6)))
    scale = np.where(scale.astype(F) == 0, F(0.125), scale.astype(F)).astype(ml_dtypes.float8_e4m3fn)
    return np.clip(x / (scale.astype(F) / g) + F(0), -MAX4, MAX4), "cast_to_fp4", scale, F(1) / g


def _tensorrt_llm_mx(x, largest):
    sf = fmax(x) * rcp(F(largest))
    code = _float_to_e8m0(sf)
    narrow = np.where(code == 0, F(2.0**-127), floats(code << 23))
    return x * np.where(sf != 0, rcp(narrow), F(0)), "satfinite", code.astype(np.uint8)


def trtllm_mxfp8(x, t, element):
    return _tensorrt_llm_mx(x, 448)


def trtllm_mxfp4(x, t, element):
    return _tensorrt_llm_mx(x, 6)


def trtllm_nvfp4(x, t):
    g = F(448 * 6) / t
    sf = g * (fmax(x) * rcp(F(6)))
    narrow = e4m3(sf)
    return x * np.where(sf != 0, rcp(narrow.astype(F) * rcp(g)), F(0)), "satfinite", narrow, F(1) / g


def _mlx_mx(x, largest, cast):
    scales = torch_amax(x) / F(largest)
    fraction, exponent = np.frexp(scales.astype(np.float64))
    power = np.where(scales == 0, 0, exponent - (fraction == 0.5))  # the smallest power of two that is not below
    return x / np.exp2(power.astype(np.float64)).astype(F), cast, (power + 127 & 0xFF).astype(np.uint8)


def mlx_mxfp8(x, t, element):
    return _mlx_mx(x, 448, "to_fp8")


def mlx_mxfp4(x, t, element):
    return _mlx_mx(x, 6, "argmin")


def mlx_nvfp4(x, t):
    scales = e4m3(torch_amax(x) / F(6))
    return x / scales.astype(F), "argmin", scales, None


def mlx_cuda_mxfp4(x, t, element):
    code = _float_to_e8m0(fmax(x) / F(6))
    return x * (F(1) / np.where(code == 0, F(2.0**-127), floats(code << 23))), "satfinite", code.astype(np.uint8)


def mlx_cuda_nvfp4(x, t):
    scales = e4m3(fmax(x) / F(6))
    return x * (F(1) / scales.astype(F)), "satfinite", scales, None


def vllm_mxfp4(x, t, element, mantissa_bits=23, exponent_bits=8):
    """qdq_mxfp4_torch of the reference, for a format of these widths, before its quotient is rounded to e2m1."""
    block_max = bits(torch_amax(x)) >> (23 - mantissa_bits)
    rounded = (block_max + (1 << (mantissa_bits - 1 - 1))) & (((1 << (exponent_bits + 1)) - 1) << mantissa_bits)
    exponent = np.clip((rounded >> mantissa_bits).astype(np.int64) - 2, 0, 254)
    scale = np.where(exponent == 0, F(2.0**-127), floats(exponent << 23))
    return x / scale, "satfinite", exponent.astype(np.uint8)


def four_over_six(x, t, largest, squared, error):
    """TransformerEngine's quantize_4over6_nvfp4.cuh ("amax", "f16") and FlashInfer's ref_fp4_quant_4over6_te ("tensor scale", "f16")."""
    g = np.minimum(F(largest * 6) / t, F32_MAX)
    g = np.where((t == 0) | (g == 0), F(1), g).astype(F)
    base, found = fmax(x) / F(6) * g, []
    for expand in (F(1.5), F(1)):
        sf = np.fmin(base * expand, MAX8).astype(ml_dtypes.float8_e4m3fn)
        values = x * np.fmin(F(1) / (sf.astype(F) * (F(1) / g)), F32_MAX)
        q = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)[element_codes("e2m1", values, "satfinite") & 7]
        q = np.where(element_codes("e2m1", values, "satfinite") & 8, -q, q)
        if error == "f16":
            difference = (q.astype(np.float16) * sf.astype(np.float16)).astype(F) - x * g
        else:
            decoded = q * sf.astype(F) * t / F(6 * largest) if error == "amax" else q * sf.astype(F) * (F(1) / g)
            difference = decoded - x
        each, total = difference * difference if squared else np.abs(difference), np.zeros(x.shape[:-1], F)
        for index in range(x.shape[-1]):
            total = total + each[..., index]
        found.append((values, sf, total[..., None]))
    (four, scale4, error4), (six, scale6, error6) = found
    smaller = error4 < error6
    return np.where(smaller, four, six), "satfinite", np.where(smaller, scale4, scale6), F(1) / g


# ---- the functions by the names that contracts give the libraries

Quantiser = Callable[..., tuple]
LIBRARIES: dict[str, tuple[Quantiser, ...]] = {
    name: (globals()[name],)
    for name in (
        "torchao_float8", "torchao_float8_power_of_two", "torchao_inference", "te_current", "te_power_of_two", "deepgemm", "deepgemm_ue8m0",
        "vllm_per_token", "vllm_group", "vllm_group_ue8m0", "sglang_group", "sglang_group_v1", "sglang_group_ue8m0",
        "sglang_group_ue8m0_rows", "compressed_tensors_fp8", "aiter_per_token", "aiter_per_tensor", "mslk_row", "te_mxfp8",
        "te_delayed", "aiter_per_token_fnuz", "aiter_per_tensor_fnuz", "vllm_per_token_fnuz", "vllm_per_tensor_fnuz",
        "flashinfer_mxfp8", "flashinfer_mxfp4", "mslk_mxfp8", "deepgemm_fp4", "mslk_mx4_even", "mslk_mx4_floor", "mslk_mx4_ceil",
        "mslk_mx4_stochastic",
        "te_nvfp4", "modelopt_nvfp4", "torchao_nvfp4", "torchao_nvfp4_one_level", "torchao_nvfp4_before_0_18", "flashinfer_nvfp4",
        "trtllm_mxfp8", "trtllm_mxfp4", "trtllm_nvfp4", "mlx_mxfp8", "mlx_mxfp4", "mlx_nvfp4", "mlx_cuda_mxfp4", "mlx_cuda_nvfp4",
        "vllm_mxfp4",
        "flashinfer_nvfp4_te_exact", "vllm_nvfp4", "mslk_nvfp4", "mslk_nvfp4_reciprocals", "compressed_tensors_nvfp4",
    )
}  # fmt: skip
LIBRARIES |= {
    "vllm_per_tensor": (vllm_per_tensor,),
    "sglang_per_token": (sglang_per_token_many,),
    "ocp_mxfp8": (ocp,), "ocp_mxfp4": (ocp,), "aiter_mxfp8": (aiter_round_up,),
    "compressed_tensors_mxfp8": (compressed_tensors_mx,), "compressed_tensors_mxfp4": (compressed_tensors_mx,),
}  # fmt: skip
LIBRARIES |= {
    f"torchao_{kind}_{mode}": (globals()[f"torchao_{mode}"],) for kind in ("mxfp8", "mxfp4") for mode in ("floor", "ceil", "even", "rceil")
}
LIBRARIES |= {f"aiter_mxfp4_{mode}": (globals()[f"aiter_{mode}"],) for mode in ("round_up", "round_down", "even", "ceil")}
LIBRARIES |= {
    f"{library}_nvfp4_4over6{'_mse' * squared}{'_256' * (largest == 256)}{'_fast' * (error == 'f16')}": (
        partial(four_over_six, largest=largest, squared=squared, error=error),
    )
    for library, error in (("te", "amax"), ("te", "f16"), ("flashinfer", "tensor scale"))
    for squared in (False, True)
    for largest in (448, 256)
}


def element_codes(element: str, values: np.ndarray, cast: str) -> np.ndarray:
    """Casts values, f32 or exact f64; every NaN of e4m3 is 0x7F."""
    nan = np.isnan(values)
    if element == "e4m3fnuz":  # values beyond 248 become NaN, 0x80
        return values.astype(ml_dtypes.float8_e4m3fnuz).view(np.uint8)
    if element == "e4m3":
        with np.errstate(over="ignore"):
            codes = np.where(nan, 0, np.clip(values, -448, 448)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return np.where(nan, 0x7E if cast == "to_fp8" else 0x7F, codes)
    if cast == "argmin":  # the first of the nearest, by differences in float32
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)
        with np.errstate(all="ignore"):
            distance = np.abs(np.asarray(values, F)[..., None] - table)
        return np.argmin(np.where(np.isnan(distance), np.inf, distance), axis=-1).astype(np.uint8)
    magnitude = np.where(nan, 0, np.abs(values))
    code = np.zeros(values.shape, np.uint8)
    for number, (bound, even) in enumerate(((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)), 1):
        code[magnitude >= bound if even and cast != "bucketize" else magnitude > bound] = number
    sign = (values < 0) & (code != 0) if cast == "bucketize" else np.signbit(values)
    return np.where(nan, {"torch": 3, "torch, NaN of e4m3": 4}.get(cast, 7), code | sign.astype(np.uint8) << 3).astype(np.uint8)
