"""Saved files are read strictly: what another program, a broken disk or a hostile hand wrote raises DamagedFile."""

import io
import json
import lzma
import re
import zipfile

import numpy as np
import pytest

from tcemu.base.saved_files import DamagedFile, check_members, decompress_json, pack_archive, parse_json, read_array, unpack_archive

NAMES = re.compile(r"(header|counts|case_\d+)\.npy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"a": NaN}', "NaN"),
        ("[-Infinity]", "Infinity"),
        ("[" * 100_000, "nested"),
        ("{", "Expecting"),
        (b"\xff", "decode"),
    ],
)
def test_json_that_is_not_strict_is_rejected(text, message):
    with pytest.raises(DamagedFile, match=message):
        parse_json(text)


def test_members_are_exactly_the_expected_ones():
    assert check_members("x", {"a": 1, "b": 2}, ("a", "b")) == {"a": 1, "b": 2}
    with pytest.raises(DamagedFile, match=r"unknown \['c'\] and missing \['b'\]"):
        check_members("x", {"a": 1, "c": 2}, ("a", "b"))
    with pytest.raises(DamagedFile, match="expected an object"):
        check_members("x", [], ("a",))


def test_compressed_json():
    packed = lzma.compress(json.dumps([1, "two"]).encode())
    assert decompress_json(packed) == [1, "two"]
    for damaged in (packed[:-5], b"", b"text", lzma.compress(b" " * (1 << 25))):
        with pytest.raises(DamagedFile):
            decompress_json(damaged)


def test_an_archive_is_read_as_it_was_packed():
    counts = np.arange(6).reshape(2, 3)
    packed = pack_archive({"format": 1}, {"counts": counts, "case_7": np.ones(4, np.uint8)})
    header, members = unpack_archive(packed, NAMES, skipped="case_")
    assert header == {"format": 1} and list(members) == ["counts"]
    assert (read_array(members["counts"], np.int64, (2, 3)) == counts).all()
    for dtype, shape in ((np.int32, (2, 3)), (np.int64, (3, 2)), (np.int64, None)):
        with pytest.raises(DamagedFile):
            read_array(members["counts"], dtype, shape)


@pytest.mark.parametrize("names", [{}, {"header.npy": b"", "odd.npy": b""}])
def test_archives_with_other_members_are_rejected(names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in names.items():
            archive.writestr(name, content)
    with pytest.raises(DamagedFile, match=r"missing|unexpected"):
        unpack_archive(buffer.getvalue(), NAMES)
