"""Block scaling: `mma` and `mma_sp` of sm_120 against the slow exact reference, published values, and the registers that hold scales."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import block_scaled_reference as reference_scaled
from oracles import reference
from oracles.reference import decode, encode
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.formats import E2M1, E4M3, F32, UE4M3, UE8M0, from_float

TARGET = "sm_120a"
OPS = [op for op in tcemu.isa.instructions(TARGET) if getattr(op, "scaling", None)]
KINDS = sorted({(op.family, op.kind, op.scaling.count, op.scaling.format.name) for op in OPS})
USUAL_KINDS = (("mma.sp", "mxf4", 2, "ue8m0"),)  # of every run
ONE = {"ue8m0": 127, "ue4m3": 0x38}
SCALE_CLASSES = ("near one", "sweep", "any", "edges")


def instruction_kind(op):
    return op.family, op.kind, op.scaling.count, op.scaling.format.name


def scale_codes(name, kind, shape, rng):
    """Codes of scales in one of SCALE_CLASSES; the edges are zero, subnormals, the largest and, seldom, NaN."""
    one, top = ONE[name], 0xFF if name == "ue8m0" else 0x7F
    if kind == "near one":
        return np.clip(one + rng.integers(-3, 4, shape), 0, top - 1).astype(np.uint8)
    if kind == "sweep":  # all alike, but for a few: neighbouring groups far apart
        base = int(rng.integers(20, 230)) if name == "ue8m0" else int(rng.integers(0, 0x7F))
        step = rng.integers(0, 45, shape) * (rng.random(shape) < 0.4)
        return np.clip(base + step, 0, top - 1).astype(np.uint8)
    if kind == "any":
        return rng.integers(0, top, shape).astype(np.uint8)
    edges = np.array([0, 1, 2, 7, 8, 9, top - 1, top - 2], np.uint8)
    return np.where(rng.random(shape) < 0.01, top, rng.choice(edges, shape)).astype(np.uint8)


def draw(op, tiles, rng):
    """Codes of A, B, C and both scales, one class of elements and of scales a tile; sparse: A stored, and metadata fields."""
    stored, parts = op.matrix_shape("a")[1], []
    for tile in range(tiles):
        kind, scales = operands.CLASSES[tile % len(operands.CLASSES)], SCALE_CLASSES[tile // 2 % len(SCALE_CLASSES)]
        a = operands.codes(op.a.name, kind, (op.m, stored), rng)
        b = operands.codes(op.b.name, kind, (op.n, op.k), rng)
        if kind == "cancelling":  # whole groups cancel, exactly or nearly
            b[:, 1::2] = b[:, 0::2]
        x, y = (scale_codes(op.scaling.format.name, scales, op.matrix_shape(name), rng) for name in ("scale_a", "scale_b"))
        middle = int(x[0, 0]) + int(y[0, 0]) - 127 if op.scaling.format.name == "ue8m0" else 127
        field = np.clip(middle + rng.integers(-40, 41, (op.m, op.n)), 0, 254).astype(np.uint32)
        near = field << 23 | rng.integers(0, 1 << 23, (op.m, op.n), np.uint32) | rng.integers(0, 2, (op.m, op.n), np.uint32) << 31
        c = np.where(rng.random((op.m, op.n)) < 0.2, operands.codes("f32", kind, (op.m, op.n), rng), near)
        c = np.where(rng.random((op.m, op.n)) < 0.1, 0, c).astype(np.uint32)
        a[0], c[0, ::2] = 0, 0  # a row whose results are C, or zero
        parts.append((a, b.T, c, x, y))
    fields = np.full((tiles, *op.matrix_shape("e")), 0, np.uint8) if op.sparse else None
    if op.sparse:
        fields[...] = rng.choice(np.array([4, 8, 9, 12, 13, 14], np.uint8), fields.shape)
    return (*(np.stack(column) for column in zip(*parts, strict=True)), fields)


def reference_output(op, a_row, b_column, c_code, a_scales, b_scales, alignment="RZ"):
    lists = a_row.tolist(), b_column.tolist(), int(c_code)
    scales = a_scales.tolist(), b_scales.tolist()
    if op.kind == "mxf8f6f4":
        return reference_scaled.scaled_dot_add(*lists, op.a.name, op.b.name, *scales, alignment)
    return reference_scaled.grouped_dot_add(*lists, op.scaling.format.name, *scales, alignment)


def compare(op, outputs, seed):
    """Mismatches between `dot` and the reference, out of at least `outputs`; and how many results were NaN, Inf and zero."""
    a, b, c, x, y, fields = draw(op, -(-outputs // (op.m * op.n)), np.random.default_rng(seed))
    d = np.asarray(tcemu.dot(op, a, b, c, target=TARGET, scale_a=x, scale_b=y, e=fields))
    wrong = []
    for t, i, j in np.ndindex(d.shape):
        column = b[t, :, j]
        if op.sparse:
            column = column[reference.kept_positions("s4" if op.chunk_size == 8 else "s8", fields[t, i].tolist())]
        want = reference_output(op, a[t, i], column, c[t, i, j], x[t, i], y[t, :, j])
        if int(d[t, i, j]) != want:
            wrong.append(f"{(t, i, j)}: {int(d[t, i, j]):#x}, the reference says {want:#x}")
    finite = (d & 0x7F800000) != 0x7F800000
    return wrong, d.size, (int((d == 0x7FFFFFFF).sum()), int((~finite & (d != 0x7FFFFFFF)).sum()), int((d == 0).sum()))


def ids(kind):
    return "-".join(map(str, kind))


def held_to_the_reference(kind, outputs, every=1):
    ops = [op for op in OPS if instruction_kind(op) == kind][::every]
    counted, met = 0, np.zeros(3, int)
    for at, op in enumerate(ops):
        wrong, size, found = compare(op, -(-outputs // len(ops)), seed=at)
        assert wrong == [], f"{op}: {len(wrong)} mismatches of {size}: {wrong[:3]}"
        counted, met = counted + size, met + found
    assert counted >= outputs
    assert met[0] > 0 and met[2] > 0, "no NaN or no zero was among the results"
    assert met[1] > 0 or kind[3] == "ue4m3", "no infinity was among the results"


@pytest.mark.parametrize("kind", sample_cases(KINDS, USUAL_KINDS, ids))
def test_every_kind_is_the_reference(kind):
    held_to_the_reference(kind, 4_500, every=12)  # of the 25 pairs of mxf8f6f4 three of equal types


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=ids)
def test_every_kind_is_the_reference_on_100_000_outputs(kind):
    held_to_the_reference(kind, 100_000)


def test_every_block_scaled_spelling_of_sm_120_is_covered():
    assert len(KINDS) == 10 and len({op.a.name + op.b.name for op in OPS if op.kind == "mxf8f6f4" and not op.sparse}) == 25
    assert all(tcemu.evidence(op, TARGET).level in ("published", "literature", "assumed") for op in OPS)


# ---- published values

MXF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
MXF8 = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0"
NVF4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
SPARSE = "mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"


def single(spelling, a_row, b_column, c, a_scales=None, b_scales=None):
    """The word that one row, one column and one accumulator give: numbers in, a Fraction out."""
    op = tcemu.parse(spelling)
    a, b = np.zeros((op.m, op.k), np.uint8), np.zeros((op.k, op.n), np.uint8)
    a[0, : len(a_row)] = [encode(op.a.name, Fraction(v)) for v in a_row]
    b[: len(b_column), 0] = [encode(op.b.name, Fraction(v)) for v in b_column]
    start = np.full((op.m, op.n), encode("f32", Fraction(c)), np.uint32)
    scales = [np.full(op.matrix_shape(f"scale_{name}"), ONE[op.scaling.format.name], np.uint8) for name in "ab"]
    for matrix, given in zip((scales[0][0], scales[1][:, 0]), (a_scales, b_scales), strict=True):
        if given is not None:
            matrix[:] = [encode(op.scaling.format.name, Fraction(v)) for v in given]
    d = tcemu.dot(op, a, b, start, target=TARGET, scale_a=scales[0], scale_b=scales[1])
    return decode("f32", int(d[0, 0]))


def spread(*pairs):
    """Rows of a and b with the pair (x, y) at the head of each group of 16 that has one."""
    a, b = [0] * 64, [0] * 64
    for group, members in enumerate(pairs):
        for at, (x, y) in enumerate(members):
            a[16 * group + at], b[16 * group + at] = x, y
    return a, b


@pytest.mark.full
def test_cancellation_of_equation_10():
    """arXiv 2511.10909 v2, table 8: MXFP8 -0.75; MXFP4 and NVFP4 the exact -0.875, at scales that their range allows."""
    e5m2 = MXF8.replace("e4m3", "e5m2")
    assert single(e5m2, [-(2**13), -0.5, -0.25, -0.125], [2**10, 1, 1, 1], 2**23) == Fraction(-3, 4)
    halves = spread([(-4, 2)], [], [(-1, 1), (-0.5, 1)], [(-0.5, 0.5)])
    assert single(MXF4, *halves, 2**23, [2**20, Fraction(1, 2)], [1, 1]) == Fraction(-7, 8)
    groups = spread([(-4, 2)], [(-0.5, 1), (-0.5, 0.5)], [(-0.5, 0.5)], [])
    assert single(NVF4, *groups, 8 * 2**16, [256, 1, Fraction(1, 2), 1], [256, 1, 1, 1]) == Fraction(-7, 8)


def test_scale_and_value_are_not_interchangeable():
    """Equal products, a factor of two in the elements or in the scale: a group is aligned by its scales alone, even if it cancels."""
    quarter = [(0.5, 0.5)]

    def value(exponent, x, y):
        a, b = spread([(x, 1), (-x, y)], [], quarter)
        return single(MXF4, a, b, 0, [Fraction(2) ** exponent, 1], [1, 1])

    assert value(33, 2, 1) == Fraction(1, 4)
    assert value(34, 1, 1) == 0  # the same products; 2^34 lifts the quarter below the 35th bit
    assert value(34, 0, 1) == Fraction(1, 4)  # a group of zeros has no say


@pytest.mark.parametrize("scale", ["ue4m3", pytest.param("ue8m0", marks=pytest.mark.full)])
def test_twins_of_equal_scaled_products_part_where_the_reference_says(scale):
    """Random twins: the elements doubled and the scale halved. Some results differ, and each is the reference's."""
    op = tcemu.parse(NVF4 if scale == "ue4m3" else NVF4.replace("ue4m3", "ue8m0"))
    rng = np.random.default_rng(3)
    tiles, small = 24, np.array([0, 1, 2, 9, 10], np.uint8)  # e2m1 of which the double is exact: 0, 0.5, 1, -0.5, -1
    doubled = np.array([0, 2, 4, 10, 12], np.uint8)
    at = rng.integers(0, 5, (tiles, op.m, op.k))
    b = rng.integers(0, 16, (tiles, op.k, op.n)).astype(np.uint8)
    b[:, 1::2] = np.where(rng.random(b[:, 1::2].shape) < 0.9, b[:, 0::2], b[:, 1::2])
    at[..., 1::2] = np.array([0, 3, 4, 1, 2])[at[..., 0::2]]  # neighbours cancel
    high = 0x40 if scale == "ue4m3" else 127 + 28
    step = 8 if scale == "ue4m3" else 1  # one power of two
    x = np.where(rng.random((tiles, op.m, 4)) < 0.5, high, ONE[scale] - 7).astype(np.uint8)
    y = np.full((tiles, 4, op.n), ONE[scale], np.uint8)
    c = operands.codes("f32", "near one", (tiles, op.m, op.n), rng)
    args = dict(target=TARGET, scale_b=y)
    plain = np.asarray(tcemu.dot(op, small[at], b, c, scale_a=x, **args))
    twin = np.asarray(tcemu.dot(op, doubled[at], b, c, scale_a=(x - step).astype(np.uint8), **args))
    for d, a, s in ((plain, small[at], x), (twin, doubled[at], x - step)):
        want = [reference_output(op, a[t, i], b[t, :, j], c[t, i, j], s[t, i], y[t, :, j]) for t, i, j in np.ndindex(d.shape)]
        assert (d.ravel() == np.array(want)).all()
    assert scale == "ue4m3" or (plain != twin).any()


def test_a_zero_scale_and_a_nan_scale():
    six = [6] * 64
    assert single(NVF4, six, six, 1, [0] * 4, [448] * 4) == 1
    op = tcemu.parse(NVF4)
    zeros = np.zeros((16, 64), np.uint8), np.zeros((64, 8), np.uint8)
    x, y = np.full((16, 4), 0x38, np.uint8), np.full((4, 8), 0x38, np.uint8)
    x[3, 2], y[1, 5] = 0x7F, 0xFF  # bit 7 of ue4m3 means nothing
    d = np.asarray(tcemu.dot(op, *zeros, np.full((16, 8), 0x7F800000, np.uint32), target=TARGET, scale_a=x, scale_b=y))
    nan = np.zeros((16, 8), bool)
    nan[3], nan[:, 5] = True, True
    np.testing.assert_array_equal(d, np.where(nan, 0x7FFFFFFF, 0x7F800000))


# ---- registers


def registers(op, a, b, c, x, y, selectors, fields=None, selector=0):
    """The keywords and registers of one call, packed by `pack`."""
    packed = [tcemu.pack(op, name, codes) for name, codes in (("a", a), ("b", b), ("c", c))]
    if fields is not None:
        packed.append(tcemu.pack(op, "e", fields, selector=selector))
    at = dict(zip(("scale_a", "scale_b"), selectors, strict=True))
    scales = {name: tcemu.pack(op, name, codes, selector=at[name]) for name, codes in (("scale_a", x), ("scale_b", y))}
    return packed, scales | {"selector_a": selectors[0], "selector_b": selectors[1]}


@pytest.mark.parametrize("kind", sample_cases(KINDS, 10, ids))
def test_registers_give_what_dot_gives_for_every_selector(kind):
    op = next(op for op in OPS if instruction_kind(op) == kind)
    rng = np.random.default_rng(7)
    a, b, c, x, y, fields = draw(op, 3, rng)
    want = tcemu.pack(op, "d", np.asarray(tcemu.dot(op, a, b, c, target=TARGET, scale_a=x, scale_b=y, e=fields)))
    bytes_ = range(0, 4, op.scaling.count)
    for byte_a, thread_a, byte_b, thread_b in [(i, t % 2, j, t) for i in bytes_ for j in bytes_ for t in range(4)]:
        packed, keywords = registers(op, a, b, c, x, y, ((byte_a, thread_a), (byte_b, thread_b)), fields)
        noise = rng.integers(0, 2**32, (2, 3, 32), np.uint32)  # what the selectors do not name may hold anything
        for name, words, at in zip(("scale_a", "scale_b"), noise, ((byte_a, thread_a), (byte_b, thread_b)), strict=True):
            lane, lanes = np.arange(32) % 4, at[1]
            read = (lane // 2 == lanes) if name == "scale_a" else (lane == lanes)
            mask = np.uint32(((1 << 8 * op.scaling.count) - 1) << 8 * at[0])
            keywords[name] = keywords[name] | np.where(read, words & ~mask, words)
        if op.sparse:
            d = tcemu.mma_sp(op, *packed, selector=0, target=TARGET, **keywords)
        else:
            d = tcemu.mma(op, *packed, target=TARGET, **keywords)
        np.testing.assert_array_equal(d, want)


def test_where_the_scales_lie():
    """The manual's figures 42 to 45: row m in lane 4 (m % 8) + 2 thread_id + m // 8, column n in lane 4 n + thread_id; byte byte_id + j."""
    op = tcemu.parse(MXF4)
    x, y = np.arange(1, 33, dtype=np.uint8).reshape(16, 2), np.arange(1, 17, dtype=np.uint8).reshape(2, 8)
    held = np.asarray(tcemu.pack(op, "scale_a", x, selector=(2, 1))).view(np.uint8).reshape(32, 4)
    for m, j in np.ndindex(16, 2):
        assert held[4 * (m % 8) + 2 + m // 8, 2 + j] == x[m, j]
    assert np.count_nonzero(held) == x.size
    held = np.asarray(tcemu.pack(op, "scale_b", y, selector=(0, 3))).view(np.uint8).reshape(32, 4)
    for j, n in np.ndindex(2, 8):
        assert held[4 * n + 3, j] == y[j, n]
    np.testing.assert_array_equal(tcemu.unpack(op, "scale_a", tcemu.pack(op, "scale_a", x, selector=(0, 1)), selector=(0, 1)), x)


@pytest.mark.full
def test_batches_jit_vmap_and_traced_selectors():
    op = tcemu.parse(NVF4)
    a, b, c, x, y, _ = draw(op, 6, np.random.default_rng(11))
    packed, keywords = registers(op, a, b, c, x, y, ((0, 1), (0, 2)))
    scales = keywords["scale_a"], keywords["scale_b"]
    whole = np.asarray(tcemu.mma(op, *packed, target=TARGET, **keywords))
    one = lambda *v: tcemu.mma(op, *v[:3], scale_a=v[3], scale_b=v[4], selector_a=(0, 1), selector_b=(0, 2), target=TARGET)
    np.testing.assert_array_equal(jax.vmap(one)(*packed, *scales), whole)
    grid = [v.reshape(2, 3, *v.shape[1:]) for v in (*packed, *scales)]
    np.testing.assert_array_equal(one(*grid), whole.reshape(2, 3, *whole.shape[1:]))
    traced = jax.jit(
        lambda s, *v: tcemu.mma(op, *v[:3], scale_a=v[3], scale_b=v[4], selector_a=(0, s[0]), selector_b=(0, s[1]), target=TARGET)
    )
    np.testing.assert_array_equal(traced(jnp.array([1, 2]), *packed, *scales), whole)
    one_scale = tcemu.mma(op, *packed, target=TARGET, **(keywords | {"scale_a": keywords["scale_a"][0]}))  # broadcasts
    np.testing.assert_array_equal(one_scale[0], whole[0])


# ---- gemm


@pytest.mark.parametrize("spelling", sample_cases((MXF8, MXF4, NVF4), (NVF4,)))
def test_gemm_is_a_loop_of_instructions(spelling):
    """K of three and a half instructions, the last block half full; numbers and codes as scales; a batch that only the scales have."""
    op = tcemu.parse(spelling)
    rng, block = np.random.default_rng(13), op.k // op.scaling.count
    k = 3 * op.k + op.k // 2 + block // 2
    blocks = -(-k // block)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((16, k), (k, 8)))
    c = rng.normal(size=(16, 8)).astype(np.float32)
    x = scale_codes(op.scaling.format.name, "near one", (2, 16, blocks), rng)
    y = scale_codes(op.scaling.format.name, "near one", (blocks, 8), rng)
    got = np.asarray(tcemu.gemm(a, b, c, op=op, target=TARGET, scale_a=x, scale_b=y)).view(np.uint32)
    numbers = [np.vectorize(lambda code: float(decode(op.scaling.format.name, int(code))))(v).astype(np.float32) for v in (x, y)]
    again = tcemu.gemm(a, b, c, op=op, target=TARGET, scale_a=numbers[0], scale_b=jnp.asarray(numbers[1]))
    np.testing.assert_array_equal(np.asarray(again).view(np.uint32), got)
    fill, whole = ONE[op.scaling.format.name], 4 * op.k
    a, b = (np.asarray(from_float(op.a, v)) for v in (a, b))
    a, b = np.pad(a, [(0, 0), (0, whole - k)]), np.pad(b, [(0, whole - k), (0, 0)])
    missing = 4 * op.scaling.count - blocks
    x = np.pad(x, [(0, 0), (0, 0), (0, missing)], constant_values=fill)
    y = np.pad(y, [(0, missing), (0, 0)], constant_values=fill)
    for batch in range(2):
        d = c.view(np.uint32)
        for i in range(4):
            ks, ss = slice(i * op.k, (i + 1) * op.k), slice(i * op.scaling.count, (i + 1) * op.scaling.count)
            d = tcemu.dot(op, a[:, ks], b[ks], d, target=TARGET, scale_a=x[batch][:, ss], scale_b=y[ss])
        np.testing.assert_array_equal(got[batch], d)


def test_gemm_wants_its_scales():
    a, b = np.ones((16, 64), np.float32), np.ones((64, 8), np.float32)
    args = dict(op=MXF8, target=TARGET)
    with error_message(ValueError, "^scale_a: missing", "16, 2", "each 32 elements"):
        tcemu.gemm(a, b, **args)
    with error_message(ValueError, "^scale_b: got uint8.8, 2.", "2, 8"):
        tcemu.gemm(a, b, **args, scale_a=np.ones((16, 2), np.uint8), scale_b=np.ones((8, 2), np.uint8))
    with error_message(TypeError, "^scale_a: got int64.16, 2.", "unsigned, or floats"):
        tcemu.gemm(a, b, **args, scale_a=np.ones((16, 2), np.int64), scale_b=np.ones((2, 8), np.uint8))
    with error_message(ValueError, "has no block scales"):
        tcemu.gemm(a, b, op="mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", target=TARGET, scale_a=a)


# ---- models


@pytest.mark.full
@pytest.mark.parametrize("spelling", [MXF8, MXF4, NVF4])
def test_terms_that_are_rounded_at_alignment(spelling):
    op, rng = tcemu.parse(spelling), np.random.default_rng(7)
    a, b, c, x, y, _ = draw(op, 36, rng)
    cut = np.asarray(tcemu.dot(op, a, b, c, target=TARGET, scale_a=x, scale_b=y))
    for mode in ("RN", "RM", "RP"):
        model = tcemu.get_model(op, TARGET).replace(alignment=mode)
        d = np.asarray(tcemu.dot(op, a, b, c, target=TARGET, scale_a=x, scale_b=y, model=model))
        want = [reference_output(op, a[t, i], b[t, :, j], c[t, i, j], x[t, i], y[t, :, j], mode) for t, i, j in np.ndindex(d.shape)]
        assert (d.ravel() != np.array(want)).sum() == 0
        assert (d != cut).any()


@pytest.mark.full
def test_models_with_traced_fields_give_the_words_of_static_ones():
    rng = np.random.default_rng(5)
    a, b = rng.integers(0, 16, (8, 128)).astype(np.uint8), rng.integers(0, 16, (128, 8)).astype(np.uint8)
    c = operands.codes("f32", "near one", (8, 8), rng)
    x, y = scale_codes("ue4m3", "any", (8, 8), rng), scale_codes("ue4m3", "any", (8, 8), rng)
    signature = ProductSpec(E2M1, E2M1, F32, F32, 64, scale=UE4M3)
    base = tcemu.Model(F32, 64, 35, -139, summed=16)
    settings = [(64, 35), (32, 20), (16, 12), (48, 25)]
    static = [multiply_matrices(base.replace(terms=t, fraction_bits=f), signature, a, b, c, (x, y)) for t, f in settings]
    traced = jax.vmap(lambda t, f: multiply_matrices(base.replace(terms=t, fraction_bits=f), signature, a, b, c, (x, y)))
    np.testing.assert_array_equal(traced(*map(jnp.array, zip(*settings, strict=True))), np.stack(static))
    assert len({np.asarray(d).tobytes() for d in static}) == 4


def test_models_that_do_not_fit_are_refused():
    e2m1, e4m3 = ProductSpec(E2M1, E2M1, F32, F32, 64, scale=UE4M3), ProductSpec(E4M3, E4M3, F32, F32, 32, scale=UE8M0)
    zeros = lambda k, s: (np.zeros((16, k), np.uint8), np.zeros((k, 8), np.uint8), np.zeros((16, 8), np.uint32),
                          (np.zeros((16, s), np.uint8), np.zeros((s, 8), np.uint8)))  # fmt: skip
    for model, signature, args, said in [
        (tcemu.Model(F32, 64, 35), e2m1, zeros(64, 4), "summed=None"),
        (tcemu.Model(F32, 64, 35, summed=32), e2m1, zeros(64, 4), "must divide the 16"),
        (tcemu.Model(F32, 32, 25, summed=16), e4m3, zeros(32, 1), "does not fit 24 bits"),
        (tcemu.Model(F32, 1, None, rounding="RN"), e4m3, zeros(32, 1), "no block scales"),
        (tcemu.Model(F32, 32, 25, summed=16), e4m3._replace(scale=None), (*zeros(32, 1)[:3], None), "only products with block scales"),
    ]:
        with pytest.raises(ValueError, match=said):
            multiply_matrices(model, signature, *args)
    for fields in ({"summed": 5}, {"summed": 0}, {"summed": 16, "groups": 2}):
        with pytest.raises(ValueError, match="summed"):
            tcemu.Model(F32, 64, 35, **fields)


# ---- errors


def error_message(error, *fragments):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments))


def test_bad_scales_and_selectors_are_named():
    op = tcemu.parse(MXF4)
    packed = [np.zeros((32, op.register_count(name)), np.uint32) for name in "abc"]
    scales = {"scale_a": np.zeros(32, np.uint32), "scale_b": np.zeros(32, np.uint32), "target": TARGET}
    with error_message(ValueError, "selector_a, its byte_id: got 1", "0, 2", "9.7.14.3"):
        tcemu.mma(op, *packed, **scales, selector_a=(1, 0))
    with error_message(ValueError, "selector_a, its thread_id: got 2", "0, 1"):
        tcemu.mma(op, *packed, **scales, selector_a=(0, 2))
    with error_message(ValueError, "selector_b, its thread_id: got 4", "0, 1, 2, 3"):
        tcemu.mma(op, *packed, **scales, selector_b=(0, 4))
    with error_message(ValueError, "selector_b, its byte_id: got 0.5"):
        tcemu.mma(op, *packed, **scales, selector_b=(0.5, 0))
    with error_message(ValueError, "selector_b: got 3", "pair .byte_id, thread_id."):
        tcemu.mma(op, *packed, **scales, selector_b=3)
    with error_message(ValueError, "^scale_b: ", "has block scales, and none came"):
        tcemu.mma(op, *packed, scale_a=scales["scale_a"], target=TARGET)
    with error_message(ValueError, "^scale_a: got uint32.31.", "uint32.*32"):
        tcemu.mma(op, *packed, **(scales | {"scale_a": np.zeros(31, np.uint32)}))
    with error_message(TypeError, "^scale_a: got uint8.32.", "uint32"):
        tcemu.mma(op, *packed, **(scales | {"scale_a": np.zeros(32, np.uint8)}))
    with error_message(ValueError, "^scale_a: got uint8.16, 4.", "16, 2"):
        tcemu.pack(op, "scale_a", np.zeros((16, 4), np.uint8))
    dense = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
    registers_ = [np.zeros((32, n), np.uint32) for n in (4, 2, 4)]
    with error_message(ValueError, "^scale_a: ", "has no block scales; leave it out"):
        tcemu.mma(dense, *registers_, scale_a=scales["scale_a"], target=TARGET)
    with error_message(tcemu.Unsupported, "is mma.sp; tcemu.mma runs mma"):
        tcemu.mma(SPARSE, *registers_, target=TARGET)
    with error_message(ValueError, "selector: got 1 for operand 'a'"):
        tcemu.pack(op, "a", np.zeros((16, 64), np.uint8), selector=1)
    with error_message(ValueError, "operand 'e'", "'a', 'b', 'c', 'd', 'scale_a', 'scale_b'"):
        tcemu.pack(op, "e", np.zeros((16, 8), np.uint8))
