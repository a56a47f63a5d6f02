"""`ProductSpec`: the formats and modes of an instruction, all that an arithmetic must know of it besides its `Model`."""

from functools import lru_cache
from typing import NamedTuple

from jax.typing import ArrayLike

from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply

Scales = tuple[ArrayLike, ArrayLike]  # codes of the block scales of A and of B


class ProductSpec(NamedTuple):
    """A pure property of an instruction, made by `product_spec`. Hashable, so it may be static under `jit`."""

    a: Format
    b: Format
    c: Format
    d: Format
    k: int  # products of one instruction
    rounding: str | None = None  # the instruction's own rounding mode, in place of the model's (f64)
    clamp: bool = False  # .satfinite
    bit_op: str | None = None  # "xor" or "and", for b1
    scale: Format | None = None  # format of the block scales
    scale_vec: int = 0  # block scales of one instruction for a row of A or a column of B
    family: str = ""  # the instruction's family, whose units compute natively; "" for a product that no instruction names

    def require_scale(self) -> Format:
        """Return the format of the block scales.

        Raises:
            ValueError: The product has no block scales.
        """
        if self.scale is None:
            raise ValueError(f"a product of {self.a} and {self.b} without block scales")
        return self.scale


class Promotion(NamedTuple):
    """Promotion of sums outside the instruction: a chunk of K begins at +0, and its sum is added to an f32 sum, rounded RN."""

    instructions: int  # instructions in a chunk
    # rows of A and columns of B that share one block scale; None in a place: all of them. Each chunk is multiplied by the f32 product of a
    # scale of its rows and a scale of its columns: sum = fma(scale, chunk, sum). None: there are no scales
    scale_block_shape: tuple[int | None, int | None] | None


@lru_cache(maxsize=65536)
def product_spec(op: MatrixMultiply) -> ProductSpec:
    """Returns the formats and modes of an instruction that computes a product."""
    return ProductSpec(
        a=op.a,
        b=op.b,
        c=op.accumulator,
        d=op.d,
        k=op.k // 2 if op.sparse else op.k,
        rounding=op.rounding,
        clamp=op.satfinite,
        bit_op=op.bit_op,
        scale=None if op.scaling is None else op.scaling.format,
        scale_vec=0 if op.scaling is None else op.scaling.count,
        family=op.family,
    )
