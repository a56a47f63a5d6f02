"""Planted faults, each one change of what a target computes: name -> (instruction, the true side, the faulty side)."""

from collections.abc import Callable

import jax.numpy as jnp

import tcemu
from tcemu.engine.layouts.fragment_layouts import TILE, Fragment, Layout, tile_sizes
from tcemu.engine.layouts.packing import unpack_registers
from tcemu.fuzz import Implementation, emulator

MMA, SP = "mma.sync.aligned.{}", "mma.sp::ordered_metadata.sync.aligned.{}"
HALF, HALF_8 = MMA.format("m16n8k16.row.col.f32.f16.f16.f32"), MMA.format("m16n8k8.row.col.f32.f16.f16.f32")
HALF_16 = MMA.format("m16n8k16.row.col.f16.f16.f16.f16")
BF16, TF32 = MMA.format("m16n8k8.row.col.f32.bf16.bf16.f32"), MMA.format("m16n8k8.row.col.f32.tf32.tf32.f32")
FP8, FP8_16 = MMA.format("m16n8k32.row.col.f32.e4m3.e4m3.f32"), MMA.format("m16n8k32.row.col.f16.e5m2.e5m2.f16")
QUAD, QUAD_16 = MMA.format("m8n8k4.row.col.f32.f16.f16.f32"), MMA.format("m8n8k4.row.col.f16.f16.f16.f16")
WGMMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
WMMA_16 = "wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32"
NVFP4 = MMA.format("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")
F64, S8 = MMA.format("m8n8k4.row.col.f64.f64.f64.f64"), MMA.format("m8n8k16.row.col.satfinite.s32.s8.s8.s32")
SP_HALF, SP_FP8 = SP.format("m16n8k32.row.col.f32.f16.f16.f32"), SP.format("m16n8k64.row.col.f32.e4m3.e4m3.f32")

Planted = tuple[tcemu.Instruction, Implementation, Implementation]


def changed_model(spelling: str, target: str, **fields) -> Planted:
    """The target's model with other fields."""
    op = tcemu.parse(spelling)
    return op, emulator(op, target), emulator(op, target, tcemu.get_model(op, target).replace(**fields), "faulty")


def around(spelling: str, target: str, before: Callable = lambda given: given, after: Callable = lambda d: d) -> Planted:
    """Something done to the operands, or to D."""
    op = tcemu.parse(spelling)
    true = emulator(op, target)
    return op, true, Implementation("faulty", lambda given: after(true.fn(before(given))))


def reversed_k(given: dict) -> dict:
    return given | {"a": given["a"][:, :, ::-1], "b": given["b"][:, ::-1]}


def put_word(d, at: int, to: int):
    return jnp.where(d == jnp.asarray(at, d.dtype), jnp.asarray(to, d.dtype), d)


def with_layout(operand: str, layout: Layout) -> Planted:
    """f16 m16n8k16 in registers, one operand of which is taken apart by another layout."""
    op = tcemu.parse(HALF)
    true = Implementation("true", lambda given: tcemu.mma(op, given["a"], given["b"], given["c"], target="sm_90"), level="registers")
    rows, columns = op.matrix_shape(operand)
    fmt = getattr(op, operand)
    sizes = tile_sizes(rows, columns, 2) if operand != "b" else tile_sizes(columns, rows, 2)

    def call(given: dict):
        codes = Fragment(layout, tuple(sizes.items())).decode(unpack_registers(given[operand], fmt))
        codes = codes.swapaxes(-1, -2) if operand == "b" else codes
        return true.fn(given | {operand: tcemu.pack(op, operand, codes)})

    return op, true, Implementation("faulty", call, level="registers")


# TILE with two digits of the lane or of the element in each other's place
SWAPPED = {
    "t and g": Layout("(w t g) (c m p)", "(w m g) (c t p)"), "m and c": Layout("(w g t) (m c p)", "(w m g) (c t p)"),
    "m and p": Layout("(w g t) (c p m)", "(w m g) (c t p)"), "row half": Layout("(w g t) (c m p)", "(w g m) (c t p)"),
    "column": Layout("(w g t) (c m p)", "(w m g) (t c p)"),
}  # fmt: skip
assert all(layout != TILE for layout in SWAPPED.values())

MUTANTS: dict[str, Callable[[], Planted]] = {
    # fraction bits
    "f16 24 bits": lambda: changed_model(HALF, "sm_90", fraction_bits=24),
    "f16 26 bits": lambda: changed_model(HALF, "sm_90", fraction_bits=26),
    "f16 of sm_80 25 bits": lambda: changed_model(HALF, "sm_80", fraction_bits=25),
    "f16 of sm_70 24 bits": lambda: changed_model(QUAD, "sm_70", fraction_bits=24),
    "bf16 24 bits": lambda: changed_model(BF16, "sm_90", fraction_bits=24),
    "tf32 26 bits": lambda: changed_model(TF32, "sm_90", fraction_bits=26),
    "f16 to f16 24 bits": lambda: changed_model(HALF_16, "sm_90", fraction_bits=24),
    "fp8 of sm_89 14 bits": lambda: changed_model(FP8, "sm_89", fraction_bits=14),
    "fp8 of sm_90 24 bits": lambda: changed_model(FP8, "sm_90", fraction_bits=24),
    "fp8 of sm_120 24 bits": lambda: changed_model(FP8, "sm_120", fraction_bits=24),
    "fp8 wgmma 12 bits": lambda: changed_model(WGMMA, "sm_90a", fraction_bits=12),
    "nvfp4 34 bits": lambda: changed_model(NVFP4, "sm_120a", fraction_bits=34),
    "nvfp4 36 bits": lambda: changed_model(NVFP4, "sm_120a", fraction_bits=36),
    "sparse f16 24 bits": lambda: changed_model(SP_HALF, "sm_90", fraction_bits=24),
    # floor
    "bf16 floor -132": lambda: changed_model(BF16, "sm_90", floor=-132),
    "bf16 floor -134": lambda: changed_model(BF16, "sm_90", floor=-134),
    "tf32 floor -130": lambda: changed_model(TF32, "sm_90", floor=-130),
    "f16 to f16 floor -20": lambda: changed_model(HALF_16, "sm_90", floor=-20),
    "f16 to f16 floor -22": lambda: changed_model(HALF_16, "sm_90", floor=-22),
    "f16 to f16 of sm_70 floor -20": lambda: changed_model(QUAD_16, "sm_70", floor=-20),
    # rounding
    "f16 RN": lambda: changed_model(HALF, "sm_90", rounding="RN"),
    "f16 RM": lambda: changed_model(HALF, "sm_90", rounding="RM"),
    "f16 RP": lambda: changed_model(HALF, "sm_90", rounding="RP"),
    "f16 to f16 RZ": lambda: changed_model(HALF_16, "sm_90", rounding="RZ"),
    "quad-pair RZ": lambda: changed_model(QUAD, "sm_90", rounding="RZ"),
    "fp8 wgmma RN": lambda: changed_model(WGMMA, "sm_90a", rounding="RN"),
    "nvfp4 RN": lambda: changed_model(NVFP4, "sm_120a", rounding="RN"),
    "f16 through f32": lambda: changed_model(HALF_16, "sm_90", result=tcemu.formats.F32, rounding="RZ", floor=-133),
    "wmma f16 of f32 at once": lambda: changed_model(WMMA_16, "sm_90", result=tcemu.formats.F16, rounding="RN", floor=-21),
    # bits of the result
    "fp8 of sm_89 12 bits of the result": lambda: changed_model(FP8, "sm_89", result_bits=12),
    "fp8 wgmma all bits of the result": lambda: changed_model(WGMMA, "sm_90a", result_bits=None),
    # block length
    "f16 in steps of 8": lambda: changed_model(HALF, "sm_90", terms=8),
    "f16 of sm_80 in one step": lambda: changed_model(HALF, "sm_80", terms=16),
    "tf32 in steps of 4": lambda: changed_model(TF32, "sm_90", terms=4),
    "fp8 of sm_120 in steps of 16": lambda: changed_model(FP8, "sm_120", terms=16),
    "fp8 wgmma in steps of 16": lambda: changed_model(WGMMA, "sm_90a", terms=16),
    "nvfp4 in steps of 32": lambda: changed_model(NVFP4, "sm_120a", terms=32),
    "nvfp4 in groups of 8": lambda: changed_model(NVFP4, "sm_120a", summed=8),
    # order
    "f16 of sm_80 backwards": lambda: around(HALF, "sm_80", before=reversed_k),
    "quad-pair backwards": lambda: around(QUAD, "sm_90", before=reversed_k),
    "f64 backwards": lambda: around(F64, "sm_90", before=reversed_k),
    "fp8 of sm_90 without groups": lambda: changed_model(FP8, "sm_90", groups=1),
    "fp8 of sm_90 from C on": lambda: changed_model(FP8, "sm_90", chain=None),
    "fp8 of sm_90 as of ptxas 12.6": lambda: changed_model(FP8, "sm_90", chain=16, together=True),
    "quad-pair in two chains": lambda: changed_model(QUAD, "sm_90", chain=2),
    "sparse fp8 of sm_90 without groups": lambda: changed_model(SP_FP8, "sm_90", groups=1),
    # words
    "zero is -0": lambda: around(HALF_8, "sm_90", after=lambda d: put_word(d, 0, 0x80000000)),
    "quad-pair's zero products leave -0": lambda: changed_model(QUAD, "sm_90", from_zero=False),
    "f32 NaN 7fc00000": lambda: around(HALF_8, "sm_90", after=lambda d: put_word(d, 0x7FFFFFFF, 0x7FC00000)),
    "f16 NaN 7e00": lambda: around(HALF_16, "sm_90", after=lambda d: put_word(d, 0x7FFF, 0x7E00)),
    "infinity is the largest number": lambda: around(HALF_16, "sm_90", after=lambda d: put_word(d, 0x7C00, 0x7BFF)),
    "s32 clamps one early": lambda: around(S8, "sm_90", after=lambda d: put_word(d, 0x7FFFFFFF, 0x7FFFFFFE)),
    "subnormal operands are zero": lambda: around(
        HALF_8, "sm_90", before=lambda given: given | {"a": jnp.where(given["a"] & 0x7C00 == 0, given["a"] & 0x8000, given["a"])}
    ),
    "metadata outside the defined are clamped": lambda: around(SP_HALF, "sm_90", before=lambda g: g | {"e": jnp.maximum(g["e"], 4)}),
    # layouts
    **{f"layout of A, {name}": lambda layout=layout: with_layout("a", layout) for name, layout in SWAPPED.items()},
    "layout of C, t and g": lambda: with_layout("c", SWAPPED["t and g"]),
    "layout of C, m and p": lambda: with_layout("c", SWAPPED["m and p"]),
    "layout of B, t and g": lambda: with_layout("b", SWAPPED["t and g"]),
    "layout of B, c and p": lambda: with_layout("b", Layout("(w g t) (p m c)", "(w m g) (c t p)")),
}  # fmt: skip

# the case, counted from 1, of seed 0 that shows each of them first
FOUND = {
    "f16 24 bits": 1, "f16 26 bits": 1, "f16 of sm_80 25 bits": 1, "f16 of sm_70 24 bits": 1, "bf16 24 bits": 1, "tf32 26 bits": 1,
    "f16 to f16 24 bits": 139, "fp8 of sm_89 14 bits": 3, "fp8 of sm_90 24 bits": 1, "fp8 of sm_120 24 bits": 1, "fp8 wgmma 12 bits": 1,
    "nvfp4 34 bits": 18, "nvfp4 36 bits": 25, "sparse f16 24 bits": 1, "bf16 floor -132": 94, "bf16 floor -134": 99, "tf32 floor -130": 9,
    "f16 to f16 floor -20": 121900, "f16 to f16 floor -22": 96516, "f16 to f16 of sm_70 floor -20": 11713, "f16 RN": 1, "f16 RM": 1,
    "f16 RP": 1, "f16 to f16 RZ": 1, "quad-pair RZ": 1, "fp8 wgmma RN": 1, "nvfp4 RN": 1, "f16 through f32": 15,
    "wmma f16 of f32 at once": 1, "fp8 of sm_89 12 bits of the result": 1, "fp8 wgmma all bits of the result": 1, "f16 in steps of 8": 1,
    "f16 of sm_80 in one step": 1, "tf32 in steps of 4": 1, "fp8 of sm_120 in steps of 16": 1, "fp8 wgmma in steps of 16": 3,
    "nvfp4 in steps of 32": 1, "nvfp4 in groups of 8": 14, "f16 of sm_80 backwards": 1, "quad-pair backwards": 1, "f64 backwards": 1,
    "fp8 of sm_90 without groups": 1, "fp8 of sm_90 from C on": 1, "fp8 of sm_90 as of ptxas 12.6": 1, "quad-pair in two chains": 1,
    "sparse fp8 of sm_90 without groups": 3, "zero is -0": 9, "quad-pair's zero products leave -0": 20, "f32 NaN 7fc00000": 3,
    "f16 NaN 7e00": 3, "infinity is the largest number": 3, "s32 clamps one early": 1, "subnormal operands are zero": 2,
    "metadata outside the defined are clamped": 19, "layout of A, t and g": 1, "layout of A, m and c": 1, "layout of A, m and p": 1,
    "layout of A, row half": 1, "layout of A, column": 1, "layout of C, t and g": 1, "layout of C, m and p": 1, "layout of B, t and g": 1,
    "layout of B, c and p": 1,
}  # fmt: skip
