"""The ways on which the lattice of a step is computed: every backend, and within it every form of the step."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

import tcemu
from support.llvm_products import Arithmetic, multiply_by_kernel, multiply_portably, older_target
from support.step_lattice import Codes, Lattice, LatticeBuilder, expected
from tcemu.arithmetic import reduction
from tcemu.backends.dispatch import multiply_matrices
from tcemu.base.errors import Unsupported


def bounded_portably(arithmetic: Arithmetic, operands: tuple[Any, ...]) -> np.ndarray:
    """D by the portable backend with the steps on bounded operands wherever one matrix of the batch allows them."""
    model, spec, _ = arithmetic
    fewest = [mock.patch.object(reduction, name, 1) for name in ("FEWEST_PRODUCTS", "FEWEST_STEPS")]
    with fewest[0], fewest[1], tcemu.execution("portable"):
        return np.asarray(jax.jit(jax.vmap(lambda *v: multiply_matrices(model, spec, *v)))(*operands))


def by_gpu_kernel(arithmetic: Arithmetic, operands: tuple[Any, ...]) -> np.ndarray:
    """D by the CUDA backend. Needs a GPU."""
    model, spec, _ = arithmetic
    with tcemu.execution("emulated"):
        return np.asarray(multiply_matrices(model, spec, *operands))


class Path(NamedTuple):
    """One way of computing, and the lattices that it is asked for."""

    multiply: Callable[[Arithmetic, tuple[Any, ...]], np.ndarray]
    lattices: tuple[str, ...]


PATHS = {
    "llvm": Path(multiply_by_kernel, ("spread", "tight", "special", "small")),
    "llvm by columns": Path(partial(multiply_by_kernel, by_columns=True), ("tight",)),
    "llvm without AVX-512": Path(lambda *v: multiply_by_kernel(*v, target=older_target()), ("spread", "tight", "special", "small")),
    "portable": Path(multiply_portably, ("spread", "special", "small")),
    "portable, bounded": Path(bounded_portably, ("tight",)),
    "cuda": Path(by_gpu_kernel, ("spread", "tight", "special", "small")),
}


def build(arithmetic: Arithmetic, kind: str, repeats: int = 1) -> Lattice:
    """The lattice of a kind: "spread", "tight", "special", or "small": as many small products as one instruction on a batch of warps."""
    builder = LatticeBuilder(arithmetic, seed=repeats, instructions=1 if kind == "small" else 2)
    if kind == "spread":
        return builder.spread(repeats, 64, 300)
    if kind == "special":
        return builder.special(6 * repeats)
    return builder.tight(6 * repeats) if kind == "tight" else builder.tight(2 * repeats, 20, 16, 8)


def count_differences(arithmetic: Arithmetic, path: str, repeats: int = 1) -> Iterator[tuple[str, int, int]]:
    """(lattice, words that differ from the exact reference, words) of each lattice. A kernel that there is none of has no words."""
    for kind in PATHS[path].lattices:
        operands = build(arithmetic, kind, repeats)
        try:
            got = PATHS[path].multiply(arithmetic, operands.operands)
        except Unsupported:
            continue
        wanted: Codes = expected(arithmetic, operands)
        yield kind, int((got.astype(np.int64) != wanted).sum()), wanted.size
