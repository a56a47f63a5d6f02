"""`predict` computes each recorded operation of PyTorch from its operands as a GPU does, and says which results the GPU would not give.

The operations are those of `tcemu.uses.replay.aten_operations`, which `tcemu.torch.emulate(gpu=...)` computes with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.results import Result, Table
from tcemu.base.text import wrap_lines
from tcemu.uses.drift.recorder import VARIABLES
from tcemu.uses.drift.records import DTYPES, Operation, Record, RecordSource, TensorRecord, read_values
from tcemu.uses.replay.aten_operations import EXACT, GPUS, LIBRARIES, OPERATIONS, PLACEMENT, Answer, Call, bind_arguments

EQUAL, DIFFERENT, UNKNOWN, MOVES, MISSING = "equal", "different", "not known", "exact", "not kept"
SPECIAL_NUMBERS = ("inf", "-inf", "nan")  # floats that JSON lacks, as the recorder writes them
MAX_GAPS, SMALL_SPAN = 4, 1 << 22  # times the elements of an operand that its strides may span, or elements that they may span anyway


class PredictedOperation(NamedTuple):
    """The judgement on one operation.

    Attributes:
        number: Its number in the run.
        path: Path of the module.
        name: Name of the operation.
        verdict: EQUAL: every word is that of the GPU. DIFFERENT: some word is not. UNKNOWN: the GPU's result is not known. MOVES: every
            correct implementation has these bits, and they were not computed. MISSING: the record has no values of it.
        words: Number of words of the results that were compared.
        wrong: Number of them that differ.
        kernel: The kernel or the order that was computed.
        status: The status of its evidence, as in the report of `emulate`.
        reason: The evidence, or why nothing was compared.
        skipped: Results with another dtype or size than the GPU's, or that the rule does not give, which were not compared.
    """

    number: int
    path: str
    name: str
    verdict: str
    words: int = 0
    wrong: int = 0
    kernel: str = ""
    status: str = ""
    reason: str = ""
    skipped: str = ""

    @property
    def title(self) -> str:
        """The number, path and name, as reports show them."""
        return f"{self.number} {self.path + ': ' if self.path else ''}{self.name}"


@dataclass(frozen=True)
class Prediction(Result):
    """The operations of a record, compared with what a GPU gives for their operands.

    Attributes:
        record: Name of the record.
        gpu: The GPU.
        library: The library.
        notes: What the record says of its own GPU and library, if it is another one.
        operations: The operations with float results, in order.
    """

    record: str
    gpu: str
    library: str
    notes: tuple[str, ...]
    operations: tuple[PredictedOperation, ...]

    @property
    def different(self) -> tuple[PredictedOperation, ...]:
        """The operations whose results the GPU would not give."""
        return tuple(line for line in self.operations if line.verdict == DIFFERENT)

    @property
    def first(self) -> PredictedOperation | None:
        """The first operation whose result the GPU would not give."""
        return next(iter(self.different), None)

    def __str__(self) -> str:
        counts = Counter(line.verdict for line in self.operations)
        computed = [line for line in self.operations if line.verdict in (EQUAL, DIFFERENT)]
        words, wrong = sum(line.words for line in computed), sum(line.wrong for line in computed)
        verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in (EQUAL, DIFFERENT, UNKNOWN, MOVES, MISSING) if counts[verdict])
        lines = [f"{self.record}, as {self.library} on {self.gpu}: {verdicts or 'no operation with a float result'}"]
        lines.append(f"{words - wrong:,} of {words:,} words equal")
        lines += [line for note in self.notes for line in wrap_lines(note)]
        if self.first is not None:
            line = self.first
            lines += wrap_lines(
                f"first that no {self.gpu} with {self.library} would give: {line.title}: {line.wrong:,} of {line.words:,} words differ "
                f"from {line.kernel} ({line.status}: {line.reason})",
                "  ",
            )
        unknown = Counter((line.name, line.reason) for line in self.operations if line.verdict == UNKNOWN)
        for (name, reason), count in unknown.items():
            lines += wrap_lines(f"not known: {count} {name}: {reason}", "  ")
        for (name, skipped), count in Counter((line.name, line.skipped) for line in self.operations if line.skipped).items():
            lines += wrap_lines(f"not compared: {count} {name}: {skipped}", "  ")
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table with a row for each operation."""
        facts = {"gpu": self.gpu, "library": self.library, "different": len(self.different)}
        return Table(
            f"{self.record} as {self.library} on {self.gpu}", PredictedOperation._fields, tuple(map(tuple, self.operations)), facts
        )


def predict(record: RecordSource, *, gpu: str, library: str = LIBRARIES[0]) -> Prediction:
    """Compute each operation of a record from its recorded operands as PyTorch does on a GPU, and compare the results.

    Args:
        record: A record of torch: a file, a finished recording, or its bytes.
        gpu: "H100" or "H200".
        library: "torch 2.11".

    Returns:
        A `Prediction`.

    Raises:
        DamagedFile: The file is no record.
        NotModelled: Nothing is known of the GPU or of the library.
    """
    if gpu not in GPUS or library not in LIBRARIES:
        raise NotModelled(
            f"gpu={gpu!r}, library={library!r}: known are {', '.join(GPUS)} and {', '.join(LIBRARIES)} (replay/aten_operations.py)"
        )
    run = read_values(record)
    found = [predict_operation(run, operation, gpu, library)[0] for operation in run.operations if _has_floats(operation.results)]
    return Prediction(run.name, gpu, library, _notes(run, gpu, library), tuple(found))


def _has_floats(tensors: Sequence[TensorRecord]) -> bool:
    return any(tensor.dtype.startswith(("float", "bfloat")) for tensor in tensors)


def _notes(run: Record, gpu: str, library: str) -> tuple[str, ...]:
    own, version = str(run.environment.get("gpu", "")), str(run.environment.get("torch", run.framework.removeprefix("torch").strip()))
    found = []
    if own and gpu not in own:
        found.append(f"the record is of {own}")
    if version and not f"torch {version}".startswith(library):
        found.append(f"the record is of torch {version}")
    if run.environment.get("matmul_allow_tf32"):
        found.append("the record is of a run with torch.backends.cuda.matmul.allow_tf32, which has no rule")
    found += [f"the record is of a run with {name}={run.environment[name]}, which has no rule" for name in _variables(run)]
    return tuple(found)


def _variables(run: Record) -> list[str]:
    """Return the names of the environment variables that were set, by which cuBLAS or PyTorch choose other kernels."""
    return [name for name in VARIABLES if name in run.environment]


def recorded_kernels(run: Record) -> tuple[str, str] | None:
    """Return the GPU and the library that made a record, if their kernels are known.

    Args:
        run: The record.

    Returns:
        A key of GPUS and one of LIBRARIES, or None.
    """
    gpu = next((gpu for gpu in GPUS if gpu in str(run.environment.get("gpu", ""))), None)
    library = next((library for library in LIBRARIES if f"torch {run.environment.get('torch', '')}".startswith(library)), None)
    others = run.environment.get("matmul_allow_tf32") or _variables(run)
    return None if gpu is None or library is None or others else (gpu, library)


def operator_name(operation: Operation) -> str:
    """Return an operator's name in `OPERATIONS` and `EXACT`: without "aten.", and without the "_" of those that write to an operand."""
    name = operation.name.removeprefix("aten.")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def predict_operation(run: Record, operation: Operation, gpu: str, library: str) -> tuple[PredictedOperation, Answer | None]:
    """Judge one recorded operation.

    Args:
        run: The record.
        operation: The operation.
        gpu: A key of GPUS.
        library: A key of LIBRARIES.

    Returns:
        The judgement, and what computed the results; None if nothing did.
    """
    facts = operation.index, operation.path, operation.name
    name = operator_name(operation)
    if name not in OPERATIONS or not _has_floats(operation.operands):
        verdict, reason = (MOVES, EXACT[name]) if name in EXACT else (UNKNOWN, f"{name} has no rule")
        return PredictedOperation(*facts, verdict, reason=reason), None
    operands, expected = run.values(operation.operands), run.values(operation.results)
    if operands is None or expected is None:
        return PredictedOperation(
            *facts, MISSING, reason="the record keeps digests of it; record with a larger budget, and without rows"
        ), None
    try:
        arrays = [_lay(x, tensor.strides) for x, tensor in zip(operands, operation.operands, strict=True)]
        arguments = bind_arguments(OPERATIONS[name], *_arguments(operation.attributes, arrays))
        tf32, deterministic = bool(run.environment.get("cudnn_allow_tf32", True)), bool(run.environment.get("deterministic"))
        call = Call(name, arguments, tuple(x.dtype for x in expected), gpu, library, tf32=tf32, deterministic=deterministic)
        answer = OPERATIONS[name].compute(call)
    except (NotModelled, Unsupported) as error:
        return PredictedOperation(*facts, UNKNOWN, reason=str(error)), None
    words, wrong, skipped = 0, 0, []
    given = [x for x in answer.results if x is not None]
    for number, (found, recorded) in enumerate(zip_longest(given, expected)):
        if number in answer.open_results:
            skipped.append(f"result {number}: the order of its sums is open: {answer.open_results[number]}")
            continue
        if found is None or recorded is None or found.size != recorded.size or found.dtype != recorded.dtype:
            if not _is_state(found, recorded):
                skipped.append(f"result {number} is {_describe(found)} on the GPU, {_describe(recorded)} in the record")
            continue
        code = np.dtype(f"u{recorded.dtype.itemsize}")
        same = np.ascontiguousarray(found).reshape(-1).view(code) == np.ascontiguousarray(recorded).reshape(-1).view(code)
        same |= np.isnan(found.reshape(-1)) & np.isnan(recorded.reshape(-1))
        words, wrong = words + same.size, wrong + int((~same).sum())
    verdict = DIFFERENT if wrong else EQUAL if words or not skipped else UNKNOWN
    reason = answer.evidence.text if verdict != UNKNOWN else "no result has the GPU's dtype and size"
    line = PredictedOperation(*facts, verdict, words, wrong, answer.kernel, answer.evidence.status, reason, "; ".join(skipped))
    return line, answer


def _is_state(found: np.ndarray | None, recorded: np.ndarray | None) -> bool:
    """Return whether a recorded result is one of integers that no rule gives, as attention's seeds, offsets and sizes."""
    return found is None and recorded is not None and recorded.dtype.kind in "biu"


def _describe(x: np.ndarray | None) -> str:
    return "not given" if x is None else f"{x.dtype}{list(x.shape)}"


def _lay(x: np.ndarray, strides: tuple[int, ...] | None) -> np.ndarray:
    """Return an array whose elements lie in memory as those of the recorded operand."""
    if strides is None or not x.size:
        return x
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    if span > max(MAX_GAPS * x.size, SMALL_SPAN) or any(stride < 0 for stride in strides):
        raise NotModelled(f"an operand of {x.size:,} elements lies in {span:,}: its layout has no rule")
    laid = np.lib.stride_tricks.as_strided(np.zeros(span, x.dtype), x.shape, [stride * x.itemsize for stride in strides])
    laid[...] = x
    return laid


def _arguments(attributes: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> tuple[list[Any], dict[str, Any]]:
    """Return positional arguments and keyword arguments of a recorded call."""

    def restore(value: Any) -> Any:
        if isinstance(value, list):
            return [restore(item) for item in value]
        if not isinstance(value, str):
            return value
        if value.startswith("#") and value[1:].isdigit() and int(value[1:]) < len(arrays):
            return arrays[int(value[1:])]
        if value.startswith("torch.") and value[6:] in DTYPES:
            return DTYPES[value[6:]]
        return float(value) if value in SPECIAL_NUMBERS else value

    args, kwargs = attributes.get("args", []), attributes.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise NotModelled("the record has no arguments of this operation")
    return [restore(value) for value in args], {name: restore(value) for name, value in kwargs.items() if name not in PLACEMENT}
