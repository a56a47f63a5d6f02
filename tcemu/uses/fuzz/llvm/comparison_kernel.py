"""The comparison of two models of an instruction as LLVM IR: a task draws LANES cases, computes them by both models, and counts the outputs
that differ. Operands and results of a task stay in the caches of its core.
"""

from __future__ import annotations

from functools import lru_cache

from llvmlite import ir

from tcemu.engine.backends.llvm.blocks import LANES, code_type
from tcemu.engine.backends.llvm.small_kernel import SmallForm, SmallProducts
from tcemu.engine.backends.llvm.values import I8, I32, I64, POINTER, Builder
from tcemu.uses.fuzz.llvm.drawing_kernel import VECTOR, CaseDrawing, count_case_tasks, load_keys
from tcemu.uses.fuzz.llvm.kernel_requests import CASES, OPERANDS, WORD_BYTES, ComparisonLayout

LINE_BYTES = 64  # of a cache


@lru_cache(maxsize=256)
def comparison_text(name: str, layout: ComparisonLayout, forms: tuple[SmallForm, ...]) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. Operands: keys, uint32 [cases] each, a multiple of LANES. Result:
    uint32 [groups, words], as `ComparisonLayout` says.

    Args:
        name: Of the kernel.
        layout: Of the result.
        forms: Of the products of both models: of both together, or of the left and of the right one.
    """
    assert CASES == LANES
    module, request = ir.Module(name), layout.request
    count_case_tasks(module, name)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, POINTER]), f"{name}_task")
    b = Builder(function, forms[0].sides[0].arithmetic.wide_registers)
    task, buffers, _ = b.arguments
    low, high, out = (b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(3))
    drawing = CaseDrawing(b, request, OPERANDS)
    drawing.draw_cases(load_keys(b, [low, high], task * LANES, b.constant(I64, LANES)))
    line = ir.VectorType(I8, LINE_BYTES)
    memory = {operand: b.allocate(line, LANES * layout.bytes(operand) // LINE_BYTES) for operand in OPERANDS}
    with b.loop(b.constant(I64, LANES)) as lane:
        for operand in OPERANDS:
            code, size = code_type(request.format(operand)), request.size(operand)
            drawing.draw_elements(operand, lane, b.at(memory[operand], code, lane * size))
    numbers = [[b.constant(I64, case) for case in range(LANES)]] * len(OPERANDS)
    models = [SmallProducts(b, form) for form in forms]
    first, *others = models
    sharing = [other for other in others if first.shares_factors(other)]
    first.load(list(memory.values()), numbers, sharing)
    for model in models:
        if model is not first and model not in sharing:
            model.load(list(memory.values()), numbers)
        model.compute()
    sides = [side for model in models for side in model.sides]
    left, right = (side.accumulators for side in sides)
    own, counts = b.at(out, I32, task * layout.words), b.allocate(VECTOR)
    b.store(b.constant(VECTOR, 0), counts)
    with b.loop(b.constant(I64, request.size("d"))) as element:
        x, y = (b.load(VECTOR, b.at(results, VECTOR, element)) for results in (left, right))
        b.store(b.load(VECTOR, counts) - (x != y).cast("sext", I32), counts)
    b.store(b.load(VECTOR, counts), own)
    start = LANES
    for operand in layout.copied:
        words = layout.bytes(operand) // WORD_BYTES
        with b.loop(b.constant(I64, words)) as at:
            # the results of LANES cases stand side by side, the operands of a case one after the other
            source = b.at(left, VECTOR, at) if operand == "d" else b.at(memory[operand], I32, at)
            b.store(b.load(I32, source), b.at(own, I32, at + start))
        start += words
    b.finish()
    return str(module)
