// What stands in the place of the kernels' machine.cu when their text is compiled for a CPU: each CUDA thread is a fiber, and where a warp or a
// block does something together, a fiber waits for the others. Of the GPU's arithmetic, only what the kernels rely on is promised.

#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __shared__ static

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;
using std::abs;
using std::max;
using std::min;

struct alignas(8) Words2 { u32 x, y; };
struct alignas(16) Words4 { u32 x, y, z, w; };
struct Index { unsigned x; };

static Index threadIdx, blockIdx;
alignas(16) u8 shared[1 << 18];

// ---- fibers

struct Meeting {  // of the threads of a warp, or of a block
    int arrived = 0, turn = 0;
};
struct Warp {
    Meeting meeting;
    u32 given[32][12];
    u32 taken[32][4];
};
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<std::unique_ptr<char[]>> stacks;
static std::vector<bool> done;
static std::vector<Warp> warps;
static Meeting block;
static std::function<void()> kernel;
constexpr size_t STACK = 1 << 18;

static void yield() {
    const unsigned me = threadIdx.x;
    swapcontext(&fibers[me], &scheduler);
    threadIdx.x = me;
}
static void meet(Meeting &meeting, int all, const std::function<void()> &together) {
    const int turn = meeting.turn;
    if (++meeting.arrived == all) {
        together();
        meeting.arrived = 0, ++meeting.turn;
    } else
        while (meeting.turn == turn) yield();
}
static void fiber() {
    kernel();
    done[threadIdx.x] = true;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}
static void run_block(int threads) {
    fibers.assign(threads, {}), done.assign(threads, false), warps.assign((threads + 31) / 32, {}), block = {};
    while ((int)stacks.size() < threads) stacks.emplace_back(new char[STACK]);
    for (int t = 0; t < threads; ++t) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks[t].get(), fibers[t].uc_stack.ss_size = STACK, fibers[t].uc_link = nullptr;
        makecontext(&fibers[t], fiber, 0);
    }
    for (bool some = true; some;) {
        some = false;
        for (int t = 0; t < threads; ++t)
            if (!done[t]) {
                some = true, threadIdx.x = t;
                swapcontext(&scheduler, &fibers[t]);
            }
    }
}
template <class F> static void launch(int grid, int threads, F body) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1F80);  // as a program begins: XLA's threads flush subnormals
    kernel = body;
    memset(shared, 0xA5, sizeof shared);
    for (int b = 0; b < grid; ++b) blockIdx.x = b, run_block(threads);
    _mm_setcsr(mode);
}
static void __syncthreads() { meet(block, (int)fibers.size(), [] {}); }

// ---- a warp together

static u32 *exchange(const u32 *given, int count, const std::function<void(Warp &)> &together) {
    Warp &warp = warps[threadIdx.x / 32];
    memcpy(warp.given[threadIdx.x % 32], given, 4 * count);
    meet(warp.meeting, 32, [&] { together(warp); });
    return warp.taken[threadIdx.x % 32];
}
template <class F> static int reduced(int v, F f) {
    const u32 given = v;
    return (int)*exchange(&given, 1, [&](Warp &w) {
        int all = (int)w.given[0][0];
        for (int lane = 1; lane < 32; ++lane) all = f(all, (int)w.given[lane][0]);
        for (int lane = 0; lane < 32; ++lane) w.taken[lane][0] = all;
    });
}
static int __reduce_max_sync(u32, int v) { return reduced(v, [](int x, int y) { return max(x, y); }); }
static int __reduce_add_sync(u32, int v) { return reduced(v, [](int x, int y) { return x + y; }); }
static int __reduce_min_sync(u32, int v) { return reduced(v, [](int x, int y) { return min(x, y); }); }
static int __all_sync(u32, int v) { return reduced(v != 0, [](int x, int y) { return x & y; }); }

static void __syncwarp() { meet(warps[threadIdx.x / 32].meeting, 32, [] {}); }

static int __any_sync(u32, int v) { return reduced(v != 0, [](int x, int y) { return x | y; }); }

static double of_bf16(u32 bits) {
    const u32 word = bits << 16;
    float f;
    memcpy(&f, &word, 4);
    return f;
}
// A step of an H100's tensor core: terms truncated to 25 bits below the largest exponent, the sum to an f32. An f64 holds it: terms are finite,
// fewer than 2^5, and below 2^27 units
static int own_exponent(double v, int least) { return max(std::ilogb(v), least); }
static float fused_step(float c, const double *x, const double *y, int k) {
    int top = c == 0 ? INT32_MIN : own_exponent(c, -126);
    for (int t = 0; t < k; ++t)
        if (x[t] != 0 && y[t] != 0) top = max(top, own_exponent(x[t], -126) + own_exponent(y[t], -126));
    if (top == INT32_MIN) return 0;
    const int unit = top - 25;
    double sum = std::trunc(std::ldexp((double)c, -unit));
    for (int t = 0; t < k; ++t) sum += std::trunc(std::ldexp(x[t] * y[t], -unit));
    const double v = std::ldexp(sum, unit);
    const float f = (float)v;
    return std::fabs((double)f) > std::fabs(v) ? std::nextafter(f, 0.0f) : f;
}
// k: of one fragment; given: 4 of D, then the registers of A, then those of B
static void mma(float (&d)[4], const u32 *a, const u32 *b, int k) {
    u32 given[12];
    memcpy(given, d, 16), memcpy(given + 4, a, k), memcpy(given + 4 + k / 4, b, k / 2);
    const u32 *taken = exchange(given, 4 + k / 4 + k / 8, [k](Warp &w) {
        for (int lane = 0; lane < 32; ++lane)
            for (int v = 0; v < 4; ++v) {
                const int row = lane / 4 + v / 2 * 8, column = lane % 4 * 2 + v % 2;
                float start;
                memcpy(&start, &w.given[lane][v], 4);
                double x[16], y[16];
                for (int t = 0; t < k; ++t) {
                    x[t] = of_bf16(w.given[row % 8 * 4 + t % 8 / 2][4 + row / 8 + t / 8 * 2] >> t % 2 * 16 & 0xFFFF);
                    y[t] = of_bf16(w.given[column * 4 + t % 8 / 2][4 + k / 4 + t / 8] >> t % 2 * 16 & 0xFFFF);
                }
                const float f = fused_step(start, x, y, k);
                memcpy(&w.taken[lane][v], &f, 4);
            }
    });
    memcpy(d, taken, 16);
}
static void mma_k16(float (&d)[4], Words4 a, u32 b0, u32 b1) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[2] = {b0, b1};
    mma(d, x, y, 16);
}
static void mma_k8(float (&d)[4], u32 a0, u32 a1, u32 b) {
    const u32 x[2] = {a0, a1};
    mma(d, x, &b, 8);
}

// ---- single instructions

template <class TO, class FROM> static TO as(FROM v) {
    TO to;
    static_assert(sizeof to == sizeof v);
    memcpy(&to, &v, sizeof to);
    return to;
}
static float __uint_as_float(u32 v) { return as<float>(v); }
static u32 __float_as_uint(float v) { return as<u32>(v); }
static double __longlong_as_double(s64 v) { return as<double>(v); }
static s64 __double_as_longlong(double v) { return as<s64>(v); }
static int __double2hiint(double v) { return (int)(as<u64>(v) >> 32); }
static double __hiloint2double(int high, int low) { return as<double>((u64)(u32)high << 32 | (u32)low); }
static int __clzll(s64 v) { return v ? __builtin_clzll(v) : 64; }
static int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static u32 __funnelshift_rc(u32 low, u32 high, u32 right) { return (u32)(((u64)high << 32 | low) >> min(right, 32u)); }
static u32 __dp4a(u32 x, u32 y, u32 sum) {
    for (int v = 0; v < 32; v += 8) sum += (x >> v & 0xFF) * (y >> v & 0xFF);
    return sum;
}
template <class F> static u32 by_halves(u32 x, u32 y, F f) { return (u32)(u16)f(x & 0xFFFF, y & 0xFFFF) | (u32)(u16)f(x >> 16, y >> 16) << 16; }
static u32 __vmaxu2(u32 x, u32 y) {
    return by_halves(x, y, [](u32 v, u32 w) { return max(v, w); });
}
static u32 __vminu2(u32 x, u32 y) {
    return by_halves(x, y, [](u32 v, u32 w) { return min(v, w); });
}
static u32 __viaddmax_s16x2(u32 x, u32 y, u32 z) {
    const u32 sums = by_halves(x, y, [](u32 v, u32 w) { return v + w; });
    return by_halves(sums, z, [](u32 v, u32 w) { return max((int16_t)v, (int16_t)w); });
}
static int __float2int_rz(float v) { return std::fabs(v) < 2147483648.0f ? (int)v : v > 0 ? INT32_MAX : v < 0 ? INT32_MIN : 0; }
template <class F> __attribute__((noinline)) static auto toward_zero(F f) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | 0x6000);
    const volatile auto result = f();
    _mm_setcsr(mode);
    return result;
}
template <class T> static T hidden(T v) {  // the compiler computes nothing with it before
    asm volatile("" : "+x"(v));
    return v;
}
static float __fadd_rz(float x, float y) { return toward_zero([=] { return hidden(x) + hidden(y); }); }
static double __dadd_rz(double x, double y) { return toward_zero([=] { return hidden(x) + hidden(y); }); }
static float __fmul_rn(float x, float y) { return x * y; }
static double __dmul_rn(double x, double y) { return x * y; }
static float __fdiv_rn(float x, float y) { return x / y; }
static float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static float __fadd_rn(float x, float y) { return x + y; }
static double __dadd_rn(double x, double y) { return x + y; }
static float __fsub_rn(float x, float y) { return x - y; }
static double __dsub_rn(double x, double y) { return x - y; }
static float __fmaf_rz(float x, float y, float z) { return toward_zero([=] { return __builtin_fmaf(hidden(x), hidden(y), hidden(z)); }); }
static double __fma_rn(double x, double y, double z) { return __builtin_fma(x, y, z); }
static float __double2float_rn(double v) { return (float)v; }
static double __fma_rz(double x, double y, double z) { return toward_zero([=] { return __builtin_fma(hidden(x), hidden(y), hidden(z)); }); }
static float __double2float_rz(double v) { return toward_zero([=] { return (float)hidden(v); }); }

// f16 -> f32 is exact; so is the sum of two in f64
static float from_f16(u32 v) { return (float)as<_Float16>((u16)v); }
static u32 to_f16(float v) { return v != v ? 0x7FFF : as<u16>((_Float16)v); }
static u32 add_f16(u32 x, u32 y) {
    const double sum = (double)from_f16(x) + from_f16(y);
    return sum != sum ? 0x7FFF : as<u16>((_Float16)sum);
}

static void copy_16(void *to, const void *from) { memcpy(to, from, 16); }
static void commit_copies() {}
static void await_copies() {}
static void barrier() { __syncthreads(); }
static void pause() { __syncwarp(); }
template <class T> static T opaque(T v) { return v; }
