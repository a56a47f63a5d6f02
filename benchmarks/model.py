"""How long until the first result of a whole model with emulated products, and how much slower is each call? `python benchmarks/model.py`

The forward pass of a GPT of `--layers`, by default in the shape of GPT-2 small with random weights, one sequence of `--tokens`, as one
`jax.jit`. The first call is taken apart: tracing and lowering, compiling, and running. Each recipe runs in a process of its own, and so
does plain float32, so that each line has its own peak of memory. `--again` adds a second process, which finds the compiled programs of
a first one on disk.
"""

import json
import os
import resource
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish, timed
from training import gpt

import tcemu
from tcemu.base.compilation import CACHE_VARIABLE

NAMES = ("trace s", "compile s", "run s", "CPU s", "best s", "CPU s", "x plain", "peak MB")
SIZES = {"layers": 12, "width": 768, "heads": 12, "words": 50257, "tokens": 128, "batch": 1}


def draw_model(args) -> tuple[dict, jax.Array]:
    """Parameters and words."""
    rng, width = np.random.default_rng(0), args.width
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(width)))
    shapes = {name: (width, args.heads, width // args.heads) for name in "qkv"} | {"o": (args.heads, width // args.heads, width)}
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(args.layers)]
    params = {"layers": layers, "embedding": normal(args.words, width), "places": normal(args.tokens, width)}
    return params, jnp.asarray(rng.integers(0, args.words, (args.batch, args.tokens)))


def measure(args) -> dict:
    """One line: the first call, taken apart, and the best of those that follow."""
    tcemu.cache_compilations()
    (name,), (params, words) = args.recipes, draw_model(args)
    jax.block_until_ready(params)
    emulated = None if name == "plain" else tcemu.emulate(gpt, tcemu.get_recipe(name))
    marks, cpu = [time.perf_counter()], [time.process_time()]

    def mark() -> None:
        marks.append(time.perf_counter())
        cpu.append(time.process_time())

    lowered = jax.jit(emulated or gpt).lower(params, words)
    mark()
    compiled = lowered.compile()
    mark()
    jax.block_until_ready(compiled(params, words))
    mark()
    _, best = timed(lambda: compiled(params, words), args.repeats)
    mark()
    trace, compile_, run, _ = np.diff(marks)
    left = 0 if emulated is None else len(emulated.report(params, words).unchanged)
    return {
        "recipe": name, "trace_s": trace, "compile_s": compile_, "run_s": run, "first_cpu_s": cpu[3] - cpu[0], "best_s": best,
        "best_cpu_s": (cpu[4] - cpu[3]) / (args.repeats + 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20), "left": left,
    }  # fmt: skip


def measure_in_a_process(args, recipe: str, cache: str = "off") -> dict:
    sizes = [word for size in SIZES for word in (f"--{size}", getattr(args, size))]
    words = [*sizes, "--repeats", args.repeats, "--recipes", recipe, "--alone"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}  # only what is asked for
    environment[CACHE_VARIABLE] = cache
    run = subprocess.run([sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "mxfp8", "nvfp4"])
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--again", action="store_true", help="also a second process, with the compiled programs of a first one on disk")
    parser.add_argument("--alone", action="store_true", help="one recipe, in this process, as a line of JSON")
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
                line = measure_in_a_process(args, name, cache if args.again else "off")
                lines.append(line | {"ratio": line["best_s"] / (lines[0] if lines else line)["best_s"], "second_process": bool(again)})
                keys = ("trace_s", "compile_s", "run_s", "first_cpu_s", "best_s", "best_cpu_s", "ratio", "peak_mb")
                figures = " ".join(f"{lines[-1][key]:>9.2f}" if key != "peak_mb" else f"{line[key]:>9}" for key in keys)
                print(f"{name:>10} {figures}{'  in a second process' if again else ''}", flush=True)
    return finish(args, machine, lines, sum(line["left"] for line in lines), "the forward pass", "products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
