"""`tcemu.triton.compare`: one program on two targets, by two configs or with two kernels; the first launch whose memory differs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import triton
from triton.runtime import driver as triton_driver

from tcemu.base.errors import Unsupported
from tcemu.base.results import Result, Table
from tcemu.kernels.ptx.runtime.target_comparison import Comparison
from tcemu.kernels.ptx.runtime.target_comparison import compare as compare_ptx
from tcemu.kernels.triton.emulation import emulated
from tcemu.kernels.triton.kernel_launches import LaunchData
from tcemu.kernels.triton.launches import Launch
from tcemu.kernels.triton.tensors import as_tensor
from tcemu.kernels.triton.triton_versions import describe_version

Program = Callable[..., Any]
ConfigChoice = Callable[[triton.Config], bool] | None


class OutputDifference(NamedTuple):
    """A tensor that two launches left with different bits."""

    argument: str  # of the Triton function; both names where they differ
    elements: int  # of the memory behind the tensor
    differing: int  # elements
    place: tuple[int, ...]  # of the first one in the tensor; in a tensor with gaps its distance in elements from the tensor's first
    values: tuple[Any, Any]  # there, left and right
    words: tuple[int, int]  # their raw bits


class LaunchPair(NamedTuple):
    """Two launches with the same number."""

    left: Launch
    right: Launch
    equal_inputs: bool  # all tensors had equal bits before
    differences: tuple[OutputDifference, ...]  # after it
    reason: str = ""  # why their memory cannot be compared


@dataclass(frozen=True, repr=False)
class ProgramComparison(Result):
    """The result of `tcemu.triton.compare`. `str()` is a report; `records()` has a row for each tensor of a launch that differs."""

    targets: tuple[str, str]
    launches: tuple[LaunchPair, ...]  # in their order, as far as both sides have launches
    launch_counts: tuple[int, int]  # of either side
    results: tuple[OutputDifference, ...]  # differences of the arrays that the program returns
    statement: Comparison | None  # the left kernel of the first launch that differs, on both targets, statement by statement
    statement_reason: str  # why there is no such comparison
    triton: str = ""  # version that compiled both sides

    @property
    def first(self) -> int | None:
        """The number of the first launch whose tensors differ; None if no launch differs."""
        return next((number for number, pair in enumerate(self.launches) if pair.differences), None)

    @property
    def equal(self) -> bool:
        """True if all launches left equal bits, as many on both sides, and the program returned equal bits."""
        comparable = not any(pair.reason for pair in self.launches) and self.launch_counts[0] == self.launch_counts[1]
        return self.first is None and not self.results and comparable

    def table(self) -> Table:
        """One row for each tensor that differs."""
        columns = ("launch", "left_kernel", "right_kernel", "tensor", "elements", "differing", "index", "left", "right")
        rows = [
            (number, pair.left.kernel, pair.right.kernel, each.argument, each.elements, each.differing, str(each.place), *each.values)
            for number, pair in enumerate(self.launches)
            for each in pair.differences
        ]
        rows += [(None, None, None, each.argument, each.elements, each.differing, str(each.place), *each.values) for each in self.results]
        facts = {"left_target": self.targets[0], "right_target": self.targets[1], "first_launch": self.first}
        facts |= {"triton": self.triton, "left_launches": self.launch_counts[0], "right_launches": self.launch_counts[1]}
        return Table("Tensors that differ", columns, tuple(rows), facts)

    def __str__(self) -> str:
        left, right = self.targets
        counts = f"{self.launch_counts[0]} launches" + (f" and {self.launch_counts[1]}" if len(set(self.launch_counts)) > 1 else "")
        differing = sum(bool(pair.differences) for pair in self.launches)
        lines = [f"{left} and {right}, Triton {self.triton}: {counts}; {differing} of the {len(self.launches)} compared launches differ"]
        first = self.first
        lines += [f"launch {number} is not compared: {pair.reason}" for number, pair in enumerate(self.launches) if pair.reason]
        if first is not None:
            lines += self._first_lines(first)
        lines += [f"returned: {_difference_text(each)}" for each in self.results]
        return "\n".join(lines)

    def _first_lines(self, number: int) -> list[str]:
        pair = self.launches[number]
        lines = [f"The first is launch {number}, {pair.left.kernel}, grid {pair.left.grid}:"]
        if not pair.equal_inputs:
            lines.append(
                "  its tensors differed before it, though no launch made the difference: the program's own inputs or its host code differ"
            )
        lines += [f"  {_difference_text(each)}" for each in pair.differences]
        if self.statement is not None:
            lines.append("The left kernel's own code on both targets, with the tensors of this launch:")
            lines += [f"  {line}" for line in str(self.statement).splitlines()]
        elif self.statement_reason:
            lines.append(f"No statement is named: {self.statement_reason}")
        return lines


def compare(
    program: Program | tuple[Program, Program],
    *args: Any,
    targets: tuple[str, str],
    configs: tuple[ConfigChoice, ConfigChoice] = (None, None),
    redirect_cuda: bool = True,
) -> ProgramComparison:
    """Run a program with Triton kernels twice, and find the first launch after which a tensor differs in a bit.

    The two runs differ in their target, in the configs that autotuned kernels take, or in the program: a candidate and a reference. Both
    get copies of the same arguments. Launches are compared in their order, the memory behind every tensor as a whole.

    Args:
        program: A function that launches kernels; or two, the left and the right one. Called with `args`.
        *args: Arguments of the program. Each run gets a deep copy, NumPy arrays through `as_tensor`.
        targets: The left and the right GPU, which may be the same.
        configs: The configs of autotuned kernels on either side, as `config` of `emulated`.
        redirect_cuda: As for `emulated`.

    Returns:
        The launches with their differences. If the first one that differs runs the same kernel on two targets, and the left PTX may run on
        the right target, also the first statement at which that PTX differs, found by `tcemu.ptx.compare`.

    Raises:
        ValueError: There are not two targets, programs or configs. Further errors are those of `emulated`.
    """
    programs = program if isinstance(program, tuple) else (program, program)
    for name, pair in (("targets", targets), ("program", programs), ("configs", configs)):
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{name}: got {pair!r}; expected two, the left and the right one")
    left = _Recording()
    right = _Comparing(left)
    returned, names = [], []
    for side, observer in enumerate((left, right)):
        with emulated(targets[side], config=configs[side], redirect_cuda=redirect_cuda) as report:
            triton_driver.active.observer = observer  # the driver of `emulated`
            copies = (as_tensor(np.array(each)) if isinstance(each, np.ndarray) else copy.deepcopy(each) for each in args)
            returned.append(programs[side](*copies))
        names.append(report.target)
    statement, reason = right.find_statement((names[0], names[1]))
    results = [_flatten_arrays(value) for value in returned]
    return ProgramComparison(
        targets=(names[0], names[1]),
        launches=tuple(right.pairs),
        launch_counts=(len(left.launches), right.count),
        results=tuple(_compare_results(*results)),
        statement=statement,
        statement_reason=reason,
        triton=describe_version(),
    )


def _flatten_arrays(value: Any, name: str = "result") -> dict[str, np.ndarray]:
    """Return the arrays in nested tuples, lists and dicts by their paths."""
    if isinstance(value, Mapping):
        return {path: array for key, each in value.items() for path, array in _flatten_arrays(each, f"{name}[{key!r}]").items()}
    if isinstance(value, tuple | list):
        return {path: array for n, each in enumerate(value) for path, array in _flatten_arrays(each, f"{name}[{n}]").items()}
    if hasattr(value, "untyped_storage"):
        tensor = _Tensor.describe(value)
        plain = value.detach().contiguous()
        import torch

        return {name: plain.view(torch.uint8).numpy().view(tensor.dtype).reshape(value.shape) if value.numel() else np.zeros(0)}
    return {name: np.asarray(value)} if isinstance(value, np.ndarray | float | int) else {}


def _compare_results(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> list[OutputDifference]:
    found = []
    for name in left:
        if name not in right or left[name].shape != right[name].shape or left[name].dtype != right[name].dtype:
            raise ValueError(f"the two runs return different kinds of values: {name} is of another shape or dtype, or missing")
        tensor = _Tensor(name, left[name].dtype, left[name].shape, True, 0)
        difference = tensor.compare(*(np.ascontiguousarray(each[name]).reshape(-1).view(np.uint8) for each in (left, right)))
        found += [difference] if difference is not None else []
    return found


# ---- the memory of launches


class _Tensor(NamedTuple):
    """The place of a tensor in its region."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    contiguous: bool
    offset: int  # bytes from the beginning of the region's buffer

    @classmethod
    def describe(cls, tensor: Any, name: str = "", offset: int = 0) -> _Tensor:
        if isinstance(tensor, np.ndarray):
            return cls(name, tensor.dtype, tensor.shape, tensor.flags.c_contiguous, offset)
        text = str(tensor.dtype).removeprefix("torch.")
        return cls(name, _numpy_dtype(text), tuple(tensor.shape), tensor.is_contiguous(), offset)

    def compare(self, left: np.ndarray, right: np.ndarray) -> OutputDifference | None:
        """Compare two states of the region, uint8; None if they are equal."""
        size = self.dtype.itemsize
        start = self.offset % size
        end = start + (len(left) - start) // size * size
        values = [np.ascontiguousarray(each[start:end]).view(self.dtype) for each in (left, right)]
        words = [each.view(f"u{min(size, 8)}").reshape(len(values[0]), -1) for each in values]
        differing = np.flatnonzero((words[0] != words[1]).any(-1))
        if not len(differing):
            return None
        origin = (self.offset - start) // size
        inside = differing[(differing >= origin) & (differing < origin + prod(self.shape))]
        first = int(inside[0] if len(inside) else differing[0])
        place = first - origin
        index = tuple(map(int, np.unravel_index(place, self.shape))) if self.contiguous and len(inside) else (place,)
        return OutputDifference(
            self.name, len(values[0]), len(differing), index, tuple(each[first].item() for each in values),
            (int(words[0][first, 0]), int(words[1][first, 0])),
        )  # fmt: skip


def _numpy_dtype(name: str) -> np.dtype:
    names = {"bool": np.bool_, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
    names |= {"bfloat16": ml_dtypes.bfloat16, "half": np.float16, "float": np.float32, "double": np.float64}
    try:
        return np.dtype(names.get(name, name))
    except TypeError:
        return np.dtype(np.uint8)


class _State(NamedTuple):
    """The memory of a launch by region, each with the first tensor that points into it."""

    data: LaunchData
    tensors: tuple[_Tensor, ...]
    inputs: tuple[bytes, ...]  # digests of the bytes before the launch
    after: tuple[np.ndarray, ...]  # bytes after it

    @classmethod
    def read(cls, data: LaunchData) -> _State:
        memory, tensors, inputs, after = data.memory, [], [], []
        for (region, value), output in zip(memory.holders.items(), data.outputs, strict=True):
            padding = memory.regions[region].padding
            offset = memory.regions[region].offset(value.tensor.data_ptr()) - padding
            tensors.append(_Tensor.describe(value.tensor, value.name or "scratch memory", offset))
            inputs.append(_digest(memory.before[region][padding:]))
            after.append(np.asarray(output)[padding:])
        return cls(data, tuple(tensors), tuple(inputs), tuple(after))


def _digest(array: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).digest()


class _Recording:
    """The launches of the left run."""

    def __init__(self) -> None:
        self.launches: list[_State] = []
        self._stored: dict[bytes, np.ndarray] = {}  # arrays by their digests: what many launches read is stored once

    def __call__(self, data: LaunchData) -> None:
        state = _State.read(data)
        after = tuple(self._stored.setdefault(_digest(each), each) for each in state.after)
        data.memory.before.clear()
        light = data._replace(outputs=(), options={name: value for name, value in data.options.items() if name != "args"})
        self.launches.append(state._replace(data=light, after=after))


class _Comparing:
    """The launches of the right run, compared with those of the left."""

    def __init__(self, left: _Recording) -> None:
        self.left, self.pairs, self.count = left, list[LaunchPair](), 0
        self.first: tuple[LaunchData, LaunchData] | None = None  # the first launch that differs, left and right

    def __call__(self, data: LaunchData) -> None:
        number, self.count = self.count, self.count + 1
        if number >= len(self.left.launches):
            return
        left, right = self.left.launches[number], _State.read(data)
        launches = left.data.launch, data.launch
        sizes = [[(len(each), tensor.dtype) for each, tensor in zip(state.after, state.tensors, strict=True)] for state in (left, right)]
        if sizes[0] != sizes[1]:
            reason = f"the tensors of {launches[0].kernel} and {launches[1].kernel} have other sizes or dtypes"
            self.pairs.append(LaunchPair(*launches, left.inputs == right.inputs, (), reason))
            return
        found = []
        for mine, other, *states in zip(left.tensors, right.tensors, left.after, right.after, strict=True):
            difference = other._replace(name=" and ".join(dict.fromkeys((mine.name, other.name)))).compare(*states)
            found += [difference] if difference is not None else []
        self.pairs.append(LaunchPair(*launches, left.inputs == right.inputs, tuple(found)))
        if found and self.first is None:
            self.first = left.data, data

    def find_statement(self, targets: tuple[str, str]) -> tuple[Comparison | None, str]:
        """Compare the left kernel of the first launch that differs on both targets. Returns None and why where that is impossible."""
        if self.first is None:
            return None, ""
        left, right = self.first
        if targets[0] == targets[1]:
            return None, "both sides run on the same target"
        if left.launch.kernel != right.launch.kernel:
            return None, "the two sides launch different kernels"
        try:
            return compare_ptx(left.module, targets=targets, args=_own_arguments(left, right), **left.options), ""
        except Unsupported as error:
            return None, f"the left PTX does not run on both targets: {error}"


def _own_arguments(left: LaunchData, right: LaunchData) -> Sequence[Any]:
    memory = left.memory
    memory.before = {}
    for mine, other in zip(memory.holders, right.memory.holders, strict=True):
        inner = right.memory.before[other][right.memory.regions[other].padding :]
        memory.before[mine] = np.concatenate([np.zeros(memory.regions[mine].padding, np.uint8), inner])
    return memory.arguments()


def _difference_text(each: OutputDifference) -> str:
    left, right = (f"{value:.9g}" if isinstance(value, float) else str(value) for value in each.values)
    words = " and ".join(f"0x{word:x}" for word in each.words)
    counts = f"{each.differing:,} of {each.elements:,} elements differ"
    return f"{each.argument}: {counts}, the first at {list(each.place)}: {left} and {right} ({words})"
