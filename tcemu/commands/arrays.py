"""Matrices in files: reading them, comparing their shapes, writing the result. Every fault is a CommandError."""

import os
from io import BytesIO
from math import prod
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from tcemu.commands import CommandError
from tcemu.commands.outputs import shown
from tcemu.formats import Format
from tcemu.linalg.shapes import shape_of_product

LONGEST = 160  # characters of a file's own text that a message repeats


def load(name: str, path: Path, *, exact: bool = True) -> np.ndarray:
    """The array of real numbers in a .npy file, in this machine's byte order. exact: float64 must hold each of them.

    The header is read first, by itself, and held against the file's length: what it claims takes no memory until it is there.
    """
    try:
        kind = path.stat().st_mode
        if not S_ISREG(kind) and not S_ISDIR(kind):  # opening a pipe would wait for its writer
            raise CommandError(f"{name}: {shown(path)} is no regular file; save the array to one")
        with path.open("rb") as file:
            shape, columns_first, dtype = _header(name, path, file)
            x = np.fromfile(file, dtype, prod(shape)).reshape(shape, order="F" if columns_first else "C")
    except OSError as error:
        raise CommandError(f"{name}: {shown(path)} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise CommandError(f"{name}: {shown(path)} does not fit in memory") from error
    except (ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: links in a circle
        raise CommandError(f"{name}: {shown(path)} is damaged: {error}") from error
    if exact and x.dtype.kind in "iu" and x.size and max(int(x.max()), -int(x.min())) > 2**53:
        raise CommandError(f"{name}: {shown(path)} holds integers beyond 2^53, which float64 does not hold exactly; scale them down")
    return x.astype(x.dtype.newbyteorder("="), copy=False)


def _header(name: str, path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """The shape, whether columns are stored first, and the dtype. Raises CommandError for what is not wanted, or not there."""
    start = file.read(6)
    if start[:4] == b"PK\x03\x04":
        raise CommandError(f"{name}: {shown(path)} is an .npz archive; one array is wanted, as numpy.save writes it")
    if start != b"\x93NUMPY":
        raise CommandError(f"{name}: {shown(path)} is not a .npy file; numpy.save writes one")
    file.seek(0)
    try:
        with catch_warnings():
            simplefilter("ignore")  # NumPy says of headers that Python 2 wrote that they are slow to read
            version = read_magic(file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"it has version {version[0]}.{version[1]} of the format; 1.0, 2.0 and 3.0 are known")
            shape, columns_first, dtype = (read_array_header_1_0 if version == (1, 0) else read_array_header_2_0)(file)
    except Exception as error:  # what a header holds is Python text, and its parsers raise whatever they meet
        raise CommandError(f"{name}: {shown(path)} is damaged: {_first_line(error)}") from error
    _wanted(name, path, dtype)
    if any(type(axis) is not int or axis < 0 for axis in shape):  # NumPy lets True pass for a 1
        raise CommandError(f"{name}: {shown(path)} is damaged: its header says shape {list(shape)}")
    count = prod(shape)
    here = os.fstat(file.fileno()).st_size - file.tell()
    if count * dtype.itemsize != here:
        claimed = f"{_first_line(list(shape))} of {dtype}, {_first_line(f'{count * dtype.itemsize:,}')} bytes"
        raise CommandError(f"{name}: {shown(path)} is damaged: its header says {claimed}, and {here:,} follow it")
    return shape, columns_first, dtype


def _wanted(name: str, path: Path, dtype: np.dtype) -> None:
    """Refuses what are no real numbers, or none that float64 holds."""
    if dtype.hasobject:
        raise CommandError(f"{name}: {shown(path)} holds Python objects, which are never loaded; save an array of numbers")
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        raise CommandError(
            f"{name}: {shown(path)} holds raw bytes ({dtype.str}): numpy.save drops the type of bfloat16 and float8 arrays; "
            "save x.astype(numpy.float32), which holds the same values"
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        what = _first_line(dtype)
        raise CommandError(f"{name}: {shown(path)} holds {what}; floats of 16, 32 or 64 bits, integers or booleans are wanted")


def _first_line(what: object) -> str:
    """What goes into a message of one line: the first of its lines, cut where it is long."""
    text = (str(what).splitlines() or [type(what).__name__])[0]
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def shape_of_files(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> tuple[int, ...]:
    """The shape [..., M, N] of D = A·B + C; C must have it too, since it is taken in the same blocks of rows as A."""
    try:
        shape = shape_of_product(a.shape, b.shape, names=("A", "B", "C"))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if c is not None and c.shape != shape:
        raise CommandError(f"C: got shape {list(c.shape)}; wanted that of D, {list(shape)}")
    return shape


def check_size(shape: tuple[int, ...], fmt: Format) -> None:
    """Refuses a D that this machine's memory cannot hold: a small file may ask for it, with a K of 0."""
    if not hasattr(os, "sysconf"):  # as on Windows
        return
    wanted, held = prod(shape) * fmt.bits // 8, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > held:
        size = f"{wanted / 1e9:,.1f}" if wanted < 1e18 else "more than 10^9"
        raise CommandError(f"D: {list(shape)} of {fmt} takes {size} GB; this machine has {held / 1e9:,.1f} GB")


def npy(x: np.ndarray) -> bytes:
    """The array as a .npy file."""
    file = BytesIO()
    np.save(file, x)
    return file.getvalue()
