"""Batches of small products for the LLVM backend: whether the kernel of `small_kernel` takes them, and its call."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.forms import bounded_form
from tcemu.engine.backends.llvm import machine_code, xla_call
from tcemu.engine.backends.llvm.xla_call import Kernel
from tcemu.engine.backends.product_requests import StoredOperand, WarpOperands
from tcemu.engine.formats.number_formats import F32, Format

if TYPE_CHECKING:
    from tcemu.engine.backends.llvm.small_kernel import PlacedOperand, SmallForm

MOST_TERMS = 64  # products of a step
MOST_OUTPUTS = 256  # elements of D


class SmallCall(NamedTuple):
    """A kernel of small products, a `BatchedCall`. Hashable: a compiled program belongs to each."""

    kernel: Kernel
    ranks: tuple[int, int, int, int]  # axes of A, B, C and D besides the batch
    result: tuple[int, ...]  # shape of D

    @property
    def axes(self) -> tuple[str, ...]:
        """A mesh may shard the batch alone."""
        return tuple(" ".join(f"o{at}a{axis}" for axis in range(rank)) for at, rank in enumerate(self.ranks))

    @property
    def sharing(self) -> tuple[str, ...]:
        """Each operand by itself may serve the whole batch."""
        return "a", "b", "c"

    def __call__(self, *operands: Array) -> Array:
        batch = max(len(v) for v in operands)
        return xla_call.call(self.kernel, jax.ShapeDtypeStruct((batch, *self.result), jnp.uint32), *operands)[0]


def find_matrix_kernel(
    model: Model, given: ProductSpec, spec: ProductSpec, m: int, n: int, target: machine_code.Target | None = None
) -> SmallCall | None:
    """Returns the call for A [batch, M, K], B [batch, K, N] and C [batch, M, N], with K of one instruction; None if no kernel takes it.

    Args:
        model: The model, specialised to the instruction.
        given: The formats of the codes. C and D have the format of the model's result.
        spec: The formats that are multiplied.
        m: Rows of D.
        n: Columns of D.
        target: The CPU; None: this machine's.
    """
    form = find_matrix_form(model, given, spec, m, n, target)
    return None if form is None else SmallCall(_build_kernel(form, target), (2, 2, 2, 2), (m, n))


def find_matrix_form(
    model: Model, given: ProductSpec, spec: ProductSpec, m: int, n: int, target: machine_code.Target | None = None
) -> SmallForm | None:
    shapes = (given.a, m, spec.k), (given.b, spec.k, n), (F32, m, n), (F32, m, n)
    return find_small_form(model, given, spec, m, n, [_place_matrix(*shape) for shape in shapes], target)


def find_register_kernel(model: Model, given: ProductSpec, spec: ProductSpec, warp: WarpOperands) -> SmallCall | None:
    """Returns the call for the registers of warps, uint32 [batch, lanes, words]; None if no kernel takes them. Arguments as above."""
    one_warp = warp.warps == warp.tiles == 1 and warp.metadata is None and warp.scales is None
    if not one_warp or any(len(stored.fragment.shape) != 2 for stored in (warp.a, warp.b, warp.c, warp.d)):
        return None
    if (warp.c.format, warp.d.format, given.a, given.b) != (F32, F32, warp.a.format, warp.b.format):
        return None
    m, n = warp.d.fragment.shape
    operands = [_place_registers(stored) for stored in (warp.a, warp.b, warp.c, warp.d)]
    form = find_small_form(model, given, spec, m, n, operands)
    lanes = warp.d.fragment.lanes
    return None if form is None else SmallCall(_build_kernel(form), (2, 2, 2, 2), (*lanes, operands[3].words // lanes[-1]))


def find_small_form(
    model: Model,
    given: ProductSpec,
    spec: ProductSpec,
    m: int,
    n: int,
    operands: list[PlacedOperand],
    target: machine_code.Target | None = None,
) -> SmallForm | None:
    """Returns the form of the kernel of small products, or None where there is none.

    Args:
        model: As in `find_matrix_kernel`, as are `given`, `spec`, `m` and `n`.
        given: The formats of the codes.
        spec: The formats that are multiplied.
        m: Rows of D.
        n: Columns of D.
        operands: The places of A, B, C and D.
        target: The CPU; None: this machine's.
    """
    from tcemu.engine.backends.llvm.bounded_lanes import KernelForm
    from tcemu.engine.backends.llvm.small_kernel import SideForm, SmallForm

    if not isinstance(model.terms, int) or model.flush is not None or model.together or spec.scale is not None or spec.a.words > 1:
        return None
    order = Order.from_model(model, spec.k)
    if order.step_size(spec.k) > MOST_TERMS or m * n > MOST_OUTPUTS:
        return None
    step = bounded_form(model.replace(chain=None), spec._replace(d=model.result), order.step_size(spec.k))
    # a wide format is multiplied as it is given, and has no chains
    if step is None or not (step.is_narrow or (order.chain is None and (given.a, given.b) == (spec.a, spec.b))):
        return None
    if len(order.chains(spec.k)) > 1:
        return None
    target = target or machine_code.host_target()
    wide = target.vector_bits == 512
    side = SideForm(KernelForm(step, int(model.floor), 0, wide), 1, order.chain is not None)
    small = SmallForm(m, n, tuple(map(tuple, order.steps(spec.k))), *operands, sides=(side,), converts_half=wide or target.has("f16c"))
    return None if small.missing_reason() else small


def _build_kernel(form: SmallForm, target: machine_code.Target | None = None) -> Kernel:
    from tcemu.engine.backends.llvm.small_kernel import small_kernel_text

    return Kernel("small", small_kernel_text("small", form), target)


def _place_matrix(fmt: Format, rows: int, columns: int) -> PlacedOperand:
    from tcemu.engine.backends.llvm.small_kernel import WORD_BITS, PlacedOperand

    size, count = 8 * fmt.dtype.itemsize, rows * columns
    return PlacedOperand(fmt, tuple(range(0, size * count, size)), size * count // WORD_BITS)


def _place_registers(stored: StoredOperand) -> PlacedOperand:
    from tcemu.engine.backends.llvm.small_kernel import WORD_BITS, PlacedOperand

    elements = stored.fragment.index().ravel()
    bits = {int(element): at * stored.container_bits + stored.shift for at, element in enumerate(elements)}
    return PlacedOperand(stored.format, tuple(bits[at] for at in sorted(bits)), len(elements) * stored.container_bits // WORD_BITS)
