"""Graphs that `torch.compile` has compiled for a GPU, read from inductor's cache folder and run without that GPU.

A graph is a list of launches of Triton kernels, whose PTX the folder has and `tcemu.ptx` runs, and of calls of libraries, which are
operators of PyTorch. Nothing of the folder is executed but the PTX: of its Python files the syntax trees are read.

Source: PyTorch 2.11.0, torch/_inductor/codegen/wrapper.py and runtime/triton_heuristics.py (`GridExpr`); the folder's layout as PyTorch
2.11.0 and Triton 3.6.0 leave it.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tcemu.base.errors import NotModelled
from tcemu.base.results import Result, Table
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.ptx.text.parser import parse
from tcemu.kernels.triton.kernel_launches import CompiledKernel, launch_kernel
from tcemu.kernels.triton.launches import Launch

AXES = {"Grid1D": "x", "Grid2D": "xy", "Grid3D": "xyz"}  # of the grids that are a number of elements by a block
MOST_PROGRAMS = 65535  # along y: inductor's `get_max_y_grid`
PROGRAM_ID = re.compile(r"(%\S+) = tt\.get_program_id (\w)")
CONSTANT = re.compile(r"(%\S+) = arith\.constant (\d+) : i\d+")
MULTIPLIED = re.compile(r"%[xyz]offset\S* = arith\.muli (%\S+), (%\S+) :")  # Triton names a value as the source does
WIDENED = re.compile(r"(%\S+) = arith\.extsi (%\S+) :")
SOURCE_NODES = re.compile(r"# Topologically Sorted Source Nodes: \[([^\]]*)\]")
ORIGINAL = re.compile(r"Original ATen: \[([^\]]*)\]")
ACTIVATIONS = frozenset(  # functions that tell models with the same operands apart, and that PyTorch calls on every device
    f"aten.{name}"
    for name in ("gelu", "silu", "relu", "tanh", "sigmoid", "elu", "leaky_relu", "hardtanh", "hardswish", "mish", "softplus", "sin", "cos")
)
PTX_FILE = re.compile(r'^\s*\.file\s+\d+\s+"([^"]*)"', re.MULTILINE)
NAME_LENGTH = 150  # characters of a kernel's name that Triton's files have
FIRST_LINE = "# AOT ID:"  # of a Python file with a graph
METHODS = ("view", "sum", "prod", "amax", "amin", "to", "zero_")  # of tensors: sums of partial sums, and workspaces
LIBRARY = ("mm", "addmm", "bmm", "baddbmm", "convolution")  # of extern_kernels: functions of torch by the same names
IGNORED = ("args.clear", "torch.cuda.set_device", "get_raw_stream", "assert_alignment")
ALLOCATIONS = ("empty_strided_cuda", "empty_strided_cpu", "empty_strided")
OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


class TensorType(NamedTuple):
    """Shape, strides and dtype of an operand of a graph."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor) -> TensorType:
        """Return those of a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    def matches(self, x: torch.Tensor) -> bool:
        """Return whether a tensor has this shape and dtype, and these strides where an axis has more than one element."""
        alike = tuple(x.shape) == self.shape and x.dtype == self.dtype
        return alike and all(a == b for a, b, size in zip(x.stride(), self.strides, self.shape, strict=True) if size > 1)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class GraphPart(NamedTuple):
    """A step of a graph after it ran."""

    name: str  # of the kernel, or of the library's function
    launch: Launch | None  # of a kernel; None: a library's function
    operands: tuple[Any, ...]  # as the step left them, results of functions among them


@dataclass(frozen=True)
class GraphKernel:
    """A Triton kernel of a graph, as its source describes it."""

    name: str
    signature: Mapping[str, str]  # Triton's types by argument
    grid: str  # a class of inductor's `GridExpr`, a key of `GRIDS`
    grid_settings: Mapping[str, Any]  # what the source says of the grid besides numbers of elements and blocks
    ptx: Path | None  # None: `missing` says why there is none
    blocks: Mapping[str, int]  # elements of a program by "XBLOCK", ...
    missing: str = ""
    source: str = ""

    @cached_property
    def compiled(self) -> CompiledKernel:
        """The kernel's PTX with Triton's metadata.

        Raises:
            NotModelled: The folder does not have it.
        """
        if self.ptx is None:
            raise NotModelled(f"{self.name}: {self.missing}")
        module = parse(self.ptx.read_text(encoding="utf-8"))
        metadata = SimpleNamespace(**json.loads(self.ptx.with_suffix(".json").read_text(encoding="utf-8")))
        settings = {**self.blocks, "num_warps": metadata.num_warps, "num_stages": metadata.num_stages}
        return CompiledKernel(module, module.entries[self.name], self.signature, metadata, settings)

    def launch(self, arguments: Sequence[Any], target: str, checked: bool) -> Launch:
        """Run the kernel on tensors, which it writes in place."""
        if self.grid not in GRIDS:
            raise NotModelled(f"{self.name}: a grid of the kind {self.grid} has no rule; known are {', '.join(GRIDS)}")
        compiled, names = self.compiled, list(self.signature)
        constants = names[len(arguments) :]
        if any(self.signature[name] != "constexpr" for name in constants):
            raise NotModelled(f"{self.name}: got {len(arguments)} arguments for {', '.join(names)}")
        grid = GRIDS[self.grid](self, dict(zip(names, arguments, strict=False)))
        if not all(grid):
            return Launch(self.name, grid, 0, dict(compiled.settings), 0, 0.0, ())
        return launch_kernel(compiled, grid, [*arguments, *[None] * len(constants)], target, checked=checked).launch


def _grid_by_axes(kernel: GraphKernel, given: Mapping[str, Any]) -> tuple[int, int, int]:
    programs = {axis: -(-given[f"{axis}numel"] // kernel.blocks[f"{axis.upper()}BLOCK"]) for axis in AXES[kernel.grid]}
    return programs["x"], programs.get("y", 1), programs.get("z", 1)


def _grid_with_overflow(kernel: GraphKernel, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Two axes, the second of which continues along the third."""
    x, y = (-(-given[f"{axis}numel"] // kernel.blocks[f"{axis.upper()}BLOCK"]) for axis in "xy")
    z = -(-y // MOST_PROGRAMS)
    return x, -(-y // z), z


def _grid_of_mixed_reductions(kernel: GraphKernel, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Reductions along rows and columns by the same programs, each with a part of the rows."""
    return -(-given["xnumel"] // kernel.grid_settings["RSPLIT_SIZE"]), 1, 1


def _grid_of_combined_kernels(kernel: GraphKernel, given: Mapping[str, Any]) -> tuple[int, int, int]:
    """Several pointwise kernels, one after the other along x."""
    settings = kernel.grid_settings["combo_grid_meta"]
    blocks = {**(settings["default_config"] or {}), **kernel.blocks}
    parts = range(settings["num_kernels"])
    if any(f"ynumel_{part}" in settings for part in parts):
        raise NotModelled(f"{kernel.name}: combined kernels with two axes have no rule")
    sizes = [settings[f"xnumel_{part}"] or given[f"xnumel_{part}"] for part in parts]
    programs = sum(x if settings[f"no_x_dim_{part}"] else -(-x // blocks["XBLOCK"]) for part, x in zip(parts, sizes, strict=True))
    return max(programs, settings["min_blocks"] or 0), 1, 1


GRIDS: dict[str, Callable[[GraphKernel, Mapping[str, Any]], tuple[int, int, int]]] = {
    **dict.fromkeys(AXES, _grid_by_axes),
    "Grid2DWithYZOverflow": _grid_with_overflow,
    "MixOrderReductionGrid": _grid_of_mixed_reductions,
    "SequentialComboKernelGrid": _grid_of_combined_kernels,
}


class CompiledGraph:
    """A graph that inductor has compiled.

    Attributes:
        path: Its Python file.
        kind: "inference", "forward" or "backward".
        number: Of the compilation that wrote it: the graphs of one training step have the same.
        arguments: Types of the operands, in order.
        names: Names of the operands, in order: "primals_1" and so on are parameters and inputs, "tangents_1" and so on gradients.
        results: Expressions of the results, in order; "None" where there is none.
        sources: Names of the operations of the captured function from which it was compiled, and its activations as "aten.gelu", as
            far as its comments list them.
        kernels: Its Triton kernels by name.
        steps: Names of the launches and calls, in order; a library's function has its module before it, as "extern_kernels.mm".
    """

    def __init__(self, path: Path, tree: ast.Module, kernels: Mapping[str, GraphKernel]) -> None:
        self.path, self.kernels = path, kernels
        text = path.read_text(encoding="utf-8")
        self.number, _, self.kind = text.partition("\n")[0].removeprefix(FIRST_LINE).strip("[]'\n ").rpartition("_")
        listed = lambda pattern: {name for names in pattern.findall(text) for name in names.split(", ") if name}
        self.sources = frozenset(listed(SOURCE_NODES) | listed(ORIGINAL) & ACTIVATIONS)
        functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if "call" not in functions or "get_args" not in functions:
            raise NotModelled(f"{path}: no functions call and get_args; PyTorch 2.11 writes them")
        self.body = functions["call"].body
        self.arguments = tuple(_read_arguments(functions["get_args"]))
        self.names, self.results = _read_interface(self.body)
        self.program = (ast.unparse(functions["call"]), *(kernel.source for kernel in kernels.values()))
        called = [_dotted(node.func) for node in _calls_in_order(self.body)]
        self.steps = tuple(name.removesuffix(".run") for name in called if name.removesuffix(".run") in kernels or _is_library(name))

    def run(
        self, *operands: torch.Tensor, target: str, checked: bool = False, watch: Callable[[GraphPart], None] | None = None
    ) -> tuple[Any, ...]:
        """Run the graph on tensors of the CPU.

        Kernels run as PTX. Calls of libraries are operators of PyTorch: within a block of `tcemu.torch.emulate(gpu=...)` as on that GPU,
        outside as on this CPU.

        Args:
            *operands: As `arguments` says: parameters and inputs in the order of the graph.
            target: GPU, as "H100".
            checked: Raise for what PTX leaves undefined.
            watch: Called after each launch and each call of a library.

        Returns:
            The results.

        Raises:
            NotModelled: The folder lacks a kernel's PTX, or the graph has a statement or function that is not known.
            ValueError: An operand has another shape, strides or dtype.
        """
        if len(operands) != len(self.arguments):
            raise ValueError(f"{self.path.name}: got {len(operands)} operands; the graph has {len(self.arguments)}")
        for number, (x, expected) in enumerate(zip(operands, self.arguments, strict=True)):
            if not expected.matches(x):
                raise ValueError(f"{self.path.name}: operand {number} is {TensorType.of(x)}; the graph was compiled for {expected}")
        with torch.no_grad():
            return _Interpreter(self, resolve_target(target), checked, watch).run(list(operands))

    def accepts(self, operands: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors have the types of the operands."""
        return len(operands) == len(self.arguments) and all(map(TensorType.matches, self.arguments, operands))

    def __repr__(self) -> str:
        launches = sum(name in self.kernels for name in self.steps)
        return (
            f"<CompiledGraph {self.kind}: {len(self.arguments)} operands, {launches} launches of {len(self.kernels)} kernels, "
            f"{len(self.steps) - launches} calls of libraries>"
        )


@dataclass(frozen=True)
class TrainingGraphs:
    """The forward and the backward graph of a training step."""

    forward: CompiledGraph
    backward: CompiledGraph
    results: int  # of the forward graph, without the tensors that are saved for the backward graph

    @property
    def saved(self) -> tuple[tuple[str, TensorType], ...]:
        """Names and types of the saved tensors, in order; operands of the forward graph among them keep their names."""
        count = len(self.forward.results) - self.results
        return tuple(zip(self.backward.names[:count], self.backward.arguments[:count], strict=True))

    @property
    def program(self) -> tuple[str, ...]:
        """The parts by which two graphs differ."""
        return (*self.forward.program, *self.backward.program)


class CompiledGraphs(Result):
    """The graphs of a folder: a sequence of `CompiledGraph`. `str()` lists kernels and calls of libraries."""

    def __init__(self, folder: Path, graphs: Sequence[CompiledGraph]) -> None:
        self.folder, self.graphs = folder, tuple(graphs)

    def __len__(self) -> int:
        return len(self.graphs)

    def __iter__(self) -> Any:
        return iter(self.graphs)

    def __getitem__(self, index: int) -> CompiledGraph:
        return self.graphs[index]

    def find(self, operands: Sequence[torch.Tensor], results: int, sources: Collection[str]) -> CompiledGraph:
        """Return the inference graph for tensors of these types.

        Args:
            operands: Tensors of the types that the graph takes.
            results: Number of the results.
            sources: Names of the operations of the captured function, and of PyTorch's operators as "aten.gelu".

        Raises:
            NotModelled: No graph of the folder has such operands, or several that differ have them.
        """
        alike = lambda graph: [graph] * (len(graph.results) == results and graph.sources <= {*sources})
        return self._choose("inference", operands, sources, alike)

    def find_training(
        self,
        operands: Sequence[torch.Tensor],
        results: int,
        tangents: Sequence[torch.Tensor],
        gradients: Sequence[bool],
        sources: Collection[str],
    ) -> TrainingGraphs:
        """Return the graphs of a training step for tensors of these types.

        What a forward graph saves for its backward graph is the compiler's choice. The folder tells it by places and names: the saved
        tensors are the last results of the one and the first operands of the other, in the same order.

        Args:
            operands: Tensors of the types that the forward graph takes.
            results: Number of its results without those that are saved.
            tangents: Gradients of the results, as the backward graph takes them.
            gradients: Whether each operand gets a gradient.
            sources: As for `find`.

        Raises:
            NotModelled: No graphs of the folder have such operands and results, or several that differ have them.
        """

        def pair(forward: CompiledGraph) -> list[TrainingGraphs]:
            saved = forward.results[results:]
            return [
                TrainingGraphs(forward, graph, results)
                for graph in self.graphs
                if graph.kind == "backward"
                and graph.number == forward.number
                and len(graph.names) == len(saved) + len(tangents)
                and all(name.startswith("tangents_") == (i >= len(saved)) for i, name in enumerate(graph.names))
                and all(expected.matches(x) for expected, x in zip(graph.arguments[len(saved) :], tangents, strict=True))
                and [result != "None" for result in graph.results] == list(gradients)
                and all(_keeps_name(*names) for names in zip(saved, graph.names, strict=False))
                and forward.sources <= {*sources, *graph.names}  # a part of the backward pass that the forward graph computes is saved
            ]

        return self._choose("forward", operands, sources, pair)

    def _choose(self, kind: str, operands: Sequence[torch.Tensor], sources: Collection[str], select: Callable[..., Any]) -> Any:
        taken = [x for x in self.graphs if x.kind == kind and x.accepts(operands)]
        foreign = {name for graph in taken for name in graph.sources - {*sources}}
        found = [each for graph in taken for each in select(graph)]
        if len({each.program for each in found}) == 1:
            return found[0]
        types = [str(TensorType.of(x)) for x in operands]
        shown = ", ".join(types[:6]) + (f" and {len(types) - 6} more" if len(types) > 6 else "")
        training = "" if kind == "inference" else ", or none with a backward graph for it"
        more = f". The model here does not call {', '.join(sorted(foreign)[:6])}" if foreign and not found else ""
        raise NotModelled(
            f"{self.folder}: {'no' if not found else len(found)} {kind} graph{'s' * (len(found) > 1)} for {len(types)} operands {shown}"
            f"{training * (not found)}; it has {', '.join(map(repr, self.graphs)) or 'none'}{more}. Sizes, dtypes and the version of "
            "PyTorch must be those of the compilation, and a folder that has several models must have one with such operands"
        )

    def table(self) -> Table:
        """One row for each kernel or library's function of a graph."""
        columns = ("graph", "step", "calls", "runs as", "grid", "blocks", "missing")
        rows = []
        for number, graph in enumerate(self.graphs):
            for name in dict.fromkeys(graph.steps):
                kernel = graph.kernels.get(name)
                facts = ("PTX", kernel.grid, ", ".join(f"{k}={v}" for k, v in kernel.blocks.items()), kernel.missing) if kernel else ()
                rows.append((number, name, graph.steps.count(name), *(facts or ("operator of PyTorch", "", "", ""))))
        return Table(f"Graphs of {self.folder}", columns, tuple(rows), {"graphs": len(self.graphs)})


def read(folder: str | Path) -> CompiledGraphs:
    """Read the graphs of a cache folder of inductor (TORCHINDUCTOR_CACHE_DIR, /tmp/torchinductor_USER by default). It needs no GPU.

    Args:
        folder: The folder, with Triton's cache in it.

    Returns:
        The graphs, in the order of their files.

    Raises:
        FileNotFoundError: There is no such folder.
        NotModelled: A graph has another form than PyTorch 2.11 writes.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*/*.py"))}
    files = {text.strip(): path.name for path, text in texts.items()}
    best = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*/*.best_config"))]
    chosen = {config.get("triton_cache_hash"): config for config in best}
    ptx: dict[str, list[Path]] = {}
    for path in sorted((folder / "triton").glob("*/*/*.ptx")):
        ptx.setdefault(path.stem, []).append(path)
    graphs = []
    for path, text in texts.items():
        if text.startswith(FIRST_LINE):
            tree = ast.parse(text)
            sources = dict(_kernel_sources(tree))
            found = {name: _read_kernel(name, source, files, ptx.get(name[:NAME_LENGTH], []), chosen) for name, source in sources.items()}
            graphs.append(CompiledGraph(path, tree, found))
    return CompiledGraphs(folder, graphs)


# ---- what the files say


def _kernel_sources(tree: ast.Module) -> Any:
    """Yield name and source of each `name = async_compile.triton('name', '''source''', ...)`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _dotted(node.value.func) == "async_compile.triton":
            target, source = node.targets[0], node.value.args[1]
            if isinstance(target, ast.Name) and isinstance(source, ast.Constant):
                yield target.id, source.value


def _read_kernel(
    name: str, source: str, files: Mapping[str, str], candidates: Sequence[Path], chosen: Mapping[str, Mapping[str, Any]]
) -> GraphKernel:
    """Find the PTX of a kernel: compiled from the file with this source, and chosen where several forms of it were timed."""
    function = next(node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == name)
    metas = {word.arg: word.value for call in function.decorator_list if isinstance(call, ast.Call) for word in call.keywords}
    signature = _literal_entry(metas["triton_meta"], "signature")
    grid = _literal_entry(metas["inductor_meta"], "grid_type")
    settings = {key: found for key in ("RSPLIT_SIZE", "combo_grid_meta") if (found := _literal_entry(metas["inductor_meta"], key))}
    file = files.get(source.strip())
    paths = []
    for path in candidates:
        named = [Path(each).name for each in PTX_FILE.findall(path.read_text(encoding="utf-8"))]
        if file is None or not named or file in named:
            paths.append(path)
    if len(paths) > 1:
        paths = [path for path in paths if path.parent.name in chosen]
    if len(paths) != 1:
        many = "no PTX" if not candidates else f"{len(candidates)} compiled forms, and no .best_config says which of them was taken"
        return GraphKernel(name, signature, grid, settings, None, {}, f"the folder has {many}", source)
    (path,) = paths
    config = chosen.get(path.parent.name)
    blocks = _read_blocks(path.with_suffix(".ttir")) if config is None else {k: v for k, v in config.items() if k.endswith("BLOCK")}
    return GraphKernel(name, signature, grid, settings, path, blocks, source=source)


def _literal_entry(node: ast.expr, key: str) -> Any:
    """Return an entry of a dictionary whose other entries need not be literals, or None."""
    assert isinstance(node, ast.Dict)
    entries = zip(node.keys, node.values, strict=True)
    return next((ast.literal_eval(value) for name, value in entries if isinstance(name, ast.Constant) and name.value == key), None)


def _read_blocks(path: Path) -> dict[str, int]:
    """Return the blocks of a kernel that was compiled in one form: the factor of each program id in Triton's own code, or 1."""
    text = path.read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in CONSTANT.findall(text)}
    axes = {name: axis for name, axis in PROGRAM_ID.findall(text)}
    axes |= {wide: axes[name] for wide, name in WIDENED.findall(text) if name in axes}
    blocks = {f"{axis.upper()}BLOCK": 1 for axis in "xyz"}
    for left, right in MULTIPLIED.findall(text):
        for name, factor in ((left, right), (right, left)):
            if name in axes and factor in constants:
                blocks[f"{axes[name].upper()}BLOCK"] = constants[factor]
    return blocks


def _read_arguments(function: ast.FunctionDef) -> Any:
    """Yield the type of each `rand_strided(shape, strides, device=..., dtype=...)` that the function returns, in its order."""
    found, order = {}, []
    for node in function.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            call = node.value
            dtype = next((word.value for word in call.keywords if word.arg == "dtype"), None)
            if _dotted(call.func) == "rand_strided" and isinstance(dtype, ast.Attribute):
                shape, strides = map(ast.literal_eval, call.args[:2])
                found[node.targets[0].id] = TensorType(shape, strides, getattr(torch, dtype.attr))
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            order = [each.id for each in node.value.elts if isinstance(each, ast.Name)]
    if set(order) - set(found):
        raise NotModelled(f"operands {', '.join(sorted(set(order) - set(found)))} are no tensors; compile with dynamic=False")
    yield from (found[name] for name in order)


def _read_interface(body: Sequence[ast.stmt]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the operands, from `a, b = args`, and the expressions of the results."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    taken = [x for x in nodes if isinstance(x, ast.Assign) and isinstance(x.value, ast.Name) and x.value.id == "args"]
    returned = [x.value for x in nodes if isinstance(x, ast.Return)]
    names = [_dotted(each) for x in taken for target in x.targets for each in getattr(target, "elts", [target])]
    return tuple(names), tuple(ast.unparse(each) for value in returned if isinstance(value, ast.Tuple) for each in value.elts)


def _keeps_name(result: str, name: str) -> bool:
    """Return whether a result may be the operand of that name: an operand of the forward graph keeps its name."""
    own = re.search(r"\bprimals_\d+\b", result)
    return name == own.group() if own else not name.startswith("primals_")


def _dotted(node: ast.expr) -> str:
    """Return "torch.ops.aten.mm.default" of such an expression; "" of others."""
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def _is_library(name: str) -> bool:
    return name.startswith(("extern_kernels.", "torch.ops.", "aten."))


def _calls_in_order(body: Sequence[ast.stmt]) -> list[ast.Call]:
    calls = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return sorted(calls, key=lambda node: (node.lineno, node.col_offset))


# ---- the run


class _Interpreter:
    """Runs the statements of a graph's function `call`: allocations, views, launches and calls of libraries."""

    def __init__(self, graph: CompiledGraph, target: str, checked: bool, watch: Callable[[GraphPart], None] | None) -> None:
        self.graph, self.target, self.checked, self.watch = graph, target, checked, watch
        self.values: dict[str, Any] = {"inf": math.inf, "nan": math.nan}

    def run(self, operands: list[torch.Tensor]) -> tuple[Any, ...]:
        self.values["args"] = operands
        return self._block(self.graph.body)

    def _refuse(self, node: ast.AST, what: str) -> NotModelled:
        line = getattr(node, "lineno", 0)
        return NotModelled(f"{self.graph.path.name}, line {line}: {what} {ast.unparse(node)[:100]!r} is not known to tcemu.inductor")

    def _block(self, body: Sequence[ast.stmt]) -> Any:
        for node in body:
            if isinstance(node, ast.Return):
                return self._value(node.value) if node.value is not None else ()
            if isinstance(node, ast.With):
                self._block(node.body)
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], self._value(node.value))
            elif isinstance(node, ast.Delete):
                for target in node.targets:
                    self.values.pop(_dotted(target), None)
            elif isinstance(node, ast.Expr):
                self._value(node.value)
            else:
                raise self._refuse(node, "the statement")
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for each, part in zip(target.elts, value, strict=True):
                self._assign(each, part)
        elif isinstance(target, ast.Name):
            self.values[target.id] = value
        else:
            raise self._refuse(target, "an assignment to")

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.values:
            return self.values[node.id]
        if isinstance(node, ast.Tuple | ast.List):
            return type(ast.literal_eval("()" if isinstance(node, ast.Tuple) else "[]"))(map(self._value, node.elts))
        if isinstance(node, ast.Slice):
            return slice(*(None if each is None else self._value(each) for each in (node.lower, node.upper, node.step)))
        if isinstance(node, ast.Subscript):
            return self._value(node.value)[self._value(node.slice)]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](self._value(node.left), self._value(node.right))
        if isinstance(node, ast.Attribute) and _dotted(node).startswith("torch."):
            found = getattr(torch, node.attr, None)
            if isinstance(found, torch.dtype | torch.layout | torch.memory_format) and _dotted(node) == f"torch.{node.attr}":
                return found
        if isinstance(node, ast.Call):
            return self._call(node, _dotted(node.func))
        raise self._refuse(node, "the expression")

    def _call(self, node: ast.Call, name: str) -> Any:
        if name in IGNORED:
            return None
        if name == "device":
            return torch.device("cpu")
        args = [self._value(each) for each in node.args]
        if name == "assert_size_stride":
            return self._check(node, *args)
        if name in ALLOCATIONS:
            shape, strides, dtype = args
            return torch.empty_strided(shape, strides, dtype=dtype)
        if name == "reinterpret_tensor":
            x, shape, strides, *offset = args
            return torch.as_strided(x, shape, strides, x.storage_offset() + (offset[0] if offset else 0))
        kernel = self.graph.kernels.get(name.removesuffix(".run"))
        if kernel is not None:
            self._note(kernel.name, kernel.launch(args, self.target, self.checked), args)
            return None
        keywords = {word.arg: self._value(word.value) for word in node.keywords if word.arg is not None}
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not _is_library(name):
            return getattr(self._value(node.func.value), node.func.attr)(*args, **keywords)
        if _is_library(name):
            result = self._library(node, name)(*args, **keywords)
            self._note(name, None, [*args, *keywords.values(), *(result if isinstance(result, tuple) else (result,))])
            return result
        raise self._refuse(node, "the call")

    def _library(self, node: ast.Call, name: str) -> Callable[..., Any]:
        if name.startswith("extern_kernels."):
            if name.removeprefix("extern_kernels.") not in LIBRARY:
                raise self._refuse(node, "the library's function")
            return getattr(torch, name.removeprefix("extern_kernels."))
        found: Any = torch.ops.aten
        for part in name.removeprefix("torch.ops.").removeprefix("aten.").split("."):
            found = getattr(found, part)
        return found

    def _check(self, node: ast.Call, x: torch.Tensor, shape: Sequence[int], strides: Sequence[int], *_: Any) -> None:
        """Give a library's result the strides that the GPU's has; operands have been checked."""
        if tuple(x.shape) != tuple(shape):
            raise NotModelled(f"{self.graph.path.name}, line {node.lineno}: {_dotted(node.args[0])} is {list(x.shape)}, not {list(shape)}")
        if any(own != expected for own, expected, size in zip(x.stride(), strides, shape, strict=True) if size > 1):
            self._assign(node.args[0], torch.empty_strided(shape, strides, dtype=x.dtype).copy_(x))

    def _note(self, name: str, launch: Launch | None, operands: Sequence[Any]) -> None:
        if self.watch is not None:
            self.watch(GraphPart(name, launch, tuple(operands)))
