"""Ctrl-C and SIGTERM at any moment of a command: one line, status 130 or 143, files whole, and the run's file goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import fuzz
from tcemu.base import interrupts
from tcemu.uses.fuzz import differential_run as runs

S8 = "mma.sync.aligned.m8n8k16.row.col.satfinite.s32.s8.s8.s32"
SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[3], Path(__file__).parents[2])))}
COMMANDS = {
    "fuzz": f"fuzz {S8} --left sm_80 --right sm_90a --cases 1e9 --out out --quiet",
    "gemm": f"gemm A.npy A.npy --op {SMALL} -o D.npy",
    "infer": f"infer {SMALL} --target sm_90a",
    "explain": f"explain {SMALL} --a 1 --b 1",
    "run": "run kernel.ptx --grid 1 --block 1",
    "verify": "verify mma --outputs 1e9 --out out",
}
ENDLESS = ".version 8.0 .target sm_80 .address_size 64 .entry k() { .reg .b32 r; L: add.u32 r, r, 1; bra L; }"
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
# the process of a command, which says when its words are read: before that Python itself answers
START = """
import sys
from tcemu import cli
from tcemu.fuzz import differential_run
differential_run.SAVE_INTERVAL_SECONDS = 0.2
if sys.argv[1] == "verify":
    from support.emulated_gpu import EmulatedGpu
    from tcemu.commands import verify_commands
    verify_commands.gpu = EmulatedGpu
real = cli.parse_arguments
def parse_arguments(argv):
    args = real(argv)
    print("begun", file=sys.stderr, flush=True)
    return args
cli.parse_arguments = parse_arguments
sys.exit(cli.main())
"""


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """Also where the tests were started in the background, whose processes ignore SIGINT; a child inherits that, but no handler."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def stop_command(command, number, after, folder, until=None):
    """A command that gets a signal so many seconds after its start, or once `until` holds: (status, stdout, stderr)."""
    np.save(folder / "A.npy", np.ones((1024, 1024), np.float32))
    (folder / "kernel.ptx").write_text(ENDLESS)
    words = [sys.executable, "-c", START, *COMMANDS[command].split()]
    process = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline() == "begun\n"
    while until is not None and not until():
        time.sleep(0.02)
    time.sleep(after)
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def check_stopped(command, number, ended, folder):
    status, out, error = ended
    if status in (0, 1):  # it was done before
        assert out and "stop" not in error
    else:
        assert status == STATUS[number], (status, out, error)
        assert error.count("\n") == 1 and error.startswith("tcemu: stop"), error
        assert "0 mismatches of 0" not in out
    left = [path.name for path in folder.rglob("*") if path.name.startswith(".")]
    assert left == []
    if (folder / "D.npy").exists():
        assert np.load(folder / "D.npy").shape == (1024, 1024)
    if (folder / "out" / "run.npz").exists():
        header = runs.read_run_header(folder / "out")
        assert header["done"] <= header["cases"] and header["wrong_cases"] == 0
    if (folder / "out" / "verify.json").exists():
        assert all(row["outputs"] for row in json.loads((folder / "out" / "verify.json").read_text())["rows"])


MOMENTS = [(command, number, turn) for turn in range(4) for command in COMMANDS for number in STATUS]
USUAL = [("gemm", signal.SIGTERM, 0)]


@pytest.mark.parametrize("moment", sample_cases(MOMENTS, USUAL, ids=lambda m: f"{m[0]}-{m[1].name}-{m[2]}"))
def test_a_signal_at_any_moment_ends_a_command(moment, tmp_path):
    command, number, turn = moment
    longest = (0.3, 1.5, 4.0, 10.0)[turn]
    after = np.random.default_rng(MOMENTS.index(moment)).uniform(0, longest)
    check_stopped(command, number, stop_command(command, number, after, tmp_path), tmp_path)


def test_a_stopped_run_has_its_counts_in_the_file(tmp_path):
    """After the first chunk: its account is printed, and is that of the file."""
    counted = lambda: (tmp_path / "out" / "run.npz").exists() and runs.read_run_header(tmp_path / "out")["done"]
    ended = stop_command("fuzz", signal.SIGINT, 0.1, tmp_path, until=counted)
    check_stopped("fuzz", signal.SIGINT, ended, tmp_path)
    done = runs.read_run_header(tmp_path / "out")["done"]
    assert ended[0] == 130 and f": {done:,} of 1,000,000,000 cases" in ended[1] and "stopped; the same command" in ended[1]


ENDS = """
import atexit, sys, time
from tcemu import cli
atexit.register(time.sleep, 2)
sys.argv[1:] = ["list", "--target", "sm_70"]
status = cli.main()
print("done", file=sys.stderr, flush=True)
sys.exit(status)
"""


@pytest.mark.parametrize("number", sample_cases(list(STATUS), ()))
def test_a_signal_after_the_work_changes_nothing(number):
    """Also while the interpreter ends, which gives signals back their default."""
    words = [sys.executable, "-c", ENDS]
    with subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().endswith(" instructions\n") and process.stderr.readline() == "done\n"
        process.send_signal(number)
        assert process.stderr.read() == ""
    assert process.returncode == 0


# ---- in a process of other people


def test_a_first_signal_waits_for_the_chunk_and_a_second_one_raises(monkeypatch):
    """Wherever the first one comes, also where an exception is lost."""
    real = runs.add_chunk

    def added(state, counts):
        signal.raise_signal(signal.SIGINT)
        return real(state, counts)

    monkeypatch.setattr(runs, "add_chunk", added)
    before = signal.getsignal(signal.SIGINT)
    found = fuzz.find_mismatches(S8, "sm_80", "sm_90a", cases=10**6, iterations=1, coverage=False)
    assert found.stopped and found.signal == signal.SIGINT and 0 < found.done < 10**6
    assert signal.getsignal(signal.SIGINT) is before
    with interrupts.defer_signals() as held:
        signal.raise_signal(signal.SIGINT)
        assert held.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_in_the_last_chunk_is_not_swallowed(monkeypatch):
    real = runs.add_chunk

    def added(state, counts):
        signal.raise_signal(signal.SIGINT)
        return real(state, counts)

    monkeypatch.setattr(runs, "add_chunk", added)
    found = fuzz.find_mismatches(S8, "sm_80", "sm_90a", cases=1, coverage=False)
    assert found.complete and found.stopped


def test_outside_the_main_thread_signals_are_left_alone():
    before, states = signal.getsignal(signal.SIGINT), []

    def work():
        with interrupts.defer_signals() as held:
            states.append((signal.getsignal(signal.SIGINT) is before, held.signal))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert states == [(True, 0)]


def test_a_signal_waits_for_a_file_that_is_written(monkeypatch):
    """And for what counts; the second one does not."""
    said, ends = [], []
    monkeypatch.setattr(interrupts, "WRITE_LOCK", threading.RLock())  # this process does not end, which would free the other one
    monkeypatch.setattr(interrupts, "_write_stderr", said.append)
    monkeypatch.setattr(os, "_exit", lambda status: ends.append((status, time.monotonic())))
    leaving = interrupts.ExitHandler("tcemu")
    with interrupts.WRITE_LOCK:
        thread = threading.Thread(target=leaving.handle, args=(signal.SIGTERM,))
        thread.start()
        time.sleep(0.2)
        assert ends == []
    thread.join()
    assert [status for status, _ in ends] == [143] and said == ["tcemu: stopped"]
    leaving.pending = interrupts.PendingSignal()
    leaving.pending.busy = True
    leaving.handle(signal.SIGINT)
    assert len(ends) == 1 and leaving.pending.signal == signal.SIGINT
