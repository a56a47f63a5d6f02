"""The arithmetic against the slow exact reference: every instruction of sm_90, and the fused dot-add at other settings than silicon's."""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import model_reference as reference_model
from oracles import reference
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu import formats
from tcemu.engine.arithmetic import fma
from tcemu.engine.arithmetic import integer_dot as integer
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.dispatch import multiply_matrices

SPELLINGS = [
    "m8n8k4.row.col.f16.f16.f16.f16", "m8n8k4.row.col.f32.f16.f16.f16", "m8n8k4.row.col.f32.f16.f16.f32",
    "m16n8k8.row.col.f16.f16.f16.f16", "m16n8k16.row.col.f16.f16.f16.f16", "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k4.row.col.f32.tf32.tf32.f32", "m16n8k8.row.col.f32.tf32.tf32.f32",
    "m16n8k16.row.col.f32.e4m3.e5m2.f32", "m16n8k32.row.col.f32.e4m3.e4m3.f32", "m16n8k32.row.col.f16.e5m2.e5m2.f16",
    "m16n8k32.row.col.f32.e5m2.e5m2.f32", "m16n8k32.row.col.f16.e4m3.e4m3.f16",
    "m16n8k8.row.col.f64.f64.f64.f64.rn", "m16n8k8.row.col.f64.f64.f64.f64.rz",
    "m16n8k8.row.col.f64.f64.f64.f64.rm", "m16n8k8.row.col.f64.f64.f64.f64.rp",
    "m16n8k32.row.col.s32.s8.u8.s32", "m16n8k32.row.col.satfinite.s32.u8.s8.s32", "m16n8k64.row.col.satfinite.s32.u4.s4.s32",
    "m16n8k128.row.col.s32.b1.b1.s32.xor.popc", "m16n8k256.row.col.s32.b1.b1.s32.and.popc",
]  # fmt: skip


def draw(op, tiles, rng):
    """Codes of A [tiles, M, K], B [tiles, K, N] and C [tiles, M, N], the classes of `operands` in turn; some tiles mix them."""
    shapes = {"a": (op.m, op.k), "b": (op.n, op.k), "c": (op.m, op.n)}
    drawn = {}
    for name, shape in shapes.items():
        fmt = getattr(op, name)
        if fmt.is_integer:
            drawn[name] = operands.integers(fmt.name, (tiles, *shape), rng)
            continue
        kinds = [operands.CLASSES[i % len(operands.CLASSES)] for i in range(tiles)]
        mixed = [str(rng.choice(operands.CLASSES)) if i % 3 == 2 else kind for i, kind in enumerate(kinds)]
        drawn[name] = np.stack([operands.codes(fmt.name, kind, shape, rng) for kind in mixed])
    return drawn["a"], np.swapaxes(drawn["b"], -1, -2), drawn["c"]


def compare(spelling, outputs, seed=0):
    """Mismatches between `dot` and the reference, out of at least `outputs`."""
    op = tcemu.parse("mma.sync.aligned." + spelling)
    a, b, c = draw(op, -(-outputs // (op.m * op.n)), np.random.default_rng(seed))
    words = operands.two_words if op.d.bits == 64 else lambda x: x
    d = np.asarray(tcemu.dot(op, words(a), words(b), words(c), target="sm_90"))
    d = operands.one_code(d) if op.d.bits == 64 else d
    wrong = []
    for t, i, j in np.ndindex(d.shape):
        want = reference.dot(
            op.d.name, op.a.name, op.b.name, op.c.name, a[t, i].tolist(), b[t, :, j].tolist(), int(c[t, i, j]),
            k=op.k, mode=(op.rounding or "rn").upper(), satfinite=op.satfinite, bit_op=op.bit_op,
        )  # fmt: skip
        if int(d[t, i, j]) != want:
            wrong.append(f"{(t, i, j)}: {int(d[t, i, j]):#x}, the reference says {want:#x}")
    return wrong, d.size


FLOATING = [s for s in SPELLINGS if ".f64." not in s and ".s32." not in s]


@pytest.mark.parametrize("spelling", sample_cases(SPELLINGS, 24))
def test_dot_is_the_reference(spelling):
    wrong, size = compare(spelling, 1_000)
    assert size >= 1_000 and wrong == []


@pytest.mark.full
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_dot_is_the_reference_on_100_000_outputs(spelling):
    wrong, size = compare(spelling, 100_000, seed=1)
    assert size >= 100_000 and wrong == []


# ---- settings that no silicon has

PAIRS = [("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), ("e4m3", "e5m2"), ("e3m2", "e2m1"), ("e2m3", "e2m3"), ("bf16", "tf32")]
K = 16


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def run_model(model, a_name, b_name, result, a, b, c):
    """`run` on `count` independent dot products: a [count, K], b [count, K], c [count]."""
    signature = ProductSpec(formats.FORMATS[a_name], formats.FORMATS[b_name], result, result, K)
    d = multiply_matrices(model, signature, a[:, None, :], b[:, :, None], c[:, None, None])
    return d[:, 0, 0]


def run_reference(a_name, b_name, result, a, b, c, *, terms, fraction_bits, floor, rounding, alignment="RZ"):
    out = []
    for row, column, code in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        for at in range(0, K, terms):
            code = reference.fused_dot_add(
                row[at : at + terms], column[at : at + terms], code, a_name, b_name,
                fraction_bits=fraction_bits, floor=floor, result=result, rounding=rounding, alignment=alignment,
            )  # fmt: skip
        out.append(code)
    return np.array(out)


def drawn_pair(a_name, b_name, c_name, count, rng):
    parts = [operands.dot_operands(a_name, b_name, c_name, kind, -(-count // len(operands.CLASSES)), K, rng) for kind in operands.CLASSES]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


SETTINGS = [
    (terms, bits, floor) for terms in (1, 4, 5, 8, 16) for bits, floor in ((1, -133), (13, -133), (24, -20), (25, -133), (30, -140))
]
RESULTS = (("f32", "RZ"), ("f16", "RN"), ("f32", "RP"), ("f16", "RM"))
SETTINGS += [(16, 35, -139), (8, 40, -133), (16, 31, -1000)]


@pytest.mark.parametrize("case", sample_cases(zip(PAIRS, SETTINGS[::4], strict=True), 4, str))
def test_other_settings(case):
    pair, setting = case
    settings_agree(pair, *setting, RESULTS[setting[0] % 4 :][:1], count=180)


@pytest.mark.full
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("terms", "fraction_bits", "floor"), SETTINGS)
def test_other_settings_on_4_500_outputs(pair, terms, fraction_bits, floor):
    settings_agree(pair, terms, fraction_bits, floor, RESULTS, count=4_500)


STEPS = ((16, 25, -133), (5, 9, -20), (8, 38, -133))
ALIGNED = [(pair, mode, step) for pair in PAIRS for mode in ("RN", "RM", "RP") for step in STEPS]


@pytest.mark.parametrize("case", sample_cases(ALIGNED, ((("bf16", "tf32"), "RM", STEPS[1]),), str))
def test_terms_that_are_rounded_at_alignment(case):
    """What-if: no unit does."""
    pair, mode, (terms, bits, floor) = case
    a, b, c = drawn_pair(*pair, "f32", 450, np.random.default_rng(11))
    model = Model(formats.F32, terms, bits, floor, alignment=mode)
    got = np.asarray(run_model(model, *pair, formats.F32, a, b, c))
    step = {"terms": terms, "fraction_bits": bits, "floor": floor, "rounding": "RZ"}
    want = run_reference(*pair, "f32", a, b, c, **step, alignment=mode)
    assert (got != want).sum() == 0, f"{(got != want).sum()} mismatches of {len(want)} with {model}"
    if (terms, bits, floor) == STEPS[1]:
        assert (want != run_reference(*pair, "f32", a, b, c, **step)).sum() > 0


@pytest.mark.parametrize("pair", sample_cases(PAIRS, (), "-".join))
def test_a_traced_rounding_at_alignment(pair):
    terms, bits, floor = STEPS[2]
    a, b, c = drawn_pair(*pair, "f32", 90, np.random.default_rng(11))
    model = Model(formats.F32, terms, bits, floor)
    step = {"terms": terms, "fraction_bits": bits, "floor": floor, "rounding": "RZ"}
    traced = jax.vmap(lambda mode: run_model(model.replace(alignment=mode), *pair, formats.F32, a, b, c))(jnp.arange(4))
    for got, one in zip(traced, formats.ROUNDINGS[:4], strict=True):
        np.testing.assert_array_equal(got, run_reference(*pair, "f32", a, b, c, **step, alignment=one))


def settings_agree(pair, terms, fraction_bits, floor, results, count):
    rng = np.random.default_rng(terms * 1000 + fraction_bits)
    for name, rounding in results:
        result = formats.FORMATS[name]
        a, b, c = drawn_pair(*pair, name, count, rng)
        model = Model(result, terms, fraction_bits, floor, rounding)
        got = np.asarray(run_model(model, *pair, result, a, b, c))
        want = run_reference(*pair, name, a, b, c, terms=terms, fraction_bits=fraction_bits, floor=floor, rounding=rounding)
        assert (got != want).sum() == 0, f"{(got != want).sum()} mismatches of {len(want)} in {name} {rounding}"


def run_fields_reference(model, a_name, b_name, a, b, c):
    """The reference of any Model, whose fields may be arrays of one number."""
    fields, kind = reference_model.Fields.from_model(model), reference_model.Kind(a_name, b_name, "f32", "f32", K)
    return [reference_model.multiply_add(fields, kind, *one) for one in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]


@pytest.mark.parametrize("pair", sample_cases([("f16", "f16"), ("bf16", "bf16"), ("e4m3", "e4m3")], 3, "-".join))
def test_traced_numbers_are_the_reference(pair):
    """fraction_bits, floor, terms, rounding and result_bits swept by vmap in one program, on the wide path; the last of them static too."""
    a, b, c = drawn_pair(*pair, "f32", 90, np.random.default_rng(5))
    swept = [(4, 13, -133, 1, 13), (16, 25, -133, 1, 23), (1, 24, -20, 0, 20), (8, 30, -140, 2, 10), (3, 18, -133, 3, 23)]
    columns = [jnp.array(column) for column in zip(*swept, strict=True)]

    def one(terms, fraction_bits, floor, rounding, result_bits):
        return run_model(Model(formats.F32, terms, fraction_bits, floor, rounding, result_bits), *pair, formats.F32, a, b, c)

    together = np.asarray(jax.jit(jax.vmap(one))(*columns))
    for (terms, bits, floor, rounding, result_bits), got in zip(swept, together, strict=True):
        model = Model(formats.F32, terms, bits, floor, formats.ROUNDINGS[rounding], result_bits)
        np.testing.assert_array_equal(got, run_fields_reference(model, *pair, a, b, c))
    np.testing.assert_array_equal(run_model(model, *pair, formats.F32, a, b, c), together[-1])


@pytest.mark.full
@pytest.mark.parametrize("stride", sample_cases((7, 1), (7,)))
def test_a_model_with_arrays_passes_through_vmap(stride):
    a, b, c = drawn_pair("f16", "f16", "f32", 45, np.random.default_rng(6))
    models = Model(formats.F32, 16, jnp.arange(8, 31))
    swept = jax.vmap(lambda model: run_model(model, "f16", "f16", formats.F32, a, b, c))(models)
    for bits, got in list(zip(range(8, 31), np.asarray(swept), strict=True))[::stride]:
        np.testing.assert_array_equal(got, run_fields_reference(Model(formats.F32, 16, bits), "f16", "f16", a, b, c))


@pytest.mark.parametrize("result_bits", sample_cases([13, 7], 2))
def test_fewer_result_bits(result_bits):
    """13 is Hopper's e8m13; the same without a name, by cutting the reference's exact sum in two roundings that do not interfere."""
    a, b, c = drawn_pair("e4m3", "e5m2", "f32", 450, np.random.default_rng(7))
    got = np.asarray(run_model(Model(formats.F32, 16, 13, result_bits=result_bits), "e4m3", "e5m2", formats.F32, a, b, c))
    want = run_reference("e4m3", "e5m2", "e8m13", a, b, c, terms=16, fraction_bits=13, floor=-133, rounding="RZ")
    finite = (want & 0x7F800000) != 0x7F800000
    cut = np.uint32(0xFFFFFFFF << (23 - result_bits) & 0xFFFFFFFF)  # cutting toward zero twice is cutting once
    want = np.where(finite, want & cut, want)
    np.testing.assert_array_equal(got, np.where(want == 0x80000000, 0, want))


# ---- exact fma and addition


def fma_agrees(name, mode, a, b, c):
    fmt = formats.FORMATS[name]
    words = operands.two_words if fmt.bits == 64 else lambda x: x
    got = np.asarray(jax.jit(fma.fma, static_argnums=(3, 4))(words(a), words(b), words(c), fmt, mode))
    total = np.asarray(jax.jit(fma.add, static_argnums=(2, 3))(words(a), words(c), fmt, mode))
    got, total = (operands.one_code(v) if fmt.bits == 64 else v for v in (got, total))
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    np.testing.assert_array_equal(got, np.array([reference.fma(*t, name, mode) for t in triples], got.dtype))
    np.testing.assert_array_equal(total, np.array([reference.add(x, z, name, mode) for x, _, z in triples], got.dtype))


@pytest.mark.parametrize("case", sample_cases(product(("f32", "f64"), ("RN", "RZ", "RM", "RP")), (("f64", "RM"),), "-".join))
def test_fma_and_add(case):
    name, mode = case
    rng = np.random.default_rng(8)
    parts = [operands.dot_operands(name, name, name, kind, 100, 2, rng) for kind in operands.CLASSES]
    a, b, c = (np.concatenate(column) for column in zip(*parts, strict=True))
    fma_agrees(name, mode, a[:, 0], b[:, 0], c)
    fma_agrees(name, mode, a[:, 1], b[:, 1], operands.one_code(np.zeros((len(c), 2))).astype(c.dtype))
    near = a[:, 0] ^ rng.integers(0, 4, len(a)).astype(a.dtype)  # neighbours of -a: cancellation to the last bits
    fma_agrees(
        name,
        mode,
        a[:, 0],
        np.full_like(a[:, 0], 0x3FF << 52 if name == "f64" else 0x3F800000),
        near ^ a.dtype.type(1 << (a.itemsize * 8 - 1)),
    )


@pytest.mark.parametrize("case", sample_cases(product(("f32", "f64"), ("RN", "RZ", "RM", "RP")), (("f32", "RP"),), "-".join))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_fma_on_any_bits(data, case):
    name, mode = case
    fma_agrees(name, mode, *(data.draw(operands.array_strategy(name, (32,))) for _ in range(3)))


@pytest.mark.parametrize("spelling", sample_cases(FLOATING, (FLOATING[6],)))
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_dot_on_any_bits(spelling, data):
    op = tcemu.parse("mma.sync.aligned." + spelling)
    a = data.draw(operands.array_strategy(op.a.name, (op.m, op.k)))
    b = data.draw(operands.array_strategy(op.b.name, (op.k, op.n)))
    c = data.draw(operands.array_strategy(op.c.name, (op.m, op.n)))
    d = np.asarray(tcemu.dot(op, a, b, c, target="sm_90"))
    for i, j in ((0, 0), (3, 5), (7, 7)):
        want = reference.dot(op.d.name, op.a.name, op.b.name, op.c.name, a[i].tolist(), b[:, j].tolist(), int(c[i, j]), k=op.k)
        assert int(d[i, j]) == want


@pytest.mark.parametrize("signs", [(True, True), (True, False), (False, True), (False, False)])
def test_the_dot_of_bytes_is_that_of_floats(signs):
    """What a GPU runs in place of the other; every pair of byte values meets."""
    low = tuple(-128 if signed else 0 for signed in signs)
    a, b = (np.float32(np.arange(256) + least) for least in low)
    a, b = jnp.stack([a, a[::-1]], 1), jnp.stack([b, b], 0).at[1].add(1).clip(low[1], low[1] + 255)
    got = integer._by_bytes(low, a, b)
    np.testing.assert_array_equal(got, integer._by_floats(a, b))
    np.testing.assert_array_equal(got, np.asarray(a).astype(np.int64) @ np.asarray(b).astype(np.int64))


# ---- what a model refuses


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (dict(fraction_bits=41), "from 1 to 40"),
        (dict(fraction_bits=0), "from 1 to 40"),
        (dict(fraction_bits=None, result=formats.F64), "terms must be 1"),
        (dict(terms=0), "from 1 to 65536"),
        (dict(rounding="SR"), "one of RN, RZ, RM, RP"),
        (dict(result=formats.BF16), "f16, f32, f64 or s32"),
        (dict(chain="m"), "those of one instruction"),
    ],
)
def test_a_model_that_cannot_be(changes, told):
    with pytest.raises(ValueError, match=told):
        Model(formats.F32).replace(**changes)


def test_unknown_field():
    with pytest.raises(TypeError, match="fraction"):
        Model(formats.F32).replace(fraction=13)
