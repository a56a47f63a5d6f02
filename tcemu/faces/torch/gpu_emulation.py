"""`emulate(model, gpu=...)`: a dispatch mode that computes every operation of a model as PyTorch does on a GPU, by `aten_operations`.

Autograd stands above the mode, so that backward passes and optimizers within the block are computed too. Functions that PyTorch decomposes
in another way on a CPU than on a GPU are taken before, by a function mode.
"""

from __future__ import annotations

import importlib
import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.results import Result, Table
from tcemu.base.text import table_lines, wrap_lines
from tcemu.faces.torch.watching import describe_tensor
from tcemu.operations.functional.torch_cuda.attention import CHOICES, CUDNN_HIDDEN, AttentionCall
from tcemu.operations.functional.torch_cuda.random_numbers import GpuGenerator
from tcemu.operations.functional.torch_cuda.sorting import NETWORK
from tcemu.uses.replay.aten_operations import (
    ALIGNED,
    ALIGNMENT,
    BY_RULE,
    COPIED,
    EXACT,
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
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
MOST_DESCRIBED = 6  # operands that a line of a report names
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NUMPY_DTYPES = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float16: np.dtype(np.float16), torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64), torch.int64: np.dtype(np.int64), torch.int32: np.dtype(np.int32), torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8), torch.uint8: np.dtype(np.uint8), torch.uint64: np.dtype(np.uint64), torch.bool: np.dtype(np.bool_),
}  # fmt: skip
RANDOM = (  # beginnings of the names of operators that draw random numbers
    "rand", "normal", "bernoulli", "native_dropout", "multinomial", "uniform", "exponential", "geometric", "cauchy", "log_normal",
    "binomial", "poisson", "_standard_gamma", "_sample_dirichlet", "rrelu_with_noise",
)  # fmt: skip


# ---- tensors and arrays


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array with its strides."""
    tensor = tensor.detach()
    if tensor.dtype not in NUMPY_DTYPES or tensor.device.type != "cpu":
        raise NotModelled(f"got {tensor.dtype} on {tensor.device}; tcemu.torch.emulate(gpu=...) takes real tensors on the CPU")
    tensor = tensor.resolve_neg()
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor of its dtype; the memory may be shared."""
    array = np.ascontiguousarray(array)
    array = array if array.flags.writeable else array.copy()
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _empty_results(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """Return empty tensors like the results, with the strides that PyTorch gives them. The operands are not read."""
    meta = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    given = pytree.tree_map_only(torch.Tensor, meta, (args, kwargs))
    try:
        found = func(*given[0], **given[1])
    except NotImplementedError as error:
        raise NotModelled(f"PyTorch does not say which shapes {func} gives") from error
    leaves = list(found) if isinstance(found, list | tuple) else [found]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if _is_tensor(x) else x for x in leaves]


def _write_result(out: torch.Tensor, found: torch.Tensor, is_operand: bool) -> torch.Tensor:
    """Write a result to its place. Where no operand is the place, dtype and shape may be others than a CPU's, as of a norm's moments."""
    if is_operand or (out.dtype == found.dtype and out.shape == found.shape):
        return out.copy_(found.reshape(out.shape))
    return found.reshape(out.shape) if out.numel() == found.numel() else found


# ---- the report


@dataclass(frozen=True)
class OperationLine:
    """Calls of one operator in one module whose operands have the same description.

    Attributes:
        operator: Name of the operator: "aten.mm".
        path: Path of the module, "" outside of modules.
        backward: Whether the backward pass called it.
        operands: Dtypes and shapes of the operands.
        kernel: The kernel or the order, or what runs in its place.
        status: "not known", "by rule", "measured" or "exact".
        evidence: The evidence; for what is not known, what a record would teach.
        runs: Number of calls.
    """

    operator: str
    path: str
    backward: bool
    operands: str
    kernel: str
    status: str
    evidence: str
    runs: int = 1


STATUS_ORDER = (NOT_KNOWN, "by rule", "measured", EXACT_RESULT)


class OperationReport(Result):
    """The operations of a block in the order of their evidence, unknown ones first: a sequence of `OperationLine`.

    Attributes:
        lines: A line for each operator, module and shape.
        gpu: The GPU.
        library: The library.
    """

    def __init__(self, lines: Sequence[OperationLine], gpu: str, library: str) -> None:
        self.lines, self.gpu, self.library = tuple(sorted(lines, key=lambda x: STATUS_ORDER.index(x.status))), gpu, library

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Any:
        return iter(self.lines)

    def __getitem__(self, index: int) -> OperationLine:
        return self.lines[index]

    @property
    def unknown(self) -> tuple[OperationLine, ...]:
        """The lines of operations whose result on the GPU is not known."""
        return tuple(line for line in self.lines if line.status == NOT_KNOWN)

    def counts(self) -> dict[str, int]:
        """Return the number of calls of each status."""
        return {status: sum(line.runs for line in self.lines if line.status == status) for status in STATUS_ORDER}

    def __str__(self) -> str:
        """Operations as text: those that move elements are counted only."""
        shown = [line for line in self.lines if line.status != EXACT_RESULT or not line.kernel.startswith("torch on this CPU")]
        rows = [
            [
                line.status,
                line.operator,
                line.path + " (backward)" * line.backward,
                line.operands,
                str(line.runs),
                line.kernel,
                line.evidence,
            ]
            for line in shown
        ]
        heads = ["status", "operator", "module", "operands", "runs", "kernel", "evidence"]
        counts = self.counts()
        summary = ", ".join(f"{counts[status]} {status}" for status in STATUS_ORDER)
        lines = table_lines(heads, rows, left=(0, 1, 2, 3, 5, 6)) if rows else []
        lines += wrap_lines(f"{self.library} on {self.gpu}: {sum(counts.values())} operations: {summary}")
        if counts[NOT_KNOWN]:
            lines += wrap_lines(
                "An operation that is not known ran as PyTorch runs it on this CPU. "
                f"tcemu.drift.record on an {self.gpu} records its operands and results; tcemu drift then says which arithmetic gives them."
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<OperationReport: {sum(line.runs for line in self.lines)} operations as {self.library} on {self.gpu}>"

    def table(self) -> Table:
        """Return a table with a row for each line."""
        heads = ("operator", "module", "backward", "operands", "kernel", "status", "evidence", "runs")
        rows = tuple((x.operator, x.path, x.backward, x.operands, x.kernel, x.status, x.evidence, x.runs) for x in self.lines)
        return Table(
            f"operations as {self.library} on {self.gpu}", heads, rows, {"gpu": self.gpu, "library": self.library, **self.counts()}
        )


# ---- where an operation runs


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
        if torch._C._current_graph_task_id() != -1:
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
    """Return the name of an operator without "aten::", and without the "_" of those that write to their operand."""
    name = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _describe_operands(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtypes and shapes; of the long lists of an optimizer the first ones and the number of the others."""
    more = len(tensors) - MOST_DESCRIBED
    shown = [describe_tensor(x) for x in (tensors if more <= 1 else tensors[:MOST_DESCRIBED])]
    return " · ".join(shown) + (f" and {more} more" if more > 1 else "")


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _flat_tensors(*trees: Any) -> list[torch.Tensor]:
    return [x for x in pytree.tree_leaves(trees) if _is_tensor(x)]


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
        if self.compiled is None:
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
            return self._call_compiled(args, kwargs)
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

    def _call_compiled(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the model by its compiled graphs: Dynamo captures it here too, only to learn the order of a graph's operands."""
        if torch.is_grad_enabled():
            raise NotModelled(
                "compiled: graphs of training have no rule, since what they keep for the backward pass is the compiler's choice; call the "
                "model under torch.no_grad() (faces/torch/gpu_emulation.py)"
            )
        run = self._compiled_model or torch.compile(self.model, backend=self._capture, fullgraph=True, dynamic=False)
        self._compiled_model = run
        try:
            return run(*args, **kwargs)
        except importlib.import_module("torch._dynamo.exc").BackendCompilerFailed as error:
            raise error.inner_exception from None

    def _capture(self, captured: Any, operands: Sequence[torch.Tensor]) -> Any:
        aot_autograd = importlib.import_module("torch._dynamo.backends.common").aot_autograd  # Dynamo takes seconds to import
        return aot_autograd(fw_compiler=self._find_graph, keep_inference_input_mutations=True)(captured, operands)

    def _find_graph(self, captured: Any, operands: Sequence[torch.Tensor]) -> Any:
        graph = self.compiled.find(operands)

        def run(*given: torch.Tensor) -> Any:
            with OperationMode(self):
                return graph.run(*given, target=self.gpu, watch=self._add_launch)

        return importlib.import_module("torch._functorch.aot_autograd").make_boxed_func(run)

    def _add_launch(self, part: Any) -> None:
        """List the launch of a kernel; an operator has listed itself."""
        if part.launch is not None:
            doubts = "; ".join(part.launch.inexact)
            evidence = Evidence(NOT_KNOWN, doubts) if doubts else Evidence(BY_RULE, "the PTX that torch.compile wrote, run by tcemu.ptx")
            self._add((f"triton.{part.name}", "", False), _describe_operands(_flat_tensors(part.operands)), "PTX", evidence)

    # ---- one operation

    def compute(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute one call of an operator and list it."""
        name = _base_name(func)
        if func.is_view or func.namespace != "aten":
            return func(*args, **kwargs)
        path, backward = ("", False) if self._paths is None else self._paths.find()
        place = (f"aten.{func._schema.name.removeprefix('aten::')}", path, backward)
        operands = _describe_operands(_flat_tensors(args, kwargs))
        has_rule = name in OPERATIONS and not (name == "sort" and bool(kwargs.get("stable")))
        draws, before = name.startswith(RANDOM) and not name.endswith("_backward"), self.generator.offset
        try:
            if draws and backward:
                raise NotModelled("random numbers drawn within a backward pass, as of a checkpoint, whose generator PyTorch turns back")
            if not (has_rule and self._has_floats(func, args, kwargs)):
                exact = self._find_exact(func, name, args, kwargs)
                if exact is not None:
                    run, reason = exact
                    result = run(*args, **kwargs)
                    self._add(place, operands, "torch on this CPU", Evidence(EXACT_RESULT, reason))
                    return result
            if has_rule:
                answer, result = self._by_rule(func, name, args, kwargs)
                self._add(place, operands, answer.kernel, answer.evidence)
                return result
            reason = f"{name} has no rule"
        except (NotModelled, Unsupported) as error:
            reason = str(error)
        if (draws or _by_name(func, args, kwargs).get("dropout_p")) and not backward and self.generator.offset == before:
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
        floats = [x for x in _flat_tensors(args, kwargs) if x.is_floating_point()]
        return bool(floats) and (any(x.numel() for x in floats) or func._schema.name.startswith("aten::_scaled_dot_product"))

    def _by_rule(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Answer, Any]:
        operation = OPERATIONS[name]
        written = _written_arguments(func)
        outs = [kwargs[key] for _, key in written if key in kwargs] or [args[i] for i, _ in written if i < len(args)]
        given = {key: value for key, value in kwargs.items() if key not in {key for _, key in written} and key not in PLACEMENT}
        empty = _flat_tensors(outs) if outs else _empty_results(func, args, kwargs)
        _check_rule(name, _flat_tensors(args, given))
        arrays = pytree.tree_map_only(torch.Tensor, to_array, (args, given))
        arguments = bind_arguments(operation, *arrays)
        arguments = {key: NUMPY_DTYPES[value] if isinstance(value, torch.dtype) else value for key, value in arguments.items()}
        if name == "bernoulli" and outs and arguments["p"] is None:
            arguments["p"] = 0.5  # the default of the overload that writes to its operand
        dtypes = tuple(NUMPY_DTYPES[x.dtype] for x in empty if _is_tensor(x))  # type: ignore[union-attr]
        tf32 = torch.backends.cudnn.allow_tf32
        answer = operation.compute(Call(name, arguments, dtypes, self.gpu, self.library, self.generator, tf32))
        named = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs
        for key, value in answer.updates.items():
            named[key].copy_(to_tensor(value))
        for i, out in enumerate(empty):
            if i >= len(answer.results):  # seeds and offsets of random numbers, and sizes
                if isinstance(out, torch.Tensor):
                    out.copy_(to_tensor(answer.states[i]).reshape(out.shape)) if i in answer.states else out.zero_()
            elif (found := answer.results[i]) is not None:
                empty[i] = _write_result(out, to_tensor(found), bool(outs))
            elif not outs:
                empty[i] = None
        if not func._schema.returns:
            return answer, None
        if outs:
            return answer, outs[0] if len(func._schema.returns) == 1 else tuple(outs)
        returns = func._schema.returns
        if len(returns) == 1 and str(returns[0].type) != "List[Tensor]":
            return answer, empty[0]
        return answer, tuple(empty) if len(returns) > 1 else empty

    def _find_exact(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str] | None:
        """Return what computes an operation whose bits every correct implementation has, and why it has them; None for others."""
        if name.startswith(RANDOM):
            return None
        if name in SPECIAL:
            return SPECIAL[name](func, args, kwargs)
        if name in EXACT:
            return func, EXACT[name]
        tensors = _flat_tensors(args, kwargs)
        if any(_is_inexact(x) and x.numel() for x in tensors):
            return None
        if any(map(_is_inexact, tensors)):
            return func, "no elements"
        if func._schema.is_mutable:
            return func, "integers"
        found = func(*args, **kwargs)  # of integers, but a quotient or a root is a float
        exact = bool(_flat_tensors(found)) and not any(map(_is_inexact, _flat_tensors(found)))
        return (lambda *_, **__: found, "integers") if exact else None

    def _leave(self, func: Any, args: tuple, kwargs: dict[str, Any], place: tuple, operands: str, reason: str) -> Any:
        self._note_unknown(place, operands, reason)
        name = _base_name(func)
        if name.startswith("_scaled_dot_product_") and "_for_cpu" not in name and "_math" not in name:
            result = _attention_by_formula(func, args, kwargs)  # a CPU has no such kernel
        elif name == "_fused_rms_norm_backward":
            result = _rms_norm_gradients(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        return result

    def leave_function(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Leave a function that is one kernel on a GPU, and which a CPU decomposes into operators that have rules."""
        place = (f"torch.{func.__name__}", *(("", False) if self._paths is None else self._paths.find()))
        self.generator.lost = self.generator.lost or place[0]  # dropout between layers may draw
        reason = "a GPU runs one kernel, of cuDNN or PyTorch, which has no rule (torch_cuda/)"
        self._note_unknown(place, _describe_operands(_flat_tensors(args, kwargs)), reason)
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _note_unknown(self, place: tuple, operands: str, reason: str) -> None:
        """List an operation that is not known, and raise or warn as the user asked."""
        where = (
            place[0]
            + (f" of {operands}" if operands else "")
            + (f" in {place[1]}" if place[1] else "")
            + (", backward" if place[2] else "")
        )
        if self.unknown == "raise":
            raise NotModelled(
                f"{where}: what {self.library} gives on {self.gpu} is not known: {reason}. "
                "unknown='warn' or 'leave' computes such operations as PyTorch does on this CPU, and the report names them"
            )
        if self.unknown == "warn" and place[0] not in self._warned:
            self._warned.add(place[0])
            warnings.warn(f"{where}: not known on {self.gpu}, computed as on this CPU: {reason}", stacklevel=5)
        self._add(place, operands, "torch on this CPU, other bits than the GPU's", Evidence(NOT_KNOWN, reason))


def _sort(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """A stable sort, and one of integers: CUDA's is stable for more than 32 elements, and a CPU's need not be."""
    given = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs
    x, dim, is_stable = given["self"], given.get("dim", -1), bool(given.get("stable"))
    if not is_stable and x.ndim and x.shape[dim] <= NETWORK and bool((x.sort(dim=dim).values.diff(dim=dim) == 0).any()):
        raise NotModelled(f"sort: equal integers among {x.shape[dim]}: CUDA's network for up to {NETWORK} is not stable")
    options = {"stable": True, "dim": dim, "descending": given.get("descending", False)}
    return lambda *_, **__: torch.ops.aten.sort.stable(x, **options), "moves elements by a stable sort"


def _arange(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    numbers = [x for x in args if isinstance(x, bool | int | float)]
    dtype = kwargs.get("dtype")
    if any(float(x) != int(x) for x in numbers) or (dtype in (torch.bfloat16, torch.float16) and max(map(abs, numbers)) > 256):
        raise NotModelled(f"{func._schema.name}: steps that are no integers are rounded in an order that is not known")
    return func, "integers"


SATURATING = {torch.int64: torch.int64, torch.uint8: torch.int64} | dict.fromkeys((torch.int32, torch.int16, torch.int8), torch.int32)


def _saturate(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return floats as integers that the GPU's cvt gives, which saturates, where some lie beyond them. A CPU gives other ones of these.

    On an H200 27 numbers of each float dtype become these integers of each dtype.
    """
    wide = SATURATING.get(dtype) if x.is_floating_point() and dtype is not None else None
    if wide is None:
        return x
    info, number = torch.iinfo(wide), x.double()
    above, below = number >= 2.0 ** (info.bits - 1), number < -(2.0 ** (info.bits - 1))
    if not bool((above | below | number.isnan()).any()):
        return x
    of_nan = info.min if wide == torch.int64 else 0
    found = torch.where(above | below | number.isnan(), 0.0, number).to(wide)
    return found.masked_fill(above, info.max).masked_fill(below, info.min).masked_fill(number.isnan(), of_nan)


def _convert(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    return lambda x, *_, **__: func(_saturate(x, kwargs.get("dtype")), *args[1:], **kwargs), "moves elements"


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    return lambda to, x, *_, **__: func(to, _saturate(x, to.dtype), *args[2:], **kwargs), "moves elements"


def _extreme_of_all(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """The largest or the least of all elements: of zeros of both signs the order decides which one it is."""
    given = _by_name(func, args, kwargs)
    x = given["self"]
    zeros = x[x == 0] if len(given) == 1 and x.is_floating_point() else x[:0]
    if zeros.numel() and bool(zeros.signbit().any()) and not bool(zeros.signbit().all()) and func(*args, **kwargs) == 0:
        raise NotModelled(f"{func._schema.name}: got zeros of both signs; amax and amin have a rule for them (replay/aten_operations.py)")
    return func, "takes one of its operands"


def _by_name(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs


def _repeats(places: torch.Tensor) -> bool:
    """Return whether a column has an index twice."""
    return bool((places.sort(dim=0).values.diff(dim=0) == 0).any())


def _columns(index: torch.Tensor, dim: int) -> torch.Tensor:
    return index if index.ndim < 2 else index.movedim(dim, 0).flatten(1)


def _add_to_indices(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """Additions at indices are exact IEEE operations if no index repeats; atomics add the others in any order."""
    given = _by_name(func, args, kwargs)
    if not given["self"].is_floating_point():
        return func, "integers"
    if _repeats(_columns(given["index"], given["dim"])):
        raise NotModelled(f"{func._schema.name}: the order of additions at equal indices is open: CUDA adds them by atomics")
    return func, "one IEEE addition for each element: no index repeats"


def _scatter(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    """Moves to indices are exact if no index repeats; of others CUDA leaves open which element stays."""
    given = _by_name(func, args, kwargs)
    if given.get("reduce") is not None and given["self"].is_floating_point():
        raise NotModelled(f"{func._schema.name}: reduce={given['reduce']!r}: CUDA reduces by atomics, in an order that is open")
    if given.get("reduce") is None and "src" in given and _repeats(_columns(given["index"], given["dim"])):
        raise NotModelled(f"{func._schema.name}: which element stays at equal indices is open on CUDA")
    return func, "moves elements"


def _index_put(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    given = _by_name(func, args, kwargs)
    if given.get("accumulate", False):
        if given["self"].is_floating_point():
            raise NotModelled(f"{func._schema.name}: the order of additions at equal indices is not known")
        return func, "integers"
    if given["values"].numel() > 1:
        places = torch.arange(given["self"].numel()).reshape(given["self"].shape)
        if _repeats(torch.ops.aten.index(places, given["indices"]).flatten()):
            raise NotModelled(f"{func._schema.name}: which element stays at equal indices is open on CUDA")
    return func, "moves elements"


def _bincount(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str]:
    if _by_name(func, args, kwargs).get("weights") is not None:
        raise NotModelled("bincount: the order in which weights are added is open: CUDA adds them by atomics")
    return func, "counts"


def _choose_element(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable, str] | None:
    """Operators that also give the index of what they take, of one of some equal elements."""
    given = _by_name(func, args, kwargs)
    x = given["self"]
    if x.is_floating_point():
        return None
    if x.ndim and len(func._schema.returns) > 1 and _repeats(_columns(x, given.get("dim", -1))):
        raise NotModelled(f"{func._schema.name}: which of equal integers CUDA takes is not known")
    return func, "integers"


SPECIAL: dict[str, Callable[..., tuple[Callable, str] | None]] = {
    "sort": _sort,
    "arange": _arange,
    "_to_copy": _convert,
    "copy": _copy,
    **dict.fromkeys(("max", "min"), _extreme_of_all),
    "bincount": _bincount,
    "scatter": _scatter,
    **dict.fromkeys(("index_put", "_index_put_impl"), _index_put),
    **dict.fromkeys(("index_add", "scatter_add"), _add_to_indices),
    **dict.fromkeys(("topk", "kthvalue", "median", "nanmedian", "mode"), _choose_element),
}


# ---- what PyTorch decides before its dispatcher


class GpuDefaults:
    """A context in which PyTorch decides, before its dispatcher, as it does for tensors on a GPU without this mode. It is of one thread.

    Seeds of GPUs reach the generators of the thread's blocks. Optimizers and `clip_grad_norm_` take their foreach forms by default.
    Multi-head attention and transformer layers take their fused forms where no gradient is needed, and these have no rule:
    `has_torch_function` would tell them that a mode is open.
    """

    _lock, _originals = threading.Lock(), list[tuple[Any, str, Any]]()  # of all blocks
    _open: ClassVar = defaultdict[int, list[GpuGenerator]](list)  # generators of the open blocks, by threads

    def __init__(self, generator: GpuGenerator) -> None:
        self._generator = generator

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        with self._lock:
            if not self._open:
                for name, attribute, answer in DEFAULTS:
                    module = importlib.import_module(name)
                    self._originals.append((module, attribute, original := getattr(module, attribute)))
                    setattr(module, attribute, partial(self._answer, original, answer))
            self._open[self._thread].append(self._generator)

    def _answer(self, original: Callable, answer: Callable, *args: Any) -> Any:
        return answer(original, *args) if threading.get_ident() in self._open else original(*args)

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._open[self._thread].pop()
            if not self._open[self._thread]:
                del self._open[self._thread]
            while not self._open and self._originals:
                setattr(*self._originals.pop())


def _foreach_devices(original: Callable[[], list[str]]) -> list[str]:
    return [*original(), "cpu"]


def _seed_generators(original: Callable[[int], None], seed: int) -> None:
    for generator in GpuDefaults._open[threading.get_ident()]:
        generator.manual_seed(seed)
    original(seed)


def _keeps_from_fused_form(original: Callable, operands: Sequence[Any]) -> bool:
    if torch.is_autocast_enabled("cpu"):  # on a GPU too it keeps layers from their fused forms
        return original(operands)
    return any(hasattr(type(x), "__torch_function__") and type(x) not in (torch.Tensor, torch.nn.Parameter) for x in operands)


DEFAULTS = (
    ("torch.utils._foreach_utils", "_get_foreach_kernels_supported_devices", _foreach_devices),
    ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices", _foreach_devices),
    ("torch.overrides", "has_torch_function", _keeps_from_fused_form),  # as torch.nn's modules call it
    ("torch.cuda", "manual_seed", _seed_generators),
    ("torch.cuda", "manual_seed_all", _seed_generators),  # as torch.manual_seed calls it
)

# Functions that autocast computes in float32 on a GPU. Source: PyTorch 2.11.0, aten/src/ATen/autocast_mode.h (AT_FORALL_FP32 and others).
FLOAT32_UNDER_AUTOCAST = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "pow",
    "softplus", "layer_norm", "native_layer_norm", "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss",
    "nll_loss", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
    "soft_margin_loss", "triplet_margin_loss", "binary_cross_entropy_with_logits", "cross_entropy", "dist", "pdist", "cdist",
    "renorm", "logsumexp", "prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "norm", "__pow__", "__rpow__", "rms_norm",
}  # fmt: skip
LOW_PRECISION = (torch.bfloat16, torch.float16)
# Functions that are one kernel on a GPU, while a CPU calls products and activations. Source: PyTorch 2.11.0, aten/src/ATen/native/RNN.cpp;
# tests/gpu_runs/torch_dispatched.py on an H200.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell")


class FunctionChoices(TorchFunctionMode):
    """Takes the functions that PyTorch decomposes in another way on a CPU than on a GPU, and autocast's list of a GPU."""

    def __init__(self, emulation: GpuEmulation) -> None:
        super().__init__()
        self.emulation = emulation
        self._open: list[Callable] = []  # functions whose bodies run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return scaled_dot_product_attention(self.emulation, *args, **kwargs)
        if func in (torch.nn.functional.rms_norm, torch.rms_norm):
            return rms_norm(self.emulation, func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if func is torch.dropout:
            return dropout(func, *args, **kwargs)
        if name in RECURRENT:
            return self.emulation.leave_function(func, args, kwargs)
        if torch.is_autocast_enabled("cpu") and name in FLOAT32_UNDER_AUTOCAST:
            widen = lambda x: x.float() if x.dtype in LOW_PRECISION else x
            with torch.autocast("cpu", enabled=False):
                args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (args, kwargs))
                return func(*args, **kwargs)
        if func in self._open or (body := _python_body(func)) is None:  # a body may hand its function to a mode by another one
            return func(*args, **kwargs)
        self._open.append(func)
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self._open.pop()


@lru_cache(maxsize=1024)
def _python_body(func: Any) -> Callable | None:
    """Return a function that does not hand itself to a mode, which then sees what it calls; None for a function that calls no others.

    These are functions of torch.nn.functional, and backward passes, which may compute a forward again.
    """
    runs_backward = func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
    if not isinstance(func, FunctionType) or not (runs_backward or func.__module__ in ("torch.nn.functional", "torch.functional")):
        return None
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), lambda *_: False)
    body = FunctionType(func.__code__, func.__globals__ | never, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def dropout(func: Callable[..., torch.Tensor], input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU.

    Source: PyTorch 2.11.0, aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`); the form that writes to its operand has none.
    """
    if train and 0 < p < 1 and input.numel():
        return torch.ops.aten.native_dropout(input, p, train)[0]
    return func(input, p, train)


def rms_norm(
    emulation: GpuEmulation,
    func: Callable[..., torch.Tensor],
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU, unless it composes the norm there too.

    Source: PyTorch 2.11.0, aten/src/ATen/native/layer_norm.cpp (`rms_norm_symint`).
    """
    if not input.numel() or (weight is not None and weight.dtype != input.dtype):
        return func(input, normalized_shape, weight, eps)
    if len(normalized_shape) == 1 and input.dtype in FLOAT_DTYPES[:3]:
        return _RmsNorm.apply(emulation, input, list(normalized_shape), weight, eps)
    return emulation.compute_alone(torch.ops.aten._fused_rms_norm.default, input, list(normalized_shape), weight, eps)[0]


class _RmsNorm(torch.autograd.Function):
    """RMS norm and its gradients by operators that a CPU decomposes before a mode sees them."""

    @staticmethod
    def forward(
        ctx: Any, emulation: GpuEmulation, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> Any:
        out, inverse = emulation.compute_alone(torch.ops.aten._fused_rms_norm.default, x, shape, weight, eps)
        ctx.save_for_backward(x, inverse, weight)
        ctx.emulation, ctx.shape = emulation, shape
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, inverse, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[1], ctx.needs_input_grad[3]]
        run = torch.ops.aten._fused_rms_norm_backward.default
        found = ctx.emulation.compute_alone(run, grads[0], x, ctx.shape, inverse, weight, wanted)
        return None, found[0], None, found[1], None


def _rms_norm_gradients(
    grad: torch.Tensor, x: torch.Tensor, shape: Sequence[int], inverse: torch.Tensor, weight: torch.Tensor | None, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Compute the gradients of RMS norm by their formula in float32: a CPU has no such operator."""
    scaled, axes = x.float() * inverse.float(), tuple(range(-len(shape), 0))
    inner = grad.float() * (1.0 if weight is None else weight.float())
    of_x = (inner - scaled * (inner * scaled).mean(axes, keepdim=True)) * inverse.float()
    of_weight = None if weight is None else (grad.float() * scaled).reshape(-1, *weight.shape).sum(0).to(weight.dtype)
    return (of_x.to(x.dtype) if wanted[0] else None), (of_weight if wanted[1] else None)


def scaled_dot_product_attention(
    emulation: GpuEmulation,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the operator that PyTorch calls on a GPU. Autograd knows its gradient, an operator too.

    Source: PyTorch 2.11.0, aten/src/ATen/native/transformers/attention.cpp (`scaled_dot_product_attention`).
    """
    needs_sums = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    backend = _choose_backend(emulation, query, key, value, attn_mask, is_causal)
    if backend == "math":
        run, given = torch.ops.aten._scaled_dot_product_attention_math, {"scale": scale, "enable_gqa": enable_gqa}
        if not dropout_p:
            return run(query, key, value, attn_mask, 0.0, is_causal, None, **given)[0]
        wide = [x.float() if x.dtype in LOW_PRECISION else x for x in (query, key, value)]
        weights = run(*wide[:2], wide[2][..., :0], attn_mask, 0.0, is_causal, None, **given)[1]  # of no values: the weights alone
        values = wide[2].repeat_interleave(query.shape[-3] // value.shape[-3], -3) if enable_gqa else wide[2]
        return (dropout(torch.dropout, weights, dropout_p, True) @ values).to(query.dtype)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = torch.scalar_tensor(CUDNN_HIDDEN if backend == "cudnn" else -math.inf, dtype=query.dtype)
        attn_mask = torch.where(attn_mask, torch.scalar_tensor(0.0, dtype=query.dtype), hidden)
    if backend == "cudnn":
        run = torch.ops.aten._scaled_dot_product_cudnn_attention
        return run(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, False, scale=scale)[0]
    if backend == "efficient":
        run = torch.ops.aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, needs_sums, dropout_p, is_causal, scale=scale)[0]
    size = query.shape[-1]
    padded = [torch.nn.functional.pad(x, (0, -size % 8)) if size % 8 else x for x in (query, key, value)]
    scale = size**-0.5 if scale is None else scale
    return torch.ops.aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :size]


def _choose_backend(
    emulation: GpuEmulation, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool
) -> str:
    """Return the backend that PyTorch takes on the GPU, of those that are switched on."""
    if query.ndim != 4 or query.dtype not in NUMPY_DTYPES:
        return "math"
    call = AttentionCall(
        tuple(query.shape), tuple(key.shape), value.shape[-1], NUMPY_DTYPES[query.dtype], causal, mask is not None, emulation.gpu
    )
    switches = torch.backends.cuda
    enabled = {
        "cudnn": switches.cudnn_sdp_enabled(), "flash": switches.flash_sdp_enabled(), "efficient": switches.mem_efficient_sdp_enabled(),
        "math": switches.math_sdp_enabled(),
    }  # fmt: skip
    found = [name for name, conditions in CHOICES.items() if enabled[name] and all(condition.holds(call) for condition in conditions)]
    if not found:
        raise RuntimeError(f"scaled_dot_product_attention: no backend that is switched on takes {call}")
    return found[0]


def _attention_by_formula(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Compute a fused attention that is not known, or its gradients, by its formula in float32. Dropout is left out."""
    given = dict(zip([x.name for x in func._schema.arguments], args, strict=False)) | kwargs
    query, key, value = (given[name].float() for name in ("query", "key", "value"))
    group = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if given.get("scale") is None else given["scale"]
    scores = query @ keys.mT * scale
    if given.get("attn_bias") is not None:
        scores = scores + given["attn_bias"].float()
    if given.get("is_causal", False):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    weights = torch.nan_to_num((scores - sums).exp())
    if "logsumexp" not in given:
        empty = _empty_results(func, args, kwargs)
        for out, found in zip(empty, (weights @ values, sums), strict=False):
            if isinstance(out, torch.Tensor) and out.numel() == found.numel():
                out.copy_(found.reshape(out.shape))
        return tuple(x.zero_() if i > 1 and isinstance(x, torch.Tensor) else x for i, x in enumerate(empty))
    grad, out = (given["grad_out_" if "grad_out_" in given else "grad_out"].float(), given["out"].float())
    of_scores = weights * (grad @ values.mT - (grad * out).sum(-1, keepdim=True)) * scale
    heads = lambda x: x.unflatten(1, (-1, group)).sum(2).to(given["query"].dtype)
    found = ((of_scores @ keys).to(given["query"].dtype), heads(of_scores.mT @ query), heads(weights.mT @ grad))
    return found if len(func._schema.returns) == 3 else (*found, None)
