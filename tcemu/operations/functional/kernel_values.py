"""Kernels as values: the order of their sums, their roundings and their special functions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tcemu.operations.functional.row_sums import RowSum
from tcemu.operations.functional.special_choices import DIVISIONS, LOGARITHMS, POWERS, RECIPROCAL_ROOTS, ROOTS

GELU_FORMS = ("erf", "tanh", "tanh.approx", "sigmoid")
MOMENTS = ("two_pass", "welford")
PAIRINGS = ("halves", "interleaved")
Value = TypeVar("Value", bound="KernelValue")


class KernelValue:
    """The base of all values of kernels: checked fields, and `replace`."""

    def _check(self, flags: tuple[str, ...] = (), **choices: Any) -> None:
        """Raise ValueError for a field that is none of its words, no bool, or no RowSum."""
        owner = type(self).__name__
        for name, known in choices.items():
            if getattr(self, name) not in tuple(known):
                raise ValueError(f"{owner}({name}={getattr(self, name)!r}): expected one of {', '.join(known)}")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{owner}({name}={getattr(self, name)!r}): expected True or False")
        sums = getattr(self, "sums", None)
        if sums is not None and not isinstance(sums, RowSum):
            raise ValueError(f"{owner}(sums={sums!r}): expected a RowSum")

    def replace(self: Value, **changes: Any) -> Value:
        """Return the value with some fields changed. Raises the constructor's errors."""
        return replace(self, **changes)  # type: ignore[type-var]


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
        self._check(power=POWERS, division=DIVISIONS, log=LOGARITHMS)
        if self.block is not None and (isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1):
            raise ValueError(f"SoftmaxKernel(block={self.block!r}): expected a number of columns, 1 or more, or None")


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
        self._check(("round_before_weight", "add_offset"), division=DIVISIONS, root=(*RECIPROCAL_ROOTS, *ROOTS))


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
        self._check(("fused",), division=DIVISIONS, root=(*RECIPROCAL_ROOTS, *ROOTS), moments=MOMENTS)
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
        self._check(power=POWERS, division=DIVISIONS)


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
        self._check(form=GELU_FORMS, power=POWERS, division=DIVISIONS)


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
        self._check(("fused",), pairing=PAIRINGS)
