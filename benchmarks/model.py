"""How long until the first result of a whole model with emulated products, and how much slower is each call? `python benchmarks/model.py`

The forward pass of a GPT of `--layers`, by default in the shape of GPT-2 small with random weights, one sequence of `--tokens`, as one
`jax.jit`. The first call is taken apart: tracing and lowering, compiling, and running. Each recipe runs in a process of its own, and so
does plain float32, so that each line has its own peak of memory. `--again` adds a second process, which finds the compiled programs of
a first one on disk.
"""

import json
import time
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from harness import add_processes, arguments, describe_machine, finish, measure_in_a_process, peak_megabytes, time_first_call, timed
from training import draw_gpt, gpt

import tcemu

NAMES = ("trace s", "compile s", "run s", "CPU s", "best s", "CPU s", "x plain", "peak MB")
SIZES = {"layers": 12, "width": 768, "heads": 12, "words": 50257, "tokens": 128, "batch": 1}


def draw_model(args) -> tuple[dict, jax.Array]:
    """Parameters and words."""
    rng = np.random.default_rng(0)
    params = draw_gpt(rng, args.layers, args.width, args.heads, 4, args.words, args.tokens)
    return params, jnp.asarray(rng.integers(0, args.words, (args.batch, args.tokens)))


def measure(args) -> dict:
    """One line: the first call, taken apart, and the best of those that follow."""
    tcemu.cache_compilations()
    (name,), (params, words) = args.recipes, draw_model(args)
    jax.block_until_ready(params)
    emulated = None if name == "plain" else tcemu.emulate(gpt, tcemu.get_recipe(name))
    compiled, times = time_first_call(jax.jit(emulated or gpt), params, words)
    cpu = time.process_time()
    _, best = timed(lambda: compiled(params, words), args.repeats)
    cpu = (time.process_time() - cpu) / (args.repeats + 1)
    left = 0 if emulated is None else len(emulated.report(params, words).unchanged)
    first_cpu = times.pop("compile_cpu_s") + times.pop("run_cpu_s")
    line = {"recipe": name, **times, "first_cpu_s": first_cpu, "best_s": best, "best_cpu_s": cpu}
    return line | {"peak_mb": peak_megabytes(), "left": left}


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    add_processes(parser, "bf16", "fp8", "mxfp8", "nvfp4")
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args)))
        return 0
    machine = describe_machine()
    print(", ".join(f"{size} {getattr(args, size)}" for size in SIZES))
    print(f"{'recipe':>10} " + " ".join(f"{name:>9}" for name in NAMES))
    lines = []
    for name in ["plain", *args.recipes]:
        with TemporaryDirectory() as cache:
            for again in range(1 + (args.again and name != "plain")):
                line = measure_in_a_process(__file__, args, name, cache if args.again else "off")
                lines.append(line | {"ratio": line["best_s"] / (lines[0] if lines else line)["best_s"], "second_process": bool(again)})
                keys = ("trace_s", "compile_s", "run_s", "first_cpu_s", "best_s", "best_cpu_s", "ratio", "peak_mb")
                figures = " ".join(f"{lines[-1][key]:>9.2f}" if key != "peak_mb" else f"{line[key]:>9}" for key in keys)
                print(f"{name:>10} {figures}{'  in a second process' if again else ''}", flush=True)
    return finish(args, machine, lines, sum(line["left"] for line in lines), "the forward pass", "products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
