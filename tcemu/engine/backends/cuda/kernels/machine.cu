// What the machine is asked for by name: one instruction a function. Tests put an emulation of these in this file's place.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

struct alignas(8) Words2 { u32 x, y; };
struct alignas(16) Words4 { u32 x, y, z, w; };

// D = A·B + C of bf16 in f32. Fragments as PTX ISA 9.7.14.5.7 and .8 give them: a lane has the rows g = lane / 4 and g + 8, and of each the
// columns 2t and 2t + 1, t = lane % 4.
__device__ __forceinline__ void mma_k16(float (&d)[4], Words4 a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// f16, in the low half of a word; rounded to nearest
__device__ __forceinline__ u32 add_f16(u32 x, u32 y) {
    u16 sum;
    asm("add.rn.f16 %0, %1, %2;" : "=h"(sum) : "h"((u16)x), "h"((u16)y));
    return sum;
}

__device__ __forceinline__ u32 to_f16(float v) {
    u16 code;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(code) : "f"(v));
    return code;
}

__device__ __forceinline__ float from_f16(u32 code) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((u16)code));
    return v;
}

// 16 bytes from global to shared memory, behind the threads' back
__device__ __forceinline__ void copy_16(void *shared, const void *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)), "l"(global) : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_group 0;" ::: "memory"); }

// of all threads of the block, wherever in the text they are
__device__ __forceinline__ void barrier() { asm volatile("bar.sync 0;" ::: "memory"); }

// the same value, of which the compiler does not know that it is the same: so that nothing made of it is kept in registers for long
template <class T> __device__ __forceinline__ T opaque(T v) {
    if constexpr (sizeof(T) == 8) asm volatile("" : "+l"(v));
    else asm volatile("" : "+r"(v));
    return v;
}

// nothing is loaded across it: the compiler would else load so much at once that registers do not suffice
__device__ __forceinline__ void pause() { __syncwarp(); }
