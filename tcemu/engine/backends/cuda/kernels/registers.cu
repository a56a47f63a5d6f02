// One instruction a warp: the words that its lanes hold in, the words of D out.

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
        start_steps(codes, own.c);
        if (AHEAD && item + 1 < end) next = load(item + 1);  // while the steps go
        steps(codes, lines);
        u32 words[D_WORDS];
        end_steps(words, codes);
        store_words(d + place.word(1, D_ALL, D_PART, D_WORDS) + lane * D_APART, words);
        __syncwarp();
    }
}
