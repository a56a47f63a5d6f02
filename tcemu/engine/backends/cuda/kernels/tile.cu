// A tile of D a block, in registers, while K goes by step after step. For steps that are truncated toward zero, or rounded to f16: `fast_step` of
// products.cu or groups.cu. Chains, and parts of K whose sums are promoted to f32, start from nothing; shared memory holds the sum of those
// that are done.
//
// A step is fast where all that takes part is within reach: see `is_plain` and `is_fast`. All else (Inf, NaN, what is far above or below) takes
// `careful`, the step in integers.

// The factors of a step
template <class LINE> struct OfStep {
    const LINE &line;
    int step;
    __device__ __forceinline__ Factor operator()(int t) const { return line(product_of(step, t)); }
};

struct Operands {  // the kernel's parameters
    const Shape *shapes;
    const ACode *a;
    const BCode *b;
    const u8 *a_scales, *b_scales;
};

// Which tile of D a block has: 8 tiles down, then across, so that blocks that run together read the same operands
struct Place {
    int batch, row_tile, column_tile;

    static __device__ __forceinline__ Place of(const Shape &shape) {
        const int down = (shape.m + A_LINES - 1) / A_LINES, across = (shape.n + B_LINES - 1) / B_LINES;
        const int tile = blockIdx.x % (down * across), band = tile / (8 * across), height = min(8, down - 8 * band);
        const int in_band = tile - band * 8 * across;
        return {(int)blockIdx.x / (down * across), band * 8 + in_band % height, in_band / height};
    }
};

// A step in integers, of every element of the lane. Returns whether all are plain again. It goes by way of local memory, so that its code
// stands once.
__device__ __noinline__ bool careful(u32 (&codes)[ROWS_OF_LANE][COLUMNS_OF_LANE], const Operands &of, const Lane &at, int step) {
    const Shape shape = *of.shapes;
    const Place place = Place::of(shape);
    bool plain = true;
#pragma unroll 1
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        const int row = place.row_tile * A_LINES + at.row(i), column = place.column_tile * B_LINES + at.column(j);
        if (row >= shape.m || column >= shape.n) continue;
        const auto x = row_of(shape, of.a, of.a_scales, place.batch, row);
        const auto y = column_of(shape, of.b, of.b_scales, place.batch, column);
        codes[i][j] = fused_step(OfStep<decltype(x)>{x, step}, OfStep<decltype(y)>{y, step}, codes[i][j], false);
        plain &= is_plain(codes[i][j]);
    }
    return plain;
}

// The same for accumulators as fast steps have them, and all lanes of the warp
__device__ __forceinline__ bool careful_step(Accumulators &c, const Operands &of, const Lane &at, int step) {
    u32 codes[ROWS_OF_LANE][COLUMNS_OF_LANE];
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) codes[i][j] = code_of(c[i][j]);
    const bool plain = careful(codes, of, at, step);
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) c[i][j] = value_of(codes[i][j]);
    return __all_sync(ALL, plain);
}

constexpr int STEPS = STEPS_TOGETHER;  // of a stage, which is copied to shared memory at once
constexpr int A_STAGE = STEPS * APart::bytes, STAGE = A_STAGE + STEPS * BPart::bytes;

__device__ __forceinline__ void copy_bytes(u8 *to, const u8 *from, int bytes) {
    for (int v = threadIdx.x * 16; v < bytes; v += THREADS * 16) copy_16(to + v, from + v);
}

// The stages in shared memory, in a ring. While one is worked on, the next is copied.
struct Stages {
    u8 *shared;
    const u8 *a, *b;
    int steps;

    __device__ __forceinline__ u8 *a_part(int step) const { return shared + step / STEPS % RING * STAGE + step % STEPS * APart::bytes; }
    __device__ __forceinline__ u8 *b_part(int step) const { return shared + step / STEPS % RING * STAGE + A_STAGE + step % STEPS * BPart::bytes; }
    __device__ __forceinline__ void copy(int step) const {
        if (step >= steps) return;
        const int count = min(STEPS, steps - step);
        copy_bytes(a_part(step), a + (s64)step * APart::bytes, count * APart::bytes);
        copy_bytes(b_part(step), b + (s64)step * BPart::bytes, count * BPart::bytes);
        commit_copies();
    }
    // waits until the stage that begins at `step` is there, and nobody works any more on the one whose place the next copy takes
    __device__ __forceinline__ void next(int step) const {
        if (RING == 1) {
            barrier();
            copy(step);
        }
        await_copies();
        barrier();
        if (RING > 1) copy(step + STEPS);
    }
};

// f(i, j, where the element lies in C and D), for each element of the lane that is in D
template <class F> __device__ __forceinline__ void for_each(const Shape &shape, const Lane &at, F f) {
    const Place place = Place::of(shape);
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
            const int row = place.row_tile * A_LINES + at.row(i), column = place.column_tile * B_LINES + at.column(j);
            if (row < shape.m && column < shape.n) f(i, j, ((s64)place.batch * shape.m + row) * shape.n + column);
        }
}

constexpr int STEPS_OF_PART = PROMOTED ? OF_PART / TERMS : CHAIN;  // 0: all steps follow each other, from C on

// The sums of the parts that are done, in shared memory behind the stages: each thread has its own, those of neighbours side by side
struct Totals {
    u32 *own;
    __device__ __forceinline__ u32 &operator()(int i, int j) const { return own[(i * COLUMNS_OF_LANE + j) * THREADS]; }
};

__device__ __forceinline__ void add_part(const Totals &totals, Accumulators &sums, const Shape &shape, const BlockScales &scales,
                                         const Lane &at, int part) {
    float of_rows[ROWS_OF_LANE] = {}, of_columns[COLUMNS_OF_LANE] = {};
    if (BLOCK_SCALED) {
        const Place place = Place::of(shape);
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i) {
            const int row = place.row_tile * A_LINES + at.row(i);
            if (row < shape.m) of_rows[i] = scales.row(shape, place.batch, row, part);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
            const int column = place.column_tile * B_LINES + at.column(j);
            if (column < shape.n) of_columns[j] = scales.column(shape, place.batch, column, part);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
            const u32 total = totals(i, j), sum = code_of(sums[i][j]);
            totals(i, j) = PROMOTED ? add_promoted(total, sum, __fmul_rn(of_rows[i], of_columns[j])) : add(total, sum);
            sums[i][j] = 0;
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    tile(const Shape *shapes, const ACode *a, const BCode *b, const CCode *c,
#if SCALED
         const u8 *a_scales, const u8 *b_scales,
#endif
#if BLOCK_SCALED
         const float *row_scales, const float *column_scales,
#endif
         const u8 *a_prepared, const u8 *b_prepared, DCode *d) {
#if !SCALED
    const u8 *a_scales = nullptr, *b_scales = nullptr;
#endif
#if !BLOCK_SCALED
    const float *row_scales = nullptr, *column_scales = nullptr;
#endif
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x / 32;
    const Lane at = {(int)threadIdx.x % 32, warp / WARPS_ACROSS * 16 * ROW_TILES, warp % WARPS_ACROSS * 8 * COLUMN_TILES};
    const int steps = shapes->k / TERMS, limit = shapes->limit;
    // the bit of a half, known to no compiler: then a mask and this bit are one instruction
    const u32 half = steps > 0 ? 1u << (FIELD - 1) : 0;
    Stages stages = {shared, a_prepared, b_prepared, steps};
    const Totals totals = {(u32 *)(shared + RING * STAGE) + threadIdx.x};
    Accumulators sums = {};
    bool plain = true;
    {
        const Shape shape = *shapes;
        const Place place = Place::of(shape);
        const s64 a_tile = (s64)(shape.a_batch > 1 ? place.batch : 0) * ((shape.m + A_LINES - 1) / A_LINES) + place.row_tile;
        const s64 b_tile = (s64)(shape.b_batch > 1 ? place.batch : 0) * ((shape.n + B_LINES - 1) / B_LINES) + place.column_tile;
        stages.a += a_tile * steps * APart::bytes, stages.b += b_tile * steps * BPart::bytes;
        if (RING > 1) stages.copy(0);
        for_each(shape, at, [&](int i, int j, s64 element) {
            const u32 code = c[element];
            if (STEPS_OF_PART) {
                totals(i, j) = code;
            } else {
                plain &= is_plain(code);
                sums[i][j] = value_of(code);
            }
        });
    }
    plain = __all_sync(ALL, plain);

    int in_part = 0, part = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        if (step % STEPS == 0) stages.next(step);
        const u8 *x = stages.a_part(step), *y = stages.b_part(step);
        if (plain && is_fast(x, y, at, limit)) {
            fast_step(sums, x, y, at, half);
            plain = still_plain(sums);
        } else
            plain = careful_step(sums, {opaque(shapes), opaque(a), opaque(b), opaque(a_scales), opaque(b_scales)}, at, step);
        if (STEPS_OF_PART == 0 || (++in_part < STEPS_OF_PART && step < steps - 1)) continue;
        const Shape shape = *opaque(shapes);
        const BlockScales scales = {opaque(row_scales), opaque(column_scales), shape.k / OF_PART};
        add_part(totals, sums, shape, scales, at, part);
        in_part = 0, ++part, plain = true;
    }

    const Lane here = {opaque(at.lane), opaque(at.first_row), opaque(at.first_column)};
    for_each(*opaque(shapes), here, [&](int i, int j, s64 element) { d[element] = STEPS_OF_PART ? totals(i, j) : code_of(sums[i][j]); });
}
