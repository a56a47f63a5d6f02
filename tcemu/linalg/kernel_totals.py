"""What a kernel makes of its f32 total: scales, bias and the rounding to the result. Codes in, codes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.arithmetic.fma import fma
from tcemu.arithmetic.quotient import multiply
from tcemu.formats import F32, Format, array_codes, convert
from tcemu.linalg.kernel_epilogue import Epilogue

Floats = Array | np.ndarray
Flag = bool | Array | np.ndarray  # static; or data, so that what differs in it shares a program


def chosen(flag: Flag, one: Callable[[], Array], other: Callable[[], Array]) -> Array:
    """One of the two. Where the flag is static, the other one is not traced."""
    if isinstance(flag, bool):
        return one() if flag else other()
    return jnp.where(flag, one(), other())


class Ways(NamedTuple):
    """What an epilogue does with scales and a bias."""

    once: Flag  # the last product and the bias in one rounding
    plus_zero: Flag
    narrow: Flag  # rounded to the format between before a bias


class Finish(NamedTuple):
    """What is static: the result's format, and the epilogue but for its numbers."""

    out: Format
    roundings: int = 2
    saturate: bool = False
    plus_zero: bool = True
    between: Format | None = None

    @property
    def ways(self) -> Ways:
        return Ways(self.roundings == 1, self.plus_zero, self.between is not None)


class Extras(NamedTuple):
    """What an epilogue takes besides the total, f32 codes. factors: by which it is multiplied in turn; bias and beta: or None."""

    factors: tuple[Array, ...] = ()
    bias: Array | None = None
    beta: Array | None = None


def finish_of(epilogue: Epilogue, out: Format) -> Finish:
    """An epilogue as what is compiled."""
    return Finish(out, epilogue.roundings, epilogue.saturate, epilogue.plus_zero, epilogue.between)


def rounded_to(fmt: Format | None, total: Array) -> Array:
    """f32 codes of what a format leaves of them."""
    return total if fmt in (None, F32) else convert(fmt, F32, convert(F32, fmt, total))


def finished(finish: Finish, total: Array, extras: Extras, ways: Ways | None = None) -> Array:
    """Codes of the result. total: f32 codes [..., M, N]; extras broadcast against it. ways: None: those of `finish`, static."""
    once, plus_zero, narrow = finish.ways if ways is None else ways
    for factor in extras.factors[:-1]:
        total = multiply(total, factor, F32)
    last, bias, beta = extras.factors[-1:], extras.bias, extras.beta

    def scaled() -> Array:
        if not last:
            return total
        return chosen(plus_zero, lambda: fma(last[0], total, jnp.uint32(0), F32), lambda: multiply(last[0], total, F32))

    def with_bias() -> Array:
        exact = scaled()
        waiting = chosen(narrow, lambda: rounded_to(finish.between, exact), lambda: exact)
        return fma(jnp.asarray(beta), jnp.asarray(bias), waiting, F32)

    if bias is None:
        total = scaled()
    elif last:
        total = chosen(once, lambda: fma(last[0], total, multiply(jnp.asarray(beta), bias, F32), F32), with_bias)
    else:
        total = with_bias()
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
