// What follows a product: bias and ReLU, GELU, a residual, quantisation to FP8 and to int8. A and B as in block_tile.cuh.
// use_fast_math
#include <cuda_fp8.h>
#include "block_tile.cuh"

MMA(F16, float, "f", "m16n8k16.row.col.f32.f16.f16.f32")
MMA(S8, int, "r", "m16n8k32.row.col.s32.s8.s8.s32")

extern "C" __global__ void bias_relu(const void* a, const void* b, const __half* bias, __half* d, int n, int row_bytes) {
    float sum[2][4] = {};
    block_tile<F16>(a, b, row_bytes, sum);
    each_pair(sum, [=](int row, int column, float first, float second) {
        float2 added = __half22float2(*(const __half2*)&bias[column]);
        *(__half2*)&d[row * n + column] = __floats2half2_rn(fmaxf(first + added.x, 0), fmaxf(second + added.y, 0));
    });
}

// tanh.approx: not exact
extern "C" __global__ void gelu(const void* a, const void* b, const float* bias, __nv_bfloat16* d, int n, int row_bytes) {
    float sum[2][4] = {};
    block_tile<F16>(a, b, row_bytes, sum);
    auto activated = [](float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); };
    each_pair(sum, [=](int row, int column, float first, float second) {
        float x = activated(first + bias[column]), y = activated(second + bias[column + 1]);
        *(__nv_bfloat162*)&d[row * n + column] = __floats2bfloat162_rn(x, y);
    });
}

extern "C" __global__ void residual(const void* a, const void* b, const __half* old, __half* d, int n, int row_bytes, float alpha, float beta) {
    float sum[2][4] = {};
    block_tile<F16>(a, b, row_bytes, sum);
    each_pair(sum, [=](int row, int column, float first, float second) {
        float2 before = __half22float2(*(const __half2*)&old[row * n + column]);
        *(__half2*)&d[row * n + column] = __floats2half2_rn(alpha * first + beta * before.x, alpha * second + beta * before.y);
    });
}

// On sm_80 cuda_fp8.h rounds by integer arithmetic, on sm_90a by cvt.
extern "C" __global__ void fp8_out(const void* a, const void* b, __nv_fp8x2_storage_t* d, int n, int row_bytes, float scale) {
    float sum[2][4] = {};
    block_tile<F16>(a, b, row_bytes, sum);
    each_pair(sum, [=](int row, int column, float first, float second) {
        d[(row * n + column) / 2] = __nv_cvt_float2_to_fp8x2(make_float2(first * scale, second * scale), __NV_SATFINITE, row % 2 ? __NV_E5M2 : __NV_E4M3);
    });
}

// A scale for each column, a zero point, saturation to int8
extern "C" __global__ void requantised(const void* a, const void* b, const int* bias, const float* scale, char2* d, int n, int row_bytes, int zero) {
    int sum[2][4] = {};
    block_tile<S8>(a, b, row_bytes, sum);
    auto narrow = [=](int value, int column) {
        return (signed char)min(max(__float2int_rn(__int2float_rn(value + bias[column]) * scale[column]) + zero, -128), 127);
    };
    each_pair(sum, [=](int row, int column, int first, int second) {
        d[(row * n + column) / 2] = make_char2(narrow(first, column), narrow(second, column + 1));
    });
}
