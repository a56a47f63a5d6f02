"""The kernel `registers.cu`: a batch of single instructions, from registers to registers. `WarpOperands` describes a lane's registers."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.forms import IntegerForm, StepNumbers, step_numbers
from tcemu.engine.backends.batched_calls import call_batched, launch_numbers
from tcemu.engine.backends.cuda import kernel_text as source
from tcemu.engine.backends.cuda.fragment_tables import TablePlan, plan_tables, tables_text
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch
from tcemu.engine.backends.product_requests import KernelRegisters, StoredOperand, WarpOperands, row_by_row
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.layouts.fragment_layouts import LANES

MOST_ELEMENTS = 8  # elements of D of a lane
MANY, MOST_EACH = 1 << 14, 8  # warps from which on each takes several instructions; most instructions of a warp


class RegisterKernel(NamedTuple):
    """The kernel of one instruction's arithmetic and fragments, a `BatchedCall`. Hashable: a compiled program belongs to each."""

    numbers: StepNumbers
    spec: ProductSpec  # a, b: as they are multiplied
    result: Format  # format of the steps' results
    warp: WarpOperands

    @property
    def axes(self) -> tuple[str, ...]:
        group = len(self.warp.d.fragment.lanes) - 1
        every = (2 + group, 2 + group, 2 + group, 1 + group, 1, 1, 1)
        ranks = [rank for rank, present in zip(every, self.present, strict=True) if present]
        return tuple(" ".join(f"o{i}a{axis}" for axis in range(rank)) for i, rank in enumerate((*ranks, 2 + group)))

    @property
    def sharing(self) -> tuple[str, ...]:
        """Each operand by itself may serve the whole batch."""
        return tuple(name for name, present in zip(KernelRegisters._fields, self.present, strict=True) if present)

    @property
    def present(self) -> tuple[bool, ...]:
        """The operands that the instruction has, in the order of `KernelRegisters`."""
        sparse, scaled = self.warp.metadata is not None, self.warp.scales is not None
        return True, True, True, sparse, scaled, scaled, sparse or scaled

    def __call__(self, *operands: Array) -> Array:
        """Computes on one device: uint32 [batch, lanes, words]. The kernel asks no operand for its dtype."""
        batch = max(len(v) for v in operands)
        result = jax.ShapeDtypeStruct((batch, *_result_shape(self)), jnp.uint32)
        return _launch(self, tuple(len(v) < batch for v in operands), result, operands)


def find_register_kernel(model: Model, spec: ProductSpec, warp: WarpOperands) -> RegisterKernel | None:
    """The kernel that takes a model; None where none does. spec: its a and b as they are multiplied."""
    n = step_numbers(model, spec)
    made = None if n is None else plan_tables(n, warp, (spec.a, spec.b))
    if n is None or made is None:
        return None
    return RegisterKernel(n, spec, model.result, warp)


def find_small_matrix_kernel(
    numbers: StepNumbers, spec: ProductSpec, result: Format, held: tuple[Format, Format], m: int, n: int
) -> RegisterKernel | None:
    """The kernel for batches of A [M, K], B [K, N] and C [M, N], as codes, of one instruction each; None where they do not fit a warp.

    held: the formats of A's and B's codes.
    """
    k, sizes = spec.k, {}
    for name, fmt, rows, columns in (("a", held[0], m, k), ("b", held[1], k, n), ("c", result, m, n), ("d", spec.d, m, n)):
        bits = fmt.dtype.itemsize * 8
        whole = rows * columns * bits % (LANES * 32) == 0
        if not whole or rows & (rows - 1) or columns & (columns - 1):
            return None
        sizes[name] = StoredOperand(row_by_row(rows, columns), fmt, bits)
    warp = WarpOperands(**sizes)
    made = plan_tables(numbers, warp, (spec.a, spec.b))
    if numbers.scaled or numbers.promoted or made is None or m * n > MOST_ELEMENTS * LANES:
        return None
    return RegisterKernel(numbers, spec, result, warp)


def share_products(left: RegisterKernel, right: RegisterKernel) -> bool:
    """Return whether steps of one kernel are made of whole steps of the other, on the same words of shared memory and without chains."""
    plans, forms = [], []
    for kernel in (left, right):
        plans.append((_plan(kernel), kernel.spec.a, kernel.spec.b, kernel.warp))
        forms.append(IntegerForm(kernel.numbers, kernel.spec.a, kernel.spec.b, kernel.result))
    shorter, longer = sorted(form.numbers.terms for form in forms)
    single = all(form.products_are_normal and form.numbers.chain == 0 and form.numbers.groups == 1 for form in forms)
    return plans[0] == plans[1] and plans[0][0].floats and single and left.numbers.of_group % longer == longer % shorter == 0


def warps_per_block(kernel: RegisterKernel) -> int:
    return _plan(kernel).warps


def _plan(kernel: RegisterKernel) -> TablePlan:
    made = plan_tables(kernel.numbers, kernel.warp, (kernel.spec.a, kernel.spec.b))
    assert made is not None
    return made


def register_kernel_text(kernel: RegisterKernel, entry: str = "warp") -> str:
    """Return the CUDA C++ of a register kernel, or of its steps alone.

    Args:
        kernel: The kernel.
        entry: "warp" or "steps".

    Returns:
        The text.
    """
    n, spec, warp, made = kernel.numbers, kernel.spec, kernel.warp, _plan(kernel)
    tables = f"constexpr bool C_SAME = {int(kernel.result == warp.c.format)};\n{tables_text(n, warp, made)}"
    return source.kernel_text(entry, n, spec, kernel.result, stored=source.Stored((warp.a.format, warp.b.format), tables, made.floats))


def multiply_by_register_kernel(kernel: RegisterKernel, operands: KernelRegisters) -> Array:
    """Returns D's registers, uint32 [..., lanes, words]. Batch axes broadcast, grow under `vmap`, and may be sharded by a mesh."""
    return call_batched(kernel, *(v for v in operands if v is not None))


def _result_shape(kernel: RegisterKernel) -> tuple[int, ...]:
    d = kernel.warp.d
    return *d.fragment.lanes, d.fragment.elements * d.container_bits // 32


def launch_on_matrices(kernel: RegisterKernel, a: Array, b: Array, c: Array) -> Array:
    """On one device: codes [batch, M, N]. a, b: one batch axis, of length 1 where one matrix serves all."""
    alone = tuple(len(v) < len(c) for v in (a, b, c))
    return _launch(kernel, alone, jax.ShapeDtypeStruct(c.shape, kernel.spec.d.dtype), (a, b, c))


def _launch(kernel: RegisterKernel, alone: tuple[bool, ...], d: jax.ShapeDtypeStruct, operands: tuple[Array, ...]) -> Array:
    warps, items = warps_per_block(kernel), d.shape[0] * kernel.warp.warps * kernel.warp.tiles
    each = instructions_per_warp(items)
    sizes = launch_numbers(*launch_sizes(kernel, d.shape[0], each, alone))
    return launch(KernelEntry("warp", register_kernel_text(kernel), LANES * warps), -(-items // (each * warps)), d, sizes, *operands)[0]


def instructions_per_warp(items: int) -> int:
    """Instructions of one warp, one after the other."""
    return min(MOST_EACH, max(1, items // MANY))


def launch_sizes(kernel: RegisterKernel, batch: int, each: int, alone: tuple[bool, ...]) -> list[int]:
    """`Sizes` of lanes.cu. each: instructions of one warp; alone: of the operands that there are."""
    given = iter(alone)
    return [batch, each, *(int(present and not next(given)) for present in kernel.present)]
