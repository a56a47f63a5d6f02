"""Tensor maps of XLA's Triton kernels, which its dump does not write: a map's box is the tile of an operand or result.

The tiles of a fusion's results stand in its configuration, and those of each product along K beside the product; from both the tiles of
what the fusion reads follow. Held to the descriptors that XLA's compiler itself prints (`#triton_xla.tma_descriptor`, with
--xla_dump_emitter_re=triton) for 130 maps of 44 products, and to the words of an H200.

Source: OpenXLA, xla/backends/gpu/codegen/triton/tma_utils.cc (`CreateTmaDescriptor`), xla/codegen/xtile (`GetPaddedTileSizes`: tiles of
powers of two) and xla/stream_executor/cuda/tma_util.cc (types by their size); Triton, NVMMASharedEncodingAttr (the swizzle by the bytes
of a tile's row).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from tcemu.kernels.ptx.simt.tensor_maps import TensorMap
from tcemu.kernels.xla.hlo_text import ArrayShape, Instruction

Tile = tuple[int, ...]
ELEMENTS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}  # by bytes
SWIZZLES, SWIZZLED_ROWS = (128, 64, 32), 8  # bytes of a row, and the least number of rows


def find_tiles(body: Sequence[Instruction], config: Mapping[str, Any]) -> dict[str, Tile]:
    """Return the tile of each value of a fused computation by its name, as far as it is known.

    Args:
        body: The computation.
        config: The fusion's `backend_config`.
    """
    named = {each.name: each for each in body}
    root = next(each for each in body if each.is_root)
    results = [each.name for each in root.operands] if root.opcode == "tuple" else [root.name]
    block = config.get("fusion_backend_config", {}).get("block_level_fusion_config", {})
    pending = [(name, tuple(map(int, tile["sizes"]))) for name, tile in zip(results, block.get("output_tiles", ()), strict=False)]
    found: dict[str, Tile] = {}
    open_names: set[str] = set()  # values that are read by two tiles
    while pending:
        name, tile = pending.pop()
        if name in found:
            open_names |= {name} if found[name] != tile else set()
            continue
        found[name] = tile
        operands = [named[operand.name] for operand in named[name].operands]
        tiles = _operand_tiles(named[name], tile, [each.shape for each in operands])
        pending += [(each.name, of_operand) for each, of_operand in zip(operands, tiles, strict=True) if of_operand is not None]
    return {name: tile for name, tile in found.items() if name not in open_names}


def _operand_tiles(each: Instruction, tile: Tile, shapes: Sequence[ArrayShape]) -> list[Tile | None]:
    """Return the tiles of an instruction's operands; None where they do not follow from the tile of its result."""
    sizes = [shape.sizes for shape in shapes]
    if each.opcode == "dot":
        of_k = tuple(map(int, each.config().get("sizes", ())))
        batch = len(_axes(each, "lhs_batch_dims"))
        rank = len(sizes[0]) - len(_axes(each, "lhs_contracting_dims"))
        free = tile[batch:rank], tile[rank:]
        return [
            _product_tile(_axes(each, f"{side}_batch_dims"), _axes(each, f"{side}_contracting_dims"), tile[:batch], of_k, own)
            for side, own in zip(("lhs", "rhs"), free, strict=True)
        ]
    if each.opcode == "transpose":
        axes = _axes(each, "dimensions")
        return [tuple(tile[axes.index(axis)] for axis in range(len(axes)))]
    if each.opcode == "broadcast":
        return [tuple(tile[axis] for axis in _axes(each, "dimensions"))]
    if each.opcode == "reduce":
        axes, rest = _axes(each, "dimensions"), iter(tile)
        return [tuple(size if axis in axes else next(rest) for axis, size in enumerate(sizes[0])), *[None] * (len(shapes) - 1)]
    assert isinstance(each.shape, ArrayShape)
    if each.opcode in ("bitcast", "reshape"):
        in_rows = all(shape.order == tuple(range(len(shape.sizes))) for shape in (each.shape, shapes[0]))
        return [_reshaped_tile(tile, each.shape.sizes, sizes[0]) if in_rows else None]
    return [tile if of_operand == each.shape.sizes else None for of_operand in sizes]


def _reshaped_tile(tile: Tile, sizes: Tile, wanted: Tile) -> Tile | None:
    """Return the tile of an array of the sizes `wanted` that has the elements of a tile of its reshaped form; None: it is no tile."""
    found: list[int] = []
    at = to = 0
    while at < len(sizes) or to < len(wanted):
        first, start = at, to  # axes of either form with as many elements
        at, to = at + 1, to + 1
        while (x := prod(sizes[first:at])) != (y := prod(wanted[start:to])):
            at, to = at + (x < y), to + (y < x)
        group, of_tile = sizes[first:at], tile[first:at]
        cut = next((axis for axis, length in enumerate(of_tile) if length > 1), len(of_tile))
        if of_tile[cut + 1 :] != group[cut + 1 :]:
            return None
        count, lengths = prod(of_tile), []
        for size in reversed(wanted[start:to]):
            lengths.append(min(count, size))
            if count % lengths[-1] or (count < size and size % count):
                return None
            count //= lengths[-1]
        found += reversed(lengths)
    return tuple(found)


def _product_tile(batch: Tile, contracted: Tile, of_batch: Tile, of_k: Tile, free: Tile) -> Tile | None:
    """Return the tile of a product's operand; `free` has the tiles of the axes that are neither batch nor contracted."""
    if len(of_k) != len(contracted):
        return None
    known = dict(zip((*batch, *contracted), (*of_batch, *of_k), strict=True))
    rest = iter(free)
    return tuple(known[axis] if axis in known else next(rest) for axis in range(len(known) + len(free)))


def _axes(each: Instruction, name: str) -> Tile:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", each.attributes)
    return tuple(map(int, found[1].split(","))) if found and found[1] else ()


def tile_map(shape: ArrayShape, tile: Tile, data: Any, offset: int) -> TensorMap:
    """Return the tensor map of an array.

    Args:
        shape: The array's shape and layout.
        tile: Elements of a tile along each axis.
        data: The array of bytes, or the number of the argument that is it.
        offset: Byte of `data` at which the array begins.
    """
    inward = shape.order[::-1]
    sizes, box = [shape.sizes[axis] for axis in inward], [1 << (tile[axis] - 1).bit_length() for axis in inward]
    row = box[0] * shape.dtype.itemsize
    swizzle = next((size for size in SWIZZLES if row >= size), 0) if prod(box[1:]) >= SWIZZLED_ROWS else 0
    if swizzle:
        box[0] = min(box[0], swizzle // shape.dtype.itemsize)  # Triton's kernels copy a longer row by several boxes
    return TensorMap(data, ELEMENTS[shape.dtype.itemsize], sizes, box, swizzle=swizzle, offset=offset)
