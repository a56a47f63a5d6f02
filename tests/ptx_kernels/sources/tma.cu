// TMA: tensor copies by a CUtensorMap that the host made. A copy of boxes, part of which lies outside; a GEMM by wgmma whose operands come
// swizzled by 128 bytes and whose result is stored by TMA.
// sm_90a only
#include "common.cuh"

struct __align__(64) TensorMap { char bytes[128]; };

__device__ __forceinline__ void tensor_copy(uint32_t to, const TensorMap* map, int x, int y, uint32_t barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier) : "memory");
}

__device__ __forceinline__ void tensor_store(const TensorMap* map, int x, int y, uint32_t from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(map), "r"(x), "r"(y), "r"(from) : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Boxes of 16 x 8 words; block (x, y) begins at (x * 16 - 8, y * 8 - 4)
extern "C" __global__ void tma_boxes(const __grid_constant__ TensorMap map, uint32_t* out) {
    __shared__ __align__(128) uint32_t box[8 * 16];
    __shared__ uint64_t barrier;
    uint32_t address = shared_address(&barrier);
    if (threadIdx.x == 0) {
        barrier_init(address, 1);
        barrier_fence();
        barrier_expect(address, sizeof(box));
        tensor_copy(shared_address(box), &map, (int)blockIdx.x * 16 - 8, (int)blockIdx.y * 8 - 4, address);
    }
    __syncthreads();
    barrier_wait(address, 0);
    for (int i = threadIdx.x; i < 128; i += blockDim.x) out[(blockIdx.y * gridDim.x + blockIdx.x) * 128 + i] = box[i];
}

__device__ __forceinline__ uint64_t swizzled(uint32_t address) { return (address >> 4 & 0x3FFF) | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62; }

// D (f32) = A * B, a tile of 64 x 32; A is M x K and B N x K of f16; a step takes 64 of K. Two stages; one thread of the block copies.
extern "C" __global__ void __launch_bounds__(128)
tma_gemm(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap d, int steps) {
    extern __shared__ __align__(1024) char memory[];
    __shared__ uint64_t full[2];
    uint32_t base = shared_address(memory), thread = threadIdx.x;
    if (thread == 0) {
        barrier_init(shared_address(&full[0]), 1);
        barrier_init(shared_address(&full[1]), 1);
        barrier_fence();
    }
    __syncthreads();
    auto fetch = [&](int step) {
        uint32_t stage = base + step % 2 * 12288, barrier = shared_address(&full[step % 2]);
        barrier_expect(barrier, 12288);
        tensor_copy(stage, &a, step * 64, blockIdx.y * 64, barrier);
        tensor_copy(stage + 8192, &b, step * 64, blockIdx.x * 32, barrier);
    };
    if (thread == 0) fetch(0);
    float sum[16];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        if (thread == 0 && step + 1 < steps) fetch(step + 1);
        uint32_t stage = base + step % 2 * 12288;
        barrier_wait(shared_address(&full[step % 2]), step / 2 & 1);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int j = 0; j < 4; j++)
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                         "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
                         : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7]),
                           "+f"(sum[8]), "+f"(sum[9]), "+f"(sum[10]), "+f"(sum[11]), "+f"(sum[12]), "+f"(sum[13]), "+f"(sum[14]), "+f"(sum[15])
                         : "l"(swizzled(stage + j * 32)), "l"(swizzled(stage + 8192 + j * 32)), "r"(step + j));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        __syncthreads();
    }
    float* tile = (float*)memory;
    int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    for (int i = 0; i < 16; i++) tile[(row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
    async_fence();
    __syncthreads();
    if (thread == 0) tensor_store(&d, blockIdx.x * 32, blockIdx.y * 64, base);
}
