"""The recipes in use: a row for each, with its source."""

from typing import NamedTuple

from tcemu.errors import NotModelled
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, TF32, UE4M3, UE8M0, Format
from tcemu.quantize.hadamard import SIGNS_16
from tcemu.quantize.operands import Quantizer

UNSCALED = Quantizer()  # a cast


class ScaledKind(NamedTuple):
    """A kind of instruction with .block_scale, by its qualifiers."""

    kind: str
    scale_vec: int
    stype: Format
    k: int


class RecipeRow(NamedTuple):
    """One of the recipes in use."""

    a: Format
    b: Format
    quantizer_a: Quantizer
    quantizer_b: Quantizer
    backward: tuple[str, str] | None  # the rows of dA = g·Bᵀ and dB = Aᵀ·g; None: this row is only the gradient of another
    source: str
    promote: int | None = None
    scaled: ScaledKind | None = None  # of an instruction with .block_scale
    split: bool = False  # promoted as cuBLASLt does with fast accumulation off, `split_accumulator`


TENSOR, ROW, COLUMN = (Quantizer(shared, saturate=True) for shared in ("tensor", "row", "column"))
ONE_BY_128, SQUARE_128 = (Quantizer("block", block, saturate=True) for block in ((1, 128), (128, 128)))
IN_UNIT, UPWARD = (Quantizer("block", rule=rule, saturate=True) for rule in (None, "rceil"))
MXF8F6F4, MXF4 = ScaledKind("mxf8f6f4", 1, UE8M0, k=32), ScaledKind("mxf4", 2, UE8M0, k=64)
NVF4 = ScaledKind("mxf4nvf4", 4, UE4M3, k=64)
SQUARE_16 = Quantizer("block", rows=16, saturate=True)
GRADIENT = Quantizer("block", rounding="SR", saturate=True)
TURNED, TURNED_GRADIENT = (Quantizer("block", rounding=rounding, hadamard=SIGNS_16, saturate=True) for rounding in ("RN", "SR"))
_HYBRID = "arXiv 2209.05433, 4; TransformerEngine, Format.HYBRID with the scales of the tensors at hand"
_DEEPSEEK = "arXiv 2412.19437, 3.3: tiles of activations, blocks of weights, sums promoted every 128 elements; DeepGEMM's fma"
_SPLIT = "forward CUBLASLT_MATMUL_DESC_FAST_ACCUM on, gradients off: TransformerEngine, Float8CurrentScaling, fp8_gemm_fprop, _dgrad and \
_wgrad; torchao, Float8LinearConfig, gemm_config_output, _grad_input and _grad_weight. Scales amax / largest, as in fp8"
_MXFP8 = "arXiv 2506.08027: e4m3 for gradients too, scales rounded up; TransformerEngine MXFP8BlockScaling"
_NVFP4 = "arXiv 2509.25149, without its Hadamard transforms, its stochastic rounding of gradients and its 16 x 16 blocks of weights"
_NVFP4_TRAINING = "arXiv 2509.25149; TransformerEngine, NVFP4BlockScaling with its defaults and its fixed signs"
_OCP = "OCP MX 1.0, 5.2 and 6.3"

# 4 instructions of 32 elements are the 128 after which FP8 sums begin anew on Hopper, as the order of mmaemu 0.1.0 and of bitequiv has it;
# they found none promoted on sm_100 and sm_103. The other targets are taken to be as those
SPLIT_EVERY = {"sm_90a": 4}

ROWS = {
    "f16": RecipeRow(F16, F16, UNSCALED, UNSCALED, ("f16", "f16"), "arXiv 1710.03740; scaling the loss is the caller's"),
    "bf16": RecipeRow(BF16, BF16, UNSCALED, UNSCALED, ("bf16", "bf16"), "arXiv 1905.12322"),
    "tf32": RecipeRow(TF32, TF32, UNSCALED, UNSCALED, ("tf32", "tf32"), "NVIDIA A100 whitepaper, 2020: f32 rounded to tf32, sums f32"),
    "fp8": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_da", "fp8_db"), _HYBRID),
    "fp8_da": RecipeRow(E5M2, E4M3, TENSOR, TENSOR, None, _HYBRID),
    "fp8_db": RecipeRow(E4M3, E5M2, TENSOR, TENSOR, None, _HYBRID),
    "fp8_split": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_split_da", "fp8_split_db"), _SPLIT),
    "fp8_split_da": RecipeRow(E5M2, E4M3, TENSOR, TENSOR, None, _SPLIT, split=True),
    "fp8_split_db": RecipeRow(E4M3, E5M2, TENSOR, TENSOR, None, _SPLIT, split=True),
    "fp8_e4m3": RecipeRow(E4M3, E4M3, TENSOR, TENSOR, ("fp8_e4m3", "fp8_e4m3"), "TransformerEngine, Format.E4M3"),
    "fp8_e5m2": RecipeRow(E5M2, E5M2, TENSOR, TENSOR, ("fp8_e5m2", "fp8_e5m2"), "arXiv 2209.05433, 3: the other format"),
    "fp8_rows": RecipeRow(
        E4M3, E4M3, ROW, COLUMN, ("fp8_rows", "fp8_rows"), "torchao, Float8LinearRecipeName.ROWWISE, fast accumulation all through"
    ),
    "deepseek": RecipeRow(E4M3, E4M3, ONE_BY_128, SQUARE_128, ("deepseek", "deepseek_db"), _DEEPSEEK, 4),
    "deepseek_db": RecipeRow(E4M3, E4M3, ONE_BY_128, ONE_BY_128, None, _DEEPSEEK, 4),
    "mxfp8": RecipeRow(E4M3, E4M3, UPWARD, UPWARD, ("mxfp8", "mxfp8"), _MXFP8, scaled=MXF8F6F4),
    "mxfp8_e5m2": RecipeRow(E5M2, E5M2, IN_UNIT, IN_UNIT, ("mxfp8_e5m2", "mxfp8_e5m2"), _OCP, scaled=MXF8F6F4),
    "mxfp6_e3m2": RecipeRow(E3M2, E3M2, IN_UNIT, IN_UNIT, ("mxfp6_e3m2", "mxfp6_e3m2"), _OCP, scaled=MXF8F6F4),
    "mxfp6_e2m3": RecipeRow(E2M3, E2M3, IN_UNIT, IN_UNIT, ("mxfp6_e2m3", "mxfp6_e2m3"), _OCP, scaled=MXF8F6F4),
    "mxfp4": RecipeRow(E2M1, E2M1, IN_UNIT, IN_UNIT, ("mxfp4", "mxfp4"), _OCP, scaled=MXF4),
    "nvfp4": RecipeRow(E2M1, E2M1, IN_UNIT, IN_UNIT, ("nvfp4", "nvfp4"), _NVFP4, scaled=NVF4),
    "nvfp4_training": RecipeRow(E2M1, E2M1, IN_UNIT, SQUARE_16, ("nvfp4_training_da", "nvfp4_training_db"), _NVFP4_TRAINING, scaled=NVF4),
    "nvfp4_training_da": RecipeRow(E2M1, E2M1, GRADIENT, SQUARE_16, None, _NVFP4_TRAINING, scaled=NVF4),
    "nvfp4_training_db": RecipeRow(E2M1, E2M1, TURNED, TURNED_GRADIENT, None, _NVFP4_TRAINING, scaled=NVF4),
}
RECIPES = tuple(name for name, row in ROWS.items() if row.backward)


def split_accumulator(target: str) -> int | None:
    """After how many FP8 instructions cuBLASLt promotes with fast accumulation off, the "split accumulator"; None: never.

    Raises NotModelled where nobody has said.
    """
    if target == "sm_89":
        raise NotModelled(
            "sm_89: cuBLASLt adds otherwise there with fast accumulation off, and nobody has published how; fp8 has it on for all three "
            "products, and recipe('fp8', 'sm_89').replace(backward=...) takes gradients with a promote= of your own."
        )
    return SPLIT_EVERY.get(target)
