"""`matmul`, `linear` and `scaled_mm` of torch tensors, and the operators below them.

An operator takes the registered name of a recipe or of another function in the place of `jax.lax.dot_general`; see `operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple, Union

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from tcemu.engine.arithmetic.fma import add
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, E4M3, E5M2, F32
from tcemu.faces.torch.exchange import DTYPES, jax_dtype
from tcemu.faces.torch.operators import Operator, Static, find_by_name, register_name, rounds_stochastically
from tcemu.faces.torch.shared_products import share_dot_general, share_matmul
from tcemu.operations.products.matmul import matmul as jax_matmul
from tcemu.operations.products.matmul import multiply_quantized
from tcemu.operations.products.recipe_kinds import AnyRecipe
from tcemu.operations.products.recipes import Recipe, as_recipe
from tcemu.operations.quantize.quantizer import QuantizedOperand, Quantizer
from tcemu.uses.emulation.primitives import ConvolutionParams, convolve_by_patches

Seed = Union[int, torch.Tensor, None]  # noqa: UP007


def _find_function(name: str, seed: Array | None) -> Any:
    """Return the function that takes the place of `jax.lax.dot_general`, with its random bits."""
    function = find_by_name(name)
    return replace(function, key=jax.random.key(seed)) if seed is not None else function


def _compute_matmul(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (a, b, bias, scale_a, scale_b), (name, dtype) = arrays, static
    key = None if seed is None else jax.random.key(seed)
    return jax_matmul(a, b, bias, recipe=find_by_name(name), scale_a=scale_a, scale_b=scale_b, key=key, dtype=DTYPES[dtype])


def _matmul_type(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    a, b = tensors[:2]
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}; expected [..., M, K] and [..., K, N]")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*batch, a.shape[-2], b.shape[-1]), static[-1]


def _compute_dot_general(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (lhs, rhs), (name, *axes, dtype) = arrays, static
    (left, right), batch = axes[:2], axes[2:]
    d = _find_function(name, seed)(lhs, rhs, ((left, right), tuple(batch)), precision=None, preferred_element_type=DTYPES[dtype])
    return d.astype(DTYPES[dtype])


def _dot_general_type(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    (lhs, rhs), (_, left, right, left_batch, right_batch, dtype) = tensors, static
    return dot_general_shape(lhs.shape, rhs.shape, left, right, left_batch, right_batch), dtype


def dot_general_shape(
    lhs: Sequence[int], rhs: Sequence[int], left: Sequence[int], right: Sequence[int], left_batch: Sequence[int], right_batch: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a dot_general from the operands' shapes and its contracting and batch axes."""
    rows = [size for axis, size in enumerate(lhs) if axis not in (*left, *left_batch)]
    columns = [size for axis, size in enumerate(rhs) if axis not in (*right, *right_batch)]
    return (*(lhs[axis] for axis in left_batch), *rows, *columns)


def convolution_params(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> ConvolutionParams:
    """Return the parameters of JAX for a convolution of torch. padding: low and high of each axis."""
    axes = tuple(range(len(stride) + 2))
    return ConvolutionParams(
        window_strides=stride,
        padding=list(zip(padding[::2], padding[1::2], strict=True)),
        lhs_dilation=(1,) * len(stride),
        rhs_dilation=dilation,
        dimension_numbers=lax.ConvDimensionNumbers(axes, axes, axes),
        feature_group_count=groups,
        batch_group_count=1,
    )


def _compute_convolution(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (x, w), (name, stride, padding, dilation, groups, dtype) = arrays, static
    params = convolution_params(stride, padding, dilation, groups)
    d = convolve_by_patches(
        _find_function(name, seed), x, w, params, precision=None, preferred_element_type=DTYPES[dtype], out_sharding=None
    )
    return d.astype(DTYPES[dtype])


def _convolution_type(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    (x, w), (_, stride, padding, dilation, _, dtype) = tensors, static
    return convolution_shape(x.shape, w.shape, stride, padding, dilation), dtype


def convolution_shape(
    x: Sequence[int], w: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...]:
    """Return the shape of a convolution of [batch, features, *space] with [features, features of a group, *window]."""
    windows = [(size - 1) * step + 1 for size, step in zip(w[2:], dilation, strict=True)]
    extents = [size + low + high for size, low, high in zip(x[2:], padding[::2], padding[1::2], strict=True)]
    space = [(extent - window) // step + 1 for extent, window, step in zip(extents, windows, stride, strict=True)]
    return (x[0], w[0], *space)


COMPILES_OBJECTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)  # 2.11 stops at a frozen dataclass

AXES_SCHEMA = "int[] contracting_lhs, int[] contracting_rhs, int[] batch_lhs, int[] batch_rhs"
WINDOWS_SCHEMA = "int[] stride, int[] padding, int[] dilation, int groups"
matmul_op = Operator(
    "matmul",
    "Tensor a, Tensor b, Tensor? bias, Tensor? scale_a, Tensor? scale_b",
    "str recipe, ScalarType dtype",
    _compute_matmul,
    _matmul_type,
    share=share_matmul,
).register()
dot_general_op = Operator(
    "dot_general",
    "Tensor lhs, Tensor rhs",
    f"str by, {AXES_SCHEMA}, ScalarType dtype",
    _compute_dot_general,
    _dot_general_type,
    share=share_dot_general,
).register()
convolution_op = Operator(
    "convolution", "Tensor x, Tensor w", f"str by, {WINDOWS_SCHEMA}, ScalarType dtype", _compute_convolution, _convolution_type
)
convolution_op = convolution_op.register()


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: AnyRecipe | str,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    seed: Seed = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Compute A·B (+ bias) by a recipe, with the bits of `tcemu.matmul`.

    Gradients flow to a, b, bias and the scales, as `recipe.backward` says; there are no second derivatives. It works under
    `torch.compile(fullgraph=True)`, `torch.func.grad`, `torch.vmap` (a separate product for each element) and checkpointing.

    Args:
        a: Tensor [..., M, K] of float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, on a CPU or on a GPU that JAX has too. Leading
            axes broadcast.
        b: Tensor [..., K, N] of these dtypes on the same device.
        bias: Tensor that broadcasts to [..., M, N].
        recipe: A Recipe, a KernelRecipe or a WideRecipe, or the name of a recipe, as "bf16", "deepseek on H100" or "bf16x6 on A100". Its
            fields must be plain numbers.
        scale_a: Scales of A as in `tcemu.matmul`.
        scale_b: Scales of B as in `tcemu.matmul`.
        seed: A number, or an integer tensor with one, if the recipe rounds stochastically. Its low 32 bits make the key
            `jax.random.key(seed)`.
        dtype: Dtype of the result, one of those above.

    Returns:
        Tensor [..., M, N].

    Raises:
        TypeError: A tensor is of another kind or dtype.
        ValueError: Shapes or devices do not match, a name is no recipe's, or a seed is missing.
        RuntimeError: The process was forked after JAX was used; a computation would hang.
    """
    name = _register_recipe(recipe, seed)
    tensors = {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    _check_tensors(tensors, dtype)
    return matmul_op(a, b, bias, scale_a, scale_b, _seed_tensor(seed), name, dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: AnyRecipe | str,
    seed: Seed = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute x · weightᵀ (+ bias) by a recipe, in the place of `torch.nn.functional.linear`.

    x is A and weightᵀ is B; bias is added before the result is rounded to its dtype.

    Args:
        x: Tensor [..., K], whose leading axes are the rows of one product.
        weight: Tensor [N, K].
        bias: Tensor [N].
        recipe: Recipe as in `matmul`.
        seed: Seed as in `matmul`.
        dtype: Dtype of the result. None: the dtype of x and weight.

    Returns:
        Tensor [..., N].

    Raises:
        TypeError: As `matmul`.
        ValueError: As `matmul`.
    """
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: got x {list(x.shape)} and weight {list(weight.shape)}; expected [..., K] and [N, K]")
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    dtype = torch.promote_types(x.dtype, weight.dtype) if dtype is None else dtype
    y = matmul(rows, weight.mT, bias, recipe=recipe, seed=seed, dtype=dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _register_recipe(recipe: Any, seed: Seed) -> str:
    if not isinstance(recipe, str) and torch.compiler.is_compiling() and not COMPILES_OBJECTS:
        raise TypeError(
            f"recipe: the compiler of PyTorch {torch.__version__} takes a recipe by its name alone, as 'fp8 on H100', got an object; "
            "2.15 takes both, and tcemu.torch.emulate takes any recipe (docs/howto/torch.md)"
        )
    name = register_name(recipe)
    if needs_seed(name) and seed is None:
        raise ValueError('recipe: rounding="SR" needs random bits: give seed= (a number, or an integer tensor)')
    return name


@torch.compiler.assume_constant_result
def needs_seed(name: str) -> bool:
    """Return whether the function or recipe of this name rounds stochastically."""
    return rounds_stochastically(find_by_name(name))


def _seed_tensor(seed: Seed) -> torch.Tensor | None:
    return torch.tensor(seed) if isinstance(seed, int) else seed


def _check_tensors(given: dict[str, torch.Tensor | None], dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError for an argument that is no tensor, of another dtype, or on another device than the first."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype}; expected one of {', '.join(map(str, DTYPES))}")
    device = None
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; expected a torch.Tensor")
        jax_dtype(name, tensor)
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, and a on {device}; expected all on one device")


# ---- scaled_mm

FP8_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
SCALE_BLOCK = 128  # elements per scale of blocks, and between promotions of sums


class Scaling(NamedTuple):
    """The scales of both operands."""

    a: Quantizer
    b: Quantizer
    shape_a: tuple[int, ...]  # shape of the scales in torch
    shape_b: tuple[int, ...]


def _list_scalings(m: int, n: int, k: int) -> list[Scaling]:
    """List the scalings that torch knows, without those of MX and NVFP4, whose scales are swizzled."""
    deep, wide = -(-k // SCALE_BLOCK), -(-n // SCALE_BLOCK)
    tensor, line, square = Quantizer("tensor"), Quantizer("block", (1, SCALE_BLOCK)), Quantizer("block", (SCALE_BLOCK, SCALE_BLOCK))
    return [
        Scaling(tensor, tensor, (), ()),
        Scaling(Quantizer("row"), Quantizer("column"), (m, 1), (1, n)),
        Scaling(line, square, (m, deep), (deep, wide)),
        Scaling(line, line, (m, deep), (deep, n)),
        Scaling(square, line, (-(-m // SCALE_BLOCK), deep), (deep, n)),
    ]


def _find_scaling(tensors: Sequence[Any]) -> Scaling:
    """Find a scaling by the shapes of the scales. Raises ValueError if there is none."""
    a, b, scale_a, scale_b = tensors[:4]
    shapes = [() if scale.size == 1 else tuple(scale.shape) for scale in (scale_a, scale_b)]
    known = _list_scalings(a.shape[0], b.shape[1], a.shape[1])
    for scaling in known:
        if shapes in ([scaling.shape_a, scaling.shape_b], [(), ()] if scaling.shape_a == () else None):
            return scaling
    expected = "; ".join(f"{list(s.shape_a)} and {list(s.shape_b)}" for s in known)
    raise ValueError(f"scale_a is {list(scale_a.shape)}, scale_b {list(scale_b.shape)}; expected {expected}")


def _make_recipe(scaling: Scaling, formats: tuple[Any, Any], fast: bool, target: str) -> Recipe:
    """Return the recipe of a scaled product: its instruction and promotion."""
    fp8 = as_recipe("fp8", target)
    of_pairs = {(r.op.a, r.op.b): r for r in (fp8, *fp8.require_gradients(), as_recipe("fp8_e5m2", target))}
    base = of_pairs[formats]
    promote = None if fast and scaling.a.block is None else SCALE_BLOCK // base.op.k
    return base.replace(a=scaling.a, b=scaling.b, promote=promote, backward="exact")


def _scale_codes(scale: Array, shape: tuple[int, ...]) -> Array:
    return convert(F32, F32, array_codes(scale)[1]).reshape(shape)


def _compute_scaled_mm(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (a, b, scale_a, scale_b, bias, scale_result), (dtype, fast, target) = arrays, static
    scaling = _find_scaling(arrays)
    formats = ARRAY_FORMATS[a.dtype], ARRAY_FORMATS[b.dtype]
    recipe = _make_recipe(scaling, formats, fast, target)
    quantized_a = QuantizedOperand(codes=array_codes(a)[1], scales=_scale_codes(scale_a, scaling.shape_a))
    columns = _scale_codes(scale_b, scaling.shape_b)
    quantized_b = QuantizedOperand(codes=array_codes(b)[1].T, scales=columns.T)
    empty = 0 in (a.shape[0], *b.shape)
    total = jnp.zeros((a.shape[0], b.shape[1]), jnp.uint32) if empty else multiply_quantized(recipe, quantized_a, quantized_b)
    if bias is not None:
        source, codes = array_codes(bias)
        total = add(total, convert(source, F32, codes), F32)
    if scale_result is not None:
        total = multiply(total, array_codes(scale_result)[1].reshape(()), F32)
    out = ARRAY_FORMATS[DTYPES[dtype]]
    codes = total if out == F32 else convert(F32, out, total, saturate=dtype in FP8_FORMATS)
    return lax.bitcast_convert_type(codes, DTYPES[dtype])


def _scaled_mm_type(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    return (tensors[0].shape[0], tensors[1].shape[1]), static[0]


scaled_mm_op = Operator(
    "scaled_mm",
    "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor? scale_result",
    "ScalarType out_dtype, bool use_fast_accum, str target",
    _compute_scaled_mm,
    _scaled_mm_type,
    has_gradients=False,
).register()


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
    """Compute scale_a · scale_b · A·B (+ bias) of FP8 operands as `torch._scaled_mm` does, with its arguments.

    K is one slice; a library may split it (`tcemu.replay`). Both scales are multiplied with each other before they multiply the sum, each
    step rounded to nearest; torch's kernels for scales of rows may multiply by one after the other. There are no gradients, as in torch.

    Args:
        a: Tensor [M, K], float8_e4m3fn or float8_e5m2, in any memory order.
        b: Tensor [K, N], float8_e4m3fn or float8_e5m2, in any memory order.
        scale_a: Scales of A, float32: one number; [M, 1]; or, for blocks of 128 along K, [M, blocks] or [blocks of M, blocks].
        scale_b: Scales of B, float32: one number; [1, N]; [blocks, blocks of N] or [blocks, N] beside [M, blocks]; [blocks, N] beside
            [blocks of M, blocks]. Swizzled scales, of MX and NVFP4, are not supported: `matmul` with "mxfp8" and "nvfp4" finds them itself.
        bias: Tensor [N], added in f32.
        scale_result: One number, which multiplies the sum after that.
        out_dtype: Dtype of the result. None: that of a. FP8 saturates.
        use_fast_accum: Whether sums stay in the instruction's accumulator. Else they are added to an f32 sum every 128 elements, as was
            measured of cuBLASLt 13.1 on an H200.
        target: The GPU.

    Returns:
        Tensor [M, N].

    Raises:
        TypeError: A dtype is not supported.
        ValueError: Shapes do not match.
        Unsupported: The target has no FP8.
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in FP8_FORMATS or tensor.ndim != 2:
            raise TypeError(f"{name}: got {tensor.dtype}{list(tensor.shape)}; expected float8_e4m3fn or float8_e5m2, with two axes")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}; expected [M, K] and [K, N]")
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b), ("scale_result", scale_result)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise TypeError(f"{name}: got {tensor.dtype}; expected float32")
    if bias is not None and (bias.dtype not in DTYPES or tuple(bias.shape) != (b.shape[1],)):
        raise ValueError(f"bias: got {bias.dtype}{list(bias.shape)}; expected floats, {[b.shape[1]]}")
    dtype = a.dtype if out_dtype is None else out_dtype
    if dtype not in DTYPES:
        raise TypeError(f"out_dtype: got {dtype}; expected one of {', '.join(map(str, DTYPES))}")
    return scaled_mm_op(a, b, scale_a, scale_b, bias, scale_result, None, dtype, use_fast_accum, target)
