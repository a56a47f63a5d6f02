// The operands of `tile`, made once a matrix: see prepared.cu. A thread makes one step of one line.

__device__ __forceinline__ void store(u8 *to, const u32 (&words)[4]) { *(Words4 *)to = {words[0], words[1], words[2], words[3]}; }
__device__ __forceinline__ void store(u8 *to, const u32 (&words)[2]) { *(Words2 *)to = {words[0], words[1]}; }
__device__ __forceinline__ void store(u8 *to, const u32 (&words)[1]) { *(u32 *)to = words[0]; }

constexpr int MOST_LINES = A_LINES > B_LINES ? A_LINES : B_LINES;

// half_of(t), the bf16 of product t -> a section of fragments
template <bool IS_A, bool REPEATED, class F> __device__ __forceinline__ void store_fragments(u8 *section, int line, F half_of) {
    typedef Prepared<IS_A ? A_LINES : B_LINES> Part;
#pragma unroll
    for (int t = 0; t < KP; t += 2)
        *(u32 *)(section + (REPEATED ? IS_A ? Part::in_repeated_of_a(line, t) : Part::in_repeated_of_b(line, t)
                            : IS_A   ? Part::in_fragment_of_a(line, t)
                                     : Part::in_fragment_of_b(line, t))) = t < TERMS ? half_of(t) | half_of(t + 1) << 16 : 0;
}

// What a fast step of single products reads besides the powers
template <class FORMAT, class PART> __device__ __forceinline__ void store_products(u8 *to, int line, const Factor (&factors)[TERMS], int top) {
#pragma unroll
    for (int t = 0; t < TERMS; t += PIECE) {
        u32 low_bits[PIECE / 4], signs[PIECE / 4];
#pragma unroll
        for (int v = 0; v < PIECE; v += 4) {
            low_bits[v / 4] = signs[v / 4] = 0;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const Factor one = factors[t + v + w];
                low_bits[v / 4] |= (u32)FORMAT::lowest_bit(one, top) << (8 * w), signs[v / 4] |= (u32)sign_byte(one) << (8 * w);
            }
        }
        store(to + PART::low_bits + PART::byte(line, t), low_bits);
        store(to + PART::signs + PART::byte(line, t), signs);
    }
#pragma unroll
    for (int t = 0; t < TERMS; t += 16 / WORD) {
        Values values;
#pragma unroll
        for (int v = 0; v < 16 / WORD; ++v) values.v[v] = FORMAT::value(factors[t + v]);
        *(Values *)(to + PART::values + PART::value(line, t)) = values;
    }
}

template <class FORMAT, bool IS_A, class LINE> __device__ __forceinline__ void prepare_line(const LINE *source, int line, int step, u8 *to) {
    typedef Prepared<IS_A ? A_LINES : B_LINES> Part;
    Factor factors[TERMS];
    int top = NO_TOP;
    if (source && GROUPS == 1) source->template read<TERMS>(step * TERMS, factors);
#pragma unroll
    for (int t = 0; t < TERMS; ++t) {
        if (source && GROUPS > 1) factors[t] = (*source)(product_of(step, t));
        if (!source) factors[t] = {0, ZERO_EXPONENT};
        if (factors[t].exponent != ZERO_EXPONENT) top = max(top, min(factors[t].exponent, SPECIAL_TOP));
    }
    if (SUMMED && top > MOST_OF_SCALE) top = SPECIAL_TOP;
    if constexpr (IN_BF16)
        store_fragments<IS_A, OWN_BITS != 0>(to + Part::values, line, [&](int t) { return (u32)FORMAT::bf16(factors[t]); });
    else
        store_products<FORMAT, Part>(to, line, factors, top);
    store_fragments<IS_A, false>(to + Part::powers, line, [&](int t) { return (u32)(IS_A ? power_of_a(factors[t], top) : power_of_b(factors[t], top)); });
    *(int *)(to + Part::tops + line * 4) = top * TOP;
    if (RELATIVE) {
        int near = 0;
#pragma unroll
        for (int t = 0; t < TERMS; ++t) near += is_near(factors[t], top);
        *(int *)(to + Part::near + line * 4) = near;
    }
}

extern "C" __global__ void __launch_bounds__(MOST_LINES) prepare(const Shape *shapes, const ACode *a, const BCode *b,
#if SCALED
                                                            const u8 *a_scales, const u8 *b_scales,
#endif
                                                            u8 *a_prepared, u8 *b_prepared) {
#if !SCALED
    const u8 *a_scales = nullptr, *b_scales = nullptr;
#endif
    const Shape shape = *shapes;
    const int steps = shape.k / TERMS, down = (shape.m + A_LINES - 1) / A_LINES, across = (shape.n + B_LINES - 1) / B_LINES;
    const int line = threadIdx.x;
    const s64 of_a = (s64)shape.a_batch * down * steps;
    if (blockIdx.x < of_a) {
        const s64 part = blockIdx.x;
        const int step = (int)(part % steps), tile = (int)(part / steps % down), row = tile * A_LINES + line;
        const auto source = row_of(shape, a, a_scales, (int)(part / steps / down), row);
        if (line < A_LINES)
            prepare_line<A, true>(row < shape.m ? &source : nullptr, line, step, a_prepared + part * Prepared<A_LINES>::bytes);
    } else {
        const s64 part = blockIdx.x - of_a;
        const int step = (int)(part % steps), tile = (int)(part / steps % across), column = tile * B_LINES + line;
        const auto source = column_of(shape, b, b_scales, (int)(part / steps / across), column);
        if (line < B_LINES)
            prepare_line<B, false>(column < shape.n ? &source : nullptr, line, step, b_prepared + part * Prepared<B_LINES>::bytes);
    }
}
