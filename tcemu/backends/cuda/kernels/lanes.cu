// What a warp's kernel needs whichever way its steps go: sizes, words of lanes, codes among them, and the end of a step.

constexpr int PER_GROUP = (OF_GROUP + TERMS - 1) / TERMS, STEPS = GROUPS * PER_GROUP;
constexpr bool WORD_SUM = MOST_UNITS * TERMS + MOST_OWN_UNITS < (s64)1 << 32;
constexpr int OWN_ABOVE = FRACTION_BITS > RESULT::mantissa_bits ? FRACTION_BITS - RESULT::mantissa_bits : 0;
constexpr int OWN_BELOW = OWN_ABOVE - FRACTION_BITS + RESULT::mantissa_bits;

// Sizes of the batch: instructions per warp, and whether each operand has a batch axis
struct Sizes {
    int batch, each;                                            // instructions that one warp takes, one after the other
    int a, b, c, fields, a_scales, b_scales, selectors;         // 1 where each of the batch has its own, 0 where one serves all
};

constexpr int PARTS = WARPGROUP * TILES;  // of an instruction, which a warp takes one of at once
typedef Integers<PARTS == 1>::Signed Item;  // its number in the batch

struct Place {
    int batch, part, tile;  // the warp in its warpgroup, and the eight columns of its D
    static __device__ __forceinline__ Place of(Item item) { return {(int)(item / PARTS), (int)(item / TILES % WARPGROUP), (int)(item % TILES)}; }
    __device__ __forceinline__ s64 word(int whole, int all, int of_part, int of_tile) const {
        return (s64)batch * (whole ? all : 0) + part * of_part + tile * of_tile;
    }
};

template <int COUNT> struct Words { u32 v[COUNT]; };

template <int COUNT> __device__ __forceinline__ Words<COUNT> load_words(const u32 *from) {
    Words<COUNT> to;
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int v = 0; v < COUNT; v += 4) {
            const Words4 w = *(const Words4 *)(from + v);
            to.v[v] = w.x, to.v[v + 1] = w.y, to.v[v + 2] = w.z, to.v[v + 3] = w.w;
        }
    } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
        for (int v = 0; v < COUNT; v += 2) {
            const Words2 w = *(const Words2 *)(from + v);
            to.v[v] = w.x, to.v[v + 1] = w.y;
        }
    } else {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) to.v[v] = from[v];
    }
    return to;
}

template <int COUNT> __device__ __forceinline__ void store_words(u32 *to, const u32 (&from)[COUNT]) {
    if constexpr (COUNT % 4 == 0) {
#pragma unroll
        for (int v = 0; v < COUNT; v += 4) *(Words4 *)(to + v) = {from[v], from[v + 1], from[v + 2], from[v + 3]};
    } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
        for (int v = 0; v < COUNT; v += 2) *(Words2 *)(to + v) = {from[v], from[v + 1]};
    } else {
#pragma unroll
        for (int v = 0; v < COUNT; ++v) to[v] = from[v];
    }
}

// the code of element i among a lane's words
template <int BITS, int CONTAINER, int SHIFT, int COUNT> __device__ __forceinline__ u32 code_of(const Words<COUNT> &words, int i) {
    const u32 word = words.v[i * CONTAINER / 32] >> (i * CONTAINER % 32 + SHIFT);
    return BITS == 32 ? word : word & (u32)(((u64)1 << BITS) - 1);
}

// v >> right, 0 from 32 on
__device__ __forceinline__ u32 shifted_right(u32 v, u32 right) { return __funnelshift_rc(v, 0, right); }

// A factor, without its sign, in the format that the model multiplies, which holds it: there what is subnormal in its own format may be normal
template <class FROM, class TO> __device__ __forceinline__ Factor converted(Factor x) {
    if (x.exponent == SPECIAL_EXPONENT) return {x.significand << (TO::mantissa_bits - FROM::mantissa_bits), x.exponent};
    if (x.significand == 0) return x;
    const int top = 31 - __clz(x.significand);
    const int exponent = max(x.exponent - FROM::mantissa_bits + top, TO::least_exponent);
    const int left = x.exponent - FROM::mantissa_bits - (exponent - TO::mantissa_bits);
    return {left >= 0 ? x.significand << left : x.significand >> -left, exponent};
}

template <class STORED, class FORMAT, bool SAME> __device__ __forceinline__ Factor absolute_of(u32 code) {
    if constexpr (SAME) return FORMAT::absolute(code);
    else return converted<STORED, FORMAT>(STORED::absolute(code));
}

typedef u32 Codes[ROWS_OF_LANE][COLUMNS_OF_LANE];

typedef int Numbers[ROWS_OF_LANE][COLUMNS_OF_LANE];

// whether a step can end in f64, which then holds its sum: the result is an f32, and every unit a normal number
constexpr bool ENDS_IN_F64 = RESULT::mantissa_bits == F32::mantissa_bits && FLOOR > -900 &&
                             (ROUNDING == RZ || (ROUNDING == RN && KEPT == F32::mantissa_bits));

// Rules 4 to 7 for the accumulator and the sum of the products in units. word: the exponent that terms were aligned to, where an f64's stands
__device__ __forceinline__ u32 end_by_word(s64 sum, u32 c, int word) {
    const double own = (double)__uint_as_float(c), power = __hiloint2double(word - (FRACTION_BITS << 20), 0);
    const double whole = __hiloint2double((word + ((52 - FRACTION_BITS) << 20) + (1 << 19)) | (int)(c & F32::sign), 0);
    const double truncated = __dadd_rn(__dadd_rz(own, whole), -whole);  // to units: they are the last places of `whole`
    const double products = TERMS_OF_SUM >= TERMS ? (double)(int)sum : (double)sum;
    const double total = __fma_rn(products, power, truncated);
    const u32 high = (u32)__double2hiint(total);
    u32 code = __float_as_uint(ROUNDING == RZ ? __double2float_rz(total) : __double2float_rn(total));
    if ((high & 0x7FFFFFFF) >= (1023u + F32::max_exponent + 1) << 20) code = F32::infinity | (high & F32::sign);
    else code &= ~((1u << (F32::mantissa_bits - KEPT)) - 1);
    return code << 1 ? code : 0;
}

// The same for every result; codes without an accumulator are 0. max_exponent: the exponent that terms were aligned to
__device__ __forceinline__ u32 end_of_step(s64 sum, u32 c, int max_exponent) {
    const int unit = max_exponent - FRACTION_BITS;
    if constexpr (ENDS_IN_F64) {
        return end_by_word(sum, c, (max_exponent + 1023) << 20);
    } else {
        const Factor start = RESULT::decode(c);
        const int own = (int)shifted_right((u32)abs(start.significand) << OWN_ABOVE, (u32)(max_exponent + OWN_BELOW - start.exponent));
        const s64 total = sum + (start.significand < 0 ? -own : own);
        const u64 magnitude = (u64)(total < 0 ? -total : total);
        if constexpr (WORD_SUM) return encode<RESULT, ROUNDING, u32>(total < 0, (u32)magnitude, unit, KEPT);
        else return encode<RESULT, ROUNDING, u64>(total < 0, magnitude, unit, KEPT);
    }
}

struct Selected {  // by selectors: which lane of each quad holds what, and which of its bytes
    int metadata, a_group, a_thread, b_group, b_thread;
};

__device__ __forceinline__ Selected selected(const int *selectors, const Sizes &sizes, int batch) {
    const int *own = selectors + (sizes.selectors ? batch * SELECTORS : 0);
    Selected of = {0, 0, 0, 0, 0};
    if (SPARSE) of.metadata = own[0];
    if (SCALED) of.a_group = own[SPARSE], of.a_thread = own[SPARSE + 1], of.b_group = own[SPARSE + 2], of.b_thread = own[SPARSE + 3];
    return of;
}

struct OfBatch {  // of the instruction at hand, where there are such operands
    const u8 *a_scales, *b_scales;
    const u32 *fields;
    Selected selected;
};
