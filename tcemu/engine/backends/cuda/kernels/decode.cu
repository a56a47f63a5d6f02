// Where the factors of a product lie. A `Factor` is what `decode` of its format makes of a code: tcemu/engine/arithmetic/step/decoding.py.

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
        return SCALED ? FORMAT::scaled(factor, scales[k / share * scale_stride]) : factor;
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
            factors[v] = SCALED ? FORMAT::scaled(factor, scales[(k + v) / share * scale_stride]) : factor;
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
