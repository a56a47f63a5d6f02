// Accumulators between instructions whose D has another format than their steps.

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
