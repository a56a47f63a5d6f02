// One fused step in integers, for any numbers of a Model that are known: the loops of tcemu/engine/arithmetic/step/general.py.

[[maybe_unused]] constexpr int OF_TERM = SUMMED ? SUMMED : 1;  // products that are one term: their exponents are the same, and they are added first

// x, y: (t) -> the factors of product t. c: a code of RESULT; first: there is no accumulator. Returns the code of the step's result.
template <class X, class Y> __device__ __forceinline__ u32 fused_step(const X &x, const Y &y, u32 c, bool first) {
    const u32 start = first ? 0 : c;
    int max_exponent = 2 * ZERO_EXPONENT;  // rule 3
#pragma unroll (TERMS <= 32 ? TERMS : 1)
    for (int t = 0; t < TERMS; ++t) max_exponent = max(max_exponent, x(t).exponent + y(t).exponent);
    max_exponent = max(max(max_exponent, RESULT::decode(start).exponent), FLOOR);
    if (max_exponent > SPECIAL_EXPONENT / 2) {
        float total = special_value(start);
        for (int t = 0; t < TERMS; ++t) total = __fadd_rn(total, __fmul_rn(class_of(x(t)), class_of(y(t))));
        return special_result(total, 0);
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
        sum += align_term(product, max_exponent - exponent);
    }
    return end_step(sum, start, max_exponent);
}
