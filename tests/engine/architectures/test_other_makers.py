"""Units of other makers: recorded words of a Xeon, published examples, the reference on every model, names and refusals."""

import struct

import ml_dtypes
import numpy as np
import pytest
from oracles import mmasim_oracle, x86_probe
from support import golden
from support import random_operands as operands
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz
from tcemu.base.errors import NotModelled, Unsupported
from tcemu.cli import main
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.architectures.other_maker_rows import OTHER_ROWS, UNKNOWN
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.reference_products import decode_products
from tcemu.engine.arithmetic.reference.reference_steps import reduce_products
from tcemu.engine.arithmetic.step.forms import step_numbers
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.isa.other_makers import OTHER_TARGETS, Unit, find_unit, other_units
from tcemu.engine.isa.targets import resolve_target
from tcemu.formats import F32, S8, S32, U8

NAN = 0x7FFFFFFF


def is_nan(words: np.ndarray) -> np.ndarray:
    return words & np.uint32(NAN) > F32.infinity


def mismatches(got: np.ndarray, wanted: np.ndarray) -> int:
    """Words that differ; NaNs count as one class."""
    return int(((got != wanted) & ~(is_nan(got) & is_nan(wanted))).sum())


def dots(op: Unit, target: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One dot product a row: codes a, b [N, K] and c [N] -> codes [N]."""
    model = find_row(op, target).model
    return np.asarray(multiply_matrices(model, product_spec(op), a[:, None, :], b[:, :, None], c[:, None, None])).ravel()


def distinct_units() -> list[tuple[Unit, str]]:
    """An instruction and a target for every row of arithmetic with float results in f32."""
    found = {}
    for target in OTHER_TARGETS:
        for op in other_units(target) if target not in UNKNOWN else ():
            row = find_row(op, target)
            if op.d == F32:
                found.setdefault((id(row), op.a, op.b), (op, target))
    return list(found.values())


UNITS = distinct_units()


def unit_id(unit: tuple[Unit, str]) -> str:
    return f"{unit[0]} on {unit[1]}"


def draw(op: Unit, rng: np.random.Generator, kind: str, count: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a, b = (operands.codes(fmt.name, kind, (count, k), rng).astype(fmt.dtype) for fmt in (op.a, op.b))
    if kind == "cancelling" and op.a == op.b:
        a[:, 1::2], b[:, 1::2] = a[:, ::2], b[:, ::2] ^ np.array(1 << (op.b.bits - 1), op.b.dtype)
    other = operands.CLASSES[rng.integers(len(operands.CLASSES))]
    return a, b, operands.codes("f32", other, (count,), rng).astype(np.uint32)


# ---- recorded words


def x86_words() -> dict[str, np.ndarray]:
    with np.load(golden.root() / "x86_bf16.npz") as file:
        return {name: file[name] for name in file.files}


def test_every_recorded_word_of_tdpbf16ps():
    words, op = x86_words(), find_unit("tdpbf16ps")
    b = words["tdp_b"].reshape(-1, 16, 16, 2).swapaxes(2, 3).reshape(-1, 32, 16)
    model = find_row(op, "sapphirerapids").model
    d = np.asarray(multiply_matrices(model, product_spec(op), words["tdp_a"], b, words["tdp_c"]))
    assert mismatches(d, words["tdp_d"]) == 0 and d.size >= 8 * 256
    assert 0.01 < is_nan(d).mean() < 0.5 and (d != words["tdp_c"]).mean() > 0.9


def test_every_recorded_word_of_vdpbf16ps():
    words, op = x86_words(), find_unit("vdpbf16ps")
    a, b = (words[f"vdp_{name}"].reshape(-1, 2) for name in "ab")
    d, wanted = dots(op, "sapphirerapids", a, b, words["vdp_c"].ravel()), words["vdp_d"].ravel()
    assert mismatches(d, wanted) == 0 and d.size >= 160 * 16
    swapped = dots(op, "sapphirerapids", a[:, ::-1], b[:, ::-1], words["vdp_c"].ravel())
    assert mismatches(swapped, wanted) > 0  # the words tell the order of the two elements


def test_rows_count_the_recorded_words():
    counts = {(row.targets[0], row.family): row.evidence.recorded for row in OTHER_ROWS if row.evidence.family.endswith("bf16")}
    xeon = {("sapphirerapids", "tdpbf16ps"): 240 * 256, ("sapphirerapids", "vdpbf16ps"): 6000 * 16}
    assert counts == xeon | {("znver4", "vdpbf16ps"): zen4_words()["d"].size}
    words = x86_words()
    if golden.root() != golden.SAMPLE:
        assert list(xeon.values()) == [words["tdp_d"].size, words["vdp_d"].size]


def test_rows_count_the_compared_outputs():
    """tests/golden/verified_x86.txt has what the full tests of this machine's own units printed."""
    counts, machine = {}, ""
    for line in (golden.SAMPLE / "verified_x86.txt").read_text().splitlines():
        machine = "sapphirerapids" if line.startswith("Intel") else "znver4" if line.startswith("AMD") else machine
        name, found, outputs = line.strip().partition(": 0 mismatches of ")
        if found and "," not in name:
            counts[machine, name] = outputs
    silicon = {(row.targets[0], row.family): row.evidence for row in OTHER_ROWS if row.evidence.level == "silicon"}
    assert set(silicon) == set(counts) and len(counts) == 11
    for unit, evidence in silicon.items():
        further = int(counts[unit].replace(",", "")) + {"tdpbf16ps": 4_096_000, "vdpbf16ps": 3_840_000}.get(unit[1], 0) * (
            unit[0] == "sapphirerapids"
        )
        assert f" 0 of {further:,} " in evidence.source and all(part in evidence.source for part in evidence.gpus)


def zen4_words() -> dict[str, np.ndarray]:
    with np.load(golden.SAMPLE / "zen4_bf16.npz") as file:
        return {name: file[name] for name in file.files}


def test_every_recorded_word_of_zen_4():
    """310 results are just below the smallest normal number, where rounding to the subnormal grid and then flushing is wrong."""
    words, op = zen4_words(), find_unit("vdpbf16ps")
    assert mismatches(dots(op, "znver4", words["a"], words["b"], words["c"]), words["d"]) == 0
    model, spec, smallest = find_row(op, "znver4").model, product_spec(op), 0x00800000
    tiny = np.flatnonzero((words["c"] & NAN >= smallest) & (words["c"] & NAN < smallest + 4))
    for i in tiny[:400]:
        products = decode_products(model, spec, words["a"][i].tolist(), words["b"][i].tolist(), ["k 0", "k 1"], None)
        assert reduce_products(model, spec, products, int(words["c"][i]))[1] == words["d"][i]
    assert len(tiny) > 400


def rdna3_words() -> dict[str, np.ndarray]:
    with np.load(golden.SAMPLE / "rdna3_published.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("fmt", sample_cases(["f16", "bf16"], ["bf16"]))
def test_every_published_word_of_rdna3(fmt):
    """103 dot products by v_dot2 and a matrix by WMMA of a Radeon Pro W7900, by the engine and by the reference."""
    words, op = rdna3_words(), find_unit(f"v_dot2_f32_{fmt}")
    a, b, c, d = words[f"dot2_{fmt}"].T
    a, b = (np.stack([v & 0xFFFF, v >> 16], axis=1).astype(np.uint16) for v in (a, b))
    assert mismatches(dots(op, "gfx1100", a, b, c), d) == 0 and len(d) == find_row(op, "gfx1100").evidence.recorded
    model, spec = find_row(op, "gfx1100").model, product_spec(op)
    products = (decode_products(model, spec, *(v[i].tolist() for v in (a, b)), ["k 0", "k 1"], None) for i in range(len(d)))
    exact = [reduce_products(model, spec, found, int(c[i]))[1] for i, found in enumerate(products)]
    assert mismatches(np.array(exact, np.uint32), d) == 0
    i = np.arange(16)
    x, y, z = (i[:, None] * 16 + i) * 7 % 17 - 8, (i[:, None] * 16 + i) * 11 % 17 - 8, (i[:, None] * 16 + i) * 13 % 129 - 64
    wmma = find_unit(f"v_wmma_f32_16x16x16_{fmt}")
    found = tcemu.gemm(*(v.astype(np.float32) for v in (x, y, z)), op=wmma, target="Radeon Pro W7900")
    assert (np.asarray(found).view(np.uint32) == words["wmma"]).all() and find_row(wmma, "gfx1100").evidence.recorded == 256


@pytest.mark.parametrize("fmt", sample_cases(["f16", "bf16"], 2))
def test_strix_halo_adds_one_unit_too_much(fmt):
    """A row times ones on a Radeon 8060S: ROCm/rocm-systems issue 12056, and the table of a report on gfx1151 of 2026-10-08."""
    table = {(1, -1): -(2.0**-24), (-1, 1): -(2.0**-24), (2, -2): -(2.0**-23), (8, -8): -(2.0**-21), (0.5, -0.5): -(2.0**-25),
             (2, -1, -1): -3 * 2.0**-24, (1, 2, -3): -(2.0**-23), (1, -1, 1, -1): 0.0, (2,): 2.0, (-1,): -1.0}  # fmt: skip
    for row, wanted in table.items():
        a = np.float32([[*row, *[0] * (16 - len(row))]])
        for op in (f"v_wmma_f32_16x16x16_{fmt}", f"v_dot2_f32_{fmt}"):
            assert float(tcemu.gemm(a, np.ones((16, 1), np.float32), op=op, target="Strix Halo")[0, 0]) == wanted
    a, b, c = np.float32([[3, 4]]), np.float32([[8], [8]]), np.float32([[-1]])
    assert float(tcemu.gemm(a, b, c, op=f"v_dot2_f32_{fmt}", target="gfx1151")[0, 0]) == np.float32(55.0000038)


@pytest.mark.parametrize("fmt", sample_cases(["f16", "bf16"], ["bf16"]))
def test_every_published_word_of_rdna4(fmt):
    """121 dot products by v_dot2 and 24 by WMMA in both wave modes of a Radeon AI Pro R9700, by the engine and by the reference."""
    with np.load(golden.SAMPLE / "rdna4_published.npz") as file:
        dot2, wmma = file[f"dot2_{fmt}"], file[f"wmma_{fmt}"]
    a, b = (np.stack([v & 0xFFFF, v >> 16], axis=1).astype(np.uint16) for v in dot2.T[:2])
    c, wide = wmma[:, 32], [wmma[:, at : at + 16].astype(np.uint16) for at in (0, 16)]
    assert (wmma[:, 33] != wmma[:, 34]).any()  # the words tell the order of K in the two modes
    for name, x, y, z, d in (
        (f"v_dot2_f32_{fmt}", a, b, dot2[:, 2], dot2[:, 3]),
        (f"v_wmma_f32_16x16x16_{fmt}", *wide, c, wmma[:, 33]),
        (f"v_wmma_f32_16x16x16_{fmt}_w64", *wide, c, wmma[:, 34]),
    ):
        op = find_unit(name)
        model, spec = find_row(op, "gfx1201").model, product_spec(op)
        assert mismatches(dots(op, "gfx1201", x, y, z), d) == 0 and len(d) == find_row(op, "gfx1201").evidence.recorded
        names = [f"k {j}" for j in range(op.k)]
        products = (decode_products(model, spec, x[i].tolist(), y[i].tolist(), names, None) for i in range(len(d)))
        exact = [reduce_products(model, spec, found, int(z[i]))[1] for i, found in enumerate(products)]
        assert mismatches(np.array(exact, np.uint32), d) == 0


# ---- the units of the CPU that runs the tests


def draw_own(op: Unit, rng: np.random.Generator, kind: str, count: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw bytes, or bf16 codes: a [count, K], b [count, K], c [count].

    Of kind "brink", multiply-adds of products down to 2^-152 begin at the smallest normal number, where rounding to the subnormal grid
    and then flushing is wrong.
    """
    if op.d == S32:
        a, b = (rng.integers(0, 256, (count, k)).astype(np.uint8) for _ in "ab")
        c = rng.integers(-(2**31), 2**31, count).astype(np.int32) >> rng.integers(0, 31, count).astype(np.int32)
        return a, b, c.view(np.uint32)
    if kind != "brink":
        return draw(op, rng, kind, count, k)
    fields = rng.integers(51, 53, (2, count, k)) << 7
    fields[:, :, : k // 16] = 64 << 7  # one product of 2^-126 for each of the two chains of TDPBF16PS
    signs = rng.integers(0, 2, (count, k)) << 15
    a = np.where((np.arange(k) < k // 16) | (rng.integers(0, 2, (count, k)) == 1), fields[0] | signs, 0)
    c = np.where(rng.integers(0, 3, count) == 0, 0, 0x00800000 + rng.integers(0, 3, count)) | rng.integers(0, 2, count) << 31
    return a.astype(np.uint16), fields[1].astype(np.uint16), c.astype(np.uint32)


def compare_with_this_machine(op: Unit, count: int) -> int:
    """Compare `count` outputs or more with this machine's own, ten classes of operands; returns how many were compared."""
    rng, compared, tiled = np.random.default_rng(46), 0, op.m > 1
    model, spec = find_row(op, op.targets[0]).model, product_spec(op)
    while compared < count:
        for kind in (*operands.CLASSES, "brink"):
            if tiled:
                rows = 512 * 16
                a, b = (draw_own(op, rng, kind, rows, op.k)[i].reshape(512, 16, op.k) for i in range(2))
                c = draw_own(op, rng, kind, rows * 16, 2)[2].reshape(512, 16, 16)
                d = np.asarray(multiply_matrices(model, spec, a, b.swapaxes(1, 2), c)).view(np.uint32)
                wanted = x86_probe.run_tiles(op, a, b.swapaxes(1, 2), c)
            else:
                a, b, c = draw_own(op, rng, kind, min(1 << 16, count // 160 * 16), op.k)
                d, wanted = dots(op, op.targets[0], a, b, c).view(np.uint32), x86_probe.run_rows(op, a, b, c)
            wrong = int((d != wanted).sum()) if op.d == S32 else mismatches(d, wanted)
            assert wrong == 0, f"{op}: {wrong} of {d.size} outputs differ on operands of kind {kind}"
            compared += d.size
    print(f"{op}: 0 differences of {compared:,}")
    return compared


@pytest.mark.parametrize(
    "count", [pytest.param(1 << 14, id="a sample"), pytest.param(10_000_000, id="ten million", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("name", sample_cases(["vdpbf16ps", "vpdpbusd", "vpdpbusds"], ["vdpbf16ps"]))
def test_lanes_are_this_machine_s_own(name, count):
    assert compare_with_this_machine(find_unit(name), count) >= count


@pytest.mark.full
@pytest.mark.parametrize("name", ["tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud"])
def test_tiles_are_this_machine_s_own(name):
    assert compare_with_this_machine(find_unit(name), 10_000_000) >= 10_000_000


# ---- published examples

EQUATION_10 = [-(2.0**13), -0.5, -0.25, -0.125], [2.0**10, 1.0, 1.0, 1.0], 2.0**23


OF_EQUATION_10 = [
    ("f16", "MI100", -0.875), ("bf16", "MI100", -0.875),
    ("f16", "MI250X", 0.0), ("v_mfma_f32_32x32x8bf16_1k", "MI250X", 0.0), ("v_mfma_f32_32x32x4bf16", "MI250X", -0.375),
    ("f16", "MI300X", -0.5), ("bf16", "MI300X", -0.5), ("tf32", "MI300X", -0.5), ("e5m2fnuz", "MI300X", -1.0),
]  # fmt: skip


@pytest.mark.parametrize("case", sample_cases(OF_EQUATION_10, 8))
def test_equation_10(case):
    """MMA-Sim, arXiv 2511.10909 v2, equation 10: exactly -0.875."""
    op, target, wanted = case
    a, b, c = EQUATION_10
    d = tcemu.gemm(np.float32([a]), np.float32(b)[:, None], np.float32([[c]]), op=op, target=target)
    assert float(d[0, 0]) == wanted


@pytest.mark.parametrize(
    ("target", "c", "wanted"),
    [("MI300X", -1e-6, -0.25), ("MI300X", 1e-6, 0.0), ("MI250X", -1e-6, -1e-6)],
)
def test_cdna3_rounds_down(target, c, wanted):
    """The asymmetry example of arXiv 2511.10909, VI-C."""
    d = tcemu.gemm(np.float32([[2048, 2048]]), np.float32([[2048], [-2048]]), np.float32([[c]]), op="f16", target=target)
    assert float(d[0, 0]) == np.float32(wanted)


def test_cdna2_flushes_subnormals():
    """AMD, MIOpen, "MI200 alternate implementation": CDNA2 alone takes subnormal inputs for zero."""
    tiny, one = np.float32([[2.0**-15]]), np.float32([[1]])
    found = {name: float(tcemu.gemm(tiny, one, op="f16", target=name)[0, 0]) for name in ("MI250X", "MI300X")}
    assert found == {"MI250X": 0.0, "MI300X": 2.0**-15}


def test_arm_rounds_to_odd():
    """1 + 2^-30 is inexact: to odd it is the next f32, to nearest 1; with EBF = 1 the pair is added exactly."""
    a, b = np.float32([[1, 2.0**-15]]), np.float32([[1], [2.0**-15]])
    word = lambda op, target: int(np.asarray(tcemu.gemm(a, b, op=op, target=target)).view(np.uint32)[0, 0])
    assert word("bf16", "Graviton3") == word("bfdot", "Neoverse V2") == 0x3F800001
    assert word("bfmmla_ebf", "Armv9-A") == 0x3F800000


# ---- against the reference, and against mmasim


@pytest.mark.parametrize("unit", sample_cases(UNITS, 28, ids=unit_id))
def test_the_engine_is_the_reference(unit):
    """Two instructions along K, a few dot products of every class of operands, special values and subnormals included."""
    op, target = unit
    rng, wrong = np.random.default_rng(5), []
    model, spec, k = find_row(op, target).model, product_spec(op), 2 * op.k
    parts = [draw(op, rng, kind, 3, k) for kind in operands.CLASSES]
    a, b, c = (np.concatenate(part) for part in zip(*parts, strict=True))
    d = dots(op, target, a, b, c)
    for i, word in enumerate(d.tolist()):
        products = decode_products(model, spec, a[i].tolist(), b[i].tolist(), [f"k {j}" for j in range(k)], None)
        _, wanted = reduce_products(model, spec, products, int(c[i]))
        if word != wanted:
            wrong.append((hex(word), hex(wanted), a[i], b[i], hex(c[i])))
    assert not wrong, wrong[:2]
    assert len(d) == 3 * len(operands.CLASSES)


SIMULATED = [(op, target) for op, target in UNITS if mmasim_oracle.simulates(op, target)]


@pytest.mark.full
@pytest.mark.parametrize("unit", SIMULATED, ids=unit_id)
def test_a_million_operands_by_mmasim(unit):
    """10^6 dot products a row, nine classes of operands.

    mmasim is left out in two places. With FP8 it drops a NaN or an infinite C beside a large sum, as a small C. For CDNA1 it sums doubles
    and decides on one of them what overflows; where it differs, the exact reference decides.
    """
    op, target = unit
    simulate, model, spec = mmasim_oracle.simulator(op, target), find_row(op, target).model, product_spec(op)
    rng, wrong, compared = np.random.default_rng(11), [], 0
    while compared < 1_000_000:
        for kind in operands.CLASSES:
            a, b, c = draw(op, rng, kind, 14_000, op.k)
            d, wanted = dots(op, target, a, b, c), simulate(a, b, c)
            nan = is_nan(c) | (a == op.a.nan).any(-1) | (b == op.b.nan).any(-1)
            left_out = (nan | (c & NAN == F32.infinity)) & (op.a.specials == "fnuz")
            assert is_nan(d[nan]).all() and not np.isfinite(d.view(np.float32)[left_out]).any()
            for i in np.flatnonzero((d != wanted) & ~(is_nan(d) & is_nan(wanted)) & ~left_out):
                products = decode_products(model, spec, a[i].tolist(), b[i].tolist(), [f"k {j}" for j in range(op.k)], None)
                if target != "gfx908" or reduce_products(model, spec, products, int(c[i]))[1] != d[i]:
                    wrong.append((hex(d[i]), hex(wanted[i]), a[i], b[i], hex(c[i])))
            compared += len(c)
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:2]}"


def test_mmasim_is_asked_about_every_float_row_of_amd():
    amd = [(op, target) for op, target in UNITS if target in mmasim_oracle.FAMILIES and op.a.name != "f32"]
    assert amd == SIMULATED and len(amd) >= 12


# ---- integers


def test_integers_are_exact_wrapped_or_clamped_once():
    a, b, c = np.uint8([[255, 255, 255, 255]]), np.int8([[127], [127], [127], [-128]]), np.int32([[2**31 - 1]])
    assert int(tcemu.gemm(a, b, c, op="vpdpbusds", target="Zen 4")[0, 0]) == 2**31 - 1
    assert int(tcemu.gemm(a, b, c, op="vpdpbusd", target="Zen 4")[0, 0]) == (2**31 - 1 + 255 * 253) - 2**32
    bytes_, signs = np.random.default_rng(0).integers(0, 256, (2, 70)).astype(np.uint8), {S8: np.int8, U8: np.uint8}
    for op, target in (("tdpbsud", "sapphirerapids"), ("s8", "MI300X")):
        a, b = bytes_.view(signs[tcemu.check(op, target).a]), bytes_.T.copy().view(signs[tcemu.check(op, target).b])
        assert (np.asarray(tcemu.gemm(a, b, op=op, target=target)) == a.astype(np.int64) @ b.astype(np.int64)).all()
    integers = {op for target in OTHER_TARGETS if target not in UNKNOWN for op in other_units(target) if op.d == S32}
    assert all(find_row(op, op.targets[0]).model == Model(S32) for op in integers) and len(integers) > 20


# ---- names and refusals


def test_every_instruction_has_a_row_or_says_what_is_known():
    for target in OTHER_TARGETS:
        for op in other_units(target):
            assert tcemu.parse(str(op)) is tcemu.check(str(op).upper(), target) or tcemu.parse(str(op)) == op
            assert target in tcemu.targets(op)
            if target in UNKNOWN:
                with pytest.raises(NotModelled, match="known is"):
                    tcemu.evidence(op, target)
            else:
                assert tcemu.evidence(op, target).level in ("silicon", "published", "literature")
    used = {id(find_row(op, target)) for target in OTHER_TARGETS if target not in UNKNOWN for op in other_units(target)}
    assert used == {id(row) for row in OTHER_ROWS}


def test_names_of_machines():
    names = {"MI300X": "gfx942", "AMD Instinct MI300X": "gfx942", "mi100": "gfx908", "Xeon (Sapphire Rapids)": "sapphirerapids",
             "Sapphire Rapids": "sapphirerapids", "Intel Xeon (Emerald Rapids)": "sapphirerapids",
             "Zen 4": "znver4", "Graviton3": "neoverse-v1", "Neoverse V2": "neoverse-v2",
             "CDNA2": "gfx90a"}  # fmt: skip
    assert {name: resolve_target(name) for name in names} == names


def test_what_cannot_be_is_refused_by_name():
    zeros = np.zeros((32, 4), np.uint32)
    with pytest.raises(Unsupported, match=r"tdpbf16ps: .*registers.*gemm"):
        tcemu.mma("tdpbf16ps", zeros, zeros[:, :2], zeros, target="Sapphire Rapids")
    with pytest.raises(Unsupported, match=r"sapphirerapids.*target is sm_90a.*Intel"):
        tcemu.gemm(np.eye(4), np.eye(4), op="tdpbf16ps", target="H100")
    with pytest.raises(Unsupported, match=r"CDNA3 by AMD.*e4m3fnuz"):
        tcemu.gemm(np.eye(4), np.eye(4), op="e4m3", target="MI300X")
    with pytest.raises(NotModelled, match="CDNA4"):
        tcemu.gemm(np.eye(4), np.eye(4), op="bf16", target="MI355X")
    with pytest.raises(ValueError, match="registers of other makers"):
        find_unit("bfmmla").register_count("a")


def test_no_kernel_takes_a_model_that_it_does_not_know():
    for op, target in UNITS:
        model = find_row(op, target).model
        assert step_numbers(model, product_spec(op)) is None, op


@pytest.mark.parametrize("name", sample_cases(["bf16 on MI300X", "f16 on MI250X"], ["bf16 on MI300X"]))
def test_a_recipe_takes_the_machine_s_unit(name):
    """Its gradients too."""
    recipe, rng = tcemu.get_recipe(name), np.random.default_rng(1)
    a, b = (rng.standard_normal(size).astype(np.float32) for size in ((3, 20), (20, 2)))
    assert (np.asarray(tcemu.matmul(a, b, recipe=name)) == np.asarray(tcemu.gemm(a, b, op=recipe.op, target=recipe.target))).all()
    assert isinstance(recipe.op, Unit) and all(isinstance(one.op, Unit) for one in recipe.gradients)
    assert type(recipe).from_json(recipe.to_json()) == recipe
    with pytest.raises(Unsupported, match="e4m3fnuz"):
        tcemu.get_recipe("fp8 on MI300X")


def test_commands_know_the_units(capsys):
    assert main(["check", "tdpbf16ps", "--target", "Sapphire Rapids"]) == 0
    assert main(["list", "--target", "MI100"]) == 0
    assert main(["list", "--evidence", "--target", "MI300X"]) == 0
    said = capsys.readouterr().out
    assert "tdpbf16ps is an instruction of sapphirerapids. Intel" in said and "v_mfma_f32_32x32x8f16\n" in said
    assert "v_mfma f16 to f32: joined steps of 8, f32 RN\n    literature: MMA-Sim" in said


ACROSS = [("bf16", "MI300X"), ("f16", "MI100"), ("bf16", "Xeon (Sapphire Rapids)"), ("f64", "MI250X"), ("s8", "MI300X")]


@pytest.mark.parametrize("case", sample_cases(ACROSS, ()))
def test_fuzz_takes_other_makers_on_nvidia_s_operands(case):
    """The compiled loop against the slow reference, and against gemm."""
    op, machine = case
    found = fuzz.find_mismatches(op, machine, f"reference:{machine}", cases=2, seed=3, coverage=False)
    assert found.done == 2 and found.wrong_outputs == 0
    if op == "f64":
        return
    instruction, dtype = tcemu.parse(op), {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "s8": np.int8}[op]
    drawn = {name: np.asarray(v) for name, v in fuzz.generate(instruction, 3, 0, 8).items()}
    d = np.asarray(fuzz.get_implementation(instruction, machine).fn(drawn))
    result = np.int32 if op == "s8" else np.float32
    for i in range(8):
        a, b, c = drawn["a"][i].view(dtype), drawn["b"][i].view(dtype), drawn["c"][i].view(result)
        wanted = np.asarray(tcemu.gemm(a, b, c, op=tcemu.check(op, machine), target=machine)).view(np.uint32)
        assert mismatches(d[i].view(np.uint32), wanted) == 0


def test_fuzz_refuses_what_a_unit_does_not_multiply():
    with pytest.raises(Unsupported, match=r"no unit of gfx942 \(CDNA3\) multiplies such operands; .*f16 by f16 to f32"):
        fuzz.find_mismatches("f16 sparse", "MI300X", "H100", cases=1)
    with pytest.raises(Unsupported, match=r"u8 by s8 to s32"):
        fuzz.find_mismatches("s8", "Zen 4", "H100", cases=1)


def word(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.full
def test_explain_compares_makers():
    a, b, c = EQUATION_10
    both = tcemu.explain("bf16", a, b, c, target=["H100", "MI300X", "MI250X", "MI100"])
    assert [one.result for one in both.explanations] == [word(v) for v in (-0.75, -0.5, 0.0, -0.875)]
    text = str(both)
    assert "v_mfma_f32_32x32x8_bf16 on gfx942" in text and "evidence: literature: MMA-Sim" in text
    for target in ("MI300X", "MI250X", "MI100"):
        d = np.asarray(tcemu.gemm(np.float32([a]), np.float32(b)[:, None], np.float32([[c]]), op="bf16", target=target))
        assert tcemu.explain("bf16", a, b, c, target=target).result == int(d.view(np.uint32)[0, 0])
