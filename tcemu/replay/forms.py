"""What a library's product takes besides A and B, and what it may do with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np

from tcemu.formats import BF16, F16, F32, FORMATS, Format
from tcemu.linalg.kernel_epilogue import SCALES, SCALINGS, Conditions, Epilogue, check_one_of

BIAS = (F32, F16, BF16)
OF = ("columns", "outputs")


class Besides(NamedTuple):
    """What one call takes besides A and B, as codes; None: it takes no such thing."""

    scale_a: np.ndarray | None = None  # f32, [] or [M, 1]
    scale_b: np.ndarray | None = None  # f32, [] or [1, N]
    bias: np.ndarray | None = None  # [N] or [M, N]

    def repeated(self, m: int, n: int) -> Besides:
        """For so many rows and columns, of which there are fewer: the first ones again."""
        a, b, bias = self

        def along(x: np.ndarray, axis: int, count: int) -> np.ndarray:
            return np.take(x, np.arange(count) % x.shape[axis], axis)

        if a is not None and b is not None and a.ndim:
            a, b = along(a, 0, m), along(b, 1, n)
        if bias is not None:
            bias = along(bias if bias.ndim == 1 else along(bias, 0, m), -1, n)
        return Besides(a, b, bias)


@dataclass(frozen=True)
class Form:
    """What a product takes besides A and B, as keyword arguments: alpha · scale_a · scale_b · A·B + beta · bias.

    scales: None; "tensor": two f32 numbers, arrays of shape []; "rows": scale_a f32 [M, 1] and scale_b f32 [1, N].
    bias: None, or its format: f32, f16, bf16. of: what has one of its numbers: "columns", [N], or "outputs", [M, N].
    alpha, beta: numbers that the function has in itself. alpha is rounded to f32; with scales it is 1.
    Raises ValueError for what cannot be.
    """

    scales: str | None = None
    bias: str | Format | None = None
    of: str = "columns"
    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_one_of("scales", self.scales, (None, *SCALES))
        bias = FORMATS.get(self.bias) if isinstance(self.bias, str) else self.bias
        if bias not in (None, *BIAS) or (bias is None and self.bias is not None):
            raise ValueError(f"bias={self.bias!r}: wanted None, or one of {', '.join(map(str, BIAS))}")
        object.__setattr__(self, "bias", bias)
        check_one_of("of", self.of, OF)
        Epilogue(scaled=True, alpha=self.alpha, beta=self.beta)  # refuses what are no finite numbers
        if self.alpha == 0 or self.beta == 0:
            raise ValueError(f"alpha={self.alpha}, beta={self.beta}: wanted numbers other than 0; what is multiplied by 0 shows nothing")
        if self.alpha != 1 and self.scales is not None:
            raise ValueError(f"alpha={self.alpha}: wanted 1 with scales, which are factors enough")
        if self.beta != 1 and self.bias is None:
            raise ValueError(f"beta={self.beta}: wanted bias= with it")

    def __str__(self) -> str:
        said = [] if self.scales is None else [f"scales of {'each tensor' if self.scales == 'tensor' else 'rows and columns'}"]
        said += [] if self.alpha == 1 else [f"alpha = {self.alpha:g}"]
        said += [] if self.bias is None else [f"a bias in {self.bias} of {self.of}"]
        return " and ".join(said) or "nothing besides A and B"

    @property
    def plain(self) -> bool:
        """Nothing besides A and B."""
        return self == PLAIN

    @property
    def formats(self) -> dict[str, Format]:
        """Of what it takes."""
        return {"scale_a": F32, "scale_b": F32, "bias": self.bias}  # pyright: ignore[reportReturnType]

    def neutral(self, m: int, n: int) -> Besides:
        """What leaves every total as it is: scales of one, and as bias the zero that leaves negative zeros what they are."""
        a = b = bias = None
        if self.scales is not None:
            sizes = ((m, 1), (1, n)) if self.scales == "rows" else ((), ())
            a, b = (np.ones(size, np.float32).view(np.uint32) for size in sizes)
        if isinstance(self.bias, Format):
            zero = 1 << (self.bias.bits - 1) if self.beta > 0 else 0
            bias = np.full(n if self.of == "columns" else (m, n), zero, self.bias.dtype)
        return Besides(a, b, bias)

    def conditions(self, known: Conditions) -> Conditions:
        """What is known of a library, and this form."""
        return replace(known, scales=self.scales, bias=None if self.bias is None else f"{self.bias} {self.of}")

    def epilogues(self, out: Format) -> Iterator[Epilogue]:
        """What a kernel may do with it."""
        between = (None, out) if self.bias is not None and out != F32 else (None,)
        if self.scales is None and self.alpha == 1:
            for kept in between:
                yield Epilogue(beta=self.beta, between=kept)
            if self.beta != 1:  # else the same as before, the totals of A·B that are -0 apart
                yield Epilogue(True, beta=self.beta, roundings=1)
            return
        scaled = Epilogue(True, self.alpha, self.beta)
        for scaling, plus_zero in product(SCALINGS if self.scales else SCALINGS[:1], (True, False) if self.scales else (True,)):
            for kept in between:
                yield replace(scaled, scaling=scaling, plus_zero=plus_zero, between=kept)
            if self.bias is not None and plus_zero:
                yield replace(scaled, scaling=scaling, roundings=1)


PLAIN = Form()
