"""`tcemu.triton.interpreted`: Triton's interpreter with `tl.dot` in the bits of a GPU's tensor cores.

The interpreter runs a kernel program by program in NumPy. Here its operations `create_dot` and `create_dot_scaled` are `tcemu.gemm` by the
instruction that Triton's compiler would choose. All else stays NumPy's: special functions, and the order of sums within a reduction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from inspect import getcallargs, isfunction
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

# it keeps functions of `tl` when it is imported, which must not be while they are the interpreter's
from triton.compiler import code_generator as code_generator
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tcemu.base.errors import Unsupported
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, F64, TF32, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import instructions
from tcemu.engine.isa.targets import parse_target_name, resolve_target
from tcemu.kernels.ptx.runtime.launch_shape import read_dimensions
from tcemu.kernels.triton.cuda_redirection import cuda_on_cpu
from tcemu.kernels.triton.interpreter_floats import NarrowFloats, numbers
from tcemu.kernels.triton.launches import Launch, LaunchReport
from tcemu.kernels.triton.tensors import InterpreterTensor, NumpyTensor
from tcemu.kernels.triton.triton_versions import TRIED, TritonVersion, describe_version, installed_version
from tcemu.operations.products.gemm import gemm

WARPS_PER_GROUP = 4
FP8 = (E4M3, E5M2)
EXACT_FUNCTIONS = {"rint": np.rint, "nearbyint": np.rint, "trunc": np.trunc, "floor": np.floor, "ceil": np.ceil}  # of libdevice


class DotRule(NamedTuple):
    """The instructions that Triton's compiler takes for `tl.dot` on some targets.

    Source: kernels that Triton 3.9.0 compiled for sm_80, sm_89 and sm_90. The other targets are assumed to follow their neighbours.
    """

    capabilities: tuple[int, ...]
    fp8: bool  # FP8 operands are multiplied as they are; else they are first converted to f16
    warpgroup: bool  # wgmma for tiles of 64 rows and more by 4 warps and more; else always mma.sync


RULES = (
    DotRule((75, 80, 86, 87, 88), fp8=False, warpgroup=False),
    DotRule((89, 120, 121), fp8=True, warpgroup=False),
    DotRule((90,), fp8=True, warpgroup=True),
)


@contextmanager
def interpreted(target: str, *, redirect_cuda: bool = True) -> Iterator[LaunchReport]:
    """Run every Triton kernel that is launched inside by Triton's interpreter, with `tl.dot` in the bits of the target's tensor cores.

    It is faster than `emulated`, and less exact: `tl.dot` and `tl.dot_scaled` have the bits of the instruction that Triton's compiler would
    choose, in ascending order of K, with the accumulator as C. The compiled kernel adds the products of `tl.dot_scaled` in another order:
    its inexact sums may differ in the last bits. Other operations are those of Triton's interpreter: the order in which
    `tl.sum` adds, special functions, and the fusion of products and sums are not the GPU's.

    bf16 is computed and bf16 and FP8 are converted as on the target (see `interpreter_floats`); the codes of NaN may differ.
    Of libdevice it has the functions whose results are exact: rint, nearbyint, trunc, floor and ceil.

    Args:
        target: GPU, as "H100" or "sm_90a".
        redirect_cuda: As for `emulated`.

    Yields:
        The launches so far.

    Raises:
        Unsupported: Triton is older than 3.8; the target is unknown or has no rule for `tl.dot`; or, at a dot, an `input_precision` of
            several products, or `max_num_imprecise_acc`.
    """
    version = installed_version()
    if not version.interpreted:
        raise Unsupported(
            f"interpreted: Triton {triton.__version__}'s interpreter lacks operations that this way replaces (tried were {TRIED}). "
            "tcemu.triton.emulated works with this one"
        )
    name = resolve_target(target)
    capability = parse_target_name(name).number
    rule = next((rule for rule in RULES if capability in rule.capabilities), None)
    if rule is None:
        covered = ", ".join(f"sm_{number}" for rule in RULES for number in rule.capabilities)
        raise Unsupported(
            f"interpreted: there is no rule for tl.dot on {name}; covered are {covered}. tcemu.triton.emulated has no such limit"
        )
    report = LaunchReport(name, describe_version())
    dots = _Dots(name, rule, report, version)
    with ExitStack() as stack:
        builder = interpreter.interpreter_builder
        stack.enter_context(patch.object(builder, "create_dot", dots.create_dot))
        stack.enter_context(patch.object(builder, "create_dot_scaled", dots.create_dot_scaled))
        stack.enter_context(patch.object(JITFunction, "run", lambda function, *args, **kwargs: dots.run(function, *args, **kwargs)))
        stack.enter_context(patch.object(JITFunction, "__call__", _call_interpreted))
        stack.enter_context(NarrowFloats(capability, version).patched())
        if redirect_cuda:
            stack.enter_context(cuda_on_cpu(capability, target))
        yield report


@lru_cache(maxsize=1024)
def _interpreted_function(function: Callable) -> interpreter.InterpretedFunction:
    """Return the interpreter's form of a Python function; a `JITFunction` is no key, since its hash analyses the patched language."""
    return interpreter.InterpretedFunction(function)


def _call_interpreted(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Call a function from within an interpreted kernel, whose launch has patched the language already."""
    return _interpreted_function(function.fn).rewrite()(*args, **kwargs)


@contextmanager
def _interpreted_language() -> Iterator[None]:
    """Make the operations of `triton.language` those of the interpreter, for kernels and for the library's functions that they call."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    libdevice = import_module("triton.language.extra.libdevice")
    try:
        for name, function in list(vars(libdevice).items()):
            if isfunction(function) and function.__module__ == libdevice.__name__:
                scope.set_attr(libdevice, name, _library_function(name))
        yield
    finally:
        scope.restore()


def _library_function(name: str) -> Callable:
    """Return a function of libdevice for the interpreter: those whose results are exact, and else a refusal."""

    def run(x: Any, *others: Any, **options: Any) -> Any:
        if name not in EXACT_FUNCTIONS:
            raise Unsupported(f"libdevice.{name}: not interpreted, only {', '.join(EXACT_FUNCTIONS)} are; tcemu.triton.emulated runs it")
        return tl.tensor(interpreter.TensorHandle(EXACT_FUNCTIONS[name](x.handle.data), x.handle.dtype), x.type)

    return run


def _for_interpreter(argument: Any) -> Any:
    """Return an argument of a launch with NumPy arrays as the interpreter takes them."""
    if isinstance(argument, NumpyTensor):
        return InterpreterTensor(argument)
    if isinstance(argument, TensorDescriptor):
        return replace(argument, base=_for_interpreter(argument.base))
    return tuple(map(_for_interpreter, argument)) if type(argument) is tuple else argument


class _Dots:
    """The products of the kernels that run."""

    def __init__(self, target: str, rule: DotRule, report: LaunchReport, version: TritonVersion) -> None:
        self.target, self.rule, self.report, self.version = target, rule, report, version
        self.warps = WARPS_PER_GROUP

    def run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Run a kernel, in place of `JITFunction.run`."""
        if warmup:
            return
        self.warps = kwargs.get("num_warps", WARPS_PER_GROUP)
        began = time.perf_counter()
        args, kwargs = tuple(map(_for_interpreter, args)), {key: _for_interpreter(value) for key, value in kwargs.items()}
        with _interpreted_language():
            _interpreted_function(function.fn).run(*args, grid=grid, warmup=False, **kwargs)
        bound = getcallargs(function.fn, *args, **{n: v for n, v in kwargs.items() if n in function.arg_names})
        axes: Any = grid(bound) if callable(grid) else grid
        settings = {name: bound[name] for name in function.arg_names if function.params[function.arg_names.index(name)].is_constexpr}
        self.report.launches.append(
            Launch(
                kernel=function.fn.__name__, grid=read_dimensions("grid", axes), threads=32 * self.warps,
                settings=settings | {"num_warps": self.warps},
                statements=0, seconds=time.perf_counter() - began, inexact=("all but tl.dot",),
            )
        )  # fmt: skip

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: int) -> Any:
        """Return a·b + d as a handle of the interpreter."""
        left, right = _values(a), _values(b)
        result = d.dtype.scalar
        if left.dtype == np.int8:
            total = np.matmul(left.astype(np.int32), right.astype(np.int32)) + d.data
            return interpreter.TensorHandle(total.astype(np.int32), result)
        formats = [FORMATS[value.dtype] for value in (left, right)]
        if formats[0] == F32:
            return interpreter.TensorHandle(
                self._multiply_f32(left, right, d.data, str(input_precision).rpartition(".")[2].lower()), result
            )
        if any(each in FP8 for each in formats):
            if E4M3 in formats:
                self._require_e4m3()
            if not self.rule.fp8 or not all(each in FP8 for each in formats):
                left, right, formats = left.astype(np.float16), right.astype(np.float16), [F16, F16]
            elif 0 < max_num_imprecise_acc < left.shape[-1]:
                raise Unsupported(
                    f"tl.dot with max_num_imprecise_acc={max_num_imprecise_acc}: its promotion of FP8 sums is not interpreted; "
                    "tcemu.triton.emulated runs it"
                )
        op = self._instruction(formats[0], formats[1], F16 if d.data.dtype == np.float16 else F64 if formats[0] == F64 else F32, left)
        return interpreter.TensorHandle(self._multiply(op, left, right, d.data), result)

    def _require_e4m3(self) -> None:
        if not self.rule.fp8:
            raise Unsupported(f"tl.dot of float8e4nv: Triton does not compile it for {self.target}; sm_89 and later have it")

    def _multiply_f32(self, left: np.ndarray, right: np.ndarray, total: np.ndarray, precision: str) -> np.ndarray:
        if precision != "tf32":
            raise Unsupported(
                f"tl.dot of float32 with input_precision {precision}: only tf32 is one instruction; tcemu.triton.emulated runs the others"
            )
        return self._multiply(self._instruction(TF32, TF32, F32, left), left, right, total, rounding="RZ")  # the unit ignores the low bits

    def create_dot_scaled(
        self, lhs: Any, lhs_scale: Any, lhs_format: Any, rhs: Any, rhs_scale: Any, rhs_format: Any, fast_math: bool, lhs_k_pack: bool,
        rhs_k_pack: bool, accumulator: Any,
    ) -> Any:  # fmt: skip
        """Return the product of scaled operands, which the compiler converts to bf16, or to f16 if one of them is f16."""
        if any(each.dtype.scalar is tl.float8e4nv for each in (lhs, rhs)):
            self._require_e4m3()
        half = "FP16" in f"{lhs_format} {rhs_format}".upper()
        compute = tl.float16 if half else tl.bfloat16
        prepare, kind = interpreter._prepare_dot_scaled_operand, (compute,) if self.version.scaled_type else ()
        values = (
            prepare(lhs, lhs_scale, lhs_format, lhs_k_pack, *kind, is_rhs=False),
            prepare(rhs, rhs_scale, rhs_format, rhs_k_pack, *kind, is_rhs=True),
        )
        left, right = (value.astype(np.float16 if half else ml_dtypes.bfloat16) for value in values)
        form = F16 if half else BF16
        return interpreter.TensorHandle(self._multiply(self._instruction(form, form, F32, left), left, right, accumulator.data), tl.float32)

    def _instruction(self, a: Format, b: Format, result: Format, left: np.ndarray) -> MatrixMultiply:
        grouped = self.rule.warpgroup and left.ndim == 2 and left.shape[0] % 64 == 0 and self.warps % WARPS_PER_GROUP == 0
        family = "wgmma" if grouped and a != F64 else "mma"
        return _largest(self.target, family, a, b, result)

    def _multiply(self, op: MatrixMultiply, left: np.ndarray, right: np.ndarray, total: np.ndarray, **options: Any) -> np.ndarray:
        return np.asarray(gemm(left, right, total, op=op, target=self.target, **options)).astype(total.dtype)


# formats by NumPy's dtypes; float32 operands are those of tf32
FORMATS = {
    np.dtype(np.float16): F16, np.dtype(ml_dtypes.bfloat16): BF16, np.dtype(np.float32): F32, np.dtype(np.float64): F64,
    np.dtype(ml_dtypes.float8_e4m3fn): E4M3, np.dtype(ml_dtypes.float8_e5m2): E5M2,
}  # fmt: skip


def _values(handle: Any) -> np.ndarray:
    """Return the operand of a dot with the dtype of its numbers. Raises Unsupported for a type that no rule covers."""
    values = numbers(handle)
    if values.dtype != np.int8 and values.dtype not in FORMATS:
        raise Unsupported(
            f"tl.dot of {handle.dtype.scalar}: not interpreted; expected float16, bfloat16, float32, float64, int8, float8e4nv or float8e5"
        )
    return values


@cache
def _largest(target: str, family: str, a: Format, b: Format, result: Format) -> MatrixMultiply:
    """Return the largest dense instruction of a family for some formats. Raises Unsupported if the target has none."""
    found = [
        op for op in instructions(target, family)
        if isinstance(op, MatrixMultiply) and (op.a, op.b, op.d) == (a, b, result) and not op.sparse and op.scaling is None
    ]  # fmt: skip
    if not found:
        raise Unsupported(f"tl.dot: {target} has no {family} of {a} by {b} with sums in {result}")
    return max(found, key=lambda op: op.m * op.n * op.k)
