"""`explain`: the words of `dot`, bits that add up to them, and the place where two arithmetics part."""

import numpy as np
import operands
import pytest

import tcemu
from tcemu.catalog import instructions
from tcemu.errors import NotModelled
from tcemu.models import row
from tcemu.sparsity import defined_fields

HALF = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
FAMILIES = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")


def representatives() -> list:
    """One instruction for each arithmetic, family, K, types and modes, with a target that has it."""
    found = {}
    for target in ("sm_90a", "sm_120a"):
        for op in (op for family in FAMILIES for op in instructions(target, family)):
            try:
                model = row(op, target).model
            except NotModelled:
                continue
            facts = (op.k, op.a, op.b, op.c, op.d, op.rounding, op.satfinite, op.bit_op, op.kind, op.scale_vec, op.stype)
            found.setdefault((op.family, model, *facts), (op, target))
    return list(found.values())


CASES = representatives()
# every kind of arithmetic and every family, in the default run
SAMPLE = [
    ("mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16", "sm_90a"),
    (HALF, "sm_90a"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", "sm_90a"),
    ("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rm", "sm_90a"),
    ("mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32", "sm_90a"),
    ("mma.sp.sync.aligned.m16n8k64.row.col.satfinite.s32.s8.u8.s32", "sm_90a"),
    ("wmma.mma.sync.aligned.row.col.m16n16k16.f16.f32", "sm_90a"),
    ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3", "sm_90a"),
    ("wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc", "sm_90a"),
    ("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e2m3.e5m2.f32.ue8m0", "sm_120a"),
    ("mma.sp::ordered_metadata.sync.aligned.m16n8k128.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", "sm_120a"),
]


def words(fmt, codes):
    return operands.two_words(codes) if fmt.words == 2 else codes


def drawn(fmt, kind, shape, rng):
    return operands.integers(fmt.name, shape, rng) if fmt.is_integer else operands.codes(fmt.name, kind, shape, rng)


def scales(fmt, kind, shape, rng):
    """Codes of block scales: near one, anything, or the ends and NaN."""
    one = fmt.bias << fmt.mantissa_bits
    if kind == "special":
        return rng.choice(np.array([0, 1, 7, fmt.nan - 1, fmt.nan], np.uint8), shape)
    spread = 3 if kind in ("near one", "cancelling", "ties") else 40
    return np.clip(one + rng.integers(-spread, spread + 1, shape), 0, fmt.nan - 1).astype(np.uint8)


def tiles(op, rng):
    """A tile of each class of operands: codes of A, B, C, and what sparse and block-scaled instructions take besides."""
    more, c = {}, op.c or op.d
    kinds = operands.CLASSES
    a = np.stack([drawn(op.a, kind, op.matrix("a"), rng) for kind in kinds])
    b = np.stack([drawn(op.b, kind, op.matrix("b")[::-1], rng) for kind in kinds])
    for tile, kind in enumerate(kinds):
        if kind == "cancelling":
            b[tile, :, 1::2] = b[tile, :, 0::2]
    accumulators = np.stack([drawn(c, kind, op.matrix("d"), rng) for kind in kinds])
    if op.sparse:
        fields = defined_fields(op.chunk, op.ordered) if rng.random() < 0.5 or op.chunk == 8 else range(16)
        more["e"] = rng.choice(np.array(fields, np.uint8), (len(kinds), *op.matrix("e" if op.family == "mma.sp" else "sp_meta")))
    if op.block_scale:
        more |= {name: np.stack([scales(op.stype, kind, op.matrix(name), rng) for kind in kinds]) for name in ("scale_a", "scale_b")}
    return a, np.swapaxes(b, -1, -2), accumulators, more


def compare(spelling, target, count, seed=0):
    """Elements of D, chosen at random over all tiles, in which `explain` and `dot` differ, of how many."""
    op, rng = tcemu.parse(spelling), np.random.default_rng(seed)
    a, b, c, more = tiles(op, rng)
    d = np.asarray(tcemu.dot(op, *(words(fmt, v) for fmt, v in ((op.a, a), (op.b, b), (op.d, c))), target=target, **more))
    d = operands.one_code(d) if op.d.words == 2 else d
    places = rng.permutation(d.size)[:count]
    wrong = []
    for t, i, j in zip(*np.unravel_index(places, d.shape), strict=True):
        own = {name: v[t, :, j] if name == "scale_b" else v[t, i] for name, v in more.items()}
        found = tcemu.explain(op, a[t, i], b[t, :, j], c[t, i, j], target=target, **own)
        readd(found)
        if found.result != int(d[t, i, j]):
            wrong.append(f"{(t, i, j)}: dot says {int(d[t, i, j]):#x}\n{found}")
    return wrong, len(places)


def readd(found):
    pass


@pytest.mark.parametrize(("spelling", "target"), SAMPLE)
def test_explain_gives_the_words_of_dot(spelling, target):
    wrong, count = compare(spelling, target, 60)
    assert count == 60 and wrong == [], f"{len(wrong)} of {count}: {wrong[0]}"


@pytest.mark.full
@pytest.mark.parametrize(("op", "target"), CASES, ids=str)
def test_explain_gives_the_words_of_dot_for_every_arithmetic(op, target):
    wrong, count = compare(op, target, 100, seed=1)
    assert count == 100 and wrong == [], f"{len(wrong)} of {count}: {wrong[0]}"
