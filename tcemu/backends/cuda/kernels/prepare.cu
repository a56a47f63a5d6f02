// The operands of `tile`, made once a matrix: see prepared.cu. A thread makes one step of one line.

__device__ __forceinline__ u32 power_in_bf16(int exponent) { return (u32)(exponent + 127) << 7; }

__device__ __forceinline__ void store(u8 *to, const u32 (&words)[4]) { *(Words4 *)to = {words[0], words[1], words[2], words[3]}; }
__device__ __forceinline__ void store(u8 *to, const u32 (&words)[2]) { *(Words2 *)to = {words[0], words[1]}; }
__device__ __forceinline__ void store(u8 *to, const u32 (&words)[1]) { *(u32 *)to = words[0]; }

template <bool WIDE_ONE> struct PowerOfTwo;
template <> struct PowerOfTwo<false> {
    static __device__ __forceinline__ float of(int exponent) { return __uint_as_float((u32)(exponent + 127) << 23); }
};
template <> struct PowerOfTwo<true> {
    static __device__ __forceinline__ double of(int exponent) { return __longlong_as_double((s64)(exponent + 1023) << 52); }
};

template <class FORMAT> struct OneFactor {
    const Factor factor;
    const int top;  // of the line

    // what a factor is besides; a step with a special does not look at its factors here
    __device__ __forceinline__ bool zero() const { return factor.significand == 0 || factor.exponent == SPECIAL_EXPONENT; }
    __device__ __forceinline__ int unit() const {
        return factor.exponent - FORMAT::mantissa_bits + (SUMMED ? FORMAT::least_exponent - SCALE::mantissa_bits : 0);
    }
    __device__ __forceinline__ auto value() const {
        const auto power = PowerOfTwo<WIDE>::of(zero() ? 0 : unit());
        return (zero() ? 0 : factor.significand) * power;
    }
    __device__ __forceinline__ u32 in_bf16() const {  // of a group's: exact, or subnormal and exact, for exponents up to MOST_OF_SCALE
        if (zero()) return 0;
        const double value = factor.significand * PowerOfTwo<true>::of(unit());
        return __float_as_uint((float)value) >> 16;
    }
    __device__ __forceinline__ u32 low_bit() const {
        if (zero()) return ABSENT;
        const int low = unit() + __ffs(factor.significand) - 1;
        return RELATIVE ? max(low - top, -DEPTH) + DEPTH : low - (FORMAT::least_exponent - FORMAT::mantissa_bits);
    }
    __device__ __forceinline__ u32 sign() const { return factor.significand < 0 && !zero() ? 0x80 : 0; }
    __device__ __forceinline__ bool near() const { return top == NO_TOP || (!zero() && factor.exponent >= top - NEAR / 2); }
    // relative exponents: of a line of zeros all powers are those of its max exponent, NO_TOP
    __device__ __forceinline__ u32 power(int power_of_one) const {
        const int up = factor.exponent - (RELATIVE ? top : 0);
        if (RELATIVE && top == NO_TOP) return power_in_bf16(power_of_one);
        return zero() || (RELATIVE && up < -RELATIVE_REACH) ? 0 : power_in_bf16(BASE * up + power_of_one);
    }
};

constexpr int MOST_OF_SCALE = 120;  // the exponent of a scale whose products bf16 holds
constexpr int MOST_LINES = A_LINES > B_LINES ? A_LINES : B_LINES;

// half_of(t), the bf16 of product t -> a section of fragments
template <bool IS_A, class F> __device__ __forceinline__ void store_fragments(u8 *section, int line, F half_of) {
    typedef Prepared<IS_A ? A_LINES : B_LINES> Part;
#pragma unroll
    for (int t = 0; t < KP; t += 2)
        *(u32 *)(section + (IS_A ? Part::in_fragment_of_a(line, t) : Part::in_fragment_of_b(line, t))) =
            t < TERMS ? half_of(t) | half_of(t + 1) << 16 : 0;
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
                const OneFactor<FORMAT> one = {factors[t + v + w], top};
                low_bits[v / 4] |= one.low_bit() << (8 * w), signs[v / 4] |= one.sign() << (8 * w);
            }
        }
        store(to + PART::low_bits + PART::byte(line, t), low_bits);
        store(to + PART::signs + PART::byte(line, t), signs);
    }
#pragma unroll
    for (int t = 0; t < TERMS; t += 16 / WORD) {
        Values values;
#pragma unroll
        for (int v = 0; v < 16 / WORD; ++v) values.v[v] = OneFactor<FORMAT>{factors[t + v], top}.value();
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
    if constexpr (SUMMED)
        store_fragments<IS_A>(to + Part::values, line, [&](int t) { return OneFactor<FORMAT>{factors[t], top}.in_bf16(); });
    else
        store_products<FORMAT, Part>(to, line, factors, top);
    const int power_of_one = IS_A ? POWER_OF_A : POWER_OF_B;
    store_fragments<IS_A>(to + Part::powers, line, [&](int t) { return OneFactor<FORMAT>{factors[t], top}.power(power_of_one); });
    *(int *)(to + Part::tops + line * 4) = top * TOP;
    if (RELATIVE) {
        int near = 0;
#pragma unroll
        for (int t = 0; t < TERMS; ++t) near += OneFactor<FORMAT>{factors[t], top}.near();
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
