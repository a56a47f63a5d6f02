// stmatrix: the sums of mma.sync go to shared memory as 8 x 8 matrices of f16, plain or transposed, and from there in rows of 16 bytes.
// sm_90a only
#include "block_tile.cuh"

MMA(F16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")

template <bool transposed> __device__ __forceinline__ void tile(const void* a, const void* b, __half* d, int n, int row_bytes) {
    __shared__ __align__(16) __half out[32][40];
    float sum[2][4] = {};
    block_tile<F16>(a, b, row_bytes, sum);
    uint32_t held[4];
    for (int i = 0; i < 4; i++) {
        __half2 both = __floats2half2_rn(sum[i / 2][i % 2 * 2], sum[i / 2][i % 2 * 2 + 1]);
        held[i] = *(uint32_t*)&both;
    }
    int lane = threadIdx.x % 32, row = threadIdx.x / 64 * 16 + lane % 16, column = threadIdx.x / 32 % 2 * 16 + lane / 16 * 8;
    if constexpr (transposed) {
        row = threadIdx.x / 32 % 2 * 16 + lane / 16 * 8 + lane % 8, column = threadIdx.x / 64 * 16 + lane / 8 % 2 * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(shared_address(&out[row][column])), "r"(held[0]), "r"(held[1]), "r"(held[2]), "r"(held[3]) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     :: "r"(shared_address(&out[row][column])), "r"(held[0]), "r"(held[1]), "r"(held[2]), "r"(held[3]) : "memory");
    }
    __syncthreads();
    int from = threadIdx.x / 4, part = threadIdx.x % 4 * 8;
    *(uint4*)&d[(blockIdx.y * 32 + from) * n + blockIdx.x * 32 + part] = *(const uint4*)&out[from][part];
}

extern "C" __global__ void stored_by_matrices(const void* a, const void* b, __half* d, int n, int row_bytes) { tile<false>(a, b, d, n, row_bytes); }

// Each tile of 32 x 32 on its own is transposed
extern "C" __global__ void stored_transposed(const void* a, const void* b, __half* d, int n, int row_bytes) { tile<true>(a, b, d, n, row_bytes); }
