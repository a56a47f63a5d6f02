// FlashAttention, forward: a block of four warps takes 64 queries of one head, a warp 16; keys come 32 at a time; f16, head size 64.
// Scores never leave registers: the accumulators of Q * K^T are the A operand of P * V. ex2.approx: not exact.
// use_fast_math
#include "common.cuh"

template <bool causal>
__device__ __forceinline__ void forward(const __half* q, const __half* k, const __half* v, __half* out, float* log_sums, int length, float scale) {
    __shared__ __align__(16) __half k_tile[32][72], v_tile[32][72];
    int thread = threadIdx.x, lane = thread % 32, query = blockIdx.x * 64 + thread / 32 * 16 + lane / 4;
    size_t head = (size_t)blockIdx.y * length * 64;
    q += head, k += head, v += head, out += head;
    uint32_t q_tile[4][4];
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) q_tile[i][j] = *(const uint32_t*)&q[(query + j % 2 * 8) * 64 + i * 16 + j / 2 * 8 + lane % 4 * 2];
    float sum[8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
    int end = causal ? min(length, blockIdx.x * 64 + 64) : length;
#pragma unroll 1
    for (int start = 0; start < end; start += 32) {
        for (int i = thread; i < 256; i += 128) {
            copy_16(shared_address(&k_tile[i / 8][i % 8 * 8]), k + (start + i / 8) * 64 + i % 8 * 8);
            copy_16(shared_address(&v_tile[i / 8][i % 8 * 8]), v + (start + i / 8) * 64 + i % 8 * 8);
        }
        copies_commit();
        copies_wait<0>();
        __syncthreads();
        float score[4][4] = {};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 2; j++) {
                uint32_t tile[4];
                ldmatrix_x4(tile, shared_address(&k_tile[j * 16 + lane % 8 + lane / 16 * 8][i * 16 + lane / 8 % 2 * 8]));
                mma_f16(score[2 * j], q_tile[i], tile[0], tile[1]);
                mma_f16(score[2 * j + 1], q_tile[i], tile[2], tile[3]);
            }
        for (int half = 0; half < 2; half++) {
            float larger = largest[half];
            for (int i = 0; i < 4; i++)
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    int key = start + i * 8 + lane % 4 * 2 + j % 2;
                    score[i][j] = causal && key > query + half * 8 ? -INFINITY : score[i][j] * scale;
                    larger = fmaxf(larger, score[i][j]);
                }
            larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 1));
            larger = fmaxf(larger, __shfl_xor_sync(~0u, larger, 2));
            float shrink = exp2f(largest[half] - larger), row = 0;
            largest[half] = larger;
            for (int i = 0; i < 4; i++)
                for (int j = 2 * half; j < 2 * half + 2; j++) row += score[i][j] = exp2f(score[i][j] - larger);
            total[half] = total[half] * shrink + row;
            for (int i = 0; i < 8; i++) sum[i][2 * half] *= shrink, sum[i][2 * half + 1] *= shrink;
        }
        for (int i = 0; i < 2; i++) {
            uint32_t p[4];
            for (int j = 0; j < 4; j++) {
                __half2 both = __floats2half2_rn(score[2 * i + j / 2][j % 2 * 2], score[2 * i + j / 2][j % 2 * 2 + 1]);
                p[j] = *(uint32_t*)&both;
            }
            for (int j = 0; j < 4; j++) {
                uint32_t tile[4];
                ldmatrix_x4_trans(tile, shared_address(&v_tile[i * 16 + lane % 16][j * 16 + lane / 16 * 8]));
                mma_f16(sum[2 * j], p, tile[0], tile[1]);
                mma_f16(sum[2 * j + 1], p, tile[2], tile[3]);
            }
        }
        __syncthreads();
    }
    for (int half = 0; half < 2; half++) {
        total[half] += __shfl_xor_sync(~0u, total[half], 1);
        total[half] += __shfl_xor_sync(~0u, total[half], 2);
        for (int i = 0; i < 8; i++)
            *(__half2*)&out[(query + half * 8) * 64 + i * 8 + lane % 4 * 2] =
                __floats2half2_rn(sum[i][2 * half] / total[half], sum[i][2 * half + 1] / total[half]);
        if (lane % 4 == 0) log_sums[blockIdx.y * length + query + half * 8] = largest[half] + log2f(total[half]);
    }
}

extern "C" __global__ void __launch_bounds__(128)
attention(const __half* q, const __half* k, const __half* v, __half* out, float* log_sums, int length, float scale) {
    forward<false>(q, k, v, out, log_sums, length, scale);
}

extern "C" __global__ void __launch_bounds__(128)
attention_causal(const __half* q, const __half* k, const __half* v, __half* out, float* log_sums, int length, float scale) {
    forward<true>(q, k, v, out, log_sums, length, scale);
}
