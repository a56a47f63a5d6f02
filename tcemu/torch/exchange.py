"""Tensors of torch as JAX's arrays and back, by DLPack: no copy where the layout allows, on a CPU and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from jax._src import xla_bridge

DTYPES = {  # what a product takes; DLPack carries all of them
    getattr(torch, name): jnp.dtype(name) for name in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
}
TAKEN = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_forked = False


def _after_fork() -> None:
    """In the child. JAX's threads are not there any more: what asks them waits for ever."""
    global _forked
    _forked = _forked or xla_bridge.backends_are_initialized()


os.register_at_fork(after_in_child=_after_fork)


def check_process() -> None:
    """Raises RuntimeError in a child that was forked from a process that had used JAX: a computation would hang there."""
    if _forked:
        raise RuntimeError(
            "tcemu.torch: this process was forked from one that had used JAX, whose threads a fork does not copy: JAX would wait for ever. "
            'Give DataLoader multiprocessing_context="spawn" (or "forkserver"), compute emulated products outside its workers, or fork '
            "before the first of them"
        )


def dtype_of(name: str, tensor: torch.Tensor) -> np.dtype:
    """The dtype of a tensor as JAX has it. Raises TypeError for one that a product does not take."""
    found = DTYPES.get(tensor.dtype)
    if found is None:
        raise TypeError(f"{name}: got {tensor.dtype}{list(tensor.shape)}; wanted one of {TAKEN}: convert it, as by {name}.float()")
    return found


def to_jax(tensor: torch.Tensor) -> Array:
    """The tensor's memory as an array; a copy of it where it is neither contiguous nor a transpose of its last two axes.

    Raises ValueError for a device that JAX does not have here.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous() and tensor.ndim >= 2 and tensor.mT.is_contiguous():
        return jnp.swapaxes(to_jax(tensor.mT), -1, -2)
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"got a tensor on {tensor.device}; wanted one on cpu or cuda, which JAX shares: x.cpu()")
    try:
        return jax.dlpack.from_dlpack(tensor.contiguous())
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


def on_device_of(array: Array) -> AbstractContextManager:
    """Within it, JAX makes new arrays where this one is."""
    (device,) = array.devices()
    return jax.default_device(device)


def to_torch(array: Array, apart_from: Sequence[torch.Tensor]) -> torch.Tensor:
    """The array's memory as a tensor. JAX has finished with it, and with all that it was made of.

    A result that shares its memory with one of the tensors `apart_from` is copied: JAX hands on what it does not change.
    """
    array.block_until_ready()
    tensor = torch.from_dlpack(array)
    pointer = tensor.untyped_storage().data_ptr()
    shared = tensor.numel() and any(pointer == other.untyped_storage().data_ptr() for other in apart_from)
    return tensor.clone() if shared else tensor
