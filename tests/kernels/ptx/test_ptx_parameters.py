"""Parameters by value: pointers declared as bytes, structs with pointers and tensor maps in them, and what says which is which."""

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import ptx

HEAD = ".version 8.0 .target sm_90 .address_size 64"
POINTER = f"""{HEAD}
.visible .entry k(.param .align 8 .b8 p[8]) {{
    .reg .b32 %r<3>; .reg .b64 %d<3>;
    ld.param.b64 %d0, [p]; mov.u32 %r0, %tid.x; mul.wide.u32 %d1, %r0, 4; add.u64 %d0, %d0, %d1;
    ld.global.u32 %r1, [%d0]; add.u32 %r1, %r1, 1; st.global.u32 [%d0], %r1; ret; }}"""
# struct { const int* x; int n; int add; struct { int* y; short pad; } inner; int* more[2]; }: y[i] = x[i] + add, more[j][i] = i + j
STRUCT = f"""{HEAD}
.visible .entry k(.param .align 8 .b8 s[48], .param .u64 own) {{
    .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p;
    ld.param.u64 %d0, [s]; ld.param.v2.u32 {{%r1, %r2}}, [s+8]; ld.param.u64 %d1, [s+16]; ld.param.v2.u64 {{%d2, %d3}}, [s+32];
    mov.u32 %r0, %tid.x; setp.ge.u32 %p, %r0, %r1; @%p ret;
    mul.wide.u32 %d4, %r0, 4; add.u64 %d0, %d0, %d4; add.u64 %d1, %d1, %d4; add.u64 %d2, %d2, %d4; add.u64 %d3, %d3, %d4;
    ld.global.u32 %r3, [%d0]; add.u32 %r3, %r3, %r2; st.global.u32 [%d1], %r3;
    st.global.u32 [%d2], %r0; add.u32 %r4, %r0, 1; st.global.u32 [%d3], %r4; ret; }}"""


class Inner(ctypes.Structure):
    _fields_ = (("y", ctypes.POINTER(ctypes.c_int)), ("pad", ctypes.c_short))


class Outer(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int), ("add", ctypes.c_int), ("inner", Inner), ("more", ctypes.c_uint64 * 2))


INNER = np.dtype([("y", "u8"), ("pad", "i2")], align=True)
LAYOUTS = {
    "ctypes": Outer,
    "dtype": np.dtype([("x", "u8"), ("n", "i4"), ("add", "i4"), ("inner", INNER), ("more", "u8", 2)], align=True),
    "objects": np.dtype([("x", "O"), ("n", "i4"), ("add", "i4"), ("inner", INNER), ("more", "O", 2)], align=True),
}


@pytest.mark.parametrize(
    "wrap", [lambda x: x, ptx.BufferPointer, jnp.asarray, lambda x: ptx.BufferPointer(x, 0)], ids=["array", "pointer", "jax", "offset"]
)
def test_a_pointer_may_be_declared_as_eight_bytes(wrap):
    assert ptx.run(POINTER, grid=1, block=4, args=[wrap(np.arange(4, dtype=np.int32))], target="H100")[0].tolist() == [1, 2, 3, 4]


def test_cases_have_pointers_of_eight_bytes():
    data = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert np.array_equal(ptx.run(POINTER, grid=1, block=4, args=[data], target="H100", cases=3)[0], data + 1)


def test_an_array_of_eight_bytes_says_what_it_is():
    data = np.array([5, 7], np.int32)
    with pytest.raises(TypeError, match=r"p: got an array of 8 bytes.*\.b8\[8\].*BufferPointer"):
        ptx.run(POINTER, grid=1, block=1, args=[data], target="H100")
    assert ptx.run(POINTER, grid=1, block=1, args=[ptx.BufferPointer(data)], target="H100")[0].tolist() == [6, 7]
    for null in (bytes(8), np.zeros((), "V8")[()], np.zeros((), "i4,i4")[()], ctypes.c_uint64 * 1):
        value = null() if isinstance(null, type) else null
        with pytest.raises(ptx.OutOfBounds):
            ptx.run(POINTER, grid=1, block=1, args=[value], target="H100")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_struct_has_pointers_to_arrays(layout):
    x, y, more = np.arange(10, 18, dtype=np.int32), np.zeros(8, np.int32), np.zeros(12, np.int32)
    own = np.zeros(8, np.int32)
    values = {"x": ptx.BufferPointer(x, 8), "n": 4, "add": -3, "inner": {"y": y, "pad": 0}, "more": [ptx.BufferPointer(1, 16), more]}
    outputs = ptx.run(STRUCT, grid=1, block=32, args=[ptx.Struct(layout, values), own], target="H100")
    assert len(outputs) == 4, "those of the arguments, then those behind the struct in the order of its fields"
    assert outputs[0].tolist() == [0, 0, 0, 0, 0, 1, 2, 3] and outputs[1].tolist() == x.tolist()
    assert outputs[2].tolist() == [9, 10, 11, 12, 0, 0, 0, 0] and outputs[3].tolist() == [1, 2, 3, 4] + [0] * 8
    same = values | {"more": [y, ptx.BufferPointer(y, 16)], "inner": {"y": x, "pad": 0}}
    outputs = ptx.run(STRUCT, grid=1, block=32, args=[ptx.Struct(layout, same), own], target="H100")
    assert len(outputs) == 3 and outputs[2].tolist() == [0, 1, 2, 3, 1, 2, 3, 4], "an array is returned once"
    with pytest.raises(ptx.OutOfBounds, match=r"s\.inner\.y, which has 8 bytes"):
        ptx.run(STRUCT, grid=1, block=32, args=[ptx.Struct(layout, values | {"inner": {"y": y[:2], "pad": 0}}), own], target="H100")


def test_a_struct_may_hold_a_table_and_nothing():
    behind, own = np.zeros(4, np.int32), np.zeros(8, np.int32)
    table = ptx.PointerTable(np.zeros(2, np.uint64), {8: ptx.BufferPointer(behind)})
    values = {"x": table, "n": 1, "add": 0, "inner": {"y": behind, "pad": 0}, "more": (own, own)}
    outputs = ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(Outer, values), own], target="H100")
    assert [each.dtype for each in outputs] == [np.int32, np.uint64, np.int32, np.int32] and outputs[1][1] > 0
    with pytest.raises(ptx.OutOfBounds):
        ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(Outer, values | {"x": None}), own], target="H100")


VALUES = {"x": None, "n": 4, "add": 0, "inner": {"y": None, "pad": 0}, "more": [0, 0]}


@pytest.mark.parametrize(
    ("layout", "values", "said"),
    [
        (Outer, {"x": None}, "expected a mapping with the fields x, n, add, inner, more"),
        (Outer, VALUES | {"n": np.zeros(3)}, "n: got ndarray; the field has 4 bytes"),
        (Outer, VALUES | {"n": 1.5}, "n: got float; expected an integer"),
        (Outer, VALUES | {"n": 2**32}, "n: got 4294967296; a field of int32 holds"),
        (Outer, VALUES | {"x": "a"}, "x: got str; expected an array, a BufferPointer"),
        (Outer, VALUES | {"inner": {"y": None}}, "inner: got fields y; expected a mapping with the fields y, pad"),
        (Outer, VALUES | {"more": [0]}, "more: got 1 values; expected a sequence of 2"),
        (Outer, VALUES | {"x": ptx.TensorMap(np.zeros(64, np.uint8), "u8", [64], [64])}, "x: got TensorMap of 128 bytes; the field has 8"),
        (np.dtype("u8"), {}, "expected a structured NumPy dtype"),
        (type("Bits", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_int, 3)]}), {"a": 1}, "bit fields"),
        (type("Odd", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_longdouble)]}), {"a": 1}, "a"),
    ],
)
def test_a_value_that_does_not_fit_its_field_is_refused(layout, values, said):
    with pytest.raises((TypeError, ValueError), match=said):
        ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(layout, values), np.zeros(1)], target="H100")


def test_structs_of_other_sizes_and_of_the_cpus_memory_are_refused():
    own = np.zeros(8, np.int32)
    with pytest.raises(TypeError, match="s: got a Struct of 16 bytes; the parameter has 48"):
        ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(Inner, {"y": None, "pad": 0}), own], target="H100")
    with pytest.raises(TypeError, match="s: got Outer, whose pointers lead into the memory of the CPU"):
        ptx.run(STRUCT, grid=1, block=1, args=[Outer(), own], target="H100")
    with pytest.raises(TypeError, match=r"Python objects; give a ptx\.Struct"):
        ptx.run(STRUCT, grid=1, block=1, args=[np.zeros((), LAYOUTS["objects"])[()], own], target="H100")
    with pytest.raises(ValueError, match="s: a Struct is an argument of one launch"):
        ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(Outer, VALUES), own[None]], target="H100", cases=1)
    with pytest.raises(ValueError, match=r"s\.x: it points into argument 5"):
        ptx.run(STRUCT, grid=1, block=1, args=[ptx.Struct(Outer, VALUES | {"x": ptx.BufferPointer(5)}), own], target="H100")


TENSOR = """.version 8.0 .target sm_90a .address_size 64
.visible .entry k(.param .align 64 .b8 s[256]) {
    .reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p; .shared .align 128 .b8 tile[256]; .shared .align 8 .b64 bar;
    mov.u32 %r0, %tid.x; setp.ne.u32 %p, %r0, 0; mov.u32 %r1, tile; mov.u32 %r2, bar; mov.b64 %d0, s; cvta.param.u64 %d1, %d0;
    add.u64 %d1, %d1, 128; ld.param.u64 %d2, [s+8]; ld.param.u32 %r3, [s];
    @!%p mbarrier.init.shared.b64 [%r2], 1; bar.sync 0; @%p bra wait;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256;
    cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {%r3, %r3}], [%r2];
wait: mbarrier.try_wait.parity.shared.b64 %p, [%r2], 0; @!%p bra wait;
    mul.wide.u32 %d3, %r0, 8; add.u64 %d2, %d2, %d3; shl.b32 %r4, %r0, 3; add.u32 %r4, %r1, %r4;
    ld.shared.u64 %d4, [%r4]; st.global.u64 [%d2], %d4; ret; }"""


@pytest.mark.parametrize("opaque", sample_cases([("V128",), ("u8", 16), ("u1", (2, 64))], [("u8", 16)], str))
def test_a_struct_may_hold_a_tensor_map(opaque):
    source, out = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32), np.zeros((8, 16), np.uint16)
    fields = [("at", "i4"), ("pad", "i4"), ("out", "u8"), ("more", "V112"), ("map", *opaque)]
    tensor_map = ptx.TensorMap(source, "u16", [32, 32], [16, 8])
    values = {"at": 3, "pad": 0, "out": out, "more": bytes(112), "map": tensor_map}
    outputs = ptx.run(TENSOR, grid=1, block=32, args=[ptx.Struct(np.dtype(fields), values)], target="H100", checked=True)
    assert np.array_equal(outputs[0], source[3:11, 3:19]) and np.array_equal(outputs[1], source)
