"""`tcemu.cute.run` without CuTe DSL: an engine of Python stands in for that of the package, and its host code launches saved PTX.

tests/kernels/cute_dsl needs the package, and has functions that it compiled.
"""

import ctypes
import struct

import numpy as np
import pytest
from support.tensor_map_bits import encode

import tcemu.cute
from tcemu import ptx
from tcemu.base.errors import NotModelled, Unsupported

TEXT = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry tiles(.param .align 64 .b8 map[128], .param .align 8 .b8 out[8], .param .align 4 .b8 shape[8]) {
    .reg .pred %p; .reg .b32 %r<9>; .reg .b64 %d<5>; .shared .align 128 .b8 tile[256]; .shared .align 8 .b64 bar;
    mov.u32 %r0, %tid.x; mov.u32 %r1, bar; mov.u32 %r2, tile; mov.b64 %d0, map; cvta.param.u64 %d0, %d0; setp.eq.u32 %p, %r0, 0;
    @%p mbarrier.init.shared::cta.b64 [%r1], 1; fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 %r3, %ctaid.x; mul.lo.u32 %r4, %r3, 8; mov.u32 %r5, 0;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 256;
    @%p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r2], [%d0, {%r5, %r4}], [%r1];
wait: mbarrier.try_wait.parity.shared::cta.b64 %p, [%r1], 0; @!%p bra wait;
    mad.lo.u32 %r6, %r0, 4, %r2; ld.shared.u32 %r7, [%r6]; ld.param.u32 %r8, [shape+4]; add.u32 %r7, %r7, %r8;
    ld.param.u64 %d1, [out]; cvta.to.global.u64 %d1, %d1; mad.lo.u32 %r6, %r3, 64, %r0; mad.wide.u32 %d1, %r6, 4, %d1;
    st.global.u32 [%d1], %r7; ret;
}
"""
CONFIG = struct.Struct("<6IQQQI")


class Element:
    width = 32


class Tensor:
    """As much of CuTe DSL's runtime tensor as is read."""

    element_type = Element

    def __init__(self, array):
        self.array, self.data_ptr, self.shape = array, array.ctypes.data, array.shape
        self.stride = tuple(step // array.itemsize for step in array.strides)


class Engine:
    """Host code in Python: it calls the registered functions as compiled code does."""

    def __init__(self, module, opt_level, shared_libs):
        self.module, self.functions = module, {}
        assert not shared_libs

    def raw_register_runtime(self, name, callback):
        self.functions[name] = callback.value

    def call(self, name, *arguments):
        kinds = [ctypes.c_void_p if isinstance(each, int) and each > 1 << 31 else ctypes.c_int32 for each in arguments]
        return ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(self.functions[name])(*arguments)

    def raw_lookup(self, name):
        self.kept = getattr(self, "kept", [])
        self.kept.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(getattr(self, name)))
        return ctypes.cast(self.kept[-1], ctypes.c_void_p).value

    def cuda_init(self, packed):
        pass

    def cuda_load_to_device(self, packed):
        self.kernel, name = ctypes.c_void_p(), ctypes.create_string_buffer(b"tiles")
        self.call("_cudaLibraryGetKernel", ctypes.addressof(self.kernel), 1 << 40, ctypes.addressof(name))
        value = ctypes.c_int32()
        for attribute in self.module.attributes:
            if self.call("_cudaDeviceGetAttribute", ctypes.addressof(value), attribute, 0):
                return
        self.values = value.value

    def lookup(self, name):
        return self.run

    def run(self, packed):
        source, target = (ctypes.c_void_p.from_address(packed[i]).value for i in (0, 1))
        tensor_map = encode("u32", source, [8, 32], [32], [8, 8], [1, 1], mode=self.module.mode) + bytes(64)
        arguments = [tensor_map, struct.pack("<Q", target), struct.pack("<II", 0, 1000)]
        room = ctypes.create_string_buffer(512)
        start = -ctypes.addressof(room) % 64
        places = []
        for data in arguments:
            ctypes.memmove(ctypes.addressof(room) + start, data, len(data))
            places.append(ctypes.addressof(room) + start)
            start += 128
        pointers = (ctypes.c_void_p * 3)(*places)
        attributes = ctypes.create_string_buffer(struct.pack("<i4x3I52x", 4, 1, 1, 1))
        config = ctypes.create_string_buffer(CONFIG.pack(4, 1, 1, 64, 1, 1, 0, 0, ctypes.addressof(attributes), 1))
        launch = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 3)(self.functions["_cudaLaunchKernelEx"])
        status = launch(ctypes.addressof(config), self.kernel.value, ctypes.addressof(pointers))
        ctypes.c_int32.from_address(packed[2]).value = status


class Module:
    def __init__(self, mode=0, attributes=(97,), calls=()):
        self.mode, self.attributes, self.calls = mode, attributes, calls

    def __str__(self):
        return "\n".join(f"llvm.func @{name}(!llvm.ptr) -> i32" for name in ("_cudaLaunchKernelEx", "printf", *self.calls))


class Compiled:
    """As much of a compiled function as is read."""

    function_name = "copied"

    def __init__(self, text=TEXT, **module):
        self.ir_module, self.__ptx__ = Module(**module), text
        self.engine = Engine(self.ir_module, 2, [])

    def generate_execution_args(self, *args):
        self.values = [ctypes.c_void_p(each.data_ptr) for each in args]
        return [ctypes.addressof(value) for value in self.values], []


def arrays():
    whole = np.arange(8 * 32 + 4, dtype=np.uint32)
    offset = -whole.ctypes.data % 16 // 4  # tensors of a map begin at multiples of 16 bytes
    return whole[offset : offset + 256].reshape(32, 8), np.zeros((32, 8), np.uint32)


@pytest.mark.parametrize("mode", (2, pytest.param(0, marks=pytest.mark.full)))
def test_launches_of_host_code_run_on_the_arrays(mode, tmp_path):
    source, target = arrays()
    with ptx.record_launches(tmp_path) as recorder:
        found = tcemu.cute.run(Compiled(mode=mode), Tensor(source), Tensor(target), target="H100", checked=True)
    assert np.array_equal(target, source + 1000)
    (launch,) = found.launches
    assert (launch.kernel, launch.grid, launch.block, launch.cluster) == ("tiles", (4, 1, 1), (64, 1, 1), (1, 1, 1))
    recorded = ptx.read_launch(recorder.files[0])
    assert [list(each.tensor_map.box_dims) for each in recorded.references if each.tensor_map is not None] == [[8, 8]]


def test_tensors_that_share_memory_stay_one():
    """The target is the upper half of the source's own array: the launch sees one array."""
    whole = np.arange(520, dtype=np.uint32)
    offset = -whole.ctypes.data % 16 // 4
    both = whole[offset : offset + 512].reshape(64, 8)
    source, target = both[:32], both[32:]
    before = source.copy()
    tcemu.cute.run(Compiled(), Tensor(both), Tensor(target), target="H100")
    assert np.array_equal(target, before + 1000) and np.array_equal(source, before)


def test_what_stops_a_launch_is_raised():
    source, target = map(Tensor, arrays())
    with pytest.raises(Unsupported, match=r"calls _cudaMallocAsync; known are _cudaLaunchKernelEx"):
        tcemu.cute.run(Compiled(calls=["_cudaMallocAsync"]), source, target, target="H100")
    with pytest.raises(Unsupported, match="attribute 5 of the device"):
        tcemu.cute.run(Compiled(attributes=(97, 5)), source, target, target="H100")
    with pytest.raises(Unsupported, match=r"'copied' has no PTX.*--keep-ptx"):
        tcemu.cute.run(Compiled(text=None), source, target, target="H100")
    with pytest.raises(Unsupported, match=r"has no host code: expected what cute\.compile returned"):
        tcemu.cute.run(print, source, target, target="H100", ptx=Compiled().__ptx__)
    with pytest.raises(NotModelled, match="no tensor map"):
        tcemu.cute.run(Compiled(mode=3), source, target, target="H100")
    with pytest.raises(ptx.OutOfBounds, match="out of bounds"):
        tcemu.cute.run(Compiled(), source, Tensor(np.zeros(8, np.uint32)), target="H100")
