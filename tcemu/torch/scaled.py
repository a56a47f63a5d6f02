"""`scaled_mm`: what `torch._scaled_mm` computes, of operands that are in FP8 already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import torch
from jax import Array, lax

from tcemu.arithmetic.fma import add
from tcemu.arithmetic.quotient import multiply
from tcemu.formats import ARRAY_FORMATS, E4M3, E5M2, F32, array_codes, convert
from tcemu.linalg.matmul import sum_of_quantized
from tcemu.linalg.recipes import Recipe, as_recipe
from tcemu.quantize.operands import Quantized, Quantizer
from tcemu.torch.exchange import DTYPES
from tcemu.torch.operators import Operator, Static

FP8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
BLOCK = 128  # elements that share a scale of blocks, and after which sums are promoted


class Scaling(NamedTuple):
    """How the scales of both operands lie."""

    a: Quantizer
    b: Quantizer
    shape_a: tuple[int, ...]  # as torch has it
    shape_b: tuple[int, ...]


def _scalings(m: int, n: int, k: int) -> list[Scaling]:
    """Those that torch knows, but for MX's and NVFP4's, whose scales are swizzled."""
    deep, wide = -(-k // BLOCK), -(-n // BLOCK)
    tensor, line, square = Quantizer("tensor"), Quantizer("block", (1, BLOCK)), Quantizer("block", (BLOCK, BLOCK))
    return [
        Scaling(tensor, tensor, (), ()),
        Scaling(Quantizer("row"), Quantizer("column"), (m, 1), (1, n)),
        Scaling(line, square, (m, deep), (deep, wide)),
        Scaling(line, line, (m, deep), (deep, n)),
        Scaling(square, line, (-(-m // BLOCK), deep), (deep, n)),
    ]


def _scaling(tensors: Sequence[Any]) -> Scaling:
    """By the shapes of the scales. Raises ValueError."""
    a, b, scale_a, scale_b = tensors[:4]
    shapes = [() if scale.size == 1 else tuple(scale.shape) for scale in (scale_a, scale_b)]
    known = _scalings(a.shape[0], b.shape[1], a.shape[1])
    for scaling in known:
        if shapes in ([scaling.shape_a, scaling.shape_b], [(), ()] if scaling.shape_a == () else None):
            return scaling
    wanted = "; ".join(f"{list(s.shape_a)} and {list(s.shape_b)}" for s in known)
    raise ValueError(f"scale_a is {list(scale_a.shape)}, scale_b {list(scale_b.shape)}; wanted {wanted}")


def _recipe(scaling: Scaling, formats: tuple[Any, Any], fast: bool, target: str) -> Recipe:
    """The recipe of such a product: its instruction and promotion."""
    fp8 = as_recipe("fp8", target)
    assert fp8.gradients is not None
    of_pairs = {(r.op.a, r.op.b): r for r in (fp8, *fp8.gradients, as_recipe("fp8_e5m2", target))}
    base = of_pairs[formats]
    promote = None if fast and scaling.a.block is None else BLOCK // base.op.k
    return base.replace(a=scaling.a, b=scaling.b, promote=promote, backward="exact")


def _codes(scale: Array, shape: tuple[int, ...]) -> Array:
    return convert(F32, F32, array_codes(scale)[1]).reshape(shape)


def _scaled_mm(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (a, b, scale_a, scale_b, bias, scale_result), (dtype, fast, target) = arrays, static
    scaling = _scaling(arrays)
    formats = ARRAY_FORMATS[a.dtype], ARRAY_FORMATS[b.dtype]
    recipe = _recipe(scaling, formats, fast, target)
    held_a = Quantized(codes=array_codes(a)[1], scales=_codes(scale_a, scaling.shape_a))
    columns = _codes(scale_b, scaling.shape_b)
    held_b = Quantized(codes=array_codes(b)[1].T, scales=columns.T)
    empty = 0 in (a.shape[0], *b.shape)
    total = jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32) if empty else sum_of_quantized(recipe, held_a, held_b)
    if bias is not None:
        source, codes = array_codes(bias)
        total = add(total, convert(source, F32, codes), F32)
    if scale_result is not None:
        total = multiply(total, array_codes(scale_result)[1].reshape(()), F32)
    out = ARRAY_FORMATS[DTYPES[dtype]]
    codes = total if out == F32 else convert(F32, out, total, saturate=dtype in FP8)
    return lax.bitcast_convert_type(codes, DTYPES[dtype])


def _result(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    return (tensors[0].shape[0], tensors[1].shape[1]), static[0]


scaled_mm_op = Operator(
    "scaled_mm",
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor? scale_result",
    "ScalarType out_dtype, bool use_fast_accum, str target",
    _scaled_mm,
    _result,
    has_gradients=False,
).define()


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    target: str = "H100",
) -> torch.Tensor:
    """What `torch._scaled_mm` computes, with its arguments: scale_a · scale_b · A·B (+ bias), of operands in FP8.

    a: [M, K], b: [K, N], float8_e4m3fn or float8_e5m2, in any memory order. scale_a, scale_b: float32; one number each, [M, 1] and [1, N],
    or those of blocks of 128 along K, [M, blocks] and [blocks, blocks of N], [M, blocks] and [blocks, N], or [blocks of M, blocks] and
    [blocks, N]. Swizzled scales, of MX and NVFP4, are not taken: `matmul` with "mxfp8" and "nvfp4" finds them itself.
    bias: [N], added in f32. scale_result: one number, which multiplies the sum after that. out_dtype: of the result; None: that of a; FP8
    saturates. use_fast_accum: sums stay in the instruction's accumulator; without it they are added to an f32 sum every 128 elements, as
    cuBLASLt 13.1 was seen to do on an H200. target: the GPU.
    K is one slice: a library may split it (`tcemu.replay`). Both scales are multiplied with each other before they multiply the sum, each
    step rounded to nearest; torch's kernels for scales of rows may multiply one after the other.
    There are no gradients, as in torch. Raises TypeError or ValueError for other dtypes and shapes, Unsupported for a target without FP8.
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in FP8 or tensor.ndim != 2:
            raise TypeError(f"{name}: got {tensor.dtype}{list(tensor.shape)}; wanted float8_e4m3fn or float8_e5m2, with two axes")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}; wanted [M, K] and [K, N]")
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b), ("scale_result", scale_result)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name}: got {tensor.dtype}; wanted float32")
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (b.shape[1],)):
        raise ValueError(f"bias: got {bias.dtype}{list(bias.shape)}; wanted floats, {[b.shape[1]]}")
    dtype = a.dtype if out_dtype is None else out_dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: got {dtype}; wanted one of {', '.join(map(str, DTYPES))}")
    return scaled_mm_op(a, b, scale_a, scale_b, bias, scale_result, None, dtype, use_fast_accum, target)
