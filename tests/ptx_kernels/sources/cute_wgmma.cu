// CuTe (CUTLASS 4.2) on Hopper: wgmma in bf16 from swizzled shared memory, filled by cp.async in three stages; 128 x 64 by two warpgroups.
// A is M x K and B is N x K, by rows; M is 128, N a multiple of 64, K of 64.
// sm_90a only
// CUTLASS
#include <cute/tensor.hpp>
using namespace cute;

extern "C" __global__ void __launch_bounds__(256) cute_wgmma(const bfloat16_t* a, const bfloat16_t* b, float* d, int n, int k) {
    extern __shared__ __align__(1024) char memory[];
    using M = _128;
    using N = _64;
    using K = _64;
    constexpr int stages = 3;
    auto a_layout = tile_to_shape(GMMA::Layout_K_SW128_Atom<bfloat16_t>{}, make_shape(M{}, K{}, Int<stages>{}));
    auto b_layout = tile_to_shape(GMMA::Layout_K_SW128_Atom<bfloat16_t>{}, make_shape(N{}, K{}, Int<stages>{}));
    Tensor a_shared = make_tensor(make_smem_ptr((bfloat16_t*)memory), a_layout);
    Tensor b_shared = make_tensor(make_smem_ptr((bfloat16_t*)memory + cosize_v<decltype(a_layout)>), b_layout);
    Tensor a_tiles = local_tile(make_tensor(make_gmem_ptr(a), make_shape(M{}, k), make_stride(k, _1{})), make_shape(M{}, K{}), make_coord(0, _));
    Tensor b_tiles = local_tile(make_tensor(make_gmem_ptr(b), make_shape(n, k), make_stride(k, _1{})), make_shape(N{}, K{}), make_coord(blockIdx.x, _));
    Tensor d_tile = local_tile(make_tensor(make_gmem_ptr(d), make_shape(M{}, n), make_stride(n, _1{})), make_shape(M{}, N{}), make_coord(0, blockIdx.x));

    auto copy_tiles = make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL<uint128_t>, bfloat16_t>{}, Layout<Shape<_32, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{});
    auto copier = copy_tiles.get_slice(threadIdx.x);
    Tensor a_from = copier.partition_S(a_tiles);
    Tensor b_from = copier.partition_S(b_tiles);
    Tensor a_to = copier.partition_D(a_shared);
    Tensor b_to = copier.partition_D(b_shared);

    auto mma = make_tiled_mma(SM90_64x64x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>{}, Layout<Shape<_2, _1, _1>>{});
    auto multiplier = mma.get_slice(threadIdx.x);
    Tensor a_operand = multiplier.make_fragment_A(multiplier.partition_A(a_shared));
    Tensor b_operand = multiplier.make_fragment_B(multiplier.partition_B(b_shared));
    Tensor d_part = multiplier.partition_C(d_tile);
    Tensor sum = multiplier.make_fragment_C(d_part);
    clear(sum);

    int steps = k / 64;
    auto fetch = [&](int step) {
        if (step < steps) {
            copy(copy_tiles, a_from(_, _, _, step), a_to(_, _, _, step % stages));
            copy(copy_tiles, b_from(_, _, _, step), b_to(_, _, _, step % stages));
        }
        cp_async_fence();
    };
    for (int i = 0; i < stages - 1; i++) fetch(i);
#pragma unroll 1
    for (int i = 0; i < steps; i++) {
        cp_async_wait<stages - 2>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        warpgroup_fence_operand(sum);
        warpgroup_arrive();
        gemm(mma, a_operand(_, _, _, i % stages), b_operand(_, _, _, i % stages), sum);
        warpgroup_commit_batch();
        warpgroup_wait<0>();
        warpgroup_fence_operand(sum);
        __syncthreads();
        fetch(i + stages - 1);
    }
    copy(sum, d_part);
}
