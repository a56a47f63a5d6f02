// A warp's factors kept as f32 beside their exponents: the loops of tcemu/engine/arithmetic/step/kept_floats.py. Two neighbours' exponents lie in one
// word, 16 bits each.

[[maybe_unused]] constexpr bool AHEAD = true;  // the next instruction's words are loaded while one's steps go
constexpr int VALUES = GROUPS * PADDED;
// One operand's factors. An f16 is converted by the machine; what has few bits, by a table of all codes
template <class STORED, int BITS, int CONTAINER, int SHIFT> struct Floats {
    static constexpr bool narrow = BITS <= 8, halves = BITS == 16, paired = halves && CONTAINER == 16 && SHIFT == 0;
    static constexpr int codes = narrow ? 1 << BITS : 1;
    static constexpr int up = STORED::up;
    static constexpr u32 HALVES_OF = 0x10001;

    static __device__ __forceinline__ Words2 words_of(u32 code) {
        const FloatFactor x = STORED::kept_float(code);
        return {(u32)x.word, (u32)x.exponent};
    }
    static __device__ __forceinline__ void fill(Words2 *table) {
#pragma unroll 1
        for (int code = threadIdx.x; narrow && code < codes; code += 32 * WARPS) table[code] = words_of(code);
    }
    // The exponents of two codes of 16 bits in a word. max_fields: collects their fields
    static __device__ __forceinline__ u32 exponents_of(u32 word, u32 &max_fields) {
        const u32 fields = __vmaxu2(word & HALVES_OF * STORED::infinity, HALVES_OF << STORED::mantissa_bits);
        max_fields = __vmaxu2(max_fields, fields);
        return __vminu2(word & 0x7FFF7FFF, HALVES_OF) * NOT_ZERO + (fields >> STORED::mantissa_bits);
    }
    static __device__ __forceinline__ u32 value_of_half(u32 half) {
        if constexpr (STORED::mantissa_bits == F16::mantissa_bits) return __float_as_uint(from_f16(half));
        else return half << 16;
    }
    // as many elements from i on, which lie side by side. max_fields: see `special`
    template <int RUN, int COUNT>
    static __device__ __forceinline__ void convert(u32 (&values)[RUN], u32 (&exponents)[(RUN + 1) / 2], const Words2 *table,
                                                   const Words<COUNT> &words, int i, u32 &max_fields) {
        if constexpr (halves) {
#pragma unroll
            for (int v = 0; v < RUN; v += 2) {
                u32 word = words.v[(i + v) / 2];
                if constexpr (!paired || RUN == 1) {
                    word = code_of<BITS, CONTAINER, SHIFT>(words, i + v);
                    if (RUN > 1) word |= code_of<BITS, CONTAINER, SHIFT>(words, i + v + 1) << 16;
                }
                values[v] = value_of_half(word & 0xFFFF);
                if (RUN > 1) values[v + 1] = value_of_half(word >> 16);
                exponents[v / 2] = exponents_of(word, max_fields);
            }
        } else {
#pragma unroll
            for (int v = 0; v < RUN; ++v) {
                const u32 code = code_of<BITS, CONTAINER, SHIFT>(words, i + v);
                const Words2 w = narrow ? table[code] : words_of(code);
                values[v] = w.x, max_fields = max(max_fields, w.x & ~F32::sign);
                exponents[v / 2] = v % 2 ? exponents[v / 2] | w.y << 16 : w.y;
            }
        }
    }
    static __device__ __forceinline__ bool special(u32 max_fields) {
        return halves ? (max_fields & 0xFFFF) >= STORED::infinity || max_fields >> 16 >= STORED::infinity : max_fields >= F32::infinity;
    }
    // The words of an operand into the warp's shared memory. Returns whether one is Inf or NaN
    template <int RUN, int ELEMENTS, int COUNT, class PLACE, class HALF>
    static __device__ __forceinline__ bool write(u32 *values, u16 *exponents, const Words2 *table, const Words<COUNT> &words, PLACE place, HALF half) {
        u32 max_fields = 0;
#pragma unroll
        for (int i = 0; i < ELEMENTS; i += RUN) {
            u32 own[RUN], both[(RUN + 1) / 2];
            convert<RUN>(own, both, table, words, i, max_fields);
            store_words(values + place(i), own);
            if constexpr (RUN == 1) exponents[half(i)] = (u16)both[0];
            else store_words((u32 *)(exponents + half(i)), both);
        }
        return special(max_fields);
    }
};
typedef Floats<AStored, A_BITS, A_CONTAINER, A_SHIFT> AFloats;
typedef Floats<BStored, B_BITS, B_CONTAINER, B_SHIFT> BFloats;
struct Tables {
    Words2 a[AFloats::codes], b[BFloats::codes];
    static constexpr bool used = AFloats::codes > 1 || BFloats::codes > 1;
    __device__ __forceinline__ void fill() { AFloats::fill(a), BFloats::fill(b); }
};

// What a lane reads: where its first row and column begin
struct Lines {
    u32 *lines;
    const u32 *rows, *columns;
    bool special;  // of the warp: whether a factor is Inf or NaN

    __device__ __forceinline__ Lines(u32 *memory, int lane)
        : lines(memory), rows(memory + row_place_of_lane(lane)), columns(memory + COLUMNS_BEGIN + column_place_of_lane(lane)), special(false) {
        fill(lane);
    }
    // what fills the last step of a group takes no part
    __device__ __forceinline__ void fill(int lane) const {
        for (int line = lane; line < A_LINES + B_LINES; line += 32)
            for (int group = 0; group < GROUPS; ++group)
                for (int at = group * PADDED + OF_GROUP; at < (group + 1) * PADDED; ++at) {
                    u32 *to = lines + (line < A_LINES ? line * ROW_STRIDE : COLUMNS_BEGIN + (line - A_LINES) * COLUMN_STRIDE);
                    to[at] = 0, ((u16 *)(to + VALUES))[at] = 0;
                }
    }
    __device__ __forceinline__ void write(const Tables &tables, const Words<A_WORDS> &x, const Words<B_WORDS> &y, const OfBatch &, int lane) {
        u32 *a = lines + a_place_of_lane(lane), *b = lines + COLUMNS_BEGIN + b_place_of_lane(lane);
        u16 *a_exponents = (u16 *)lines + a_half_of_lane(lane), *b_exponents = (u16 *)(lines + COLUMNS_BEGIN) + b_half_of_lane(lane);
        special = AFloats::write<A_RUN, A_ELEMENTS>(a, a_exponents, tables.a, x, [](int i) { return a_place(i); }, [](int i) { return a_half(i); });
        special |= BFloats::write<B_RUN, B_ELEMENTS>(b, b_exponents, tables.b, y, [](int i) { return b_place(i); }, [](int i) { return b_half(i); });
        special = __any_sync(0xFFFFFFFF, special);
    }
    // COUNT words of each line, `at` from where it begins
    template <int COUNT>
    __device__ __forceinline__ void read(Words<COUNT> (&x)[ROWS_OF_LANE], Words<COUNT> (&y)[COLUMNS_OF_LANE], int at) const {
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i) x[i] = load_words<COUNT>(rows + row_place(i) + at);
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) y[j] = load_words<COUNT>(columns + column_place(j) + at);
    }
};

// rule 8, of a step with an Inf or a NaN: what it gives, where it meets it
__device__ __forceinline__ void special_steps(Codes &ends, const Codes &codes, const Lines &of, int first, bool without) {
    float sums[ROWS_OF_LANE][COLUMNS_OF_LANE];
#pragma unroll
    for (int w = 0; w < ROWS_OF_LANE * COLUMNS_OF_LANE; ++w) {
        const int i = w / COLUMNS_OF_LANE, j = w % COLUMNS_OF_LANE;
        sums[i][j] = special_value(without ? 0 : codes[i][j]);
    }
#pragma unroll 1
    for (int t = 0; t < TERMS; t += 4) {
        Words<4> x[ROWS_OF_LANE], y[COLUMNS_OF_LANE];
        of.read<4>(x, y, first + t);
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS_OF_LANE; ++j)
                    sums[i][j] = __fmaf_rn(finite_as_one(x[i].v[w]), finite_as_one(y[j].v[w]), sums[i][j]);
    }
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) ends[i][j] = special_result(sums[i][j], ends[i][j]);
}

typedef float Powers[ROWS_OF_LANE][COLUMNS_OF_LANE];
typedef s64 Totals[ROWS_OF_LANE][COLUMNS_OF_LANE];

// The max exponents of COUNT products from `first` on, in the halves of words
template <int COUNT> __device__ __forceinline__ void find_tops(u32 (&tops)[ROWS_OF_LANE][COLUMNS_OF_LANE], const Lines &of, int first) {
    constexpr int READ = COUNT % 8 == 0 ? 8 : 4;
#pragma unroll
    for (int t = 0; t < COUNT; t += READ) {
        Words<READ / 2> x[ROWS_OF_LANE], y[COLUMNS_OF_LANE];
        of.read<READ / 2>(x, y, VALUES + (first + t) / 2);
#pragma unroll
        for (int w = 0; w < READ / 2; ++w)
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS_OF_LANE; ++j) tops[i][j] = __viaddmax_s16x2(x[i].v[w], y[j].v[w], tops[i][j]);
    }
}

// What a step knows of its elements before it adds products, and their sums in units
struct Step {
    Numbers words, sums;  // words: of the exponents that terms are aligned to
    Totals totals;
    Powers units;
    bool far, special;  // far: from f32's exponents; special: an accumulator is, or a factor

    __device__ __forceinline__ void begin(const Codes &codes, const u32 (&tops)[ROWS_OF_LANE][COLUMNS_OF_LANE], const Lines &of, bool without) {
        u32 most = 0;
        far = false;
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
                // the exponent at its place in the upper word of an f64; what lies below does not count
                const int products = (int)(max(tops[i][j], tops[i][j] << 16) << (UPPER - 16)) + NO_EXPONENTS;
                words[i][j] = align_word(products, without ? 0 : own_word(codes[i][j]));
                most = max(most, without ? 0 : codes[i][j] & ~RESULT::sign);
                units[i][j] = scale_of_word(words[i][j]);
                far |= is_far(products, words[i][j]);
                sums[i][j] = 0, totals[i][j] = 0;
            }
        special = of.special || most >= RESULT::infinity;
    }
    // one product, the `at`-th of the step
    __device__ __forceinline__ void add(int i, int j, int at, float x, float y) {
        sums[i][j] += truncate_by_conversion(x, y, units[i][j]);
        if (at % TERMS_OF_SUM == TERMS_OF_SUM - 1) totals[i][j] += sums[i][j], sums[i][j] = 0;
    }
    __device__ __forceinline__ void end(Codes &codes, const Lines &of, int first, bool without) const {
        Codes ends;
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_OF_LANE; ++j)
                ends[i][j] = end_by_word(totals[i][j] + sums[i][j], without ? 0 : codes[i][j], words[i][j]);
        if (__any_sync(0xFFFFFFFF, special)) special_steps(ends, codes, of, first, without);
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_OF_LANE; ++j) codes[i][j] = ends[i][j];
    }
};

// Products from `first` on. MOVED: both factors are multiplied by a power of two first
template <bool MOVED> __device__ __forceinline__ void add_products(Step &step, const Powers &moved, const Lines &of, int first) {
#pragma unroll
    for (int t = 0; t < TERMS; t += 4) {
        Words<4> x[ROWS_OF_LANE], y[COLUMNS_OF_LANE];
        of.read<4>(x, y, first + t);
#pragma unroll
        for (int w = 0; w < 4; ++w)
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
                    float one = __uint_as_float(x[i].v[w]), other = __uint_as_float(y[j].v[w]);
                    if (MOVED) one = __fmul_rn(one, moved[i][j]), other = __fmul_rn(other, moved[i][j]);
                    step.add(i, j, t + w, one, other);
                }
    }
}

__device__ __forceinline__ void step(Codes &codes, const Lines &of, int first, bool without) {
    u32 tops[ROWS_OF_LANE][COLUMNS_OF_LANE] = {};
    find_tops<TERMS>(tops, of, first);
    Step own;
    own.begin(codes, tops, of, without);
    pause();
    Powers moved = {};
    if (!PRODUCTS_ARE_NORMAL && __any_sync(0xFFFFFFFF, own.far)) {
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
                const Moved by = move(own.words[i][j]);
                moved[i][j] = by.factor, own.units[i][j] = by.product;
            }
        add_products<true>(own, moved, of, first);
    } else {
        add_products<false>(own, moved, of, first);
    }
    own.end(codes, of, first, without);
}
