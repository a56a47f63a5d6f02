// Sums of chains, and which products a step has.

__device__ __forceinline__ u32 canonical(u32 c) { return (c & ~RESULT::sign) > RESULT::infinity ? RESULT::nan : c; }

// x + y of codes of RESULT, rounded RN once
__device__ __forceinline__ u32 add(u32 x, u32 y) {
    if (RESULT::mantissa_bits == F16::mantissa_bits) return canonical(add_f16(x, y));
    return canonical(__float_as_uint(__fadd_rn(__uint_as_float(x), __uint_as_float(y))));
}

// The number in its instruction of a group's product: they are dealt out in pairs
__device__ __forceinline__ int dealt(int j, int group) { return GROUPS == 1 ? j : (j / 2 * GROUPS + group) * 2 + j % 2; }

// The number along K of a step's product, where the steps of a group are all whole
__device__ __forceinline__ int product_of(int step, int t) {
    if (GROUPS == 1) return step * TERMS + t;
    const int j = step * TERMS % OF_INSTRUCTION;
    return step * TERMS - j + dealt(j % OF_GROUP + t, j / OF_GROUP);
}
