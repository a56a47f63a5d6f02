"""Kernels of fused steps in LLVM IR: for every arithmetic that they take, the bits of the portable backend."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.architectures.lookup import resolve_arithmetic
from tcemu.arithmetic.fitting import specialize
from tcemu.arithmetic.product_spec import product_spec
from tcemu.backends.batched_calls import call_batched
from tcemu.backends.dispatch import multiply_matrices
from tcemu.backends.llvm import machine_code, xla_call
from tcemu.backends.llvm.llvm_programs import StepCall, find_kernel
from tcemu.base.stored_programs import HOST_CALL_PREFIX
from tcemu.formats import F32, from_float

pytestmark = pytest.mark.skipif(bool(xla_call.missing()), reason=xla_call.missing() or "kernels can be called")

TARGETS = ("sm_70", "sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
NARROW, WIDE, FLOATS = "f16 in steps of 16 by 25", "bf16 in steps of 16 by 25", "e4m3 in steps of 32 by 13"
CALL = f"custom_call @{HOST_CALL_PREFIX}"  # in a program
SCALED = "e4m3 by e2m1 in steps of 32 by 25, scales of 32"


@cache
def arithmetics():
    """By name: the model and the spec of an arithmetic that a kernel takes, and the products that share a block scale."""
    found = {}
    for target in TARGETS:
        for op in tcemu.isa.instructions(target):
            if not isinstance(op, tcemu.isa.families.MatrixMultiply) or op.d != F32:
                continue
            try:
                model = resolve_arithmetic(op, target).model
            except tcemu.NotModelled:
                continue
            spec = product_spec(op)
            block = spec.k // spec.scale_vec if spec.scale_vec else 0
            model, spec = specialize(model, spec, block or None)
            of = spec.a.name if spec.a == spec.b else f"{spec.a} by {spec.b}"
            name = f"{of} in steps of {model.terms} by {model.fraction_bits}" + (f", scales of {block}" if block else "")
            if name not in found and isinstance(model.terms, int) and model.summed is None and takes_bounded_steps(model, spec, block):
                found[name] = model, spec, block
    return found


def takes_bounded_steps(model, spec, block):
    found = find_kernel(model, spec, block)
    return found is not None and found.kernel.name == "steps"


def draw_codes(rng, fmt, shape, kind):
    """Codes of a format: "bits" at random, "numbers" of like size, or "mixed": those with a few of the others among them."""
    bits = jnp.asarray(rng.integers(0, 1 << fmt.bits, shape).astype(fmt.dtype))
    numbers = from_float(fmt, jnp.asarray(rng.standard_normal(shape), jnp.float32)) if fmt.signed else None
    if numbers is None:
        numbers = jnp.asarray(rng.integers(120, 131, shape).astype(fmt.dtype))
    return {"bits": bits, "numbers": numbers, "mixed": jnp.where(rng.random(shape) < 0.002, bits, numbers)}[kind]


def draw_operands(spec, block, kind, batch=2, m=70, n=150, instructions=3):
    rng = np.random.default_rng(7)
    k = instructions * spec.k
    a, b = draw_codes(rng, spec.a, (1, m, k), kind), draw_codes(rng, spec.b, (batch, k, n), kind)
    c = jnp.where(rng.random((batch, m, n)) < 0.5, draw_codes(rng, F32, (batch, m, n), kind), 0)
    if not block:
        return a, b, c, None
    kinds = kind if kind == "bits" else "numbers"
    return a, b, c, tuple(draw_codes(rng, spec.scale, s, kinds) for s in ((1, m, k // block), (batch, k // block, n)))


def multiply(model, spec, block, operands, target=None, by_columns=False):
    """D by the kernel alone."""
    a, b, c, scales = operands
    found = find_kernel(model, spec, block, target, by_columns)
    assert found.by_columns == by_columns
    call, b = StepCall(found.kernel, block > 0, spec.d, by_columns), jnp.swapaxes(b, -1, -2) if by_columns else b
    return np.asarray(jax.jit(lambda *v: call_batched(call, *v))(a, b, c, *(scales or ())))


def multiply_portably(model, spec, operands):
    with tcemu.execution("portable"):
        return np.asarray(jax.jit(lambda a, b, c, scales: multiply_matrices(model, spec, a, b, c, scales))(*operands))


def names():
    return sorted(arithmetics()) if not xla_call.missing() else [NARROW]


@pytest.mark.parametrize("name", sample_cases(names(), [NARROW, WIDE, FLOATS, SCALED]))
def test_bits_are_those_of_the_portable_backend(name):
    model, spec, block = arithmetics()[name]
    older = machine_code.host_target().without("avx512", "avxvnni")
    for kind in ("bits", "numbers", "mixed"):
        operands = draw_operands(spec, block, kind)
        wanted = multiply_portably(model, spec, operands)
        for target, by_columns in ((None, False), (None, True), (older, kind == "mixed")):
            got = multiply(model, spec, block, operands, target, by_columns)
            np.testing.assert_array_equal(got, wanted, err_msg=f"{kind}, {target}, {by_columns}")


@pytest.mark.parametrize("shape", [(1, 1), (16, 8), (64, 128), (65, 129), (3, 300)], ids=str)
def test_any_size(shape):
    model, spec, block = arithmetics()[NARROW]
    operands = draw_operands(spec, block, "mixed", 1, *shape)
    np.testing.assert_array_equal(multiply(model, spec, block, operands), multiply_portably(model, spec, operands))


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


def test_gradients_and_products_of_a_model_are_the_same_without_kernels():
    x, w = np.random.default_rng(1).standard_normal((2, 40, 40), np.float32)
    loss = tcemu.emulate(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2), "fp8 on H100")
    got = jax.grad(loss)(w)
    with tcemu.execution("portable"):
        np.testing.assert_array_equal(jax.grad(loss)(w), got)
