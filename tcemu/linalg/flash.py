"""`Flash`: how FlashAttention cuts, scales and adds, as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from tcemu.linalg.recipes import Recipe
from tcemu.quantize.operands import is_count

SCOPES = ("tensor", "head", "block")
COLUMNS = 8  # of an accumulator's tile, which the four lanes of a row share: blocks of keys are whole tiles


@dataclass(frozen=True)
class Flash:
    """How attention is computed block by block, as FlashAttention 2 (arXiv 2307.08691) and 3 (arXiv 2407.08608) do it.

    block_q, block_k: queries and keys of a block. All queries of a head take the keys block by block, in ascending order; block_q matters
        to scales="block" alone.
    p_scale: P = exp(S - m) is multiplied by it before its cast, inside the exponential, and the row's sum with it, so that it leaves the
        result by itself. The paper of FlashAttention 3 has 1, its kernels for FP8 have 256 (arXiv 2606.06521). It takes the place of the
        scale that a recipe would find for P.
    scales: what a scale of a recipe's "tensor" reaches. "tensor": all of Q, of K, of V; "head": a head of the keys, with the queries that
        share it; "block": a block of block_q queries, or block_k keys, of one head (FlashAttention 3, section 3.3).
    hadamard: Q and K are multiplied by a Hadamard matrix with random signs, over sqrt(H), which leaves Q·Kᵀ as it is ("incoherent
        processing", FlashAttention 3, section 3.3). H must be a power of two.
    promote: None: P·V is added in the instruction's accumulator over all keys; n: after n keys, a multiple of block_k, the accumulator is
        added to an f32 sum and begins anew (two-level sums). A recipe that promotes, or splits K, does so within each block, whose sum is
        then added in f32.
    Raises ValueError for other values.
    """

    block_q: int = 128
    block_k: int = 128
    p_scale: float = 1.0
    scales: str = "tensor"
    hadamard: bool = False
    promote: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "promote"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        for name in ("block_q", "block_k"):
            if not is_count(getattr(self, name)):
                raise ValueError(f"Flash({name}={getattr(self, name)!r}): wanted a number of rows, 1 or more")
        if self.block_k % COLUMNS:
            raise ValueError(f"Flash(block_k={self.block_k}): wanted a multiple of {COLUMNS}, the columns of an accumulator's tile")
        if isinstance(self.p_scale, bool) or not isinstance(self.p_scale, int | float | np.number):
            raise ValueError(f"Flash(p_scale={self.p_scale!r}): wanted a number, as 256")
        object.__setattr__(self, "p_scale", float(self.p_scale))
        if not (isfinite(self.p_scale) and self.p_scale > 0):
            raise ValueError(f"Flash(p_scale={self.p_scale!r}): wanted a positive number, as 256")
        if self.scales not in SCOPES:
            raise ValueError(f"Flash(scales={self.scales!r}): wanted one of {', '.join(SCOPES)}")
        if not isinstance(self.hadamard, bool):
            raise ValueError(f"Flash(hadamard={self.hadamard!r}): wanted True or False")
        if self.promote is not None and not (is_count(self.promote) and self.promote % self.block_k == 0):
            raise ValueError(
                f"Flash(promote={self.promote!r}): wanted a multiple of block_k={self.block_k}, in keys, or None; a smaller interval is "
                "the recipe's own, in instructions: recipe.replace(promote=...)"
            )

    def replace(self, **changes: Any) -> Flash:
        """The value with some fields changed. Raises as the constructor."""
        return replace(self, **changes)

    def check(self, qk: Recipe, pv: Recipe) -> None:
        """Raises ValueError where blocks do not fit the recipes of Q·Kᵀ and P·V."""
        if self.block_k % pv.op.k:
            raise ValueError(f"Flash(block_k={self.block_k}): {pv.op} takes {pv.op.k} keys; wanted a multiple of that")
        for name, block in (("queries", qk.a.block), ("rows of P", pv.a.block)):
            if block is not None and block[0] != 1:
                raise ValueError(f"recipe: scales of {block[0]} {name} together; in attention a block of scales is of one row, (1, ...)")
        for name, keys in (("K", qk.b.block and qk.b.block[0]), ("P", pv.a.block and pv.a.block[1]), ("V", pv.b.block and pv.b.block[1])):
            if keys is not None and self.block_k % keys:
                raise ValueError(f"Flash(block_k={self.block_k}): the recipe's scales of {name} are of {keys} keys; wanted a multiple")
        if self.promote not in (None, self.block_k) and sums_apart(pv):
            raise ValueError(
                f"Flash(promote={self.promote}): the recipe of P·V promotes, or splits K, within a block, so that nothing is chained "
                f"from block to block; give promote=None or {self.block_k}, or a recipe with promote=None and split_k=1"
            )

    def blocks_chained(self, pv: Recipe) -> int | None:
        """How many blocks of keys are added in one accumulator; None: all."""
        if sums_apart(pv):
            return 1
        return None if self.promote is None else self.promote // self.block_k


def sums_apart(pv: Recipe) -> bool:
    """The recipe's own sum of a block is no single chain of instructions, so that none can go on in the next block."""
    return pv.promote is not None or pv.split_k > 1
