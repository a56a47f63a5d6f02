// wgmma: a warpgroup makes 64 x 32 of A * B, from shared memory by descriptors (SS) or with A in registers (RS). A is 64 x K and B 32 x K, both by
// rows of bytes, 128 bytes of each row a step, swizzled by 128 bytes, unless an entry says otherwise.
// sm_90a only
#include "common.cuh"

__device__ __forceinline__ uint64_t descriptor(uint32_t address, int leading, int stride, int swizzle) {
    return (uint64_t)(address >> 4 & 0x3FFF) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 | (uint64_t)swizzle << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define SUMS "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define HELD(letter)                                                                                                                           \
    "+" letter(d[0]), "+" letter(d[1]), "+" letter(d[2]), "+" letter(d[3]), "+" letter(d[4]), "+" letter(d[5]), "+" letter(d[6]),              \
        "+" letter(d[7]), "+" letter(d[8]), "+" letter(d[9]), "+" letter(d[10]), "+" letter(d[11]), "+" letter(d[12]), "+" letter(d[13]),      \
        "+" letter(d[14]), "+" letter(d[15])

#define SS(name, Sum, letter, spelling, immediates)                                                                                            \
    struct name {                                                                                                                              \
        static __device__ __forceinline__ void run(Sum (&d)[16], uint64_t a, uint64_t b, int keep) {                                           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned." spelling " " SUMS ", %16, %17, p" immediates \
                         ";\n}" : HELD(letter) : "l"(a), "l"(b), "r"(keep));                                                                   \
        }                                                                                                                                      \
    };
#define RS(name, Sum, letter, spelling, immediates)                                                                                            \
    struct name {                                                                                                                              \
        static __device__ __forceinline__ void run(Sum (&d)[16], const uint32_t (&a)[4], uint64_t b, int keep) {                               \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned." spelling " " SUMS                           \
                         ", {%16, %17, %18, %19}, %20, p" immediates ";\n}"                                                                    \
                         : HELD(letter) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));                                      \
        }                                                                                                                                      \
    };

SS(F16, float, "f", "m64n32k16.f32.f16.f16", ", 1, 1, 0, 0")
SS(BF16, float, "f", "m64n32k16.f32.bf16.bf16", ", 1, -1, 0, 0")
SS(TF32, float, "f", "m64n32k8.f32.tf32.tf32", ", 1, 1")
SS(E4M3, float, "f", "m64n32k32.f32.e4m3.e4m3", ", 1, 1")
SS(E5M2, float, "f", "m64n32k32.f32.e5m2.e4m3", ", 1, 1")
SS(S8, int, "r", "m64n32k32.s32.s8.s8", "")
SS(F16_TRANS, float, "f", "m64n32k16.f32.f16.f16", ", 1, 1, 0, 1")
RS(F16_RS, float, "f", "m64n32k16.f32.f16.f16", ", 1, 1, 0")
RS(E4M3_RS, float, "f", "m64n32k32.f32.e4m3.e4m3", ", 1, 1")

// `rows` rows of 128 bytes from `from`, swizzled, to shared memory
__device__ __forceinline__ void stage(uint32_t to, const char* from, int rows, int row_bytes) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * 8; i += 128) {
        int row = i / 8, chunk = i % 8;
        copy_16(to + row * 128 + ((chunk ^ (row & 7)) << 4), from + row * row_bytes + chunk * 16);
    }
}

template <typename Sum> __device__ __forceinline__ void store(const Sum (&sum)[16], Sum* d) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int i = 0; i < 16; i++) d[(row + i / 2 % 2 * 8) * 32 + i / 4 * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

template <typename Wgmma, bool registers, typename Sum> __device__ __forceinline__ void product(const char* a, const char* b, Sum* d, int row_bytes) {
    __shared__ __align__(1024) char a_tile[64 * 128], b_tile[32 * 128];
    uint32_t a_start = shared_address(a_tile), b_start = shared_address(b_tile);
    Sum sum[16];
#pragma unroll 1
    for (int i = 0; i < row_bytes; i += 128) {
        stage(a_start, a + i, 64, row_bytes);
        stage(b_start, b + i, 32, row_bytes);
        copies_commit();
        copies_wait<0>();
        async_fence();
        __syncthreads();
        uint32_t a_registers[4][4];
        if constexpr (registers)
            for (int j = 0; j < 4; j++) {
                int row = threadIdx.x / 32 * 16 + threadIdx.x % 16, chunk = j * 2 + threadIdx.x % 32 / 16;
                ldmatrix_x4(a_registers[j], a_start + row * 128 + ((chunk ^ (row & 7)) << 4));
            }
        wgmma_fence();
        for (int j = 0; j < 4; j++) {
            uint64_t b_descriptor = descriptor(b_start + j * 32, 16, 1024, 1);
            if constexpr (registers) Wgmma::run(sum, a_registers[j], b_descriptor, i + j > 0);
            else Wgmma::run(sum, descriptor(a_start + j * 32, 16, 1024, 1), b_descriptor, i + j > 0);
        }
        wgmma_commit();
        wgmma_wait();
        __syncthreads();
    }
    store(sum, d);
}

#define GEMM(name, Wgmma, registers, Sum)                                                                                 \
    extern "C" __global__ void __launch_bounds__(128) name(const char* a, const char* b, Sum* d, int row_bytes) {         \
        product<Wgmma, registers>(a, b, d, row_bytes);                                                                    \
    }

GEMM(wgmma_f16, F16, false, float)
GEMM(wgmma_bf16_negated, BF16, false, float)
GEMM(wgmma_tf32, TF32, false, float)
GEMM(wgmma_e4m3, E4M3, false, float)
GEMM(wgmma_e5m2_e4m3, E5M2, false, float)
GEMM(wgmma_s8, S8, false, int)
GEMM(wgmma_f16_registers, F16_RS, true, float)
GEMM(wgmma_e4m3_registers, E4M3_RS, true, float)

// B by rows (K x 32), swizzled by 64 bytes and transposed by the instruction; A without swizzle, in 8 x 16 byte blocks. K = 16
extern "C" __global__ void __launch_bounds__(128) wgmma_transposed(const char* a, const char* b, float* d) {
    __shared__ __align__(1024) char a_tile[64 * 32], b_tile[16 * 64];
    uint32_t a_start = shared_address(a_tile), b_start = shared_address(b_tile);
    int row = threadIdx.x / 2, half = threadIdx.x % 2;
    copy_16(a_start + row / 8 * 256 + half * 128 + row % 8 * 16, a + row * 32 + half * 16);
    row = threadIdx.x / 4;
    int chunk = threadIdx.x % 4;
    if (threadIdx.x < 64) copy_16(b_start + row * 64 + ((chunk ^ (row >> 1 & 3)) << 4), b + row * 64 + chunk * 16);
    copies_commit();
    copies_wait<0>();
    async_fence();
    __syncthreads();
    float sum[16];
    wgmma_fence();
    F16_TRANS::run(sum, descriptor(a_start, 128, 256, 0), descriptor(b_start, 16, 512, 2), 0);
    wgmma_commit();
    wgmma_wait();
    store(sum, d);
}
