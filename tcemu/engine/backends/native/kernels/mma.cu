// D = A·B + C by an instruction of one warp, K in ascending order through one accumulator. All operands come as the registers of fragments,
// so that nothing here knows where in them an element stands. A warp has DOWN x ACROSS fragments of D.

struct Shape {
    int batch, rows, columns, steps;  // fragments of D, and instructions along K
    int batch_a, batch_b;             // 1: one for all
};

constexpr int WARPS = 4, TOGETHER = 16;  // of a block; rows of warps that run at once, so that they meet in the cache

template <int REGISTERS> struct alignas(REGISTERS * sizeof(Word) < 16 ? REGISTERS * sizeof(Word) : 16) Fragment { Word r[REGISTERS]; };
typedef Fragment<A_REGISTERS> A;
typedef Fragment<B_REGISTERS> B;
typedef Fragment<D_REGISTERS> D;

STATEMENT
extern "C" __global__ void __launch_bounds__(32 * WARPS) multiply_by_mma(const Shape *shape, const A *a, const B *b, const D *c, D *d) {
    const Shape s = *shape;
    const int down = (s.rows + DOWN - 1) / DOWN, across = (s.columns + ACROSS - 1) / ACROSS, lane = threadIdx.x % 32;
    const s64 warp = (s64)blockIdx.x * WARPS + threadIdx.x / 32;
    const int batch = (int)(warp / ((s64)down * across)), number = (int)(warp % ((s64)down * across));
    if (batch >= s.batch) return;
    const int group = number / (TOGETHER * across) * TOGETHER, tall = min(TOGETHER, down - group);
    const int row = (group + number % (TOGETHER * across) % tall) * DOWN, column = number % (TOGETHER * across) / tall * ACROSS;
    const A *left[DOWN];
    const B *right[ACROSS];
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
        left[i] = a + ((s64)(s.batch_a > 1 ? batch : 0) * s.rows + min(row + i, s.rows - 1)) * s.steps * 32 + lane;
#pragma unroll
    for (int j = 0; j < ACROSS; ++j)
        right[j] = b + ((s64)(s.batch_b > 1 ? batch : 0) * s.columns + min(column + j, s.columns - 1)) * s.steps * 32 + lane;
    const s64 first = (s64)batch * s.rows * s.columns;
    D sum[DOWN][ACROSS];
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
            sum[i][j] = c[(first + (s64)min(row + i, s.rows - 1) * s.columns + min(column + j, s.columns - 1)) * 32 + lane];
    A x[DOWN];
    B y[ACROSS];
    const auto load = [&](int t) {
#pragma unroll
        for (int i = 0; i < DOWN; ++i) x[i] = left[i][(s64)t * 32];
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) y[j] = right[j][(s64)t * 32];
    };
    load(0);
#pragma unroll 2
    for (int t = 0; t < s.steps; ++t) {
        A own[DOWN];
        B other[ACROSS];
#pragma unroll
        for (int i = 0; i < DOWN; ++i) own[i] = x[i];
#pragma unroll
        for (int j = 0; j < ACROSS; ++j) other[j] = y[j];
        load(min(t + 1, s.steps - 1));  // ahead
#pragma unroll
        for (int i = 0; i < DOWN; ++i)
#pragma unroll
            for (int j = 0; j < ACROSS; ++j) multiply(sum[i][j], own[i], other[j]);
    }
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
        for (int j = 0; j < ACROSS; ++j)
            if (row + i < s.rows && column + j < s.columns) d[(first + (s64)(row + i) * s.columns + column + j) * 32 + lane] = sum[i][j];
}
