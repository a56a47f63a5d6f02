"""Packing against bit strings, numpy's little-endian views, and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcemu.engine.layouts.packing import CONTAINERS, Container, container, pack_registers, unpack_registers
from tcemu.formats import B1, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, FORMATS, S4, S8, TF32, UE4M3, Format

BATCHES = ((), (2,), (2, 3), (1, 2, 2))
# every format in its default container, and every row of CONTAINERS
PLACED = [(fmt, container(fmt)) for fmt in FORMATS.values()]
PLACED += [(fmt, row) for kind in ("f8f6f4", "mxf8f6f4") for fmt, row in CONTAINERS[kind].items()]
some_places = pytest.mark.parametrize(
    ("fmt", "place"),
    [pytest.param(*case, marks=[pytest.mark.full] if at % 3 else []) for at, case in enumerate(PLACED)],
    ids=lambda x: repr(x) if isinstance(x, Format) else f"{x[0]}+{x[1]}",
)


def _slow_unpack(words, fmt, place):
    """The elements of one lane as Python integers: the registers written out as one string of bits, lowest first."""
    bits = "".join(f"{int(word):032b}"[::-1] for word in words)
    pieces = [bits[at : at + place.container_bits] for at in range(0, len(bits), place.container_bits)]
    return [int(piece[place.shift : place.shift + fmt.bits][::-1], 2) for piece in pieces]


def _integers(codes, fmt):
    """Codes as Python integers, the two words of an f64 as one."""
    codes = np.asarray(codes).astype(object)
    return codes[..., 0] + (codes[..., 1] << 32) if fmt.bits == 64 else codes


@some_places
@settings(deadline=None, max_examples=4)
@given(data=st.data())
def test_unpacking_reads_the_bits_and_packing_writes_them(fmt, place, data):
    batch = data.draw(st.sampled_from(BATCHES))
    shape = (*batch, 4)
    words = data.draw(st.binary(min_size=4 * int(np.prod(shape)), max_size=4 * int(np.prod(shape))))
    registers = np.frombuffer(words, "<u4").reshape(shape)
    codes = unpack_registers(registers, fmt, **place._asdict())
    assert codes.dtype == fmt.dtype
    tail = (2,) if fmt.bits == 64 else ()
    assert codes.shape == (*batch, 4 * 32 // place.container_bits, *tail)
    want = [_slow_unpack(lane, fmt, place) for lane in registers.reshape(-1, 4)]
    assert _integers(codes, fmt).reshape(len(want), -1).tolist() == want

    again = pack_registers(codes, fmt, **place._asdict())
    assert again.dtype == jnp.uint32 and again.shape == shape
    code = ((1 << fmt.bits) - 1) << place.shift
    no_padding = sum(code << at for at in range(0, 32, place.container_bits)) & 0xFFFFFFFF
    np.testing.assert_array_equal(again, registers & np.uint32(no_padding))
    np.testing.assert_array_equal(unpack_registers(again, fmt, **place._asdict()), codes)


@some_places
def test_every_code_of_sixteen_bits_or_fewer_comes_back(fmt, place):
    if fmt.bits > 16:
        codes = np.arange(1 << 16, dtype=np.uint32) * np.uint32(0x00010003)
        codes = np.stack([codes, codes[::-1]], axis=-1) if fmt.bits == 64 else codes
    else:
        per = 32 // place.container_bits
        codes = np.resize(np.arange(1 << fmt.bits), -(-(1 << fmt.bits) // per) * per).astype(fmt.dtype)
    np.testing.assert_array_equal(unpack_registers(pack_registers(codes, fmt, **place._asdict()), fmt, **place._asdict()), codes)


def test_wide_elements_lie_as_in_little_endian_memory():
    rng = np.random.default_rng(0)
    registers = rng.integers(0, 1 << 32, (5, 4), np.uint32)
    np.testing.assert_array_equal(unpack_registers(registers, F16), registers.astype("<u4").view("<u2"))
    np.testing.assert_array_equal(unpack_registers(registers, S8), registers.astype("<u4").view("u1"))
    np.testing.assert_array_equal(unpack_registers(registers, TF32), registers)
    values = np.array([1.5, -0.0, np.pi, 5e-324])
    words = pack_registers(values.view("<u4").reshape(4, 2), F64)
    np.testing.assert_array_equal(np.asarray(words).view("<f8"), values)


def test_element_0_is_lowest():
    assert hex(pack_registers(np.arange(1, 9, dtype=np.uint8), S4)[0]) == "0x87654321"
    assert hex(pack_registers(np.array([1, 2], np.uint16), F16)[0]) == "0x20001"
    assert unpack_registers(np.array([0x80000001], np.uint32), B1).tolist() == [1, *[0] * 30, 1]


@pytest.mark.parametrize(
    ("fmt", "kind", "want", "register"),
    [
        (E2M1, "f8f6f4", (8, 2), "0b00111100001111000011110000111100"),
        (E2M1, "mxf8f6f4", (8, 2), "0b00111100001111000011110000111100"),
        (E2M1, "mxf4", (4, 0), "0b11111111111111111111111111111111"),
        (E2M1, "mxf4nvf4", (4, 0), "0b11111111111111111111111111111111"),
        (E2M1, None, (4, 0), "0b11111111111111111111111111111111"),
        (E3M2, "f8f6f4", (8, 0), "0b00111111001111110011111100111111"),
        (E2M3, "mxf8f6f4", (8, 0), "0b00111111001111110011111100111111"),
        (E4M3, "f8f6f4", (8, 0), "0b11111111111111111111111111111111"),
        (E5M2, "mxf8f6f4", (8, 0), "0b11111111111111111111111111111111"),
        (UE4M3, "mxf4nvf4", (8, 0), "0b01111111011111110111111101111111"),
    ],
)
def test_the_containers_of_the_manual(fmt, kind, want, register):
    place = container(fmt, kind)
    assert place == want
    ones = np.full(32 // place.container_bits, 0xFF, np.uint8)  # more bits than the code has: the rest is cut off
    assert f"{int(pack_registers(ones, fmt, **place._asdict())[0]):#034b}" == register
    full = unpack_registers(np.array([0xFFFFFFFF], np.uint32), fmt, **place._asdict())
    assert set(np.asarray(full).tolist()) == {(1 << fmt.bits) - 1}


def test_signed_and_wide_codes_are_cut_to_the_format():
    minus = np.array([-1, -8, 7, 0, 1, 2, 3, 4], np.int32)
    assert hex(pack_registers(minus, S4)[0]) == "0x4321078f"
    assert hex(pack_registers(np.full(4, 0x1FF, np.uint16), S8)[0]) == "0xffffffff"


def test_code_dtypes_are_the_smallest():
    widths = {fmt.name: fmt.dtype.itemsize * 8 for fmt in FORMATS.values()}
    assert all(width == next(w for w in (8, 16, 32) if w >= min(FORMATS[name].bits, 32)) for name, width in widths.items())


def test_they_trace_under_jit_and_vmap():
    registers = np.random.default_rng(2).integers(0, 1 << 32, (3, 32, 4), np.uint32)
    want = unpack_registers(registers, E2M1, container_bits=8, shift=2)
    got = jax.jit(jax.vmap(lambda r: unpack_registers(r, E2M1, container_bits=8, shift=2)))(registers)
    np.testing.assert_array_equal(got, want)
    back = jax.jit(jax.vmap(lambda c: pack_registers(c, E2M1, container_bits=8, shift=2)))(got)
    np.testing.assert_array_equal(back, registers & np.uint32(0x3C3C3C3C))


U32, U8 = np.zeros((2, 4), np.uint32), np.zeros((2, 4), np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: unpack_registers(U8, S8), TypeError, r"registers: .*uint32\[..., n\].* uint8"),
        (lambda: unpack_registers(U32.astype(np.uint64), S8), TypeError, "registers: .* got dtype uint64"),
        (lambda: unpack_registers(np.uint32(1), S8), ValueError, "registers: .* no axis"),
        (lambda: unpack_registers(U32[:, :3], F64), ValueError, r"registers: .*f64.* two .*\(2, 3\)"),
        (lambda: unpack_registers(U32, E4M3, container_bits=4), ValueError, "container_bits: 4 .*e4m3"),
        (lambda: unpack_registers(U32, E3M2, container_bits=6), ValueError, "container_bits: 6 "),
        (lambda: unpack_registers(U32, E2M1, container_bits=8, shift=5), ValueError, "container_bits: 8 .*shift 5 .*e2m1"),
        (lambda: unpack_registers(U32, E2M1, container_bits=8, shift=-1), ValueError, "with shift -1"),
        (lambda: unpack_registers(U32, F32, container_bits=64), ValueError, "container_bits: 64"),
        (lambda: pack_registers(U8.astype(np.float32), S8), TypeError, "codes: .*s8.* float32"),
        (lambda: pack_registers(U8[:, :3], S8), ValueError, r"multiple of 4, .*s8.* \(2, 3\)"),
        (lambda: pack_registers(np.uint8(1), S8), ValueError, r"codes: .* got shape \(\)"),
        (lambda: pack_registers(U32, F64), ValueError, r"codes: .*uint32\[..., count, 2\] .*f64.* \(2, 4\)"),
        (lambda: pack_registers(np.zeros((4, 2)), F64), TypeError, "codes: .* got dtype float64"),
        (lambda: container(F16, "f8f6f4"), ValueError, "fmt: .kind::f8f6f4 takes e4m3, e5m2, e3m2, e2m3, e2m1; got f16"),
    ],
)
def test_the_errors_name_the_argument(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_container_is_a_row():
    assert container(F64) == Container(64) and container(B1) == Container(1) and container(E3M2) == Container(8)
