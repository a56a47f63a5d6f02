"""The backends: what can walk the steps of a model, and on which platform. The table to which kernels are added.

A backend is asked for a program, a function (a, b, c, scales, block scales) -> D on codes; A and B may be held in other formats than those
that are multiplied, which hold all their numbers. On each platform the first backend of the table that has one serves it. The portable walk
is the last row and has one for every model. All give the same bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array, lax

from tcemu.arithmetic.kernels import cuda
from tcemu.arithmetic.model import Model, Promotion, Scales, Signature
from tcemu.arithmetic.walk import walk
from tcemu.formats import Format
from tcemu.formats.coding import recoded

Program = Callable[[Array, Array, Array, Scales | None, Scales | None], Array]
Held = tuple[Format, Format]  # of A's and B's codes
EVERY = ""  # every platform


class Backend(NamedTuple):
    """One way to walk the steps."""

    name: str
    platform: str  # as `lax.platform_dependent` names it: "cpu", "cuda", "tpu"; or EVERY
    missing: Callable[[], str]  # why it cannot run here; "" if it can
    program: Callable[[Model, Signature, Promotion | None, Held], Program | None]  # None for what it cannot take


def _walk(model: Model, signature: Signature, promotion: Promotion | None, held: Held) -> Program | None:
    """Promotion is left to the caller."""

    def call(a: Array, b: Array, c: Array, scales: Scales | None, _: Scales | None) -> Array:
        return walk(model, signature, recoded(held[0], signature.a, a), recoded(held[1], signature.b, b), c, scales)

    return None if promotion else call


BACKENDS = (
    Backend("cuda", "cuda", cuda.missing, cuda.program),
    Backend("walk", EVERY, lambda: "", _walk),
)


def chosen(model: Model, signature: Signature, promotion: Promotion | None, held: Held) -> dict[str, tuple[Backend, Program]]:
    """The backend that serves each platform, and its program; EVERY stands for the platforms that have none of their own.

    signature: its a and b as they are multiplied.
    """
    serving: dict[str, tuple[Backend, Program]] = {}
    for backend in BACKENDS:
        if backend.platform not in serving and not backend.missing():
            program = backend.program(model, signature, promotion, held)
            if program is not None:
                serving[backend.platform] = backend, program
    return serving


def reasons(model: Model, signature: Signature) -> dict[str, str]:
    """Of each backend by name, why it does not serve this arithmetic on its platform; "" if it does."""
    held = signature.a, signature.b
    serving = chosen(model, signature, None, held)
    said = {}
    for backend in BACKENDS:
        first, _ = serving.get(backend.platform, (None, None))
        said[backend.name] = backend.missing()
        if not said[backend.name] and first is not backend:
            able = backend.program(model, signature, None, held) is not None
            said[backend.name] = f"{first.name} comes first" if able and first is not None else "it does not take this arithmetic"
    return said


def product(model: Model, signature: Signature, held: Held, a: Array, b: Array, c: Array, scales: Scales | None) -> Array:
    """D = A·B + C by the backends of the platform that the program is compiled for. Operands as in `walk`, A and B as they are held."""
    programs = {platform: program for platform, (_, program) in chosen(model, signature, None, held).items()}
    return by_platform(programs, programs.pop(EVERY), a, b, c, scales, None)


def by_platform(programs: dict[str, Callable[..., Array]], portable: Callable[..., Array], *operands: Any) -> Array:
    """What the platform's own program gives, or the portable one."""
    return lax.platform_dependent(*operands, default=portable, **programs) if programs else portable(*operands)
