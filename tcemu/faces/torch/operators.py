"""torch's operators `tcemu::...`, each made of one function of JAX, and the names that they take for recipes and functions.

torch's operators take strings and no Python objects, so that recipes and functions are registered by name. An operator has its value, its
shape for fake tensors, gradients by `jax.vjp`, and `torch.vmap` by a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.progress import interactive_line
from tcemu.faces.torch.exchange import check_process, program_context, to_jax, to_torch
from tcemu.faces.torch.operator_programs import compile_together, find_program
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.operations.products.matmul import parse_recipe
from tcemu.operations.products.recipes import Recipe, get_recipe

_registered: dict[str, Any] = {}
_names: dict[Hashable, str] = {}
_lock = Lock()


@torch.compiler.assume_constant_result
def register_name(what: Any) -> str:
    """Return the name by which operators know a recipe, a kernel recipe, a `tcemu.dot_general`, or another callable like it.

    Equal objects have one name. It is valid in this process; the name of a standard recipe, as "fp8 on sm_90a", is valid everywhere.

    Raises:
        TypeError: The object does not hash, as a recipe of arrays.
        ValueError: A string names no recipe.
    """
    if isinstance(what, str) and what in _registered:
        return what
    if isinstance(what, str):
        what = parse_recipe(what)
    try:
        key = (type(what), what, getattr(what, "key", None) is None)
        hash(key)
    except TypeError:
        raise TypeError(
            f"recipe: {what!r} does not hash, as a recipe whose fields are arrays; tcemu.torch takes a recipe of plain numbers"
        ) from None
    with _lock:
        if key not in _names:
            label = getattr(what, "name", "") or getattr(what, "__name__", type(what).__name__)
            name = _standard_name(what) or f"{label} #{len(_registered)}"
            _registered[name], _names[key] = what, name
        return _names[key]


def _standard_name(what: Any) -> str | None:
    """Return the name and target of a recipe if it is one of the standard recipes."""
    if not (isinstance(what, Recipe) and what.name):
        return None
    try:
        same = get_recipe(what.name, what.target) == what
    except (TypeError, ValueError):
        return None
    return f"{what.name} on {what.target}" if same else None


def stable_name(name: str) -> str | None:
    """Return a name that stands for the same object in every process, or None if the object has no such name."""
    what = _registered.get(name)
    if what is None or "#" not in name:
        return name
    recipe = _standard_name(what.recipe) if isinstance(what, DotGeneral) else None
    return recipe and f"dot_general of {recipe}, A is {what.a}"


def find_by_name(name: str) -> Any:
    """Return the object of a name. Raises ValueError for a name of another process."""
    if name not in _registered:
        try:
            return parse_recipe(name)
        except ValueError:
            raise ValueError(
                f"{name!r} names no recipe in use, and nothing in this process; names with '#' are given to a recipe at its first product, "
                "and hold in that process only"
            ) from None
    return _registered[name]


def rounds_stochastically(what: Any) -> bool:
    """Return whether a recipe or function rounds stochastically and needs a seed."""
    return bool(getattr(what.recipe if isinstance(what, DotGeneral) else what, "is_stochastic", False))


# ---- a line of progress while programs compile, which takes most of the time of a model's first call


@dataclass
class CompileProgress:
    """The programs that this process has begun to compile while somebody watched, and the time that their first runs took."""

    programs: set[Hashable] = field(default_factory=set)
    seconds: float = 0.0  # time of the finished first runs
    last_report: float = 0.0  # `seconds` at the last line where the stream is not a terminal
    lock: Lock = field(default_factory=Lock)

    @contextmanager
    def show(self, name: str, program: Hashable) -> Iterator[None]:
        """Show a line on the standard error stream during the first run of a program, if somebody watches that stream.

        A terminal shows it until the run ends. A notebook gets a line for every ten seconds of first runs, so none for quick ones.

        Args:
            name: What the program computes.
            program: What distinguishes it from all other programs: operator, static arguments, shapes and dtypes.
        """
        line = interactive_line(1)
        with self.lock:
            is_known = program in self.programs
            if line is not None:
                self.programs.add(program)
            number = len(self.programs)
        if line is None or is_known:
            yield
            return
        began = time.monotonic()
        line.started, line.last_report = began - self.seconds, self.last_report
        line.update(f"tcemu.torch: compiles program {number}, {name}; {line.elapsed:.0f} s so far")
        self.last_report = line.last_report
        try:
            yield
        finally:
            line.clear()
            with self.lock:
                self.seconds += time.monotonic() - began


compile_progress = CompileProgress()


# ---- operators

Static = tuple[Any, ...]
Compute = Callable[..., Array]  # (arrays, seed, static arguments) -> the result
NO_SECOND_DERIVATIVES = (
    "its gradients have no gradients of their own in torch, since the products of a backward pass are rounded. jax.grad of tcemu.matmul "
    "has second derivatives, where recipe.backward is 'exact' or 'straight_through'"
)


@jit_wide_vectors(0, 1)
def compute_value(compute: Compute, static: Static, arrays: Sequence[Array | None], seed: Array | None) -> Array:
    return compute(arrays, seed, static)


@jit_wide_vectors(0, 1, 2)
def _compute_gradients(
    compute: Compute, static: Static, needed: tuple[int, ...], arrays: Sequence[Array | None], seed: Array | None, g: Array
):
    def compute_moving(*moving: Array) -> Array:
        given = list(arrays)
        for index, value in zip(needed, moving, strict=True):
            given[index] = value
        return compute(given, seed, static)

    _, pull = jax.vjp(compute_moving, *(arrays[index] for index in needed))
    return pull(g)


@dataclass(frozen=True)
class Operator:
    """One operator of torch.

    Its arguments are tensors that are differentiated, some of them None, a seed, and hashable static arguments. Static lists become tuples.

    Attributes:
        name: Name after "tcemu::".
        tensors: The tensors in torch's schema language.
        statics: The static arguments in torch's schema language.
        compute: The function of JAX, of (arrays, seed, static arguments).
        result_type: Function from (tensors, static arguments) to shape and dtype, for fake tensors too.
        has_gradients: Whether the operator has gradients.
        share: Function from (tensors, static arguments) to a `SharedProduct`, whose programs values and gradients share, or to None.
    """

    name: str
    tensors: str
    statics: str
    compute: Compute
    result_type: Callable[[Sequence[Any], Static], tuple[Sequence[int], torch.dtype]]
    has_gradients: bool = True
    share: Callable[[Sequence[Any], Static], Any] | None = None

    @property
    def tensor_count(self) -> int:
        """Number of tensors that are differentiated."""
        return len(self.tensors.split(","))

    def split_arguments(self, args: Sequence[Any]) -> tuple[Sequence[Any], Any, Static]:
        """Split arguments into tensors, seed and static arguments."""
        static = tuple(tuple(arg) if isinstance(arg, list) else arg for arg in args[self.tensor_count + 1 :])
        return args[: self.tensor_count], args[self.tensor_count], static

    def evaluate(self, *args: Any) -> torch.Tensor:
        """Compute the value."""
        tensors, seed, static = self.split_arguments(args)
        with self.show_progress(static, (*tensors, seed)):
            if (product := self.find_product(tensors, seed, static)) is not None:
                return product.value()
            arrays, key, present = _to_arrays(tensors, seed)
            with program_context(next(array for array in arrays if array is not None)):
                program = find_program(compute_value, (self.compute, static), arrays, (key,), self.stored_name(static))
                return to_torch(program(arrays, key), present)

    def evaluate_backward(self, g: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        """Compute the gradients of the requested tensors. The last argument says which these are."""
        (tensors, seed, static), needed = self.split_arguments(args[:-1]), args[-1]
        requested = tuple(index for index, need in enumerate(needed) if need)
        with self.show_progress(static, (*tensors, seed, g), requested):
            product = self.find_product(tensors, seed, static)
            if product is not None and (gradients := product.gradients(g, requested)) is not None:
                return gradients
            arrays, key, present = _to_arrays(tensors, seed)
            cotangent = to_jax(g)
            # that of the first operand and those of the others are a product each: the programs compile side by side, and serve apart
            parts = [part for part in (tuple(set(requested) & {0}), tuple(index for index in requested if index)) if part]
            with program_context(cotangent):
                programs = [
                    find_program(_compute_gradients, (self.compute, static, part), arrays, (key, cotangent), self.stored_name(static, part))
                    for part in parts
                ]
                compile_together(programs)
                gradients = [gradient for program in programs for gradient in program(arrays, key, cotangent)]
        return [to_torch(gradient, [g, *present]) for gradient in gradients]

    def find_product(self, tensors: Sequence[Any], seed: Any, static: Static) -> Any:
        """Return the `SharedProduct` that this is, or None."""
        return None if self.share is None or seed is not None else self.share(tensors, static)

    def stored_name(self, static: Static, requested: tuple[int, ...] | None = None) -> str | None:
        """Return the name of a program on disk, or None if its static arguments are of this process alone."""
        names = [stable_name(value) if isinstance(value, str) else value for value in static]
        return None if None in names else repr((self.name, names, requested))

    def show_progress(
        self, static: Static, tensors: Sequence[torch.Tensor | None], requested: tuple[int, ...] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that shows progress while a program compiles. requested: indices of the gradients, None for the value."""
        types = tuple(tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
        names = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors[:2] if tensor is not None]
        name = f"{self.name}{'' if requested is None else ' backward'} of {' · '.join(names)}"
        return compile_progress.show(name, (self.name, requested, static, types))

    def make_fake(self, *args: Any) -> torch.Tensor:
        """Return an empty tensor like the value."""
        tensors, _, static = self.split_arguments(args)
        shape, dtype = self.result_type(tensors, static)
        return tensors[0].new_empty(shape, dtype=dtype)

    def make_fake_gradients(self, g: torch.Tensor, *args: Any) -> list[torch.Tensor]:
        """Return empty tensors like the gradients."""
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x, need in zip(args, args[-1], strict=False) if need]

    def register(self) -> Callable[..., torch.Tensor]:
        """Register the operator and the operator of its gradients with torch.

        Returns:
            A function that calls the operator, also inside `torch.func`'s transformations.
        """
        inputs = f"{self.tensors}, Tensor? seed, {self.statics}"
        forward = torch.library.custom_op(f"tcemu::{self.name}", self.evaluate, mutates_args=(), schema=f"({inputs}) -> Tensor")
        forward.register_fake(self.make_fake)
        if not self.has_gradients:
            return _add_derivative(
                forward, _save_nothing, partial(_raise_no_gradient, self.name, "it has no gradients, as torch._scaled_mm has none")
            )
        backward = torch.library.custom_op(
            f"tcemu::{self.name}_backward",
            self.evaluate_backward,
            mutates_args=(),
            schema=f"(Tensor grad, {inputs}, bool[] needed) -> Tensor[]",
        )
        backward.register_fake(self.make_fake_gradients)
        backwards = _add_derivative(backward, _save_nothing, partial(_raise_no_gradient, self.name, NO_SECOND_DERIVATIVES))
        return _add_derivative(forward, self.save_context, partial(self.collect_gradients, lambda *args: backwards(*args)))

    def save_context(self, ctx: Any, inputs: Sequence[Any], output: torch.Tensor) -> None:
        """Save the inputs that the gradients need."""
        ctx.save_for_backward(*inputs[: self.tensor_count + 1])
        ctx.static = inputs[self.tensor_count + 1 :]

    def collect_gradients(self, backward: Callable, ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of all inputs, with None where none is requested."""
        needed = [bool(need) for need in ctx.needs_input_grad[: self.tensor_count]]
        computed = iter(backward(g, *ctx.saved_tensors, *ctx.static, needed) if any(needed) else ())
        return (*(next(computed) if need else None for need in needed), None, *(None for _ in ctx.static))


def _add_derivative(op: Any, save: Callable, gradients: Callable) -> Callable:
    """Add a derivative to an operator. torch's registration works for autograd alone; under `torch.func` a Function has the derivative."""
    op.register_autograd(gradients, setup_context=save)
    op.register_vmap(partial(_vmap_by_loop, op))

    class Within(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            result = op(*args)
            return tuple(result) if isinstance(result, list) else result

        setup_context = staticmethod(save)
        backward = staticmethod(gradients)

        @staticmethod
        def vmap(info: Any, in_dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
            result, dims = _vmap_by_loop(call, info, in_dims, *args)
            return (tuple(result), tuple(dims)) if isinstance(result, list) else (result, dims)

    def call(*args: Any) -> Any:
        return Within.apply(*args) if torch._C._are_functorch_transforms_active() else op(*args)

    return call


def _to_arrays(
    tensors: Sequence[torch.Tensor | None], seed: torch.Tensor | None
) -> tuple[list[Array | None], Array | None, list[torch.Tensor]]:
    """Return the arrays, the seed as a uint32, and the tensors that are not None."""
    check_process()
    arrays = [None if tensor is None else to_jax(tensor) for tensor in tensors]
    key = None if seed is None else jnp.uint32(int(seed) & 0xFFFFFFFF)
    return arrays, key, [tensor for tensor in tensors if tensor is not None]


def _save_nothing(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Save nothing for the gradients."""


def _raise_no_gradient(name: str, why: str, ctx: Any, *g: Any) -> Any:
    raise RuntimeError(f"tcemu::{name}: {why}")


def _vmap_by_loop(op: Callable, info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
    """Implement `torch.vmap` by a loop over the batch. A scale belongs to one element of the batch, not to all of them."""
    results = []
    for number in range(info.batch_size):
        own = [arg.select(dim, number) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)]
        results.append(op(*own))
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return [torch.stack(parts) for parts in zip(*results, strict=True)], [0] * len(results[0])
