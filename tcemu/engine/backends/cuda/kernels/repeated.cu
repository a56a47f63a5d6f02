// The fast step of single products that the tensor core truncates. It aligns all terms of its own step to the greatest one, keeps OWN_BITS bits
// below, and truncates the rest of each. With an accumulator of so much more than every product, those bits end at this step's unit. The result
// keeps fewer bits; so an instruction adds each of four products four times, and no sum has a bit that is lost.

__device__ __forceinline__ void fast_step(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half) {
    const int row_tile = at.first_row / 16, column_tile = at.first_column / 8;
    float sums[ROW_TILES][COLUMN_TILES][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) {
            u32 powers[4];
            sum_powers(powers, a, b, row_tile + i, column_tile + j, at.lane);
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int row = 2 * i + v / 2, column = 2 * j + v % 2;
                const u32 word = alignment_word(powers[v], c[row][column], base_of(a, b, at.row(row), at.column(column)), half);
                sums[i][j][v] = begin_repeated(c[row][column], word);
            }
        }
#pragma unroll
    for (int k = 0; k < TERMS; k += 8) {
        Words4 x[ROW_TILES][2], y[COLUMN_TILES];
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
            for (int part = 0; part < 2; ++part) x[i][part] = APart::repeated_of_a(a + APart::values, row_tile + i, k + 4 * part, at.lane);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) y[j] = BPart::repeated_of_b(b + BPart::values, column_tile + j, k, at.lane);
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
                for (int i = 0; i < ROW_TILES; ++i) mma_k16(sums[i][j], x[i][part], part ? y[j].z : y[j].x, part ? y[j].w : y[j].y);
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int v = 0; v < 4; ++v) c[2 * i + v / 2][2 * j + v % 2] = end_repeated(sums[i][j][v], half);
}
