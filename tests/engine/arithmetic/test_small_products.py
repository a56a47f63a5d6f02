"""Small products with the batch as the minor axis give the bits of `reduce_k`, on operands that fuzzing draws, Inf and NaN among them."""

import jax
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reduction import reduce_k
from tcemu.engine.arithmetic.small_products import FEWEST_PRODUCTS, are_small_products, reduce_small_products
from tcemu.engine.formats.coding import recode
from tcemu.fuzz import generate

MMA = "mma.sync.aligned."
F16, FP8 = MMA + "m16n8k16.row.col.f32.f16.f16.f32", MMA + "m16n8k32.row.col.f32.e4m3.e5m2.f32"
BF16 = MMA + "m16n8k16.row.col.f32.bf16.bf16.f32"
CASES = [  # the first has groups, a chain and a conversion, the second several steps
    (FP8, "sm_90a"),
    (BF16, "sm_80"),
    (FP8, "sm_89"),
    (FP8, "sm_120a"),
    (BF16, "sm_90a"),
    (F16, "sm_80"),
    (F16, "sm_90a"),
    (MMA + "m8n8k4.row.col.f32.f16.f16.f16", "sm_70"),
    (MMA + "m16n8k8.row.col.f32.tf32.tf32.f32", "sm_90a"),
]


@pytest.mark.parametrize("case", sample_cases(CASES, CASES[:1], " on ".join))
def test_small_products_are_those_of_the_reduction(case):
    op, target = tcemu.parse(case[0]), case[1]
    given = product_spec(op)
    model, spec = specialize(resolve_arithmetic(op, target).model, given, None)
    count = FEWEST_PRODUCTS + 3  # the last block is filled up
    a, b, c = (generate(op, 47, 0, count)[name] for name in "abc")
    assert are_small_products(model, spec, c.shape, op.k)
    by_reduction = jax.jit(
        lambda a, b, c: reduce_k(
            model, spec, recode(given.a, spec.a, a), recode(given.b, spec.b, b), recode(given.c, model.result, c), None
        )
    )
    found, expected = (np.asarray(v) for v in (reduce_small_products(model, given, spec, a, b, c), by_reduction(a, b, c)))
    assert (found == expected).all() and len(np.unique(expected)) > count


def test_other_products_are_left_to_the_reduction():
    op = tcemu.parse(F16)
    model, spec = specialize(resolve_arithmetic(op, "sm_90a").model, product_spec(op), None)
    assert are_small_products(model, spec, (FEWEST_PRODUCTS, 16, 8), 16)
    assert not are_small_products(model, spec, (FEWEST_PRODUCTS - 1, 16, 8), 16)
    assert not are_small_products(model, spec, (FEWEST_PRODUCTS, 16, 8), 32)
    assert not are_small_products(model, spec, (FEWEST_PRODUCTS, 64, 8), 16)
    assert not are_small_products(model.replace(chain="k", together=True), spec, (FEWEST_PRODUCTS, 16, 8), 16)
