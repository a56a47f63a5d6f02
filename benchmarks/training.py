"""How much slower is training with emulated products? `python benchmarks/training.py`: a step of a transformer, beside the plain f32 step.

One encoder block with attention, mean squared error, the gradient of every parameter and a step of gradient descent, compiled whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, describe_machine, finish, timed

import tcemu

TOKENS, WIDTH, HEADS, HIDDEN = 64, 128, 4, 256


def norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def encoder(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x: [batch, tokens, width]"""
    q, k, v = (jnp.einsum("btw,whd->bthd", norm(x), params[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH / HEADS), axis=-1)
    x = x + jnp.einsum("bthd,hdw->btw", jnp.einsum("bhts,bshd->bthd", weights, v), params["o"])
    return x + jax.nn.gelu(norm(x) @ params["up"]) @ params["down"]


def step(model, params, x, y):
    gradient = jax.grad(lambda params: ((model(params, x) - y) ** 2).mean())(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()

    machine = describe_machine()
    rng = np.random.default_rng(0)
    shapes = {name: (WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
    shapes |= {"o": (HEADS, WIDTH // HEADS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    params = {name: jnp.asarray(rng.normal(size=shape) / np.sqrt(WIDTH), jnp.float32) for name, shape in shapes.items()}
    x, y = (jnp.asarray(rng.normal(size=(args.batch, TOKENS, WIDTH)), jnp.float32) for _ in range(2))
    print(f"batch {args.batch}, {TOKENS} tokens, width {WIDTH}, {HEADS} heads, hidden {HIDDEN}; backward products by their own recipes")
    print(f"{'recipe':>10} {'first call s':>13} {'best s':>9} {'x slower than plain f32':>24}")
    lines, left, base = [], 0, 0.0
    for name in ["plain", *args.recipes]:
        model = encoder if name == "plain" else tcemu.emulate(encoder, tcemu.recipe(name))
        train = jax.jit(lambda params, x, y, model=model: step(model, params, x, y))
        first, best = timed(lambda train=train: train(params, x, y), args.repeats)
        base = base or best
        if name != "plain":
            left += len(model.report(params, x).left)
        lines.append({"recipe": name, "batch": args.batch, "first_call_s": first, "best_s": best, "ratio": best / base})
        print(f"{name:>10} {first:>13.2f} {best:>9.4f} {best / base:>24.1f}", flush=True)
    return finish(args, machine, lines, left, "the forward pass", "products left as they were")


if __name__ == "__main__":
    raise SystemExit(main())
