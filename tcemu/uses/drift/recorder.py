"""Record every operation of a run of torch or JAX in one file. This module imports nothing of tcemu: copy it to the machine that runs.

    with record("run_a.drift", model) as run:      # torch: forward, backward and several steps
        loss = model(x).sum()
        loss.backward()
        run.next_step()

    record(fn, "run_a.drift")(*arguments)          # JAX: operation by operation

The file is a sequence of complete safetensors files, one for each operation. A plain safetensors file has its header first, so nothing can
be appended to it; a sequence of them can be appended to, and the file of a killed run is readable up to its last complete operation.
`tcemu.drift.locate` compares two records.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

KIND, VERSION = "tcemu drift record", "1"
BUDGET = 1 << 30  # bytes of operands and results that a record keeps
DIGEST_BYTES = 16
SAFETENSORS_NAMES = {  # NumPy's name of a dtype, and safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
OWN_FILE = os.path.abspath(__file__)
VARIABLES = (  # of a process, by which cuBLAS or PyTorch choose other kernels
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT", "DISABLE_ADDMM_CUDA_LT",
)  # fmt: skip
LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")  # packages with PyTorch's kernels

Substitute = Callable[[int, str, list[np.ndarray], list[np.ndarray]], "list[np.ndarray] | None"]


def record(
    where: str | os.PathLike | Callable,
    model: Any = None,
    *,
    budget: int = BUDGET,
    rows: Sequence[int] | None = None,
    compiled: bool = False,
    whole: Sequence[str] = (),
    substitute: Substitute | None = None,
) -> Any:
    """Record the operations of a run.

    Args:
        where: The file to write, for torch: `with record(path, model) as run:`. Or a function of JAX: `record(fn)(*arguments)` runs it and
            returns the recording.
        model: The torch module whose paths name the operations, or None. For a function of JAX: the file to write, or None for memory.
        budget: Bytes of operands and results that are kept. Beyond it only digests are written. Equal tensors are kept once.
        rows: Rows of the first axis that are kept, of tensors that have them all. None: whole tensors.
        compiled: JAX: the function is compiled as one program, and its intermediate values are further results. torch: the calls of
            modules are recorded, not the operations in them, so that compiled modules run as compiled.
        whole: JAX: names of jitted functions within `fn` that are recorded as one operation each, as a fused kernel is.
        substitute: Called as substitute(number, name, operands, results) after each operation. The arrays that it returns take the place
            of the results; None leaves them. Not for `compiled`.

    Returns:
        A `Recording`, which is a context manager; or a function with the arguments of `fn` that returns a `Recording`.

    Raises:
        TypeError: An argument has another type.
        ValueError: budget or rows are negative, or substitute is given with compiled.
        FileExistsError: The file exists. A record is never overwritten.
    """
    if not isinstance(budget, int) or budget < 0:
        raise ValueError(f"budget={budget!r}: expected a number of bytes")
    if rows is not None and (not all(isinstance(row, int) and row >= 0 for row in rows) or not rows):
        raise ValueError(f"rows={rows!r}: expected row numbers, 0 or more")
    if compiled and substitute is not None:
        raise ValueError("substitute: a compiled program has no place for it; leave compiled out")
    if callable(where):
        fn, path = where, model
        if path is not None and not isinstance(path, str | os.PathLike):
            raise TypeError(f"record(fn, path): got a path of type {type(path).__name__}; expected a file name, or None")
        return lambda *args, **kwargs: _record_jax(
            fn, args, kwargs, Recording(path, budget, rows, substitute, "jax"), compiled, tuple(whole)
        )
    if not isinstance(where, str | os.PathLike):
        raise TypeError(f"record: got {type(where).__name__}; expected a file name, or a function of JAX")
    return TorchRecording(Recording(where, budget, rows, substitute, "torch"), model, compiled)


class Recording:
    """A record that is being written.

    Attributes:
        path: The file, or None for a record in memory.
        result: What the recorded function of JAX returned.
        count: Number of operations so far.
    """

    def __init__(
        self, path: str | os.PathLike | None, budget: int, rows: Sequence[int] | None, substitute: Substitute | None, framework: str
    ) -> None:
        self.path = None if path is None else Path(path)
        self.result: Any = None
        self.count, self.step = 0, 0
        self._budget, self._rows, self._substitute = budget, None if rows is None else list(rows), substitute
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        try:
            self._file: Any = BytesIO() if self.path is None else open(self.path, "xb")  # noqa: SIM115
        except FileExistsError:
            raise FileExistsError(f"{self.path}: this file exists, and a record is never overwritten; name another or remove it") from None
        version = getattr(sys.modules.get(framework), "__version__", "")
        facts = {"kind": KIND, "version": VERSION, "framework": f"{framework} {version}".strip()}
        self._write_part(facts | {"environment": json.dumps(_environment(framework))}, {})

    def content(self) -> bytes:
        """Return the bytes of a record in memory."""
        return self._file.getvalue() if self.path is None else self.path.read_bytes()

    def next_step(self) -> None:
        """Begin the next training step."""
        self.step += 1

    def close(self) -> None:
        """Write the end of the record, which says that the run was not killed."""
        with self._lock:
            self._write_part({"end": str(self.count)}, {})
            if self.path is not None:
                self._file.close()

    def substitute(self, name: str, operands: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray] | None:
        """Return what takes the place of the next operation's results, or None."""
        return None if self._substitute is None else self._substitute(self.count, name, operands, results)

    def add(
        self,
        name: str,
        operands: Sequence[np.ndarray],
        results: Sequence[np.ndarray],
        *,
        path: str,
        source: str,
        backward: bool,
        attributes: dict[str, Any],
        strides: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        """Append one operation. strides: those of each operand in elements, None for an operand that is contiguous."""
        with self._lock:
            tensors: dict[str, np.ndarray] = {}
            described = {
                "index": self.count,
                "name": name,
                "path": path,
                "source": source,
                "pass": "backward" if backward else "forward",
                "step": self.step,
                "attributes": attributes,
                "operands": [
                    self._describe(x, tensors) | ({} if own is None else {"strides": list(own)})
                    for x, own in zip(operands, strides or [None] * len(operands), strict=True)
                ],
                "results": [self._describe(x, tensors) for x in results],
            }
            self._write_part({"operation": json.dumps(described)}, tensors)
            self.count += 1

    def _describe(self, x: np.ndarray, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        x = np.asarray(x)
        facts: dict[str, Any] = {"shape": list(x.shape), "dtype": str(x.dtype), "digest": _digest(x), "kept": None, "rows": None}
        kept = x
        if self._rows is not None and x.ndim and x.shape[0] > max(self._rows):
            kept, facts["rows"] = x[self._rows], self._rows
        if str(x.dtype) not in SAFETENSORS_NAMES:
            return facts
        name = facts["digest"] if facts["rows"] is None else _digest(kept)
        if name not in self._kept:
            if kept.nbytes > self._budget:
                return facts | {"rows": None}
            self._budget -= kept.nbytes
            self._kept.add(name)
            tensors[name] = kept
        return facts | {"kept": name}

    def _write_part(self, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        header: dict[str, Any] = {"__metadata__": metadata}
        data, offset = [], 0
        for name, x in tensors.items():
            data.append(_raw_bytes(x))
            header[name] = {
                "dtype": SAFETENSORS_NAMES[str(x.dtype)], "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]
            }  # fmt: skip
            offset += x.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(b"".join([len(text).to_bytes(8, "little"), text, *data]))
        self._file.flush()


def _raw_bytes(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def _digest(x: np.ndarray) -> str:
    return hashlib.blake2b(_raw_bytes(x), digest_size=DIGEST_BYTES).hexdigest()


def _plain(value: Any) -> Any:
    """Return a value of JSON for a parameter of an operation."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)[:200]


def _environment(framework: str) -> dict[str, Any]:
    """Return what the choice of kernels depends on: versions, GPU, driver, and PyTorch's switches."""
    found: dict[str, Any] = {}
    for name in ("torch", "jax", "jaxlib", "transformers", "triton", "numpy"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    torch = sys.modules.get("torch")
    if framework == "torch" and torch is not None:
        found |= _torch_environment(torch)
        found |= {name: os.environ[name] for name in VARIABLES if name in os.environ}
    elif framework == "jax" and "jax" in sys.modules:
        found["devices"] = sorted({str(device.device_kind) for device in sys.modules["jax"].devices()})
    return found


def _torch_environment(torch: Any) -> dict[str, Any]:
    switches = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic": lambda: torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn_enabled": lambda: torch.backends.cudnn.enabled,
        "cudnn": lambda: torch.backends.cudnn.version(),
        "matmul_allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "matmul_reduced_bf16": lambda: str(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "matmul_reduced_f16": lambda: str(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "preferred_blas": lambda: str(torch.backends.cuda.preferred_blas_library()),
        "sdp_priority": lambda: list(map(int, torch._C._get_sdp_priority_order())),
        **{f"version of {name}": partial(metadata.version, name) for name in LIBRARIES},
        **{
            f"sdp_{name}": getattr(torch.backends.cuda, f"{name}_sdp_enabled", None) for name in ("flash", "mem_efficient", "cudnn", "math")
        },
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        switches |= {
            "gpu": lambda: properties.name,
            "capability": lambda: [properties.major, properties.minor],
            "multiprocessors": lambda: properties.multi_processor_count,
            "cuda": lambda: torch.version.cuda,
            "driver": _driver,
        }
    found: dict[str, Any] = {}
    for name, read in switches.items():
        try:
            value = None if read is None else read()
        except (AttributeError, RuntimeError, OSError, ImportError):  # a switch or package that this release or this build does not have
            continue
        if value is not None:
            found[name] = value if isinstance(value, bool | int | list) else str(value)
    return found


def _driver() -> str | None:
    """Return the version of the NVIDIA driver."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), None)


def _source_line(frames: Iterable[tuple[str, int]], skipped: tuple[str, ...]) -> str:
    """Return the first line that is outside the frameworks, as "file.py:12"."""
    for file, line in frames:
        if file != OWN_FILE and not file.startswith("<") and not any(part in file for part in skipped):
            return f"{os.path.basename(file)}:{line}"
    return ""


# ---- torch


class TorchRecording:
    """`with record(path, model) as run:`; see `record`."""

    def __init__(self, recording: Recording, model: Any, compiled: bool) -> None:
        self.recording, self.model, self.compiled = recording, model, compiled
        self._stack: list[tuple[str, list[np.ndarray]]] = []
        self._paths: dict[int, str] = {}  # module path by the sequence number of an autograd node
        self._hooks: list[Any] = []
        self._mode: Any = None

    def __enter__(self) -> Recording:
        for path, module in self.model.named_modules() if self.model is not None else ():
            if self.compiled and "_orig_mod" in path:
                continue  # hooks in a compiled region would be compiled with it
            self._hooks.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave(path), always_call=True))
            if self.compiled and path:
                self._hooks.append(module.register_full_backward_hook(self._backward(path)))
                object.__setattr__(module, "_is_full_backward_hook", True)  # a compiled module forwards it to the module within
            if self.compiled:
                self._hooks += [
                    weight.register_post_accumulate_grad_hook(self._gradient(f"{path}.{name}" if path else name))
                    for name, weight in module.named_parameters(recurse=False)
                    if weight.requires_grad
                ]
        if not self.compiled:
            self._mode = _torch_mode(self)
            self._mode.__enter__()
        return self.recording

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self.recording.close()

    def _enter(self, path: str) -> Callable:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._stack.append((path, [_torch_array(x) for x in _torch_tensors((args, kwargs))] if self.compiled else []))

        return hook

    def _leave(self, path: str) -> Callable:
        def hook(module: Any, args: Any, output: Any) -> None:
            while self._stack:
                left, operands = self._stack.pop()
                if left == path:
                    break
            else:
                return
            if self.compiled:
                weights = [_torch_array(x) for x in module.parameters()]
                self._add_module(module, path, [*operands, *weights], _torch_tensors(output), backward=False)

        return hook

    def _backward(self, path: str) -> Callable:
        def hook(module: Any, grad_inputs: Any, grad_outputs: Any) -> None:
            results = _torch_tensors(grad_inputs)
            if results:
                self._add_module(module, path, [_torch_array(x) for x in _torch_tensors(grad_outputs)], results, backward=True)

        return hook

    def _gradient(self, path: str) -> Callable:
        def hook(weight: Any) -> None:
            self.recording.add("module.gradient", [], [_torch_array(weight.grad)], path=path, source="", backward=True, attributes={})

        return hook

    def _add_module(self, module: Any, path: str, operands: list[np.ndarray], results: list[Any], *, backward: bool) -> None:
        kind = type(getattr(module, "_orig_mod", module)).__name__
        arrays = [_torch_array(x) for x in results]
        self.recording.add(f"module.{kind}", operands, arrays, path=path, source="", backward=backward, attributes={})

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator of torch and append it to the record."""
        import torch
        from torch.utils import _pytree as pytree

        name = func._schema.name.replace("::", ".")
        if func.is_view or name in ("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.detach", "aten._unsafe_view"):
            return func(*args, **kwargs)
        given = _torch_tensors((args, kwargs))
        operands = [_torch_array(x) for x in given]
        strides = [None if x.is_contiguous() else x.stride() for x in given]
        result = func(*args, **kwargs)
        outputs = _torch_tensors(result)
        if not func._schema.returns:  # it writes to its operands, as an optimizer's operators on lists do
            places = [i for i, x in enumerate(func._schema.arguments) if x.alias_info is not None and x.alias_info.is_write]
            outputs = _torch_tensors([args[i] if i < len(args) else kwargs.get(func._schema.arguments[i].name) for i in places])
        results = [_torch_array(x) for x in outputs]
        replaced = self.recording.substitute(name, operands, results)
        if replaced is not None:
            results = [np.asarray(x) for x in replaced]
            for x, value in zip(outputs, results, strict=True):
                x.copy_(_torch_tensor(value, x))
        in_backward = torch._C._current_graph_task_id() != -1
        path = self._stack[-1][0] if self._stack else ""
        if in_backward:
            node = torch._C._current_autograd_node()
            path = self._paths.get(node._sequence_nr(), "") if node is not None else ""
        else:
            self._paths[torch.autograd._get_sequence_nr() - 1] = path  # type: ignore[attr-defined]
        numbers = iter(range(len(given)))
        attributes = pytree.tree_map(
            lambda x: f"#{next(numbers)}" if isinstance(x, torch.Tensor) else x, {"args": list(args), "kwargs": kwargs}
        )
        frame, frames = sys._getframe(1), []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        source = _source_line(frames, (f"{os.sep}torch{os.sep}",))
        self.recording.add(
            name, operands, results, path=path, source=source, backward=in_backward, attributes=_plain(attributes), strides=strides
        )
        return result


def _torch_mode(recording: TorchRecording) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class RecordingMode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return recording.dispatch(func, args, kwargs or {})

    return RecordingMode()


def _torch_tensors(tree: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _torch_array(x: Any) -> np.ndarray:
    """Copy a tensor to NumPy, whatever its device and dtype."""
    import torch

    x = x.detach().contiguous().cpu()
    name = str(x.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import ml_dtypes

        whole = torch.int16 if name == "bfloat16" else torch.uint8
        return x.view(whole).numpy().copy().view(getattr(ml_dtypes, name))
    return x.numpy().copy()


def _torch_tensor(value: np.ndarray, like: Any) -> Any:
    import torch

    raw = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
    return raw.view(like.dtype).reshape(tuple(value.shape))


# ---- JAX


def _record_jax(fn: Callable, args: tuple, kwargs: dict, recording: Recording, compiled: bool, whole: tuple[str, ...]) -> Recording:
    import jax

    try:
        flat, tree = jax.tree.flatten((args, kwargs))

        def flat_function(*leaves: Any) -> Any:
            given, named = jax.tree.unflatten(tree, leaves)
            return fn(*given, **named)

        program, shapes = jax.make_jaxpr(flat_function, return_shape=True)(*flat)
        evaluation = _Evaluation(recording, compiled, whole)
        if compiled:
            outputs, values = jax.jit(lambda *x: (evaluation.run(program.jaxpr, program.consts, x, ""), evaluation.traced_values()))(*flat)
            evaluation.write(values)
        else:
            outputs = evaluation.run(program.jaxpr, program.consts, flat, "")
        recording.result = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    finally:
        recording.close()
    return recording


class _Evaluation:
    """Evaluates a jaxpr, equation by equation, and records each."""

    def __init__(self, recording: Recording, compiled: bool, whole: tuple[str, ...]) -> None:
        self.recording, self.compiled, self.whole = recording, compiled, whole
        self.pending: list[tuple[dict[str, Any], list[Any], list[Any]]] = []  # operations whose values are tracers

    def traced_values(self) -> list[tuple[list[Any], list[Any]]]:
        return [(operands, results) for _, operands, results in self.pending]

    def write(self, values: list[tuple[list[Any], list[Any]]]) -> None:
        for (facts, *_), (operands, results) in zip(self.pending, values, strict=True):
            self.recording.add(operands=[np.asarray(x) for x in operands], results=[np.asarray(x) for x in results], **facts)

    def run(self, program: Any, consts: Sequence[Any], args: Sequence[Any], prefix: str) -> list[Any]:
        values: dict[Any, Any] = {}
        read = lambda atom: atom.val if hasattr(atom, "val") else values[atom]
        values.update(zip(program.constvars, consts, strict=True))
        values.update(zip(program.invars, args, strict=True))
        for equation in program.eqns:
            operands = [read(atom) for atom in equation.invars]
            results = self.equation(equation, operands, prefix)
            values.update((var, x) for var, x in zip(equation.outvars, results, strict=True) if type(var).__name__ != "DropVar")
        return [read(atom) for atom in program.outvars]

    def equation(self, equation: Any, operands: list[Any], prefix: str) -> list[Any]:
        import jax

        kind, params = equation.primitive.name, equation.params
        stack = "/".join(part for part in (prefix, str(equation.source_info.name_stack)) if part)
        function = params.get("name") if kind in ("jit", "pjit") else None
        if kind in CALLS and function not in self.whole:
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            open_jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            return self.run(open_jaxpr, consts, operands, "/".join(part for part in (stack, function) if part))
        if not self.compiled and kind == "scan":
            return self.scan(params, operands, stack)
        if not self.compiled and kind == "cond":
            branch = params["branches"][int(operands[0])]
            return self.run(branch.jaxpr, branch.consts, operands[1:], stack)
        if not self.compiled and kind == "while":
            return self.loop(params, operands, stack)
        parameters = equation.primitive.get_bind_params(params)
        if isinstance(parameters, tuple):  # JAX before 0.7: functions and parameters
            bound = equation.primitive.bind(*parameters[0], *operands, **parameters[1])
        else:
            bound = equation.primitive.bind(*operands, **parameters)
        results = list(bound) if equation.primitive.multiple_results else [bound]
        traceback = equation.source_info.traceback
        frames = [(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback is not None else []
        facts = {
            "name": f"jit:{function}" if function else kind,
            "path": stack,
            "source": _source_line(frames, (f"{os.sep}jax{os.sep}", f"{os.sep}jaxlib{os.sep}")),
            "backward": "transpose(" in stack,
            "attributes": _plain({name: value for name, value in params.items() if not hasattr(value, "eqns") and name != "sharding"})
            if function is None
            else {},
        }
        if any(jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.extended) for x in (*operands, *results)):
            return results  # random keys
        if self.compiled:
            self.pending.append((facts, operands, results))
            return results
        arrays = [np.asarray(x) for x in operands], [np.asarray(x) for x in results]
        replaced = self.recording.substitute(facts["name"], *arrays)
        if replaced is not None:
            results = [jax.numpy.asarray(x) for x in replaced]
        self.recording.add(operands=arrays[0], results=[np.asarray(x) for x in results], **facts)
        return results

    def scan(self, params: dict[str, Any], operands: list[Any], stack: str) -> list[Any]:
        import jax.numpy as jnp

        closed = params["jaxpr"]
        if "ft_in" in params:  # JAX 0.11 and later
            consts, carry, xs = (list(part) for part in params["ft_in"].update(operands).unpack())
        else:
            first, end = params["num_consts"], params["num_consts"] + params["num_carry"]
            consts, carry, xs = operands[:first], operands[first:end], operands[end:]
        n_carry = len(carry)
        slots: list[Any] = [None] * params["length"]
        for number in reversed(range(params["length"])) if params["reverse"] else range(params["length"]):
            out = self.run(closed.jaxpr, closed.consts, [*consts, *carry, *(x[number] for x in xs)], f"{stack}[{number}]")
            carry, slots[number] = out[:n_carry], out[n_carry:]
        stacked = [jnp.stack(column) for column in zip(*slots, strict=True)] if slots else []
        if not slots:
            stacked = [jnp.zeros(var.aval.shape, var.aval.dtype)[:0] for var in closed.jaxpr.outvars[n_carry:]]
        return [*carry, *stacked]

    def loop(self, params: dict[str, Any], operands: list[Any], stack: str) -> list[Any]:
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        n_condition, n_body = params["cond_nconsts"], params["body_nconsts"]
        for_condition, for_body = operands[:n_condition], operands[n_condition : n_condition + n_body]
        carry, number = operands[n_condition + n_body :], 0
        while bool(self.run(condition.jaxpr, condition.consts, [*for_condition, *carry], f"{stack}[{number}]")[0]):
            carry = self.run(body.jaxpr, body.consts, [*for_body, *carry], f"{stack}[{number}]")
            number += 1
        return list(carry)
