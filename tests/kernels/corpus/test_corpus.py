"""The corpus: kernels of four kinds, each right in checked mode. Those of a kind whose package is missing are left out."""

import pytest
from kernels.corpus.corpus_table import CASES, CUTE, PTX, check
from kernels.corpus.run_corpus import load_cases
from support.sampling import sample_cases

MISSING = load_cases()
USUAL = ("product_of_128_bits_by_carries", "shuffles_in_four_modes")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION", "ignore::DeprecationWarning")


@pytest.mark.parametrize("name", sample_cases(CASES, USUAL))
def test_a_kernel_of_the_corpus_is_right(name):
    assert check(name)


def test_there_are_twenty_kernels_of_each_kind():
    kinds = [case.kind for case in CASES.values()]
    assert all(kinds.count(kind) >= 20 for kind in set(kinds)) and PTX in kinds
    assert (CUTE in kinds) == ("cute_functions" not in MISSING)
