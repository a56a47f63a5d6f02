"""`tcemu.ptx.compile`: CUDA C++ device code to PTX, by NVRTC. It needs no GPU and no CUDA toolkit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tcemu.backends.cuda import nvrtc
from tcemu.base.errors import PtxError
from tcemu.isa.targets import resolve_target
from tcemu.ptx.text.module import Module
from tcemu.ptx.text.parser import parse

HOST_HINT = (
    "NVRTC compiles device code alone. Leave out host functions, launches and host headers, or put them between `#ifndef "
    "__CUDACC_RTC__` and `#endif`"
)
HOST_SIGNS = ("<<<", "cudaMalloc", "std::vector", "<iostream>", "<stdio.h>", "<cstdio>", "<vector>", "<cstdlib>", "int main(")


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
            source, architecture, options=(*options, *folders), name_expressions=name_expressions, headers=headers, file_name="source.cu"
        )
    except nvrtc.CompilationError as error:
        hint = f"\n{HOST_HINT}." if any(sign in source for sign in HOST_SIGNS) else ""
        raise PtxError(f"the source does not compile for {resolve_target(target)}: {error}{hint}") from None
    module = parse(compiled.code.rstrip(bytes(1)).decode())
    return replace(module, name_expressions=compiled.lowered_names)
