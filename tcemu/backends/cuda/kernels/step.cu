// One fused step in integers: the eight rules of tcemu/arithmetic/fused_dot_add.py, for any numbers of a Model that are known.

enum { RN, RZ, RM, RP };
constexpr int PLUS = 1, MINUS = 2, NOT_A_NUMBER = 4;  // what a step met; any sum above MINUS makes a NaN

[[maybe_unused]] constexpr int OF_TERM = SUMMED ? SUMMED : 1;  // products that are one term: their exponents are the same, and they are added first

constexpr __device__ int log2_up(int x) { return x <= 1 ? 0 : 1 + log2_up((x + 1) / 2); }

// whether a sum of products and an accumulator, in units, fits an int; else it fits a long: 40 + 2 bits, and 2^16 terms
constexpr bool SHORT = SUMMED == 0 && FRACTION_BITS + 3 + log2_up(TERMS) < 31;
template <bool> struct Integers { typedef s64 Signed; typedef u64 Unsigned; };
template <> struct Integers<true> { typedef int Signed; typedef u32 Unsigned; };
typedef Integers<SHORT>::Signed Sum;
typedef Integers<SHORT>::Unsigned Magnitude;

// whether a magnitude that loses the bits `rest` goes up by one; half: the weight of half a unit, 0 if it is beyond the word
template <int ROUNDING, class WORD> __device__ __forceinline__ bool goes_up(WORD rest, WORD half, bool odd, bool negative) {
    if (ROUNDING == RN) return half != 0 && (rest > half || (rest == half && odd));
    if (ROUNDING == RM) return rest != 0 && negative;
    if (ROUNDING == RP) return rest != 0 && !negative;
    return false;
}

// magnitude * 2^left, rounded to an integer
template <int ROUNDING, class WORD> __device__ __forceinline__ WORD rounded(WORD magnitude, int left, bool negative) {
    if (left >= 0) return magnitude << left;
    const int drop = -left, width = 8 * sizeof(WORD);
    const WORD whole = drop < width ? magnitude >> drop : 0;
    if (ROUNDING == RZ) return whole;
    const WORD rest = drop < width ? magnitude & (((WORD)1 << drop) - 1) : magnitude;
    const WORD half = drop <= width ? (WORD)1 << (drop - 1) : 0;
    return whole + goes_up<ROUNDING, WORD>(rest, half, whole & 1, negative);
}

__device__ __forceinline__ int leading_zeros(u64 v) { return __clzll(v); }
__device__ __forceinline__ int leading_zeros(u32 v) { return __clz(v); }

// rules 6 and 7: the code of (-1)^negative * magnitude * 2^unit, rounded once, with `kept` fraction bits
template <class FORMAT, int ROUNDING, class WORD = u64> __device__ __forceinline__ u32 encode(bool negative, WORD magnitude, int unit, int kept) {
    if (magnitude == 0) return 0;
    const int zeros = leading_zeros(magnitude), last = 8 * sizeof(WORD) - 1, exponent = unit + last - zeros;
    const int above = max(exponent - FORMAT::least_exponent, 0), below = max(FORMAT::least_exponent - exponent, 0);
    const WORD whole = rounded<ROUNDING, WORD>(magnitude << zeros, kept - last - below, negative);
    const u32 code = ((u32)whole << (FORMAT::mantissa_bits - kept)) + ((u32)above << FORMAT::mantissa_bits);  // the hidden bit adds one to the field
    if (exponent > FORMAT::max_exponent || code >= FORMAT::infinity) return FORMAT::infinity | (negative ? FORMAT::sign : 0);
    return code != 0 && negative ? code | FORMAT::sign : code;
}

// rule 8, of one product with an Inf or a NaN; without branches
__device__ __forceinline__ int special_product(Factor x, Factor y) {
    const int sign = (x.significand ^ y.significand) < 0 ? MINUS : PLUS;
    const int flag = (x.significand == 0) | (y.significand == 0) ? NOT_A_NUMBER : sign;  // a NaN, or Inf x 0
    return (x.exponent == SPECIAL_EXPONENT) | (y.exponent == SPECIAL_EXPONENT) ? flag : 0;
}

__device__ __forceinline__ int special_flags(Factor start) {
    return start.exponent != SPECIAL_EXPONENT ? 0 : start.significand == 0 ? NOT_A_NUMBER : start.significand < 0 ? MINUS : PLUS;
}

// what a step gives that met something of it
__device__ __forceinline__ u32 special_result(int flags) {
    return flags > MINUS ? RESULT::nan : RESULT::infinity | (flags == MINUS ? RESULT::sign : 0);
}

// x, y: (t) -> the factors of product t. c: a code of RESULT; first: there is no accumulator. Returns the code of the step's result.
template <class X, class Y> __device__ __forceinline__ u32 fused_step(const X &x, const Y &y, u32 c, bool first) {
    const Factor start = first ? Factor{0, ZERO_EXPONENT} : RESULT::decode(c);
    int max_exponent = 2 * ZERO_EXPONENT;  // rule 3
#pragma unroll (TERMS <= 32 ? TERMS : 1)
    for (int t = 0; t < TERMS; ++t) max_exponent = max(max_exponent, x(t).exponent + y(t).exponent);
    max_exponent = max(max(max_exponent, start.exponent), FLOOR);
    if (max_exponent > SPECIAL_EXPONENT / 2) {
        int flags = special_flags(start);
        for (int t = 0; t < TERMS; ++t) flags |= special_product(x(t), y(t));
        return special_result(flags);
    }
    Sum sum = 0;  // rules 4 and 5, in units of 2^(max_exponent - FRACTION_BITS)
#pragma unroll (TERMS <= 32 ? TERMS : 1)
    for (int term = 0; term < TERMS; term += OF_TERM) {
        int product = 0, exponent = 2 * ZERO_EXPONENT;
#pragma unroll
        for (int t = term; t < term + OF_TERM; ++t) {
            const Factor i = x(t), j = y(t);
            product += i.significand * j.significand, exponent = max(exponent, i.exponent + j.exponent);
        }
        const int left = FRACTION_BITS - MANTISSAS - (max_exponent - exponent);
        const Sum whole = rounded<ALIGNMENT, Magnitude>(abs(product), max(left, -128), product < 0);
        sum += product < 0 ? -whole : whole;
    }
    const int left = FRACTION_BITS - RESULT::mantissa_bits - (max_exponent - start.exponent);
    const s64 own = rounded<ALIGNMENT, u64>(abs(start.significand), max(left, -128), start.significand < 0);
    const s64 total = (s64)sum + (start.significand < 0 ? -own : own);
    return encode<RESULT, ROUNDING>(total < 0, (u64)(total < 0 ? -total : total), max_exponent - FRACTION_BITS, KEPT);
}
