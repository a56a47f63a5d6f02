"""The LLVM backend: for each form of a product the kernel that takes it, or the reason why none does."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.bounded_steps import step_form
from tcemu.arithmetic.fitting import specialize
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.order import Order
from tcemu.arithmetic.product_spec import ProductSpec, Scales, product_spec
from tcemu.arithmetic.small_products import are_small_products
from tcemu.backends.batched_calls import call_batched, require_known_sizes
from tcemu.backends.llvm import machine_code, xla_call
from tcemu.backends.llvm.small_programs import find_matrix_kernel, find_register_kernel
from tcemu.backends.llvm.xla_call import Kernel
from tcemu.backends.product_requests import MatrixProduct, Program, PromotedProduct, RegisterProduct
from tcemu.base.errors import Unsupported
from tcemu.formats.coding import recode

NOT_TAKEN = "it does not take this arithmetic"
TERMS = (4, 8, 16, 32, 64)  # products of a step that a kernel takes


class StepCall(NamedTuple):
    """A kernel of fused steps, a `BatchedCall`. Hashable: a compiled program belongs to each."""

    kernel: Kernel
    scaled: bool

    @property
    def axes(self) -> tuple[str, ...]:
        return "m k", "k n", "m n", *(("m s", "s n") if self.scaled else ()), "m n"

    @property
    def sharing(self) -> tuple[str, ...]:
        """A and its scales serve the whole batch together, B and its scales too."""
        return "a", "b", "", *(("a", "b") if self.scaled else ())

    def __call__(self, *operands: Array) -> Array:
        c = operands[2]
        return xla_call.call(self.kernel, jax.ShapeDtypeStruct(c.shape, c.dtype), *operands)[0]


def registers_program(product: RegisterProduct) -> Program:
    """The kernel that takes the registers of warps. Raises Unsupported."""
    op, model, forms, operands = product.op, product.model, product.forms, product.operands
    if reason := xla_call.missing():
        raise Unsupported(reason)
    require_known_sizes(*jax.tree.leaves(operands))
    if forms.warp is None or forms.registers is None or model.result.is_integer:
        raise Unsupported(NOT_TAKEN)
    if any(0 in v.shape for v in jax.tree.leaves(operands)):
        raise Unsupported("the batch is empty")
    given = product_spec(op)
    model, spec = specialize(model, given, given.k // given.scale_vec if given.scale_vec else None)
    call = find_register_kernel(model, given, spec, forms.warp(op, product.clamped_metadata, operands))
    if call is None:
        raise Unsupported("its kernel for registers does not take this instruction")
    pack = forms.registers
    return lambda operands: call_batched(call, *pack(op, operands)[:3])


def promoted_program(product: PromotedProduct) -> Program:
    """No kernel promotes sums. Raises Unsupported."""
    raise Unsupported("its kernels reduce one chunk at a time")


def matrices_program(product: MatrixProduct) -> Program:
    """The kernel that reduces K of matrices. Raises Unsupported."""
    if reason := xla_call.missing():
        raise Unsupported(reason)
    require_known_sizes(product.a, product.b, product.c, *(jnp.asarray(v) for v in product.scales or ()))
    if product.model.result.is_integer:
        raise Unsupported(NOT_TAKEN)
    model, spec = specialize(product.model, product.spec, product.scale_block)
    if are_small_products(model, spec, product.c.shape, product.a.shape[-1]):
        return _small_products_program(product, model, spec)
    block = product.scale_block or 0
    kernel = find_kernel(model, spec, block)
    if kernel is None:
        raise Unsupported(NOT_TAKEN)
    order, call = Order.from_model(model, spec.k), StepCall(kernel, block > 0)

    def program(a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
        a, b = recode(product.spec.a, spec.a, a), recode(product.spec.b, spec.b, b)
        a, b = _arrange(order, spec.k, a, -1), _arrange(order, spec.k, b, -2)
        return call_batched(call, a, b, recode(product.spec.c, model.result, c), *map(jnp.asarray, scales or ()))

    return program


def _small_products_program(product: MatrixProduct, model: Model, spec: ProductSpec) -> Program:
    """The kernel of small products, whose vectors lie along the batch. Raises Unsupported."""
    given, result = product.spec, model.result
    call = find_matrix_kernel(model, given, spec, *product.c.shape[-2:])
    if call is None:
        raise Unsupported("its kernel for batches of small products does not take this arithmetic")
    return lambda a, b, c, scales: recode(result, given.d, call_batched(call, a, b, recode(given.c, result, c)))


def find_kernel(model: Model, spec: ProductSpec, block: int, target: machine_code.Target | None = None) -> Kernel | None:
    """Returns the kernel for a model, or None where its steps are not those of `arithmetic.bounded_steps`.

    Args:
        model: The model, specialised to the instruction.
        spec: The formats and modes, A and B as they are multiplied.
        block: Products that share a block scale; 0 where there are no scales.
        target: The CPU; None: this machine's.
    """
    from tcemu.backends.llvm.step_kernel import KernelForm, kernel_text

    order = Order.from_model(model, spec.k) if isinstance(model.terms, int) and not model.result.is_integer else None
    if order is None or (terms := order.step_size(spec.k)) not in TERMS or spec.a.words > 1:
        return None
    form = step_form(model, spec, terms)
    if form is None or (block and (block % min(terms, 16) or order.groups > 1 or spec.k % terms)):
        return None
    wide = (target or machine_code.host_target()).vector_bits == 512
    return Kernel("steps", kernel_text("steps", KernelForm(form._replace(spec=_arithmetic(spec)), block, wide)), target)


def _arithmetic(spec: ProductSpec) -> ProductSpec:
    """The fields of a spec on which a kernel depends, so that equal kernels have equal texts."""
    return spec._replace(family="", scale_vec=0)


def _arrange(order: Order, k: int, codes: Array, axis: int) -> Array:
    """Brings K into the order of the steps. The last step of a group is filled with zeros, which take no part."""
    group, terms = k // order.groups, order.step_size(k)
    if order.groups == 1 and group % terms == 0:
        return codes
    at = codes.ndim + axis
    dealt: Any = jnp.moveaxis(order.deal(jnp.moveaxis(codes, at, 0), k), 0, at)
    parts = dealt.reshape(*dealt.shape[:at], -1, group, *dealt.shape[at + 1 :])
    parts = jnp.pad(parts, [(0, -group % terms if axis == at + 1 else 0) for axis in range(parts.ndim)])
    return parts.reshape(*dealt.shape[:at], -1, *dealt.shape[at + 1 :])
