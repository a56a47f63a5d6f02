"""More cases of PyTorch's CUDA operators than `torch_census.py` has: what tcemu computes for those of `tests/gpu_runs/torch_rows.py`.

    python tests/operations/functional/torch_rows_census.py [axes/sum ...]

computes every case of the kinds that are named, or all, and counts those whose words are the H200's (tests/golden/torch_rows_h200.json.xz).
"""

import hashlib
import json
import lzma
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.foreach import clip_grad_norm, foreach_norm
from tcemu.operations.functional.torch_cuda.optimizers import AdamState, adam_step, adamw_step, sgd_step

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "gpu_runs"))
from torch_census import F, evaluate_by_numpy
from torch_rows import OPTIMIZERS, inputs, numbers


def spatial(operator, options, x):
    log = operator.startswith("log")
    y = F.softmax(x, 1, log=log)
    return [F.softmax_backward(np.flip(x, 1), y, 1, log=log) if operator.endswith("bwd") else y]


def norm(operator, options, x, weight, bias, grad):
    w, b = (None, None) if "plain" in operator else (weight, bias)
    if operator.startswith("layer"):
        y, mean, scale = F.layer_norm(x, w, b, 1e-5)
        found = F.layer_norm_backward(grad, x, mean, scale, w) if operator.endswith("bwd") else (y, mean, scale)
        return found[:1] if operator == "layer_norm_plain_bwd" else found
    y, scale = F.rms_norm(x, w, 1e-6)
    found = F.rms_norm_backward(grad, x, scale, w) if operator.endswith("bwd") else (y, scale, y)
    return found[:1] if operator == "rms_norm_plain_bwd" else found


def group(operator, options, x, weight, bias, grad, *_):
    groups = int(options[1])
    y, mean, scale = F.group_norm(x, groups, weight, bias, 1e-5)
    return F.group_norm_backward(grad, x, mean, scale, groups, weight) if operator.endswith("bwd") else (y, mean, scale)


def batch(operator, options, x, weight, bias, grad, mean, variance):
    if not operator.startswith("native") and x.dtype == np.float32 and x.ndim > 2:
        raise NotModelled("batch_norm: cuDNN computes it")
    training = not operator.endswith("eval")
    y, means, scales, *running = F.batch_norm(x, weight, bias, mean, variance, training, 0.1, 1e-5)
    if operator.endswith("bwd"):
        return F.batch_norm_backward(grad, x, weight, means, scales)
    return (y, means, scales, *running) if operator.startswith("native") else (y, *running)


def optimizer(operator, options, param, *grads):
    settings = {**OPTIMIZERS[operator], "form": options[0]}
    if operator.startswith("SGD"):
        return run_sgd(param, grads, **settings)
    return run_adam(operator.startswith("AdamW"), param, grads, **settings)


def run_sgd(param, grads, **settings):
    found, buffer = [], None
    for grad in grads:
        param, buffer = sgd_step(param, grad, buffer, **settings)
        found += [param] if buffer is None else [param, buffer]
    return found


def run_adam(decoupled, param, grads, *, amsgrad=False, **settings):
    zeros = np.zeros_like(param)
    found, state = [], AdamState(zeros, zeros, zeros if amsgrad else None)
    for step, grad in enumerate(grads, 1):
        param, state = (adamw_step if decoupled else adam_step)(param, grad, state, step, **settings)
        found += [param, *(x for x in state if x is not None)]
    return found


AXES = {
    **{name: (lambda x, axis, name=name: [F.reduce(name, x, axis)]) for name in ("sum", "mean", "amax", "norm", "norm1", "norm_inf")},
    "sum_f32": lambda x, axis: [F.reduce("sum", x, axis, dtype=np.float32)],
    "norm3": lambda x, axis: [F.vector_norm(x, 3.0, axis)],
    "var": lambda x, axis: [F.variance(x, axis)],
    "std": lambda x, axis: [F.standard_deviation(x, axis)],
    "std0": lambda x, axis: [F.standard_deviation(x, axis, correction=0)],
    "var_mean": lambda x, axis: list(F.var_mean(x, axis)),
    "cumsum": lambda x, axis: [F.cumsum(x, axis or 0)],
    "cumprod": lambda x, axis: [F.cumprod(x, axis or 0)],
}


def axes(operator, options, x):
    axis = numbers(options[1]) if len(options) > 1 else None
    if operator == "prod":  # one axis after the other
        for one in sorted(axis or (), reverse=True):
            x = F.reduce("prod", x, one)
        return [x]
    return AXES[operator](x, axis[0] if operator.startswith("cum") and axis else axis)


FOREACH = {
    "sqrt": lambda a, b, c: F.elementwise("sqrt", c),
    "reciprocal": lambda a, b, c: F.elementwise("reciprocal", c),
    "add_scalar": lambda a, b, c: F.elementwise("add", a, 0.3),
    "mul_scalar": lambda a, b, c: F.elementwise("mul", a, 0.3),
    "div_scalar": lambda a, b, c: F.elementwise("div", a, 0.3),
    "div_list": lambda a, b, c: F.elementwise("div", a, c),
    "mul_list": lambda a, b, c: F.elementwise("mul", a, b),
    "sub_list": lambda a, b, c: F.elementwise("add", a, b, alpha=-0.3),
    "add_list_a": lambda a, b, c: F.elementwise("add", a, b, alpha=0.3),
    "addcdiv": lambda a, b, c: F.elementwise("addcdiv", a, b, c, value=-0.01),
    "addcmul": lambda a, b, c: F.elementwise("addcmul", a, b, c, value=0.1),
    "lerp": lambda a, b, c: F.elementwise("lerp", a, b, weight=0.1),
}


def foreach(operator, options, *tensors):
    count = len(tensors) // 3
    a, b, c = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    if operator.startswith("norm"):
        return foreach_norm(a, {"norm2": 2.0, "norm1": 1.0, "norm_inf": np.inf}[operator])
    if operator == "clip":
        total, clipped = clip_grad_norm(b, 1.0)
        return [total, *clipped]
    if operator == "maximum":
        return [np.maximum(x, y) for x, y in zip(a, b, strict=True)]
    return [FOREACH[operator](*each) for each in zip(a, b, c, strict=True)]


def loss(operator, options, x, target, weight, classes):
    one = np.ones((), x.dtype)
    if operator.startswith("ce"):
        smoothing = {"label_smoothing": 0.1} if "smooth" in operator else {}
        kind = "sum" if operator == "ce_sum" else "mean"
        found = [F.cross_entropy(x, classes, reduction=kind, **smoothing)]
        return [*found, F.cross_entropy_backward(one, x, classes, **smoothing)] if operator.endswith("bwd") else found
    if operator == "mse":
        return [F.mse_loss(x, target)]
    if not operator.startswith("nll"):
        raise NotModelled(f"loss/{operator}: no rule")
    w = weight if "weight" in operator else None
    reduction = {"nll_sum": "sum", "nll_none": "none"}.get(operator, "mean")
    found, total = F.nll_loss(x, classes, w, reduction, 3 if operator == "nll_ignore" else -100)
    return [found, F.nll_loss_backward(one, x, classes, total, w)] if operator.endswith("bwd") else [found]


def taken(operator, options, grad, indices, base):
    if operator in ("index_put", "index_select_bwd"):
        return [F.index_put_accumulate(base if operator == "index_put" else np.zeros_like(base), indices, grad)]
    if operator in ("index_add", "scatter_add"):
        return [F.index_add(base, indices, grad)]
    return [F.embedding_backward(grad, indices, len(base), 2 if operator.endswith("padding") else -1)]


def order(operator, options, x):
    """The indices are int64 in PyTorch."""
    if operator.startswith("sort"):
        found = F.sort(x, descending=operator == "sort_down")
    elif operator.startswith("topk"):
        found = F.topk(x, int(options[1]), largest=operator == "topk")
    else:
        raise NotModelled(f"order/{operator}: no rule")
    return [found[0], np.asarray(found[1]).astype(np.int64)]


UNARY = {
    "expit": lambda x: F.elementwise("sigmoid", x),
    "sigmoid_logit": lambda x: F.elementwise("sigmoid", x),
    "log_sigmoid": lambda x: F.elementwise("logsigmoid", x),
    "div_scalar": lambda x: F.elementwise("div", x, 3.0),
    "pow_1_5": lambda x: F.elementwise("pow", x, 1.5),
    "pow_4": lambda x: F.elementwise("pow", x, 4.0),
}


def unary(operator, options, x):
    return [UNARY.get(operator, lambda x: F.elementwise(operator, x))(x)]


BINARY = {
    "mse_backward": lambda x, y, z: F.mse_loss_backward(x, y, z, "none"),
    "sub_a": lambda x, y, z: F.elementwise("add", x, y, alpha=-0.3),
    "lerp_far": lambda x, y, z: F.elementwise("lerp", x, y, weight=0.7),
    "mul_scalar": lambda x, y, z: F.elementwise("mul", x, 0.3),
    "add_scalar": lambda x, y, z: F.elementwise("add", x, 0.3),
}


def binary(operator, options, x, y, z):
    return [BINARY.get(operator, lambda x, y, z: F.elementwise(operator, x, y))(x, y, z)]


GROUPS = {
    "unary": unary,
    "binary": binary,
    "order": order,
    "foreach": foreach,
    "loss": loss,
    "taken": taken,
    "axes": axes,
    "whole": axes,
    "scan": axes,
    "optimizer": optimizer,
    "spatial": spatial,
    "norm": norm,
    "group": group,
    "batch": batch,
}
GOLDEN = Path(__file__).parents[2] / "golden/torch_rows_h200.json.xz"
DIGITS = 16  # of a digest


@cache
def recorded() -> dict:
    """The H200's cases that repeat: name -> digests of the results."""
    return json.loads(lzma.decompress(GOLDEN.read_bytes()))["cases"]


def compute(name: str) -> list:
    """The results of a case.

    Raises:
        NotModelled: There is no rule for it.
    """
    kind, operator, _, rest = name.split("|")
    if kind not in GROUPS:
        raise NotModelled(f"{kind}/{operator}: no rule")
    return list(GROUPS[kind](operator, rest.split(";"), *inputs(name)))


def is_equal(name: str) -> bool:
    """Whether tcemu gives every word of a case."""
    return [hashlib.sha256(np.ascontiguousarray(y).tobytes()).hexdigest()[:DIGITS] for y in compute(name)] == recorded()[name]


def main(kinds: list[str]) -> None:
    evaluate_by_numpy()
    found, wrong = Counter(), []
    for name in recorded():
        if kinds and "/".join(name.split("|")[:2]) not in kinds:
            continue
        try:
            same = is_equal(name)
            found["equal" if same else "not equal"] += 1
            wrong += [] if same else [name]
        except NotModelled as error:
            found[f"no rule: {str(error).split(';')[0][:80]}"] += 1
    print(*(f"{count} {what}" for what, count in found.items()), sep="\n")
    print("other words:", wrong)


if __name__ == "__main__":
    main(sys.argv[1:])
