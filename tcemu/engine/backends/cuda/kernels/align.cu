// What the fast steps share, those of single products and those of groups: the accumulators, and the exponent that a step aligns to, which the
// tensor core finds. The formulas and their preconditions are those of tcemu/engine/arithmetic/step/anchored.py.

constexpr int ROWS_OF_LANE = 2 * ROW_TILES, COLUMNS_OF_LANE = 2 * COLUMN_TILES;  // tiles of m16n8
constexpr int THREADS = 32 * WARPS_DOWN * WARPS_ACROSS;
typedef Prepared<A_LINES> APart;
typedef Prepared<B_LINES> BPart;
constexpr u32 ALL = 0xFFFFFFFF;
constexpr int NONE = 1000;  // above every exponent

struct Lane {
    int lane, first_row, first_column;  // of the lane's warp in the tile
    __device__ __forceinline__ int row(int i) const { return first_row + lane / 4 + 8 * i; }
    __device__ __forceinline__ int column(int j) const { return first_column + lane % 4 * 2 + j / 2 * 8 + j % 2; }
};

typedef Value Accumulators[ROWS_OF_LANE][COLUMNS_OF_LANE];

// The sums of powers for a tile of m16n8, as bits: for BASE 8 of the whole step at once, for BASE 4 the largest of sums of 8 products
__device__ __forceinline__ void sum_powers(u32 (&to)[4], const u8 *a, const u8 *b, int row_tile, int column_tile, int lane) {
    const u8 *of_a = a + APart::powers, *of_b = b + BPart::powers;
    float sums[4] = {0, 0, 0, 0};
    u32 best[4] = {0, 0, 0, 0};
    if constexpr (KP == 8) {
        const Words2 x = *(const Words2 *)(of_a + (row_tile * 32 + lane) * 8);
        mma_k8(sums, x.x, x.y, *(const u32 *)(of_b + (column_tile * 32 + lane) * 4));
    } else {
#pragma unroll
        for (int k = 0; k < KP; k += 16) {
            const Words4 x = APart::fragment_of_a(of_a, row_tile, k, lane);
            const Words2 y = BPart::fragment_of_b(of_b, column_tile, k, lane);
            if constexpr (BASE == 8) {
                mma_k16(sums, x, y.x, y.y);
            } else {
                float first[4] = {0, 0, 0, 0}, second[4] = {0, 0, 0, 0};
                mma_k8(first, x.x, x.y, y.x);
                mma_k8(second, x.z, x.w, y.y);
#pragma unroll
                for (int v = 0; v < 4; ++v) best[v] = max(best[v], max(__float_as_uint(first[v]), __float_as_uint(second[v])));
            }
        }
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) to[v] = max(__float_as_uint(sums[v]), best[v]);
}

// What is added to the sum of powers of an element, so that it is the exponent of M; where exponents are relative, it includes the max exponents
// of both lines
__device__ __forceinline__ int base_of(const u8 *a, const u8 *b, int row, int column) {
    if (!RELATIVE) return base_of_lines(0);
    return ((const int *)(a + APart::tops))[row] + base_of_lines(((const int *)(b + BPart::tops))[column]);
}

// The code of a result, and the value of a code. An f16 is converted by the machine
__device__ __forceinline__ u32 code_of(Value c) {
    if constexpr (IS_F16) return to_f16(result_float(c));
    else return result_code(c);
}
__device__ __forceinline__ Value value_of(u32 code) { return IS_F16 ? from_f16(code) : __uint_as_float(code); }

// whether these are plain, after fast steps from plain ones: an f16 may have become too large
__device__ __forceinline__ bool still_plain(const Accumulators &c) {
    if (!IS_F16) return true;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) most = max(most, (u32)magnitude_word(c[i][j]));
    return __all_sync(ALL, is_small((int)most));
}

// the fewest products of a line, among those of this warp, that are near its max exponent
template <int LINES> __device__ __forceinline__ int fewest_near(const int *near, int lane) {
    int fewest = TERMS;
#pragma unroll
    for (int line = 0; line < LINES; line += 32)
        if (line + 32 <= LINES || line + lane < LINES) fewest = min(fewest, near[line + lane]);
    return __reduce_min_sync(ALL, fewest);
}

// whether a step of this warp is fast, the same for all of its lanes
__device__ __forceinline__ bool is_fast(const u8 *a, const u8 *b, const Lane &at, int limit) {
    const int *a_tops = (const int *)(a + APart::tops) + at.first_row, *b_tops = (const int *)(b + BPart::tops) + at.first_column;
    int a_most = NO_TOP * TOP, b_most = NO_TOP * TOP, a_least = NONE * TOP, b_least = NONE * TOP;
#pragma unroll
    for (int line = 0; line < 16 * ROW_TILES; line += 32) {
        const int top = line + 32 <= 16 * ROW_TILES || line + at.lane < 16 * ROW_TILES ? a_tops[line + at.lane] : NO_TOP * TOP;
        a_most = max(a_most, top);
        a_least = min(a_least, top == NO_TOP * TOP ? NONE * TOP : top);
    }
#pragma unroll
    for (int line = 0; line < 8 * COLUMN_TILES; line += 32) {
        const int top = line + 32 <= 8 * COLUMN_TILES || line + at.lane < 8 * COLUMN_TILES ? b_tops[line + at.lane] : NO_TOP * TOP;
        b_most = max(b_most, top);
        b_least = min(b_least, top == NO_TOP * TOP ? NONE * TOP : top);
    }
    if (__reduce_max_sync(ALL, a_most) + __reduce_max_sync(ALL, b_most) > limit * TOP) return false;
    if (!RELATIVE) return true;
    if (__reduce_min_sync(ALL, a_least) + __reduce_min_sync(ALL, b_least) < LEAST_TOPS * TOP) return false;
    // And every largest product within NEAR binades of what both lines' max exponents allow. So it is where one of the TERMS places has factors
    // that are near the max exponents of their lines, in both: if the two lines have more than TERMS such factors together, they share a place
    if (fewest_near<16 * ROW_TILES>((const int *)(a + APart::near) + at.first_row, at.lane) +
            fewest_near<8 * COLUMN_TILES>((const int *)(b + BPart::near) + at.first_column, at.lane) > TERMS)
        return true;
    // Else the sums of powers tell: bit 30 is set
    u32 near = ALL;
#pragma unroll
    for (int j = 0; j < COLUMN_TILES; ++j)
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i) {
            u32 powers[4];
            sum_powers(powers, a, b, at.first_row / 16 + i, at.first_column / 8 + j, at.lane);
            near &= powers[0] & powers[1] & powers[2] & powers[3];
        }
    return __all_sync(ALL, near >> 30 & 1);
}
