"""A library's product as a black box: NumPy codes in, NumPy codes out, whatever arrays the function takes.

A `ProductForm` says what the function takes besides A and B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu.base.records import check_choice
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, BF16, E4M3, E5M2, F16, F32, FORMATS, Format
from tcemu.operations.products.library.kernel_recipe import SCALES, SCALINGS, Conditions, Epilogue

BIAS_FORMATS = (F32, F16, BF16)
BIAS_SHAPES = ("columns", "outputs")


def repeat(x: np.ndarray, axis: int, count: int) -> np.ndarray:
    """Repeat rows or columns from the first on, up to a count, in row-major order."""
    return np.ascontiguousarray(x).take(np.arange(count) % x.shape[axis], axis)


class EpilogueCodes(NamedTuple):
    """Codes of the epilogue operands of one call. None: the call does not take this operand."""

    scale_a: np.ndarray | None = None  # f32, [] or [M, 1]
    scale_b: np.ndarray | None = None  # f32, [] or [1, N]
    bias: np.ndarray | None = None  # [N] or [M, N]

    def repeat(self, m: int, n: int) -> EpilogueCodes:
        """Repeat the first rows and columns, up to m rows and n columns."""
        a, b, bias = self
        if a is not None and b is not None and a.ndim:
            a, b = repeat(a, 0, m), repeat(b, 1, n)
        if bias is not None:
            bias = repeat(bias if bias.ndim == 1 else repeat(bias, 0, m), -1, n)
        return EpilogueCodes(a, b, bias)


@dataclass(frozen=True)
class ProductForm:
    """The arguments of a product besides A and B: alpha · scale_a · scale_b · A·B + beta · bias.

    Attributes:
        scales: None; "tensor": two f32 numbers, arrays of shape []; "rows": scale_a f32 [M, 1] and scale_b f32 [1, N].
        bias: Format of the bias, f32, f16 or bf16, or None.
        bias_shape: "columns": the bias is [N]; "outputs": it is [M, N].
        alpha: Factor that the function has in itself, rounded to f32. With scales it is 1.
        beta: Factor of the bias that the function has in itself.

    Raises:
        ValueError: The values contradict each other.
    """

    scales: str | None = None
    bias: str | Format | None = None
    bias_shape: str = "columns"
    alpha: float = 1.0
    beta: float = 1.0

    def __post_init__(self) -> None:
        check_choice("scales", self.scales, (None, *SCALES))
        bias = FORMATS.get(self.bias) if isinstance(self.bias, str) else self.bias
        if bias not in (None, *BIAS_FORMATS) or (bias is None and self.bias is not None):
            raise ValueError(f"bias={self.bias!r}: expected None, or one of {', '.join(map(str, BIAS_FORMATS))}")
        object.__setattr__(self, "bias", bias)
        check_choice("bias_shape", self.bias_shape, BIAS_SHAPES)
        Epilogue(scaled=True, alpha=self.alpha, beta=self.beta)  # rejects numbers that are not finite
        if self.alpha == 0 or self.beta == 0:
            raise ValueError(f"alpha={self.alpha}, beta={self.beta}: expected numbers other than 0, which would hide the operand")
        if self.alpha != 1 and self.scales is not None:
            raise ValueError(f"alpha={self.alpha}: expected 1 together with scales")
        if self.beta != 1 and self.bias is None:
            raise ValueError(f"beta={self.beta}: expected bias= with it")

    def __str__(self) -> str:
        parts = [] if self.scales is None else [f"scales of {'each tensor' if self.scales == 'tensor' else 'rows and columns'}"]
        parts += [] if self.alpha == 1 else [f"alpha = {self.alpha:g}"]
        parts += [] if self.bias is None else [f"a bias in {self.bias} of {self.bias_shape}"]
        return " and ".join(parts) or "nothing besides A and B"

    @property
    def is_plain(self) -> bool:
        """True if the product takes nothing besides A and B."""
        return self == PLAIN_FORM

    @property
    def formats(self) -> dict[str, Format]:
        """Formats of the epilogue operands by name."""
        return {"scale_a": F32, "scale_b": F32, "bias": self.bias}  # pyright: ignore[reportReturnType]

    def neutral_epilogue(self, m: int, n: int) -> EpilogueCodes:
        """Return epilogue operands that leave every total unchanged: scales of 1, and as bias the zero that preserves negative zeros.

        Args:
            m: Rows of the result.
            n: Columns of the result.

        Returns:
            The codes.
        """
        a = b = bias = None
        if self.scales is not None:
            sizes = ((m, 1), (1, n)) if self.scales == "rows" else ((), ())
            a, b = (np.ones(size, np.float32).view(np.uint32) for size in sizes)
        if isinstance(self.bias, Format):
            zero = 1 << (self.bias.bits - 1) if self.beta > 0 else 0
            bias = np.full(n if self.bias_shape == "columns" else (m, n), zero, self.bias.dtype)
        return EpilogueCodes(a, b, bias)

    def extend_conditions(self, conditions: Conditions) -> Conditions:
        """Add this form to the known conditions of a library.

        Args:
            conditions: Known conditions.

        Returns:
            The conditions with this form's scales and bias.
        """
        return replace(conditions, scales=self.scales, bias=None if self.bias is None else f"{self.bias} {self.bias_shape}")

    def possible_epilogues(self, dtype: Format) -> Iterator[Epilogue]:
        """Yield the epilogues that a kernel may compute for this form.

        Args:
            dtype: Format of the result.

        Yields:
            The epilogues, the plainest first.
        """
        between = (None, dtype) if self.bias is not None and dtype != F32 else (None,)
        if self.scales is None and self.alpha == 1:
            for rounding in between:
                yield Epilogue(beta=self.beta, between=rounding)
            if self.beta != 1:  # otherwise the same as before, except for totals of A·B that are -0
                yield Epilogue(True, beta=self.beta, roundings=1)
            return
        scaled = Epilogue(True, self.alpha, self.beta)
        for scaling, plus_zero in product(SCALINGS if self.scales else SCALINGS[:1], (True, False) if self.scales else (True,)):
            for rounding in between:
                yield replace(scaled, scaling=scaling, plus_zero=plus_zero, between=rounding)
            if self.bias is not None and plus_zero:
                yield replace(scaled, scaling=scaling, roundings=1)


PLAIN_FORM = ProductForm()


# ---- the black box


FRAMEWORKS = ("numpy", "jax", "torch")
DTYPES: dict[Format, Any] = {
    F32: np.float32, F16: np.float16, BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2,
}  # fmt: skip
TORCH_DTYPES = {F32: "float32", F16: "float16", BF16: "bfloat16", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}
RESULT_FORMATS = (F32, F16, BF16)
FP8_FORMATS = (E4M3, E5M2)
FormatPair = tuple[Format, Format]  # formats of A and B


class CallsExhausted(Exception):
    """The permitted number of calls is used up."""


def detect_framework(fn: Callable) -> str:
    """Return the framework of a function by its module: "torch", "jax", or otherwise "numpy"."""
    module = str(getattr(fn, "__module__", None) or type(fn).__module__).split(".")[0]
    if module == "torch" or str(type(fn).__module__).split(".")[0] == "torch":
        return "torch"
    if module in ("jax", "jaxlib") or type(fn).__module__.split(".")[0] in ("jax", "jaxlib"):
        return "jax"
    return "numpy"


@dataclass(eq=False)
class BlackBox:
    """A function of A [M, K], B [K, N] and its form's epilogue operands that returns A·B [M, N].

    The black box counts its calls, and allows at most `max_calls`.
    """

    fn: Callable
    shape: tuple[int, int, int]
    operand_formats: FormatPair
    framework: str
    device: str | None
    max_calls: int
    form: ProductForm = PLAIN_FORM
    calls: int = field(default=0, init=False)
    _result_format: Format | None = field(default=None, init=False)

    def __call__(self, a: np.ndarray, b: np.ndarray, epilogue: EpilogueCodes | None = None) -> np.ndarray:
        """Compute codes of A·B.

        Args:
            a: Codes [M, K] in the first operand format.
            b: Codes [K, N] in the second operand format.
            epilogue: Epilogue operands. None takes neutral ones.

        Returns:
            Codes [M, N].

        Raises:
            CallsExhausted: No call is left.
            TypeError, ValueError: The function returned another dtype or shape.
        """
        if self.calls >= self.max_calls:
            raise CallsExhausted(f"all {self.max_calls} calls are used up")
        self.calls += 1
        arrays = [self._to_framework(fmt, codes) for fmt, codes in zip(self.operand_formats, (a, b), strict=True)]
        with np.errstate(all="ignore"):
            return self._result_codes(self.fn(*arrays, **self.epilogue_arguments(epilogue)))

    @property
    def result_format(self) -> Format:
        """The format of the results.

        Raises:
            RuntimeError: The function has not been called.
        """
        if self._result_format is None:
            raise RuntimeError("the format of the results is unknown until the function was called")
        return self._result_format

    def epilogue_arguments(self, epilogue: EpilogueCodes | None = None) -> dict[str, Any]:
        """Return the keyword arguments of the function as its framework's arrays. None takes neutral ones."""
        epilogue = self.form.neutral_epilogue(*self.shape[:2]) if epilogue is None else epilogue
        return {name: self._to_framework(self.form.formats[name], codes) for name, codes in epilogue._asdict().items() if codes is not None}

    def _to_framework(self, fmt: Format, codes: np.ndarray) -> Any:
        """Return a new array each time, so that nothing that the function does to it is visible here."""
        array = np.array(codes, order="C").view(DTYPES[fmt])
        if self.framework == "numpy":
            return array
        if self.framework == "jax":
            import jax

            from tcemu.base.meshes import local_device

            device = None if self.device is None else local_device(self.device)
            return jax.device_put(array, device)
        import torch  # pyright: ignore[reportMissingImports]

        words = np.array(codes, order="C").view(f"int{fmt.bits}")
        return torch.from_numpy(words).view(getattr(torch, TORCH_DTYPES[fmt])).to(self.device or "cpu")

    def _result_codes(self, result: Any) -> np.ndarray:
        m, n, _ = self.shape
        if self.framework == "torch":
            import torch  # pyright: ignore[reportMissingImports]

            name = str(result.dtype).removeprefix("torch.")
            matching = [fmt for fmt, dtype in TORCH_DTYPES.items() if dtype == name]
            if not matching:
                raise TypeError(f"the function returned {name}; expected one of {', '.join(map(str, RESULT_FORMATS))}")
            words = result.contiguous().view(getattr(torch, f"int{matching[0].bits}")).cpu().numpy()
            fmt, codes = matching[0], words.view(f"uint{matching[0].bits}")
        else:
            array = np.asarray(result)
            fmt = ARRAY_FORMATS.get(array.dtype)
            if fmt is None:
                raise TypeError(f"the function returned {array.dtype}; expected one of {', '.join(map(str, RESULT_FORMATS))}")
            codes = np.ascontiguousarray(array).view(fmt.dtype)
        if fmt not in RESULT_FORMATS:
            raise TypeError(f"the function returned {fmt}; expected one of {', '.join(map(str, RESULT_FORMATS))}")
        if codes.shape != (m, n):
            raise ValueError(f"the function returned {list(codes.shape)}; expected [M, N] = {[m, n]}")
        if self._result_format not in (None, fmt):
            raise TypeError(f"the function returned {self._result_format} first and {fmt} now")
        self._result_format = fmt
        return codes


def codes_to_float64(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Convert codes to float64, exactly."""
    return np.asarray(codes).view(DTYPES[fmt]).astype(np.float64)


def round_to_codes(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Convert numbers to codes, rounded to nearest even."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x).astype(np.float32).astype(DTYPES[fmt]).view(fmt.dtype)
