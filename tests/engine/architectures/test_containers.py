"""What a unit reads where a code is narrower than its container and the padding is not zero."""

from itertools import product

import numpy as np
import pytest
from support import digests
from support.sampling import sample_cases

import tcemu
from tcemu.engine.architectures.container_rows import REGISTERS, ROWS, SCALES, decoded_op
from tcemu.engine.architectures.evidence import LEVELS
from tcemu.engine.layouts.packing import CONTAINERS
from tcemu.formats import E2M1, E2M3, E3M2, UE4M3, to_float

NARROW = "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.{}.{}.f32"
SCALED = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{}.{}.f32.ue8m0"
SPARSE = "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::f8f6f4.f32.{}.{}.f32"
SPARSE_SCALED = "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{}.{}.f32.ue8m0"
HALF = "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f16.{}.{}.f16"
FORMS = (NARROW, SCALED, SPARSE, SPARSE_SCALED, HALF)


def draw(op, seed):
    """Registers of any bits, batches of 9 warps."""
    rng = np.random.default_rng(seed)
    words = lambda *shape: rng.integers(0, 1 << 32, (9, 32, *shape), dtype=np.uint32)
    given = {name: words(op.register_count(name)) for name in "ab"} | {"c": words(op.register_count("c")) & np.uint32(0x3FFF3FFF)}
    if op.scaling:
        given |= {name: rng.integers(120, 134, (9, 32, 4), dtype=np.uint8).view("<u4")[..., 0] for name in ("scale_a", "scale_b")}
    return given | ({"e": np.full((9, 32), 0x4E4E4E4E, np.uint32), "selector": 0} if op.sparse else {})


def call(op, given, target):
    return np.asarray((tcemu.mma_sp if op.sparse else tcemu.mma)(op, **given, target=target))


@pytest.mark.parametrize("case", sample_cases(product(FORMS, ("sm_120a", "sm_121a"), ("auto", "portable")), 5, " ".join))
def test_e2m1_in_a_byte_is_e2m3_of_its_low_six_bits(case):
    """The usual run has each target and each way."""
    form, target, execution = case
    for a, b in (("e2m1", "e2m1"), ("e2m1", "e3m2"), ("e2m3", "e2m1")):
        op = tcemu.parse(form.format(a, b))
        given = draw(op, 0)
        wide = tcemu.parse(form.format(*("e2m3" if name == "e2m1" else name for name in (a, b))))
        with tcemu.execution(execution):
            d, wanted = call(op, given, target), call(wide, given, target)
            by_codes = dict(given)
            for name in "ab":
                if getattr(op, name) == E2M1:  # padding of zeros
                    by_codes[name] = given[name] & np.uint32(0x3C3C3C3C)
            plain = call(op, by_codes, target)
        assert (d == wanted).all() and (d != plain).any()


@pytest.mark.parametrize("name", ["e2m3", "e3m2"])
def test_other_padding_is_ignored(name):
    op = tcemu.parse(NARROW.format(name, "e4m3"))
    given = draw(op, 1)
    clean = given | {"a": given["a"] & np.uint32(0x3F3F3F3F)}
    assert (call(op, given, "sm_120a") == call(op, clean, "sm_120a")).all()


@pytest.mark.full
def test_e2m1_and_e2m3_have_the_same_values_with_padding_of_zeros():
    codes = np.arange(16, dtype=np.uint8)
    assert (np.asarray(to_float(E2M1, codes)) == np.asarray(to_float(E2M3, codes << 2))).all()
    op = tcemu.parse(SCALED.format("e2m1", "e2m1"))
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 16, op.matrix_shape("a"), np.uint8), rng.integers(0, 16, op.matrix_shape("b"), np.uint8)
    c = np.zeros((16, 8), np.uint32)
    scales = {name: np.full(op.matrix_shape(name), 127, np.uint8) for name in ("scale_a", "scale_b")}
    registers = {name: tcemu.pack(op, name, v) for name, v in {"a": a, "b": b, "c": c, **scales}.items()}
    d = tcemu.unpack(op, "d", tcemu.mma(op, **registers, target="sm_120a"))
    assert (np.asarray(d) == np.asarray(tcemu.dot(op, a, b, c, **scales, target="sm_120a"))).all()


def test_a_kernel_reads_padding_too():
    """mma of a whole PTX kernel goes the same way."""
    op = tcemu.parse(NARROW.format("e2m1", "e4m3"))
    given = {name: words[0] for name, words in draw(op, 3).items()}
    registers = ", ".join
    lines = [f"ld.global.b32 %r{i}, [%rd1+{4 * i}];" for i in range(10)]
    text = f"""
.version 8.7
.target sm_120a
.address_size 64
.visible .entry padded(.param .u64 source, .param .u64 result)
{{
.reg .b32 %r<20>; .reg .b64 %rd<4>;
mov.u32 %r19, %tid.x;
ld.param.u64 %rd1, [source];
mad.wide.u32 %rd1, %r19, 40, %rd1;
{chr(10).join(lines)}
{op} {{%r10, %r11, %r12, %r13}}, {{{registers(f"%r{i}" for i in range(4))}}}, {{%r4, %r5}}, {{{registers(f"%r{i}" for i in range(6, 10))}}};
ld.param.u64 %rd2, [result];
mad.wide.u32 %rd2, %r19, 16, %rd2;
{chr(10).join(f"st.global.b32 [%rd2+{4 * i}], %r{10 + i};" for i in range(4))}
ret;
}}
"""
    source = np.concatenate([given["a"], given["b"], given["c"]], axis=1)
    found = tcemu.ptx.run(text, grid=1, block=32, args=[source, np.zeros((32, 4), np.uint32)], target="sm_120a")
    assert (np.asarray(found[1]) == call(op, given, "sm_120a")).all()


# ---- the table


def test_every_container_has_a_row_with_evidence():
    for row in ROWS:
        assert row.evidence.level in LEVELS and row.evidence.source and row.padding and row.targets
    for target in tcemu.targets("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32"):
        formats = [fmt for row in ROWS if row.place == REGISTERS and target in row.targets for fmt in row.formats]
        assert sorted(map(str, formats)) == sorted(str(fmt) for fmt in CONTAINERS["f8f6f4"] if fmt.bits < 8)
    places = {row.place for row in ROWS}
    assert len(places) == 6 and all(any(row.place == place and row.evidence.level == "assumed" for row in ROWS) for place in places)


def test_rows_count_the_words_behind_the_digests():
    counts = {(E2M1,): 0, (E2M3, E3M2): 0, (UE4M3,): 0}
    for case in digests.RECORDED["mma_blockscale"]:
        op = tcemu.parse(case["op"])
        formats = {op.a, op.b} if op.kind in CONTAINERS else set()
        counts[E2M1,] += 128 * (E2M1 in formats)
        counts[E2M3, E3M2] += 128 * bool({E2M3, E3M2} & formats)
        counts[UE4M3,] += 128 * (op.scaling is not None and op.scaling.format == UE4M3)
    for row in (row for row in ROWS if row.place in (REGISTERS, SCALES) and row.evidence.level == "published"):
        assert row.evidence.recorded == counts.pop(row.formats), row
    assert not counts
    loads = [tcemu.parse(case["op"]) for case in digests.RECORDED["ldmatrix_forms"] if "digest" in case]
    (row,) = (row for row in ROWS if row.place.startswith("rows") and row.evidence.level == "published")
    assert row.evidence.recorded == sum(32 * op.register_count("r") for op in loads if op.src_fmt)


def test_only_byte_containers_are_decoded_otherwise():
    for spelling, target in ((NARROW.format("e4m3", "e3m2"), "sm_120a"), ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "sm_120a")):
        assert decoded_op(tcemu.parse(spelling), target) == tcemu.parse(spelling)
    fp4 = tcemu.parse("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0")
    assert decoded_op(fp4, "sm_120a") == fp4
    assert decoded_op(tcemu.parse(NARROW.format("e2m1", "e4m3")), "sm_120a") == tcemu.parse(NARROW.format("e2m3", "e4m3"))
