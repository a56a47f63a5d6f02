"""More cases of PyTorch's CUDA operators than `torch_census.py` has: what tcemu computes for those of `tests/gpu_runs/torch_rows.py`.

    python tests/operations/functional/torch_rows_census.py [axes/sum ...]

computes every case of the kinds that are named, or all, and counts those whose words are the H200's (tests/golden/torch_rows_h200.json.xz).
"""

import sys
from pathlib import Path

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.norms import (
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from tcemu.operations.functional.torch_cuda.optimizers import AdamState, adam_step, adamw_step, sgd_step
from tcemu.operations.functional.torch_cuda.rows import reduce, standard_deviation, var_mean, variance, vector_norm
from tcemu.operations.functional.torch_cuda.scans import cumprod, cumsum
from tcemu.operations.functional.torch_cuda.softmax import softmax, softmax_backward

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu_runs"))
from torch_rows import OPTIMIZERS, inputs, numbers


def spatial(operator, options, x):
    log = operator.startswith("log")
    y = softmax(x, 1, log=log)
    return [softmax_backward(np.flip(x, 1), y, 1, log=log) if operator.endswith("bwd") else y]


def norm(operator, options, x, weight, bias, grad):
    w, b = (None, None) if "plain" in operator else (weight, bias)
    if operator.startswith("layer"):
        y, mean, scale = layer_norm(x, w, b, 1e-5)
        found = layer_norm_backward(grad, x, mean, scale, w) if operator.endswith("bwd") else (y, mean, scale)
        return found[:1] if operator == "layer_norm_plain_bwd" else found
    y, scale = rms_norm(x, w, 1e-6)
    found = rms_norm_backward(grad, x, scale, w) if operator.endswith("bwd") else (y, scale, y)
    return found[:1] if operator == "rms_norm_plain_bwd" else found


def group(operator, options, x, weight, bias, grad, *_):
    groups = int(options[1])
    y, mean, scale = group_norm(x, groups, weight, bias, 1e-5)
    return group_norm_backward(grad, x, mean, scale, groups, weight) if operator.endswith("bwd") else (y, mean, scale)


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
    **{name: (lambda x, axis, name=name: [reduce(name, x, axis)]) for name in ("sum", "mean", "amax", "norm", "norm1", "norm_inf")},
    "sum_f32": lambda x, axis: [reduce("sum", x, axis, dtype=np.float32)],
    "norm3": lambda x, axis: [vector_norm(x, 3.0, axis)],
    "var": lambda x, axis: [variance(x, axis)],
    "std": lambda x, axis: [standard_deviation(x, axis)],
    "std0": lambda x, axis: [standard_deviation(x, axis, correction=0)],
    "var_mean": lambda x, axis: list(var_mean(x, axis)),
    "cumsum": lambda x, axis: [cumsum(x, axis or 0)],
    "cumprod": lambda x, axis: [cumprod(x, axis or 0)],
}


def axes(operator, options, x):
    axis = numbers(options[1]) if len(options) > 1 else None
    if operator == "prod":  # one axis after the other
        for one in sorted(axis, reverse=True):
            x = reduce("prod", x, one)
        return [x]
    return AXES[operator](x, axis[0] if operator.startswith("cum") and axis else axis)


GROUPS = {"axes": axes, "whole": axes, "scan": axes, "optimizer": optimizer, "spatial": spatial, "norm": norm, "group": group}


def compute(name: str) -> list:
    """The results of a case.

    Raises:
        NotModelled: There is no rule for it.
    """
    kind, operator, _, rest = name.split("|")
    if kind not in GROUPS:
        raise NotModelled(f"{kind}/{operator}: no rule")
    return list(GROUPS[kind](operator, rest.split(";"), *inputs(name)))
