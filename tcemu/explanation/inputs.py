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


def as_codes(op: Instruction, name: str, fmt: Format, given: Any, rounding: str, *, raw: bool) -> tuple[tuple[int, ...], bool]:
    """The codes of a vector (or of one element), and whether they are of numbers, of which some were rounded.

    given: numbers, as ints, floats, Fractions or arrays of any real dtype; or, if `raw`, codes, as ints or integer arrays (f64: also
    uint32[..., 2], low word first).
    """
    if rounding not in DIRECTIONS:
        raise ValueError(f"rounding={rounding!r}: want one of {', '.join(DIRECTIONS)}")
    wanted = f"raw codes of {fmt} (ints, or an integer array)" if raw else "numbers (ints, floats, Fractions, or an array of them)"
    wanted += f", for {op}; codes={not raw} is for {'numbers' if raw else 'raw codes'}"
    items = _items(name, fmt, given, wanted, raw)
    if raw:
        return tuple(_code(name, fmt, v, wanted) for v in items), False
    return _rounded(name, fmt, items, rounding, wanted)


def _items(name: str, fmt: Format, given: Any, wanted: str, raw: bool) -> list[Any]:
    """One Python value for each element; what each may be is looked at where it is used."""
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        given = [_items(name, fmt, v, wanted, raw)[0] if _is_array(v) and v.ndim == 0 else v for v in given]
        if not any(_is_array(v) and v.ndim for v in given):
            return given
        given = np.asarray(given)
    if not _is_array(given):
        return [given]
    array = np.asarray(given)
    words = fmt.words if raw and array.dtype == np.uint32 else 1
    if array.ndim > words or (words == 2 and array.shape[-1:] != (2,)):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}; wanted one row or column, {wanted}")
    if words == 2:
        return [low | high << 32 for low, high in array.reshape(-1, 2).tolist()]
    if not _is_plain(array):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; wanted {wanted}")
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 8:
        array = array.astype(np.float64)
    return array.reshape(-1).tolist()  # of longdouble, NumPy's own scalars


def _is_array(v: Any) -> bool:
    return isinstance(v, np.ndarray | np.generic | jax.Array)


def _is_plain(array: np.ndarray) -> bool:
    """Real numbers or booleans."""
    return array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)


def _code(name: str, fmt: Format, code: Any, wanted: str) -> int:
    if not isinstance(code, int):
        raise TypeError(f"{name}: got {code!r}; wanted {wanted}")
    held = 8 * fmt.dtype.itemsize * fmt.words
    if not 0 <= code < 1 << held:
        what = code if abs(code) < 1 << 64 else "an integer of more than 64 bits"
        raise ValueError(f"{name}: {what} is no code of {fmt}, which is from 0 to {(1 << held) - 1:#x}; wanted {wanted}")
    return code & (1 << fmt.bits) - 1


def _rounded(name: str, fmt: Format, given: Sequence[Any], rounding: str, wanted: str) -> tuple[tuple[int, ...], bool]:
    codes, inexact = [], False
    for v in given:
        if isinstance(v, np.floating) and not isinstance(v, float):
            v = Fraction(*v.as_integer_ratio()) if np.isfinite(v) and v else float(v)
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
