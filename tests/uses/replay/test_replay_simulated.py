"""Black boxes that are simulated: planted kernels are found, others refused, and nothing is claimed that is not so.

`support/simulated_kernels.py` computes in NumPy floats and shares no line with the package.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from oracles import simulated_kernels as sim
from support.sampling import sample_cases

from tcemu.formats import FORMATS
from tcemu.uses.replay.black_box import BlackBox
from tcemu.uses.replay.fingerprinting import fingerprint
from tcemu.uses.replay.recipe_results import ask_sample, count_mismatches

ALL = list(range(512))


class Planted(NamedTuple):
    fn: Callable
    k: int
    dtype: str = "f16"
    said: str = ""  # part of what the recipe says, or of why there is none


def slow(k, count, grain, **options):
    return sim.tensor("e4m3", "bf16", sim.even(k, count, grain), core=sim.HOPPER_FP8, restart=128, **options)


def fp8(slices, merge=sim.add_in_order):
    return sim.tensor("e4m3", "bf16", slices, merge, core=sim.HOPPER_FP8)


def f16(slices, merge=sim.add_in_order, **options):
    return sim.tensor("f16", "f16", slices, merge, **options)


def in_f32(slices, merge=sim.add_in_order, **options):
    return sim.tensor("f16", "f32", slices, merge, **options)


def plus_zero(fn):
    """Where the result is -0 it becomes +0: another kernel adds up the one slice."""
    return lambda a, b: (d := fn(a, b)) + d.dtype.type(0)


FOUND = {
    "one chain": Planted(f16([ALL]), 512, said="one slice"),
    "one chain, f32 out": Planted(in_f32([ALL]), 512, said="one slice"),
    "a tail": Planted(f16(sim.even(500, 1, 64)), 500, said="one slice"),
    "eight terms a step": Planted(f16([ALL], steps=lambda p: sim.split_steps(p, 8), core=sim.AMPERE), 512, said="sm_80"),
    "residue of 32": Planted(f16(sim.even(333, 1, 8), steps=lambda p: sim.residue_first(p, 32)), 333, said="K modulo 32 comes first"),
    "residue of 64": Planted(f16(sim.even(500, 1, 8), steps=lambda p: sim.residue_first(p, 64)), 500, said="K modulo 64 comes first"),
    "2 slices": Planted(f16(sim.even(512, 2, 64)), 512, said="2 slices of 256, 256"),
    "3 slices": Planted(f16(sim.even(1000, 3, 64)), 1000, said="3 slices of 384, 384, 232"),
    "6 slices": Planted(f16(sim.even(1000, 6, 64)), 1000, said="6 slices of 192"),
    "3 slices of 128": Planted(in_f32(sim.even(1000, 3, 128)), 1000, said="3 slices of 384, 384, 232"),
    "17 slices": Planted(in_f32(sim.even(1088, 17, 64)), 1088, said="17 slices of 64"),
    "113 slices": Planted(in_f32(sim.even(901, 113, 8)), 901, said="113 slices of 8, the last 5"),
    "slices with residues": Planted(
        f16(sim.even(333, 2, 8), steps=lambda p: sim.residue_first(p, 32)), 333, said="2 slices of 168, 165"
    ),
    "serial in f16": Planted(f16(sim.even(512, 3, 64), sim.serial("f16")), 512, said="the running sum waits in f16"),
    "stored in f16": Planted(f16(sim.even(512, 3, 64), sim.store_rounded("f16")), 512, said="partial sums wait in f16"),
    "serial in bf16": Planted(
        sim.tensor("bf16", "bf16", sim.even(512, 3, 64), sim.serial("bf16")), 512, "bf16", "the running sum waits in bf16"
    ),
    "stored in bf16": Planted(
        sim.tensor("bf16", "bf16", sim.even(512, 3, 64), sim.store_rounded("bf16")), 512, "bf16", "partial sums wait in bf16"
    ),
    "atomic in bf16": Planted(
        sim.tensor("bf16", "bf16", sim.even(512, 3, 64), sim.atomic("bf16")), 512, "bf16", "partial sums and the running sum wait in bf16"
    ),
    "atomic in f16, from the last": Planted(
        f16(sim.even(512, 4, 64), lambda sums: sim.atomic("f16")(sums[::-1])), 512, said="descending, partial sums and the running sum"
    ),
    "bf16 chain": Planted(sim.tensor("bf16", "bf16", [ALL]), 512, "bf16", "one slice"),
    "descending": Planted(in_f32(sim.even(512, 4, 64), sim.descending), 512, said="added descending"),
    "a tree of slices": Planted(in_f32(sim.even(512, 5, 64), sim.pairwise), 512, said="added tree"),
    "halves of slices": Planted(in_f32(sim.even(512, 8, 64), sim.halves), 512, said="added folded"),
    "paired slices": Planted(in_f32(sim.even(512, 6, 64), sim.paired), 512, said="added paired"),
    "round robin": Planted(in_f32(sim.round_robin(512, 3, 64)), 512, said="dealt out to 3 slices"),
    "warps take stripes": Planted(f16(sim.round_robin(512, 2, 32)), 512, said="tiles of 32, dealt out to 2"),
    "uneven, as stream-K": Planted(in_f32(sim.uneven(0, 128, 208, 352, 512)), 512, said="4 slices of 128, 80, 144, 160"),
    "uneven, f16": Planted(f16(sim.uneven(0, 176, 208, 512)), 512, said="3 slices of 176, 32, 304"),
    "K's tail left out": Planted(in_f32(sim.even(640, 10, 64)), 648, said="the last 8 products LEFT OUT"),
    "FP8": Planted(fp8([ALL]), 512, "e4m3", "one slice"),
    "FP8 in slices": Planted(fp8(sim.even(1024, 3, 128)), 1024, "e4m3", "3 slices of 384, 384, 256"),
    "FP8 restarted": Planted(slow(512, 1, 128), 512, "e4m3", ""),
    "FP8 restarted in slices": Planted(slow(1536, 3, 128), 1536, "e4m3", "3 slices of 512"),
    "FP8 round robin": Planted(fp8(sim.round_robin(512, 3, 64)), 512, "e4m3", "dealt out to 3"),
    "FP8 round robin, paired": Planted(fp8(sim.round_robin(512, 4, 64), sim.paired), 512, "e4m3", "added paired"),
    "tf32": Planted(sim.tensor("tf32", "f32", [ALL[:256]]), 256, "f32", "tf32"),
    "tf32 in slices": Planted(sim.tensor("tf32", "f32", sim.even(256, 4, 32)), 256, "f32", "tf32"),
    "20 fraction bits": Planted(in_f32([ALL], core=sim.STRANGE), 512, said="fraction_bits=20"),
    "steps rounded to nearest": Planted(f16(sim.even(512, 2, 64), core=sim.NEAREST), 512, said="rounding='RN'"),
    "one lane": Planted(sim.lanes("f16", "f16", [sim.dealt(ALL, 1, 1)]), 512, said="f32 fma"),
    "one lane, restarted": Planted(sim.lanes("f16", "f16", [sim.dealt(range(600), 1, 1, 256)]), 600, said="f32 fma"),
    "32 lanes of 4": Planted(sim.lanes("f16", "f16", [sim.dealt(ALL, 32, 4)], sim.halves), 512, said="32 lanes, 4 elements"),
    "16 lanes in chunks": Planted(sim.lanes("f16", "f32", [sim.dealt(range(1100), 16, 1, 32)]), 1100, said="closes every 32"),
    "lanes that own runs": Planted(sim.lanes("f16", "f16", [sim.dealt(ALL, 8, 64)], sim.halves), 512, said="8 "),
    "two threads in blocks": Planted(
        sim.lanes("f16", "f16", [[sim.split_steps(range(300), 256), sim.split_steps(range(300, 600), 256)]]),
        600,
    ),
    "lanes in slices": Planted(
        sim.lanes("f16", "f32", [sim.dealt(p, 4, 2) for p in sim.even(512, 3, 64)], sim.halves), 512, said="4 lanes, 2 elements"
    ),
    "lanes left to right": Planted(sim.lanes("f16", "f32", [sim.dealt(ALL, 16, 1)]), 512, said="joined ascending"),
    "neighbouring lanes": Planted(sim.lanes("f16", "f32", [sim.dealt(ALL, 8, 1)], sim.pairwise), 512, said="joined tree"),
    "f32 fma": Planted(sim.lanes("f32", "f32", [sim.dealt(range(128), 1, 1)]), 128, "f32", "f32 fma"),
    "f32 products and sums": Planted(sim.lanes("f32", "f32", [sim.dealt(range(128), 1, 1)], fused=False), 128, "f32", "each rounded"),
    "a product alone, f16": Planted(sim.lanes("f16", "f16", [sim.dealt([0], 1, 1)], start=-0.0), 1, said="begun at the first product"),
    "a product alone, bf16": Planted(
        sim.lanes("bf16", "bf16", [sim.dealt([0], 1, 1)], start=-0.0), 1, "bf16", "begun at the first product"
    ),
    "products in f16, as XLA's": Planted(
        sim.lanes("f16", "f16", [sim.dealt(range(300), 32, 1)], sim.halves, fused=False, product="f16"), 300, said="f16 products"
    ),
    "products in bf16, as XLA's": Planted(
        sim.lanes("bf16", "bf16", [sim.dealt(range(78), 32, 1)], sim.halves, fused=False, product="bf16"), 78, "bf16", "bf16 products"
    ),
    "products in f16, slices": Planted(
        sim.lanes("f16", "f16", [sim.dealt(p, 1, 1) for p in sim.even(300, 4, 1)], fused=False, product="f16"), 300, said="f16 products"
    ),
    "f32 from the first product": Planted(
        sim.lanes("f32", "f32", [sim.dealt(range(32), 1, 1)], start=-0.0), 32, "f32", "fma, begun at the first product"
    ),
    "f32, +0 at the end": Planted(plus_zero(sim.lanes("f32", "f32", [sim.dealt(range(32), 1, 1)])), 32, "f32", "begun at +0"),
    "one slice that waits in bf16": Planted(
        plus_zero(sim.tensor("bf16", "bf16", [ALL[:4]])), 4, "bf16", "partial sums wait in bf16, begun at +0"
    ),
    "two residues": Planted(
        sim.tensor("bf16", "bf16", sim.even(1406, 16, 8), sim.store_rounded("bf16"), lambda p: [s for s in sim.residue_first(p, 32) if s]),
        1406, "bf16", "K modulo 32 comes first",
    ),
    "f32 in lanes": Planted(sim.lanes("f32", "f32", [sim.dealt(range(128), 8, 1)], sim.pairwise), 128, "f32", "joined tree"),
}  # fmt: skip


def position_dependent(a, b):
    """As stream-K's: the cut of K is another one in the lower half of the rows."""
    upper, lower = in_f32(sim.uneven(0, 256, 512)), in_f32(sim.uneven(0, 128, 512))
    half = len(a) // 2
    return np.concatenate([upper(a[:half], b), lower(a[half:], b)])


def one_output_differs(a, b):
    """All outputs but one come of one chain."""
    d = in_f32([ALL])(a, b)
    d[-1, -1] = in_f32(sim.even(512, 2, 64))(a[-1:], b[:, -1:])[0, 0]
    return d


class Atomic:
    """Slices are added in whatever order they come."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, a, b):
        slices = sim.even(512, 6, 64)
        return in_f32([slices[i] for i in self.rng.permutation(len(slices))])(a, b)


def last_slice_first(sums):
    return sim.add_in_order([sums[-1], *sums[:-1]])


def one_in_f16(sums):
    return sim.add_in_order([sim.rounder("f16")(sums[0]), *sums[1:]])


def one_step_short(places):
    """The fifth step has eight terms."""
    return [*sim.split_steps(places[:64], 16), places[64:72], *sim.split_steps(places[72:], 16)]


def shifted(a, b):
    """Two slices whose terms at the edge have changed places."""
    one, other = list(range(256)), list(range(256, 512))
    one[-1], other[0] = other[0], one[-1]
    return in_f32([one, other])(a, b)


def by_magnitude(a, b):
    """Another order where the operands are large."""
    return in_f32(sim.even(512, 2 if np.abs(a.astype(np.float32)).max() > 100 else 1, 64))(a, b)


def twice_rounded(a, b):
    """The f32 total goes to f16 by way of bf16's eleven-bit neighbour: cut to 13 bits first."""
    d = in_f32([ALL])(a, b)
    return (d.view(np.uint32) & np.uint32(0xFFFFFC00)).view(np.float32).astype(np.float16)


def f32_pairwise(a, b):
    """Neighbouring products, then neighbouring sums: K lanes, more than any candidate has."""
    with np.errstate(over="ignore", invalid="ignore"):
        return sim.pairwise(list(sim.f32(np.moveaxis(a[:, :, None].astype(np.float64) * b[None], 1, 0)))).astype(np.float32)


REFUSED = {
    "atomic": Planted(Atomic(), 512, said="the same operands gave other bits"),
    "another cut below": Planted(position_dependent, 512, said="no order among the candidates"),
    "one output differs": Planted(one_output_differs, 512),
    "last slice first": Planted(in_f32(sim.even(480, 5, 96), last_slice_first), 480),
    "one slice in f16": Planted(f16(sim.even(512, 3, 64), one_in_f16), 512),
    "one step is short": Planted(in_f32([ALL], steps=one_step_short), 512),
    "terms at an edge have changed places": Planted(shifted, 512),
    "another order for large operands": Planted(by_magnitude, 512),
    "a total cut before it is rounded": Planted(twice_rounded, 512),
    "f32 pairwise": Planted(f32_pairwise, 40, "f32"),
    "ones are lost": Planted(lambda a, b: in_f32([ALL[:500]])(a, b) * np.float32(0.5), 512),
    "the middle is left out": Planted(in_f32([[*range(100), *range(116, 512)]]), 512),
}  # fmt: skip

USUAL = ("serial in f16", "uneven, as stream-K")
CHEAP = ("atomic", "one output differs", "one step is short", "ones are lost")
M, N = 16, 40


@pytest.mark.parametrize("name", sample_cases(FOUND, USUAL, str))
def test_planted_kernels_are_found(name):
    planted = FOUND[name]
    found = fingerprint(planted.fn, M, N, planted.k, operand_dtype=planted.dtype)
    assert found.recipe is not None, str(found)
    assert planted.said in str(found.recipe), str(found)
    fmt = FORMATS[planted.dtype]
    box = BlackBox(planted.fn, (M, N, planted.k), (fmt, fmt), "numpy", None, 64)
    assert [count_mismatches(found.recipe, ask_sample(box, kind, 77)) for kind in ("flat", "late")] == [0, 0]
    assert found.calls <= 64 and found.compared >= 64


@pytest.mark.parametrize("name", sample_cases(REFUSED, CHEAP, str))
def test_what_is_no_candidate_is_refused(name):
    planted = REFUSED[name]
    found = fingerprint(planted.fn, M, N, planted.k, operand_dtype=planted.dtype)
    assert found.recipe is None, str(found)
    assert planted.said in " ".join(str(found).split()), str(found)


def test_outputs_that_are_added_in_different_orders_by_their_place():
    """Rows repeat after 48: the upper half's and the lower half's are compared with each other, at no further call."""
    found = fingerprint(position_dependent, 128, 8, 512)
    assert found.recipe is None and found.calls == 3 and "the same rows and columns give other bits" in found.reason, str(found)


def test_there_are_at_least_forty():
    assert len(FOUND) + len(REFUSED) >= 40


def drawn_kernel(rng):
    """A kernel drawn at random, many of them none of the candidates, and its K."""
    k, out = int(2 ** rng.uniform(3, 8)), str(rng.choice(["f16", "f32"]))
    slices = [
        sim.even(k, int(rng.integers(1, 6)), int(rng.choice([8, 16, 24, 32]))),
        sim.uneven(*sorted({0, k, *rng.integers(1, k, 2).tolist()})),
        [s for s in sim.round_robin(k, int(rng.integers(2, 4)), int(rng.choice([8, 16, 32, 48]))) if s],
        [list(range(k))],
    ][rng.integers(4)]
    merge = [
        sim.add_in_order,
        sim.descending,
        sim.pairwise,
        sim.paired,
        last_slice_first,
        sim.serial("f16"),
        sim.store_rounded("f16"),
        sim.atomic("f16"),
    ]
    tile = int(rng.choice([16, 24, 32, 64]))
    steps = (lambda places: [s for s in sim.residue_first(places, tile) if s]) if rng.integers(3) == 0 else None
    core = [sim.HOPPER, sim.HOPPER, sim.AMPERE, sim.STRANGE][rng.integers(4)]
    return sim.tensor("f16", out, slices, merge[rng.integers(5 if out == "f32" else len(merge))], steps, core), k


@pytest.mark.parametrize("seed", sample_cases(range(40), 40, str))
def test_nothing_false_is_said_of_random_kernels(seed):
    rng = np.random.default_rng(seed)
    (fn, k), m, n = drawn_kernel(rng), int(rng.integers(1, 20)), int(rng.integers(1, 20))
    found = fingerprint(fn, m, n, k)
    if found.recipe is not None:
        box = BlackBox(fn, (m, n, k), (FORMATS["f16"],) * 2, "numpy", None, 64)
        kinds = [(kind, 2000 + at) for at in range(4) for kind in ("flat", "late", "near", "steep")]
        assert [count_mismatches(found.recipe, ask_sample(box, kind, number)) for kind, number in kinds] == [0] * 16, str(found)
