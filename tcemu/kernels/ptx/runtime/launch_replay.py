"""Recorded launches, repeated on the GPU of this machine and compared word by word.

A worker process launches one after the other, since a fault of a kernel ends its context, and a kernel may not terminate. The worker is
replaced when it dies or hangs. Each result is kept in a file of its own, so that a run that was stopped continues.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.base.files import lock_folder, remove_leftovers, replace_file
from tcemu.base.results import Result, Table
from tcemu.base.saved_files import DamagedFile, check_saved, parse_json
from tcemu.engine.backends.native.gpu_runner import call_driver, gpu
from tcemu.kernels.ptx.runtime.kernel_arguments import POINTER_BYTES
from tcemu.kernels.ptx.runtime.launch_records import (
    FILE_NAME,
    RecordedLaunch,
    check_parameters,
    list_launches,
    read_launch,
    read_launch_file,
)
from tcemu.kernels.ptx.simt.tensor_maps import INTERLEAVES, MAP_BYTES, SWIZZLES, TensorMap
from tcemu.kernels.ptx.text.parser import parse

KIND, VERSION = "tcemu replayed launch", 1
EQUAL, DIFFERENT, UNSTABLE, FAILED, SKIPPED = "equal", "different", "depends on the run", "failed", "not launched"
LAUNCH_SECONDS, MAX_SECONDS = 30.0, 86_400.0  # until a launch counts as one that does not terminate
GPU = "tcemu.kernels.ptx.runtime.launch_replay:open_gpu"
PARAMETER_ALIGNMENT = 128
MAX_MESSAGE = 500  # characters of a message
PORTABLE_CLUSTER = 8  # blocks of a cluster that need no permission: CUDA C++ programming guide, thread block clusters
# CUtensorMapDataType: cuda.h
MAP_TYPES = {
    "u8": 0, "e4m3": 0, "e5m2": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
    "f32_ftz": 10, "tf32": 11, "tf32_ftz": 12, "b4x16": 13, "b4x16_p64": 14, "b6x16_p32": 15,
}  # fmt: skip


@dataclass(frozen=True)
class ReplayedLaunch:
    """The result of a recorded launch that a GPU repeated.

    Attributes:
        name: Name of the launch's file.
        entry: Name of the kernel.
        status: "equal", "different", "depends on the run": the words differ, and two runs on the GPU differ from each other too, "failed",
            or "not launched".
        words: Compared words of 32 bits, of all arrays and cases.
        differing: Words that differ from the recorded ones.
        message: The first word that differs, or why the launch failed or was left out.
        digest: SHA-256 of the launch's file.
        device: The GPU and its driver.
    """

    name: str
    entry: str
    status: str
    words: int = 0
    differing: int = 0
    message: str = ""
    digest: str = ""
    device: str = ""


@dataclass(frozen=True, repr=False)
class LaunchReplays(Result):
    """The launches of a folder as a GPU repeated them.

    Attributes:
        launches: The launches, in the order of their files.
    """

    launches: tuple[ReplayedLaunch, ...]

    @property
    def words(self) -> int:
        """Compared words."""
        return sum(each.words for each in self.launches)

    @property
    def differing(self) -> int:
        """Words that differ."""
        return sum(each.differing for each in self.launches)

    @property
    def all_equal(self) -> bool:
        """True if launches were compared and every word of every launch is equal."""
        return bool(self.launches) and all(each.status == EQUAL for each in self.launches)

    def table(self) -> Table:
        """One row for each launch."""
        columns = ("launch", "status", "words", "differing", "message")
        rows = tuple((each.name.removesuffix(".npz"), each.status, each.words, each.differing, each.message) for each in self.launches)
        devices = ", ".join(sorted({each.device for each in self.launches if each.device}))
        title = f"{len(rows):,} launches on {devices or 'no GPU'}: {self.differing:,} of {self.words:,} words differ"
        return Table(title, columns, rows, {"device": devices})


class LaunchDevice(Protocol):
    """Repeats launches: on a GPU, or in tests by an emulation of one."""

    target: str
    name: str  # with its driver

    def __call__(self, launch: RecordedLaunch, case: int) -> list[np.ndarray]:
        """Repeat a case of a launch and return the bytes of its arrays, with zeros where a reference lies that the kernel left alone."""
        ...


def replay_launches(
    folder: str | Path,
    *,
    out: str | Path | None = None,
    seconds: float = LAUNCH_SECONDS,
    report: Callable[[ReplayedLaunch], None] | None = None,
    device: str = GPU,
) -> LaunchReplays:
    """Repeat recorded launches on the GPU of this machine, and compare every word of their arrays.

    Each launch runs on memory of its own, with the recorded initial contents. A launch whose words differ runs once more, which tells a
    kernel whose result depends on the run, such as one with floating-point atomics, from one that differs.

    Args:
        folder: Folder of `record_launches`.
        out: Folder for the results, one JSON file for each launch; launches with a result of this GPU there are not repeated. None: none.
        seconds: Time after which a launch counts as one that does not terminate.
        report: Function that is called with each result.
        device: MODULE:FUNCTION of the function that opens the device; by default the GPU through cuda-core.

    Returns:
        The results. A damaged file, and a kernel that the GPU rejects, are results with the status "failed".

    Raises:
        Unsupported: There is no GPU, or cuda-core is missing.
        FolderInUse: Another replay writes to `out`.
        ValueError: The folder has no launches, or `seconds` is not a positive number up to a day.
    """
    if not 0 < seconds <= MAX_SECONDS:
        raise ValueError(f"seconds: got {seconds:g}; expected more than 0, and {MAX_SECONDS:,.0f} at most")
    paths = list_launches(folder)
    if not paths:
        raise ValueError(f"folder: {folder} has no launches; tcemu.ptx.record_launches writes them, as {FILE_NAME.pattern}")
    if out is None:
        return _replay(paths, None, seconds, report, device)
    Path(out).mkdir(parents=True, exist_ok=True)
    with lock_folder(Path(out)):
        return _replay(paths, Path(out), seconds, report, device)


def _replay(
    paths: Sequence[Path], out: Path | None, seconds: float, report: Callable[[ReplayedLaunch], None] | None, device: str
) -> LaunchReplays:
    results: dict[Path, ReplayedLaunch] = {}

    def keep(path: Path, result: ReplayedLaunch, stored: bool = False) -> None:
        results[path] = result
        if out is not None and not stored:
            replace_file(out / f"{path.stem}.json", json.dumps({"kind": KIND, "version": VERSION, **asdict(result)}).encode())
        if report is not None:
            report(result)

    pending = list(paths)
    while pending:
        worker = _Worker(device)
        try:
            opened = worker.read(10 * seconds)
            if opened is None or "refused" in opened:
                raise Unsupported((opened or {}).get("refused") or f"gpu: {worker.last_words()}")
            while pending:
                path = pending[0]
                try:
                    digest = sha256(read_launch_file(path)).hexdigest()
                except (DamagedFile, OSError) as error:
                    pending.pop(0)
                    keep(path, ReplayedLaunch(path.name, "", FAILED, message=str(error)[:MAX_MESSAGE], device=opened["device"]))
                    continue
                stored = None if out is None else _read_result(out / f"{path.stem}.json", digest, opened["device"])
                if stored is not None:
                    keep(pending.pop(0), stored, stored=True)
                    continue
                found = worker.launch(path, seconds)
                pending.pop(0)
                if found is not None:
                    keep(path, ReplayedLaunch(path.name, digest=digest, device=opened["device"], **found["result"]))
                    if not found["usable"]:
                        break
                    continue
                message = worker.last_words() if worker.ended else f"it did not terminate within {seconds:g} s"
                keep(path, ReplayedLaunch(path.name, "", FAILED, message=message, digest=digest, device=opened["device"]))
                break
        finally:
            worker.close()
    return LaunchReplays(tuple(results[path] for path in paths))


def _read_result(path: Path, digest: str, device: str) -> ReplayedLaunch | None:
    """Return a stored result of the same launch on the same device; None: there is none, or it is damaged."""
    remove_leftovers(path)
    try:
        found = check_saved("result", parse_json(path.read_bytes()), KIND, VERSION, tuple(ReplayedLaunch.__dataclass_fields__))
        numbers = ("words", "differing")
        if any(type(value) is not (int if name in numbers else str) for name, value in found.items() if name not in ("kind", "version")):
            return None
        result = ReplayedLaunch(**{name: found[name] for name in ReplayedLaunch.__dataclass_fields__})
        return result if (result.digest, result.device) == (digest, device) else None
    except (OSError, DamagedFile):
        return None


# ---- the worker process


class _Worker:
    """A process that repeats launches: it reads paths in JSON, one a line, and answers each with a line of JSON."""

    def __init__(self, device: str) -> None:
        # -P and the path of this process: a module in the working directory, which may be the folder of launches, must not run
        command, pipe = [sys.executable, "-P", "-m", __name__, device], subprocess.PIPE
        path = [*(each or os.getcwd() for each in sys.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | os.environ  # JAX would take most of the GPU's memory
        environment["PYTHONPATH"] = os.pathsep.join(path)
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", errors="replace", env=environment
        )
        self.lines: Queue[str | None] = Queue()  # None: the process has ended
        self.errors: list[str] = []
        self.ended = False
        self.threads = [Thread(target=each, daemon=True) for each in (self._read_lines, self._read_errors)]
        for thread in self.threads:
            thread.start()

    def _read_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors = [*self.errors[-20:], line]

    def read(self, seconds: float) -> dict[str, Any] | None:
        """Return the next answer; None: none came in time, or the process has ended."""
        try:
            line = self.lines.get(timeout=seconds)
        except Empty:
            return None
        self.ended = line is None
        return None if line is None else json.loads(line)

    def launch(self, path: Path, seconds: float) -> dict[str, Any] | None:
        """Let the process repeat a launch, and return its answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{json.dumps(str(path))}\n")
            self.process.stdin.flush()
        except OSError:  # the process has ended
            pass
        return self.read(seconds)

    def last_words(self) -> str:
        """Return how the process ended, with the last line of its standard error."""
        self.threads[1].join(timeout=1)
        line = next((line.strip() for line in reversed(self.errors) if line.strip()), "")
        with suppress(subprocess.TimeoutExpired):  # it has closed its output, and ends
            self.process.wait(timeout=10)
        status = self.process.returncode
        return f"the process that launched it ended with status {status}: {line}"[:MAX_MESSAGE]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for thread in self.threads:
            thread.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError):  # what was not yet written
                stream.close()  # type: ignore[union-attr]


def work(device_name: str) -> None:
    """Repeat the launches whose paths come on standard input, one a line in JSON, and print an answer for each."""
    module, _, function = device_name.partition(":")
    try:
        device: LaunchDevice = getattr(import_module(module), function)()
    except Unsupported as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    print(json.dumps({"device": device.name}), flush=True)
    for line in sys.stdin:
        usable, result = _replay_one(Path(json.loads(line)), device)
        print(json.dumps({"usable": usable, "result": result}), flush=True)
        if not usable:
            return


def _replay_one(path: Path, device: LaunchDevice) -> tuple[bool, dict[str, Any]]:
    """Return whether the device is still usable, and the result of a launch."""
    try:
        launch = read_launch(path)
    except (DamagedFile, OSError) as error:
        return True, {"entry": "", "status": FAILED, "message": str(error)[:MAX_MESSAGE]}
    if launch.target != device.target:
        message = f"its words are those of {launch.target}, and this device is {device.target}"
        return True, {"entry": launch.entry, "status": SKIPPED, "message": message}
    try:
        check_parameters(launch, parse(launch.text).functions[launch.entry].parameters)
    except (KeyError, ValueError) as error:
        return True, {"entry": launch.entry, "status": FAILED, "message": f"its PTX or entry: {error}"[:MAX_MESSAGE]}
    try:
        made = [device(launch, case) for case in range(launch.cases)]
        result = compare_launch(launch, made)
        if result["differing"]:
            again = [device(launch, case) for case in range(launch.cases)]
            if any(not np.array_equal(x, y) for left, right in zip(made, again, strict=True) for x, y in zip(left, right, strict=True)):
                result |= {"status": UNSTABLE, "message": f"two runs on this device differ. {result['message']}"}
        return True, result
    except Exception as error:  # whatever the driver's bindings raise; after a fault nothing more runs in this context
        return False, {"entry": launch.entry, "status": FAILED, "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}


def compare_launch(launch: RecordedLaunch, made: Sequence[Sequence[np.ndarray]]) -> dict[str, Any]:
    """Compare the arrays that a device left, case by case, with the recorded ones.

    Returns:
        The fields entry, status, words, differing and message of a `ReplayedLaunch`.
    """
    words, differing, message = 0, 0, ""
    for case, arrays in enumerate(made):
        for name, expected, found in zip(launch.names, launch.after, arrays, strict=True):
            left, right = _as_words(found), _as_words(expected[case])
            wrong = np.flatnonzero(left != right)
            words, differing = words + left.size, differing + wrong.size
            if wrong.size and not message:
                place = f"{name}, word {wrong[0]:,}" + (f", case {case}" if launch.cases > 1 else "")
                message = f"{place}: {left[wrong[0]]:#010x}; the emulation has {right[wrong[0]]:#010x}"
    return {"entry": launch.entry, "status": DIFFERENT if differing else EQUAL, "words": words, "differing": differing, "message": message}


def _as_words(data: np.ndarray) -> np.ndarray:
    return np.pad(data, (0, -len(data) % 4)).view(np.uint32)


# ---- the GPU


class _GpuLauncher:
    """Launches recorded kernels on a GPU, each text loaded once."""

    def __init__(self) -> None:
        from cuda.bindings import driver  # type: ignore[reportMissingImports]

        self.driver, self.gpu = driver, gpu()
        facts = self.gpu.facts()
        self.target, self.name = self.gpu.target, f"{facts['device']}, driver {facts['driver']}"
        self.loaded: tuple[tuple[str, bool, str], Any] | None = None  # the last kernel, by text, fmad and entry

    def __call__(self, launch: RecordedLaunch, case: int) -> list[np.ndarray]:
        """Repeat a case of a launch. Raises RuntimeError with the driver's message."""
        self.gpu.device.set_current()
        function, addresses = self._load(launch), list[int]()
        try:
            for array in launch.before:
                addresses.append(int(call_driver("cuMemAlloc", max(array.shape[1], 1))))
            held = [array[case].copy() for array in launch.before]
            self._write_references(launch, held, addresses)
            for address, data in zip(addresses, held, strict=True):
                if data.nbytes:
                    call_driver("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
            self._launch(launch, function, self._parameters(launch, case, addresses))
            call_driver("cuCtxSynchronize")
            made = [np.empty_like(data) for data in held]
            for address, data in zip(addresses, made, strict=True):
                if data.nbytes:
                    call_driver("cuMemcpyDtoH", data.ctypes.data, address, data.nbytes)
        finally:
            with suppress(RuntimeError):  # after a fault; the launch's own error says more
                for address in addresses:
                    call_driver("cuMemFree", address)
        for each in launch.references:
            if each.holder is not None:
                place = slice(each.byte, each.byte + POINTER_BYTES)
                if np.array_equal(made[each.holder][place], held[each.holder][place]):
                    made[each.holder][place] = 0
        return made

    def _load(self, launch: RecordedLaunch) -> Any:
        key = launch.text, launch.fmad, launch.entry
        if self.loaded is None or self.loaded[0] != key:
            core = self.gpu.core
            if launch.fmad:
                code = core.ObjectCode.from_ptx(launch.text.encode() + b"\0")
            else:
                options = core.ProgramOptions(arch=self.target, fma=False)
                code = core.Program(launch.text, "ptx", options).compile("cubin")
            self.loaded = key, code.get_kernel(launch.entry)
        return self.loaded[1]

    def _write_references(self, launch: RecordedLaunch, arrays: Sequence[np.ndarray], addresses: Sequence[int]) -> None:
        for each in launch.references:
            if each.holder is not None:
                address = np.uint64(addresses[each.output] + each.offset)
                arrays[each.holder][each.byte : each.byte + POINTER_BYTES] = np.frombuffer(address.tobytes(), np.uint8)

    def _parameters(self, launch: RecordedLaunch, case: int, addresses: Sequence[int]) -> np.ndarray:
        """Return the bytes of the parameters, at an aligned address."""
        size = launch.parameters.shape[1]
        room = np.zeros(size + PARAMETER_ALIGNMENT, np.uint8)
        start = -room.ctypes.data % PARAMETER_ALIGNMENT
        data = room[start : start + size]
        data[:] = launch.parameters[case]
        for each in launch.references:
            if each.holder is None and each.tensor_map is None:
                address = np.uint64(addresses[each.output] + each.offset)
                data[each.byte : each.byte + POINTER_BYTES] = np.frombuffer(address.tobytes(), np.uint8)
            elif each.holder is None and each.tensor_map is not None:
                data[each.byte : each.byte + MAP_BYTES] = self._encode_map(each.tensor_map, addresses[each.output] + each.tensor_map.offset)
        return data

    def _encode_map(self, value: TensorMap, address: int) -> np.ndarray:
        """Encode a tensor map by the driver, which alone knows the bits of this GPU."""
        driver = self.driver
        words, longs = driver.cuuint32_t, driver.cuuint64_t
        atoms = {16: SWIZZLES.index(value.swizzle), 32: 5 if value.swizzle_flip else 4, 64: 6}  # CUtensorMapSwizzle: cuda.h
        first = driver.CUtensorMapDataType(MAP_TYPES[value.dtype]), len(value.global_dims), address
        shape = [longs(int(size)) for size in value.global_dims], [longs(int(stride)) for stride in value.strides]
        steps = [words(int(step)) for step in value.element_steps]
        last = (
            steps, driver.CUtensorMapInterleave(INTERLEAVES.index(value.interleave)), driver.CUtensorMapSwizzle(atoms[value.swizzle_atom]),
            driver.CUtensorMapL2promotion(0), driver.CUtensorMapFloatOOBfill(int(value.nan_fill)),
        )  # fmt: skip
        if value.corners is None:
            encoded = call_driver("cuTensorMapEncodeTiled", *first, *shape, [words(int(size)) for size in value.box_dims], *last)
        else:
            low, high = ([int(each) for each in corner] for corner in value.corners)
            encoded = call_driver("cuTensorMapEncodeIm2col", *first, *shape, low, high, *map(int, value.box_dims), *last)
        return np.frombuffer(ctypes.string_at(encoded.getPtr(), MAP_BYTES), np.uint8)

    def _launch(self, launch: RecordedLaunch, kernel: Any, parameters: np.ndarray) -> None:
        driver = self.driver
        attributes = driver.CUfunction_attribute
        function = driver.CUkernel(int(kernel.handle))
        number = self.gpu.device.device_id
        if launch.shared_bytes:
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call_driver("cuKernelSetAttribute", most, launch.shared_bytes, function, number)
        if launch.cluster is not None and int(np.prod(launch.cluster)) > PORTABLE_CLUSTER:
            call_driver("cuKernelSetAttribute", attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, function, number)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        chosen, names = [], driver.CUlaunchAttributeID
        if launch.cluster is not None:
            chosen.append(attribute := driver.CUlaunchAttribute())
            attribute.id, size = names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, attribute.value.clusterDim
            size.x, size.y, size.z = launch.cluster
        if launch.cooperative:
            chosen.append(attribute := driver.CUlaunchAttribute())
            attribute.id, attribute.value.cooperative = names.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1
        config.attrs, config.numAttrs = chosen, len(chosen)
        places = [parameters.ctypes.data + start for start, _ in launch.places]
        pointers = (ctypes.c_void_p * max(len(places), 1))(*places)
        call_driver("cuLaunchKernelEx", config, driver.CUfunction(int(kernel.handle)), ctypes.addressof(pointers), 0)


def open_gpu() -> LaunchDevice:
    """Return the GPU of this machine. Raises Unsupported."""
    gpu()  # before the driver's bindings are imported: its message says what is missing
    return _GpuLauncher()


if __name__ == "__main__":
    work(sys.argv[1])
