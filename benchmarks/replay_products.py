"""The products that `replay_gpu.py` asks: functions of libraries, with formats, what they take besides A and B, and the shapes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.formats import FORMATS, Format
from tcemu.uses.replay.black_box import PLAIN_FORM, ProductForm
from tcemu.uses.replay.kernel_profiles import list_profiles


class Survey(NamedTuple):
    """One function. dtypes: of A and B; form: what it takes besides; fast: accumulation of FP8; shapes: of the random sample, at most."""

    dtypes: tuple[str, str]
    framework: str = "torch"
    form: ProductForm = PLAIN_FORM
    fast: bool = False
    shapes: int = 1 << 30

    @property
    def held(self) -> tuple[Format, Format]:
        a, b = self.dtypes
        return FORMATS[a], FORMATS[b]


def fp8(a: str, b: str, *, fast: bool, form: ProductForm = PLAIN_FORM, shapes: int = 1 << 30) -> Survey:
    return Survey((a, b), "torch", form, fast, shapes)


FEW = 24  # shapes of the surveys that came later
TENSOR_BIAS, ROWS_BIAS = ProductForm("tensor", "bf16"), ProductForm("rows", "bf16")
SURVEYS = {  # by their numbers in this order shapes are drawn: new ones come last
    "torch-f16": Survey(("f16", "f16")), "torch-bf16": Survey(("bf16", "bf16")), "torch-e4m3": fp8("e4m3", "e4m3", fast=True),
    "torch-tf32": Survey(("f32", "f32")), "jax-f16": Survey(("f16", "f16"), "jax"), "jax-bf16": Survey(("bf16", "bf16"), "jax"),
    "torch-f32": Survey(("f32", "f32"), shapes=FEW), "torch-e4m3-slow": fp8("e4m3", "e4m3", fast=False, shapes=FEW),
    "torch-e5m2-e4m3": fp8("e5m2", "e4m3", fast=True), "torch-e5m2-e4m3-slow": fp8("e5m2", "e4m3", fast=False),
    "torch-e4m3-e5m2": fp8("e4m3", "e5m2", fast=True), "torch-e4m3-e5m2-slow": fp8("e4m3", "e5m2", fast=False),
    "torch-e4m3-rows": fp8("e4m3", "e4m3", fast=True, form=ProductForm("rows")),
    "torch-e4m3-rows-slow": fp8("e4m3", "e4m3", fast=False, form=ProductForm("rows")),
    "torch-e4m3-tensor": fp8("e4m3", "e4m3", fast=True, form=ProductForm("tensor"), shapes=FEW),
    "torch-e4m3-bias": fp8("e4m3", "e4m3", fast=True, form=TENSOR_BIAS, shapes=FEW),
    "torch-e4m3-rows-bias": fp8("e4m3", "e4m3", fast=True, form=ROWS_BIAS, shapes=FEW),
    "torch-bf16-bias": Survey(("bf16", "bf16"), form=ProductForm(bias="bf16"), shapes=FEW),
    "torch-f16-bias": Survey(("f16", "f16"), form=ProductForm(bias="f16"), shapes=FEW),
    "torch-bf16-addmm": Survey(("bf16", "bf16"), form=ProductForm(bias="bf16", bias_shape="outputs"), shapes=FEW),
    "torch-f16-addmm": Survey(("f16", "f16"), form=ProductForm(bias="f16", bias_shape="outputs", alpha=1.7, beta=0.3), shapes=FEW),
}  # fmt: skip
FORMS = tuple(name for name, survey in SURVEYS.items() if not survey.form.is_plain or survey.dtypes[0] != survey.dtypes[1])
F16, BF16 = ("torch-f16", "jax-f16"), ("torch-bf16", "jax-bf16")
FP8_FORMS = tuple(name for name in FORMS if "e4m3" in name)
FIRST = tuple(SURVEYS)[:8]
LISTED = [  # m, n, k, surveys: the shapes of which something is known or asked
    (128, 128, 128, tuple(SURVEYS)), (64, 64, 8192, (*F16, "torch-e4m3", "torch-e4m3-slow", *FORMS)),
    (16, 4096, 4096, (*F16, "torch-tf32", "torch-e4m3", "torch-f32", *FORMS)),
    (256, 256, 1024, ("torch-tf32", "torch-f32")), (100, 300, 700, (*F16, *BF16, "torch-f16-bias", "torch-f16-addmm")),
    (333, 77, 1000, (*F16, "torch-f16-addmm")), (333, 78, 1000, ("torch-f16",)),
    (129, 130, 131, ("torch-f16",)), (1, 4096, 4096, (*F16, "torch-bf16", "torch-bf16-bias")), (4096, 1, 4096, BF16),
    (2, 4096, 45, F16), (8, 4096, 1200, F16),
    (8, 32, 30, F16), (1, 1, 8192, F16), (128, 128, 16384, (*F16, "torch-e4m3", *FP8_FORMS)), (192, 256, 12288, ("torch-e4m3",)),
    (64, 64, 4096, (*F16, "torch-e4m3")), (64, 64, 11528, F16), (64, 64, 11520, ("torch-f16",)), (100, 2560, 9728, BF16),
    (128, 128, 65536, ("torch-bf16",)), (16, 64, 131072, ("torch-e4m3",)), (1023, 1025, 8192, ("torch-f16",)),
    (1, 8449, 4096, ("torch-f16",)), (1, 8448, 4096, ("torch-f16",)),
    (2, 2048, 2048, BF16), (17, 2048, 2048, BF16), (33, 2048, 2048, BF16), (257, 2048, 2048, BF16),
    (2048, 2048, 2048, (*FIRST, *FORMS)), (4096, 4096, 4096, ("torch-f16", "torch-e4m3")),
    (96, 256, 256, BF16), (96, 96, 64, BF16), (96, 64, 96, BF16), (96, 1024, 256, BF16), (96, 256, 1024, BF16),
    (96, 512, 256, BF16),  # the products of replay_model.py
]  # fmt: skip
TORCH = {"f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "f32": "float32"}


def products(device: str) -> dict[str, Callable]:
    """The functions, by survey."""
    found: dict[str, Callable] = {"jax-f16": jax.jit(jnp.matmul), "jax-bf16": jax.jit(jnp.matmul)}
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    torch.backends.cuda.matmul.allow_tf32 = True
    one = torch.ones((), device=device)

    def scaled(fast: bool) -> Callable:
        def product(a: Any, b: Any, scale_a: Any = one, scale_b: Any = one, bias: Any = None) -> Any:
            columns = b.t().contiguous().t()  # Hopper takes B with contiguous columns
            return torch._scaled_mm(a, columns, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return product

    def added(form: ProductForm) -> Callable:
        def product(a: Any, b: Any, bias: Any) -> Any:
            return torch.addmm(bias, a, b, alpha=form.alpha, beta=form.beta)

        return product

    def plain(a: Any, b: Any) -> Any:
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            return torch.mm(a, b)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = True

    for name, survey in SURVEYS.items():
        if survey.framework == "torch":
            narrow = set(survey.dtypes) <= {"e4m3", "e5m2"}
            found[name] = scaled(survey.fast) if narrow else torch.mm if survey.form.is_plain else added(survey.form)
    return found | {"torch-f32": plain}


def shapes(count: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Every shape of the survey, in the order in which they are taken: the listed ones, then the sample, each survey in turn."""
    found = [(name, m, n, k) for m, n, k, names in LISTED for name in names]
    rngs = {name: np.random.default_rng([seed, number]) for number, name in enumerate(SURVEYS)}
    for number in range(count):
        for name, rng in rngs.items():
            m, n, k = (int(x) for x in np.rint(np.exp2(rng.uniform(0, 13, 3))))
            if number % 2:
                m, n, k = (-(-x // 16) * 16 for x in (m, n, k))
            if number >= SURVEYS[name].shapes:
                continue
            if "e4m3" in name:
                n, k = (-(-x // 16) * 16 for x in (n, k))
            found.append((name, m, n, k))
    return list(dict.fromkeys(found))


STUDY_ROUND = ("torch-tf32", "jax-f16", "torch-f16", "torch-tf32", "jax-bf16", "torch-bf16")
STUDY_UNITS = {"torch-tf32": (1, 2, 4, 16), "torch-f16": (1, 2, 4), "torch-bf16": (1, 2, 4), "jax-f16": (1, 16), "jax-bf16": (1, 16)}
LEARN_SEED, TEST_SEED = 2027, 4700


def study_shapes(count: int) -> dict[tuple[str, int, int, int], int]:
    """The shapes for rules of tf32, of operands that are not aligned, and of XLA, with the round in which each is drawn.

    m, n and k are log-uniform in 1..8192, n and k multiples of one of `STUDY_UNITS`. Each round has all products, and every fifth round is
    for tests (`tests_rules`), so that any beginning is useful.
    """
    rngs, found = (np.random.default_rng(LEARN_SEED), np.random.default_rng(TEST_SEED)), {}
    for number in range(count):
        rng = rngs[tests_rules(number)]
        for name in STUDY_ROUND:
            unit = int(rng.choice(STUDY_UNITS[name]))
            m, n, k = (int(x) for x in np.rint(np.exp2(rng.uniform(0, 13, 3))))
            found.setdefault((name, m, -(-n // unit) * unit, -(-k // unit) * unit), number)
    return found


def tests_rules(number: int) -> bool:
    """Return True for a round of `study_shapes` whose shapes test rules, and nothing else."""
    return number % 5 == 4


LAYERS = {  # n and k of the products of a model
    "MiniLM": ((384, 384), (1536, 384), (384, 1536)),
    "7B": ((4096, 4096), (12288, 4096), (11008, 4096), (22016, 4096), (4096, 11008), (32000, 4096)),
}
ROWS_OF_LAYERS = (1, 8, 16, 32, 64, 96, 128, 256, 512, 1024)
HELD_OUT_SEED = 4600


def held_out_shapes() -> list[tuple[str, int, int, int]]:
    """The shapes that test predicted orders, none of them measured before: drawn as in the survey, with a long K, and of models."""
    rng, drawn = np.random.default_rng(HELD_OUT_SEED), []

    def sixteens(low: tuple[float, ...], high: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(int(x) * 16 for x in np.ceil(np.exp2(rng.uniform(low, high)) / 16))

    layers = [("torch-bf16", m, n, k) for m in ROWS_OF_LAYERS for model in LAYERS.values() for n, k in model if n * k < 1 << 26]
    for number in range(40):
        for name in ("torch-f16", "torch-bf16", "torch-e4m3"):
            drawn.append((name, *sixteens((0, 0, 0), (13, 13, 13))))
            if number % 2:
                drawn.append((name, *sixteens((3, 3, 11), (11, 12, 15))))
        if number % 4 == 0:
            for name in ("torch-f16", "torch-bf16", "torch-tf32", "jax-f16", "jax-bf16"):
                drawn.append((name, *(int(x) for x in np.rint(np.exp2(rng.uniform(0, 13, 3))))))
        drawn += layers[number::40]
    measured = {(profile.library, *shape) for profile in list_profiles() for shape in profile.shapes}
    return [shape for shape in dict.fromkeys(drawn) if shape not in measured]
