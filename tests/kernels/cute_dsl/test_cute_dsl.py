"""Compiled functions of CuTe DSL, where it is installed (extra `cute`). tests/kernels/ptx/test_cute_launches.py needs no package."""

import numpy as np
import pytest

pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed: the extra `cute`")

import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack
from kernels.cute_dsl.cute_kernels import TiledCopy, scaled_sum

import tcemu.cute
from tcemu import ptx
from tcemu.base.errors import Unsupported

OPTIONS = "--keep-ptx --gpu-arch=sm_90a"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def tensors(*arrays):
    return [from_dlpack(array, assumed_align=16) for array in arrays]


def test_launches_follow_each_other_and_change_the_arrays():
    rng = np.random.default_rng(0)
    x, y, z = (rng.normal(size=300).astype(np.float32) for _ in range(3))
    given = tensors(x, y, z)
    compiled = cute.compile(scaled_sum, *given, 1.0, options=OPTIONS)
    expected_x = x.copy()
    found = tcemu.cute.run(compiled, *given, 2.5, target="H100", checked=True)
    fused = lambda a, b, c: (np.float64(a) * b + c).astype(np.float32)  # 48 bits of a product, and a sum: rounded once
    assert np.array_equal(z, fused(np.float32(2.5), fused(np.float32(2.5), x, y), y)) and np.array_equal(x, expected_x)
    assert [(each.grid, each.block) for each in found.launches] == [((3, 1, 1), (128, 1, 1))] * 2
    assert "Launches on sm_90a" in str(found) and found.records()[0]["grid"] == "3 x 1 x 1"


def test_tensor_maps_are_those_of_the_host_code(tmp_path):
    source, target = np.arange(64 * 128, dtype=np.float32).reshape(64, 128), np.zeros((64, 128), np.float32)
    given = tensors(source, target)
    compiled = cute.compile(TiledCopy(), *given, options=OPTIONS)
    with ptx.record_launches(tmp_path) as recorder:
        tcemu.cute.run(compiled, *given, target="H100", checked=True)
    assert np.array_equal(target, source)
    maps = [each.tensor_map for each in ptx.read_launch(recorder.files[0]).references if each.tensor_map is not None]
    assert [(list(each.global_dims), list(each.box_dims), each.dtype) for each in maps] == [([128, 64], [64, 32], "f32")] * 2


def test_a_function_without_ptx_says_how_to_keep_it():
    given = tensors(*(np.zeros(8, np.float32) for _ in range(3)))

    class Forgotten:
        function_name, __ptx__ = "forgotten", None

    with pytest.raises(Unsupported, match="--keep-ptx"):
        tcemu.cute.run(Forgotten(), *given, 1.0, target="H100")
