// D = A·B + C by `wgmma`, K in ascending order through one accumulator. A block has 128 rows and TILE_N columns of D: two warpgroups, each
// with 64 of the rows, and a warp that has the tiles of A and B copied to a ring in shared memory.
//
// Promoted, an accumulator begins anew with each chunk of K and is then added to a sum in f32, with block scales by a fused multiply-add.

struct Shape {
    int batch, m, n, k_tiles;
    int batch_a, batch_b;      // 1: one for all
    int chunk;                 // tiles of K in a promoted chunk
    int scale_rows, scale_columns, row_groups, column_groups, chunks;
};

constexpr int ROWS = 128, LINE = 128, WARPGROUPS = 2, THREADS = 32 * (4 * WARPGROUPS + 1);
constexpr u32 A_BYTES = ROWS * LINE, B_BYTES = TILE_N * LINE, STAGE = A_BYTES + B_BYTES, ATOM = 1024;
constexpr int TOGETHER = 16;   // tiles of rows whose blocks run at once, so that they meet in the cache

// of a matrix with K in lines of 128 bytes, swizzled: PTX ISA 9.7.15.5.1.2.2
__device__ __forceinline__ u64 descriptor(u32 at) {
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(ATOM >> 4) << 32 | (u64)1 << 62;
}

// where two neighbouring elements of a lane's accumulator stand, in the warpgroup's part of D
__device__ __forceinline__ int row_of(int pair) { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + (pair & 1) * 8; }
__device__ __forceinline__ int column_of(int pair) { return (pair >> 1) * 8 + threadIdx.x % 4 * 2; }

template <class T> __device__ __forceinline__ void read_pair(const T *c, s64 at, int n, int column, T &x, T &y) {
    x = column < n ? c[at] : T(0);
    y = column + 1 < n ? c[at + 1] : T(0);
}

template <class T> __device__ __forceinline__ void write_pair(T *d, s64 at, int n, int column, T x, T y) {
    struct alignas(2 * sizeof(T)) Pair { T x, y; };
    if (n % 2 == 0 && column < n) {
        *(Pair *)(d + at) = Pair{x, y};
    } else {
        if (column < n) d[at] = x;
        if (column + 1 < n) d[at + 1] = y;
    }
}

#if PROMOTED
struct Sums {
    float total[ACCUMULATORS];

    __device__ __forceinline__ void add(const float (&chunk)[ACCUMULATORS], int number, const Shape &s, const float *x, const float *y,
                                        int first_row, int first_column) {
#if SCALED
        float row_scales[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_scales[half] = x[(s64)(min(first_row + row_of(half), s.m - 1) / s.scale_rows) * s.chunks + number];
        }
        const float *scales = y + (s64)number * s.column_groups;
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i += 4) {
            const int column = first_column + column_of(i / 2);
            const float left = scales[min(column, s.n - 1) / s.scale_columns], right = scales[min(column + 1, s.n - 1) / s.scale_columns];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int at = i + 2 * half;
                total[at] = __fmaf_rn(__fmul_rn(row_scales[half], left), chunk[at], total[at]);
                total[at + 1] = __fmaf_rn(__fmul_rn(row_scales[half], right), chunk[at + 1], total[at + 1]);
            }
        }
#else
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; ++i) total[i] = __fadd_rn(total[i], chunk[i]);
#endif
    }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_by_wgmma(const Shape *shape, const u8 *a, const u8 *b, ADDENDS Result *d) {
    extern __shared__ __align__(1024) u8 dynamic[];
    const Shape s = *shape;
    const u32 ring = (shared_address(dynamic) + ATOM - 1) & ~(ATOM - 1), full = ring + STAGES * STAGE, empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_begin(full + 8 * i, 1);
            barrier_begin(empty + 8 * i, WARPGROUPS);
        }
        barriers_begun();
    }
    __syncthreads();

    const int down = (s.m + ROWS - 1) / ROWS, across = (s.n + TILE_N - 1) / TILE_N;
    const int batch = blockIdx.x / (down * across), number = blockIdx.x % (down * across);
    const int group = number / (TOGETHER * across) * TOGETHER, tall = min(TOGETHER, down - group);
    const int tile_row = group + number % (TOGETHER * across) % tall, tile_column = number % (TOGETHER * across) / tall;
    const int batch_a = s.batch_a > 1 ? batch : 0, batch_b = s.batch_b > 1 ? batch : 0;

    if (threadIdx.x >= 128 * WARPGROUPS) {
        if (threadIdx.x % 32) return;
        const u8 *from_a = a + ((s64)batch_a * down + tile_row) * s.k_tiles * A_BYTES;
        const u8 *from_b = b + ((s64)batch_b * across + tile_column) * s.k_tiles * B_BYTES;
        for (int t = 0; t < s.k_tiles; ++t) {
            const int stage = t % STAGES, turn = t / STAGES;
            if (turn > 0) await(empty + 8 * stage, (turn - 1) & 1);
            arrive_expecting(full + 8 * stage, STAGE);
            copy(ring + stage * STAGE, from_a + (s64)t * A_BYTES, A_BYTES, full + 8 * stage);
            copy(ring + stage * STAGE + A_BYTES, from_b + (s64)t * B_BYTES, B_BYTES, full + 8 * stage);
        }
        return;
    }

    const int warpgroup = threadIdx.x / 128, first_row = tile_row * ROWS + 64 * warpgroup, first_column = tile_column * TILE_N;
    Accumulator sum[ACCUMULATORS];
#if PROMOTED
    Sums sums;
    int keep = 0;
#pragma unroll
    for (int i = 0; i < ACCUMULATORS; ++i) { sum[i] = 0; sums.total[i] = 0; }
#if SCALED
    const float *x = scales_a + (s64)batch_a * s.row_groups * s.chunks, *y = scales_b + (s64)batch_b * s.chunks * s.column_groups;
#else
    const float *x = nullptr, *y = nullptr;
#endif
#else
    const int keep = 1;
    {
        const Result *start = c + (s64)batch * s.m * s.n;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            const int row = first_row + row_of(pair), column = first_column + column_of(pair);
            Result left = 0, right = 0;
            if (row < s.m) read_pair(start, (s64)row * s.n + column, s.n, column, left, right);
            set_pair(sum, pair, left, right);
        }
    }
#endif
    for (int t = 0; t < s.k_tiles; ++t) {
        const int stage = t % STAGES;
        await(full + 8 * stage, t / STAGES & 1);
        const u64 left = descriptor(ring + stage * STAGE + warpgroup * 64 * LINE), right = descriptor(ring + stage * STAGE + A_BYTES);
        hold(sum);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 32 bytes along K, one instruction
#if PROMOTED
            multiply(sum, left + 2 * i, right + 2 * i, i > 0 ? 1 : keep);
#else
            multiply(sum, left + 2 * i, right + 2 * i, keep);
#endif
        }
        wgmma_commit();
        wgmma_wait<0>();  // the other warpgroup's keep the tensor core busy
        hold(sum);
        if (threadIdx.x % 128 == 0) arrive(empty + 8 * stage);
#if PROMOTED
        keep = (t + 1) % s.chunk != 0;
        if (!keep) sums.add(sum, t / s.chunk, s, x, y, first_row, first_column);
#endif
    }

    Result *out = d + (s64)batch * s.m * s.n;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
        const int row = first_row + row_of(pair), column = first_column + column_of(pair);
        if (row >= s.m) continue;
        Result left, right;
#if PROMOTED
        left = __float_as_uint(sums.total[2 * pair]), right = __float_as_uint(sums.total[2 * pair + 1]);
#else
        get_pair(sum, pair, left, right);
#endif
        write_pair(out, (s64)row * s.n + column, s.n, column, left, right);
    }
}
