// Functions that PTX allows an error, each alone; functions of the C library, some of which have one of these within.
#include <cstdint>
#include <cuda_fp16.h>

extern "C" __global__ void approximations(const float* x, float* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float a = x[i];
    float results[10];
    asm("rcp.approx.f32 %0, %1;" : "=f"(results[0]) : "f"(a));
    asm("sqrt.approx.f32 %0, %1;" : "=f"(results[1]) : "f"(a));
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(results[2]) : "f"(a));
    asm("ex2.approx.f32 %0, %1;" : "=f"(results[3]) : "f"(a));
    asm("lg2.approx.f32 %0, %1;" : "=f"(results[4]) : "f"(a));
    asm("sin.approx.f32 %0, %1;" : "=f"(results[5]) : "f"(a));
    asm("cos.approx.f32 %0, %1;" : "=f"(results[6]) : "f"(a));
    asm("tanh.approx.f32 %0, %1;" : "=f"(results[7]) : "f"(a));
    asm("div.approx.f32 %0, %1, %2;" : "=f"(results[8]) : "f"(1.7f), "f"(a));
    asm("div.full.f32 %0, %1, %2;" : "=f"(results[9]) : "f"(1.7f), "f"(a));
    for (int j = 0; j < 10; j++) out[j * size + i] = results[j];
}

// Exact in every step: sinf reduces large arguments by a product of 192 bits, in a local array
extern "C" __global__ void sines(const float* x, float* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = sinf(x[i]);
    out[size + i] = atan2f(x[i], 0.75f);
    out[2 * size + i] = log1pf(fabsf(x[i]));
}

// With ex2.approx or lg2.approx somewhere within
extern "C" __global__ void exponentials(const float* x, float* out, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = expf(x[i]);
    out[size + i] = tanhf(x[i]);
    out[2 * size + i] = erff(x[i]);
    out[3 * size + i] = cbrtf(x[i]);
}
