// Draws a float operand of many cases, one case a warp. WARPS of a block are defined before this text.

extern "C" __global__ void __launch_bounds__(32 * WARPS) draw(const int *cases, const Case *__restrict__ case_words,
                                                             const u32 *__restrict__ place_words, Code *__restrict__ out) {
    fill_table(32 * WARPS);
    __syncthreads();
    const s64 at = (s64)blockIdx.x * WARPS + threadIdx.x / 32;
    if (at < *cases) draw_case(case_words[at], place_words + at * PLACES, out + at * ELEMENTS, threadIdx.x % 32);
}
