// What the fast steps share, those of single products and those of groups: the accumulators, and the exponent that a step aligns to.
//
// The max exponent E of a step is found by the tensor core: of the powers 2^(BASE e) in bf16, the sum of products lies between 2^(BASE E)
// and n 2^(BASE E), n < 2^BASE, so that its exponent field gives E, however the machine rounds it (`alignment_word`). Beside it stands
// M = 1.5 * 2^(E + UP), a float whose last place is the step's unit, 2^(E - FRACTION_BITS). What is added to M and stays in its binade is rounded
// to whole units.

constexpr int ROWS_OF_LANE = 2 * ROW_TILES, COLUMNS_OF_LANE = 2 * COLUMN_TILES;  // tiles of m16n8
constexpr int THREADS = 32 * WARPS_DOWN * WARPS_ACROSS;
typedef Prepared<A_LINES> APart;
typedef Prepared<B_LINES> BPart;
constexpr u32 ALL = 0xFFFFFFFF;
constexpr int NONE = 1000;  // above every exponent

constexpr int BIAS = Floats<WIDE>::bias, UP = Floats<WIDE>::mantissa_bits - FRACTION_BITS;
constexpr u32 FIELDS = WIDE ? 0x7FF00000 : 0x7F800000;
constexpr u32 LEAST_FIELD = (u32)(RESULT::least_exponent + BIAS) << FIELD, TOO_LARGE = (u32)(RESULT::max_exponent + 1 + BIAS) << FIELD;

// a float's upper word, and a float of an upper word and what is below it
__device__ __forceinline__ u32 upper(float v) { return __float_as_uint(v); }
__device__ __forceinline__ u32 upper(double v) { return (u32)__double2hiint(v); }
__device__ __forceinline__ Value with_upper(u32 word) {
    if constexpr (WIDE) return __hiloint2double((int)word, 0);
    else return __uint_as_float(word);
}
__device__ __forceinline__ Value plus_units(u32 word, u32 units) {
    if constexpr (WIDE) return __hiloint2double((int)word, (int)units);
    else return __uint_as_float(word + units);
}
__device__ __forceinline__ float add_down(float x, float y) { return __fadd_rz(x, y); }
__device__ __forceinline__ double add_down(double x, double y) { return __dadd_rz(x, y); }
__device__ __forceinline__ float add_nearest(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double add_nearest(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ float multiply_add_down(float x, float y, float s) { return __fmaf_rz(x, y, s); }
__device__ __forceinline__ double multiply_add_down(double x, double y, double s) { return __fma_rz(x, y, s); }

struct Lane {
    int lane, first_row, first_column;  // of the lane's warp in the tile
    __device__ __forceinline__ int row(int i) const { return first_row + lane / 4 + 8 * i; }
    __device__ __forceinline__ int column(int j) const { return first_column + lane % 4 * 2 + j / 2 * 8 + j % 2; }
};

typedef Value Accumulators[ROWS_OF_LANE][COLUMNS_OF_LANE];

// The sums of powers for a tile of m16n8, as bits: for BASE 8 of the whole step at once, for BASE 4 the largest of sums of 8 products
__device__ __forceinline__ void sum_powers(u32 (&to)[4], const u8 *a, const u8 *b, int row_tile, int column_tile, int lane) {
    const u8 *of_a = a + APart::powers, *of_b = b + BPart::powers;
    float sums[4] = {0, 0, 0, 0};
    u32 best[4] = {0, 0, 0, 0};
    if constexpr (KP == 8) {
        const Words2 x = *(const Words2 *)(of_a + (row_tile * 32 + lane) * 8);
        mma_k8(sums, x.x, x.y, *(const u32 *)(of_b + (column_tile * 32 + lane) * 4));
    } else {
#pragma unroll
        for (int k = 0; k < KP; k += 16) {
            const Words4 x = APart::fragment_of_a(of_a, row_tile, k, lane);
            const Words2 y = BPart::fragment_of_b(of_b, column_tile, k, lane);
            if constexpr (BASE == 8) {
                mma_k16(sums, x, y.x, y.y);
            } else {
                float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
                mma_k8(first, x.x, x.y, y.x);
                mma_k8(second, x.z, x.w, y.y);
#pragma unroll
                for (int v = 0; v < 4; ++v) best[v] = max(best[v], max(__float_as_uint(first[v]), __float_as_uint(second[v])));
            }
        }
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) to[v] = max(__float_as_uint(sums[v]), best[v]);
}

// An accumulator's exponent, at its place. A subnormal f16 has that of the least normal one, and as a float a smaller one.
__device__ __forceinline__ u32 own_exponent(Value c) {
    const u32 word = upper(c) & 0x7FFFFFFF;
    return IS_F16 && word != 0 ? max(word, LEAST_FIELD) : word;
}

// The upper word of M. base: see `base_of`
__device__ __forceinline__ u32 alignment_word(u32 powers, Value c, int base, u32 half) {
    constexpr int SHIFT = 23 - FIELD + (BASE == 8 ? 3 : 2);  // an exponent's field, divided by BASE
    const int by_products = (int)(powers >> SHIFT) + base;
    const int by_c = (int)own_exponent(c) + (UP << FIELD);
    int both = max(by_c, by_products);
    if (FLOOR_COUNTS) both = max(both, (FLOOR + UP + BIAS) << FIELD);
    return ((u32)both & FIELDS) | half;
}

// What is added to the sum of powers of an element, so that it is the exponent of M; where exponents are relative, it includes the max exponents
// of both lines
constexpr int BASE_OF_ABSOLUTE = (UP + BIAS - OFFSET) << FIELD;
__device__ __forceinline__ int base_of(const u8 *a, const u8 *b, int row, int column) {
    if (!RELATIVE) return BASE_OF_ABSOLUTE;
    return ((const int *)(a + APart::tops))[row] + (((const int *)(b + BPart::tops))[column] + BASE_OF_ABSOLUTE);
}

// v truncated toward zero to whole units: rounded down beside M, or beside -M where v is negative
__device__ __forceinline__ Value truncate(Value v, u32 word) {
    const Value like_v = with_upper(word | (upper(v) & 0x80000000));
    return add_nearest(add_down(v, like_v), -like_v);
}

// rule 6, where the sum may have more bits than a result keeps. To nearest: rounded beside a float whose last place is the result's.
__device__ __forceinline__ Value kept(Value sum, u32 half) {
    constexpr int MORE = Floats<WIDE>::mantissa_bits - KEPT;
    if constexpr (ROUNDING == RN) {
        const Value like_sum = with_upper(((max(upper(sum) & FIELDS, LEAST_FIELD) + (MORE << FIELD)) & FIELDS) | half);
        return add_nearest(add_nearest(sum, like_sum), -like_sum);
    } else if constexpr (KEPT >= FRACTION_BITS) {
        return sum;
    } else {
        constexpr u64 lost = ((u64)1 << MORE) - 1;
        if constexpr (WIDE) return __longlong_as_double(__double_as_longlong(sum) & (s64)~lost);
        else return __uint_as_float(__float_as_uint(sum) & ~(u32)lost);
    }
}

// The code of a result. Where `kept` has truncated what a result does not keep, nothing is left to truncate, except in a C that no step has seen,
// which stays. Elsewhere what is truncated here lies below every unit of the next step. An f16 is exact, or too large and becomes Inf.
__device__ __forceinline__ u32 code_of(Value c) {
    float narrow;
    if constexpr (WIDE) narrow = __double2float_rz(c);
    else narrow = c;
    if (IS_F16) return to_f16(narrow);
    constexpr u32 lost = KEPT >= FRACTION_BITS ? (1u << (F32::mantissa_bits - KEPT)) - 1 : 0;
    return c != c ? F32::nan : __float_as_uint(narrow) & ~lost;
}

__device__ __forceinline__ Value value_of(u32 code) { return IS_F16 ? from_f16(code) : __uint_as_float(code); }

// an accumulator from which fast steps may go on: 0, or a multiple of the least unit and below 2^MOST
__device__ __forceinline__ bool is_plain(u32 code) {
    const Factor c = RESULT::decode(code);
    if (c.significand == 0) return c.exponent != SPECIAL_EXPONENT;
    return c.exponent < MOST && c.exponent - RESULT::mantissa_bits + __ffs(c.significand) - 1 >= LEAST_UNIT;
}

// whether these are plain, after fast steps from plain ones: an f16 may have become too large
__device__ __forceinline__ bool still_plain(const Accumulators &c) {
    if (!IS_F16) return true;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) most = max(most, upper(c[i][j]) & 0x7FFFFFFF);
    return __all_sync(ALL, most < TOO_LARGE);
}

// the fewest products of a line, among those of this warp, that are near its max exponent
template <int LINES> __device__ __forceinline__ int fewest_near(const int *near, int lane) {
    int fewest = TERMS;
#pragma unroll
    for (int line = 0; line < LINES; line += 32)
        if (line + 32 <= LINES || line + lane < LINES) fewest = min(fewest, near[line + lane]);
    return __reduce_min_sync(ALL, fewest);
}

// whether a step of this warp is fast, the same for all of its lanes
__device__ __forceinline__ bool is_fast(const u8 *a, const u8 *b, const Lane &at, int limit) {
    const int *a_tops = (const int *)(a + APart::tops) + at.first_row, *b_tops = (const int *)(b + BPart::tops) + at.first_column;
    int a_most = NO_TOP * TOP, b_most = NO_TOP * TOP, a_least = NONE * TOP, b_least = NONE * TOP;
#pragma unroll
    for (int line = 0; line < 16 * ROW_TILES; line += 32) {
        const int top = line + 32 <= 16 * ROW_TILES || line + at.lane < 16 * ROW_TILES ? a_tops[line + at.lane] : NO_TOP * TOP;
        a_most = max(a_most, top);
        a_least = min(a_least, top == NO_TOP * TOP ? NONE * TOP : top);
    }
#pragma unroll
    for (int line = 0; line < 8 * COLUMN_TILES; line += 32) {
        const int top = line + 32 <= 8 * COLUMN_TILES || line + at.lane < 8 * COLUMN_TILES ? b_tops[line + at.lane] : NO_TOP * TOP;
        b_most = max(b_most, top);
        b_least = min(b_least, top == NO_TOP * TOP ? NONE * TOP : top);
    }
    if (__reduce_max_sync(ALL, a_most) + __reduce_max_sync(ALL, b_most) > limit * TOP) return false;
    if (!RELATIVE) return true;
    if (__reduce_min_sync(ALL, a_least) + __reduce_min_sync(ALL, b_least) < LEAST_TOPS * TOP) return false;
    // And every largest product within NEAR binades of what both lines' max exponents allow. So it is where one of the TERMS places has factors
    // that are near the max exponents of their lines, in both: if the two lines have more than TERMS such factors together, they share a place
    if (fewest_near<16 * ROW_TILES>((const int *)(a + APart::near) + at.first_row, at.lane) +
            fewest_near<8 * COLUMN_TILES>((const int *)(b + BPart::near) + at.first_column, at.lane) > TERMS)
        return true;
    // Else the sums of powers tell: bit 30 is set
    u32 near = ALL;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            u32 powers[4];
            sum_powers(powers, a, b, at.first_row / 16 + i, at.first_column / 8 + j, at.lane);
            near &= powers[0] & powers[1] & powers[2] & powers[3];
        }
    return __all_sync(ALL, near >> 30 & 1);
}
