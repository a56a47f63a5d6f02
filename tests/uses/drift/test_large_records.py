"""Records of a hundred operations: the drifts are found in little time and memory, however large the tensors are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.large_records import write_records

from tcemu.drift import locate

CAUSES = {"tanh": "a rounding more", "rsqrt": "a rounding more", "dot_general": "order of the sum"}
MEASURED = """
import resource, sys, time
from tcemu.drift import locate
start, wall = time.process_time(), time.time()
drift = locate(*sys.argv[1:], targets=())
print([line.name for line in drift.sources], drift.left_count)
print(time.process_time() - start, time.time() - wall, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
SECONDS, KILOBYTES = 120, 2_000_000  # a minute on two cores


def check(drift):
    assert drift.left_count >= 100
    assert {line.name for line in drift.sources} == set(CAUSES), str(drift)
    for line in drift.sources:
        assert CAUSES[line.name] in line.cause.kinds, str(drift)


def test_drifts_in_a_run_of_a_hundred_operations_are_found(tmp_path):
    check(locate(*write_records(tmp_path, 16, 24), targets=()))


@pytest.mark.full
def test_a_gigabyte_of_records_takes_a_minute_on_two_cores(tmp_path):
    paths = write_records(tmp_path, 1472, 832)
    assert sum(path.stat().st_size for path in paths) > 10**9
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", MEASURED, *map(str, paths)], capture_output=True, text=True, check=True, env=environment)
    names, numbers = done.stdout.splitlines()
    print(done.stdout)
    seconds, _, peak = map(float, numbers.split())
    assert all(name in names for name in CAUSES) and seconds < SECONDS and peak < KILOBYTES
