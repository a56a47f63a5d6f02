// Draws cases, computes each by two models at once, and counts the outputs that differ: a warp takes CASES cases, one after the other. Before this
// text stand the namespaces `left` and `right`, the steps of a model each, and `of_a`, `of_b` and `of_c`, which draw an operand each.

constexpr int PART = left::TERMS < right::TERMS ? left::TERMS : right::TERMS, PARTS = left::OF_GROUP / PART;  // products that both add to one step
constexpr int ROWS = left::ROWS_OF_LANE, COLUMNS = left::COLUMNS_OF_LANE;

// What a lane holds of an operand
template <class WORDS> __device__ __forceinline__ WORDS words_of_lane(const u32 *codes, int lane) {
    constexpr int COUNT = sizeof(WORDS) / 4;
    WORDS words;
#pragma unroll
    for (int v = 0; v < COUNT; ++v) words.v[v] = codes[lane * COUNT + v];
    return words;
}

// The max exponents of a step that begins with a part
template <int TERMS> __device__ __forceinline__ void join_tops(u32 (&to)[ROWS][COLUMNS], const u32 (&tops)[PARTS][ROWS][COLUMNS], int part) {
#pragma unroll
    for (int v = 0; v < TERMS / PART * ROWS * COLUMNS; ++v) {
        u32 &one = to[v / COLUMNS % ROWS][v % COLUMNS];
        one = __viaddmax_s16x2(tops[part + v / COLUMNS / ROWS][v / COLUMNS % ROWS][v % COLUMNS], 0, one);
    }
}
#define BEGIN(side)                                                      \
    if (part * PART % side::TERMS == 0) {                                \
        u32 own[ROWS][COLUMNS] = {};                                     \
        join_tops<side::TERMS>(own, tops, part);                         \
        side##_step.begin(side##_codes, own, side##_lines, false);       \
    }
#define END(side)                                                        \
    if ((part + 1) * PART % side::TERMS == 0) side##_step.end(side##_codes, side##_lines, (part + 1) * PART - side::TERMS, false);

// Both models read the same factors, and each product is computed once
__device__ __forceinline__ void steps(left::Codes &left_codes, right::Codes &right_codes, const left::Lines &left_lines,
                                      const right::Lines &right_lines) {
    u32 tops[PARTS][ROWS][COLUMNS] = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) left::find_tops<PART>(tops[part], left_lines, part * PART);
    left::Step left_step;
    right::Step right_step;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        BEGIN(left)
        BEGIN(right)
        pause();
#pragma unroll
        for (int t = part * PART; t < (part + 1) * PART; t += 4) {
            left::Words<4> x[ROWS], y[COLUMNS];
            left_lines.read<4>(x, y, t);
#pragma unroll
            for (int v = 0; v < 4 * ROWS * COLUMNS; ++v) {
                const int i = v / COLUMNS % ROWS, j = v % COLUMNS, w = v / COLUMNS / ROWS;
                const float one = __uint_as_float(x[i].v[w]), other = __uint_as_float(y[j].v[w]);
                left_step.add(i, j, (t + w) % left::TERMS, one, other), right_step.add(i, j, (t + w) % right::TERMS, one, other);
            }
        }
        END(left)
        END(right)
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    compare(const int *groups, const Words4 *__restrict__ a_cases, const u32 *__restrict__ a_places, const Words4 *__restrict__ b_cases,
            const u32 *__restrict__ b_places, const Words4 *__restrict__ c_cases, const u32 *__restrict__ c_places, u32 *__restrict__ out) {
    constexpr int A_SIZE = 32 * left::A_WORDS, B_SIZE = 32 * left::B_WORDS, C_SIZE = 32 * left::C_WORDS, D_WORDS = left::D_WORDS;
    constexpr int PLACES = of_a::PLACES + of_b::PLACES + of_c::PLACES, OPERANDS = A_SIZE + B_SIZE + C_SIZE;
    __shared__ Words4 memory[WARPS][(left::WORDS_OF_WARP + OPERANDS + PLACES + 3) / 4];
    __shared__ left::Tables tables;
    tables.fill();
    of_a::fill_table(32 * WARPS), of_b::fill_table(32 * WARPS), of_c::fill_table(32 * WARPS);
    __syncthreads();
    const int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= *groups) return;
    u32 *lines = (u32 *)memory[threadIdx.x / 32], *a = lines + left::WORDS_OF_WARP, *b = a + A_SIZE, *c = b + B_SIZE;
    u32 *places_of_a = c + C_SIZE, *places_of_b = places_of_a + of_a::PLACES, *places_of_c = places_of_b + of_b::PLACES;
    u32 *own = out + (s64)group * WORDS;
    left::Lines left_lines(lines, lane);
    right::Lines right_lines(lines, lane);
#pragma unroll 1
    for (int i = 0; i < CASES; ++i) {
        const s64 at = (s64)group * CASES + i;
        for (int v = lane; v < of_a::PLACES; v += 32) places_of_a[v] = a_places[at * of_a::PLACES + v];
        for (int v = lane; v < of_b::PLACES; v += 32) places_of_b[v] = b_places[at * of_b::PLACES + v];
        for (int v = lane; v < of_c::PLACES; v += 32) places_of_c[v] = c_places[at * of_c::PLACES + v];
        __syncwarp();
        of_a::draw_case(((const of_a::Case *)a_cases)[at], places_of_a, (of_a::Code *)a, lane);
        of_b::draw_case(((const of_b::Case *)b_cases)[at], places_of_b, (of_b::Code *)b, lane);
        of_c::draw_case(((const of_c::Case *)c_cases)[at], places_of_c, (of_c::Code *)c, lane);
        __syncwarp();
        left_lines.write(tables, words_of_lane<left::Words<left::A_WORDS>>(a, lane), words_of_lane<left::Words<left::B_WORDS>>(b, lane), {}, lane);
        right_lines.special = left_lines.special;
        __syncwarp();
        left::Codes left_codes;
        right::Codes right_codes;
        left::start_steps(left_codes, words_of_lane<left::Words<left::C_WORDS>>(c, lane));
        right::start_steps(right_codes, words_of_lane<right::Words<right::C_WORDS>>(c, lane));
        steps(left_codes, right_codes, left_lines, right_lines);
        u32 left_words[D_WORDS], right_words[D_WORDS];
        left::end_steps(left_words, left_codes);
        right::end_steps(right_words, right_codes);
        int wrong = 0;
#pragma unroll
        for (int v = 0; v < D_WORDS; ++v) wrong += left_words[v] != right_words[v];
        wrong = __reduce_add_sync(0xFFFFFFFF, wrong);
        if (lane == 0) own[i] = wrong;
        if (WITH_OPERANDS && i == 0) {
            for (int v = lane; v < OPERANDS; v += 32) own[CASES + v] = a[v];
#pragma unroll
            for (int v = 0; v < D_WORDS; ++v) own[CASES + OPERANDS + lane * D_WORDS + v] = left_words[v];
        }
        __syncwarp();
    }
}
