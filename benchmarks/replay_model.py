"""Is a whole model replayed, product by product? `python benchmarks/replay_model.py --out FILE` on a GPU: a small GPT in bf16 by JAX.

It runs op by op on the GPU, XLA's autotuning off. The operands and words of every matrix product are taken down, and the same product is
computed on the CPU by `tcemu.replay`: all words are compared. FILE, JSON in xz, gets some rows and columns of each product; `--check FILE`
compares those on any machine. A shape that no profile has is fingerprinted there and then, or said to be missing.
"""

import argparse
import base64
import json
import lzma
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import tcemu
from tcemu import replay
from tcemu.operations.products.library.kernel_recipe import KernelRecipe

LIBRARY = "jax-bf16"
TOKENS, WIDTH, HEADS, LAYERS, WORDS = 96, 256, 4, 2, 512
ROWS, COLUMNS = 4, 8  # of each product, that are kept
Product = Callable[[Any, Any], Any]


def weights(seed: int = 0) -> dict[str, Any]:
    """bfloat16 matrices of the scale that training starts from."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (WIDTH, WIDTH),
        "k": (WIDTH, WIDTH),
        "v": (WIDTH, WIDTH),
        "o": (WIDTH, WIDTH),
        "up": (WIDTH, 4 * WIDTH),
        "down": (4 * WIDTH, WIDTH),
    }
    matrix = lambda shape: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(ml_dtypes.bfloat16)
    layers = [{name: matrix(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    embedding = rng.standard_normal((WORDS, WIDTH)).astype(ml_dtypes.bfloat16)
    return {"embedding": embedding, "layers": layers, "head": matrix((WIDTH, WORDS)), "words": rng.integers(0, WORDS, TOKENS)}


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def gpt(params: dict[str, Any], words: jax.Array, product: Product = jnp.matmul) -> jax.Array:
    """Logits [tokens, WORDS] in bfloat16; every head's products are of its own matrices."""
    x = jnp.asarray(params["embedding"])[words]
    for layer in params["layers"]:
        q, k, v = (product(norm(x), layer[name]) for name in "qkv")
        heads = []
        for head in range(HEADS):
            part = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
            scores = product(q[:, part], k[:, part].T).astype(jnp.float32) / np.sqrt(WIDTH // HEADS)
            scores = jnp.where(np.tri(len(words), dtype=bool), scores, -jnp.inf)
            heads.append(product(jax.nn.softmax(scores).astype(x.dtype), v[:, part]))
        x = x + product(jnp.concatenate(heads, -1), layer["o"])
        x = x + product(jax.nn.gelu(product(norm(x), layer["up"])), layer["down"])
    return product(norm(x), params["head"])


def recorded(params: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A, B and A·B of every product of the model on the default device, op by op."""
    found = []

    def product(a: Any, b: Any) -> Any:
        d = jnp.matmul(a, b)
        found.append(tuple(np.asarray(x) for x in (a, b, d)))
        return d

    gpt(jax.tree.map(jnp.asarray, params), jnp.asarray(params["words"]), product)
    return found


def recipe_of(m: int, n: int, k: int) -> KernelRecipe | str:
    """From the profile, else by a fingerprint of the device that is here; else why there is none."""
    try:
        return replay.get_kernel_recipe(LIBRARY, m, n, k)
    except tcemu.NotModelled as error:
        if jax.default_backend() != "gpu":
            return str(error)
        found = replay.fingerprint(jax.jit(jnp.matmul), m, n, k, operand_dtype="bf16", framework="jax", device="gpu")
        return found.recipe or found.reason


def words_of(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint16)


def coded(x: np.ndarray) -> str:
    return base64.b64encode(words_of(x).tobytes()).decode()


def decoded(text: str, shape: tuple[int, int]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), ml_dtypes.bfloat16).reshape(shape)


def compared(out: Path) -> int:
    """Runs the model on the GPU, compares every word, writes a part of each product. Returns the number of words that differ."""
    cpu = jax.devices("cpu")[0]
    kept, wrong, words, missing = [], 0, 0, 0
    for number, (a, b, d) in enumerate(recorded(weights())):
        (m, k), n = a.shape, b.shape[1]
        recipe = recipe_of(m, n, k)
        if isinstance(recipe, str):
            missing += 1
            print(f"{number:>3} {m} x {n} x {k}: {recipe}")
            continue
        with jax.default_device(cpu):
            ours = np.asarray(tcemu.matmul(jax.device_put(a, cpu), jax.device_put(b, cpu), recipe=recipe, dtype=jnp.bfloat16))
        different = int((words_of(ours) != words_of(d)).sum())
        plain = int((words_of((a.astype(np.float64) @ b.astype(np.float64)).astype(ml_dtypes.bfloat16)) != words_of(d)).sum())
        wrong, words = wrong + different, words + d.size
        print(f"{number:>3} {m} x {n} x {k}: {different} of {d.size} words differ; rounded once they would be {plain}", flush=True)
        rows, columns = (np.linspace(0, size - 1, count).astype(int) for size, count in ((m, ROWS), (n, COLUMNS)))
        kept.append({"m": m, "n": n, "k": k, "a": coded(a[rows]), "b": coded(b[:, columns]), "d": coded(d[np.ix_(rows, columns)])})
    about = {"gpu": jax.devices()[0].device_kind, "jax": jax.__version__, "date": time.strftime("%Y-%m-%d"), "library": LIBRARY}
    out.write_bytes(lzma.compress(json.dumps(about | {"products": kept}).encode(), preset=9))
    print(f"{len(kept)} products, {wrong} of {words:,} words differ; {missing} products without a recipe")
    return wrong + missing


def checked(path: Path) -> int:
    """Computes the kept rows and columns again on the machine that is here. Returns the number of words that differ."""
    held = json.loads(lzma.decompress(path.read_bytes()))
    wrong = words = 0
    for kept in held["products"]:
        m, n, k = kept["m"], kept["n"], kept["k"]
        a, b, d = decoded(kept["a"], (ROWS, k)), decoded(kept["b"], (k, COLUMNS)), decoded(kept["d"], (ROWS, COLUMNS))
        ours = tcemu.matmul(a, b, recipe=replay.get_kernel_recipe(held["library"], m, n, k).without_shape(), dtype=jnp.bfloat16)
        wrong, words = wrong + int((words_of(np.asarray(ours)) != words_of(d)).sum()), words + d.size
    print(f"{len(held['products'])} products as {held['gpu']} gave them on {held['date']}: {wrong} of {words} words differ")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="FILE", help="run the model on the GPU that is here, and write this file")
    what.add_argument("--check", type=Path, metavar="FILE", help="compare the words of a file with those of this machine")
    args = parser.parse_args()
    return int(bool(checked(args.check) if args.check else compared(args.out)))


if __name__ == "__main__":
    sys.exit(main())
