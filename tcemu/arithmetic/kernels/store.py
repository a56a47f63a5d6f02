"""Compiled kernels, kept on disk: each compiled once a machine, whatever happens to the file.

An entry is written whole under another name and then renamed, so that two processes that compile at once both find one. It begins with the
checksum of its rest; one that does not fit is compiled again. Where nothing can be written, kernels are compiled once a process.
"""

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock

from tcemu.arithmetic.kernels import nvrtc
from tcemu.compilation import user_cache
from tcemu.files import replace_file

FOLDER = "TCEMU_KERNELS"  # the environment's variable that names another folder
CHECKSUM = hashlib.sha256().digest_size
KEPT = 512  # binaries that a process remembers
_running: dict[tuple[str, str], Future[bytes]] = {}  # compilations
_guard = Lock()  # of what runs


def folder() -> Path:
    """Where binaries are kept: $TCEMU_KERNELS, or tcemu/kernels of the user's cache. Raises RuntimeError if there is no home."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else user_cache() / "kernels"


@lru_cache(maxsize=KEPT)
def binary(text: str, architecture: str) -> bytes:
    """What `nvrtc.compiled` gives, from the disk where it is there. Raises nvrtc.CompilationError."""
    major, minor = nvrtc.version()
    key = "\0".join((text, architecture, *nvrtc.OPTIONS, f"{major}.{minor}"))
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.{architecture}"
    with suppress(OSError, RuntimeError):  # not kept yet, or no home
        if (kept := _intact((folder() / name).read_bytes())) is not None:
            return kept
    made = nvrtc.compiled(text, architecture)
    with suppress(OSError, RuntimeError):  # a home that cannot be written, or none
        folder().mkdir(parents=True, exist_ok=True)
        replace_file(folder() / name, hashlib.sha256(made).digest() + made)
    return made


def begun(text: str, architecture: str) -> Future[bytes]:
    """`binary` in another thread; what is asked for again while it runs is the same one."""
    key = text, architecture
    with _guard:
        if (running := _running.get(key)) is not None:
            return running
        started = _running[key] = _threads().submit(binary, text, architecture)
    started.add_done_callback(lambda _: _running.pop(key, None))
    return started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "tcemu compiles a kernel")


def _intact(data: bytes) -> bytes | None:
    """What follows the checksum, if it fits."""
    checksum, rest = data[:CHECKSUM], data[CHECKSUM:]
    return rest if rest and hashlib.sha256(rest).digest() == checksum else None
