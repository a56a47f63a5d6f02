"""Kernels as values: the order of their sums, their roundings and their special functions; and as plain values, for JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tcemu.base.records import Record
from tcemu.base.saved_files import DamagedFile
from tcemu.operations.functional.row_sums import RowSum
from tcemu.operations.functional.special_choices import DIVISIONS, LOGARITHMS, POWERS, RECIPROCAL_ROOTS, ROOTS
from tcemu.operations.products.recipe_json import value_from_dict, value_to_dict

GELU_FORMS = ("erf", "tanh", "tanh.approx", "sigmoid")
MOMENTS = ("two_pass", "welford")
PAIRINGS = ("halves", "interleaved")


class KernelValue(Record):
    """The base of all values of kernels."""

    def check_fields(self, **checks: Any) -> None:
        """Check fields as `Record.check_fields` does, and that sums are a `RowSum`."""
        super().check_fields(**checks)
        sums = getattr(self, "sums", None)
        if sums is not None and not isinstance(sums, RowSum):
            raise ValueError(f"{type(self).__name__}(sums={sums!r}): expected a RowSum")


@dataclass(frozen=True)
class SoftmaxKernel(KernelValue):
    """The computation of a kernel for the softmax of a row, its logarithm, or the cross entropy.

    The kernel subtracts the row's maximum in f32, multiplies by log2 e, takes 2^x and adds.

    Attributes:
        sums: The order of the sum.
        power: How 2^x is computed: a name of `special_choices.POWERS`. "exact" is a what-if, within 0.53 ulp.
        division: How the exponentials are divided by their sum: "div.full", "div.approx", "rcp.approx" (multiplied by the reciprocal), each
            also with ".ftz", or "rn", rounded correctly.
        log: How `log_softmax` and `cross_entropy` compute the logarithm of the sum: "logf", libdevice's, or "lg2.approx" and
            "lg2.approx.ftz", times ln 2.
        block: Columns of one step of the online softmax of `cross_entropy`; None: all columns in one step.

    Raises:
        ValueError: A field has another value.
    """

    sums: RowSum = field(default_factory=RowSum)
    power: str = "ex2.approx"
    division: str = "div.full"
    log: str = "logf"
    block: int | None = None

    def __post_init__(self) -> None:
        self.check_fields(optional_counts="block", power=POWERS, division=DIVISIONS, log=LOGARITHMS)


@dataclass(frozen=True)
class RmsNormKernel(KernelValue):
    """The computation of a kernel for x / sqrt(mean(x^2) + eps) * weight, in f32.

    Attributes:
        sums: The order of the sum of squares.
        division: How the sum is divided by the number of columns; as `SoftmaxKernel.division`.
        root: How 1 / sqrt is computed: "rsqrt.approx" or "sqrt.approx", which a division follows, each also with ".ftz".
        round_before_weight: x / sqrt(...) is rounded to x's dtype before it is multiplied by the weight, as in Llama.
        add_offset: The weight is added to an offset first, even if that is 0, in which case a weight of -0 becomes +0.

    Raises:
        ValueError: A field has another value.
    """

    sums: RowSum = field(default_factory=RowSum)
    division: str = "div.full"
    root: str = "rsqrt.approx.ftz"
    round_before_weight: bool = True
    add_offset: bool = True

    def __post_init__(self) -> None:
        self.check_fields(flags="round_before_weight add_offset", division=DIVISIONS, root=(*RECIPROCAL_ROOTS, *ROOTS))


@dataclass(frozen=True)
class LayerNormKernel(KernelValue):
    """The computation of a kernel for (x - mean) / sqrt(variance + eps) * weight + bias, in f32.

    Attributes:
        sums: The order of the sums of x and of the squares of x - mean.
        moments: "two_pass": the mean first, then the squares of x - mean; "welford": both in one pass, by `RowSum.moments`.
        division: How sums are divided by the number of columns; as `SoftmaxKernel.division`.
        root: As `RmsNormKernel.root`.
        fused: The product with the weight and the addition of the bias are one fused multiply-add.

    Raises:
        ValueError: A field has another value.
    """

    sums: RowSum = field(default_factory=RowSum)
    division: str = "div.full"
    root: str = "sqrt.approx.ftz"
    fused: bool = True
    moments: str = "two_pass"

    def __post_init__(self) -> None:
        self.check_fields(flags="fused", division=DIVISIONS, root=(*RECIPROCAL_ROOTS, *ROOTS), moments=MOMENTS)
        if self.moments == "welford" and self.sums.tile is not None:
            raise ValueError(f"LayerNormKernel(sums={self.sums!r}): Welford's updates take a row as one tile; expected tile=None")


@dataclass(frozen=True)
class SiluKernel(KernelValue):
    """The computation of a kernel for x / (1 + e^-x), in f32, as x times a sigmoid.

    Attributes:
        power: How 2^x is computed; as `SoftmaxKernel.power`.
        division: How 1 is divided by 1 + e^-x; as `SoftmaxKernel.division`.

    Raises:
        ValueError: A field has another value.
    """

    power: str = "ex2.approx"
    division: str = "div.full"

    def __post_init__(self) -> None:
        self.check_fields(power=POWERS, division=DIVISIONS)


@dataclass(frozen=True)
class GeluKernel(KernelValue):
    """The computation of a kernel for GELU, in f32.

    Attributes:
        form: "erf": 0.5 x (1 + erf(x / sqrt 2)), by libdevice's erf. "tanh": 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3),
            by libdevice's tanh. "tanh.approx": the same by the instruction. "sigmoid": x / (1 + e^(-2u)), by `power` and `division`.
        power: As `SoftmaxKernel.power`, of the form "sigmoid".
        division: As `SoftmaxKernel.division`, of the form "sigmoid".

    Raises:
        ValueError: A field has another value.
    """

    form: str = "tanh"
    power: str = "ex2.approx"
    division: str = "div.full"

    def __post_init__(self) -> None:
        self.check_fields(form=GELU_FORMS, power=POWERS, division=DIVISIONS)


@dataclass(frozen=True)
class RotaryKernel(KernelValue):
    """The rotation by a kernel of pairs (x1, x2) by angles: x1 cos - x2 sin and x2 cos + x1 sin, in the dtype of the cosines.

    Attributes:
        pairing: "halves": x1 is the first half of a head, x2 the second; "interleaved": neighbours are pairs.
        fused: Only the product of x2 is rounded, and that of x1 is fused into the sum. False: both are rounded.

    Raises:
        ValueError: A field has another value.
    """

    pairing: str = "halves"
    fused: bool = True

    def __post_init__(self) -> None:
        self.check_fields(flags="fused", pairing=PAIRINGS)


# ---- JSON

TYPES = {kind.__name__: kind for kind in (SoftmaxKernel, RmsNormKernel, LayerNormKernel, SiluKernel, GeluKernel, RotaryKernel)}


def kernel_to_dict(kernel: KernelValue | str) -> Any:
    """Convert a kernel to plain values; a name of `functional.KERNELS` is one already."""
    return kernel if isinstance(kernel, str) else {type(kernel).__name__: value_to_dict(kernel)}


def kernel_from_dict(data: Any) -> KernelValue | str:
    """Convert the plain values of `kernel_to_dict` to their kernel.

    Args:
        data: Plain values. They are not trusted: unknown names and values are rejected.

    Raises:
        ValueError: They are no kernel's.
    """
    if isinstance(data, str):
        return data
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in TYPES:
        raise DamagedFile(f"kernel: got {str(data)[:80]}; expected a name, or an object with one of {', '.join(TYPES)}")
    ((name, members),) = data.items()
    return value_from_dict("kernel", TYPES[name], members)
