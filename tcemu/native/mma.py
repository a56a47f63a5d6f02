"""Products of matrices of codes that walk K with an instruction of one warp."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.arithmetic.kernels.calls import numbers, run
from tcemu.arithmetic.kernels.launch import Entry, launch
from tcemu.isa.instructions import LANES, Instruction
from tcemu.layouts import Fragment, fragment
from tcemu.native import sources
from tcemu.native.sources import Fragments
from tcemu.packing import container, pack_registers, unpack_registers

WARPS = 4  # of a block


class Walk(NamedTuple):
    """D = A·B + C on the registers of fragments, a call of `calls.run`.

    a: [batch or 1, fragments of M, instructions, lanes, registers]; b: the same, of N; c: [batch, fragments of M, of N, lanes, registers].
    """

    op: Instruction

    @property
    def axes(self) -> tuple[str, ...]:
        return "m k l r", "n k l s", "m n l t", "m n l t"

    @property
    def shared(self) -> tuple[bool, ...]:
        return True, True, False

    def __call__(self, *operands: Array) -> Array:
        a, b, c = operands
        (batch, rows, columns), steps = c.shape[:3], a.shape[2]
        kernel = Fragments.of(self.op, rows, columns)
        warps = batch * -(-rows // kernel.down) * -(-columns // kernel.across)
        entry = Entry("multiply_by_mma", sources.by_fragments(kernel), WARPS * LANES)
        shape = numbers(batch, rows, columns, steps, len(a), len(b))
        return launch(entry, -(-warps // WARPS), jax.ShapeDtypeStruct(c.shape, c.dtype), shape, a, b, c)[0]


def product(op: Instruction, a: Array, b: Array, c: Array) -> Array:
    """D = A·B + C. a: codes [batch or 1, M, K] of whole instructions; b: [batch or 1, K, N]; c: [batch, M, N]; with the words of f64."""
    x, y, start = _registers(op, "a", a), _registers(op, "b", jnp.swapaxes(b, 1, 2)), _registers(op, "c", c)
    return _codes(op, run(Walk(op), x, y, start))[:, : c.shape[1], : c.shape[2]]


def _fragment(op: Instruction, name: str) -> Fragment:
    volta = {"a": op.alayout, "b": op.blayout}.get(name) if op.products > 1 else None
    return fragment(name, (op.m, op.n, op.k), op.container_bits(name), volta=volta)


def _registers(op: Instruction, name: str, codes: Array) -> Array:
    """[batch, lines, places] -> registers [batch, fragments of lines, fragments of places, lanes, registers].

    An instruction of four products has them side by side along N.
    """
    fmt, tail, wide = getattr(op, name), codes.shape[3:], op.n * op.products
    lines, places = {"a": (op.m, op.k), "b": (wide, op.k), "c": (op.m, wide)}[name]
    codes = jnp.pad(codes, [(0, 0), (0, -codes.shape[1] % lines), (0, -codes.shape[2] % places), *[(0, 0)] * len(tail)])
    codes = codes.reshape(len(codes), codes.shape[1] // lines, lines, codes.shape[2] // places, places, *tail)
    codes = jnp.swapaxes(codes, 2, 3)
    if name == "b":
        codes = jnp.swapaxes(codes, 3, 4)  # K x N, as its fragment is seen
    if op.products > 1 and name == "a":
        codes = jnp.broadcast_to(codes[:, :, :, None], (*codes.shape[:3], op.products, *codes.shape[3:]))
    elif op.products > 1:
        codes = jnp.moveaxis(codes.reshape(*codes.shape[:4], op.products, op.n), 4, 3)
    return pack_registers(_fragment(op, name).encode(codes, trailing=len(tail)), fmt, **container(fmt)._asdict())


def _codes(op: Instruction, registers: Array) -> Array:
    """The registers of D as codes [batch, M, N] of whole fragments."""
    fmt = op.d
    assert fmt is not None
    codes = _fragment(op, "d").decode(unpack_registers(registers, fmt, **container(fmt)._asdict()), trailing=fmt.words - 1)
    if op.products > 1:
        codes = jnp.moveaxis(codes, 3, 4).reshape(*codes.shape[:3], op.m, op.products * op.n)
    batch, rows, columns, m, n, *words = codes.shape
    return jnp.swapaxes(codes, 2, 3).reshape(batch, rows * m, columns * n, *words)


def filling(op: Instruction) -> np.ndarray:
    """The code of A with which K is filled up to whole instructions, against zeros of B: the products change nothing.

    A sum of multiply-adds keeps its -0 by products that are -0; rounded down, it keeps +0 by products that are +0, and -0 too.
    """
    fmt = op.a
    assert fmt is not None
    positive = fmt.is_integer or op.rounding == "rm"
    code = 0 if positive else 1 << fmt.bits - 1
    if fmt.words == 2:
        return np.array([code & 0xFFFFFFFF, code >> 32], np.uint32)
    return np.array(code, fmt.dtype)
