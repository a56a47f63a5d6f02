"""The census of PyTorch's CUDA operators: its cases by name, their inputs by seeds, and what tcemu computes for them.

    python tests/operations/functional/torch_census.py [reduce/sum sdpa/FLASH_ATTENTION ...]

computes every case of the kinds that are named, or all, and counts those whose words are the H200's (tests/golden/torch_h200.json.xz).
A case without a rule raises NotModelled, and is counted by what is missing.
"""

import hashlib
import json
import lzma
import sys
import zlib
from collections import Counter
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.attention import attention, attention_backward
from tcemu.operations.functional.torch_cuda.elementwise import elementwise
from tcemu.operations.functional.torch_cuda.rows import layer_norm, reduce, rms_norm, softmax, softmax_backward, variance

GOLDEN = Path(__file__).parents[2] / "golden/torch_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
ROWS = 5  # of the reductions


@cache
def recorded() -> dict:
    """The H200's cases that repeat: name -> digests of the results."""
    cases = json.loads(lzma.decompress(GOLDEN.read_bytes()))["cases"]
    return {name: case["digests"] for name, case in cases.items() if case.get("repeats")}


def kind(name: str) -> str:
    return "/".join(name.split("|")[:2])


def generator(key: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(key.encode())))


def normal(key: str, shape: int | tuple[int, ...], dtype: str, scale: float = 1.0) -> np.ndarray:
    return (generator(key).standard_normal(shape) * scale).astype(np.float32).astype(DTYPES[dtype])


def all_codes(key: str, dtype: str) -> np.ndarray:
    """Every code of a 16-bit dtype, or as many of f32."""
    if dtype != "f32":
        return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    rng = generator(key)
    usual = (rng.standard_normal(1 << 15) * np.exp2(rng.integers(-20, 8, 1 << 15))).astype(np.float32)
    return np.concatenate([usual, rng.integers(0, 1 << 32, 1 << 15, dtype=np.uint32).view(np.float32)])


BINARY = {
    "add_a": lambda x, y: elementwise("add", x, y, alpha=0.3),
    "lerp": lambda x, y: elementwise("lerp", x, y, weight=0.1),
    "addcmul": lambda x, y: elementwise("addcmul", x, y, y, value=0.1),
    "addcdiv": lambda x, y: elementwise("addcdiv", x, y, elementwise("add", abs(y), np.ones_like(y)), value=-0.01),
    "sigmoid_backward": lambda x, y: elementwise("sigmoid_backward", x, elementwise("sigmoid", y)),
    "tanh_backward": lambda x, y: elementwise("tanh_backward", x, elementwise("tanh", y)),
}


def logsumexp(x):
    x = x.astype(np.float32)
    largest = reduce("amax", x)
    powers = elementwise("exp", elementwise("add", x, jnp.broadcast_to(-largest[:, None], x.shape)))
    return elementwise("add", elementwise("log", reduce("sum", powers)), largest)


def product(x):
    return reduce("prod", elementwise("add", elementwise("mul", x, 0.01), 1.0))


REDUCE = {
    **{name: (lambda x, name=name: reduce(name, x)) for name in ("sum", "mean", "norm", "amax")},
    "prod": product,
    "sum0": lambda x: reduce("sum", np.ascontiguousarray(x.T), 0),
    "sum_all": lambda x: reduce("sum", x, None),
    "mean_pow2": lambda x: reduce("mean", elementwise("pow2", x.astype(np.float32))),
    "softmax": softmax,
    "softmax_f32": lambda x: softmax(x, dtype=np.float32),
    "log_softmax": lambda x: softmax(x, log=True),
    "softmax_bwd": lambda x: softmax_backward(x[:, ::-1], softmax(x)),
    "log_softmax_bwd": lambda x: softmax_backward(x[:, ::-1], softmax(x, log=True), log=True),
    "logsumexp": logsumexp,
    "var": lambda x: variance(x.astype(np.float32)),
    "std_all": lambda x: elementwise("sqrt", variance(x.astype(np.float32), None)),
}
NORM = {
    "layer_norm": lambda x, w, b: layer_norm(x, w, b, 1e-5),
    "rms_norm": lambda x, w, b: [rms_norm(x, w, 1e-6)],
}
SDPA = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cudnn", "MATH": "math"}


def sdpa(backend: str, way: str, dtype: str, case: str) -> list:
    *sizes, causal = case.split(",")
    b, h, key_heads, s, keys, d = map(int, sizes)
    seed = f"{s}{keys}{d}"
    q = normal(f"q{seed}", (b, h, s, d), dtype)
    k, v = (normal(f"{which}{seed}", (b, key_heads, keys, d), dtype) for which in "kv")
    options = {"backend": SDPA[backend], "causal": causal == "True"}
    out, logsumexp = attention(q, k, v, **options)
    return [out] if way == "fwd" else list(attention_backward(out[..., ::-1], q, k, v, out, logsumexp, **options))


def compute(name: str) -> list:
    """The results of a case.

    Raises:
        NotModelled: There is no rule for it.
    """
    group, operator, dtype, *rest = name.split("|")
    if group == "unary":
        return [elementwise(operator, all_codes(operator + dtype, dtype))]
    if group == "binary":
        x, y = (normal(f"{operator}{which}{dtype}", 1 << 16, dtype, 3) for which in "xy")
        return [BINARY.get(operator, lambda x, y: elementwise(operator, x, y))(x, y)]
    if group == "reduce" and operator in REDUCE:
        return [REDUCE[operator](normal(f"{operator}{dtype}{rest[0]}", (ROWS, int(rest[0])), dtype, 2))]
    if group == "norm" and operator in NORM:
        rows, columns = map(int, rest[0].split("x"))
        x = normal(f"{operator}{dtype}{columns}", (rows, columns), dtype, 2)
        return list(NORM[operator](x, *(normal(f"{which}{operator}{columns}", columns, dtype) for which in "wb")))
    if group == "sdpa":
        way, dtype, (case,) = dtype, rest[0], rest[1:]
        return sdpa(operator, way, dtype, case)
    raise NotModelled(f"{group}/{operator}: no rule")


def is_equal(name: str) -> bool:
    """Whether tcemu gives every word of a case."""
    return [hashlib.sha256(np.asarray(y).tobytes()).hexdigest()[:32] for y in compute(name)] == recorded()[name]


def main(kinds: list[str]) -> None:
    equal, wrong, missing, counts = Counter(), [], Counter(), Counter()
    for name in recorded():
        if kinds and kind(name) not in kinds:
            continue
        counts[kind(name)] += 1
        try:
            same = is_equal(name)
            equal[kind(name)] += same
            wrong += [] if same else [name]
        except NotModelled as error:
            missing[kind(name), str(error).split(";")[0][:60]] += 1
    for each, count in counts.items():
        print(f"{each}: {equal[each]} of {count} cases equal")
    print(f"{equal.total()} of {counts.total()} cases equal; other words: {wrong}")
    for (each, what), count in missing.items():
        print(f"no rule: {count} of {each}: {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
