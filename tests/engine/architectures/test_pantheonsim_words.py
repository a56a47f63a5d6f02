"""Digests that pantheongpu/pantheonsim published: mma, ldmatrix and cvt of an RTX 3060, an L40S and an RTX PRO 6000."""

import numpy as np
import pytest
from support import digests
from support.ptx_scalars import operation, run_operations
from support.sampling import sample_cases

import tcemu
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.architectures.model_rows import ROWS
from tcemu.formats import S32

FORMS, BLOCKS, LOADS = (digests.RECORDED[name] for name in ("mma_forms", "mma_blockscale", "ldmatrix_forms"))
ON_CARDS = [(case, gpu) for case in FORMS for gpu in case["gpus"]]
CLAMPED = [(case, gpu) for case, gpu in ON_CARDS if "k32.row.col.satfinite.s32.s8" in case["op"] or "k64.row.col.satfinite" in case["op"]]


def name_form(case_and_gpu):
    case, gpu = case_and_gpu
    return f"{gpu} {case['op'].removeprefix('mma.')} {case.get('selector', '')}"


def multiply(target):
    return lambda op, *registers, **sparse: (tcemu.mma_sp if op.sparse else tcemu.mma)(op, *registers, **sparse, target=target)


@pytest.mark.parametrize("case_and_gpu", sample_cases(ON_CARDS, [*CLAMPED[::3], *ON_CARDS[::62]], name_form))
def test_every_form_has_the_digest_of_the_card(case_and_gpu):
    case, gpu = case_and_gpu
    assert digests.form_digest(case, multiply(digests.TARGETS[gpu]))[0] == case["digest"]


def test_there_are_369_digests_of_forms():
    assert len(ON_CARDS) == 3 * 123 and len({(case["op"], case.get("selector"), gpu) for case, gpu in ON_CARDS}) == 3 * 122
    assert len(BLOCKS) == 27 and len(LOADS) == 12


@pytest.mark.parametrize("case", sample_cases(BLOCKS, 6, lambda case: f"{case['op'][9:]} {case.get('selector_a', '')}"))
def test_narrow_and_scaled_products_have_the_digest_of_the_card(case):
    """Codes of any bits: 9 of the 27 have e2m1 in bytes whose padding is not zero."""
    op = tcemu.parse(case["op"])
    selectors = {name: tuple(case[name]) for name in ("selector_a", "selector_b") if name in case}
    given = digests.block_operands(op)
    call = tcemu.mma_sp if op.sparse else tcemu.mma
    assert digests.block_digest(call(op, **given, **selectors, target="sm_120a")) == case["digest"]


@pytest.mark.parametrize("case", LOADS, ids=lambda case: case["op"].removeprefix("ldmatrix.sync.aligned.") + str(case.get("lane", "")))
def test_loads_have_the_words_of_the_card(case):
    """Rows of any bytes: what PTX calls padding of b4x16_p64 and b6x16_p32 is not zero."""
    shared = (np.arange(1024) * 37 + 11).astype(np.uint8).view("<u4")
    registers = np.asarray(tcemu.ldmatrix(case["op"], shared, 16 * np.arange(32), target="sm_120a"))
    if "word" in case:
        assert f"{registers[case['lane'], case['register']]:08x}" == case["word"]
        return
    one = registers.shape[1] == 1
    lanes = [lane[0] if one else digests.fnv(lane, 32) for lane in registers.tolist()]
    assert f"{digests.fnv(lanes, 32):08x}" == case["digest"]


# ---- conversions


def test_conversions_have_the_digests_of_the_card():
    first, second = digests.paired(digests.narrow_inputs())
    plain, sizes = [first, second], [first & np.uint32(0x7FFFFFFF), second & np.uint32(0x7FFFFFFF)]
    narrow = [
        "rn.satfinite.e2m1x2", "rn.relu.satfinite.e2m1x2", "rn.satfinite.e3m2x2", "rn.satfinite.e2m3x2", "rn.satfinite.e4m3x2",
        "rn.satfinite.e5m2x2", "rz.satfinite.ue8m0x2", "rp.satfinite.ue8m0x2",
    ]  # fmt: skip
    given = [sizes if "ue8m0" in name else plain for name in narrow]
    found = [word for (word,) in run_operations([operation(f"cvt.{name}.f32") for name in narrow], given)]
    fp4, fp4_relu, e3m2, e2m3, e4m3, e5m2, down, up = (word.astype(np.uint32) for word in found)
    wide = [("f16x2.e2m1x2", fp4), ("f16x2.e2m1x2", fp4_relu), ("f16x2.e3m2x2", e3m2), ("f16x2.e2m3x2", e2m3), ("f16x2.e4m3x2", e4m3),
            ("f16x2.e5m2x2", e5m2), ("bf16x2.ue8m0x2", down)]  # fmt: skip
    operations = [operation(f"cvt.rn.{name}") for name, _ in wide]
    back = [word for (word,) in run_operations(operations, [[w.astype(np.uint8 if "e2m1" in n else np.uint16)] for n, w in wide])]
    both = fp4 | fp4_relu << 8
    words = [both | both << 16, e3m2 | e2m3 << 16, e4m3 | e5m2 << 16, down, *back, up]
    for case, word in zip(digests.RECORDED["narrow_cvt"], words, strict=True):
        assert {i: f"{int(word[int(i)]):08x}" for i in case["samples"]} == case["samples"], case["conversion"]
        assert f"{digests.fnv(word.tolist(), 32):08x}" == case["digest"], case["conversion"]


def test_every_fp8_conversion_of_an_l4():
    """4,608 raw words: f32 and f16 to pairs of e4m3 and e5m2 and back, and f32 to f16."""
    x, beside = digests.paired(digests.fp8_inputs())
    found, compared = {}, 0
    for case in digests.RECORDED["lowprec_cvt"]:
        given = [beside, x] if case["source"] == "f32" else [found[case["source"]]]
        ((found[case["op"]],),) = run_operations([operation(case["op"])], [given])
        width = len(case["words"]) // 512
        words = [int(case["words"][at : at + width], 16) for at in range(0, len(case["words"]), width)]
        assert found[case["op"]].tolist() == words, case["op"]
        compared += len(words)
    assert compared == 4608


# ---- the rows


def counted_words():
    """The words behind the digests that bear on arithmetic, by target and row."""
    found = {}
    for case, gpu in ON_CARDS:
        op, target = tcemu.parse(case["op"]), digests.TARGETS[gpu]
        if op.d == S32 or op.a.bits == 64:  # sums of the other types are exact, whatever the steps
            row = find_row(op, target)
            count = len(digests.SEEDS) * 32 * op.register_count("d") // op.d.words
            found[target, row.label] = found.get((target, row.label), 0) + count
    for case in BLOCKS:
        row = find_row(tcemu.parse(case["op"]), "sm_120a")
        found["sm_120a", row.label] = found.get(("sm_120a", row.label), 0) + 128
    return found


def test_rows_count_the_words_behind_the_digests():
    counted = counted_words()
    for row in (row for row in ROWS if row.evidence.family == "pantheonsim.json"):
        (target,) = {digests.TARGETS[gpu] for gpu in row.evidence.gpus}
        assert row.targets[-1] == target and row.evidence.recorded == counted.pop((target, row.label)), row.label
        assert "pantheonsim" in row.evidence.source
    left = {label for _, label in counted}
    assert all("s4/u4" in label for label in left), left  # digests that both rules of the clamp give
