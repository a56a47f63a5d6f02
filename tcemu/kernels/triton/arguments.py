"""Arguments of a Triton launch as those of its PTX entry: constants left out, tuples and tensor descriptors expanded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.runtime.kernel_arguments import BufferPointer, PointerTable
from tcemu.kernels.ptx.simt.tensor_maps import TensorMap

INTEGERS = re.compile(r"[iu](1|8|16|32|64)")
FLOATS = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32, "f32": np.float32, "fp64": np.float64}
SWIZZLE_BYTES = (0, 32, 64, 128)  # by CUtensorMapSwizzle
# by the number that Triton's compiler writes (`elem_type`); the host's CUtensorMapDataType has 8 to 10 in another order
TENSOR_MAP_DTYPES = {0: "u8", 1: "u16", 2: "u32", 3: "s32", 4: "u64", 5: "s64", 6: "f16", 7: "f32", 9: "f64", 10: "bf16"}


@dataclass(frozen=True)
class KernelValue:
    """One parameter of the PTX entry."""

    name: str = ""  # the argument of the Triton function
    scalar: Any = None  # the argument of `tcemu.ptx.run`, where there is no tensor
    tensor: Any = None  # the tensor whose memory the kernel reaches
    tensor_map: Mapping[str, Any] | None = None  # the arguments of `TensorMap` besides data and offset; None: a plain pointer

    def point(self, data: np.ndarray | PointerTable | int, offset: int) -> BufferPointer | TensorMap:
        """Return the argument that points into a buffer; `data` and `offset` are those of `BufferPointer`."""
        if self.tensor_map is None:
            return BufferPointer(data, offset)
        return TensorMap(data, offset=offset, **self.tensor_map)


def flatten_arguments(signature: Mapping[Any, Any], metadata: Any, arguments: Sequence[Any]) -> list[KernelValue]:
    """Return the parameters of the PTX entry, without the scratch pointers at its end.

    Args:
        signature: Triton's types of the arguments, in order: "*fp32", "i32", "constexpr", "tensordesc<fp16[64, 64]>", or tuples of them.
        metadata: Metadata of the compiled kernel.
        arguments: The arguments of the launch, constants included.
    """
    layouts = getattr(metadata, "tensordesc_meta", None)
    descriptors, values = iter(layouts or ()), []
    for (name, types), argument in zip(signature.items(), arguments, strict=True):
        values += [replace(value, name=str(name)) for value in _flatten(types, argument, descriptors, bool(layouts))]
    return values


def _flatten(types: Any, value: Any, descriptors: Iterator[Any], encoded: bool) -> Iterator[KernelValue]:
    if isinstance(types, tuple):
        for kind, each in zip(types, value, strict=True):
            yield from _flatten(kind, each, descriptors, encoded)
    elif types == "constexpr":
        return
    elif types.startswith("tensordesc"):
        yield from _expand_descriptor(value, next(descriptors) if encoded else None)
    elif types.startswith("*"):
        yield _pointer_value(types, value)
    else:
        yield KernelValue(scalar=_number(types, value))


def _pointer_value(kind: str, value: Any) -> KernelValue:
    if hasattr(value, "data_ptr"):
        return KernelValue(tensor=value) if value.data_ptr() else KernelValue(scalar=0)
    if isinstance(value, int) and not value:
        return KernelValue(scalar=0)
    raise TypeError(
        f"a pointer of type {kind}: got {type(value).__name__}; expected a torch tensor on the CPU, or "
        "tcemu.triton.as_tensor of a NumPy array"
    )


def _number(kind: str, value: Any) -> Any:
    if INTEGERS.fullmatch(kind):
        return int(value)
    if kind not in FLOATS:
        raise Unsupported(f"an argument of Triton's type {kind} is not known to tcemu.triton")
    number = np.asarray(value).astype(FLOATS[kind])[()]
    return number.view(np.uint16) if kind == "bf16" else number


def _expand_descriptor(descriptor: Any, layout: Mapping[str, Any] | None) -> Iterator[KernelValue]:
    """Yield what Triton passes for a TensorDescriptor: a tensor map or, without one, its parts; then its shape and strides."""
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    if layout is None:
        yield KernelValue(tensor=descriptor.base)
        yield from (KernelValue(scalar=int(number)) for number in (*shape, *strides))
        yield KernelValue(scalar=int(descriptor.padding == "nan"))
        if hasattr(descriptor, "round_f32_to_tf32"):  # Triton 3.6 has no such field and passes no such argument
            yield KernelValue(scalar=int(descriptor.round_f32_to_tf32))
    else:
        yield KernelValue(tensor=descriptor.base, tensor_map=_tensor_map_fields(descriptor, layout))
    yield from (KernelValue(scalar=int(number)) for number in (*shape, *strides))


def _tensor_map_fields(descriptor: Any, layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `TensorMap` for a descriptor.

    Triton counts dimensions from the outermost one, a tensor map from the innermost.
    """
    special = {
        "fp4 padding": layout.get("fp4_padded"), "im2col": layout.get("is_im2col"),
        "rounding to tf32": getattr(descriptor, "round_f32_to_tf32", False),
    }  # fmt: skip
    if any(special.values()):
        names = ", ".join(name for name, given in special.items() if given)
        raise Unsupported(f"a tensor descriptor with {names} is not supported: {descriptor}")
    if layout["elem_type"] not in TENSOR_MAP_DTYPES:
        raise Unsupported(f"a tensor descriptor of Triton's element type {layout['elem_type']} is not supported")
    size = layout["elem_size"]
    return {
        "dtype": TENSOR_MAP_DTYPES[layout["elem_type"]],
        "global_dims": [int(extent) for extent in reversed(descriptor.shape)],
        "global_strides": [int(stride) * size for stride in reversed(descriptor.strides[:-1])],
        "box_dims": [int(extent) for extent in reversed(layout["block_size"])],
        "swizzle": SWIZZLE_BYTES[layout["swizzle"]],
        "nan_fill": descriptor.padding == "nan",
    }
