// A tile of D a block, in registers, while K goes by step after step. For steps that are cut toward zero, one after the other.
//
// One product through it. The largest exponent E of a step is found by the tensor core: of the powers 2^(BASE e) in bf16, the sum of products
// lies between 2^(BASE E) and n 2^(BASE E), n < 2^BASE, so that its exponent field gives E, however the machine rounds it (`greatest`).
// The sum of the step then starts from S = 1.5 * 2^(E + UP), a float whose last place is the step's unit, 2^(E - FRACTION_BITS). A product is
// added by one fused multiply-add rounded toward zero. As S stays positive and in its binade, that adds the product rounded DOWN to whole
// units (`add_products`). A negative product that is no whole number of units is then one unit too low. Whether it is whole can be told from
// exponents: those of the lowest bits of both factors together reach the unit. Bytes hold them, four products to a word, and the negative
// products that are not whole are counted and added as units at the start (`reach`, `too_low`, `start`). The step's result is S - 1.5 * 2^(E + UP).
//
// So steps are exact while S stays in its binade, E + UP in the exponents of the float, and the bytes below 256: see `is_plain` and `fast`.
// All else (Inf, NaN, what is far above or below) takes `careful`, the step in integers.

constexpr int ROWS_OF_LANE = 2 * ROW_TILES, COLUMNS_OF_LANE = 2 * COLUMN_TILES;  // tiles of m16n8
constexpr int THREADS = 32 * WARPS_DOWN * WARPS_ACROSS;
typedef Prepared<A_LINES> APart;
typedef Prepared<B_LINES> BPart;
constexpr u32 ALL = 0xFFFFFFFF, ONES = 0x01010101;
constexpr int NONE = 1000;  // above every exponent

constexpr int BIAS = Floats<WIDE>::bias, UP = Floats<WIDE>::mantissa_bits - FRACTION_BITS;
constexpr int FIELD = WIDE ? 20 : 23;  // where the exponent begins in a float's upper word
constexpr u32 FIELDS = WIDE ? 0x7FF00000 : 0x7F800000;

// a float's upper word, and a float of an upper word and what is below it
__device__ __forceinline__ u32 upper(float v) { return __float_as_uint(v); }
__device__ __forceinline__ u32 upper(double v) { return (u32)__double2hiint(v); }
__device__ __forceinline__ Value with_upper(u32 word) {
    if constexpr (WIDE) return __hiloint2double((int)word, 0);
    else return __uint_as_float(word);
}
__device__ __forceinline__ Value plus_units(u32 word, u32 units) {
    if constexpr (WIDE) return __hiloint2double((int)word, (int)units);
    else return __uint_as_float(word + units);
}
__device__ __forceinline__ float add_down(float x, float y) { return __fadd_rz(x, y); }
__device__ __forceinline__ double add_down(double x, double y) { return __dadd_rz(x, y); }
__device__ __forceinline__ float add_exact(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double add_exact(double x, double y) { return __dadd_rn(x, y); }
__device__ __forceinline__ float multiply_add_down(float x, float y, float s) { return __fmaf_rz(x, y, s); }
__device__ __forceinline__ double multiply_add_down(double x, double y, double s) { return __fma_rz(x, y, s); }

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

// The sums of powers for a tile of m16n8, as bits: for BASE 8 of the whole step at once, for BASE 4 the largest of sums of 8 products
__device__ __forceinline__ void sum_powers(u32 (&to)[4], const u8 *a, const u8 *b, int row_tile, int column_tile, int lane) {
    const u8 *of_a = a + APart::powers, *of_b = b + BPart::powers + (column_tile * 32 + lane) * (KP / 2);
    float sums[4] = {0, 0, 0, 0};
    u32 best[4] = {0, 0, 0, 0};
    if constexpr (KP == 8) {
        const Words2 x = *(const Words2 *)(of_a + (row_tile * 32 + lane) * 8);
        mma_k8(sums, x.x, x.y, *(const u32 *)of_b);
    } else {
#pragma unroll
        for (int k = 0; k < KP / 16; ++k) {
            const Words4 x = *(const Words4 *)(of_a + ((row_tile * (KP / 16) + k) * 32 + lane) * 16);
            const Words2 y = *(const Words2 *)(of_b + k * 8);
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

// The upper word of 1.5 * 2^(E + UP). base: of the relative exponents, the sum of both lines' greatest exponents, at the exponent's place
__device__ __forceinline__ u32 greatest(u32 powers, Value c, int base, u32 half) {
    constexpr int SHIFT = 23 - FIELD + (BASE == 8 ? 3 : 2);  // an exponent's field, divided by BASE
    const int by_products = (int)(powers >> SHIFT) + ((UP + BIAS - OFFSET) << FIELD) + base;
    const int by_c = (int)(upper(c) & 0x7FFFFFFF) + (UP << FIELD);
    int both = max(by_c, by_products);
    if (FLOOR_COUNTS) both = max(both, (FLOOR + UP + BIAS) << FIELD);
    return ((u32)both & FIELDS) | half;
}

// What is added to the sum of two bytes of lowest bits, four to a word, so that 0x80 is reached where the product's lowest bit reaches the unit
__device__ __forceinline__ u32 reach(u32 word, int base) {
    int unit = ((int)word >> FIELD) - (UP + BIAS) - FRACTION_BITS - LOW_BITS_BEGIN;
    if (RELATIVE) unit = min((((int)word - base) >> FIELD) - (UP + BIAS) - FRACTION_BITS + 2 * DEPTH, 2 * DEPTH + 1);
    return 0x80808080u - (u32)unit * ONES;
}

// count and 128 times the number of negative products among these that are not whole units
__device__ __forceinline__ u32 too_low(const Bytes &x, const Bytes &y, u32 reach, u32 count) {
#pragma unroll
    for (int at = 0; at < PIECE_WORDS; ++at) {
        const u32 whole = x.low_bits[at] + y.low_bits[at] + reach;
        count = __dp4a(~whole & (x.signs[at] ^ y.signs[at]), ONES, count);
    }
    return count;
}

// S before the products: the accumulator cut toward zero to whole units, the units that the products will lack, and 1.5 * 2^(E + UP)
__device__ __forceinline__ Value start(Value c, u32 word, u32 units) {
    const Value like_c = with_upper(word | (upper(c) & 0x80000000));
    const Value cut = add_exact(add_down(c, like_c), -like_c);
    return add_exact(cut, plus_units(word, units));
}

// what a step leaves of S: rule 6's cut to the bits that a result keeps, where the sum may have more
__device__ __forceinline__ Value finish(Value s, u32 half) {
    const Value sum = add_exact(s, -with_upper((upper(s) & FIELDS) | half));
    if constexpr (KEPT >= FRACTION_BITS) return sum;
    if constexpr (WIDE) {
        const u64 lost = ((u64)1 << (52 - KEPT)) - 1;
        return __longlong_as_double(__double_as_longlong(sum) & (s64)~lost);
    } else
        return __uint_as_float(__float_as_uint(sum) & ~((1u << (23 - KEPT)) - 1));
}

// the code of a result. Where `finish` has cut what a result does not keep, nothing is left to cut, but for a C that no step has seen, which stays.
// Elsewhere what is cut here lies below every unit of the next step.
__device__ __forceinline__ u32 code_of(Value c) {
    float narrow;
    if constexpr (WIDE) narrow = __double2float_rz(c);
    else narrow = c;
    constexpr u32 lost = KEPT >= FRACTION_BITS ? (1u << (23 - KEPT)) - 1 : 0;
    return c != c ? F32::nan : __float_as_uint(narrow) & ~lost;
}

__device__ __forceinline__ Value value_of(u32 code) {
    if constexpr (WIDE) return (double)__uint_as_float(code);
    else return __uint_as_float(code);
}

// an accumulator from which fast steps may go on: 0, or a multiple of the least unit and below 2^MOST
__device__ __forceinline__ bool is_plain(u32 code) {
    const Factor c = F32::decode(code);
    if (c.significand == 0) return c.exponent != SPECIAL_EXPONENT;
    return c.exponent < MOST && c.exponent - F32::mantissa_bits + __ffs(c.significand) - 1 >= LEAST_UNIT;
}

struct Lane {
    int lane, first_row, first_column;  // of the lane's warp in the tile
    __device__ __forceinline__ int row(int i) const { return first_row + lane / 4 + 8 * i; }
    __device__ __forceinline__ int column(int j) const { return first_column + lane % 4 * 2 + j / 2 * 8 + j % 2; }
};

typedef Value Accumulators[ROWS_OF_LANE][COLUMNS_OF_LANE];

// whether a step of this warp is fast, the same for all of its lanes
__device__ __forceinline__ bool is_fast(const u8 *a, const u8 *b, const Lane &at, int limit) {
    const int *a_tops = (const int *)(a + APart::tops) + at.first_row, *b_tops = (const int *)(b + BPart::tops) + at.first_column;
    int a_most = NO_TOP, b_most = NO_TOP, a_least = NONE, b_least = NONE;
#pragma unroll
    for (int line = 0; line < 16 * ROW_TILES; line += 32) {
        const int top = line + 32 <= 16 * ROW_TILES || line + at.lane < 16 * ROW_TILES ? a_tops[line + at.lane] : NO_TOP;
        a_most = max(a_most, top);
        a_least = min(a_least, top == NO_TOP ? NONE : top);
    }
#pragma unroll
    for (int line = 0; line < 8 * COLUMN_TILES; line += 32) {
        const int top = line + 32 <= 8 * COLUMN_TILES || line + at.lane < 8 * COLUMN_TILES ? b_tops[line + at.lane] : NO_TOP;
        b_most = max(b_most, top);
        b_least = min(b_least, top == NO_TOP ? NONE : top);
    }
    if (__reduce_max_sync(ALL, a_most) + __reduce_max_sync(ALL, b_most) > limit) return false;
    if (!RELATIVE) return true;
    if (__reduce_min_sync(ALL, a_least) + __reduce_min_sync(ALL, b_least) < LEAST_TOPS) return false;
    // and every largest product within a few binades of what both lines' greatest exponents allow: then bit 30 of its power is set
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

// c -> S, of the elements of one tile of m16n8
__device__ __forceinline__ void begin_tile(Accumulators &s, const u8 *a, const u8 *b, const Lane &at, u32 half, int i, int j) {
    const int *a_tops = (const int *)(a + APart::tops), *b_tops = (const int *)(b + BPart::tops);
    u32 powers[4], words[4], reaches[4], counts[4] = {0, 0, 0, 0};
    sum_powers(powers, a, b, at.first_row / 16 + i, at.first_column / 8 + j, at.lane);
#pragma unroll
    for (int v = 0; v < 4; ++v) {
        const int base = RELATIVE ? (a_tops[at.row(2 * i + v / 2)] << FIELD) + (b_tops[at.column(2 * j + v % 2)] << FIELD) : 0;
        words[v] = greatest(powers[v], s[2 * i + v / 2][2 * j + v % 2], base, half);
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
        c = start(c, words[v], counts[v] >> 7);
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
                for (int j = 0; j < COLUMNS_OF_LANE; ++j) s[i][j] = multiply_add_down(x[i].v[t], y[j].v[t], s[i][j]);
    }
}

// The factors of a step that begins at `first`
template <class LINE> struct FromHere {
    const LINE &line;
    int first;
    __device__ __forceinline__ Factor operator()(int t) const { return line(first + t); }
};

struct Operands {  // the kernel's parameters
    const Shape *shapes;
    const ACode *a;
    const BCode *b;
    const u8 *a_scales, *b_scales;
};

// Which tile of D a block has: 8 tiles down, then across, so that blocks that run together read the same operands
struct Place {
    int batch, row_tile, column_tile;

    static __device__ __forceinline__ Place of(const Shape &shape) {
        const int down = (shape.m + A_LINES - 1) / A_LINES, across = (shape.n + B_LINES - 1) / B_LINES;
        const int tile = blockIdx.x % (down * across), band = tile / (8 * across), height = min(8, down - 8 * band);
        const int in_band = tile - band * 8 * across;
        return {(int)blockIdx.x / (down * across), band * 8 + in_band % height, in_band / height};
    }
};

// A step in integers, of every element of the lane. Returns whether all are plain again. It goes by way of local memory, so that its code
// stands once.
__device__ __noinline__ bool careful(u32 (&codes)[ROWS_OF_LANE][COLUMNS_OF_LANE], const Operands &of, const Lane &at, int k) {
    const Shape shape = *of.shapes;
    const Place place = Place::of(shape);
    bool plain = true;
#pragma unroll 1
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
        const int row = place.row_tile * A_LINES + at.row(i), column = place.column_tile * B_LINES + at.column(j);
        if (row >= shape.m || column >= shape.n) continue;
        const auto x = row_of(shape, of.a, of.a_scales, place.batch, row);
        const auto y = column_of(shape, of.b, of.b_scales, place.batch, column);
        codes[i][j] = fused_step(FromHere<decltype(x)>{x, k}, FromHere<decltype(y)>{y, k}, codes[i][j], false);
        plain &= is_plain(codes[i][j]);
    }
    return plain;
}

// The same for accumulators as fast steps have them, and all lanes of the warp
__device__ __forceinline__ bool careful_step(Accumulators &c, const Operands &of, const Lane &at, int k) {
    u32 codes[ROWS_OF_LANE][COLUMNS_OF_LANE];
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) codes[i][j] = code_of(c[i][j]);
    const bool plain = careful(codes, of, at, k);
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) c[i][j] = value_of(codes[i][j]);
    return __all_sync(ALL, plain);
}

constexpr int STEPS = STEPS_TOGETHER;  // of a stage, which is copied to shared memory at once
constexpr int A_STAGE = STEPS * APart::bytes, STAGE = A_STAGE + STEPS * BPart::bytes;

__device__ __forceinline__ void copy_bytes(u8 *to, const u8 *from, int bytes) {
    for (int v = threadIdx.x * 16; v < bytes; v += THREADS * 16) copy_16(to + v, from + v);
}

// The stages in shared memory, in a ring. While one is worked on, the next is copied.
struct Stages {
    u8 *shared;
    const u8 *a, *b;
    int steps;

    __device__ __forceinline__ u8 *a_part(int step) const { return shared + step / STEPS % RING * STAGE + step % STEPS * APart::bytes; }
    __device__ __forceinline__ u8 *b_part(int step) const { return shared + step / STEPS % RING * STAGE + A_STAGE + step % STEPS * BPart::bytes; }
    __device__ __forceinline__ void copy(int step) const {
        if (step >= steps) return;
        const int count = min(STEPS, steps - step);
        copy_bytes(a_part(step), a + (s64)step * APart::bytes, count * APart::bytes);
        copy_bytes(b_part(step), b + (s64)step * BPart::bytes, count * BPart::bytes);
        commit_copies();
    }
    // waits until the stage that begins at `step` is there, and nobody works any more on the one whose place the next copy takes
    __device__ __forceinline__ void next(int step) const {
        if (RING == 1) {
            barrier();
            copy(step);
        }
        await_copies();
        barrier();
        if (RING > 1) copy(step + STEPS);
    }
};

// Half of the warps lag behind by half a step, where the ring has room for it: while some add products, on the float pipes, others find and
// count, on the integer pipe. What lags is only the place of the barrier.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tile(const Shape *shapes, const ACode *a, const BCode *b, const u32 *c,
#if SCALED
         const u8 *a_scales, const u8 *b_scales,
#endif
         const u8 *a_prepared, const u8 *b_prepared, u32 *d) {
#if !SCALED
    const u8 *a_scales = nullptr, *b_scales = nullptr;
#endif
    extern __shared__ __align__(16) u8 shared[];
    const int warp = threadIdx.x / 32;
    const Lane at = {(int)threadIdx.x % 32, warp / WARPS_ACROSS * 16 * ROW_TILES, warp % WARPS_ACROSS * 8 * COLUMN_TILES};
    const bool lags = RING > 2 && warp >= THREADS / 64;
    const int steps = shapes->k / TERMS, limit = shapes->limit;
    // the bit of a half, known to no compiler: then a mask and this bit are one instruction
    const u32 half = steps > 0 ? 1u << (FIELD - 1) : 0;
    Stages stages = {shared, a_prepared, b_prepared, steps};
    Accumulators sums;
    bool plain = true;
    {
        const Shape shape = *shapes;
        const Place place = Place::of(shape);
        const s64 a_tile = (s64)(shape.a_batch > 1 ? place.batch : 0) * ((shape.m + A_LINES - 1) / A_LINES) + place.row_tile;
        const s64 b_tile = (s64)(shape.b_batch > 1 ? place.batch : 0) * ((shape.n + B_LINES - 1) / B_LINES) + place.column_tile;
        stages.a += a_tile * steps * APart::bytes, stages.b += b_tile * steps * BPart::bytes;
        if (RING > 1) stages.copy(0);
#pragma unroll
        for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
                const int row = place.row_tile * A_LINES + at.row(i), column = place.column_tile * B_LINES + at.column(j);
                u32 code = 0;
                if (row < shape.m && column < shape.n) code = c[((s64)place.batch * shape.m + row) * shape.n + column];
                plain &= is_plain(code);
                sums[i][j] = value_of(code);
            }
    }
    plain = __all_sync(ALL, plain);

#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const bool first = step % STEPS == 0, last = step % STEPS == STEPS - 1 || step == steps - 1;
        if (lags ? step == 0 : first) stages.next(step);
        const u8 *x = stages.a_part(step), *y = stages.b_part(step);
        const bool fast = plain && is_fast(x, y, at, limit);
        if (fast)
            begin(sums, x, y, at, half);
        else
            plain = careful_step(sums, {opaque(shapes), opaque(a), opaque(b), opaque(a_scales), opaque(b_scales)}, at, step * TERMS);
        if (lags && last) stages.next(step / STEPS * STEPS + STEPS);
        if (fast) {
            add_products(sums, x, y, at);
#pragma unroll
            for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS_OF_LANE; ++j) sums[i][j] = finish(sums[i][j], half);
        }
    }
    if (RING > 2 && !lags) stages.next(steps + STEPS);  // as often as the others

    const Shape shape = *opaque(shapes);
    const Place place = Place::of(shape);
    const Lane here = {opaque(at.lane), opaque(at.first_row), opaque(at.first_column)};
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_OF_LANE; ++j) {
            const int row = place.row_tile * A_LINES + here.row(i), column = place.column_tile * B_LINES + here.column(j);
            if (row < shape.m && column < shape.n) d[((s64)place.batch * shape.m + row) * shape.n + column] = code_of(sums[i][j]);
        }
}
