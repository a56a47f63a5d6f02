// D = A * B + C by the wmma API: each warp makes one tile of D. One entry for each type and shape of fragment.
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;

template <typename Fragment> __device__ void rounded(Fragment& fragment) {
    for (int i = 0; i < fragment.num_elements; i++) fragment.x[i] = wmma::__float_to_tf32(fragment.x[i]);
}

template <int M, int N, int K, typename Type, typename LayoutB, typename Stored, typename Sum>
__device__ void tile(const Stored* a, const Stored* b, const Sum* c, Sum* d, int n, int k) {
    int row = blockIdx.y * M, column = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * N;
    constexpr bool rows_of_b = std::is_same<LayoutB, wmma::row_major>::value;
    wmma::fragment<wmma::matrix_a, M, N, K, Type, wmma::row_major> a_tile;
    wmma::fragment<wmma::matrix_b, M, N, K, Type, LayoutB> b_tile;
    wmma::fragment<wmma::accumulator, M, N, K, Sum> sum;
    wmma::load_matrix_sync(sum, c + row * n + column, n, wmma::mem_row_major);
    for (int i = 0; i < k; i += K) {
        wmma::load_matrix_sync(a_tile, a + row * k + i, k);
        wmma::load_matrix_sync(b_tile, rows_of_b ? b + i * n + column : b + column * k + i, rows_of_b ? n : k);
        if constexpr (std::is_same<Type, wmma::precision::tf32>::value) rounded(a_tile), rounded(b_tile);
        wmma::mma_sync(sum, a_tile, b_tile, sum);
    }
    wmma::store_matrix_sync(d + row * n + column, sum, n, wmma::mem_row_major);
}

#define GEMM(name, M, N, K, Type, LayoutB, Stored, Sum)                                                             \
    extern "C" __global__ void name(const Stored* a, const Stored* b, const Sum* c, Sum* d, int n, int k) {         \
        tile<M, N, K, Type, LayoutB>(a, b, c, d, n, k);                                                             \
    }

GEMM(wmma_f16, 16, 16, 16, __half, wmma::row_major, __half, float)
GEMM(wmma_f16_sums, 32, 8, 16, __half, wmma::col_major, __half, __half)
GEMM(wmma_bf16, 8, 32, 16, __nv_bfloat16, wmma::row_major, __nv_bfloat16, float)
GEMM(wmma_tf32, 16, 16, 8, wmma::precision::tf32, wmma::col_major, float, float)
GEMM(wmma_s8, 16, 16, 16, signed char, wmma::col_major, signed char, int)
GEMM(wmma_f64, 8, 8, 4, double, wmma::row_major, double, double)
