// Shared memory: transposes (padded; swizzled; by movmatrix in registers), bitonic sort, a histogram, a product of f32 tiles, a filter.
#include <cstdint>

extern "C" __global__ void transpose_padded(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[32][33];
    int column = blockIdx.x * 32 + threadIdx.x, row = blockIdx.y * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8)
        if (row + i < rows && column < columns) tile[threadIdx.y + i][threadIdx.x] = x[(row + i) * columns + column];
    __syncthreads();
    column = blockIdx.y * 32 + threadIdx.x, row = blockIdx.x * 32 + threadIdx.y;
    for (int i = 0; i < 32; i += 8)
        if (row + i < columns && column < rows) y[(row + i) * rows + column] = tile[threadIdx.x][threadIdx.y + i];
}

extern "C" __global__ void transpose_swizzled(const uint16_t* x, uint16_t* y, int size) {
    __shared__ uint16_t tile[32][32];
    const uint16_t* from = x + blockIdx.y * 32 * size + blockIdx.x * 32;
    uint16_t* to = y + blockIdx.x * 32 * size + blockIdx.y * 32;
    for (int i = threadIdx.y; i < 32; i += blockDim.y) tile[i][threadIdx.x ^ i] = from[i * size + threadIdx.x];
    __syncthreads();
    for (int i = threadIdx.y; i < 32; i += blockDim.y) to[i * size + threadIdx.x] = tile[threadIdx.x][threadIdx.x ^ i];
}

// Each warp transposes 8 x 8 of 16 bits
extern "C" __global__ void transpose_in_registers(const uint32_t* x, uint32_t* y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t value;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(value) : "r"(x[i]));
    y[i] = value;
}

extern "C" __global__ void bitonic(const int* x, int* y) {
    extern __shared__ int held[];
    int i = threadIdx.x, size = blockDim.x;
    held[i] = x[blockIdx.x * size + i];
    __syncthreads();
    for (int length = 2; length <= size; length *= 2)
        for (int gap = length / 2; gap > 0; gap /= 2) {
            int j = i ^ gap;
            if (j > i) {
                int low = held[i], high = held[j];
                if ((low > high) == ((i & length) == 0)) held[i] = high, held[j] = low;
            }
            __syncthreads();
        }
    y[blockIdx.x * size + i] = held[i];
}

extern "C" __global__ void histogram(const uint8_t* x, unsigned* counts, int size) {
    __shared__ unsigned bins[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < size; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (bins[i] > 0) atomicAdd(&counts[i], bins[i]);
}

extern "C" __global__ void sgemm(const float* a, const float* b, float* d, int n, int k) {
    __shared__ float a_tile[16][17], b_tile[16][16];
    int row = blockIdx.y * 16 + threadIdx.y, column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
#pragma unroll 1
    for (int i = 0; i < k; i += 16) {
        a_tile[threadIdx.y][threadIdx.x] = a[row * k + i + threadIdx.x];
        b_tile[threadIdx.y][threadIdx.x] = b[(i + threadIdx.y) * n + column];
        __syncthreads();
        for (int j = 0; j < 16; j++) sum += a_tile[threadIdx.y][j] * b_tile[j][threadIdx.x];
        __syncthreads();
    }
    d[row * n + column] = sum;
}

__constant__ float weights[7] = {0.03125f, -0.25f, 0.5f, 1.0f, 0.5f, -0.25f, 0.03125f};
__device__ int calls_so_far = 5;

// Seven taps, with what lies outside taken as zero; constant memory, a halo in shared memory, a counter in the module's global memory
extern "C" __global__ void filter(const float* x, float* y, int* numbers, int size) {
    __shared__ float held[128 + 6];
    int i = blockIdx.x * 128 + threadIdx.x;
    for (int j = threadIdx.x; j < 134; j += 128) {
        int place = blockIdx.x * 128 + j - 3;
        held[j] = place >= 0 && place < size ? x[place] : 0;
    }
    __syncthreads();
    if (i >= size) return;
    float sum = 0;
    for (int j = 0; j < 7; j++) sum = fmaf(weights[j], held[threadIdx.x + j], sum);
    y[i] = sum;
    if (threadIdx.x == 0) numbers[blockIdx.x] = (atomicAdd(&calls_so_far, 1) >= 5) + (weights[blockIdx.x % 7] > 0);
}
