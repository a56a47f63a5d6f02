"""Memory of Triton's arguments: torch tensors on the CPU and NumPy arrays as bytes that kernels read and write in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from tcemu.kernels.ptx.runtime.host_memory import Extent, merge_extents

DIVISIBILITY = 16  # bytes: Triton compiles a kernel for pointers that are multiples of it, or for any


class AddressBook:
    """Tensors whose addresses a program has asked for, as long as they live: kernels may find these addresses in memory."""

    def __init__(self) -> None:
        self._tensors: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by address

    def note(self, tensor: Any, address: int) -> None:
        """Add a tensor."""
        self._tensors[address] = tensor

    def tensors(self) -> list[Any]:
        """Return the tensors that are alive and have elements."""
        return [tensor for address, tensor in list(self._tensors.items()) if address]


_book: ContextVar[AddressBook | None] = ContextVar("tcemu_triton_addresses", default=None)


@contextmanager
def noted_addresses() -> Iterator[AddressBook]:
    """Note the arrays of `as_tensor` whose addresses are asked for meanwhile."""
    book = AddressBook()
    token = _book.set(book)
    try:
        yield book
    finally:
        _book.reset(token)


class NumpyTensor(np.ndarray):
    """A NumPy array with the members that Triton's launches ask of a tensor."""

    def data_ptr(self) -> int:
        """The address of the first element."""
        address = self.ctypes.data
        book = _book.get()
        if book is not None:
            book.note(self, address)
        return address

    def stride(self, axis: int | None = None) -> Any:
        """Strides in elements, as torch counts them."""
        strides = tuple(step // self.itemsize for step in self.strides)
        return strides if axis is None else strides[axis]


class InterpreterTensor:
    """A NumPy array with the members that Triton's interpreter asks of a torch tensor and of its storage.

    The interpreter copies storages to the host and back, and makes tensors on the copies. An array is its own copy.
    """

    def __init__(self, array: NumpyTensor) -> None:
        self._array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._array.data_ptr()

    def size(self) -> tuple[int, ...]:
        """The shape."""
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        """Strides in elements."""
        return self._array.stride()

    def storage_offset(self) -> int:
        """0: the storage is the array."""
        return 0

    def untyped_storage(self) -> InterpreterTensor:
        """The array."""
        return self

    def cpu(self) -> InterpreterTensor:
        """The array, which is in the memory of the CPU."""
        return self

    def new_empty(self, size: int, device: str) -> InterpreterTensor:
        """The tensor for `set_`."""
        return self

    def set_(self, storage: InterpreterTensor, offset: int, size: Any, stride: Any) -> None:
        """Nothing: the tensor already has its storage."""

    def copy_(self, other: InterpreterTensor) -> None:
        """Nothing: the copy is the array itself."""


def as_tensor(array: np.ndarray) -> NumpyTensor:
    """Return a view of a NumPy array that Triton kernels accept as a pointer. Kernels write into the array itself.

    Args:
        array: Array of a dtype that Triton has; bfloat16 and FP8 are those of ml_dtypes.

    Raises:
        TypeError: It is no NumPy array, or read-only.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"as_tensor: got {type(array).__name__}; expected a NumPy array. Torch tensors on the CPU are passed as they are")
    if not array.flags.writeable:
        raise TypeError("as_tensor: the array is read-only, and kernels write in place; pass a copy")
    return array.view(NumpyTensor)


def tensor_device(value: Any) -> str:
    """Return the kind of device on which a tensor is, as "cpu"."""
    return getattr(getattr(value, "device", None), "type", "cpu")


def storage_extent(value: Any) -> Extent:
    """Return the memory that a kernel may reach through a tensor: its whole storage.

    Raises:
        TypeError: The tensor is not in the memory of the CPU.
    """
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        low, high = np.lib.array_utils.byte_bounds(value)
        return Extent(low, high)
    if tensor_device(value) != "cpu":
        raise TypeError(f"a tensor is on the device {value.device}; tcemu.triton runs kernels on tensors of the CPU: pass tensor.cpu()")
    if hasattr(value, "untyped_storage"):
        storage = value.untyped_storage()
        return Extent(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    if not hasattr(value, "nbytes"):
        raise TypeError(f"got {type(value).__name__}; expected a torch tensor on the CPU, or tcemu.triton.as_tensor of a NumPy array")
    return Extent(value.data_ptr(), value.data_ptr() + value.nbytes)


class Region(NamedTuple):
    """A piece of the CPU's memory that one or more arguments share, as a buffer of the simulated GPU."""

    extent: Extent
    padding: int  # bytes before it in the buffer, so that addresses are multiples of DIVISIBILITY where Triton saw that they are

    def offset(self, address: int) -> int:
        """The byte of the buffer at an address of the CPU."""
        return address - self.extent.start + self.padding

    def read(self) -> np.ndarray:
        """The buffer, uint8."""
        return np.concatenate([np.zeros(self.padding, np.uint8), self.extent.view()])

    def write(self, data: np.ndarray) -> None:
        """Store a buffer back."""
        self.extent.view()[...] = data[self.padding :]


def merge_regions(extents: Sequence[Extent]) -> list[Region]:
    """Return the regions of several extents: those that overlap become one, so that pointers alias as they do on the CPU.

    The buffer of a region begins where `cudaMalloc` would let it begin, whatever the address on the CPU, unless that is no multiple of 16.
    """
    return [Region(extent, extent.start % DIVISIBILITY) for extent in merge_extents(extents)]


def find_addresses(words: np.ndarray, extents: Sequence[Extent]) -> dict[int, int]:
    """Return the addresses of the CPU's memory, by their places among the words, uint64, that lie in one of the extents."""
    starts, ends = (np.array([extent[side] for extent in merge_extents(extents)], np.uint64) for side in (0, 1))
    nearest = np.searchsorted(starts, words, side="right").astype(np.int64) - 1
    inside = (nearest >= 0) & (words < ends[np.maximum(nearest, 0)])
    return {int(place): int(words[place]) for place in np.flatnonzero(inside)}


def find_region(regions: Sequence[Region], extent: Extent) -> int:
    """Return the number of the region that contains an extent."""
    return next(n for n, region in enumerate(regions) if region.extent.start <= extent.start and extent.end <= region.extent.end)
