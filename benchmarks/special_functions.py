"""How many special functions does a second have? `python benchmarks/special_functions.py`: each function of the unit, with `.ftz` and
without.

A row is 2^22 f32 operands in one call. The CPU time of one operand is the least of all calls, of all cores together; another load changes
it little. The words of a sample are compared with a second implementation in NumPy.
"""

import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish, timed

from tcemu.engine.arithmetic.special_functions import UNARY

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from oracles import special_functions_reference as reference

COUNT, SAMPLE = 1 << 22, 1 << 16
RANGES = {"ex2": (-20.0, 0.0), "sin": (-9.0, 9.0), "cos": (-9.0, 9.0)}  # of operands; the others': (0, 1000)


def main() -> int:
    args = arguments(__doc__).parse_args()
    machine = describe_machine()
    print(f"{'function':>10} {'first call s':>13} {'best ms':>9} {'1/s':>9} {'CPU ns each':>12}")
    lines, wrong = [], 0
    for name, function in UNARY.items():
        x = np.random.default_rng(0).uniform(*RANGES.get(name, (0.0, 1000.0)), COUNT).astype(np.float32).view(np.uint32)
        for flush in (True, False):
            call = jax.jit(lambda codes, function=function, flush=flush: function(codes, flush))
            first, seconds = timed(partial(call, jnp.asarray(x)), args.repeats)
            operands, each = jnp.asarray(x), []
            for _ in range(args.repeats):
                begun = time.process_time()
                words = call(operands).block_until_ready()
                each.append((time.process_time() - begun) / COUNT)
            wrong += int((np.asarray(words)[:SAMPLE] != reference.unary(name, x[:SAMPLE], flush)).sum())
            label = name + ".ftz" * flush
            lines.append(
                {
                    "function": label,
                    "count": COUNT,
                    "first_call_s": first,
                    "best_s": seconds,
                    "rate": COUNT / seconds,
                    "cpu_s_each": min(each),
                }
            )
            print(f"{label:>10} {first:>13.2f} {1e3 * seconds:>9.2f} {COUNT / seconds:>9.2g} {1e9 * min(each):>12.1f}", flush=True)
    return finish(args, machine, lines, wrong, f"{SAMPLE} words of each")


if __name__ == "__main__":
    raise SystemExit(main())
