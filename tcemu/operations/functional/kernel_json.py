"""Kernels as plain values, for JSON, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tcemu.base.saved_files import DamagedFile, check_members
from tcemu.operations.functional.kernel_values import (
    GeluKernel,
    KernelValue,
    LayerNormKernel,
    RmsNormKernel,
    RotaryKernel,
    SiluKernel,
    SoftmaxKernel,
)
from tcemu.operations.functional.row_sums import RowSum

TYPES = {kind.__name__: kind for kind in (SoftmaxKernel, RmsNormKernel, LayerNormKernel, SiluKernel, GeluKernel, RotaryKernel)}


def kernel_to_dict(kernel: KernelValue | str) -> Any:
    """Convert a kernel to plain values; a name of `functional.KERNELS` is one already."""
    if isinstance(kernel, str):
        return kernel
    return {type(kernel).__name__: _plain_fields(kernel)}


def _plain_fields(value: Any) -> dict[str, Any]:
    plain = {field.name: getattr(value, field.name) for field in fields(value)}
    return {
        name: _plain_fields(item) if isinstance(item, RowSum) else list(item) if isinstance(item, tuple) else item
        for name, item in plain.items()
    }


def kernel_from_dict(data: Any) -> KernelValue | str:
    """Convert the plain values of `kernel_to_dict` to their kernel.

    Args:
        data: Plain values. They are not trusted: unknown names and values are rejected.

    Raises:
        ValueError: They are no kernel's.
    """
    if isinstance(data, str):
        return data
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in TYPES:
        raise DamagedFile(f"kernel: got {str(data)[:80]}; expected a name, or an object with one of {', '.join(TYPES)}")
    ((name, members),) = data.items()
    values: dict[str, Any] = dict(check_members("kernel", members, [field.name for field in fields(TYPES[name])]))
    try:
        if "sums" in values:
            sums: dict[str, Any] = dict(check_members("kernel.sums", values["sums"], [field.name for field in fields(RowSum)]))
            if not isinstance(sums["reversed_pairs"], list):
                raise DamagedFile(f"kernel.sums.reversed_pairs: got {str(sums['reversed_pairs'])[:80]}; expected a list of numbers")
            values["sums"] = RowSum(**{**sums, "reversed_pairs": tuple(sums["reversed_pairs"])})
        return TYPES[name](**values)
    except TypeError as error:
        raise DamagedFile(f"kernel: {error}") from None
