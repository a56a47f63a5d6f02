// The fast step of single products: each is added to S, which starts from the anchor M, by one fused multiply-add. Bytes tell which negative
// products are no whole numbers of units, four products to a word.

constexpr u32 ONES = 0x01010101;
constexpr int PIECE_WORDS = PIECE / 4;
struct Bytes {  // of one line, as they lie together
    u32 low_bits[PIECE_WORDS], signs[PIECE_WORDS];
};

__device__ __forceinline__ void load(u32 (&to)[PIECE_WORDS], const u8 *from) {
    if constexpr (PIECE == 16) {
        const Words4 v = *(const Words4 *)from;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (PIECE == 8) {
        const Words2 v = *(const Words2 *)from;
        to[0] = v.x, to[1] = v.y;
    } else
        to[0] = *(const u32 *)from;
}

template <class PART> __device__ __forceinline__ Bytes load_bytes(const u8 *part, int line, int k) {
    Bytes bytes;
    load(bytes.low_bits, part + PART::low_bits + PART::byte(line, k));
    load(bytes.signs, part + PART::signs + PART::byte(line, k));
    return bytes;
}

// count and 128 times the number of negative products among these that are not whole units
__device__ __forceinline__ u32 too_low(const Bytes &x, const Bytes &y, u32 reach, u32 count) {
#pragma unroll
    for (int at = 0; at < PIECE_WORDS; ++at)
        count = __dp4a((u32)not_integers(x.low_bits[at], y.low_bits[at], x.signs[at], y.signs[at], reach), ONES, count);
    return count;
}

// c -> S, of the elements of one tile of m16n8
__device__ __forceinline__ void begin_tile(Accumulators &s, const u8 *a, const u8 *b, const Lane &at, u32 half, int i, int j) {
    u32 powers[4], words[4], reaches[4], counts[4] = {0, 0, 0, 0};
    sum_powers(powers, a, b, at.first_row / 16 + i, at.first_column / 8 + j, at.lane);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        const int base = base_of(a, b, at.row(2 * i + v / 2), at.column(2 * j + v % 2));
        words[v] = alignment_word(powers[v], s[2 * i + v / 2][2 * j + v % 2], base, half);
        reaches[v] = reach(words[v], base);
    }
#pragma unroll
    for (int k = 0; k < TERMS; k += PIECE) {
        const Bytes x[2] = {load_bytes<APart>(a, at.row(2 * i), k), load_bytes<APart>(a, at.row(2 * i + 1), k)};
        const Bytes y[2] = {load_bytes<BPart>(b, at.column(2 * j), k), load_bytes<BPart>(b, at.column(2 * j + 1), k)};
#pragma unroll
        for (int v = 0; v < 4; ++v) counts[v] = too_low(x[v / 2], y[v % 2], reaches[v], counts[v]);
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        Value &c = s[2 * i + v / 2][2 * j + v % 2];
        c = begin_sum(c, words[v], counts[v]);
    }
}

// c -> S, of every element
__device__ __forceinline__ void begin(Accumulators &s, const u8 *a, const u8 *b, const Lane &at, u32 half) {
#pragma unroll
    for (int v = 0; v < ROW_TILES * COLUMN_TILES; ++v) {
        begin_tile(s, a, b, at, half, v % ROW_TILES, v / ROW_TILES);
        if (v % PAUSE == PAUSE - 1) pause();
    }
}

__device__ __forceinline__ void add_products(Accumulators &s, const u8 *a, const u8 *b, const Lane &at) {
#pragma unroll UNROLLED
    for (int k = 0; k < TERMS; k += 16 / WORD) {
        Values x[ROWS_OF_LANE], y[COLUMNS_OF_LANE];
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i) x[i] = *(const Values *)(a + APart::value(at.row(i), k));
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) y[j] = *(const Values *)(b + BPart::value(at.column(j), k));
#pragma unroll
        for (int t = 0; t < 16 / WORD; ++t)
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS_OF_LANE; ++j) s[i][j] = add_product(s[i][j], x[i].v[t], y[j].v[t]);
    }
}

__device__ __forceinline__ void fast_step(Accumulators &c, const u8 *a, const u8 *b, const Lane &at, u32 half) {
    begin(c, a, b, at, half);
    add_products(c, a, b, at);
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) c[i][j] = end_sum(c[i][j], half);
}
