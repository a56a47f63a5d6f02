"""`wmma_load` and `wmma_store` of every target, layout and type against formulas, memory in and registers out."""

import numpy as np
import pytest
from oracles import wmma_reference as wmma_model
from support.word_arrays import random_words

import tcemu

TARGETS = {"sm_70": 70, "sm_72": 72, "sm_75": 75, "sm_80": 80, "sm_90a": 90, "sm_120": 120}
WORDS = 2048


def cases(family):
    """Every generic spelling on every target. The usual run has one in twelve of those that differ in more than the name of a type."""
    seen = set()
    for target, sm in TARGETS.items():
        for op in tcemu.isa.instructions(target, family):
            if op.space is not None:
                continue
            kind = wmma_model.element(op)
            like = op.operand, op.shape, wmma_model.BITS[kind], kind in wmma_model.WHOLE, op.register_count("r"), op.layout, min(sm, 80)
            marks = [pytest.mark.full] if like in seen or len(seen) % 12 else []
            seen.add(like)
            yield pytest.param(op, target, id=f"{target} {str(op).removeprefix('wmma.').replace('.sync.aligned', '')}", marks=marks)


LOADS, STORES = list(cases("wmma.load")), list(cases("wmma.store"))


def draw_offset_and_stride(op, seed):
    """An offset and a stride of a sub-matrix."""
    rng, unit = np.random.default_rng(seed), wmma_model.alignment(op)
    least = -(-op.default_stride // unit)
    return int(unit * rng.integers(0, 9)), int(unit * (least + rng.integers(1, 3)))


def test_the_cases_are_counted():
    assert len(LOADS) == 24 + 54 + 64 + 3 * 88 and len(STORES) == 12 + 18 + 22 + 3 * 26


@pytest.mark.parametrize(("op", "target"), LOADS)
def test_load(op, target):
    memory = random_words((2, WORDS), 1)
    offset, stride = draw_offset_and_stride(op, 2)
    want = np.stack([wmma_model.load(op, one, offset, stride, TARGETS[target]) for one in memory])
    got = np.asarray(tcemu.wmma_load(op, memory, offset=offset, stride=stride, target=target))
    assert got.shape == (2, 32, op.register_count("r"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("op", "target"), STORES)
def test_store(op, target):
    memory, fragment = random_words((2, WORDS), 1), random_words((2, 32, op.register_count("r")), 3)
    offset, stride = draw_offset_and_stride(op, 4)
    want = [wmma_model.store(op, *one, offset, stride, TARGETS[target]) for one in zip(memory, fragment, strict=True)]
    np.testing.assert_array_equal(tcemu.wmma_store(op, memory, fragment, offset=offset, stride=stride, target=target), np.stack(want))
