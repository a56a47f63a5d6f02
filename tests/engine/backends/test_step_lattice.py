"""The lattice of a fused step by every backend and form of the step: the words of the exact reference. See `support.step_lattice`."""

import jax
import numpy as np
import pytest
from oracles import model_reference
from oracles.model_reference import Fields, Kind
from support import cuda_on_cpu
from support.lattice_paths import PATHS, build, count_differences
from support.llvm_products import Arithmetic, arithmetics
from support.sampling import sample_cases
from support.step_lattice import expected

import tcemu
from tcemu.engine.backends.llvm import xla_call

F16, BF16, MXF8 = "f16 in steps of 16 by 25", "bf16 in steps of 16 by 25", "e4m3 in steps of 32 by 25, ue8m0 scales of 32"
FP8, NVF4 = "e4m3 in steps of 32 by 13", "e2m1 in steps of 64 by 35, ue4m3 scales of 16"
HALF, CHAINED, NARROWED = "f16 in steps of 16 by 25 to f16", "e5m2 as f16 in steps of 16 by 25", "f16 in steps of 16 by 25, C f32, D f16"
# one arithmetic for each form of the step, and for each pair of widths; `-m full` has all
USUAL = (
    F16, BF16, MXF8, FP8, NVF4, HALF, CHAINED, NARROWED, "tf32 in steps of 4 by 24", "e5m2 by e2m1 in steps of 32 by 25",
    "e5m2 in steps of 32 by 25, ue8m0 scales of 32", "e2m1 in steps of 64 by 35, ue8m0 scales of 32",
)  # fmt: skip


def assert_no_word_differs(name: str, path: str, repeats: int = 1) -> None:
    found = list(count_differences(arithmetics()[name], path, repeats))
    assert [(kind, differ) for kind, differ, _ in found if differ] == [], f"{path}, {name}"
    assert sum(words for *_, words in found) > 0 or path.startswith(("llvm", "cuda tile", "cuda warp"))  # some have no kernel


LLVM = ("llvm", "llvm without AVX-512", "llvm by columns")
FOR_CPUS = [(path, name) for name in sorted(arithmetics()) for path in LLVM]
USUAL_FOR_CPUS = [(path, name) for at, name in enumerate(USUAL) for path in (LLVM[0], LLVM[1 + at % 2])]


@pytest.mark.skipif(bool(xla_call.missing()), reason=xla_call.missing() or "kernels can be called")
@pytest.mark.parametrize("case", sample_cases(FOR_CPUS, USUAL_FOR_CPUS, ", ".join))
def test_kernels_for_cpus(case):
    path, name = case
    assert_no_word_differs(name, path)


PORTABLE, BOUNDED = "portable", "portable, bounded"
IN_JAX = [(path, name) for path in (PORTABLE, BOUNDED) for name in sorted(arithmetics())]
USUAL_IN_JAX = [(PORTABLE, MXF8), *((BOUNDED, name) for name in (F16, FP8, MXF8))]  # and F16 below, with other roundings


@pytest.mark.parametrize("case", sample_cases(IN_JAX, USUAL_IN_JAX, ", ".join))
def test_portable_backend(case):
    path, name = case
    assert_no_word_differs(name, path)


TILE, INTEGER, WARP = ON_CPU = [path for path in PATHS if path.startswith("cuda ")]
KERNEL_TEXTS = [(path, name) for path in ON_CPU for name in sorted(arithmetics())]


@pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="g++ is not installed here")
@pytest.mark.parametrize("case", sample_cases(KERNEL_TEXTS, [(TILE, MXF8), (INTEGER, NARROWED), (WARP, HALF)], ", ".join))
def test_texts_of_kernels_for_gpus(case):
    path, name = case
    assert_no_word_differs(name, path)


HAS_GPU = jax.default_backend() == "gpu"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="JAX finds no NVIDIA GPU here")
@pytest.mark.parametrize("name", sorted(arithmetics()) if HAS_GPU else [F16])  # elsewhere one line of those that are skipped
def test_kernels_for_gpus(name):
    assert_no_word_differs(name, "cuda")


# Of two arithmetics, one whose sums leave the range of f32, the usual run has one by turns, and once as many bits as the result has.
# The formulas are proved for all four roundings: tests/engine/proofs/test_general_proofs.py, test_rounding_proofs.py
ROUNDINGS = [("RN", "RZ"), ("RM", "RN"), ("RP", "RM"), ("RZ", "RP")]
ROUNDED = [(name, *modes, kept) for modes in ROUNDINGS for kept in (None, 6) for name in (F16, BF16)]
USUAL_ROUNDED = [((F16, BF16)[at % 2], *modes, (None, 6)[at // 2]) for at, modes in enumerate(ROUNDINGS)]


@pytest.mark.skipif(bool(xla_call.missing()), reason=xla_call.missing() or "kernels can be called")
@pytest.mark.parametrize("case", sample_cases(ROUNDED, USUAL_ROUNDED, str))
def test_every_rounding_by_kernels_for_cpus(case):
    check_rounding(LLVM[0], *case)


@pytest.mark.parametrize("case", sample_cases(ROUNDED, USUAL_ROUNDED[::3], str))
def test_every_rounding_in_jax(case):
    check_rounding(PORTABLE, *case)


def check_rounding(path, name, rounding, alignment, result_bits):
    model, spec, block = arithmetics()[name]
    arithmetic = Arithmetic(model.replace(rounding=rounding, alignment=alignment, result_bits=result_bits), spec, block)
    counts = list(count_differences(arithmetic, path))
    assert sum(words for *_, words in counts) > 100_000
    assert [kind for kind, differ, _ in counts if differ] == []


@pytest.mark.parametrize("name", sample_cases(sorted(arithmetics()), [NARROWED, NVF4]))
def test_vectorised_reference_is_the_reference_of_one_element(name):
    """The reference of whole arrays shares no rule with the one of Fractions."""
    model, spec, block = arithmetic = arithmetics()[name]
    kind = Kind(str(spec.a), str(spec.b), str(spec.c), str(spec.d), spec.k, str(spec.scale) if block else None, block or None)
    fields, rng = Fields.from_model(model), np.random.default_rng(0)
    for lattice in ("spread", "tight", "special"):
        operands = build(arithmetic, lattice)
        wanted = expected(arithmetic, operands)
        for _ in range(60):
            at, m, n = (int(rng.integers(size)) for size in wanted.shape)
            scales = None if operands.scales is None else (operands.scales[0][at, m].tolist(), operands.scales[1][at, :, n].tolist())
            one = model_reference.multiply_add(
                fields, kind, operands.a[at, m].tolist(), operands.b[at, :, n].tolist(), int(operands.c[at, m, n]), scales
            )
            assert one == wanted[at, m, n], (lattice, at, m, n)


def test_products_that_cancel_leave_a_small_accumulator():
    """A bounded step that dropped C because it lies below every product's exponent gave 0."""
    a, b = np.array([[2.0**-14, 2.0**-14]], np.float16), np.array([[2.0**-14], [-(2.0**-14)]], np.float16)
    d = tcemu.gemm(a, b, np.full((1, 1), 2.0**-50, np.float32), op="f16", target="H100")
    assert float(d[0, 0]) == 2.0**-50
