"""The algorithms that cuBLASLt's heuristic proposes for a product, by ctypes. The library examines the GPU, and launches nothing.

Source: cublasLt.h and cublas_api.h of cuBLAS 13.1, whose names stand beside the numbers.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tcemu.base.results import Result, Table
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, FORMATS, TF32, Format
from tcemu.uses.replay.black_box import FP8_FORMATS, RESULT_FORMATS

LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")
FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")  # folders of the wheels
PROCESS_MAPS = Path("/proc/self/maps")  # lists the libraries that this process has loaded
STATUSES = {  # cublasStatus_t
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR", 13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip
CUDA_TYPES: dict[Format, int] = {F32: 0, TF32: 0, F16: 2, BF16: 14, E4M3: 28, E5M2: 29}  # cudaDataType_t: CUDA_R_32F, ...
COMPUTE_32F, COMPUTE_32F_FAST_TF32 = 68, 77  # cublasComputeType_t
TRANSA, TRANSB, FAST_ACCUM = 3, 4, 25  # cublasLtMatmulDescAttributes_t
TRANSPOSED = 1  # CUBLAS_OP_T
WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t: MAX_WORKSPACE_BYTES, MIN_ALIGNMENT_A_BYTES to D
CONFIGURATION = {  # cublasLtMatmulAlgoConfigAttributes_t, each with the C type that the header gives it
    "algorithm": (0, ctypes.c_int32), "tile": (1, ctypes.c_uint32), "split_k": (2, ctypes.c_int32),
    "reduction_scheme": (3, ctypes.c_uint32), "swizzle": (4, ctypes.c_uint32), "custom_option": (5, ctypes.c_uint32),
    "stages": (6, ctypes.c_uint32), "inner_shape": (7, ctypes.c_uint16), "cluster_shape": (8, ctypes.c_uint16),
}  # fmt: skip
SCHEMES = {0: "none", 1: "in place", 2: "compute type", 4: "output type"}  # cublasLtReductionScheme_t
HINTS = {
    "cublasLtCreate": ": it needs an NVIDIA GPU and its driver",
    "cublasLtMatmulAlgoGetHeuristic": ": it proposes nothing. For FP8 it needs N and K in multiples of 16, and layout 'rc' on Hopper",
}
OPERAND_FORMATS = (F16, BF16, F32, TF32, E4M3, E5M2)
LAYOUTS = ("rr", "rc", "cr", "cc")
MIB_32 = 32 << 20  # workspace of torch and XLA on Hopper


class _HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class AlgorithmConfiguration:
    """One algorithm of cuBLASLt, in the library's own numbers.

    Attributes:
        algorithm: Number of the algorithm.
        tile: Number of the tile.
        split_k: Number of slices of K, 1 for none.
        reduction_scheme: Merge of the slices: "none", "in place" (the running sum is stored in the result's format), "compute type" (sums
            are stored in f32) or "output type" (sums are stored in the result's format).
        swizzle: Number of the swizzle.
        custom_option: Number of the custom option.
        stages: Number of the stages.
        inner_shape: Number of the inner shape.
        cluster_shape: Number of the cluster shape.
        workspace: Workspace in bytes.
        waves: Waves of thread blocks on this GPU.
    """

    algorithm: int
    tile: int
    split_k: int
    reduction_scheme: str
    swizzle: int
    custom_option: int
    stages: int
    inner_shape: int
    cluster_shape: int
    workspace: int
    waves: float


@dataclass(frozen=True)
class HeuristicProposals(Result):
    """The algorithms that cuBLASLt proposes for a product, the best first. A caller may take another one.

    Attributes:
        shape: M, N and K.
        dtype: Formats of operands and result, in words.
        version: Version of the library; 130100 is 13.1.0.
        configurations: The proposals.
    """

    shape: tuple[int, int, int]
    dtype: str
    version: int
    configurations: tuple[AlgorithmConfiguration, ...]

    def table(self) -> Table:
        """Make a table with a row per proposal.

        Returns:
            The table.
        """
        columns = tuple(f.name for f in fields(AlgorithmConfiguration))
        rows = tuple(tuple(getattr(one, head) for head in columns) for one in self.configurations)
        title = f"cuBLASLt {self.version}, {self.dtype}, {' x '.join(map(str, self.shape))}"
        return Table(title, columns, rows, {"version": self.version, "dtype": self.dtype})

    def __str__(self) -> str:
        lines = [f"{self.table().title}:"]
        for c in self.configurations:
            split = "K in one piece" if c.split_k == 1 else f"K in {c.split_k} slices, reduction {c.reduction_scheme}"
            lines.append(
                f"  algorithm {c.algorithm}, tile {c.tile}, stages {c.stages}, custom option {c.custom_option}, cluster {c.cluster_shape}, "
                f"swizzle {c.swizzle}; {split}; {c.workspace:,} bytes of workspace, {c.waves:.2f} waves"
            )
        return "\n".join(lines)


def query_heuristic(
    m: int,
    n: int,
    k: int,
    *,
    operand_dtype: str | tuple[str, str] = "f16",
    dtype: str | None = None,
    layout: str | None = None,
    workspace: int = MIB_32,
    alignment: int = 256,
    fast_accumulation: bool = False,
    count: int = 1,
    library: str | Path | None = None,
) -> HeuristicProposals:
    """Ask cuBLASLt which algorithms it proposes for A·B, A [m, k] and B [k, n], on the GPU of this machine.

    A library that calls cuBLASLt may take another algorithm, and `cublasGemmEx` another one. `fingerprint` shows what was computed.

    Args:
        m: Rows of A.
        n: Columns of B.
        k: Columns of A.
        operand_dtype: Format of both operands, or of A and of B: f16, bf16, f32, tf32 (f32 operands that may be multiplied as tf32),
            e4m3, e5m2.
        dtype: Format of the result, f16, bf16 or f32. None: as the operands, bf16 for FP8, f32 for tf32.
        layout: Contiguous rows ("r") or columns ("c") of A and of B. None: "rr", or "rc" for FP8, which Hopper requires. The result is in
            row-major order.
        workspace: Bytes that an algorithm may use.
        alignment: Minimum alignment of every matrix, in bytes.
        fast_accumulation: FP8 fast accumulation, as in `torch._scaled_mm`.
        count: Maximum number of proposals.
        library: Path of libcublasLt. None: the one that this process has loaded, otherwise one of the loader or of a wheel.

    Returns:
        The proposals.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: There is no library or GPU, or cuBLASLt proposes nothing.
    """
    pair = (operand_dtype, operand_dtype) if isinstance(operand_dtype, str) else tuple(operand_dtype)
    if len(pair) != 2 or any(name not in map(str, OPERAND_FORMATS) for name in pair):
        raise ValueError(f"operand_dtype={operand_dtype!r}: expected one or two of {', '.join(map(str, OPERAND_FORMATS))}")
    formats = FORMATS[pair[0]], FORMATS[pair[1]]
    if formats[0] != formats[1] and not set(formats) <= set(FP8_FORMATS):
        raise ValueError(f"operand_dtype={operand_dtype!r}: two different formats must both be FP8")
    result = FORMATS.get(dtype) if dtype is not None else BF16 if formats[0] in FP8_FORMATS else F32 if formats[0] == TF32 else formats[0]
    if result not in RESULT_FORMATS:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(str, RESULT_FORMATS))}")
    layout = ("rc" if formats[0] in FP8_FORMATS else "rr") if layout is None else layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected one of {', '.join(LAYOUTS)}")
    numbers = {"m": m, "n": n, "k": k, "count": count, "alignment": alignment, "workspace": workspace}
    for name, value in numbers.items():
        smallest = 0 if name == "workspace" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise ValueError(f"{name}={value!r}: expected an integer from {smallest}")
    query = _Query((m, n, k), formats, result, layout, workspace, alignment, bool(fast_accumulation), count)
    lt = _CublasLt(_library_path(library))
    operand_text = pair[0] if pair[0] == pair[1] else " x ".join(pair)
    return HeuristicProposals((m, n, k), f"{operand_text} -> {result}", lt.version(), tuple(lt.proposals(query)))


@dataclass(frozen=True)
class _Query:
    """One checked question."""

    shape: tuple[int, int, int]
    operand_formats: tuple[Format, Format]
    result_format: Format
    layout: str
    workspace: int
    alignment: int
    fast: bool
    count: int


def _library_path(library: str | Path | None) -> str:
    """Return the library's file. Raises RuntimeError if there is none."""
    if library is not None:
        return str(library)
    with suppress(OSError):
        loaded = {line.split()[-1] for line in PROCESS_MAPS.read_text().splitlines() if "libcublasLt.so" in line}
        if loaded:
            return min(loaded)
    for name in LIBRARIES:
        for candidate in (Path(path) / folder / name for path in sys.path for folder in FOLDERS):
            if candidate.exists():
                return str(candidate)
        with suppress(OSError):
            ctypes.CDLL(name)
            return name
    raise RuntimeError(f"no {' or '.join(LIBRARIES)} is here; library= takes its path. jax[cuda13] and torch for CUDA bring it")


class _CublasLt:
    """libcublasLt, with its statuses as errors."""

    def __init__(self, path: str):
        try:
            self.functions = ctypes.CDLL(path)
        except OSError as error:
            raise RuntimeError(f"{path} cannot be loaded as cuBLASLt: {error}") from None
        self.path = path

    def version(self) -> int:
        found = self._function("cublasLtGetVersion")
        found.restype = ctypes.c_size_t
        return int(found())

    def _function(self, name: str) -> Any:
        try:
            return getattr(self.functions, name)
        except AttributeError:
            raise RuntimeError(f"{self.path} has no {name}: it is not libcublasLt") from None

    def invoke(self, name: str, *arguments: Any) -> None:
        status = self._function(name)(*arguments)
        if status:
            why = STATUSES.get(status, "an unknown status")
            raise RuntimeError(f"{name} answered {status}, CUBLAS_STATUS_{why}{HINTS.get(name, '')}")

    @contextmanager
    def create(self, kind: str, *arguments: Any) -> Iterator[ctypes.c_void_p]:
        """Create an object of the library, and destroy it afterwards."""
        handle = ctypes.c_void_p()
        self.invoke(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
        try:
            yield handle
        finally:
            self.invoke(f"cublasLt{kind}Destroy", handle)

    def set_attribute(self, kind: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self.invoke(f"cublasLt{kind}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def create_layout(self, fmt: Format, rows: int, columns: int) -> Any:
        """Create the layout of a matrix whose columns are contiguous."""
        return self.create("MatrixLayout", CUDA_TYPES[fmt], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))

    def proposals(self, query: _Query) -> Iterator[AlgorithmConfiguration]:
        """Yield the proposals.

        cuBLASLt's matrices have contiguous columns, so a row-major A·B is queried as Bᵀ·Aᵀ, whose first operand is B.
        """
        (m, n, k), (of_a, of_b) = query.shape, query.operand_formats
        rows_of_b, rows_of_a = query.layout[1] == "r", query.layout[0] == "r"
        compute = COMPUTE_32F_FAST_TF32 if TF32 in query.operand_formats else COMPUTE_32F
        answers, answer_count = (_HeuristicResult * query.count)(), ctypes.c_int()
        with (
            self.create("") as handle,
            self.create("MatmulDesc", compute, CUDA_TYPES[F32]) as product,
            self.create_layout(of_b, *((n, k) if rows_of_b else (k, n))) as first,
            self.create_layout(of_a, *((k, m) if rows_of_a else (m, k))) as second,
            self.create_layout(query.result_format, n, m) as result,
            self.create("MatmulPreference") as preference,
        ):
            for attribute, contiguous_rows in ((TRANSA, rows_of_b), (TRANSB, rows_of_a)):
                if not contiguous_rows:
                    self.set_attribute("MatmulDesc", product, attribute, ctypes.c_int32(TRANSPOSED))
            if query.fast:
                self.set_attribute("MatmulDesc", product, FAST_ACCUM, ctypes.c_int8(1))
            self.set_attribute("MatmulPreference", preference, WORKSPACE, ctypes.c_uint64(query.workspace))
            for attribute in ALIGNMENTS:
                self.set_attribute("MatmulPreference", preference, attribute, ctypes.c_uint32(query.alignment))
            arguments = (handle, product, first, second, result, result, preference, query.count, answers, ctypes.byref(answer_count))
            self.invoke("cublasLtMatmulAlgoGetHeuristic", *arguments)
            usable = [answer for answer in answers[: answer_count.value] if answer.state == 0]
            if not usable:
                raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic gave {answer_count.value} answers, none usable")
            yield from map(self.read_configuration, usable)

    def read_configuration(self, answer: _HeuristicResult) -> AlgorithmConfiguration:
        values: dict[str, Any] = {}
        for name, (attribute, kind) in CONFIGURATION.items():
            value, written = kind(), ctypes.c_size_t()
            size = ctypes.c_size_t(ctypes.sizeof(value))
            arguments = (ctypes.byref(answer.algo), attribute, ctypes.byref(value), size, ctypes.byref(written))
            self.invoke("cublasLtMatmulAlgoConfigGetAttribute", *arguments)
            values[name] = int(value.value)
        scheme = values["reduction_scheme"]
        values["reduction_scheme"] = SCHEMES.get(scheme, f"number {scheme}")
        return AlgorithmConfiguration(**values, workspace=int(answer.workspace), waves=float(answer.waves))
