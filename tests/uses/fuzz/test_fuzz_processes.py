"""Several JAX processes on one run: the counts of one process, one file, and a process that dies takes nothing that was counted with it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tcemu import fuzz
from tcemu.uses.fuzz import differential_run as runs
from tcemu.uses.fuzz.comparison_loop import Processes

SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
PROCESS = f"""
import json, sys
import jax
address, number, out, what, cases = sys.argv[1:]
jax.distributed.initialize(address, 2, int(number))
from tcemu import cli, fuzz
from tcemu.fuzz import differential_run
differential_run.SAVE_INTERVAL_SECONDS = 0.0
if what == "command":
    words = ["fuzz", {SMALL!r}, "--left", "sm_80", "--right", "sm_90a", "--cases", cases, "--out", out, "--quiet"]
    sys.exit(cli.main(words))
r = fuzz.find_mismatches({SMALL!r}, "sm_80", "sm_90a", cases=int(cases), out=out, iterations=1, coverage=False, shrink=False)
print(json.dumps([r.done, r.wrong_cases, r.wrong_outputs, r.first, r.by_kind.tolist()]))
"""


def two(out, what, cases):
    """Two processes of one job."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = [[sys.executable, "-c", PROCESS, address, str(number), str(out), what, str(cases)] for number in range(2)]
    return [subprocess.Popen(w, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in words]


def wait_for_processes(processes):
    outcomes = [process.communicate(timeout=300) for process in processes]
    return [(process.returncode, *outcome) for process, outcome in zip(processes, outcomes, strict=True)]


@pytest.fixture(scope="module")
def alone():
    return fuzz.find_mismatches(SMALL, "sm_80", "sm_90a", cases=20_000, coverage=False, shrink=False)


@pytest.mark.full
def test_two_processes_have_the_counts_of_one(alone, tmp_path):
    for status, out, error in wait_for_processes(two(tmp_path, "function", 20_000)):
        assert status == 0, error
        wanted = [alone.done, alone.wrong_cases, alone.wrong_outputs, list(alone.first), alone.by_kind.tolist()]
        assert json.loads(out.splitlines()[-1]) == wanted
    assert runs.read_run_header(tmp_path)["wrong_outputs"] == alone.wrong_outputs


@pytest.mark.full
def test_the_command_speaks_once(alone, tmp_path):
    first, second = wait_for_processes(two(tmp_path, "command", 20_000))
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert f"{alone.wrong_outputs:,} of 2,560,000 outputs differ" in first[1] and "outputs differ" not in second[1]


@pytest.mark.full
def test_a_process_that_dies_takes_no_counts_with_it(alone, tmp_path):
    processes = two(tmp_path, "function", 20_000)
    while not (tmp_path / "run.npz").exists() or not runs.read_run_header(tmp_path)["done"]:
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.02)
    processes[1].send_signal(signal.SIGKILL)
    time.sleep(1)
    for process in processes:
        process.kill()
        process.communicate()
    assert 0 < runs.read_run_header(tmp_path)["done"] <= 20_000
    for status, out, error in wait_for_processes(two(tmp_path, "function", 20_000)):
        assert status == 0, error
        assert json.loads(out.splitlines()[-1])[:3] == [alone.done, alone.wrong_cases, alone.wrong_outputs]


def test_one_process_agrees_with_itself():
    one = Processes(several=False)
    assert one.is_first and one.agree(7, 2) == (7, 2) and one.broadcast_from_first(lambda: b"file") == b"file"

    def fails():
        raise ValueError("this")

    with pytest.raises(ValueError, match="this"):
        one.broadcast_from_first(fails)
