// Control flow that parts the threads of a warp: loops of different length with breaks, switches, early exits, calls that are not inlined.
#include <cstdint>

// How many steps of 3n + 1 each number takes to 1; it stops at `limit`, and after eight numbers above `ceiling`
extern "C" __global__ void collatz(const unsigned* x, int* steps, unsigned* highest, int size, int limit, unsigned ceiling) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    unsigned n = x[i], top = n;
    int count = 0, above = 0;
    while (n != 1) {
        if (n & 1) {
            if (n > ceiling && ++above == 8) break;
            n = 3 * n + 1;
        } else {
            n /= 2;
        }
        top = n > top ? n : top;
        if (++count >= limit) break;
    }
    steps[i] = above == 8 ? -count : count;
    highest[i] = top;
}

// Three loops in each other; the outer ones are left from within
extern "C" __global__ void nested_breaks(const int* x, int* found, int* tried, int size) {
    int target = x[blockIdx.x * blockDim.x + threadIdx.x], tries = 0, answer = -1;
    for (int i = 1; i < size && answer < 0; i++) {
        for (int j = i; j < size; j++) {
            if (i * i + j * j > target) break;
            for (int k = j; k < size; k++) {
                tries++;
                int sum = i * i + j * j + k * k;
                if (sum > target) break;
                if (sum == target) {
                    answer = i << 16 | j << 8 | k;
                    goto next;
                }
                if (tries % 17 == 3) continue;
                tries += k & 1;
            }
        }
    next:;
    }
    found[blockIdx.x * blockDim.x + threadIdx.x] = answer;
    tried[blockIdx.x * blockDim.x + threadIdx.x] = tries;
}

// A small machine: each thread runs its own program of 16 instructions, by a switch in a loop
extern "C" __global__ void interpreter(const uint8_t* programs, const unsigned* x, unsigned* y, int budget) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, at = 0;
    const uint8_t* program = programs + i * 16;
    unsigned value = x[i], other = i;
    for (int step = 0; step < budget; step++) {
        uint8_t code = program[at];
        at = (at + 1) & 15;
        switch (code & 15) {
            case 0: value += other; break;
            case 1: value *= other | 1; break;
            case 2: value ^= code * 0x01010101u; break;
            case 3: { unsigned held = value; value = other; other = held; break; }
            case 4: value = value >> (code >> 4) | value << (32 - (code >> 4) & 31); break;
            case 5: if (value & 1) at = code >> 4; break;
            case 6: if (value > other) at = (at + 1) & 15; break;
            case 7: other = __popc(value) + (code >> 4); break;
            case 8: value = value % (other | 1); break;
            case 9: y[i] = value ^ other; return;
            default: other -= value >> 3;
        }
    }
    y[i] = value;
}

struct Pair { int low, high; };

__noinline__ __device__ int greatest_divisor(int a, int b) {
    while (b != 0) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

__noinline__ __device__ Pair extremes(const int* x, int size) {
    Pair result = {x[0], x[0]};
    for (int i = 1; i < size; i++) {
        if (x[i] < result.low) result.low = x[i];
        if (x[i] > result.high) result.high = x[i];
    }
    return result;
}

__noinline__ __device__ float polynomial(const float (&coefficients)[4], float x) {
    float y = coefficients[3];
    for (int i = 2; i >= 0; i--) y = y * x + coefficients[i];
    return y;
}

// Calls of functions of the module, in parts of a warp, with structures and with arrays on the stack
extern "C" __global__ void calls(const int* x, int* y, float* z, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    Pair pair = extremes(x + i * width, width);
    int divisor = 0;
    if (i % 3 != 0) divisor = greatest_divisor(abs(pair.low) + 1, abs(pair.high) + 1);
    else if (i % 2) divisor = -greatest_divisor(abs(pair.high), 12);
    float coefficients[4];
    for (int j = 0; j < 4; j++) coefficients[j] = x[i * width + j] * 0.25f;
    y[2 * i] = divisor;
    y[2 * i + 1] = pair.high - pair.low;
    z[i] = polynomial(coefficients, 0.5f + i);
}
