"""Assertions for tests of kernels: equal bits, or a product of matrices within the error that its arithmetic can have.

The tolerance of `assert_product_close` follows from the formats, the model of the instruction and the given operands. It is never a choice,
and operands that could not tell a wrong kernel from a right one are rejected.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, array_format, to_float
from tcemu.engine.formats.number_formats import F32, S32, Format
from tcemu.engine.isa.families import Instruction
from tcemu.operations.products.gemm import gemm
from tcemu.operations.products.matmul import matmul, pruned_operand
from tcemu.operations.products.recipes import Recipe, as_recipe
from tcemu.operations.quantize.quantizer import exact_factors, exact_values, quantize

SIGMAS = 6.0  # how far a sum of truncations with random signs may lie from its mean, in standard deviations
PARTIAL_SUM_SIGMAS = 3.0  # how far a partial sum in another order may exceed those in ascending order, in root sums of squares
PREFIXES = 16  # partial sums in ascending order that are looked at
TELLING_SHARE = 0.75  # of the elements that must be larger than their tolerance
SHOWN = 3  # elements that a message lists


def assert_bits_equal(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless two arrays have the same shape, dtype and bits; signed zeros and NaN payloads count.

    Args:
        actual: NumPy or JAX array, or torch tensor on the CPU.
        expected: The same.
    """
    left, right = _as_numpy(actual), _as_numpy(expected)
    if left.shape != right.shape or left.dtype != right.dtype:
        raise AssertionError(f"got {left.dtype} {list(left.shape)}; expected {right.dtype} {list(right.shape)}")
    if not left.size:
        return
    size = left.dtype.itemsize
    words = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(-1, size) for each in (left, right)]
    differing = np.flatnonzero((words[0] != words[1]).any(-1))
    if len(differing):
        lines = [f"{len(differing):,} of {left.size:,} elements have other bits"]
        for position in differing[:SHOWN]:
            index = tuple(map(int, np.unravel_index(position, left.shape)))
            texts = [f"{each[index]} (0x{word[position].tobytes()[::-1].hex()})" for each, word in zip((left, right), words, strict=True)]
            lines.append(f"  {list(index)}: got {texts[0]}, expected {texts[1]}")
        raise AssertionError("\n".join(lines))


def assert_product_close(
    actual: Any,
    a: Any,
    b: Any,
    c: Any = None,
    *,
    op: str | Instruction | None = None,
    target: str | None = None,
    recipe: Recipe | str | None = None,
    scale: Any = None,
    order: str = "unknown",
    rounding: str = "RN",
) -> None:
    """Raise AssertionError unless a kernel's result is scale·(A·B) + C within the error of its arithmetic, or in its bits.

    With order="unknown" the kernel may add the products in any order, in any number of parts. The tolerance of an element is computed from
    the instruction's truncations and roundings at the size of the partial sums, and from the rounding to the dtype of `actual`. With
    order="ascending", and for integers, the bits are promised, and no other result passes.

    Args:
        actual: The kernel's result [..., M, N]: NumPy or JAX array, or torch tensor on the CPU.
        a: The kernel's A [..., M, K]. Values are rounded to the format of the instruction, or quantised as the recipe says.
        b: The kernel's B [..., K, N].
        c: What is added to the product, which broadcasts to [..., M, N]; None: nothing.
        op: The instruction, as a spelling or a short name such as "f16"; with `target`.
        target: The GPU, as "H100"; also for a recipe that is given by its name.
        recipe: A `Recipe` or its name, in place of `op`.
        scale: What the kernel multiplies the product by, which broadcasts to [..., M, N], such as scale_a * scale_b; None: 1. A recipe's
            own scales are computed from a and b.
        order: "unknown" or "ascending".
        rounding: How the kernel converts a and b to the instruction's formats, with `op`: "RN", or "RZ" for f32 operands that it passes to
            a tf32 instruction as they are, as Triton does.

    Raises:
        AssertionError: The result is wrong.
        ValueError: The operands cannot tell a wrong kernel from a right one, because a quarter of the elements or more are smaller than
            their tolerance: a kernel that writes zeros would nearly pass.
    """
    if order not in ("unknown", "ascending"):
        raise ValueError(f'order: got {order!r}; expected "unknown" or "ascending"')
    product = _product(op, target, recipe, rounding)
    result, a, b = _as_numpy(actual), _as_numpy(a), _as_numpy(b)
    c, scale = (None if each is None else _as_numpy(each) for each in (c, scale))
    if order == "ascending" or (product.model.result == S32 and scale is None):
        return assert_bits_equal(result, product.bits(a, b, c, scale, result.dtype))
    left, right = product.operands(a, b)
    with np.errstate(invalid="ignore", over="ignore"):  # Inf and NaN take their way
        exact, size = _exact_and_tolerance(product, left, right)
        return _assert_close(result, exact, size, c, scale)


def _assert_close(result: np.ndarray, exact: np.ndarray, size: np.ndarray, c: np.ndarray | None, scale: np.ndarray | None) -> None:
    """Apply scale and C to the product and its tolerance, and compare."""
    for factor, quantity in ((scale, "scale"), (c, "c")):
        if factor is not None and np.broadcast_shapes(factor.shape, exact.shape) != exact.shape:
            raise ValueError(f"{quantity}: got shape {list(factor.shape)}; expected one that broadcasts to {list(exact.shape)}")
    steps = 4 * 2.0**-F32.mantissa_bits  # of the multiplications by scales and of the last addition
    if scale is not None:
        exact, size = exact * scale.astype(np.float64), size * np.abs(scale.astype(np.float64))
    size = size + steps * np.abs(exact)
    if c is not None:
        exact = exact + c.astype(np.float64)
        size = size + steps * (np.abs(c.astype(np.float64)) + np.abs(exact))
    _compare(result, exact, size + _half_ulp(np.abs(exact) + size, array_format(result.dtype)))


@dataclass(frozen=True)
class _Product:
    """The arithmetic of a product of matrices."""

    model: Model
    products: int  # of one instruction, along K
    recipe: Recipe | None = None
    op: Any = None
    target: str = ""
    rounding: str = "RN"

    def bits(self, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, scale: np.ndarray | None, dtype: np.dtype) -> np.ndarray:
        """Return the result in ascending order of K."""
        if scale is not None:
            raise ValueError('scale: bits are promised for the product alone; leave the scale out, or say order="unknown"')
        if self.recipe is not None:
            return np.asarray(matmul(a, b, c, recipe=self.recipe, dtype=dtype))
        total = np.asarray(gemm(a, b, c, op=self.op, target=self.target, rounding=self.rounding))
        return total if total.dtype == dtype or total.dtype.kind == "i" else total.astype(dtype)

    def operands(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values that the instruction multiplies, float64 [..., M, K] and [..., K, N], scales included."""
        if self.recipe is None:
            return _round_values(a, self.op.a, self.rounding), _round_values(b, self.op.b, self.rounding)
        schemes = self.recipe.schemes
        rows = (pruned_operand(self.recipe, jnp.asarray(a)), np.swapaxes(b, -1, -2))
        left, right = (
            exact_values(exact_factors(scheme, quantize(scheme, jnp.asarray(each)))) for scheme, each in zip(schemes, rows, strict=True)
        )
        return left, np.swapaxes(right, -1, -2)

    @property
    def promoted_products(self) -> int | None:
        """Products between two promotions; None without promotion."""
        promote = None if self.recipe is None else self.recipe.promote
        return None if promote is None else int(np.max(np.asarray(promote))) * self.products


def _product(op: str | Instruction | None, target: str | None, recipe: Recipe | str | None, rounding: str) -> _Product:
    if (op is None) == (recipe is None):
        raise ValueError("op, recipe: expected one of the two")
    if recipe is not None and rounding != "RN":
        raise ValueError(f"rounding: got {rounding!r}; a recipe says itself how it rounds")
    if recipe is not None:
        recipe = as_recipe(recipe, target)
        return _Product(recipe.arithmetic, recipe.op.k, recipe=recipe)
    if op is None or target is None:
        raise ValueError("target: an instruction needs its GPU, as target='H100'")
    arithmetic = resolve_arithmetic(op, target)
    return _Product(arithmetic.model, arithmetic.op.k, op=arithmetic.op, target=arithmetic.target, rounding=rounding)


def _exact_and_tolerance(product: _Product, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return A·B and a bound of its error in any order of the products, float64 [..., M, N].

    A step truncates each term below 2^-F of the largest one, which no partial sum P exceeds: K terms lose less than K·2^-F·P, and as
    truncations of both signs, little more than their mean and six standard deviations. It rounds its sum once, at P; the accumulator is
    one more term of each step.
    """
    model, k = product.model, a.shape[-1]
    if model.result == S32:
        exact = a @ b  # integers below 2^53
        return exact, np.zeros_like(exact)
    terms = 1 if model.fraction_bits is None else int(np.min(np.asarray(model.terms)))
    result_bits = model.result.mantissa_bits if model.result_bits is None else int(np.min(np.asarray(model.result_bits)))
    unit = 0.0 if model.fraction_bits is None else 2.0 ** -int(np.min(np.asarray(model.fraction_bits)))
    floor = 2.0 ** max(model.result.min_exponent, -1000)
    part = product.promoted_products or max(k, 1)
    exact = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))
    tolerance, largest, roundoff = np.zeros_like(exact), np.zeros_like(exact), np.zeros_like(exact)
    for start in range(0, k, part):
        left, right = a[..., start : start + part], b[..., start : start + part, :]
        length, total, low, high = left.shape[-1], np.zeros_like(exact), np.zeros_like(exact), np.zeros_like(exact)
        width = -(-length // PREFIXES)
        for first in range(0, length, width):
            total = total + left[..., first : first + width] @ right[..., first : first + width, :]
            low, high = np.minimum(low, total), np.maximum(high, total)
        magnitudes = np.abs(left) @ np.abs(right)
        spread = PARTIAL_SUM_SIGMAS * np.sqrt(left**2 @ right**2)
        partial = np.minimum(magnitudes, high - low + spread) + floor
        steps = -(-length // terms) + 2
        drift = np.abs(np.sign(left) @ np.sign(right)) / 2 + SIGMAS * np.sqrt(length) * (1 / 2 + 1 / np.sqrt(12))
        truncated = unit * (np.minimum(drift, length) + steps)
        tolerance += partial * (truncated + steps * (2.0**-result_bits + 2.0**-F32.mantissa_bits))
        exact, largest = exact + total, largest + partial
        roundoff += 2.0**-52 * (length + 1) * magnitudes
    parts = -(-k // part) if product.promoted_products else 0
    return exact, tolerance + parts * 2 * 2.0**-F32.mantissa_bits * largest + roundoff


def _half_ulp(magnitude: np.ndarray, fmt: Format) -> np.ndarray:
    """Return half the distance of two neighbours of a format at a magnitude."""
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.min_exponent)
    return np.ldexp(0.5, exponent - fmt.mantissa_bits)


def _compare(result: np.ndarray, exact: np.ndarray, tolerance: np.ndarray) -> None:
    if result.shape != exact.shape:
        raise AssertionError(f"got shape {list(result.shape)}; the product has {list(exact.shape)}")
    finite = np.isfinite(exact)
    telling = (np.abs(exact) > tolerance)[finite]
    if telling.size and telling.mean() <= TELLING_SHARE:
        raise ValueError(
            f"these operands cannot tell a wrong kernel from a right one: {1 - telling.mean():.0%} of the elements are smaller than their "
            "tolerance, so that zeros would pass there; take a smaller K, operands with less cancellation or "
            f"a wider format than {result.dtype}"
        )
    values = result.astype(np.float64)
    largest = float(ml_dtypes.finfo(result.dtype).max)
    overflow = np.isinf(values) & (np.sign(values) == np.sign(exact)) & (np.abs(exact) + tolerance >= largest)
    with np.errstate(invalid="ignore"):
        same = (np.isnan(exact) & np.isnan(values)) | (exact == values)
        good = np.where(finite, (np.abs(values - exact) <= tolerance) | overflow, same)
    if good.all():
        return
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.where(good, 0, np.where(np.isfinite(values), np.abs(values - exact) / tolerance, np.inf))
    lines = [f"{(~good).sum():,} of {good.size:,} elements are further from the exact product than this arithmetic can be"]
    for position in np.argsort(-np.nan_to_num(excess, nan=np.inf), axis=None, kind="stable")[:SHOWN]:
        index = np.unravel_index(position, good.shape)
        if not good[index]:
            place = list(map(int, index))
            lines.append(f"  {place}: got {values[index]:.9g}, exact {exact[index]:.9g}, tolerance {tolerance[index]:.2g}")
    raise AssertionError("\n".join(lines))


def _round_values(x: np.ndarray, fmt: Format, rounding: str) -> np.ndarray:
    """Return the values of x rounded to a format, float64."""
    source, codes = array_codes(x)
    if source == fmt:
        return x.astype(np.float64)
    return np.asarray(to_float(F32, convert(fmt, F32, convert(source, fmt, codes, rounding)))).astype(np.float64)


def _as_numpy(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().contiguous()
        names = {"bfloat16": ml_dtypes.bfloat16, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
        name = str(value.dtype).removeprefix("torch.")
        if name in names:
            import torch

            return value.view(torch.uint8 if value.element_size() == 1 else torch.int16).numpy().view(names[name])
        return value.numpy()
    return np.asarray(value)
