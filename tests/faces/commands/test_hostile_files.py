"""Files as an enemy would give them: what a command reads is refused by name, and what it writes costs nothing that was there."""

import gc
import os
import resource
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import hostile_arrays as hostile
from support.sampling import sample_cases

from tcemu.cli import main
from tcemu.operations.products.gemm import gemm

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
BATCH = 100


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with A [4, 5], B [5, 2] and C [4, 2]."""
    rng = np.random.default_rng(0)
    for name, shape in (("A", (4, 5)), ("B", (5, 2)), ("C", (4, 2))):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=shape).astype(np.float32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def multiply(*words: str | Path) -> int:
    return main(["gemm", *map(str, words), "--op", F16])


def refused(capsys, *words: str | Path) -> str:
    """The one line that `tcemu gemm` says, with exit status 2."""
    status = multiply(*words)
    out, error = capsys.readouterr()
    assert (status, out) == (2, ""), (status, out, error)
    assert error.startswith("tcemu gemm: ") and error.count("\n") == 1 and len(error) < 700, error
    return error


# ---- what is read


@pytest.mark.parametrize("batch", sample_cases(range(10), 10))
def test_hostile_files_are_refused_by_name(batch, folder, capsys):
    """1,000 in all. Good arrays among them have shapes that do not fit, so no file is multiplied."""
    before, bad = contents(folder), folder / "X.npy"
    multiply("A.npy", "A.npy")  # what is imported and cached on the way is not counted
    capsys.readouterr()
    gc.collect()
    gc.freeze()  # what other files' tests left is not looked at each time below
    tracemalloc.start()
    for number in range(batch * BATCH, (batch + 1) * BATCH):
        bad.write_bytes(hostile.mutate(number))
        words = ("X.npy", "B.npy") if number % 2 else ("A.npy", "B.npy", "-c", "X.npy")
        try:
            refused(capsys, *words, "-o", "D.npy")
        except BaseException as error:
            kind = hostile.KINDS[number % len(hostile.KINDS)].__name__
            raise AssertionError(f"file {number}, {kind}: {bad.read_bytes()[:300]}") from error
        bad.unlink()
        gc.collect()  # conftest lets the collector come late; what it would free is not held
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert contents(folder) == before
    assert peak < 8e6, f"{peak:,} bytes were held at once"


@pytest.mark.parametrize("dtype", sample_cases([">f4", ">f8", ">f2", ">i2", ">u8"], (">f4",)))
def test_byte_order_and_axis_order_change_nothing(dtype, folder, capsys):
    a, b = (np.round(np.load(f"{name}.npy") * 8) ** 2 for name in "AB")
    np.save("A.npy", a.astype(dtype))
    np.save("B.npy", np.asfortranarray(b.astype(dtype)))
    assert multiply("A.npy", "B.npy", "-o", "D.npy") == 0
    assert np.load("D.npy").tobytes() == np.asarray(gemm(a, b, op=F16, target="sm_90a")).tobytes()


def test_a_header_may_not_claim_more_than_the_file_has(folder, capsys):
    (folder / "X.npy").write_bytes(hostile.npy_with_header(hostile.header_text(shape="(100000, 100000)")))
    said = refused(capsys, "X.npy", "B.npy")
    assert "X.npy is damaged: its header says [100000, 100000] of float32, 40,000,000,000 bytes, and 0 follow it" in said
    (folder / "X.npy").write_bytes(hostile.GOOD + b"more")
    assert "48 bytes, and 52 follow it" in refused(capsys, "X.npy", "B.npy")


def test_a_small_file_may_not_ask_for_all_memory(folder, capsys):
    np.save("A.npy", np.zeros((10**13, 0), np.float32))
    np.save("B.npy", np.zeros((0, 3), np.float32))
    assert "D: [10000000000000, 3] of f32 takes 120,000.0 GB; this machine has " in refused(capsys, "A.npy", "B.npy")


def test_places_that_hold_no_file(folder, capsys):
    os.symlink("round.npy", "about.npy")
    os.symlink("about.npy", "round.npy")
    os.mkfifo("pipe.npy")
    (folder / "folder.npy").mkdir()
    before = contents(folder)
    for name, said in {
        "round.npy": "symbolic links",
        "pipe.npy": "A: pipe.npy is not a regular file",
        "/dev/zero": "A: /dev/zero is not a regular file",
        "folder.npy": "Is a directory",
        "x" * 300: "File name too long",
        "": "Is a directory",
        "A.npy/x": "Not a directory",
        "a\nb.npy": r"A: 'a\nb.npy' cannot be read: No such file",
        "\0": "embedded null byte",
    }.items():
        assert said in refused(capsys, name, "B.npy", "-o", "D.npy"), name
    for name, said in {
        "round.npy": "D: round.npy cannot be written: Symlink loop",
        "folder.npy": "D: folder.npy is a folder",
        "x" * 300: "File name too long",
        "A.npy/x": "D: the folder A.npy does not exist",
        "no\n/D.npy": r"D: the folder 'no\n' does not exist",
        "\0": "embedded null byte",
    }.items():
        assert said in refused(capsys, "A.npy", "B.npy", "-o", name), name
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["矩陣 Ä.npy", os.fsdecode(b"\xff\xfe.npy"), "-A.npy", "a\nb\x1b[2J.npy"])
def test_odd_names_are_names(name, folder, capsys):
    os.rename("A.npy", name)
    assert multiply(f"./{name}", "B.npy", "-o", f"./D{name}") == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("D is in ")]
    assert len(said) == 1 and "\x1b" not in said[0]
    d = np.asarray(gemm(np.load(f"./{name}"), np.load("B.npy"), op=F16, target="sm_90a"))
    assert np.load(f"./D{name}").tobytes() == d.tobytes()


# ---- what is written


@pytest.mark.parametrize("read", ["A", "B", "C"])
def test_an_input_is_never_overwritten_by_any_name(read, folder, capsys):
    (folder / "sub").mkdir()
    os.symlink(folder, folder / "sub" / "back")
    os.symlink(f"{read}.npy", "link.npy")
    os.link(f"{read}.npy", "hard.npy")
    before = contents(folder)
    names = [f"{read}.npy", f"./{read}.npy", f"sub/../{read}.npy", f"sub/back/{read}.npy", folder / f"{read}.npy", "link.npy", "hard.npy"]
    if (folder / f"{read.lower()}.NPY").exists():
        names.append(f"{read.lower()}.NPY")  # the file system does not tell cases apart
    for name in names:
        for more in ((), ("--overwrite",)):
            said = refused(capsys, "A.npy", "B.npy", "-c", "C.npy", "-o", name, *more)
            assert f"is {read}" in said and "never overwritten; name another file" in said
    said = refused(capsys, "link.npy" if read == "A" else "A.npy", "link.npy" if read == "B" else "B.npy",
                   "-c", "link.npy" if read == "C" else "C.npy", "-o", f"{read}.npy")  # fmt: skip
    assert f"{read}.npy is {read}, by another name: link.npy" in said
    assert contents(folder) == before


def test_an_output_that_exists_wants_overwrite(folder, capsys):
    np.save("D.npy", np.ones(3))
    before = contents(folder)
    assert "D: D.npy exists already; name another file, or add --overwrite" in refused(capsys, "A.npy", "B.npy", "-o", "D.npy")
    os.symlink("D.npy", "link.npy")
    assert "D: link.npy exists already" in refused(capsys, "A.npy", "B.npy", "-o", "link.npy")
    assert "--overwrite needs the file of -o" in refused(capsys, "A.npy", "B.npy", "--overwrite")
    assert contents(folder) == before | {str(folder / "link.npy"): before[str(folder / "D.npy")]}
    assert multiply("A.npy", "B.npy", "-o", "link.npy", "--overwrite") == 0
    assert Path("link.npy").is_symlink() and np.load("D.npy").shape == (4, 2)
    assert multiply("A.npy", "B.npy", "-o", "/dev/null") == 0  # which is no file, and stays what it is
    assert Path("/dev/null").is_char_device()


@contextmanager
def full_disk():
    """No file may grow beyond a few bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_costs_neither_the_old_file_nor_the_report(folder, capsys):
    np.save("D.npy", np.ones(3))
    before = contents(folder)
    with full_disk():
        status = multiply("A.npy", "B.npy", "-o", "D.npy", "--overwrite")
    out, error = capsys.readouterr()
    assert (status, error) == (2, "tcemu gemm: D: D.npy cannot be written: File too large\n")
    assert "D from the exact product" in out and "D is in" not in out
    assert {name: content for name, content in contents(folder).items() if not Path(name).name.startswith(".")} == before
    assert multiply("A.npy", "B.npy", "-o", "/dev/full") == 2
    out, error = capsys.readouterr()
    assert "cannot be written: No space left on device" in error and "D from the exact product" in out


def test_a_picture_is_written_whole_or_not_at_all(folder, capsys):
    Path("old.svg").write_text("old")
    with full_disk():
        assert main(["show", F16, "--svg", "old.svg", "--overwrite"]) == 2
    assert "old.svg cannot be written: File too large" in capsys.readouterr().err
    assert Path("old.svg").read_text() == "old"


@pytest.mark.parametrize("command", [("gemm", "A.npy", "B.npy", "--op", F16, "-o"), ("show", F16, "--svg")])
def test_a_folder_that_takes_no_file(command, folder, capsys):
    (folder / "closed").mkdir(mode=0o500)
    places = ["/proc/D"] if os.geteuid() == 0 else ["/proc/D", "closed/D"]  # root writes everywhere else
    for place in places:
        assert main([*command, place]) == 2
        assert f"{place} cannot be written: " in capsys.readouterr().err
    assert list((folder / "closed").iterdir()) == []
