"""Who computes: the emulation, or the instruction itself on a GPU that has the same arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

EMULATED, NATIVE, AUTO = "emulated", "native", "auto"
CHOICES = (EMULATED, NATIVE, AUTO)
_choice = jax.make_user_context(EMULATED)  # JAX traces and compiles a function anew for each value


@contextmanager
def execution(choice: str) -> Iterator[None]:
    """Within it, tcemu's instructions and products are computed as chosen; also a decorator. The default is "emulated".

    "native": by the PTX instruction, on the NVIDIA GPU that JAX computes on. Raises Unsupported, and says why, where that GPU has no
    instruction of the same arithmetic, or nobody has verified that it has. `tcemu.backends` says the same beforehand.
    "auto": by the instruction where "native" would not raise and the program is compiled for the GPU, else by the emulation.
    The bits are the same, but for operands that PTX leaves undefined: there the GPU does what it does.
    The choice is part of the key under which `jax.jit` keeps what it traced and compiled: a function that was compiled under one choice is
    traced anew under another. It is taken where a function is traced, so what is called later, as what `jax.vjp` returns, is computed as
    chosen there. Each thread has its own.
    Raises ValueError for another word.
    """
    if choice not in CHOICES:
        raise ValueError(f"execution({choice!r}): wanted one of {', '.join(CHOICES)}")
    with _choice(choice):
        yield


def chosen() -> str:
    """The choice that holds here, one of CHOICES."""
    return _choice.value
