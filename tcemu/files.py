"""Files written whole, and folders that one process has to itself."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

WRITING = threading.RLock()  # held while a file is written; who ends the process takes it first, so that no half of a file stays


class InUse(ValueError):
    """Another run writes to the same folder."""


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file beside the old one and puts it in its place. A kill leaves the old file or the new one, whole.

    Raises OSError if it cannot be written: the old file is as it was, and nothing stays beside it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with WRITING:
        try:
            with beside.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def sweep(path: Path) -> None:
    """Removes what kills have left beside a file. Only for who has the folder to itself."""
    for left in path.parent.glob(f".{path.name}.*"):
        if left.suffix[1:].isdigit():
            with suppress(OSError):
                left.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """This process, or thread, has the folder to itself. The lock is the kernel's, so the end of a process, however it comes, frees it.

    Gives False where the file system has no locks. Raises InUse if another has the folder.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            raise InUse(f"out: another run writes to {folder}; wait until it ends, or choose another directory") from None
        except OSError:  # some network file systems
            alone = False
        yield alone
    finally:
        os.close(descriptor)
