"""The rows of floats: syntax (PTX ISA 9.1) and what makes the `Operation`. A name with several rows has a word behind a point."""

from __future__ import annotations

from functools import partial

from tcemu.ptx.scalar import approximate, conversions, floats, narrow
from tcemu.ptx.scalar.syntax import Row, row, shaped

HALF = "f16|f16x2"
BRAIN = "bf16|bf16x2"
ROUNDED = "rn|rz|rm|rp"
SUM = (f"{ROUNDED}? ftz? sat? f32", f"{ROUNDED}? f64", f"rn? ftz? sat? {HALF}", f"rn? {BRAIN}", f"{ROUNDED}? ftz? f32x2")
FUSED = (
    f"{ROUNDED} ftz? sat? f32", f"{ROUNDED} f64", f"rn ftz? sat? {HALF}", f"rn ftz? relu {HALF}", f"rn relu? {BRAIN}",
    f"rn oob relu? {HALF}|{BRAIN}", f"{ROUNDED} ftz? f32x2",
)  # fmt: skip
MIXED = f"{ROUNDED}? sat? f32 f16|bf16"
EXACT = (f"{ROUNDED} ftz? f32", f"{ROUNDED} f64")
SIGNED = ("ftz? f32", "f64", f"ftz? {HALF}", BRAIN)
EXTREMUM = (
    "ftz? NaN? abs? f32", "ftz? NaN? xorsign abs f32", "f64", f"ftz? NaN? {HALF}", f"ftz? NaN? xorsign abs {HALF}", f"NaN? {BRAIN}",
    f"NaN? xorsign abs {BRAIN}",
)  # fmt: skip
NUMBERS = "u8|u16|u32|u64|s8|s16|s32|s64|bf16|f16|f32|f64"
BYTES = "e4m3x2|e5m2x2"
QUADS = "e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4"
SMALL = "e2m1x2|e2m3x2|e3m2x2"
NARROW = (f"rn satfinite relu? {BYTES} f32|f16x2", f"rn satfinite relu? {SMALL} f32", "rn satfinite relu? e2m1x2 f16x2")

FLOAT_ROWS: dict[str, Row] = {
    "add": row(SUM, floats.add),
    "sub": row(SUM, floats.subtract),
    "mul": row(SUM, floats.multiply),
    "fma": row(FUSED, floats.multiply_add),
    "mad": row((f"{ROUNDED} ftz? sat? f32", f"{ROUNDED} f64"), floats.multiply_add),
    "add.mixed": row(MIXED, floats.mixed_add),
    "sub.mixed": row(MIXED, floats.mixed_subtract),
    "fma.mixed": row(f"{ROUNDED} sat? f32 f16|bf16", floats.mixed_multiply_add),
    "div": row(EXACT, floats.divide),
    "div.full": row("full ftz? f32", approximate.correctly_rounded(floats.divide)),
    "div.approx": row("approx ftz? f32", approximate.divide),
    "rcp": row(EXACT, floats.reciprocal),
    "rcp.approx": row("approx ftz? f32", approximate.correctly_rounded(floats.reciprocal)),
    "rcp.upper": row("approx ftz f64", approximate.upper_word(floats.reciprocal)),
    "sqrt": row(EXACT, floats.square_root),
    "sqrt.approx": row("approx ftz? f32", approximate.correctly_rounded(floats.square_root)),
    "rsqrt": row(("approx ftz? f32", "approx f64"), approximate.rsqrt),
    "rsqrt.upper": row("approx ftz f64", approximate.upper_word(approximate.rsqrt)),
    "sin": row("approx ftz? f32", approximate.sine),
    "cos": row("approx ftz? f32", approximate.cosine),
    "lg2": row("approx ftz? f32", approximate.logarithm),
    "ex2": row(("approx ftz? f32", f"approx {HALF}", f"approx ftz {BRAIN}"), approximate.exponential),
    "tanh": row(f"approx f32|{HALF}|{BRAIN}", approximate.hyperbolic_tangent),
    "abs": row(SIGNED, floats.absolute),
    "neg": row(SIGNED, floats.negate),
    "min": shaped(EXTREMUM, partial(floats.extremum, least=True)),
    "max": shaped(EXTREMUM, partial(floats.extremum, least=False)),
    # 9.7.9.21, 9.7.9.22
    "cvt": row(f"rni|rzi|rmi|rpi|{ROUNDED}? ftz? sat? {NUMBERS} {NUMBERS}", conversions.scalar),
    "cvt.finite": row("rn|rz relu? satfinite? f16|bf16 f32", conversions.scalar),
    "cvt.pair": row("rn|rz relu? satfinite? f16x2|bf16x2 f32", conversions.pairs),
    "cvt.tf32": row(("rna satfinite? tf32 f32", "rn|rz satfinite? relu? tf32 f32"), conversions.to_tf32),
    "cvt.narrow": row(NARROW, narrow.to_narrow),
    "cvt.scale": row("rz|rp satfinite? ue8m0x2 f32|bf16x2", narrow.to_scale),
    "cvt.stochastic": row(("rs relu? satfinite? f16x2|bf16x2 f32", f"rs relu? satfinite {QUADS} f32"), narrow.stochastic),
    "cvt.wide": row((f"rn relu? f16x2 {BYTES}|{SMALL}", "rn bf16x2 ue8m0x2"), narrow.from_narrow),
    "cvt.pack": row(
        ("pack sat u16|s16 s32", "pack sat u8|s8|u4|s4|u2|s2 s32 b32"), conversions.packed
    ),
}  # fmt: skip
