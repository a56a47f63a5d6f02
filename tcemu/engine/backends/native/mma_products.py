"""Products of matrices of codes that reduce K with an instruction of one warp."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.backends.batched_calls import call_batched, launch_numbers
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch
from tcemu.engine.backends.native import native_text as sources
from tcemu.engine.backends.native.native_text import MmaKernelSpec
from tcemu.engine.isa.families import LANES, MatrixMultiply, Mma
from tcemu.engine.layouts.fragment_layouts import Fragment, mma_fragment
from tcemu.engine.layouts.packing import container, pack_registers, unpack_registers

WARPS = 4  # warps of a block


class MmaReduction(NamedTuple):
    """D = A·B + C on the registers of fragments, a `BatchedCall`.

    a: [batch or 1, fragments of M, instructions, lanes, registers]; b: the same, of N; c: [batch, fragments of M, of N, lanes, registers].
    """

    op: MatrixMultiply

    @property
    def axes(self) -> tuple[str, ...]:
        return "m k l r", "n k l s", "m n l t", "m n l t"

    @property
    def sharing(self) -> tuple[str, ...]:
        return "a", "b", ""

    def __call__(self, *operands: Array) -> Array:
        a, b, c = operands
        (batch, rows, columns), steps = c.shape[:3], a.shape[2]
        kernel = MmaKernelSpec.choose(self.op, rows, columns)
        warps = batch * -(-rows // kernel.down) * -(-columns // kernel.across)
        entry = KernelEntry("multiply_by_mma", sources.mma_kernel_text(kernel), WARPS * LANES)
        shape = launch_numbers(batch, rows, columns, steps, len(a), len(b))
        return launch(entry, -(-warps // WARPS), jax.ShapeDtypeStruct(c.shape, c.dtype), shape, a, b, c)[0]


def multiply_by_mma(op: MatrixMultiply, a: Array, b: Array, c: Array) -> Array:
    """Computes D = A·B + C on codes: a [..., M, K], K in whole instructions; b [..., K, N]; c [..., M, N]; f64 codes with an axis of
    words.
    """
    row = c.ndim - op.d.words - 1  # the axis of M
    b_rows = b.ndim - op.d.words - 1
    x, y, start = _registers(op, "a", a), _registers(op, "b", jnp.swapaxes(b, b_rows, b_rows + 1)), _registers(op, "c", c)
    d = _codes(op, call_batched(MmaReduction(op), x, y, start))
    return lax.slice_in_dim(lax.slice_in_dim(d, 0, c.shape[row], axis=row), 0, c.shape[row + 1], axis=row + 1)


def pad_to_instructions(op: MatrixMultiply, a: Array, b: Array) -> tuple[Array, Array]:
    """Fills K of A and B up to whole instructions with products that change nothing: see `padding_code`."""
    k_of_a, k_of_b = a.ndim - op.a.words, b.ndim - op.a.words - 1
    missing = -a.shape[k_of_a] % op.k
    if not missing:
        return a, b
    more = jnp.broadcast_to(jnp.asarray(padding_code(op)), (*a.shape[:k_of_a], missing, *a.shape[k_of_a + 1 :]))
    return jnp.concatenate([a, more], k_of_a), jnp.pad(b, [(0, missing if axis == k_of_b else 0) for axis in range(b.ndim)])


def _fragment(op: MatrixMultiply, name: str) -> Fragment:
    volta = {"a": op.alayout, "b": op.blayout}.get(name) if isinstance(op, Mma) and op.matrix_count > 1 else None
    return mma_fragment(name, (op.m, op.n, op.k), op.container_bits(name), volta=volta)


def _registers(op: MatrixMultiply, name: str, codes: Array) -> Array:
    """Packs codes [..., lines, places] into registers [..., fragments of lines, fragments of places, lanes, registers].

    An instruction of four products has them side by side along N.
    """
    fmt, wide = getattr(op, name), op.n * op.matrix_count
    first = codes.ndim - fmt.words - 1  # the axis of lines
    batch, tail = codes.shape[:first], codes.shape[first + 2 :]
    lines, places = {"a": (op.m, op.k), "b": (wide, op.k), "c": (op.m, wide)}[name]
    missing = {first: -codes.shape[first] % lines, first + 1: -codes.shape[first + 1] % places}
    codes = jnp.pad(codes, [(0, missing.get(axis, 0)) for axis in range(codes.ndim)])
    codes = codes.reshape(*batch, codes.shape[first] // lines, lines, codes.shape[first + 1] // places, places, *tail)
    codes = jnp.swapaxes(codes, first + 1, first + 2)
    if name == "b":
        codes = jnp.swapaxes(codes, first + 2, first + 3)  # K x N, as its fragment is seen
    if op.matrix_count > 1 and name == "a":
        codes = jnp.repeat(jnp.expand_dims(codes, first + 2), op.matrix_count, first + 2)
    elif op.matrix_count > 1:
        codes = jnp.moveaxis(codes.reshape(*codes.shape[: first + 3], op.matrix_count, op.n), first + 3, first + 2)
    return pack_registers(_fragment(op, name).encode(codes, trailing=len(tail)), fmt, **container(fmt)._asdict())


def _codes(op: MatrixMultiply, registers: Array) -> Array:
    """Unpacks the registers of D into codes [..., M, N] of whole fragments."""
    fmt = op.d
    codes = _fragment(op, "d").decode(unpack_registers(registers, fmt, **container(fmt)._asdict()), trailing=fmt.words - 1)
    first = registers.ndim - 4  # the axis of fragments of M
    if op.matrix_count > 1:
        codes = jnp.moveaxis(codes, first + 2, first + 3).reshape(*codes.shape[: first + 2], op.m, op.matrix_count * op.n)
    *batch, rows, columns, m, n = codes.shape[: first + 4]
    return jnp.swapaxes(codes, first + 1, first + 2).reshape(*batch, rows * m, columns * n, *codes.shape[first + 4 :])


def padding_code(op: MatrixMultiply) -> np.ndarray:
    """The code of A with which K is filled up to whole instructions, against zeros of B: the products change nothing.

    A sum of multiply-adds keeps its -0 by products that are -0; rounded down, it keeps +0 by products that are +0, and -0 too.
    """
    fmt = op.a
    positive = fmt.is_integer or op.rounding == "rm"
    code = 0 if positive else 1 << fmt.bits - 1
    if fmt.words == 2:
        return np.array([code & 0xFFFFFFFF, code >> 32], np.uint32)
    return np.array(code, fmt.dtype)
