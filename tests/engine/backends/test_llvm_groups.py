"""Kernels of groups and of general steps in LLVM IR: for every arithmetic that they take, the bits of the portable backend."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from support.llvm_products import (
    Arithmetic,
    arithmetics,
    draw_operands,
    multiply_by_kernel,
    multiply_portably,
)
from support.sampling import sample_cases
from support.systems import skip_file

from tcemu.engine.arithmetic.model import what_if
from tcemu.engine.backends.llvm import machine_code, xla_call

skip_file(xla_call.missing())

NVFP4, MXFP4 = (f"e2m1 in steps of 64 by 35, {scales}" for scales in ("ue4m3 scales of 16", "ue8m0 scales of 32"))
F16, CHAINED = "f16 in steps of 16 by 25 to f16", "e4m3 as f16 in steps of 16 by 25"
ROUNDED_AGAIN = "f16 in steps of 16 by 25, C f32, D f16"
USUAL = (NVFP4,)
GENERAL = "f16 in steps of 16 by 25"
CHANGES = (  # arithmetics that no GPU has, by the arithmetic that is changed
    (GENERAL, "rounding=RN"),
    (GENERAL, "rounding=RM,alignment=RP"),
    (GENERAL, "terms=6,groups=2,nan=4294967295"),
    (GENERAL, "terms=12,chain=k,alignment=RN"),
    (GENERAL, "floor=20,fraction_bits=3"),
    ("tf32 in steps of 8 by 25", "fraction_bits=33,alignment=RM"),
    ("bf16 in steps of 16 by 25", "chain=32,rounding=RP,alignment=RN"),
    ("e4m3 in steps of 32 by 13", "rounding=RN,result_bits=11"),
    ("e4m3 in steps of 32 by 25, ue8m0 scales of 32", "terms=12,groups=2"),
    (F16, "result_bits=7,rounding=RP"),
    (F16, "terms=1,alignment=RN"),
    (CHAINED, "together=True,chain=16"),
    (NVFP4, "terms=48"),
    (NVFP4, "terms=32,result_bits=17"),
    (NVFP4, "fraction_bits=40,rounding=RN"),
    (MXFP4, "summed=32,chain=k,alignment=RM"),
)
USUAL_CHANGES = (CHANGES[1],)


def names():
    if xla_call.missing():
        return USUAL
    return sorted(name for name, arithmetic in arithmetics().items() if arithmetic.kernel_name in ("groups", "general"))


def change(name, changes):
    arithmetic = arithmetics()[name]
    return Arithmetic(what_if(arithmetic.model, changes), arithmetic.spec, arithmetic.block)


def assert_same(arithmetic, *kinds, target=None, **sizes):
    for kind in kinds:
        operands = draw_operands(arithmetic, kind, **sizes)
        wanted = multiply_portably(arithmetic, operands)
        for by_columns in (False, True):
            got = multiply_by_kernel(arithmetic, operands, target, by_columns)
            np.testing.assert_array_equal(got, wanted, err_msg=f"{kind}, B by columns: {by_columns}")


@pytest.mark.full
def test_six_groups_in_a_step():
    of_nvfp4 = arithmetics()[NVFP4]
    model, spec = replace(of_nvfp4.model, terms=96), of_nvfp4.spec._replace(k=96, scale_vec=6)
    assert_same(Arithmetic(model, spec, 16), "mixed", m=17, n=33)


@pytest.mark.parametrize("name", sample_cases(names(), USUAL))
def test_bits_are_those_of_the_portable_backend(name):
    assert_same(arithmetics()[name], "bits", "numbers", "mixed")


@pytest.mark.parametrize("case", sample_cases(CHANGES, USUAL_CHANGES, ids=": ".join))
def test_other_models(case):
    assert_same(change(*case), "bits", "numbers", "mixed", m=33, n=21)


@pytest.mark.parametrize("name", sample_cases((NVFP4, MXFP4, F16, CHAINED, ROUNDED_AGAIN), [NVFP4]))
def test_older_cpus(name):
    assert_same(arithmetics()[name], "mixed", target=machine_code.host_target().without("avx512vnni"))


@pytest.mark.parametrize("shape", sample_cases([(1, 1), (16, 8), (64, 128), (65, 129), (3, 300)], [(3, 300)], ids=str))
def test_any_size_of_groups(shape):
    m, n = shape
    assert_same(arithmetics()[NVFP4], "mixed", batch=1, m=m, n=n)


@pytest.mark.full
def test_subnormal_accumulators_of_chains():
    """A chain of zeros is added to C, and one that is not zero to a subnormal C."""
    a, b, c, _ = draw_operands(arithmetics()[CHAINED], "numbers", m=33, n=21)
    c = jnp.asarray(np.random.default_rng(2).integers(0, 1 << 24, c.shape).astype(np.uint32)) | (c & np.uint32(1 << 31))
    for x in (a, jnp.zeros_like(a)):
        operands = x, b, c, None
        got = multiply_by_kernel(arithmetics()[CHAINED], operands)
        np.testing.assert_array_equal(got, multiply_portably(arithmetics()[CHAINED], operands))
    assert ((got & 0x7FFFFFFF) < 1 << 23).any()


@pytest.mark.parametrize("name", sample_cases((NVFP4, MXFP4), [NVFP4]))
def test_groups_far_apart_in_size(name):
    """Scales of many binades, values that are zero in whole groups, and accumulators of every size."""
    arithmetic, rng = arithmetics()[name], np.random.default_rng(3)
    a, b, c, _ = draw_operands(arithmetic, "numbers")
    a = jnp.where(rng.random(a.shape) < 0.5, a, 0).at[:, 3:9, 16:40].set(0)
    b = jnp.where(rng.random(b.shape) < 0.5, b, 0)
    c = jnp.asarray(np.ldexp(rng.standard_normal(c.shape), rng.integers(-60, 60, c.shape)).astype(np.float32)).view(jnp.uint32)
    for low, high in ((0, 127), (85, 165)) if arithmetic.spec.scale.mantissa_bits == 0 else ((0, 127), (1, 9)):
        sizes = ((1, 70, a.shape[-1] // arithmetic.block), (2, a.shape[-1] // arithmetic.block, 150))
        operands = a, b, c, tuple(jnp.asarray(rng.integers(low, high, size).astype(np.uint8)) for size in sizes)
        np.testing.assert_array_equal(multiply_by_kernel(arithmetic, operands), multiply_portably(arithmetic, operands))


def test_what_no_kernel_takes():
    arithmetic = arithmetics()[GENERAL]
    exact = replace(arithmetic.model, fraction_bits=None)
    assert not arithmetic._replace(model=exact).kernel_name
    assert not arithmetic._replace(model=replace(arithmetic.model, fraction_bits=jnp.int32(20))).kernel_name
    assert arithmetic._replace(model=replace(arithmetic.model, rounding="RN")).kernel_name == "general"
