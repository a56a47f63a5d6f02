"""Products in float32 as PyTorch computes them: which kernel a layer gets, and words of products with one row on an H200.

`torch_float32_h200.json.xz` has some words of 208 products and digests of attention (tests/gpu_runs/float32_products.py).
"""

import json
import lzma
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.product_kernels import TorchProduct, order_of_kernels
from tcemu.uses.replay.kernel_choices import proposed_orders
from tcemu.uses.replay.torch_products import (
    RECORDED,
    RULE,
    SMALL_LAYERS_FILE,
    choose_kernel,
    matmul,
    proposed_choice,
    recorded_launches,
    recorded_vectors,
    vector_choice,
)

GOLDEN = Path(__file__).parents[2] / "golden/torch_float32_h200.json.xz"


@cache
def recorded():
    return json.loads(lzma.decompress(GOLDEN.read_bytes()))


def draw(which, call, shape):
    key = f"{which}{call.m}x{call.k}x{call.n}"
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32)


def known_vectors():
    """The recorded products with one row whose kernel is known, by their text."""
    found = {}
    for product, index, words in recorded()["products"]:
        call = TorchProduct(*product)
        try:
            choose_kernel(call)
        except NotModelled:
            continue
        if call.m == 1:
            found[str(call)] = call, index, words
    return found


CHEAP = ("1 x 576 x 64 (M x K x N) in float32, layout 'rc' with a bias", "1 x 384 x 384 (M x K x N) in float32, layout 'rr'")


@pytest.mark.parametrize("name", sample_cases(sorted(known_vectors()), CHEAP))
def test_products_with_one_row_have_the_words_of_an_h200(name):
    call, index, words = known_vectors()[name]
    a, b = draw("a", call, (1, call.k)), draw("b", call, (call.k, call.n)) * np.float32(call.k**-0.5)
    columns = np.array(index) % call.n
    kept = np.unique(columns)
    bias = np.zeros(len(kept), np.float32) if call.addend else None
    if call.batch > 1:
        a, b = (np.stack([x] * call.batch) for x in (a, b))
    choice = choose_kernel(call)
    from tcemu.uses.replay.torch_products import multiply_as_chosen

    y = np.asarray(multiply_as_chosen(choice._replace(recipe=choice.recipe.without_shape()), a, b[..., kept], bias)).view(np.int32)
    assert y.reshape(-1, len(kept))[0][np.searchsorted(kept, columns)].tolist() == words


def test_most_recorded_products_with_one_row_are_known():
    assert len(known_vectors()) >= 110


def same(choice, order):
    mine, other = choice.recipe, order.recipe
    return (mine.slices.edges, mine.slices.dealt, mine.unit, mine.epilogue, choice.addend_first) == (
        other.slices.edges, other.slices.dealt, other.unit, other.epilogue, order.addend_first,
    )  # fmt: skip


def test_proposals_for_layers_are_the_orders_of_launched_kernels():
    right, asked, opened = 0, 0, 0
    for call, launches in recorded_launches().launches.items():
        if call.dtype != "float32" or min(call.m, call.n) == 1:
            continue
        try:
            choice, order = proposed_choice(call, "H200"), order_of_kernels(launches, call)
        except NotModelled as error:
            assert "order is open" in str(error), call
            opened += 1
            continue
        if choice is not None:
            right, asked = right + same(choice, order), asked + 1
    assert right == asked > 1800 and opened > 60


@pytest.mark.parametrize("tokens", [2, 77, 1024])
def test_layers_of_small_models_are_known_or_open(tokens):
    """BERT, GPT-2, ViT and a small Llama: forwards, gradients of inputs and of weights."""
    for h in (256, 384, 512, 768):
        for k, n in ((h, h), (h, 4 * h), (4 * h, h)):
            calls = [
                TorchProduct("float32", tokens, k, n, 1, layout, addend)
                for layout, addend in (("rc", None), ("rc", "columns"), ("rr", None))
            ]
            for call in (*calls, TorchProduct("float32", k, tokens, n, 1, "cr")):
                try:
                    assert choose_kernel(call).recipe.slices.k == call.k
                except NotModelled as error:
                    assert "order is open" in str(error)


def test_between_recorded_sizes_a_kernel_is_known_where_its_neighbours_agree():
    exact, between = (vector_choice(TorchProduct("float32", 1, k, n, 1, "rc"), "H200") for k, n in ((768, 768), (772, 774)))
    assert exact.source == RECORDED and between.source == RULE and between.recipe.unit == exact.recipe.unit
    assert str(recorded_vectors().tried.right) in between.evidence.replace(",", "") and between.probability > 0.99
    assert vector_choice(TorchProduct("float32", 1, 512, 1728, 1, "rc"), "H200") is not None
    assert vector_choice(TorchProduct("float32", 1, 540, 1750, 1, "rc"), "H200") is None  # gemvx, and gemv2T
    for call in (TorchProduct("float32", 2, 768, 768), TorchProduct("float32", 1, 32, 768), TorchProduct("bfloat16", 1, 768, 768)):
        assert vector_choice(call, "H200") is None
    assert "assumed for an H100" in vector_choice(TorchProduct("float32", 1, 768, 768, 1, "rc"), "H100").evidence


def test_a_layer_outside_of_the_steps_has_its_recorded_kernel():
    choice = choose_kernel(TorchProduct("float32", 1, 768, 30522, 1, "rc", "columns"))
    assert choice.source == RECORDED and choice.kernels == "gemv2T"


@pytest.mark.parametrize("k", [1025, 2048])
def test_dot_products_of_many_blocks_are_not_known(k):
    with pytest.raises(NotModelled, match="1024 elements"):
        choose_kernel(TorchProduct("float32", 1, k, 64, 1, "rc"))


def test_gradients_of_eager_attention_are_chains():
    choice = choose_kernel(TorchProduct("float32", 37, 37, 64, 12, "cr"))
    assert choice.recipe.slices.edges == (0, 37) and choice.source == RULE and choice.recipe.unit.lanes == 1
    with pytest.raises(NotModelled):
        choose_kernel(TorchProduct("float32", 1, 37, 64, 12, "cr"))


def test_the_proposals_say_where_they_end():
    table = proposed_orders(SMALL_LAYERS_FILE)
    right, asked = table.launched
    assert right > 29_000 and asked - right < 12
    runs = table.curves["f32-rc", 768, 768]
    assert table.orders[runs[-1]] == [] and runs[-2] == 4097
    with pytest.raises(NotModelled, match="order is open"):
        choose_kernel(TorchProduct("float32", 15, 256, 256, 1, "rc"))


def test_matmul_takes_the_kernel_of_a_layer():
    a, b = (np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(((1, 576), (576, 3))))
    products = (a[0][:, None] * b).reshape(-1)  # of dot_kernel: rounded, in blocks of 256, threads in halves
    blocks = np.zeros((3, 256, 3), np.float32)
    blocks.reshape(-1)[: products.size] = products
    pairs = blocks.reshape(3, 128, 2, 3)
    sums = pairs[:, :, 0] + pairs[:, :, 1]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    expected = (sums[0, 0] + sums[1, 0]) + sums[2, 0]
    assert np.asarray(matmul(a, b, transposed_b=True))[0].tolist() == expected.tolist()
