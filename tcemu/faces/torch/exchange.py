"""Tensors of torch as JAX's arrays and back, by DLPack: no copy where the layout allows, on a CPU and on a GPU; and as NumPy's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from jax import Array

from tcemu.base.errors import NotModelled
from tcemu.base.jax_internals import backends_are_initialized, without_source_locations

DTYPES = {  # dtypes of products; DLPack carries all of them
    getattr(torch, name): jnp.dtype(name) for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
DTYPE_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
NUMPY_DTYPES = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float16: np.dtype(np.float16), torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64), torch.int64: np.dtype(np.int64), torch.int32: np.dtype(np.int32), torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8), torch.uint8: np.dtype(np.uint8), torch.uint64: np.dtype(np.uint64), torch.bool: np.dtype(np.bool_),
}  # fmt: skip
_forked = False


def _after_fork() -> None:
    """Note in a forked child that JAX was used before. Its threads do not exist in the child: a computation would wait forever."""
    global _forked
    _forked = _forked or backends_are_initialized()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)


def check_process() -> None:
    """Raise RuntimeError in a child that was forked from a process that had used JAX: a computation would hang there."""
    if _forked:
        raise RuntimeError(
            "tcemu.torch: this process was forked from one that had used JAX, whose threads a fork does not copy: JAX would wait forever. "
            'Give DataLoader multiprocessing_context="spawn" (or "forkserver"), compute emulated products outside its workers, or fork '
            "before the first of them"
        )


def jax_dtype(name: str, tensor: torch.Tensor) -> np.dtype:
    """Return JAX's dtype of a tensor. Raises TypeError for a dtype that products do not support."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise TypeError(f"{name}: got {tensor.dtype}{list(tensor.shape)}; expected one of {DTYPE_NAMES}: convert it, as by {name}.float()")
    return dtype


def to_jax(tensor: torch.Tensor) -> Array:
    """Return a tensor's memory as an array, or a copy of it unless the tensor is contiguous.

    Raises:
        ValueError: JAX does not have the tensor's device here.
    """
    tensor = tensor.detach()
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"got a tensor on {tensor.device}; expected one on cpu or cuda, which JAX shares: x.cpu()")
    try:
        # torch keeps any stride for an axis of one element, and JAX would infer another layout from it
        return jax.dlpack.from_dlpack(tensor.contiguous().view(-1).view(tensor.shape))
    except RuntimeError as error:
        if tensor.device.type == "cuda" and not _has_gpu():
            raise ValueError(
                f"got a tensor on {tensor.device}, and JAX has no GPU here: pip install 'jax[cuda13]' (or cuda12), or give x.cpu()"
            ) from error
        raise


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


@contextmanager
def program_context(array: Array) -> Iterator[None]:
    """Compute on the device of an array, by programs without source lines: with them jaxlib 0.10 may compile forever."""
    (device,) = array.devices()
    with jax.default_device(device), without_source_locations():
        yield


def to_torch(array: Array, other_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return an array's memory as a tensor, after JAX has finished with the array and its operands.

    A result that shares its memory with one of the other tensors is copied: JAX may return an operand that it does not change.
    """
    array.block_until_ready()
    tensor = torch.from_dlpack(array)
    pointer = tensor.untyped_storage().data_ptr()
    shared = tensor.numel() and any(pointer == other.untyped_storage().data_ptr() for other in other_tensors)
    return tensor.clone() if shared else tensor


# ---- NumPy


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's memory as an array with its strides."""
    tensor = tensor.detach()
    if tensor.dtype not in NUMPY_DTYPES or tensor.device.type != "cpu":
        raise NotModelled(f"got {tensor.dtype} on {tensor.device}; tcemu.torch.emulate(gpu=...) takes real tensors on the CPU")
    tensor = tensor.resolve_neg()
    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor of its dtype; the memory may be shared."""
    array = np.ascontiguousarray(array)
    array = array if array.flags.writeable else array.copy()
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if array.dtype == ml_dtypes.bfloat16 else torch.from_numpy(array)
