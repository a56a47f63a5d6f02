"""The versions of Triton that were tried. The version is an axis of results: two compilers make different code of one kernel."""

from __future__ import annotations

from typing import NamedTuple

import triton

from tcemu.base.errors import Unsupported

HALF_UP, NEAREST_EVEN = "half up", "nearest even"


class TritonVersion(NamedTuple):
    """A version of Triton, and what differs in it from the others for `tcemu.triton`.

    Source: the PTX that each version makes; `tests/kernels/triton_kernels` ran with each.
    """

    number: tuple[int, int]
    release: str  # that was tried
    interpreted: bool  # its interpreter has the operations that `tcemu.triton.interpreted` replaces
    e5m2: str  # rounding to e5m2 before sm_89: half up, beyond the largest number too, or to nearest even; "": nothing is interpreted
    scaled_type: bool  # the interpreter prepares operands of `tl.dot_scaled` for a type


VERSIONS = (  # ascending
    TritonVersion((3, 6), "3.6.0", interpreted=False, e5m2="", scaled_type=False),
    TritonVersion((3, 8), "3.8.0", interpreted=True, e5m2=HALF_UP, scaled_type=False),
    TritonVersion((3, 9), "3.9.0", interpreted=True, e5m2=NEAREST_EVEN, scaled_type=True),
)
TRIED = ", ".join(row.release for row in VERSIONS)


def installed_version() -> TritonVersion:
    """Return the row of the installed Triton: its own, or that of the latest older version.

    Raises:
        Unsupported: Triton is older than every row.
    """
    number = tuple(int(part) for part in triton.__version__.split(".")[:2])
    rows = [row for row in VERSIONS if row.number <= number]
    if not rows:
        raise Unsupported(f"tcemu.triton needs Triton {VERSIONS[0].release} or later; this is {triton.__version__}. Tried were {TRIED}")
    return rows[-1]


def describe_version() -> str:
    """Return the installed version for a report, with a remark if it was not tried."""
    release = triton.__version__.partition("+")[0]
    return release if any(row.release == release for row in VERSIONS) else f"{triton.__version__} (not tried; tried were {TRIED})"
