// The fast step of single products that the tensor core truncates. It aligns all terms of its own step to the greatest one, keeps so many bits
// below, and truncates the rest of each. With an accumulator of so much more than every product, those bits end at this step's unit. The result
// keeps fewer bits; so an instruction adds each of four products four times, and no sum has a bit that is lost.

__device__ __forceinline__ void fast_step(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half) {
    const int row_tile = at.first_row / 16, column_tile = at.first_column / 8;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
        u32 words[COLUMN_TILES][4];
        float sums[COLUMN_TILES][4];
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j) sum_powers(words[j], a, b, row_tile + i, column_tile + j, at.lane);
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                const int base = base_of(a, b, at.row(2 * i + v / 2), at.column(2 * j + v % 2));
                words[j][v] = alignment_word(words[j][v], c[2 * i + v / 2][2 * j + v % 2], base, half);
                sums[j][v] = begin_repeated(words[j][v]);
            }
#pragma unroll
        for (int k = 0; k < TERMS; k += 16) {
            const Words4 first = APart::repeated_of_a(a + APart::values, row_tile + i, k, at.lane);
            const Words4 second = APart::repeated_of_a(a + APart::values, row_tile + i, k + 8, at.lane);
            Words4 y[COLUMN_TILES];
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) y[j] = BPart::repeated_of_b(b + BPart::values, column_tile + j, k, at.lane);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) mma_k16(sums[j], {first.x, first.y, first.x, first.y}, y[j].x, y[j].x);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) mma_k16(sums[j], {first.z, first.w, first.z, first.w}, y[j].y, y[j].y);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) mma_k16(sums[j], {second.x, second.y, second.x, second.y}, y[j].z, y[j].z);
#pragma unroll
            for (int j = 0; j < COLUMN_TILES; ++j) mma_k16(sums[j], {second.z, second.w, second.z, second.w}, y[j].w, y[j].w);
        }
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
            for (int v = 0; v < 4; ++v) {
                Value &d = c[2 * i + v / 2][2 * j + v % 2];
                d = end_repeated(d, words[j][v], sums[j][v], half);
            }
        pause();
    }
}
