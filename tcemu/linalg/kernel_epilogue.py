"""What becomes of a kernel's f32 total: scales, bias, the rounding to the result. And under which conditions a kernel was seen. Values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tcemu.formats import BF16, F16, Format

SCALINGS = ("folded", "a first", "b first")
SCALES = ("tensor", "rows")
BIASES = tuple(f"{fmt} {of}" for fmt in ("f32", "f16", "bf16") for of in ("columns", "outputs"))


def check_whole(**values: Any) -> None:
    """Raises ValueError unless all are whole numbers from 1, or None."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: wanted a whole number from 1")


def check_one_of(name: str, value: Any, wanted: tuple) -> None:
    """Raises ValueError unless the value is one of those."""
    if value not in wanted:
        raise ValueError(f"{name}={value!r}: wanted one of {', '.join(map(str, wanted))}")


@dataclass(frozen=True)
class Epilogue:
    """What happens to the f32 total: y = alpha · scale_a · scale_b · total + beta · bias in f32, then one rounding to the result.

    All rounding is to nearest even.
    scaled: the total is multiplied by alpha, and by scale_a and scale_b of `tcemu.matmul`; without it, the total is not touched.
    scaling: "folded": alpha and the scales become one f32 factor first, (scale_a · scale_b) · alpha, each product rounded. "a first": the
        total is multiplied by scale_a and rounded, and then by scale_b; "b first": the other way round. These want alpha = 1.
    plus_zero: the last of these products is an fma with +0, so that -0 becomes +0; False: a multiplication.
    roundings: 2: the scaled total is rounded before fma(beta, bias, it); 1: the last product is fma(factor, total, beta · bias), of which
        beta · bias is rounded, and wants scaled.
    between: None, or f16 or bf16: the scaled total is rounded to this format too before bias is added. It wants roundings=2.
    saturate: beyond the result's range comes its largest finite value, not Inf.
    """

    scaled: bool = False
    alpha: float = 1.0
    beta: float = 1.0
    roundings: int = 2
    saturate: bool = False
    scaling: str = "folded"
    plus_zero: bool = True
    between: Format | None = None

    def __post_init__(self) -> None:
        for name in ("scaled", "saturate", "plus_zero"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: wanted True or False")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) == float("inf"):
                raise ValueError(f"{name}={value!r}: wanted a finite number")
            object.__setattr__(self, name, float(value))
        check_one_of("roundings", self.roundings, (1, 2))
        check_one_of("scaling", self.scaling, SCALINGS)
        check_one_of("between", self.between, (None, F16, BF16))
        if not self.scaled and (self.alpha != 1.0 or self.scaling != "folded" or not self.plus_zero or self.roundings == 1):
            raise ValueError(
                f"alpha={self.alpha}, scaling={self.scaling!r}, plus_zero={self.plus_zero}, roundings={self.roundings}: wanted scaled=True"
            )
        if self.scaling != "folded" and self.alpha != 1.0:
            raise ValueError(f"scaling={self.scaling!r}: wanted alpha=1; alpha is a factor of what is folded")
        if self.between is not None and self.roundings == 1:
            raise ValueError(f"between={self.between}: wanted roundings=2; with one rounding there is nothing between")

    def __str__(self) -> str:
        factor = "" if self.alpha == 1.0 else f"{self.alpha:g} · "
        how = {"folded": "scale_a · scale_b", "a first": "scale_a, then scale_b", "b first": "scale_b, then scale_a"}[self.scaling]
        said = "as it is" if not self.scaled else f"times {factor}{how}, by {'fma' if self.plus_zero else 'multiplication'}"
        said += "" if self.between is None else f", rounded to {self.between} before a bias"
        said += "" if self.beta == 1.0 else f", plus {self.beta:g} · bias"
        said += ", with a bias in one rounding" if self.roundings == 1 else ""
        return said + ("; saturating" if self.saturate else "")


@dataclass(frozen=True)
class Conditions:
    """Under which conditions a kernel recipe was seen to hold. None: not said. m, n: None: any.

    layout: of A and B as "row" and "column" memory orders, "rr", "rc", ...; alignment, workspace: in bytes.
    scales: "tensor", one for each operand, or "rows", one for each row of A and each column of B. bias: its format and what has one of its
    numbers, "bf16 columns" for [N], "bf16 outputs" for [M, N]. `tcemu.matmul` refuses scales and a bias of another shape.
    evidence: what shows it, in words: shapes, seeds, outputs that were compared.
    """

    m: int | None = None
    n: int | None = None
    library: str | None = None
    version: str | None = None
    gpu: str | None = None
    sm_count: int | None = None
    layout: str | None = None
    alignment: int | None = None
    workspace: int | None = None
    evidence: str = ""
    scales: str | None = None
    bias: str | None = None

    def __post_init__(self) -> None:
        check_whole(m=self.m, n=self.n, sm_count=self.sm_count, alignment=self.alignment)
        if self.workspace is not None and (isinstance(self.workspace, bool) or not isinstance(self.workspace, int) or self.workspace < 0):
            raise ValueError(f"workspace={self.workspace!r}: wanted bytes, a whole number from 0")
        for name in ("library", "version", "gpu", "layout", "evidence"):
            value = getattr(self, name)
            if not (isinstance(value, str) or (value is None and name != "evidence")):
                raise ValueError(f"{name}={value!r}: wanted text")
        check_one_of("scales", self.scales, (None, *SCALES))
        check_one_of("bias", self.bias, (None, *BIASES))

    def __str__(self) -> str:
        shape = f"M = {self.m or 'any'}, N = {self.n or 'any'}"
        names = ("library", "version", "gpu", "sm_count", "scales", "bias")
        known = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        return ", ".join([shape, *known])
