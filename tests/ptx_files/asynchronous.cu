// Kernels with mbarriers, asynchronous copies and tensor maps, for tests/kernels/ptx/test_ptx_asynchronous.py.
// asynchronous.ptx beside this file: nvcc -arch=sm_90a -O3 -ptx asynchronous.cu
#include <cstdint>
#include <cuda_fp16.h>

struct alignas(64) TensorMap {
    char opaque[128];
};

__device__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

__device__ void init(uint64_t *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count));
}

__device__ void arrive(uint64_t *barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.release.cta.shared::cta.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

__device__ void arrive_expecting(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ void wait(uint64_t *barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra AGAIN;\nDONE:\n}" ::"r"(
            shared_address(barrier)),
        "r"(parity)
        : "memory");
}

__device__ void load_box(void *to, const TensorMap &map, int x, int y, uint64_t *barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"(&map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

// Warp 0 makes numbers, warp 1 sums them, through a ring of two slots: `full` and `empty` barriers of 32 arrivals.
extern "C" __global__ void ring(const uint32_t *in, uint32_t *out, int rounds) {
    __shared__ uint32_t slots[2][32];
    __shared__ uint64_t full[2], empty[2];
    int lane = threadIdx.x % 32;
    if (threadIdx.x == 0)
        for (int i = 0; i < 2; ++i) init(&full[i], 32), init(&empty[i], 32);
    __syncthreads();
    const uint32_t *mine = in + blockIdx.x * rounds * 32;
    if (threadIdx.x < 32) {
        for (int round = 0; round < rounds; ++round) {
            int slot = round % 2;
            if (round >= 2) wait(&empty[slot], (round / 2 - 1) & 1);
            slots[slot][lane] = mine[round * 32 + lane] * 3;
            arrive(&full[slot]);
        }
    } else {
        uint32_t sum = 0;
        for (int round = 0; round < rounds; ++round) {
            int slot = round % 2;
            wait(&full[slot], round / 2 & 1);
            sum = sum * 5 + slots[slot][31 - lane];
            arrive(&empty[slot]);
        }
        out[blockIdx.x * 32 + lane] = sum;
    }
}

// A run of bytes into shared memory and, turned round by words, back: cp.async.bulk both ways.
extern "C" __global__ void bulk(const uint32_t *in, uint32_t *out, int words) {
    extern __shared__ __align__(128) uint32_t buffer[];
    __shared__ uint64_t barrier;
    uint32_t *turned = buffer + words;
    if (threadIdx.x == 0) {
        init(&barrier, 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        arrive_expecting(&barrier, words * 4);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(buffer)),
                     "l"(in + blockIdx.x * words), "r"(words * 4), "r"(shared_address(&barrier))
                     : "memory");
    }
    __syncthreads();
    wait(&barrier, 0);
    for (int i = threadIdx.x; i < words; i += blockDim.x) turned[words - 1 - i] = buffer[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + blockIdx.x * words), "r"(shared_address(turned)),
                     "r"(words * 4)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
}

// A box into shared memory; what lies there, as it lies there, to `seen`; and the box into another tensor at the same place.
extern "C" __global__ void box(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, uint32_t *seen, int bytes, int dx, int dy) {
    extern __shared__ __align__(1024) char tile[];
    __shared__ uint64_t barrier;
    int x = (int)blockIdx.x * dx - 3, y = (int)blockIdx.y * dy - 2;
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) ((uint32_t *)tile)[i] = 0xAAAAAAAA;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&from));
        init(&barrier, 1);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        arrive_expecting(&barrier, bytes);
        load_box(tile, from, x, y, &barrier);
    }
    wait(&barrier, 0);
    int block = blockIdx.y * gridDim.x + blockIdx.x;
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) seen[block * (bytes / 4) + i] = ((uint32_t *)tile)[i];
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&to), "r"(x), "r"(y),
                     "r"(shared_address(tile))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// Rows of 16 bytes with a tail that is filled with zeros: cp.async with src-size, groups, and an arrival when the copies are done.
extern "C" __global__ void small(const uint8_t *in, uint8_t *out, int bytes) {
    __shared__ __align__(16) uint8_t rows[64 * 16];
    __shared__ uint64_t barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    int left = bytes - (int)threadIdx.x * 16, size = left < 0 ? 0 : left > 16 ? 16 : left;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(rows + threadIdx.x * 16)), "l"(in + threadIdx.x * 16),
                 "r"(size));
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier)) : "memory");
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    wait(&barrier, 0);
    for (int i = 0; i < 16; ++i) out[threadIdx.x * 16 + i] = rows[(blockDim.x - 1 - threadIdx.x) * 16 + i];
}

// C = A * B^T by wgmma, 64 x 64 x 64 a step: one thread of a producer warpgroup loads by tensor maps, a warpgroup multiplies; two stages.
extern "C" __global__ void __launch_bounds__(256)
    product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, float *c, int k) {
    extern __shared__ __align__(1024) char tiles[];
    __shared__ uint64_t full[2], empty[2];
    const int tile = 64 * 64 * 2, columns = gridDim.x * 64;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) init(&full[i], 1), init(&empty[i], 128);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) {
            for (int step = 0; step < k / 64; ++step) {
                int stage = step % 2;
                if (step >= 2) wait(&empty[stage], (step / 2 - 1) & 1);
                arrive_expecting(&full[stage], 2 * tile);
                load_box(tiles + stage * 2 * tile, a, step * 64, blockIdx.y * 64, &full[stage]);
                load_box(tiles + stage * 2 * tile + tile, b, step * 64, blockIdx.x * 64, &full[stage]);
            }
        }
        return;
    }
    float d[32] = {};
    for (int step = 0; step < k / 64; ++step) {
        int stage = step % 2;
        wait(&full[stage], step / 2 & 1);
        uint32_t at = shared_address(tiles + stage * 2 * tile);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int i = 0; i < 4; ++i) {
            // K-major with a swizzle of 128 bytes: eight rows are 1024 bytes apart
            uint64_t shape = 1ull << 62 | (uint64_t)(1024 >> 4) << 32 | 1ull << 16;
            uint64_t a_desc = shape | (at + 32 * i) >> 4, b_desc = shape | (at + tile + 32 * i) >> 4;
            asm volatile(
                "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, 1, 1, 1, 0, 0;"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
                  "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
                  "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
                  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                : "l"(a_desc), "l"(b_desc));
        }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        arrive(&empty[stage]);
    }
    int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    for (int i = 0; i < 32; ++i) {
        int row = blockIdx.y * 64 + 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = blockIdx.x * 64 + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        c[row * columns + column] = d[i];
    }
}
