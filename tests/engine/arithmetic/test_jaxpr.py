"""What the compiler is given: no float operation but those proved exact, and no gather where only digits move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases
from support.traced_programs import EXACT, MOVES, equations, float_operations

import tcemu

DENSE = sorted({str(op) for op in tcemu.isa.instructions("sm_90", family="mma")})


def registers(op):
    return [jax.ShapeDtypeStruct((2, 32, op.register_count(name)), jnp.uint32) for name in "abc"]


@pytest.mark.parametrize("spelling", sample_cases(DENSE, 9))
def test_only_exact_float_operations(spelling):
    op = tcemu.parse(spelling)
    jaxpr = jax.make_jaxpr(lambda *words: tcemu.mma(op, *words, target="sm_90"))(*registers(op)).jaxpr
    assert float_operations(jaxpr) - MOVES <= set(EXACT)


def test_the_wide_and_traced_path_too():
    op = tcemu.parse("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")

    def swept(a, b, bits, terms):
        model = tcemu.list_models("sm_90")["mma f16 to f32"].replace(fraction_bits=bits, terms=terms)
        return tcemu.gemm(a, b, op=op, target="sm_90", model=model)

    one = jax.ShapeDtypeStruct((), jnp.int32)
    matrix = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    found = float_operations(jax.make_jaxpr(swept)(matrix, matrix, one, one).jaxpr) - MOVES
    assert found <= set(EXACT) and "sub" in found


def test_the_truncation_by_addition_too():
    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    op = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
    found = float_operations(jax.make_jaxpr(lambda a, b: tcemu.gemm(a, b, op=op, target="sm_90a"))(matrix, matrix).jaxpr) - MOVES
    assert found <= set(EXACT) and {"add", "abs"} <= found


def test_the_list_names_nothing_that_is_not_used():
    used = set()
    for spelling in ("m16n8k16.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k32.row.col.s32.s8.s8.s32"):
        op = tcemu.parse("mma.sync.aligned." + spelling)
        used |= float_operations(jax.make_jaxpr(lambda *words, op=op: tcemu.mma(op, *words, target="sm_90"))(*registers(op)).jaxpr)
    assert set(EXACT) - {"add", "sub", "abs"} <= used


@pytest.mark.parametrize("spelling", sample_cases(DENSE, 4))
def test_pack_and_unpack_gather_nothing(spelling):
    op = tcemu.parse(spelling)
    for name, words in zip("abc", registers(op), strict=True):
        unpacked = jax.make_jaxpr(lambda w, name=name: tcemu.unpack(op, name, w))(words)
        packed = jax.make_jaxpr(lambda x, name=name: tcemu.pack(op, name, x))(unpacked.out_avals[0])
        for jaxpr in (unpacked.jaxpr, packed.jaxpr):
            names = {e.primitive.name for e in equations(jaxpr)}
            assert not names & {"gather", "scatter", "dynamic_slice", "dynamic_update_slice", "sort"}
            assert not float_operations(jaxpr)


@pytest.mark.parametrize("spelling", sample_cases(DENSE, [spelling for spelling in DENSE[::27] if "f64" not in spelling]))
def test_no_gather_is_compiled_into_mma(spelling):
    op = tcemu.parse(spelling)
    text = jax.jit(lambda *words: tcemu.mma(op, *words, target="sm_90")).lower(*registers(op)).compile().as_text()
    assert " gather(" not in text and " scatter(" not in text


def test_x64_is_never_turned_on():
    op = tcemu.parse("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc")
    tcemu.mma(op, *(np.zeros(s.shape, np.uint32) for s in registers(op)), target="sm_90")
    assert not jax.config.jax_enable_x64
