"""Products for the kernels of the LLVM backend: every arithmetic, operands, and D by a kernel alone and by the portable backend."""

from functools import cache
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
    bits = jnp.asarray(rng.integers(0, 1 << fmt.bits, shape).astype(fmt.dtype))
    if fmt.signed:
        numbers = from_float(fmt, jnp.asarray(rng.standard_normal(shape), jnp.float32))
    else:
        one = fmt.bias << fmt.mantissa_bits
        numbers = jnp.asarray(rng.integers(one - 7, one + 4, shape).astype(fmt.dtype))
    decoded = decode(fmt, bits)
    finite = jnp.where(decoded.nan | decoded.infinite, numbers, bits)
    return {"bits": bits, "numbers": numbers, "mixed": jnp.where(rng.random(shape) < 0.002, bits, numbers), "finite": finite}[kind]


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
    product = MatrixProduct(arithmetic.model, arithmetic.spec, *operands, by_columns=by_columns)
    program = llvm_programs.matrices_program(product, target)
    return np.asarray(jax.jit(program)(*operands))


def multiply_portably(arithmetic: Arithmetic, operands: tuple[Any, ...]) -> np.ndarray:
    model, spec, _ = arithmetic
    with tcemu.execution("portable"):
        return np.asarray(multiply_matrices(model, spec, *operands))


def older_target() -> machine_code.Target:
    """This machine's CPU without AVX-512."""
    return machine_code.host_target().without("avx512", "avxvnni")
