"""Compiled programs in files beside JAX's persistent compilation cache, which spare later processes tracing, lowering and compiling.

XLA loads a program with host calls, which are calls of functions outside the program, only if those are registered. So a stored program
brings its host calls along, and they are registered first.
"""

import os
import pickle
import platform
import re
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import tcemu.base

HOST_CALL_PREFIX = "tcemu_"  # of the names of host calls
_load_lock = Lock()


class HostCall(Protocol):
    """A function outside the programs that call it, as a value that can be pickled."""

    def register(self) -> None:
        """Register the function with XLA in this process, unless that has been done."""
        ...


_host_calls: dict[str, HostCall] = {}  # by the name in programs


def note_host_call(name: str, function: HostCall) -> None:
    """Note the function behind a name, which begins with HOST_CALL_PREFIX, so that programs that call it can be stored."""
    _host_calls[name] = function


def find_host_calls(text: str) -> list[HostCall]:
    """Return the host calls whose names a program's text has. Another process must register them before it loads the program."""
    return [_host_calls[name] for name in sorted(set(re.findall(rf"\b{HOST_CALL_PREFIX}\w+", text)) & _host_calls.keys())]


def cache_subfolder(name: str) -> Path | None:
    """Return a folder within that of JAX's persistent compilation cache, or None where that is off; see `tcemu.cache_compilations`."""
    configured = jax.config.values
    if not configured["jax_enable_compilation_cache"] or not configured["jax_compilation_cache_dir"]:
        return None
    return Path(configured["jax_compilation_cache_dir"]) / name


def file_name(key: object) -> str:
    """Return the name of a program's file. key: all that the program depends on, with a `repr` that is the same in each process."""
    return f"{_environment()}-{blake2b(repr(key).encode(), digest_size=20).hexdigest()}"


def store_program(path: Path, compiled: jax.stages.Compiled, facts: Any = None) -> None:
    """Store a program, with facts that can be pickled, unless the folder or the backend does not allow it."""
    with suppress(OSError, ValueError):  # ValueError: this backend cannot serialise programs
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{get_ident()}")
        host_calls = find_host_calls(compiled.as_text() or "") if _host_calls else []
        temporary.write_bytes(pickle.dumps((host_calls, serialize(compiled), facts)))
        os.replace(temporary, path)  # without fsync: a file that a power failure cuts short is not read back


def load_program(path: Path | None, device: Any) -> tuple[jax.stages.Compiled, Any] | None:
    """Load a program for a device and its facts. Return None if no readable file holds the program."""
    if path is None or not path.exists():
        return None
    try:
        host_calls, program, facts = pickle.loads(path.read_bytes())
        for function in host_calls:
            function.register()
        with _load_lock:
            return deserialize_and_load(*program, execution_devices=[device]), facts
    except Exception:  # a file of a killed or foreign process is compiled anew, whatever is wrong with it
        return None


@cache
def _environment() -> str:
    """Return a digest of all that stored programs depend on besides their key: this package, jaxlib, the processor, XLA's flags."""
    digest = blake2b(digest_size=8)
    facts = (version("jax"), version("jaxlib"), platform.machine(), _processor(), os.environ.get("XLA_FLAGS"), jax.device_count())
    digest.update(repr((facts, jax.config.values["jax_disable_most_optimizations"])).encode())
    package = Path(tcemu.base.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def _processor() -> str:
    """Return the features of the processor, for which XLA compiles."""
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return platform.processor()
