// The elements of a quantised operand: x / scale, in f32 and then in the format, each rounded to nearest once. And the way back, of a product's
// sums: x * scale in f32. The formulas are those of tcemu/engine/arithmetic/step/quantizing.py; the text is compiled without -ftz.

struct Places {
    int lines, rows, k;                  // of x, [lines, k]: a batch of `rows` each
    int scale_batch, scale_rows, groups; // of the scales; 1 where one serves the whole batch, or all rows
    int depth;                           // neighbours along K that share a scale
};

constexpr int PIECE = 8, THREADS = 256;  // elements of a thread

template <class CODE> struct alignas(sizeof(CODE) * PIECE < 16 ? sizeof(CODE) * PIECE : 16) Piece { CODE codes[PIECE]; };

__device__ __forceinline__ float value_of(Source code) { return SOURCE_IS_F16 ? from_f16(code) : number(code); }

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const Places *places, const Source *x,
#if SCALES
                                                               const Scale *scales,
#endif
                                                               Target *out) {
    const Places s = *places;
    const u32 pieces = (u32)(s.k + PIECE - 1) / PIECE, piece = blockIdx.x * (u32)THREADS + threadIdx.x;
    const u32 line = piece / pieces;
    if (line >= (u32)s.lines) return;
    const int first = (int)(piece - line * pieces) * PIECE, count = min(s.k - first, PIECE);
    const Source *from = x + (s64)line * s.k + first;
    Target *to = out + (s64)line * s.k + first;
    const bool whole = count == PIECE && (u64)from % alignof(Piece<Source>) == 0 && (u64)to % alignof(Piece<Target>) == 0;
    Piece<Source> given = {};
    if (whole) given = *(const Piece<Source> *)from;
    else
        for (int i = 0; i < count; ++i) given.codes[i] = from[i];
    Piece<Target> made;
#if SCALES
    const s64 batch = s.scale_batch > 1 ? line / (u32)s.rows : 0;
    const s64 row = batch * s.scale_rows + (s.scale_rows > 1 ? line % (u32)s.rows : 0);
    const Scale *own = scales + row * s.groups;
    int group = first / s.depth, inside = first - group * s.depth;
    float scale = scale_number(own[group]);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (inside == s.depth && i < count) inside = 0, scale = scale_number(own[++group]);
        ++inside;
        made.codes[i] = rounded(by_scale(value_of(given.codes[i]), scale));
    }
#else
#pragma unroll
    for (int i = 0; i < PIECE; ++i) made.codes[i] = rounded(value_of(given.codes[i]));
#endif
    if (whole) *(Piece<Target> *)to = made;
    else
        for (int i = 0; i < count; ++i) to[i] = made.codes[i];
}
