"""The interface between the engine and its instructions: a statement and its `Context` in, an `Operation` or a `Step` out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array

from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.text.module import Function, Module, Operand, Statement


@dataclass(frozen=True)
class Context:
    """The surroundings of a statement while it is prepared."""

    module: Module
    function: Function
    target: str  # the GPU whose arithmetic tensor-core instructions have
    checked: bool  # undefined behaviour raises


class Operation(NamedTuple):
    """An instruction that maps values to values, thread by thread: an addition, a comparison, a conversion.

    Two opcodes that are equal and have operands of equal sizes share one `compute` object, so that one compiled program serves both.
    """

    results: tuple[str, ...]  # types of the destinations, as "f32"; a vector operand counts with each of its elements
    sources: tuple[str, ...]  # types of the other operands, counted in the same way
    compute: Callable[..., tuple[Array, ...]]  # raw bits to raw bits, see `text.ptx_types`; pure, for arrays of any shape
    carry_in: bool = False  # the last source is the carry flag CC.CF, of type "pred", which no operand names (PTX ISA 9.7.2)
    carry_out: bool = False  # the last result is that flag
    constants: tuple[int, ...] = ()  # indices of the sources that must be integer constants


class Step(NamedTuple):
    """An instruction that maps the machine to the machine: it accesses memory, or several threads execute it together."""

    apply: Callable[..., Machine]  # pure and traceable; `Machine.active` has the threads that execute it, guard included
    collective: bool = False  # all participating threads of a warp must have arrived first: mma.sync, shfl.sync, ...
    # operands whose values decide shapes or types. The host reads them, and `apply` gets them as ints behind the machine. A statement whose
    # threads have several values is executed once for each, by the threads that have it
    constants: tuple[Operand, ...] = ()


NO_EFFECT = Step(lambda machine: machine)
Prepare = Callable[[Statement, Context], Any]  # returns an Operation or a Step; raises Unsupported with what would work
