"""Claims about the sums of FP8 products: how much they lose, where, and what promotion gives back."""

from collections.abc import Mapping

from tcemu.engine.architectures.lookup import require_product
from tcemu.engine.isa.grammar import parse
from tcemu.operations.products.matmul import matmul
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.study.claims.claim_types import Claim, Quantity
from tcemu.uses.study.sweeps import Sweep, normal, sweep, uniform

E4M3_WGMMA = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
WGMMA = Recipe(require_product(parse(E4M3_WGMMA)), "sm_90a", name="e4m3 wgmma")
DRAWS = {"N(0,1)": normal, "uniform": uniform}  # uniform from 0 to 1
DEEPSEEK = "DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.3.2"
DEEPSEEK_LINK = "https://arxiv.org/abs/2412.19437"
SEVERAL_ERRORS = ("normwise", "elementwise", "mean_elementwise", "largest_over_rms", "bias")


def _size(quick: bool) -> int:
    """Return the number of rows and columns of the product."""
    return 32 if quick else 256


def _sweep_wgmma(draw: str, k: int, seed: int, quick: bool, intervals: tuple[int | None, ...] = (None,)) -> Sweep:
    """Sweep promotion intervals of wgmma's e4m3 sums on an H100."""
    size = _size(quick)
    operands = DRAWS[draw](size, size, k)
    return sweep(matmul, {"promote": intervals}, recipe=WGMMA, operands=operands, measures=SEVERAL_ERRORS, seeds=(seed,))


# ---- how much chained sums lose

LENGTHS = (1024, 4096, 16384)
MEASURE_LABELS = {  # labels of the measures in the table
    "largest_over_rms": "largest error / rms",
    "normwise": "normwise",
    "elementwise": "largest relative error",
    "mean_elementwise": "mean relative error",
    "bias": "bias",
}
PLOTTED_MEASURES = ("largest_over_rms", "normwise")  # measures in the picture
PUBLISHED_ROW = ("N(0,1)", 4096, "largest_over_rms")
ACCUMULATION_ROWS = [  # without relative errors of elements of N(0,1), which have no bound where sums cancel
    (draw, k, measure) for draw in DRAWS for k in LENGTHS for measure in MEASURE_LABELS if draw == "uniform" or "elementwise" not in measure
]


def measure_accumulation(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the errors of chained sums by distribution and length."""
    lengths = (4096,) if quick else LENGTHS
    errors = {(draw, k): _sweep_wgmma(draw, k, seed, quick) for draw in DRAWS for k in lengths}
    return {_quantity_name(*row): errors[row[:2]].column(row[2])[0] for row in ACCUMULATION_ROWS if row[1] in lengths}


def _quantity_name(draw: str, k: int, measure: str) -> str:
    return f"{draw}, K = {k}: {MEASURE_LABELS[measure]}"


def _accumulation_quantity(draw: str, k: int, measure: str) -> Quantity:
    published, text = (0.02, "nearly 2%") if (draw, k, measure) == PUBLISHED_ROW else (None, "")
    series, x = (f"{draw}, {MEASURE_LABELS[measure]}", k) if measure in PLOTTED_MEASURES else ("", None)
    return Quantity(_quantity_name(draw, k, measure), published, text, series, x)


# ---- what promotion gives back

INTERVALS = {"never": None, "every 16": 16, "every 8": 8, "every 4": 4, "every 2": 2, "every 1": 1}  # instructions, of 32 products each
K = 4096


def measure_promotion(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the normwise error by distribution and promotion interval."""
    results = {}
    for draw in DRAWS:
        errors = _sweep_wgmma(draw, K, seed, quick, tuple(INTERVALS.values()))
        results |= {f"{draw}, {name}": errors.column("normwise", promote=n)[0] for name, n in INTERVALS.items()}
    return results


# ---- Hopper and Blackwell

GENERATIONS = {
    "sm_89, mma": ("e4m3", "sm_89"),
    "sm_90a, wgmma": (E4M3_WGMMA, "sm_90a"),
    "sm_100a, mma": ("e4m3", "sm_100a"),
    "sm_120a, mma": ("e4m3", "sm_120a"),
}
QUICK_GENERATIONS = ("sm_90a, wgmma", "sm_120a, mma")


def measure_generations(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the normwise error of the same product on several GPUs."""
    size = _size(quick)
    recipes = [
        Recipe(require_product(parse(op)), target, name=name)
        for name, (op, target) in GENERATIONS.items()
        if not quick or name in QUICK_GENERATIONS
    ]
    errors = sweep(matmul, {"recipe": recipes, "promote": (None,)}, operands=normal(size, size, K), measures="normwise", seeds=(seed,))
    return {recipe.name: errors.column("normwise", recipe=recipe)[0] for recipe in recipes}


# ---- fast accumulation

LAYER = {  # the products of a layer; libraries chain the sums of the first alone
    "forward": E4M3_WGMMA,
    "gradient of the input": "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3",
    "gradient of the weight": "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e5m2",
}
SLOW_INTERVAL = 4  # instructions between two promotions


def measure_fast_accumulation(seed: int, quick: bool) -> Mapping[str, float]:
    """Measure the ratio of the error of chained sums to that of promoted sums."""
    results, intervals = (
        {},
        tuple(INTERVALS.values()) if quick else (None, SLOW_INTERVAL),
    )  # the quick form shares deepseek-promotion's programs
    for name, op in tuple(LAYER.items())[: 1 if quick else None]:
        base = WGMMA.replace(op=op, name=name)
        for k in (4096,) if quick else LENGTHS:
            for draw, operands in DRAWS.items():
                size = _size(quick)
                drawn = operands(size, size, k)
                errors = sweep(matmul, {"promote": intervals}, recipe=base, operands=drawn, measures="normwise", seeds=(seed,))
                fast, slow = (errors.column("normwise", promote=promote)[0] for promote in (None, SLOW_INTERVAL))
                results[f"{name}, K = {k}, {draw}"] = fast / slow
    return results


CLAIMS = (
    Claim(
        name="deepseek-accumulation",
        title="FP8 sums on an H800 keep about 14 bits: at K = 4096 the largest relative error is nearly 2%",
        citation=DEEPSEEK,
        link=DEEPSEEK_LINK,
        setting="e4m3 x e4m3 by wgmma on sm_90a, 256 x 256 outputs, one chain of sums over K; the exact product is that of the operands as "
        "they are rounded to e4m3. The paper multiplies two random matrices with K = 4096 and does not say how they are drawn.",
        reduced="32 x 32 outputs, K = 4096 alone. A largest error over fewer outputs is smaller.",
        differs="The paper does not say how its matrices are drawn, nor which relative error it means. With N(0,1) the largest error over "
        "the root mean square of the results is what comes near its 2%; the relative error of single elements has no bound there, since "
        "some results are almost 0. With uniform operands every sum loses in one direction, and errors are several times larger.",
        quantities=tuple(_accumulation_quantity(*row) for row in ACCUMULATION_ROWS),
        measure=measure_accumulation,
        target=WGMMA.target,
        x_label="K",
        y_label="error",
    ),
    Claim(
        name="deepseek-promotion",
        title="promotion to f32 every 128 elements (four wgmma) is the smallest interval that is worth its cost",
        citation=DEEPSEEK,
        link=DEEPSEEK_LINK,
        setting="As deepseek-accumulation with K = 4096: the normwise error where the sums of every so many instructions, of 32 products "
        "each, are added to an f32 sum.",
        reduced="32 x 32 outputs.",
        differs="The paper gives no error for any interval, and its cost is time on a GPU, which an emulation does not measure. What can "
        "be seen: every halving of the interval still lowers the error, by about 1.7 (N(0,1)) to 3 (uniform) times.",
        quantities=tuple(Quantity(f"{draw}, {name}", None, "", draw, n) for draw in DRAWS for name, n in INTERVALS.items()),
        measure=measure_promotion,
        target=WGMMA.target,
        x_label="instructions between promotions",
        y_label="normwise error",
    ),
    Claim(
        name="hopper-blackwell-fp8",
        title="the short FP8 sums of Ada and Hopper are gone in Blackwell",
        citation="Xie et al., MMA-Sim: Bit-Accurate Reference Model of Tensor Cores and Matrix Cores, 2025",
        link="https://arxiv.org/abs/2511.10909",
        setting="e4m3 x e4m3, 256 x 256 outputs, K = 4096, N(0,1), one chain of sums over K: the normwise error from the exact product of "
        "the operands as they are rounded to e4m3.",
        reduced="32 x 32 outputs, one GPU of each kind.",
        differs="The paper gives the arithmetic of each GPU and no error of a product. The rows of sm_89 and of Blackwell are not measured "
        "here but known from publications (tcemu show).",
        quantities=tuple(Quantity(name, target=target) for name, (_, target) in GENERATIONS.items()),
        measure=measure_generations,
        y_label="normwise error",
    ),
    Claim(
        name="fast-accumulation",
        title="libraries chain FP8 sums in the forward pass, and promote them in both products of the backward pass",
        citation="NVIDIA, Transformer Engine 2.20.2, transformer_engine/common/recipe; PyTorch, torchao 0.18.0, Float8LinearConfig",
        link="https://github.com/NVIDIA/TransformerEngine https://github.com/pytorch/ao",
        setting="A layer's three products by wgmma on sm_90a, 256 x 256 outputs, gradients in e5m2, everything else in e4m3: the normwise "
        "error of chained sums (fast) over that of sums that are promoted to f32 every 4 instructions (slow).",
        reduced="32 x 32 outputs, the forward product with K = 4096 alone.",
        differs="The libraries give a default and no error. cuBLAS does not document its interval for slow sums; 4 instructions, as "
        "DeepGEMM has, are assumed. Operands are rounded without scales, since N(0,1) needs none.",
        quantities=tuple(
            Quantity(f"{name}, K = {k}, {draw}", None, "", f"{name}, {draw}", k) for name in LAYER for k in LENGTHS for draw in DRAWS
        ),
        measure=measure_fast_accumulation,
        target=WGMMA.target,
        x_label="K",
        y_label="error of chained sums over that of promoted ones",
    ),
)
