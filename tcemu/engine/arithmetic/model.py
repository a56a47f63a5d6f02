"""The arithmetic of an instruction as a value: `Model`.

LIMITS and STATIC_FIELDS state the values that a field may have. A known value outside the limits raises where the Model is made. A traced
value outside its limits makes every result NaN, and raises in checked mode (see `clip_to_limits`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from tcemu.engine.formats.number_formats import F16, F32, F64, FORMATS, S32, Format
from tcemu.engine.formats.rounding import ROUNDINGS, Rounding, truncates

MAX_FRACTION_BITS = 40  # a wide term is two 24-bit parts, and 128 of the upper ones still fit an s32 (see `dot_add`)
PRODUCT_BITS = 24  # bits of a product's significand in a fused step, which an f32 holds exactly (see `fused_dot_add`)
OUT_OF_RANGE = 1 << 30  # outside the limits of every field, and an int32
ROUNDING_MODES = ROUNDINGS[:-1]  # rounding modes of steps and alignment: all but the stochastic one
STEP_KINDS = ("pairwise", "joined", "complement", "floored")  # kinds of step that are neither fused nor one multiply-add: see `Model`
DEALINGS = ("pairs", "single", "reversed", "fours")
DEALING_WIDTHS = {"pairs": 2, "single": 1, "reversed": 1, "fours": 4}  # products that a group takes in turn
TO_ODD = "RO"  # rounding to odd, which pairwise steps may have besides ROUNDING_MODES
FLUSHES = ("signed", "positive")
RARE_FIELDS = ("dealing", "step_kind", "flush", "nan", "clamp_step")  # fields that `repr` shows only where they are set

# the fields that may be traced: their least and greatest value; those that are roundings, as indices into MODES
LIMITS: dict[str, tuple[int, int]] = {
    "terms": (1, 1 << 16),
    "fraction_bits": (1, MAX_FRACTION_BITS),
    "floor": (-1024, 512),  # beyond every exponent that a term of a fused step has
    "result_bits": (1, F64.mantissa_bits),  # and no more than the result has
    "rounding": (0, len(ROUNDING_MODES) - 1),
    "alignment": (0, len(ROUNDING_MODES) - 1),
}
OPTIONAL_FIELDS = ("fraction_bits", "result_bits")  # fields that may be None
ROUNDING_FIELDS = ("rounding", "alignment")  # fields that may be words
EXPECTED = {  # how messages say what they may be
    "terms": "an integer from {} to {}",
    "fraction_bits": "an integer from {} to {}, or None for exact",
    "floor": "an integer from {} to {}",
    "result_bits": "an integer from {} to {}, or None for all",
    "rounding": f"one of {', '.join(ROUNDING_MODES)}, or {TO_ODD} in pairwise steps",
    "alignment": f"one of {', '.join(ROUNDING_MODES)}",
}
HINTS = {"fraction_bits": "; tcemu.study.surrogate takes a real number of bits, with gradients"}  # said besides of what is no integer


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# the fields that must be known before tracing: which values they may have, and how that is said
STATIC_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "result": (lambda v: isinstance(v, Format) and v in (F16, F32, F64, S32), "f16, f32, f64 or s32, of tcemu.formats"),
    "multiplicand": (lambda v: v is None or (isinstance(v, Format) and not v.is_integer), "a float format of tcemu.formats, or None"),
    "groups": (_is_count, "a number of groups, at least 1"),
    "chain": (lambda v: v is None or v == "k" or _is_count(v), 'a number of products, "k" for those of one instruction, or None'),
    "together": (lambda v: isinstance(v, bool), "True or False"),
    "summed": (lambda v: v is None or _is_count(v), "a number of products, or None"),
    "from_zero": (lambda v: isinstance(v, bool), "True or False"),
    "dealing": (lambda v: v in DEALINGS, f"one of {', '.join(DEALINGS)}"),
    "step_kind": (lambda v: v is None or v in STEP_KINDS, f"one of {', '.join(STEP_KINDS)}, or None"),
    "flush": (lambda v: v is None or v in FLUSHES, f"one of {', '.join(FLUSHES)}, or None"),
    "nan": (lambda v: v is None or (isinstance(v, int) and 0 <= v < 1 << 32), "a code of 32 bits, or None for the canonical NaN"),
    "clamp_step": (lambda v: v is None or _is_count(v), "a number of products, or None for those of one instruction"),
}


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, repr=False)
class Model:
    """The arithmetic of an instruction, as a value: D = A·B + C by steps along K.

    A step adds `terms` products and the running value in one fused sum and rounds it to `result`. With `fraction_bits=None` the sum
    is exact: with one product a step is an IEEE fused multiply-add, and with several, whose results are f32, all of them and the running
    value are added exactly and rounded once. `step_kind` names another kind of step, which units of other makers have:

    - "pairwise": each product is rounded; the products are added in pairs, and these sums in pairs, each sum rounded; the total is added to
      the running value and rounded. The rounding may be "RO", to odd: an inexact result, rounded toward zero, gets an odd last bit.
    - "joined": the products alone are aligned and truncated as in a fused step. Their sum then joins the running value: both are rounded
      down, the running value to `fraction_bits`, the sum to 32 bits below the larger exponent; the total is rounded down to 31 bits and by
      `rounding` to the result. With `groups`, each group is aligned by itself, the groups are joined rounded down, and a running value more
      than `fraction_bits` + 1 below is dropped.
    - "complement": as a fused step, with the running value aligned by an exponent two below its own. A term whose sign is not the running
      value's is negated by flipping its bits, so that it lies one unit of the last place further from zero, as a zero does too. Subnormals
      of 8-bit exponents, in A, B, C and the result, become zeros. The result is rounded with no bound on the exponent.
    - "floored": each pair of products is aligned to its own max exponent, rounded down to `fraction_bits` and added. These sums and the
      running value are then rounded down to one unit, `fraction_bits` below the max exponent of the products, or `fraction_bits` + 2 below
      the leading bit of the running value if that is larger; a running value below the unit is dropped. Their sum is rounded once.

    The aligned kinds stay apart because they share no rule but the alignment: who is aligned with whom, the direction of the rounding and
    what becomes of the running value all differ, so that parameters of one kind would have to name each kind again.

    A step never reaches into the next instruction. Without `chain`, all steps follow each
    other, beginning at C. With `chain`, every chain of products starts from nothing, and its sum is added to C, rounded RN.

    fraction_bits, floor, result_bits, terms, rounding and alignment may be integer arrays, so that `jax.vmap` sweeps them in one compiled
    program (rounding and alignment as indices into `formats.ROUNDINGS`). As a pytree a model has just its arrays as leaves. Traced values
    outside the limits make all results NaN; in `tcemu.checked` functions they raise UndefinedBehaviour. Each new combination of values that
    are not arrays is compiled anew, a second or more, and JAX keeps the program until `jax.clear_caches()`. Arrays of one shape share one
    program, whatever their values.

    Raises:
        ValueError: A value is outside its limits, or fields exclude each other.
    """

    result: Format  # F32, F16 or F64, of every step; S32 for integers, which are exact and use no other field but clamp_step
    terms: int | Array = 16  # products in one step
    fraction_bits: int | Array | None = 25  # kept below the unit of the largest exponent in a step; None: exact
    floor: int | Array = -133  # the least exponent that a step aligns to
    rounding: Rounding = "RZ"  # rounding of a step: "RN", "RZ", "RM" or "RP"; "RO" in pairwise steps
    result_bits: int | Array | None = None  # fraction bits that a step's result keeps; None: all of `result`
    multiplicand: Format | None = None  # A and B are converted to it first, exactly; exact steps convert them to `result` by themselves
    groups: int = 1  # groups to which an instruction's products are dealt out in pairs, and which are then reduced one after the other
    chain: int | str | None = None  # products in a chain; "k": those of one instruction
    together: bool = False  # the chains of one instruction are added to each other, and their sum to C
    summed: int | None = None  # products that are first added exactly, then scaled and aligned as one term (block scaling of 4-bit types)
    alignment: Rounding = "RZ"  # rounding of an aligned term: "RZ" truncates, as every known unit does; "RN", "RM", "RP" are what-if
    from_zero: bool = False  # an exact chain starts from +0, so that products that are all -0 sum to +0; else from its first product
    dealing: str = "pairs"  # products go to the groups in "pairs", "fours", "single" (one by one), or "reversed" (one by one, last first)
    step_kind: str | None = None  # one of STEP_KINDS; None: fused steps or multiply-adds, as fraction_bits says
    flush: str | None = None  # subnormal operands and results become zero: operands "signed" zeros or "positive" ones; None: they are kept
    nan: int | None = None  # code of every NaN that an f32 result has; None: the canonical one
    clamp_step: int | None = None  # products after each of which .satfinite clamps an integer sum; None: those of one instruction

    def __repr__(self) -> str:
        """RARE_FIELDS are shown only where they are set."""
        hidden = {f.name for f in fields(self) if f.name in RARE_FIELDS and getattr(self, f.name) == f.default}
        return f"Model({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self) if f.name not in hidden)})"

    def __post_init__(self) -> None:
        for name, (allowed, wanted) in STATIC_FIELDS.items():
            value = getattr(self, name)
            if isinstance(value, np.integer | np.bool_):
                object.__setattr__(self, name, value := value.item())
            if isinstance(value, jax.Array):
                raise ValueError(f"Model({name}=...): {name} must be known before tracing: {wanted}")
            if not allowed(value):
                self._refuse(name, wanted)
        for name in LIMITS:
            object.__setattr__(self, name, self._validated(name, getattr(self, name)))
        self._check_together()

    def _refuse(self, field: str, wanted: str) -> None:
        raise ValueError(f"Model({field}={getattr(self, field)!r}): {field} must be {wanted}")

    def _validated(self, name: str, value: Any) -> Any:
        """The value of a field of LIMITS, arrays as int32; or an error that says what it may be."""
        if (value is None and name in OPTIONAL_FIELDS) or (name in ROUNDING_FIELDS and isinstance(value, str) and value in ROUNDING_MODES):
            return value
        if isinstance(value, Tracer):
            if not _is_integer_valued(value):
                raise ValueError(f"Model({name}=...): got traced {value.dtype}; {name} must be {self._expected(name, value)}")
            if value.dtype.itemsize >= 4 and value.dtype != jnp.int32:  # what does not fit an int32 must not wrap into the limits
                info = jnp.iinfo(value.dtype)
                value = jnp.clip(value, max(info.min, -OUT_OF_RANGE), min(info.max, OUT_OF_RANGE))
            return value.astype(jnp.int32)
        if name == "rounding" and isinstance(value, str) and value == TO_ODD and self.step_kind == "pairwise":
            return value
        least, greatest = self.limits(name)
        if not _is_integer_valued(value) or ((np.asarray(value) < least) | (np.asarray(value) > greatest)).any():
            self._refuse(name, self._expected(name, value))
        if isinstance(value, int):
            return ROUNDING_MODES[value] if name in ROUNDING_FIELDS else value
        return jnp.asarray(value, jnp.int32)

    def _expected(self, name: str, value: Any) -> str:
        """Describes the values that a field of LIMITS may have, for a message about this value."""
        wanted = EXPECTED[name].format(*self.limits(name))
        if isinstance(value, int | np.integer):
            wanted = wanted.removeprefix("an integer ")
        return wanted if _is_integer_valued(value) else wanted + HINTS.get(name, "")

    def limits(self, name: str) -> tuple[int, int]:
        """Returns the least and the greatest value of a field that may be traced."""
        least, greatest = LIMITS[name]
        return least, min(greatest, self.result.mantissa_bits) if name == "result_bits" and self.result.mantissa_bits else greatest

    def _check_together(self) -> None:
        """Raises ValueError for fields that exclude each other."""
        exact = self.fraction_bits is None
        if self.clamp_step is not None and not self.result.is_integer:
            self._refuse("clamp_step", "None where the result is not s32")
        self._check_step_kind(exact)
        if exact and self.step_kind is None and not (isinstance(self.terms, int) and (self.terms == 1 or self.result == F32)):
            self._refuse("terms", "1 where fraction_bits is None and the result is not f32: an exact step is a fused multiply-add")
        if self.is_exact_sum and not isinstance(self.rounding, str):
            self._refuse("rounding", "known before tracing where fraction_bits is None and a step has several terms")
        if exact and not truncates(self.alignment):
            self._refuse("alignment", '"RZ" where fraction_bits is None: nothing is cut')
        if exact and self.result_bits is not None:
            self._refuse("result_bits", "None where fraction_bits is None: an exact step keeps all bits of its result")
        if exact and self.multiplicand is not None:
            self._refuse("multiplicand", "None where fraction_bits is None: exact steps convert A and B to the result's format")
        if not exact and self.result == F64:
            self._refuse("result", "f16 or f32 where there are fraction_bits: a result in f64 is a chain of fused multiply-adds")
        if self.together and self.chain is None:
            self._refuse("together", "False where there is no chain")
        if self.from_zero and (self.chain is None or not exact):
            self._refuse("from_zero", "False where there is no chain of exact steps; no other has a zero of its own")
        if self.summed is not None and isinstance(self.terms, int) and self.terms % self.summed:
            self._refuse("summed", f"None or a divisor of terms={self.terms}")
        if self.summed is not None and (exact or self.multiplicand is not None or self.groups != 1):
            self._refuse(
                "summed", "None where steps are exact, where A and B are converted first, or where products are dealt out in groups"
            )

    def _check_step_kind(self, exact: bool) -> None:
        """Raises ValueError where the fields of other makers' units exclude each other or `result`."""
        if (self.step_kind is not None or self.flush is not None or self.nan is not None) and self.result != F32:
            self._refuse("result", "f32 where step_kind, flush or nan are set")
        if self.step_kind is not None and not (isinstance(self.terms, int) and isinstance(self.rounding, str)):
            self._refuse("terms" if not isinstance(self.terms, int) else "rounding", "known before tracing where step_kind is set")
        aligned = self.step_kind in ("joined", "complement", "floored")
        if self.step_kind is not None and aligned == exact:
            wanted = "a number" if aligned else "None"
            self._refuse("fraction_bits", f'{wanted} where step_kind is "{self.step_kind}"')
        if self.step_kind in ("pairwise", "floored") and int(self.terms) & (int(self.terms) - 1):
            self._refuse("terms", f'a power of two where step_kind is "{self.step_kind}"')
        if self.step_kind == "floored" and (int(self.terms) < 2 or self.rounding != "RN"):
            self._refuse("step_kind", 'None with other roundings than "RN" or with single terms')
        if self.flush is not None and (not exact or self.is_exact_sum):
            self._refuse("flush", "None where a step is not made of multiply-adds, or of products and sums rounded one by one")
        fused_only = self.multiplicand, self.result_bits, self.summed, self.chain
        most = {"complement": 26, "floored": 24}.get(self.step_kind or "", 30)
        if aligned and (fused_only != (None,) * 4 or not isinstance(self.fraction_bits, int) or self.fraction_bits > most):
            self._refuse("step_kind", f"None with multiplicand, result_bits, summed, chain, or more than {most} fraction_bits")
        if self.step_kind == "complement" and (self.rounding != "RN" or self.terms != 2):
            self._refuse("step_kind", 'None with other roundings than "RN" or other terms than 2')

    @property
    def is_exact_sum(self) -> bool:
        """True if a step adds several products exactly."""
        return self.fraction_bits is None and self.step_kind is None and not (isinstance(self.terms, int) and self.terms == 1)

    def require_fraction_bits(self) -> int | Array:
        """Return the fraction bits.

        Raises:
            ValueError: The model's sums are exact.
        """
        if self.fraction_bits is None:
            raise ValueError(f"{self} keeps every bit; expected fraction_bits")
        return self.fraction_bits

    @property
    def common_format(self) -> Format | None:
        """The format to which A and B are converted before they are multiplied; None: they are not converted."""
        if self.result.is_integer or self.is_exact_sum:
            return None
        return self.result if self.fraction_bits is None else self.multiplicand

    def uses_only(self, *names: str) -> bool:
        """Returns whether all other fields have their defaults, for code that knows these fields and must reject the rest."""
        others = (f for f in fields(self) if f.name not in names)
        return all(type(value := getattr(self, f.name)) is type(f.default) and value == f.default for f in others)

    def replace(self, **changes: Any) -> "Model":
        """Return the model with some fields changed.

        Args:
            changes: New values by the names of fields.

        Raises:
            TypeError: A field is unknown.
            ValueError: As for a new model.
        """
        return replace(self, **changes)

    def tree_flatten(self) -> tuple[list, tuple]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        static = {name: v for name, v in values.items() if v is None or isinstance(v, int | str | Format)}
        arrays = [name for name in values if name not in static]
        return [values[name] for name in arrays], (tuple(arrays), tuple(static.items()))

    @classmethod
    def tree_unflatten(cls, aux: tuple, arrays: list) -> "Model":
        names, static = aux
        model = object.__new__(cls)  # what JAX puts in the leaves' places need not be numbers
        for name, value in (*static, *zip(names, arrays, strict=True)):
            object.__setattr__(model, name, value)
        return model


def _is_integer_valued(value: Any) -> bool:
    """Returns whether the value is an integer, or an array of integers, traced or not. Booleans are rejected."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer | np.ndarray | jax.Array):
        return False
    return jnp.issubdtype(value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype, jnp.integer)


def clip_to_limits(model: Model) -> tuple[Model, Array | None]:
    """Clips traced fields to their limits; returns the model, and bool: all were inside (None if no field is traced).

    Raises ValueError for a field that is an array of several values: `jax.vmap` gives each its own.
    """
    inside, cut = [], {}
    for name in LIMITS:
        value = getattr(model, name)
        if value is None or isinstance(value, int | str):
            continue
        if jnp.ndim(value):
            raise ValueError(
                f"Model({name}=...): got an array {list(jnp.shape(value))}; a field is one number, and jax.vmap sweeps several"
            )
        least, greatest = model.limits(name)
        cut[name] = jnp.clip(value, least, greatest)
        inside.append(cut[name] == value)
        if name == "terms" and model.summed is not None:
            inside.append(value % model.summed == 0)
    return (model.replace(**cut), jnp.all(jnp.stack(inside))) if inside else (model, None)


# ---- models changed by text


FIELD_WORDS = {"chain": ("k",), "dealing": DEALINGS, "step_kind": STEP_KINDS, "flush": FLUSHES}  # words that are values of a field


class WhatIfField:
    """One field of `Model` as text: the values that its words stand for, and whether it may be any whole number."""

    def __init__(self, name: str, kind: Any) -> None:
        kinds = get_args(kind) or (kind,)
        self.name, self.is_number = name, int in kinds
        self.is_format = Format in kinds
        self.values: dict[str, Any] = {}
        if self.is_format:
            self.values |= FORMATS
        if kind == Rounding:
            self.values |= {word: word for word in (*ROUNDING_MODES, *((TO_ODD,) if name == "rounding" else ()))}
        else:
            self.values |= {word: word for word in FIELD_WORDS.get(name, ())}
        if bool in kinds:
            self.values |= {"True": True, "False": False}
        if type(None) in kinds:
            self.values["None"] = None

    def parse(self, word: str) -> Any:
        """Returns the value that a word stands for in this field. Raises ValueError."""
        if word in self.values:
            return self.values[word]
        if self.is_number and word.removeprefix("-").isdecimal():
            return int(word)
        raise ValueError(f"{self.name}: got {word!r}; expected {self.expected}")

    @property
    def expected(self) -> str:
        """The words that this field takes, as text."""
        allowed = [*(["a whole number"] if self.is_number else []), *self.values]
        return allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"


@cache
def what_if_fields() -> dict[str, WhatIfField]:
    """Every field of `Model` by its name, the formats last."""
    kinds = get_type_hints(Model)
    known = [WhatIfField(field.name, kinds[field.name]) for field in fields(Model)]
    return {field.name: field for field in sorted(known, key=lambda field: field.is_format)}


def what_if(model: Model, text: str) -> Model:
    """The model with the fields that stand in `text` changed.

    text: FIELD=VALUE[,FIELD=VALUE...], such as "fraction_bits=24,terms=8", "from_zero=False" or "multiplicand=f16". The fields are those of
    `Model`, the values are as Python writes them, formats by their names.
    Raises ValueError for an unknown field, for a value that the field does not take, and for a model that cannot be.
    """
    known, changes = what_if_fields(), {}
    for part in text.split(","):
        name, _, word = (piece.strip() for piece in part.partition("="))
        if not word:
            raise ValueError(f"{part!r} is no FIELD=VALUE; the fields are {', '.join(known)}")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ValueError(f"unknown field {name!r}{f', did you mean {near[0]!r}?' if near else ''}; the fields are {', '.join(known)}")
        changes[name] = known[name].parse(word)
    return model.replace(**changes)
