// The quotient and the remainder of 128 bits, by NVIDIA's own code. nvcc 13.0 -arch=sm_90 -ptx
typedef unsigned __int128 u128;
extern "C" __global__ void divide(const u128* a, const u128* b, u128* q, u128* r) { int i = blockIdx.x * blockDim.x + threadIdx.x; q[i] = a[i] / b[i]; r[i] = a[i] % b[i]; }
