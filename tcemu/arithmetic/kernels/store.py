"""Compiled kernels, kept on disk: each compiled once a machine, whatever happens to the file.

An entry is written whole under another name and then renamed, so that two processes that compile at once both find one. It begins with the
checksum of its rest; one that does not fit is compiled again. Where nothing can be written, kernels are compiled once a process.
"""

import hashlib
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tcemu.arithmetic.kernels import nvrtc
from tcemu.files import replace_file

FOLDER = "TCEMU_KERNELS"  # the environment's variable that names another folder
CHECKSUM = hashlib.sha256().digest_size
KEPT = 512  # binaries that a process remembers


def folder() -> Path:
    """Where binaries are kept: $TCEMU_KERNELS, or tcemu/kernels of the user's cache."""
    named = os.environ.get(FOLDER)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(named) if named else Path(cache) / "tcemu" / "kernels"


@lru_cache(maxsize=KEPT)
def binary(text: str, architecture: str) -> bytes:
    """What `nvrtc.compiled` gives, from the disk where it is there. Raises nvrtc.CompilationError."""
    major, minor = nvrtc.version()
    key = "\0".join((text, architecture, *nvrtc.OPTIONS, f"{major}.{minor}"))
    path = folder() / f"{hashlib.sha256(key.encode()).hexdigest()}.{architecture}"
    kept = _read(path)
    if kept is not None:
        return kept
    made = nvrtc.compiled(text, architecture)
    with suppress(OSError):  # a home that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, hashlib.sha256(made).digest() + made)
    return made


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, rest = data[:CHECKSUM], data[CHECKSUM:]
    return rest if rest and hashlib.sha256(rest).digest() == checksum else None
