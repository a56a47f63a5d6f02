"""`matmul`, `linear`, and the operators below them: products, dot_generals and convolutions by what a name stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, Union

import jax
import torch
from jax import Array, lax

from tcemu.emulation.convolution import ConvolutionParams, through_patches
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.matmul import matmul as jax_matmul
from tcemu.linalg.recipes import Recipe
from tcemu.torch.exchange import DTYPES, dtype_of
from tcemu.torch.names import name_of, named, stochastic
from tcemu.torch.operators import Operator, Static

Seed = Union[int, torch.Tensor, None]  # noqa: UP007 the documentation is built with a stand-in for torch, which has no |


def _run(name: str, seed: Array | None) -> Any:
    """What takes the place of `jax.lax.dot_general`, with its random bits."""
    run = named(name)
    return replace(run, key=jax.random.key(seed)) if seed is not None else run


def _matmul(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (a, b, bias, scale_a, scale_b), (name, dtype) = arrays, static
    key = None if seed is None else jax.random.key(seed)
    return jax_matmul(a, b, bias, recipe=named(name), scale_a=scale_a, scale_b=scale_b, key=key, dtype=DTYPES[dtype])


def _matmul_result(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    a, b = tensors[:2]
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a is {list(a.shape)}, b {list(b.shape)}; wanted [..., M, K] and [..., K, N]")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (*batch, a.shape[-2], b.shape[-1]), static[-1]


def _dot_general(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (lhs, rhs), (name, *axes, dtype) = arrays, static
    (left, right), batch = axes[:2], axes[2:]
    d = _run(name, seed)(lhs, rhs, ((left, right), tuple(batch)), precision=None, preferred_element_type=DTYPES[dtype])
    return d.astype(DTYPES[dtype])


def _dot_general_result(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    (lhs, rhs), (_, left, right, left_batch, right_batch, dtype) = tensors, static
    rows = [n for at, n in enumerate(lhs.shape) if at not in (*left, *left_batch)]
    columns = [n for at, n in enumerate(rhs.shape) if at not in (*right, *right_batch)]
    return [*(lhs.shape[at] for at in left_batch), *rows, *columns], dtype


def convolution_params(stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int) -> ConvolutionParams:
    """A convolution of torch as JAX has it; padding: low and high of each axis."""
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


def _convolution(arrays: Sequence[Any], seed: Array | None, static: Static) -> Array:
    (x, w), (name, stride, padding, dilation, groups, dtype) = arrays, static
    params = convolution_params(stride, padding, dilation, groups)
    d = through_patches(_run(name, seed), x, w, params, precision=None, preferred_element_type=DTYPES[dtype], out_sharding=None)
    return d.astype(DTYPES[dtype])


def _convolution_result(tensors: Sequence[Any], static: Static) -> tuple[Sequence[int], torch.dtype]:
    (x, w), (_, stride, padding, dilation, _, dtype) = tensors, static
    reach = [(size - 1) * step + 1 for size, step in zip(w.shape[2:], dilation, strict=True)]
    extent = [n + low + high for n, low, high in zip(x.shape[2:], padding[::2], padding[1::2], strict=True)]
    return [x.shape[0], w.shape[0], *((n - r) // s + 1 for n, r, s in zip(extent, reach, stride, strict=True))], dtype


COMPILES_OBJECTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)  # 2.11 stops at a frozen dataclass

AXES = "int[] contracting_lhs, int[] contracting_rhs, int[] batch_lhs, int[] batch_rhs"
WINDOWS = "int[] stride, int[] padding, int[] dilation, int groups"
matmul_op = Operator(
    "matmul", "Tensor a, Tensor b, Tensor? bias, Tensor? scale_a, Tensor? scale_b", "str recipe, ScalarType dtype", _matmul, _matmul_result
).define()
dot_general_op = Operator("dot_general", "Tensor lhs, Tensor rhs", f"str by, {AXES}, ScalarType dtype", _dot_general, _dot_general_result)
dot_general_op = dot_general_op.define()
convolution_op = Operator("convolution", "Tensor x, Tensor w", f"str by, {WINDOWS}, ScalarType dtype", _convolution, _convolution_result)
convolution_op = convolution_op.define()


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | KernelRecipe | str,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    seed: Seed = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """A·B (+ bias) by a recipe, every bit as `tcemu.matmul` gives it.

    a: [..., M, K]; b: [..., K, N]; bias: what broadcasts to [..., M, N]; float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, all on
    one device, a CPU or a GPU that JAX has too. Leading axes broadcast.
    recipe: a Recipe or a KernelRecipe, or the name of a recipe, as "bf16" or "deepseek on H100". Its fields must be plain numbers.
    scale_a, scale_b: as in `tcemu.matmul`. dtype: of the result, one of those above.
    seed: where the recipe rounds stochastically, a number, or an integer tensor with one: its low 32 bits make the key,
    `jax.random.key(seed)`.
    Gradients flow to a, b, bias and the scales, as `recipe.backward` says; they have no gradients of their own. Works under
    `torch.compile(fullgraph=True)`, `torch.func.grad`, `torch.vmap` (member by member) and checkpointing.
    Raises TypeError or ValueError for tensors of another kind, shape or device, a name that is no recipe's, or where a seed is missing; and
    RuntimeError in a child process that was forked after JAX was used, where a computation would hang.
    """
    name = _name(recipe, seed)
    given = {"a": a, "b": b, "bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    _check(given, dtype)
    return matmul_op(a, b, bias, scale_a, scale_b, _seed(seed), name, dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    recipe: Recipe | KernelRecipe | str,
    seed: Seed = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x · weightᵀ (+ bias) by a recipe: what takes the place of `torch.nn.functional.linear`.

    x: [..., K], whose leading axes are the rows of one product; weight: [N, K]; bias: [N]. dtype: of the result; None: x's and weight's.
    The rest as in `matmul`: x is A, weightᵀ is B, and bias is added before the result is rounded to its dtype.
    """
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"linear: got x {list(x.shape)} and weight {list(weight.shape)}; wanted [..., K] and [N, K]")
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    dtype = torch.promote_types(x.dtype, weight.dtype) if dtype is None else dtype
    y = matmul(rows, weight.mT, bias, recipe=recipe, seed=seed, dtype=dtype)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _name(recipe: Any, seed: Seed) -> str:
    if not isinstance(recipe, str) and torch.compiler.is_compiling() and not COMPILES_OBJECTS:
        raise TypeError(
            f"recipe: the compiler of PyTorch {torch.__version__} takes a recipe by its name alone, as 'fp8 on H100', got an object; "
            "2.15 takes both, and tcemu.torch.emulate takes any recipe (docs/howto/torch.md)"
        )
    name = name_of(recipe)
    if needs_seed(name) and seed is None:
        raise ValueError('recipe: rounding="SR" needs random bits: give seed= (a number, or an integer tensor)')
    return name


@torch.compiler.assume_constant_result
def needs_seed(name: str) -> bool:
    """What has this name rounds stochastically."""
    return stochastic(named(name))


def _seed(seed: Seed) -> torch.Tensor | None:
    return torch.tensor(seed) if isinstance(seed, int) else seed


def _check(given: dict[str, torch.Tensor | None], dtype: torch.dtype) -> None:
    """Raises TypeError or ValueError for what is no tensor, of another dtype, or elsewhere than the first."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype: got {dtype}; wanted one of {', '.join(map(str, DTYPES))}")
    device = None
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}; wanted a torch.Tensor")
        dtype_of(name, tensor)
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, and a on {device}; wanted all on one device")
