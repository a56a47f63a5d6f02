"""Ozaki's second scheme in Python's integers and fractions, one element after the other. Nothing here is shared with tcemu.

The rules are those of RIKEN-RCCS/GEMMul8 with logarithms that are exact: powers of two by which rows and columns are multiplied,
truncation, residues, products of residues, and the integer between -P/2 and P/2 that has them.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import ceil, frexp, isqrt, prod

import numpy as np

Multiply = Callable[[np.ndarray, np.ndarray], np.ndarray]  # integers [M, K] and [K, N], by an instruction


def top_exponent(row: Sequence[float]) -> int | None:
    """Exponent of the largest power of two in the row, None for a row of zeros."""
    return max((frexp(float(x))[1] - 1 for x in row if x), default=None)


def rounded_up(x: float, exponent: int) -> int:
    return ceil(abs(Fraction(float(x))) / Fraction(2) ** exponent)


def largest_exponent(limit: int, bound: int) -> int:
    if bound == 0:
        return 0
    e = 0
    while Fraction(4) ** e * bound > limit:
        e -= 1
    while Fraction(4) ** (e + 1) * bound <= limit:
        e += 1
    return e


def norm_exponents(x: np.ndarray, limit: int) -> list[int]:
    """Powers of two of the rows of x."""
    found = []
    for row in x:
        top = top_exponent(row)
        unit = 0 if top is None else top - 30
        squares = sum(rounded_up(v, unit) ** 2 for v in row)
        found.append(0 if top is None else largest_exponent(limit, squares) - unit)
    return found


def product_exponents(a: np.ndarray, b: np.ndarray, limit: int, multiply: Multiply) -> tuple[list[int], list[int]]:
    """Powers of two of the rows of a and of the columns of b."""
    units, integers = [], []
    for x in (a, b.T):
        tops = [top_exponent(row) for row in x]
        units.append([0 if top is None else top - 5 for top in tops])
        integers.append(np.array([[rounded_up(v, unit) for v in row] for row, unit in zip(x, units[-1], strict=True)]))
    estimate = multiply(integers[0], integers[1].T)
    bounds = estimate.max(1), estimate.max(0)
    return tuple(
        [0 if not any(row) else largest_exponent(limit, int(bound)) - unit for bound, unit, row in zip(each, unit_list, x, strict=True)]
        for each, unit_list, x in zip(bounds, units, (a, b.T), strict=True)
    )


def scaled_integers(x: np.ndarray, exponents: list[int]) -> list[list[int]]:
    return [[int(Fraction(float(v)) * Fraction(2) ** e) for v in row] for row, e in zip(x, exponents, strict=True)]  # int() truncates


def residue(x: int, p: int) -> int:
    r = x % p
    return r - p if r > p // 2 else r


def fp8_parts(r: int, p: int) -> tuple[int, int]:
    """High and low part of a residue."""
    if isqrt(p) ** 2 == p:
        high = round(Fraction(r, isqrt(p)))  # ties to even
        return high, r - isqrt(p) * high
    high = ceil(Fraction(abs(r), 16)) * (-1 if r < 0 else 1)
    return high, r - 16 * high


def residue_product(x: np.ndarray, y: np.ndarray, p: int, fp8: bool, multiply: Multiply) -> np.ndarray:
    """Product of residues [M, K] and [K, N] modulo p."""
    if not fp8:
        return multiply(x, y) % p
    (x1, x0), (y1, y0) = (np.moveaxis(np.array([[fp8_parts(int(r), p) for r in row] for row in m]), -1, 0) for m in (x, y))
    if isqrt(p) ** 2 == p:
        return (isqrt(p) * (multiply(x1, y0) + multiply(x0, y1)) + multiply(x0, y0)) % p
    high, low = multiply(x1, y1), multiply(x0, y0)
    return (256 * high + 16 * (multiply(x1 + x0, y1 + y0) - high - low) + low) % p


def crt(residues: Sequence[int], moduli: Sequence[int]) -> int:
    """The integer from -P/2 to P/2 with these residues, by Garner's mixed radix digits."""
    whole, weight = 0, 1
    for r, p in zip(residues, moduli, strict=True):
        whole += weight * ((r - whole) * pow(weight, -1, p) % p)
        weight *= p
    return whole - weight if 2 * whole > weight else whole


def round_to_f64(x: int) -> int:
    """x rounded to 53 bits, to nearest even."""
    drop = max(abs(x).bit_length() - 53, 0)
    return round(Fraction(x, 1 << drop)) << drop


def modular_product(a: np.ndarray, b: np.ndarray, moduli: Sequence[int], scaling: str, fp8: bool, multiply: Multiply) -> np.ndarray:
    """Fractions [M, N]: the result before its last rounding, which divides by the powers of two."""
    limit = (prod(moduli) - 1) // 2
    if scaling == "norm":
        e_a, e_b = norm_exponents(a, limit), norm_exponents(b.T, limit)
    else:
        e_a, e_b = product_exponents(a, b, limit, multiply)
    x, y = scaled_integers(a, e_a), scaled_integers(b.T, e_b)
    products = []
    for p in moduli:
        left, right = (np.array([[residue(v, p) for v in row] for row in m]) for m in (x, y))
        products.append(residue_product(left, right.T, p, fp8, multiply))
    result = np.empty((len(a), b.shape[1]), object)
    for i, j in np.ndindex(*result.shape):
        whole = round_to_f64(crt([int(c[i, j]) for c in products], moduli))
        result[i, j] = Fraction(whole) / Fraction(2) ** (e_a[i] + e_b[j])
    return result
