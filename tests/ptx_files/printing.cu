// Functions of the CUDA runtime within a kernel: printf, malloc, free, assert. nvcc 13.0 -arch=sm_90 -ptx
#include <cstdio>
#include <cassert>
#include <cstdlib>
extern "C" __global__ void talk(const int* in, int* out, int n) {
    int i = threadIdx.x;
    const char* word = i % 2 ? "odd" : "even";
    int got = printf("thread %d of %u: %s %5.2f|%-6lld|%c%%%x %e\n", i, n, word, in[i] * 0.5, (long long)in[i] << 33, 'a' + i, in[i], 1.0f / (i + 1));
    int* mine = (int*)malloc(16 * (i + 1));
    for (int j = 0; j <= i; ++j) mine[4 * j] = in[i] + j;
    __syncwarp();
    int sum = 0;
    for (int j = 0; j <= i; ++j) sum += mine[4 * j];
    free(mine);
    int* other = (int*)malloc(8);
    other[1] = sum; sum = other[1];
    free(other);
    assert(in[i] != 77);
    out[i] = sum * 100 + got;
    if (i == 0) printf("done\n");
}
