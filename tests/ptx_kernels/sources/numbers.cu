// Arithmetic, type by type, in bits: f32 and f64 in every rounding, f16x2 and bf16x2, conversions, integers of 8 to 64 bits, local arrays.
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void floats(const float* x, const float* y, const float* z, float* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float a = x[i], b = y[i], c = z[i];
    float results[] = {
        __fadd_rn(a, b), __fadd_rz(a, b), __fadd_ru(a, b), __fadd_rd(a, b), __fmul_rn(a, b), __fmul_rz(a, b), __fmul_ru(a, b), __fmul_rd(a, b),
        __fmaf_rn(a, b, c), __fmaf_rz(a, b, c), __fmaf_ru(a, b, c), __fmaf_rd(a, b, c), __fdiv_rn(a, b), __fdiv_rz(a, b), __frcp_rn(a),
        __fsqrt_rn(a), __fsqrt_ru(a), fminf(a, b), fmaxf(a, b), fabsf(a), -b, copysignf(a, b), truncf(a), ceilf(a), floorf(a), rintf(a), __saturatef(a),
        a < b ? 1.0f : a == b ? 2.0f : isnan(a) ? 3.0f : 4.0f,
    };
    for (int j = 0; j < 28; j++) out[j * size + i] = results[j];
}

extern "C" __global__ void doubles(const double* x, const double* y, double* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    double a = x[i], b = y[i];
    double results[] = {
        __dadd_rn(a, b), __dadd_rd(a, b), __dmul_rn(a, b), __dmul_ru(a, b), __fma_rn(a, b, a), __fma_rz(a, b, b), __ddiv_rn(a, b),
        __dsqrt_rn(fabs(a)), __drcp_rn(b), fmin(a, b), fmax(a, b), floor(a), rint(b), (double)(float)a, (double)__double2ll_rn(a), __dsub_rn(a, __dmul_rn(trunc(a / 3), 3)),
    };
    for (int j = 0; j < 16; j++) out[j * size + i] = results[j];
}

// A product and a difference whose rounding is not written: PTX lets the driver fuse them, and an H200's does
extern "C" __global__ void contracted(const double* x, const double* y, double* out, double* other) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    double product;
    asm("mul.f64 %0, %1, %2;" : "=d"(product) : "d"(x[i]), "d"(y[i]));
    asm("sub.f64 %0, %1, %2;" : "=d"(out[i]) : "d"(x[i]), "d"(product));
    asm("mul.rn.f64 %0, %1, %2;" : "=d"(product) : "d"(x[i]), "d"(y[i]));
    asm("sub.rn.f64 %0, %1, %2;" : "=d"(other[i]) : "d"(x[i]), "d"(product));
}

extern "C" __global__ void halves(const __half2* x, const __half2* y, const __half2* z, uint32_t* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __half2 a = x[i], b = y[i], c = z[i];
    __half2 results[] = {
        __hadd2(a, b), __hsub2(a, b), __hmul2(a, b), __hfma2(a, b, c), __hfma2_sat(a, b, c), __hfma2_relu(a, b, c), __hmin2(a, b), __hmax2(a, b),
        __hmax2_nan(a, b), __habs2(a), __hneg2(b), __hgt2(a, b), __hadd2_sat(a, b), __halves2half2(__low2half(a), __high2half(c)),
        __float22half2_rn(__half22float2(a)), __halves2half2(__float2half_rz(__low2float(a) * 1.7f), __float2half_ru(__high2float(b) / 3)),
    };
    for (int j = 0; j < 16; j++) out[j * size + i] = *(uint32_t*)&results[j];
}

extern "C" __global__ void bfloats(const __nv_bfloat162* x, const __nv_bfloat162* y, const __nv_bfloat162* z, uint32_t* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    __nv_bfloat162 a = x[i], b = y[i], c = z[i];
    __nv_bfloat162 results[] = {
        __hadd2(a, b), __hsub2(a, b), __hmul2(a, b), __hfma2(a, b, c), __hfma2_relu(a, b, c), __hmin2(a, b), __hmax2(a, b), __hmax2_nan(a, b),
        __habs2(a), __hneg2(b), __hge2(a, b), __floats2bfloat162_rn(__low2float(a) * 1.1f, __high2float(b) - 0.3f),
        __halves2bfloat162(__float2bfloat16_rz(__low2float(c) * 3.3f), __float2bfloat16_rn(__high2float(c) / 7)),
    };
    for (int j = 0; j < 13; j++) out[j * size + i] = *(uint32_t*)&results[j];
}

extern "C" __global__ void conversions(const float* x, const int64_t* n, int64_t* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float a = x[i];
    int64_t m = n[i];
    int64_t results[] = {
        __float2int_rn(a), __float2int_rz(a), __float2int_ru(a), __float2int_rd(a), __float2uint_rn(a), __float2uint_rz(a), __float2ll_rn(a),
        __float2ll_rd(a), (int64_t)__float2ull_rz(a), __float_as_uint(__int2float_rn((int)m)), __float_as_uint(__int2float_rz((int)m)),
        __float_as_uint(__uint2float_ru((unsigned)m)), __float_as_uint(__ll2float_rn(m)), __float_as_uint(__ull2float_rd(m)),
        __double_as_longlong(__ll2double_rn(m)), __double_as_longlong(__ull2double_rz(m)), __double_as_longlong(__int2double_rn((int)m)),
        (int8_t)m, (uint8_t)m, (int16_t)m, (uint16_t)m, __half_as_ushort(__float2half_rn(a)), __half_as_ushort(__float2half_rz(a)),
        __half_as_ushort(__float2half_rd(a)), __bfloat16_as_ushort(__float2bfloat16_rn(a)), __half_as_ushort(__int2half_rn((int)(m & 0xFFFFF))),
        __half2int_rz(__float2half(a)), (int64_t)(short)a, (int64_t)(unsigned char)(a > 0 && a < 255 ? a : 7),
    };
    for (int j = 0; j < 29; j++) out[j * size + i] = results[j];
}

extern "C" __global__ void integers(const int64_t* x, const int64_t* y, int64_t* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int64_t a = x[i], b = y[i], odd = b | 1;
    int low = (int)a, other = (int)b;
    unsigned u = (unsigned)a, v = (unsigned)b;
    int64_t results[] = {
        a + b, a - b, a * b, a / odd, a % odd, (int64_t)((uint64_t)a / (uint64_t)odd), (int64_t)((uint64_t)a % (uint64_t)odd), __mul64hi(a, b),
        (int64_t)__umul64hi(a, b), a << (b & 63), a >> (b & 63), (int64_t)((uint64_t)a >> (b & 63)), a & b, a | b, a ^ b, ~a, min(a, b), max(a, b),
        (int64_t)umin(u, v), __popcll(a), __clzll(a), __ffsll(a), (int64_t)__brevll(a), low / (other | 1), low % (other | 1), u / (v | 1), u % (v | 1),
        __mulhi(low, other), __umulhi(u, v), (int64_t)low * other, (int64_t)((uint64_t)u * v), __mul24(low, other), __sad(low, other, u),
        __popc(u), __clz(low), __brev(u), __byte_perm(u, v, (unsigned)(a >> 32) & 0x7777), __funnelshift_l(u, v, v), __funnelshift_rc(u, v, u & 63),
        __dp4a(low, other, 17), __dp4a(u, v, 17u), __dp2a_lo(low, other, 3), __hadd(low, other), __rhadd(low, other), abs(low), llabs(b),
        a > b, (uint64_t)a > (uint64_t)b, low << (v & 31), (u & v) | (~u & (unsigned)(a >> 32)), u ^ v ^ (unsigned)(b >> 32),
        (int8_t)a * (int8_t)b, (int16_t)((int16_t)a + (int16_t)b), (uint8_t)((uint8_t)a - (uint8_t)b), __vadd4(u, v), __vmaxs2(u, v),
    };
    for (int j = 0; j < 56; j++) out[j * size + i] = results[j];
}

// PCG and xxHash: 64-bit products, rotations, streams of each thread
extern "C" __global__ void hashes(const uint64_t* x, uint64_t* y, uint32_t* z, int rounds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint64_t state = x[i], hash = 0x9E3779B185EBCA87ull + i;
#pragma unroll 1
    for (int j = 0; j < rounds; j++) {
        uint32_t mixed = (uint32_t)((state >> 18 ^ state) >> 27), turn = state >> 59;
        z[j * gridDim.x * blockDim.x + i] = mixed >> turn | mixed << (-turn & 31);
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        hash ^= state * 0xC2B2AE3D27D4EB4Full;
        hash = (hash << 31 | hash >> 33) * 0x9E3779B185EBCA87ull;
    }
    hash ^= hash >> 33;
    y[i] = hash * 0x165667B19E3779F9ull;
}

// Local arrays by places that are known only when it runs: insertion sort, then a ring of bytes
extern "C" __global__ void local_arrays(const int* x, int* y, const uint8_t* bytes, uint32_t* z) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, held[12];
    for (int j = 0; j < 12; j++) held[j] = x[i * 12 + j];
    for (int j = 1; j < 12; j++) {
        int value = held[j], k = j - 1;
        while (k >= 0 && held[k] > value) {
            held[k + 1] = held[k];
            k--;
        }
        held[k + 1] = value;
    }
    for (int j = 0; j < 12; j++) y[i * 12 + j] = held[j];
    uint8_t ring[16] = {};
    uint32_t sum = 0;
    for (int j = 0; j < 24; j++) {
        uint8_t byte = bytes[i * 24 + j];
        ring[byte & 15] += byte;
        sum = sum * 31 + ring[byte >> 4];
    }
    z[i] = sum;
}
