"""Every planted fault is found within 10^6 cases, and the list is long enough."""

import pytest
from mutants import MUTANTS

from tcemu import fuzz

CASES = 1_000_000
SAMPLE = ("f16 24 bits", "bf16 floor -134", "f16 of sm_80 backwards", "layout of A, m and p")


def first_found(name: str) -> int:
    """The number of cases after which the fault was seen."""
    op, true, faulty = MUTANTS[name]()
    cases = 512
    while True:
        found = fuzz.run(op, true, faulty, cases=cases, covering=False, shrinking=False)
        if found.wrong_cases or cases >= CASES:
            return found.first[0] + 1 if found.first else 0
        cases = min(32 * cases, CASES)


def test_there_are_many():
    assert len(MUTANTS) >= 40


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_found(name):
    assert 0 < first_found(name) <= CASES


@pytest.mark.full
def test_all_planted_faults_are_found():
    found = {name: first_found(name) for name in MUTANTS}
    print(found)
    assert [name for name, number in found.items() if not 0 < number <= CASES] == []
