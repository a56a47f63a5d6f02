"""Products that XLA leaves to cuBLASLt: what a call of the dump computes, and the order of the kernel that a profile of the run names.

The dump has the number of the algorithm that XLA took, an index into a list that cuBLASLt makes on the GPU. The names and grids of the
kernels that JAX's profiler records beside the name of the instruction tell the order.

Source: OpenXLA, xla/service/gpu/backend_configs.proto (`GemmBackendConfig`), xla/service/gpu/gpu_blas_lt.h and gemm_rewriter.cc (the
operands of a call), xla/service/gpu/matmul_utils.cc (the two operands change places where the result's columns are contiguous).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.profiler import ProfileData

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic import special_functions
from tcemu.engine.formats.number_formats import F32
from tcemu.kernels.xla.hlo_text import ArrayShape, Instruction
from tcemu.operations.functional.torch_cuda.device_functions import Value, fma
from tcemu.operations.functional.torch_cuda.numpy_evaluation import evaluate_by_numpy
from tcemu.operations.functional.torch_cuda.product_kernels import DTYPES, Launch, TorchProduct
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.torch_products import choose_kernel, multiply_as_chosen

CALL = "__cublas$lt$matmul"  # XLA's target for cuBLASLt
DETAILS = re.compile(r"grid:(\d+),(\d+),(\d+) block:(\d+),(\d+),(\d+)")
ACTIVATION = re.compile(r"_(?:relu|gelu)(bias)?(?=_[NT]{3}$)")  # within the name of a kernel
EPILOGUES = {  # a bias, and a function of the total
    "DEFAULT": (False, ""), "BIAS": (True, ""), "RELU": (False, "relu"), "BIAS_RELU": (True, "relu"), "GELU": (False, "gelu"),
    "BIAS_GELU": (True, "gelu"),
}  # fmt: skip
SLOPE, CUBE = math.sqrt(2 / math.pi), 0.044715  # of GELU's approximation by tanh
PROFILE = (
    'record one call with `with jax.profiler.trace("profile"): ...` in the run that writes the dump, and read it by '
    'tcemu.xla.read(dump, target=..., profile="profile")'
)


def read_profile(folder: str | Path) -> dict[str, dict[str, list[Launch]]]:
    """Read which kernels each instruction launched, from what `jax.profiler.trace` wrote.

    Args:
        folder: The folder, or its file *.xplane.pb.

    Returns:
        The kernels of one execution, by the beginning of the names of the module's files in a dump, "module_0001.jit_f", and by the name of
        the instruction.

    Raises:
        FileNotFoundError: There is no profile.
    """
    folder = Path(folder)
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.xplane.pb"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no file *.xplane.pb; jax.profiler.trace({str(folder)!r}) writes it")
    found: dict[str, dict[str, list[Launch]]] = {}
    for path in paths:
        for event in _gpu_events(path):
            facts = dict(event.stats)
            if facts.keys() >= {"hlo_op", "hlo_module", "program_id"}:
                details = DETAILS.search(str(facts.get("kernel_details", "")))  # copies and fills have none
                x, y, z, *block = map(int, details.groups()) if details else (1,) * 6
                launch = Launch(event.name, (x, y, z), (block[0], block[1], block[2]))
                module = f"module_{facts['program_id']:04}.{facts['hlo_module']}"
                found.setdefault(module, {}).setdefault(str(facts["hlo_op"]), []).append(launch)
    return {module: {name: _one_execution(launches) for name, launches in each.items()} for module, each in found.items()}


def _gpu_events(path: Path) -> Iterator[Any]:
    """Return what a profile has of GPUs."""
    with warnings.catch_warnings():  # JAX's class warns of its own form when it is made: as an error that would end the process
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = ProfileData.from_file(str(path)).planes
        yield from (e for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines for e in line.events)


def _one_execution(launches: list[Launch]) -> list[Launch]:
    """Return the shortest sequence of kernels of which the recorded ones are repetitions."""
    lengths = (length for length in range(1, len(launches)) if len(launches) % length == 0)
    repeated = (launches[:length] for length in lengths if launches == launches[:length] * (len(launches) // length))
    return next(repeated, launches)


class Operand(NamedTuple):
    """An operand of a product as [batch, rows, K]: A, or B transposed."""

    x: np.ndarray
    row_axes: int  # axes that became its rows
    contiguous_k: bool  # in memory


def multiply_by_library(
    program: str, each: Instruction, shapes: Sequence[ArrayShape], operands: Sequence[np.ndarray], launches: Sequence[Launch]
) -> np.ndarray:
    """Return the product of a call of cuBLASLt.

    Args:
        program: Name of the program, for messages.
        each: The call.
        shapes: Shapes and layouts of its operands.
        operands: The operands: A, B, an addend if beta is not 0, a bias if the epilogue has one.
        launches: The kernels that it launched; empty: they are not known. Products of integers need none: their sums are exact.

    Raises:
        NotModelled: The call does more than is known, or its kernels are not known.
    """
    where = f"{program}: {each.name}, a product by cuBLASLt,"
    config = each.config().get("gemm_backend_config", {})
    epilogue, scales = config.get("epilogue"), [config.get(name) for name in ("alpha_real", "alpha_imag", "beta")]
    if epilogue not in EPILOGUES or scales not in ([1, 0, 0], [1, 0, 1]):
        raise NotModelled(f"{where} has the epilogue {epilogue} and the factors {scales}; known are {', '.join(EPILOGUES)}, and 0 or 1")
    has_bias, function = EPILOGUES[epilogue]
    numbers = config["dot_dimension_numbers"]
    a, b = (_operand(numbers, side, shape, x) for side, shape, x in zip(("lhs", "rhs"), shapes, operands, strict=False))
    result = each.shape if isinstance(each.shape, ArrayShape) else each.shape[0]
    extras = operands[2:]
    if len(extras) != has_bias + scales[2] or len(extras) > 1:
        raise NotModelled(f"{where} has {len(operands)} operands; known are A, B, and a bias or an addend")
    if {a.x.dtype, b.x.dtype} == {np.dtype(np.int8)} and result.dtype == np.int32 and not extras:
        return np.matmul(a.x.astype(np.int32), b.x.astype(np.int32).swapaxes(-1, -2)).reshape(result.sizes)
    addend = extras[0] if extras else None
    dtype = np.dtype(np.float32) if function == "gelu" else result.dtype
    kind, algorithm = "columns" if has_bias else "outputs", config.get("selected_algorithm", 0)
    found = _multiply_floats(where, algorithm, a, b, addend, kind, result._replace(dtype=dtype), launches)
    if function == "relu":
        if np.isnan(found).any():
            raise NotModelled(f"{where} has a NaN before max(x, 0), whose result is not known")
        found = np.where(found > 0, found, np.zeros((), found.dtype))
    if function == "gelu":
        is_nvjet = any(ACTIVATION.search(launch.name) for launch in launches)
        found = evaluate_by_numpy(_nvjet_gelu if is_nvjet else _gelu, found.view(np.uint32)).view(np.float32)
    return found.astype(result.dtype).reshape(result.sizes)


def _gelu(codes: Array) -> Array:
    """Return GELU of f32 codes as cuBLASLt's own epilogue computes it.

    Source: CUTLASS, cutlass/epilogue/thread/activation.h (`GELU_taylor`), with tanh.approx.f32, which was chosen on two products of f32 on
    an H200; 0 of 16,384 words of two others with a bias differ.
    """
    half, gate = _gelu_parts(codes)
    return (half * (1.0 + gate)).codes


def _nvjet_gelu(codes: Array) -> Array:
    """Return GELU as kernels nvjet compute it: the last product and sum are one fma, which was chosen on the zeros of one product."""
    half, gate = _gelu_parts(codes)
    return fma(half, gate, half).codes


def _gelu_parts(codes: Array) -> tuple[Value, Value]:
    x = Value(codes)
    return 0.5 * x, Value(special_functions.tanh(((SLOPE * x) * fma(CUBE * x, x, 1.0)).codes))


def _multiply_floats(
    where: str, algorithm: Any, a: Operand, b: Operand, addend: np.ndarray | None, kind: str, result: ArrayShape, launches: Sequence[Launch]
) -> np.ndarray:
    """Return A·B with an addend of a kind, [batch, M, N] in the dtype of `result`."""
    (batch, m, k), n, dtype = a.x.shape, b.x.shape[1], a.x.dtype
    what = f"{where} of {batch} times {m} x {k} x {n} (M x K x N) in {dtype}"
    if not launches:
        raise NotModelled(f"{what}: the dump has the number {algorithm} of its algorithm, which does not tell the order of sums: {PROFILE}")
    swapped = m > 1 and n > 1 and result.order[-1] < len(result.sizes) - b.row_axes  # the columns of the result are contiguous
    known = dtype.name in DTYPES and b.x.dtype == dtype and result.dtype.name in ("float32", dtype.name)
    if not known or (swapped and addend is not None):
        raise NotModelled(f"{what} with operands of {dtype} and {b.x.dtype} and a result of {result} has no rule")
    left, right = (b, a) if swapped else (a, b)
    layout = ("r" if left.contiguous_k else "c") + ("c" if right.contiguous_k else "r")
    call = TorchProduct(dtype.name, left.x.shape[1], k, right.x.shape[1], batch, layout, None if addend is None else kind)
    choice = choose_kernel(call, launches=[launch._replace(name=ACTIVATION.sub(_without_activation, launch.name)) for launch in launches])
    if addend is not None and kind == "outputs":
        addend = addend.reshape(batch, m, n)
    x, y = left.x, right.x.swapaxes(-1, -2)
    if batch == 1:
        x, y, addend = x[0], y[0], addend if addend is None or addend.ndim < 3 else addend[0]
    if result.dtype == dtype:
        found = multiply_as_chosen(choice, x, y, addend)
    elif choice.addend_first or choice.recipe.merge.partial != F32:
        raise NotModelled(f"{what} in slices that wait in {dtype}, with a result or a function in float32, has no rule")
    else:
        found = matmul_with_kernel(choice.recipe.replace(dtype=F32), ProductOperands(x, y, addend), result.dtype)
    rows = np.asarray(found).reshape(batch, *call[1:4:2])
    return rows.swapaxes(-1, -2) if swapped else rows


def _without_activation(match: re.Match[str]) -> str:
    return "_bias" if match[1] else ""


def _operand(numbers: Mapping[str, Any], side: str, shape: ArrayShape, x: np.ndarray) -> Operand:
    batch, contracted = ([int(axis) for axis in numbers[f"{side}_{kind}_dimensions"]] for kind in ("batch", "contracting"))
    free = [axis for axis in range(x.ndim) if axis not in (*batch, *contracted)]
    sizes = [int(np.prod([x.shape[axis] for axis in axes], dtype=int)) for axes in (batch, free, contracted)]
    innermost = next((axis for axis in reversed(shape.order) if shape.sizes[axis] > 1), None)
    return Operand(x.transpose([*batch, *free, *contracted]).reshape(sizes), len(free), innermost in contracted)
