"""What `explain` is given, as plain codes: a row of A, a column of B, C, block scales, metadata."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation.exact import NAN, Value, convert, decode, encode, infinity
from tcemu.explanation.steps import Product
from tcemu.formats import F64, Format
from tcemu.isa.catalog import section
from tcemu.isa.instructions import Instruction
from tcemu.sparsity import UNITS

ROUNDINGS = ("RN", "RZ", "RM", "RP")


def codes(op: Instruction, name: str, fmt: Format, given: Any, rounding: str = "RN") -> tuple[tuple[int, ...], bool]:
    """The codes of a vector (or of one element), and whether they are of numbers, of which some were rounded.

    given: raw codes, as Python ints or unsigned arrays (f64: also uint32[..., 2]), or numbers, as floats, Fractions or float arrays; a list
    with one number in it is one of numbers.
    """
    wanted = f"raw codes of {fmt} (ints, or an unsigned array) or numbers (floats), for {op}"
    if isinstance(given, np.ndarray | np.generic | jax.Array):
        return _of_array(name, fmt, np.asarray(given), rounding, wanted)
    items = list(given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else [given]
    items = [v.item() if isinstance(v, np.unsignedinteger) or (isinstance(v, np.ndarray | jax.Array) and v.ndim == 0) else v for v in items]
    if any(isinstance(v, np.ndarray | jax.Array) for v in items):
        return _of_array(name, fmt, np.asarray(items), rounding, wanted)
    if all(isinstance(v, int) for v in items):
        return tuple(_code(name, fmt, v, wanted) for v in items), False
    return _rounded(name, fmt, items, rounding, wanted)


def _of_array(name: str, fmt: Format, given: np.ndarray, rounding: str, wanted: str) -> tuple[tuple[int, ...], bool]:
    if jnp.issubdtype(given.dtype, jnp.floating):
        return _rounded(name, fmt, given.reshape(-1).astype(np.float64).tolist(), rounding, wanted)
    if given.dtype != np.bool_ and not jnp.issubdtype(given.dtype, jnp.unsignedinteger):
        raise TypeError(f"{name}: got {given.dtype}{list(given.shape)}, which may be codes or numbers; wanted {wanted}")
    words = fmt.words if given.dtype == np.uint32 else 1
    if given.ndim > words or (words == 2 and given.shape[-1:] != (2,)):
        raise ValueError(f"{name}: got {given.dtype}{list(given.shape)}; wanted one row or column, {wanted}")
    whole = given.reshape(-1, words).astype(np.uint64).tolist()
    return tuple(_code(name, fmt, sum(w << 32 * i for i, w in enumerate(v)), wanted) for v in whole), False


def _code(name: str, fmt: Format, code: int, wanted: str) -> int:
    held = 8 * fmt.dtype.itemsize * fmt.words
    if not 0 <= code < 1 << held:
        raise ValueError(f"{name}: {code} is no code of {fmt}, which is from 0 to {(1 << held) - 1:#x}; wanted {wanted}, as {float(code)}")
    return code & (1 << fmt.bits) - 1


def _rounded(name: str, fmt: Format, given: Sequence[Any], rounding: str, wanted: str) -> tuple[tuple[int, ...], bool]:
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r}: want one of {', '.join(ROUNDINGS)}")
    found, inexact = [], False
    for v in given:
        if isinstance(v, np.floating) or (hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating)):
            v = float(v)
        if not isinstance(v, int | float | Fraction):
            raise TypeError(f"{name}: got {v!r}; wanted {wanted}")
        value, negative = number(v)
        code = (
            int(np.float64(v).view(np.uint64))
            if fmt is F64 and isinstance(v, float)
            else encode(fmt, value, rounding, negative_zero=negative)
        )
        inexact |= decode(fmt, code).value != value
        found.append(code)
    return tuple(found), inexact


def number(v: int | float | Fraction) -> tuple[Value, bool]:
    """A Python number as an exact value, and whether it is negative, which -0.0 is too."""
    if isinstance(v, float) and not np.isfinite(v):
        return (NAN if np.isnan(v) else infinity(v < 0)), v < 0
    return Fraction(v), v < 0 or str(v) == "-0.0"


def met(op: Instruction, b: Sequence[int], fields: Sequence[int], clamped: bool) -> tuple[list[int], list[str]]:
    """The elements of B that a row of a sparse A meets, and where they stand; b: a dense column; fields: the row's metadata.

    By PTX ISA 9.7.14.6.1, and for fields that it leaves undefined as `sparsity.gather` says.
    """
    chunk, found, names = op.chunk, [], []
    for at, field in enumerate(fields):
        first, second = field & UNITS - 1, field >> 2 & UNITS - 1
        units = (min(first, 2), max(second, 1)) if clamped else (first, second)
        base = at * chunk
        if chunk < UNITS:  # a unit is half an element of 32 bits
            halves = [b[base + unit // 2] >> 16 * (unit % 2) & 0xFFFF for unit in units]
            found.append(halves[0] | halves[1] << 16)
            places = dict.fromkeys(base + unit // 2 for unit in units)
            names.append("k " + "+".join(map(str, places)))
            continue
        size = chunk // UNITS
        places = [base + size * unit + i for unit in units for i in range(size)]
        found += [b[place] for place in places]
        names += [f"k {place}" for place in places]
    return found, names


def metadata(op: Instruction, e: Any, count: int) -> list[int]:
    """The 4-bit metadata fields of one row."""
    fields = np.asarray(e)
    if not np.issubdtype(fields.dtype, np.integer) or fields.shape != (count,) or ((fields < 0) | (fields > 15)).any():
        raise ValueError(
            f"e: got {e!r}; wanted {count} metadata fields from 0 to 15, one for {op.chunk} elements along K. PTX ISA {section(op)}"
        )
    return fields.tolist()


def products(
    model: Model,
    signature: Signature,
    a: Sequence[int],
    b: Sequence[int],
    names: Sequence[str],
    scales: tuple[Sequence[int], Sequence[int]] | None,
) -> list[Product]:
    """The products of a row and a column, A and B converted as the model says. scales: one for each `k // scale_vec` of them."""
    common, found = model.common, []
    block = signature.k // signature.scale_vec if scales else 1
    for index, (x, y, name) in enumerate(zip(a, b, names, strict=True)):
        meant = [
            decode(fmt, code) if common is None else decode(common, convert(code, fmt, common))
            for code, fmt in ((x, signature.a), (y, signature.b))
        ]
        own = None if scales is None else (scales[0][index // block], scales[1][index // block])
        decoded = None if own is None or signature.scale is None else (decode(signature.scale, own[0]), decode(signature.scale, own[1]))
        found.append(Product(index, name, x, y, meant[0], meant[1], decoded, own))
    return found
