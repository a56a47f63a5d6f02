"""Products of operands of two formats, with scales and with a bias: how these enter is found, near ways are told apart, others refused.

The kernels are simulated: `support/simulated_kernels.py` computes in NumPy floats and shares no line with the package.
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from oracles import simulated_kernels as sim
from support.sampling import sample_cases

from tcemu.formats import FORMATS
from tcemu.replay import ProductForm, dumps, loads
from tcemu.uses.replay.black_box import BlackBox
from tcemu.uses.replay.fingerprinting import fingerprint
from tcemu.uses.replay.recipe_results import ask_sample, count_mismatches

M, N, K = 16, 40, 256
MIXED = ("e5m2", "e4m3")
TENSOR, ROWS = ProductForm(scales="tensor"), ProductForm(scales="rows")
ROWS_BIAS, COLUMNS = ProductForm(scales="rows", bias="bf16"), ProductForm(bias="bf16")


class Planted(NamedTuple):
    fn: Callable
    dtype: str | tuple[str, str]
    form: ProductForm = ProductForm()
    said: tuple[str, ...] = ()  # parts of what the recipe says, or of why there is none
    k: int = K


def fp8(fmt, slices, merge=sim.add_in_order, out="f32", **options):
    return sim.tensor(fmt, out, slices, merge, core=sim.HOPPER_FP8, **options)


WHOLE = [list(range(K))]
E4M3 = fp8("e4m3", WHOLE)
BF16 = sim.tensor("bf16", "f32", sim.even(K, 2, 64))
F16 = sim.tensor("f16", "f32", WHOLE)


def scaled(scaling, adding=sim.added_last, total=E4M3, fmt="e4m3", out="bf16"):
    return sim.make_scaled_kernel(fmt, out, total, scaling, adding)


def of_format(name, then):
    """The total is rounded before the bias is added."""
    return lambda total, bias: then(sim.rounder(name)(total), bias)


def linear(alpha, beta, once):
    """CUTLASS's linear combination, beta · bias first; or alpha · total first."""
    alpha, beta = np.float64(np.float32(alpha)), np.float64(np.float32(beta))

    def adding(total, bias):
        bias, total = (np.array(x) for x in np.broadcast_arrays(bias, total))
        full = np.full_like(total, alpha)
        return sim.fma(full, total, sim.f32(beta * bias)) if once else sim.fma(np.full_like(bias, beta), bias, sim.f32(alpha * total))

    return adding


FOUND = {
    "e5m2 x e4m3": Planted(fp8(MIXED, WHOLE, out="bf16"), MIXED, said=("f32.e5m2.e4m3", "one slice")),
    "e4m3 x e5m2 in slices": Planted(
        fp8(MIXED[::-1], sim.even(768, 2, 128), out="bf16"), MIXED[::-1], said=("f32.e4m3.e5m2", "2 slices of 384"), k=768
    ),
    "e5m2 x e4m3, restarted": Planted(fp8(MIXED, WHOLE, out="bf16", restart=128), MIXED, said=("every 128",)),
    "e5m2 x e4m3, 14 bits": Planted(
        sim.tensor(MIXED, "f32", WHOLE, core=sim.Core(14, 13)), MIXED, said=("fraction_bits=14", "e5m2 x e4m3 -> f32")
    ),
    "one scale each": Planted(scaled(sim.folded), "e4m3", TENSOR, ("scale_a · scale_b, by fma", "scales tensor")),
    "one scale each, by multiplication": Planted(scaled(sim.folded_plainly), "e4m3", TENSOR, ("scale_a · scale_b, by multi",)),
    "one scale each, A's first": Planted(scaled(sim.a_first), "e4m3", TENSOR, ("scale_a, then scale_b, by multi",)),
    "mixed, one scale each": Planted(
        scaled(sim.folded, total=fp8(MIXED, WHOLE), fmt=MIXED), MIXED, TENSOR, ("e5m2.e4m3", "scale_a · scale_b, by fma")
    ),
    "scales of rows": Planted(scaled(sim.a_first), "e4m3", ROWS, ("scale_a, then scale_b, by multi", "scales rows")),
    "scales of rows, B's first": Planted(scaled(sim.b_first), "e4m3", ROWS, ("scale_b, then scale_a, by multi",)),
    "scales of rows, folded": Planted(scaled(sim.folded), "e4m3", ROWS, ("scale_a · scale_b, by fma",)),
    "scales of rows, f32 out": Planted(scaled(sim.a_first, out="f32"), "e4m3", ROWS, ("scale_a, then scale_b, by multi",)),
    "scales and bias, one rounding": Planted(
        sim.fused(sim.a_first)("e4m3", "bf16", E4M3), "e4m3", ROWS_BIAS, ("scale_a, then scale_b", "in one rounding", "bias bf16 columns")
    ),
    "scales and bias, two roundings": Planted(scaled(sim.a_first), "e4m3", ROWS_BIAS, ("scale_a, then scale_b, by multi",)),
    "scale and bias, one rounding": Planted(
        sim.fused(sim.folded)("e4m3", "bf16", E4M3), "e4m3", ProductForm("tensor", "bf16"), ("scale_a · scale_b", "in one rounding")
    ),
    "scale and bias, rounded before": Planted(
        scaled(sim.folded, of_format("bf16", sim.added_last)), "e4m3", ProductForm("tensor", "bf16"), ("rounded to bf16 before a bias",)
    ),
    "bias": Planted(scaled(None, total=BF16, fmt="bf16"), "bf16", COLUMNS, ("as it is, rounded", "bias bf16 columns")),
    "bias in f32": Planted(scaled(None, total=BF16, fmt="bf16"), "bf16", ProductForm(bias="f32"), ("as it is, rounded", "bias f32")),
    "bias of outputs, rounded before": Planted(
        scaled(None, of_format("f16", sim.added_last), F16, "f16", "f16"), "f16",
        ProductForm(bias="f16", bias_shape="outputs"), ("rounded to f16 before",),
    ),
    "alpha and beta": Planted(
        scaled(None, linear(1.7, 0.3, once=False), F16, "f16", "f16"), "f16",
        ProductForm(bias="f16", bias_shape="outputs", alpha=1.7, beta=0.3),
        ("times 1.7 · ", "plus 0.3 · bias"),
    ),
    "alpha and beta, as CUTLASS": Planted(
        scaled(None, linear(1.7, 0.3, once=True), F16, "f16", "f16"), "f16",
        ProductForm(bias="f16", bias_shape="outputs", alpha=1.7, beta=0.3),
        ("times 1.7 · ", "in one rounding"),
    ),
    "beta": Planted(
        scaled(None, linear(1, -0.3, once=False), F16, "f16", "f16"), "f16",
        ProductForm(bias="f16", beta=-0.3), ("as it is, plus -0.3 · bias",),
    ),
}  # fmt: skip


def bias_of_sums(a, b, bias):
    """The accumulator begins at the bias."""
    running = np.broadcast_to(bias.astype(np.float64), (len(a), b.shape[1]))
    for places in sim.split_steps(range(K), 16):
        running = sim.core_step(sim.HOPPER, "bf16", a[:, places].astype(np.float64), b[places].astype(np.float64), running)
    return running.astype(np.float32).astype(ml_dtypes.bfloat16)


def slices_scaled(a, b, scale_a, scale_b):
    """Each slice is scaled before they are added."""
    x, y = scale_a.astype(np.float64), scale_b.astype(np.float64)
    sums = [fp8("e4m3", [part])(a, b).astype(np.float64) for part in sim.even(K, 2, 128)]
    with np.errstate(over="ignore", invalid="ignore"):
        return sim.add_in_order([sim.a_first(s, x, y) for s in sums]).astype(np.float32).astype(ml_dtypes.bfloat16)


NONE = ("no candidate explains",)
REFUSED = {
    "a bias that sums begin with": Planted(bias_of_sums, "bf16", COLUMNS, NONE),
    "slices that are scaled": Planted(slices_scaled, "e4m3", ROWS, NONE),
    "both scales in one rounding": Planted(scaled(sim.rounded_once), "e4m3", ROWS, NONE),
    "subnormal numbers are flushed": Planted(scaled(sim.flushing), "e4m3", ROWS, NONE),
    "the scale of A alone": Planted(scaled(lambda d, a, b: sim.f32(d * a)), "e4m3", TENSOR, NONE),
    "a bias twice rounded": Planted(scaled(None, of_format("f16", sim.added_last), BF16, "bf16"), "bf16", COLUMNS, ("undetermined",)),
}
USUAL = ("alpha and beta, as CUTLASS",)
CHEAP = ("a bias that sums begin with",)


@pytest.mark.parametrize("name", sample_cases(FOUND, USUAL, str))
def test_forms_are_found(name):
    planted = FOUND[name]
    found = fingerprint(planted.fn, M, N, planted.k, operand_dtype=planted.dtype, form=planted.form)
    assert found.recipe is not None, str(found)
    assert all(said in " ".join(str(found.recipe).split()) for said in planted.said), str(found)
    held = (planted.dtype,) * 2 if isinstance(planted.dtype, str) else planted.dtype
    box = BlackBox(planted.fn, (M, N, planted.k), tuple(FORMATS[fmt] for fmt in held), "numpy", None, 64, planted.form)  # pyright: ignore[reportArgumentType]
    how = None if planted.form.is_plain else "mild"
    assert [count_mismatches(found.recipe, ask_sample(box, kind, 77, how, found.recipe)) for kind in ("flat", "late")] == [0, 0]
    assert found.calls <= 64 and loads(dumps(found.recipe)).conditions == found.recipe.conditions


@pytest.mark.parametrize("name", sample_cases(REFUSED, CHEAP, str))
def test_other_ways_are_refused(name):
    planted = REFUSED[name]
    found = fingerprint(planted.fn, M, N, planted.k, operand_dtype=planted.dtype, form=planted.form)
    assert found.recipe is None, str(found)
    assert all(said in " ".join(str(found).split()) for said in planted.said), str(found)
