"""torch's operators `tcemu::...`, each made of one function of JAX: value, shape, gradients by `jax.vjp`, members by loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from tcemu.compilation import wide_vectors
from tcemu.torch.exchange import check_process, on_device_of, to_jax, to_torch

Static = tuple[Any, ...]
Compute = Callable[..., Array]  # (arrays, seed, static arguments) -> the result
NO_SECOND = (
    "its gradients have no gradients of their own in torch, since the products of a backward pass are rounded. jax.grad of tcemu.matmul "
    "has second derivatives, where recipe.backward is 'exact' or 'straight_through'"
)


@wide_vectors(0, 1)
def _value(compute: Compute, static: Static, arrays: Sequence[Array | None], seed: Array | None) -> Array:
    return compute(arrays, seed, static)


@wide_vectors(0, 1, 2)
def _gradients(compute: Compute, static: Static, needed: tuple[int, ...], arrays: Sequence[Array | None], seed: Array | None, g: Array):
    def of_needed(*moving: Array) -> Array:
        given = list(arrays)
        for at, value in zip(needed, moving, strict=True):
            given[at] = value
        return compute(given, seed, static)

    _, pull = jax.vjp(of_needed, *(arrays[at] for at in needed))
    return pull(g)


@dataclass(frozen=True)
class Operator:
    """One operator. Its arguments: `tensors` that are differentiated, some of them None; a seed; static ones, hashable.

    tensors, statics: as a schema of torch has them. compute: the function of JAX. result: (tensors, statics) -> shape and dtype, for fake
    tensors too. statics of a list type come as tuples.
    """

    name: str
    tensors: str
    statics: str
    compute: Compute
    result: Callable[[Sequence[Any], Static], tuple[Sequence[int], torch.dtype]]
    has_gradients: bool = True

    @property
    def count(self) -> int:
        """How many tensors are differentiated."""
        return len(self.tensors.split(","))

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any, Static]:
        """Tensors, seed and static arguments."""
        static = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args[self.count + 1 :])
        return args[: self.count], args[self.count], static

    def run(self, *args: Any) -> torch.Tensor:
        """The value."""
        tensors, seed, static = self.split(args)
        arrays, key, given = _given(tensors, seed)
        with on_device_of(next(array for array in arrays if array is not None)):
            return to_torch(_value(self.compute, static, arrays, key), given)

    def run_backward(self, g: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        """The gradients of the tensors that are asked for. The last argument says which."""
        (tensors, seed, static), needed = self.split(args[:-1]), args[-1]
        arrays, key, given = _given(tensors, seed)
        wanted = tuple(at for at, need in enumerate(needed) if need)
        cotangent = to_jax(g)
        with on_device_of(cotangent):
            found = _gradients(self.compute, static, wanted, arrays, key, cotangent)
        return [to_torch(gradient, [g, *given]) for gradient in found]

    def fake(self, *args: Any) -> torch.Tensor:
        """An empty tensor like the value."""
        tensors, _, static = self.split(args)
        shape, dtype = self.result(tensors, static)
        return tensors[0].new_empty(shape, dtype=dtype)

    def fake_backward(self, g: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        """Empty tensors like the gradients."""
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in zip(args, args[-1], strict=False) if need]

    def define(self) -> Callable[..., torch.Tensor]:
        """The operator and that of its gradients, registered with torch. The result calls it, inside `torch.func`'s transformations too."""
        inputs = f"{self.tensors}, Tensor? seed, {self.statics}"
        forward = torch.library.custom_op(f"tcemu::{self.name}", self.run, mutates_args=(), schema=f"({inputs}) -> Tensor")
        forward.register_fake(self.fake)
        if not self.has_gradients:
            return _callable(forward, _nothing, partial(_none, self.name, "it has no gradients, as torch._scaled_mm has none"))
        backward = torch.library.custom_op(
            f"tcemu::{self.name}_backward", self.run_backward, mutates_args=(), schema=f"(Tensor grad, {inputs}, bool[] needed) -> Tensor[]"
        )
        backward.register_fake(self.fake_backward)
        backwards = _callable(backward, _nothing, partial(_none, self.name, NO_SECOND))
        return _callable(forward, self.save, partial(self.gradients, lambda *args: backwards(*args)))

    def save(self, ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
        """What the gradients need."""
        ctx.save_for_backward(*inputs[: self.count + 1])
        ctx.static = inputs[self.count + 1 :]

    def gradients(self, backward: Callable, ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        """The gradients of all inputs, None where none is asked for."""
        needed = [bool(need) for need in ctx.needs_input_grad[: self.count]]
        found = iter(backward(g, *ctx.saved_tensors, *ctx.static, needed) if any(needed) else ())
        return (*(next(found) if need else None for need in needed), None, *(None for _ in ctx.static))


def _callable(op: Any, save: Callable, gradients: Callable) -> Callable:
    """An operator with its derivative. What torch registers holds for autograd alone; under `torch.func` a Function has it."""
    op.register_autograd(gradients, setup_context=save)
    op.register_vmap(partial(_members, op))

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            result = op(*args)
            return tuple(result) if isinstance(result, list) else result

        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
            result, dims = _members(call, info, in_dims, *args)
            return (tuple(result), tuple(dims)) if isinstance(result, list) else (result, dims)

    def call(*args: Any) -> Any:
        return Within.apply(*args) if torch._C._are_functorch_transforms_active() else op(*args)

    return call


def _given(
    tensors: Sequence[torch.Tensor | None], seed: torch.Tensor | None
) -> tuple[list[Array | None], Array | None, list[torch.Tensor]]:
    """Arrays, the key that a seed stands for, and the tensors that are there."""
    check_process()
    arrays = [None if tensor is None else to_jax(tensor) for tensor in tensors]
    key = None if seed is None else jnp.uint32(int(seed) & 0xFFFFFFFF)
    return arrays, key, [tensor for tensor in tensors if tensor is not None]


def _nothing(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Nothing is kept."""


def _none(name: str, why: str, ctx: Any, *g: Any) -> Any:
    raise RuntimeError(f"tcemu::{name}: {why}")


def _members(op: Callable, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    """`torch.vmap`: member by member. A scale is of one member then, and not of all."""
    results = []
    for number in range(info.batch_size):
        own = [arg.select(dim, number) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
        results.append(op(*own))
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return [torch.stack(parts) for parts in zip(*results, strict=True)], [0] * len(results[0])
