"""Kernels of fused steps in LLVM IR: for every arithmetic that they take, the bits of the portable backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llvm_products import Arithmetic, arithmetics, draw_operands, multiply_by_kernel, multiply_portably, older_target
from support.sampling import sample_cases
from support.systems import skip_file

import tcemu
from tcemu.base.stored_code import HOST_CALL_PREFIX
from tcemu.engine.backends.llvm import xla_call
from tcemu.formats import E4M3, UE4M3, Format

skip_file(xla_call.missing())

NARROW, WIDE, FLOATS = "f16 in steps of 16 by 25", "bf16 in steps of 16 by 25", "e4m3 in steps of 32 by 13"
CALL = f"custom_call @{HOST_CALL_PREFIX}"  # in a program
SCALED = "e4m3 by e2m1 in steps of 32 by 25, ue8m0 scales of 32"


def names():
    if xla_call.missing():
        return [NARROW, WIDE, FLOATS, SCALED]
    return sorted(name for name, arithmetic in arithmetics().items() if arithmetic.kernel_name == "steps")


@pytest.mark.parametrize("name", sample_cases(names(), [SCALED]))  # tests below have more, and the lattice of a step has all
def test_bits_are_those_of_the_portable_backend(name):
    arithmetic = arithmetics()[name]
    for kind in ("bits", "numbers", "mixed", "finite"):
        operands = draw_operands(arithmetic, kind)
        wanted = multiply_portably(arithmetic, operands)
        for target, by_columns in ((None, False), (None, True), (older_target(), kind == "mixed")):
            got = multiply_by_kernel(arithmetic, operands, target, by_columns)
            np.testing.assert_array_equal(got, wanted, err_msg=f"{kind}, {target}, {by_columns}")


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(arithmetics()))
def test_a_million_outputs(name):
    arithmetic = arithmetics()[name]
    for kind in ("bits", "mixed", "finite"):
        operands = draw_operands(arithmetic, kind, 1, 1000, 1000)
        np.testing.assert_array_equal(multiply_by_kernel(arithmetic, operands), multiply_portably(arithmetic, operands), err_msg=kind)


def test_any_size():
    a, b, c, _ = draw_operands(arithmetics()[NARROW], "mixed", 1, 65, 300)
    wanted = multiply_portably(arithmetics()[NARROW], (a, b, c, None))
    for m, n in ((1, 1), (16, 8), (64, 128), (65, 129), (3, 300)):
        operands = a[:, :m], b[..., :n], c[:, :m, :n], None
        np.testing.assert_array_equal(multiply_by_kernel(arithmetics()[NARROW], operands), wanted[:, :m, :n], err_msg=f"{m} x {n}")


def test_a_zero_without_subnormals():
    fmt = Format("flat", 5, 4, 0, 8, specials="fnuz", subnormals=False)
    model, spec, block = arithmetics()[FLOATS]
    arithmetic = Arithmetic(model, spec._replace(a=fmt, b=fmt), block)
    for kind in ("bits", "numbers"):
        operands = draw_operands(arithmetic, kind)
        np.testing.assert_array_equal(multiply_by_kernel(arithmetic, operands), multiply_portably(arithmetic, operands))


def test_factors_without_a_sign():
    """Of A and of B. On a CPU with AVX-512, signs choose a plane of values."""
    model, spec, block = arithmetics()[FLOATS]
    for a, b in ((UE4M3, E4M3), (E4M3, UE4M3)):
        arithmetic = Arithmetic(model, spec._replace(a=a, b=b), block)
        operands = draw_operands(arithmetic, "bits")
        np.testing.assert_array_equal(multiply_by_kernel(arithmetic, operands), multiply_portably(arithmetic, operands))


def test_public_functions_use_the_kernel():
    op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    assert tcemu.backends.describe(op, target="H100")["llvm"] == ""
    a, b = np.random.default_rng(0).standard_normal((2, 5, 48, 48), np.float32)
    product = jax.jit(jax.vmap(lambda a, b: tcemu.gemm(a, b, op=op, target="H100")))
    assert CALL in product.lower(a, b).as_text()
    with tcemu.execution("portable"):
        assert CALL not in product.lower(a, b).as_text()
        wanted = product(a, b)
    np.testing.assert_array_equal(product(a, b), wanted)


def test_what_no_kernel_takes_is_said():
    describe = lambda op, target: tcemu.backends.describe(op, target=target)["llvm"]
    assert describe("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "sm_90a") == "it does not take this arithmetic"
    with tcemu.execution("portable"):
        assert describe("f16", "sm_90a") == 'execution("portable") uses no kernels'


@pytest.mark.full
def test_gradients_and_products_of_a_model_are_the_same_without_kernels():
    x, w = np.random.default_rng(1).standard_normal((2, 40, 40), np.float32)
    loss = tcemu.emulate(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2), "fp8 on H100")
    got = jax.grad(loss)(w)
    with tcemu.execution("portable"):
        np.testing.assert_array_equal(jax.grad(loss)(w), got)
