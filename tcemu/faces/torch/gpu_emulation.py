"""`emulate(model, gpu=...)`: a dispatch mode that computes every operation of a model as PyTorch does on a GPU, by `aten_operations`.

Autograd stands above the mode, so that backward passes and optimizers within the block are computed too. Functions that PyTorch decomposes
in another way on a CPU than on a GPU are taken before, by a function mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.faces.torch.compiled_models import compile_with_graphs, find_optimizer
from tcemu.faces.torch.cpu_formulas import attention_by_formula, empty_results, rms_norm_gradients
from tcemu.faces.torch.exact_operations import RANDOM, arguments_by_name, find_exact, flat_tensors
from tcemu.faces.torch.exchange import NUMPY_DTYPES, to_array, to_tensor
from tcemu.faces.torch.function_choices import FunctionChoices, GpuDefaults, has_fixed_orders
from tcemu.faces.torch.operation_report import OperationLine, OperationReport
from tcemu.faces.torch.watching import describe_tensor
from tcemu.operations.functional.torch_cuda.random_numbers import GpuGenerator
from tcemu.uses.replay.aten_operations import (
    ALIGNED,
    ALIGNMENT,
    BY_RULE,
    CHANNELS_LAST,
    COPIED,
    EXACT_RESULT,
    GPUS,
    LIBRARIES,
    NOT_KNOWN,
    OPERATIONS,
    PLACEMENT,
    Answer,
    Call,
    Evidence,
    bind_arguments,
)

UNKNOWN_CHOICES = ("raise", "warn", "leave")
ON_THIS_CPU, OTHER_BITS = "as PyTorch does on this CPU", "torch on this CPU, other bits than the GPU's"
IN_ONE_ORDER = (
    "in one order that the GPU may take, while its other results have the GPU's bits; torch.use_deterministic_algorithms(True) fixes the "
    "order, on the GPU too"
)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
OF_ATOMICS = ("in one of the orders that the GPU may take", "PTX, in one of the orders that the GPU may take")
MOST_DESCRIBED = 6  # operands that a line of a report names


# ---- where an operation runs


def _runs_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class ModulePaths:
    """The path of the module that runs now, by hooks, and for a backward pass by the sequence numbers of autograd's nodes."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.stack: list[str] = []
        self.by_node: dict[int, str] = {}
        self.hooks: list[Any] = []
        for path, module in model.named_modules():
            self.hooks.append(module.register_forward_pre_hook(self._enter(path)))
            self.hooks.append(module.register_forward_hook(self._leave(path), always_call=True))

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self.stack.append(path)

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            while self.stack and self.stack.pop() != path:
                pass

        return hook

    def find(self) -> tuple[str, bool]:
        """Return the path of the operation that runs now, and whether a backward pass runs it."""
        if _runs_backward():
            node = torch._C._current_autograd_node()
            return ("" if node is None else self.by_node.get(node._sequence_nr(), "")), True
        path = self.stack[-1] if self.stack else ""
        self.by_node.setdefault(torch.autograd._get_sequence_nr() - 1, path)  # type: ignore[attr-defined]
        return path, False

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()


# ---- the dispatch mode


class OperationMode(TorchDispatchMode):
    """Computes each operator that reaches PyTorch's dispatcher."""

    def __init__(self, emulation: GpuEmulation) -> None:
        super().__init__()
        self.emulation = emulation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func):  # in inference mode these come undecomposed
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.emulation.compute(func, args, kwargs or {})


class CompilableMode(OperationMode):
    """The same around a function of which `torch.compile` captures parts, which the mode leaves alone."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell Dynamo to capture under this mode."""
        return True


@lru_cache(maxsize=4096)
def _is_composite(func: Any) -> bool:
    """Return whether PyTorch has an operator only as a function of other ones."""
    keys = torch._C.DispatchKey
    return func.has_kernel_for_dispatch_key(keys.CompositeImplicitAutograd) and not func.has_kernel_for_dispatch_key(keys.CPU)


@lru_cache(maxsize=4096)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return index and name of the arguments to which an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


@lru_cache(maxsize=4096)
def _base_name(func: Any) -> str:
    """Return the name of an operator without "aten::", and without the "_" of those that write to their operand.

    `normal_` keeps it: `normal` is another operator.
    """
    name = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") and name != "normal_" else name


def _describe_operands(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtypes and shapes; of the long lists of an optimizer the first ones and the number of the others."""
    more = len(tensors) - MOST_DESCRIBED
    shown = [describe_tensor(x) for x in (tensors if more <= 1 else tensors[:MOST_DESCRIBED])]
    return " · ".join(shown) + (f" and {more} more" if more > 1 else "")


def _is_needed(result: int) -> bool:
    """Return whether a result of the operator that autograd runs now goes to a node: the gradient of an operand without one does not."""
    node = torch._C._current_autograd_node()
    following = () if node is None else node.next_functions
    return result >= len(following) or following[result][0] is not None


def _check_rule(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise NotModelled for what a rule does not see: where its operands begin in memory, and the switches of PyTorch's products."""
    for x in tensors if name in ALIGNED else ():
        begin = x.storage_offset() * x.element_size() % ALIGNMENT
        if begin and x.numel() > 1 and (x.is_contiguous() or name not in COPIED):
            raise NotModelled(
                f"an operand begins {begin} bytes after a multiple of {ALIGNMENT}; one that begins there, as a clone, has a rule"
            )
    if name in PRODUCTS and tensors:
        switches = torch.backends.cuda.matmul
        if tensors[0].dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            raise NotModelled('products of float32 in TF32 have no rule; torch.set_float32_matmul_precision("highest") is the default')
        kept = {torch.float16: "allow_fp16_reduced_precision_reduction", torch.bfloat16: "allow_bf16_reduced_precision_reduction"}
        if (switch := kept.get(tensors[0].dtype)) and getattr(switches, switch) is not True:
            raise NotModelled(f"products with {switch}={getattr(switches, switch)} have no rule; True is the default")


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    if dtype not in NUMPY_DTYPES:
        raise NotModelled(f"{dtype} has no rule; known are {', '.join(str(x).removeprefix('torch.') for x in NUMPY_DTYPES)} (exchange.py)")
    return NUMPY_DTYPES[dtype]


def _write_result(out: torch.Tensor, found: np.ndarray, is_operand: bool) -> torch.Tensor:
    """Write a result to its place. Where no operand is the place, dtype and shape may be others than a CPU's, as of a norm's moments."""
    if is_operand:
        return out.copy_(to_tensor(found).reshape(out.shape))
    if NUMPY_DTYPES.get(out.dtype) == found.dtype and tuple(out.shape) == found.shape:
        to_array(out)[...] = found  # NumPy wakes no threads, for which `copy_` waits on a machine that is busy
        return out
    tensor = to_tensor(found)
    return tensor.reshape(out.shape) if out.numel() == tensor.numel() else tensor


class GpuEmulation:
    """A model whose operations are computed as PyTorch computes them on a GPU, within `with`; `emulate(model, gpu=...)` returns it.

    Attributes:
        generator: The GPU's default generator of random numbers. `torch.manual_seed` and `torch.cuda.manual_seed` within the block seed it.
    """

    def __init__(self, model: torch.nn.Module, gpu: str, library: str, unknown: str, compiled: Any = None) -> None:
        if gpu not in GPUS:
            raise NotModelled(
                f"gpu={gpu!r}: launches, products and attention depend on the GPU; known are {', '.join(GPUS)} "
                "(replay/aten_operations.py, GPUS). tcemu.torch.emulate(model, policy) computes the products of other GPUs"
            )
        if library not in LIBRARIES:
            raise NotModelled(
                f"library={library!r}: kernels change between versions; known is {', '.join(LIBRARIES)} (replay/aten_operations.py)"
            )
        if unknown not in UNKNOWN_CHOICES:
            raise ValueError(f"unknown={unknown!r}: expected one of {', '.join(UNKNOWN_CHOICES)}")
        self.model, self.gpu, self.library, self.unknown = model, gpu, library, unknown
        self.generator = GpuGenerator()
        self.compiled = compiled  # graphs of `tcemu.inductor`
        self._compiled_model: Callable[..., Any] | None = None
        self._lines: dict[tuple, int] = {}
        self._warned: set[str] = set()
        self._open: list[Any] = []
        self._paths: ModulePaths | None = None

    # ---- the block

    def __enter__(self) -> GpuEmulation:
        if self._open:
            raise RuntimeError("emulate: this block is open already")
        if self.compiled is None:  # Dynamo would trace the hooks
            self._paths = ModulePaths(self.model)
        self._open = [GpuDefaults(self.generator), FunctionChoices(self), OperationMode(self)]
        for mode in self._open:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._open):
            mode.__exit__(*error)
        self._open = []
        if self._paths is not None:
            self._paths.remove()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.compiled is not None:
            self._compiled_model = self._compiled_model or self.compile(self.model)
            return self._compiled_model(*args, **kwargs)
        if self._open:
            return self.model(*args, **kwargs)
        with self:
            return self.model(*args, **kwargs)

    def report(self) -> OperationReport:
        """Return the operations so far: path of the module, operands, kernel, evidence; what is not known comes first."""
        return OperationReport([OperationLine(*key, runs=count) for key, count in self._lines.items()], self.gpu, self.library)

    def __repr__(self) -> str:
        return f"emulate({type(self.model).__name__}, gpu={self.gpu!r}, library={self.library!r}, unknown={self.unknown!r})"

    # ---- compiled graphs

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs by the compiled graphs of the block, as `torch.compile(function)` does on the GPU.

        Args:
            function: The model, or the `step` of an optimizer that was compiled on the GPU too.

        Raises:
            TypeError: The block has no compiled graphs.
            Unsupported: PyTorch here is of another version than the library, and the function is an optimizer's.
        """
        if self.compiled is None:
            raise TypeError("emulate: compile needs graphs, as emulate(model, gpu=..., compiled=tcemu.inductor.read(folder))")
        compiled, is_step = compile_with_graphs(function, self.compiled, self._run_graph), find_optimizer(function) is not None
        version = self.library.removeprefix("torch ")
        if is_step and not torch.__version__.startswith(f"{version}."):
            raise Unsupported(
                f"emulate: a compiled optimizer needs PyTorch {version} here, and this is {torch.__version__}: the order in which Dynamo "
                "takes an optimizer's tensors changes between versions"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled() and not self._open:
                raise NotModelled(
                    "compiled: outside of the block a model runs under torch.no_grad() alone, since its loss, the backward pass and the "
                    "optimizer would be this CPU's; train within `with tcemu.torch.emulate(...)`"
                )
            modes, self._open = self._open, []  # Dynamo captures nothing under a dispatch mode
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
            try:
                with CompilableMode(self) if is_step else nullcontext():
                    return compiled(*args, **kwargs)
            finally:
                for mode in modes:
                    mode.__enter__()
                self._open = modes

        return call

    def _run_graph(self, graph: Any, operands: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        is_open = any(isinstance(mode, OperationMode) for mode in _get_current_dispatch_mode_stack())  # as in a backward pass
        with nullcontext() if is_open else OperationMode(self):
            return graph.run(*operands, target=self.gpu, watch=self._add_launch)

    def _add_launch(self, part: Any) -> None:
        """List the launch of a kernel; an operator has listed itself."""
        if part.launch is None:
            return
        place, operands = (f"triton.{part.name}", "", _runs_backward()), _describe_operands(flat_tensors(part.operands))
        if part.launch.inexact:
            self._note_unknown(place, operands, "; ".join(part.launch.inexact), *OF_ATOMICS)
        else:
            self._add(place, operands, "PTX", Evidence(BY_RULE, "the PTX that torch.compile wrote, run by tcemu.ptx"))

    # ---- one operation

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute one call of an operator and list it."""
        name = _base_name(func)
        if func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        path, backward = ("", _runs_backward()) if self._paths is None else self._paths.find()
        place = (f"aten.{func._schema.name.removeprefix('aten::')}", path, backward)
        operands = _describe_operands(flat_tensors(args, kwargs))
        has_rule = name in OPERATIONS and not (name == "sort" and bool(kwargs.get("stable")))
        draws, before = name.startswith(RANDOM) and not name.endswith("_backward"), self.generator.offset
        opened: tuple[str, str, Any] | None = None  # why a sum's order is open, the kernel, and the result in one order
        try:
            if draws and backward:
                raise NotModelled("random numbers drawn within a backward pass, as of a checkpoint, whose generator PyTorch turns back")
            if not (has_rule and self._has_floats(func, args, kwargs)):
                exact = find_exact(func, name, args, kwargs)
                if exact is not None:
                    run, reason = exact
                    result = run(*args, **kwargs)
                    self._add(place, operands, "torch on this CPU", Evidence(EXACT_RESULT, reason))
                    return result
            if has_rule:
                answer, result = self._by_rule(func, name, args, kwargs)
                why = "; ".join(why for i, why in answer.open_results.items() if not backward or _is_needed(i))
                if not why:
                    self._add(place, operands, answer.kernel, answer.evidence)
                    return result
                opened = why, answer.kernel, result
            reason = f"{name} has no rule"
        except (NotModelled, Unsupported) as error:
            reason = str(error)
        if opened is not None:
            why, kernel, result = opened
            self._note_unknown(place, operands, f"the order of a sum is open: {why}", IN_ONE_ORDER, kernel)
            return result
        if (draws or arguments_by_name(func, args, kwargs).get("dropout_p")) and not backward and self.generator.offset == before:
            self.generator.lost = self.generator.lost or place[0]
        return self._leave(func, args, kwargs, place, operands, reason)

    def compute_alone(self, func: Any, *args: Any) -> Any:
        """Compute one call of an operator that the dispatcher would decompose."""
        with _disable_current_modes():
            return self.compute(func, args, {})

    def _add(self, place: tuple, operands: str, kernel: str, evidence: Evidence) -> None:
        key = (*place, operands, kernel, evidence.status, evidence.text)
        self._lines[key] = self._lines.get(key, 0) + 1

    def _has_floats(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Return whether an operand has elements that are floats. Without them a result has no terms, and every one is alike."""
        floats = [x for x in flat_tensors(args, kwargs) if x.is_floating_point()]
        return bool(floats) and (any(x.numel() for x in floats) or func._schema.name.startswith("aten::_scaled_dot_product"))

    def _by_rule(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Answer, Any]:
        operation = OPERATIONS[name]
        written = _written_arguments(func)
        outs = [kwargs[key] for _, key in written if key in kwargs] or [args[i] for i, _ in written if i < len(args)]
        given = {key: value for key, value in kwargs.items() if key not in {key for _, key in written} and key not in PLACEMENT}
        empty = flat_tensors(outs) if outs else empty_results(func, args, kwargs)
        if outs and name.startswith(RANDOM):
            empty_results(func, args, kwargs)  # PyTorch's checks of limits, rates and deviations
        _check_rule(name, flat_tensors(args, given))
        arrays = pytree.tree_map_only(torch.Tensor, to_array, (args, given))
        arguments = bind_arguments(operation, *arrays)
        arguments = {key: _numpy_dtype(value) if isinstance(value, torch.dtype) else value for key, value in arguments.items()}
        if name == "bernoulli" and outs and arguments["p"] is None:
            arguments["p"] = 0.5  # the default of the overload that writes to its operand
        dtypes = tuple(_numpy_dtype(x.dtype) for x in empty if isinstance(x, torch.Tensor))  # type: ignore[union-attr]
        tf32, deterministic = torch.backends.cudnn.allow_tf32, has_fixed_orders()
        answer = operation.compute(Call(name, arguments, dtypes, self.gpu, self.library, self.generator, tf32, deterministic))
        named = arguments_by_name(func, args, kwargs)
        for key, value in answer.updates.items():
            named[key].copy_(to_tensor(value))
        for i, out in enumerate(empty):
            if i >= len(answer.results):  # seeds and offsets of random numbers, and sizes
                if isinstance(out, torch.Tensor):
                    out.copy_(to_tensor(answer.states[i]).reshape(out.shape)) if i in answer.states else out.zero_()
            elif (found := answer.results[i]) is not None:
                empty[i] = _write_result(out, found, bool(outs))
            elif not outs:
                empty[i] = None
        if answer.memory_format is not None and empty[0] is not None:
            last = torch.channels_last if empty[0].ndim == 4 else torch.channels_last_3d
            empty[0] = empty[0].contiguous(memory_format=last if answer.memory_format == CHANNELS_LAST else torch.contiguous_format)
        if not func._schema.returns:
            return answer, None
        if outs:
            return answer, outs[0] if len(func._schema.returns) == 1 else tuple(outs)
        returns = func._schema.returns
        if len(returns) == 1 and str(returns[0].type) != "List[Tensor]":
            return answer, empty[0]
        return answer, tuple(empty) if len(returns) > 1 else empty

    def _leave(self, func: Any, args: tuple, kwargs: dict[str, Any], place: tuple, operands: str, reason: str) -> Any:
        self._note_unknown(place, operands, reason)
        name = _base_name(func)
        if name.startswith("_scaled_dot_product_") and "_for_cpu" not in name and "_math" not in name:
            result = attention_by_formula(func, args, kwargs)  # a CPU has no such kernel
        elif name == "_fused_rms_norm_backward":
            result = rms_norm_gradients(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        return result

    def leave_function(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leave a function that is one kernel on a GPU, and which a CPU decomposes into operators that have rules."""
        place = (f"torch.{func.__name__}", *(("", False) if self._paths is None else self._paths.find()))
        self.generator.lost = self.generator.lost or place[0]  # dropout between layers may draw
        reason = "a GPU runs one kernel, of cuDNN or PyTorch, which has no rule (torch_cuda/)"
        self._note_unknown(place, _describe_operands(flat_tensors(args, kwargs)), reason)
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _note_unknown(self, place: tuple, operands: str, reason: str, instead: str = ON_THIS_CPU, kernel: str = OTHER_BITS) -> None:
        """List an operation that is not known, and raise or warn as the user asked. instead: what is computed in its place."""
        where = (
            place[0]
            + (f" of {operands}" if operands else "")
            + (f" in {place[1]}" if place[1] else "")
            + (", backward" if place[2] else "")
        )
        if self.unknown == "raise":
            raise NotModelled(
                f"{where}: what {self.library} gives on {self.gpu} is not known: {reason}. "
                f"unknown='warn' or 'leave' computes such operations {instead}, and the report names them"
            )
        if self.unknown == "warn" and place[0] not in self._warned:
            self._warned.add(place[0])
            warnings.warn(f"{where}: not known on {self.gpu}, computed {instead}: {reason}", stacklevel=5)
        self._add(place, operands, kernel, Evidence(NOT_KNOWN, reason))
