"""Layouts of the scales of blocks in memory: those that GEMM libraries read, as permutations of a matrix of scale codes.

| name | readers |
|---|---|
| linear | FlashInfer, `SfLayout.layout_linear`: row by row |
| 128x4 | cuBLASLt's block scales; torchao `to_blocked`; FlashInfer, vLLM, SGLang and MSLK: tiles of 128 rows and 4 scales |
| 8x4 | FlashInfer, `SfLayout.layout_8x4`: tiles of 8 rows and 4 scales, for few rows |
| deepgemm | DeepGEMM, packed UE8M0: four exponents along K in an int32, columns of int32 one after the other |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class ScaleLayout(NamedTuple):
    """A layout of scale codes, uint8 [..., rows, scales along K]."""

    rows: int  # the rows are padded to a multiple
    columns: int  # the scales of a row are padded to a multiple
    flatten: Callable[[Array], Array]  # padded matrix [..., R, C] -> [..., R * C], in the order of memory
    restore: Callable[[Array, int, int], Array]  # the inverse; arguments R and C
    source: str


def _rows(x: Array) -> Array:
    return x.reshape(*x.shape[:-2], -1)


def _unrows(x: Array, rows: int, columns: int) -> Array:
    return x.reshape(*x.shape[:-1], rows, columns)


def _tiles_128(x: Array) -> Array:
    """(tile of rows, row / 32 % 4, row % 32), (tile of scales, scale % 4) -> tiles, row % 32, row / 32 % 4, scale % 4."""
    r, c = x.shape[-2:]
    x = x.reshape(*x.shape[:-2], r // 128, 4, 32, c // 4, 4)
    return jnp.moveaxis(x, (-2, -3), (-4, -3)).reshape(*x.shape[:-5], -1)


def _untiles_128(x: Array, rows: int, columns: int) -> Array:
    x = x.reshape(*x.shape[:-1], rows // 128, columns // 4, 32, 4, 4)
    return jnp.moveaxis(x, (-4, -3), (-2, -3)).reshape(*x.shape[:-5], rows, columns)


def _tiles_8(x: Array) -> Array:
    r, c = x.shape[-2:]
    x = x.reshape(*x.shape[:-2], r // 8, 8, c // 4, 4)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-4], -1)


def _untiles_8(x: Array, rows: int, columns: int) -> Array:
    x = x.reshape(*x.shape[:-1], rows // 8, columns // 4, 8, 4)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-4], rows, columns)


def _columns_of_words(x: Array) -> Array:
    r, c = x.shape[-2:]
    return jnp.swapaxes(x.reshape(*x.shape[:-2], r, c // 4, 4), -3, -2).reshape(*x.shape[:-2], -1)


def _uncolumns_of_words(x: Array, rows: int, columns: int) -> Array:
    x = x.reshape(*x.shape[:-1], columns // 4, rows, 4)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-3], rows, columns)


SCALE_LAYOUTS = {
    "linear": ScaleLayout(1, 1, _rows, _unrows, "flashinfer 014327a, quantization_utils.cuh, QuantizationSFLayout::LINEAR"),
    "128x4": ScaleLayout(
        128,
        4,
        _tiles_128,
        _untiles_128,
        "cuBLAS 12.8, 1D block scaling factors layout; torchao 0.18, to_blocked; flashinfer 014327a, get_sf_out_offset_128x4",
    ),
    "8x4": ScaleLayout(8, 4, _tiles_8, _untiles_8, "flashinfer 014327a, get_sf_out_offset_8x4"),
    "deepgemm": ScaleLayout(
        4, 4, _columns_of_words, _uncolumns_of_words, "DeepGEMM 38939a4, pack_ue8m0_to_int; rows are padded to 16 bytes, for TMA"
    ),
}


def arrange_scales(scales: Array, layout: str) -> Array:
    """Put scale codes into the order in which a library reads them.

    Args:
        scales: uint8 [..., rows, scales along K].
        layout: One of `SCALE_LAYOUTS`. Static under `jit`.

    Returns:
        uint8 [..., bytes], padded with zeros to whole tiles.

    Raises:
        ValueError: The layout is unknown, or scales have one axis.

    Source: the layout's `source`.
    """
    row = _find_layout(layout)
    scales = jnp.asarray(scales)
    if scales.ndim < 2:
        raise ValueError(f"scales: got {list(scales.shape)}; expected [..., rows, scales along K]")
    padding = [(0, 0)] * (scales.ndim - 2) + [(0, -scales.shape[-2] % row.rows), (0, -scales.shape[-1] % row.columns)]
    return row.flatten(jnp.pad(scales, padding))


def restore_scales(stored: Array, layout: str, rows: int, columns: int) -> Array:
    """Return the matrix of scale codes from a library's layout: the inverse of `arrange_scales`.

    Args:
        stored: uint8 [..., bytes].
        layout: One of `SCALE_LAYOUTS`.
        rows: Rows of the matrix.
        columns: Scales along K.

    Returns:
        uint8 [..., rows, columns].

    Raises:
        ValueError: The layout is unknown, or stored has another size.

    Source: the layout's `source`.
    """
    row = _find_layout(layout)
    padded = rows + -rows % row.rows, columns + -columns % row.columns
    if stored.shape[-1] != padded[0] * padded[1]:
        raise ValueError(
            f"stored: got {stored.shape[-1]} bytes; {rows} x {columns} scales in the layout {layout} have {padded[0] * padded[1]}"
        )
    return row.restore(jnp.asarray(stored), *padded)[..., :rows, :columns]


def _find_layout(layout: str) -> ScaleLayout:
    if layout not in SCALE_LAYOUTS:
        raise ValueError(f"layout {layout!r}: expected one of {', '.join(SCALE_LAYOUTS)}")
    return SCALE_LAYOUTS[layout]
