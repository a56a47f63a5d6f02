"""wmma's offsets and strides in every way they can come, against NumPy's bits, and what bad operands are told."""

from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import wmma_reference as wmma_model
from support.sampling import sample_cases
from support.word_arrays import random_words, to_bits, to_words

import tcemu

A, B = "wmma.load.a.sync.aligned.row.m16n16k16.f16", "wmma.load.b.sync.aligned.col.m16n16k16.f16"
C, D = "wmma.load.c.sync.aligned.row.m16n16k16.f32", "wmma.store.d.sync.aligned.row.m16n16k16.f32"
MMA = "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32"
WORDS = 1024
LOADS, STORES = ([op for op in tcemu.isa.instructions("sm_90", family) if op.space is None] for family in ("wmma.load", "wmma.store"))


def error_message(error, *fragments):
    return pytest.raises(error, match="(?s)" + ".*".join(fragments))


# ---- where a matrix lies


def spots(op, rng, words, count, least=None):
    """Random offsets and strides, in elements, that are legal for a load or store."""
    unit, (rows, columns) = wmma_model.alignment(op), op.matrix_shape("r")
    lines, length = (rows, columns) if op.layout == "row" else (columns, rows)
    total = words * 32 // wmma_model.BITS[wmma_model.element(op)]
    least = op.default_stride if least is None else least
    strides = unit * rng.integers(-(-least // unit), (total - length) // (lines - 1) // unit, count, endpoint=True)
    room = (total - length - (lines - 1) * strides) // unit
    return unit * rng.integers(0, room, endpoint=True), strides


@pytest.mark.parametrize("op", sample_cases(STORES, 14, str))
def test_store_after_load(op):
    """As many places as warps, and one for all: memory keeps what is not of the matrix."""
    load = str(op).replace("store.d", "load.c")
    rng, memory = np.random.default_rng(5), random_words((24, WORDS), 5)
    fragment = random_words((24, 32, op.register_count("r")), 6)
    offsets, strides = spots(op, rng, WORDS, 24)
    want = np.stack([wmma_model.store(op, *each, 90) for each in zip(memory, fragment, offsets.tolist(), strides.tolist(), strict=True)])
    after = np.asarray(tcemu.wmma_store(op, memory, fragment, offset=offsets, stride=strides))
    np.testing.assert_array_equal(after, want)
    np.testing.assert_array_equal(tcemu.wmma_load(load, after, offset=offsets, stride=strides), fragment)
    held = tcemu.wmma_load(load, memory, offset=offsets, stride=strides)
    np.testing.assert_array_equal(tcemu.wmma_store(op, memory, held, offset=offsets, stride=strides), memory)
    one = {"offset": int(offsets[7]), "stride": int(strides[7])}
    np.testing.assert_array_equal(tcemu.wmma_store(op, memory[7], fragment[7], **one), want[7])
    np.testing.assert_array_equal(tcemu.wmma_load(load, want[7], **one), fragment[7])


def traced_call(load):
    """The load, and the store of the same matrix, with offset and stride traced."""
    store = load.replace("load.c", "store.d")
    return (
        jax.jit(lambda memory, offset, stride: tcemu.wmma_load(load, memory, offset=offset, stride=stride)),
        jax.jit(lambda memory, fragment, offset, stride: tcemu.wmma_store(store, memory, fragment, offset=offset, stride=stride)),
    )


F16_TURNED, F64 = "wmma.load.c.sync.aligned.col.m8n32k16.f16", "wmma.load.c.sync.aligned.row.m8n8k4.f64"
TRACED = {load: traced_call(load) for load in (C, C.replace(".row.", ".col."), F16_TURNED, F64)}


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(sorted(TRACED)), st.integers(0, 2**32 - 1), st.booleans())
def test_traced_places(spelling, seed, overlapping):
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    load, store = TRACED[spelling]
    (offset,), (stride,) = spots(op, rng, WORDS, 1, 0 if overlapping else None)
    memory = random_words((WORDS,), seed)
    held = np.asarray(load(memory, offset, stride))
    np.testing.assert_array_equal(held, wmma_model.load(op, memory, offset, stride, 90))
    np.testing.assert_array_equal(store(memory, held, offset, stride), memory)
    fragment = random_words(held.shape, seed + 1)
    after = np.asarray(store(memory, fragment, offset, stride))
    np.testing.assert_array_equal(after, store_in_order(op, memory, fragment, offset, stride))


def store_in_order(op, memory, fragment, offset, stride):
    """A store line by line, so that of lines that overlap the last stays."""
    bits = wmma_model.BITS[wmma_model.element(op)]
    at, held = wmma_model.element_positions(op, 90), to_bits(fragment, bits)
    rows, columns = op.matrix_shape("r")
    matrix = np.empty((rows, columns, bits), np.uint8)
    matrix[at[..., 0], at[..., 1]] = held
    elements = to_bits(memory, bits).copy()
    for i, line in enumerate(matrix if op.layout == "row" else matrix.swapaxes(0, 1)):
        elements[offset + i * stride : offset + i * stride + len(line)] = line
    return to_words(elements)


@pytest.mark.parametrize("stride", [0, 8])
def test_rows_that_overlap(stride):
    memory, fragment = random_words((3, WORDS)), random_words((3, 32, 8), 1)
    op, store = tcemu.parse(C), tcemu.parse(D)
    want = np.stack([wmma_model.load(op, one, 24, stride, 90) for one in memory])
    np.testing.assert_array_equal(tcemu.wmma_load(C, memory, offset=24, stride=stride), want)
    np.testing.assert_array_equal(tcemu.wmma_load(C, memory, offset=np.full(3, 24), stride=stride), want)
    want = np.stack([store_in_order(store, *each, 24, stride) for each in zip(memory, fragment, strict=True)])
    np.testing.assert_array_equal(tcemu.wmma_store(D, memory, fragment, offset=24, stride=stride), want)
    np.testing.assert_array_equal(tcemu.wmma_store(D, memory, fragment, offset=np.full(3, 24), stride=stride), want)
    with error_message(tcemu.UndefinedBehaviour, f"stride {stride} is below 16"):
        tcemu.wmma_load(C, memory, stride=stride, checked=True)
    with error_message(tcemu.UndefinedBehaviour, f"stride {stride} is below 16"):
        tcemu.checked(jax.jit(lambda m, s: tcemu.wmma_store(D, m, fragment, stride=s, checked=True)))(memory, stride)


def test_without_a_target_fragments_are_those_from_sm_80_on():
    load, memory = "wmma.load.c.sync.aligned.row.m8n32k16.s32", random_words((WORDS,))
    plain, turned = (np.asarray(tcemu.wmma_load(load, memory, target=target)) for target in ("sm_75", "sm_80"))
    assert (np.asarray(tcemu.wmma_load(load, memory)) == turned).all() and (plain != turned).any()
    np.testing.assert_array_equal(
        tcemu.wmma_store(load.replace("load.c", "store.d"), memory, turned),
        tcemu.wmma_store(load.replace("load.c", "store.d"), memory, turned, target="sm_80"),
    )


# ---- what bad operands are told


@pytest.mark.parametrize("op", [*LOADS, *STORES], ids=lambda op: str(op).removeprefix("wmma.").replace(".sync.aligned", ""))
def test_alignment(op):
    """The size of a lane's fragment, but for the two forms whose default stride is shorter, which the H200 loads as it does others."""
    unit, memory = wmma_model.alignment(op), np.zeros(4096, np.uint32)
    size = 4 * op.register_count("r") * 8 // wmma_model.BITS[wmma_model.element(op)]
    shorter = op.default_stride % size != 0
    assert shorter == (str(op) in ("wmma.load.a.sync.aligned.col.m8n32k16.f16", "wmma.load.b.sync.aligned.row.m32n8k16.f16"))
    assert unit == (size // 2 if shorter else size)

    def run(**place):
        if op.family == "wmma.load":
            return tcemu.wmma_load(op, memory, **place)
        return tcemu.wmma_store(op, memory, np.zeros((32, op.register_count("r")), np.uint32), **place)

    for off in {1, unit // 2, unit - 1} - {0, unit}:
        with error_message(tcemu.UndefinedBehaviour, f"offset {unit + off} is no multiple of {unit} elements", "9.7.14.4.2"):
            run(offset=unit + off)
        with error_message(tcemu.UndefinedBehaviour, f"stride {op.default_stride + off} is no multiple of {unit} elements", "9.7.14.4.2"):
            run(stride=op.default_stride + off)


PLACES = [  # offset, stride, what is said; f32 16 x 16 in 1,024 words
    (776, 16, "16 lines of 16 elements from offset 776, 16 apart, are not in 1024 words"),
    (0, 72, "from offset 0, 72 apart"),
    (-8, 16, "offset -8"),
    (512, -16, "-16 apart"),
    (4, 16, "offset 4 is no multiple of 8"),
    (0, 20, "stride 20 is no multiple of 8"),
    (2**31 - 8, 16, "offset 2147483640"),
    (8, 2**31 - 8, "2147483640 apart"),
    (2**31 - 8, 2**31 - 8, "offset 2147483640"),
]


@pytest.mark.parametrize("case", sample_cases(PLACES, 9, str))
def test_bad_places(case):
    offset, stride, says = case
    memory, fragment = random_words((3, WORDS)), random_words((3, 32, 8), 1)
    for place in ({"offset": offset, "stride": stride}, {"offset": np.array([0, offset, 0]), "stride": np.array([16, stride, 16])}):
        with error_message(tcemu.UndefinedBehaviour, says, "9.7.14.4.2"):
            tcemu.wmma_load(C, memory, **place)
        with error_message(tcemu.UndefinedBehaviour, says, "9.7.14.4.2"):
            jax.jit(lambda m, f, place=place: tcemu.wmma_store(D, m, f, **place))(memory, fragment)

    def load(memory, offset, stride, **how):
        return tcemu.wmma_load(C, memory, offset=offset, stride=stride, **how)

    def store(memory, fragment, offset, stride, **how):
        return tcemu.wmma_store(D, memory, fragment, offset=offset, stride=stride, **how)

    with error_message(tcemu.UndefinedBehaviour, says):
        tcemu.checked(jax.jit(lambda *x: load(*x, checked=True)))(memory, offset, stride)
    with error_message(tcemu.UndefinedBehaviour, says):
        tcemu.checked(jax.jit(lambda *x: store(*x, checked=True)))(memory, fragment, offset, stride)
    assert not np.asarray(jax.jit(load)(memory, offset, stride)).any()
    np.testing.assert_array_equal(jax.jit(store)(memory, fragment, offset, stride), memory)
    offsets, strides = np.array([8, offset, 16]), np.array([16, stride, 24])
    held, after = jax.jit(load)(memory, offsets, strides), jax.jit(store)(memory, fragment, offsets, strides)
    assert not np.asarray(held[1]).any()
    np.testing.assert_array_equal(after[1], memory[1])
    for i in (0, 2):
        place = {"offset": int(offsets[i]), "stride": int(strides[i])}
        np.testing.assert_array_equal(held[i], tcemu.wmma_load(C, memory[i], **place))
        np.testing.assert_array_equal(after[i], tcemu.wmma_store(D, memory[i], fragment[i], **place))
    if stride == 16:  # traced offset, known stride
        assert not np.asarray(jax.jit(lambda m, o: load(m, o, 16))(memory, offset)).any()
        np.testing.assert_array_equal(jax.jit(lambda m, f, o: store(m, f, o, 16))(memory, fragment, offset), memory)


def test_bad_operands_are_named():
    memory, fragment = random_words((WORDS,)), random_words((32, 8))
    with error_message(TypeError, "^memory: got float32", "raw words"):
        tcemu.wmma_load(A, memory.astype(np.float32))
    with error_message(ValueError, "^memory: got a single"):
        tcemu.wmma_load(A, memory[0])
    with error_message(TypeError, "^offset: got float64", "integers"):
        tcemu.wmma_load(A, memory, offset=16.0)
    with error_message(TypeError, "^stride: got bool"):
        tcemu.wmma_load(A, memory, stride=True)
    with error_message(ValueError, r"^fragment: got uint32\[32, 4\]", "32, 8"):
        tcemu.wmma_store(D, memory, fragment[:, :4])
    with error_message(ValueError, r"^a: got uint32\[32, 4\]", "32, 8"):
        tcemu.wmma_mma(MMA, fragment[:, :4], fragment, fragment, target="sm_90")
    with error_message(tcemu.UndefinedBehaviour, "are not in 100 words"):
        jax.jit(lambda m, o: tcemu.wmma_load(A, m, offset=o))(memory[:100], 0)
    with error_message(tcemu.UndefinedBehaviour, "are not in 3 words"):
        jax.jit(lambda m, s: tcemu.wmma_load(A, m, stride=s))(memory[:3], 16)
    with error_message(tcemu.Unsupported, "is wmma.store; tcemu.wmma_load runs wmma.load"):
        tcemu.wmma_load(D, memory)
    with error_message(tcemu.Unsupported, "is wmma.load; tcemu.wmma_store runs wmma.store"):
        tcemu.wmma_store(A, memory, fragment)
    with error_message(tcemu.Unsupported, "is wmma.load; tcemu.wmma_mma runs wmma.mma"):
        tcemu.wmma_mma(A, fragment, fragment, fragment, target="sm_90")
    with error_message(tcemu.Unsupported, "sm_80 or later", "sm_75"):
        tcemu.wmma_load(A.replace("f16", "bf16"), memory, target="sm_75")


@pytest.mark.parametrize(
    "case", sample_cases(product(("sm_70", "sm_75", "sm_80", "sm_100a", "sm_120"), ("row.col", "col.row")), 10, "-".join)
)
def test_every_generation_multiplies_its_own_fragments(case):
    """Memory, fragments, product, memory: the words of `dot`, whatever the target's fragments look like."""
    target, layouts = case
    rng = np.random.default_rng(3)
    op = tcemu.parse(f"wmma.mma.sync.aligned.{layouts}.m32n8k16.f32.f32")
    a, b = (rng.normal(size=op.matrix_shape(name)).astype(np.float16).view(np.uint16) for name in "ab")
    c = rng.normal(size=op.matrix_shape("c")).astype(np.float32).view(np.uint32)
    held = {}
    for name, codes, layout in (("a", a, op.alayout), ("b", b, op.blayout), ("c", c, "row")):
        lines = np.ascontiguousarray(codes if layout == "row" else codes.T)
        load = f"wmma.load.{name}.sync.aligned.{layout}.{op.shape}.{getattr(op, name)}"
        held[name] = tcemu.wmma_load(load, lines.ravel().view(np.uint32), target=target)
    d = tcemu.wmma_mma(op, **held, target=target)
    memory = tcemu.wmma_store(f"wmma.store.d.sync.aligned.row.{op.shape}.f32", np.zeros(c.size, np.uint32), d, target=target)
    np.testing.assert_array_equal(np.asarray(memory).reshape(c.shape), tcemu.dot(op, a, b, c, target=target))
