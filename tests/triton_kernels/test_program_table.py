"""Triton programs as people write them, by both ways of running, against NumPy."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from support.sampling import sample_cases
from triton_kernels import elementwise_programs as elementwise_programs
from triton_kernels import product_programs, program_table
from triton_kernels import reduction_programs as reduction_programs
from triton_kernels import tutorial_programs as tutorial_programs

from tcemu.triton import emulated, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
EMULATED = sorted(program_table.PROGRAMS)
INTERPRETED = [name for name in EMULATED if "interpreted" in program_table.PROGRAMS[name].ways]
PRODUCTS = [name for name in INTERPRETED if program_table.PROGRAMS[name].function.__module__.endswith("product_programs")]
USUAL_PRODUCTS = {"product_of_int8", "product_split_along_k", "product_in_one_warp_and_one_stage", "product_of_a_transposed_operand"}
SLOW = {"tutorial_causal_attention_by_wgmma", *(name for name in PRODUCTS if name not in USUAL_PRODUCTS)}
WARPS, STAGES = (1, 2, 4, 8), (1, 2, 3, 4)


@pytest.mark.parametrize("name", sample_cases(INTERPRETED, [name for name in INTERPRETED if name not in SLOW]))
def test_program_is_right_interpreted(name):
    _run(name, interpreted)


@pytest.mark.parametrize("name", sample_cases(EMULATED, ("tutorial_dependent_launches", "tutorial_grouped_products")))
def test_program_is_right_emulated(name):
    _run(name, emulated)


@pytest.mark.full
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_product_in_each_configuration(dtype, warps, stages):
    """The same bits by any number of warps and stages; both shapes of operands of `product_programs` are exact."""
    rng, tl = np.random.default_rng(warps), product_programs.tl
    options = {"out": np.int32, "total": tl.int32} if dtype == "int8" else {}
    with emulated("A100") as report:
        for result in product_programs.run_product(
            rng, np.dtype(dtype).type, (64, 64, 96), (64, 64, 32), num_warps=warps, num_stages=stages, **options
        ):
            result.check()
    assert report.launches[0].settings["num_stages"] == stages and report.launches[0].threads == 32 * warps


def test_there_are_forty_programs():
    """Among them one for each tutorial of Triton 3.6 to 3.9."""
    assert len(EMULATED) >= 40 and len(INTERPRETED) >= 40
    assert len([name for name in EMULATED if name.startswith("tutorial_")]) >= 11


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
