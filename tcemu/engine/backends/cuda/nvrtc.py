"""NVRTC, NVIDIA's compiler as a library, by ctypes: CUDA C++ text in, machine code or PTX out. It needs no GPU."""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

MAJORS = (13, 12)  # versions that are looked for, the newest first
FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")  # folders of the wheels that jax[cuda13] and jax[cuda12] bring
HEADER_FOLDERS = (
    "nvidia/cu13/include", "nvidia/cu13/include/cccl", "nvidia/cuda_runtime/include", "nvidia/cuda_cccl/include", "nvidia/curand/include",
)  # fmt: skip
OPTIONS = ("--std=c++17", "--fmad=false")  # a multiplication and an addition are two roundings, unless the text says fma


class CompilationError(RuntimeError):
    """NVRTC did not take a text; the message has its log."""


@cache
def library() -> ctypes.CDLL | None:
    """The newest NVRTC that the loader or a wheel has; None where there is none."""
    for major in MAJORS:
        name = f"libnvrtc.so.{major}"
        for place in ("", *(str(Path(path) / folder) for path in sys.path for folder in FOLDERS)):
            with suppress(OSError):
                for builtins in Path(place).glob("libnvrtc-builtins.so.*") if place else ():
                    ctypes.CDLL(str(builtins))  # which NVRTC looks for where the loader looks
                return ctypes.CDLL(str(Path(place) / name) if place else name)
    return None


@cache
def version() -> tuple[int, int]:
    """Returns the version of the library, which must be there."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


class CompiledText(NamedTuple):
    code: bytes  # machine code, or PTX
    lowered_names: dict[str, str]  # the name in `code` of each name expression
    log: str  # warnings


def compile_text(text: str, architecture: str) -> bytes:
    """Machine code ("sm_90") or PTX ("compute_90") of a text without includes. Raises CompilationError."""
    return compile_source(text, architecture, options=OPTIONS).code


def compile_source(
    text: str,
    architecture: str,
    *,
    options: Sequence[str] = (),
    name_expressions: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    file_name: str = "tcemu.cu",
) -> CompiledText:
    """Compile CUDA C++ device code.

    Args:
        text: The source.
        architecture: "sm_90" for machine code, "compute_90" for PTX.
        options: NVRTC's options, as "--std=c++20" or "-DN=4".
        name_expressions: Templates to instantiate, as "axpy<float>".
        headers: Texts of headers by the names under which the source includes them.
        file_name: The name of the source in messages.

    Returns:
        The code, the lowered names of `name_expressions`, and the log.

    Raises:
        CompilationError: There is no NVRTC, or it rejects the text; with its log.

    Source: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc.
    """
    arguments = [option.encode() for option in (*options, f"--gpu-architecture={architecture}")]
    names, texts = [name.encode() for name in headers or ()], [content.encode() for content in (headers or {}).values()]
    pointers = ctypes.c_char_p * len(names)
    program = ctypes.c_void_p()
    _call(
        "nvrtcCreateProgram", ctypes.byref(program), text.encode(), file_name.encode(), len(names), pointers(*texts), pointers(*names)
    )  # fmt: skip
    try:
        for expression in name_expressions:
            _call("nvrtcAddNameExpression", program, expression.encode())
        status = _function("nvrtcCompileProgram")(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
        log = _output(program, "ProgramLog").rstrip(bytes(1)).decode(errors="replace")
        if status:
            raise CompilationError(f"NVRTC {'.'.join(map(str, version()))} for {architecture}: {log}{explain_architecture(architecture)}")
        lowered = {expression: _lowered_name(program, expression) for expression in name_expressions}
        return CompiledText(_output(program, "CUBIN" if architecture.startswith("sm_") else "PTX"), lowered, log)
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


class ArchitectureRange(NamedTuple):
    """The compute capabilities for which a major version of NVRTC compiles no more, or not yet."""

    oldest: int  # capability, as 75
    toolkits: str  # that still have the capabilities before `oldest`


# Source: release notes of CUDA 13.0, "Deprecated and dropped features" (offline compilation before compute capability 7.5), and of 12.0
DROPPED = {
    13: ArchitectureRange(75, "CUDA 12, from 12.0 to 12.9: pip install 'nvidia-cuda-nvrtc-cu12<13' in an environment without NVRTC 13"),
    12: ArchitectureRange(50, "CUDA 11, whose last release is 11.8"),
}


def explain_architecture(architecture: str) -> str:
    """Return a sentence that says which toolkit still has an architecture, or "" if this one is not too new for it."""
    capability = int("".join(filter(str.isdigit, architecture)))
    dropped = DROPPED.get(version()[0])
    if dropped is None or capability >= dropped.oldest:
        return ""
    oldest = ".".join(map(str, divmod(dropped.oldest, 10)))
    return f"\nNVRTC {version()[0]} compiles for compute capability {oldest} and later. {architecture} is in {dropped.toolkits}"


def include_folders() -> list[str]:
    """Folders of CUDA's headers in this environment: those of the wheels nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl."""
    folders = [Path(path) / folder for path in sys.path for folder in HEADER_FOLDERS]
    return [str(folder) for folder in dict.fromkeys(folders) if folder.is_dir()]


def _lowered_name(program: ctypes.c_void_p, expression: str) -> str:
    name = ctypes.c_char_p()
    _call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
    return (name.value or b"").decode()


def _output(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{name}", program, data)
    return data.raw


def _function(name: str) -> Callable[..., int]:
    found = library()
    if found is None:
        raise CompilationError(
            "NVRTC was not found. It is libnvrtc.so of the package nvidia-cuda-nvrtc: pip install '.[cuda]' in a clone of tcemu, or "
            "jax[cuda13] on a "
            "machine with a GPU"
        )
    return getattr(found, name)


def _call(name: str, *arguments: object) -> None:
    status = _function(name)(*arguments)
    if status:
        raise CompilationError(f"{name} gave the error {status}")
