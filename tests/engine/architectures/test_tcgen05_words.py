"""tcgen05.mma against the words of a B200 that others published, and the rows that count them."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from support import golden
from support.sampling import sample_cases

import tcemu
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.isa.tcgen05 import usual_products
from tcemu.formats import FORMATS

CASES = json.loads((golden.SAMPLE / "tcgen05_b200.json").read_text())["cases"]


def product(case):
    """The instruction of a published word."""
    wanted = [FORMATS[case[name]] for name in ("d_type", "a_type", "b_type")]
    scales = (FORMATS[case["scale"]], len(case["scale_a"])) if case["scale"] else None
    for op in usual_products():
        mine = None if op.scaling is None else (op.scaling.format, op.scaling.count)
        if (op.kind, [op.d, op.a, op.b], op.satfinite, mine, op.sparse) == (case["kind"], wanted, case["saturate"], scales, False):
            return op
    raise LookupError(case["name"])


PRODUCTS = list(dict.fromkeys(map(product, CASES)))
KINDS = {op.kind: op for op in PRODUCTS}  # the usual run has one product of each kind


@pytest.mark.parametrize("op", sample_cases(PRODUCTS, list(KINDS.values()), str))
def test_every_published_word(op):
    """One dot product each, by `dot` on codes."""
    wrong, compared = [], 0
    cases = [case for case in CASES if product(case) == op]
    count, op = len(cases), replace(op, n=8)  # the fewest columns
    a, b = np.zeros((count, op.m, op.k), op.a.dtype), np.zeros((count, op.k, op.n), op.b.dtype)
    c, scales = np.zeros((count, op.m, op.n), op.d.dtype), {}
    if op.scaling is not None:
        scales = {"scale_a": np.zeros((count, op.m, op.scaling.count), np.uint8)}
        scales["scale_b"] = np.zeros((count, op.scaling.count, op.n), np.uint8)
    for i, case in enumerate(cases):
        shift = 16 if op.a == FORMATS["bf16"] else 0  # bf16 stands in the high half of a word, whose low bits the unit cuts
        a[i, 0], b[i, :, 0] = np.array(case["a"], np.uint32) >> shift, np.array(case["b"], np.uint32) >> shift
        c[i, 0, 0] = case["c"]
        if scales:
            scales["scale_a"][i, 0], scales["scale_b"][i, :, 0] = case["scale_a"], case["scale_b"]
    d = np.asarray(tcemu.dot(op, a, b, c, target="B200", **scales))
    wrong += [(case["name"], hex(word), hex(case["d"])) for case, word in zip(cases, d[:, 0, 0].tolist(), strict=True) if word != case["d"]]
    compared += count
    assert not wrong, f"{len(wrong)} mismatches of {compared}: {wrong}"
    assert compared == count > 0


def test_there_are_sixty_words():
    assert len(CASES) == 60 and all(product(case) in PRODUCTS for case in CASES)


def test_rows_count_the_words():
    counted = Counter()
    for case in CASES:
        known = find_row(product(case), "sm_100a").evidence
        if known.level == "published":
            counted[known] += 1
        else:
            assert (case["a_type"], case["b_type"], case["d_type"]) == ("e2m1", "e4m3", "f16")  # two words of one pair of many
    assert all(known.recorded == count for known, count in counted.items()) and sum(counted.values()) == 58
    assert next(iter(counted)).golden == "tests/golden/tcgen05_b200.json" and "sf-tensor" in next(iter(counted)).source


@pytest.mark.full
def test_gemm_takes_the_instruction():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 32, 32)) * 2.0 ** rng.integers(-6, 7, (2, 32, 32))).astype(np.float32)
    d = tcemu.gemm(a, b, op="e4m3 tcgen05", target="B200")
    assert (np.asarray(d) == np.asarray(tcemu.gemm(a, b, op="e4m3", target="RTX 5090"))).all()
    assert (np.asarray(d) != np.asarray(tcemu.gemm(a, b, op="e4m3", target="B200"))).any()  # mma lowers FP8 to f16 there
    assert (np.asarray(tcemu.matmul(a, b, recipe="bf16 on B200")) == np.asarray(tcemu.gemm(a, b, op="bf16 tcgen05", target="B200"))).all()


def test_refusals_and_recipes_name_the_instruction():
    a, b = np.ones((2, 32, 32), np.float32)
    with pytest.raises(tcemu.Unsupported, match="instruction descriptor"):
        tcemu.gemm(a, b, op="tcgen05.mma.cta_group::1.kind::f16", target="B200")
    long_k = "tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32.m128n128k96.f32.e2m1.e2m1.ue8m0"
    assert tcemu.get_model(long_k, "B300").terms == 96 and tcemu.evidence(long_k, "B300").level == "assumed"
    with pytest.raises(tcemu.Unsupported, match="needs sm_103a"):
        tcemu.get_model(long_k, "B200")
    assert "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16" in repr(tcemu.get_recipe("nvfp4 on B200"))
    assert tcemu.check("nvf4", "B200") == tcemu.parse("nvf4 tcgen05") and tcemu.check("f16", "B200").family == "mma"
