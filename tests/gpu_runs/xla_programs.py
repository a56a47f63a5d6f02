"""Words of whole JAX functions on a GPU, with XLA's dump of each: compiled by XLA's defaults, and with nothing chosen by time.

python xla_programs.py OUT untimed     on a machine with a GPU: OUT/words.npz, OUT/facts.json, OUT/dump.tar.xz
python xla_programs.py OUT2 default    in a process of its own: what XLA has timed it keeps until the process ends
python xla_programs.py --between FOLDER FOLDER2     words and launches of two recordings that differ, by function
python xla_programs.py --compare FOLDER [--gpu H200]     the same functions by tcemu.xla: words that differ from FOLDER's, by function
"""

import io
import itertools
import json
import os
import sys
import tarfile
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

KEPT = ("after_optimizations.txt", "buffer-assignment.txt", ".ptx", "thunk_sequence.txt", "thunk_metadata.txt", "gpu_target_config.pbtxt")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
MODES = {"default": {}, "untimed": {"xla_gpu_autotune_level": 0}}


def draw(seed, *shape, scale=1.0, dtype="f32"):
    rng = np.random.Generator(np.random.Philox([11, seed]))
    return (rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int32).astype(np.float32) * np.float32(scale * 2.0**-15)).astype(
        DTYPES[dtype]
    )


def layer_norm(x, scale):
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(((wide - mean) ** 2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def block(x, weights):
    """A layer of a transformer: causal attention with four heads, and an MLP."""
    rows, width = x.shape
    heads = (layer_norm(x, weights["n1"]) @ weights["qkv"]).reshape(rows, 3, 4, width // 4)
    q, k, v = heads[:, 0], heads[:, 1], heads[:, 2]
    scores = jnp.einsum("qhd,khd->hqk", q, k).astype(jnp.float32) / np.float32((width // 4) ** 0.5)
    scores = jnp.where(jnp.tril(jnp.ones((rows, rows), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1).astype(x.dtype), v).reshape(rows, width)
    x = x + mixed @ weights["o"]
    return x + jax.nn.gelu(layer_norm(x, weights["n2"]) @ weights["up"]) @ weights["down"]


def block_weights(width, dtype, seed=20):
    shapes = {"qkv": (width, 3 * width), "o": (width, width), "up": (width, 2 * width), "down": (2 * width, width)}
    found = {name: draw(seed + n, *shape, scale=width**-0.5, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return found | {"n1": draw(seed + 8, width, dtype=dtype), "n2": draw(seed + 9, width, dtype=dtype)}


def mlp_loss(weights, x, labels):
    hidden = jax.nn.relu(x @ weights["up"] + weights["b"])
    logits = (hidden @ weights["down"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits, -1), labels[:, None], -1).mean()


def sgd_step(weights, x, labels):
    loss, gradient = jax.value_and_grad(mlp_loss)(weights, x, labels)
    return loss, jax.tree.map(lambda w, g: w - (0.1 * g).astype(w.dtype), weights, gradient)


def adam_step(state, gradient):
    first = 0.9 * state["m"] + 0.1 * gradient
    second = 0.999 * state["v"] + 0.001 * gradient * gradient
    return {"w": state["w"] - 1e-3 * (first / 0.1) / (jnp.sqrt(second / 0.001) + 1e-8), "m": first, "v": second}


def recurrent(weights, x):
    def step(state, row):
        state = jnp.tanh(state @ weights + row)
        return state, state.sum()

    return jax.lax.scan(step, jnp.zeros(x.shape[1:], x.dtype), x)


def embedded(table, ids):
    rows = table[ids]
    return rows, jnp.zeros_like(table).at[ids].add(rows), jnp.argmax(rows, -1), jnp.sort(rows, -1), jnp.cumsum(rows, -1)


def cases():
    """Name, function and arguments."""
    for dtype in ("f32", "bf16"):
        for rows, width in ((16, 64), (37, 128)):
            yield f"block_{dtype}_{rows}x{width}", block, (draw(1, rows, width, dtype=dtype), block_weights(width, dtype))
        weights = {
            "up": draw(2, 96, 128, scale=0.1, dtype=dtype),
            "b": draw(3, 128, dtype=dtype),
            "down": draw(4, 128, 40, scale=0.1, dtype=dtype),
        }
        labels = np.arange(24, dtype=np.int32) * 7 % 40
        yield f"sgd_step_{dtype}", sgd_step, (weights, draw(5, 24, 96, dtype=dtype), labels)
        yield f"recurrent_{dtype}", recurrent, (draw(6, 32, 32, scale=0.2, dtype=dtype), draw(7, 5, 8, 32, dtype=dtype))
    state = {"w": draw(8, 300, 7), "m": draw(9, 300, 7, scale=0.01), "v": draw(10, 300, 7, scale=0.01) ** 2}
    yield "adam_step", adam_step, (state, draw(11, 300, 7, scale=0.1))
    yield "embedded", embedded, (draw(12, 50, 24), np.array([3, 49, 3, 0, 17, 8], np.int32))
    yield (
        "gated_f16",
        lambda x, a, b: jax.nn.silu(x @ a) * (x @ b),
        (draw(13, 8, 64, dtype="f16"), *(draw(n, 64, 96, scale=0.2, dtype="f16") for n in (14, 15))),
    )
    yield "logsumexp_f32", lambda x: jax.nn.logsumexp(x, 0), (draw(16, 70, 33, scale=9),)
    yield "variance_bf16", lambda x: (x.mean(0), x.var(0), jnp.max(x), x.prod(1)), (draw(17, 60, 90, dtype="bf16"),)


def words(x):
    x = np.ascontiguousarray(x)
    return x.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def record(out: Path, only: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found, facts, dump = {}, {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "seconds": {}}, Path(tempfile.mkdtemp())
    for mode, options in MODES.items():
        if only not in ("", mode):
            continue
        for name, function, operands in cases():
            began, folder = time.perf_counter(), dump / f"{mode}.{name}"
            try:
                options = {
                    **options,
                    "xla_dump_to": str(folder),
                    "xla_dump_hlo_as_text": True,
                    "xla_dump_large_constants": True,
                    "xla_dump_emitter_re": "ptx",
                }
                compiled = jax.jit(function, keep_unused=True).lower(*operands).compile(compiler_options=options)
                for number, leaf in enumerate(jax.tree.leaves(compiled(*jax.device_put(operands)))):
                    found[f"{mode}.{name}.{number}"] = words(np.asarray(leaf))
            except Exception as error:
                facts[f"{mode}.{name}"] = traceback.format_exception_only(error)[-1][:300]
            facts["seconds"][f"{mode}.{name}"] = round(time.perf_counter() - began, 2)
    np.savez_compressed(out / "words.npz", **found)
    (out / "facts.json").write_text(json.dumps(facts, indent=1))
    with tarfile.open(out / "dump.tar.xz", "w:xz") as archive:
        for path in sorted(dump.glob("*/*")):
            if path.name.endswith(KEPT):
                data = path.read_bytes()
                entry = tarfile.TarInfo(f"{path.parent.name}/{path.name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    print(facts["jax"], facts["device"], len(found), "results")


def launches(folder: Path) -> dict[str, str]:
    """The steps of the runtime by program."""
    with tarfile.open(folder / "dump.tar.xz") as archive:
        return {
            member.name.partition("/")[0]: archive.extractfile(member).read().decode()
            for member in archive.getmembers()
            if member.name.endswith("thunk_sequence.txt")
        }


def between(one: Path, other: Path) -> int:
    """Print what XLA chose and computed otherwise in a second process."""
    x, y, steps, again = np.load(one / "words.npz"), np.load(other / "words.npz"), launches(one), launches(other)
    for program in sorted(steps.keys() & again.keys()):
        names = [name for name in x.files if name.rpartition(".")[0] == program]
        wrong, count = sum(int((x[name] != y[name]).sum()) for name in names), sum(x[name].size for name in names)
        print(f"{program}: {wrong} of {count} words differ, {'equal' if steps[program] == again[program] else 'other'} launches")
    return 0


def compare(folder: Path, gpu: str) -> int:
    """Count the words that differ: by tcemu's own compilation from both recordings, and by the recorded dump of XLA's defaults."""
    import tcemu.xla

    recorded, total, wrong = np.load(folder / "words.npz"), 0, 0
    with tempfile.TemporaryDirectory() as dumped:
        with tarfile.open(folder / "dump.tar.xz") as archive:
            archive.extractall(dumped, filter="data")
        for name, function, operands in cases():
            for mode, way in itertools.product(MODES, ("the GPU's dump", "compiled here")):
                if f"{mode}.{name}.0" not in recorded:
                    continue
                began = time.process_time()
                try:
                    if way == "compiled here":
                        program = tcemu.xla.compile(function, *operands, gpu=gpu, options=MODES[mode])
                    else:
                        program = tcemu.xla.read(Path(dumped) / f"{mode}.{name}", target=gpu)[0]
                    leaves = jax.tree.leaves(program.run(*jax.tree.leaves(operands))[0])
                except Exception as error:
                    print(f"{mode}, {name}, {way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                    continue
                pairs = [(words(leaf), recorded[f"{mode}.{name}.{number}"]) for number, leaf in enumerate(leaves)]
                differing, count = sum(int((x != y).sum()) for x, y in pairs), sum(y.size for _, y in pairs)
                wrong, total = wrong + differing, total + count
                print(f"{mode}, {name}, {way}: {differing} of {count} words differ, {time.process_time() - began:.1f} CPU s", flush=True)
    print(f"{wrong} of {total:,} words differ")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1] == "--between":
        sys.exit(between(Path(sys.argv[2]), Path(sys.argv[3])))
    if sys.argv[1] == "--compare":
        sys.exit(compare(Path(sys.argv[2]), sys.argv[4] if len(sys.argv) > 4 else "H200"))
    record(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
