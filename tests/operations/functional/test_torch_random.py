"""PyTorch's random numbers on a GPU: Philox, dropout, and the words of an H200."""

import hashlib
import json
import lzma
import zlib
from ast import literal_eval
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.attention import attention, attention_backward
from tcemu.operations.functional.torch_cuda.random_numbers import (
    AttentionDropout,
    GpuGenerator,
    attention_mask,
    attention_step,
    bernoulli_of_tensor,
    count_threads,
    drop,
    dropout_mask,
    dropout_scale,
    dropout_vector,
    launch_step,
    philox_words,
    uniform_numbers,
)

GOLDEN = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden/torch_random_h200.json.xz").read_bytes()))
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
HEAD, TAIL = 6000, 3000  # words of a result that were recorded


def digest(words):
    return hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()[:16]


def test_philox_has_its_authors_words():
    """The first counter of key 0: Random123's known answer of philox4x32-10."""
    assert [f"{word:08x}" for word in philox_words(0, 0, 1)[0]] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_an_offset_is_a_counter_of_64_bits():
    later = philox_words(5, 4 << 32, 3)
    assert not (later == philox_words(5, 0, 3)).any(axis=1).all() and (later != philox_words(5, 4, 3)).any()


CALLS = dict.fromkeys(tuple(name.split("#")[0].split("|")) for name in GOLDEN["dropout"])
LARGE, USUAL = 1 << 20, ("float16", "3000001", "0.5")  # the size from which calls run with -m full, but one


@pytest.mark.parametrize(
    ("dtype", "size", "p"),
    [
        pytest.param(dtype, int(size), float(p), marks=pytest.mark.full if int(size) >= LARGE and (dtype, size, p) != USUAL else ())
        for dtype, size, p in CALLS
    ],
)
def test_two_calls_of_dropout_have_the_words_of_an_h200(dtype, size, p):
    """Results and masks, of the second call only its first words and its last mask; the seed is 1234 more than the size."""
    generator = GpuGenerator()
    generator.manual_seed(1234 + size)
    kind = np.dtype(DTYPES[dtype])
    x = (np.arange(size) % 7 + 1).astype(np.float32)
    found = []
    for _ in range(2):
        mask = dropout_mask(*generator.advance(launch_step(size, "H200")), size, p, vector=dropout_vector(size, kind.itemsize))
        found.append((drop(x, mask, dropout_scale(p)).astype(kind), mask))
    (y, mask), (second, other) = found
    parts = [y[:HEAD], mask[:HEAD], second[:HEAD], other[:HEAD], mask[-TAIL:], other[-TAIL:], y[-TAIL:]]
    assert [digest(part) for part in parts] == [GOLDEN["dropout"][f"{dtype}|{size}|{p}#{i}"] for i in range(len(parts))]


def test_a_launch_has_as_many_threads_as_run_at_a_time():
    assert count_threads(1, "H100") == 256 and count_threads(257, "H100") == 512 and count_threads(1 << 30, "H200") == 132 * 2048
    assert launch_step(132 * 2048 * 4, "H200") == 4 and launch_step(132 * 2048 * 4 + 1, "H200") == 8


def test_no_elements_take_no_numbers():
    assert launch_step(0, "H200") == 0 and uniform_numbers(7, 0, 0).shape == dropout_mask(7, 0, 0, 0.5, vector=4).shape == (0,)


def test_single_elements_are_a_launch_apart_and_vectors_are_neighbours():
    words = uniform_numbers(7, 0, 4 * 256, vector=4)
    single = uniform_numbers(7, 0, 1024)  # four blocks: all elements take the first number of their thread
    assert (single[:256] == words.reshape(-1, 4)[:, 0]).all()
    assert (uniform_numbers(7, 0, 1024, vector=2).reshape(-1, 2)[:256] == words.reshape(-1, 4)[:, :2]).all()
    assert (
        dropout_vector(24, 2) == 8
        and dropout_vector(24, 4) == 4
        and dropout_vector(6, 4) == 2
        and dropout_vector(24, 4, is_dense=False) == 1
    )


def test_a_dropped_element_keeps_its_sign_and_infinity_becomes_nan():
    found = drop(np.array([-3.0, 3.0, np.inf], np.float32), np.array([False, True, False]), 2.0)
    assert found[0] == 0 and np.signbit(found[0]) and found[1] == 6 and np.isnan(found[2])


def test_bernoulli_of_a_tensor_takes_an_equal_probability():
    numbers = uniform_numbers(3, 8, 8, vector=4)
    assert bernoulli_of_tensor(3, 8, numbers).all() and not bernoulli_of_tensor(3, 8, np.nextafter(numbers, np.float32(0))).any()


def test_a_generator_without_a_seed_or_after_an_unknown_operator_is_refused():
    generator = GpuGenerator()
    with pytest.raises(NotModelled, match=r"torch\.manual_seed"):
        generator.advance(4)
    generator.manual_seed(-1, 8)
    assert generator.advance(10) == ((1 << 64) - 1, 8) and generator.offset == 20
    generator.lost = "aten.randn"
    with pytest.raises(NotModelled, match=r"aten\.randn"):
        generator.advance(4)
    with pytest.raises(ValueError, match="multiple of 4"):
        generator.manual_seed(0, 3)
    with pytest.raises(NotModelled, match="B200"):
        count_threads(4, "B200")


# ---- attention


def normals(key, dtype, *shapes):
    rng = np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))
    return [rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for shape in shapes]


def spread(y, most=1024):
    """Words at evenly spread places, as tests/gpu_runs/dropout_words.py takes them."""
    words = np.ascontiguousarray(y).reshape(-1).view(f"i{np.asarray(y).dtype.itemsize}")
    return words[np.unique(np.linspace(0, words.size - 1, min(words.size, most)).astype(np.int64))]


MASKS = [name for name in GOLDEN["attention"] if name.startswith("mask")]
WORDS = dict.fromkeys(name.split("#")[0] for name in GOLDEN["attention"] if not name.startswith("mask"))
USUAL_WORDS = tuple(
    f"{name}|(1, 2, 2, 48, 48, 64)|0.1|{causal}"
    for name, causal in (("flash|bfloat16", True), ("efficient|float16", False), ("cudnn|float16", True))
)


@pytest.mark.parametrize("name", MASKS)
def test_attention_drops_the_weights_that_an_h200_drops(name):
    """Recorded as zeros of the output for V = 1, of as many columns as the head size."""
    _, backend, _, shape, p, _ = name.split("#")[0].split("|")
    batch, heads, _, queries, keys, size = literal_eval(shape)
    kept = attention_mask(backend, AttentionDropout(float(p), 91, 0), (batch, heads, queries, keys))
    assert size == keys and digest(np.packbits(kept)) == GOLDEN["attention"][name]


@pytest.mark.parametrize("name", [name if name in USUAL_WORDS else pytest.param(name, marks=pytest.mark.full) for name in WORDS])
def test_attention_with_dropout_has_the_words_of_an_h200(name):
    backend, dtype, text, p, causal = name.split("|")
    batch, heads, key_heads, queries, keys, size = literal_eval(text)
    shapes = (batch, heads, queries, size), *[(batch, key_heads, keys, size)] * 2
    q, k, v = normals(f"w{text}", dtype, *shapes)
    (grad,) = normals(f"g{text}", dtype, shapes[0])
    options = {"backend": backend, "causal": causal == "True", "dropout": AttentionDropout(float(p), 13, 0)}
    out, logarithms = attention(q, k, v, **options)
    found = {"o": out, "lse": logarithms}
    found |= attention_backward(grad, q, k, v, out, logarithms, open_order="lockstep", **options)._asdict().items()
    names = {"q": "dq", "k": "dk", "v": "dv"}
    recorded = {part: f"{name}#{names.get(part, part)}" for part in found if f"{name}#{names.get(part, part)}" in GOLDEN["attention"]}
    assert len(recorded) >= 3 or backend == "flash"
    assert {part: digest(spread(found[part])) for part in recorded} == {part: GOLDEN["attention"][key] for part, key in recorded.items()}


@pytest.mark.parametrize("name", GOLDEN["one query"])
def test_one_query_of_cudnn_has_the_words_of_an_h200(name):
    dtype, text = name.split("|")
    batch, heads, key_heads, keys, size = literal_eval(text)
    q, k, v = normals(f"one{text}", dtype, (batch, heads, 1, size), *[(batch, key_heads, keys, size)] * 2)
    out, logarithms = attention(q, k, v, backend="cudnn")
    assert [digest(spread(out, 4096)), digest(spread(logarithms))] == GOLDEN["one query"][name]


def test_attention_moves_the_generator_as_its_kernels_do():
    steps = [attention_step(name, (2, 3, 130, 128)) for name in ("flash", "efficient", "cudnn")]
    assert steps == [192, 99840, 99840]
    first, later = (attention_mask("efficient", AttentionDropout(0.5, 1, offset), (1, 1, 4, 4)).reshape(-1) for offset in (0, 4))
    assert (first[4:] == later[:-4]).all()
