"""The kernels of `sources/functional_kernels.py` and `block_norms.cuh`: how each is compiled, and the texts that Triton and NVRTC made."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "functional.json.xz"
POINTERS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16"}
BLOCK_NORMS_FILE = Path(__file__).parent / "block_norms.json.xz"
CUDA_DTYPES = {"f32": "float", "f16": "__half", "bf16": "__nv_bfloat16"}
VECTORS = {"f32": (1, 4), "f16": (1, 4, 8), "bf16": (1, 4, 8)}  # neighbouring elements of a thread
DTYPES, WIDTHS = tuple(POINTERS), (64, 300, 1024, 4096)


class Case(NamedTuple):
    """One kernel, compiled for a dtype and a number of columns. variant: of the same kernel; "" where there is one."""

    kernel: str
    kind: str
    columns: int
    variant: str = ""

    @property
    def name(self) -> str:
        return " ".join(str(part) for part in self if part != "")

    @property
    def size(self) -> int:
        return 1 << (self.columns - 1).bit_length()

    @property
    def warps(self) -> int:
        """Warps as the published launchers choose them."""
        if self.kernel == "softmax_rows" or self.kernel == "log_softmax_rows":
            return 8
        if self.kernel == "layer_norm_rows":
            return min(max(self.size // 256, 1), 8)
        if self.kernel == "cross_entropy_rows":
            return 32
        return 8 if self.size >= 2048 else 4

    def signature(self) -> tuple[dict[str, str], dict[str, object]]:
        """Return the types of the parameters, and the constants."""
        p, i, f = POINTERS[self.kind], "i32", "fp32"
        constants: dict[str, object] = {"SIZE": self.size}
        if self.kernel == "softmax_rows":
            return {"y": p, "x": p, "x_stride": i, "y_stride": i, "rows": i, "columns": i}, constants
        if self.kernel == "log_softmax_rows":
            return {"y": p, "x": p, "stride": i, "columns": i}, constants
        if self.kernel == "layer_norm_rows":
            return {"y": p, "x": p, "stride": i, "weight": p, "bias": p, "columns": i, "eps": f}, constants
        if self.kernel == "rms_norm_rows":
            types = {"y": p, "y_stride": i, "x": p, "x_stride": i, "weight": p, "columns": i, "eps": f, "offset": f}
            return types, constants | {"GEMMA": self.variant == "gemma"}
        if self.kernel == "cross_entropy_rows":
            types = {"x": p, "x_stride": i, "labels": "*i32", "loss": "*fp32", "columns": i, "count": i}
            return types, {"SIZE": 512 if self.variant == "blocks" else self.size}
        if self.kernel == "rotary_rows":
            return {"q": p, "stride": i, "cos": p, "sin": p, "cos_stride": i}, {"HEADS": 4, "HALF": self.columns // 2}
        types = {"a": p, "b": p, "c": p, "stride": i}
        return types, constants | {"COLUMNS": self.columns} | ({"FORM": self.variant} if self.variant else {})

    def aligned(self) -> list[str]:
        """Return the parameters that 16 divides: pointers, and strides and columns where it does."""
        types, _ = self.signature()
        return [key for key, kind in types.items() if kind[0] == "*" or (kind == "i32" and "count" not in key and "rows" not in key
                and self.columns % 16 == 0)]  # fmt: skip


CASES = tuple(
    [Case(kernel, kind, columns) for kernel in ("softmax_rows", "layer_norm_rows", "rms_norm_rows", "cross_entropy_rows", "silu_mul_rows")
     for kind in DTYPES for columns in WIDTHS]
    + [Case("log_softmax_rows", kind, columns) for kind in DTYPES for columns in (300, 1024)]
    + [Case("rms_norm_rows", kind, columns, "gemma") for kind in DTYPES for columns in (300, 1024)]
    + [Case("cross_entropy_rows", kind, 4096, "blocks") for kind in DTYPES]
    + [Case("gelu_mul_rows", kind, columns, form) for kind in DTYPES for columns in (300, 1024) for form in ("erf", "tanh", "sigmoid")]
    + [Case("rotary_rows", kind, columns) for kind in DTYPES for columns in (64, 128)]
)  # fmt: skip

B, F, I = "*bf16", "*fp32", "i32"  # noqa: E741
TOKENS, WIDTH, HEADS, HIDDEN, VOCABULARY = 32, 64, 4, 128, 128  # of the GPT
HEAD = WIDTH // HEADS
GPT = {  # kernel of the GPT: its source's function, the types of the parameters, the constants
    "embedding": ("embedding", {"tokens": "*i32", "table": B, "x": B}, {"WIDTH": WIDTH}),
    "rms_norm": (
        "rms_norm_rows", {"y": B, "y_stride": I, "x": B, "x_stride": I, "weight": B, "columns": I, "eps": "fp32", "offset": "fp32"},
        {"GEMMA": False, "SIZE": WIDTH},
    ),
    "matmul": ("matmul", {"a": B, "b": B, "d": B, "N": I, "K": I}, {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}),
    "logits": ("matmul", {"a": B, "b": B, "d": F, "N": I, "K": I}, {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32}),
    "rotary": ("rotary_rows", {"q": B, "stride": I, "cos": B, "sin": B, "cos_stride": I}, {"HEADS": HEADS, "HALF": HEAD // 2}),
    "attention": ("attention", {"q": B, "k": B, "v": B, "out": B, "stride": I, "scale": "fp32"}, {"T": TOKENS, "D": HEAD}),
    "add": ("add", {"x": B, "y": B}, {"SIZE": 256}),
    "silu_mul": ("silu_mul_rows", {"a": B, "b": B, "c": B, "stride": I}, {"COLUMNS": HIDDEN, "SIZE": HIDDEN}),
    "cross_entropy": (
        "cross_entropy_rows", {"x": F, "x_stride": I, "labels": "*i32", "loss": F, "columns": I, "count": I}, {"SIZE": VOCABULARY},
    ),
}  # fmt: skip


@cache
def compiled_texts() -> dict[str, dict]:
    """Return by the name of a case, or "gpt NAME": "text", PTX, "shared", bytes of dynamic shared memory, and "warps"."""
    return json.loads(lzma.decompress(FILE.read_bytes()))


@cache
def block_norm_texts() -> dict[str, str]:
    """Return the PTX of `sources/block_norms.cuh` by dtype and vector, as "bf16 8"."""
    return json.loads(lzma.decompress(BLOCK_NORMS_FILE.read_bytes()))
