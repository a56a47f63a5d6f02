"""Arithmetics and operands for the GPU kernels: `CASES` is what `test_cuda` and `test_gpu` loop over."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.cuda.matrix_kernels import find_matrix_kernels, multiply_by_kernels
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, TF32, UE4M3, UE8M0

HOPPER, FP8, BLACKWELL = Model(F32, 16, 25, -133), Model(F32, 32, 13, -133, result_bits=13), Model(F32, 32, 25, -133)
GROUPED, HALF = Model(F32, 64, 35, -139, summed=16), Model(F16, 16, 25, -21, "RN")
CASES = {  # model, formats, scale format, products that share a scale
    "f16": (HOPPER, F16, F16, None, 0),
    "bf16": (HOPPER, BF16, BF16, None, 0),
    "tf32": (HOPPER.replace(terms=8), TF32, TF32, None, 0),
    "e4m3": (FP8, E4M3, E4M3, None, 0),
    "e5m2 and e4m3": (FP8, E5M2, E4M3, None, 0),
    "e3m2 and e2m3, two sums": (BLACKWELL, E3M2, E2M3, None, 0),
    "mxf8": (BLACKWELL, E4M3, E5M2, UE8M0, 32),
    "mxf4": (GROUPED, E2M1, E2M1, UE8M0, 32),
    "nvf4": (GROUPED, E2M1, E2M1, UE4M3, 16),
    "volta": (Model(F32, 4, 23, -131), F16, F16, None, 0),
    "a floor among the products": (HOPPER.replace(floor=-3), F16, BF16, None, 0),
    "few bits": (Model(F32, 8, 9, -20, result_bits=5), E4M3, F16, None, 0),
    "fewer bits than the result keeps": (Model(F32, 8, 9, -133), E4M3, E5M2, None, 0),
    "fewer bits in an f64": (Model(F32, 8, 17, -133), F16, F16, None, 0),
    "a floor among the accumulators": (FP8.replace(floor=-100), E4M3, E4M3, None, 0),
    "27 bits": (Model(F32, 8, 27, -133), E4M3, E4M3, None, 0),
    "f16 results": (HALF, F16, F16, None, 0),
    "f16 results of 8": (Model(F16, 8, 24, -20, "RN"), F16, F16, None, 0),
    "f16 results of e5m2": (Model(F16, 32, 13, -21, "RN"), E5M2, E4M3, None, 0),
    "f16 results of few bits": (Model(F16, 16, 25, -21, "RN", result_bits=6), E4M3, E3M2, None, 0),
    "chains of e4m3 as f16": (HOPPER.replace(groups=2, chain="k"), F16, F16, None, 0),
    "f16 chains": (HALF.replace(groups=2, chain="k"), F16, F16, None, 0),
    "long chains": (FP8.replace(chain=64), E4M3, E5M2, None, 0),
    "groups of 32, few bits": (Model(F32, 32, 24, -20, summed=32, result_bits=20), E2M1, E2M1, UE4M3, 32),
    "groups of e2m3": (Model(F32, 64, 30, -139, summed=16), E2M3, E2M1, UE8M0, 32),
}


def codes(rng, fmt, shape, raw):
    """Any code, but Inf and NaN made rare; or values around 1, so that products cancel and meet in their exponents."""
    code = rng.integers(0, 1 << fmt.bits, shape, dtype=np.uint64)
    at, top = fmt.mantissa_bits + fmt.unused_bits, (1 << fmt.exponent_bits) - 1
    field = (code >> np.uint64(at)).astype(int) & top
    near = np.clip(fmt.bias + rng.integers(-3, 4, shape), 1, max(1, top - 1))
    wanted = np.where((field == top) & (rng.random(shape) < 0.98), near, field) if raw else near
    return jnp.asarray((code ^ ((field ^ wanted).astype(np.uint64) << np.uint64(at))).astype(fmt.dtype))


def operands(name, raw, m, n, k, batch=(), seed=0):
    """a, b, c and the scales."""
    rng = np.random.default_rng(seed)
    model, a, b, scale, share = CASES[name]
    c, minus = codes(rng, model.result, (*batch, m, n), raw), 1 << (model.result.bits - 1)
    if raw:  # among them NaN of many words, and what stands far above and below the products
        c = jnp.where(jnp.asarray(rng.random(c.shape) < 0.1), c.dtype.type(minus | model.result.infinity) | (c & 0xFF), c)
    x, y = codes(rng, a, (*batch, m, k), raw), codes(rng, b, (*batch, k, n), raw)
    x, c = x.at[..., ::8, :].set(0), c.at[..., ::8, ::4].set(c.dtype.type(minus))  # the accumulator alone, and -0
    if scale is None:
        return x, y, c, None
    size = lambda count: rng.integers(0 if raw else 100, 128 if raw else 110, count).astype(np.uint8)
    scales = [size((*batch, m, k // share)), size((*batch, k // share, n))]
    for v in scales if raw else ():
        v[rng.random(v.shape) < 0.02] = scale.nan
    return x, y, c, tuple(map(jnp.asarray, scales))


def signature(name):
    model, a, b, scale, share = CASES[name]
    k = max(16, model.terms) * model.groups
    return ProductSpec(a, b, model.result, model.result, k, scale=scale, scale_vec=k // share if share else 0)


def kernel_program(model, spec, promotion=None, stored=None):
    """The function (a, b, c, scales, block scales) -> D by the kernels that take a model."""
    kernels = find_matrix_kernels(model, spec, promotion, stored)
    assert kernels is not None
    return partial(multiply_by_kernels, kernels)
