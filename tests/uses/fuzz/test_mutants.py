"""Every planted fault is found within 10^6 cases, and the list is long enough."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.planted_faults import FOUND, MUTANTS

from tcemu import fuzz
from tcemu.uses.fuzz.implementations import pack_operands

CASES = 1_000_000
# of one instruction, so that its operands and the true side are compiled once
SAMPLE = ("f16 24 bits", "f16 in steps of 8", "layout of A, m and p")


def first_found(name: str) -> int:
    """The number of cases after which the fault was seen."""
    op, true, faulty = MUTANTS[name]()
    cases = 512
    while True:
        found = fuzz.find_mismatches(op, true, faulty, cases=cases, coverage=False, shrink=False)
        if found.wrong_cases or cases >= CASES:
            return found.first[0] + 1 if found.first else 0
        cases = min(32 * cases, CASES)


def test_there_are_many():
    assert len(MUTANTS) >= 40 and FOUND.keys() == MUTANTS.keys() and max(FOUND.values()) <= CASES


@pytest.mark.parametrize("name", SAMPLE)
def test_a_planted_fault_is_found_by_the_first_cases(name):
    op, true, faulty = MUTANTS[name]()
    given = fuzz.generate(op, 0, 0, 256)
    if true.level == "registers":
        given = pack_operands(op, given)
    assert np.any(jnp.asarray(true.fn(given)) != faulty.fn(given))


@pytest.mark.full
@pytest.mark.parametrize("name", MUTANTS)
def test_every_planted_fault_is_found(name):
    assert first_found(name) == FOUND[name]
