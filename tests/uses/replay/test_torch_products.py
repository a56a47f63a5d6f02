"""Products of PyTorch: the order read from recorded kernels gives the H200's words, and rules choose the kernels that it launched.

`torch_products_h200.json.xz` has the kernels of 5,904 products on an H200, and some words of 67 (tests/gpu_runs/torch_products.py, seed 1).
The rows of kernels were found on another run; the trees were fitted on what cuBLASLt proposed for other shapes.
"""

import json
import lzma
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gpu_runs.model_products import operands as operands_of_layer

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct, order_of_kernels
from tcemu.uses.replay.kernel_choices import ChoiceTree
from tcemu.uses.replay.torch_products import (
    SHORT,
    choose_kernel,
    form_name,
    matmul,
    multiply_as_chosen,
    product_features,
    product_rules,
    proposed_choice,
    torch_product,
)

GOLDEN = Path(__file__).parents[2] / "golden/torch_products_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
LAYOUTS = {
    "mm": "rr", "linear": "rc", "linear_bias": "rc", "dw": "cr", "bmm": "rr", "bmm_t": "rc", "addmm": "rr", "addmm2": "rr", "baddbmm": "rr",
}  # fmt: skip
ADDENDS = {"linear_bias": "columns", "addmm": "columns", "addmm2": "outputs", "baddbmm": "outputs"}


@cache
def recorded():
    return json.loads(lzma.decompress(GOLDEN.read_bytes()))


def product_of(name):
    kind, dtype, sizes = name.split("|")
    m, k, n = map(int, sizes.split("x"))
    return TorchProduct(np.dtype(DTYPES[dtype]).name, m, k, n, recorded()["cases"][name][0], LAYOUTS[kind], ADDENDS.get(kind))


def launches_of(name):
    return [Launch(recorded()["kernels"][number], tuple(grid), tuple(block)) for number, grid, block in recorded()["cases"][name][1]]


def draw(which, name, shape):
    key = which + name.split("|")[2]
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode()))).standard_normal(shape, np.float32)


def sampled_operands(name, places):
    """Rows of A, columns of B and of the addend such that outputs [i, i] are those at these places of the flattened result."""
    call, dtype = product_of(name), DTYPES[name.split("|")[1]]
    batch, rest = np.divmod(np.array(places), call.m * call.n)
    rows, columns = np.divmod(rest, call.n)
    a = draw("a", name, (call.m, call.k)).astype(dtype)
    b = (draw("b", name, (call.k, call.n)) * np.float32(call.k**-0.5)).astype(dtype)
    picked = np.where((batch % 3 == 2)[:, None], a[call.m - 1 - rows], np.where((batch % 3 == 1)[:, None], -a[rows], a[rows]))
    addend = None
    if call.addend == "columns":
        addend = draw("c", name, call.n).astype(dtype)[columns]
    elif call.addend == "outputs":
        addend = np.broadcast_to(draw("d", name, (call.m, call.n)).astype(dtype)[rows, columns], (len(places), len(places)))
    return picked, b[:, columns], addend


def words_of(name):
    """The words that tcemu gives at the recorded places, and the H200's."""
    places, words = recorded()["words"][name]
    call = product_of(name)
    choice = choose_kernel(call, launches=launches_of(name))
    a, b, addend = (None if x is None else jnp.asarray(x) for x in sampled_operands(name, places))
    y = np.asarray(multiply_as_chosen(choice._replace(recipe=choice.recipe.without_shape()), a, b, addend))
    size = y.dtype.itemsize
    return np.diagonal(y).copy().view(f"i{size}").tolist(), words


USUAL = ("CUTLASS", "gemmSN_NN", "XMMA f32", "nvjet", "CUTLASS f32")


@cache
def usual():
    """The first product of some rows, and those that begin with their bias."""
    orders = {name: order_of_kernels(launches_of(name), product_of(name)) for name in recorded()["words"]}
    first = {order.kernels: name for name, order in reversed(orders.items()) if order.kernels in USUAL}
    return {*first.values(), *(name for name, order in orders.items() if order.addend_first)}


@pytest.mark.parametrize("name", [n if n in usual() else pytest.param(n, marks=pytest.mark.full) for n in recorded()["words"]])
def test_recorded_kernels_give_the_words_of_an_h200(name):
    ours, theirs = words_of(name)
    assert ours == theirs


def same_order(choice, order):
    """True if both have one order, whatever instruction of 16 products a recipe names."""
    mine, other = choice.recipe, order.recipe
    parts = lambda recipe: (
        recipe.slices.edges,
        recipe.slices.dealt,
        recipe.merge if len(recipe.slices.edges) != 2 else None,
        recipe.epilogue,
    )
    units = [recipe.unit if not hasattr(recipe.unit, "op") else (recipe.unit.op.k, recipe.unit.residue) for recipe in (mine, other)]
    return parts(mine) == parts(other) and units[0] == units[1] and choice.addend_first == order.addend_first


@cache
def judged():
    """Of the recorded products whose kernels have a row: how many rules chose, and which wrongly, by dtype."""
    counts, wrong = Counter(), []
    for name in recorded()["cases"]:
        call = product_of(name)
        try:
            order = order_of_kernels(launches_of(name), call)
        except NotModelled:
            continue
        dtype = name.split("|")[1]
        counts[dtype, "known"] += 1
        try:
            choice = choose_kernel(call)
        except NotModelled:
            continue
        counts[dtype, "chosen"] += 1
        if choice.source in ("by rule", "proposed") and not same_order(choice, order):
            wrong.append(name)
    return counts, wrong


def test_rules_choose_the_order_of_the_kernels_that_were_launched():
    counts, wrong = judged()
    assert len(wrong) <= 4, wrong  # of 4,042: docs/howto/replay_torch.md
    assert {dtype: counts[dtype, "chosen"] for dtype in DTYPES} == {"bf16": 1433, "f16": 1470, "f32": 1139}


# ---- layers of public models: `tests/gpu_runs/model_products.py` launched products that were drawn, and every layer's of one token


@cache
def layers():
    """The launched products with their kernels, and the words of some rows and columns of some products."""
    data = json.loads(lzma.decompress((GOLDEN.parent / "torch_layers_h200.json.xz").read_bytes()))
    read = lambda kernel: Launch(data["kernels"][kernel[0]], *map(tuple, kernel[1:]))
    products = {TorchProduct(*product): tuple(map(read, kernels)) for *product, kernels in data["products"]}
    return products, {TorchProduct(*product): words for product, words in data["words"]}


def test_layers_have_the_order_of_the_kernels_that_were_launched():
    """What cuBLASLt proposed and what nvjet's thresholds say is what PyTorch launched, where the launch tells the order."""
    counts, wrong = Counter(), []
    for call, launches in layers()[0].items():
        choice = choose_kernel(call)
        try:
            order = order_of_kernels(launches, call)
        except NotModelled as error:
            assert "fills the GPU" in str(error)
            counts["not told by the launch"] += 1
            continue
        counts[choice.source] += 1
        if not same_order(choice, order) and call.k > 1:
            wrong.append(str(call))
    assert not wrong
    assert counts == {"proposed": 1970, "by rule": 3514, "measured": 1, "not told by the launch": 85}


def kinds_of_layers():
    """The first product with words of each memory order, bias, and one slice or several."""
    kinds = {}
    for call in layers()[1]:
        kinds.setdefault((call.layout, call.addend, len(choose_kernel(call).recipe.slices.edges) > 2), call)
    return set(kinds.values())


@pytest.mark.parametrize(
    "call", [call if call in kinds_of_layers() else pytest.param(call, marks=pytest.mark.full) for call in layers()[1]], ids=str
)
def test_layers_give_the_words_of_an_h200(call):
    """The terms of each sum cancel in pairs, so that a word is what the order of the sum rounds away."""
    _, _, *operands = operands_of_layer((call.dtype, call.m, call.k, call.n, call.layout, call.addend))
    choice = choose_kernel(call)
    a, b, bias = (None if x is None else x.astype(DTYPES[SHORT[call.dtype]]) for x in operands)
    y = np.asarray(multiply_as_chosen(choice._replace(recipe=choice.recipe.without_shape()), a, b, bias))
    assert y.view(np.int16).tolist() == layers()[1][call]


def test_a_layer_between_answers_is_refused():
    """Gradients of weights were asked about at multiples of 8 tokens where K may be cut; a kernel for vectors is not told by a proposal."""
    gradient = TorchProduct("bfloat16", 1024, 4096, 1024, 1, "cr")
    assert choose_kernel(gradient).source == "proposed"
    assert proposed_choice(gradient._replace(k=4097), "H200") is None
    with pytest.raises(NotModelled, match="whose order the proposal does not tell"):
        proposed_choice(TorchProduct("bfloat16", 1, 4096, 1, 1, "rc"), "H200")
    assumed = proposed_choice(gradient, "H100")
    assert assumed is not None and "assumed for an H100" in assumed.evidence
    with pytest.raises(NotModelled, match=r"has a probability of 0\.92\d only"):
        choose_kernel(gradient, gpu="H100")


def test_every_prediction_says_its_evidence():
    recorded_layer = choose_kernel(TorchProduct("float32", 16, 256, 256, layout="rc", addend="columns"))
    assert recorded_layer.source == "recorded kernels" and recorded_layer.evidence.startswith("its kernels on an NVIDIA H200")
    elsewhere = choose_kernel(recorded_layer.product, gpu="H100")
    assert elsewhere.source == "by rule" and "assumed for an H100" in elsewhere.evidence
    choice = choose_kernel(TorchProduct("bfloat16", 24, 256, 256, layout="rc", addend="columns"))
    assert choice.source == "by rule" and choice.probability > 0.99 and choice.recipe.conditions.probability == choice.probability
    assert "right for" in choice.evidence and "K = 256 in one slice" in str(choice)
    assert "assumed for an H100" in choose_kernel(TorchProduct("float32", 16, 64, 64, 8), gpu="H100").evidence
    measured = choose_kernel(TorchProduct("float16", 64, 8192, 64))
    assert measured.source == "measured" and "0 different" in measured.evidence


def test_the_two_axes_of_a_layer_are_rows():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 64)), jnp.bfloat16)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((64, 32)), jnp.bfloat16)
    bias = jnp.arange(32, dtype=jnp.bfloat16)
    y = matmul(x, w, transposed_b=True, bias=bias)
    assert y.shape == (2, 3, 32) and y.dtype == jnp.bfloat16
    assert (y.reshape(6, 32) == matmul(x.reshape(6, 64), w, transposed_b=True, bias=bias)).all()
    assert torch_product((2, 3, 64), (64, 32), "bfloat16", transposed_b=True) == TorchProduct("bfloat16", 6, 64, 32, 1, "rc")
    assert torch_product((2, 3, 64), (2, 64, 32), "float32").batch == 2


def test_a_vector_that_pytorch_expands_is_an_addend_of_all_outputs():
    """`baddbmm` expands a vector, and `addmm` one element: nvjet rounds the product before it adds."""
    draw = np.random.default_rng(0).standard_normal
    a, w, bias = (jnp.asarray(draw(shape), jnp.bfloat16) for shape in ((2, 16, 64), (2, 64, 32), (32,)))
    few = bias[None, None], bias[0], bias[:16, None]
    for x, y, addend in (
        (a, w, bias),
        (a[0], w[0], bias[:1]),
        (a, w, few[0]),
        (a[0], w[0], few[0][0]),
        (a[0], w[0], few[1]),
        (a, w[0], few[2]),
    ):
        expanded = matmul(x, y, bias=jnp.broadcast_to(addend, (*x.shape[:-1], 32)))
        assert (matmul(x, y, bias=addend) == expanded).all()
        assert torch_product(x.shape, y.shape, "bfloat16", addend_shape=addend.shape).addend == "outputs"
    assert (matmul(a, w, bias=bias)[0] != matmul(a[0], w[0], bias=bias)).any()
    for wrong in (bias[:5], bias[None, :16], jnp.zeros((2, 2, 16, 32), bias.dtype)):
        with pytest.raises(ValueError, match=r"bias: got shape \[.*\]; expected \[32\]"):
            matmul(a, w, bias=wrong)


SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, "
ARRIVAL = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x64x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas"


@pytest.mark.parametrize(
    ("call", "launches", "said"),
    [
        (TorchProduct("float32", 8, 64, 8), [Launch("my_kernel")], "no row of KERNELS knows"),
        (TorchProduct("float32", 8, 64, 8), [Launch(SPLIT)], "expected one kernel of a product"),
        (TorchProduct("float32", 24, 16384, 1024, layout="rc"), [Launch("gpu_memset"), Launch(ARRIVAL, (1, 16, 33))], "the order is open"),
        (TorchProduct("float32", 8, 64, 8), [Launch("gemmSN_NN_kernel<float, 1, 0, ")], "has a size of 0"),
        (TorchProduct("float32", 1, 1024, 384), None, "took K in two ways"),
    ],
)
def test_what_is_not_known_is_refused(call, launches, said):
    with pytest.raises(NotModelled, match=said):
        choose_kernel(call, launches=launches)


def test_what_nobody_observed_is_refused():
    call = TorchProduct("float32", 8, 64, 8)
    for options in ({"gpu": "A100"}, {"library": "torch 1.0"}):
        with pytest.raises(Unsupported):
            choose_kernel(call, **options)
    for changes in ({"dtype": "float64"}, {"layout": "rx"}):
        with pytest.raises(Unsupported):
            choose_kernel(call._replace(**changes))
    for name, size in (("m", 8.0), ("n", 0), ("batch", True)):
        with pytest.raises(ValueError, match=f"{name}={size}: expected sizes"):
            choose_kernel(call._replace(**{name: size}))
    with pytest.raises(Unsupported, match="dtype='float64': expected one of bfloat16"):
        matmul(np.ones((2, 4)), np.ones((4, 2)))
    with pytest.raises(ValueError, match="expected one"):
        matmul(np.ones((2, 4), np.float32), np.ones((4, 2), np.float16))
    with pytest.raises(ValueError, match=r"expected \[\.\.\., M, K\]"):
        torch_product((2, 4), (5, 2), "float32")


def test_a_tree_answers_by_its_leaves():
    call = TorchProduct("float32", 8, 64, 8)
    tree = ChoiceTree([["fma"]], ["M", 8, [0, 20], []])
    assert tree.find(product_features(call, 132)) == (["fma"], 20, "M <= 8")
    assert tree.find(product_features(call._replace(m=9), 132)) is None
    assert form_name(call._replace(addend="columns")) == "f32-rr-bias" and all(
        name.removeprefix("nvjet ").split("-")[0] in DTYPES for name in product_rules().forms
    )
