"""The CUDA kernel that draws cases, computes them by two models and compares them: the steps of both, and the drawing of each operand."""

from typing import NamedTuple

import jax
from jax import Array

from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.step.forms import step_numbers
from tcemu.engine.backends.batched_calls import launch_numbers
from tcemu.engine.backends.cuda.kernel_text import MACHINE_ENDS, prepend_machine
from tcemu.engine.backends.cuda.register_kernel import RegisterKernel, find_small_matrix_kernel, register_kernel_text, share_products
from tcemu.engine.backends.cuda.step_functions import constants_text
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch, route
from tcemu.engine.formats.number_formats import F32
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.uses.fuzz.case_generator import cuda_text, draw_cases, element_grids, element_text, float_inputs, pack_inputs
from tcemu.uses.fuzz.case_kinds import Kind
from tcemu.uses.fuzz.llvm.kernel_requests import CASES, OPERANDS, ComparisonLayout, DrawRequest

MOST_OUTPUTS = 128  # of a case: more do not fit the registers of a warp for both models
WARPS, BLOCKS = 4, 6  # warps of a block; blocks of a multiprocessor, at least, which bounds the registers of a thread


class CudaComparison(NamedTuple):
    """A kernel that draws cases and compares two models on them, as `llvm.kernel_calls.ComparisonCall` does."""

    layout: ComparisonLayout
    sides: tuple[RegisterKernel, RegisterKernel]

    def __call__(self, *keys: Array) -> Array:
        op, kinds = self.layout.request
        groups, cases = len(keys[0]) // CASES, draw_cases(op, (keys[0], keys[1]), kinds)
        inputs = [words for name in OPERANDS for words in pack_inputs(float_inputs(op, name, cases))]
        entry = KernelEntry("compare", comparison_text(self), 32 * WARPS)
        result = jax.ShapeDtypeStruct((groups, self.layout.words), "uint32")
        return launch(entry, -(-groups // WARPS), result, launch_numbers(groups), *inputs)[0]


def find_cuda_comparison(
    op: MatrixMultiply, kinds: tuple[Kind, ...], models: tuple[Model | None, Model | None], with_operands: bool
) -> CudaComparison | None:
    """Return the call of the kernel that compares two models, or None where there is none; arguments as of `find_comparison_call`."""
    given, sides = product_spec(op), []
    formats = given.a, given.b, given.c
    plain = not op.sparse and op.scaling is None and given.d == F32 and op.m * op.n <= MOST_OUTPUTS
    if route().missing or not plain or any(fmt.is_integer or fmt.words > 1 for fmt in formats):
        return None
    for model in models:
        if model is None or model.result != F32:
            return None
        own, spec = specialize(model, given, None)
        kernel = None if (n := step_numbers(own, spec)) is None else find_small_matrix_kernel(n, spec, F32, (given.a, given.b), op.m, op.n)
        if kernel is None:
            return None
        sides.append(kernel)
    left, right = sides
    return CudaComparison(ComparisonLayout(DrawRequest(op, kinds), with_operands), (left, right)) if share_products(left, right) else None


def comparison_text(call: CudaComparison) -> str:
    """Write the CUDA C++ of a comparison."""
    layout, sides = call.layout, call.sides
    grids = element_grids(layout.request.op)
    texts = [register_kernel_text(side, "steps").partition(MACHINE_ENDS)[2] for side in sides]
    spaces = dict(zip(("left", "right"), texts, strict=True))
    spaces |= {f"of_{name}": element_text(grids[name]) for name in OPERANDS}
    numbers = constants_text(cases=CASES, words=layout.words, with_operands=layout.with_operands, warps=WARPS, blocks=BLOCKS)
    return prepend_machine(*(f"namespace {name} {{\n{text}\n}}" for name, text in spaces.items()), numbers, cuda_text("compare"))
