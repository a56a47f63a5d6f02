"""With an NVIDIA GPU and cuda-core: what was recorded comes back from it; skipped where there is none."""

import types

import jax
import numpy as np
import pytest
import replay_golden as replay
from support import golden
from support.systems import skip_file

import tcemu
from tcemu import silicon


def missing():
    """Why there is nothing to run on, or None."""
    try:
        return None if silicon.gpu().target == replay.TARGET else f"this GPU is {silicon.gpu().target}, the recorded one {replay.TARGET}"
    except tcemu.Unsupported as error:
        return str(error)


skip_file(missing())
pytestmark = pytest.mark.gpu


def on_gpu(op, *operands, target=None, **keywords):
    return silicon.run(op, *operands, **keywords)


names = ("mma", "mma_sp", "wmma_load", "wmma_mma", "wmma_store", "ldmatrix", "stmatrix", "movmatrix", "wgmma")
ON_GPU = types.SimpleNamespace(parse=tcemu.parse, **dict.fromkeys(names, on_gpu))


@pytest.mark.parametrize("family", replay.REPLAYS)
def test_recorded_words_come_back(family, monkeypatch):
    monkeypatch.setattr(replay, "tcemu", ON_GPU)
    counts = [(case["ptx"], *replay.compare(case)) for case in golden.cases(family)]
    wrong = [(ptx, bad) for ptx, bad, _ in counts if bad]
    print(f"{family}: {sum(bad for _, bad in wrong)} mismatches of {sum(words for *_, words in counts)} words")
    assert not wrong


def test_arrays_of_the_host_give_the_same():
    op = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    words = [np.random.default_rng(i).integers(0, 1 << 32, (100, 32, n), dtype=np.uint32) for i, n in enumerate((4, 2, 4))]
    made = silicon.run(op, *words)
    assert isinstance(made, jax.Array) and np.array_equal(made, tcemu.mma(op, *words, target=replay.TARGET))
    gpu = silicon.gpu()
    given = dict(zip("abc", words, strict=True))
    kernel = silicon.statement_kernel(tcemu.parse(op), gpu.target)
    assert np.array_equal(made, gpu._copied(kernel, given, made.shape, 0, None))
