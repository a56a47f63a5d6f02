"""Tensor maps as drivers encode them, against objects that an H200's driver wrote."""

import numpy as np
import pytest
from support.tensor_map_bits import TYPES, encode, recording

from tcemu.base.errors import NotModelled
from tcemu.kernels.ptx.simt.encoded_tensor_maps import decode_tensor_map
from tcemu.kernels.ptx.simt.tensor_maps import INTERLEAVES, SWIZZLES

PROMOTION = 3 << 17  # bits of word 1 that say how L2 is filled: no result depends on them


def plain(row):
    """The first 64 bytes of a recorded object, without the promotion of L2."""
    words = np.frombuffer(bytes.fromhex(row["object"]), np.uint64).copy()
    words[1] &= np.uint64(~PROMOTION % 2**64)
    return words.tobytes()


def arguments(row):
    shape = {"box": [row["channels"]], **{name: row[name] for name in ("low", "high", "pixels")}} if "low" in row else {"box": row["box"]}
    names = ("address", "dims", "strides", "steps", "swizzle", "interleave", "fill")
    return {"kind": TYPES[row["kind"]], **{name: row[name] for name in names}, **shape}


def test_recorded_objects_are_read_as_their_arguments():
    rows = recording()["tensor maps"]
    refused = 0
    for row in rows:
        assert encode(**arguments(row)) == plain(row)
        data = bytes.fromhex(row["object"]) + bytes(64)
        if "low" in row and row["interleave"]:  # of which nothing is recorded
            refused += 1
            with pytest.raises(ValueError, match="im2col"):
                decode_tensor_map(data)
            continue
        address, found = decode_tensor_map(data)
        box = [row["channels"], row["pixels"]] if "low" in row else row["box"]
        assert (address, found.dtype, found.swizzle, found.interleave) == (
            row["address"], TYPES[row["kind"]], SWIZZLES[row["swizzle"]], INTERLEAVES[row["interleave"]],
        )  # fmt: skip
        assert [list(each) for each in (found.global_dims, found.global_strides, found.box_dims, found.element_strides)] == [
            row["dims"], row["strides"], box, row["steps"],
        ]  # fmt: skip
        assert found.nan_fill == bool(row["fill"])
        assert found.corners == ((row["low"], row["high"]) if "low" in row else None)
    assert len(rows) == 340 and 20 < refused < 60


def test_bytes_that_are_no_map_are_rejected():
    words = np.frombuffer(encode("f16", 4096, [64, 64], [128], [64, 8], [1, 1]) + bytes(64), np.uint64)
    assert decode_tensor_map(words.tobytes()).address == 4096
    for word, bit in ((0, 0), (0, 60), (1, 2), (1, 3), (1, 20), (3, 50), (6, 33), (6, 50), (7, 45)):
        changed = words.copy()
        changed[word] ^= np.uint64(1 << bit)
        with pytest.raises((NotModelled, ValueError)):
            decode_tensor_map(changed.tobytes())
    changed = words.copy()
    changed[1] |= np.uint64(1 << 16)  # the bit of tf32
    with pytest.raises(NotModelled, match="f16 has the bit of tf32"):
        decode_tensor_map(changed.tobytes())
    with pytest.raises(NotModelled, match="no tensor map"):
        decode_tensor_map(b"\xff" * 128)
