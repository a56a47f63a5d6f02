"""Sources of kernels as modules: PTX is parsed, and CUDA C++ compiled by NVRTC, which needs no GPU and no CUDA toolkit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tcemu.base.errors import PtxError
from tcemu.engine.backends.cuda import nvrtc
from tcemu.engine.isa.targets import resolve_target
from tcemu.kernels.ptx.text.module import Module
from tcemu.kernels.ptx.text.parser import parse

HOST_HINT = (
    "NVRTC compiles device code alone. Leave out host functions, launches and host headers, or put them between `#ifndef "
    "__CUDACC_RTC__` and `#endif`"
)
HOST_SIGNS = ("<<<", "cudaMalloc", "std::vector", "<iostream>", "<stdio.h>", "<cstdio>", "<vector>", "<cstdlib>", "int main(")

# what nvcc includes of itself and NVRTC does not have: values of math.h, and headers of C whose functions NVRTC knows
NVCC_MACROS = ("-DINFINITY=__int_as_float(0x7f800000)", "-DNAN=__int_as_float(0x7fffffff)")
_INTEGERS = "#include <cuda/std/cstdint>\n" + " ".join(f"using cuda::std::{sign}int{n}_t;" for sign in ("", "u") for n in (8, 16, 32, 64))
NVCC_HEADERS = {"math.h": "", "cmath": "", "stdint.h": _INTEGERS, "cstdint": _INTEGERS}

Source = str | os.PathLike | Module  # PTX or CUDA C++ as text, a file of either kind, or a module


def read_module(source: Source, target: str, entry: str | None = None, options: Sequence[str] = ()) -> Module:
    """Return the module of a source. A text without `.version`, which begins PTX, and with `__global__` is CUDA C++, as are files *.cu.

    Args:
        source: Text, path or module.
        target: GPU for which CUDA C++ is compiled.
        entry: Name of a kernel, which is instantiated if it is a template.
        options: Options of NVRTC. The folder of a file is searched for headers.

    Raises:
        PtxError: The source is neither PTX nor CUDA C++ that NVRTC accepts.
        TypeError: The source is something else.
        ValueError: There are options, and the source is not CUDA C++.
        OSError: The file cannot be read.
    """
    if not isinstance(source, str | os.PathLike | Module):
        raise TypeError(f"text: got {type(source).__name__}; expected PTX or CUDA C++ as a string, a path, or a module of parse or compile")
    options, is_cuda = tuple(options), False
    if isinstance(source, os.PathLike):
        path = Path(source)
        is_cuda = path.suffix == ".cu"
        options, source = ((*options, f"--include-path={path.resolve().parent}") if is_cuda else options), path.read_text(encoding="utf-8")
    elif isinstance(source, str):
        is_cuda = "__global__" in source and re.search(r"^\s*\.version\b", source, re.MULTILINE) is None
    if is_cuda and isinstance(source, str):
        return _compile_once(source, resolve_target(target), options, () if entry is None else (entry,))
    if options:
        raise ValueError(f"options: got {list(options)}; they are NVRTC's, for CUDA C++, and the source is PTX")
    return parse_once(source) if isinstance(source, str) else source


@lru_cache(maxsize=256)
def parse_once(text: str) -> Module:
    """Parse PTX; later launches share the module."""
    return parse(text)


@lru_cache(maxsize=64)
def _compile_once(source: str, target: str, options: tuple[str, ...], name_expressions: tuple[str, ...]) -> Module:
    return compile(source, target=target, options=options, name_expressions=name_expressions)


def compile(
    source: str,
    *,
    target: str,
    options: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> Module:
    """Compile CUDA C++ device code for a GPU and parse the PTX.

    Headers of CUDA and of CUB, libcu++ and cooperative groups are found where the extra `cuda` installed them. As with nvcc, a product and
    a sum become one fused multiply-add unless an option says `--fmad=false`.

    Args:
        source: CUDA C++: kernels and device functions.
        target: GPU for which the code is compiled, as "sm_90a" or "H100".
        options: Options of NVRTC, as "--std=c++20", "-DN=4" or "-I/path".
        name_expressions: C++ names of kernels to instantiate from templates, as "axpy<float>". `run` accepts them as `entry`.
        headers: Texts of headers by the names under which the source includes them.

    Returns:
        The module; `text` is the PTX.

    Raises:
        PtxError: NVRTC is missing or rejects the source; with its log.
        Unsupported: The target is unknown.

    Source: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc.
    """
    architecture = resolve_target(target).replace("sm_", "compute_")
    folders = [f"--include-path={folder}" for folder in nvrtc.include_folders()]
    try:
        compiled = nvrtc.compile_source(
            source, architecture, options=(*NVCC_MACROS, *options, *folders), name_expressions=name_expressions,
            headers={**NVCC_HEADERS, **(headers or {})}, file_name="source.cu",
        )  # fmt: skip
    except nvrtc.CompilationError as error:
        hint = f"\n{HOST_HINT}." if any(sign in source for sign in HOST_SIGNS) else ""
        raise PtxError(f"the source does not compile for {resolve_target(target)}: {error}{hint}") from None
    module = parse(compiled.code.rstrip(bytes(1)).decode())
    return replace(module, name_expressions=compiled.lowered_names)
