"""Arrays in .npy files: reading them, checking the shapes of a product, and writing results. Every fault is a CommandError."""

import os
from collections.abc import Mapping
from io import BytesIO
from math import prod
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_array_header_2_0, read_magic

from tcemu.base.files import replace_file
from tcemu.engine.formats.number_formats import Format
from tcemu.faces.commands import CommandError, command_errors
from tcemu.operations.products.product_arguments import product_shape

MAX_MESSAGE_CHARACTERS = 160  # characters of a file's header that a message quotes


def load_array(name: str, path: Path, *, exact: bool = True) -> np.ndarray:
    """Read an array of real numbers from a .npy file, in this machine's byte order.

    The header is read first and compared with the file's length, so that a false header allocates no memory.

    Args:
        name: The name of the array in messages.
        path: The file.
        exact: Reject integers that float64 cannot represent.

    Raises:
        CommandError: The file cannot be read, or does not hold such an array.
    """
    try:
        kind = path.stat().st_mode
        if not S_ISREG(kind) and not S_ISDIR(kind):  # opening a pipe would wait for its writer
            raise CommandError(f"{name}: {path_text(path)} is not a regular file; save the array to one")
        with path.open("rb") as file:
            shape, columns_first, dtype = _read_header(name, path, file)
            x = np.fromfile(file, dtype, prod(shape)).reshape(shape, order="F" if columns_first else "C")
    except OSError as error:
        raise CommandError(f"{name}: {path_text(path)} cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise CommandError(f"{name}: {path_text(path)} does not fit in memory") from error
    except (ValueError, RuntimeError, OverflowError) as error:  # RuntimeError: links in a circle
        raise CommandError(f"{name}: {path_text(path)} is damaged: {error}") from error
    if exact and x.dtype.kind in "iu" and x.size and max(int(x.max()), -int(x.min())) > 2**53:
        raise CommandError(f"{name}: {path_text(path)} holds integers beyond 2^53, which float64 does not hold exactly; scale them down")
    return x.astype(x.dtype.newbyteorder("="), copy=False)


def _read_header(name: str, path: Path, file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """The shape, whether columns are stored first, and the dtype of an array that is supported and complete."""
    start = file.read(6)
    if start[:4] == b"PK\x03\x04":
        raise CommandError(f"{name}: {path_text(path)} is an .npz archive; expected one array, as numpy.save writes it")
    if start != b"\x93NUMPY":
        raise CommandError(f"{name}: {path_text(path)} is not a .npy file; numpy.save writes one")
    file.seek(0)
    try:
        with catch_warnings():
            simplefilter("ignore")  # NumPy warns about headers that Python 2 wrote
            version = read_magic(file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"it has version {version[0]}.{version[1]} of the format; 1.0, 2.0 and 3.0 are known")
            shape, columns_first, dtype = (read_array_header_1_0 if version == (1, 0) else read_array_header_2_0)(file)
    except Exception as error:  # a header is Python text, and its parsers raise many types
        raise CommandError(f"{name}: {path_text(path)} is damaged: {_first_line(error)}") from error
    _check_dtype(name, path, dtype)
    if any(type(axis) is not int or axis < 0 for axis in shape):  # NumPy lets True pass for a 1
        raise CommandError(f"{name}: {path_text(path)} is damaged: its header says shape {list(shape)}")
    count = prod(shape)
    here = os.fstat(file.fileno()).st_size - file.tell()
    if count * dtype.itemsize != here:
        claimed = f"{_first_line(list(shape))} of {dtype}, {_first_line(f'{count * dtype.itemsize:,}')} bytes"
        raise CommandError(f"{name}: {path_text(path)} is damaged: its header says {claimed}, and {here:,} follow it")
    return shape, columns_first, dtype


def _check_dtype(name: str, path: Path, dtype: np.dtype) -> None:
    """Reject dtypes other than real numbers of up to 64 bits."""
    if dtype.hasobject:
        raise CommandError(f"{name}: {path_text(path)} holds Python objects, which are never loaded; save an array of numbers")
    if dtype.kind == "V" and dtype.names is None and dtype.subdtype is None:
        raise CommandError(
            f"{name}: {path_text(path)} holds raw bytes ({dtype.str}): numpy.save drops the type of bfloat16 and float8 arrays; "
            "save x.astype(numpy.float32), which holds the same values"
        )
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        what = _first_line(dtype)
        raise CommandError(f"{name}: {path_text(path)} holds {what}; expected floats of 16, 32 or 64 bits, integers or booleans")


def _first_line(what: object) -> str:
    """The first line of a text, shortened for a message."""
    text = (str(what).splitlines() or [type(what).__name__])[0]
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[: MAX_MESSAGE_CHARACTERS - 3] + "..."


def output_shape(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> tuple[int, ...]:
    """The shape [..., M, N] of D = A·B + C. C must have it too, because it is added in the same blocks of rows."""
    with command_errors(ValueError):
        shape = product_shape(a.shape, b.shape, names=("A", "B", "C"))
    if c is not None and c.shape != shape:
        raise CommandError(f"C: got shape {list(c.shape)}; expected that of D, {list(shape)}")
    return shape


def memory_bytes() -> int:
    """Bytes of this machine's memory; a very large number where the system does not tell, as Windows."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62


def check_size(shape: tuple[int, ...], fmt: Format) -> None:
    """Reject a D that does not fit into this machine's memory. Small files can request one, with K = 0."""
    needed, available = prod(shape) * fmt.bits // 8, memory_bytes()
    if needed > available:
        size = f"{needed / 1e9:,.1f}" if needed < 1e18 else "more than 10^9"
        raise CommandError(f"D: {list(shape)} of {fmt} takes {size} GB; this machine has {available / 1e9:,.1f} GB")


def npy_bytes(x: np.ndarray) -> bytes:
    """The array as the bytes of a .npy file."""
    file = BytesIO()
    np.save(file, x)
    return file.getvalue()


class Output:
    """An output file. It never overwrites an input, overwrites an existing file only on request, and is never half written.

    The constructor checks the path before any work is done; `write` checks it again.
    """

    def __init__(self, path: Path, overwrite: bool, name: str = "", inputs: Mapping[str, Path] | None = None, ending: str = "") -> None:
        """Check the path.

        Args:
            path: The file.
            overwrite: The file may exist.
            name: The name of the output in messages.
            inputs: The files that the command reads, by name.
            ending: Ending of the file's kind, such as ".npy". A path with another ending is refused.

        Raises:
            CommandError: The path cannot be written.
        """
        if ending and path.suffix.lower() not in ("", ending):
            other = f"{name}: " if name else ""
            raise CommandError(
                f"{other}{path_text(path)} is no name of a {ending} file, which is written; name it {path_text(path.with_suffix(ending))}"
            )
        self.path, self.overwrite, self.name, self.inputs = path, overwrite, f"{name}: " if name else "", inputs or {}
        self._check_path()

    def write(self, content: bytes) -> None:
        """Write the whole content, or leave the old file as it is.

        Raises:
            CommandError: The path cannot be written.
        """
        path = self._check_path()  # another process may have written there
        try:
            if path.exists() and not path.is_file():  # a device or a pipe is written directly
                with path.open("wb") as file:
                    file.write(content)
            else:
                replace_file(path.resolve(), content)  # a link stays a link
        except OSError as error:
            raise CommandError(f"{self.name}{path_text(path)} cannot be written: {error.strerror or error}") from error

    def _check_path(self) -> Path:
        path, name = self.path, self.name
        try:
            if path.is_dir():
                raise CommandError(f"{name}{path_text(path)} is a folder; name a file in it")
            if not path.parent.is_dir():
                raise CommandError(f"{name}the folder {path_text(path.parent)} does not exist: No such file or directory")
            for read, own in self.inputs.items():
                if path.exists() and own.exists() and path.samefile(own):
                    also = "" if path == own else f", by another name: {path_text(own)}"
                    raise CommandError(f"{name}{path_text(path)} is {read}{also}. Inputs are never overwritten; name another file")
            if path.is_file() and not self.overwrite:
                raise CommandError(f"{name}{path_text(path)} exists already; name another file, or add --overwrite")
            path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise CommandError(f"{name}{path_text(path)} cannot be written: {getattr(error, 'strerror', None) or error}") from error
        return path


def path_text(path: Path) -> str:
    """The path as one printable line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)
