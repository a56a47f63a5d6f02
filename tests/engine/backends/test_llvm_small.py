"""The LLVM kernel of small products, on matrices and on registers, and any steps of the other kernel, against the portable backend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases
from support.systems import skip_file

import tcemu
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.backends import portable
from tcemu.engine.backends.batched_calls import call_batched
from tcemu.engine.backends.llvm import llvm_programs, machine_code, xla_call
from tcemu.engine.backends.llvm.small_programs import find_matrix_kernel, find_register_kernel
from tcemu.engine.backends.product_requests import MatrixProduct
from tcemu.engine.instructions.register_products import warp_operands

skip_file(xla_call.missing())

MMA, KIND = "mma.sync.aligned.{}.row.col.f32.{}.{}.f32", "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{}.{}.f32"
CASES = [
    (MMA.format("m16n8k16", "f16", "f16"), "sm_80"),
    (MMA.format("m16n8k16", "bf16", "bf16"), "sm_90a"),
    (MMA.format("m16n8k32", "e4m3", "e5m2"), "sm_90a"),
    (MMA.format("m16n8k8", "f16", "f16"), "sm_75"),
    (MMA.format("m16n8k16", "f16", "f16"), "sm_90a"),
    (MMA.format("m16n8k8", "bf16", "bf16"), "sm_80"),
    (MMA.format("m16n8k4", "tf32", "tf32"), "sm_80"),
    (MMA.format("m16n8k8", "tf32", "tf32"), "sm_90a"),
    (MMA.format("m16n8k32", "e4m3", "e4m3"), "sm_89"),
    (MMA.format("m16n8k16", "e5m2", "e4m3"), "sm_120"),
    (KIND.format("e2m1", "e3m2"), "sm_120a"),
    (KIND.format("e2m3", "e5m2"), "sm_120a"),
]
BATCH = 2 * 16 + 3  # the last task is not full


def draw(rng, spec, shapes, share):
    """Codes of random bits. In the second half of the batch specials are rare, and C is near the products, subnormal or zero."""
    codes = []
    for fmt, shape in zip((spec.a, spec.b, spec.c), shapes, strict=True):
        x = rng.integers(0, 1 << fmt.bits, (BATCH, *shape), np.uint64).astype(fmt.dtype)
        half = x[BATCH // 2 :]
        field = (1 << fmt.exponent_bits) - 1 << (fmt.mantissa_bits + fmt.unused_bits)
        half[(half & field == field) & (rng.random(half.shape) < share)] = 0
        codes.append(x)
    c = codes[2][BATCH // 2 :]
    near = rng.integers(0x30000000, 0x48000000, c.shape, np.uint32) | rng.integers(0, 2, c.shape, np.uint32) << 31
    c[:] = np.choose(rng.integers(0, 4, c.shape), [c, near, c & 0x807FFFFF, c & 0x80000000])
    return codes


def operands_of(op, share=0.999):
    spec = product_spec(op)
    return draw(np.random.default_rng(7), spec, [(op.m, op.k), (op.k, op.n), (op.m, op.n)], share)


def expected_codes(own, a, b, c):
    product = MatrixProduct(own.model, product_spec(own.op), jnp.asarray(a), jnp.asarray(b), jnp.asarray(c), None)
    return np.asarray(jax.jit(portable.matrices_program(product), static_argnums=3)(product.a, product.b, product.c, None))


@pytest.mark.parametrize("case", sample_cases(CASES, CASES[2:3], " on ".join))  # the lattice of a step has the others
def test_kernels_have_the_bits_of_the_portable_backend(case):
    spelling, target = case
    op: Any = tcemu.parse(spelling)
    own = resolve_arithmetic(op, target)
    given = product_spec(op)
    model, spec = specialize(own.model, given, None)
    a, b, c = operands_of(op)
    expected = expected_codes(own, a, b, c)
    assert ((expected & 0x7F800000) == 0x7F800000).any() and ((expected & 0x7F800000) != 0x7F800000).any()
    narrow_registers = machine_code.host_target().without("avx512")
    for cpu in (None, narrow_registers):
        call = find_matrix_kernel(model, given, spec, op.m, op.n, cpu)
        assert call is not None
        np.testing.assert_array_equal(np.asarray(jax.jit(lambda *v, call=call: call_batched(call, *v))(a, b, c)), expected)
    assert find_register_kernel(model, given, spec, warp_operands(op)) is not None
    registers = [tcemu.pack(op, name, codes) for name, codes in zip("abc", (a, b, c), strict=True)]
    d = tcemu.mma(op, *registers, target=target)
    np.testing.assert_array_equal(np.asarray(tcemu.unpack(op, "d", d)), expected)


def test_operands_that_serve_the_whole_batch_and_vmap():
    op: Any = tcemu.parse(CASES[0][0])
    a, b, c = (tcemu.pack(op, name, codes) for name, codes in zip("abc", operands_of(op), strict=True))
    run = lambda *registers: tcemu.mma(op, *registers, target="sm_80")
    spread = jnp.broadcast_to(b[:1], b.shape)
    expected = np.asarray(run(a, spread, c))
    np.testing.assert_array_equal(np.asarray(run(a, b[0], c)), expected)
    np.testing.assert_array_equal(np.asarray(jax.vmap(run, (0, None, 0))(a, b[0], c)), expected)
    np.testing.assert_array_equal(np.asarray(run(a[3], b[0], c[3])), expected[3])


@pytest.mark.parametrize(
    ("spelling", "target"),
    [
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "sm_90"),
        ("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "sm_90"),
        ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0", "sm_120a"),
    ],
)
def test_other_instructions_are_left_to_matrices(spelling, target):
    op: Any = tcemu.parse(spelling)
    own, given = resolve_arithmetic(op, target), product_spec(op)
    model, spec = specialize(own.model, given, given.k // given.scale_vec if given.scale_vec else None)
    assert find_register_kernel(model, given, spec, warp_operands(op)) is None


STEP_CASES = [
    (MMA.format("m16n8k32", "e5m2", "e4m3"), "sm_89"),
    (CASES[1][0], "sm_90a"),
    (CASES[0][0], "sm_90a"),
    (MMA.format("m16n8k8", "tf32", "tf32"), "sm_80"),
    (MMA.format("m16n8k32", "e4m3", "e4m3"), "sm_120"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e5m2.f32.ue8m0", "sm_120a"),
]


@pytest.mark.parametrize("case", sample_cases(STEP_CASES, STEP_CASES[:1], " on ".join))
def test_any_steps_have_the_bits_of_the_portable_backend(case):
    """Of three matrices the first has random bits, the second some in a few steps, and the third some in a row and a column."""
    spelling, target = case
    op: Any = tcemu.parse(spelling)
    own, spec, rng = resolve_arithmetic(op, target), product_spec(op), np.random.default_rng(3)
    m, n, k = 70, 150, 6 * op.k
    operands = [rng.integers(0, 1 << fmt.bits, (3, *shape), np.uint64).astype(fmt.dtype)
                for fmt, shape in zip((spec.a, spec.b, spec.c), ((m, k), (k, n), (m, n)), strict=True)]  # fmt: skip
    usual = [
        np.asarray(tcemu.formats.from_float(fmt, rng.normal(0, 1, v.shape)))
        for fmt, v in zip((spec.a, spec.b, spec.c), operands, strict=True)
    ]
    for v, near, along in zip(operands, usual, (1, 0, 1), strict=True):
        at = np.arange(v.shape[1 + along])
        few = np.expand_dims((at // op.k % 3 == 1) & (at % 5 == 0), 1 - along) & (rng.random(v.shape[1:]) < 0.02)
        v[1] = np.where(few, v[1], near[1])
        kept = np.zeros(v.shape[1:], bool)
        kept[3], kept[:, 5] = rng.random(v.shape[2]) < 0.1, rng.random(v.shape[1]) < 0.1
        v[2] = np.where(kept, v[2], near[2])
    scales = None
    if spec.scale is not None:
        scales = tuple(jnp.asarray(rng.integers(64, 160, shape, np.uint8)) for shape in ((3, m, k // 32), (3, k // 32, n)))
        of_a, of_b = (v.at[0, :, 3].set(255).at[0, :, 5].set(0) for v in scales)
        scales = of_a, of_b
    a, b, c = map(jnp.asarray, operands)
    product = MatrixProduct(own.model, spec, a, b, c, scales)
    run = lambda backend: np.asarray(jax.jit(backend.matrices_program(product))(product.a, product.b, product.c, scales))
    found, expected = run(llvm_programs), run(portable)
    assert ((expected[1:] & 0x7F800000) != 0x7F800000).mean() > 0.3
    np.testing.assert_array_equal(found, expected)
