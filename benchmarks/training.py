"""How long until the first training step with emulated products, and how much slower is each? `python benchmarks/training.py`

A step of an encoder (`--model encoder`) or of a GPT with tied embeddings (`--model gpt`), `--layers` deep, its layers a Python loop: the
gradient of every parameter and a step of gradient descent, compiled whole. Each recipe runs in a process of its own, and so does the same
model in plain float32, so that each line has its own peak of memory. A GPU multiplies float32 as TF32 unless it is told otherwise: it has
one more plain line, with products in full float32, and each recipe's time is divided by either. `--deep N` adds the time to the first step
with N layers, over one's; `--again` that of a second process, which finds the compiled programs of a first one on disk.
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
from harness import add_execution, arguments, describe_machine, finish, timed

import tcemu
from tcemu.base.compilation import CACHE_VARIABLE

WIDTH = {"encoder": 128, "gpt": 64}
PLAIN = {"plain": None, "plain f32": "highest"}  # JAX's precision of matrix products
HEADS, HIDDEN, WORDS = 4, 2, 256  # HIDDEN: times the width; WORDS: of the GPT's vocabulary
COLUMNS = f"{'recipe':>10} {'trace s':>8} {'compile s':>10} {'CPU s':>7} {'best s':>9} {'x plain':>8} {'x f32':>7} {'peak MB':>8}"


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def block(params: dict[str, jax.Array], x: jax.Array, causal: bool) -> jax.Array:
    """x: [batch, tokens, width]"""
    q, k, v = (jnp.einsum("btw,whd->bthd", norm(x), params[name]) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e9) if causal else scores
    x = x + jnp.einsum("bthd,hdw->btw", jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v), params["o"])
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def encoder(params: dict, x: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = block(layer, x, causal=False)
    return x


def gpt(params: dict, words: jax.Array) -> jax.Array:
    """Logits [batch, tokens, WORDS]; the embedding gives the last product its matrix too."""
    x = params["embedding"][words] + params["places"]
    for layer in params["layers"]:
        x = block(layer, x, causal=True)
    return norm(x) @ params["embedding"].T


def encoder_loss(model, params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(params, x) - y) ** 2).mean()


def gpt_loss(model, params: dict, words: jax.Array, following: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(model(params, words)), following[..., None], -1).mean()


MODELS = {"encoder": (encoder, encoder_loss), "gpt": (gpt, gpt_loss)}


def drawn(args) -> tuple[dict, jax.Array, jax.Array]:
    """Parameters, inputs, targets."""
    rng, width, tokens = np.random.default_rng(0), width_of(args), args.tokens
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / np.sqrt(width), jnp.float32)
    shapes = {name: (width, HEADS, width // HEADS) for name in "qkv"} | {"o": (HEADS, width // HEADS, width)}
    shapes |= {"up": (width, HIDDEN * width), "down": (HIDDEN * width, width)}
    params: dict = {"layers": [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(args.layers)]}
    if args.model == "encoder":
        x, y = (jnp.asarray(rng.normal(size=(args.batch, tokens, width)), jnp.float32) for _ in range(2))
        return params, x, y
    words = jnp.asarray(rng.integers(0, WORDS, (args.batch, tokens + 1)))
    return params | {"embedding": normal(WORDS, width), "places": normal(tokens, width)}, words[:, :-1], words[:, 1:]


def width_of(args) -> int:
    return args.width or WIDTH[args.model]


def measured(args) -> dict:
    """One line: the first step, taken apart, and the best of those that follow."""
    function, loss = MODELS[args.model]
    tcemu.cache_compilations()
    (name,), (params, x, y) = args.recipes, drawn(args)
    emulated = function if name in PLAIN else tcemu.emulate(function, tcemu.get_recipe(name))

    @jax.jit
    def step(params: dict, x: jax.Array, y: jax.Array) -> dict:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss, argnums=1)(emulated, params, x, y))

    began, cpu = time.perf_counter(), time.process_time()
    with tcemu.execution(args.execution), jax.default_matmul_precision(PLAIN.get(name)):
        lowered = step.lower(params, x, y)
    traced = time.perf_counter()
    compiled = lowered.compile()
    done, cpu = time.perf_counter(), time.process_time() - cpu
    _, best = timed(lambda: jax.tree.leaves(compiled(params, x, y))[0], args.repeats)
    left = 0 if name in PLAIN else len(emulated.report(params, x).unchanged)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "linux" else 1 << 20)
    times = {"trace_s": traced - began, "compile_s": done - traced, "first_cpu_s": cpu, "best_s": best}
    return {"recipe": name, "model": args.model, "layers": args.layers, "batch": args.batch, **times, "peak_mb": peak, "left": left}


def in_a_process(args, recipe: str, layers: int, cache: str = "off") -> dict:
    words = ["--model", args.model, "--layers", layers, "--batch", args.batch, "--repeats", args.repeats, "--recipes", recipe, "--alone"]
    words += ["--width", width_of(args), "--tokens", args.tokens, "--execution", args.execution]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}  # only what is asked for
    environment[CACHE_VARIABLE] = cache
    run = subprocess.run([sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8", "mxfp8", "nvfp4"])
    parser.add_argument("--model", choices=MODELS, default="encoder")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--deep", type=int, metavar="N", help="also N layers against one")
    parser.add_argument("--again", action="store_true", help="also a second process, with the compiled programs of a first one on disk")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    add_execution(parser)
    parser.add_argument("--width", type=int, help=f"of the model (default: {WIDTH})")
    parser.add_argument("--alone", action="store_true", help="one recipe, in this process, as a line of JSON")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measured(args)))
        return 0

    machine = describe_machine()
    size = f"width {width_of(args)}, {HEADS} heads, hidden {HIDDEN * width_of(args)}"
    print(f"{args.model}, {args.layers} layers, batch {args.batch}, {args.tokens} tokens, {size}; backward products by their own recipes")
    print(COLUMNS)
    lines, seconds = [], {}
    for name in [*(PLAIN if jax.default_backend() == "gpu" else ["plain"]), *args.recipes]:
        line = in_a_process(args, name, args.layers)
        seconds[name] = line["best_s"]
        ratios = [line["best_s"] / seconds.get(plain, seconds["plain"]) for plain in PLAIN]
        lines.append(line | {"ratio": ratios[0], "ratio_f32": ratios[1]})
        figures = f"{line['trace_s']:>8.2f} {line['compile_s']:>10.2f} {line['first_cpu_s']:>7.1f} {line['best_s']:>9.4f}"
        print(f"{name:>10} {figures} {ratios[0]:>8.1f} {ratios[1]:>7.1f} {line['peak_mb']:>8}", flush=True)
    for name in args.recipes if args.deep else ():
        one, deep = (in_a_process(args, name, layers) for layers in (1, args.deep))
        lines += [one, deep]
        apart = ", ".join(f"{words} {deep[key] / one[key]:.2f}" for words, key in (("trace", "trace_s"), ("compile", "compile_s")))
        cpu = deep["first_cpu_s"] / one["first_cpu_s"]
        print(f"{name:>10} {args.deep} layers over 1, times as long to the first step: {apart}; both, in CPU time {cpu:.2f}", flush=True)
    for name in args.recipes if args.again else ():
        with TemporaryDirectory() as cache:
            _, second = (in_a_process(args, name, args.layers, cache) for _ in range(2))
        lines.append(second)
        trace, compile_, cpu = (second[key] for key in ("trace_s", "compile_s", "first_cpu_s"))
        print(f"{name:>10} in a second process: trace {trace:.2f} s, compile {compile_:.2f} s; both, in CPU time {cpu:.1f} s", flush=True)
    return finish(args, machine, lines, sum(line["left"] for line in lines), "the forward pass", "products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
