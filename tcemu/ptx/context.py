"""What instructions are told before anything runs, and how they say what they do: the contract between the engine and its instructions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jax import Array

from tcemu.ptx.module import Function, Module, Statement

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine


@dataclass(frozen=True)
class Context:
    """Where a statement stands, and how it is run. target: whose arithmetic; checked: what PTX leaves undefined raises."""

    module: Module
    function: Function
    target: str
    checked: bool


class Operation(NamedTuple):
    """An instruction that takes values and gives values, thread by thread: an addition, a comparison, a conversion.

    results, sources: the types of its destinations and of its other operands, in their order, as "f32" and "pred". A vector operand
    counts with each of its elements.
    compute: raw bits in, raw bits out, a tuple (see `tcemu.ptx.values`); pure, under any shape, under `jax.enable_x64(True)`.
    exact: every bit is that of the GPU; False: within the error that the manual states.
    carry_in, carry_out: the last source, the last result is the carry flag CC.CF, of type "pred", which no operand names (PTX ISA 9.7.2).
    Equal opcodes with operands of equal sizes have the same `compute`, the very object: what is compiled for one serves all.
    """

    results: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., tuple[Array, ...]]
    exact: bool = True
    carry_in: bool = False
    carry_out: bool = False


class Step(NamedTuple):
    """What a statement does to the machine: one that reads memory, or that threads do together.

    run: the machine before -> the machine after; pure and traceable. `Machine.active` says which threads execute it, the guard included.
    """

    run: Callable[[Machine], Machine]
    together: bool = False  # all threads of a warp that take part must have arrived: mma.sync, shfl.sync, ...


Prepare = Callable[[Statement, Context], Any]  # -> Operation or Step; raises Unsupported, with what is known and what would work
