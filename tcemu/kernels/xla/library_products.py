"""Products that XLA leaves to cuBLASLt: what a call of the dump computes, and the order of the kernel that a profile of the run names.

The dump has the number of the algorithm that XLA took, an index into a list that cuBLASLt makes on the GPU. The names and grids of the
kernels that JAX's profiler records beside the name of the instruction tell the order.

Source: OpenXLA, xla/service/gpu/backend_configs.proto (`GemmBackendConfig`), xla/service/gpu/gpu_blas_lt.h and gemm_rewriter.cc (the
operands of a call), xla/service/gpu/matmul_utils.cc (the two operands change places where the result's columns are contiguous).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.profiler import ProfileData

from tcemu.base.errors import NotModelled
from tcemu.kernels.xla.hlo_text import ArrayShape, Instruction
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.product_kernels import DTYPES, Launch, TorchProduct
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.torch_products import choose_kernel, multiply_as_chosen

CALL = "__cublas$lt$matmul"  # XLA's target for cuBLASLt
DETAILS = re.compile(r"grid:(\d+),(\d+),(\d+) block:(\d+),(\d+),(\d+)")
ACTIVATION = re.compile(r"_(?:relu|gelu)(bias)?(?=_[NT]{3}$)")  # within the name of a kernel
EPILOGUES = {"DEFAULT": (False, False), "BIAS": (True, False), "RELU": (False, True), "BIAS_RELU": (True, True)}  # a bias, max(x, 0)
PROFILE = (
    'record one call with `with jax.profiler.trace("profile"): ...` in the run that writes the dump, and read it by '
    'tcemu.xla.read(dump, target=..., profile="profile")'
)


def read_profile(folder: str | Path) -> dict[str, dict[str, list[Launch]]]:
    """Read which kernels each instruction launched, from what `jax.profiler.trace` wrote.

    Args:
        folder: The folder, or its file *.xplane.pb.

    Returns:
        By name of the module and name of the instruction the kernels of one execution.

    Raises:
        FileNotFoundError: There is no profile.
    """
    folder = Path(folder)
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.xplane.pb"))
    if not paths:
        raise FileNotFoundError(f"{folder}: no file *.xplane.pb; jax.profiler.trace({str(folder)!r}) writes it")
    found: dict[str, dict[str, list[Launch]]] = {}
    for path in paths:
        for plane in ProfileData.from_file(str(path)).planes:
            for event in (event for line in plane.lines for event in line.events if plane.name.startswith("/device:GPU")):
                facts = dict(event.stats)
                if "hlo_op" in facts and "hlo_module" in facts:
                    details = DETAILS.search(str(facts.get("kernel_details", "")))  # copies and fills have none
                    x, y, z, *block = map(int, details.groups()) if details else (1,) * 6
                    launch = Launch(event.name, (x, y, z), (block[0], block[1], block[2]))
                    found.setdefault(str(facts["hlo_module"]), {}).setdefault(str(facts["hlo_op"]), []).append(launch)
    return {module: {name: _one_execution(launches) for name, launches in each.items()} for module, each in found.items()}


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
    has_bias, has_relu = EPILOGUES[epilogue]
    numbers = config["dot_dimension_numbers"]
    a, b = (_operand(numbers, side, shape, x) for side, shape, x in zip(("lhs", "rhs"), shapes, operands, strict=False))
    result = each.shape if isinstance(each.shape, ArrayShape) else each.shape[0]
    extras = operands[2:]
    if len(extras) != has_bias + scales[2] or len(extras) > 1:
        raise NotModelled(f"{where} has {len(operands)} operands; known are A, B, and a bias or an addend")
    if {a.x.dtype, b.x.dtype} == {np.dtype(np.int8)} and result.dtype == np.int32 and not extras:
        found = np.matmul(a.x.astype(np.int32), b.x.astype(np.int32).swapaxes(-1, -2))
    else:
        addend = extras[0] if extras else None
        found = _multiply_floats(where, config.get("selected_algorithm", 0), a, b, addend, "columns" if has_bias else "outputs", result, launches)
    if has_relu:
        if np.isnan(found).any():
            raise NotModelled(f"{where} has a NaN before max(x, 0), whose result is not known")
        found = np.where(found > 0, found, np.zeros((), found.dtype))
    return found.reshape(result.sizes)


def _multiply_floats(
    where: str, algorithm: Any, a: Operand, b: Operand, addend: np.ndarray | None, kind: str, result: ArrayShape, launches: Sequence[Launch]
) -> np.ndarray:
    (batch, m, k), n, dtype = a.x.shape, b.x.shape[1], a.x.dtype
    what = f"{where} of {batch} times {m} x {k} x {n} (M x K x N) in {dtype}"
    if not launches:
        raise NotModelled(f"{what}: the dump has the number {algorithm} of its algorithm, which does not tell the order of its sums: {PROFILE}")
    swapped = m > 1 and n > 1 and result.order[-1] < len(result.sizes) - b.row_axes  # the columns of the result are contiguous
    left, right = (b, a) if swapped else (a, b)
    if dtype.name not in DTYPES or b.x.dtype != dtype or result.dtype.name not in ("float32", dtype.name) or (swapped and addend is not None):
        raise NotModelled(f"{what} with operands of {dtype} and {b.x.dtype} and a result of {result} has no rule")
    layout = ("r" if left.contiguous_k else "c") + ("c" if right.contiguous_k else "r")
    call = TorchProduct(dtype.name, left.x.shape[1], k, right.x.shape[1], batch, layout, None if addend is None else kind)
    plain = [launch._replace(name=ACTIVATION.sub(lambda match: "_bias" if match[1] else "", launch.name)) for launch in launches]
    choice = choose_kernel(call, launches=plain)
    if addend is not None and kind == "outputs":
        addend = addend.reshape(batch, m, n)
    x, y, addend = (each if each is None or each.ndim < 3 or batch > 1 else each[0] for each in (left.x, right.x.swapaxes(-1, -2), addend))
    if result.dtype == dtype:
        found = multiply_as_chosen(choice, x, y, addend)
    elif addend is None and choice.recipe.merge.partial == F32:
        found = matmul_with_kernel(choice.recipe.replace(dtype=F32), ProductOperands(x, y), result.dtype)
    else:
        raise NotModelled(f"{what} with a result of {result} and a bias, or with slices that wait in {dtype}, has no rule")
    rows = np.asarray(found).reshape(batch, *call[1:4:2])
    return rows.swapaxes(-1, -2) if swapped else rows


def _operand(numbers: Mapping[str, Any], side: str, shape: ArrayShape, x: np.ndarray) -> Operand:
    batch, contracted = ([int(axis) for axis in numbers[f"{side}_{kind}_dimensions"]] for kind in ("batch", "contracting"))
    free = [axis for axis in range(x.ndim) if axis not in (*batch, *contracted)]
    sizes = [int(np.prod([x.shape[axis] for axis in axes], dtype=int)) for axes in (batch, free, contracted)]
    innermost = next((axis for axis in reversed(shape.order) if shape.sizes[axis] > 1), None)
    return Operand(x.transpose([*batch, *free, *contracted]).reshape(sizes), len(free), innermost in contracted)
