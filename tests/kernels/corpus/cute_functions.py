"""CuTe DSL functions of the corpus, compiled by CuTe DSL and run as they are by `tcemu.cute.run` in checked mode."""

import os
import tempfile

os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp())  # else the PTX that is kept lands in the working directory

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
import numpy as np
from cutlass.cute.runtime import from_dlpack
from kernels.corpus.corpus_table import CUTE, case, small

import tcemu.cute

OPTIONS = "--keep-ptx --gpu-arch=sm_90a"
THREADS = 128


class Launch:
    """A kernel of one block of threads for each row of the first tensor, or of as many blocks as are given."""

    def __init__(self, kernel, blocks=1, threads=THREADS):
        self.kernel, self.blocks, self.threads = kernel, blocks, threads

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
        self.kernel(x, y, z).launch(grid=(self.blocks, 1, 1), block=(self.threads, 1, 1))


def start(kernel, *arrays, **shape):
    given = [from_dlpack(each, assumed_align=16) for each in arrays]
    given += [given[-1]] * (3 - len(given))
    compiled = cute.compile(Launch(kernel, **shape), *given, options=OPTIONS)
    tcemu.cute.run(compiled, *given, target="H100", checked=True)


def words(rng, count=THREADS):
    return rng.integers(-(2**31), 2**31, count).astype(np.int32)


@cute.kernel
def add_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    i = b * THREADS + t
    if i < cute.size(z):
        z[i] = x[i] + y[i]


@case(CUTE)
def sums_of_vectors(rng):
    x, y, z = *rng.normal(size=(2, 300)).astype(np.float32), np.zeros(300, np.float32)
    start(add_kernel, x, y, z, blocks=3)
    yield z, x + y, 0


@cute.kernel
def mixed_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    z[t] = (x[t].to(cutlass.Float32) * y[t].to(cutlass.Float32)).to(cutlass.Float16)


@case(CUTE)
def products_of_f16_by_f32(rng):
    x, y, z = *rng.normal(size=(2, THREADS)).astype(np.float16), np.zeros(THREADS, np.float16)
    start(mixed_kernel, x, y, z)
    yield z, (x.astype(np.float32) * y.astype(np.float32)).astype(np.float16), 0


@cute.kernel
def butterfly_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    v = x[t]
    for i in cutlass.range_constexpr(5):
        v = v + cute.arch.shuffle_sync_bfly(v, 1 << i)
    y[t] = v


@case(CUTE)
def sums_of_warps_by_butterflies(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(butterfly_kernel, x, y)
    yield y, np.repeat(x.reshape(4, 32).sum(1, dtype=np.int32), 32), 0


@cute.kernel
def redux_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    y[t] = cute.arch.warp_reduction_max(x[t])


@case(CUTE)
def greatest_of_warps(rng):
    x, y = rng.normal(size=THREADS).astype(np.float32), np.zeros(THREADS, np.float32)
    start(redux_kernel, x, y)
    yield y, np.repeat(x.reshape(4, 32).max(1), 32), 0


@cute.kernel
def vote_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    y[t] = cute.arch.vote_ballot_sync(x[t] > 0)


@case(CUTE)
def votes_of_warps(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(vote_kernel, x, y)
    ballots = ((x > 0).reshape(4, 32) * (np.uint32(1) << np.arange(32, dtype=np.uint32))).sum(1, dtype=np.uint32)
    yield y, np.repeat(ballots, 32).view(np.int32), 0


@cute.kernel
def reverse_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    memory = utils.SmemAllocator()
    tile = memory.allocate_tensor(cutlass.Int32, cute.make_layout(THREADS), byte_alignment=16)
    tile[t] = x[t]
    cute.arch.sync_threads()
    y[t] = tile[THREADS - 1 - t]


@case(CUTE)
def reversal_through_shared_memory(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(reverse_kernel, x, y)
    yield y, x[::-1], 0


@cute.kernel
def transpose_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    memory = utils.SmemAllocator()
    tile = memory.allocate_tensor(cutlass.Float32, cute.make_layout((16, 16), stride=(17, 1)), byte_alignment=16)
    for i in cutlass.range_constexpr(2):
        tile[t // 16 + 8 * i, t % 16] = x[t // 16 + 8 * i, t % 16]
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(2):
        y[t // 16 + 8 * i, t % 16] = tile[t % 16, t // 16 + 8 * i]


@case(CUTE)
def transposition_of_a_tile(rng):
    x, y = rng.normal(size=(16, 16)).astype(np.float32), np.zeros((16, 16), np.float32)
    start(transpose_kernel, x, y)
    yield y, x.T.copy(), 0


@cute.kernel
def scan_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    v = x[t]
    for i in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(v, 1 << i, mask_and_clamp=0)
        if lane >= (1 << i):
            v = v + other
    y[t] = v


@case(CUTE)
def scans_of_warps(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(scan_kernel, x, y)
    yield y, np.cumsum(x.reshape(4, 32), 1, dtype=np.int32).reshape(-1), 0


@cute.kernel
def softmax_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    a, b = x[row, lane], x[row, lane + 32]
    top = cute.arch.warp_reduction_max(cute.arch.fmax(a, b))
    a, b = cute.math.exp(a - top), cute.math.exp(b - top)
    total = cute.arch.warp_reduction_sum(a + b)
    y[row, lane] = a / total
    y[row, lane + 32] = b / total


@case(CUTE)
def softmax_of_rows_by_warps(rng):
    x, y = rng.normal(size=(3, 64)).astype(np.float32), np.zeros((3, 64), np.float32)
    start(softmax_kernel, x, y, blocks=3, threads=32)
    e = np.exp(x.astype(np.float64))
    yield y, e / e.sum(1, keepdims=True), 1e-6


@cute.kernel
def norm_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    a = x[row, lane].to(cutlass.Float32)
    total = cute.arch.warp_reduction_sum(a * a)
    z[row, lane] = a * cute.math.rsqrt(total / 32 + 1e-5) * y[lane]


@case(CUTE)
def root_mean_square_of_rows(rng):
    x, y, z = rng.normal(size=(4, 32)).astype(np.float16), rng.normal(size=32).astype(np.float32), np.zeros((4, 32), np.float32)
    start(norm_kernel, x, y, z, blocks=4, threads=32)
    wide = x.astype(np.float64)
    yield z, wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * y, 1e-4


@cute.kernel
def stencil_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    total = 2 * x[t]
    if t > 0:
        total = total - x[t - 1]
    if t < THREADS - 1:
        total = total - x[t + 1]
    y[t] = total


@case(CUTE)
def second_differences(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(stencil_kernel, x, y)
    padded = np.pad(x, 1)
    yield y, 2 * x - padded[:-2] - padded[2:], 0


@cute.kernel
def bits_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    y[t] = cute.arch.popc(x[t]) + (x[t] >> 3 & 7)


@case(CUTE)
def ones_and_fields(rng):
    x, y = words(rng), np.zeros(THREADS, np.int32)
    start(bits_kernel, x, y)
    yield y, np.bitwise_count(x.view(np.uint32)).astype(np.int32) + (x >> 3 & 7), 0


@cute.kernel
def histogram_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    cute.arch.atomic_add((y.iterator + (x[b * THREADS + t] & 15)).llvm_ptr, cutlass.Int32(1))


@case(CUTE)
def histogram_by_atomics(rng):
    x, y = words(rng, 2 * THREADS), np.zeros(16, np.int32)
    start(histogram_kernel, x, y, blocks=2)
    yield y, np.bincount(x & 15, minlength=16).astype(np.int32), 0


@cute.kernel
def loop_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    v = x[t]
    steps = cutlass.Int32(0)
    while v > 1:
        v = v // 2
        steps = steps + 1
    y[t] = steps


@case(CUTE)
def loops_of_different_lengths(rng):
    x, y = rng.integers(1, 2**20, THREADS).astype(np.int32), np.zeros(THREADS, np.int32)
    start(loop_kernel, x, y)
    yield y, np.log2(x).astype(np.int32), 0


@cute.kernel
def matrix_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    m, n = t // 16, t % 16
    total = cutlass.Float32(0)
    for k in cutlass.range(32):
        total = total + x[m, k].to(cutlass.Float32) * y[n, k].to(cutlass.Float32)
    z[m, n] = total


@case(CUTE)
def product_without_tensor_cores(rng):
    x, y, z = small(rng, 8, 32), small(rng, 16, 32), np.zeros((8, 16), np.float32)
    start(matrix_kernel, x, y, z)
    yield z, x.astype(np.float32) @ y.T.astype(np.float32), 0


class WarpProduct:
    """D = A B^T of 16 x 8 x 16 by one `mma.sync`, whose fragments CuTe's layouts give."""

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        operation = cute.nvgpu.warp.MmaF16BF16Op(cutlass.Float16, cutlass.Float32, (16, 8, 16))
        self.kernel(cute.make_tiled_mma(operation), a, b, d).launch(grid=(1, 1, 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
        t, _, _ = cute.arch.thread_idx()
        part = mma.get_slice(t)
        of_a, of_b, of_d = part.partition_A(a), part.partition_B(b), part.partition_C(d)
        x, y, c = mma.make_fragment_A(of_a), mma.make_fragment_B(of_b), mma.make_fragment_C(of_d)
        x.store(of_a.load())
        y.store(of_b.load())
        c.fill(0.0)
        cute.gemm(mma, c, x, y, c)
        of_d.store(c.load())


def run_class(function, *arrays):
    given = [from_dlpack(each, assumed_align=16) for each in arrays]
    tcemu.cute.run(cute.compile(function(), *given, options=OPTIONS), *given, target="H100", checked=True)


@case(CUTE)
def product_of_a_warp(rng):
    a, b, d = small(rng, 16, 32), small(rng, 16, 32), np.zeros((16, 16), np.float32)
    run_class(WarpProduct, a, b, d)
    yield d, a.astype(np.float32) @ b.T.astype(np.float32), 0


@cute.kernel
def quantise_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    v = x[row, lane]
    scale = cute.arch.warp_reduction_max(cute.arch.fmax(v, -v)) / 127
    y[row] = scale
    z[row, lane] = cute.math.roundeven(v / scale).to(cutlass.Int8)


@case(CUTE)
def quantiser_of_rows_to_int8(rng):
    x, y, z = rng.normal(size=(3, 32)).astype(np.float32), np.zeros(3, np.float32), np.zeros((3, 32), np.int8)
    start(quantise_kernel, x, y, z, blocks=3, threads=32)
    scale = abs(x).max(1) / np.float32(127)
    yield y, scale, 0
    yield z, np.rint(x / scale[:, None]).astype(np.int8), 0


@cute.kernel
def attention_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    """Rows of x are queries, of y keys and values at once; one warp a query, one feature a lane."""
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    q = x[row, lane]
    m, total, o = cutlass.Float32(-1e30), cutlass.Float32(0), cutlass.Float32(0)
    for j in cutlass.range(8):
        s = cute.arch.warp_reduction_sum(q * y[j, lane]) * 0.25
        top = cute.arch.fmax(m, s)
        shrink, p = cute.math.exp(m - top), cute.math.exp(s - top)
        total, o, m = total * shrink + p, o * shrink + p * y[j, lane], top
    z[row, lane] = o / total


@case(CUTE)
def attention_by_warps(rng):
    x, y, z = rng.normal(size=(4, 32)).astype(np.float32), rng.normal(size=(8, 32)).astype(np.float32), np.zeros((4, 32), np.float32)
    start(attention_kernel, x, y, z, blocks=4, threads=32)
    s = x.astype(np.float64) @ y.T / 4
    p = np.exp(s - s.max(1, keepdims=True))
    yield z, p / p.sum(1, keepdims=True) @ y, 1e-5


@cute.kernel
def gather_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    t, _, _ = cute.arch.thread_idx()
    z[t] = x[y[t]]


@case(CUTE)
def gather_by_indices(rng):
    x, y, z = words(rng), rng.permutation(THREADS).astype(np.int32), np.zeros(THREADS, np.int32)
    start(gather_kernel, x, y, z)
    yield z, x[y], 0


@cute.kernel
def last_kernel(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    """Sums of blocks through shared memory and a tree of barriers."""
    t, _, _ = cute.arch.thread_idx()
    b, _, _ = cute.arch.block_idx()
    memory = utils.SmemAllocator()
    tile = memory.allocate_tensor(cutlass.Int32, cute.make_layout(THREADS), byte_alignment=16)
    tile[t] = x[b * THREADS + t]
    for i in cutlass.range_constexpr(7):
        cute.arch.sync_threads()
        if t < (64 >> i):
            tile[t] = tile[t] + tile[t + (64 >> i)]
    if t == 0:
        y[b] = tile[0]


@case(CUTE)
def sums_of_blocks_by_a_tree(rng):
    x, y = words(rng, 3 * THREADS), np.zeros(3, np.int32)
    start(last_kernel, x, y, blocks=3)
    yield y, x.reshape(3, THREADS).sum(1, dtype=np.int32), 0
