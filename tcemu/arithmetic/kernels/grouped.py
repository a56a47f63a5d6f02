"""The steps of `grouped_dot_add` for the kernel in `tile`.

The sum of a group is an s32 by dp4a, four products an instruction, and takes its scales as an integer factor. The aligned groups meet in an
f64 whose unit, 2^-1074, is the step's: a multiplication rounded toward zero then cuts at the unit, and sums below 2^53 units are exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.dot_add import add_wide
from tcemu.arithmetic.grouped import unit, values
from tcemu.arithmetic.kernels.fused import F64_WORD, upper_end
from tcemu.arithmetic.kernels.ptx import ptx
from tcemu.arithmetic.kernels.steps import ABSENT, Loads, end_in_integers, own_exponent, tiles
from tcemu.arithmetic.multiplicands import SPECIAL_EXPONENT, Scale, power_of_two
from tcemu.formats import F32, Format

DOWN = 700  # binades from an aligned value to the subnormals, in one exact and one cutting multiplication


class GroupedSteps(NamedTuple):
    """What the kernel must know of an arithmetic; static. See `steps.Steps`."""

    a: Format
    b: Format
    terms: int  # of a step
    summed: int  # of a group
    scale_bits: int  # fraction bits of a scale
    fraction_bits: int
    floor: int
    lost: int
    assembly: bool

    @property
    def groups(self) -> int:
        return self.terms // self.summed

    @property
    def unit(self) -> int:
        """A group's sum times the significands of its scales counts units of 2^(unit + the exponents of its scales)."""
        return unit(self.a) + unit(self.b) - 2 * self.scale_bits

    @property
    def possible(self) -> bool:
        return self.terms % self.summed == 0 and self.summed % 4 == 0 and self.summed <= 16

    @property
    def tile(self) -> tuple[int, int]:
        return 32, 64

    @property
    def warps(self) -> int:
        return 4

    def prepare(self, side: int, codes: Array, scales: Scale | None, width: int) -> tuple[tuple[Array, ...], Array]:
        assert scales is not None
        return prepare(self, side, codes, scales, width)

    def step(self, row: Loads, column: Loads, c: Array, special: Array) -> Array:
        return step(self, row, column, c, special)


class GroupedOperand(NamedTuple):
    """A multiplicand for the kernel: [batch, tiles, steps, ..., width of a tile], int32."""

    values: Array  # [..., terms / 4, width]: four bytes, integers
    scales: Array  # [..., groups, width]: bits 16 and up the significand of the scale; below, which products are not zero
    exponents: Array  # [..., groups, width], of the scales
    nan: Array  # [..., 1, width]: 1 where a scale of the step is NaN


def prepare(steps: GroupedSteps, side: int, codes: Array, scales: Scale, width: int) -> tuple[GroupedOperand, Array]:
    """A multiplicand; no step is special.

    side: 0 for A, 1 for B; codes: [batch, K, rows or columns], whole steps and whole tiles; scales: one for each code.
    """
    by_group = lambda v: v.reshape(v.shape[0], -1, steps.summed, v.shape[-1])  # noqa: E731
    integers = values((steps.a, steps.b)[side], codes).astype(jnp.int32)
    packed = sum((integers[:, at::4] & 0xFF) << (8 * at) for at in range(4))
    significand, exponent = (by_group(v)[:, :, 0] for v in scales)
    significand = significand.astype(jnp.int32)
    present = (by_group(integers) != 0) & (significand != 0)[:, :, None]
    mask = jnp.sum(jnp.where(present, jnp.int32(1) << jnp.arange(steps.summed, dtype=jnp.int32)[:, None], 0), axis=2)
    nan = exponent == SPECIAL_EXPONENT
    in_step = jnp.any(nan.reshape(nan.shape[0], -1, steps.groups, nan.shape[-1]), axis=2).astype(jnp.int32)
    cut = lambda v, rows: tiles(v, rows, width)  # noqa: E731
    return GroupedOperand(
        cut(jnp.asarray(packed), steps.terms // 4), cut((significand << 16) | mask, steps.groups),
        cut(jnp.where(nan, 0, exponent), steps.groups), cut(in_step, 1),
    ), jnp.zeros((1, codes.shape[1] // steps.terms), jnp.int32)  # fmt: skip


def step(steps: GroupedSteps, row: Loads, column: Loads, c: Array, special: Array) -> Array:
    """One step. row, column: load one line of a GroupedOperand's arrays, by the array's number and the line's."""
    del special
    best, sums, exponents = jnp.full(c.shape, ABSENT, jnp.int32), [], []
    for group in range(steps.groups):
        best = _add_max(steps, best, row(1, group), column(1, group), row(2, group), column(2, group))
    greatest = jnp.maximum(jnp.maximum(best, own_exponent(c)), steps.floor)
    for group in range(steps.groups):
        words = [(row(0, at), column(0, at)) for at in range(group * steps.summed // 4, (group + 1) * steps.summed // 4)]
        sums.append(_dot(steps, words, row(1, group), column(1, group)))
        exponents.append(row(2, group) + column(2, group))
    d = _finish(steps, sums, exponents, c, greatest)
    return jnp.where(row(3, 0) | column(3, 0) != 0, F32.nan, d)


ADD_MAX = f"""
    .reg .b32 %both, %exponent;
    .reg .pred %present;
    and.b32 %both, %x, %y;
    and.b32 %both, %both, 0xFFFF;           // the products that are not zero
    setp.ne.s32 %present, %both, 0;
    add.s32 %exponent, %i, %j;
    selp.b32 %exponent, %exponent, {ABSENT}, %present;
    max.s32 %result, %best, %exponent;
"""


def _add_max(steps: GroupedSteps, best: Array, x: Array, y: Array, i: Array, j: Array) -> Array:
    """The larger of `best` and a group's exponent, if any of its products is not zero."""
    if steps.assembly:
        return ptx(ADD_MAX, best=best, x=x, y=y, i=i, j=j)
    return jnp.maximum(best, jnp.where((x & y & 0xFFFF) != 0, i + j, ABSENT))


def _dot(steps: GroupedSteps, words: list[tuple[Array, Array]], x_scale: Array, y_scale: Array) -> Array:
    """The exact sum of a group times the significands of its scales."""
    if steps.assembly:
        text = """
    .reg .b32 %sum, %scale;
    mov.u32 %sum, 0;
"""
        text += "".join(f"dp4a.s32.s32 %sum, %x{at}, %y{at}, %sum;      // four products\n" for at in range(len(words)))
        text += """
    shr.u32 %scale, %x_scale, 16;
    mul.lo.s32 %sum, %sum, %scale;
    shr.u32 %scale, %y_scale, 16;
    mul.lo.s32 %result, %sum, %scale;
"""
        factors = {f"{name}{at}": word for at, pair in enumerate(words) for name, word in zip("xy", pair, strict=True)}
        return ptx(text, x_scale=x_scale, y_scale=y_scale, **factors)
    byte = lambda v, at: (v << (24 - 8 * at)) >> 24  # noqa: E731
    total = sum(byte(x, at) * byte(y, at) for x, y in words for at in range(4))
    return total * (x_scale >> 16) * (y_scale >> 16)


def _finish(steps: GroupedSteps, sums: list[Array], exponents: list[Array], c: Array, greatest: Array) -> Array:
    last = steps.fraction_bits + steps.unit
    if steps.assembly:
        operands = {f"sum{at}": v for at, v in enumerate(sums)} | {f"exponent{at}": v for at, v in enumerate(exponents)}
        return ptx(_end(steps, last), c=c, greatest=greatest, **operands)
    aligned = [total.astype(jnp.float32) * power_of_two(e - greatest + last) for total, e in zip(sums, exponents, strict=True)]
    return end_in_integers(steps, *add_wide(aligned), greatest, c)


def _end(steps: GroupedSteps, last: int) -> str:
    subnormal = 1074  # the unit of an f64 subnormal is 2^-1074
    up, down = ("0d" + f"{(F64_WORD.bias + sign * DOWN) << 52:016X}" for sign in (1, -1))
    text = f"""
    .reg .f64 %power, %sum, %term;
    .reg .b32 %base, %word, %sign, %zero;
    .reg .f32 %rounded;
    .reg .pred %is;
    mov.u32 %zero, 0;
    sub.s32 %base, {F64_WORD.bias + DOWN - subnormal}, %greatest;
    add.s32 %word, %base, {steps.fraction_bits};
    shl.b32 %word, %word, 20;
    mov.b64 %power, {{%zero, %word}};
    cvt.f64.f32 %sum, %c;
    mul.rn.f64 %sum, %sum, %power;          // exact
    mul.rz.f64 %sum, %sum, {down};    // cut at the unit, which is now 2^-1074
"""
    for at in range(steps.groups):
        text += f"""
    add.s32 %word, %base, %exponent{at};
    add.s32 %word, %word, {last};
    shl.b32 %word, %word, 20;
    mov.b64 %power, {{%zero, %word}};
    cvt.rn.f64.s32 %term, %sum{at};
    mul.rn.f64 %term, %term, %power;
    mul.rz.f64 %term, %term, {down};
    add.rn.f64 %sum, %sum, %term;
"""
    return (
        text
        + f"""
    add.s32 %word, %greatest, {F64_WORD.bias + subnormal - DOWN - steps.fraction_bits};
    shl.b32 %word, %word, 20;
    mov.b64 %power, {{%zero, %word}};
    mul.rn.f64 %sum, %sum, {up};      // back up, exact
    mul.rn.f64 %sum, %sum, %power;
"""
        + upper_end(steps.lost)
    )
