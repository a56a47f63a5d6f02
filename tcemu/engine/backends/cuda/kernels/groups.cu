// The fast step of products that are summed in groups. A group's factors are integers below 2^8 under one pair of scales, so that bf16 holds each
// with its scale. A tensor core adds their products exactly: all are whole multiples of one power of two, below 2^16 of it, and their sum is below
// 2^24 of it; it keeps 23 bits or more below the greatest product, and f32 holds the sum. That sum is the group's term. What lies too low for f32
// lies below every unit of a fast step. The terms are truncated beside M, each by itself, and added exactly in f64.

constexpr int SUMS = TERMS / SUMMED;  // groups of a step

__device__ __forceinline__ void fast_tile(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half, int i, int j) {
    const int row_tile = at.first_row / 16 + i, column_tile = at.first_column / 8 + j;
    u32 powers[4];
    float sums[SUMS][4] = {};
    sum_powers(powers, a, b, row_tile, column_tile, at.lane);
#pragma unroll
    for (int k = 0; k < TERMS; k += 16) {
        const Words4 x = APart::fragment_of_a(a + APart::values, row_tile, k, at.lane);
        const Words2 y = BPart::fragment_of_b(b + BPart::values, column_tile, k, at.lane);
        mma_k16(sums[k / SUMMED], x, y.x, y.y);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        Value &d = c[2 * i + v / 2][2 * j + v % 2];
        const u32 word = alignment_word(powers[v], d, base_of(a, b, at.row(2 * i + v / 2), at.column(2 * j + v % 2)), half);
        Value sum = truncate(d, word);
#pragma unroll
        for (int group = 0; group < SUMS; ++group) sum = add_value(sum, truncate(sums[group][v], word));
        d = round_kept(sum, half);
    }
}

__device__ __forceinline__ void fast_step(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) fast_tile(c, a, b, at, half, i, j);
}
