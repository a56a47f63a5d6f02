"""D in blocks: the same bits as in one piece, one compilation, memory of the matrices alone; and the cut to f32 that ends a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.arithmetic import reduction as blocks
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.step.jax_values import codes_of, conditions, integers
from tcemu.engine.arithmetic.step.rounding import Magnitude, encode_truncated
from tcemu.engine.arithmetic.step.values import I32
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.formats import F32, Number, encode_limbs

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
F16_F16 = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"


@pytest.mark.parametrize(
    ("op", "a", "b", "c", "elements"),
    [
        pytest.param(F16, (21, 80), (80, 37), (21, 37), 16, marks=pytest.mark.full),
        (F16, (3, 5, 32), (3, 32, 37), (3, 5, 37), 160),
        pytest.param(F16, (3, 5, 16), (3, 16, 11), (3, 5, 11), 16, marks=pytest.mark.full),
        pytest.param(F16_F16, (3, 1, 5, 32), (2, 32, 19), (3, 2, 5, 19), 16, marks=pytest.mark.full),
        pytest.param(F16_F16, (3, 1, 5, 32), (2, 32, 37), (3, 2, 5, 37), 160, marks=pytest.mark.full),
    ],
)
def test_blocks_change_no_bit(monkeypatch, op, a, b, c, elements):
    """Blocks of 8 columns and 2 rows, or of 5 rows and 3 of them side by side, the last ones not full, against D in one piece."""
    op = tcemu.parse(op)
    rng = np.random.default_rng(0)
    codes = [tcemu.formats.from_float(fmt, rng.standard_normal(shape)) for fmt, shape in ((op.a, a), (op.b, b), (op.c, c))]
    codes[0] = codes[0].at[..., 3, 2].set(op.a.infinity)
    codes[1] = codes[1].at[..., 2, 1].set(op.b.nan)
    product = lambda: jax.jit(lambda *codes: multiply_matrices(find_row(op, "sm_90").model, product_spec(op), *codes))(*codes)
    whole = np.asarray(product())
    monkeypatch.setattr(blocks, "COLUMNS", 8)
    monkeypatch.setattr(blocks, "ELEMENTS", elements)
    assert np.array_equal(np.asarray(product()), whole)
    assert {int(v) for v in whole[..., 3, :2].ravel()} >= {op.d.nan}


@pytest.mark.parametrize("name", sample_cases(["f16", "bf16"], ["bf16"]))
def test_one_block_where_a_matrix_serves_the_whole_batch(monkeypatch, name):
    """As on other devices, where all of D is one block. The batch is not as long as there are steps."""
    a, b = np.random.default_rng(3).standard_normal((2, 5, 64, 64), np.float32)
    gemm = lambda a, b: jax.jit(lambda a, b: tcemu.gemm(a, b, op=name, target="sm_80"))(a, b)
    wanted = gemm(a, b[0]), gemm(a[0], b)
    monkeypatch.setattr(blocks, "call_by_platform", lambda programs, default, *operands: default(*operands))
    jax.clear_caches()
    for got, expected in zip((gemm(a, b[0]), gemm(a[0], b)), wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_every_block_is_full_but_the_last():
    for size in range(1, 600):
        tile = blocks._even_tile(size, 128)
        assert tile <= 128 and -(-size // tile) == -(-size // 128)


def test_a_gemm_is_compiled_once():
    rng = np.random.default_rng(0)
    model = tcemu.list_models("sm_90")["mma f16 to f32"]
    compiled = []
    listen = lambda event, _, fun_name="", **more: compiled.append(fun_name) if event.endswith("backend_compile_duration") else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    for bits, value in ((25, 1.0), (20, np.nan), (23, 0.0)):
        a, b = rng.standard_normal((2, 16, 48), np.float32) * value, rng.standard_normal((48, 24), np.float32)
        tcemu.gemm(a, b, op=F16, target="sm_90", model=model.replace(fraction_bits=jnp.int32(bits)))
    jax.monitoring.unregister_event_duration_listener(listen)
    assert len([name for name in compiled if "_gemm" in name]) == 1


def test_memory_is_that_of_the_matrices():
    """Nothing of size M x N x K: 512 times less is allowed."""
    m, n, k = 640, 512, 1536
    a, b = jax.ShapeDtypeStruct((m, k), jnp.float32), jax.ShapeDtypeStruct((k, n), jnp.float32)
    compiled = jax.jit(lambda a, b: tcemu.gemm(a, b, op=F16, target="sm_90")).lower(a, b).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 32 * (m * n + m * k + n * k)


@pytest.mark.parametrize("result_bits", [None, 13])
def test_the_cut_to_f32_is_that_of_encode(result_bits):
    """All magnitudes of two set bits and of a run of ones, and random ones, by every unit that matters."""
    rng = np.random.default_rng(0)
    two = [1 << i | 1 << j for i in range(32) for j in range(32)]
    runs = [(1 << i) - (1 << j) for i in range(33) for j in range(i)]
    magnitude = np.array([0, *two, *runs, *(rng.integers(0, 2**32, 1000) >> rng.integers(0, 32, 1000))], np.uint32)
    units = np.concatenate([np.arange(-190, -110), [-1, 0, 3], np.arange(90, 135), [1 << 20]])
    magnitude, unit = (np.ravel(v) for v in np.meshgrid(magnitude, units.astype(np.int32)))
    negative, never = np.arange(unit.size) % 3 == 0, np.zeros(unit.size, bool)
    number = Number(negative, (jnp.asarray(magnitude),), jnp.asarray(unit), never, never)

    @jax.jit
    def both(number):
        (want,) = encode_limbs(F32, number, "RZ", overflow="infinity", signed_zero=False, fraction_bits=result_bits)
        total = Magnitude(conditions(number.negative).resize(I32), integers(number.magnitude[0]))
        return codes_of(encode_truncated(total, integers(number.exponent), 23 if result_bits is None else result_bits)), want

    found, want = both(number)
    assert np.array_equal(found, want)
