"""The recorded words again, with an NVIDIA GPU as JAX's device; skipped where there is none."""

import golden
import jax
import pytest
import replay


def gpus():
    try:
        return jax.devices("cuda")
    except RuntimeError:
        return []


@pytest.mark.gpu
@pytest.mark.skipif(not gpus(), reason="JAX finds no NVIDIA GPU here")
@pytest.mark.parametrize("family", replay.REPLAYS)
def test_recorded_words_on_a_gpu(family):
    with jax.default_device(gpus()[0]):
        counts = [replay.compare(case) for case in golden.cases(family)]
    assert sum(wrong for wrong, _ in counts) == 0, f"mismatches of {sum(words for _, words in counts)} words"
