"""The kernel of `cuda/warp.cu`: a batch of single instructions, words in and words out. What a lane's words hold is said by a `Warp`."""

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.kernels import calls, source
from tcemu.arithmetic.kernels.held import Held, Plan, Warp, plan, row_by_row, tables
from tcemu.arithmetic.kernels.launch import Entry, launch
from tcemu.arithmetic.kernels.source import Numbers
from tcemu.arithmetic.model import Model, Signature
from tcemu.formats import Format
from tcemu.layouts import LANES
from tcemu.meshes import alike, cut_along_result

PROGRAMS = 512  # arithmetics whose programs are remembered
MOST_ELEMENTS = 8  # of D, of a lane
MANY, MOST_EACH = 1 << 14, 8  # from so many warps on each takes several instructions, at most so many


class Kernel(NamedTuple):
    """What the kernel is compiled for. Hashable: a compiled program belongs to each."""

    numbers: Numbers
    signature: Signature  # a, b: as they are multiplied
    result: Format  # of the steps
    warp: Warp


class Words(NamedTuple):
    """The operands, with batch axes in front."""

    a: Array  # uint32 [..., lanes, words], as `Warp` says
    b: Array
    c: Array
    fields: Array | None = None  # of a sparse instruction: uint32 [..., lanes], a register each
    a_scales: Array | None = None  # of a block-scaled one
    b_scales: Array | None = None
    selectors: Array | None = None  # int32 [..., values]: the sparsity selector; of A's and B's scales the group of bytes and the thread


def kernel_of(model: Model, signature: Signature, warp: Warp) -> Kernel | None:
    """The kernel that takes a model; None where none does. signature: its a and b as they are multiplied."""
    n = source.numbers(model, signature)
    made = None if n is None else plan(n, warp, (signature.a, signature.b))
    if n is None or made is None:
        return None
    return Kernel(n, signature, model.result, warp)


def kernel_of_matrices(
    numbers: Numbers, signature: Signature, result: Format, held: tuple[Format, Format], m: int, n: int
) -> Kernel | None:
    """The kernel for batches of A [M, K], B [K, N] and C [M, N], as codes, of one instruction each; None where they do not fit a warp.

    held: the formats of A's and B's codes.
    """
    k, sizes = signature.k, {}
    for name, fmt, rows, columns in (("a", held[0], m, k), ("b", held[1], k, n), ("c", result, m, n), ("d", signature.d, m, n)):
        bits = fmt.dtype.itemsize * 8
        whole = rows * columns * bits % (LANES * 32) == 0
        if not whole or rows & (rows - 1) or columns & (columns - 1):
            return None
        sizes[name] = Held(row_by_row(rows, columns), fmt, bits)
    warp = Warp(**sizes)
    made = plan(numbers, warp, (signature.a, signature.b))
    if numbers.scaled or numbers.promoted or made is None or m * n > MOST_ELEMENTS * LANES:
        return None
    return Kernel(numbers, signature, result, warp)


def warps_of_block(kernel: Kernel) -> int:
    return _plan(kernel).warps


def _plan(kernel: Kernel) -> Plan:
    made = plan(kernel.numbers, kernel.warp, (kernel.signature.a, kernel.signature.b))
    assert made is not None
    return made


def text(kernel: Kernel) -> str:
    """Its CUDA C++."""
    n, signature, warp, made = kernel.numbers, kernel.signature, kernel.warp, _plan(kernel)
    same = {"a": signature.a == warp.a.format, "b": signature.b == warp.b.format, "c": kernel.result == warp.c.format}
    lines = [f"typedef {source.format_type(held.format)} {name}Held;" for name, held in (("A", warp.a), ("B", warp.b))]
    lines += [f"constexpr bool {name.upper()}_SAME = {int(value)};" for name, value in same.items()]
    lines.append(tables(n, warp, made, _units(kernel)))
    return source.text("warp", n, signature, kernel.result, tables="\n".join(lines), floats=made.floats)


def _units(kernel: Kernel) -> tuple[int, int]:
    """The most units of a product, and of an accumulator. (0, 0) where a step takes the wide way."""
    n, a, b = kernel.numbers, kernel.signature.a, kernel.signature.b
    product = (2 ** (a.mantissa_bits + 1) - 1) * (2 ** (b.mantissa_bits + 1) - 1) << max(0, n.fraction_bits - n.mantissas)
    own = 2 ** (kernel.result.mantissa_bits + 1) - 1 << max(0, n.fraction_bits - kernel.result.mantissa_bits)
    return (product, own) if n.alignment == "RZ" and not n.summed and max(product, own) < 2**31 else (0, 0)


def product(kernel: Kernel, words: Words) -> Array:
    """D's words, uint32 [..., lanes, words]. Batch axes broadcast; under `vmap` the batch grows longer; under a mesh, it may be sharded."""
    group = len(kernel.warp.d.fragment.lanes) - 1
    axes = (2 + group, 2 + group, 2 + group, 1 + group, 1, 1, 1)  # of each operand's own
    own_axes = [own for v, own in zip(words, axes, strict=True) if v is not None]
    given = list(zip(alike(*(v for v in words if v is not None)), own_axes, strict=True))
    batches = [v.shape[: v.ndim - own] for v, own in given]
    batch = jnp.broadcast_shapes(*batches)
    flat = []
    for (v, own), axis in zip(given, batches, strict=True):
        whole = axis if prod(axis) == 1 else batch
        flat.append(jnp.broadcast_to(v, (*whole, *v.shape[v.ndim - own :])).reshape(prod(whole), -1))
    return _batched(kernel)(*flat).reshape(*batch, *_shape_of_d(kernel))


def _shape_of_d(kernel: Kernel) -> tuple[int, ...]:
    d = kernel.warp.d
    return *d.fragment.lanes, d.fragment.elements * d.container_bits // 32


@lru_cache(maxsize=PROGRAMS)
def _batched(kernel: Kernel) -> Callable:
    """`_sharded`, which `vmap` gives a longer batch, not another axis."""

    def whole(*operands: Array) -> Array:
        batch = max(len(v) for v in operands)
        return _sharded(kernel, tuple(len(v) < batch for v in operands))(*operands)

    batched = jax.custom_batching.custom_vmap(whole)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        batch = max(v.shape[given] for v, given in zip(operands, mapped, strict=True))
        longer = []
        for v, given in zip(operands, mapped, strict=True):
            if given or v.shape[0] > 1:
                v = jnp.broadcast_to(v if given else v[None], (size, batch, v.shape[-1])).reshape(size * batch, -1)
            longer.append(v)
        d = batched(*longer)
        return d.reshape(-1, batch, d.shape[-1]), True

    return batched


@lru_cache(maxsize=PROGRAMS)
def _sharded(kernel: Kernel, alone: tuple[bool, ...]) -> Callable:
    """`launched`, which a mesh may cut along the batch. alone: the operands that serve all of it."""
    operands = [f"{f'u{at}' if one else 'b'} w{at}" for at, one in enumerate(alone)]
    return cut_along_result(partial(launched, kernel, alone), operands, "b d")


def launched(kernel: Kernel, alone: tuple[bool, ...], *operands: Array) -> Array:
    """On one device: uint32 [batch, words]. alone: the operands that serve the whole batch. The kernel asks no operand for its dtype."""
    batch = next(len(v) for v, one in zip(operands, alone, strict=True) if not one)
    return _launch(kernel, alone, jax.ShapeDtypeStruct((batch, prod(_shape_of_d(kernel))), jnp.uint32), operands)


def launched_on_matrices(kernel: Kernel, a: Array, b: Array, c: Array) -> Array:
    """On one device: codes [batch, M, N]. a, b: one batch axis, of length 1 where one matrix serves all."""
    alone = tuple(len(v) < len(c) for v in (a, b, c))
    return _launch(kernel, alone, jax.ShapeDtypeStruct(c.shape, kernel.signature.d.dtype), (a, b, c))


def _launch(kernel: Kernel, alone: tuple[bool, ...], d: jax.ShapeDtypeStruct, operands: tuple[Array, ...]) -> Array:
    warps, items = warps_of_block(kernel), d.shape[0] * kernel.warp.warps * kernel.warp.tiles
    each = each_of(items)
    sizes = calls.numbers(*sizes_of(kernel, d.shape[0], each, alone))
    return launch(Entry("warp", text(kernel), LANES * warps), -(-items // (each * warps)), d, sizes, *operands)[0]


def each_of(items: int) -> int:
    """Instructions of one warp, one after the other."""
    return min(MOST_EACH, max(1, items // MANY))


def sizes_of(kernel: Kernel, batch: int, each: int, alone: tuple[bool, ...]) -> list[int]:
    """`Sizes` of warp.cu. each: instructions of one warp; alone: of the operands that there are."""
    has = (True,) * 3 + (kernel.warp.metadata is not None,) + (kernel.warp.scales is not None,) * 2
    has += (kernel.warp.metadata is not None or kernel.warp.scales is not None,)
    given = iter(alone)
    return [batch, each, *(int(there and not next(given)) for there in has)]
