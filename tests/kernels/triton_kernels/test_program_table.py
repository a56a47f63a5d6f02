"""Triton programs as people write them, by both ways of running, against NumPy."""

import ml_dtypes
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
MMA_DTYPES = {"float16": "A100", "bfloat16": "A100", "float32": "A100", "int8": "A100", "float8_e4m3fn": "L4", "float8_e5m2": "L4"}
# wgmma takes the whole of 4 warps, and its operands of 8 bits and tf32 with K as the fast axis
WGMMA_CASES = [(dtype, WARPS[2 + (i + stages) % 2], stages) for i, dtype in enumerate(MMA_DTYPES) for stages in STAGES]


@pytest.mark.parametrize("name", sample_cases(INTERPRETED, [name for name in INTERPRETED if name not in SLOW]))
def test_program_is_right_interpreted(name):
    _run(name, interpreted)


@pytest.mark.parametrize("name", sample_cases(EMULATED, ("tutorial_dependent_launches", "tutorial_grouped_products")))
def test_program_is_right_emulated(name):
    _run(name, emulated)


@pytest.mark.full
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize(("dtype", "gpu"), MMA_DTYPES.items())
def test_a_product_in_each_configuration(dtype, gpu, warps, stages):
    """The same bits by any number of warps and stages, by mma.sync; operands and sums are integers that every format has."""
    _check_configuration(dtype, gpu, warps, stages)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "warps", "stages"), WGMMA_CASES)
def test_a_product_by_wgmma_in_each_configuration(dtype, warps, stages):
    """Each dtype meets every number of stages and, with 4 and 8 warps in turn, every other pair."""
    _check_configuration(dtype, "H100", warps, stages, transposed=dtype not in ("float16", "bfloat16"))


def _check_configuration(dtype, gpu, warps, stages, **options):
    options |= {"out": np.int32, "total": product_programs.tl.int32} if dtype == "int8" else {}
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype).type
    with emulated(gpu) as report:
        results = product_programs.run_product(
            np.random.default_rng(warps), kind, (64, 64, 96), (64, 64, 32), num_warps=warps, num_stages=stages, **options
        )
    for result in results:
        result.check()
    (launch,) = report.launches
    assert launch.settings["num_stages"] == stages and launch.threads == 32 * warps


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
