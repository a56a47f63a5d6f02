"""Scales and biases on which a black box and a recipe are compared: of each kind, what shows some differences and hides others."""

from __future__ import annotations

import numpy as np

from tcemu.formats import Format
from tcemu.replay.boxes import codes_of, values
from tcemu.replay.forms import Besides, Form

HOWS = {"mild": 0, "low a": 1, "low b": 2, "aimed": 3, "beyond": 4}  # numbers of the kinds, in seeds
LEAST, GREATEST = -148, 127  # exponents of scales
FOLDED = ((90, 40), (-64, -80))  # exponents whose sum is beyond f32, or a subnormal number of few bits
LOST = -143  # exponent of a product of the total and one scale, of which few bits are left


def hows_of(form: Form) -> tuple[str, ...]:
    """The kinds that tell a form's epilogues apart."""
    return ("mild", *(("low a", "low b", "beyond") if form.scales else ()), *(("aimed",) if form.bias is not None else ()))


def besides(form: Form, how: str, seed: int, totals: np.ndarray) -> Besides:
    """Scales and a bias of one kind, by a seed, for these totals of A·B, [M, N].

    "mild": of all signs, about the totals' own magnitude, also biases of zero. "low a", "low b": a product of the total and one scale has
    few bits left, which the other scale brings back, and shows which one comes first. "beyond": the scales' product has few bits, or is
    beyond f32. "aimed": the bias takes away nearly all of the scaled total, so that the result is what was rounded before they met.
    """
    m, n = totals.shape
    rng = np.random.default_rng([seed, m, n, HOWS[how]])
    totals = np.where(np.isfinite(totals), totals, 0)
    nonzero = np.abs(totals[totals != 0])
    middle = int(np.floor(np.log2(np.median(nonzero)))) if len(nonzero) else 0
    a, b = _scales(rng, form, how, middle, m, n)
    if form.bias is None:
        return Besides(_codes(a), _codes(b))
    assert isinstance(form.bias, Format)
    of_a, of_b = (np.asarray(1 if x is None else x, np.float64) for x in (a, b))
    size = (1, n) if form.of == "columns" else (m, n)
    whole = totals * of_a * of_b * form.alpha / form.beta
    if how == "aimed":
        bias = -whole[rng.integers(0, m, n), np.arange(n)][None] if form.of == "columns" else -whole
    else:
        typical = np.abs(whole).mean(0, keepdims=True) if form.of == "columns" else np.abs(whole)
        bias = rng.standard_normal(size) * typical * np.exp2(rng.integers(-2, 4, size))
        bias = np.where(rng.integers(0, 8, size) == 0, np.copysign(0, rng.standard_normal(size)), bias)
    codes = codes_of(form.bias, np.clip(bias, -3e38, 3e38))
    if how == "aimed" and a is not None:
        a = _aimed(rng, totals, a, of_b, form.beta * np.broadcast_to(values(form.bias, codes), totals.shape))
    return Besides(_codes(a), _codes(b), codes[0] if form.of == "columns" else codes)


def _scales(rng: np.random.Generator, form: Form, how: str, middle: int, m: int, n: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """float32, as the form has them. middle: exponent of the totals."""
    if form.scales is None:
        return None, None
    found = []
    for size, low in (((m, 1), "low a"), ((1, n), "low b")):
        size = size if form.scales == "rows" else ()
        if how in ("mild", "aimed"):
            exponents = rng.integers(-4, 5, size)
        elif how == "beyond":
            exponents = FOLDED[middle > 0][low == "low b"] + rng.integers(0, 2, size)
        elif how == low:
            exponents = np.clip(LOST - middle + rng.integers(-2, 3, size), LEAST, GREATEST)
        else:
            exponents = np.clip(-LOST - 8 + rng.integers(-2, 3, size), LEAST, GREATEST)
        sizes = np.ldexp(rng.uniform(1, 2, size), np.asarray(exponents).astype(int)) * rng.choice([-1.0, 1.0], size)
        found.append(np.asarray(sizes, np.float64).astype(np.float32))
    return found[0], found[1]


def _aimed(rng: np.random.Generator, totals: np.ndarray, a: np.ndarray, of_b: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """scale_a, so that in each row (with one scale: at one place) the scaled total is nearly the opposite of the bias."""
    m, n = totals.shape
    rows, columns = np.arange(m), rng.integers(0, n, m)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        wanted = (-bias / (totals * of_b))[rows, columns].astype(np.float32)
    right = np.isfinite(wanted) & (np.abs(wanted) > 2.0**-100) & (np.abs(wanted) < 2.0**100)
    if a.ndim:
        return np.where(right[:, None], wanted[:, None], a)
    return wanted[right][rng.integers(right.sum(), size=())].reshape(()) if right.any() else a


def _codes(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else np.asarray(x, np.float32).view(np.uint32)
