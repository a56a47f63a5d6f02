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
from tcemu.operations.functional.torch_cuda.attention import attention

FORWARD = "__cudnn$fmhaSoftmax"  # XLA's target
MASKS = {"NO_MASK": False, "CAUSAL": True}
UNUSED = {"dropout_rate": 0, "is_paged_attention": False, "sliding_window_length": 0, "max_seg_per_batch": 1}  # of a known call


def attend(program: str, each: Instruction, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the results of a forward call, without its workspace: the weighted values, and the log-sum-exps if the call asks for them.

    Args:
        program: Name of the program, for messages.
        each: The call.
        operands: Q, K and V.

    Raises:
        NotModelled: The call has more than queries, keys and values, or no rule is known for its shape.
    """
    config = each.config().get("cudnn_fmha_backend_config", {})
    given = {name: config.get(name, value) for name, value in UNUSED.items()}
    if len(operands) != 3 or config.get("mask_type") not in MASKS or given != UNUSED:
        raise NotModelled(
            f"{program}: {each.name} is attention by cuDNN with {len(operands)} operands, the mask {config.get('mask_type')} and {given}; "
            f"known are three operands, {' or '.join(MASKS)}, and {UNUSED}"
        )
    first, second = config["bmm1_dot_dimension_numbers"], config["bmm2_dot_dimension_numbers"]
    q, k, v = (_heads(*each) for each in zip(operands, (first, first, second), ("lhs", "rhs", "rhs"), strict=True))
    out, logsumexp = attention(q, k, v.swapaxes(-1, -2), backend="cudnn", causal=MASKS[config["mask_type"]], scale=config["fmha_scale"])
    return [np.asarray(out), np.asarray(logsumexp)][: len(each.shape) - 1]


def _heads(x: np.ndarray, numbers: Mapping[str, Any], side: str) -> np.ndarray:
    """Return an operand of a product as [batch, heads, rows, K]."""
    batch, contracted = ([int(axis) for axis in numbers[f"{side}_{kind}_dimensions"]] for kind in ("batch", "contracting"))
    rest = [axis for axis in range(x.ndim) if axis not in (*batch, *contracted)]
    return x.transpose([*batch, *rest, *contracted])
