"""NVRTC, NVIDIA's compiler as a library, by ctypes: CUDA C++ text in, machine code or PTX out. It needs no GPU."""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

MAJORS = (13, 12)  # versions that are looked for, the newest first
FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib")  # of the wheels that jax[cuda13] and jax[cuda12] bring
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
    """Of the library, which must be there."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compiled(text: str, architecture: str) -> bytes:
    """Machine code ("sm_90") or PTX ("compute_90") of a text without includes. Raises CompilationError."""
    options = [option.encode() for option in (*OPTIONS, f"--gpu-architecture={architecture}")]
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"tcemu.cu", 0, None, None)
    try:
        status = _function("nvrtcCompileProgram")(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if status:
            raise CompilationError(f"NVRTC {version()} for {architecture}: {_output(program, 'ProgramLog').rstrip(bytes(1)).decode()}")
        return _output(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
    finally:
        _call("nvrtcDestroyProgram", ctypes.byref(program))


def _output(program: ctypes.c_void_p, name: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{name}Size", program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{name}", program, data)
    return data.raw


def _function(name: str) -> Callable[..., int]:
    found = library()
    if found is None:
        raise CompilationError("there is no NVRTC here: libnvrtc.so comes with jax[cuda13], as the package nvidia-cuda-nvrtc")
    return getattr(found, name)


def _call(name: str, *arguments: object) -> None:
    status = _function(name)(*arguments)
    if status:
        raise CompilationError(f"{name} gave the error {status}")
