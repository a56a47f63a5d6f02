// Codes and the numbers that they stand for, as tcemu/formats/coding.py and tcemu/arithmetic/multiplicands.py have them.

enum { NO_SPECIALS, IEEE, NAN_ONLY };  // what a format's codes are besides numbers: none; Inf and NaN; NaN where all bits are ones

[[maybe_unused]] constexpr int ZERO_EXPONENT = -(1 << 18);   // of what takes no part in the alignment
[[maybe_unused]] constexpr int SPECIAL_EXPONENT = 1 << 20;   // of Inf and NaN

// One factor of a product: its significand, signed, in units of its last place, and its exponent. A NaN has the significand 0, Inf +1 or -1.
struct Factor {
    int significand, exponent;
};

template <int BITS, int EXPONENT_BITS, int MANTISSA, int BIAS, int SPECIALS, int UNUSED, bool SIGNED = true, bool SUBNORMALS = true>
struct Format {
    static constexpr int mantissa_bits = MANTISSA, least_exponent = SUBNORMALS - BIAS;
    static constexpr int max_exponent = (1 << EXPONENT_BITS) - 1 - BIAS - (SPECIALS == IEEE);
    static constexpr u32 infinity = ((1u << EXPONENT_BITS) - 1) << MANTISSA, nan = (1u << (EXPONENT_BITS + MANTISSA)) - 1;
    static constexpr u32 sign = SIGNED ? 1u << (BITS - UNUSED - 1) : 0;
    static constexpr u32 greatest = SPECIALS == IEEE ? infinity - 1 : SPECIALS == NAN_ONLY ? nan - 1 : nan;
    static constexpr int specials = SPECIALS, unused_bits = UNUSED;

    static __device__ __forceinline__ bool negative(u32 code) { return code >> UNUSED & sign; }
    // the factor without its sign. An Inf has the significand 2^MANTISSA, a NaN another one: see `special`
    static __device__ __forceinline__ Factor absolute(u32 code) {
        const int c = (int)(code >> UNUSED & nan), field = SUBNORMALS ? max(c >> MANTISSA, 1) : c >> MANTISSA;
        const bool special = SPECIALS == IEEE ? c >= (int)infinity : SPECIALS == NAN_ONLY && c == (int)nan;
        const int significand = c - ((field - 1) << MANTISSA), exponent = special ? SPECIAL_EXPONENT : field - BIAS;
        return {significand, significand == 0 ? ZERO_EXPONENT : exponent};
    }
    // the same with the significands of specials as they are in a Factor
    static __device__ __forceinline__ Factor special(Factor x) {
        return {x.exponent == SPECIAL_EXPONENT ? SPECIALS == IEEE && x.significand == 1 << MANTISSA : x.significand, x.exponent};
    }
    static __device__ __forceinline__ Factor decode(u32 code) {
        const Factor factor = special(absolute(code));
        return {negative(code) ? -factor.significand : factor.significand, factor.exponent};
    }
};

typedef Format<32, 8, 23, 127, IEEE, 0> F32;
typedef Format<16, 5, 10, 15, IEEE, 0> F16;

// A factor under its block scale. Where products are summed in groups, all factors of a group are integers, in units of 2^least_exponent and of
// the scale's last place, and have the scale's exponent: that is the group's, whatever its values are.
template <class FORMAT> __device__ __forceinline__ Factor scaled(Factor factor, u8 code) {
    const Factor scale = SCALE::decode(code);
    if (scale.exponent == SPECIAL_EXPONENT) return {0, SPECIAL_EXPONENT};
    if (factor.exponent == ZERO_EXPONENT || factor.exponent == SPECIAL_EXPONENT) return factor;
    if (SUMMED == 0) return {factor.significand, factor.exponent + scale.exponent};  // of a power of two
    if (scale.significand == 0) return {0, ZERO_EXPONENT};
    return {factor.significand * (1 << (factor.exponent - FORMAT::least_exponent)) * scale.significand, scale.exponent};
}

// What a product is of, in the order of the shape that every kernel is given
struct Shape {
    int batch, m, n, k;
    int a_batch, b_batch;  // 1 where one matrix serves the whole batch
    int share;             // products that share a block scale
    int limit;             // on the exponents of a step, so that its sum stays in its binade: see tile.cu
};

// Where the factors of one row of A, or of one column of B, lie
template <class FORMAT, class CODE> struct Line {
    const CODE *codes;
    s64 stride;  // from one to the next along K
    const u8 *scales;
    s64 scale_stride;
    int share;

    __device__ __forceinline__ Factor operator()(int k) const {
        const Factor factor = FORMAT::decode(codes[k * stride]);
        return SCALED ? scaled<FORMAT>(factor, scales[k / share * scale_stride]) : factor;
    }
    // as many from k on, a multiple of their number; codes that lie together are read together
    template <int COUNT> __device__ __forceinline__ void read(int k, Factor (&factors)[COUNT]) const {
        constexpr int BYTES = COUNT * sizeof(CODE), PART = BYTES < 16 ? BYTES : 16;
        struct alignas(PART) Part { CODE codes[PART / sizeof(CODE)]; };
        struct Parts { Part parts[BYTES / PART]; } all;
        if (stride == 1) {
#pragma unroll
            for (int v = 0; v < BYTES / PART; ++v) all.parts[v] = ((const Part *)(codes + k))[v];
        } else {
#pragma unroll
            for (int v = 0; v < COUNT; ++v) all.parts[v * sizeof(CODE) / PART].codes[v % (PART / sizeof(CODE))] = codes[(k + v) * stride];
        }
#pragma unroll
        for (int v = 0; v < COUNT; ++v) {
            const Factor factor = FORMAT::decode(all.parts[v * sizeof(CODE) / PART].codes[v % (PART / sizeof(CODE))]);
            factors[v] = SCALED ? scaled<FORMAT>(factor, scales[(k + v) / share * scale_stride]) : factor;
        }
    }
};

__device__ __forceinline__ Line<A, ACode> row_of(const Shape &shape, const ACode *a, const u8 *scales, int batch, int row) {
    const s64 at = (s64)(shape.a_batch > 1 ? batch : 0) * shape.m + row;
    return {a + at * shape.k, 1, SCALED ? scales + at * (shape.k / shape.share) : nullptr, 1, shape.share};
}

__device__ __forceinline__ Line<B, BCode> column_of(const Shape &shape, const BCode *b, const u8 *scales, int batch, int column) {
    const s64 at = shape.b_batch > 1 ? batch : 0;
    const u8 *own = SCALED ? scales + at * (shape.k / shape.share) * shape.n + column : nullptr;
    return {b + at * shape.k * shape.n + column, shape.n, own, shape.n, shape.share};
}
