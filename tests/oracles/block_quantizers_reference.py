"""Block quantisers, slow and exact: OCP MX with fractions, and NVFP4 as the authors' code computes it, in NumPy float32.

Not a line shared with tcemu. The MX part follows OCP MX 1.0, 6.3, and the rules' one-line definitions; the NVFP4 part is a transcription,
operation by operation, of the PyTorch code that each function names.
"""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

from oracles.reference import FORMATS, decode, encode, power_of_two, sign_bit

ELEMENTS = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp6_e3m2": "e3m2", "mxfp6_e2m3": "e2m3", "mxfp4": "e2m1"}


# ---- MX


def floor_log2(value: Fraction) -> int:
    """For value > 0."""
    e = value.numerator.bit_length() - value.denominator.bit_length()
    return e if power_of_two(e) <= value else e - 1


def largest(element: str) -> Fraction:
    return decode(element, FORMATS[element].greatest)


def scale_exponent(rule: str, amax: Fraction, element: str) -> int:
    """Of the power of two that is a block's scale."""
    if amax == 0:
        return -127
    emax = floor_log2(largest(element))
    if rule == "floor":
        e = floor_log2(amax) - emax
    elif rule == "ceil":
        e = -floor_log2(1 / amax) - emax
    elif rule == "even":
        unit = power_of_two(floor_log2(amax) - FORMATS[element].fraction)
        e = floor_log2((amax / unit + Fraction(1, 2)).__floor__() * unit) - emax
    else:
        ratio = decode("f32", encode("f32", amax / largest(element)))
        e = -floor_log2(1 / ratio) if ratio else -127
    return min(max(e, -127), 127)


def mx_block(codes: list[int], source: str, element: str, rule: str, mode: str = "RN") -> tuple[list[int], int]:
    """Codes of one block -> element codes and the scale's code."""
    values = [decode(source, code) for code in codes]
    if not all(isinstance(value, Fraction) for value in values):
        return [FORMATS[element].nan] * len(codes), 0xFF
    exponent = scale_exponent(rule, max(map(abs, values)), element)
    scale = power_of_two(exponent)
    pairs = zip(values, codes, strict=True)
    return [encode(element, value / scale, mode, True, sign_bit(source, code)) for value, code in pairs], exponent + 127


def value(element: str, scale_format: str, code: int, scale: int, tensor_scale: int | None = None) -> int:
    """The f32 code of element * scale * tensor scale, rounded once."""
    parts = [decode(element, code), decode(scale_format, scale)] + ([] if tensor_scale is None else [decode("f32", tensor_scale)])
    if not all(isinstance(part, Fraction) for part in parts):
        return FORMATS["f32"].nan
    return encode("f32", math.prod(parts), zero_sign=sign_bit(element, code))


# ---- NVFP4: x [..., blocks, 16] float32, the tensor's amax float32 -> values for e2m1, e4m3 scales, tensor scale

F = np.float32


def to_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -F(448), F(448)).astype(ml_dtypes.float8_e4m3fn)


def to_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes by the bounds of `cast_to_fp4x2` and `_cast_fp4`: ties go to the even code. The sign is that of cvt, which keeps -0."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for number, (bound, reached) in enumerate(
        [(0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)], 1
    ):
        code[magnitude >= F(bound) if reached else magnitude > F(bound)] = number
    return code | np.signbit(x).astype(np.uint8) << 3


def transformer_engine(x: np.ndarray, amax: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """TransformerEngine 1a4d3b0, custom_recipes/quantization_nvfp4.py, `_quantize_blockwise_reference`; amax 0 as core_nvfp4.cuh."""
    vec_max = np.max(np.abs(x), axis=-1, keepdims=True)
    global_encode_scale = np.minimum(F(448) * F(6) / amax, np.finfo(F).max)
    if amax == 0 or global_encode_scale == 0:
        global_encode_scale = F(1)
    global_decode_scale = F(1) / global_encode_scale
    multiplier = global_encode_scale * np.reciprocal(F(6))
    decode_scale = to_e4m3(np.minimum(vec_max * multiplier, np.finfo(F).max))
    encode_scale = np.minimum(F(1) / (decode_scale.astype(F) * global_decode_scale), np.finfo(F).max)
    return x * encode_scale, decode_scale[..., 0], global_decode_scale


def modelopt(x: np.ndarray, amax: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Model-Optimizer 211c6b3, qtensor/nvfp4_tensor.py, `quantize` and `get_weights_scaling_factor`; the cast saturates."""
    weights_scaling_factor_2 = amax / F(6.0 * 448.0)
    per_block_scale = np.max(np.abs(x), axis=-1) / (F(6) * weights_scaling_factor_2)
    per_block_scale[per_block_scale == 0] = F(1)
    per_block_scale = to_e4m3(np.maximum(per_block_scale, F(2**-9)))
    return x / (per_block_scale.astype(F) * weights_scaling_factor_2)[..., None], per_block_scale, weights_scaling_factor_2


def torchao(x: np.ndarray, amax: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """torchao 02a1bc4, prototype/mx_formats/nvfp4_tensor.py, `per_tensor_amax_to_scale` and `_nvfp4_quantize`."""
    per_tensor_scale = amax / F(448.0 * 6.0)
    block_scale = np.max(np.abs(x), axis=-1) / F(6)
    scaled = to_e4m3(np.maximum(block_scale / per_tensor_scale, F(2**-6)))
    return x / (per_tensor_scale * scaled.astype(F))[..., None], scaled, per_tensor_scale


RECIPES = {"transformer_engine": transformer_engine, "modelopt": modelopt, "torchao": torchao}


def nvfp4(x: np.ndarray, recipe: str, amax: np.float32 | None = None) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """Finite float32 [..., blocks, 16] -> element codes, scale codes, the word of the tensor scale, and x in units of its scales."""
    with np.errstate(all="ignore"):
        scaled, scales, tensor_scale = RECIPES[recipe](x, np.max(np.abs(x)) if amax is None else amax)
        return to_e2m1(scaled), scales.view(np.uint8), int(tensor_scale.view(np.uint32)), scaled
