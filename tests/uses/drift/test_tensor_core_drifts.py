"""Products whose sides were made by planted kernels of tensor cores: the difference between the two kernels is named."""

import json
import lzma
from base64 import b64decode
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles.reference import chain
from oracles.simulated_kernels import AMPERE, HOPPER_FP8, even, serial, store_rounded, tensor
from support.drift_records import MATRIX_PRODUCT, recorded, recorded_product
from support.sampling import sample_cases

import tcemu
from tcemu.drift import identify, locate
from tcemu.replay import get_kernel_recipe, loads

GOLDEN = Path(__file__).parents[2] / "golden"
DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn}
K = 192
ONE, TWO, THREE = [list(range(K))], even(K, 2, 32), even(K, 3, 64)


def f16_sums(a, b):
    """A tensor core's f16 accumulator, by the exact reference."""
    codes = lambda x: np.ascontiguousarray(x).view(np.uint16).tolist()
    rows, columns = codes(a), codes(np.ascontiguousarray(b.T))
    words = [[chain(row, column, 0, "f16", "f16", "f16", 16) for column in columns] for row in rows]
    return np.array(words, np.uint16).view(np.float16).astype(np.float32)


def kernel(fmt, out="f32", slices=ONE, **options):
    return tensor(fmt, out, slices, **options)


CASES = {  # operands, left kernel, right kernel, targets, and the hypotheses
    "other target": ("bf16", kernel("bf16"), kernel("bf16", core=AMPERE), ("H100", "A100"), {"tensor core"}),
    "other target, f16": ("f16", kernel("f16"), kernel("f16", core=AMPERE), ("H100", "A100"), {"tensor core"}),
    "slices": ("bf16", kernel("bf16"), kernel("bf16", slices=TWO), ("H100",), {"order of the sum"}),
    "slices, f16": ("f16", kernel("f16", slices=THREE), kernel("f16", slices=TWO), ("H100",), {"order of the sum"}),
    "restart": ("bf16", kernel("bf16"), kernel("bf16", restart=64), ("H100",), {"promotion"}),
    "bf16 partial sums": (
        "bf16", kernel("bf16", "bf16", THREE), kernel("bf16", "bf16", THREE, merge=store_rounded("bf16")), ("H100",), {"partial sums"}
    ),
    "bf16 running sum": (
        "bf16", kernel("bf16", "bf16", THREE), kernel("bf16", "bf16", THREE, merge=serial("bf16")), ("H100",), {"partial sums"}
    ),
    "f16 sums": ("f16", kernel("f16"), f16_sums, ("H100",), {"accumulator"}),
    "fp8 promotion": ("e4m3", kernel("e4m3", core=HOPPER_FP8), kernel("e4m3", core=HOPPER_FP8, restart=128), ("H100",), {"promotion"}),
    "tf32 on another target": ("tf32", kernel("tf32"), kernel("tf32", core=AMPERE), ("H100", "A100"), {"tensor core"}),
    "tf32 on or off": ("f32", kernel("tf32"), None, ("H100",), {"tensor core", "operands rounded"}),
}  # fmt: skip


def operands(fmt, rows=6, columns=5, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape).astype(DTYPES[fmt]) for shape in ((rows, K), (K, columns)))


@pytest.mark.parametrize("case", sample_cases(CASES, ["slices"]))
def test_the_difference_of_two_tensor_core_kernels_is_named(case):
    fmt, left, right, targets, kinds = CASES[case]
    a, b = operands(fmt, *((24, 16) if "sum" in case or "partial" in case else (6, 5)))
    sides = [(sequential if make is None else make)(a, b) for make in (left, right)]
    assert (sides[0] != sides[1]).any()
    drift = locate(*(recorded_product(a, b, d) for d in sides), targets=targets)
    (source,) = drift.sources
    assert kinds <= set(source.cause.kinds) and source.cause.explained, str(drift)
    for recipe, expected in zip(source.cause.recipes, sides, strict=True):
        if recipe is not None:  # the recipe pins the side
            pinned = tcemu.matmul(a, b, recipe=loads(json.dumps(recipe)), dtype=expected.dtype)
            assert np.asarray(pinned).tobytes() == expected.tobytes()


def sequential(a, b):
    """f32 sums of rounded products, one after the other."""
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for x, y in zip(a.T, b, strict=True):
        total = total + x[:, None] * y
    return total


def h200_products():
    """(shape, A, B, D) of every product of a GPT on an H200: four rows and eight columns of each, from benchmarks/replay_model.py."""
    held = json.loads(lzma.decompress((GOLDEN / "replay_model.json.xz").read_bytes()))
    matrix = lambda text, *shape: np.frombuffer(b64decode(text), ml_dtypes.bfloat16).reshape(shape)
    for kept in held["products"]:
        m, n, k = kept["m"], kept["n"], kept["k"]
        yield (m, n, k), matrix(kept["a"], 4, k), matrix(kept["b"], k, 8), matrix(kept["d"], 4, 8)


def record_products(results):
    operations = [("dot_general", [a, b], [d], MATRIX_PRODUCT) for (_, a, b, _), d in zip(h200_products(), results, strict=True)]
    return recorded(operations)


@pytest.mark.full
def test_the_products_of_a_gpt_on_an_h200_are_those_of_the_emulation():
    silicon = record_products(d for *_, d in h200_products())
    recipes = [get_kernel_recipe("jax-bf16", *shape).without_shape() for shape, *_ in h200_products()]
    emulated = [
        np.asarray(tcemu.matmul(a, b, recipe=recipe, dtype=jnp.bfloat16))
        for recipe, (_, a, b, _) in zip(recipes, h200_products(), strict=True)
    ]
    assert len(emulated) == 29
    drift = locate(silicon, record_products(emulated), targets=("H200",))
    assert drift.left_count == 29 and drift.lines == ()
    plain = [(a.astype(np.float32) @ b.astype(np.float32)).astype(d.dtype) for _, a, b, d in h200_products()]
    assert all(line.cause.explained for line in locate(silicon, record_products(plain), targets=("H200",)).sources)


@pytest.mark.full
def test_every_product_of_a_gpt_on_an_h200_is_identified():
    found = identify(record_products(d for *_, d in h200_products()), targets=("H200",))
    assert len(found.operations) == 29 and found.unexplained == ()
