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
#define COMPUTE(side)                                                                                       \
    side::Codes side##_codes;                                                                               \
    side::start_steps(side##_codes, words_of_lane<side::Words<side::C_WORDS>>(c, lane));                    \
    side::steps(side##_codes, side##_lines);                                                                \
    u32 side##_words[D_WORDS];                                                                              \
    side::end_steps(side##_words, side##_codes);

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
    compare(const int *groups, const Words4 *__restrict__ a_cases, const u32 *__restrict__ a_places, const Words4 *__restrict__ b_cases,
            const u32 *__restrict__ b_places, const Words4 *__restrict__ c_cases, const u32 *__restrict__ c_places, u32 *__restrict__ out) {
    constexpr int A_SIZE = 32 * left::A_WORDS, B_SIZE = 32 * left::B_WORDS, C_SIZE = 32 * left::C_WORDS, D_WORDS = left::D_WORDS;
    constexpr int LINES = left::WORDS_OF_WARP > right::WORDS_OF_WARP ? left::WORDS_OF_WARP : right::WORDS_OF_WARP;
    __shared__ Words4 memory[WARPS][(LINES + A_SIZE + B_SIZE + C_SIZE) / 4];
    __shared__ left::Tables left_tables;
    __shared__ right::Tables right_tables;
    left_tables.fill(), right_tables.fill();
    if (left::Tables::used || right::Tables::used) __syncthreads();
    const int lane = threadIdx.x % 32, group = blockIdx.x * WARPS + threadIdx.x / 32;
    if (group >= *groups) return;
    u32 *lines = (u32 *)memory[threadIdx.x / 32], *a = lines + LINES, *b = a + A_SIZE, *c = b + B_SIZE, *own = out + (s64)group * WORDS;
#pragma unroll 1
    for (int i = 0; i < CASES; ++i) {
        const s64 at = (s64)group * CASES + i;
        of_a::draw_case(((const of_a::Case *)a_cases)[at], a_places + at * of_a::PLACES, (of_a::Code *)a, lane);
        of_b::draw_case(((const of_b::Case *)b_cases)[at], b_places + at * of_b::PLACES, (of_b::Code *)b, lane);
        of_c::draw_case(((const of_c::Case *)c_cases)[at], c_places + at * of_c::PLACES, (of_c::Code *)c, lane);
        __syncwarp();
        WRITE(left)
        COMPUTE(left)
#if SAME_LINES
        right::Lines right_lines(lines, lane);
        right_lines.special = left_lines.special;
#else
        __syncwarp();
        WRITE(right)
#endif
        COMPUTE(right)
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
