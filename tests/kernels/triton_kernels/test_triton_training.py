"""A module of Triton kernels trained on a CPU, by emulation and by the interpreter, against the same module in torch."""

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")
pytest.importorskip("torch", reason="torch is not installed: pip install 'tcemu[torch]'")

from triton_kernels.training_module import train

from tcemu.triton import emulated, interpreted

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")  # Triton 3.9 announces another default
STEPS = 20
LAUNCHES = 5  # of a step: three kernels forward, of which one also gives the gradient, and two backward


@pytest.mark.full
@pytest.mark.parametrize("way", [interpreted, emulated])
def test_a_module_of_triton_kernels_learns(way):
    """Rounding differs from torch's by some 2^-22, which twenty steps multiply by less than a thousand."""
    with way("H100") as report:
        losses = train(True, STEPS)
    reference = train(False, STEPS)
    assert len(report.launches) == LAUNCHES * STEPS and losses[-1] < losses[0] / 4
    assert np.abs(np.array(losses) - reference).max() < 1e-4


def test_the_second_interpreted_step_has_the_loss_of_torch():
    """Its loss depends on all gradients of the first."""
    with interpreted("A100") as report:
        losses = train(True, 2)
    assert len(report.launches) == 2 * LAUNCHES
    assert np.abs(np.array(losses) - train(False, 2)).max() < 1e-6
