"""A library's product as a black box: NumPy codes in, NumPy codes out, whatever arrays the function takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tcemu.formats import ARRAY_FORMATS, BF16, E4M3, E5M2, F16, F32, Format
from tcemu.replay.forms import PLAIN, Besides, Form

FRAMEWORKS = ("numpy", "jax", "torch")
DTYPES: dict[Format, Any] = {
    F32: np.float32, F16: np.float16, BF16: ml_dtypes.bfloat16, E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2,
}  # fmt: skip
TORCH = {F32: "float32", F16: "float16", BF16: "bfloat16", E4M3: "float8_e4m3fn", E5M2: "float8_e5m2"}
RESULTS = (F32, F16, BF16)


class Unrepeatable(Exception):
    """The box gave other bits for the same operands."""


class Spent(Exception):
    """No call is left."""


def framework_of(fn: Callable) -> str:
    """By the module that a function comes from: "torch", "jax", or else "numpy"."""
    module = str(getattr(fn, "__module__", None) or type(fn).__module__).split(".")[0]
    if module == "torch" or str(type(fn).__module__).split(".")[0] == "torch":
        return "torch"
    if module in ("jax", "jaxlib") or type(fn).__module__.split(".")[0] in ("jax", "jaxlib"):
        return "jax"
    return "numpy"


class Box:
    """A function of A [M, K] and B [K, N], and of what its form says besides, to A·B [M, N].

    It counts its calls, and takes no more than `most`.
    """

    def __init__(
        self,
        fn: Callable,
        shape: tuple[int, int, int],
        held: tuple[Format, Format],
        framework: str,
        device: str | None,
        most: int,
        form: Form = PLAIN,
    ):
        self.fn, self.shape, self.held, self.framework, self.device, self.most = fn, shape, held, framework, device, most
        self.form = form
        self.calls = 0
        self.out: Format | None = None

    def __call__(self, a: np.ndarray, b: np.ndarray, besides: Besides | None = None) -> np.ndarray:
        """Codes of A·B. a, b: codes of the formats that are held; besides: None: what changes no result.

        Raises Spent, TypeError or ValueError.
        """
        if self.calls >= self.most:
            raise Spent(f"{self.most} calls are spent")
        self.calls += 1
        arrays = [self._given(fmt, codes) for fmt, codes in zip(self.held, (a, b), strict=True)]
        with np.errstate(all="ignore"):
            return self._codes(self.fn(*arrays, **self.more(besides)))

    def more(self, besides: Besides | None = None) -> dict[str, Any]:
        """What the function is given besides A and B, as its framework's arrays; None: what changes no result."""
        besides = self.form.neutral(*self.shape[:2]) if besides is None else besides
        return {name: self._given(self.form.formats[name], codes) for name, codes in besides._asdict().items() if codes is not None}

    def _given(self, fmt: Format, codes: np.ndarray) -> Any:
        """A new array each time, so that nothing that the function does to it is seen here."""
        array = np.array(codes, order="C").view(DTYPES[fmt])
        if self.framework == "numpy":
            return array
        if self.framework == "jax":
            import jax

            device = None if self.device is None else jax.devices(self.device)[0]
            return jax.device_put(array, device)
        import torch  # pyright: ignore[reportMissingImports]

        words = np.array(codes, order="C").view(f"int{fmt.bits}")
        return torch.from_numpy(words).view(getattr(torch, TORCH[fmt])).to(self.device or "cpu")

    def _codes(self, result: Any) -> np.ndarray:
        m, n, _ = self.shape
        if self.framework == "torch":
            import torch  # pyright: ignore[reportMissingImports]

            name = str(result.dtype).removeprefix("torch.")
            found = [fmt for fmt, dtype in TORCH.items() if dtype == name]
            if not found:
                raise TypeError(f"the function returned {name}; wanted one of {', '.join(map(str, RESULTS))}")
            words = result.contiguous().view(getattr(torch, f"int{found[0].bits}")).cpu().numpy()
            fmt, codes = found[0], words.view(f"uint{found[0].bits}")
        else:
            array = np.asarray(result)
            fmt = ARRAY_FORMATS.get(array.dtype)
            if fmt is None:
                raise TypeError(f"the function returned {array.dtype}; wanted one of {', '.join(map(str, RESULTS))}")
            codes = np.ascontiguousarray(array).view(fmt.dtype)
        if fmt not in RESULTS:
            raise TypeError(f"the function returned {fmt}; wanted one of {', '.join(map(str, RESULTS))}")
        if codes.shape != (m, n):
            raise ValueError(f"the function returned {list(codes.shape)}; wanted [M, N] = {[m, n]}")
        if self.out not in (None, fmt):
            raise TypeError(f"the function returned {self.out} first and {fmt} now")
        self.out = fmt
        return codes


def values(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Codes as float64, exact."""
    return np.asarray(codes).view(DTYPES[fmt]).astype(np.float64)


def codes_of(fmt: Format, x: np.ndarray) -> np.ndarray:
    """Numbers as codes, rounded to nearest even."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x).astype(np.float32).astype(DTYPES[fmt]).view(fmt.dtype)
