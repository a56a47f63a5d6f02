"""The census of PyTorch's CUDA operators: its cases by name, their inputs by seeds, and what tcemu computes for them.

    python tests/operations/functional/torch_census.py [reduce/sum sdpa/FLASH_ATTENTION ...]

computes every case of the kinds that are named, or all, and counts those whose words are the H200's (tests/golden/torch_h200.json.xz).
A case without a rule raises NotModelled, and is counted by what is missing. CUTLASS's attention leaves the order of several blocks of keys
open: its gradients are computed in lockstep. Functions of rows are evaluated by NumPy.
"""

import hashlib
import json
import lzma
import sys
import zlib
from collections import Counter
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda import (
    batch_norms,
    elementwise,
    embeddings,
    losses,
    norms,
    rows,
    scans,
    softmax,
    sorting,
)
from tcemu.operations.functional.torch_cuda.attention import attention, attention_backward
from tcemu.operations.functional.torch_cuda.numpy_evaluation import call_by_numpy
from tcemu.operations.functional.torch_cuda.optimizers import AdamState, adamw_step, sgd_step
from tcemu.uses.replay.torch_products import matmul

FUNCTIONS = {  # of rows and elements: a case is quick where NumPy evaluates them, since nothing is compiled
    batch_norms: "batch_norm batch_norm_backward",
    elementwise: "elementwise",
    embeddings: "embedding_backward index_add index_put_accumulate",
    losses: "cross_entropy cross_entropy_backward mse_loss mse_loss_backward nll_loss nll_loss_backward",
    norms: "group_norm group_norm_backward layer_norm layer_norm_backward rms_norm rms_norm_backward",
    rows: "reduce standard_deviation var_mean variance vector_norm",
    scans: "cumprod cumsum",
    softmax: "logsumexp softmax softmax_backward",
    sorting: "sort topk",
}
F = SimpleNamespace(**{name: getattr(module, name) for module, names in FUNCTIONS.items() for name in names.split()})


def evaluate_by_numpy() -> None:
    """Let NumPy evaluate the functions from now on."""
    vars(F).update({name: partial(call_by_numpy, fn) for name, fn in vars(F).items()})


GOLDEN = Path(__file__).parents[2] / "golden/torch_h200.json.xz"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
ROWS, LOSS_ROWS = 5, 37  # of the reductions, and of the losses


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
    "add_a": lambda x, y: F.elementwise("add", x, y, alpha=0.3),
    "lerp": lambda x, y: F.elementwise("lerp", x, y, weight=0.1),
    "addcmul": lambda x, y: F.elementwise("addcmul", x, y, y, value=0.1),
    "addcdiv": lambda x, y: F.elementwise("addcdiv", x, y, F.elementwise("add", abs(y), np.ones_like(y)), value=-0.01),
    "sigmoid_backward": lambda x, y: F.elementwise("sigmoid_backward", x, F.elementwise("sigmoid", y)),
    "tanh_backward": lambda x, y: F.elementwise("tanh_backward", x, F.elementwise("tanh", y)),
}


def product(x):
    return F.reduce("prod", F.elementwise("add", F.elementwise("mul", x, 0.01), 1.0))


REDUCE = {
    **{name: (lambda x, name=name: F.reduce(name, x)) for name in ("sum", "mean", "norm", "amax")},
    "prod": product,
    "sum0": lambda x: F.reduce("sum", np.ascontiguousarray(x.T), 0),
    "sum_all": lambda x: F.reduce("sum", x, None),
    "mean_pow2": lambda x: F.reduce("mean", F.elementwise("pow2", x.astype(np.float32))),
    "softmax": lambda x: F.softmax(x),
    "softmax_f32": lambda x: F.softmax(x, dtype=np.float32),
    "log_softmax": lambda x: F.softmax(x, log=True),
    "softmax_bwd": lambda x: F.softmax_backward(x[:, ::-1], F.softmax(x)),
    "log_softmax_bwd": lambda x: F.softmax_backward(x[:, ::-1], F.softmax(x, log=True), log=True),
    "cumsum": lambda x: F.cumsum(x),
    "logsumexp": lambda x: F.logsumexp(x.astype(np.float32)),
    "var": lambda x: F.variance(x.astype(np.float32)),
    "std_all": lambda x: F.standard_deviation(x.astype(np.float32), None),
}


def rms_norm_gradients(x, w, b):
    y, scale = F.rms_norm(x, w, 1e-6)
    return F.rms_norm_backward(np.asarray(y)[:, ::-1], x, scale, w)


NORM = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, w, b, 1e-5),
    "rms_norm": lambda x, w, b: [F.rms_norm(x, w, 1e-6)[0]],
    "layer_norm_bwd": lambda x, w, b: F.layer_norm_backward(x[:, ::-1], x, *F.layer_norm(x, w, b, 1e-5)[1:], w),
    "rms_norm_bwd": rms_norm_gradients,
}


def smoothed(x, y):
    wide, one = x.astype(np.float32), np.float32(1)
    grad = F.cross_entropy_backward(one, wide, y, label_smoothing=0.1)
    return [F.cross_entropy(wide, y, label_smoothing=0.1), np.asarray(grad).astype(x.dtype)]


def optimize(operator, form, param, grads):
    settings = {"lr": 1e-2, "weight_decay": 0.1, "form": form}
    state, buffer = AdamState(np.zeros_like(param), np.zeros_like(param)), None
    for step, grad in enumerate(grads, 1):
        if operator == "SGD":
            param, buffer = sgd_step(param, grad, buffer, momentum=0.9, **settings)
        else:
            param, state = adamw_step(param, grad, state, step, **settings)
    return param


LOSS = {"ce": lambda x, y: [F.cross_entropy(x, y)], "ce_bwd": smoothed}


def factors(m: int, k: int, n: int, dtype: str) -> tuple[np.ndarray, ...]:
    """A layer's input [M, K], weight [N, K], bias [N], and the gradient of its result [M, N]."""
    shapes = {f"x{m}{k}{n}": (m, k), f"w{m}{k}{n}": (n, k), f"b{m}{n}": n, f"g{m}{k}{n}": (m, n)}
    return tuple(normal(key, shape, dtype, k**-0.5 if key[0] == "w" else 1.0) for key, shape in shapes.items())


MATMUL = {
    "mm": lambda x, w, b, g: matmul(x, w.T),
    "linear": lambda x, w, b, g: matmul(x, w.T, transposed_b=True),
    "linear_bias": lambda x, w, b, g: matmul(x, w.T, transposed_b=True, bias=b),
    "bmm": lambda x, w, b, g: matmul(np.stack([x, -x, x[::-1]]), np.stack([w.T] * 3)),
    "linear_dw": lambda x, w, b, g: matmul(g.T, x, transposed_a=True),
    "linear_dx": lambda x, w, b, g: matmul(g, w),
}
SDPA = {"FLASH_ATTENTION": "flash", "EFFICIENT_ATTENTION": "efficient", "CUDNN_ATTENTION": "cudnn", "MATH": "math"}


def sdpa(backend: str, way: str, dtype: str, case: str) -> list:
    *sizes, causal = case.split(",")
    b, h, key_heads, s, keys, d = map(int, sizes)
    seed = f"{s}{keys}{d}"
    q = normal(f"q{seed}", (b, h, s, d), dtype)
    k, v = (normal(f"{which}{seed}", (b, key_heads, keys, d), dtype) for which in "kv")
    options = {"backend": SDPA[backend], "causal": causal == "True", "multiply": matmul}
    out, logsumexp = attention(q, k, v, **options)
    if way == "fwd":
        return [out]
    order = "lockstep" if backend == "EFFICIENT_ATTENTION" else "raise"
    return list(attention_backward(out[..., ::-1], q, k, v, out, logsumexp, open_order=order, **options)[:3])


def compute(name: str) -> list:
    """The results of a case.

    Raises:
        NotModelled: There is no rule for it.
    """
    group, operator, dtype, *rest = name.split("|")
    if group == "unary":
        return [F.elementwise(operator, all_codes(operator + dtype, dtype))]
    if group == "binary":
        x, y = (normal(f"{operator}{which}{dtype}", 1 << 16, dtype, 3) for which in "xy")
        return [BINARY.get(operator, lambda x, y: F.elementwise(operator, x, y))(x, y)]
    if group == "reduce" and operator in REDUCE:
        return [REDUCE[operator](normal(f"{operator}{dtype}{rest[0]}", (ROWS, int(rest[0])), dtype, 2))]
    if group == "norm" and operator in NORM:
        rows, columns = map(int, rest[0].split("x"))
        x = normal(f"{operator}{dtype}{columns}", (rows, columns), dtype, 2)
        return list(NORM[operator](x, *(normal(f"{which}{operator}{columns}", columns, dtype) for which in "wb")))
    if group == "loss":
        classes = int(rest[0])
        x = normal(f"ce{classes}{dtype}", (LOSS_ROWS, classes), dtype, 2)
        return LOSS[operator](x, generator(f"y{classes}").integers(0, classes, LOSS_ROWS))
    if group == "optimizer":
        param, grads = normal("p" + rest[0], 5000, rest[0]), [normal(f"g{i}{rest[0]}", 5000, rest[0], 0.1) for i in range(3)]
        return [optimize(operator, dtype, param, grads)]
    if group == "embedding":
        return [F.embedding_backward(normal("eb" + dtype, (300, 40), dtype), generator("ei").integers(0, 64, 300), 64)]
    if group == "matmul":
        return [MATMUL[operator](*factors(*map(int, rest[0].split("x")), dtype))]
    if group == "sdpa":
        way, dtype, (case,) = dtype, rest[0], rest[1:]
        return sdpa(operator, way, dtype, case)
    raise NotModelled(f"{group}/{operator}: no rule")


def is_equal(name: str) -> bool:
    """Whether tcemu gives every word of a case."""
    return [hashlib.sha256(np.asarray(y).tobytes()).hexdigest()[:32] for y in compute(name)] == recorded()[name]


def main(kinds: list[str]) -> None:
    evaluate_by_numpy()
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
