// What a warp's kernel needs whichever way its steps go: sizes, words of lanes, and codes among them.

constexpr int PER_GROUP = (OF_GROUP + TERMS - 1) / TERMS, STEPS = GROUPS * PER_GROUP;

// Sizes of the batch: instructions per warp, and whether each operand has a batch axis
struct Sizes {
    int batch, each;                                            // instructions that one warp takes, one after the other
    int a, b, c, fields, a_scales, b_scales, selectors;         // 1 where each of the batch has its own, 0 where one serves all
};

constexpr int PARTS = WARPGROUP * TILES;  // of an instruction, which a warp takes one of at once
template <bool> struct Number { typedef s64 Type; };
template <> struct Number<true> { typedef int Type; };
typedef Number<PARTS == 1>::Type Item;  // its number in the batch

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

typedef u32 Codes[ROWS_OF_LANE][COLUMNS_OF_LANE];

typedef int Numbers[ROWS_OF_LANE][COLUMNS_OF_LANE];

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
