"""How long until the first training step with emulated products, and how much slower is each? `python benchmarks/training.py`

A step of an encoder (`--model encoder`) or of a GPT with tied embeddings (`--model gpt`), `--layers` deep, its layers a Python loop: the
gradient of every parameter and a step of gradient descent, compiled whole. Each recipe runs in a process of its own, and so does the same
model in plain float32, so that each line has its own peak of memory. A GPU multiplies float32 as TF32 unless it is told otherwise: it has
one more plain line, with products in full float32, and each recipe's time is divided by either. `--deep N` adds the time to the first step
with N layers, over one's; `--again` that of a second process, which finds the compiled programs of a first one on disk.
"""

import json
from tempfile import TemporaryDirectory

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import add_execution, add_processes, arguments, describe_machine, finish, measure_in_a_process, timed

import tcemu

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
    x = params["embedding"][words] + params["positions"]
    for layer in params["layers"]:
        x = block(layer, x, causal=True)
    return norm(x) @ params["embedding"].T


def encoder_loss(model, params: dict, x: jax.Array, y: jax.Array) -> jax.Array:
    return ((model(params, x) - y) ** 2).mean()


def gpt_loss(model, params: dict, words: jax.Array, following: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(model(params, words)), following[..., None], -1).mean()


MODELS = {"encoder": (encoder, encoder_loss), "gpt": (gpt, gpt_loss)}


def draw_layers(rng: np.random.Generator, layers: int, width: int, heads: int, hidden: int) -> dict:
    """Parameters of `block` for each layer; hidden: of the MLP, in widths."""
    shapes = {name: (width, heads, width // heads) for name in "qkv"} | {"o": (heads, width // heads, width)}
    shapes |= {"up": (width, hidden * width), "down": (hidden * width, width)}
    return {"layers": [{name: draw_matrix(rng, width, *shape) for name, shape in shapes.items()} for _ in range(layers)]}


def draw_matrix(rng: np.random.Generator, width: int, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(width)))


def draw_gpt(rng: np.random.Generator, layers: int, width: int, heads: int, hidden: int, words: int, tokens: int) -> dict:
    """Parameters of `gpt`."""
    embeddings = {"embedding": draw_matrix(rng, width, words, width), "positions": draw_matrix(rng, width, tokens, width)}
    return draw_layers(rng, layers, width, heads, hidden) | embeddings


def draw_model(args) -> tuple[dict, jax.Array, jax.Array]:
    """Parameters, inputs, targets."""
    rng, width, tokens = np.random.default_rng(0), model_width(args), args.tokens
    if args.model == "encoder":
        x, y = (jnp.asarray(rng.standard_normal((args.batch, tokens, width), np.float32)) for _ in range(2))
        return draw_layers(rng, args.layers, width, HEADS, HIDDEN), x, y
    words = jnp.asarray(rng.integers(0, WORDS, (args.batch, tokens + 1)))
    return draw_gpt(rng, args.layers, width, HEADS, HIDDEN, WORDS, tokens), words[:, :-1], words[:, 1:]


def model_width(args) -> int:
    return args.width or WIDTH[args.model]


def measure(args) -> dict:
    """One line: the first step, taken apart, and the best of those that follow."""
    function, loss = MODELS[args.model]
    tcemu.cache_compilations()
    (name,), (params, x, y) = args.recipes, draw_model(args)
    emulated = function if name in PLAIN else tcemu.emulate(function, tcemu.get_recipe(name))

    @jax.jit
    def step(params: dict, x: jax.Array, y: jax.Array) -> dict:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss, argnums=1)(emulated, params, x, y))

    with tcemu.execution(args.execution), jax.default_matmul_precision(PLAIN.get(name)):
        compiled, times = harness.time_first_call(step, params, x, y)
    _, best = timed(lambda: jax.tree.leaves(compiled(params, x, y))[0], args.repeats)
    left = 0 if name in PLAIN else len(emulated.report(params, x).unchanged)
    times = {"trace_s": times["trace_s"], "compile_s": times["compile_s"], "first_cpu_s": times["compile_cpu_s"], "best_s": best}
    shape = {"model": args.model, "layers": args.layers, "batch": args.batch}
    return {"recipe": name, **shape, **times, "peak_mb": harness.peak_megabytes(), "left": left}


def main() -> int:
    parser = arguments(__doc__)
    add_processes(parser, "bf16", "fp8", "mxfp8", "nvfp4")
    parser.add_argument("--model", choices=MODELS, default="encoder")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--deep", type=int, metavar="N", help="also N layers against one")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    add_execution(parser)
    parser.add_argument("--width", type=int, help=f"of the model (default: {WIDTH})")
    args = parser.parse_args()
    if args.alone:
        print(json.dumps(measure(args)))
        return 0

    machine = describe_machine()
    size = f"width {model_width(args)}, {HEADS} heads, hidden {HIDDEN * model_width(args)}"
    print(f"{args.model}, {args.layers} layers, batch {args.batch}, {args.tokens} tokens, {size}; backward products by their own recipes")
    print(COLUMNS)
    lines, seconds = [], {}
    for name in [*(PLAIN if jax.default_backend() == "gpu" else ["plain"]), *args.recipes]:
        line = measure_in_a_process(__file__, args, name)
        seconds[name] = line["best_s"]
        ratios = [line["best_s"] / seconds.get(plain, seconds["plain"]) for plain in PLAIN]
        lines.append(line | {"ratio": ratios[0], "ratio_f32": ratios[1]})
        figures = f"{line['trace_s']:>8.2f} {line['compile_s']:>10.2f} {line['first_cpu_s']:>7.1f} {line['best_s']:>9.4f}"
        print(f"{name:>10} {figures} {ratios[0]:>8.1f} {ratios[1]:>7.1f} {line['peak_mb']:>8}", flush=True)
    for name in args.recipes if args.deep else ():
        one, deep = (measure_in_a_process(__file__, args, name, layers=layers) for layers in (1, args.deep))
        lines += [one, deep]
        apart = ", ".join(f"{words} {deep[key] / one[key]:.2f}" for words, key in (("trace", "trace_s"), ("compile", "compile_s")))
        cpu = deep["first_cpu_s"] / one["first_cpu_s"]
        print(f"{name:>10} {args.deep} layers over 1, times as long to the first step: {apart}; both, in CPU time {cpu:.2f}", flush=True)
    for name in args.recipes if args.again else ():
        with TemporaryDirectory() as cache:
            _, second = (measure_in_a_process(__file__, args, name, cache) for _ in range(2))
        lines.append(second)
        trace, compile_, cpu = (second[key] for key in ("trace_s", "compile_s", "first_cpu_s"))
        print(f"{name:>10} in a second process: trace {trace:.2f} s, compile {compile_:.2f} s; both, in CPU time {cpu:.1f} s", flush=True)
    return finish(args, machine, lines, sum(line["left"] for line in lines), "the forward pass", "products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
