"""The file of a run as bytes: its header and its counts. What is read is not trusted: sizes first, then contents, then sense."""

import io
import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from tcemu.fuzz.counts import Coverage

FILE = "run.npz"
FORMAT = 2  # of the file
MOST = 16  # mismatches whose operands the file keeps
MOST_BYTES = 1 << 24  # of a file; the largest instruction's 16 mismatches take a third of it
MOST_DIRECTORY = 1 << 16  # bytes of the zip's directory, some 11,000 of a whole run
MOST_MEMBER = 1 << 20  # bytes of the header or of one array of counts, unpacked
END = 22  # bytes of the record that ends a zip without a comment
NAMES = re.compile(r"(header|by_kind|coverage_[a-z]+|case_\d+_[a-z_]+)\.npy")
ADVICE = "choose another directory, or move the file away"

Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Damaged(ValueError):
    """The file of a run is cut short, changed, or none."""


def content(path: Path) -> bytes:
    """The bytes of a run's file. Raises Damaged if it is too large, or no file, and OSError."""
    size = path.stat().st_size
    if not path.is_file():
        raise Damaged(f"out: {path} is no file; {ADVICE}")
    if size > MOST_BYTES:
        raise Damaged(f"out: {path} has {size:,} bytes, more than a run's file can have, {MOST_BYTES:,}; {ADVICE}")
    with path.open("rb") as file:
        return file.read(MOST_BYTES)


def packed(header: Header, arrays: Arrays) -> bytes:
    """The bytes of a run's file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, header=np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def parsed(content: bytes, path: Path) -> tuple[Header, Arrays]:
    """The header, and the counts by their names. Raises Damaged with what is wrong."""
    try:
        members = _members(content)
        header = json.loads(_array(members.pop("header"), np.uint8, None).tobytes())
        _check_header(header)
        shapes = {"by_kind": (len(header["kinds"]), 2)}
        shapes |= {f"coverage_{name}": zeros.shape for name, zeros in Coverage.none()._asdict().items()}
        counts = {name: _array(data, np.int64, shapes[name]) for name, data in members.items()}
        _check_counts(header, counts, set(shapes))
    except Exception as error:  # a hostile file finds more ways to fail than can be listed
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise Damaged(f"out: {path} is damaged, or no run's file: {reason}; {ADVICE}") from error
    return header, counts


def _members(content: bytes) -> dict[str, bytes]:
    """The header and the counts as .npy bytes. The zip's directory is looked at before anything is unpacked."""
    end = content[-END:]
    if len(content) < END or end[:4] != b"PK\5\6" or end[-2:] != b"\0\0":
        raise ValueError("it does not end as a zip does" if content else "it is empty")
    directory = int.from_bytes(end[12:16], "little")
    if directory > MOST_DIRECTORY or content[-END - 20 : -END][:4] == b"PK\6\7":
        raise ValueError(f"its directory has {directory:,} bytes; at most {MOST_DIRECTORY:,} are wanted")
    members = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = archive.namelist()
        odd = [name for name in names if not NAMES.fullmatch(name)] or [name for name in names if names.count(name) > 1]
        if odd:
            raise ValueError(f"it holds {odd[0][:80]!r}, which no run writes" + (" twice" if names.count(odd[0]) > 1 else ""))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name.startswith("case_"):
                continue  # for people; they are made again, not read
            if info.file_size > MOST_MEMBER or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{name} unpacks to {info.file_size:,} bytes; at most {MOST_MEMBER:,} are wanted, stored or deflated")
            with archive.open(info) as member:
                members[name] = member.read(MOST_MEMBER + 1)
    return members


def _array(data: bytes, dtype: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """The array of .npy bytes, if it has this dtype and shape (None: a vector). No size is believed: the bytes are counted."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array of another version of .npy than 1.0")
    there, by_columns, kind = np.lib.format.read_array_header_1_0(stream)
    rest = data[stream.tell() :]
    wanted = shape if shape is not None else (len(rest),)
    if kind != np.dtype(dtype) or there != wanted or (by_columns and len(wanted) > 1):
        raise ValueError(f"{kind} {str(list(there))[:80]} stands where {np.dtype(dtype)} {list(wanted)} is wanted")
    return np.frombuffer(rest, dtype).reshape(wanted).copy()


def _check_header(header: Any) -> None:
    """Raises ValueError, or KeyError, if no run can have written it."""
    if not isinstance(header, dict):
        raise ValueError("the header is no table of names")
    if header["format"] != FORMAT:
        raise ValueError(f"its format is {header['format']!r:.40}, and this tcemu reads {FORMAT}")
    whole = lambda value: type(value) is int and 0 <= value < 1 << 64  # noqa: E731
    pair = lambda value: isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)  # noqa: E731
    names = ("cases", "seed", "done", "wrong_cases", "wrong_outputs")
    wrong = [name for name in names if not whole(header[name])]
    wrong += [name for name in ("op", "left", "right") if not isinstance(header[name], str)]
    kinds, first, seconds = header["kinds"], header["first"], header["seconds"]
    if not isinstance(kinds, list) or not kinds or not all(pair(kind) and whole(kind[1]) for kind in kinds):
        wrong.append("kinds")
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        wrong.append("seconds")
    if not isinstance(first, list) or not all(map(whole, first)) or first != sorted(set(first)):
        wrong.append("first")
    if wrong:
        raise ValueError(f"the header's {wrong[0]} is {str(header[wrong[0]])[:80]}, which no run writes")
    if header["done"] > header["cases"]:
        raise ValueError(f"it says that {header['done']:,} of {header['cases']:,} cases are done")
    within = header["wrong_cases"] <= min(header["done"], header["wrong_outputs"]) and all(number < header["done"] for number in first)
    if not within or bool(header["wrong_outputs"]) != bool(header["wrong_cases"]) or len(first) != min(header["wrong_cases"], MOST):
        raise ValueError("the header's counts do not fit each other")


def _check_counts(header: Header, counts: Arrays, names: set[str]) -> None:
    """Raises ValueError if the counts do not fit the header."""
    missing = names - counts.keys()
    if missing and (header["done"] or counts):
        raise ValueError(f"{min(missing)} is missing")
    if any((array < 0).any() for array in counts.values()):
        raise ValueError("a count is negative")
    if counts:
        by_kind = [sum(column) for column in zip(*counts["by_kind"].tolist(), strict=True)]
        if by_kind != [header["done"], header["wrong_cases"]] or counts["coverage_cases"][0] > header["done"]:
            raise ValueError(f"cases by kind, {by_kind}, are not those of the header, {[header['done'], header['wrong_cases']]}")
