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
    else if constexpr (RESULT::mantissa_bits == F32::mantissa_bits) return f16_to_f32(code);
    else return f32_to_f16(code);
}

// The words of one instruction
struct Given {
    Words<A_WORDS> a;
    Words<B_WORDS> b;
    Words<C_WORDS> c;
};

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
    const s64 items = (s64)sizes.batch * PARTS, first = (s64)number * sizes.each;
    if (first >= items) return;
    const Item end = (Item)min(items, first + sizes.each);
    const auto load = [&](Item item) {
        const Place place = Place::of(item);
        return Given{load_words<A_WORDS>(a + place.word(sizes.a, A_ALL, A_PART, 0) + lane * A_APART),
                     load_words<B_WORDS>(b + place.word(sizes.b, B_ALL, 0, B_TILE) + lane * B_APART),
                     load_words<C_WORDS>(c + place.word(sizes.c, C_ALL, C_PART, C_WORDS) + lane * C_APART)};
    };
    Given next = load((Item)first);
#pragma unroll 1
    for (Item item = (Item)first; item < end; ++item) {
        const Place place = Place::of(item);
        const Given own = AHEAD ? next : load(item);
        OfBatch beside = {};
#if SPARSE
        beside.fields = fields + place.word(sizes.fields, 32 * WARPGROUP, 32, 0);
#endif
#if SCALED
        beside.a_scales = a_scales + place.word(sizes.a_scales, 128, 0, 0), beside.b_scales = b_scales + place.word(sizes.b_scales, 128, 0, 0);
#endif
#if SELECTED
        beside.selected = selected(selectors, sizes, place.batch);
#endif
        lines.write(tables, own.a, own.b, beside, lane);
        __syncwarp();
        Codes codes;
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v)
            codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE] = accumulator_of(code_of<C_BITS, C_CONTAINER, 0>(own.c, d_element(v)));
        if (AHEAD && item + 1 < end) next = load(item + 1);  // while the steps go
        steps(codes, lines);
        u32 words[D_WORDS];
#pragma unroll
        for (int v = 0; v < D_WORDS; ++v) words[v] = 0;
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            const u32 code = codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
            words[d_element(v) * D_BITS / 32] |= (ROUNDED_AGAIN ? f32_to_f16(code) : code) << d_element(v) * D_BITS % 32;
        }
        store_words(d + place.word(1, D_ALL, D_PART, D_WORDS) + lane * D_APART, words);
        __syncwarp();
    }
}
