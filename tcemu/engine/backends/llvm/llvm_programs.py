"""The LLVM backend: for each form of a product the kernel that takes it, or the reason why none does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec, Scales, product_spec
from tcemu.engine.arithmetic.small_products import are_small_products
from tcemu.engine.arithmetic.step.forms import bounded_form, grouped_form, step_numbers
from tcemu.engine.backends.batched_calls import call_batched, require_known_sizes
from tcemu.engine.backends.elementwise_request import ElementwiseRequest, MagnitudeRequest
from tcemu.engine.backends.llvm import machine_code, xla_call
from tcemu.engine.backends.llvm.small_programs import find_matrix_kernel, find_register_kernel
from tcemu.engine.backends.llvm.xla_call import Kernel
from tcemu.engine.backends.product_requests import MatrixProduct, Program, RegisterProduct
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import Format

if TYPE_CHECKING:
    from tcemu.engine.backends.llvm.bounded_lanes import KernelForm
    from tcemu.engine.backends.llvm.general_steps import GeneralForm
    from tcemu.engine.backends.llvm.grouped_kernel import GroupedKernelForm

NOT_TAKEN = "it does not take this arithmetic"
TERMS = (4, 8, 16, 32, 64)  # products of a step that a kernel takes


class StepCall(NamedTuple):
    """A kernel of fused steps, a `BatchedCall`. Hashable: a compiled program belongs to each."""

    kernel: Kernel
    scaled: bool
    d: Format
    by_columns: bool = False  # it takes B as [N, K]

    @property
    def axes(self) -> tuple[str, ...]:
        return "m k", "n k" if self.by_columns else "k n", "m n", *(("m s", "s n") if self.scaled else ()), "m n"

    @property
    def sharing(self) -> tuple[str, ...]:
        """A and its scales serve the whole batch together, B and its scales too."""
        return "a", "b", "", *(("a", "b") if self.scaled else ())

    def __call__(self, *operands: Array) -> Array:
        return xla_call.call(self.kernel, jax.ShapeDtypeStruct(operands[2].shape, self.d.dtype), *operands)[0]


def registers_program(product: RegisterProduct) -> Program:
    """The kernel that takes the registers of warps. Raises Unsupported."""
    op, model, forms, operands = product.op, product.model, product.forms, product.operands
    if reason := xla_call.missing():
        raise Unsupported(reason)
    require_known_sizes(*jax.tree.leaves(operands))
    if forms is None or model.result.is_integer:
        raise Unsupported(NOT_TAKEN)
    if any(0 in v.shape for v in jax.tree.leaves(operands)):
        raise Unsupported("the batch is empty")
    given = product_spec(op)
    model, spec = specialize(model, given, given.k // given.scale_vec if given.scale_vec else None)
    call = find_register_kernel(model, given, spec, forms.places(op, product.clamped_metadata, operands))
    if call is None:
        raise Unsupported("its kernel for registers does not take this instruction")
    words = forms.words  # the program keeps no operand alive
    return lambda operands: call_batched(call, *words(op, operands)[:3])


def matrices_program(product: MatrixProduct, target: machine_code.Target | None = None) -> Program:
    """The kernel that reduces K of matrices. target: the CPU; None: this machine's. Raises Unsupported."""
    if reason := xla_call.missing():
        raise Unsupported(reason)
    require_known_sizes(product.a, product.b, product.c)
    if product.model.result.is_integer:
        raise Unsupported(NOT_TAKEN)
    model, spec = specialize(product.model, product.spec, product.scale_block)
    if are_small_products(model, spec, product.c.shape, product.a.shape[-1]):
        return _small_products_program(product, model, spec, target)
    block, order = product.scale_block or 0, _order(model, spec)
    is_spread = order is not None and block > 0 and not order.is_arranged(spec.k)  # then there is a scale for each product
    kernel = find_kernel(model, spec, 1 if is_spread else block, target, product.by_columns)
    if kernel is None or order is None:
        raise Unsupported(NOT_TAKEN)
    call = StepCall(kernel, block > 0, spec.d, product.by_columns)

    def program(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        a, b = recode(product.spec.a, spec.a, a), recode(product.spec.b, spec.b, b)
        a, b = order.arrange(a, spec.k, -1), order.arrange(b, spec.k, -2)
        if product.by_columns:
            b = jnp.swapaxes(b, -1, -2)
        of_units = [jnp.asarray(codes) for codes in scales or ()]
        if is_spread:
            repeated = (jnp.repeat(codes, block, axis) for codes, axis in zip(of_units, (-1, -2), strict=True))
            of_units = [order.arrange(codes, spec.k, axis) for codes, axis in zip(repeated, (-1, -2), strict=True)]
        return call_batched(call, a, b, recode(product.spec.c, model.result, c), *of_units)

    return program


def _small_products_program(product: MatrixProduct, model: Model, spec: ProductSpec, target: machine_code.Target | None) -> Program:
    """The kernel of small products, whose vectors lie along the batch. Raises Unsupported."""
    given, result, (m, n) = product.spec, model.result, product.c.shape[-2:]
    call = find_matrix_kernel(model, given, spec, m, n, target)
    if call is None:
        raise Unsupported("its kernel for batches of small products does not take this arithmetic")
    return lambda a, b, c, scales: recode(result, given.d, call_batched(call, a, b, recode(given.c, result, c)))


def find_kernel(
    model: Model, spec: ProductSpec, block: int, target: machine_code.Target | None = None, by_columns: bool = False
) -> Kernel | None:
    """Returns the fastest kernel for a model, or None where its steps are not fused dot-adds whose numbers are known before tracing.

    Args:
        model: The model, specialised to the instruction.
        spec: The formats and modes, A and B as they are multiplied.
        block: Products that share a block scale; 0 where there are no scales.
        target: The CPU; None: this machine's.
        by_columns: The kernel takes B as [N, K].
    """
    from tcemu.engine.backends.llvm.blocks import block_text
    from tcemu.engine.backends.llvm.general_steps import GeneralKernel
    from tcemu.engine.backends.llvm.grouped_kernel import GroupedKernel
    from tcemu.engine.backends.llvm.step_kernel import StepKernel

    kernels: dict[str, Any] = {"steps": StepKernel, "groups": GroupedKernel, "general": GeneralKernel}
    form = kernel_form(model, spec, block, target or machine_code.host_target(), by_columns)
    return None if form is None else Kernel(form.name, block_text(kernels[form.name], form), target)


def kernel_form(
    model: Model, spec: ProductSpec, block: int, target: machine_code.Target, by_columns: bool = False
) -> KernelForm | GroupedKernelForm | GeneralForm | None:
    """Returns the parameters of the kernel that `find_kernel` returns."""
    from tcemu.engine.backends.llvm.blocks import LANES
    from tcemu.engine.backends.llvm.bounded_lanes import KernelForm
    from tcemu.engine.backends.llvm.general_steps import GeneralForm
    from tcemu.engine.backends.llvm.grouped_kernel import GroupedKernelForm, has_whole_groups

    order, wide = _order(model, spec), target.vector_bits == 512
    numbers = None if order is None or spec.a.words > 1 else step_numbers(model.replace(nan=None, dealing="pairs"), spec)
    if numbers is None:
        return None
    steps = bounded_form(model, spec, numbers.terms)
    if steps is not None and numbers.terms in TERMS and block % min(numbers.terms, LANES) == 0:
        return KernelForm(steps, numbers.floor, block, wide, by_columns)
    nan = model.result.nan if model.nan is None else model.nan
    form = GeneralForm(numbers, spec.a, spec.b, spec.scale, model.result, spec.d, block, nan, by_columns)
    groups = grouped_form(numbers, spec.a, spec.b, spec.scale, model.result, spec.d)
    if groups is None or not has_whole_groups(numbers, block):
        return form
    return GroupedKernelForm(groups, form, wide, wide and target.has("avx512vnni"))


def _order(model: Model, spec: ProductSpec) -> Order | None:
    """The order of the products, if it is known before tracing."""
    return Order.from_model(model, spec.k) if isinstance(model.terms, int) and not model.result.is_integer else None


# ---- elements scaled and rounded, and max magnitudes


def missing_elementwise(shape: tuple[int, ...]) -> str:
    """Returns the reason why the kernel cannot run here; "" if it can. Any shape will do."""
    return xla_call.missing()


def run_elementwise(request: ElementwiseRequest | MagnitudeRequest, result: jax.ShapeDtypeStruct, codes: Array, *scales: Array) -> Array:
    return xla_call.call(elementwise_kernel(request), result, codes, *scales)[0]


def elementwise_kernel(request: ElementwiseRequest | MagnitudeRequest, target: machine_code.Target | None = None) -> Kernel:
    """Returns the kernel of a request.

    Args:
        request: The request.
        target: The CPU; None: this machine's.
    """
    from tcemu.engine.backends.llvm.elementwise_kernel import elements_text, magnitudes_text  # they need llvmlite

    if isinstance(request, MagnitudeRequest):
        return Kernel("magnitudes", magnitudes_text("magnitudes", request), target)
    return Kernel("elements", elements_text("elements", request), target)
