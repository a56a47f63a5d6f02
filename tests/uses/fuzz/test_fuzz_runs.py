"""A held run: whose sides may go on with it, files that no run wrote, disks that take nothing, two runs at once, and counts of nothing."""

import errno
import io
import json
import os
import re
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.emulated_gpu import EmulatedGpu
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz
from tcemu.base import files
from tcemu.cli import main
from tcemu.uses.fuzz import differential_run as runs

S8 = "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32"
SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
ROOM = 64 << 20  # bytes that reading a hostile file may take


def right(given):
    return np.asarray(tcemu.dot(S8, **given, target="sm_90a"))


def run(out, cases=64, left="sm_80", right="sm_90a", **more):
    return fuzz.find_mismatches(S8, left, right, cases=cases, out=out, coverage=False, shrink=False, **more)


# ---- which side is which


def test_a_function_is_not_told_by_its_name(tmp_path):
    """A correct one, then one that flips a bit of every output, of the same name: the second is never taken for the first."""
    both = [lambda given: right(given), lambda given: right(given) ^ 1]
    assert run(tmp_path, right=both[0]).wrong_cases == 0
    before = (tmp_path / "run.npz").read_bytes()
    for function in both:
        with pytest.raises(ValueError, match=r"cannot resume: <lambda> is a function"):
            run(tmp_path, right=function)
    assert (tmp_path / "run.npz").read_bytes() == before
    assert run(None, right=both[1]).wrong_outputs == 64 * 64


def test_a_side_goes_on_by_its_identity(tmp_path):
    sides = [
        fuzz.Implementation("mine", function, traceable=False, identity=words) for function, words in ((right, "1"), (lambda given: 0, "2"))
    ]
    first = run(tmp_path, right=sides[0])
    again = run(tmp_path, right=sides[0])
    assert again.complete and (again.done, again.seconds) == (64, first.seconds)
    with pytest.raises(ValueError, match=r"identities is .*'1'\] there and .*'2'\] here"):
        run(tmp_path, right=sides[1])


def test_that_a_run_cannot_go_on_is_said_at_its_start(tmp_path):
    lines = []
    run(tmp_path, right=right, report=lines.append)
    assert "cannot resume" in lines[0] and "without an identity" in lines[0]


def test_it_says_that_it_compiles_and_how_long_it_did():
    lines = []
    fuzz.find_mismatches(SMALL, "sm_80", "sm_90a:fraction_bits=7", cases=1, report=lines.append, coverage=False, shrink=False)
    assert lines[0].startswith("compiling") and lines[-1].endswith("done")
    assert float(re.fullmatch(r"compiled in (\d+\.\d) s", lines[1])[1]) > 0
    lines.clear()
    fuzz.find_mismatches(SMALL, "sm_80", "sm_90a:fraction_bits=7", cases=1, report=lines.append, coverage=False, shrink=False)
    assert len(lines) == 2  # nothing was left to compile


def test_what_was_counted_is_held_when_the_reports_reader_goes(tmp_path):
    def report(line):
        if "a second" in line:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=1, out=tmp_path, report=report, coverage=False)
    assert runs.read_run_header(tmp_path)["done"] == 1


def test_two_gpus_are_two_sides(monkeypatch):
    from tcemu.uses.fuzz import implementations as sides

    identities = []
    for device in ("H100", "H200"):
        gpu = EmulatedGpu()
        monkeypatch.setattr(type(gpu), "facts", lambda self, device=device: {"device": device})
        monkeypatch.setattr(sides, "gpu", lambda gpu=gpu: gpu)
        identities.append(fuzz.get_implementation(SMALL, "gpu").identity)
        sides._implementation_from_spec.cache_clear()
    assert identities == ["gpu, device H100", "gpu, device H200"]


def test_the_order_of_kinds_is_part_of_the_question(tmp_path):
    """It says which case is of which kind."""
    run(tmp_path, kinds=["raw bits", "carries"])
    with pytest.raises(ValueError, match=r"kinds is .* there and .* here"):
        run(tmp_path, kinds=["carries", "raw bits"])


@pytest.mark.parametrize("kinds", [[], ["carries", "carries"]])
def test_kinds_come_once_each(kinds):
    with pytest.raises(ValueError, match="expected at least one"):
        fuzz.generate(S8, 0, 0, 1, kinds=kinds)


@pytest.mark.parametrize("weight", [-1, 0.5, float("nan"), 1 << 62])
def test_weights_are_whole_numbers(weight):
    with pytest.raises(ValueError, match="weights: got"):
        fuzz.generate(S8, 0, 0, 1, kinds=["carries", "raw bits"], weights=[1, weight])


# ---- counts of nothing


@pytest.mark.parametrize("cases", [0, -1, 1e30, 1e3, float("nan"), 1 << 62])
def test_a_run_of_no_cases_is_none(cases, tmp_path):
    with pytest.raises(ValueError, match=r"cases: got .*; expected an integer from 1"):
        run(tmp_path / "new", cases=cases)
    with pytest.raises(ValueError, match=r"cases: got .*; expected an integer from 1"):
        fuzz.infer_model(SMALL, "sm_90a", cases=cases if cases != 1 << 62 else 0)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "words",
    [
        f"fuzz {S8} --left sm_80 --right sm_90a --cases", f"infer {SMALL} --cases", "verify mma --outputs", "verify mma --jobs",
        "record mma --out x.npz --cases",
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", ["0", "-1", "1e30", "nan", "0.5", "²"])
def test_counts_of_nothing_are_refused(words, count, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*words.split(), count])
    assert stopped.value.code == 2
    assert "expected at least 1" in (error := capsys.readouterr().err) or "count from" in error or "expected one argument" in error


def test_what_compared_nothing_does_not_say_that_it_passed(monkeypatch, capsys):
    """Stopped before the first chunk, and while a model is confirmed."""

    def at_once(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "add_chunk", at_once)
    stopped = run(None)
    assert stopped.stopped and "nothing was compared" in str(stopped) and "0 mismatches" not in str(stopped)
    assert main(["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--cases", "64", "--quiet"]) == 130
    assert "nothing was compared" in capsys.readouterr().out
    with pytest.raises(KeyboardInterrupt):
        fuzz.infer_model(S8, "sm_90a", cases=64)


@pytest.mark.parametrize("weight", ["=-1", "=x", "=", "=1.5", "=1e3", "=99999999999", "=²"])
def test_a_weight_that_is_none_is_said(weight, capsys):
    assert main(["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--cases", "1", "--quiet", "--kind", f"raw bits{weight}"]) == 2
    assert "the weight is" in capsys.readouterr().err


# ---- disks


@pytest.fixture
def full(monkeypatch):
    """From now on nothing can be written."""

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return lambda: monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_loses_no_counts(tmp_path, full, monkeypatch, capsys):
    real, words = runs.add_chunk, ["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--cases", "64", "--out", str(tmp_path), "--quiet"]

    def added(*counted):
        full()
        return real(*counted)

    monkeypatch.setattr(runs, "add_chunk", added)
    with pytest.raises(OSError, match="cannot be written: No space left on device") as failed:
        run(tmp_path)
    assert failed.value.run.done == 64
    held = runs.read_run_header(tmp_path)
    assert held["done"] == 0 and [path.name for path in tmp_path.iterdir()] == ["run.npz"]
    (tmp_path / "run.npz").unlink()
    monkeypatch.undo()
    monkeypatch.setattr(runs, "add_chunk", added)
    assert main(words) == 2
    out, error = capsys.readouterr()
    assert "0 mismatches of 4,096 outputs" in out and "No space left" in error and error.count("\n") == 1


def test_a_place_that_takes_no_file_is_said_before_the_work(tmp_path, monkeypatch, full, capsys):
    monkeypatch.setattr(runs, "make_chunk_runner", lambda *_: pytest.fail("it began to work"))
    (tmp_path / "file").touch()
    words = ["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--quiet", "--out"]
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        assert main([*words, str(place)]) == 2
        assert "cannot be used: " in capsys.readouterr().err
    full()
    assert main([*words, str(tmp_path / "new")]) == 2
    assert "No space left" in capsys.readouterr().err and list((tmp_path / "new").iterdir()) == []


def test_an_error_of_a_side_loses_no_counts(tmp_path):
    calls = []

    def faulty(given):
        calls.append(0)
        if len(calls) > 2:
            raise ZeroDivisionError
        return right(given)

    with pytest.raises(ZeroDivisionError):
        run(tmp_path, cases=256, right=fuzz.Implementation("faulty", faulty, traceable=False, identity="1"))
    assert runs.read_run_header(tmp_path)["done"] == 128


LIMITED = f"""
import resource, sys
from tcemu.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.exit(main(["fuzz", {S8!r}, "--left", "sm_80", "--right", "sm_90a", "--cases", "64", "--out", sys.argv[1]]))
"""


@pytest.mark.full
def test_a_limit_on_files_is_said(tmp_path):
    ended = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True)
    assert ended.returncode == 2 and "File too large" in ended.stderr and "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


# ---- two at once


def test_a_second_run_is_refused_while_the_first_has_the_directory(tmp_path, capsys):
    seconds = []

    def meanwhile(given):
        if not seconds:
            with pytest.raises(ValueError, match="another run writes to") as refused:
                run(tmp_path, cases=128)
            seconds.append(refused)
            seconds.append(main(["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--out", str(tmp_path), "--quiet"]))
        return right(given)

    assert run(tmp_path, right=meanwhile).done == 64
    assert seconds[1] == 2 and "another run writes to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run.npz"]


HOLDS = "import sys, time\nfrom pathlib import Path\nfrom tcemu.base.files import lock_folder\n"
HOLDS += "with lock_folder(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)\n"


@pytest.mark.full
def test_a_crash_leaves_no_lock_behind(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another run writes to"):
            run(tmp_path)
        process.kill()
    assert run(tmp_path).done == 64


def test_what_a_kill_left_beside_the_file_goes(tmp_path):
    (tmp_path / f".run.npz.{'0123456789abcdef' * 2}").write_bytes(b"half")
    (tmp_path / ".run.npz.mine").write_bytes(b"")
    run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.npz.mine", "run.npz"]


def test_a_file_is_whole_or_as_it_was(tmp_path, full):
    path = tmp_path / "file"
    files.replace_file(path, b"old")
    full()
    with pytest.raises(OSError):
        files.replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


# ---- files that no run wrote


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    """A run that is complete, and the bytes of its file."""
    folder = tmp_path_factory.mktemp("held")
    complete = run(folder)
    return complete, (folder / "run.npz").read_bytes()


def members(content):
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(parts, method=zipfile.ZIP_DEFLATED):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as made:
        for name, data in parts.items():
            made.writestr(name, data)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def truncate(content, rng):
    return content[: rng.integers(0, len(content))]


def flip_byte(content, rng):
    changed = bytearray(content)
    for at in rng.integers(0, len(content), rng.integers(1, 9)):
        changed[at] ^= 1 << rng.integers(8)
    return bytes(changed)


def with_header(content, **changes):
    parts = members(content)
    header = json.loads(np.load(io.BytesIO(parts["header.npy"])).tobytes())
    header |= changes
    return archive(parts | {"header.npy": npy(np.frombuffer(json.dumps(header).encode(), np.uint8))})


ODD_VALUES = (-1, 10**9, 1 << 70, 0.5, float("nan"), "x", None, [], {}, [[]], [1, 0], True, "\ud800", [["raw bits", -1]])
FIELDS = (
    "done",
    "wrong_cases",
    "wrong_outputs",
    "first",
    "seconds",
    "cases",
    "seed",
    "kinds",
    "format",
    "op",
    "left",
    "models",
    "identities",
)


def other_header(content, rng):
    return with_header(content, **{str(rng.choice(FIELDS)): ODD_VALUES[rng.integers(len(ODD_VALUES))]})


def no_header(content, rng):
    parts = members(content)
    parts.pop(list(parts)[rng.integers(7)])
    return archive(parts)


class Trap:
    """Unpickled it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("TRAPPED"),)


def pickle_member(content, rng):
    parts = members(content)
    parts[list(parts)[rng.integers(7)]] = npy(np.array([Trap()], object))
    return archive(parts)


def bomb(content, rng):
    parts = members(content)
    parts[list(parts)[rng.integers(7)]] = npy(np.zeros(1 << 17, np.int64)) * 8
    return archive(parts, [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA][rng.integers(3)])


def lying_bomb(content, rng):
    """The directory says that 100 bytes come of it."""
    parts = members(content)
    name = list(parts)[rng.integers(7)]
    made = bytearray(archive(parts | {name: bytes(1 << 26)}))
    at = made.rindex(b"PK\1\2", 0, made.rindex(name.encode()))
    made[at + 24 : at + 28] = (100).to_bytes(4, "little")
    return bytes(made)


def huge(content, rng):
    parts = members(content)
    name = list(parts)[rng.integers(7)]
    buffer = io.BytesIO()
    shape = [(1 << 40,), (1 << 62, 1 << 62), (-1, 2), (5_000_000_000,), (10**30,)][rng.integers(5)]
    np.lib.format.write_array_header_1_0(buffer, {"descr": ["<i8", "|u1"][rng.integers(2)], "fortran_order": False, "shape": shape})
    return archive(parts | {name: buffer.getvalue() + bytes(64)})


def odd_name(content, rng):
    name = ["../../run.npz", "/etc/passwd", "header", "x" * 60000, "\u202e.npy", "by_kind.npy/", "case_x_a.npy"][rng.integers(7)]
    return archive(members(content) | {name: b"odd"})


def many(content, rng):
    return archive({f"case_{i}_a.npy": b"" for i in range(5000)} | members(content))


def no_zip(content, rng):
    return [b"", b"\0" * 100, b"PK\3\4", b"PK\5\6" + bytes(18), rng.bytes(1000), npy(np.ones(3)), bytes(1 << 25)][rng.integers(7)]


MUTATIONS = (truncate, flip_byte, other_header, no_header, pickle_member, bomb, lying_bomb, huge, odd_name, many, no_zip)


def check_refused(mutated, held, folder):
    """A named error, or a run with the counts of the true one; nothing is written, and memory is bounded."""
    path = folder / "run.npz"
    path.write_bytes(mutated)
    tracemalloc.start()
    try:
        went_on = run(folder)
    except ValueError as error:
        assert str(error).startswith("out: ") and ("is damaged, or no run's file" in str(error) or "holds another run" in str(error)
                                                   or "more than a run's file can have" in str(error)), error  # fmt: skip
        assert len(str(error)) < 10_000
    else:
        assert (went_on.done, went_on.wrong_outputs, went_on.first) == (held.done, held.wrong_outputs, held.first)
        assert np.array_equal(went_on.by_kind, held.by_kind)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < ROOM + len(mutated)
    assert path.read_bytes() == mutated and list(folder.iterdir()) == [path] and not Path("TRAPPED").exists()


@pytest.mark.parametrize("number", sample_cases(range(1000), 100))
def test_a_file_that_no_run_wrote_is_refused(number, held, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    rng = np.random.default_rng(number)
    check_refused(MUTATIONS[number // 10 % len(MUTATIONS)](held[1], rng), held[0], folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"done": 10**9}, "it says that 1,000,000,000 of 64 cases are done"),
        ({"done": 3}, "do not fit|are not those of the header"),
        ({"wrong_cases": 1, "wrong_outputs": 1, "first": [1]}, "are not those of the header"),
        ({"first": [70]}, "do not fit"),
        ({"seed": 1}, "seed is 1 there and 0 here"),
        ({"op": SMALL}, "op is"),
        ({"format": 1}, "its format is 1, and this tcemu reads"),
    ],
)
def test_a_header_by_hand_is_seen(changes, said, held, tmp_path, capsys):
    (tmp_path / "run.npz").write_bytes(with_header(held[1], **changes))
    with pytest.raises(ValueError, match=said):
        run(tmp_path)


@pytest.mark.parametrize("content", [b"", b"text", None], ids=["empty", "text", "cut"])
def test_the_command_says_of_a_damaged_file_that_it_is(content, held, tmp_path, capsys):
    (tmp_path / "run.npz").write_bytes(held[1][:-9] if content is None else content)
    assert main(["fuzz", "--resume", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert "run.npz is damaged, or no run's file: it " in error and error.count("\n") == 1


def test_a_directory_in_the_place_of_the_file_is_said(tmp_path, capsys):
    (tmp_path / "run.npz").mkdir()
    assert main(["fuzz", S8, "--left", "sm_80", "--right", "sm_90a", "--out", str(tmp_path), "--quiet"]) == 2
    assert "is not a file" in capsys.readouterr().err
