"""Triton programs as people write them, by both ways of running, against NumPy."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from triton_kernels import elementwise_programs as elementwise_programs
from triton_kernels import program_table

from tcemu.triton import emulated, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
NAMES = sorted(program_table.PROGRAMS)


@pytest.mark.parametrize("name", NAMES)
def test_program_is_right_interpreted(name):
    _run(name, interpreted)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_program_is_right_emulated(name):
    _run(name, emulated)


def _run(name, way):
    program = program_table.PROGRAMS[name]
    with way(program.target) as report:
        results = program.function(np.random.default_rng(43))
    assert report.launches and results
    for result in results:
        result.check()
        wrong = result.actual.copy()
        wrong.reshape(-1).view(np.uint8)[-1] ^= 0x40  # a check that cannot fail would pass this
        with pytest.raises(AssertionError):
            result._replace(actual=wrong).check()
