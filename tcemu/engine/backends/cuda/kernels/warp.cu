// The steps of one instruction by one warp.
//
// A warp decodes the factors of A and of B into shared memory, each once, and lays them out as steps take them: a line is a row of A or a
// column of B. Then each lane computes the elements of D that it holds, which are some rows by some columns. Where things are stands in tables
// before this text: a place is the sum of what the bits of the lane's number add and of what the number of the element adds.

// All steps of the instruction, in their order
__device__ __forceinline__ void steps(Codes &running, const Lines &of) {
    Codes chain = {}, chains = {};
    int steps_in_chain = 0, chains_before = 0;
#pragma unroll 1
    for (int at = 0; at < STEPS; ++at) {
        const int first = at / PER_GROUP * PADDED + at % PER_GROUP * TERMS;
        if constexpr (CHAIN == 0) {
            step(running, of, first, false);
        } else {
            step(chain, of, first, steps_in_chain == 0);
            if (++steps_in_chain < CHAIN && at < STEPS - 1) continue;
            steps_in_chain = 0;
#pragma unroll
            for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
                const int i = v / COLUMNS_OF_LANE, j = v % COLUMNS_OF_LANE;
                if (TOGETHER) chains[i][j] = chains_before == 0 ? chain[i][j] : add(chains[i][j], chain[i][j]);
                else running[i][j] = add(running[i][j], chain[i][j]);
            }
            ++chains_before;
        }
    }
    if constexpr (TOGETHER) {
#pragma unroll
        for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
            u32 &c = running[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
            c = add(c, chains[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE]);
        }
    }
}

// C's code in the format of the steps' results
__device__ __forceinline__ u32 accumulator_of(u32 code) {
    if constexpr (C_SAME) return code;
    else if constexpr (RESULT::mantissa_bits == F32::mantissa_bits) return f16_to_f32(code);
    else return f32_to_f16(code);
}

// The elements of C that a lane holds
__device__ __forceinline__ void start_steps(Codes &codes, const Words<C_WORDS> &c) {
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v)
        codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE] = accumulator_of(code_of<C_BITS, C_CONTAINER, 0>(c, d_element(v)));
}

// The words of D that a lane holds
__device__ __forceinline__ void end_steps(u32 (&words)[D_WORDS], const Codes &codes) {
#pragma unroll
    for (int v = 0; v < D_WORDS; ++v) words[v] = 0;
#pragma unroll
    for (int v = 0; v < ROWS_OF_LANE * COLUMNS_OF_LANE; ++v) {
        const u32 code = codes[v / COLUMNS_OF_LANE][v % COLUMNS_OF_LANE];
        words[d_element(v) * D_BITS / 32] |= (ROUNDED_AGAIN ? f32_to_f16(code) : code) << d_element(v) * D_BITS % 32;
    }
}
