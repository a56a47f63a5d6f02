"""Products on clusters, as CUTLASS's Hopper pipelines compute them, against `tcemu.gemm` in the kernel's order, in every bit.

`tests/ptx_files/cluster_gemm.cu` has the kernels: a warp that loads, warpgroups that multiply, multicast copies, and arrivals at the
mbarriers of other blocks.
"""

import re
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour

TILE, TILE_BYTES = 64, 128

TEXT = (Path(__file__).parents[2] / "ptx_files" / "cluster_gemm.ptx").read_text()


class Case(NamedTuple):
    """A kernel: its instruction, the dtype of its operands, its cluster, and its warpgroups."""

    op: str
    kind: str  # dtype of the tensor map
    dtype: type
    cluster: tuple[int, int]
    warpgroups: int = 1
    blocks: tuple[int, int] | None = None  # of the grid; None: a tile each


F16 = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
CASES = {
    "f16_2x1": Case(F16, "f16", np.float16, (2, 1)),
    "f16_1x2": Case(F16, "f16", np.float16, (1, 2)),
    "f16_2x2": Case(F16, "f16", np.float16, (2, 2)),
    "f16_4x1": Case(F16, "f16", np.float16, (4, 1)),
    "bf16_2x2": Case(F16.replace("f16.f16", "bf16.bf16"), "bf16", ml_dtypes.bfloat16, (2, 2)),
    "tf32_1x2": Case("wgmma.mma_async.sync.aligned.m64n64k8.f32.tf32.tf32", "f32", np.float32, (1, 2)),
    "e4m3_2x1": Case("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", "e4m3", ml_dtypes.float8_e4m3fn, (2, 1)),
    "s8_2x2": Case("wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8", "u8", np.int8, (2, 2)),
    "two_warpgroups_2x1": Case(F16, "f16", np.float16, (2, 1), 2, (2, 1)),  # persistent: two tiles a block
    "split_k": Case(F16, "f16", np.float16, (2, 1), 1, (4, 1)),
}


def draw(case, rows, k, seed):
    rng = np.random.default_rng(seed)
    if case.dtype is np.int8:
        return rng.integers(-128, 128, (rows, k)).astype(np.int8)
    values = (rng.standard_normal((rows, k)) * 2.0 ** rng.integers(-3, 4, (rows, 1))).astype(case.dtype)
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) if case.dtype is np.float32 else values  # of tf32


def launch(name, k_tiles, text=TEXT, **options):
    """Run a kernel on two tiles of clusters along each axis; return A, B and the result."""
    case, split = CASES[name], name == "split_k"
    k = k_tiles * TILE_BYTES // np.dtype(case.dtype).itemsize
    tiles = (2, 1) if split else (2, 2) if case.blocks else case.cluster
    m, n = tiles[1] * TILE * case.warpgroups, tiles[0] * TILE
    a, b = draw(case, m, k, 1), draw(case, n, k, 2)
    parts = (1, 1) if split else case.cluster
    width = TILE_BYTES // np.dtype(case.dtype).itemsize
    boxes = (width, TILE * case.warpgroups // parts[0]), (width, TILE // parts[1])
    maps = [ptx.TensorMap(x, case.kind, (k, x.shape[0]), box, swizzle=128) for x, box in zip((a, b), boxes, strict=True)]
    out = np.zeros((m, n), np.int32 if case.dtype is np.int8 else np.float32)
    shared = 2 * (case.warpgroups + 1) * TILE * TILE_BYTES + 40 + 4 * 32 * 128 + 1024
    *_, found = ptx.run(
        text, entry=name, grid=case.blocks or tiles, block=128 * case.warpgroups + 32, args=[*maps, out, n, k, *tiles], target="sm_90a",
        shared_bytes=shared, **options,
    )  # fmt: skip
    return a, b, found


def product(case, a, b):
    return np.asarray(tcemu.gemm(a, b.T, op=case.op, target="sm_90a"))


@pytest.mark.parametrize("name", sample_cases(CASES, {}))
def test_products_on_clusters(name):
    """Five tiles of K through two stages; for split K the sums of two halves, which one block sends to the other."""
    a, b, found = launch(name, 5)
    case = CASES[name]
    if name == "split_k":
        half = 5 // 2 * TILE_BYTES // 2
        wanted = product(case, a[:, :half], b[:, :half]) + product(case, a[:, half:], b[:, half:])
    else:
        wanted = product(case, a, b)
    assert np.count_nonzero(found.view(np.uint32) != wanted.view(np.uint32)) == 0 and wanted.any()


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_right_kernels_have_no_fault(name):
    launch(name, 3, checked=True)


def body(name):
    """Return the part of the file that is one kernel."""
    start = TEXT.index(f".entry {name}(")
    end = TEXT.find(".entry ", start + 1)
    return TEXT[start : end if end > 0 else len(TEXT)]


PLANTED = {
    "bytes that never come": (lambda text: re.sub(r"(mov\.u32\s+%r\d+), 16384;", r"\1, 16400;", text), "deadlock|more than step_limit"),
    "an arrival that never comes": (
        lambda text: re.sub(r"(mbarrier\.init.*), 1;", r"\1, 2;", text, count=1),
        "deadlock|more than step_limit",
    ),
    "a multicast mask of other blocks": (lambda text: re.sub(r"(\.multicast::cluster .*), %rs\d+;", r"\1, 12;", text), "does not have"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name):
    """One fault in a right kernel of two blocks, found in checked mode."""
    change, message = PLANTED[name]
    right = body("f16_2x1")
    wrong = change(right)
    assert wrong != right
    with pytest.raises((UndefinedBehaviour, ptx.OutOfBounds, ptx.StepLimit), match=message):
        launch("f16_2x1", 3, TEXT.replace(right, wrong), checked=True, step_limit=4000)
