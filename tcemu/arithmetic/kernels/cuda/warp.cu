// One instruction a warp: the words that its lanes hold in, the words of D out.
//
// A warp decodes the factors of A and of B into shared memory, each once, and lays them out as steps take them: a line is a row of A or a
// column of B. Then each lane computes the elements of D that it holds, which are some rows by some columns. Where things are stands in tables
// before this text: a place is the sum of what the bits of the lane's number add and of what the number of the element adds.

// All steps of the instruction, in their order
__device__ __forceinline__ void steps(Codes &running, const Lines &of) {
    Codes chain = {}, chains = {};
    int steps_in_chain = 0, chains_before = 0;
#pragma unroll 1
    for (int at = 0; at < STEPS; ++at) {
        const int first = at / PER_GROUP * PADDED + at % PER_GROUP * TERMS;
        if constexpr (CHAIN == 0) {
            step(running, of, first, false);
        } else {
            step(chain, of, first, steps_in_chain == 0);
            if (++steps_in_chain < CHAIN && at < STEPS - 1) continue;
            steps_in_chain = 0;
#pragma unroll
            for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
                const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
                if (TOGETHER) chains[i][j] = chains_before == 0 ? chain[i][j] : add(chains[i][j], chain[i][j]);
                else running[i][j] = add(running[i][j], chain[i][j]);
            }
            ++chains_before;
        }
    }
    if constexpr (TOGETHER) {
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            u32 &c = running[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
            c = add(c, chains[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE]);
        }
    }
}

// C's code in the format of the steps' results
__device__ __forceinline__ u32 accumulator_of(u32 code) {
    if constexpr (C_SAME) return code;
    else if constexpr (RESULT::mantissa_bits == F32::mantissa_bits) return from_result_format(code);
    else return to_result_format(code);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    warp(const Sizes *of_all, const u32 *__restrict__ a, const u32 *__restrict__ b, const u32 *__restrict__ c,
#if SPARSE
         const u32 *__restrict__ fields,
#endif
#if SCALED
         const u8 *__restrict__ a_scales, const u8 *__restrict__ b_scales,
#endif
#if SELECTED
         const int *__restrict__ selectors,
#endif
         u32 *__restrict__ d) {
    __shared__ Words4 memory[WARPS][WORDS_OF_WARP / 4];
    const Sizes sizes = *of_all;
    const int lane = threadIdx.x % 32, number = blockIdx.x * WARPS + threadIdx.x / 32;
    __shared__ Tables tables;
    tables.fill();
    if (Tables::used) __syncthreads();
    Lines lines((u32 *)memory[threadIdx.x / 32], lane);
    const s64 items = (s64)sizes.batch * WARPGROUP * TILES, begin = (s64)number * sizes.each, end = min(items, begin + sizes.each);
#pragma unroll 1
    for (s64 item = begin; item < end; ++item) {
        const Place place = {(int)(item / (WARPGROUP * TILES)), (int)(item / TILES % WARPGROUP), (int)(item % TILES)};
        const auto x = load_words<A_WORDS>(a + place.word(sizes.a, A_ALL, A_PART, 0) + lane * A_APART);
        const auto y = load_words<B_WORDS>(b + place.word(sizes.b, B_ALL, 0, B_TILE) + lane * B_APART);
        const auto start = load_words<C_WORDS>(c + place.word(sizes.c, C_ALL, C_PART, C_WORDS) + lane * C_APART);
        OfBatch given = {};
#if SPARSE
        given.fields = fields + place.word(sizes.fields, 32 * WARPGROUP, 32, 0);
#endif
#if SCALED
        given.a_scales = a_scales + place.word(sizes.a_scales, 128, 0, 0), given.b_scales = b_scales + place.word(sizes.b_scales, 128, 0, 0);
#endif
#if SELECTED
        given.selected = selected(selectors, sizes, place.batch);
#endif
        lines.write(tables, x, y, given, lane);
        __syncwarp();
        Codes codes;
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v)
            codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE] = accumulator_of(code_of<C_BITS, C_CONTAINER, 0>(start, d_element(v)));
        steps(codes, lines);
        u32 words[D_WORDS];
#pragma unroll
        for (int v = 0; v < D_WORDS; ++v) words[v] = 0;
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            const u32 code = codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
            words[d_element(v) * D_BITS / 32] |= (ROUNDED_AGAIN ? to_result_format(code) : code) << d_element(v) * D_BITS % 32;
        }
        store_words(d + place.word(1, D_ALL, D_PART, D_WORDS) + lane * D_APART, words);
        __syncwarp();
    }
}
