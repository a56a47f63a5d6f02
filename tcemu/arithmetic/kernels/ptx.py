"""Inline PTX with named operands."""

import importlib
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

TRITON = "jax.experimental.pallas.triton"  # JAX 0.11 announces that this backend will go: every device then walks as a CPU does
plt: Any = importlib.import_module(TRITON) if importlib.util.find_spec(TRITON) else None
RESULT = "result"


def ptx(text: str, **operands: Array) -> Array:
    """One instance of inline PTX for each element: int32, the shape to which the operands broadcast.

    text: PTX statements. `%result` is the result; `%name` is the operand of that name; other registers are declared in the text. All
    operands and the result are 32-bit registers.
    """
    shape = jnp.broadcast_shapes(*(v.shape for v in operands.values()))
    return plt.elementwise_inline_asm(
        numbered(text, operands), args=[jnp.broadcast_to(v, shape) for v in operands.values()],
        constraints=",".join(["=r"] + ["r"] * len(operands)), pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )[0]  # fmt: skip


def numbered(text: str, operands: Any) -> str:
    """The text as the compiler takes it: in one block, without comments, the operands as $1, $2, ... and the result as $0."""
    number = {RESULT: 0} | {name: at for at, name in enumerate(operands, 1)}
    lines = [line.partition("//")[0].strip() for line in text.splitlines()]
    block = " ".join(line for line in lines if line)
    return "{ " + re.sub(r"%(\w+)", lambda match: f"${number[match[1]]}" if match[1] in number else match[0], block) + " }"
