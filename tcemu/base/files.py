"""Files that are replaced atomically, and folders that are locked for one process."""

import os
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

WRITE_LOCK = (
    threading.RLock()
)  # held while a file is written; code that ends the process acquires it first, so that no partial file remains
# for a new file, under a name that nobody could guess: no file and no link that lies there is opened
EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
TOKEN_BYTES = 16  # random bytes in the name of a temporary file


class FolderInUse(ValueError):
    """Another run holds the lock on the same folder."""


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically: if the process is killed, either the old file or the new one remains, complete.

    The new file is written as a temporary file in the same folder, and then renamed.

    Args:
        path: File to write.
        content: Bytes of the new file.

    Raises:
        OSError: The file cannot be written. The old file is unchanged, and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(TOKEN_BYTES)}")
    with WRITE_LOCK:
        try:
            with open(os.open(temporary, EXCLUSIVE, 0o666), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed processes that were writing this file.

    Args:
        path: File that `replace_file` writes. The caller must hold the lock on its folder.
    """
    for temporary in path.parent.glob(f".{path.name}.*"):
        if re.fullmatch(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}", temporary.suffix[1:]):
            with suppress(OSError):
                temporary.unlink()


@contextmanager
def lock_folder(folder: Path) -> Iterator[bool]:
    """Lock a folder for this process or thread, as a context manager.

    The kernel holds the lock, so it is released when the process ends for any reason.

    Args:
        folder: Existing folder.

    Yields:
        True if the folder is locked, False if the platform or the file system has no locks.

    Raises:
        FolderInUse: Another process or thread holds the lock.
    """
    if fcntl is None:
        yield False
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            raise FolderInUse(f"out: another run writes to {folder}; wait until it ends, or choose another directory") from None
        except OSError:  # some network file systems have no locks
            locked = False
        yield locked
    finally:
        os.close(descriptor)
