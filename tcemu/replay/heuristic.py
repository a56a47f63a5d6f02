"""What cuBLASLt's heuristic proposes for a product, by ctypes. A GPU has to be there: the library looks at it; nothing is launched.

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

from tcemu.formats import BF16, E4M3, E5M2, F16, F32, FORMATS, TF32, Format
from tcemu.results import Result, Table

LIBRARIES = ("libcublasLt.so.13", "libcublasLt.so.12")
FOLDERS = ("nvidia/cu13/lib", "nvidia/cublas/lib")  # of the wheels that hold them
MAPS = Path("/proc/self/maps")  # which libraries this process has loaded
STATUSES = {  # cublasStatus_t
    1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH", 11: "MAPPING_ERROR", 13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip
TYPES: dict[Format, int] = {F32: 0, TF32: 0, F16: 2, BF16: 14, E4M3: 28, E5M2: 29}  # cudaDataType_t: CUDA_R_32F, ...
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
    "cublasLtCreate": ": it wants an NVIDIA GPU and its driver",
    "cublasLtMatmulAlgoGetHeuristic": ": it proposes nothing. For FP8 it wants N and K in multiples of 16, and layout 'rc' on Hopper",
}
NARROW = (E4M3, E5M2)
HELD, RESULTS, LAYOUTS = (F16, BF16, F32, TF32, E4M3, E5M2), (F16, BF16, F32), ("rr", "rc", "cr", "cc")
MIB_32 = 32 << 20  # torch's workspace and XLA's on Hopper


class _Answer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One algorithm of cuBLASLt, as the library numbers its parts.

    algorithm, tile, stages, custom_option, inner_shape, cluster_shape: the library's numbers. split_k: slices of K, 1 for none.
    reduction_scheme: how they become one: "none", "in place" (the running sum waits in the result's format), "compute type" (sums wait in
    f32) or "output type" (each waits in the result's format). workspace: bytes that it wants; waves: of thread blocks on this GPU.
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
class Heuristic(Result):
    """What cuBLASLt proposes for a product, the best first. It is a proposal: a caller may take another one.

    version: of the library, as it counts: 130100 is 13.1.0.
    """

    shape: tuple[int, int, int]
    dtype: str
    version: int
    configurations: tuple[Configuration, ...]

    def table(self) -> Table:
        heads = tuple(f.name for f in fields(Configuration))
        rows = tuple(tuple(getattr(one, head) for head in heads) for one in self.configurations)
        title = f"cuBLASLt {self.version}, {self.dtype}, {' x '.join(map(str, self.shape))}"
        return Table(title, heads, rows, {"version": self.version, "dtype": self.dtype})

    def __str__(self) -> str:
        said = [f"{self.table().title}:"]
        for one in self.configurations:
            split = "K whole" if one.split_k == 1 else f"K in {one.split_k} slices, reduction {one.reduction_scheme}"
            said.append(
                f"  algorithm {one.algorithm}, tile {one.tile}, stages {one.stages}, custom option {one.custom_option}, cluster "
                f"{one.cluster_shape}, swizzle {one.swizzle}; {split}; {one.workspace:,} bytes of workspace, {one.waves:.2f} waves"
            )
        return "\n".join(said)


def heuristic(
    m: int,
    n: int,
    k: int,
    *,
    dtype: str | tuple[str, str] = "f16",
    out: str | None = None,
    layout: str | None = None,
    workspace: int = MIB_32,
    alignment: int = 256,
    fast_accumulation: bool = False,
    count: int = 1,
    library: str | Path | None = None,
) -> Heuristic:
    """Asks cuBLASLt which algorithms it proposes for A·B, A [m, k] and B [k, n], on the GPU that is here.

    dtype: of both operands, or of A and of B: f16, bf16, f32, tf32 (f32 operands that may be multiplied as tf32), e4m3, e5m2. out: of the
    result, f16, bf16 or f32; None: as the operands, bf16 for FP8, f32 for tf32. layout: of A and B, rows ("r") or columns ("c") contiguous;
    None: "rr", or for FP8 "rc", which is what Hopper takes. The result is in row-major order. workspace: bytes that it may use.
    alignment: of every matrix, in bytes, at least. fast_accumulation: of FP8, as `torch._scaled_mm` has it. count: proposals, at most.
    library: the path of libcublasLt; None: the one that this process has loaded, else one that the loader or a wheel has.
    A library that calls cuBLASLt may take another algorithm, and `cublasGemmEx` another one; `fingerprint` shows what was computed.
    Raises ValueError for arguments that cannot be, RuntimeError where there is no library or GPU, and for what cuBLASLt has nothing for.
    """
    pair = (dtype, dtype) if isinstance(dtype, str) else tuple(dtype)
    if len(pair) != 2 or any(name not in map(str, HELD) for name in pair):
        raise ValueError(f"dtype={dtype!r}: wanted one or two of {', '.join(map(str, HELD))}")
    held = FORMATS[pair[0]], FORMATS[pair[1]]
    if held[0] != held[1] and not set(held) <= set(NARROW):
        raise ValueError(f"dtype={dtype!r}: two formats are of FP8, or one")
    result = FORMATS.get(out) if out is not None else BF16 if held[0] in NARROW else F32 if held[0] == TF32 else held[0]
    if result not in RESULTS:
        raise ValueError(f"out={out!r}: wanted one of {', '.join(map(str, RESULTS))}")
    layout = ("rc" if held[0] in NARROW else "rr") if layout is None else layout
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: wanted one of {', '.join(LAYOUTS)}")
    numbers = {"m": m, "n": n, "k": k, "count": count, "alignment": alignment, "workspace": workspace}
    for name, value in numbers.items():
        least = 0 if name == "workspace" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: wanted a whole number from {least}")
    asked = _Asked((m, n, k), held, result, layout, workspace, alignment, bool(fast_accumulation), count)
    lt = _Library(_path(library))
    said = pair[0] if pair[0] == pair[1] else " x ".join(pair)
    return Heuristic((m, n, k), f"{said} -> {result}", lt.version(), tuple(lt.proposals(asked)))


@dataclass(frozen=True)
class _Asked:
    """One question, checked."""

    shape: tuple[int, int, int]
    held: tuple[Format, Format]
    out: Format
    layout: str
    workspace: int
    alignment: int
    fast: bool
    count: int


def _path(library: str | Path | None) -> str:
    """The library's file. Raises RuntimeError where none is found."""
    if library is not None:
        return str(library)
    with suppress(OSError):
        loaded = {line.split()[-1] for line in MAPS.read_text().splitlines() if "libcublasLt.so" in line}
        if loaded:
            return min(loaded)
    for name in LIBRARIES:
        for place in (Path(path) / folder / name for path in sys.path for folder in FOLDERS):
            if place.exists():
                return str(place)
        with suppress(OSError):
            ctypes.CDLL(name)
            return name
    raise RuntimeError(f"no {' or '.join(LIBRARIES)} is here; library= takes its path. jax[cuda13] and torch for CUDA bring it")


class _Library:
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
            raise RuntimeError(f"{self.path} has no {name}: it is no libcublasLt") from None

    def call(self, name: str, *arguments: Any) -> None:
        status = self._function(name)(*arguments)
        if status:
            why = STATUSES.get(status, "an unknown status")
            raise RuntimeError(f"{name} answered {status}, CUBLAS_STATUS_{why}{HINTS.get(name, '')}")

    @contextmanager
    def made(self, kind: str, *arguments: Any) -> Iterator[ctypes.c_void_p]:
        """An object of the library, destroyed afterwards."""
        handle = ctypes.c_void_p()
        self.call(f"cublasLt{kind}Create", ctypes.byref(handle), *arguments)
        try:
            yield handle
        finally:
            self.call(f"cublasLt{kind}Destroy", handle)

    def set(self, kind: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
        self.call(f"cublasLt{kind}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def layout(self, fmt: Format, rows: int, columns: int) -> Any:
        """A matrix whose columns are contiguous."""
        return self.made("MatrixLayout", TYPES[fmt], ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))

    def proposals(self, asked: _Asked) -> Iterator[Configuration]:
        """cuBLASLt's matrices have contiguous columns, so that a row-major A·B is asked as Bᵀ·Aᵀ: its first operand is B."""
        (m, n, k), (of_a, of_b) = asked.shape, asked.held
        rows_of_b, rows_of_a = asked.layout[1] == "r", asked.layout[0] == "r"
        compute = COMPUTE_32F_FAST_TF32 if TF32 in asked.held else COMPUTE_32F
        answers, found = (_Answer * asked.count)(), ctypes.c_int()
        with (
            self.made("") as handle,
            self.made("MatmulDesc", compute, TYPES[F32]) as product,
            self.layout(of_b, *((n, k) if rows_of_b else (k, n))) as first,
            self.layout(of_a, *((k, m) if rows_of_a else (m, k))) as second,
            self.layout(asked.out, n, m) as result,
            self.made("MatmulPreference") as preference,
        ):
            for attribute, plain in ((TRANSA, rows_of_b), (TRANSB, rows_of_a)):
                if not plain:
                    self.set("MatmulDesc", product, attribute, ctypes.c_int32(TRANSPOSED))
            if asked.fast:
                self.set("MatmulDesc", product, FAST_ACCUM, ctypes.c_int8(1))
            self.set("MatmulPreference", preference, WORKSPACE, ctypes.c_uint64(asked.workspace))
            for attribute in ALIGNMENTS:
                self.set("MatmulPreference", preference, attribute, ctypes.c_uint32(asked.alignment))
            given = (handle, product, first, second, result, result, preference, asked.count, answers, ctypes.byref(found))
            self.call("cublasLtMatmulAlgoGetHeuristic", *given)
            usable = [answer for answer in answers[: found.value] if answer.state == 0]
            if not usable:
                raise RuntimeError(f"cublasLtMatmulAlgoGetHeuristic gave {found.value} answers, none usable")
            yield from map(self.configuration, usable)

    def configuration(self, answer: _Answer) -> Configuration:
        values: dict[str, Any] = {}
        for name, (attribute, kind) in CONFIGURATION.items():
            value, written = kind(), ctypes.c_size_t()
            size = ctypes.c_size_t(ctypes.sizeof(value))
            given = (ctypes.byref(answer.algo), attribute, ctypes.byref(value), size, ctypes.byref(written))
            self.call("cublasLtMatmulAlgoConfigGetAttribute", *given)
            values[name] = int(value.value)
        scheme = values["reduction_scheme"]
        values["reduction_scheme"] = SCHEMES.get(scheme, f"number {scheme}")
        return Configuration(**values, workspace=int(answer.workspace), waves=float(answer.waves))
