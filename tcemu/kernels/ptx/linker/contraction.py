"""Products and sums that ptxas fuses into one multiply-add, as it does unless `--fmad=false` is given.

PTX lets the assembler fuse where neither statement names a rounding. Which pairs ptxas fuses was read from the machine code that ptxas 12.8
and 13.0 make for sm_80 and sm_90 (`nvdisasm -c`):

- A product without rounding and saturation, and the last product within `div.full` and `div.approx`, is fused if each of its readers is a
  sum or a difference without rounding, of the same type and `.ftz`, in the same basic block; then it is fused into all of them. Copies and
  negations in between do not matter, a guard of the sum does not either, and neither do later values of the factors.
- A product by a constant, that is by a number of the text or by a parameter of the kernel, copied or negated, is fused into sums in other
  blocks too, but not into one after a loop in which the product stands, since ptxas unrolls such loops.
- Where both operands of a sum are such products, the left one is fused.

Two things are not followed: a register that is written more than once, whose values ptxas tells apart, and a loop that ptxas does not
unroll, such as one without a count, behind which it fuses.

Of two kernels with `div.full` before a sum, 172 and 150 words differed from an H100's without this pass. With it 172 and 150 words change;
the kernels were not run on the GPU again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

from tcemu.kernels.ptx.linker.control_flow import branch_targets
from tcemu.kernels.ptx.text.module import Address, Float, Function, Integer, Module, Operand, Register, Statement, nested_operands

TYPES = ("f32", "f64", "f16", "f16x2", "bf16", "bf16x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")
BRANCHES = ("bra", "brx", "call", "ret", "exit", "trap")
REGISTERS = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}  # types of registers, where an instruction's is none
SIGN = {32: 1 << 31, 64: 1 << 63}
LARGE, NORMAL = Float(0x7E800000, 32), Float(0x00800000, 32)  # 2^126, and the smallest normal number
QUARTER, UP_24 = Float(0x3E800000, 32), Float(0x4B800000, 32)


class _Use(NamedTuple):
    """A sum that reads a product."""

    statement: int  # its number
    operand: int  # 1 or 2
    negated: bool  # a negation lies between


@dataclass
class _Product:
    """A product that may be fused, and its readers."""

    index: int
    kind: str
    flush: bool
    uses: list[_Use]
    copies: bool  # whether its factors may have other values where it is read


def fuse_products(module: Module) -> Module:
    """Return the module with fused multiply-adds in place of the sums into which ptxas fuses products."""
    functions = {name: _fuse_in_function(function) for name, function in module.functions.items()}
    return replace(module, functions=functions)


def _fuse_in_function(function: Function) -> Function:
    products = _find_products(function) if function.defined else {}
    fused = _chosen_uses(function, products)
    if not fused:
        return function
    rewriter = _Rewriter(function)
    chosen = {product.index: product for product, _ in fused.values()}
    statements: list[Statement] = []
    starts = []  # of each old statement among the new ones
    for index, statement in enumerate(function.statements):
        starts.append(len(statements))
        if index in chosen and statement.name == "div":
            statements += rewriter.split_division(index)
        elif index in chosen and chosen[index].copies:
            statements += rewriter.copy_factors(index, chosen[index].kind)
        statements += rewriter.fused_sum(statement, *fused[index]) if index in fused else [statement]
    starts.append(len(statements))
    labels = {name: starts[index] for name, index in function.labels.items()}
    return replace(function, statements=tuple(statements), labels=labels, registers=function.registers | rewriter.registers)


# ---- which products are fused


def _qualified(statement: Statement, names: tuple[str, ...]) -> tuple[str, bool] | None:
    """Return the type of an unrounded statement of floats with one of these names, and its `.ftz`; None for others."""
    *modes, kind = statement.qualifiers or ("",)
    if statement.name not in names or kind not in TYPES or set(modes) & set(ROUNDINGS):
        return None
    return kind, "ftz" in modes


def _is_product(statement: Statement) -> bool:
    if statement.name not in ("mul", "div") or statement.guard is not None or "sat" in statement.qualifiers:
        return False
    if not isinstance(statement.operands[0], Register):
        return False
    if statement.name == "div":
        return statement.qualifiers[-1] == "f32" and statement.qualifiers[0] in ("full", "approx")
    return _qualified(statement, ("mul",)) is not None


def _find_products(function: Function) -> dict[str, _Product]:
    """Return the products all of whose readers are sums into which they are fused, by the register of the product."""
    blocks, block, targets, loops = [], 0, set(function.labels.values()), _loops(function)
    for index, statement in enumerate(function.statements):
        block += index in targets
        blocks.append(block)
        block += statement.name in BRANCHES
    readers: dict[str, list[int]] = defaultdict(list)  # statements in which a register occurs in any way
    for index, statement in enumerate(function.statements):
        for name in {operand.name for operand in nested_operands(statement.operands) if isinstance(operand, Register)}:
            readers[name].append(index)
        if statement.guard is not None:
            readers[statement.guard.register].append(index)
    found, constants = {}, _constants(function)
    for index, statement in enumerate(function.statements):
        if not _is_product(statement):
            continue
        register = statement.operands[0]
        assert isinstance(register, Register)
        uses = _sums(function, readers, index, register.name, False)
        if not uses:
            continue
        stays = all(blocks[use.statement] == blocks[index] for use in uses)
        leaves = any(first <= index <= last < use.statement for first, last in loops for use in uses)
        is_scaled = any(not isinstance(each, Register) or each.name in constants for each in statement.operands[1:])
        if stays or (statement.name == "mul" and is_scaled and not leaves):
            kind = statement.qualifiers[-1]
            flush = "ftz" in statement.qualifiers
            if all(_qualified(function.statements[use.statement], ("add", "sub")) == (kind, flush) for use in uses):
                last = max(use.statement for use in uses)
                found[register.name] = _Product(index, kind, flush, uses, _operands_change(function, index, last, loops))
    return found


def _constants(function: Function) -> set[str]:
    """Return the registers that one statement alone writes: a number of the text, a parameter of the kernel, or a copy of these."""
    written = Counter(
        operand.name for each in function.statements for operand in nested_operands(each.operands[:1]) if isinstance(operand, Register)
    )
    found: set[str] = set()
    for statement in function.statements:
        target, *sources = statement.operands or (None,)
        if not isinstance(target, Register) or written[target.name] > 1 or statement.guard is not None or len(sources) != 1:
            continue
        is_number = isinstance(sources[0], Float | Integer) or (isinstance(sources[0], Register) and sources[0].name in found)
        if (statement.name in ("mov", "neg") and is_number) or (function.entry and statement.opcode.startswith("ld.param.")):
            found.add(target.name)
    return found


def _loops(function: Function) -> list[tuple[int, int]]:
    """Return first and last statement of each loop: of the text that a branch back repeats."""
    branches = [(index, each) for index, each in enumerate(function.statements) if each.name in ("bra", "brx")]
    targets = [(index, function.labels[label]) for index, each in branches for label in branch_targets(each, function)]
    return [(target, index) for index, target in targets if target <= index]


def _sums(function: Function, readers: dict[str, list[int]], made: int, name: str, negated: bool) -> list[_Use] | None:
    """Return the sums that read a register, through copies and negations; None if something else reads or writes it."""
    uses: list[_Use] = []
    for index in readers[name]:
        statement = function.statements[index]
        if index == made:
            if sum(isinstance(each, Register) and each.name == name for each in nested_operands(statement.operands)) > 1:
                return None
            continue
        if index < made:
            return None
        reads = [number for number, operand in enumerate(statement.operands) if operand == Register(name)]
        if statement.name in ("mov", "neg") and reads == [1] and statement.guard is None and isinstance(statement.operands[0], Register):
            if statement.name == "mov" and statement.qualifiers[-1][0] not in "fb":
                return None
            inner = _sums(function, readers, index, statement.operands[0].name, negated ^ (statement.name == "neg"))
            if inner is None:
                return None
            uses += inner
        elif statement.name in ("add", "sub") and len(statement.operands) == 3 and reads in ([1], [2]):
            uses.append(_Use(index, reads[0], negated))
        else:
            return None
    return uses


def _operands_change(function: Function, first: int, last: int, loops: list[tuple[int, int]]) -> bool:
    """Return True if a statement between a product and its last reader, or in a loop with a part of that text, writes a factor."""
    factors = {operand.name for operand in function.statements[first].operands[1:] if isinstance(operand, Register)}
    end = max([last, *(stop for start, stop in loops if start <= last and stop >= first)])
    for statement in function.statements[first : end + 1]:
        written = statement.operands[:1] if statement.operands and not isinstance(statement.operands[0], Address) else ()
        if any(isinstance(operand, Register) and operand.name in factors for operand in nested_operands(written)):
            return True
    return False


def _chosen_uses(function: Function, products: dict[str, _Product]) -> dict[int, tuple[_Product, _Use]]:
    """Return for each sum the product that is fused into it."""
    by_sum: dict[int, dict[int, str]] = defaultdict(dict)  # names of the products by sum and operand
    for name, product in products.items():
        for use in product.uses:
            by_sum[use.statement][use.operand] = name
    kept = dict(products)
    for name, product in sorted(products.items(), key=lambda item: -item[1].index):
        rivals = [by_sum[use.statement].get(1) for use in product.uses if use.operand == 2]
        if any(rival in kept for rival in rivals if rival is not None):
            del kept[name]
    return {use.statement: (product, use) for product in kept.values() for use in product.uses}


# ---- the fused statements


class _Rewriter:
    """Makes the statements that compute a fused sum, and names their registers."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.registers: dict[str, str] = {}
        self.factors: dict[int, tuple[Operand, Operand]] = {}  # of divisions

    def _new(self, kind: str) -> Register:
        name = f"%fused{len(self.registers)}"
        while name in self.function.registers:
            name += "_"
        self.registers[name] = kind
        return Register(name)

    def split_division(self, index: int) -> list[Statement]:
        """Return the statements that make the factors of a division's last product: the scaled dividend and the divisor's reciprocal."""
        division = self.function.statements[index]
        _, dividend, divisor = division.operands
        ftz = ".ftz" if "ftz" in division.qualifiers else ""
        statements: list[Statement] = []

        def emit(opcode: str, *operands: Operand) -> Register:
            made = self._new("pred" if opcode.startswith("setp") else "f32")
            statements.append(Statement(opcode, (made, *operands), None, division.position))
            return made

        def scale(condition: Operand, factor: Float) -> None:
            nonlocal dividend, divisor
            dividend, divisor = (emit("selp.f32", emit(f"mul.rn{ftz}.f32", each, factor), each, condition) for each in (dividend, divisor))

        magnitude = emit("abs.f32", divisor)
        large = emit("setp.gt.f32", magnitude, LARGE)
        small = emit("setp.lt.f32", magnitude, NORMAL)
        if "full" in division.qualifiers:
            scale(large, QUARTER)
        if not ftz:
            scale(small, UP_24)
        self.factors[index] = emit("rcp.approx.ftz.f32", divisor), dividend
        return statements

    def copy_factors(self, index: int, kind: str) -> list[Statement]:
        """Return the statements that keep the factors of a product for where it is read."""
        product, statements = self.function.statements[index], []
        factors: list[Operand] = list(product.operands[1:])
        for i, factor in enumerate(factors):
            if isinstance(factor, Register):
                factors[i] = self._new(REGISTERS.get(kind, kind))
                statements.append(Statement(f"mov.{REGISTERS.get(kind, kind)}", (factors[i], factor), None, product.position))
        self.factors[index] = factors[0], factors[1]
        return statements

    def fused_sum(self, statement: Statement, product: _Product, use: _Use) -> list[Statement]:
        """Return the statements in place of a sum."""
        made = self.function.statements[product.index]
        left, right = self.factors.get(product.index, made.operands[1:])
        addend = statement.operands[3 - use.operand]
        difference = statement.name == "sub"
        statements: list[Statement] = []
        if use.negated ^ (difference and use.operand == 2):
            left = self._negate(left, product.kind, statement, statements)
        if difference and use.operand == 1:
            addend = self._negate(addend, product.kind, statement, statements)
        modes = [mode for mode in statement.qualifiers[:-1] if mode in ("ftz", "sat")]
        opcode = ".".join(["fma", "rn", *modes, product.kind])
        return [*statements, replace(statement, opcode=opcode, operands=(statement.operands[0], left, right, addend))]

    def _negate(self, operand: Operand, kind: str, statement: Statement, statements: list[Statement]) -> Operand:
        """Return the negated operand, and append the statement that makes it."""
        if isinstance(operand, Float):
            return replace(operand, bits=operand.bits ^ SIGN[operand.width])
        made = self._new(REGISTERS.get(kind, kind))
        statements.append(Statement(f"neg.{kind}", (made, operand), None, statement.position))
        return made
