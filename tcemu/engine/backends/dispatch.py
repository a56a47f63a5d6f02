"""Choice of the backend that computes a product: one table of backends and one decision.

A product comes in three forms, and each form has one entry point: the registers of one instruction (`multiply_registers`), matrices of
codes (`multiply_matrices`), and matrices whose partial sums are promoted to f32 (`multiply_promoted`). `move_words` is the same decision
for instructions that compute nothing. For each form a backend returns a program, or raises `Unsupported` and says why it has none. On each
platform the first backend with a program computes. The portable backend has a program for every product of matrices; what takes no
registers leaves them to the instruction, which unpacks them to matrices. All backends give the same bits.

`tcemu.execution` is read here, and where a kernel computes what is no product (`elementwise`, the operands of fuzzing), while a function is
traced; it is part of the key of JAX's caches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.compilation import call_kernel_by_platform
from tcemu.base.errors import Unsupported
from tcemu.base.execution import AUTO, EMULATED, NATIVE, PORTABLE, current_execution, without_native
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, Promotion, Scales, product_spec
from tcemu.engine.backends import portable
from tcemu.engine.backends.cuda import cuda_programs
from tcemu.engine.backends.llvm import llvm_programs
from tcemu.engine.backends.native import native_programs
from tcemu.engine.backends.product_requests import (
    MatrixProduct,
    Program,
    PromotedOperands,
    PromotedProduct,
    RegisterProduct,
    StatementLaunch,
)
from tcemu.engine.isa.families import Instruction

Tree = TypeVar("Tree")
NO_KERNELS = 'execution("portable") uses no kernels'
ANY_PLATFORM = ""  # every platform that no other backend serves


class Backend(NamedTuple):
    """One way to compute products. Each function returns a program for a product, or raises Unsupported."""

    name: str
    platform: str  # name of the platform in `lax.platform_dependent`, or ANY_PLATFORM
    matrices: Callable[[MatrixProduct], Program]
    promoted: Callable[[PromotedProduct], Program] | None  # None: it promotes no sums
    registers: Callable[[RegisterProduct], Program] | None = None  # None: it takes no registers


# the GPU's own instructions, where `tcemu.execution` chooses them
NATIVE_BACKEND = Backend(
    "native", "cuda", native_programs.matrices_program, native_programs.promoted_program, native_programs.registers_program
)
EMULATORS = (  # in the order in which they are asked; kernels unless `tcemu.execution` excludes them
    Backend("cuda", "cuda", cuda_programs.matrices_program, cuda_programs.promoted_program, cuda_programs.registers_program),
    Backend("llvm", "cpu", llvm_programs.matrices_program, None, llvm_programs.registers_program),
    Backend("portable", ANY_PLATFORM, portable.matrices_program, portable.promoted_program),
)


# ---- entry points


def multiply_registers(product: RegisterProduct, by_matrices: Program, operands: Any) -> Array:
    """Computes one instruction for each warp of a batch by kernels that take its registers, and by its matrices where there are none.

    Args:
        product: The instruction, its model, and how its operands lie in registers.
        by_matrices: Takes the operands and computes the same by `multiply_matrices`.
        operands: The operands of `product`.

    Returns:
        The registers of D, uint32.
    """
    programs = {platform: program for platform, (_, program) in _emulating_programs("registers", product).items()}
    return call_kernel_by_platform(programs, by_matrices, operands)


def multiply_matrices(
    model: Model,
    spec: ProductSpec,
    a: ArrayLike,
    b: ArrayLike,
    c: ArrayLike,
    scales: Scales | None = None,
    *,
    by_columns: bool = False,
) -> Array:
    """Computes D = A·B + C on matrices of raw codes.

    Args:
        model: The arithmetic.
        spec: The formats and modes of the instruction.
        a: Codes [..., M, K]. K is a multiple of `spec.k`, not 0 (any number but 0 for a model with fraction_bits=None and no chain).
        b: Codes [..., K, N]; leading axes broadcast. f64 codes have a trailing axis of two words.
        c: Codes [..., M, N].
        scales: Codes of `spec.scale`, [..., M, S] for A and [..., S, N] for B, each for K / S products along K; None if there are none.
        by_columns: B is the transposition of an array [..., N, K]. A backend that reads columns as they lie then saves a copy.

    Returns:
        Codes of `spec.d`, [..., M, N].

    Raises:
        ValueError: The model's arithmetic is not defined for the instruction.
        Unsupported: As `multiply_registers`.
    """
    a, b, c = jnp.asarray(a), jnp.asarray(b), jnp.asarray(c)
    words = (2,) * (spec.a.words - 1)
    (*a_batch, m, _), (*b_batch, _, n), (*c_batch, _, _) = (v.shape[: v.ndim - len(words)] for v in (a, b, c))
    batch = jnp.broadcast_shapes(tuple(a_batch), tuple(b_batch), tuple(c_batch), *(jnp.shape(v)[:-2] for v in scales or ()))
    c = jnp.broadcast_to(c, (*batch, m, n, *words))
    if c.size == 0:
        return jnp.zeros(c.shape, spec.d.dtype)
    model, (a, b, c), scales = _match_axes((model, (a, b, c), scales))
    product = MatrixProduct(model, spec, a, b, c, scales, by_columns)
    emulate = partial(_emulate, "matrices", product)
    return choose_native(_product_name(spec), lambda: NATIVE_BACKEND.matrices(product), emulate, a, b, c, scales)


def multiply_promoted(
    model: Model, spec: ProductSpec, promotion: Promotion, operands: PromotedOperands, by_chunks: Callable[[PromotedOperands], Array]
) -> Array:
    """Computes A·B as the f32 sum of promoted chunks of K.

    Args:
        model: The arithmetic.
        spec: The formats and modes of the instruction.
        promotion: The length of a chunk, and the shape of the blocks that share a scale.
        operands: Codes and scales, K in whole chunks.
        by_chunks: The same by one `multiply_matrices` a chunk, for platforms on which no backend promotes.

    Returns:
        f32 codes [..., M, N].
    """
    model, operands = _match_axes((model, operands))
    product = PromotedProduct(model, spec, promotion, operands, by_chunks)
    if current_execution() == NATIVE:
        try:
            return native_programs.promoted_program(product)(operands)
        except Unsupported:
            return by_chunks(operands)  # each chunk is a native product, or is refused
    emulate = partial(_emulate, "promoted", product)
    return choose_native(_product_name(spec), lambda: native_programs.promoted_program(product), emulate, operands)


def move_words(op: Instruction, statement: Callable[[], StatementLaunch], emulate: Callable[[], Array]) -> Array:
    """Runs an instruction that only moves words: by the GPU's own statement where `tcemu.execution` chooses it, else by `emulate`."""
    return choose_native(str(op), lambda: native_programs.movement_program(op, statement), emulate)


# ---- the decision


def choose_native(subject: str, native_program: Callable[[], Program], emulate: Program, *operands: Any) -> Array:
    """Computes natively where `tcemu.execution` chooses it and the native backend has a program, else by `emulate`.

    Args:
        subject: What is computed, for the message.
        native_program: Returns the native program, or raises Unsupported.
        emulate: Computes the same on any platform.
        *operands: The operands of both.

    Raises:
        Unsupported: `tcemu.execution` says "native", and there is no native program.
    """
    choice = current_execution()
    if choice in (EMULATED, PORTABLE):
        return emulate(*operands)
    try:
        by_gpu = native_program()
    except Unsupported as error:
        if choice == AUTO:
            return emulate(*operands)
        raise Unsupported(
            f'{subject}: execution("native") cannot run it: {error}. execution("auto") takes the emulation in such cases'
        ) from None
    if choice == NATIVE:
        return by_gpu(*operands)

    def elsewhere(*operands: Any) -> Array:
        with without_native():
            return emulate(*operands)

    return lax.platform_dependent(*operands, cuda=by_gpu, default=elsewhere)


def _emulate(form: str, product: Any, *operands: Any) -> Array:
    """Computes by the first emulating backend of each platform."""
    programs = {platform: program for platform, (_, program) in _emulating_programs(form, product).items()}
    on_any_platform = programs.pop(ANY_PLATFORM)
    return call_kernel_by_platform(programs, on_any_platform, *operands)


def _emulating_programs(form: str, product: Any, reasons: dict[str, str] | None = None) -> dict[str, tuple[Backend, Program]]:
    """The first emulating backend with a program, and the program, by platform. reasons: gets, by backend, why it does not serve."""
    serving: dict[str, tuple[Backend, Program]] = {}
    reasons = {} if reasons is None else reasons
    kernels_are_used = current_execution() != PORTABLE
    for backend in EMULATORS:
        ask = getattr(backend, form)
        if ask is None:
            continue
        if backend.platform != ANY_PLATFORM and not kernels_are_used:
            reasons[backend.name] = NO_KERNELS
            continue
        try:
            program = ask(product)
        except Unsupported as error:
            reasons[backend.name] = str(error)
            continue
        first, _ = serving.setdefault(backend.platform, (backend, program))
        reasons[backend.name] = "" if first is backend else f"{first.name} comes first"
    return serving


def _match_axes(arrays: Tree) -> Tree:
    """All arrays, varying over the same axes of a mesh."""
    leaves, tree = jax.tree.flatten(arrays)
    return jax.tree.unflatten(tree, match_varying_axes(*map(jnp.asarray, leaves)))


def _product_name(spec: ProductSpec) -> str:
    return f"{spec.family} of {spec.a} by {spec.b} to {spec.d}"


# ---- the description


def describe(op: str | Instruction, *, target: str, model: Model | str | None = None) -> dict[str, str]:
    """Describes which backends can compute the products of an instruction here.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target: GPU or target to emulate, as "H100" or "sm_90a".
        model: Another arithmetic in place of the target's own.

    Returns:
        For each backend by name, in the order in which backends are asked, "" if it serves, else the reason why it does not. "native" is
        the instruction itself, or one of the same arithmetic, on the GPU that is here, where `tcemu.execution` chooses it. "cuda" are
        kernels in CUDA C++, compiled at first use. "portable" is plain JAX, on every platform that no other backend serves. All give the
        same bits.

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        NotModelled: There is no evidence of the target's arithmetic for `op`.
    """
    arithmetic = resolve_arithmetic(op, target, model)
    spec = product_spec(arithmetic.op)
    reasons = {NATIVE_BACKEND.name: native_programs.refusal_reason(arithmetic)}
    a: Any = jax.ShapeDtypeStruct((0, spec.k), spec.a.dtype)
    b: Any = jax.ShapeDtypeStruct((spec.k, 0), spec.b.dtype)
    scales: Any = None if spec.scale is None else (jax.ShapeDtypeStruct((0, spec.scale_vec), spec.scale.dtype),) * 2
    _emulating_programs("matrices", MatrixProduct(arithmetic.model, spec, a, b, a, scales), reasons)
    return reasons
