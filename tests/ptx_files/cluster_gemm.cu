// Products in the style of CUTLASS's Hopper pipelines, on clusters of CX x CY blocks: nvcc 13.0 -std=c++17 -arch=sm_90a -ptx cluster_gemm.cu
//
// Each block computes 64 W x 64 outputs; W warpgroups multiply, and a warp more loads. The CX blocks of a row of the cluster share rows of A, the
// CY blocks of a column share columns of B: each block loads its part of a tile and multicasts it to the others. A stage is full when the
// bytes of all parts have come; it is empty when every block that receives a part has said so, at the mbarrier of the block that sends.
// A is M x K, B is N x K, both row major; a tile has 128 bytes of K, swizzled by 128 bytes. D is M x N. Grid: N / 64, M / (64 W).
#include <cstdint>
#include <cuda.h>

struct F16 { using D = float; };
struct BF16 { using D = float; };
struct TF32 { using D = float; };
struct E4M3 { using D = float; };
struct S8 { using D = int; };

#define D4(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define D32(c) D4(c, 0), D4(c, 4), D4(c, 8), D4(c, 12), D4(c, 16), D4(c, 20), D4(c, 24), D4(c, 28)
#define VECTOR "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define PRODUCT(kind, name, register_type, value, tail)                                                                    \
    __device__ __forceinline__ void multiply(kind, value (&d)[32], uint64_t a, uint64_t b, int add) {                      \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                             \
                     "wgmma.mma_async.sync.aligned.m64n64" name " " VECTOR ", %32, %33, p" tail ";}"                      \
                     : D32(register_type) : "l"(a), "l"(b), "r"(add));                                                     \
    }
#define F(x) "+f"(x)
#define I(x) "+r"(x)
PRODUCT(F16, "k16.f32.f16.f16", F, float, ", 1, 1, 0, 0")
PRODUCT(BF16, "k16.f32.bf16.bf16", F, float, ", 1, 1, 0, 0")
PRODUCT(TF32, "k8.f32.tf32.tf32", F, float, ", 1, 1")
PRODUCT(E4M3, "k32.f32.e4m3.e4m3", F, float, ", 1, 1")
PRODUCT(S8, "k32.s32.s8.s8", I, int, "")

__device__ __forceinline__ uint32_t shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint32_t rank_of_block() { uint32_t r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait(uint64_t* barrier, int parity) {
    asm volatile("{.reg .pred p;\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;}"
                 :: "r"(shared(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive_at(uint64_t* barrier, uint32_t rank) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];}"
                 :: "r"(shared(barrier)), "r"(rank) : "memory");
}
__device__ __forceinline__ void load(void* to, const CUtensorMap* map, int x, int y, uint64_t* barrier, uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(shared(to)), "l"(map), "r"(x), "r"(y), "r"(shared(barrier)), "h"(mask) : "memory");
}
__device__ __forceinline__ uint64_t descriptor(const void* p) {  // K-major, rows of 128 bytes, swizzled by 128 bytes
    return (uint64_t)((shared(p) & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

constexpr int TILE = 64, BYTES = 128, STAGES = 2;

template <int W> struct __align__(1024) Memory {
    char a[STAGES][W * TILE * BYTES], b[STAGES][TILE * BYTES];
    uint64_t full[STAGES], empty[STAGES], done;
    float sums[32 * 128];  // of rank 1, for split K
};

template <class Kind, int SIZE, int CX, int CY, int W, bool SPLIT>
__device__ __forceinline__ void product(const CUtensorMap* a, const CUtensorMap* b, typename Kind::D* out, int n, int k, int tiles_x, int tiles_y) {
    extern __shared__ __align__(1024) char dynamic[];
    Memory<W>& memory = *reinterpret_cast<Memory<W>*>(dynamic);
    const int warp = threadIdx.x / 32;
    const uint32_t rank = rank_of_block(), cx = rank % CX, cy = rank / CX;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&memory.full[s])));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared(&memory.empty[s])), "r"(W * (SPLIT ? 1 : CX + CY - 1)));
        }
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&memory.done)));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    const int blocks = k * SIZE / BYTES, first = SPLIT ? rank * blocks / CX : 0, last = SPLIT ? (rank + 1) * blocks / CX : blocks;
    const int row_parts = SPLIT ? 1 : CX, column_parts = SPLIT ? 1 : CY;
    int count = 0;  // stages used so far
#pragma unroll 1
    for (int y = blockIdx.y; y < tiles_y; y += gridDim.y)
#pragma unroll 1
        for (int x = SPLIT ? blockIdx.x / CX : blockIdx.x; x < tiles_x; x += SPLIT ? gridDim.x / CX : gridDim.x) {
            if (warp == 4 * W) {
                if (threadIdx.x % 32 == 0)
#pragma unroll 1
                    for (int i = first; i < last; ++i, ++count) {
                        const int s = count % STAGES, rows = W * TILE / row_parts, columns = TILE / column_parts;
                        wait(&memory.empty[s], (count / STAGES & 1) ^ 1);
                        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                                     :: "r"(shared(&memory.full[s])), "r"((W + 1) * TILE * BYTES) : "memory");
                        const uint16_t row_mask = SPLIT ? 1 << rank : ((1 << CX) - 1) << (cy * CX);
                        uint16_t column_mask = 0;
                        for (int j = 0; j < CY; ++j) column_mask |= 1 << (cx + j * CX);
                        const int part_a = SPLIT ? 0 : cx * rows, part_b = SPLIT ? 0 : cy * columns;
                        load(memory.a[s] + part_a * BYTES, a, i * (BYTES / SIZE), y * W * TILE + part_a, &memory.full[s], row_mask);
                        load(memory.b[s] + part_b * BYTES, b, i * (BYTES / SIZE), x * TILE + part_b, &memory.full[s], SPLIT ? 1 << rank : column_mask);
                    }
            } else if (warp < 4 * W) {
                typename Kind::D d[32];
#pragma unroll 1
                for (int i = first; i < last; ++i, ++count) {
                    const int s = count % STAGES;
                    wait(&memory.full[s], count / STAGES & 1);
                    const uint64_t da = descriptor(memory.a[s] + warp / 4 * TILE * BYTES), db = descriptor(memory.b[s]);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int j = 0; j < 4; ++j) multiply(Kind{}, d, da + 2 * j, db + 2 * j, i > first || j > 0);
                    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
                    if (threadIdx.x % 128 < CX * CY) {
                        const uint32_t other = threadIdx.x % 128;
                        const bool sends = SPLIT ? other == rank : other % CX == cx || other / CX == cy;
                        if (sends) arrive_at(&memory.empty[s], other);
                    }
                }
                const int t = threadIdx.x % 128, row = y * W * TILE + warp * 16 + t % 32 / 4, column = x * TILE + t % 4 * 2;
                if (SPLIT) {  // rank 1 sends its sums to rank 0, which adds them to its own
                    const uint32_t own = shared(memory.sums) + t * 4;
                    if (rank == 1) {
#pragma unroll
                        for (int j = 0; j < 32; ++j)
                            asm volatile("{.reg .b32 r, s; mapa.shared::cluster.u32 r, %0, 0; mapa.shared::cluster.u32 s, %1, 0;\n"
                                         "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [r], %2, [s];}"
                                         :: "r"(own + j * 512), "r"(shared(&memory.done)), "r"(__float_as_int((float)d[j])) : "memory");
                    } else {
                        if (t == 0)
                            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared(&memory.done)), "r"(128 * 128) : "memory");
                        wait(&memory.done, 0);
#pragma unroll
                        for (int j = 0; j < 32; ++j) d[j] += memory.sums[t + j * 128];
                    }
                }
                if (!SPLIT || rank == 0)
#pragma unroll
                    for (int j = 0; j < 32; ++j)
                        out[(row + j / 2 % 2 * 8) * n + column + j / 4 * 8 + j % 2] = d[j];
            }
        }
    cluster_sync();
}

#define KERNEL(name, kind, size, cx, cy, w, split)                                                                                           \
    extern "C" __global__ void __cluster_dims__(cx, cy, 1) name(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, \
                                                                kind::D* out, int n, int k, int tiles_x, int tiles_y) {                      \
        product<kind, size, cx, cy, w, split>(&a, &b, out, n, k, tiles_x, tiles_y);                                                          \
    }
KERNEL(f16_2x1, F16, 2, 2, 1, 1, false)
KERNEL(f16_1x2, F16, 2, 1, 2, 1, false)
KERNEL(f16_2x2, F16, 2, 2, 2, 1, false)
KERNEL(f16_4x1, F16, 2, 4, 1, 1, false)
KERNEL(bf16_2x2, BF16, 2, 2, 2, 1, false)
KERNEL(tf32_1x2, TF32, 4, 1, 2, 1, false)
KERNEL(e4m3_2x1, E4M3, 1, 2, 1, 1, false)
KERNEL(s8_2x2, S8, 1, 2, 2, 1, false)
KERNEL(two_warpgroups_2x1, F16, 2, 2, 1, 2, false)
KERNEL(split_k, F16, 2, 2, 1, 1, true)
