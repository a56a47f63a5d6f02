// The elements of a quantised operand: x / scale, in f32 and then in the format, each rounded to nearest once. tcemu/quantize/quantizer.py has
// the same on integers. And the way back, of a product's sums: x * scale in f32. Both are IEEE 754's: the text is compiled without -ftz, and
// __fdiv_rn is never replaced by a reciprocal.

struct Places {
    int lines, rows, k;                  // of x, [lines, k]: a batch of `rows` each
    int scale_batch, scale_rows, groups; // of the scales; 1 where one serves the whole batch, or all rows
    int depth;                           // neighbours along K that share a scale
};

constexpr int PIECE = 8, THREADS = 256;  // elements of a thread

template <class CODE> struct alignas(sizeof(CODE) * PIECE < 16 ? sizeof(CODE) * PIECE : 16) Piece { CODE codes[PIECE]; };

__device__ __forceinline__ float number(Source code) {  // exact
    if constexpr (sizeof(Source) == 4) return __uint_as_float(code);
    else if constexpr (SOURCE::mantissa_bits == F16::mantissa_bits) return from_f16(code);
    else return __uint_as_float((u32)code << 16);
}

// The code of an f32 number. As `encode` of tcemu/formats/coding.py: a NaN is the canonical one, and zeros keep their sign.
__device__ __forceinline__ Target rounded(float value) {
    constexpr bool finite_only = TARGET::specials == NO_SPECIALS;
    constexpr u32 beyond = SATURATE || finite_only ? TARGET::greatest : TARGET::specials == IEEE ? TARGET::infinity : TARGET::nan;
    constexpr u32 nan = (finite_only ? TARGET::greatest : TARGET::nan) << TARGET::unused_bits | ((1u << TARGET::unused_bits) - 1);
    const u32 word = __float_as_uint(value), magnitude = word & ~F32::sign, sign = word & F32::sign ? TARGET::sign : 0;
    if (magnitude > F32::infinity) return nan;
    if constexpr (TARGET::mantissa_bits == F32::mantissa_bits) return word;
    if (magnitude == F32::infinity) return (beyond | sign) << TARGET::unused_bits;
    const int field = magnitude >> F32::mantissa_bits, exponent = max(field, 1) - 127;
    const u32 significand = field == 0 ? magnitude : (magnitude & 0x7FFFFF) | 0x800000;
    const int above = max(exponent - TARGET::least_exponent, 0), below = max(TARGET::least_exponent - exponent, 0);
    const int drop = min(F32::mantissa_bits - TARGET::mantissa_bits + below, F32::mantissa_bits + 2);  // then nothing is left
    const u32 whole = (significand + ((1u << (drop - 1)) - 1) + (significand >> drop & 1)) >> drop;    // a tie goes to the even one
    const u32 code = whole + ((u32)above << TARGET::mantissa_bits);                                     // the hidden bit adds one to the field
    return ((code > TARGET::greatest ? beyond : code) | sign) << TARGET::unused_bits;
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize(const Places *places, const Source *x,
#if SCALES
                                                               const float *scales,
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
    const float *own = scales + row * s.groups;
    int group = first / s.depth, inside = first - group * s.depth;
    float scale = own[group];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        if (inside == s.depth && i < count) inside = 0, scale = own[++group];
        ++inside;
        const float v = number(given.codes[i]);
        made.codes[i] = rounded(MULTIPLIED ? __fmul_rn(v, scale) : __fdiv_rn(v, scale));
    }
#else
#pragma unroll
    for (int i = 0; i < PIECE; ++i) made.codes[i] = rounded(number(given.codes[i]));
#endif
    if (whole) *(Piece<Target> *)to = made;
    else
        for (int i = 0; i < count; ++i) to[i] = made.codes[i];
}
