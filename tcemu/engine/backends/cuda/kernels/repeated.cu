// The fast step of single products that the tensor core truncates. It aligns all terms of its own step to the greatest one, keeps OWN_BITS bits
// below, and truncates the rest of each. With an accumulator of so much more than every product, those bits end at this step's unit. The result
// keeps fewer bits; so an instruction adds each of four products four times, and no sum has a bit that is lost.

constexpr int ROWS_TOGETHER = ROW_TILES < 2 ? 1 : 2;  // tiles of rows, so that many sums are independent

__device__ __forceinline__ void fast_step(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half) {
    const int row_tile = at.first_row / 16, column_tile = at.first_column / 8;
#pragma unroll
    for (int first = 0; first < ROW_TILES; first += ROWS_TOGETHER) {
        u32 words[ROWS_TOGETHER][COLUMN_TILES][4];
        float sums[ROWS_TOGETHER][COLUMN_TILES][4];
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) sum_powers(words[i][j], a, b, row_tile + first + i, column_tile + j, at.lane);
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const int row = 2 * (first + i) + v / 2, column = 2 * j + v % 2;
                    words[i][j][v] = alignment_word(words[i][j][v], c[row][column], base_of(a, b, at.row(row), at.column(column)), half);
                    sums[i][j][v] = begin_repeated(words[i][j][v]);
                }
#pragma unroll
        for (int k = 0; k < TERMS; k += 8) {
            Words4 x[ROWS_TOGETHER][2], y[COLUMN_TILES];
#pragma unroll
            for (int i = 0; i < ROWS_TOGETHER; ++i)
#pragma unroll
                for (int part = 0; part < 2; ++part)
                    x[i][part] = APart::repeated_of_a(a + APart::values, row_tile + first + i, k + 4 * part, at.lane);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) y[j] = BPart::repeated_of_b(b + BPart::values, column_tile + j, k, at.lane);
#pragma unroll
            for (int part = 0; part < 2; ++part)
#pragma unroll
                for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
                    for (int i = 0; i < ROWS_TOGETHER; ++i) {
                        const Words4 &w = y[j];
                        mma_k16(sums[i][j], x[i][part], part ? w.z : w.x, part ? w.w : w.y);
                    }
        }
#pragma unroll
        for (int i = 0; i < ROWS_TOGETHER; ++i)
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    Value &d = c[2 * (first + i) + v / 2][2 * j + v % 2];
                    d = end_repeated(d, words[i][j][v], sums[i][j][v], half);
                }
        pause();
    }
}
