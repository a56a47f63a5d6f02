"""What the CPU kernels of fuzzing draw, and what they return."""

from __future__ import annotations

from typing import NamedTuple

from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.uses.fuzz.case_kinds import Kind

CASES = 16  # cases of a task
OPERANDS = ("a", "b", "c")
WORD_BYTES = 4


class DrawRequest(NamedTuple):
    """The instruction and the kinds of the cases that a kernel draws; it is compiled for each of them."""

    op: MatrixMultiply
    kinds: tuple[Kind, ...]

    def format(self, name: str) -> Format:
        """The format of an operand."""
        return getattr(product_spec(self.op), name)

    def shape(self, name: str) -> tuple[int, int]:
        """The shape of an operand of one case."""
        return self.op.matrix_shape("d" if name == "c" else name)

    def size(self, name: str) -> int:
        """Elements of an operand of one case."""
        rows, columns = self.shape(name)
        return rows * columns

    def missing_reason(self, name: str) -> str:
        """Returns why no kernel draws an operand; "" if one does."""
        fmt, (_, columns) = self.format(name), self.shape(name)
        if fmt.is_integer or fmt.words > 1:
            return f"operands of {fmt} are drawn by JAX's operations"
        regular = columns % CASES == 0 or CASES % columns == 0
        return "" if name == "c" or (regular and self.size(name) % CASES == 0) else f"rows of {columns} fill no vectors"


class ComparisonLayout(NamedTuple):
    """The words of a task's result: the number of outputs that differ of each case, and operands and the left result of the first case."""

    request: DrawRequest
    with_operands: bool  # else the numbers alone

    def bytes(self, name: str) -> int:
        """Bytes of an operand of one case, or of the result, "d"."""
        return self.request.size(name) * self.request.format(name).dtype.itemsize

    @property
    def copied(self) -> tuple[str, ...]:
        """The operands and the result that follow the numbers."""
        return (*OPERANDS, "d") if self.with_operands else ()

    @property
    def words(self) -> int:
        """The number of words of a task."""
        return CASES + sum(map(self.bytes, self.copied)) // WORD_BYTES
