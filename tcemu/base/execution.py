"""Choice of who computes: the emulation, with kernels or without, or the instruction itself on a GPU that has the same arithmetic."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import jax

EMULATED, PORTABLE, NATIVE, AUTO = "emulated", "portable", "native", "auto"
CHOICES = (EMULATED, PORTABLE, NATIVE, AUTO)
_choice = jax.make_user_context(EMULATED)  # part of the key of `jit`'s cache: JAX traces and compiles a function again for each value


@contextmanager
def execution(choice: str) -> Iterator[None]:
    """Choose who computes: the emulation, or the GPU's own instruction, as a context manager or a decorator.

    All choices give the same bits, except where PTX leaves the result undefined: there the GPU's result may differ.

    The choice is part of the key of `jax.jit`'s cache, so a function that was compiled under one choice is traced again under another. The
    choice at the time of tracing counts: a function that is called later, such as the result of `jax.vjp`, computes as chosen at its trace.
    Each thread has its own choice.

    Args:
        choice: "emulated", the default: the emulation computes, by kernels where this machine can compile them, else by JAX's operations.
            "portable": the emulation computes by JAX's operations alone, as in a program that `jax.export` writes.
            "native": the PTX instruction computes, on the NVIDIA GPU that JAX uses. `tcemu.backends.describe` tells beforehand whether it
            can.
            "auto": the instruction computes if "native" would not raise and the program is compiled for the GPU, else the emulation.

    Raises:
        ValueError: `choice` is none of these words.
        Unsupported: Raised by an operation under "native": the GPU has no instruction with the same arithmetic, or nobody has verified that
            it has one. The message says which.
    """
    if choice not in CHOICES:
        raise ValueError(f"execution({choice!r}): expected one of {', '.join(CHOICES)}")
    with _choice(choice):
        yield


def without_native() -> AbstractContextManager:
    """Return a context in which the emulation computes, without kernels where the current choice is "portable"."""
    return execution(PORTABLE if current_execution() == PORTABLE else EMULATED)


def current_execution() -> str:
    """Return the current choice of this thread, one of `CHOICES`."""
    return _choice.value
