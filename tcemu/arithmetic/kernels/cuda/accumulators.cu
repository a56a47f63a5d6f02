// Accumulators between steps: sums of chains, and the second rounding of an instruction whose D has another format.

__device__ __forceinline__ u32 canonical(u32 c) { return (c & ~RESULT::sign) > RESULT::infinity ? RESULT::nan : c; }

// x + y of codes of RESULT, rounded RN once
__device__ __forceinline__ u32 add(u32 x, u32 y) {
    if (RESULT::mantissa_bits == F32::mantissa_bits) return canonical(__float_as_uint(__fadd_rn(__uint_as_float(x), __uint_as_float(y))));
    const Factor i = RESULT::decode(x), j = RESULT::decode(y);
    const bool i_special = i.exponent == SPECIAL_EXPONENT, j_special = j.exponent == SPECIAL_EXPONENT;
    if (i_special || j_special) {
        const bool invalid = (i_special && i.significand == 0) || (j_special && j.significand == 0);
        if (invalid || (i_special && j_special && i.significand != j.significand)) return RESULT::nan;
        return i_special ? x : y;
    }
    // in units of the least subnormal a sum fits a long
    const int last = RESULT::least_exponent;
    const s64 sum = ((s64)i.significand << max(i.exponent - last, 0)) + ((s64)j.significand << max(j.exponent - last, 0));
    if (sum == 0) return x & y & RESULT::sign;
    return encode<RESULT, RN>(sum < 0, (u64)(sum < 0 ? -sum : sum), last - RESULT::mantissa_bits, RESULT::mantissa_bits);
}

// what an instruction leaves where D has another format than the steps: f32 steps, D in f16
__device__ __forceinline__ u32 to_result_format(u32 c) {
    const Factor i = F32::decode(c);
    if (i.exponent == SPECIAL_EXPONENT) return i.significand == 0 ? (u32)F16::nan : F16::infinity | (i.significand < 0 ? F16::sign : 0);
    const u32 code = encode<F16, RN>(i.significand < 0, (u64)abs(i.significand), i.exponent - F32::mantissa_bits, F16::mantissa_bits);
    return c >> 31 ? code | F16::sign : code;
}

__device__ __forceinline__ u32 from_result_format(u32 code) {
    const Factor i = F16::decode(code);
    const u32 sign = code & F16::sign ? F32::sign : 0;
    if (i.exponent == SPECIAL_EXPONENT) return i.significand == 0 ? F32::nan : F32::infinity | sign;
    return encode<F32, RZ>(false, (u64)abs(i.significand), i.exponent - F16::mantissa_bits, F32::mantissa_bits) | sign;
}
