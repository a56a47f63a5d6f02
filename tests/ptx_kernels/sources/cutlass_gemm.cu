// Kernels by CUTLASS 4.2: the multistage GEMM of its device library (f16, cp.async, bias by C and ReLU), put together within the kernel, so that it
// takes pointers and not the library's own structure.
// CUTLASS
#include <cutlass/epilogue/thread/linear_combination_relu.h>
#include <cutlass/gemm/kernel/default_gemm.h>

using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using cutlass::gemm::GemmShape;
using Epilogue = cutlass::epilogue::thread::LinearCombinationRelu<cutlass::half_t, 8, float, float>;
using Gemm = cutlass::gemm::kernel::DefaultGemm<
    cutlass::half_t, Row, 8, cutlass::half_t, Column, 8, cutlass::half_t, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    GemmShape<64, 64, 32>, GemmShape<32, 32, 32>, GemmShape<16, 8, 16>, Epilogue,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3, false, cutlass::arch::OpMultiplyAdd>::GemmKernel;

extern "C" __global__ void __launch_bounds__(128)
cutlass_gemm(cutlass::half_t* a, cutlass::half_t* b, cutlass::half_t* c, cutlass::half_t* d, int m, int n, int k, float alpha, float beta) {
    extern __shared__ __align__(128) char memory[];
    static_assert(sizeof(Gemm::SharedStorage) <= 24576, "the manifest says so many bytes");
    cutlass::gemm::GemmCoord tiles((m + 63) / 64, (n + 63) / 64, 1);
    Gemm::Params params({m, n, k}, tiles, {a, k}, {b, k}, {c, n}, {d, n}, {alpha, beta});
    Gemm()(params, *reinterpret_cast<Gemm::SharedStorage*>(memory));
}
