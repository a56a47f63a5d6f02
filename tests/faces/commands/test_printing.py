"""What is printed is written, or the exit status says that it is not: every command, with a reader that is gone and on a full device."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.emulated_gpu import EmulatedGpu
from support.sampling import sample_cases
from support.systems import posix

from tcemu import cli
from tcemu.cli import main
from tcemu.drift import record
from tcemu.faces.commands import demo_command as demo
from tcemu.faces.commands import verify_commands as silicon
from tcemu.faces.commands.standard_streams import READER_GONE_STATUS
from tcemu.formats import F32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Slices
from tcemu.replay import dumps
from tcemu.uses.fuzz.differential_run import read_run_header

F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
S8 = "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32"
FUZZ = f"fuzz {S8} --left sm_80 --right sm_90a --cases 1"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
NAMES = [command.name for command in cli.COMMANDS]
PRINTING = {
    "demo": "demo",
    "quantizers": "quantizers deepgemm",
    "gemm": "gemm A.npy B.npy --op " + F16,
    "run": "run kernel.ptx --grid 1 --block 1 --arg A.npy",
    "launches": "launches list launches",
    "explain": f"explain {F16} --random 1",
    "explain several": f"explain {F16} --random 1 --target sm_80 --target sm_90a --steps",
    "explain as JSON": f"explain {F16} --random 1 --json",
    "fuzz": f"{FUZZ} --quiet",
    "infer": f"infer {S8} --cases 1",
    "replay": "replay diff A.npy B.npy --left order.json --right order.json",
    "study": "study",
    "drift": "drift run.drift run.drift",
    "verify": f"verify {S8} --outputs 1",
    "check": f"check {F16} --target sm_90a",
    "list": "list --target sm_90a",
    "show": f"show {F16} --fragments",
    "help": "--help",
    **{f"{name} --help": f"{name} --help" for name in NAMES},
}
SILENT = {"record": f"record {S8} --cases 1 --out words.npz"}  # what prints nothing but on standard error
FULL = "cannot be written: No space left on device"


KERNEL = ".version 8.0 .target sm_80 .address_size 64 .entry k(.param .u64 a) { ret; }"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with A [4, 5] and B [5, 2], a kernel and a kernel recipe, and the emulation where a GPU would be."""
    rng = np.random.default_rng(0)
    for name, shape in (("A", (4, 5)), ("B", (5, 2))):
        np.save(tmp_path / f"{name}.npy", rng.normal(size=shape).astype(np.float32))
    (tmp_path / "kernel.ptx").write_text(KERNEL)
    (tmp_path / "launches").mkdir()
    (tmp_path / "order.json").write_text(dumps(KernelRecipe(F32, F32, F32, Lanes(), Slices.single(5))))
    record(lambda x: x + 1, tmp_path / "run.drift")(np.ones(3, np.float32))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(silicon, "gpu", EmulatedGpu)
    return tmp_path


@pytest.fixture
def gone():
    """A stream whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    with io.TextIOWrapper(os.fdopen(write, "wb")) as stream:
        yield stream


@pytest.fixture
def full():
    """A stream to a device without space."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as stream:
        yield stream


def said(capsys) -> list[str]:
    """The messages of the command; `list` also says on standard error how many there are."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("tcemu")]


def speaker(words: str) -> str:
    return "tcemu" if "--help" in words else f"tcemu {words.split()[0]}"  # who asks for help has no command yet


def test_no_command_is_left_out():
    assert {words.split()[0] for words in (PRINTING | SILENT).values() if "--help" not in words} == set(NAMES)


USUAL = ("quantizers", "gemm", "explain", "study", "check", "list", "show", "help", "gemm --help", "fuzz --help")


@pytest.mark.parametrize("case", sample_cases(PRINTING, USUAL))
def test_a_reader_that_goes_away_ends_it_quietly(case, folder, gone, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", gone)
    assert main(PRINTING[case].split()) == READER_GONE_STATUS
    assert said(capsys) == []


@pytest.mark.parametrize("case", sample_cases(PRINTING, USUAL))
def test_a_full_device_is_said_in_one_line(case, folder, full, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", full)
    assert main(PRINTING[case].split()) == 2
    assert said(capsys) == [f"{speaker(PRINTING[case])}: standard output {FULL}"]


@pytest.mark.parametrize("stream", ["gone", "full"])
def test_who_prints_nothing_needs_no_reader(stream, folder, request, monkeypatch):
    monkeypatch.setattr(sys, "stdout", request.getfixturevalue(stream))
    assert main(SILENT["record"].split()) == 0
    assert (folder / "words.npz").exists()


COMPLAINING = {
    "progress": f"{FUZZ} --out run",
    "a count": "list --target sm_70",
    "what is done": SILENT["record"],
    "a user's error": "list --family mma",
    "words that are no command": "lost",
}


@pytest.mark.parametrize(("stream", "status"), [("gone", READER_GONE_STATUS), ("full", 2)])
@pytest.mark.parametrize("case", COMPLAINING)
def test_standard_error_is_answered_for_too(case, stream, status, folder, request, monkeypatch):
    monkeypatch.setattr(sys, "stderr", request.getfixturevalue(stream))
    assert main(COMPLAINING[case].split()) == status
    if case == "progress":
        assert read_run_header(folder / "run")["done"] == 0  # it ends before it compiles, and the file can go on
    if case == "what is done":
        assert (folder / "words.npz").exists()


def test_a_full_disk_is_said_beside_a_full_output(folder, full, monkeypatch, capsys):
    """One full disk holds both, often."""

    def fsync(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(sys, "stdout", full)
    assert main([*FUZZ.split(), "--quiet", "--out", "run"]) == 2
    first, *others = said(capsys)
    assert first.startswith("tcemu fuzz: out: run/run.npz cannot be written: No space left on device.")
    assert others in ([], [f"tcemu fuzz: standard output {FULL}"])


def test_a_file_that_fails_is_no_stream_that_fails(monkeypatch, capsys):
    def load():
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "digits.npz")

    monkeypatch.setattr(demo, "load_digits", load)
    assert main(["demo"]) == 2
    assert said(capsys) == ["tcemu demo: [Errno 13] Permission denied: 'digits.npz'"]


def test_the_streams_are_left_as_they_were(folder, full, monkeypatch):
    for words, stream in (("list --target sm_70", io.StringIO()), ("list --target sm_70", full), ("nothing", full)):
        errors = io.StringIO()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", errors)
        try:
            main(words.split())
        except SystemExit as stopped:
            assert stopped.code == 2
        assert sys.stdout is stream and sys.stderr is errors


IN_A_PROCESS = """
import sys
from support.emulated_gpu import EmulatedGpu
from tcemu import cli
from tcemu.faces.commands import verify_commands
verify_commands.gpu = EmulatedGpu
sys.exit(cli.main())
"""


@posix
@pytest.mark.parametrize("case", sample_cases(PRINTING, ()))
def test_the_end_of_the_process_adds_nothing(case, folder):
    """Python writes once more what it still holds, and would complain, with status 120."""
    paths = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[3]), str(Path(__file__).parents[2])))}
    options = {"env": ENVIRONMENT | paths, "cwd": folder, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", IN_A_PROCESS, *PRINTING[case].split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, [line for line in error.splitlines() if not line.endswith(" instructions")]) == (READER_GONE_STATUS, [])
    with open("/dev/full", "w") as device:
        ended = subprocess.run(words, stdout=device, check=False, **options)
    lines = [line for line in ended.stderr.splitlines() if not line.endswith(" instructions")]
    assert (ended.returncode, lines) == (2, [f"{speaker(PRINTING[case])}: standard output {FULL}"])


@posix
@pytest.mark.parametrize("unbuffered", sample_cases(["", "1"], [""]))
def test_head_in_a_shell(unbuffered):
    """What is printed is longer than a pipe holds, so that the reader is gone before the end."""
    script = f"set -o pipefail; {sys.executable} -m tcemu.cli list --target sm_90a | head -n 1"
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (READER_GONE_STATUS, "mma.sync.aligned.m8n8k4.row.row.f16.f16.f16.f16\n", "")


def test_a_terminal_that_knows_ascii_alone(folder, monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert main(PRINTING["gemm"].split()) == 0
    assert rb"\xb7" in ascii_only.buffer.getvalue()
