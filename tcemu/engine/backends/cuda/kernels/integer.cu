// Any order of steps, one element of D a thread, in integers: groups, chains, a second rounding of each instruction's result, and promotion.
//
// A block has 16 x 8 elements of D. Of one instruction at a time it decodes the factors of its rows and columns into shared memory.

constexpr int ROWS = 16, COLUMNS = 8;

// The factors of one step in shared memory; those beyond the end of a group take no part
struct StepFactors {
    const Factor *factors;
    int first, group;  // the step's first product in its group; the group's number

    __device__ __forceinline__ Factor operator()(int t) const {
        const int j = first + t;
        if (OF_GROUP % TERMS != 0 && j >= OF_GROUP) return {0, ZERO_EXPONENT};
        return factors[dealt(j, group)];
    }
};

extern "C" __global__ void __launch_bounds__(ROWS *COLUMNS)
    integer(const Shape *shapes, const ACode *a, const BCode *b, const CCode *c,
#if SCALED
            const u8 *a_scales, const u8 *b_scales,
#endif
#if BLOCK_SCALED
            const float *row_scales, const float *column_scales,
#endif
            DCode *d) {
#if !SCALED
    const u8 *a_scales = nullptr, *b_scales = nullptr;
#endif
#if !BLOCK_SCALED
    const float *row_scales = nullptr, *column_scales = nullptr;
#endif
    __shared__ Factor rows[ROWS][OF_INSTRUCTION + 1], columns[COLUMNS][OF_INSTRUCTION + 1];
    const Shape shape = *shapes;
    const int across = (shape.n + COLUMNS - 1) / COLUMNS, down = (shape.m + ROWS - 1) / ROWS;
    const int batch = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    const int row0 = tile / across * ROWS, column0 = tile % across * COLUMNS;
    const int i = threadIdx.x / COLUMNS, j = threadIdx.x % COLUMNS, row = row0 + i, column = column0 + j;
    const bool inside = row < shape.m && column < shape.n;
    const s64 at = ((s64)batch * shape.m + row) * shape.n + column;
    const BlockScales block_scales = {row_scales, column_scales, shape.k / OF_PART};
    const u32 start = inside ? c[at] : 0;
    u32 running = PROMOTED ? 0 : canonical(start), chain = 0, chains = 0, total = start;
    int steps_in_chain = 0;
    for (int k = 0; k < shape.k; k += OF_INSTRUCTION) {
        __syncthreads();
        for (int v = threadIdx.x; v < ROWS * OF_INSTRUCTION; v += ROWS * COLUMNS) {
            const int r = v / OF_INSTRUCTION, t = v % OF_INSTRUCTION;
            if (row0 + r < shape.m) rows[r][t] = row_of(shape, a, a_scales, batch, row0 + r)(k + t);
        }
        for (int v = threadIdx.x; v < COLUMNS * OF_INSTRUCTION; v += ROWS * COLUMNS) {
            const int r = v % COLUMNS, t = v / COLUMNS;
            if (column0 + r < shape.n) columns[r][t] = column_of(shape, b, b_scales, batch, column0 + r)(k + t);
        }
        __syncthreads();
        if (!inside) continue;
        int chains_in_instruction = 0;
        const bool promoted = PROMOTED && (k + OF_INSTRUCTION) % OF_PART == 0;
        const bool ends_chain = ROUNDED_AGAIN || promoted || k + OF_INSTRUCTION == shape.k;
        for (int group = 0; group < GROUPS; ++group)
            for (int first = 0; first < OF_GROUP; first += TERMS) {
                const StepFactors x = {rows[i], first, group}, y = {columns[j], first, group};
                if (CHAIN == 0) {
                    running = fused_step(x, y, running, false);
                    continue;
                }
                chain = fused_step(x, y, chain, steps_in_chain == 0);
                const bool last_of_all = ends_chain && group == GROUPS - 1 && first + TERMS >= OF_GROUP;
                if (++steps_in_chain < CHAIN && !last_of_all) continue;
                steps_in_chain = 0;
                if (TOGETHER)
                    chains = chains_in_instruction++ == 0 ? chain : add(chains, chain);
                else
                    running = add(running, chain);
            }
        if (TOGETHER) running = add(running, chains);
        if (ROUNDED_AGAIN) running = f16_to_f32(f32_to_f16(running));
        if (!promoted) continue;
        float scale = 0;
        if (BLOCK_SCALED)
            scale = __fmul_rn(block_scales.row(shape, batch, row, k / OF_PART), block_scales.column(shape, batch, column, k / OF_PART));
        total = add_promoted(total, running, scale), running = 0;
    }
    if (inside) d[at] = PROMOTED ? total : ROUNDED_AGAIN ? f32_to_f16(running) : running;
}
