// Every shuffle, in whole warps and in segments of 8, with lanes that lie outside; a transpose and a broadcast by shuffles.
#include <cstdint>

extern "C" __global__ void shuffles(const int* x, int* y, const double* wide, double* wide_out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, value = x[i];
    int* to = y + i * 8;
    to[0] = __shfl_sync(~0u, value, 5);
    to[1] = __shfl_sync(~0u, value, value & 31);
    to[2] = __shfl_sync(~0u, value, lane * 3, 8);
    to[3] = __shfl_up_sync(~0u, value, 3);
    to[4] = __shfl_up_sync(~0u, value, 2, 8);
    to[5] = __shfl_down_sync(~0u, value, 7);
    to[6] = __shfl_down_sync(~0u, value, 3, 16);
    to[7] = __shfl_xor_sync(~0u, value, 21);
    double sum = wide[i];
    for (int j = 1; j < 32; j *= 2) sum += __shfl_xor_sync(~0u, sum, j);
    wide_out[i] = sum;
    if (lane % 2) {
        int part = __shfl_xor_sync(0xAAAAAAAAu, value, 2);  // the odd lanes alone
        to[7] += part;
    }
}
