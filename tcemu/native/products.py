"""`Native`: the GPU's instruction in the place of an emulated product of matrices of codes, where that is chosen."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from tcemu.arithmetic.kernels.calls import known_sizes
from tcemu.arithmetic.model import Model, Promotion, Signature
from tcemu.errors import Unsupported
from tcemu.executing import AUTO, NATIVE
from tcemu.formats import F32, Format, convert
from tcemu.isa.instructions import Instruction
from tcemu.native import mma, wgmma
from tcemu.native.units import Unit, target_here, unit_of_product

Matrices = tuple[Array, Array, Array]


class Native(NamedTuple):
    """That an instruction's products may be computed by a GPU. Hashable, a part of a `Signature`."""

    op: Instruction
    choice: str  # NATIVE or AUTO

    def unit(self, model: Model, signature: Signature) -> Unit:
        """The GPU's instruction for a model. Raises Unsupported."""
        return unit_of_product(self.op, model, signature._replace(native=None), target_here())

    def product(self, emulated: Callable[..., Array], model: Model, signature: Signature, matrices: Matrices) -> Array:
        """D = A·B + C on codes, as `program.multiply_add` has them, C with every batch axis. emulated: the same on such matrices.

        Raises Unsupported where there is no way, and NATIVE is the choice.
        """
        try:
            unit = self.unit(model, signature)
            known_sizes(*matrices)
        except Unsupported as error:
            if self.choice == AUTO:
                return emulated(*matrices)
            raise refused(self.op, str(error)) from None
        by_unit = partial(_product, unit, signature.c)
        if self.choice == NATIVE:
            return by_unit(*matrices)
        return lax.platform_dependent(*matrices, cuda=by_unit, default=emulated)

    def promoted(self, model: Model, signature: Signature, promotion: Promotion, *matrices: Array) -> Callable[[Any], Array] | None:
        """Takes the operands of `program.promoted` and gives promoted sums, f32 codes [..., M, N]; None: there is no such kernel.

        Then parts are promoted outside, and `product` computes each.
        """
        try:
            unit = self.unit(model, signature)
            known_sizes(*matrices)
        except Unsupported:
            return None
        if unit.op.family != "wgmma" or unit.op.d != F32:
            return None
        scaled, (rows, columns) = promotion.reach is not None, promotion.reach or (None, None)
        parts = wgmma.Promotion(promotion.instructions * signature.k, rows, columns, scaled)
        return lambda operands: _promoted(unit, parts, operands.a, operands.b, *(operands.block_scales or ()))


def refused(op: Instruction, reason: str) -> Unsupported:
    """What `execution("native")` raises."""
    return Unsupported(f'{op}: execution("native") cannot run it: {reason}. execution("auto") takes the emulation in such cases')


def _product(unit: Unit, addend: Format, a: Array, b: Array, c: Array) -> Array:
    assert unit.op.d is not None
    words = unit.op.d.words - 1
    *batch, m, n = c.shape[: c.ndim - words]
    c = c if addend == unit.op.d else convert(addend, unit.op.d, c)
    x, y, start = _flat(a, batch, words), _flat(b, batch, words), c.reshape(-1, *c.shape[len(batch) :])
    if unit.op.family == "wgmma":
        d = wgmma.product(wgmma.Product(unit.op, wgmma.Steps(unit.step, unit.own_step)), x, y, start)
    else:
        d = mma.product(unit.op, *_filled(unit.op, x, y), start)
    return d.reshape(*batch, m, n, *c.shape[c.ndim - words :])


def _promoted(unit: Unit, promotion: wgmma.Promotion, a: Array, b: Array, *scales: Array) -> Array:
    batch = jnp.broadcast_shapes(*(v.shape[:-2] for v in (a, b, *scales)))
    sides = zip((a, b), scales, strict=True) if scales else ((a,), (b,))
    (x, *of_a), (y, *of_b) = ([_flat(v, batch, 0, [other.shape[:-2] for other in side]) for v in side] for side in sides)
    call = wgmma.Product(unit.op, wgmma.Steps(unit.step, unit.own_step), promotion)
    d = wgmma.product(call, x, y, *of_a, *of_b)
    return d.reshape(*batch, *d.shape[1:])


def _flat(v: Array, batch: Sequence[int], words: int, beside: Sequence[tuple[int, ...]] = ()) -> Array:
    """One batch axis, of length 1 where this serves all. beside: the batch axes of what must have the same."""
    own, rest = v.shape[: v.ndim - 2 - words], v.shape[v.ndim - 2 - words :]
    alone = all(prod(axes) == 1 for axes in (own, *beside))
    return v.reshape(1, *rest) if alone else jnp.broadcast_to(v, (*batch, *rest)).reshape(-1, *rest)


def _filled(op: Instruction, a: Array, b: Array) -> tuple[Array, Array]:
    """With K filled up to whole instructions."""
    missing = -a.shape[2] % op.k
    if not missing:
        return a, b
    more = jnp.broadcast_to(jnp.asarray(mma.filling(op)), (*a.shape[:2], missing, *a.shape[3:]))
    return jnp.concatenate([a, more], 2), jnp.pad(b, [(0, 0), (0, missing), *[(0, 0)] * (b.ndim - 2)])
