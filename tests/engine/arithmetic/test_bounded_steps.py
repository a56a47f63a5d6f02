"""Steps on bounded operands: the words of the independent reference within the bounds, at them and just beyond them."""

import jax
import numpy as np
import pytest
from oracles import model_reference
from support.sampling import sample_cases

from tcemu import formats
from tcemu.engine.architectures import model_rows
from tcemu.engine.arithmetic import reduction
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32

M, N, STEPS = 6, 16, 5
MODELS = {  # model, formats; the sums of the last two do not fit one word
    "f16": (model_rows.HOPPER_F32, F16, F16),
    "e4m3": (model_rows.HOPPER_FP8, E4M3, E4M3),
    "e5m2 by e4m3": (model_rows.ADA_FP8, E5M2, E4M3),
    "bf16": (model_rows.HOPPER_F32, BF16, BF16),
    "tf32": (model_rows.AMPERE_TF32, TF32, TF32),
    "f16 on Volta": (model_rows.VOLTA_F32, F16, F16),
    "bf16 on Blackwell": (model_rows.BLACKWELL_F32, BF16, BF16),
    "e4m3 on Blackwell": (model_rows.BLACKWELL_F32, E4M3, E4M3),
}


def float_codes(fmt, values):
    return np.asarray(formats.from_float(fmt, np.asarray(values, np.float32)))


def powers(fmt, exponents, rng):
    """Codes of numbers of these exponents, with any fractions and signs. Exponents below the normal ones give subnormals."""
    exponents = np.asarray(exponents)
    field = np.maximum(exponents + fmt.bias, 0).astype(np.int64)
    fraction = rng.integers(0, 1 << fmt.mantissa_bits, exponents.shape)
    if fmt == E4M3:
        fraction = np.where(field == 15, np.minimum(fraction, 6), fraction)
    sign = rng.integers(0, 2, exponents.shape)
    code = (sign << fmt.exponent_bits + fmt.mantissa_bits | field << fmt.mantissa_bits | fraction) << fmt.unused_bits
    return code.astype(fmt.dtype)


def draw(kind, model, a, b, rng):
    """Codes of A, B and C, and whether they are bounded, if the formats are wide."""
    k = model.terms * STEPS
    x, y = rng.standard_normal((M, k)), rng.standard_normal((k, N))
    c, bounded = np.zeros((M, N)), False
    least = model.fraction_bits + F32.min_exponent
    if kind == "normal":
        c, bounded = rng.standard_normal((M, N)) * 100, True
    elif kind == "largest":  # sums up to 2^31 and 2^32 units
        x, y = (np.sign(v) if rng.integers(2) else np.ones_like(v) for v in (x, y))
        x, y = x * (2 - 2.0**-a.mantissa_bits), y * (2 - 2.0**-b.mantissa_bits)
        c, bounded = np.full((M, N), 3.9999998), True
    elif kind == "cancelling":  # small accumulators beside steps of zeros
        x = np.concatenate([x[:, : k // 2], -x[:, : k // 2], np.zeros((M, k % 2))], axis=1)
        y = np.concatenate([y[: k // 2], y[: k // 2] * (1 + 2.0**-b.mantissa_bits * (rng.random((k // 2, N)) < 0.1)), y[: k % 2]])
        x[:, model.terms : 2 * model.terms] *= rng.random((M, model.terms)) < 0.05
        c, bounded = rng.choice([0, -0.0, 2.0**-20], (M, N)), True
    elif kind in ("least", "beyond least"):
        low = -(least // -2)
        x, y = powers(a, rng.integers(low, low + 9, (M, k)), rng), powers(b, rng.integers(least - low, least - low + 9, (k, N)), rng)
        if kind == "beyond least":
            x[M - 1, k - 1], y[k - 1, 0] = powers(a, [low], rng)[0], powers(b, [least - low - 1], rng)[0]
        else:
            x[0, 0], y[0, 0] = powers(a, [low], rng)[0], powers(b, [least - low], rng)[0]
        x[:, : model.terms] = 0
        return x, y, powers(F32, np.where(rng.random((M, N)) < 0.5, least, least + 1), rng), kind == "least"
    elif kind in ("most", "beyond most"):
        most = 124 - (k).bit_length() + (kind == "beyond most")
        x, y = powers(a, np.full((M, k), most // 2), rng), powers(b, np.full((k, N), most - most // 2), rng)
        return x, y, powers(F32, np.full((M, N), 125), rng), kind == "most"
    elif kind == "any C":
        return float_codes(a, x), float_codes(b, y), rng.integers(0, 1 << 32, (M, N), np.uint32), False
    elif kind == "subnormal":
        x, y = powers(a, np.full((M, k), -200), rng), powers(b, rng.integers(0, 4, (k, N)), rng)
        return x, y, float_codes(F32, c), False
    else:
        x[2, 3], y[1, 2], y[5, 3] = {"infinite": (np.inf, -np.inf, 1), "nan": (1, 1, np.nan)}.get(kind, (1, 1, 1))
        c = np.where(rng.random((M, N)) < 0.5, {"infinite C": np.inf, "tiny C": 1e-40, "large C": 3e38}.get(kind, 1), c)
        x[:, : model.terms] *= kind != "tiny C"
    return float_codes(a, x), float_codes(b, y), float_codes(F32, c), bounded


NARROW = ("normal", "largest", "cancelling", "subnormal", "infinite", "nan", "any C", "infinite C", "tiny C", "large C")
KINDS = (*NARROW, "least", "beyond least", "most", "beyond most")


def compare(monkeypatch, name):
    """Describes the words that differ from the reference, and says whether each kind of operands of wide formats was bounded."""
    model, a, b = MODELS[name]
    spec = ProductSpec(a, b, F32, F32, model.terms)
    seen = []
    decide = reduction.are_bounded

    def noted(*args):
        bounded = decide(*args)
        jax.debug.callback(lambda value: seen.append(bool(value)), bounded)
        return bounded

    monkeypatch.setattr(reduction, "are_bounded", noted)
    monkeypatch.setattr(reduction, "FEWEST_PRODUCTS", 0)
    product = jax.jit(lambda *codes: multiply_matrices(model, spec, *codes))
    fields, kind_of_product = model_reference.Fields.from_model(model), model_reference.Kind(str(a), str(b), "f32", "f32", spec.k)
    wrong, rng = [], np.random.default_rng(0)
    for kind in KINDS if a.exponent_bits == 8 else NARROW:
        x, y, c, bounded = draw(kind, model, a, b, rng)
        d = np.asarray(product(x, y, c))
        jax.effects_barrier()
        assert not seen or seen[-1] == bounded, kind
        for i, j in np.ndindex(d.shape):
            if (i + j) % 3 == 0:
                want = model_reference.multiply_add(fields, kind_of_product, x[i].tolist(), y[:, j].tolist(), int(c[i, j]))
                if int(d[i, j]) != want:
                    wrong.append(f"{kind} {(i, j)}: {int(d[i, j]):#x}, the reference says {want:#x}")
    return wrong, seen


@pytest.mark.parametrize("name", sample_cases(MODELS, ()))  # the usual run has the lattice of a step
def test_the_words_are_those_of_the_reference(monkeypatch, name):
    """Every kind of operands; those of wide formats are bounded just up to the bounds."""
    wrong, seen = compare(monkeypatch, name)
    assert wrong == [] and set(seen) == ({True, False} if MODELS[name][1].exponent_bits == 8 else set())
