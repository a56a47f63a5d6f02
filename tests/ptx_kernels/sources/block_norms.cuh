// Norms of one row a thread block, in the manner of vLLM and PyTorch, written anew. DTYPE, VECTOR: element type, neighbours of a thread.
// `python compile.py --block-norms` compiles them with NVRTC for sm_90.

#include <cub/block/block_reduce.cuh>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct alignas(sizeof(DTYPE) * VECTOR) Vector {
    DTYPE at[VECTOR];
};

// A thread adds the squares of its elements one after the other; CUB adds the threads.
extern "C" __global__ void rms_norm(DTYPE* y, const DTYPE* x, const DTYPE* weight, float eps, int columns) {
    __shared__ float root;
    const Vector* row = reinterpret_cast<const Vector*>(x + (size_t)blockIdx.x * columns);
    float total = 0.0f;
    for (int i = threadIdx.x; i < columns / VECTOR; i += blockDim.x) {
        Vector part = row[i];
#pragma unroll
        for (int j = 0; j < VECTOR; j++) {
            float value = (float)part.at[j];
            total += value * value;
        }
    }
    using Reduce = cub::BlockReduce<float, 1024>;
    __shared__ typename Reduce::TempStorage storage;
    total = Reduce(storage).Reduce(total, cuda::std::plus<>{}, blockDim.x);
    if (threadIdx.x == 0) root = rsqrtf(total / columns + eps);
    __syncthreads();
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = (float)x[(size_t)blockIdx.x * columns + i];
        y[(size_t)blockIdx.x * columns + i] = (DTYPE)(value * root) * weight[i];
    }
}

struct Moments {
    float mean, squares, count;
};

__device__ Moments with_value(float value, Moments m) {
    float delta = value - m.mean;
    float count = m.count + 1.0f;
    float mean = m.mean + delta * (1.0f / count);
    return {mean, m.squares + delta * (value - mean), count};
}

__device__ Moments joined(Moments b, Moments a) {
    float delta = b.mean - a.mean;
    float count = a.count + b.count;
    if (!(count > 0.0f)) return {0.0f, 0.0f, count};
    float scale = 1.0f / count;
    float share_a = a.count * scale, share_b = b.count * scale;
    return {share_a * a.mean + share_b * b.mean, a.squares + b.squares + delta * delta * a.count * share_b, count};
}

// Welford's moments: of a thread's elements one after the other, of lanes 16, 8, ... apart, of warps in halves.
extern "C" __global__ void layer_norm(DTYPE* y, const DTYPE* x, const DTYPE* weight, const DTYPE* bias, float eps, int columns) {
    __shared__ Moments shared[32];
    const Vector* row = reinterpret_cast<const Vector*>(x + (size_t)blockIdx.x * columns);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Moments m = {0.0f, 0.0f, 0.0f};
    for (int i = threadIdx.x; i < columns / VECTOR; i += blockDim.x) {
        Vector part = row[i];
#pragma unroll
        for (int j = 0; j < VECTOR; j++) m = with_value((float)part.at[j], m);
    }
    for (int apart = 16; apart > 0; apart >>= 1) {
        Moments other = {__shfl_down_sync(~0u, m.mean, apart), __shfl_down_sync(~0u, m.squares, apart), __shfl_down_sync(~0u, m.count, apart)};
        m = joined(m, other);
    }
    for (int apart = warps / 2; apart > 0; apart /= 2) {
        if (lane == 0 && warp >= apart && warp < 2 * apart) shared[warp - apart] = m;
        __syncthreads();
        if (lane == 0 && warp < apart) m = joined(m, shared[warp]);
        __syncthreads();
    }
    if (threadIdx.x == 0) shared[0] = {m.mean, m.squares / (float)columns, 0.0f};
    __syncthreads();
    float mean = shared[0].mean, root = rsqrtf(shared[0].squares + eps);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        float value = (float)x[(size_t)blockIdx.x * columns + i];
        y[(size_t)blockIdx.x * columns + i] = (DTYPE)((float)weight[i] * (root * (value - mean)) + (float)bias[i]);
    }
}
