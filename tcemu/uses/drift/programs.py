"""Small programs of known arithmetic, and the choices of an arithmetic for them.

A node computes in f32 from its inputs and is rounded to its dtype. `Choices` says which of these roundings happen, which special functions
are used, how sums are added, and where a multiplication and an addition are one fma. Nodes that libraries keep in f32 within one kernel,
such as the parts of a softmax, are internal: they are rounded only if a choice says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32
from tcemu.uses.drift.moments import Moments
from tcemu.uses.drift.quantization import BlockQuantization, Quantization
from tcemu.uses.drift.samples import SUMS
from tcemu.uses.drift.summation import Summation

Ref = tuple[str, int]  # ("input", index) or ("node", index)
F32_DTYPE = np.dtype(np.float32)
FORMATS = {F32_DTYPE: F32, np.dtype(np.float16): F16, np.dtype(ml_dtypes.bfloat16): BF16}
FACTOR_FORMATS = FORMATS | {np.dtype(ml_dtypes.float8_e4m3fn): E4M3, np.dtype(ml_dtypes.float8_e5m2): E5M2}  # of multiplied operands
UNFIT = (ValueError, IndexError, MemoryError)  # what NumPy raises where recorded parameters of the right kind do not fit their operands
SPECIAL = ("exp", "exp2", "log", "tanh", "logistic", "rsqrt", "sqrt", "erf", "sin", "cos")


class Node(NamedTuple):
    """One step of a program."""

    kind: str
    inputs: tuple[Ref, ...]
    dtype: np.dtype  # dtype to which its result is rounded
    attributes: dict[str, Any]
    internal: bool  # within one recorded operation
    operation: int  # number of the recorded operation


@dataclass
class Program:
    """The arithmetic of one operation or of several that follow each other.

    Attributes:
        nodes: Its steps; the last one gives the result.
        inputs: What it reads: (operation, operand) of a record, or a constant.
        shape: Shape of the result.
        f32_inputs: Indices of the inputs that are f32 tensors.
        others: Further results of the last operation that are known, by their number.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[tuple[int, int] | np.ndarray] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    f32_inputs: set[int] = field(default_factory=set)
    others: dict[int, Ref] = field(default_factory=dict)

    def operand_name(self, index: int) -> str:
        """Return the number of an input's operand, with its operation."""
        given = self.inputs[index]
        return "constant" if isinstance(given, np.ndarray) else f"{given[1]} of operation {given[0]}"

    def constant(self, value: float, dtype: type = np.float32) -> Ref:
        self.inputs.append(np.asarray(value, dtype))
        return "input", len(self.inputs) - 1

    def add(self, kind: str, inputs: Sequence[Ref], dtype: np.dtype, operation: int, internal: bool = False, **attributes: Any) -> Ref:
        self.nodes.append(Node(kind, tuple(inputs), np.dtype(dtype), attributes, internal, operation))
        return "node", len(self.nodes) - 1

    def dtype(self, ref: Ref, inputs: Sequence[np.ndarray]) -> np.dtype:
        """Return the dtype of a value as a node reads it."""
        kind, index = ref
        node = None if kind == "input" else self.nodes[index]
        return inputs[index].dtype if node is None else F32_DTYPE if node.internal else node.dtype

    @property
    def sums(self) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.kind in SUMS]

    @property
    def has_special(self) -> bool:
        return any(node.kind in SPECIAL for node in self.nodes)


class Choices(NamedTuple):
    """The arithmetic under which a program is evaluated."""

    unrounded: frozenset[int] = frozenset()  # nodes that are not rounded to their dtype
    rounded: frozenset[int] = frozenset()  # internal nodes that are rounded
    functions: str = "exact"  # "exact", "gpu", "cuda", "expanded" or "xla"
    contracted: frozenset[int] = frozenset()  # additions x·y + z of a node x·y that are one fma
    flushed: bool = False  # subnormal f32 count as zeros
    reciprocal: bool = False  # a quotient is a product with the rounded reciprocal
    summation: Summation | None = None  # None: the plain sequential sum
    extra: tuple[tuple[str, int, str], ...] = ()  # further roundings: of ("input" or "node", index), to a dtype
    order: str = ""  # order of scales in a rewritten program, in words; see `tcemu.uses.drift.rewrites`
    quantization: Quantization | BlockQuantization | None = None
    moments: Moments | None = None  # of a mean and a variance in one pass; None: in two passes, by sums

    def require_summation(self) -> Summation:
        """Return the summation.

        Raises:
            ValueError: The choices have none, and so evaluate programs without sums alone.
        """
        if self.summation is None:
            raise ValueError("choices.summation: a program with sums needs a summation")
        return self.summation
