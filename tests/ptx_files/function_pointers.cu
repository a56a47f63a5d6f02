// Calls through registers: tables of functions, a choice, and virtual functions. nvcc 13.0 -arch=sm_90 -ptx
typedef float (*F)(float);
__device__ __noinline__ float plus(float x) { return x + 1; }
__device__ __noinline__ float twice(float x) { return x * 2; }
__device__ F table[2] = {plus, twice};
extern "C" __global__ void by_table(float* x) { x[threadIdx.x] = table[threadIdx.x & 1](x[threadIdx.x]); }
extern "C" __global__ void by_choice(float* x, int n) { F f = (int)threadIdx.x < n ? plus : twice; for (int i = 0; i < 3; ++i) x[threadIdx.x] = f(x[threadIdx.x]); }
struct Shape { float scale; __device__ virtual float area(float) const = 0; };
struct Square : Shape { __device__ float area(float x) const override { return scale * x * x; } };
struct Disc : Shape { __device__ float area(float x) const override { return scale * 3 * x * x; } };
extern "C" __global__ void by_virtual(float* x, int n) {
    Square s; s.scale = 2; Disc d; d.scale = 0.5f;
    const Shape* shape = (int)threadIdx.x < n ? (const Shape*)&s : (const Shape*)&d;
    x[threadIdx.x] = shape->area(x[threadIdx.x]);
}
