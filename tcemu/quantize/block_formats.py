"""The block formats and an array in one of them: `BlockFormat`, `BLOCK_FORMATS`, `BlockQuantized`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.core import Tracer

from tcemu.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format
from tcemu.quantize.scale_rules import RULES


@dataclass(frozen=True)
class BlockFormat:
    """A block format: the elements, how many of them share a scale, and the rule that finds the scale.

    element: a signed float format of at most 16 bits that holds 2. block: elements in a block, at least 1. rule: one of
    `tcemu.quantize.RULES`, which also says what a scale is: a power of two (ue8m0: "floor", "ceil", "even", "rceil") or ue4m3 times an f32
    for the whole tensor ("transformer_engine", "modelopt", "torchao"; these know elements of e2m1 only). Frozen and hashable. Raises
    ValueError for others.
    """

    name: str
    element: Format
    block: int
    rule: str
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"{self.name}: rule {self.rule!r} is not one of {', '.join(RULES)}")
        if self.element.is_integer or not self.element.signed or self.element.bits > 16 or self.element.greatest_exponent < 1:
            wanted = "a signed float format of at most 16 bits that holds 2, as e4m3 or e2m1"
            raise ValueError(f"{self.name}: an element is {wanted}, not {self.element}")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{self.name}: block is {self.block!r}; wanted the number of elements in a block, 1 or more")
        if self.two_level and self.element != E2M1:
            fitting = ", ".join(name for name, rule in RULES.items() if rule.exponent)
            raise ValueError(f"{self.name}: the rule {self.rule!r} is for elements of e2m1, not {self.element}; use one of {fitting}")

    def __repr__(self) -> str:
        return f"{self.name} (blocks of {self.block} {self.element}, scale {self.scale} by {self.rule!r})"

    @property
    def scale(self) -> Format:
        return RULES[self.rule].scale

    @property
    def two_level(self) -> bool:
        """A scale of the whole tensor, f32, comes on top."""
        return RULES[self.rule].two_level is not None


BLOCK_FORMATS = {
    row.name: row
    for row in (
        BlockFormat("mxfp8_e4m3", E4M3, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp8_e5m2", E5M2, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp6_e3m2", E3M2, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp6_e2m3", E2M3, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp4", E2M1, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("nvfp4", E2M1, 16, "transformer_engine", "arXiv 2509.25149; PTX ISA 9.7.14.3, .kind::mxf4nvf4.scale_vec::4X"),
    )
}


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales", "tensor_scale"], meta_fields=["format", "axis"])
@dataclass(frozen=True)
class BlockQuantized:
    """An array in blocks. A pytree of its arrays, so that it goes through jit, vmap and scan.

    codes: the elements' raw codes, in the array's own shape and the smallest unsigned dtype. axis: the one that is cut into blocks, counted
    from the end. scales: raw codes, uint8, of the same shape but for that axis, which counts blocks. tensor_scale: None, or float32 whose
    axes are leading (batch) axes of codes.
    """

    codes: Array
    scales: Array
    tensor_scale: Array | None
    format: BlockFormat
    axis: int = -1

    def __repr__(self) -> str:
        fmt, axis = self.format, "" if self.axis == -1 else f" along axis {self.axis}"
        text = f"{fmt.name}: {dims(self.codes)} {fmt.element} in blocks of {fmt.block}{axis}, scales {dims(self.scales)} {fmt.scale}"
        if self.tensor_scale is None:
            return text
        value = self.tensor_scale
        known = isinstance(value, jax.Array | np.ndarray | np.generic) and not isinstance(value, Tracer) and value.ndim == 0
        return f"{text}, tensor scale {float(value) if known else dims(value)}"


def dims(x: Array) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)
