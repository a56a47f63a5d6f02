"""A Pallas kernel for NVIDIA GPUs: a tile of D stays in registers while K goes by, step after step.

What a step does is a plan's affair: `fused_kernel` does those of `dot_add`, `grouped_kernel` those of `grouped_dot_add`. Both exist twice,
with their inner operations in PTX and in plain integers (`assembly`), the latter for Pallas' interpret mode on any device.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from tcemu.arithmetic.dot_add import Scale, add_accumulator, decode_accumulator
from tcemu.bits import Limbs
from tcemu.formats import F32

_TRITON = "jax.experimental.pallas.triton"  # JAX 0.11 announces that this backend will go: every device then walks as a CPU does
plt: Any = importlib.import_module(_TRITON) if importlib.util.find_spec(_TRITON) else None

ABSENT = -(1 << 13)  # the exponent, in 16 bits, of what takes no part in the alignment
SIGN = -(1 << 31)
Loads = Callable[[int, Any], Array]  # (number of an operand's array, line of the step) -> [rows, 1] or [1, columns]


class Plan(Protocol):
    """What the kernel must know of an arithmetic; hashable."""

    @property
    def assembly(self) -> bool: ...
    @property
    def fraction_bits(self) -> int: ...
    @property
    def lost(self) -> int:
        """Fraction bits of f32 that a step's result gives up."""
        ...

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of D that a block of threads computes, powers of two; less where D is smaller."""
        ...

    @property
    def warps(self) -> int:
        """Of a block of threads, for a whole tile."""
        ...

    def prepare(self, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[tuple[Array, ...], Array]:
        """Side 0, A, or 1, B: codes [batch, K, rows or columns] -> `tiles`; and what is special, int32 [batch or 1, steps]."""
        ...

    def step(self, row: Loads, column: Loads, c: Array, special: Array) -> Array:
        """One step from the accumulator c, f32 bits in int32, to the next."""
        ...


def capable() -> bool:
    """JAX has Pallas' Triton backend, and the GPUs here the instructions that the PTX uses: compute capability 9.0 and up (add.s16x2)."""
    if plt is None:
        return False
    try:
        return all(float(device.compute_capability) >= 9 for device in jax.devices("cuda"))
    except RuntimeError:  # no GPU
        return False


def ptx(text: str, *operands: Array) -> Array:
    """One instance of inline PTX an element: $0 is the result, $1 and up are the operands, 32-bit registers all."""
    shape = jnp.broadcast_shapes(*(v.shape for v in operands))
    return plt.elementwise_inline_asm(
        "{ " + text + " }", args=[jnp.broadcast_to(v, shape) for v in operands], constraints=",".join(["=r"] + ["r"] * len(operands)),
        pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )[0]  # fmt: skip


def is_special(c: Array) -> Array:
    """Inf or NaN, by the bits of an f32."""
    return ((c >> 23) & 0xFF) == 0xFF


def own_exponent(c: Array) -> Array:
    """The exponent that an accumulator, f32 bits, brings to the alignment."""
    return jnp.where((c & ~SIGN) == 0, ABSENT, jnp.maximum((c >> 23) & 0xFF, 1) - F32.bias)


def end_in_integers(plan: Plan, negative: Array, magnitude: Limbs, exponent: Array, c: Array) -> Array:
    """What the PTX does at the end of a step: the products' sum, in units, and the accumulator c to f32 bits; c, if Inf or NaN, stays."""
    number = decode_accumulator(F32, (lax.bitcast_convert_type(c, jnp.uint32),))
    (code,) = add_accumulator(
        negative, magnitude, exponent, jnp.zeros(c.shape, jnp.int32), number, result=F32, rounding="RZ",
        fraction_bits=plan.fraction_bits, result_bits=F32.mantissa_bits - plan.lost,
    )  # fmt: skip
    return jnp.where(is_special(c), c, lax.bitcast_convert_type(code, jnp.int32))


def tiles(v: Array, lines: int, width: int) -> Array:
    """[batch, steps * lines, tiles * width] -> [batch, tiles, steps, lines, width]: what a block of threads reads lies together."""
    return v.reshape(v.shape[0], -1, lines, v.shape[-1] // width, width).transpose(0, 3, 1, 2, 4)


def product(plan: Plan, a: Array, b: Array, c: Array, scales: tuple[Scale, Scale] | None = None) -> Array:
    """All steps along K, in ascending order: codes of f32.

    a: codes [..., M, K]; b: codes [..., K, N], of whole steps; c: f32 codes [..., M, N], with every batch axis; scales: of a's and b's
    codes, one each. Under `vmap` the batch grows longer; under a mesh, batch, M and N may be sharded, and K is gathered.
    """
    batch, (m, n) = c.shape[:-2], c.shape[-2:]

    def flat(*together: Array) -> list[Array]:
        """One batch axis, of length 1 where these serve all of c."""
        own = jnp.broadcast_shapes(*(v.shape[:-2] for v in together))
        own = own if prod(own) == 1 else batch
        return [jnp.broadcast_to(v, (*own, *v.shape[-2:])).reshape(-1, *v.shape[-2:]) for v in together]

    (a, *a_scales), (b, *b_scales) = flat(a, *(scales[0] if scales else ())), flat(b, *(scales[1] if scales else ()))
    return _batched(plan)(a, b, *flat(c), *a_scales, *b_scales).reshape(*batch, m, n)


@cache
def _batched(plan: Plan) -> Callable:
    """`_sharded`, which `vmap` gives a longer batch, not another axis."""

    @jax.custom_batching.custom_vmap
    def batched(*operands: Array) -> Array:
        return _sharded(plan, tuple(v.shape[0] == 1 for v in operands))(*operands)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        a, b, c, *scales = (v if given else jnp.broadcast_to(v, (size, *v.shape)) for v, given in zip(operands, mapped, strict=True))
        return product(plan, a, b, c, (Scale(*scales[:2]), Scale(*scales[2:])) if scales else None), True

    return batched


@cache
def _sharded(plan: Plan, alone: tuple[bool, ...]) -> Callable:
    """`_product`, which a mesh may cut along batch, M and N. alone: the operands that serve the whole batch."""
    whole = custom_partitioning(partial(_product, plan))

    def partition(mesh: Any, arguments: tuple, result: Any) -> tuple:
        return mesh, partial(_product, plan), result.sharding, tuple(argument.sharding for argument in arguments)

    matrices = ("m k", "k n", "m n", "m k", "m k", "k n", "k n")[: len(alone)]
    factors = [f"{f'u{at}' if one else 'b'} {matrix}" for at, (one, matrix) in enumerate(zip(alone, matrices, strict=True))]
    rule = f"{', '.join(factors)} -> {factors[2]}"
    whole.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=("k",))
    return whole


def _product(plan: Plan, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    m, n = c.shape[1:]
    tile = min(plan.tile[0], pl.next_power_of_2(max(m, 8))), min(plan.tile[1], pl.next_power_of_2(max(n, 8)))
    fill = lambda v, axis, width: jnp.pad(v, [(0, -size % width if at == axis else 0) for at, size in enumerate(v.shape)])  # noqa: E731
    rows = lambda v: fill(jnp.swapaxes(v, 1, 2), 2, tile[0])  # noqa: E731
    columns = lambda v: fill(v, 2, tile[1])  # noqa: E731
    x, x_special = plan.prepare(0, rows(a), Scale(*map(rows, scales[:2])) if scales else None, tile[0])
    y, y_special = plan.prepare(1, columns(b), Scale(*map(columns, scales[2:])) if scales else None, tile[1])
    start = lax.bitcast_convert_type(columns(fill(c, 1, tile[0])), jnp.int32)
    grid = (start.shape[0], start.shape[1] // tile[0], start.shape[2] // tile[1])
    call = pl.pallas_call(
        partial(_kernel, plan=plan, tile=tile, grid=grid),
        out_shape=jax.ShapeDtypeStruct(start.shape, jnp.int32), grid=(prod(grid),), interpret=not plan.assembly,
        compiler_params=plt.CompilerParams(num_warps=min(plan.warps, max(1, prod(tile) // 128)), num_stages=1),
    )  # fmt: skip
    d = call(*x, *y, x_special | y_special, start)
    return lax.bitcast_convert_type(d[:, :m, :n], jnp.uint32)


def _kernel(*refs: Any, plan: Plan, tile: tuple[int, int], grid: tuple[int, int, int]) -> None:
    *sides, special_ref, c_ref, d_ref = refs
    at, half = pl.program_id(0), len(sides) // 2
    batch, row_tile, column_tile = at // (grid[1] * grid[2]), at // grid[2] % grid[1], at % grid[2]
    x_batch, y_batch, special_batch = (batch if ref.shape[0] > 1 else jnp.int32(0) for ref in (sides[0], sides[half], special_ref))
    where = (batch, pl.ds(row_tile * tile[0], tile[0]), pl.ds(column_tile * tile[1], tile[1]))

    def advance(s: Array, c: Array) -> Array:
        row = lambda array, line: plt.load(sides[array].at[x_batch, row_tile, s, jnp.int32(line), :])[:, None]  # noqa: E731
        column = lambda array, line: plt.load(sides[half + array].at[y_batch, column_tile, s, jnp.int32(line), :])[None, :]  # noqa: E731
        return plan.step(row, column, c, special_ref[special_batch, s])

    one_nan = lambda v: jnp.where((v & ~SIGN) > F32.infinity, F32.nan, v)  # noqa: E731
    plt.store(d_ref.at[where], one_nan(lax.fori_loop(0, sides[0].shape[2], advance, one_nan(plt.load(c_ref.at[where])))))
