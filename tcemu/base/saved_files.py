"""Saved files, read strictly: JSON, JSON in xz, and .npz archives of arrays with a JSON header.

A file that is read is not trusted. Sizes are checked before anything is unpacked, and everything unexpected raises `DamagedFile`.
"""

import io
import json
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

HEADER = "header"  # the member of an archive that holds its JSON header
MAX_DIRECTORY_BYTES = 1 << 16  # bytes of a zip's directory, which has some 11,000 in a complete run
MAX_MEMBER_BYTES = 1 << 20  # unpacked bytes of the header or of one array
MAX_JSON_BYTES = 1 << 24  # unpacked bytes of a compressed JSON file
ZIP_END_BYTES = 22  # bytes of the record that ends a zip without a comment


class DamagedFile(ValueError):
    """A saved file is truncated, changed, or of another kind."""


# ---- JSON


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text. Raises DamagedFile, also for duplicate names, NaN, infinities and nesting that is too deep."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise DamagedFile(f"a name stands twice among {', '.join(names)}"[:200])
        return dict(pairs)

    def reject(constant: str) -> Any:
        raise DamagedFile(f"{constant} is not a number of JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=reject)
    except RecursionError:
        raise DamagedFile("the text is nested too deep") from None
    except DamagedFile:
        raise
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError
        raise DamagedFile(str(error)) from None


def decompress_json(content: bytes) -> Any:
    """Read JSON in xz. Raises DamagedFile, also for more than MAX_JSON_BYTES."""
    decompressor = lzma.LZMADecompressor(memlimit=1 << 28)
    try:
        text = decompressor.decompress(content, MAX_JSON_BYTES)
    except lzma.LZMAError as error:
        raise DamagedFile(str(error)) from None
    if not decompressor.eof:
        raise DamagedFile(f"it is truncated, or unpacks to more than {MAX_JSON_BYTES:,} bytes")
    return parse_json(text)


def check_members(name: str, value: Any, expected: Collection[str]) -> dict[str, Any]:
    """Return a JSON object if it has exactly the expected members. Raises DamagedFile."""
    if not isinstance(value, dict):
        raise DamagedFile(f"{name}: got {str(value)[:80]}; expected an object with {', '.join(expected)}")
    if set(value) != set(expected):
        unknown, missing = sorted(set(value) - set(expected)), sorted(set(expected) - set(value))
        problems = [f"{problem} {names}" for problem, names in (("unknown", unknown), ("missing", missing)) if names]
        raise DamagedFile(f"{name}: {' and '.join(problems)}")
    return value


def check_saved(name: str, value: Any, kind: str, version: int, expected: Collection[str]) -> dict[str, Any]:
    """Return a JSON object if its "kind" and "version" are these and its other members the expected ones. Raises DamagedFile.

    Kind and version come first: a file of another kind has other members.
    """
    if isinstance(value, dict) and "kind" in value and "version" in value:
        found = value["kind"], value["version"]
        if found != (kind, version) or isinstance(found[1], bool):
            raise DamagedFile(f"this is {found[0]!r}, version {found[1]!r}; expected {kind!r}, version {version}")
    return check_members(name, value, ("kind", "version", *expected))


# ---- archives


def pack_archive(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Write arrays and a JSON header as an .npz archive."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8)
    np.savez_compressed(buffer, **{HEADER: text}, **arrays)  # pyright: ignore[reportArgumentType]
    return buffer.getvalue()


def unpack_archive(
    content: bytes,
    names: re.Pattern[str],
    skipped: str | None = None,
    largest: int = MAX_MEMBER_BYTES,
    max_directory: int = MAX_DIRECTORY_BYTES,
) -> tuple[Any, dict[str, bytes]]:
    """Read an archive of `pack_archive`. The zip's directory is checked before anything is unpacked.

    Args:
        content: Bytes of the archive.
        names: Pattern of the names that the archive may have, with ".npy".
        skipped: Prefix of names that are not read.
        largest: Unpacked bytes that an array may have.
        max_directory: Bytes that the zip's directory may have.

    Returns:
        The header, and the .npy bytes by name; see `read_array`.

    Raises:
        DamagedFile: The archive is damaged, or has other names or larger members.
    """
    end = content[-ZIP_END_BYTES:]
    if len(content) < ZIP_END_BYTES or end[:4] != b"PK\5\6" or end[-2:] != b"\0\0":
        raise DamagedFile("it does not end as a zip does" if content else "it is empty")
    directory = int.from_bytes(end[12:16], "little")
    if directory > max_directory or content[-ZIP_END_BYTES - 20 : -ZIP_END_BYTES][:4] == b"PK\6\7":
        raise DamagedFile(f"its directory has {directory:,} bytes; expected at most {max_directory:,}")
    members = {}
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        there = archive.namelist()
        counts = Counter(there)
        odd = [name for name in counts if not names.fullmatch(name)] or [name for name, count in counts.items() if count > 1]
        if odd:
            raise DamagedFile(f"it has an unexpected member {odd[0][:80]!r}" + (" twice" if counts[odd[0]] > 1 else ""))
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if skipped is not None and name.startswith(skipped):
                continue
            if info.file_size > largest or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DamagedFile(f"{name} unpacks to {info.file_size:,} bytes; expected at most {largest:,}, stored or deflated")
            with archive.open(info) as member:
                members[name] = member.read(largest + 1)
    if HEADER not in members:
        raise DamagedFile(f"{HEADER} is missing")
    return parse_json(read_array(members.pop(HEADER), np.uint8, None).tobytes()), members


def read_array(data: bytes, dtype: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    """Read .npy bytes as an array of this dtype and shape (None: a vector). No stated size is trusted: the bytes are counted.

    Raises DamagedFile for another dtype or shape.
    """
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise DamagedFile("an array has another .npy version than 1.0")
    stated, by_columns, kind = np.lib.format.read_array_header_1_0(stream)
    rest = data[stream.tell() :]
    expected = shape if shape is not None else (len(rest),)
    if kind != np.dtype(dtype) or stated != expected or (by_columns and len(expected) > 1):
        raise DamagedFile(f"got {kind} {str(list(stated))[:80]}; expected {np.dtype(dtype)} {list(expected)}")
    return np.frombuffer(rest, dtype).reshape(expected).copy()
