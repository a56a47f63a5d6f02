"""Hostile .npy files: each a mutation of a good one, by its number. None holds a matrix that fits, so that each must be refused."""

import gzip
import io
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

SHAPE = (4, 3)  # 48 bytes of float32: no other header on them can say that K is 5
MARK = "executed"  # the file that a pickle writes if anything loads it
Rng = np.random.Generator


class Executable:
    """Who unpickles it makes a file."""

    def __reduce__(self) -> tuple:
        return Path.touch, (Path(MARK),)


def npy(x: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, x, version=version)
    return file.getvalue()


def npy_with_header(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    """A file with any text for a header. length: what the file says that the header has, where that is not so."""
    text = header.encode() + b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + text + data


def header_text(descr: str = "'<f4'", order: str = "False", shape: str = "(4, 3)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}"


GOOD = npy(np.arange(12, dtype=np.float32).reshape(SHAPE))
DATA = GOOD[-48:]
DTYPES = ("<i4", ">f4", "<f2", "<f8", "<c8", "<U4", "|S48", "|V4", "<M8[s]", "|O", "<f16", "|b1", "|u1", "<q4", "nonsense", "")
SHAPES = (
    "(10000000000,)", "(100000, 100000)", "(9223372036854775807, 9223372036854775807)", f"({'9' * 4000}, 2)", "(-4, -3)", "(-12,)", "()",
    "(0, 7)", "(True, 12)", "(4.0, 3)", "('4', 3)", "4", "(4L, 3L)", "(12,)", f"({'1, ' * 70}4, 3)", f"(0, {10**30})", "((4, 3),)",
    "[4, 3]",
)  # fmt: skip
HEADERS = (
    "", "{}", "[]", "0", "{'descr': '<f4'}", "{", "(" * 5000, "-" * 5000 + "1", "'" * 3, "__import__('os')", "{**{}}", "\\x00", "é" * 20,
    header_text(descr="[('x', '<f4')]"), header_text(descr="('<f4', (3,))"), header_text(descr="[('x', '|O')]"), header_text(descr="None"),
    header_text(order="2"), header_text() + " " * 20_000, header_text() * 2, header_text().replace("descr", "shape"), "9" * 9000,
)  # fmt: skip


def truncate(rng: Rng) -> bytes:
    return GOOD[: rng.integers(len(GOOD))]


def flip_byte(rng: Rng, end: int = len(GOOD)) -> bytes:
    content = bytearray(GOOD)
    for _ in range(rng.integers(1, 9)):
        content[rng.integers(end)] ^= 1 << rng.integers(8)
    return bytes(content)


def flip_header_byte(rng: Rng) -> bytes:
    return flip_byte(rng, len(GOOD) - len(DATA))


def another_header(rng: Rng) -> bytes:
    descr, order = rng.choice(DTYPES), rng.choice(["False", "True"])
    return npy_with_header(header_text(f"'{descr}'", order, str(tuple(rng.integers(0, 9, rng.integers(5)).tolist()))), DATA)


def another_shape(rng: Rng) -> bytes:
    return npy_with_header(header_text(shape=rng.choice(SHAPES)), DATA if rng.random() < 0.5 else b"")


def odd_header(rng: Rng) -> bytes:
    length = int(rng.choice([0, 1, 10_001, 65_535])) if rng.random() < 0.3 else None
    return npy_with_header(rng.choice(HEADERS), DATA, (int(rng.integers(1, 4)), 0), length)


def pickle_array(rng: Rng) -> bytes:
    objects = np.array([[Executable(), 1]], object)
    with_header = npy_with_header(header_text("'|O'", shape="(1, 2)"), pickle.dumps(objects))
    return (pickle.dumps(Executable()), with_header, npy_with_header(header_text(), pickle.dumps(Executable())))[rng.integers(3)]


def another_array(rng: Rng) -> bytes:
    """A good file of what is no matrix that fits: another byte order, version, layout, kind or rank."""
    dtype = str(rng.choice([">f4", ">f8", ">i8", "<u8", "<c16", "<U3", "<M8[s]", "<m8[s]", "<f2", "|b1", "|S1", "|V3"]))
    x = np.zeros(tuple(rng.choice([1, 3, 4], rng.integers(0, 7)).tolist()), dtype)
    version = (None, (1, 0), (2, 0), (3, 0))[rng.integers(4)]
    return npy(np.asfortranarray(x) if rng.random() < 0.5 else x, version)


def no_array(rng: Rng) -> bytes:
    archive = io.BytesIO()
    np.savez_compressed(archive, np.zeros(10**4))
    noise = rng.bytes(int(rng.integers(300)))
    kinds = (b"", GOOD[:6], bytes(500), noise, archive.getvalue(), gzip.compress(GOOD), GOOD[:6] + noise, GOOD + noise + b"x", GOOD * 2)
    return kinds[rng.integers(len(kinds))]


KINDS: tuple[Callable[[Rng], bytes], ...] = (
    truncate, flip_byte, flip_header_byte, another_header, another_shape, odd_header, pickle_array, another_array, no_array,
)  # fmt: skip


def mutate(number: int) -> bytes:
    """The file of this number, always the same."""
    return KINDS[number % len(KINDS)](np.random.default_rng(number))
