"""Records of `tcemu.uses.drift.recorder`, read strictly: a file is not trusted, and values are read when they are needed."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from tcemu.base.saved_files import DamagedFile, parse_json
from tcemu.uses.drift.recorder import DIGEST_BYTES, KIND, SAFETENSORS_NAMES, VERSION, Recording

MAX_HEADER_BYTES = 1 << 24  # bytes of the header of one operation
MAX_OPERATIONS = 1 << 20
CACHE_BYTES = 1 << 27  # bytes of values that a record holds in memory
DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name)) if name.startswith(("bfloat", "float8")) else np.dtype(name) for name in SAFETENSORS_NAMES
}
DTYPE_BY_CODE = {code: DTYPES[name] for name, code in SAFETENSORS_NAMES.items()}
UNKNOWN_DIGEST = ""  # of a tensor of which nothing is known
TENSOR_MEMBERS = {"shape", "dtype", "digest", "kept", "rows"}
OPERATION_MEMBERS = {"index", "name", "path", "source", "pass", "step", "attributes", "operands", "results"}


@dataclass(frozen=True)
class TensorRecord:
    """An operand or a result.

    Attributes:
        shape: Shape of the whole tensor.
        dtype: NumPy's name of its dtype.
        digest: Digest of all its bytes.
        kept: Digest of the kept bytes, or None if only the digest was kept.
        rows: Rows of the first axis that were kept, or None for all.
        strides: Strides of an operand that was not contiguous, in elements; None for a contiguous one. The value is kept contiguous.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    kept: str | None
    rows: tuple[int, ...] | None
    strides: tuple[int, ...] | None = None

    @property
    def identity(self) -> tuple[str, str]:
        """The dtype and the digest, which are equal for equal bits of any shape."""
        return self.dtype, self.digest

    @property
    def key(self) -> tuple[str, str, tuple[int, ...]]:
        """The dtype, the digest and the shape."""
        return self.dtype, self.digest, self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Operation:
    """One recorded operation.

    Attributes:
        index: Its number in the run.
        name: Operator of torch, primitive of JAX, "jit:NAME" for a function that was recorded whole, or "module.CLASS".
        path: Path of the module, or JAX's name stack.
        source: Line of the user's code, as "model.py:12".
        backward: True in the backward pass.
        step: Number of the training step.
        attributes: Parameters other than tensors.
        operands: The operands.
        results: The results.
        parts: The operations that it joins, if the other record has them as one; see `tcemu.uses.drift.joined_products`.
    """

    index: int
    name: str
    path: str
    source: str
    backward: bool
    step: int
    attributes: dict[str, Any]
    operands: tuple[TensorRecord, ...]
    results: tuple[TensorRecord, ...]
    parts: tuple[Operation, ...] = ()

    @property
    def title(self) -> str:
        """The number, path and name, as reports show them."""
        where = f"{self.path}: " if self.path else ""
        return f"{self.index} {where}{self.name}" + (" (backward)" if self.backward else "")


class Record:
    """The operations of a run, with their values on request.

    Attributes:
        name: Name of the file, or "memory".
        framework: Framework and version, as the recorder wrote it.
        environment: What the choice of kernels depends on: versions, GPU, driver, switches; {} in records of older recorders.
        operations: The operations in order.
        complete: True if the run closed the record. The record of a killed run has all operations that were written completely.
        absorbed: Numbers of the operations that are parts of one that stands in another place.
        has_values: False for a log of hashes; see `tcemu.uses.drift.debug_logs`.
    """

    has_values = True

    def __init__(self, open_file: Callable[[], BinaryIO], size: int, name: str) -> None:
        self._begin(name)
        self._open = open_file
        with self._open() as file:
            self._read_parts(file, size)

    def _begin(self, name: str) -> None:
        self.name, self.framework = name, ""
        self.environment: dict[str, Any] = {}
        self.operations: list[Operation] = []
        self.complete = False
        self.absorbed: set[int] = set()
        self._joined: dict[str, tuple[list[TensorRecord], int]] = {}  # tensors that are put together along an axis
        self._tensors: dict[str, tuple[int, int, np.dtype, tuple[int, ...]]] = {}  # offset, bytes, dtype, shape
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._cached_bytes = 0

    def _read_parts(self, file: BinaryIO, size: int) -> None:
        offset, first = 0, True
        while offset < size:
            file.seek(offset)
            length_bytes = file.read(8)
            length = int.from_bytes(length_bytes, "little")
            if len(length_bytes) == 8 and length > MAX_HEADER_BYTES:
                raise DamagedFile(f"{self.name}: a header at byte {offset:,} has {length:,} bytes; expected at most {MAX_HEADER_BYTES:,}")
            text = file.read(length)
            if len(length_bytes) < 8 or len(text) < length:
                break  # a killed run
            metadata, end = self._read_header(text, offset + 8 + length)
            if first and (metadata.get("kind"), metadata.get("version")) != (KIND, VERSION):
                got = f"{metadata.get('kind')!r}, version {metadata.get('version')!r}"[:120]
                raise DamagedFile(f"{self.name}: this is {got}; expected {KIND!r}, version {VERSION!r}")
            if end > size:
                break
            if first:
                self.framework = str(metadata.get("framework", ""))[:80]
                environment = parse_json(metadata["environment"]) if "environment" in metadata else {}
                if not isinstance(environment, dict):
                    raise DamagedFile(f"{self.name}: the environment is {str(environment)[:80]}; expected an object")
                self.environment = environment
            elif "operation" in metadata:
                self._add_operation(metadata["operation"])
            elif metadata.get("end") == str(len(self.operations)):
                self.complete = True
                if end != size:
                    raise DamagedFile(f"{self.name}: {size - end:,} bytes follow the end of the record")
            else:
                raise DamagedFile(f"{self.name}: the part at byte {offset:,} is neither an operation nor the end of the record")
            offset, first = end, False
        if first:
            raise DamagedFile(f"{self.name}: it is {'empty' if not size else 'truncated within its first header'}")

    def _read_header(self, text: bytes, start: int) -> tuple[dict[str, str], int]:
        """Return a part's metadata and the position of its end."""
        header = parse_json(text)
        metadata = header.pop("__metadata__", None) if isinstance(header, dict) else None
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise DamagedFile(f"{self.name}: a header has no metadata of texts; it is no record of tcemu.uses.drift.recorder")
        expected = 0
        for name, facts in header.items():
            if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
                raise DamagedFile(f"{self.name}: tensor {name[:40]!r}: got {str(facts)[:80]}; expected dtype, shape and data_offsets")
            dtype, shape, offsets = DTYPE_BY_CODE.get(str(facts["dtype"])), _read_shape(facts["shape"]), facts["data_offsets"]
            if dtype is None or shape is None or offsets != [expected, expected + prod(shape) * dtype.itemsize]:
                raise DamagedFile(f"{self.name}: tensor {name[:40]!r}: dtype, shape and offsets do not agree: {str(facts)[:120]}")
            if name in self._tensors:
                raise DamagedFile(f"{self.name}: tensor {name[:40]!r} stands twice")
            self._tensors[name] = (start + expected, prod(shape) * dtype.itemsize, dtype, shape)
            expected = offsets[1]
        return metadata, start + expected

    def _add_operation(self, text: str) -> None:
        data = parse_json(text)
        number = len(self.operations)
        if number >= MAX_OPERATIONS:
            raise DamagedFile(f"{self.name}: it has more than {MAX_OPERATIONS:,} operations")
        kinds = {"index": int, "name": str, "path": str, "source": str, "pass": str, "step": int, "attributes": dict, "operands": list}
        fits = isinstance(data, dict) and set(data) == OPERATION_MEMBERS and isinstance(data["results"], list)
        if not fits or any(type(data[name]) is not kind for name, kind in kinds.items()) or data["index"] != number:
            raise DamagedFile(f"{self.name}: operation {number}: got {str(data)[:120]}; expected its members {sorted(OPERATION_MEMBERS)}")
        self.operations.append(
            Operation(
                number,
                data["name"],
                data["path"],
                data["source"],
                data["pass"] == "backward",
                data["step"],
                data["attributes"],
                tuple(self._read_tensor(number, item) for item in data["operands"]),
                tuple(self._read_tensor(number, item) for item in data["results"]),
            )
        )

    def _read_tensor(self, number: int, data: Any) -> TensorRecord:
        wrong = DamagedFile(f"{self.name}: operation {number}: {str(data)[:120]} is no tensor of this record")
        if not isinstance(data, dict) or set(data) - {"strides"} != TENSOR_MEMBERS:
            raise wrong
        shape, dtype, digest, kept, rows = (data[name] for name in ("shape", "dtype", "digest", "kept", "rows"))
        shape, strides = _read_shape(shape), None if data.get("strides") is None else _read_shape(data["strides"])
        if data.get("strides") is not None and (shape is None or strides is None or len(strides) != len(shape)):
            raise wrong
        if shape is None or not isinstance(dtype, str) or not isinstance(digest, str) or len(digest) != 2 * DIGEST_BYTES:
            raise wrong
        if rows is not None and not (shape and isinstance(rows, list) and all(type(row) is int and 0 <= row < shape[0] for row in rows)):
            raise wrong
        if kept is not None:
            stored = self._tensors.get(kept) if isinstance(kept, str) else None
            count = prod(shape) if rows is None else len(rows) * prod(shape[1:])
            if stored is None or dtype not in DTYPES or stored[1] != count * DTYPES[dtype].itemsize:
                raise wrong
        return TensorRecord(shape, dtype, digest, kept, None if rows is None else tuple(rows), strides)

    def value(self, tensor: TensorRecord) -> np.ndarray | None:
        """Return the kept value of a tensor, its kept rows if not all were kept, or None.

        Raises:
            DamagedFile: The bytes have another digest than the record says.
        """
        if tensor.kept is None:
            return None
        if tensor.kept in self._joined:
            return self._concatenate(*self._joined[tensor.kept])
        found = self._cache.get(tensor.kept)
        if found is None:
            offset, length, _, _ = self._tensors[tensor.kept]
            with self._open() as file:
                file.seek(offset)
                data = file.read(length)
            if hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest() != tensor.kept:
                raise DamagedFile(f"{self.name}: the bytes of tensor {tensor.kept} are not those that were recorded")
            found = np.frombuffer(data, np.uint8)
            self._cache[tensor.kept] = found
            self._cached_bytes += length
            while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
                self._cached_bytes -= len(self._cache.popitem(last=False)[1])
        shape = tensor.shape if tensor.rows is None else (len(tensor.rows), *tensor.shape[1:])
        return found.view(DTYPES[tensor.dtype]).reshape(shape)

    def values(self, tensors: tuple[TensorRecord, ...]) -> list[np.ndarray] | None:
        """Return the values of tensors, or None if one of them was not kept whole."""
        found = [None if tensor.rows is not None else self.value(tensor) for tensor in tensors]
        return [x for x in found if x is not None] if all(x is not None for x in found) else None

    def stored_order(self, tensor: TensorRecord) -> tuple[tuple[str, str], tuple[int, ...], tuple[int, ...]] | None:
        """Find how the elements of a view lie in memory, by which it is a transposition of an earlier result.

        Args:
            tensor: An operand of the record.

        Returns:
            The identity and the shape of the elements in memory, and the axes that transpose them to the operand; None if the operand is
            contiguous, has gaps or repeats in memory, or was not kept whole.
        """
        value = None if tensor.strides is None or tensor.rows is not None else self.value(tensor)
        if value is None or tensor.strides is None:
            return None
        strides = tensor.strides
        order = sorted(range(len(strides)), key=lambda axis: (-strides[axis], tensor.shape[axis] == 1))
        laid = np.ascontiguousarray(value.transpose(order))
        dense = [prod(laid.shape[place + 1 :]) for place in range(laid.ndim)]
        if any(strides[axis] != step and tensor.shape[axis] > 1 for axis, step in zip(order, dense, strict=True)):
            return None
        digest = hashlib.blake2b(laid.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
        return (tensor.dtype, digest), laid.shape, tuple(int(axis) for axis in np.argsort(order))

    def copy(self) -> Record:
        """Return a record of the same operations, which may be changed."""
        changed = copy(self)
        changed.operations, changed.absorbed, changed._joined = list(self.operations), set(self.absorbed), dict(self._joined)
        return changed

    def join(self, tensors: list[TensorRecord], axis: int) -> TensorRecord:
        """Put tensors of the record together along an axis. Their values must have been kept whole."""
        value = self._concatenate(tensors, axis)
        digest = hashlib.blake2b(value.tobytes(), digest_size=DIGEST_BYTES).hexdigest()
        name = f"joined {digest}"
        self._joined[name] = tensors, axis
        return TensorRecord(value.shape, tensors[0].dtype, digest, name, None)

    def _concatenate(self, tensors: list[TensorRecord], axis: int) -> np.ndarray:
        return np.concatenate([x for x in map(self.value, tensors) if x is not None], axis)

    def __repr__(self) -> str:
        end = "" if self.complete else ", of a run that did not end"
        return f"<Record {self.name}: {len(self.operations)} operations, {self.framework}{end}>"


def _read_shape(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 48 for size in value) or len(value) > 32:
        return None
    return tuple(value)


RecordSource = str | os.PathLike | Recording | Record | bytes


def read_record(source: RecordSource) -> Record:
    """Read a record.

    Args:
        source: A file, the `Recording` of a finished run, or its bytes.

    Returns:
        The record. Values are read from the file when they are needed.

    Raises:
        DamagedFile: The file is no record, or was changed.
        OSError: The file cannot be read.
    """
    if isinstance(source, Record):
        return source
    if isinstance(source, Recording):
        source = source.content() if source.path is None else source.path
    if isinstance(source, bytes):
        content = source
        return Record(lambda: BytesIO(content), len(content), "memory")
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such record")
    return Record(lambda: path.open("rb"), path.stat().st_size, path.name)


def read_values(source: RecordSource) -> Record:
    """Read a record of values; see `read_record`.

    Raises:
        ValueError: The source is a log of hashes.
    """
    record = read_record(source)
    if not record.has_values:
        raise ValueError(
            f"{record.name}: a log has hashes, and no values to compute with. Record the run as the GPU computes it, by "
            "tcemu.torch.emulate(gpu=...) and tcemu.drift.record, and compare the two: tcemu drift LOG RECORD"
        )
    return record
