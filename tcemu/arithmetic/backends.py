"""The backends: what can walk the steps of a model, and on which platform. The table to which kernels are added.

A backend is asked for a program, a function (a, b, c, scales, block scales) -> D on codes. On each platform the first backend of the table
that has one serves it. The portable walk is the last row and has one for every model. All give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array, lax

from tcemu.arithmetic.kernels import cuda
from tcemu.arithmetic.model import Model, Promotion, Scales, Signature
from tcemu.arithmetic.walk import walk
from tcemu.formats import Format

Program = Callable[[Array, Array, Array, Scales | None, Scales | None], Array]
EVERY = ""  # every platform


class Backend(NamedTuple):
    """One way to walk the steps."""

    name: str
    platform: str  # as `lax.platform_dependent` names it: "cpu", "cuda", "tpu"; or EVERY
    missing: Callable[[], str]  # why it cannot run here; "" if it can
    program: Callable[[Model, Signature, Promotion | None], Program | None]  # None for what it cannot take


def _walk(model: Model, signature: Signature, promotion: Promotion | None) -> Program | None:
    """Promotion is left to the caller."""
    return None if promotion else lambda a, b, c, scales, _: walk(model, signature, a, b, c, scales)


BACKENDS = (
    Backend("cuda", "cuda", cuda.missing, cuda.program),
    Backend("walk", EVERY, lambda: "", _walk),
)


def chosen(model: Model, signature: Signature, promotion: Promotion | None = None) -> dict[str, tuple[Backend, Program]]:
    """The backend that serves each platform, and its program; EVERY stands for the platforms that have none of their own."""
    serving: dict[str, tuple[Backend, Program]] = {}
    for backend in BACKENDS:
        if backend.platform not in serving and not backend.missing():
            program = backend.program(model, signature, promotion)
            if program is not None:
                serving[backend.platform] = backend, program
    return serving


def reasons(model: Model, signature: Signature) -> dict[str, str]:
    """Of each backend by name, why it does not serve this arithmetic on its platform; "" if it does."""
    serving = chosen(model, signature)
    said = {}
    for backend in BACKENDS:
        first, _ = serving.get(backend.platform, (None, None))
        said[backend.name] = backend.missing()
        if not said[backend.name] and first is not backend:
            able = backend.program(model, signature, None) is not None
            said[backend.name] = f"{first.name} comes first" if able and first is not None else "it does not take this arithmetic"
    return said


class Codes(NamedTuple):
    """A and B as they came, before they were converted to what a model multiplies: a backend may do that itself."""

    formats: tuple[Format, Format]
    a: Array
    b: Array


def product(model: Model, signature: Signature, a: Array, b: Array, c: Array, scales: Scales | None, came: Codes | None = None) -> Array:
    """D = A·B + C by the backends of the platform that the program is compiled for. Operands as in `walk`."""
    serving = chosen(model, signature)
    programs = {platform: program for platform, (_, program) in serving.items()}
    if came is not None and came.formats != (signature.a, signature.b) and "cuda" in serving:
        by_codes = cuda.program(model, signature, None, came.formats)
        if by_codes is not None:
            programs["cuda"] = lambda _a, _b, c, scales, none: by_codes(came.a, came.b, c, scales, none)
    return by_platform(programs, programs.pop(EVERY), a, b, c, scales, None)


def by_platform(programs: dict[str, Callable[..., Array]], portable: Callable[..., Array], *operands: Any) -> Array:
    """What the platform's own program gives, or the portable one."""
    return lax.platform_dependent(*operands, default=portable, **programs) if programs else portable(*operands)
