"""Elements divided by scales or multiplied by them, and rounded, as a CPU kernel in LLVM IR; and the max magnitudes of groups.

A task computes a run of elements in row-major order, in vectors within a row and within a group of elements that share a scale. Its f32
arithmetic is that of IEEE 754, which the handler of the call ensures (`ffi_handler`). LLVM contracts nothing without flags that allow it.
"""

from functools import lru_cache

from llvmlite import ir

from tcemu.engine.arithmetic.step.quantizing import decode_number, decode_scale, round_scale, round_value
from tcemu.engine.backends.elementwise_request import EVERY, ElementwiseRequest, MagnitudeRequest
from tcemu.engine.backends.llvm.blocks import LANES, extend
from tcemu.engine.backends.llvm.values import I32, I64, POINTER, Builder, Value, build_count, build_task
from tcemu.engine.formats.number_formats import F32 as BINARY32

TASK_ELEMENTS = 1 << 15


class ElementwiseKernel:
    def __init__(self, module: ir.Module, name: str, request: ElementwiseRequest) -> None:
        self.request, self.b = request, build_task(module, name)
        b = self.b
        task, buffers, dims = b.arguments
        self.source, self.target, self.scale = (
            ir.IntType(8 * fmt.dtype.itemsize) for fmt in (request.source, request.target, request.scale)
        )
        self.x, *scales, self.out = (b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(3 if request.depth else 2))
        sizes = b.load(POINTER, dims)
        batch, rows, k = (b.load(I64, b.at(sizes, I64, axis)) for axis in range(3))
        first = task * TASK_ELEMENTS
        stop = b.minimum(batch * rows * k, first + TASK_ELEMENTS)
        if not scales:
            self._run(first, stop - first, None)
            b.finish()
            return
        self.scales = scales[0]
        shape = b.load(POINTER, b.at(dims, POINTER, 1))
        batch_step, row_step, groups = (b.load(I64, b.at(shape, I64, axis)) for axis in range(3))
        zero = b.constant(I64, 0)
        row_step, batch_step = (row_step > 1).select(groups, zero), (batch_step > 1).select(row_step * groups, zero)
        # one scale for all, or one an element: the operand is one row
        whole = (batch_step == 0) & (row_step == 0) & (groups == 1)
        if request.depth == 1:
            whole = (batch_step != 0) | (batch == 1)
            whole = whole & ((row_step != 0) | (rows == 1)) & (groups == k)
        rows, k = whole.select(1, rows), whole.select(batch * rows * k, k)
        self._segments(first, stop, rows, k, batch_step, row_step)
        b.finish()

    def _segments(self, first: Value, stop: Value, rows: Value, k: Value, batch_step: Value, row_step: Value) -> None:
        """Runs of elements within a row and a group."""
        b, depth = self.b, self.request.depth
        assert depth is not None
        line, column = first // k, first % k
        in_groups = depth not in (1, EVERY)
        at = {"element": first, "column": column, "batch": line // rows, "row": line % rows}
        memory = {name: b.allocate(I64) for name in at}
        for name, value in at.items():
            b.store(value, memory[name])
        with b.loop_while(lambda: b.load(I64, memory["element"]) < stop):
            at = {name: b.load(I64, place) for name, place in memory.items()}
            own = at["batch"] * batch_step + at["row"] * row_step
            end = k
            if in_groups:
                group = at["column"] // depth
                own, end = own + group, b.minimum(k, (group + 1) * depth)
            elif depth == 1:
                own = own + at["column"]
            count = b.minimum(stop - at["element"], end - at["column"])
            self._run(at["element"], count, own)
            column = at["column"] + count
            after_row = column == k
            row = at["row"] + after_row.cast("zext", I64)
            after_batch = row == rows
            b.store(at["element"] + count, memory["element"])
            b.store(after_row.select(0, column), memory["column"])
            b.store(after_batch.select(0, row), memory["row"])
            b.store(at["batch"] + after_batch.cast("zext", I64), memory["batch"])

    def _run(self, first: Value, count: Value, scale: Value | None) -> None:
        """Elements side by side. scale: index of the scale of all, or of the first one where each has its own."""
        b, each = self.b, self.request.depth == 1
        x, out = b.at(self.x, self.source, first), b.at(self.out, self.target, first)
        codes, own = ir.VectorType(self.source, LANES), ir.VectorType(self.scale, LANES)
        shared = None
        if scale is not None and not each:
            shared = b.splat(decode_scale(self.request.scale, extend(b.load(self.scale, b.at(self.scales, self.scale, scale)))), LANES)
        whole = count & -LANES
        with b.loop(whole, LANES) as i:
            given = shared
            if each and scale is not None:
                given = decode_scale(self.request.scale, extend(b.load(own, b.at(self.scales, self.scale, scale + i))))
            self._store(self._compute(b.load(codes, b.at(x, self.source, i)), given), b.at(out, self.target, i), None)

        def rest() -> None:
            mask = b.splat((count - whole).cast("trunc", I32), LANES) > b.iota(I32, LANES)
            given = shared
            if each and scale is not None:
                loaded = b.masked_load(own, b.at(self.scales, self.scale, scale + whole), mask)
                given = decode_scale(self.request.scale, extend(loaded))
            made = self._compute(b.masked_load(codes, b.at(x, self.source, whole), mask), given)
            self._store(made, b.at(out, self.target, whole), mask)

        b.branch(whole < count, rest, lambda: None)

    def _store(self, made: Value, place: Value, mask: Value | None) -> None:
        made = made if self.target == I32 else made.cast("trunc", self.target)
        if mask is None:
            self.b.store(made, place)
        else:
            self.b.masked_store(made, place, mask)

    def _compute(self, codes: Value, scales: Value | None) -> Value:
        request, value = self.request, decode_number(self.request.source, extend(codes))
        if scales is not None:
            value = value * scales if request.multiplied else value / scales
        return round_value(request.target, request.saturate, value)


@lru_cache(maxsize=256)
def elements_text(name: str, request: ElementwiseRequest) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. Operands and result are those of an `ElementwiseRequest`."""
    module = ir.Module(name)
    counting, dims = build_count(module, name)
    sizes = counting.load(POINTER, dims)
    batch, rows, k = (counting.load(I64, counting.at(sizes, I64, axis)) for axis in range(3))
    counting.finish((batch * rows * k + (TASK_ELEMENTS - 1)) // TASK_ELEMENTS)
    ElementwiseKernel(module, name, request)
    return str(module)


@lru_cache(maxsize=64)
def magnitudes_text(name: str, request: MagnitudeRequest) -> str:
    """LLVM IR of the functions NAME_tasks and NAME_task: see `xla_call`. The operand and the result are those of the request.

    A task computes some neighbouring groups, in row-major order.
    """
    module = ir.Module(name)
    counting, dims = build_count(module, name)
    groups, per_task, *_ = _groups(counting, dims, request.depth)
    counting.finish((groups + per_task - 1) // per_task)

    b = build_task(module, name)
    task, buffers, dims = b.arguments
    groups, per_task, depth, k, per_row = _groups(b, dims, request.depth)
    x, out = (b.load(POINTER, b.at(buffers, POINTER, at)) for at in range(2))
    source = ir.IntType(8 * request.source.dtype.itemsize)
    codes, magnitude = ir.VectorType(source, LANES), (1 << (request.source.bits - 1)) - 1
    accumulator = b.allocate(codes)
    first = task * per_task
    with b.loop(b.minimum(groups - first, per_task)) as i:
        group = first + i
        column = group % per_row * depth
        start = b.at(x, source, group // per_row * k + column)
        count = b.minimum(k - column, depth)
        whole = count & -LANES
        b.store(b.constant(codes, 0), accumulator)
        with b.loop(whole, LANES) as j:
            found = b.load(codes, b.at(start, source, j)) & magnitude
            b.store(b.maximum(b.load(codes, accumulator), found), accumulator)  # without sign, so that any comparison will do

        def rest(start: Value = start, whole: Value = whole, count: Value = count) -> None:
            mask = b.splat((count - whole).cast("trunc", I32), LANES) > b.iota(I32, LANES)
            found = b.masked_load(codes, b.at(start, source, whole), mask) & magnitude
            b.store(b.maximum(b.load(codes, accumulator), found), accumulator)

        b.branch(whole < count, rest, lambda: None)
        largest = b.load(codes, accumulator).reduce("smax")
        word = decode_number(request.source, extend(largest)).bits()
        if request.source.bias != BINARY32.bias:
            word = (word > BINARY32.infinity).select(BINARY32.nan, word)
        if (scale := request.scale) is not None:
            word = round_scale(word, scale.largest, scale.least, scale.power_of_two)
        b.store(word, b.at(out, I32, group))
    b.finish()
    return str(module)


def _groups(b: Builder, dims: Value, depth: int) -> tuple[Value, Value, Value, Value, Value]:
    """The number of groups, those of a task, their elements, the elements of a row and its groups."""
    sizes = b.load(POINTER, dims)
    batch, rows, k = (b.load(I64, b.at(sizes, I64, axis)) for axis in range(3))
    size = b.minimum(k, b.constant(I64, depth))
    per_row = (k + size - 1) // size
    return batch * rows * per_row, b.maximum(b.constant(I64, 1), b.constant(I64, TASK_ELEMENTS) // size), size, k, per_row
