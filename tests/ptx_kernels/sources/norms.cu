// Layer norm of f16 rows (a block a row, exact: sqrt and division are rounded), RMS norm (a warp a row, rsqrt.approx: not exact).
#include <cuda_fp16.h>

extern "C" __global__ void layer_norm(const __half* x, const float* gain, const float* bias, __half* y, int columns, float epsilon) {
    __shared__ float sums[2][4];
    x += blockIdx.x * columns, y += blockIdx.x * columns;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = __half2float(x[i]);
        sum += value;
        squares += value * value;
    }
    for (int i = 16; i > 0; i /= 2) {
        sum += __shfl_down_sync(~0u, sum, i);
        squares += __shfl_down_sync(~0u, squares, i);
    }
    if (threadIdx.x % 32 == 0) sums[0][threadIdx.x / 32] = sum, sums[1][threadIdx.x / 32] = squares;
    __syncthreads();
    sum = sums[0][0] + sums[0][1] + sums[0][2] + sums[0][3];
    squares = sums[1][0] + sums[1][1] + sums[1][2] + sums[1][3];
    float mean = sum / columns, scale = 1 / sqrtf(squares / columns - mean * mean + epsilon);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) y[i] = __float2half((__half2float(x[i]) - mean) * scale * gain[i] + bias[i]);
}

extern "C" __global__ void rms_norm(const float4* x, const float4* gain, float4* y, float epsilon) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 v = x[row * 32 + lane], g = gain[lane];
    float sum = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
    float scale = rsqrtf(sum / 128 + epsilon);
    y[row * 32 + lane] = make_float4(v.x * scale * g.x, v.y * scale * g.y, v.z * scale * g.z, v.w * scale * g.w);
}
