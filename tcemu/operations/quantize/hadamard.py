"""The random Hadamard transform of an operand along K, as a kernel computes it: bf16 in, one product by the bf16 instruction, bf16 out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import BF16, F32
from tcemu.operations.quantize.scale_groups import split_groups

HADAMARD_SIZES = (4, 16, 64, 256)
# the fixed signs of TransformerEngine's weight gradients: get_wgrad_sign_vector in pytorch/custom_recipes/quantization_ref_nvfp4.py
SIGNS_16 = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class HadamardTransform:
    """x -> x diag(signs) H / sqrt(n), for every n = len(signs) elements along K, with the arithmetic of a target's bf16 instruction.

    TransformerEngine's row_cast_col_hadamard_transform_cast_fusion.cu: bf16 operands, a tensor core's f32 sum from +0, rounded to bf16
    ("for bit-wise compatibility with unfused kernels"). Hashable, so static under jit.
    """

    signs: tuple[int, ...]
    model: Model
    spec: ProductSpec

    @property
    def size(self) -> int:
        return len(self.signs)

    @property
    def matrix(self) -> np.ndarray:
        """diag(signs) H / sqrt(n), float32 [n, n]; its inverse is its transpose."""
        h = np.ones((1, 1), np.float32)
        while len(h) < self.size:
            h = np.block([[h, h], [h, -h]])
        return np.array(self.signs, np.float32)[:, None] * h / np.float32(self.size**0.5)

    def apply(self, x: Array) -> Array:
        """Transforms floats [..., R, K] to bfloat16 [..., R, K padded to whole groups]."""
        source, codes = array_codes(x)
        codes = codes if source == BF16 else convert(source, BF16, codes)
        groups = split_groups(codes, self.size, -1)
        rows = groups.reshape(*groups.shape[:-3], groups.shape[-3] * groups.shape[-2], self.size)
        missing = -self.size % self.spec.k
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)])
        h = np.pad(self.matrix.astype(jnp.bfloat16).view(np.uint16), [(0, missing), (0, 0)])
        d = multiply_matrices(self.model, self.spec, rows, h, jnp.zeros((*rows.shape[:-1], self.size), jnp.uint32))
        done = lax.bitcast_convert_type(convert(F32, BF16, d), jnp.bfloat16)
        return done.reshape(*groups.shape[:-2], groups.shape[-2] * self.size)

    def invert(self, x: Array | np.ndarray, depth: int) -> Any:
        """Inverts the transform, [..., R, depth], in x's own float dtype and array type. For derivatives and errors, not for results."""
        groups = x.reshape(*x.shape[:-1], x.shape[-1] // self.size, self.size)
        inverse = self.matrix.T.astype(x.dtype)
        back = groups @ inverse if isinstance(x, np.ndarray) else jnp.matmul(groups, inverse, precision=lax.Precision.HIGHEST)
        return back.reshape(x.shape)[..., :depth]
