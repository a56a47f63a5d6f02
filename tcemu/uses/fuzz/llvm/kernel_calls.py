"""The calls of the CPU kernels that draw cases and compare models on them, or the reason why there is none.

llvmlite is optional, so the modules that write kernels are imported where a kernel is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
from jax import Array

from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends.llvm import xla_call
from tcemu.engine.backends.llvm.small_programs import find_matrix_form
from tcemu.engine.backends.llvm.xla_call import Kernel
from tcemu.engine.formats.number_formats import F32
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.uses.fuzz.case_kinds import Kind
from tcemu.uses.fuzz.llvm.kernel_requests import CASES, OPERANDS, ComparisonLayout, DrawRequest

if TYPE_CHECKING:
    from tcemu.engine.backends.llvm.small_kernel import SmallForm


class DrawCall(NamedTuple):
    """A kernel that draws an operand, a `BatchedCall` of keys, uint32 [cases] each. Its result is codes [cases, rows, columns]."""

    request: DrawRequest
    operand: str
    axes: tuple[str, ...] = ("", "", "i j")
    sharing: tuple[str, ...] = ("", "")

    def __call__(self, *keys: Array) -> Array:
        from tcemu.uses.fuzz.llvm.drawing_kernel import drawing_text

        kernel = Kernel("draw", drawing_text("draw", self.request, self.operand))
        shape = len(keys[0]), *self.request.shape(self.operand)
        return xla_call.call(kernel, jax.ShapeDtypeStruct(shape, self.request.format(self.operand).dtype), *keys)[0]


def find_draw_call(op: MatrixMultiply, kinds: tuple[Kind, ...], operand: str) -> DrawCall | None:
    """Returns the call of the kernel that draws an operand, or None where there is none."""
    request = DrawRequest(op, kinds)
    return None if request.missing_reason(operand) or xla_call.missing() else DrawCall(request, operand)


class ComparisonCall(NamedTuple):
    """A kernel that draws cases and compares two models on them.

    It takes keys, uint32 [cases] each, a multiple of CASES, and returns uint32 [cases / CASES, words], as `layout` says.
    """

    layout: ComparisonLayout
    forms: tuple[SmallForm, ...]  # of the products of both models: of both together, or of the left and of the right one

    def __call__(self, *keys: Array) -> Array:
        from tcemu.uses.fuzz.llvm.comparison_kernel import comparison_text

        kernel = Kernel("compare", comparison_text("compare", *self))
        return xla_call.call(kernel, jax.ShapeDtypeStruct((len(keys[0]) // CASES, self.layout.words), "uint32"), *keys)[0]


def find_comparison_call(
    op: MatrixMultiply, kinds: tuple[Kind, ...], models: tuple[Model | None, Model | None], with_operands: bool
) -> ComparisonCall | None:
    """Returns the call of the kernel that compares two models, or None where there is none.

    Args:
        op: The instruction.
        kinds: Kinds of the cases.
        models: The left and the right model. None: an implementation that no model describes.
        with_operands: See `ComparisonLayout`.
    """
    request, given = DrawRequest(op, kinds), product_spec(op)
    if op.sparse or op.scaling is not None or (given.c, given.d) != (F32, F32) or xla_call.missing():
        return None
    if any(request.missing_reason(operand) for operand in OPERANDS):
        return None
    forms = []
    for model in models:
        if model is None or model.result != F32:
            return None
        own, spec = specialize(model, given, None)
        form = find_matrix_form(own, given, spec, op.m, op.n)
        if form is None:
            return None
        forms.append(form)
    left, right = forms
    merged = left.merge(right)
    return ComparisonCall(ComparisonLayout(request, with_operands), (left, right) if merged is None else (merged,))
