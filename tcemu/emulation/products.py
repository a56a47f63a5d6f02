"""A matrix product of a program, as a policy sees it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import summarize
from jax.typing import DTypeLike

from tcemu.emulation.origins import CONSTANT, Origin, roles
from tcemu.emulation.programs import PRODUCTS
from tcemu.linalg.dot_general import DimensionNumbers

LINE = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)? \((?P<function>.*)\)")


@dataclass(frozen=True)
class Product:
    """One matrix product of a program, as a policy sees it.

    name: where it stands, as "encoder/mlp/dot_general": the jit functions, named scopes and loops around it. Where a name repeats, ".1",
    ".2" and so on follow it. index: that number, 0 for the first.
    primitive: "dot_general", "conv_general_dilated" or "ragged_dot_general". dimension_numbers, preferred_element_type: its parameters.
    lhs_shape, lhs_dtype, rhs_shape, rhs_dtype: the operands; shape, dtype: the result.
    repeats: how often the loops around it run it; None inside a `while`.
    roles: of lhs and rhs: "activation", "weight", "gradient" or "constant" (it depends on none of these).
    parameters: the paths of the parameters that its weights come from, as "params/up/kernel" or "layers/0/weight".
    source: the line that multiplies, as "model.py:31 (mlp)".
    """

    name: str
    index: int
    primitive: str
    lhs_shape: tuple[int, ...]
    lhs_dtype: DTypeLike
    rhs_shape: tuple[int, ...]
    rhs_dtype: DTypeLike
    dimension_numbers: DimensionNumbers | lax.ConvDimensionNumbers | lax.RaggedDotDimensionNumbers
    preferred_element_type: DTypeLike | None
    shape: tuple[int, ...]
    dtype: DTypeLike
    repeats: int | None = 1
    roles: tuple[str, str] = ("constant", "constant")
    parameters: tuple[str, ...] = ()
    source: str = ""

    @property
    def is_float(self) -> bool:
        """Both operands and the result are real floats."""
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in (self.lhs_dtype, self.rhs_dtype, self.dtype))

    @property
    def is_contraction(self) -> bool:
        """It sums over an axis, be it of size 1. einsum("i,j->ij") and einsum("btd,btd->btd") do not: they only multiply elements."""
        if isinstance(self.dimension_numbers, lax.ConvDimensionNumbers):
            return True
        numbers = self.dimension_numbers
        (contracting, _), _ = numbers.dot_dimension_numbers if isinstance(numbers, lax.RaggedDotDimensionNumbers) else numbers
        return len(contracting) > 0

    @property
    def operands(self) -> str:
        """Both operands in words, as "float32[4,8] · float32[8,2]"."""
        return f"{_array(self.lhs_dtype, self.lhs_shape)} · {_array(self.rhs_dtype, self.rhs_shape)}"

    @property
    def result(self) -> str:
        """The result in words."""
        return _array(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.operands} -> {self.result}"


def as_product(equation: JaxprEqn, name: str, index: int, repeats: int | None, origins: Sequence[Origin] = (CONSTANT, CONSTANT)) -> Product:
    """What a policy is told of an equation. origins: those of its operands."""
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    (lhs, rhs, *_, out), params = avals, equation.params
    return Product(
        name=name,
        index=index,
        primitive=equation.primitive.name,
        lhs_shape=tuple(lhs.shape),
        lhs_dtype=lhs.dtype,
        rhs_shape=tuple(rhs.shape),
        rhs_dtype=rhs.dtype,
        dimension_numbers=params[PRODUCTS[equation.primitive.name].numbers],
        preferred_element_type=params["preferred_element_type"],
        shape=tuple(out.shape),
        dtype=out.dtype,
        repeats=repeats,
        roles=roles(*origins[:2]),
        parameters=tuple(dict.fromkeys(path for origin in origins[:2] for path in origin.parameters)),
        source=_line(equation),
    )


def _line(equation: JaxprEqn) -> str:
    """The innermost line outside JAX, as "model.py:31 (mlp)"."""
    found = LINE.fullmatch(summarize(equation.source_info))
    return f"{Path(found['file']).name}:{found['line']} ({found['function']})" if found else ""


def _array(dtype: DTypeLike, shape: Sequence[int]) -> str:
    return f"{jnp.dtype(dtype).name}[{','.join(map(str, shape))}]"
