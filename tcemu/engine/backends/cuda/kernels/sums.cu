// Sums outside the steps: of chains, and of what is promoted. And which products a step has.

[[maybe_unused]] constexpr bool IS_F16 = RESULT::mantissa_bits == F16::mantissa_bits;
[[maybe_unused]] constexpr int OF_PART = (PROMOTED ? PROMOTED : 1) * OF_INSTRUCTION;  // products whose sum is promoted

// x + y of codes of RESULT, rounded RN once
__device__ __forceinline__ u32 add(u32 x, u32 y) {
    if (IS_F16) return canonical(add_f16(x, y));
    return add_f32(x, y);
}

// The f32 scales of promoted sums: one for each row of A and each column of B in each part of K
struct BlockScales {
    const float *of_rows, *of_columns;
    int parts;
    __device__ __forceinline__ float row(const Shape &shape, int batch, int row, int part) const {
        return of_rows[((s64)(shape.a_batch > 1 ? batch : 0) * shape.m + row) * parts + part];
    }
    __device__ __forceinline__ float column(const Shape &shape, int batch, int column, int part) const {
        return of_columns[((s64)(shape.b_batch > 1 ? batch : 0) * parts + part) * shape.n + column];
    }
};

// The number in its instruction of a group's product: they are dealt out in pairs
__device__ __forceinline__ int dealt(int j, int group) { return GROUPS == 1 ? j : (j / 2 * GROUPS + group) * 2 + j % 2; }

// The number along K of a step's product, where the steps of a group are all whole
__device__ __forceinline__ int product_of(int step, int t) {
    if (GROUPS == 1) return step * TERMS + t;
    const int j = step * TERMS % OF_INSTRUCTION;
    return step * TERMS - j + dealt(j % OF_GROUP + t, j / OF_GROUP);
}
