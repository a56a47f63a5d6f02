"""What `explain` is given, as plain codes: a row of A, a column of B, C, block scales, metadata."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.arithmetic.model import Model
from tcemu.explanation.exact import NAN, Value, decode, encode, infinity
from tcemu.formats import F64, ROUNDINGS, Format
from tcemu.isa.catalog import section
from tcemu.isa.instructions import Instruction

DIRECTIONS = ROUNDINGS[:-1]  # stochastic rounding is left out


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
    if rounding not in DIRECTIONS:
        raise ValueError(f"rounding={rounding!r}: want one of {', '.join(DIRECTIONS)}")
    codes, inexact = [], False
    for v in given:
        if isinstance(v, np.floating) or (hasattr(v, "dtype") and jnp.issubdtype(v.dtype, jnp.floating)):
            v = float(v)
        if not isinstance(v, int | float | Fraction):
            raise TypeError(f"{name}: got {v!r}; wanted {wanted}")
        value, negative = number(v)
        code = (
            int(np.float64(v).view(np.uint64))
            if fmt == F64 and isinstance(v, float)
            else encode(fmt, value, rounding, negative_zero=negative)
        )
        inexact |= decode(fmt, code).value != value
        codes.append(code)
    return tuple(codes), inexact


def number(v: int | float | Fraction) -> tuple[Value, bool]:
    """A Python number as an exact value, and whether it is negative, which -0.0 is too."""
    if isinstance(v, float) and not np.isfinite(v):
        return (NAN if np.isnan(v) else infinity(v < 0)), v < 0
    return Fraction(v), v < 0 or str(v) == "-0.0"


def metadata(op: Instruction, e: Any, count: int) -> list[int]:
    """The 4-bit metadata fields of one row."""
    fields = np.asarray(e)
    if not np.issubdtype(fields.dtype, np.integer) or fields.shape != (count,) or ((fields < 0) | (fields > 15)).any():
        raise ValueError(
            f"e: got {e!r}; wanted {count} metadata fields from 0 to 15, one for {op.chunk} elements along K. PTX ISA {section(op)}"
        )
    return fields.tolist()


def concrete(model: Model) -> Model:
    """The model with plain numbers in place of arrays. Raises TypeError where they are traced."""
    changes = {}
    for name in ("terms", "fraction_bits", "floor", "result_bits", "rounding", "alignment"):
        value = getattr(model, name)
        if value is not None and not isinstance(value, int | str):
            try:
                changes[name] = int(value)
            except TypeError as error:
                raise TypeError(f"model: its {name} is traced; explain wants plain numbers, so call it outside jit and vmap") from error
    for name in changes.keys() & {"rounding", "alignment"}:
        changes[name] = ROUNDINGS[changes[name]]
    return model.replace(**changes) if changes else model
