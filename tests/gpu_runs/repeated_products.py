"""On a machine with an NVIDIA GPU: products of e4m3 whose products a tensor core truncates, beside the kernel that adds them one by one.

PYTHONPATH=.:tests python tests/gpu_runs/repeated_products.py [--size 8192]

Two pairs of operands: normal ones, and every code but NaN as it comes, with an accumulator. Prints MAC/s of both kernels in one process,
and the words that differ. Arrangements of the tile's threads are options, such as `--arrangement blocks=3 ring=2`.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from support.kernel_cases import CASES, signature

from tcemu.engine.backends.cuda import kernel_text, matrix_kernels
from tcemu.engine.backends.cuda.xla_launch import route


def normal_operands(size: int) -> tuple[jax.Array, ...]:
    a, b = (50 * jax.random.normal(jax.random.key(seed), (1, size, size)) for seed in (0, 1))
    return *(v.astype(jnp.float8_e4m3fn).view(jnp.uint8) for v in (a, b)), jnp.zeros((1, size, size), jnp.uint32)


def all_codes(size: int) -> tuple[jax.Array, ...]:
    drawn = (jax.random.randint(jax.random.key(seed), (1, size, size), 0, 256).astype(jnp.uint8) for seed in (2, 3))
    c = 1e4 * np.random.default_rng(0).normal(size=(1, size, size)).astype(np.float32)
    return *(jnp.where((v & 0x7F) == 0x7F, v ^ 1, v) for v in drawn), jnp.asarray(c.view(np.uint32))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arrangement", nargs="*", default=[], metavar="NAME=VALUE", help="fields of TileNumbers")
    given = parser.parse_args()
    kernels = matrix_kernels.find_matrix_kernels(CASES["e4m3"][0], signature("e4m3"))
    assert kernels is not None
    own = matrix_kernels.own_fraction_bits(route().capability)
    tiles = {bits: kernel_text.fit_shared_memory(kernels.numbers, kernels.tiling, route().shared_bytes, own_bits=bits) for bits in (0, own)}
    changes = {name: int(value) for name, value in (word.split("=") for word in given.arrangement)}
    tiles[own] = tiles[own]._replace(**changes)
    wrong = 0
    for name, operands in (("normal", normal_operands(given.size)), ("all codes", all_codes(given.size // 4))):
        results = []
        for bits, arranged in tiles.items():
            run = jax.jit(lambda *v, arranged=arranged: matrix_kernels._multiply_by_tiles(kernels, arranged, *v))
            results.append(run(*operands).block_until_ready())
            seconds = []
            for _ in range(given.repeats):
                start = time.perf_counter()
                run(*operands).block_until_ready()
                seconds.append(time.perf_counter() - start)
            print(f"{name}, own bits {bits}: {operands[0].size * operands[1].shape[2] / min(seconds):.3e} MAC/s", flush=True)
        differ = int((results[0] != results[1]).sum())
        print(f"{name}: {differ} of {results[0].size} words differ")
        wrong += differ
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
