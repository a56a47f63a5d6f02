// Draws cases, computes each by two models, and counts the outputs that differ: a warp takes CASES cases, one after the other. Before this text
// stand the namespaces `left` and `right`, the steps of a model each, and `of_a`, `of_b` and `of_c`, which draw an operand each.

// What a lane holds of an operand
template <class WORDS> __device__ __forceinline__ WORDS words_of_lane(const u32 *codes, int lane) {
    constexpr int COUNT = sizeof(WORDS) / 4;
    WORDS words;
#pragma unroll
    for (int v = 0; v < COUNT; ++v) words.v[v] = codes[lane * COUNT + v];
    return words;
}

// Words of A and B as a model reads them, and its steps
#define WRITE(side)                                                                                         \
    side::Lines side##_lines(lines, lane);                                                                  \
    side##_lines.write(side##_tables, words_of_lane<side::Words<side::A_WORDS>>(a, lane),                   \
                       words_of_lane<side::Words<side::B_WORDS>>(b, lane), {}, lane);                       \
    __syncwarp();
#define START(side)                                                                                         \
    side::Codes side##_codes;                                                                               \
    side::start_steps(side##_codes, words_of_lane<side::Words<side::C_WORDS>>(c, lane));

#if SAME_LINES
// Steps of both models at once, so that each product is computed once
constexpr int PART = left::TERMS < right::TERMS ? left::TERMS : right::TERMS, LONGER = left::TERMS + right::TERMS - PART;
constexpr bool TOGETHER = left::CHAIN == 0 && right::CHAIN == 0 && left::GROUPS == 1 && left::OF_GROUP % LONGER == 0 && LONGER % PART == 0 &&
                          left::PRODUCTS_ARE_NORMAL && right::PRODUCTS_ARE_NORMAL;
#define BEGIN(side)                                                                                         \
    if (first % side::TERMS == 0) {                                                                         \
        u32 own[side::ROWS_OF_LANE][side::COLUMNS_OF_LANE] = {};                                            \
        for (int part = first / PART; part < (first + side::TERMS) / PART; ++part)                          \
            for (int v = 0; v < ELEMENTS; ++v) {                                                            \
                const int i = v / COLUMNS, j = v % COLUMNS;                                                 \
                own[i][j] = __viaddmax_s16x2(tops[part][i][j], 0, own[i][j]);                               \
            }                                                                                               \
        side##_step.begin(side##_codes, own, side##_lines, false);                                          \
    }
#define END(side) \
    if ((first + PART) % side::TERMS == 0) side##_step.end(side##_codes, side##_lines, first + PART - side::TERMS, false);

__device__ __forceinline__ void steps_together(left::Codes &left_codes, right::Codes &right_codes, const left::Lines &left_lines,
                                               const right::Lines &right_lines) {
    constexpr int ROWS = left::ROWS_OF_LANE, COLUMNS = left::COLUMNS_OF_LANE, ELEMENTS = ROWS * COLUMNS, PARTS = left::OF_GROUP / PART;
    u32 tops[PARTS][ROWS][COLUMNS] = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) left::find_tops<PART>(tops[part], left_lines, part * PART);
    left::Step left_step;
    right::Step right_step;
#pragma unroll
    for (int first = 0; first < left::OF_GROUP; first += PART) {
        BEGIN(left)
        BEGIN(right)
        pause();
#pragma unroll
        for (int t = 0; t < PART; t += 4) {
            left::Words<4> x[ROWS], y[COLUMNS];
            left_lines.read<4>(x, y, first + t);
#pragma unroll
            for (int v = 0; v < 4 * ELEMENTS; ++v) {
                const int i = v / COLUMNS % ROWS, j = v % COLUMNS, w = v / ELEMENTS, at = first + t + w;
                const float one = __uint_as_float(x[i].v[w]), other = __uint_as_float(y[j].v[w]);
                left_step.add(i, j, at % left::TERMS, one, other), right_step.add(i, j, at % right::TERMS, one, other);
            }
        }
        END(left)
        END(right)
    }
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    compare(const int *groups, const Words4 *__restrict__ a_cases, const u32 *__restrict__ a_places, const Words4 *__restrict__ b_cases,
            const u32 *__restrict__ b_places, const Words4 *__restrict__ c_cases, const u32 *__restrict__ c_places, u32 *__restrict__ out) {
    constexpr int A_SIZE = 32 * left::A_WORDS, B_SIZE = 32 * left::B_WORDS, C_SIZE = 32 * left::C_WORDS, D_WORDS = left::D_WORDS;
    constexpr int PLACES = of_a::PLACES + of_b::PLACES + of_c::PLACES;
    constexpr int LINES = left::WORDS_OF_WARP > right::WORDS_OF_WARP ? left::WORDS_OF_WARP : right::WORDS_OF_WARP;
    __shared__ Words4 memory[WARPS][(LINES + A_SIZE + B_SIZE + C_SIZE + PLACES + 3) / 4];
    __shared__ left::Tables left_tables;
    __shared__ right::Tables right_tables;
    left_tables.fill(), right_tables.fill();
    of_a::fill_table(32 * WARPS), of_b::fill_table(32 * WARPS), of_c::fill_table(32 * WARPS);
    __syncthreads();
    const int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= *groups) return;
    u32 *lines = (u32 *)memory[threadIdx.x / 32], *a = lines + LINES, *b = a + A_SIZE, *c = b + B_SIZE, *places = c + C_SIZE, *own = out + (s64)group * WORDS;
#pragma unroll 1
    for (int i = 0; i < CASES; ++i) {
        const s64 at = (s64)group * CASES + i;
        for (int v = lane; v < of_a::PLACES; v += 32) places[v] = a_places[at * of_a::PLACES + v];
        for (int v = lane; v < of_b::PLACES; v += 32) places[of_a::PLACES + v] = b_places[at * of_b::PLACES + v];
        for (int v = lane; v < of_c::PLACES; v += 32) places[of_a::PLACES + of_b::PLACES + v] = c_places[at * of_c::PLACES + v];
        __syncwarp();
        of_a::draw_case(((const of_a::Case *)a_cases)[at], places, (of_a::Code *)a, lane);
        of_b::draw_case(((const of_b::Case *)b_cases)[at], places + of_a::PLACES, (of_b::Code *)b, lane);
        of_c::draw_case(((const of_c::Case *)c_cases)[at], places + of_a::PLACES + of_b::PLACES, (of_c::Code *)c, lane);
        __syncwarp();
        WRITE(left)
        START(left)
        START(right)
#if SAME_LINES
        right::Lines right_lines(lines, lane);
        right_lines.special = left_lines.special;
        if constexpr (TOGETHER) {
            steps_together(left_codes, right_codes, left_lines, right_lines);
        } else {
            left::steps(left_codes, left_lines);
            right::steps(right_codes, right_lines);
        }
#else
        left::steps(left_codes, left_lines);
        __syncwarp();
        WRITE(right)
        right::steps(right_codes, right_lines);
#endif
        u32 left_words[D_WORDS], right_words[D_WORDS];
        left::end_steps(left_words, left_codes);
        right::end_steps(right_words, right_codes);
        int wrong = 0;
#pragma unroll
        for (int v = 0; v < D_WORDS; ++v) wrong += left_words[v] != right_words[v];
        wrong = __reduce_add_sync(0xFFFFFFFF, wrong);
        if (lane == 0) own[i] = wrong;
        if (WITH_OPERANDS && i == 0) {
            for (int v = lane; v < A_SIZE + B_SIZE + C_SIZE; v += 32) own[CASES + v] = a[v];
#pragma unroll
            for (int v = 0; v < D_WORDS; ++v) own[CASES + A_SIZE + B_SIZE + C_SIZE + lane * D_WORDS + v] = left_words[v];
        }
        __syncwarp();
    }
}
