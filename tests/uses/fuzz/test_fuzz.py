"""Generated operands, runs and their file, shrinking, coverage: against known words, NumPy, the slow reference, and planted differences."""

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.device_processes import run_on_devices
from support.emulated_gpu import without_gpu
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz, silicon
from tcemu.cli import main
from tcemu.faces.commands.arguments import parse_count
from tcemu.faces.commands.fuzz_commands import family_instructions as asked_for
from tcemu.uses.fuzz.coverage import EVENTS
from tcemu.uses.fuzz.differential_run import read_run_header
from tcemu.uses.fuzz.implementations import codes_function
from tcemu.uses.fuzz.random_words import WORD_MASK, add_offset, case_keys, draw_words, mix_int, mix_words, split_uint64

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
SPARSE = "mma.sp::ordered_metadata.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
NVFP4 = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
S8 = "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32"
QUAD = "mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16"
F64 = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64"
# the operands of cases 5 to 1028 of seed 0x123456789ABCDEF0, as they must be in every version and on every machine
KNOWN = {F16: 0x8948AA9D, SPARSE: 0x84DBF1CE, NVFP4: 0x4D8AC5DB, S8: 0x133062BE, F64: 0x38CC232E}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def checksum(operands):
    return zlib.crc32(b"".join(np.ascontiguousarray(operands[name]).tobytes() for name in sorted(operands)))


# ---- words and operands


def test_words_are_those_of_a_count_in_plain_integers():
    seed, number = 0x0123456789ABCDEF, (1 << 40) + 7
    left, right = number & WORD_MASK, number >> 32
    for i in range(4):
        half = seed >> 32 * (i % 2) & WORD_MASK
        left, right = right, left ^ mix_int((right + mix_int(half + 0x9E3779B9 * (i + 1) & WORD_MASK)) & WORD_MASK)
    keys = case_keys(split_uint64(seed), split_uint64(number))
    assert (int(keys[0]), int(keys[1])) == (left, right)
    expected = []
    for place in range(5):
        x = (left + place * 0x9E3779B9 + mix_int(3)) & WORD_MASK
        x = (x ^ x >> 16) * 0x7FEB352D & WORD_MASK ^ right
        x = (x ^ x >> 15) * 0x846CA68B & WORD_MASK
        expected.append(x ^ x >> 16)
    assert draw_words(keys, 3, jnp.arange(5, dtype=jnp.uint32)).tolist() == expected


def test_numbers_beyond_32_bits_count_on():
    low, high = add_offset(split_uint64((1 << 32) - 2), jnp.arange(4, dtype=jnp.uint32))
    assert [int(x) | int(y) << 32 for x, y in zip(low, high, strict=True)] == [(1 << 32) - 2 + i for i in range(4)]


def test_mix_is_a_bijection_of_the_lowest_and_highest_words():
    for start in (0, (1 << 32) - (1 << 16)):
        found = np.asarray(mix_words(jnp.arange(1 << 16, dtype=jnp.uint32) + np.uint32(start)))
        assert len(np.unique(found)) == 1 << 16
        assert abs(np.unpackbits(found.view(np.uint8)).mean() - 0.5) < 0.002


def operands(op, seed, start):
    """All with one compiled program for each instruction."""
    return {name: np.asarray(codes) for name, codes in fuzz.generate(op, seed, start, 1024).items()}


@pytest.mark.parametrize("op", sample_cases(KNOWN, (F16,)))
def test_known_operands(op):
    assert checksum(operands(op, 0x123456789ABCDEF0, 5)) == KNOWN[op]


def test_a_case_is_the_same_whatever_it_was_made_with():
    whole = operands(F16, 3, 100)
    part = fuzz.generate(F16, 3, 107, 2)
    for name, codes in part.items():
        assert np.array_equal(codes, whole[name][7:9])


def test_operands_reach_the_corners():
    """Every kind of number in A, B and C, legal and illegal metadata, every scale."""
    given = operands(F16, 1, 0)
    found = set(np.unique(given["a"]).tolist())
    assert {0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7C01, 0x3C00, 0x8000, 0xFC00} <= found and len(found) > 40000
    assert len(set((given["c"] >> 23 & 0xFF).ravel().tolist())) == 256
    sparse = operands(SPARSE, 1, 0)["e"]
    assert set(np.unique(sparse).tolist()) == set(range(16))
    assert np.isin(sparse, (4, 8, 9, 12, 13, 14)).all((1, 2)).mean() > 0.8
    assert len(np.unique(operands(NVFP4, 1, 0)["scale_b"])) == 256


def test_kinds_and_their_weights_are_those_asked_for():
    only = fuzz.generate(F16, 1, 0, 64, kinds=["subnormal"])
    low = np.asarray(only["a"]) >> 10 & 31
    other = np.asarray(fuzz.generate(F16, 1, 0, 64, kinds=["subnormal", "raw bits"], weights=[0, 1])["a"])
    assert len(np.unique(low)) < 32 and len(np.unique(other >> 10 & 31)) == 32
    with pytest.raises(ValueError, match=r"'none' is unknown.*'raw bits'"):
        fuzz.generate(F16, 1, 0, 1, kinds=["none"])
    with pytest.raises(ValueError, match="weights"):
        fuzz.generate(F16, 1, 0, 1, kinds=["raw bits"], weights=[0])
    with pytest.raises(ValueError, match="start: got -1"):
        fuzz.generate(F16, 1, -1, 1)
    with pytest.raises(tcemu.Unsupported, match="computes nothing"):
        fuzz.generate("movmatrix.sync.aligned.m8n8.trans.b16", 1, 0, 1)


# ---- runs


def count_differences(op, left, right, cases, seed=0):
    """The counts of a run, made without it."""
    given = {name: np.asarray(v) for name, v in fuzz.generate(op, seed, 0, cases).items()}
    x, y = (np.asarray(tcemu.dot(op, **given, target=target)) for target in (left, right))
    differ = (x != y).sum((1, 2))
    return int((differ > 0).sum()), int(differ.sum()), tuple(np.flatnonzero(differ)[:16].tolist())


def test_a_run_counts_what_differs():
    found = fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=700, shrink=False)
    assert (found.wrong_cases, found.wrong_outputs, found.first) == count_differences(SMALL, "sm_80", "sm_90a", 700)
    assert found.wrong_cases > 100 and found.done == 700 and found.by_kind.sum(0).tolist() == [700, found.wrong_cases]
    assert "nothing cut" in str(found) and found.coverage.events[EVENTS.index("C zero")] > 0


def test_the_slow_reference_agrees_where_products_cancel_beside_a_small_accumulator():
    """Case 19 is one that kernels got wrong once, for 128 outputs, and that the portable backend had right."""
    assert fuzz.find_mismatches("f16", "H100", "reference:H100", cases=20, coverage=False).wrong_outputs == 0


@pytest.mark.full
def test_the_slow_reference_agrees():
    found = fuzz.find_mismatches(SMALL, "sm_90a", "reference:sm_90a", cases=4, coverage=False)
    assert (found.wrong_outputs, found.done) == (0, 4)


@pytest.mark.full
@pytest.mark.parametrize(("op", "target"), [(F64, "sm_90"), (SPARSE, "sm_90"), (NVFP4, "sm_120a"), (S8, "sm_90")])
def test_the_slow_reference_agrees_on_other_types(op, target):
    assert fuzz.find_mismatches(op, target, f"reference:{target}", cases=4, coverage=False).wrong_outputs == 0


def test_any_function_is_a_side_and_a_fault_of_it_is_made_small():
    def wrong(given):
        d = np.array(tcemu.dot(SMALL, **given, target="sm_90a"))
        d[d == 0x7FFFFFFF] = 0x7FC00000
        return d

    found = fuzz.find_mismatches(SMALL, "sm_90a", wrong, cases=64, coverage=False)
    assert found.wrong_cases > 0 and found.small_mismatch is not None
    assert found.small_mismatch.results == (0x7FFFFFFF, 0x7FC00000) and found.small_mismatch.terms <= 1
    assert "7fc00000" in str(found)
    with pytest.raises(ValueError, match=r"returned uint8\[1\] for .*; expected D's codes, uint32\[64, 16, 8\]"):
        fuzz.find_mismatches(SMALL, "sm_90a", lambda given: np.zeros(1, np.uint8), cases=64)


def test_a_mismatch_shrinks_to_two_terms_and_is_explained():
    """Sign-magnitude cuts differ from none with one large and one small term; no single term can tell."""
    found = fuzz.find_mismatches(SMALL, "sm_90a", "sm_90a:fraction_bits=24", cases=200, coverage=False)
    assert found.small_mismatch is not None
    present = sum(
        bool(x & 0x7FFF) and bool(y & 0x7FFF)
        for x, y in zip(found.small_mismatch.operands["a"], found.small_mismatch.operands["b"], strict=True)
    )
    assert present == found.small_mismatch.terms <= 2 and "diverge" in str(found.small_mismatch)
    v = found.small_mismatch.operands
    told = tcemu.explain(
        SMALL,
        v["a"],
        v["b"],
        v["c"][0],
        codes=True,
        target="sm_90a",
        model=[None, tcemu.get_model(SMALL, "sm_90a").replace(fraction_bits=24)],
    )
    assert tuple(e.result for e in told.explanations) == found.small_mismatch.results


@without_gpu
def test_a_run_goes_on_where_it_stopped(tmp_path, monkeypatch):
    whole = fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=3000, iterations=1, shrink=False)

    from tcemu.uses.fuzz import differential_run as runs

    real, calls = runs.add_chunk, []

    def interrupted(state, found):
        calls.append(state.done)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(state, found)

    monkeypatch.setattr(runs, "add_chunk", interrupted)
    part = fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=3000, iterations=1, out=tmp_path, shrink=False)
    assert part.stopped and 0 < part.done < 3000 and read_run_header(tmp_path)["done"] == part.done
    monkeypatch.undo()
    resumed = fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=3000, iterations=1, out=tmp_path, shrink=False)
    assert same(resumed, whole) and not resumed.stopped
    with pytest.raises(ValueError, match="holds another run: seed is 0 there and 1 here"):
        fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=3000, seed=1, out=tmp_path)
    with np.load(tmp_path / "run.npz") as held:
        number = whole.first[0]
        left = np.asarray(tcemu.dot(SMALL, *(held[f"case_{number}_{name}"] for name in "abc"), target="sm_80"))
        assert np.array_equal(held[f"case_{number}_left"], left) and not np.array_equal(left, held[f"case_{number}_right"])


def same(one, other):
    counts = all(getattr(one, name) == getattr(other, name) for name in ("done", "wrong_cases", "wrong_outputs", "first"))
    reached = (vars(run.coverage).values() for run in (one, other))
    return counts and np.array_equal(one.by_kind, other.by_kind) and all(map(np.array_equal, *reached))


SITTING = """
import sys
from tcemu.uses.fuzz import differential_run
differential_run.SAVE_INTERVAL_SECONDS = 0.0
differential_run.find_mismatches({op!r}, "sm_80", "sm_90a", cases={cases}, out=sys.argv[1], iterations=1, coverage={covering}, shrink=False)
"""


def run_with_kills(directory, op, kills, cases, covering):
    """Starts a run and kills it at random moments after its first chunk; then lets it end. Returns how far it was at each kill."""
    at, rng = [], np.random.default_rng(kills)
    done = lambda: read_run_header(directory)["done"] if (directory / "run.npz").exists() else 0
    command = [sys.executable, "-c", SITTING.format(op=op, cases=cases, covering=covering), str(directory)]
    environment = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": str(directory / "programs")}
    for _ in range(kills):
        before = done()
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and done() == before:
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
        at.append(done())
    subprocess.run(command, env=environment, check=True)
    assert at == sorted(at) and at[0] > 0
    return at


def check_held(directory, whole):
    found = read_run_header(directory)
    assert [found[name] for name in ("done", "wrong_cases", "wrong_outputs")] == [whole.cases, whole.wrong_cases, whole.wrong_outputs]
    assert tuple(found["first"]) == whole.first
    with np.load(directory / "run.npz") as held:
        assert np.array_equal(held["by_kind"], whole.by_kind)
        if whole.coverage is not None and whole.coverage.cases[0]:
            assert np.array_equal(held["coverage_events"], whole.coverage.events)


@pytest.mark.full
def test_killed_and_resumed_it_ends_with_the_same_counts(tmp_path):
    run_with_kills(tmp_path, S8, 1, 200_000, False)
    check_held(tmp_path, fuzz.find_mismatches(S8, "sm_80", "sm_90a", cases=200_000, coverage=False, shrink=False))


@pytest.mark.full
def test_killed_twenty_times_it_ends_with_the_same_counts(tmp_path):
    at = run_with_kills(tmp_path, SMALL, 20, 600_000, True)
    assert len(set(at)) > 10 and at[-1] < 600_000
    check_held(tmp_path, fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=600_000, shrink=False))


@pytest.mark.full
def test_eight_devices_share_the_cases(tmp_path):
    code = f"""
import json, jax
from tcemu.fuzz import find_mismatches
assert len(jax.devices()) == 8
r = find_mismatches({SMALL!r}, "sm_80", "sm_90a", cases=20000, shrink=False, coverage=False)
print(json.dumps([r.done, r.wrong_cases, r.wrong_outputs, r.first]))
"""
    said = run_on_devices(8, code)
    one = fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=20000, shrink=False, coverage=False)
    assert json.loads(said) == [20000, one.wrong_cases, one.wrong_outputs, list(one.first)]


# ---- words in, words out


def test_the_command_compares_and_goes_on(tmp_path, capsys):
    words = [SMALL, "--left", "sm_80", "--right", "sm_90a", "--cases", "7e2", "--out", str(tmp_path), "--quiet"]
    assert main(["fuzz", *words]) == 1
    said = capsys.readouterr().out
    wrong_cases, wrong_outputs, _ = count_differences(SMALL, "sm_80", "sm_90a", 700)
    assert f"{wrong_outputs:,} of 89,600 outputs differ, in {wrong_cases:,} cases" in said
    assert "not reached: " in said and "shrunk: " in said and "diverge" in said
    assert main(["fuzz", "--resume", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().out == said


def test_the_command_runs_a_family(capsys):
    ops = tcemu.isa.instructions("sm_70", "mma")
    assert [op.family for op in asked_for("mma", "sm_70", "reference:sm_70")] == ["mma"] * len(ops)
    assert main(["fuzz", "wgmma", "--left", "sm_70", "--right", "sm_90a"]) == 2
    assert "have no wgmma in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fuzz --left sm_80 --right sm_90", "give OP, --left and --right"),
        (f"fuzz {SMALL} --left sm_80 --right sm_80:bits=3", "unknown field 'bits'"),
        (f"fuzz {SMALL} --left sm_70 --right sm_80", "needs sm_75 or later"),
        (f"fuzz {SMALL} --left sm_80 --right sm_90 --kind odd", "'odd' is not one of"),
        ("fuzz --resume nowhere", "nowhere: no run"),
        (f"fuzz {SMALL} --resume nowhere", "only --cases"),
    ],
)
def test_what_cannot_be_done_is_said(line, said, capsys):
    assert main(line.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("line", [f"fuzz {SMALL} --left sm_80 --right gpu", "verify mma", f"infer {SMALL} --target gpu"])
def test_what_needs_a_gpu_is_said(line, capsys):
    if there_is_a_gpu():
        pytest.skip("there is a GPU here")
    assert main(line.split()) == 2
    assert "needs an NVIDIA GPU and the extra `silicon`" in capsys.readouterr().err


def there_is_a_gpu():
    try:
        return silicon.gpu() is not None
    except tcemu.Unsupported:
        return False


def test_a_count_is_a_count():
    assert (parse_count("1e9"), parse_count("123")) == (10**9, 123)
    for text in ("-1", "0.5", "many", "inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_count(text)


@pytest.mark.full
def test_registers_are_a_level_too():
    """The emulation behind registers, as a GPU would stand there, agrees with that on codes; one product of four that differs is seen."""
    op = tcemu.parse(QUAD)

    def call(given, wrong=0):
        d = tcemu.mma(op, given["a"], given["b"], given["c"], target="sm_80")
        return d.at[:, 4:8].set(d[:, 4:8] ^ np.uint32(wrong))  # lanes 4 to 7 hold rows of the second product

    given = fuzz.generate(op, 0, 0, 64)
    expected = tcemu.dot(op, **given, target="sm_80")
    for wrong in (0, 1):
        side = fuzz.Implementation("registers", lambda given, wrong=wrong: call(given, wrong), level="registers")
        assert np.array_equal(codes_function(op, side)(given), expected) is (not wrong)
