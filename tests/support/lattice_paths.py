"""The ways on which the lattice of a step is computed: every backend, and within it every form of the step."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import tcemu
from support import cuda_on_cpu
from support.llvm_products import Arithmetic, multiply_by_kernel, multiply_portably, older_target
from support.step_lattice import Bounds, Codes, Lattice, LatticeBuilder, expected
from tcemu.base.errors import Unsupported
from tcemu.engine.arithmetic import reduction
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.step.forms import anchored_form
from tcemu.engine.backends.cuda import matrix_kernels as cuda
from tcemu.engine.backends.cuda.register_kernel import find_small_matrix_kernel
from tcemu.engine.backends.cuda.xla_launch import Route
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import recode


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


def by_gpu_text(entry: str, arithmetic: Arithmetic, operands: tuple[Any, ...]) -> np.ndarray:
    """D by the text of a CUDA kernel, compiled for this CPU. Raises Unsupported.

    Args:
        entry: "tile", "integer" or "warp".
        arithmetic: The arithmetic.
        operands: For "warp" of one instruction, for "tile" at least as large as one serves.
    """
    model, spec, block = arithmetic
    a, b, c, scales = operands
    kernels = cuda.find_matrix_kernels(*specialize(model, spec, block or None), None, (spec.a, spec.b))
    if kernels is None or (entry == "tile" and kernels.tiling is None):
        raise Unsupported(f"no kernel {entry}")
    if entry == "warp":
        m, n = c.shape[1:]
        if find_small_matrix_kernel(kernels.numbers, kernels.spec, kernels.result, kernels.stored, m, n) is None:
            raise Unsupported(f"no kernel of one warp for {m} x {n}")
    entries: list[str] = []
    own_launch = cuda_on_cpu.launch

    def launch(kernel: Any, *rest: Any) -> Any:
        entries.append(kernel.name)
        return own_launch(kernel, *rest)

    with mock.patch.object(cuda_on_cpu, "launch", launch), mock.patch.object(cuda_on_cpu, "ROUTE", GPU), cuda_on_cpu.kernels_on_cpu():
        kernels = kernels if entry == "tile" else kernels._replace(tiling=None)
        d = np.asarray(
            cuda.multiply_by_kernels(kernels, jnp.asarray(a), jnp.asarray(b), recode(spec.c, kernels.result, jnp.asarray(c)), scales)
        )
    assert entries[-1] == entry, entries
    return d


GPU = Route("sm", "90", "", 132)  # so many multiprocessors that tiles are small


class Path(NamedTuple):
    """One way of computing, and the lattices that it is asked for."""

    multiply: Callable[[Arithmetic, tuple[Any, ...]], np.ndarray]
    lattices: tuple[str, ...]


PATHS = {
    "llvm": Path(multiply_by_kernel, ("spread", "tight", "special", "small", "lone")),
    "llvm by columns": Path(partial(multiply_by_kernel, by_columns=True), ("tight",)),
    "llvm without AVX-512": Path(lambda *v: multiply_by_kernel(*v, target=older_target()), ("spread", "tight", "special", "small")),
    "portable": Path(multiply_portably, ("spread", "special", "small")),
    "portable, bounded": Path(bounded_portably, ("tight",)),
    "cuda": Path(by_gpu_kernel, ("spread", "tight", "special", "small", "lone")),
    "cuda tile on a CPU": Path(partial(by_gpu_text, "tile"), ("tile", "guards", "lone")),
    "cuda integer on a CPU": Path(partial(by_gpu_text, "integer"), ("few",)),
    "cuda warp on a CPU": Path(partial(by_gpu_text, "warp"), ("warp",)),
}


TIGHT = {  # repeats, entries, M, N
    "tight": (6, 25, 4, 16), "few": (1, 4, 4, 16), "tile": (1, 3, 32, 32), "guards": (1, 3, 32, 32),
    # one instruction on a batch of warps
    "small": (2, 20, 16, 8), "warp": (1, 6, 16, 8),
}  # fmt: skip


def build(arithmetic: Arithmetic, kind: str, repeats: int = 1) -> Lattice:
    """The lattice of a kind: "spread", "special", "lone", or one of `TIGHT`."""
    builder = LatticeBuilder(arithmetic, seed=repeats, instructions=1 if kind in ("small", "warp") else 2)
    if kind == "spread":
        return builder.spread(repeats, 64, 300)
    if kind == "special":
        return builder.special(6 * repeats)
    if kind == "lone":
        return builder.lone(12 * repeats)
    times, *sizes = TIGHT[kind]
    return builder.tight(times * repeats, *sizes, bounds=_tile_bounds(arithmetic, builder.k) if kind == "guards" else None)


def _tile_bounds(arithmetic: Arithmetic, k: int) -> Bounds | None:
    """The ends of the guards of the anchored step."""
    form = anchored_form(*specialize(arithmetic.model, arithmetic.spec, arithmetic.block or None))
    if form is None:
        return None
    limit, least, plain = form.exponent_limit(k), form.least_tops, form.least_unit + form.result.mantissa_bits
    return Bounds([limit, least, (limit + least) // 2, *([] if form.relative else [form.most // 2])], [form.most, plain, limit, least])


@lru_cache(maxsize=8)  # the paths of one arithmetic follow each other, and take up to five lattices
def _operands(arithmetic: Arithmetic, kind: str, repeats: int) -> Lattice:
    return build(arithmetic, kind, repeats)


@lru_cache(maxsize=8)
def _expected(arithmetic: Arithmetic, kind: str, repeats: int) -> Codes:
    return expected(arithmetic, _operands(arithmetic, kind, repeats))


def count_differences(arithmetic: Arithmetic, path: str, repeats: int = 1) -> Iterator[tuple[str, int, int]]:
    """(lattice, words that differ from the exact reference, words) of each lattice. A kernel that there is none of has no words."""
    for kind in PATHS[path].lattices:
        try:
            got = PATHS[path].multiply(arithmetic, _operands(arithmetic, kind, repeats).operands)
        except Unsupported:
            continue
        wanted = _expected(arithmetic, kind, repeats)
        yield kind, int((got.astype(np.int64) != wanted).sum()), wanted.size
