"""The rows of every GPU: the words that others recorded, published check values, and that no row claims more than is known."""

import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import jax
import numpy as np
import pytest
from oracles import reference
from oracles.reference import decode, encode
from support import golden
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.evidence import LEVELS
from tcemu.engine.architectures.lookup import TOOLKITS, find_row, target_rows
from tcemu.engine.architectures.model_rows import MMA_SIM, ROWS
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.isa.tcgen05 import usual_products
from tcemu.formats import F32

ARITHMETIC = ("mma", "mma.sp", "wmma.mma", "wgmma", "wgmma.sp")
GPUS = {
    "V100": "sm_70",
    "A100": "sm_80",
    "A2": "sm_86",
    "Ada": "sm_89",
    "L40S": "sm_89",
    "H100": "sm_90a",
    "H200": "sm_90a",
    "B200": "sm_100a",
}
TYPES = {"fp16": "f16", "bf16": "bf16", "tf32": "tf32", "E4M3": "e4m3", "E5M2": "e5m2"}
PUBLISHED = golden.published_arrays()
WHOLE = golden.root().name == "golden" and golden.root().parent.name == "shared"


def mma(shape, d, a, b=None, c=None):
    return f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b or a}.{c or d}"


def model_sums(op, target, a, b, c):
    """One dot product for each row of a [R, k], b [R, k], c [R]: the diagonals of 8 x 8 outputs, all else zero."""
    op = tcemu.parse(op)
    (rows, k), at = a.shape, np.arange(8)
    a, b, c = (np.pad(v, [(0, -rows % 8)] + [(0, 0)] * (v.ndim - 1)).reshape(-1, 8, *v.shape[1:]) for v in (a, b, c))
    x, y = np.zeros((len(a), op.m, op.k), a.dtype), np.zeros((len(a), op.k, op.n), b.dtype)
    start = np.zeros((len(a), op.m, op.n), c.dtype)
    x[:, :8, :k], y[:, :k, :8], start[:, at, at] = a, b.swapaxes(1, 2), c
    return np.asarray(tcemu.dot(op, x, y, start, target=target))[:, at, at].ravel()[:rows]


def published_op(gpu, type_, result, k):
    """The instruction that a file was recorded with (tests/golden/README.md), and whether C was given to it."""
    if type_ in ("e4m3", "e5m2"):
        if gpu in ("H100", "H200") and result == "f32":
            return f"wgmma.mma_async.sync.aligned.m64n8k32.f32.{type_}.{type_}", False
        return mma("m16n8k32", result, type_), True
    shape = {"V100": "m8n8k4"}.get(gpu, f"m16n8k{k}")
    return mma(shape, result, type_), True


@pytest.mark.parametrize("gpu", sample_cases(GPUS, ("V100",)))
def test_every_word_that_others_recorded(gpu):
    """All files of a GPU, f32 and f16 results; the inputs are f32 words that hold the narrow values exactly."""
    compared = 0
    for key in [key for key in PUBLISHED if key.startswith(f"{gpu}_") and "_d_" in key]:
        _, format_, _, output = key.split("_")
        type_, result = TYPES[format_], {"fp32": "f32", "fp16": "f16"}[output]
        a, b, c = (PUBLISHED[f"{gpu}_{format_}_{x}"].view(np.float32) for x in "abc")
        a, b = (np.asarray(tcemu.formats.from_float(tcemu.formats.FORMATS[type_], v)) for v in (a, b))
        c = np.asarray(tcemu.formats.from_float(tcemu.formats.FORMATS[result], c))
        op, with_c = published_op(gpu, type_, result, a.shape[1])
        d = model_sums(op, GPUS[gpu], a, b, c if with_c else np.zeros_like(c))
        want = np.asarray(tcemu.formats.from_float(tcemu.formats.FORMATS[result], PUBLISHED[key].view(np.float32)))
        assert int((d != want).sum()) == 0, f"{key}: {(d != want).sum()} mismatches of {d.size}"
        assert tcemu.evidence(op, GPUS[gpu]).level in ("published", "silicon")
        compared += d.size
    assert compared >= (2000 if WHOLE else 40)


def recording_family(family):
    """What the recordings of a family are called."""
    return family.removesuffix(".mma").replace(".", "_")


RECORDED = [recording_family(family) for family in ARITHMETIC]


def test_the_words_that_rows_count_are_there():
    """Rows known by publication count the files of their GPU; rows known by our silicon count the recorded results."""
    if not WHOLE:
        pytest.skip("only the sample of the recordings is here")
    recorded = dict.fromkeys(RECORDED, 0)
    for family in recorded:
        with np.load(golden.root() / f"{family}.npz") as file:
            recorded[family] = sum(file[name].size for name in file.files if name.endswith(("_d", "_d_out")) and "frag" not in name)
    published = {}
    for known in {r.evidence for r in ROWS}:
        if known.level == "silicon":
            assert known.recorded == recorded.pop(known.family)
        elif known.family == "published":
            published[known.gpus, known.operands] = known.recorded
    assert recorded == {}
    assert sum(published.values()) == sum(v.size for k, v in PUBLISHED.items() if "_d_" in k and not k.startswith(("H100", "H200")))


def test_rows_say_which_spellings_were_recorded():
    if not WHOLE:
        pytest.skip("only the sample of the recordings is here")
    verified = (golden.TESTS.parent / "docs" / "verified.md").read_text()
    for family in ARITHMETIC:
        spellings = {str(op): op for op in tcemu.isa.instructions("sm_90a", family)}
        name = recording_family(family)
        recorded = {str(tcemu.parse(case["ptx"])) for case in golden.cases(name)}
        assert recorded <= set(spellings)
        missing = [spellings[spelling] for spelling in set(spellings) - recorded]
        for known in {r.evidence for r in target_rows("sm_90a") if r.family == family and r.evidence.level == "silicon"}:
            assert (known.spellings is not None) == bool(missing)
            assert known.spellings is None or (known.spellings.recorded, known.spellings.all) == (len(recorded), len(spellings))
        assert (f"{len(recorded)} of {len(spellings)}" if missing else f"`{family}` ({len(spellings)})") in verified
        if family == "wmma.mma":
            but = [op for op in spellings.values() if op.a.name in ("s8", "u8") and op.satfinite and op.alayout == "col"]
            assert set(missing) == set(but)
        elif missing:
            without_n = {spelling: spelling.replace(f"n{op.n}k", "nNk") for spelling, op in spellings.items()}
            assert {without_n[spelling] for spelling in recorded} == set(without_n.values())
            assert {spellings[spelling].n for spelling in recorded} == {8, 24, 64}


def test_rows_say_what_published_words_do_not_show():
    """The words of a row are of one K; where its instructions have a larger one, the evidence says how that is summed, and by whom."""
    seen = set()
    for key in (key for key in PUBLISHED if "_d_" in key and not key.startswith("H")):
        gpu, format_, _, output = key.split("_")
        type_, k, target = TYPES[format_], PUBLISHED[f"{gpu}_{format_}_a"].shape[1], GPUS[gpu]
        applied = find_row(tcemu.parse(published_op(gpu, type_, {"fp32": "f32", "fp16": "f16"}[output], k)[0]), target)
        largest = max(op.k for op in tcemu.isa.instructions(target, applied.family) if find_row(op, target) is applied)
        known = applied.evidence
        if largest == k:
            assert known.k == 0 and MMA_SIM not in known.papers
        else:
            assert applied.model.terms in (k, largest) and (known.k, known.step) == (k, applied.model.terms)
            assert known.papers[-1] == MMA_SIM
        seen.add(known)
    assert seen == {r.evidence for r in ROWS if r.evidence.family == "published"}


# ---- published check values

EQ10 = [-(2**13), -0.5, -0.25, -0.125], [2**10, 1, 1, 1], 2**23


def number(op, target, a, b, c):
    op = tcemu.parse(op)
    c_fmt = op.accumulator.name
    codes = lambda name, values: np.array([[encode(name, Fraction(v)) for v in values]], operands.storage_dtype(name))
    word = model_sums(op, target, codes(op.a.name, a), codes(op.b.name, b), codes(c_fmt, [c])[0])[0]
    return decode(op.d.name, int(word))


EQUATION_10 = [
    ("sm_70", mma("m8n8k4", "f32", "f16"), 0),
    ("sm_75", mma("m16n8k8", "f32", "f16"), -0.5),
    ("sm_80", mma("m16n8k16", "f32", "f16"), -0.5),
    ("sm_86", mma("m16n8k8", "f32", "bf16"), -0.5),
    ("sm_89", mma("m16n8k4", "f32", "tf32"), -0.5),
    ("sm_89", mma("m16n8k32", "f32", "e5m2"), 0),
    ("sm_90", mma("m16n8k16", "f32", "f16"), -0.75),
    ("sm_90a", "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2", 0),
    ("sm_120a", mma("m16n8k32", "f32", "e5m2"), -0.75),
]
GENERATIONS = len(EQUATION_10)  # one of each generation and step; GPUs with equal rows follow
EQUATION_10 += [
    (target, mma(shape, "f32", type_), -0.5)
    for target in ("sm_80", "sm_86", "sm_89")
    for shape, type_ in (("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k4", "tf32"))
]
EQUATION_10 += [(target, mma("m16n8k16", "f32", "f16"), -0.75) for target in ("sm_100", "sm_103a", "sm_110", "sm_120", "sm_121a")]


@pytest.mark.parametrize("case", sample_cases(EQUATION_10, EQUATION_10[:GENERATIONS], lambda case: f"{case[0]} {case[1]}"))
def test_cancellation_of_equation_10(case):
    """arXiv 2511.10909 v2, table 8: exactly -0.875, and each generation keeps a number of bits of its own."""
    target, op, want = case
    assert number(op, target, *EQ10) == Fraction(want)


HALVES = [0.5] * 4, [1, 1, 2**-10, 2**-23]


@pytest.mark.parametrize("target", sample_cases(["sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"], ("sm_80",)))
def test_an_f16_result_is_rounded_once_but_not_by_way_of_f32(target):
    """MMA-Sim's behaviour test: 0.5 * (1 + 1 + 2^-10 + 2^-23) is 0x3C01 as f16; wmma with C f32 rounds twice and loses the last bit."""
    shape = "m8n8k4" if target == "sm_70" else "m16n8k8"
    assert number(mma(shape, "f16", "f16"), target, *HALVES, 0) == decode("f16", 0x3C01)
    for c, want in (("f32", 0x3C00), ("f16", 0x3C01)):
        wmma = f"wmma.mma.sync.aligned.row.col.m16n16k16.f16.{c}"
        assert number(wmma, target, *HALVES, 0) == decode("f16", want)


def test_fp8_accumulators_of_ada_hopper_and_blackwell():
    """DeepGEMM issue 37: where a step keeps 13 bits the low ten of an accumulator vanish; mma on sm_90 and later keeps them."""
    zeros = np.zeros((1, 32), np.uint8)
    wgmma = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
    fp8 = mma("m16n8k32", "f32", "e4m3")
    for op, target, want in [
        (fp8, "sm_89", 0x40403000),
        (wgmma, "sm_90a", 0x40403000),
        (fp8, "sm_90", 0x40403017),
        (fp8, "sm_100", 0x40403017),
    ]:
        assert model_sums(op, target, zeros, zeros, np.array([0x40403017], np.uint32))[0] == want


@pytest.mark.full
def test_row_3935_tells_how_the_toolkit_lowered_fp8():
    """Khattak and Mikaitis, B200 E5M2 row 3935. ptxas from 12.8 on chains the two sums, ptxas 12.4 and 12.6 add them afterwards."""
    a = np.array([list(bytes.fromhex("c0b8b9b5a72c3bb63d2c40baa93839bdb638bc3c3338be3db2393927bdbfbcb9"))], np.uint8)
    b = np.array([list(bytes.fromhex("37bbb63504b830b73bbcbcbcbe3cba38b4c035b73cc032b734afbb3b3d3b393e"))], np.uint8)
    c, op = np.array([0x3F01684F], np.uint32), mma("m16n8k32", "f32", "e5m2")
    assert [int(model_sums(op, target, a, b, c)[0]) for target in ("sm_90", "sm_100a", "sm_120a")] == [0xC10DDF7C] * 3
    assert int(model_sums(op, "sm_89", a, b, c)[0]) == 0xC10DE000
    x, y, start = np.tile(a[0], (16, 1)), np.tile(b[0][:, None], (1, 8)), np.full((16, 8), c[0], np.uint32)
    for toolkit, want in (("12.4", 0xC10DDF7D), ("12.6", 0xC10DDF7D), ("12.8", 0xC10DDF7C), ("13.5", 0xC10DDF7C)):
        by_toolkit = tcemu.get_model(op, "sm_90", toolkit=toolkit)
        assert (np.asarray(tcemu.dot(op, x, y, start, target="sm_90", model=by_toolkit)) == want).all()


@pytest.mark.full
def test_separate_fp8_sums_are_the_reference():
    """The lowering of ptxas 12.6 on random rows: the two f16 steps apart, added by RN, and their sum added to C."""
    rng, op = np.random.default_rng(6), mma("m16n8k32", "f32", "e4m3")
    a, b, c = (
        operands.codes(name, "full", shape, rng) for name, shape in (("e4m3", (3, 16, 32)), ("e4m3", (3, 32, 8)), ("f32", (3, 16, 8)))
    )
    c = np.where(rng.random(c.shape) < 0.8, operands.codes("f32", "near one", c.shape, rng), c)
    d = np.asarray(tcemu.dot(op, a, b, c, target="sm_90", model=tcemu.get_model(op, "sm_90", toolkit="12.6")))
    chained = np.asarray(tcemu.dot(op, a, b, c, target="sm_90"))
    for t, i, j in np.ndindex(d.shape):
        x, y = ([reference.convert("e4m3", "f16", int(v)) for v in codes] for codes in (a[t, i], b[t, :, j]))
        parts = [[k for k in range(32) if k % 4 in half] for half in ((0, 1), (2, 3))]
        low, high = (reference.chain([x[k] for k in part], [y[k] for k in part], 0, "f16", "f16", "f32", 16) for part in parts)
        assert int(d[t, i, j]) == reference.add(reference.add(low, high, "f32"), int(c[t, i, j]), "f32")
    assert (d != chained).any()


def test_the_floor_of_the_alignment_on_an_h100():
    """MATLAB-tensor-core issue 7: an H100 gave 11 * 2^-149, which only the floor -133 gives."""
    a, b = (np.array([[int(word, 16) for word in words.split()]], np.uint16) for words in (
        "9b94 19f3 9a2e 1a67 9a25 9b4e 9b29 9a33 99e0 1a14 9914 99d1 9ae9 1b1a 9a9c 1b3a",
        "9aaf 99f3 9acc 1b7c 19ed 1b25 9a1b 9a20 9af7 9a48 1ae1 1b32 1b12 1b0e 9a68 1735"))  # fmt: skip
    assert model_sums(mma("m16n8k16", "f32", "bf16"), "sm_90", a, b, np.zeros(1, np.uint32))[0] == 11


def test_small_terms_beside_one_on_an_rtx_5090():
    """A published run of the tests of Fasi et al.: 1.0 and four times 2^-25 gave 0x3F800001."""
    ones = np.array([[0x3F80] * 5 + [0] * 11], np.uint16)
    terms = np.array([[0x3F80] + [0x3300] * 4 + [0] * 11], np.uint16)  # 2^-25 as bf16
    assert model_sums(mma("m16n8k16", "f32", "bf16"), "sm_120", ones, terms, np.zeros(1, np.uint32))[0] == 0x3F800001


# ---- the table


MODELLED = tuple(name for name, target in TARGETS.items() if not target.public)


def legal():
    """Every (instruction, target) pair that computes and is modelled."""
    return [(op, target) for target in MODELLED for op in tcemu.isa.instructions(target) if op.family in ARITHMETIC]


def every_tcgen05_product():
    """The usual products, the same weight-stationary where they are legal, and one of K = 96."""
    with_ws = (replace(op, ws=True) for op in usual_products() if op.scaling is None)
    long_k = tcemu.parse("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.m128n256k96.f32.e2m1.e2m1.ue8m0")
    return [*usual_products(), *(replace(op, n=128) for op in with_ws), long_k]


def test_every_legal_pair_has_a_row_and_every_row_a_pair():
    pairs, used = legal(), set()
    for op, target in pairs:
        used.add(id(find_row(op, target)))  # NotModelled would fail the test: today there is a row for each
    assert len(pairs) > 8_000
    used |= {id(find_row(op, target)) for op in every_tcgen05_product() for target in tcemu.targets(op) if target in MODELLED}
    unused = [r for r in ROWS if id(r) not in used and not r.toolkits]
    assert unused == []


def representatives():
    """One legal instruction for each different arithmetic: model, types and K."""
    chosen = {}
    for op, target in legal():
        r = find_row(op, target)
        key = (r.model, r.clamped_metadata, op.a, op.b, op.accumulator, op.d, op.k, op.sparse, op.scaling)
        chosen.setdefault(key, (op, target))
    return list(chosen.values())


def runs(op, target):
    rng = np.random.default_rng(0)
    fmts = {"a": op.a, "b": op.b, "c": op.accumulator}
    codes = {}
    for name, fmt in fmts.items():
        shape = op.matrix_shape("d" if name == "c" else name) + ((2,) if fmt.words == 2 else ())
        codes[name] = rng.integers(0, 1 << min(fmt.bits, 31), shape).astype(fmt.dtype)
    extra = {"e": np.full(op.matrix_shape("e" if op.warps == 1 else "sp_meta"), 4, np.uint8)} if op.sparse else {}
    if op.scaling:
        extra |= {name: np.full(op.matrix_shape(name), 0x38, np.uint8) for name in ("scale_a", "scale_b")}
    d = tcemu.dot(op, **codes, target=target, **extra)
    assert d.shape[:2] == op.matrix_shape("d") and d.dtype == op.d.dtype


def test_legal_pairs_run():
    for op, target in representatives()[::160]:
        runs(op, target)


@pytest.mark.full
def test_every_arithmetic_runs():
    chosen = representatives()
    assert len(chosen) > 100
    for at, (op, target) in enumerate(chosen):
        runs(op, target)
        if at % 40 == 39:
            jax.clear_caches()


def test_no_row_claims_more_than_is_known():
    for r in ROWS:
        assert r.evidence.level in LEVELS and len(r.evidence.source) > 5
        if r.evidence.level in ("silicon", "published"):
            assert r.evidence.recorded > 0 and r.evidence.gpus and "tests/golden" in r.evidence.source
            assert (golden.TESTS.parent / r.evidence.golden).is_file()
        else:
            assert r.evidence.recorded == 0 and not r.evidence.golden
        if r.evidence.level == "silicon":
            assert set(r.targets) <= {"sm_90", "sm_90a"}  # the only GPU that we have had
    published = {target for r in ROWS if r.evidence.level == "published" for target in r.targets}
    assert published <= set(GPUS.values()) | {"sm_100", "sm_100f", "sm_120", "sm_120f", "sm_120a"}


def test_rows_say_what_was_compared_on_the_gpu():
    compared: Counter[str] = Counter()
    for gpu in ("h100", "h200"):
        lines = (golden.TESTS / "golden" / f"verified_{gpu}.txt").read_text().splitlines()
        totals = [re.fullmatch(r"([\w.]+): \d+ spellings, 0 mismatches of ([\d,]+)", line) for line in lines]
        compared.update({recording_family(match[1]): int(match[2].replace(",", "")) for match in totals if match})
    silicon = {r.evidence for r in ROWS if r.evidence.level == "silicon"}
    assert len(silicon) == len(ARITHMETIC)
    assert {known.family: known.compared for known in silicon} == {family: compared[family] for family in RECORDED}
    for known in silicon:
        assert f"; {known.compared / 1e9:.1f}e9 more compared;" in known.source


def test_models_are_named_by_what_they_belong_to():
    for target in tcemu.targets():
        rows = target_rows(target)
        assert len({row.label for row in rows}) == len(rows) and bool(rows) == (target in MODELLED), target
        assert list(tcemu.list_models(target).items()) == [(row.label, row.model) for row in rows]
    assert tcemu.list_models("sm_90")["mma f16 to f32 (m8n8k4)"] == tcemu.get_model(mma("m8n8k4", "f32", "f16"), "sm_90")


def test_evidence_in_words():
    recorded, published = (tcemu.evidence(mma("m16n8k8", "f32", "tf32"), target) for target in ("sm_90", "sm_100a"))
    assert recorded.source == "one NVIDIA H200, driver 580.159, ptxas 13.0; 11.5e9 more compared; tests/golden, family mma"
    assert published.source == (
        f"B200, tf32, K = 4: Khattak and Mikaitis, arXiv 2512.07004; K = 8 as one step: {MMA_SIM}; tests/golden/published.npz"
    )
    lowered = tcemu.evidence(mma("m8n8k4", "f32", "f16"), "sm_80")
    assert lowered.source == "machine code of ptxas 12.9, 13.0 and 13.5: the routine that was measured on sm_90"


def test_less_evidence_than_is_asked_for_is_refused():
    """The levels in the order of their table, on rows of each; what-ifs have none."""
    a, b = np.ones((1, 16), np.float32), np.ones((16, 1), np.float32)
    multiply = lambda target, least: float(tcemu.gemm(a, b, op="f16", target=target, evidence=least)[0, 0])
    assert [multiply("H100", least) for least in (None, *LEVELS)] == [16.0] * 6
    assert [multiply("A100", least) for least in ("published", "assumed")] == [16.0] * 2
    for target, least in (("A100", "silicon"), ("RTX 5090", "published")):
        with pytest.raises(NotModelled, match=f"evidence={least!r} asks for more; accept less"):
            multiply(target, least)
    with pytest.raises(ValueError, match="evidence='gossip': expected one of silicon, published"):
        multiply("H100", "gossip")
    with pytest.raises(ValueError, match="another arithmetic has no evidence"):
        tcemu.gemm(a, b, op="f16", target="H100", model="fraction_bits=13", evidence="assumed")
    assert tcemu.get_recipe("bf16", "B300", evidence="assumed") == tcemu.get_recipe("bf16", "B300")
    with pytest.raises(NotModelled, match="its evidence is 'assumed'"):
        tcemu.get_recipe("bf16", "B300", evidence="published")


def test_toolkits_and_units():
    op = mma("m16n8k32", "f32", "e4m3")
    assert (
        tcemu.get_model(op, "sm_90") == tcemu.get_model(op, "sm_90", toolkit=TOOLKITS[-1]) != tcemu.get_model(op, "sm_90", toolkit="12.4")
    )
    assert tcemu.get_model(op, "sm_89", toolkit="12.4") == tcemu.get_model(op, "sm_89")
    assert tcemu.get_model("e4m3 tcgen05", "sm_100a") == tcemu.get_model(op, "sm_120a")
    mxf4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
    assert tcemu.get_model("mxf4", "sm_100a").summed == 16  # by tcgen05
    with pytest.raises(tcemu.Unsupported):
        tcemu.get_model(mxf4, "sm_100a")
    with pytest.raises(tcemu.Unsupported, match="needs sm_100a"):
        tcemu.get_model("e4m3 tcgen05", "sm_90")
    with pytest.raises(ValueError, match=r"toolkit='11.8'.*12.4, 12.6"):
        tcemu.get_model(op, "sm_90", toolkit="11.8")


@pytest.mark.full
def test_gemm_by_the_unit_of_sm_100():
    """FP8 on sm_100a: tcgen05 keeps 25 bits and one step of 32, mma is lowered to f16; each by its own name."""
    rng, op = np.random.default_rng(0), mma("m16n8k32", "f32", "e4m3")
    a, b = (np.asarray(rng.normal(size=shape) * 2.0 ** rng.integers(-5, 6, shape), np.float32) for shape in ((16, 96), (96, 8)))
    unit = np.asarray(tcemu.gemm(a, b, op="e4m3 tcgen05", target="sm_100a"))
    np.testing.assert_array_equal(unit, tcemu.gemm(a, b, op=op, target="sm_120a"))
    assert (unit != np.asarray(tcemu.gemm(a, b, op=op, target="sm_100a"))).any()


@pytest.mark.full
def test_another_model_in_registers():
    """`model=` changes one instruction as it changes gemm; its fields may be traced; a model for a target without a row is enough."""
    rng, op = np.random.default_rng(1), mma("m16n8k16", "f32", "f16")
    a, b, c = (rng.normal(size=shape).astype(dtype) for shape, dtype in (((16, 16), "f2"), ((16, 8), "f2"), ((16, 8), "f4")))
    packed = [tcemu.pack(op, name, v.view(f"u{v.itemsize}")) for name, v in (("a", a), ("b", b), ("c", c))]
    coarse = lambda bits: tcemu.Model(F32, 16, bits)
    swept = jax.vmap(lambda bits: tcemu.mma(op, *packed, target="sm_90", model=coarse(bits)))(np.array([25, 12, 6]))
    np.testing.assert_array_equal(swept[0], tcemu.mma(op, *packed, target="sm_90"))
    for got, bits in zip(swept, (25, 12, 6), strict=True):
        np.testing.assert_array_equal(
            tcemu.unpack(op, "d", got).view(np.float32), tcemu.gemm(a, b, c, op=op, target="sm_90", model=coarse(bits))
        )
    with pytest.raises(ValueError, match="accumulates in f32"):
        tcemu.mma(op, *packed, target="sm_90", model=tcemu.Model(tcemu.formats.S32))


def test_models_that_cannot_be():
    f64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
    with pytest.raises(ValueError, match="products of f64 are fused multiply-adds"):
        tcemu.gemm(np.ones((8, 4)), np.ones((4, 8)), op=f64, target="sm_90", model=tcemu.Model(F32, 4))
    for fields, said in (({"result_bits": 24}, "from 1 to 23"), ({"result_bits": 0}, "from 1 to 23"), ({"together": True}, "no chain")):
        with pytest.raises(ValueError, match=said):
            tcemu.Model(F32, **fields)
