"""A Pallas kernel for NVIDIA GPUs: a tile of D stays in registers while K goes by, step after step.

What a step does is the affair of `fused`, for the steps of `dot_add`, and of `grouped`, for those of `grouped_dot_add`. Both have their
inner operations twice: in PTX, and in plain integers for Pallas' interpret mode, which runs on any device.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

from tcemu.arithmetic.kernels.fused import FusedSteps
from tcemu.arithmetic.kernels.grouped import GroupedSteps
from tcemu.arithmetic.kernels.ptx import plt
from tcemu.arithmetic.kernels.steps import SIGN, Steps
from tcemu.arithmetic.model import Model, Scales, Signature
from tcemu.arithmetic.multiplicands import Scale, spread
from tcemu.arithmetic.order import Order
from tcemu.formats import F32

PROGRAMS = 512  # arithmetics whose programs are remembered
LEAST_CAPABILITY = 9.0  # compute capability: the PTX uses add.s16x2


def missing() -> str:
    """Why the kernel cannot run on the GPUs that are here; "" if it can."""
    if plt is None:
        return "this JAX has no Triton backend of Pallas"
    try:
        found = [float(device.compute_capability) for device in jax.devices("cuda")]
    except RuntimeError:
        return "JAX finds no NVIDIA GPU"
    return "" if min(found) >= LEAST_CAPABILITY else f"a GPU has compute capability {min(found)}; {LEAST_CAPABILITY} is needed"


def steps_of(model: Model, signature: Signature, *, assembly: bool = True) -> FusedSteps | GroupedSteps | None:
    """The steps of a model as the kernel runs them; None where it cannot.

    It cannot where fields are traced, where sums are too wide, and where results are not cut to f32 step by step. A field of Model that is
    not named here must have its default.
    """
    plain = model.uses_only("result", "terms", "fraction_bits", "floor", "result_bits", "multiplicand", "summed")
    bits, floor, kept = model.fraction_bits, model.floor, F32.mantissa_bits if model.result_bits is None else model.result_bits
    if not (plain and isinstance(model.terms, int) and isinstance(bits, int) and isinstance(floor, int) and isinstance(kept, int)):
        return None
    terms = Order.of(model, signature.k).step_size(signature.k)
    if model.result != F32 or signature.d != F32 or signature.k % terms:
        return None
    numbers = {"fraction_bits": bits, "floor": floor, "lost": F32.mantissa_bits - kept, "assembly": assembly}
    if model.summed is None:
        steps = FusedSteps(signature.a, signature.b, terms, scaled=signature.scale is not None, **numbers)
    else:
        assert signature.scale is not None
        steps = GroupedSteps(signature.a, signature.b, terms, model.summed, signature.scale.mantissa_bits, **numbers)
    return steps if steps.possible else None


def program(model: Model, signature: Signature, *, assembly: bool = True) -> Callable[..., Array] | None:
    """The function (a, b, c, scales) -> D that walks this model's steps by the kernel; None where it cannot. Codes as in `walk`."""
    steps = steps_of(model, signature, assembly=assembly)
    if steps is None:
        return None

    def by_tiles(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        if scales is None or signature.scale is None:
            return product(steps, a, b, c)
        (a, a_scales), (b, b_scales) = (spread(signature.scale, v, s, at) for v, s, at in ((a, scales[0], -1), (b, scales[1], -2)))
        return product(steps, a, b, c, (a_scales, b_scales))

    return by_tiles


def product(steps: Steps, a: Array, b: Array, c: Array, scales: tuple[Scale, Scale] | None = None) -> Array:
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
    return _batched(steps)(a, b, *flat(c), *a_scales, *b_scales).reshape(*batch, m, n)


@lru_cache(maxsize=PROGRAMS)
def _batched(steps: Steps) -> Callable:
    """`_sharded`, which `vmap` gives a longer batch, not another axis."""

    @jax.custom_batching.custom_vmap
    def batched(*operands: Array) -> Array:
        return _sharded(steps, tuple(v.shape[0] == 1 for v in operands))(*operands)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        a, b, c, *scales = (v if given else jnp.broadcast_to(v, (size, *v.shape)) for v, given in zip(operands, mapped, strict=True))
        return product(steps, a, b, c, (Scale(*scales[:2]), Scale(*scales[2:])) if scales else None), True

    return batched


@lru_cache(maxsize=PROGRAMS)
def _sharded(steps: Steps, alone: tuple[bool, ...]) -> Callable:
    """`_product`, which a mesh may cut along batch, M and N. alone: the operands that serve the whole batch."""
    whole = custom_partitioning(partial(_product, steps))

    def partition(mesh: Any, arguments: tuple, result: Any) -> tuple:
        return mesh, partial(_product, steps), result.sharding, tuple(argument.sharding for argument in arguments)

    matrices = ("m k", "k n", "m n", "m k", "m k", "k n", "k n")[: len(alone)]
    factors = [f"{f'u{at}' if one else 'b'} {matrix}" for at, (one, matrix) in enumerate(zip(alone, matrices, strict=True))]
    rule = f"{', '.join(factors)} -> {factors[2]}"
    whole.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=("k",))
    return whole


def _product(steps: Steps, a: Array, b: Array, c: Array, *scales: Array) -> Array:
    m, n = c.shape[1:]
    tile = min(steps.tile[0], pl.next_power_of_2(max(m, 8))), min(steps.tile[1], pl.next_power_of_2(max(n, 8)))
    fill = lambda v, axis, width: jnp.pad(v, [(0, -size % width if at == axis else 0) for at, size in enumerate(v.shape)])  # noqa: E731
    rows = lambda v: fill(jnp.swapaxes(v, 1, 2), 2, tile[0])  # noqa: E731
    columns = lambda v: fill(v, 2, tile[1])  # noqa: E731
    x, x_special = steps.prepare(0, rows(a), Scale(*map(rows, scales[:2])) if scales else None, tile[0])
    y, y_special = steps.prepare(1, columns(b), Scale(*map(columns, scales[2:])) if scales else None, tile[1])
    start = lax.bitcast_convert_type(columns(fill(c, 1, tile[0])), jnp.int32)
    grid = (start.shape[0], start.shape[1] // tile[0], start.shape[2] // tile[1])
    call = pl.pallas_call(
        partial(_kernel, steps=steps, tile=tile, grid=grid),
        out_shape=jax.ShapeDtypeStruct(start.shape, jnp.int32), grid=(prod(grid),), interpret=not steps.assembly,
        compiler_params=plt.CompilerParams(num_warps=min(steps.warps, max(1, prod(tile) // 128)), num_stages=1),
    )  # fmt: skip
    d = call(*x, *y, x_special | y_special, start)
    return lax.bitcast_convert_type(d[:, :m, :n], jnp.uint32)


def _kernel(*refs: Any, steps: Steps, tile: tuple[int, int], grid: tuple[int, int, int]) -> None:
    *sides, special_ref, c_ref, d_ref = refs
    at, half = pl.program_id(0), len(sides) // 2
    batch, row_tile, column_tile = at // (grid[1] * grid[2]), at // grid[2] % grid[1], at % grid[2]
    x_batch, y_batch, special_batch = (batch if ref.shape[0] > 1 else jnp.int32(0) for ref in (sides[0], sides[half], special_ref))
    where = (batch, pl.ds(row_tile * tile[0], tile[0]), pl.ds(column_tile * tile[1], tile[1]))

    def advance(s: Array, c: Array) -> Array:
        row = lambda array, line: plt.load(sides[array].at[x_batch, row_tile, s, jnp.int32(line), :])[:, None]  # noqa: E731
        column = lambda array, line: plt.load(sides[half + array].at[y_batch, column_tile, s, jnp.int32(line), :])[None, :]  # noqa: E731
        return steps.step(row, column, c, special_ref[special_batch, s])

    one_nan = lambda v: jnp.where((v & ~SIGN) > F32.infinity, F32.nan, v)  # noqa: E731
    plt.store(d_ref.at[where], one_nan(lax.fori_loop(0, sides[0].shape[2], advance, one_nan(plt.load(c_ref.at[where])))))
