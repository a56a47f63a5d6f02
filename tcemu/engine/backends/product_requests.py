"""Products as backends are asked for them: registers of one instruction, matrices of codes, and matrices whose sums are promoted."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion, Scales
from tcemu.engine.backends.cuda.fragment_tables import WarpOperands
from tcemu.engine.backends.cuda.register_kernel import KernelRegisters
from tcemu.engine.backends.native.native_statement import StatementLaunch
from tcemu.engine.isa.families import Instruction, MatrixMultiply

Program = Callable[..., Array]


class RegisterForms(NamedTuple):
    """The forms that a family gives its operands in, as functions of its own module. Static under `jit`.

    `operands` are the bound operands of the family.
    """

    by_matrices: Callable[[Any, bool, Model, Any], Array]  # (op, clamped_metadata, model, operands) -> registers of D
    warp: Callable[[Any, bool, Any], WarpOperands] | None = None  # places of the elements; None: no kernel takes the fragments
    registers: Callable[[Any, Any], KernelRegisters] | None = None  # the operands as that kernel takes them
    canonical: Callable[[Any], Any] | None = None  # the instruction whose compiled emulation serves this one too


class RegisterProduct(NamedTuple):
    """One instruction on the registers of a batch of warps."""

    op: MatrixMultiply
    model: Model
    clamped_metadata: bool  # see `layouts.sparsity.gather`
    forms: RegisterForms
    operands: Any
    statement: Callable[[], StatementLaunch] | None = None  # the operands as the PTX statement takes them; raises Unsupported
    # the instruction in whose formats registers are decoded, where `op` is the one that PTX has; None: `op`
    decoded_op: MatrixMultiply | None = None


class MatrixProduct(NamedTuple):
    """D = A·B + C on matrices of codes, any batch axes in front. Its programs take (a, b, c, scales)."""

    model: Model
    spec: ProductSpec
    a: Array  # [..., M, K], K in whole instructions
    b: Array  # [..., K, N]
    c: Array  # [..., M, N], with every batch axis
    scales: Scales | None
    by_columns: bool = False  # B is the transposition of an array [..., N, K]

    @property
    def scale_block(self) -> int | None:
        """Products along K that share a block scale; None where there are no scales."""
        return None if self.scales is None else self.a.shape[-1] // jnp.shape(self.scales[0])[-1]


class PromotedOperands(NamedTuple):
    """Operands of a product whose sums are promoted. Codes as in `MatrixProduct`, K in whole chunks."""

    a: Array
    b: Array
    scales: tuple[Array, Array] | None
    block_scales: tuple[Array, Array] | None  # f32 codes [..., groups of M, chunks] and [..., chunks, groups of N]


class PromotedProduct(NamedTuple):
    """A·B as an f32 sum of promoted chunks. Its programs take the operands and return f32 codes [..., M, N]."""

    model: Model
    spec: ProductSpec
    promotion: Promotion
    operands: PromotedOperands
    by_chunks: Callable[[PromotedOperands], Array]  # the same by one `MatrixProduct` a chunk


@partial(jax.jit, static_argnums=(0, 1, 2))
def compute_by_matrices(forms: RegisterForms, op: Instruction, clamped_metadata: bool, model: Model, operands: Any) -> Array:
    """Computes one instruction on registers by a product of matrices."""
    return forms.by_matrices(op, clamped_metadata, model, operands)
