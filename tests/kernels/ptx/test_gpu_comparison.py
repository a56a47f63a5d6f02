"""The comparison of `pytest --on-gpu`, as far as it needs no GPU: what is encoded for the driver, and which words differ."""

import numpy as np
from ptx_kernels.record import TYPES
from support import gpu_kernels

from tcemu.kernels.ptx.simt.tensor_maps import BITS
from tcemu.ptx import BufferPointer, parse

MODULE = parse(
    ".version 8.0 .target sm_90 .address_size 64\n"
    ".visible .entry k(.param .u64 p, .param .f32 f, .param .s32 i, .param .b32 raw, .param .align 8 .b8 s[16]) { ret; }"
)


def test_every_type_of_a_tensor_map_has_a_number():
    assert TYPES.keys() == BITS.keys()


def test_words_are_compared_as_bits():
    """NaN equals itself, and zeros of other signs differ."""
    x = np.float32([np.nan, 0.0, 1.0, 2.0])
    y = np.float32([np.nan, -0.0, 1.0, 3.0])
    assert gpu_kernels.count_differences([x, x.astype(np.float16)], [y, x.astype(np.float16)]) == [2, 0]


def test_arguments_are_encoded_by_their_types(monkeypatch):
    """A fake driver gives addresses; the bytes are those that a C program would pass."""
    calls = []

    class Driver:
        def __call__(self, name, *arguments):
            calls.append(name)
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = 0x7000

        def load_function(self, text, entry, shared):
            calls.append((text.split()[1], entry, shared))
            return None, None

    monkeypatch.setattr(gpu_kernels, "open_driver", Driver)
    encoded = []
    monkeypatch.setattr(gpu_kernels, "_encode", lambda *given, encode=gpu_kernels._encode: encoded.append(encode(*given)) or encoded[-1])
    array = np.arange(4, dtype=np.uint32)
    args = [BufferPointer(array, offset=8), 1.5, -2, np.float32(1.0), b"0123456789abcdef"]
    (left,) = gpu_kernels.launch_kernel(MODULE, ".version 9.4 rest", grid=(2, 3), block=32, args=args, shared_bytes=64, cluster=(2, 1, 1))
    assert np.array_equal(left, array) and calls[0] == ("9.0", "k", 64) and "cuLaunchKernelEx" in calls
    assert [each.tobytes() for each in encoded] == [
        np.uint64(0x7008).tobytes(), np.float32(1.5).tobytes(), np.int32(-2).tobytes(), np.float32(1.0).tobytes(), b"0123456789abcdef",
    ]  # fmt: skip
