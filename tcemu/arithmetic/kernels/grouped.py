"""The steps of `grouped_dot_add` for `tile_kernel`.

The sum of a group is an s32 by dp4a, four products an instruction, and takes its scales as an integer factor. The aligned groups meet in an
f64 whose unit, 2^-1074, is the step's: a multiplication rounded toward zero then cuts at the unit, and sums below 2^53 units are exact.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.dot_add import SPECIAL_EXPONENT, Scale, add_wide, power_of_two
from tcemu.arithmetic.grouped import unit, values
from tcemu.arithmetic.kernels.fused import F64_WORD, UPPER_END
from tcemu.arithmetic.kernels.tile import ABSENT, Loads, end_in_integers, own_exponent, ptx, tiles
from tcemu.formats import F32, Format

DOWN = 700  # binades from an aligned value to the subnormals, in one exact and one cutting multiplication


class GroupedPlan(NamedTuple):
    """What the kernel must know; static."""

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


class Side(NamedTuple):
    """A multiplicand for the kernel: [batch, tiles, steps, ..., width of a tile], int32."""

    values: Array  # [..., terms / 4, width]: four bytes, integers
    scales: Array  # [..., groups, width]: bits 16 and up the significand of the scale; below, which products are not zero
    exponents: Array  # [..., groups, width], of the scales
    nan: Array  # [..., 1, width]: 1 where a scale of the step is NaN


def prepare(plan: GroupedPlan, side: int, codes: Array, scales: Scale, width: int) -> tuple[Side, Array]:
    """A multiplicand; no step is special.

    side: 0 for A, 1 for B; codes: [batch, K, rows or columns], whole steps and whole tiles; scales: one for each code.
    """
    by_group = lambda v: v.reshape(v.shape[0], -1, plan.summed, v.shape[-1])  # noqa: E731
    integers = values((plan.a, plan.b)[side], codes).astype(jnp.int32)
    packed = sum((integers[:, at::4] & 0xFF) << (8 * at) for at in range(4))
    significand, exponent = (by_group(v)[:, :, 0] for v in scales)
    significand = significand.astype(jnp.int32)
    present = (by_group(integers) != 0) & (significand != 0)[:, :, None]
    mask = jnp.sum(jnp.where(present, jnp.int32(1) << jnp.arange(plan.summed, dtype=jnp.int32)[:, None], 0), axis=2)
    nan = exponent == SPECIAL_EXPONENT
    in_step = jnp.any(nan.reshape(nan.shape[0], -1, plan.groups, nan.shape[-1]), axis=2).astype(jnp.int32)
    cut = lambda v, rows: tiles(v, rows, width)  # noqa: E731
    return Side(
        cut(jnp.asarray(packed), plan.terms // 4), cut((significand << 16) | mask, plan.groups),
        cut(jnp.where(nan, 0, exponent), plan.groups), cut(in_step, 1),
    ), jnp.zeros((1, codes.shape[1] // plan.terms), jnp.int32)  # fmt: skip


def step(plan: GroupedPlan, row: Loads, column: Loads, c: Array, special: Array) -> Array:
    """One step. row, column: load one line of a Side's arrays, by the array's number and the line's."""
    del special
    best, sums, exponents = jnp.full(c.shape, ABSENT, jnp.int32), [], []
    for group in range(plan.groups):
        best = _add_max(plan, best, row(1, group), column(1, group), row(2, group), column(2, group))
    greatest = jnp.maximum(jnp.maximum(best, own_exponent(c)), plan.floor)
    for group in range(plan.groups):
        words = [(row(0, at), column(0, at)) for at in range(group * plan.summed // 4, (group + 1) * plan.summed // 4)]
        sums.append(_dot(plan, words, row(1, group), column(1, group)))
        exponents.append(row(2, group) + column(2, group))
    d = _finish(plan, sums, exponents, c, greatest)
    return jnp.where(row(3, 0) | column(3, 0) != 0, F32.nan, d)


def _add_max(plan: GroupedPlan, best: Array, x: Array, y: Array, i: Array, j: Array) -> Array:
    """The larger of `best` and a group's exponent, if any of its products is not zero."""
    if plan.assembly:
        text = ".reg .b32 t, e; .reg .pred p; and.b32 t, $2, $3; and.b32 t, t, 0xFFFF; setp.ne.s32 p, t, 0; add.s32 e, $4, $5;"
        return ptx(text + f"selp.b32 e, e, {ABSENT}, p; max.s32 $0, $1, e;", best, x, y, i, j)
    return jnp.maximum(best, jnp.where((x & y & 0xFFFF) != 0, i + j, ABSENT))


def _dot(plan: GroupedPlan, words: list[tuple[Array, Array]], x_scale: Array, y_scale: Array) -> Array:
    """The exact sum of a group times the significands of its scales."""
    if plan.assembly:
        text = ".reg .b32 t, u; mov.u32 t, 0;" + "".join(f"dp4a.s32.s32 t, ${3 + 2 * at}, ${4 + 2 * at}, t;" for at in range(len(words)))
        text += "shr.u32 u, $1, 16; mul.lo.s32 t, t, u; shr.u32 u, $2, 16; mul.lo.s32 $0, t, u;"
        return ptx(text, x_scale, y_scale, *(word for pair in words for word in pair))
    byte = lambda v, at: (v << (24 - 8 * at)) >> 24  # noqa: E731
    total = sum(byte(x, at) * byte(y, at) for x, y in words for at in range(4))
    return total * (x_scale >> 16) * (y_scale >> 16)


def _finish(plan: GroupedPlan, sums: list[Array], exponents: list[Array], c: Array, greatest: Array) -> Array:
    last = plan.fraction_bits + plan.unit
    if not plan.assembly:
        aligned = [t.astype(jnp.float32) * power_of_two(e - greatest + last) for t, e in zip(sums, exponents, strict=True)]
        return end_in_integers(plan, *add_wide(aligned), greatest, c)
    subnormal = 1074  # the unit of an f64 subnormal is 2^-1074
    up, down = ("0d" + f"{(F64_WORD.bias + sign * DOWN) << 52:016X}" for sign in (1, -1))
    text = ".reg .f64 u, t, w; .reg .b32 b, h, s, z; .reg .f32 d; .reg .pred p; mov.u32 z, 0;"
    text += f"sub.s32 b, {F64_WORD.bias + DOWN - subnormal}, $2; add.s32 h, b, {plan.fraction_bits}; shl.b32 h, h, 20; mov.b64 u, {{z, h}};"
    text += f"cvt.f64.f32 t, $1; mul.rn.f64 t, t, u; mul.rz.f64 t, t, {down};"
    for at in range(plan.groups):
        text += f"add.s32 h, b, ${3 + plan.groups + at}; add.s32 h, h, {last}; shl.b32 h, h, 20; mov.b64 u, {{z, h}};"
        text += f"cvt.rn.f64.s32 w, ${3 + at}; mul.rn.f64 w, w, u; mul.rz.f64 w, w, {down}; add.rn.f64 t, t, w;"
    text += f"add.s32 h, $2, {F64_WORD.bias + subnormal - DOWN - plan.fraction_bits}; shl.b32 h, h, 20; mov.b64 u, {{z, h}};"
    text += f"mul.rn.f64 t, t, {up}; mul.rn.f64 t, t, u;" + UPPER_END.format(mask=-1 << plan.lost)
    return ptx(text, c, greatest, *sums, *exponents)
