"""Attention that XLA leaves to cuDNN (`jax.nn.dot_product_attention(..., implementation="cudnn")`), computed by the rule of its kernels.

Source: OpenXLA, xla/service/gpu/backend_configs.proto (`CudnnfMHABackendConfig`); JAX, jax/_src/cudnn/fused_attention_stablehlo.py (the
operands and results of a call); the rule: tcemu/operations/functional/torch_cuda/fused_attention.py, found on PyTorch's calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.kernels.xla.hlo_text import Instruction
from tcemu.operations.functional.torch_cuda.attention import attention, attention_backward

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"  # XLA's targets
OPERANDS = {FORWARD: 3, BACKWARD: 6}  # Q, K, V; and log-sum-exps, the gradient of the result, the result
MASKS = {"NO_MASK": False, "CAUSAL": True}
UNUSED = {"dropout_rate": 0, "is_paged_attention": False, "sliding_window_length": 0, "max_seg_per_batch": 1}  # of a known call


def attend(program: str, each: Instruction, operands: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Return the results of a call, without its workspace.

    Args:
        program: Name of the program, for messages.
        each: The call.
        operands: Its operands, as `OPERANDS` says.

    Returns:
        Of a forward the weighted values, and the log-sum-exps if the call asks for them; of a backward the gradients of Q, K and V. Each is
        [batch, heads, rows, size].

    Raises:
        NotModelled: The call has a bias, dropout or lengths, or no rule is known for its shape.
    """
    config, target = each.config().get("cudnn_fmha_backend_config", {}), each.target()
    given = {name: config.get(name, value) for name, value in UNUSED.items()}
    if len(operands) != OPERANDS[target] or config.get("mask_type") not in MASKS or given != UNUSED:
        raise NotModelled(
            f"{program}: {each.name} is attention by cuDNN with {len(operands)} operands, the mask {config.get('mask_type')} and {given}; "
            f"known are {OPERANDS[target]} operands, {' or '.join(MASKS)}, and {UNUSED}"
        )
    numbers = config["bmm1_dot_dimension_numbers" if target == FORWARD else "bmm2_grad_gemm2_dot_dimension_numbers"]
    q, k, v = (_heads(x, numbers) for x in operands[:3])
    causal, scale = MASKS[config["mask_type"]], config["fmha_scale"]
    if target == FORWARD:
        found = attention(q, k, v, backend="cudnn", causal=causal, scale=scale)
    else:
        logsumexp, grad, out = operands[3], *(_heads(x, numbers) for x in operands[4:])
        found = attention_backward(grad, q, k, v, out, logsumexp, backend="cudnn", causal=causal, scale=scale)
    return [np.asarray(x) for x in found][: len(each.shape) - 1]


def _heads(x: np.ndarray, numbers: Mapping[str, Any]) -> np.ndarray:
    """Return an operand as [batch, heads, rows, size]. All operands of a call have one order of axes."""
    axes = [int(axis) for name in ("batch", "contracting") for axis in numbers[f"lhs_{name}_dimensions"]]
    (rows,) = set(range(x.ndim)) - set(axes)
    return x.transpose([*axes[:2], rows, axes[2]])
