"""How fast are operands quantised? `python benchmarks/quantize.py`: milliseconds of each operand of a recipe, and the bytes a second of it.

Bytes are those of the operand, read once, and of its elements. A kernel divides and rounds where there is one; "portable" is the same
without it, and all words are compared. Each line is the best of several runs after the first, which compiles.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish, timed

import tcemu
from tcemu.operations.quantize.quantizer import Scheme, quantize


def best(scheme: Scheme, is_b: bool, x: jax.Array, repeats: int) -> tuple[float, float, list[jax.Array]]:
    """Seconds of the first call, and of the best one; what it gives. A column of B lies as a row does, as `matmul` takes it."""
    call = jax.jit(lambda x: jax.tree.leaves(quantize(scheme, x.T if is_b else x)))  # traced anew each time
    first, seconds = timed(partial(call, x), repeats)
    return first, seconds, call(x)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024])
    parser.add_argument("--recipes", nargs="+", default=["deepseek", "fp8", "fp8_rows", "bf16"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    args = parser.parse_args()
    machine = describe_machine()
    head = f"{'recipe':>10} {'operand':>8} {'dtype':>9} {'size':>6} {'first call s':>13} {'best ms':>9} {'GB/s':>7}"
    print(f"{head} {'portable: first s':>18} {'best ms':>9}")
    lines, wrong = [], 0
    for n in args.sizes:
        x = jnp.asarray(np.random.default_rng(0).standard_normal((n, n), np.float32))
        for dtype in args.dtypes:
            given = x.astype(dtype)
            for name in args.recipes:
                for operand, scheme in zip("AB", tcemu.get_recipe(name).schemes, strict=True):
                    first, seconds, words = best(scheme, operand == "B", given, args.repeats)
                    with tcemu.execution("portable"):
                        portable_first, portable, wanted = best(scheme, operand == "B", given, args.repeats)
                    jax.clear_caches()
                    wrong += sum(int((got != one).sum()) for got, one in zip(words, wanted, strict=True))
                    rate = (given.nbytes + words[0].nbytes) / seconds
                    lines.append(
                        {"recipe": name, "operand": operand, "dtype": dtype, "size": n, "first_call_s": first, "best_s": seconds}
                        | {"bytes_per_s": rate, "portable_first_call_s": portable_first, "portable_s": portable}
                    )
                    row = f"{name:>10} {operand:>8} {dtype:>9} {n:>6} {first:>13.2f} {1e3 * seconds:>9.3f} {rate / 1e9:>7.0f}"
                    print(f"{row} {portable_first:>18.2f} {1e3 * portable:>9.3f}", flush=True)
    return finish(args, machine, lines, wrong, "all elements and scales")


if __name__ == "__main__":
    raise SystemExit(main())
