"""Triton kernels of the operations between matrix products, in the manner of Triton's tutorials and of Liger-Kernel, written anew.

`python compile.py --functional` compiles them with Triton 3.9.0 for sm_90; no GPU is needed for that.
A program computes one row, in softmax several.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def softmax_rows(y, x, x_stride, y_stride, rows, columns, SIZE: tl.constexpr):
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=2):
        places = tl.arange(0, SIZE)
        mask = places < columns
        values = tl.load(x + row * x_stride + places, mask=mask, other=-float("inf"))
        powers = tl.exp(values - tl.max(values, axis=0))
        tl.store(y + row * y_stride + places, powers / tl.sum(powers, axis=0), mask=mask)


@triton.jit
def log_softmax_rows(y, x, stride, columns, SIZE: tl.constexpr):
    row = tl.program_id(0)
    places = tl.arange(0, SIZE)
    mask = places < columns
    values = tl.load(x + row * stride + places, mask=mask, other=-float("inf")).to(tl.float32)
    shifted = values - tl.max(values, axis=0)
    total = tl.sum(tl.exp(shifted), axis=0)
    tl.store(y + row * stride + places, shifted - tl.log(total), mask=mask)


@triton.jit
def layer_norm_rows(y, x, stride, weight, bias, columns, eps, SIZE: tl.constexpr):
    x += tl.program_id(0) * stride
    y += tl.program_id(0) * stride
    total = tl.zeros([SIZE], dtype=tl.float32)
    for start in range(0, columns, SIZE):
        places = start + tl.arange(0, SIZE)
        total += tl.load(x + places, mask=places < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / columns
    squares = tl.zeros([SIZE], dtype=tl.float32)
    for start in range(0, columns, SIZE):
        places = start + tl.arange(0, SIZE)
        values = tl.load(x + places, mask=places < columns, other=0.0).to(tl.float32)
        centred = tl.where(places < columns, values - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, axis=0) / columns + eps)
    for start in range(0, columns, SIZE):
        places = start + tl.arange(0, SIZE)
        mask = places < columns
        gain = tl.load(weight + places, mask=mask)
        shift = tl.load(bias + places, mask=mask)
        values = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + places, (values - mean) * scale * gain + shift, mask=mask)


@triton.jit
def rms_norm_rows(y, y_stride, x, x_stride, weight, columns, eps, offset, GEMMA: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, SIZE)
    mask = places < columns
    loaded = tl.load(x + row * x_stride + places, mask=mask, other=0)
    gain = tl.load(weight + places, mask=mask, other=0)
    values = loaded.to(tl.float32)
    if GEMMA:
        gain = gain.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / columns
    values = values * libdevice.rsqrt(mean + eps)
    if not GEMMA:
        values = values.to(loaded.dtype)
    tl.store(y + row * y_stride + places, (values * (offset + gain)).to(loaded.dtype), mask=mask)


@triton.jit
def cross_entropy_rows(x, x_stride, labels, loss, columns, count, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    x += row * x_stride
    largest = float("-inf")
    total = 0.0
    chosen = tl.load(x + label).cast(tl.float32)
    for start in range(0, columns, SIZE):
        places = start + tl.arange(0, SIZE)
        values = tl.load(x + places, mask=places < columns, other=float("-inf")).cast(tl.float32)
        larger = tl.maximum(largest, tl.max(values))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(values - larger))
        largest = larger
    tl.store(loss + row, (largest + tl.log(total) - chosen) / count)


@triton.jit
def silu_mul_rows(a, b, c, stride, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    places = tl.arange(0, SIZE)
    mask = places < COLUMNS
    gate = tl.load(a + row + places, mask=mask, other=0).to(tl.float32)
    up = tl.load(b + row + places, mask=mask, other=0)
    tl.store(c + row + places, (gate * tl.sigmoid(gate)).cast(up.dtype) * up, mask=mask)


@triton.jit
def gelu_mul_rows(a, b, c, stride, COLUMNS: tl.constexpr, SIZE: tl.constexpr, FORM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * stride
    places = tl.arange(0, SIZE)
    mask = places < COLUMNS
    gate = tl.load(a + row + places, mask=mask, other=0).to(tl.float32)
    up = tl.load(b + row + places, mask=mask, other=0)
    inner = 0.7978845608028654 * (gate + 0.044715 * (gate * gate * gate))
    if FORM == "erf":
        result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif FORM == "tanh":
        result = 0.5 * gate * (1 + libdevice.tanh(inner))
    else:
        result = gate * tl.sigmoid(2 * inner)
    tl.store(c + row + places, result.cast(up.dtype) * up, mask=mask)


@triton.jit
def rotary_rows(q, stride, cos, sin, cos_stride, HEADS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, HALF)
    cosines = tl.load(cos + row * cos_stride + places)
    sines = tl.load(sin + row * cos_stride + places)
    offsets = row * stride + tl.arange(0, HEADS)[:, None] * (2 * HALF) + places[None, :]
    first = tl.load(q + offsets).to(sines.dtype)
    second = tl.load(q + offsets + HALF).to(sines.dtype)
    tl.store(q + offsets, first * cosines - second * sines)
    tl.store(q + offsets + HALF, second * cosines + first * sines)
