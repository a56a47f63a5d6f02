"""On a machine with an NVIDIA GPU: products of e4m3 whose products a tensor core truncates, beside the kernel that adds them one by one.

PYTHONPATH=.:tests python tests/gpu_runs/repeated_products.py [--size 8192]

Two pairs of operands: normal ones, and every code but NaN as it comes, with an accumulator. Then recipes from float32 operands, with their
quantisation. Prints MAC/s of both kernels in one process, and the words that differ. Arrangements of the tile's threads are options, as in
`--arrangement blocks=3 ring=2`.
"""

import argparse
import sys
import time
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from support.kernel_cases import CASES, signature

import tcemu
from tcemu.engine.backends.cuda import kernel_text, matrix_kernels
from tcemu.engine.backends.cuda.xla_launch import route


def normal_operands(size: int) -> tuple[jax.Array, ...]:
    a, b = (50 * jax.random.normal(jax.random.key(seed), (1, size, size)) for seed in (0, 1))
    return *(v.astype(jnp.float8_e4m3fn).view(jnp.uint8) for v in (a, b)), jnp.zeros((1, size, size), jnp.uint32)


def all_codes(size: int) -> tuple[jax.Array, ...]:
    drawn = (jax.random.randint(jax.random.key(seed), (1, size, size), 0, 256).astype(jnp.uint8) for seed in (2, 3))
    c = 1e4 * np.random.default_rng(0).normal(size=(1, size, size)).astype(np.float32)
    return *(jnp.where((v & 0x7F) == 0x7F, v ^ 1, v) for v in drawn), jnp.asarray(c.view(np.uint32))


def report(name: str, bits: int, products: int, repeats: int, run: Callable[[], jax.Array]) -> jax.Array:
    """Print MAC/s of the best run after the first, and return the words."""
    result = run().block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - start)
    print(f"{name}, own bits {bits}: {products / min(seconds):.3e} MAC/s", flush=True)
    return result


def run_recipe(name: str, size: int, own: int, repeats: int) -> list[jax.Array]:
    """The words of a recipe's product, without and with the tensor core's own truncation."""
    x, y = (jax.random.normal(jax.random.key(seed), (size, size)) for seed in (4, 5))
    recipe, results = tcemu.get_recipe(name), []
    for bits in (0, own):
        with mock.patch.object(matrix_kernels, "own_fraction_bits", lambda capability, bits=bits: bits):
            product = jax.jit(lambda x, y: tcemu.matmul(x, y, recipe=recipe).astype("float32").view("uint32"))
            results.append(report(name, bits, size**3, repeats, lambda product=product: product(x, y)))
        jax.clear_caches()  # the next arrangement is another program
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--recipes", nargs="*", default=["deepseek", "fp8"])
    parser.add_argument("--arrangement", nargs="*", default=[], metavar="NAME=VALUE", help="fields of TileNumbers")
    given = parser.parse_args()
    kernels = matrix_kernels.find_matrix_kernels(CASES["e4m3"][0], signature("e4m3"))
    assert kernels is not None
    own = matrix_kernels.own_fraction_bits(route().capability)
    tiles = {bits: kernel_text.fit_shared_memory(kernels.numbers, kernels.tiling, route().shared_bytes, own_bits=bits) for bits in (0, own)}
    changes = {name: int(value) for name, value in (word.split("=") for word in given.arrangement)}
    tiles[own] = tiles[own]._replace(**changes)
    wrong = 0
    runs: dict[str, list[jax.Array]] = {}
    for name, operands in (("normal", normal_operands(given.size)), ("all codes", all_codes(given.size // 4))):
        runs[name] = []
        for bits, arranged in tiles.items():
            product = jax.jit(lambda *v, arranged=arranged: matrix_kernels._multiply_by_tiles(kernels, arranged, *v))
            products = operands[0].size * operands[1].shape[2]
            runs[name].append(report(name, bits, products, given.repeats, lambda p=product, v=operands: p(*v)))
    runs |= {name: run_recipe(name, given.size, own, given.repeats) for name in given.recipes}
    for name, results in runs.items():
        differ = int((results[0] != results[1]).sum())
        print(f"{name}: {differ} of {results[0].size} words differ")
        wrong += differ
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
