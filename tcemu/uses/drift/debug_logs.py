"""Logs of PyTorch's `DebugMode` as records without values: operators, shapes and hashes, which need nothing of tcemu on the GPU's machine.

    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes("hash_tensor", hash_inputs=True):
        model(x)
    Path("gpu.log").write_text(mode.debug_string())

"hash_tensor" is the exclusive or of the elements as float64, or as int64 for integers. No order of a sum is in it, so it is computed here
from the values of a record. "norm" is a sum in float64 in the order of the machine, without signs, and is not compared. A hash may hide a
difference: equal changes of two words cancel, and an element that stands twice leaves no trace.

Source: PyTorch 2.11.0, torch/utils/_debug_mode.py; logs of torch 2.11 and 2.13.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tcemu.base.saved_files import DamagedFile
from tcemu.uses.drift.records import UNKNOWN_DIGEST, Operation, Record, RecordSource, TensorRecord, read_record

DTYPE_NAMES = {  # PyTorch's abbreviations and NumPy's names
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    "f8e8m0fnu": "float8_e8m0fnu", "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u64": "uint64", "u32": "uint32",
    "u16": "uint16", "u8": "uint8", "b8": "bool",
}  # fmt: skip
OPERATOR = re.compile(r"^(?P<space> *)(?P<namespace>\w+)::(?P<name>\w+)(?:\.\w+)?\((?P<rest>.*)$")
MODULE = re.compile(r"^(?P<space> *)\[nn\.Mod[^\]]*\] (?P<path>\S+)$")
TENSOR = re.compile(r"\bd?t(?:\$\d+)?: (?P<dtype>\w+)\[(?P<shape>(?:\d{1,18}(?:, *\d{1,18})*)?)\]")
VIEWS = (  # operators that the recorder leaves out too, since they compute nothing
    "view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split", "split_with_sizes", "unbind",
    "detach", "alias", "as_strided", "_unsafe_view", "_reshape_alias", "diagonal", "unfold", "view_as_real", "view_as_complex", "movedim",
    "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty",
)  # fmt: skip
REQUEST = 'DebugMode.log_tensor_hashes("hash_tensor", hash_inputs=True)'


class DebugLog(Record):
    """The operations of a log, with hashes in place of digests."""

    has_values = False

    def __init__(self, text: str, name: str) -> None:
        """Read a log.

        Args:
            text: What `DebugMode.debug_string()` returned.
            name: The log's name.

        Raises:
            DamagedFile: It has no operators, or no hashes of operands and results.
        """
        self._begin(name)
        self.framework, self.complete = "torch", True
        modules: list[tuple[int, str]] = []  # indentation and path of the modules that are open
        for line in text.splitlines():
            indentation = len(line) - len(line.lstrip(" "))
            if (module := MODULE.match(line)) is not None:
                modules = [*(each for each in modules if each[0] < indentation), (indentation, module["path"].partition(".")[2])]
            elif (found := OPERATOR.match(line)) is not None and found["name"] not in VIEWS:
                modules = [each for each in modules if each[0] < indentation]
                self._add_line(f"{found['namespace']}.{found['name']}", modules[-1][1] if modules else "", found["rest"])
        if not self.operations:
            raise DamagedFile(f"{name}: this is no log of operators; expected the text of DebugMode.debug_string()")

    def _add_line(self, name: str, path: str, rest: str) -> None:
        number = len(self.operations)
        call, _, log = rest.rpartition("  # {")
        before, _, after = (call or rest).partition(")  ->  ")
        try:
            hashes = ast.literal_eval("{" + re.sub(r"\bnan\b", "None", re.sub(r"\binf\b", "1e999", log))) if call else {}
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            hashes = {}
        sides = [list(TENSOR.finditer(part)) for part in (before, after)]
        found = [
            _tensors(side, list(_flat_hashes(hashes.get(key)))) if isinstance(hashes, dict) else None
            for side, key in zip(sides, ("input_hash", "hash"), strict=True)
        ]
        if found[0] is None or found[1] is None:
            raise DamagedFile(f"{self.name}: operation {number}, {name}, has no hashes of its tensors; log them by {REQUEST}")
        self.operations.append(Operation(number, name, path, "", False, 0, {}, found[0], _compared(found[1])))


def _flat_hashes(tree: Any) -> Iterator[int]:
    """Return the hashes of integers in a tree; a pair of a norm and a hash, in any order, is one."""
    if isinstance(tree, int) and not isinstance(tree, bool):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from _flat_hashes(item)


def _tensors(matches: list[re.Match[str]], hashes: list[int]) -> tuple[TensorRecord, ...] | None:
    """Return the tensors of one side of a call; None if they do not have a hash each."""
    if len(matches) != len(hashes):
        return None
    shapes = [tuple(int(size) for size in match["shape"].split(",") if size.strip()) for match in matches]
    names = [DTYPE_NAMES.get(match["dtype"], match["dtype"]) for match in matches]
    return tuple(TensorRecord(shape, dtype, f"{number:x}", None, None) for shape, dtype, number in zip(shapes, names, hashes, strict=True))


def _compared(results: tuple[TensorRecord, ...]) -> tuple[TensorRecord, ...]:
    """Return the results that a GPU's and a CPU's run have in common: beside floats, integers are indices and states of generators."""
    floats = tuple(x for x in results if x.dtype.startswith(("float", "bfloat")))
    return floats or results


def hash_tensor(x: np.ndarray) -> str:
    """Return the hash of `torch.hash_tensor` as a log has it, or UNKNOWN_DIGEST for an array with NaN, whose bits depend on the machine."""
    is_float = x.dtype.kind not in "biu"
    wide = x.astype(np.float64 if is_float else np.int64)
    if is_float and np.isnan(wide).any():
        return UNKNOWN_DIGEST
    return f"{int(np.bitwise_xor.reduce(wide.reshape(-1).view(np.uint64), initial=np.uint64(0))):x}"


def hash_record(record: Record) -> Record:
    """Return a record with the hashes that a log of its operations would have, to be compared with a log.

    Args:
        record: A record of torch with its values.
    """
    if not record.has_values:
        return record
    known: dict[tuple[str, str], str] = {}

    def hashed(tensor: TensorRecord) -> TensorRecord:
        if tensor.identity not in known:
            value = None if tensor.rows is not None else record.value(tensor)
            known[tensor.identity] = UNKNOWN_DIGEST if value is None else hash_tensor(value)
        return replace(tensor, digest=known[tensor.identity])

    found = record.copy()
    found.operations = [
        replace(
            operation,
            operands=tuple(map(hashed, operation.operands)),
            results=_compared(tuple(map(hashed, operation.results))),
            backward=False,
            step=0,
        )
        for operation in record.operations
        if not operation.name.startswith("profiler.")  # which a log does not list
    ]
    return found


def read_run(source: RecordSource) -> Record:
    """Read a record, as `read_record` does, or a file with the text of a log.

    Args:
        source: A file, a finished recording, a record, or a record's bytes.

    Returns:
        A `Record`, or a `DebugLog`.

    Raises:
        DamagedFile: The file is neither.
        OSError: The file cannot be read.
    """
    if isinstance(source, str | os.PathLike) and (path := Path(source)).is_file():
        with path.open("rb") as file:
            begin = file.read(8)
        if begin and begin.isascii() and b"\0" not in begin:  # a record begins with a length, whose upper bytes are zeros
            return DebugLog(path.read_text(encoding="utf-8", errors="replace"), path.name)
    return read_record(source)
