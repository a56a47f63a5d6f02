"""Launches in files: the PTX, the shape, the parameters, and all arrays before and after, so that a GPU can repeat a launch.

Each launch is one .npz archive with a JSON header. Addresses and tensor maps are not stored as bits: a reference says where one lies and to
which array it leads, since each machine has addresses and encoded maps of its own.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.base.files import lock_folder, remove_leftovers, replace_file
from tcemu.base.provenance import installed_versions
from tcemu.base.saved_files import DamagedFile, check_members, check_saved, pack_archive, read_array, unpack_archive
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, byte_size
from tcemu.kernels.ptx.runtime.kernel_arguments import POINTER_BYTES, BufferPointer, LaunchInputs, PointerTable, Reference, Struct
from tcemu.kernels.ptx.runtime.launch_shape import Dimensions, read_dimensions
from tcemu.kernels.ptx.simt.tensor_maps import MAP_BYTES, TensorMap
from tcemu.kernels.ptx.text.module import Module, Variable
from tcemu.kernels.ptx.text.ptx_types import KINDS, storage_dtype

KIND, VERSION = "tcemu launch", 1
FILE_NAME = re.compile(r"\d{6,}_\w+\.npz")
MEMBER_NAMES = re.compile(r"(header|text|parameters|(before|after)_\d{1,4})\.npy")
MAX_FILE_BYTES = MAX_ARRAY_BYTES = 1 << 32
MAX_ARRAYS, MAX_DIRECTORY_BYTES = 10_000, 1 << 21  # that MEMBER_NAMES can number, and the directory of a zip with so many
MAX_NAME = 80  # characters of a kernel's name in a file's name
MEMBERS = (
    "entry", "target", "grid", "block", "cluster", "cooperative", "fmad", "shared_bytes", "cases", "parameters", "arrays", "references",
    "changed", "versions",
)  # fmt: skip
MAP_FIELDS = tuple(name for name in TensorMap.__dataclass_fields__ if name != "data")


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch of a kernel with its arrays before and after.

    Attributes:
        text: The PTX.
        entry: Name of the kernel.
        target: GPU whose arithmetic the words have, as "sm_90a".
        grid: Blocks, as the launch gave them, x first.
        block: Threads of a block, x first.
        cluster: Blocks of a cluster; None: neither the launch nor the kernel says.
        cooperative: All blocks run at once.
        fmad: Products and sums whose rounding the text leaves open are fused.
        shared_bytes: Dynamic shared memory.
        places: First byte and number of bytes of each parameter.
        parameters: uint8[cases, bytes]: all parameters, with zeros where references lie.
        names: Names of the arrays.
        before: Initial bytes of each array, uint8[cases, bytes], with zeros where references lie.
        after: Final bytes of each array; a reference that the kernel left alone is zero here too.
        references: Pointers and tensor maps.
        versions: Versions of tcemu and of the packages that computed the words.
    """

    text: str = field(repr=False)
    entry: str
    target: str
    grid: Dimensions
    block: Dimensions
    cluster: Dimensions | None
    cooperative: bool
    fmad: bool
    shared_bytes: int
    places: tuple[tuple[int, int], ...]
    parameters: np.ndarray = field(repr=False)
    names: tuple[str, ...]
    before: tuple[np.ndarray, ...] = field(repr=False)
    after: tuple[np.ndarray, ...] = field(repr=False)
    references: tuple[Reference, ...] = field(repr=False)
    versions: Mapping[str, str] = field(repr=False)

    @property
    def cases(self) -> int:
        """Number of launches with parameters and arrays of their own."""
        return len(self.parameters)

    def arguments(self, parameters: Sequence[Variable], case: int = 0) -> list[Any]:
        """Return the arguments with which `tcemu.ptx.run` repeats a case and returns the arrays in the recorded order.

        Args:
            parameters: Parameters of the entry.
            case: Number of the case.
        """
        held = [
            [each for each in self.references if each.holder is None and start <= each.byte < start + size] for start, size in self.places
        ]
        owners = self._owners(held)
        arrays: dict[int, Any] = {}

        def data(output: int, argument: int | None = None) -> Any:
            """Return the data of a pointer: the array for the argument that owns it, else that argument's number."""
            if owners.get(output, argument) != argument:
                return owners[output]
            if output not in arrays:
                arrays[output] = self.before[output][case]
                if table := [each for each in self.references if each.holder == output]:
                    pointers = {each.byte: BufferPointer(data(each.output), each.offset) for each in table}
                    arrays[output] = PointerTable(arrays[output], pointers)
            return arrays[output]

        def value(reference: Reference, argument: int | None = None) -> Any:
            found = data(reference.output, argument)
            if reference.tensor_map is None:
                return BufferPointer(found, reference.offset)
            return TensorMap(found, **_map_fields(reference.tensor_map))

        arguments = []
        for number, (parameter, (start, size)) in enumerate(zip(parameters, self.places, strict=True)):
            plain = self.parameters[case, start : start + size]
            if not held[number]:
                arguments.append(_plain_argument(parameter, plain))
            elif owners.get(held[number][0].output) is not None and _reference_bytes(held[number][0]) == size:
                arguments.append(value(held[number][0], number))
            else:
                arguments.append(_struct_argument(plain, [(each, each.byte - start, value(each)) for each in held[number]]))
        return arguments

    def _owners(self, held: Sequence[Sequence[Reference]]) -> dict[int, int]:
        """Return, for arrays that are arguments themselves, the number of the argument. They come first, in the order of the arguments."""
        owners: dict[int, int] = {}
        last = -1
        for output in range(len(self.names)):
            direct = (
                number
                for number, references in enumerate(held)
                if number > last
                and [each.output for each in references] == [output]
                and _reference_bytes(references[0]) == self.places[number][1]
            )
            last = next(direct, -1)
            if last < 0:
                break
            owners[output] = last
        return owners


def _struct_argument(plain: np.ndarray, references: Sequence[tuple[Reference, int, Any]]) -> Struct:
    """Return a struct of these bytes, with values of references at their positions."""
    fields: list[tuple[str, int, Any]] = []  # format, offset and value
    end = 0
    for reference, begin, value in (*references, (None, len(plain), None)):
        if begin > end:  # the bytes between two references
            fields.append((f"V{begin - end}", end, plain[end:begin].tobytes()))
        if reference is not None:
            end = begin + _reference_bytes(reference)
            fields.append(("u8" if reference.tensor_map is None else f"V{MAP_BYTES}", begin, value))
    formats, offsets, values = zip(*fields, strict=True)
    names = [f"f{offset}" for offset in offsets]
    layout = np.dtype({"names": names, "formats": list(formats), "offsets": list(offsets), "itemsize": len(plain)})
    return Struct(layout, dict(zip(names, values, strict=True)))


def _plain_argument(parameter: Variable, data: np.ndarray) -> Any:
    kind = KINDS[parameter.kind]
    if parameter.shape:
        return data.tobytes()
    return data.view(storage_dtype(kind.name))[0] if kind.name[0] != "f" else data.view(f"f{kind.bits // 8}")[0]


def _map_fields(value: TensorMap) -> dict[str, Any]:
    return {name: getattr(value, name) for name in MAP_FIELDS}


# ---- recording


class LaunchRecorder:
    """Writes launches into a folder, one file each, numbered on from those that lie there.

    Attributes:
        folder: The folder.
        files: Files written so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, list[Path]()
        self._next = 1 + max((int(path.name[:6]) for path in list_launches(folder)), default=0)
        self._guard = Lock()

    def write(self, entry: str, content: bytes) -> None:
        """Write a launch."""
        with self._guard:
            name = re.sub(r"\W", "_", entry, flags=re.ASCII)[:MAX_NAME]
            path = self.folder / f"{self._next:06}_{name}.npz"
            replace_file(path, content)  # the folder is locked, and no file has this number
            self.files.append(path)
            self._next += 1


_recorders: list[LaunchRecorder] = []  # of this process
_recorders_guard = Lock()


@contextmanager
def record_launches(folder: str | Path) -> Iterator[LaunchRecorder]:
    """Record every launch of this process that completes, in all threads: those of `tcemu.ptx.run` and of `tcemu.triton.emulated`.

    `tcemu.ptx.replay_launches` repeats them on a GPU. Files that lie in the folder remain; new ones continue their numbers.

    Args:
        folder: Folder for the files, one for each launch; made if it is missing.

    Yields:
        A recorder, whose `files` are the files written so far.

    Raises:
        FolderInUse: Another recording writes to the folder.
        OSError: The folder or a file cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with lock_folder(path):
        for each in list_launches(path):
            remove_leftovers(each)
        recorder = LaunchRecorder(path)
        with _recorders_guard:
            _recorders.append(recorder)
        try:
            yield recorder
        finally:
            with _recorders_guard:
                _recorders.remove(recorder)


def is_recording() -> bool:
    """Return True while this process records its launches."""
    return bool(_recorders)


def record_launch(
    module: Module,
    kernel: Kernel,
    inputs: LaunchInputs,
    outputs: Sequence[np.ndarray],
    *,
    grid: Dimensions,
    block: Dimensions,
    cluster: Dimensions | None,
    shared_bytes: int,
    cooperative: bool,
    fmad: bool,
) -> None:
    """Write a launch that has completed to all recorders of this process. outputs: the arrays that it left, in the order of `inputs`."""
    if len(inputs.outputs) > MAX_ARRAYS:
        raise Unsupported(f"record_launches: {kernel.entry.name} has {len(inputs.outputs):,} arrays; a file holds {MAX_ARRAYS:,} at most")
    cases, changed, arrays = len(inputs.parameters), [], {}
    parameters = inputs.parameters.copy()
    for each in inputs.references:
        if each.holder is None:
            parameters[:, each.byte : each.byte + _reference_bytes(each)] = 0
    for number, ((_, _, buffers), output) in enumerate(zip(inputs.outputs, outputs, strict=True)):
        before = np.stack([inputs.buffers[buffer].data for buffer in buffers])
        after = np.ascontiguousarray(output).reshape(cases, -1).view(np.uint8).reshape(before.shape).copy()
        for each in inputs.references:
            place = slice(each.byte, each.byte + POINTER_BYTES)
            if each.holder == number:
                after[:, place][(after[:, place] == before[:, place]).all(1)] = 0
                before[:, place] = 0
        arrays[f"before_{number}"] = before.reshape(-1)
        if not np.array_equal(before, after):
            changed.append(number)
            arrays[f"after_{number}"] = after.reshape(-1)
    header = {
        "kind": KIND, "version": VERSION, "entry": kernel.entry.name, "target": kernel.target, "grid": grid, "block": block,
        "cluster": cluster, "cooperative": cooperative, "fmad": fmad, "shared_bytes": shared_bytes, "cases": cases,
        "parameters": [[kernel.parameters[each.name], byte_size(each)] for each in kernel.entry.parameters],
        "arrays": [[inputs.buffers[buffers[0]].name, inputs.buffers[buffers[0]].data.nbytes] for _, _, buffers in inputs.outputs],
        "references": [_reference_header(each) for each in inputs.references], "changed": changed, "versions": installed_versions(),
    }  # fmt: skip
    text = np.frombuffer((module.text or str(module)).encode(), np.uint8)
    content = pack_archive(header, {"text": text, "parameters": parameters.reshape(-1), **arrays})
    if len(content) > MAX_FILE_BYTES or any(array.nbytes >= MAX_ARRAY_BYTES for array in arrays.values()):
        raise Unsupported(f"record_launches: {kernel.entry.name} has {len(content):,} packed bytes; {MAX_FILE_BYTES:,} can be read back")
    with _recorders_guard:
        recorders = tuple(_recorders)
    for recorder in recorders:
        recorder.write(kernel.entry.name, content)


def _reference_bytes(reference: Reference) -> int:
    return POINTER_BYTES if reference.tensor_map is None else MAP_BYTES


def _reference_header(reference: Reference) -> dict[str, Any]:
    header = {name: value if value is None else int(value) for name, value in reference._asdict().items() if name != "tensor_map"}
    fields = None if reference.tensor_map is None else _map_fields(reference.tensor_map)
    return header | {"tensor_map": None if fields is None else {name: _plain_value(value) for name, value in fields.items()}}


def _plain_value(value: Any) -> Any:
    """Return a field of a tensor map as JSON has it."""
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return [_plain_value(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


# ---- reading


def list_launches(folder: str | Path) -> list[Path]:
    """Return the files of a folder of launches, in the order of the launches."""
    found = (path for path in Path(folder).iterdir() if FILE_NAME.fullmatch(path.name))
    return sorted(found, key=lambda path: (int(path.name.partition("_")[0]), path.name))


def read_launch(path: str | Path) -> RecordedLaunch:
    """Read a launch from its file.

    Args:
        path: The file.

    Returns:
        The launch.

    Raises:
        DamagedFile: The file is truncated, changed or of another kind.
        OSError: The file cannot be read.
    """
    content = read_launch_file(Path(path))
    try:
        return _parse_launch(*unpack_archive(content, MEMBER_NAMES, largest=MAX_ARRAY_BYTES, max_directory=MAX_DIRECTORY_BYTES))
    except Exception as error:  # a hostile file finds more ways to fail than can be listed
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise DamagedFile(f"{path} is damaged, or no recorded launch: {reason}") from error


def read_launch_file(path: Path) -> bytes:
    """Return the bytes of a launch's file. Raises DamagedFile for one that is too large or not regular, such as a FIFO, and OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DamagedFile(f"{path} is not a regular file")
    if found.st_size > MAX_FILE_BYTES:
        raise DamagedFile(f"{path} has {found.st_size:,} bytes; a launch has {MAX_FILE_BYTES:,} at most")
    return path.read_bytes()


def check_parameters(launch: RecordedLaunch, parameters: Sequence[Variable]) -> None:
    """Raise DamagedFile unless a launch has the entry's parameters: the driver reads as many bytes as the PTX says."""
    expected, found = [byte_size(each) for each in parameters], [size for _, size in launch.places]
    if found != expected:
        raise DamagedFile(f"parameters: the launch has {found} bytes, and {launch.entry} in its PTX {expected}")


def _parse_launch(header: Any, members: dict[str, bytes]) -> RecordedLaunch:
    """Raises DamagedFile, KeyError, TypeError or ValueError."""
    found = check_saved("launch", header, KIND, VERSION, MEMBERS)
    cases, shared = _count("cases", found["cases"], 1), _count("shared_bytes", found["shared_bytes"])
    places = tuple((_count("parameters", start), _count("parameters", size, 1)) for start, size in found["parameters"])
    parameters = read_array(members.pop("parameters"), np.uint8, None).reshape(cases, -1)
    if any(start + size > parameters.shape[1] for start, size in places):
        raise DamagedFile(f"parameters: they have {parameters.shape[1]} bytes, and places {places}")
    sizes = [(str(name), _count("arrays", size)) for name, size in found["arrays"]]
    before = tuple(
        read_array(members.pop(f"before_{n}"), np.uint8, (cases * size,)).reshape(cases, size) for n, (_, size) in enumerate(sizes)
    )
    after = list(before)
    for number in (_count("changed", each) for each in found["changed"]):
        if number >= len(sizes):
            raise DamagedFile(f"changed: array {number} of {len(sizes)}")
        after[number] = read_array(members.pop(f"after_{number}"), np.uint8, (before[number].size,)).reshape(before[number].shape)
    text = read_array(members.pop("text"), np.uint8, None).tobytes().decode()
    if members:
        raise DamagedFile(f"it has arrays that its header does not name: {', '.join(members)}")
    holders = [parameters.shape[1], *(size for _, size in sizes)]
    references = tuple(_parse_reference(each, holders) for each in found["references"])
    if not all(isinstance(found[name], bool) for name in ("cooperative", "fmad")):
        raise DamagedFile("cooperative and fmad are true or false")
    if not all(isinstance(found[name], str) for name in ("entry", "target")):
        raise DamagedFile("entry and target are texts")
    if not "".join((found["entry"], found["target"], *(name for name, _ in sizes))).isprintable():
        raise DamagedFile("a name has a line break or another control character")
    cluster = None if found["cluster"] is None else read_dimensions("cluster", found["cluster"])
    return RecordedLaunch(
        text, found["entry"], found["target"], read_dimensions("grid", found["grid"]), read_dimensions("block", found["block"]), cluster,
        found["cooperative"], found["fmad"], shared, places, parameters, tuple(name for name, _ in sizes), before, tuple(after),
        references, {str(name): str(version) for name, version in found["versions"].items()},
    )  # fmt: skip


def _parse_reference(header: Any, holders: Sequence[int]) -> Reference:
    """Parse a reference. holders: bytes of the parameters and of the arrays, which may contain references."""
    found = check_members("a reference", header, Reference._fields)
    number = -1 if found["holder"] is None else _count("holder", found["holder"])
    byte, output, offset = (_count(name, found[name]) for name in ("byte", "output", "offset"))
    tensor_map = None
    if found["tensor_map"] is not None:
        fields = check_members("a tensor map", found["tensor_map"], MAP_FIELDS)
        tensor_map = TensorMap(output, **fields)
    reference = Reference(None if number < 0 else number, byte, output, offset, tensor_map)
    if output + 1 >= len(holders) or byte + _reference_bytes(reference) > holders[number + 1]:
        raise DamagedFile(f"a reference at byte {byte} of {'the parameters' if number < 0 else f'array {number}'} leads to array {output}")
    if tensor_map is not None and tensor_map.end_byte > holders[output + 1]:
        raise DamagedFile(f"a tensor map ends at byte {tensor_map.end_byte:,} of array {output}, which has {holders[output + 1]:,}")
    return reference


def _count(name: str, value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise DamagedFile(f"{name}: got {str(value)[:40]}; expected a number of {least} or more")
    return value
