"""Compiled code in files: kernels and whole programs, each compiled once a machine and read by later processes.

Whoever can write such a file chooses the code that its readers run. So entries are read only from folders and files of the effective user
that nobody else may write, through the descriptor of the folder that was looked at; elsewhere everything is compiled anew, with a warning.

An entry is a regular file: a header, and the content. The header has a checksum over the key and the content. The key is all that the
content depends on, so a damaged entry and one that was copied over another's name are compiled anew. Entries are written under an
unpredictable name and renamed, and the ones that were not used for the longest time go when a folder outgrows its bound.
"""

import hashlib
import os
import pickle
import platform
import re
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import Any, NamedTuple, Protocol

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import tcemu.base
from tcemu.base.errors import warn_once
from tcemu.base.files import EXCLUSIVE, TOKEN_BYTES, WRITE_LOCK

KERNEL_VARIABLE = "TCEMU_KERNELS"  # environment variable: a folder for kernels, or one of OFF_VALUES
CACHE_VARIABLE = "TCEMU_COMPILATION_CACHE"  # environment variable: a folder for programs, or one of OFF_VALUES
OFF_VALUES = ("", "0", "off")
PAGE = 'docs/speed.md, "Compiled code on disk"'

HEADER = Struct("<8sQ32s")  # MAGIC, bytes of the content, SHA-256
MAGIC = b"tcemu\0\0\1"
MAX_ENTRY_BYTES = 1 << 26  # a larger file is neither read nor written
MAX_FOLDER_BYTES = 1 << 29  # of all entries of a folder
SWEEP_BYTES = MAX_FOLDER_BYTES // 16  # bytes that a process writes between two looks at a folder's size
LEFT_BYTES = MAX_FOLDER_BYTES // 4 * 3  # that a sweep leaves of a folder beyond the bound
USED_SECONDS = 24 * 3600  # an entry's time is renewed when it is read, at most so often
ABANDONED_SECONDS = 3600  # age of a temporary file that no process writes any more
ENTRY_NAME = re.compile(r"[\w.+-]+-[0-9a-f]{64}\.tcemu")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{32}\.tcemu")

HAS_OWNERS = hasattr(os, "geteuid")  # not on Windows, where the user's cache folder is the user's alone
BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
MAX_KERNELS = 512  # binaries that a process remembers
LOADED = time.time()  # when this process began to load the package
HOST_CALL_PREFIX = "tcemu_"  # of the names of host calls


# ---- whom a folder belongs to


def user_cache_folder() -> Path:
    """Return the folder for files that tcemu can make again, inside the platform's cache folder. A relative one is ignored, as XDG demands.

    Raises:
        RuntimeError: The user has no home directory.
    """
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "tcemu"
    variable, usual = ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    named = Path(os.environ.get(variable, ""))
    return (named if named.is_absolute() else Path.home() / usual) / "tcemu"


def make_private_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(0o700)
    if not path.is_dir():
        raise NotADirectoryError(f"{path}: not a directory")


def path_refusal(path: Path) -> str:
    """Return why code must not be read by a folder's path; "" if only this user and root can put files into it or move it away."""
    try:
        resolved = path.resolve(strict=True)
        if HAS_OWNERS:
            for above in dict.fromkeys((*path.absolute().parents, *resolved.parents)):
                if reason := _refusal(above.stat(), above=True):
                    return f"{above} is above it, and of that, {reason}"
        return _refusal(resolved.stat())
    except OSError as error:
        return str(error)


def warn_of_folder(folder: Path, reason: str) -> None:
    """Warn once that code of a folder is not used."""
    warn_once(f"tcemu uses no compiled code of {folder}: {reason}. Everything is compiled anew; {PAGE}, says what to do")


def _refusal(found: os.stat_result, *, above: bool = False) -> str:
    """Return who else may change a file or folder; "" if nobody. above: a folder above, which root may own and others write if sticky."""
    if not HAS_OWNERS:
        return ""
    user = os.geteuid()
    if found.st_uid != user and not (above and found.st_uid == 0):
        return f"it belongs to user {found.st_uid}, and this process runs as user {user}"
    if found.st_mode & BY_OTHERS and not (above and found.st_mode & stat.S_ISVTX):
        return f"others may write it (mode {stat.S_IMODE(found.st_mode):03o}; chmod go-w)"
    return ""


class _Untrusted(Exception):
    """Somebody else may have written what would be read."""


# ---- entries


class Entry(NamedTuple):
    """The name of a file and all that its content depends on."""

    label: str  # begins the file's name, for people: letters, digits and "_.+-"
    key: tuple[str, ...]  # what the content is of and for: text, versions, options, processor

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.label}-{hashlib.sha256(repr(self).encode()).hexdigest()}.tcemu"

    def header(self, content: bytes) -> bytes:
        """Return the header of a file with this content."""
        key = repr(self).encode()
        return HEADER.pack(MAGIC, len(content), hashlib.sha256(b"%d:%b%b" % (len(key), key, content)).digest())


def read_entry(folder: Path | None, entry: Entry) -> bytes | None:
    """Return the content of an entry. Return None if there is none, it is damaged, or somebody else may have written it."""
    if folder is None:
        return None
    with suppress(OSError):
        try:
            with _open_folder(folder) as at:
                return _read_entry(at, entry)
        except _Untrusted as error:
            warn_of_folder(folder, str(error))
    return None


def write_entry(folder: Path | None, entry: Entry, content: bytes) -> None:
    """Write an entry, unless the folder does not allow it, or somebody else may write there."""
    if folder is None or len(content) > MAX_ENTRY_BYTES - HEADER.size:
        return
    with suppress(OSError):
        make_private_folder(folder)
        try:
            with _open_folder(folder) as at, WRITE_LOCK:
                _write_entry(at, entry, content)
                _sweep(at, len(content))
        except _Untrusted as error:
            warn_of_folder(folder, str(error))


class _OpenFolder(NamedTuple):
    """A folder whose owner was looked at. Files are reached through its descriptor, so that no other folder can take its place."""

    path: Path
    descriptor: int | None  # None: the platform has no descriptors of folders

    def at(self, name: str) -> str:
        """Return a file's path for the functions of `os`, which need `where` too."""
        return name if self.descriptor is not None else str(self.path / name)

    @property
    def where(self) -> dict[str, int]:
        return {} if self.descriptor is None else {"dir_fd": self.descriptor}

    def remove(self, name: str) -> None:
        """Remove a file that may be gone already."""
        with suppress(OSError):
            os.unlink(self.at(name), **self.where)


@contextmanager
def _open_folder(path: Path) -> Iterator[_OpenFolder]:
    if not HAS_OWNERS:
        yield _OpenFolder(path, None)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if reason := _refusal(os.fstat(descriptor)):
            raise _Untrusted(reason)
        yield _OpenFolder(path, descriptor)
    finally:
        os.close(descriptor)


def _read_entry(folder: _OpenFolder, entry: Entry) -> bytes | None:
    """Raises OSError if there is no such file."""
    # a FIFO that nobody writes does not block, and a link is not followed
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    if not stat.S_ISREG(os.stat(folder.at(entry.name), follow_symlinks=False, **folder.where).st_mode):
        raise _Untrusted("an entry is a link or no regular file")
    descriptor = os.open(folder.at(entry.name), flags, **folder.where)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _Untrusted("an entry is no regular file")
        if reason := _refusal(found):
            raise _Untrusted(f"of an entry, {reason}")
        if not HEADER.size <= found.st_size <= MAX_ENTRY_BYTES:
            return None
        header = _read_bytes(descriptor, HEADER.size)
        if len(header) < HEADER.size or HEADER.unpack(header)[:2] != (MAGIC, found.st_size - HEADER.size):
            return None
        content = _read_bytes(descriptor, found.st_size - HEADER.size)
        if entry.header(content) != header:
            return None
        if os.utime in os.supports_fd and time.time() - found.st_mtime > USED_SECONDS:
            os.utime(descriptor)
        return content
    finally:
        os.close(descriptor)


def _read_bytes(descriptor: int, count: int) -> bytes:
    """Read so many bytes, or fewer if the file ends."""
    parts = []
    while count and (part := os.read(descriptor, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _write_entry(folder: _OpenFolder, entry: Entry, content: bytes) -> None:
    temporary = f".{secrets.token_hex(TOKEN_BYTES)}.tcemu"
    try:
        with open(os.open(folder.at(temporary), EXCLUSIVE, 0o600, **folder.where), "wb") as file:
            file.write(entry.header(content) + content)
        # without fsync: a file that a power failure cuts short does not have its checksum
        if folder.descriptor is None:
            os.replace(folder.at(temporary), folder.at(entry.name))
        else:
            os.replace(temporary, entry.name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
    except BaseException:
        folder.remove(temporary)
        raise


_unswept: dict[tuple[int, int], int] = {}  # bytes that this process wrote since its last sweep, by the folder's device and number


def _sweep(folder: _OpenFolder, written: int) -> None:
    """Remove temporary files of killed processes and, in a folder beyond its bound, the entries that were not used for the longest time."""
    found = os.stat(folder.path) if folder.descriptor is None else os.fstat(folder.descriptor)
    number = found.st_dev, found.st_ino
    _unswept[number] = _unswept.get(number, SWEEP_BYTES) + written
    if _unswept[number] < SWEEP_BYTES:
        return
    _unswept[number] = 0
    entries, total, now = [], 0, time.time()
    with os.scandir(folder.path if folder.descriptor is None else folder.descriptor) as files:
        for file in files:
            with suppress(OSError):
                status = file.stat(follow_symlinks=False)
                if ENTRY_NAME.fullmatch(file.name):
                    entries.append((status.st_mtime, status.st_size, file.name))
                    total += status.st_size
                elif TEMPORARY_NAME.fullmatch(file.name) and now - status.st_mtime > ABANDONED_SECONDS:
                    folder.remove(file.name)
    if total > MAX_FOLDER_BYTES:
        for _, size, name in sorted(entries):
            if total <= LEFT_BYTES:
                break
            folder.remove(name)
            total -= size


# ---- kernels


class KernelCompiler(NamedTuple):
    """A compiler of kernels, as the store needs it."""

    facts: Callable[[], tuple[str, ...]]  # all that a binary depends on besides the text and the target: options, versions
    compile: Callable[[str, str], bytes]  # (text, target): the binary


def kernel_folder() -> Path | None:
    """Return the folder of kernels: $TCEMU_KERNELS, or tcemu/kernels of the user's cache. None: it is off, or there is no home."""
    named = os.environ.get(KERNEL_VARIABLE)
    if named in OFF_VALUES:
        return None
    try:
        return Path(named).expanduser().absolute() if named else user_cache_folder() / "kernels"
    except RuntimeError:
        return None


@lru_cache(maxsize=MAX_KERNELS)
def load_or_compile(compiler: KernelCompiler, text: str, target: str) -> bytes:
    """Return the binary of a text, from disk where it is stored. Raises what the compiler raises.

    Args:
        compiler: Compiles a text that is not on disk.
        text: The kernel's source.
        target: The processor, as "sm_90". What follows a ":", as in "haswell:+avx2", is not shown in the file's name.
    """
    folder, entry = kernel_folder(), Entry(target.partition(":")[0], ("kernel", text, target, *compiler.facts()))
    stored = read_entry(folder, entry)
    if stored is not None:
        return stored
    binary = compiler.compile(text, target)
    write_entry(folder, entry, binary)
    return binary


_running: dict[tuple[KernelCompiler, str, str], Future[bytes]] = {}  # compilations
_guard = Lock()  # guards _running


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


# ---- programs, which spare later processes tracing, lowering and compiling


class HostCall(Protocol):
    """A function outside the programs that call it, as a value that can be pickled.

    XLA loads a program with host calls only if those are registered. So a stored program brings its host calls along.
    """

    def register(self) -> None:
        """Register the function with XLA in this process, unless that has been done."""
        ...


_host_calls: dict[str, HostCall] = {}  # by the name in programs
_load_lock = Lock()


def note_host_call(name: str, function: HostCall) -> None:
    """Note the function behind a name, which begins with HOST_CALL_PREFIX, so that programs that call it can be stored."""
    _host_calls[name] = function


def find_host_calls(text: str) -> list[HostCall]:
    """Return the host calls whose names a program's text has. Another process must register them before it loads the program."""
    return [_host_calls[name] for name in sorted(set(re.findall(rf"\b{HOST_CALL_PREFIX}\w+", text)) & _host_calls.keys())]


def default_cache_folder() -> Path | None:
    """Return the folder for compiled programs: $TCEMU_COMPILATION_CACHE, or a folder per jaxlib version in the user's cache. None: off.

    Raises:
        RuntimeError: The user has no home directory.
    """
    named = os.environ.get(CACHE_VARIABLE)
    if named in OFF_VALUES:
        return None
    return Path(named or user_cache_folder() / f"jaxlib-{version('jaxlib')}").expanduser().absolute()


def cache_subfolder(name: str, *, always: bool = False) -> Path | None:
    """Return a folder for programs within that of JAX's persistent compilation cache; see `tcemu.cache_compilations`.

    Args:
        name: Name of the folder.
        always: Where JAX has no folder for its cache, return one within `default_cache_folder`.

    Returns:
        The folder, or None: the cache is off.
    """
    configured = jax.config.values
    if not configured["jax_enable_compilation_cache"]:
        return None
    if configured["jax_compilation_cache_dir"]:
        return Path(configured["jax_compilation_cache_dir"]) / name
    try:
        default = default_cache_folder() if always else None
    except RuntimeError:
        return None
    return None if default is None else default / name


def program_entry(key: object, label: str = "program") -> Entry:
    """Return a program's entry. key: all that the program depends on, with a `repr` that is the same in each process."""
    return Entry(label, ("program", _environment(), repr(key)))


def store_program(folder: Path | None, entry: Entry, compiled: jax.stages.Compiled, facts: Any = None) -> None:
    """Store a program, with facts that can be pickled, unless the folder or the backend does not allow it."""
    if folder is None:
        return
    with suppress(ValueError):  # this backend cannot serialise programs
        host_calls = find_host_calls(compiled.as_text() or "") if _host_calls else []
        write_entry(folder, entry, pickle.dumps((host_calls, serialize(compiled), facts)))


def load_program(folder: Path | None, entry: Entry, device: Any) -> tuple[jax.stages.Compiled, Any] | None:
    """Load a program for a device and its facts. Return None if no readable file holds the program."""
    stored = read_entry(folder, entry)
    if stored is None:
        return None
    try:
        host_calls, program, facts = pickle.loads(stored)
        for function in host_calls:
            function.register()
        with _load_lock:
            return deserialize_and_load(*program, execution_devices=[device]), facts
    except Exception:  # XLA or LLVM does not take it here: it is compiled anew
        return None


@cache
def _environment() -> str:
    """Return a digest of all that stored programs depend on besides their key: this package, jaxlib, the processor, XLA's flags."""
    digest = hashlib.blake2b(digest_size=20)
    facts = (version("jax"), version("jaxlib"), platform.machine(), _processor(), os.environ.get("XLA_FLAGS"), jax.device_count())
    digest.update(repr((facts, jax.config.values["jax_disable_most_optimizations"])).encode())
    package = Path(tcemu.base.__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
        found = path.stat()
        if max(found.st_mtime, found.st_ctime) > LOADED:  # this process may run what the file was before: it shares no program
            digest.update(secrets.token_bytes(TOKEN_BYTES))
    return digest.hexdigest()


def _processor() -> str:
    """Return the features of the processor, for which XLA compiles."""
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    return platform.processor()
