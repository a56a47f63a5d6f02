// A warp-specialised GEMM: a producer warpgroup copies tiles by cp.async.bulk, a consumer warpgroup multiplies them by wgmma, and mbarriers say
// which stage is full and which is empty. In memory a step's A is 64 x 64 and its B 32 x 64 of f16, in blocks of 8 rows of 16 bytes.
// sm_90a only
#include "common.cuh"

constexpr int STAGES = 2, A_BYTES = 64 * 128, B_BYTES = 32 * 128;

__device__ __forceinline__ uint64_t blocks(uint32_t address) { return (address >> 4 & 0x3FFF) | 128ull >> 4 << 16 | 1024ull >> 4 << 32; }

__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

extern "C" __global__ void __launch_bounds__(256, 1) specialised(const char* a, const char* b, float* d, int steps) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    uint32_t base = shared_address(memory);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(shared_address(&full[i]), 1);
            barrier_init(shared_address(&empty[i]), 128);
        }
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x >= 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 128) {
#pragma unroll 1
            for (int i = 0; i < steps; i++) {
                uint32_t stage = base + i % STAGES * (A_BYTES + B_BYTES), barrier = shared_address(&full[i % STAGES]);
                if (i >= STAGES) barrier_wait(shared_address(&empty[i % STAGES]), i / STAGES - 1 & 1);
                barrier_expect(barrier, A_BYTES + B_BYTES);
                bulk_copy(stage, a + (size_t)(blockIdx.y * steps + i) * A_BYTES, A_BYTES, barrier);
                bulk_copy(stage + A_BYTES, b + (size_t)(blockIdx.x * steps + i) * B_BYTES, B_BYTES, barrier);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        float sum[16];
#pragma unroll 1
        for (int i = 0; i < steps; i++) {
            uint32_t stage = base + i % STAGES * (A_BYTES + B_BYTES);
            barrier_wait(shared_address(&full[i % STAGES]), i / STAGES & 1);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int j = 0; j < 4; j++)
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                             "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
                             : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
                               "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15])
                             : "l"(blocks(stage + j * 256)), "l"(blocks(stage + A_BYTES + j * 256)), "r"(i + j));
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
            barrier_arrive(shared_address(&empty[i % STAGES]));
        }
        int lane = threadIdx.x % 32, row = blockIdx.y * 64 + threadIdx.x / 32 * 16 + lane / 4;
        for (int i = 0; i < 16; i++)
            d[(row + i / 2 % 2 * 8) * gridDim.x * 32 + blockIdx.x * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
    }
}

// A block copies its 256 words in, changes them, and copies them out, by bulk copies both ways.
extern "C" __global__ void bulk_round_trip(const uint32_t* from, uint32_t* to) {
    __shared__ __align__(128) uint32_t words[256];
    __shared__ uint64_t barrier;
    uint32_t address = shared_address(&barrier), at = shared_address(words);
    if (threadIdx.x == 0) {
        barrier_init(address, blockDim.x);
        barrier_fence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        barrier_expect(address, 1024);
        bulk_copy(at, from + blockIdx.x * 256, 1024, address);
    } else {
        barrier_arrive(address);
    }
    barrier_wait(address, 0);
    for (int i = threadIdx.x; i < 256; i += blockDim.x) words[i] = words[i] * 3 + i;
    async_fence();
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" :: "l"(to + blockIdx.x * 256), "r"(at) : "memory");
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
    }
}
