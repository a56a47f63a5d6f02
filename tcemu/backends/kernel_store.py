"""Compiled kernels, kept on disk: each compiled once a machine, whatever happens to the file.

An entry is written whole under another name and then renamed, so that two processes that compile at once both find one. It begins with the
checksum of its rest; one that does not fit is compiled again. Where nothing can be written, kernels are compiled once a process.
"""

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tcemu.base.compilation import user_cache_folder
from tcemu.base.files import replace_file

FOLDER = "TCEMU_KERNELS"  # the environment's variable that names another folder
CHECKSUM = hashlib.sha256().digest_size
KEPT = 512  # binaries that a process remembers


class KernelCompiler(NamedTuple):
    """A compiler of kernels, as the store needs it."""

    facts: Callable[[], tuple[str, ...]]  # all that a binary depends on besides the text and the target: options, versions
    compile: Callable[[str, str], bytes]  # (text, target): the binary


_running: dict[tuple[KernelCompiler, str, str], Future[bytes]] = {}  # compilations
_guard = Lock()  # guards _running


def kernel_folder() -> Path:
    """Returns the folder of binaries: $TCEMU_KERNELS, or tcemu/kernels of the user's cache. Raises RuntimeError if there is no home."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else user_cache_folder() / "kernels"


@lru_cache(maxsize=KEPT)
def load_or_compile(compiler: KernelCompiler, text: str, target: str) -> bytes:
    """Returns the binary of a text, from disk where it is kept. Raises what the compiler raises.

    Args:
        compiler: Compiles a text that is not on disk.
        text: The kernel's source.
        target: The processor, as "sm_90". What follows a ":", as in "haswell:+avx2", is not shown in the file's name.
    """
    key = "\0".join((text, target, *compiler.facts()))
    name = f"{hashlib.sha256(key.encode()).hexdigest()}.{target.partition(':')[0]}"
    with suppress(OSError, RuntimeError):  # not kept yet, or no home
        if (kept := _intact((kernel_folder() / name).read_bytes())) is not None:
            return kept
    made = compiler.compile(text, target)
    with suppress(OSError, RuntimeError):  # a home that cannot be written, or none
        kernel_folder().mkdir(parents=True, exist_ok=True)
        replace_file(kernel_folder() / name, hashlib.sha256(made).digest() + made)
    return made


def start_compilation(compiler: KernelCompiler, text: str, target: str) -> Future[bytes]:
    """`load_or_compile` in another thread; what is asked for again while it runs is the same one."""
    key = compiler, text, target
    with _guard:
        if (running := _running.get(key)) is not None:
            return running
        started = _running[key] = _threads().submit(load_or_compile, compiler, text, target)
    started.add_done_callback(lambda _: _running.pop(key, None))
    return started


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "tcemu compiles a kernel")


def _intact(data: bytes) -> bytes | None:
    """Returns the data behind the checksum, if it fits."""
    checksum, rest = data[:CHECKSUM], data[CHECKSUM:]
    return rest if rest and hashlib.sha256(rest).digest() == checksum else None
