"""Matrices in files: reading them, comparing their shapes, writing the result. Every fault is a CommandError."""

from pathlib import Path

import numpy as np

from tcemu.commands import CommandError
from tcemu.linalg.shapes import shape_of_product


def load(name: str, path: Path) -> np.ndarray:
    """The array of real numbers in a .npy file."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            if start[:4] == b"PK\x03\x04":
                raise CommandError(f"{name}: {path} is an .npz archive; one array is wanted, as numpy.save writes it")
            if start != b"\x93NUMPY":
                raise CommandError(f"{name}: {path} is not a .npy file; numpy.save writes one")
            x = np.load(file, allow_pickle=False)
    except OSError as error:
        raise CommandError(f"{name}: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        if "Object arrays" in str(error):
            raise CommandError(f"{name}: {path} holds Python objects, which are never loaded; save an array of numbers") from error
        raise CommandError(f"{name}: {path} is damaged: {error}") from error
    if x.dtype.kind == "V" and x.dtype.names is None:
        raise CommandError(
            f"{name}: {path} holds raw bytes ({x.dtype.str}): numpy.save drops the type of bfloat16 and float8 arrays; "
            "save x.astype(numpy.float32), which holds the same values"
        )
    if x.dtype.kind not in "biuf" or x.dtype.itemsize > 8:
        raise CommandError(f"{name}: {path} holds {x.dtype}; floats of 16, 32 or 64 bits, integers or booleans are wanted")
    if x.dtype.kind in "iu" and x.size and max(int(x.max()), -int(x.min())) > 2**53:
        raise CommandError(f"{name}: {path} holds integers beyond 2^53, which float64 does not hold exactly; scale them down")
    return x


def shape_of_files(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> tuple[int, ...]:
    """The shape [..., M, N] of D = A·B + C; C must have it too, since it is taken in the same blocks of rows as A."""
    try:
        shape = shape_of_product(a.shape, b.shape, names=("A", "B", "C"))
    except ValueError as error:
        raise CommandError(str(error)) from error
    if c is not None and c.shape != shape:
        raise CommandError(f"C: got shape {list(c.shape)}; wanted that of D, {list(shape)}")
    return shape


def check_writable(path: Path) -> None:
    """Refuses a place that cannot take the result, before any work is done for it."""
    if path.is_dir():
        raise CommandError(f"D: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise CommandError(f"D: the folder {path.parent} does not exist")


def save(path: Path, x: np.ndarray) -> None:
    """Writes a .npy file under exactly this name."""
    try:
        with path.open("wb") as file:
            np.save(file, x)
    except OSError as error:
        raise CommandError(f"D: {path} cannot be written: {error.strerror or error}") from error
