"""CuTe DSL functions of the tests: a scaled sum with shapes known at run time, and a copy of tiles by tensor maps."""

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass.cute.nvgpu import cpasync

THREADS, TILE = 128, (32, 64)


@cute.kernel
def _scaled_sum(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    place = block * THREADS + thread
    if place < cute.size(z):
        z[place] = factor * x[place] + y[place]


@cute.jit
def scaled_sum(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor, factor: cutlass.Float32):
    """z = factor * x + y, and then z = factor * z + y: two launches."""
    grid = (cute.ceil_div(cute.size(z), THREADS), 1, 1)
    _scaled_sum(x, y, z, factor).launch(grid=grid, block=(THREADS, 1, 1))
    _scaled_sum(z, y, z, factor).launch(grid=grid, block=(THREADS, 1, 1))


class TiledCopy:
    """Tiles of a matrix, loaded by one tensor map and stored by another."""

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor):
        layout = cute.make_ordered_layout(TILE, order=(1, 0))
        load, loaded = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, TILE)
        store, stored = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), target, layout, TILE)
        tiles = cute.ceil_div(source.shape, TILE)
        self.kernel(load, loaded, store, stored, layout).launch(grid=(tiles[0], tiles[1], 1), block=(32, 1, 1))

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, source: cute.Tensor, store: cute.CopyAtom, target: cute.Tensor, layout: cute.Layout):
        row, column, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        memory = utils.SmemAllocator()
        barrier = memory.allocate_array(cutlass.Int64, 1)
        tile = memory.allocate_tensor(cutlass.Float32, layout, byte_alignment=128)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        place = (row, column)
        shared, from_global = cpasync.tma_partition(
            load, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(cute.local_tile(source, TILE, place), 0, 2)
        )
        shared_out, to_global = cpasync.tma_partition(
            store, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(cute.local_tile(target, TILE, place), 0, 2)
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 4 * TILE[0] * TILE[1])
        cute.copy(load, from_global, shared, tma_bar_ptr=barrier)
        cute.arch.mbarrier_wait(barrier, 0)
        with cute.arch.elect_one():
            cute.copy(store, shared_out, to_global)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
