"""`emulate`: a torch module with its matrix products computed by a policy, and its softmaxes, norms and activations by another one.

The forward of each module runs inside a function mode, which recognises the functions of torch that are products (`function_handlers`) or
softmaxes, norms and activations (`kernel_functions`), asks the policy for a decision on each, and computes it by an operator.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from operator import index
from typing import Any, NamedTuple, overload
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tcemu.faces.torch.exchange import DTYPE_NAMES, DTYPES
from tcemu.faces.torch.function_handlers import HANDLERS, call_original
from tcemu.faces.torch.gpu_emulation import GpuEmulation
from tcemu.faces.torch.kernel_functions import KERNEL_FLOATS, KERNEL_HANDLERS, FunctionCall, kernel_function_op, register_kernel
from tcemu.faces.torch.matrix_products import convolution_op, convolution_shape, dot_general_op, dot_general_shape, matmul_op
from tcemu.faces.torch.operators import register_name, rounds_stochastically
from tcemu.faces.torch.watching import DispatchedProduct, ProductRecorder, describe_tensor
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.uses.emulation.decisions import PlannedPolicy, Policy, as_policy, decide, plan_policy
from tcemu.uses.emulation.function_choices import FunctionPolicy, as_function_policy, decide_function, unused_function_warnings
from tcemu.uses.emulation.report import Entry, Report, policy_warnings
from tcemu.uses.emulation.survey import Function, Product
from tcemu.uses.replay.aten_operations import LIBRARIES

MARK = "_tcemu_emulation"
NOT_GIVEN: Any = object()
ALL_HANDLERS = HANDLERS | KERNEL_HANDLERS
FLOAT_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_FLOATS)
WEIGHTS = "parameters of the modules, and views of them"


class Emulation:
    """A model whose products, softmaxes, norms and activations are emulated until `remove()`, as `emulate` returns it.

    It is called as the model is, and is a context manager.
    """

    def __init__(self, model: torch.nn.Module, policy: Policy, convolutions: bool, functions: FunctionPolicy = None):
        self.model, self.decisions = model, Decisions(policy, convolutions, functions)
        self._original_forwards: list[tuple[torch.nn.Module, Any]] = []
        self._has_warned = False
        for path, module in model.named_modules():
            own = vars(module).get("forward")
            if MARK in vars(module) or hasattr(own, MARK):
                self.remove()
                raise ValueError(f"emulate: {path or 'the model'} is emulated already; .remove() what emulate gave first")
            self._original_forwards.append((module, own))
            module.forward = self._wrap_forward(path, module, module.forward)
        vars(model)[MARK] = self

    def _wrap_forward(self, path: str, module: torch.nn.Module, forward: Callable) -> Callable:
        decisions, tag, is_root = self.decisions, self.decisions.tag, path == ""

        def wrapped_forward(*args: Any, **kwargs: Any) -> Any:
            if is_root and not decisions.is_planned:
                self._plan(args, kwargs)
            with ProductMode(decisions, tag, path, module):
                results = forward(*args, **kwargs)
            if is_root and not torch.compiler.is_compiling() and not (self._has_warned or decisions.survey or decisions.capture):
                self._warn(decisions.entries, stacklevel=6)
            return results

        setattr(wrapped_forward, MARK, True)
        return wrapped_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """List what is replaced and what is left in a call, without computing anything or changing the model's state.

        The list has the forward products. The recipes have their own recipes for backward products; `tcemu.torch.watch` lists these.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.

        Returns:
            A `Report`.

        Raises:
            Exception: Whatever the model raises if its control flow depends on values; `tcemu.torch.watch` can list such a run.
        """
        entries = self._survey(args, kwargs)
        if not self.decisions.is_planned:
            self.decisions.make_plan([entry.product for entry in entries if entry.product is not None])
            entries = self._survey(args, kwargs)
        self._warn(entries, stacklevel=3)
        return Report.from_entries(tuple(entries), WEIGHTS)

    def _warn(self, entries: Sequence[Entry], stacklevel: int) -> None:
        """Warn of a policy that does not fit the products of a run."""
        self._has_warned = True
        functions = [entry for entry in entries if entry.function is not None]
        found = [entry.function for entry in functions if entry.function is not None]
        lines = policy_warnings(self.decisions.policy, entries)
        for line in lines + unused_function_warnings(self.decisions.functions, found, sum(entry.replaced for entry in functions)):
            warnings.warn(f"emulate({type(self.model).__name__}): {line}", stacklevel=stacklevel)

    def _plan(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("emulate: this policy must know all products before the first; call .report(...) once, then compile")
        self.report(*args, **kwargs)

    def _survey(self, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        decisions, planned = self.decisions, self.decisions.is_planned
        watcher = ProductRecorder()
        survey = RunSurvey(watcher)
        decisions.is_planned, decisions.survey = True, survey  # a survey may run before the plan
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as fake, watcher:
                given = pytree.tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
                self.model(*given[0], **given[1])
            return survey.entries
        finally:
            decisions.is_planned, decisions.survey = planned, None

    def remove(self) -> None:
        """Restore the model."""
        for module, own in self._original_forwards:
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own
        self._original_forwards.clear()
        if vars(self.model).get(MARK) is self:
            del vars(self.model)[MARK]

    def __enter__(self) -> Emulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        functions = "" if self.decisions.functions is None else f", functions={self.decisions.functions}"
        return f"emulate({type(self.model).__name__}, {self.decisions.policy}{functions})"


@overload
def emulate(model: torch.nn.Module, policy: Policy, *, convolutions: bool = ..., functions: FunctionPolicy = ...) -> Emulation: ...
@overload
def emulate(model: torch.nn.Module, *, gpu: str, library: str = ..., unknown: str = ..., compiled: Any = ...) -> GpuEmulation: ...
def emulate(
    model: torch.nn.Module,
    policy: Any = NOT_GIVEN,
    *,
    convolutions: bool = False,
    functions: FunctionPolicy = None,
    gpu: str | None = None,
    library: str = LIBRARIES[0],
    unknown: str = "raise",
    compiled: Any = None,
) -> Emulation | GpuEmulation:
    """Replace every matrix product of a torch model in place by the policy's choice, or compute every operation as PyTorch does on a GPU.

    With `gpu`, within `with`, every operation is computed as PyTorch computes it on that GPU, also in a backward pass and in an optimizer
    (docs/howto/gpu_you_do_not_have.md); the model is not changed. Without it the products are replaced until `.remove()` of the result,
    as follows.

    With `functions` its softmaxes, norms and activations are computed by kernels of `tcemu.functional`.

    The forward of each module is wrapped: hooks, parameters and the state_dict stay. The replaced products are linear, matmul in all its
    forms (@, mm, bmm, mv, dot, addmm, baddbmm, addbmm, addmv), einsum and tensordot, convolutions, scaled_dot_product_attention in torch's
    math form ("scores" and "values"), and nn.MultiheadAttention part by part, also where torch would run one kernel. A recipe adds the bias
    of a linear layer before the result is rounded to its dtype. Kernels with other products, such as nn.LSTM's, are left, and `.report()`
    lists them.

    Backward products are computed by the recipe's own recipes for gradients. Autocast holds: operands are brought to its dtype first. The
    model works under `torch.compile(fullgraph=True)`, `torch.func` and in checkpoints of modules; a checkpoint around other functions
    recomputes their products outside the modules, unchanged. A recipe that rounds stochastically draws from torch's generator.

    A product's name is the path of its module, "/", and its kind: "layers.0.up/linear", "attention/scores". Where a kind repeats in a call
    of a module, ".1" and so on follow it. `Product.parameters` are names of the state_dict. An operand that is a parameter or a view of one
    is a weight; others are activations.

    Args:
        model: The model. It is changed in place.
        policy: Policy as `tcemu.emulate` takes it, or `tcemu.torch.measured_policy`.
        convolutions: Whether convolutions are products too, as products of patches; without it they are left.
        functions: Kernels for softmax, log_softmax, layer_norm, rms_norm, silu and gelu of `torch.nn.functional` and of `torch`, also in
            modules and in scaled_dot_product_attention, in the forms that `tcemu.emulate` takes. A function's name is the path of its
            module, "/", and its kind: "layers.0.norm1/layer_norm". A formula that is written out of other operations is not found, and
            `inplace=True` is left. The gradient is that of the formula.
        gpu: "H100" or "H200", in the place of policy, convolutions and functions.
        library: With gpu, the library: "torch 2.11".
        unknown: With gpu, what happens to an operation whose result there is not known: "raise" raises NotModelled, "warn" and "leave"
            compute it as PyTorch does on this CPU. The report names it.
        compiled: With gpu, the graphs that `torch.compile` wrote for this model there, from `tcemu.inductor.read`. Their kernels run as
            PTX, and their calls of libraries are computed as without `compiled`. Outside of `with` the result is called under
            `torch.no_grad`; within it, a loss, its backward pass and an optimizer are the GPU's too (docs/howto/compiled_models.md).

    Returns:
        An `Emulation`, which is called as the model is. The first call and `.report()` warn if the policy replaces nothing or a rule
        matches no product. With gpu, a `GpuEmulation`, called so too; its `.report()` lists what was computed so far.

    Raises:
        TypeError: As `tcemu.emulate`; or neither a policy nor a GPU is given, or both are.
        ValueError: As `tcemu.emulate`, or the model is emulated already.
        NotModelled: Nothing is known of the GPU or of the library; or, from a call, an operation is not known.
    """
    if gpu is None:
        if policy is NOT_GIVEN:
            raise TypeError('emulate: give a policy, as emulate(model, "bf16 on H100"), or a GPU, as emulate(model, gpu="H100")')
        if library != LIBRARIES[0] or unknown != "raise" or compiled is not None:
            raise TypeError("emulate: library, unknown and compiled belong to gpu=, which is not given; a policy decides on products alone")
        return Emulation(model, policy, convolutions, functions)
    mixed = {"policy": policy is not NOT_GIVEN, "convolutions": convolutions, "functions": functions is not None}
    if any(mixed.values()):
        names = ", ".join(name for name, given in mixed.items() if given)
        raise TypeError(f"emulate: gpu={gpu!r} decides on every operation; leave out {names}, or leave out gpu")
    return GpuEmulation(model, gpu, library, unknown, compiled)


# ---- decisions

ProductAxes = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
WEIGHT, ACTIVATION = "weight", "activation"


class Replacement(NamedTuple):
    """The replacement of a product."""

    name: str  # name of the product
    function_name: str  # registered name of the function that takes the place of `jax.lax.dot_general`
    recipe_name: str  # registered name of its recipe, or ""
    needs_seed: bool


_by_tag: WeakValueDictionary[str, Decisions] = WeakValueDictionary()
_tag_numbers = count()


@torch.compiler.assume_constant_result
def decide_by_tag(tag: str, name: str, facts: tuple, weights: tuple[str | None, str | None], supported: bool) -> Replacement | None:
    """Call `Decisions.decide` of the decisions with this tag.

    A compiled program holds for one tag, because torch compares strings. It would not compare an object.
    """
    decisions = _by_tag[tag]
    return decisions.decide(name, facts, weights) if supported else decisions.skip(name, facts, weights)


@torch.compiler.assume_constant_result
def decide_function_by_tag(tag: str, name: str, facts: tuple, parameters: tuple[str, ...]) -> str | None:
    """Call `Decisions.decide_function` of the decisions with this tag; see `decide_by_tag`."""
    return _by_tag[tag].decide_function(name, facts, parameters)


class Decisions:
    """The decisions of the policies on the products and functions of one model. Its `tag` is unique in the process."""

    def __init__(self, policy: Policy, convolutions: bool, functions: FunctionPolicy = None):
        self.tag = f"emulation {next(_tag_numbers)}"
        _by_tag[self.tag] = self
        self.policy, self.convolutions = as_policy(policy), convolutions
        self.plan: Policy = None
        self.is_planned = not isinstance(self.policy, PlannedPolicy)
        if self.is_planned:
            self.plan = self.policy
        self.survey: RunSurvey | None = None  # survey of the run that is listed now
        self.capture: Callable[[Product, Any, Any], None] | None = None  # function that gets the operands of each replaced product
        self._decisions: dict[tuple, tuple[Any, Entry]] = {}  # on products and on functions
        self.functions = as_function_policy(functions)

    def make_plan(self, products: Sequence[Product]) -> None:
        """Give the products of a whole run to a policy that must know all of them before it decides on one."""
        if not self.is_planned:
            self.plan, self.is_planned = plan_policy(self.policy, products), True
            self._decisions.clear()

    def decide(self, name: str, facts: tuple, weights: tuple[str | None, str | None]) -> Replacement | None:
        """Return a product's replacement, or None if it is left.

        Args:
            name: Name of the product.
            facts: Facts of the product, see `_make_product`.
            weights: Paths of the parameters that the operands are, or None.
        """
        return self._remember((name, facts, weights), lambda: self._decide_product(_make_product(name, facts, weights)))

    def _remember(self, key: tuple, choose: Callable[[], tuple[Any, Entry]]) -> Any:
        """Return what was chosen for a key, which is chosen once, and list it in a survey."""
        if key not in self._decisions:
            self._decisions[key] = choose()
        chosen, entry = self._decisions[key]
        if self.survey is not None:
            self.survey.add(entry)
        return chosen

    def skip(self, name: str, facts: tuple, weights: tuple[str | None, str | None]) -> None:
        """List a product of dtypes or on devices that no operator takes."""
        if self.survey is not None:
            reason = f"operands of {facts[2].removeprefix('torch.')} and {facts[4].removeprefix('torch.')}; tcemu.torch takes {DTYPE_NAMES}"
            self.survey.add(Entry(name, _make_product(name, facts, weights), False, reason))

    def decide_function(self, name: str, facts: tuple, parameters: tuple[str, ...]) -> str | None:
        """Return the registered name of a function and its kernel, or None if the function is left.

        Args:
            name: Name of the function.
            facts: Kind, shape, dtype of the operand and of the result, axis, eps, form, whether there is a weight and a bias, and the other
                dtypes or devices for which no operator exists, or "".
            parameters: Paths of the parameters among weight and bias.
        """

        def choose() -> tuple[str | None, Entry]:
            kind, shape, operand_dtype, dtype, axis, eps, form, has_weight, has_bias, unsupported = facts
            function = Function(
                name=name,
                index=_repetition(name),
                kind=kind,
                shape=shape,
                operand_dtype=_numpy_dtype(operand_dtype),
                dtype=_numpy_dtype(dtype),
                axis=axis,
                eps=eps,
                form=form,
                has_weight=has_weight,
                has_bias=has_bias,
                parameters=parameters,
                scope=name,
            )
            decision = decide_function(self.functions, function)
            kernel = None if unsupported else decision.kernel
            entry = Entry(name, None, kernel is not None, unsupported or decision.reason, function=function, kernel=kernel)
            return None if kernel is None else register_kernel(function, kernel), entry

        return self._remember((name, facts, parameters), choose)

    @property
    def entries(self) -> list[Entry]:
        """The decisions so far."""
        return sorted((entry for _, entry in self._decisions.values()), key=lambda entry: entry.product is None)

    def capture_operands(self, name: str, operands: Any, axes: Any) -> None:
        """Hand the operands of a running product to `capture`. axes: its dimension numbers, or a convolution's windows."""
        assert self.capture is not None
        products = (entry.product for _, entry in self._decisions.values() if entry.name == name and entry.product is not None)
        self.capture(next(product for product in products if matches_operands(product, operands)), operands, axes)

    def _decide_product(self, product: Product) -> tuple[Replacement | None, Entry]:
        placeholder: Callable[[], Any] = lambda: jax.random.key(0)
        decision = decide(self.plan, product, self.convolutions, placeholder)
        entry = Entry(product.name, product, decision.dot_general is not None, decision.reason, decision.undecided, decision.choice)
        if decision.dot_general is None:
            return None, entry
        run = decision.dot_general
        recipe = run.recipe if isinstance(run, DotGeneral) and run.a == "lhs" else None
        seeded = rounds_stochastically(run)
        run = replace(run, key=None) if isinstance(run, DotGeneral) else run
        return Replacement(product.name, register_name(run), "" if recipe is None else register_name(recipe), seeded), entry


def _make_product(name: str, facts: tuple, weights: tuple[str | None, str | None]) -> Product:
    """Describe a product to a policy. facts: primitive, shape and dtype of lhs and of rhs, axes, shape of the result."""
    primitive, lhs, lhs_dtype, rhs, rhs_dtype, numbers, shape = facts
    dtypes: list[Any] = [_numpy_dtype(dtype) for dtype in (lhs_dtype, rhs_dtype)]
    lhs_role, rhs_role = (ACTIVATION if path is None else WEIGHT for path in weights)
    return Product(
        name=name,
        index=_repetition(name),
        primitive=primitive,
        lhs_shape=lhs,
        lhs_dtype=dtypes[0],
        rhs_shape=rhs,
        rhs_dtype=dtypes[1],
        dimension_numbers=lax.ConvDimensionNumbers(*numbers) if primitive == "conv_general_dilated" else numbers,
        preferred_element_type=None,
        shape=shape,
        dtype=dtypes[0],
        roles=(lhs_role, rhs_role),
        parameters=tuple(path for path in weights if path),
    )


def _repetition(name: str) -> int:
    """Return the number at the end of a name such as "attention/linear.1"; 0 for a name without a number."""
    number = name.rpartition("/")[2].rpartition(".")[2]
    return int(number) if number.isdigit() else 0


def matches_operands(product: Product, operands: Any) -> bool:
    """Return whether operands have the shapes of a product's operands."""
    return (product.lhs_shape, product.rhs_shape) == tuple(tuple(x.shape) for x in operands)


def _numpy_dtype(name: str) -> np.dtype:
    name = name.removeprefix("torch.")
    try:
        return np.dtype(jnp.dtype(name))
    except TypeError:  # as complex32
        return np.dtype(np.void)


# ---- the function mode around a module's forward


class ProductMode(TorchFunctionMode):
    """The function mode of one call of one module. Products of its submodules belong to modes of their own."""

    def __init__(self, decisions: Decisions, tag: str, path: str, module: torch.nn.Module):
        super().__init__()
        self.decisions, self.tag, self.path, self.module = decisions, tag, path, module
        self.counts: dict[str, int] = {}
        self.is_decomposing = False  # whether a function of several products runs part by part

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.decisions.survey is not None:
            return self.decisions.survey.call_and_list(self, func, args, kwargs or {})
        return self.call_function(func, args, kwargs or {})

    def call_function(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, or the handler that takes its place."""
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # the method calls super(), where torch.compile of torch 2.11 stops
        handler = ALL_HANDLERS.get(func)
        if handler is None:
            return func(*args, **kwargs)
        result = handler(self, func, args, kwargs)
        return call_original(func, *args, **kwargs) if result is None else result

    # ---- one product

    def next_name(self, kind: str) -> str:
        """Return the name of the next product of a kind."""
        count = self.counts.get(kind, 0)
        self.counts[kind] = count + 1
        own = f"{kind}.{count}" if count else kind
        return f"{self.path}/{own}" if self.path else own

    def dot_general(
        self, kind: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: ProductAxes, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Compute a product with the axes of `jax.lax.dot_general`, bias added to its last axis. Return None if the policy leaves it."""
        replacement = self.find_replacement(kind, operands, numbers)
        if replacement is None:
            return None
        return self.apply_replacement(replacement, operands, numbers, bias)

    def find_replacement(self, kind: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: ProductAxes) -> Replacement | None:
        """Return a product's replacement, or None. Only shapes and dtypes of the operands count."""
        return self._decide(kind, "dot_general", operands, numbers, _result_shape(operands, numbers))

    def apply_replacement(
        self, replacement: Replacement, operands: tuple[torch.Tensor, torch.Tensor], numbers: ProductAxes, bias: Any = None
    ) -> torch.Tensor:
        """Compute a product by its replacement."""
        dtype = _autocast_dtype(operands[0])
        lhs, rhs, bias = (_cast_operand(value, dtype) for value in (*operands, bias))
        if self.decisions.capture is not None:
            self.decisions.capture_operands(replacement.name, (lhs, rhs), numbers)
        (left, right), (left_batch, right_batch) = numbers
        shape, result, seed = _result_shape(operands, numbers), torch.promote_types(lhs.dtype, rhs.dtype), _draw_seed(replacement)
        if replacement.recipe_name and rhs.ndim == 2 and not left_batch and tuple(left) == (lhs.ndim - 1,):
            flat = lhs.reshape(-1, lhs.shape[-1]) if lhs.ndim != 2 else lhs
            b = rhs.mT if tuple(right) == (1,) else rhs
            return matmul_op(flat, b, bias, None, None, seed, replacement.recipe_name, result).reshape(shape)
        d = dot_general_op(lhs, rhs, seed, replacement.function_name, list(left), list(right), list(left_batch), list(right_batch), result)
        return d if bias is None else d + bias

    # ---- one softmax, norm or activation

    @property
    def chooses_functions(self) -> bool:
        """True if softmaxes, norms and activations have a policy."""
        return self.decisions.functions is not None

    def find_kernel(self, call: FunctionCall) -> str | None:
        """Return the registered name of a function and its kernel, or None. Only shapes and dtypes of the tensors count."""
        call = call.widen()
        dtypes, devices = {x.dtype for x in call.tensors}, {x.device for x in call.tensors}
        unsupported = ""
        if not dtypes <= set(KERNEL_FLOATS):
            unsupported = (
                f"operands of {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}; kernels take {FLOAT_NAMES}"
            )
        elif len(devices) > 1:
            unsupported = "operands on several devices"
        facts = (
            call.kind, tuple(index(n) for n in call.x.shape), str(call.x.dtype), str(call.dtype or call.x.dtype), call.axis, call.eps,
            call.form, call.weight is not None, call.bias is not None, unsupported,
        )  # fmt: skip
        paths = (self._parameter_path(x) for x in (call.weight, call.bias) if x is not None)
        return decide_function_by_tag(self.tag, self.next_name(call.kind), facts, tuple(path for path in paths if path))

    def apply_kernel(self, call: FunctionCall, chosen: str) -> torch.Tensor:
        """Compute a function by the kernel that `find_kernel` has chosen."""
        call = call.widen()
        result = kernel_function_op(call.x, call.weight, call.bias, None, chosen, call.dtype or call.x.dtype)
        return result if call.shape is None else result.reshape(call.shape)

    def find_softmax(self, weights: torch.Tensor) -> str | None:
        """Return the kernel that is chosen for the softmax within attention, or None. Only shape and dtype of the weights count."""
        x = _cast_operand(weights, _autocast_dtype(weights))
        return self.find_kernel(_softmax_of_scores(x)) if self.chooses_functions else None

    def compute_softmax(self, chosen: str | None, scores: torch.Tensor) -> torch.Tensor:
        """Compute the softmax within attention by the chosen kernel, or by torch if it is None."""
        call = _softmax_of_scores(scores)
        return call.original(scores) if chosen is None else self.apply_kernel(call, chosen)

    def convolution(self, operands: tuple[torch.Tensor, torch.Tensor], windows: tuple[Any, ...]) -> torch.Tensor | None:
        """Compute a convolution. Return None if the policy leaves it.

        Args:
            operands: Arrays [batch, features, *space] and [features, features of a group, *window].
            windows: Stride, padding (low and high of each axis), dilation, groups.
        """
        dtype = _autocast_dtype(operands[0])
        x, w = operands
        stride, padding, dilation, groups = windows
        axes = tuple(range(x.ndim))
        shape = convolution_shape(x.shape, w.shape, stride, padding, dilation)
        replacement = self._decide("conv", "conv_general_dilated", (x, w), (axes, axes, axes), shape)
        if replacement is None:
            return None
        x, w = _cast_operand(x, dtype), _cast_operand(w, dtype)
        if self.decisions.capture is not None:
            self.decisions.capture_operands(replacement.name, (x, w), windows)
        lists, result = [list(each) for each in (stride, padding, dilation)], torch.promote_types(x.dtype, w.dtype)
        return convolution_op(x, w, _draw_seed(replacement), replacement.function_name, *lists, groups, result)

    def _decide(
        self, kind: str, primitive: str, operands: tuple[torch.Tensor, torch.Tensor], numbers: Any, shape: Any
    ) -> Replacement | None:
        lhs, rhs = operands
        dtypes = [_product_dtype(x, _autocast_dtype(lhs)) for x in operands]
        left, right, result = (tuple(index(n) for n in sizes) for sizes in (lhs.shape, rhs.shape, shape))  # numbers, also while compiling
        facts = (primitive, left, str(dtypes[0]), right, str(dtypes[1]), numbers, result)
        weights = (self._parameter_path(lhs), self._parameter_path(rhs))
        fits = dtypes[0] in DTYPES and dtypes[1] in DTYPES and lhs.device == rhs.device
        return decide_by_tag(self.tag, self.next_name(kind), facts, weights, fits)

    def _parameter_path(self, tensor: torch.Tensor) -> str | None:
        """Return the path of the parameter that a tensor is or views, "" for another module's parameter, or None for other tensors."""
        base = tensor if isinstance(tensor, torch.nn.Parameter) else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            return None
        for name, parameter in self.module.named_parameters():
            if parameter is base:
                return f"{self.path}.{name}" if self.path else name
        return ""


def _softmax_of_scores(scores: torch.Tensor) -> FunctionCall:
    return FunctionCall("softmax", scores, partial(torch.softmax, dim=-1))


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast brings the operands of products, or None."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _product_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the tensor's dtype, or the dtype of autocast."""
    return tensor.dtype if dtype is None or tensor.dtype not in DTYPES else dtype


def _cast_operand(tensor: Any, dtype: torch.dtype | None) -> Any:
    return tensor if tensor is None else tensor.to(_product_dtype(tensor, dtype))


def _result_shape(operands: tuple[torch.Tensor, torch.Tensor], numbers: ProductAxes) -> tuple[int, ...]:
    """Return the shape of a product."""
    (lhs, rhs), ((left, right), (left_batch, right_batch)) = operands, numbers
    return dot_general_shape(lhs.shape, rhs.shape, left, right, left_batch, right_batch)


def _draw_seed(replacement: Replacement) -> torch.Tensor | None:
    """Draw a seed from torch's generator. A checkpoint resets the generator, so that it draws the same seed again."""
    return torch.randint(0, 2**31 - 1, ()) if replacement.needs_seed else None


# ---- a run in which nothing is computed


class RunSurvey:
    """The products of one run in which nothing is computed."""

    def __init__(self, watcher: ProductRecorder) -> None:
        self.watcher, self.entries = watcher, []
        self._is_inside = False
        self._added = 0

    def add(self, entry: Entry) -> None:
        """Add a product or a function with its decision, or count another run of it."""
        self._added += 1
        for at, before in enumerate(self.entries):
            for kind in ("product", "function"):
                known, found = getattr(before, kind), getattr(entry, kind)
                if known is not None and found is not None and replace(known, repeats=1) == replace(found, repeats=1):
                    self.entries[at] = replace(before, **{kind: replace(known, repeats=(known.repeats or 1) + 1)})
                    return
        self.entries.append(entry)

    def call_and_list(self, mode: ProductMode, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function of torch in a module's mode, and list the products in it without a decision as left."""
        if self._is_inside or mode.is_decomposing:
            return mode.call_function(func, args, kwargs)
        self._is_inside, added, first = True, self._added, len(self.watcher.products)
        try:
            return mode.call_function(func, args, kwargs)
        finally:
            self._is_inside = False
            if added == self._added:
                self._add_hidden(mode.path, func, self.watcher.products[first:])
            del self.watcher.products[first:]

    def _add_hidden(self, path: str, func: Callable, hidden: list[DispatchedProduct]) -> None:
        for product in hidden:
            name = f"{path}/{func.__name__}" if path else func.__name__
            what = f"{product.name}, {product.hiding_kernel}" if product.hiding_kernel else product.name
            operands = " · ".join(describe_tensor(x) for x in product.operands)
            self.entries.append(Entry(name, None, False, f"{what} of {operands}; emulate takes no such product"))
