"""What a kernel makes of its f32 total: scales, bias and the rounding to the result. Codes in, codes out."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.arithmetic.fma import fma
from tcemu.arithmetic.quotient import multiply
from tcemu.formats import F32, Format, array_codes, convert
from tcemu.linalg.kernel_epilogue import Epilogue

Floats = Array | np.ndarray


class Finish(NamedTuple):
    """What is static: the result's format, and the epilogue but for its numbers."""

    out: Format
    roundings: int = 2
    saturate: bool = False
    plus_zero: bool = True
    between: Format | None = None


class Extras(NamedTuple):
    """What an epilogue takes besides the total, f32 codes. factors: by which it is multiplied in turn; bias and beta: or None."""

    factors: tuple[Array, ...] = ()
    bias: Array | None = None
    beta: Array | None = None


def finish_of(epilogue: Epilogue, out: Format) -> Finish:
    """An epilogue as what is compiled."""
    return Finish(out, epilogue.roundings, epilogue.saturate, epilogue.plus_zero, epilogue.between)


def finished(finish: Finish, total: Array, extras: Extras) -> Array:
    """Codes of the result. total: f32 codes [..., M, N]; extras broadcast against it."""
    bias, zero = extras.bias, jnp.uint32(0)
    once = bias is not None and finish.roundings == 1
    for factor in extras.factors[:-1]:
        total = multiply(total, factor, F32)
    if extras.factors:
        last = extras.factors[-1]
        if once:
            total = fma(last, total, multiply(jnp.asarray(extras.beta), jnp.asarray(bias), F32), F32)
        else:
            total = fma(last, total, zero, F32) if finish.plus_zero else multiply(last, total, F32)
    if bias is not None and not once:
        total = total if finish.between is None else convert(finish.between, F32, convert(F32, finish.between, total))
        total = fma(jnp.asarray(extras.beta), bias, total, F32)
    return total if finish.out == F32 else convert(F32, finish.out, total, "RN", finish.saturate)


def extras_of(epilogue: Epilogue, scales: tuple[Floats | None, Floats | None], bias: Floats | None) -> Extras:
    """What the epilogue takes, from floats. scales: of A and of B, that broadcast against the total, or one number of any shape."""

    def f32(x: Floats | float) -> Array:
        source, codes = array_codes(jnp.asarray(x, jnp.float32) if isinstance(x, float) else x)
        return convert(source, F32, codes)

    factors: list[Array] = []
    if epilogue.scaled:
        ordered = scales[::-1] if epilogue.scaling == "b first" else scales
        factors = [f32(scale.reshape(()) if scale.size == 1 else scale) for scale in ordered if scale is not None]
        factors += [f32(epilogue.alpha)] if epilogue.alpha != 1.0 or not factors else []
        while epilogue.scaling == "folded" and len(factors) > 1:
            factors[:2] = [multiply(factors[0], factors[1], F32)]
    return Extras(tuple(factors), None if bias is None else f32(bias), None if bias is None else f32(epilogue.beta))
