"""Lane values as LLVM IR. Each operation is appended to the function that is being built.

A value is a vector or a scalar, of integers or of f32: see `arithmetic.step.values` for its operators. What the loops of a kernel need
besides, memory, shuffles, reductions and branches, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from tcemu.engine.arithmetic.step import values
from tcemu.engine.arithmetic.step.rounding import signed_truncated_float, truncated_float
from tcemu.engine.arithmetic.step.values import Lane

I1, I8, I16, I32, I64, F32 = ir.IntType(1), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
HALF, POINTER = ir.HalfType(), ir.PointerType()
TOWARD_ZERO = 11  # AVX-512's rounding operand: toward zero, without exceptions
WIDE_LANES = 16  # of AVX-512's vectors of 32 bits
# operations of LLVM IR by their names in `arithmetic.step.values`: of integers, of floats
INSTRUCTIONS = {
    "add": ("add", "fadd"), "sub": ("sub", "fsub"), "mul": ("mul", "fmul"), "div": ("", "fdiv"), "and": ("and_", ""), "or": ("or_", ""),
    "xor": ("xor", ""), "shl": ("shl", ""), "lshr": ("lshr", ""), "ashr": ("ashr", ""),
}  # fmt: skip
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<="}
CASTS = {"bits": "bitcast", "float": "bitcast"} | {name: name for name in ("sext", "zext", "trunc", "fptosi", "sitofp", "uitofp")}
INTEGRAL = {"RN": "rint", "RM": "floor", "RP": "ceil"}


class Value(values.Value):
    def __init__(self, ctx: Builder, raw: Any) -> None:
        self.ctx, self.raw = ctx, raw

    @property
    def type(self) -> Any:
        return self.raw.type

    @property
    def lanes(self) -> int | None:
        """Number of lanes; None for a scalar."""
        return self.type.count if isinstance(self.type, ir.VectorType) else None

    @property
    def element(self) -> Any:
        return self.type.element if isinstance(self.type, ir.VectorType) else self.type

    @property
    def lane(self) -> Lane:
        if isinstance(self.element, ir.IntType):
            return values.BOOL if self.element.width == 1 else Lane("int", self.element.width)
        return values.F32

    def constant(self, number: float, lane: Lane | None = None) -> Any:
        return self.ctx.constant(self.type if lane is None else self._shaped(element_type(lane)), number)

    def apply(self, name: str, lane: Lane, *others: Any, extra: str = "") -> Any:
        is_float, builder = isinstance(self.element, ir.FloatType), self.ctx.ir
        raws = [self.raw, *(v.raw for v in others)]
        if name in INSTRUCTIONS:
            return Value(self.ctx, getattr(builder, INSTRUCTIONS[name][is_float])(*raws))
        if name in COMPARISONS:
            return Value(self.ctx, (builder.fcmp_ordered if is_float else builder.icmp_signed)(COMPARISONS[name], *raws))
        if name in CASTS:
            return self.cast(CASTS[name], element_type(lane))
        if name == "select":
            return Value(self.ctx, builder.select(*raws))
        if name in ("max", "min"):
            return self.ctx.call(f"llvm.s{name}.{self.ctx.suffix(self.type)}", self.type, self, *others)
        if name in ("sitofp_rz", "uitofp_rz"):
            return self._to_float_toward_zero(name)
        if name == "clz":
            return self.ctx.call(f"llvm.ctlz.{self.ctx.suffix(self.type)}", self.type, self, self.ctx.constant(I1, 0))
        if name == "integral":
            return self.ctx.call(f"llvm.{INTEGRAL[extra]}.{self.ctx.suffix(self.type)}", self.type, self)
        if name == "muladd":
            return self.ctx.call(f"llvm.fmuladd.{self.ctx.suffix(self.type)}", self.type, self, *others)
        assert name == "fma" and extra == "RZ" and self.ctx.wide_registers and self.lanes == WIDE_LANES
        return self.ctx.call("llvm.x86.avx512.vfmadd.ps.512", self.type, self, *others, self.ctx.constant(I32, TOWARD_ZERO))

    def _to_float_toward_zero(self, name: str) -> Value:
        if not (self.ctx.wide_registers and self.lanes == WIDE_LANES):
            return signed_truncated_float(self) if name == "sitofp_rz" else truncated_float(self)
        intrinsic = f"llvm.x86.avx512.{name.removesuffix('_rz')}.round.v16f32.v16i32"
        return self.ctx.call(intrinsic, self._shaped(F32), self, self.ctx.constant(I32, TOWARD_ZERO))

    # indices of loops
    def __floordiv__(self, other: Value | int) -> Value:
        return Value(self.ctx, self.ctx.ir.sdiv(self.raw, self._match(other).raw))

    def __mod__(self, other: Value | int) -> Value:
        return Value(self.ctx, self.ctx.ir.srem(self.raw, self._match(other).raw))

    def _shaped(self, element: ir.Type) -> ir.Type:
        return element if self.lanes is None else ir.VectorType(element, self.lanes)

    def cast(self, how: str, element: ir.Type) -> Value:
        """Converts each lane by an instruction of LLVM: "zext", "sext", "trunc", "fptosi", "sitofp", "uitofp", "bitcast"."""
        return Value(self.ctx, getattr(self.ctx.ir, how)(self.raw, self._shaped(element)))

    def reduce(self, how: str) -> Value:
        """Combines all lanes: "smin", "smax", "or" or "and"."""
        assert self.lanes is not None
        return self.ctx.call(f"llvm.vector.reduce.{how}.{self.ctx.suffix(self.type)}", self.element, self)


def element_type(lane: Lane) -> ir.Type:
    return F32 if lane == values.F32 else ir.IntType(lane.bits)


class Builder:
    def __init__(self, function: ir.Function, wide_registers: bool = False) -> None:
        """wide_registers: AVX-512 is there."""
        self.function, self.module, self.wide_registers = function, function.module, wide_registers
        entry = function.append_basic_block("entry")
        self._allocations = ir.IRBuilder(entry)
        body = function.append_basic_block("body")
        self._allocations.branch(body)
        self._allocations.position_at_start(entry)
        self.ir = ir.IRBuilder(body)
        self.arguments = [Value(self, argument) for argument in function.args]

    # ---- constants and vectors

    def constant(self, of: Any, number: float) -> Value:
        if isinstance(of, ir.VectorType):
            return Value(self, ir.Constant(of, [self.constant(of.element, number).raw] * of.count))
        return Value(self, ir.Constant(of, float(number) if isinstance(of, ir.FloatType) else _wrap(int(number), of.width)))

    def splat(self, value: Value, lanes: int) -> Value:
        of = ir.VectorType(value.type, lanes)
        single = self.ir.insert_element(ir.Constant(of, ir.Undefined), value.raw, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        return Value(self, self.ir.shuffle_vector(single, ir.Constant(of, ir.Undefined), zeros))

    def shuffle(self, x: Value, y: Value, lanes: list[int]) -> Value:
        """Chooses lanes of two vectors, those of y counted on from those of x."""
        return Value(self, self.ir.shuffle_vector(x.raw, y.raw, ir.Constant(ir.VectorType(I32, len(lanes)), lanes)))

    def repeat(self, vector: Value, times: int) -> Value:
        assert vector.lanes is not None
        return self.shuffle(vector, vector, [*range(vector.lanes)] * times)

    def transpose(self, vectors: list[Value]) -> list[Value]:
        """The vectors that hold lane 0 of all of these, lane 1, and so on. The number of vectors is a power of two."""
        count, lanes = len(vectors), vectors[0].lanes
        assert lanes is not None
        while len(vectors) > 1:  # each with the one that is half of them further on, lane by lane
            half = len(vectors) // 2
            size = count * lanes // len(vectors)
            order = [lane + size * second for lane in range(size) for second in (0, 1)]
            vectors = [self.shuffle(x, y, order) for x, y in zip(vectors[:half], vectors[half:], strict=True)]
        (whole,) = vectors
        return [self.shuffle(whole, whole, list(range(lane * count, (lane + 1) * count))) for lane in range(lanes)]

    def iota(self, element: ir.IntType, lanes: int) -> Value:
        return Value(self, ir.Constant(ir.VectorType(element, lanes), list(range(lanes))))

    def vector(self, numbers: list[int]) -> Value:
        return Value(self, ir.Constant(ir.VectorType(I32, len(numbers)), [_wrap(number, I32.width) for number in numbers]))

    @staticmethod
    def suffix(of: ir.Type) -> str:
        """The type as the names of overloaded intrinsics end."""
        if isinstance(of, ir.VectorType):
            return f"v{of.count}{Builder.suffix(of.element)}"
        return "p0" if isinstance(of, ir.PointerType) else f"i{of.width}" if isinstance(of, ir.IntType) else "f32"

    def call(self, name: str, returned: ir.Type, *arguments: Value | ir.Constant) -> Value:
        raw: list[Any] = [v.raw if isinstance(v, Value) else v for v in arguments]
        known = self.module.globals.get(name)
        declared = known or ir.Function(self.module, ir.FunctionType(returned, [v.type for v in raw]), name)
        return Value(self, self.ir.call(declared, raw))

    def maximum(self, x: Value, y: Value, signed: bool = True) -> Value:
        return self.call(f"llvm.{'s' if signed else 'u'}max.{self.suffix(x.type)}", x.type, x, y)

    def minimum(self, x: Value, y: Value) -> Value:
        return self.call(f"llvm.smin.{self.suffix(x.type)}", x.type, x, y)

    def subtract_saturated(self, x: Value, y: Value) -> Value:
        """max(x - y, 0) of unsigned integers."""
        return self.call(f"llvm.usub.sat.{self.suffix(x.type)}", x.type, x, y)

    def reinterpret(self, x: Value, of: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self, self.ir.bitcast(x.raw, of))

    # ---- memory

    def allocate(self, of: ir.Type, count: int = 1) -> Value:
        """Memory of the function's own, aligned to 64 bytes."""
        raw: Any = self._allocations.alloca(of, count)
        raw.align = 64
        raw.type = POINTER
        return Value(self, raw)

    def table(self, of: ir.IntType, numbers: list[int]) -> Value:
        array = ir.ArrayType(of, len(numbers))
        raw: Any = ir.GlobalVariable(self.module, array, self.module.get_unique_name(f"{self.function.name}_table"))
        raw.linkage, raw.global_constant, raw.initializer = "internal", True, ir.Constant(array, numbers)
        raw.type = POINTER
        return Value(self, raw)

    def at(self, pointer: Value, element: ir.Type, index: Value | int) -> Value:
        place = index if isinstance(index, Value) else self.constant(I64, index)
        return Value(self, self.ir.gep(pointer.raw, [place.raw], source_etype=element))

    def load(self, of: ir.Type, pointer: Value, align: int | None = None) -> Value:
        element = of.element if isinstance(of, ir.VectorType) else of
        return Value(self, self.ir.load(pointer.raw, align=align or _bytes(element), typ=of))

    def store(self, value: Value, pointer: Value) -> None:
        self.ir.store(value.raw, pointer.raw, align=_bytes(value.element))

    def masked_load(self, of: ir.VectorType, pointer: Value, mask: Value) -> Value:
        """Loads the lanes of a mask; the others are 0."""
        align, zeros = self.constant(I32, _bytes(of.element)), self.constant(of, 0)
        return self.call(f"llvm.masked.load.{self.suffix(of)}.p0", of, pointer, align, mask, zeros)

    def masked_store(self, value: Value, pointer: Value, mask: Value) -> None:
        align = self.constant(I32, _bytes(value.element))
        self.call(f"llvm.masked.store.{self.suffix(value.type)}.p0", ir.VoidType(), value, pointer, align, mask)

    # ---- control

    @contextmanager
    def loop(self, stop: Value, step: int = 1) -> Iterator[Value]:
        """A loop over 0, step, ... below `stop`, an i64."""
        before = self.ir.block
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "loop", "after"))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        index = self.ir.phi(I64)
        index.add_incoming(ir.Constant(I64, 0), before)
        self.ir.cbranch(self.ir.icmp_signed("<", index, stop.raw), body, after)
        self.ir.position_at_end(body)
        yield Value(self, index)
        following = self.ir.add(index, ir.Constant(I64, step))
        index.add_incoming(following, self.ir.block)
        self.ir.branch(head)
        self.ir.position_at_end(after)

    @contextmanager
    def loop_while(self, condition: Callable[[], Value]) -> Iterator[None]:
        head, body, after = (self.function.append_basic_block(name) for name in ("head", "loop", "after"))
        self.ir.branch(head)
        self.ir.position_at_end(head)
        self.ir.cbranch(condition().raw, body, after)
        self.ir.position_at_end(body)
        yield
        self.ir.branch(head)
        self.ir.position_at_end(after)

    def branch(self, condition: Value, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Executes one of two parts."""
        with self.ir.if_else(condition.raw) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    def switch(self, value: Value, parts: dict[int, Callable[[], None]]) -> None:
        """Executes the part of an integer, which is one of the keys."""
        blocks = {key: self.function.append_basic_block(f"part{key}") for key in parts}
        after = self.function.append_basic_block("after")
        *others, last = blocks
        switch = self.ir.switch(value.raw, blocks[last])
        for key in others:
            switch.add_case(ir.Constant(value.type, key), blocks[key])
        for key, execute in parts.items():
            self.ir.position_at_end(blocks[key])
            execute()
            self.ir.branch(after)
        self.ir.position_at_end(after)

    def finish(self, result: Value | None = None) -> None:
        if result is None:
            self.ir.ret_void()
        else:
            self.ir.ret(result.raw)


def build_count(module: ir.Module, name: str) -> tuple[Builder, Value]:
    """Begins the function NAME_tasks, and returns its argument: see `ffi_handler`."""
    b = Builder(ir.Function(module, ir.FunctionType(I64, [POINTER]), f"{name}_tasks"))
    return b, b.arguments[0]


def build_task(module: ir.Module, name: str, wide_registers: bool = False) -> Builder:
    """Begins the function NAME_task: see `ffi_handler`."""
    return Builder(ir.Function(module, ir.FunctionType(ir.VoidType(), [I64, POINTER, POINTER]), f"{name}_task"), wide_registers)


def _wrap(number: int, width: int) -> int:
    """The number as two's complement of this width."""
    number &= (1 << width) - 1
    return number - (1 << width) if width > 1 and number >> (width - 1) else number


def _bytes(of: Any) -> int:
    return 8 if isinstance(of, ir.PointerType) else 4 if isinstance(of, ir.FloatType) else -(-of.width // 8)
