"""Products for the kernels of the LLVM backend: every arithmetic, operands, and D by a kernel alone and by the portable backend."""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tcemu
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.backends.llvm import llvm_programs, machine_code
from tcemu.engine.backends.product_requests import MatrixProduct
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.formats import Format, decode, from_float

TARGETS = ("sm_70", "sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


class Arithmetic(NamedTuple):
    """A model and the spec of an instruction, as they are requested, and the products that share a block scale."""

    model: Model
    spec: ProductSpec
    block: int

    @property
    def kernel_name(self) -> str:
        """The kernel that takes it on this machine; "" if none does."""
        model, spec = specialize(self.model, self.spec, self.block or None)
        form = llvm_programs.kernel_form(model, spec, self.block, machine_code.host_target())
        return "" if form is None else form.name


@cache
def arithmetics() -> dict[str, Arithmetic]:
    """All arithmetics of matrices of floats, one for each name."""
    found: dict[str, Arithmetic] = {}
    for target in TARGETS:
        for op in tcemu.isa.instructions(target):
            if not isinstance(op, MatrixMultiply) or op.d.is_integer:
                continue
            try:
                model = resolve_arithmetic(op, target).model
            except tcemu.NotModelled:
                continue
            spec = product_spec(op)
            block = spec.k // spec.scale_vec if spec.scale_vec else 0
            if model.fraction_bits is not None:
                found.setdefault(name_arithmetic(model, spec, block), Arithmetic(model, spec, block))
    return found


def name_arithmetic(model: Model, spec: ProductSpec, block: int) -> str:
    of = spec.a.name if spec.a == spec.b else f"{spec.a} by {spec.b}"
    if model.multiplicand is not None:
        of += f" as {model.multiplicand}"
    name = f"{of} in steps of {model.terms} by {model.fraction_bits}"
    name += f", {spec.scale} scales of {block}" if block else ""
    name += f" to {model.result}" if model.result != tcemu.formats.F32 else ""
    return name + (f", C {spec.c}, D {spec.d}" if spec.d != model.result else "") + (", chains apart" if model.together else "")


def draw_codes(rng: np.random.Generator, fmt: Format, shape: tuple[int, ...], kind: str) -> jax.Array:
    """Codes of a format.

    kind: "bits" at random, "numbers" of like size, "mixed": those with a few bits among them, "finite": bits but Inf and NaN.
    """
    bits = rng.integers(0, 1 << fmt.bits, shape).astype(fmt.dtype)
    if fmt.signed:
        numbers = np.asarray(_from_f32(fmt, rng.standard_normal(shape).astype(np.float32)))
    else:
        one = fmt.bias << fmt.mantissa_bits
        numbers = rng.integers(one - 7, one + 4, shape).astype(fmt.dtype)
    taken = {"bits": True, "numbers": False, "mixed": rng.random(shape) < 0.002, "finite": kind == "finite" and _are_finite(fmt, bits)}
    return jnp.asarray(np.where(taken[kind], bits, numbers))


@partial(jax.jit, static_argnums=0)
def _from_f32(fmt: Format, x: np.ndarray) -> jax.Array:
    return from_float(fmt, x)


@partial(jax.jit, static_argnums=0)
def _are_finite(fmt: Format, codes: np.ndarray) -> jax.Array:
    decoded = decode(fmt, codes)
    return ~(decoded.nan | decoded.infinite)


def draw_operands(arithmetic: Arithmetic, kind: str, batch: int = 2, m: int = 70, n: int = 150, instructions: int = 3) -> tuple[Any, ...]:
    """(A, B, C, scales): one A for the whole batch."""
    rng, spec, block = np.random.default_rng(7), arithmetic.spec, arithmetic.block
    k = instructions * spec.k
    a, b = draw_codes(rng, spec.a, (1, m, k), kind), draw_codes(rng, spec.b, (batch, k, n), kind)
    c = jnp.where(rng.random((batch, m, n)) < 0.5, draw_codes(rng, spec.c, (batch, m, n), kind), 0).astype(spec.c.dtype)
    if not block:
        return a, b, c, None
    assert spec.scale is not None
    return a, b, c, tuple(draw_codes(rng, spec.scale, s, kind) for s in ((1, m, k // block), (batch, k // block, n)))


def multiply_by_kernel(
    arithmetic: Arithmetic, operands: tuple[Any, ...], target: machine_code.Target | None = None, by_columns: bool = False
) -> np.ndarray:
    """D by the kernel that the LLVM backend chooses for a CPU; None: for this one. by_columns: B lies in memory as [N, K]."""
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(operands))
    return np.asarray(_kernel_program(arithmetic, shapes, target, by_columns)(*operands))


@lru_cache(maxsize=64)  # operands of several kinds share a program
def _kernel_program(
    arithmetic: Arithmetic, shapes: tuple[Any, ...], target: machine_code.Target | None, by_columns: bool
) -> Callable[..., jax.Array]:
    a, b, c, *scales = (np.broadcast_to(np.zeros((), dtype), shape) for shape, dtype in shapes)
    product = MatrixProduct(arithmetic.model, arithmetic.spec, a, b, c, tuple(scales) or None, by_columns=by_columns)
    return jax.jit(llvm_programs.matrices_program(product, target))


def multiply_portably(arithmetic: Arithmetic, operands: tuple[Any, ...]) -> np.ndarray:
    with tcemu.execution("portable"):
        return np.asarray(_portable_program(arithmetic)(*operands))


@lru_cache(maxsize=64)
def _portable_program(arithmetic: Arithmetic) -> Callable[..., jax.Array]:
    return jax.jit(partial(multiply_matrices, arithmetic.model, arithmetic.spec))


def older_target() -> machine_code.Target:
    """This machine's CPU without AVX-512."""
    return machine_code.host_target().without("avx512", "avxvnni")
