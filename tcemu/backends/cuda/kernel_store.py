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

from tcemu.backends.cuda import nvrtc
from tcemu.base.compilation import user_cache_folder
from tcemu.base.files import replace_file

FOLDER = "TCEMU_KERNELS"  # the environment's variable that names another folder
CHECKSUM = hashlib.sha256().digest_size
KEPT = 512  # binaries that a process remembers
_running: dict[tuple[str, str], Future[bytes]] = {}  # compilations
_guard = Lock()  # guards _running


def kernel_folder() -> Path:
    """Returns the folder of binaries: $TCEMU_KERNELS, or tcemu/kernels of the user's cache. Raises RuntimeError if there is no home."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else user_cache_folder() / "kernels"


@lru_cache(maxsize=KEPT)
def load_or_compile(text: str, architecture: str) -> bytes:
    """Returns the binary of `nvrtc.compile_text`, from disk where it is kept. Raises nvrtc.CompilationError."""
    major, minor = nvrtc.version()
    key = "\0".join((text, architecture, *nvrtc.OPTIONS, f"{major}.{minor}"))
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.{architecture}"
    with suppress(OSError, RuntimeError):  # not kept yet, or no home
        if (kept := _intact((kernel_folder() / name).read_bytes())) is not None:
            return kept
    made = nvrtc.compile_text(text, architecture)
    with suppress(OSError, RuntimeError):  # a home that cannot be written, or none
        kernel_folder().mkdir(parents=True, exist_ok=True)
        replace_file(kernel_folder() / name, hashlib.sha256(made).digest() + made)
    return made


def start_compilation(text: str, architecture: str) -> Future[bytes]:
    """`binary` in another thread; what is asked for again while it runs is the same one."""
    key = text, architecture
    with _guard:
        if (running := _running.get(key)) is not None:
            return running
        started = _running[key] = _threads().submit(load_or_compile, text, architecture)
    started.add_done_callback(lambda _: _running.pop(key, None))
    return started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "tcemu compiles a kernel")


def _intact(data: bytes) -> bytes | None:
    """Returns the data behind the checksum, if it fits."""
    checksum, rest = data[:CHECKSUM], data[CHECKSUM:]
    return rest if rest and hashlib.sha256(rest).digest() == checksum else None
