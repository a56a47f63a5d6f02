"""Changes that people want, each planted as the rows that it needs, and shown to reach everything that reads them.

| change | files that it touches |
|---|---|
| a target (Rubin) | the four of rows in `test_capabilities.py` |
| a number format (UE5M3) | `engine/formats/number_formats.py`, `tcemu/formats.py`; who may use it: `targets.py`, `tcgen05_kinds.py` |
| a pairing in a sum | `engine/arithmetic/sum_tree.py` |
| a backend | its own, and a row in `engine/backends/dispatch.py` |
| a kind of recipe | one file: `tests/operations/products/test_recipe_kinds.py` |
| a hypothesis of drift | `uses/drift/hypotheses.py`; a new arithmetic also `programs.py` and `program_evaluation.py` there |
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tcemu
from tcemu import replay
from tcemu.base.errors import Unsupported
from tcemu.engine.arithmetic.sum_tree import ORDERS
from tcemu.engine.backends import dispatch, portable

PACKAGE = Path(__file__).parents[2] / "tcemu"


def outside_in(count: int) -> list[tuple[int, int]]:
    """The outermost two, the next two, and so on; then the pairs one after the other."""
    half = count // 2
    pairs = [(i, count - 1 - i) for i in range(half)]
    return pairs + [(0, i) for i in range(1, half + count % 2)]


def test_a_pairing_in_a_sum_is_one_row(monkeypatch):
    """A kernel of somebody's that adds so is found by replay, as a recipe that products take and that gives its bits."""
    monkeypatch.setitem(ORDERS, "outside in", outside_in)

    def library(a, b):
        slices = np.zeros((6, len(a), b.shape[1]), np.float32)
        for i in range(48):
            slices[i // 8] += a[:, i : i + 1].astype(np.float32) * b[i].astype(np.float32)  # products of f16 are exact in f32
        for to, origin in outside_in(6):
            slices[to] += slices[origin]
        return slices[0]

    found = replay.fingerprint(library, 4, 4, 48, operand_dtype="f16")
    assert found.recipe is not None and found.recipe.merge.order == "outside in", str(found)
    rng = np.random.default_rng(0)
    a, b = ((rng.normal(size=(4, 48)) * 2.0 ** rng.integers(-9, 9, (4, 48))).astype(np.float16) for _ in range(2))
    product = np.asarray(tcemu.matmul(a, b.T, recipe=found.recipe))
    assert np.array_equal(product.view(np.uint32), library(a, b.T).view(np.uint32))


def test_a_backend_is_one_row(monkeypatch):
    """It computes what it has a program for, is described, and what it refuses goes to the next."""
    asked = []

    def matrices_program(product):
        if product.spec.a != tcemu.formats.F16:
            raise Unsupported("it multiplies f16 alone")
        asked.append(product.spec)
        return portable.matrices_program(product)

    def promoted_program(product):
        raise Unsupported("it promotes nothing")

    fifth = dispatch.Backend("fifth", "cpu", matrices_program, promoted_program)
    monkeypatch.setattr(dispatch, "EMULATORS", (fifth, *dispatch.EMULATORS))
    rng = np.random.default_rng(0)
    for dtype, count in ((np.float16, 1), (jnp.bfloat16, 0)):
        asked.clear()
        fmt = "f16" if count else "bf16"
        op = f"mma.sync.aligned.m16n8k16.row.col.f32.{fmt}.{fmt}.f32"
        a, b = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((37, 48), (48, 29)))
        with_fifth = jax.jit(lambda a, b, op=op: tcemu.gemm(a, b, op=op, target="sm_90a"))(a, b)
        assert len(asked) == count
        with monkeypatch.context() as before:
            before.setattr(dispatch, "EMULATORS", dispatch.EMULATORS[1:])
            without = jax.jit(lambda a, b, op=op: tcemu.gemm(a, b, op=op, target="sm_90a"))(a, b)
        assert np.array_equal(np.asarray(with_fifth).view(np.uint32), np.asarray(without).view(np.uint32))
        reason = dispatch.describe(op, target="sm_90a")["fifth"]
        assert reason == ("" if count else "it multiplies f16 alone")


def files_with(pattern: str) -> set[str]:
    return {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if re.search(pattern, path.read_text())}


def test_a_number_format_is_rows():
    """The last one that came."""
    assert files_with("UE5M3") == {"formats.py", "engine/formats/number_formats.py", "engine/isa/targets.py", "engine/isa/tcgen05_kinds.py"}


def test_a_hypothesis_of_drift_is_in_three_files():
    """One whose arithmetic was new: subnormal numbers count as zeros."""
    files = {"hypotheses.py", "programs.py", "program_evaluation.py"}
    assert files_with(r"[Cc]hoices.*\bflushed\b|flushed: bool = False  #") == {f"uses/drift/{name}" for name in files}
