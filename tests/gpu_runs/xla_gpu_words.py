# ruff: noqa: E402
"""Words of XLA:GPU: elementwise functions over codes, reductions, softmax and norms, products; with XLA's HLO and PTX.

python xla_gpu_words.py OUT               on a machine with a GPU: OUT/words.npz, OUT/facts.json, OUT/dump.tar.xz
python xla_gpu_words.py --compare OUT     anywhere: the same functions compiled and run by tcemu.xla, which must give OUT's digests
"""

import hashlib
import io
import json
import os
import pathlib
import sys
import tarfile
import tempfile
import time
import traceback

DUMP = tempfile.mkdtemp()
os.environ["XLA_FLAGS"] = f"--xla_dump_to={DUMP} --xla_dump_hlo_as_text"
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FUNCTIONS = {
    "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log, "log1p": jnp.log1p, "log2": jnp.log2, "tanh": jnp.tanh,
    "erf": jax.scipy.special.erf, "erfc": jax.scipy.special.erfc, "logistic": jax.lax.logistic, "rsqrt": jax.lax.rsqrt, "sqrt": jnp.sqrt,
    "sin": jnp.sin, "cos": jnp.cos, "cbrt": jnp.cbrt, "reciprocal": lambda x: 1 / x, "silu": jax.nn.silu, "gelu": jax.nn.gelu,
    "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False), "softplus": jax.nn.softplus, "power_3": lambda x: x**3,
}  # fmt: skip
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
KEPT = ("after_optimizations.txt", ".ptx", "thunk_sequence.txt")


def draw(seed, *shape):
    rng = np.random.Generator(np.random.Philox([7, seed]))
    return rng.integers(-(1 << 15), 1 << 15, shape, dtype=np.int32).astype(np.float32) * np.float32(2.0**-15)


def codes(dtype):
    """All codes of 16 bits; of f32 65,536 that have all exponents and both signs."""
    if dtype == "f32":
        return (np.arange(1 << 16, dtype=np.uint32) * np.uint32(65_537)).view(np.float32)
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])


def rms_norm(x, g):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * g


def layer_norm(x, g):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g


def cases():
    for dtype in DTYPES:
        for name, function in FUNCTIONS.items():
            yield f"{name}_{dtype}", function, (codes(dtype),)
    for dtype in ("f32", "bf16"):
        for rows, columns in ((8, 33), (16, 128), (24, 768), (4, 1000), (3, 5000), (2, 40_000)):
            x, g = draw(1, rows, columns).astype(DTYPES[dtype]), draw(2, columns).astype(DTYPES[dtype])
            shape = f"{dtype}_{rows}x{columns}"
            yield f"rows_{shape}", lambda x: x.sum(1), (x,)
            yield f"columns_{shape}", lambda x: x.sum(0), (x,)
            yield f"softmax_{shape}", lambda x: jax.nn.softmax(x, -1), (x,)
            yield f"rms_norm_{shape}", rms_norm, (x, g)
            yield f"layer_norm_{shape}", layer_norm, (x, g)
        for m, k, n in ((24, 256, 96), (128, 768, 768), (1, 256, 704), (40, 704, 256)):
            operands = draw(3, m, k).astype(DTYPES[dtype]), draw(4, k, n).astype(DTYPES[dtype])
            yield f"dot_{dtype}_{m}x{k}x{n}", jnp.dot, operands


def describe(found):
    """Dtype, shape and digest of a result, and the words of it that are kept."""
    raw = np.ascontiguousarray(found).view(np.uint16 if found.dtype.itemsize == 2 else np.uint32).reshape(-1)
    fact = [str(found.dtype), list(found.shape), hashlib.sha256(raw.tobytes()).hexdigest()[:24]]
    return fact, raw[::16] if raw.size == 1 << 16 and found.dtype.itemsize == 4 else raw[: 1 << 16]


def compare(folder):
    """Print the functions whose words are others, and count the words of those that are equal."""
    import tcemu.xla

    recorded, words, equal, count = json.loads((folder / "facts.json").read_text())["cases"], np.load(folder / "words.npz"), 0, 0
    for name, function, operands in cases():
        program = tcemu.xla.compile(function, *operands, gpu="H200")
        fact, own = describe(np.asarray(program.run(*map(jnp.asarray, operands))[0]))
        if fact == recorded[name]:
            equal, count = equal + 1, count + int(np.prod(fact[1]))
        else:
            print(f"{name}: {int((own != words[name]).sum())} of {own.size} words differ", flush=True)
    print(f"0 of {count:,} words differ in {equal} of {len(recorded)} functions")
    return int(equal < len(recorded))


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    words, facts = {}, {"jax": jax.__version__, "device": str(jax.devices()[0].device_kind), "platform": jax.default_backend(), "cases": {}}
    for name, function, operands in cases():
        if time.time() - BEGAN > 80:
            print("out of time at", name)
            break
        try:
            named = lambda *x, function=function: function(*x)
            named.__name__ = name
            facts["cases"][name], words[name] = describe(np.asarray(jax.jit(named)(*operands)))
        except Exception as error:
            facts["cases"][name] = traceback.format_exception_only(error)[-1][:300]
    np.savez_compressed(out / "words.npz", **words)
    (out / "facts.json").write_text(json.dumps(facts))
    with tarfile.open(out / "dump.tar.xz", "w:xz") as archive:
        for path in sorted(pathlib.Path(DUMP).iterdir()):
            if path.name.endswith(KEPT):
                data = path.read_bytes()
                entry = tarfile.TarInfo(path.name)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    print(jax.__version__, facts["device"], len(words), "cases,", len(list(pathlib.Path(DUMP).iterdir())), "dumped files")


BEGAN = time.time()
if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(compare(pathlib.Path(sys.argv[2])))
    main(pathlib.Path(sys.argv[1]))
