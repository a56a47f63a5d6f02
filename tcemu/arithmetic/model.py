"""The arithmetic of an instruction as a value: `Model`, and `Signature`, what an engine must know of the instruction besides.

What a field may be is said once, in LIMITS and FIXED. A field that may be traced is held to its limits in two ways. A value that is known
raises where the Model is made. A traced value outside its limits makes every result NaN, and raises in checked mode (see `within_limits`).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.formats import F16, F32, F64, ROUNDINGS, S32, Format, Rounding, cuts

MAX_FRACTION_BITS = 40  # a wide term is two 24-bit parts, and 128 of the upper ones still fit an s32 (see `dot_add`)
PRODUCT_BITS = 24  # of a product's significand in a fused step, which an f32 holds whole (see `dot_add`)
BEYOND = 1 << 30  # outside the limits of every field, and an int32
MODES = ROUNDINGS[:-1]  # of steps and alignment: all but the stochastic one

# the fields that may be traced: their least and greatest value; those that are roundings, as indices into MODES
LIMITS: dict[str, tuple[int, int]] = {
    "terms": (1, 1 << 16),
    "fraction_bits": (1, MAX_FRACTION_BITS),
    "floor": (-1024, 512),  # beyond every exponent that a term of a fused step has
    "result_bits": (1, F64.mantissa_bits),  # and no more than the result has
    "rounding": (0, len(MODES) - 1),
    "alignment": (0, len(MODES) - 1),
}
OPTIONAL = ("fraction_bits", "result_bits")  # which may be None
ROUNDED = ("rounding", "alignment")  # which may be words
WANTED = {  # how messages say what they may be
    "terms": "an integer from {} to {}",
    "fraction_bits": "an integer from {} to {}, or None for exact",
    "floor": "an integer from {} to {}",
    "result_bits": "an integer from {} to {}, or None for all",
    "rounding": f"one of {', '.join(MODES)}",
    "alignment": f"one of {', '.join(MODES)}",
}
ELSEWHERE = {"fraction_bits": "; tcemu.study.surrogate takes a real number of bits, with gradients"}  # said besides of what is no integer


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# the fields that must be known before tracing: which values they may have, and how that is said
FIXED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "result": (lambda v: isinstance(v, Format) and v in (F16, F32, F64, S32), "f16, f32, f64 or s32, of tcemu.formats"),
    "multiplicand": (lambda v: v is None or (isinstance(v, Format) and not v.is_integer), "a float format of tcemu.formats, or None"),
    "groups": (_count, "a number of groups, at least 1"),
    "chain": (lambda v: v is None or v == "k" or _count(v), 'a number of products, "k" for those of one instruction, or None'),
    "together": (lambda v: isinstance(v, bool), "True or False"),
    "summed": (lambda v: v is None or _count(v), "a number of products, or None"),
    "from_zero": (lambda v: isinstance(v, bool), "True or False"),
}


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Model:
    """The arithmetic of an instruction, as a value: D = A·B + C by steps along K.

    A step adds `terms` products and the running value in one fused sum and rounds it to `result`; with `fraction_bits=None` it is exact
    and has one product: an IEEE fused multiply-add. A step never reaches into the next instruction. Without `chain`, all steps follow each
    other, from C on. With it, every chain of products starts from nothing, and its outcome is added to C, rounded RN.

    fraction_bits, floor, result_bits, terms, rounding and alignment may be integer arrays, so that `jax.vmap` sweeps them in one compiled
    program (rounding and alignment as indices into `formats.ROUNDINGS`). As a pytree a model has just its arrays as leaves. Traced values
    outside the limits make all results NaN; in `tcemu.checked` functions they raise UndefinedBehaviour.
    Each new combination of values that are no arrays is compiled anew, a second or more, and JAX keeps the program until
    `jax.clear_caches()`. Arrays of one shape share one program, whatever their values.
    Raises ValueError for values outside the limits and for fields that exclude each other.
    """

    result: Format  # F32, F16 or F64, of every step; S32 for integers, which are exact and use no other field
    terms: int | Array = 16  # products in one step
    fraction_bits: int | Array | None = 25  # kept below the unit of the largest exponent in a step; None: exact
    floor: int | Array = -133  # the least exponent that a step aligns to
    rounding: Rounding = "RZ"  # of a step: "RN", "RZ", "RM" or "RP"
    result_bits: int | Array | None = None  # fraction bits that a step's result keeps; None: all of `result`
    multiplicand: Format | None = None  # A and B are converted to it first, exactly; exact steps convert them to `result` by themselves
    groups: int = 1  # an instruction's products are dealt out in pairs to so many groups, which are then walked one after the other
    chain: int | str | None = None  # products in a chain; "k": those of one instruction
    together: bool = False  # the chains of one instruction are added to each other, and their sum to C
    summed: int | None = None  # products that are first added exactly, then scaled and aligned as one term (block scaling of 4-bit types)
    alignment: Rounding = "RZ"  # of a term to the bits that are kept: "RZ" cuts it, as every known unit does; "RN", "RM", "RP" are what-if
    from_zero: bool = False  # an exact chain starts from +0, so that products that are all -0 sum to +0; else from its first product

    def __post_init__(self) -> None:
        for name, (allowed, wanted) in FIXED.items():
            value = getattr(self, name)
            if isinstance(value, np.integer | np.bool_):
                object.__setattr__(self, name, value := value.item())
            if isinstance(value, jax.Array):
                raise ValueError(f"Model({name}=...): {name} must be known before tracing: {wanted}")
            if not allowed(value):
                self._refuse(name, wanted)
        for name in LIMITS:
            object.__setattr__(self, name, self._within(name, getattr(self, name)))
        self._check_together()

    def _refuse(self, field: str, wanted: str) -> None:
        raise ValueError(f"Model({field}={getattr(self, field)!r}): {field} must be {wanted}")

    def _within(self, name: str, value: Any) -> Any:
        """The value of a field of LIMITS, arrays as int32; or an error that says what it may be."""
        if (value is None and name in OPTIONAL) or (name in ROUNDED and isinstance(value, str) and value in MODES):
            return value
        if isinstance(value, Tracer):
            if not _of_integers(value):
                raise ValueError(f"Model({name}=...): got traced {value.dtype}; {name} must be {self._wanted(name, value)}")
            if value.dtype.itemsize >= 4 and value.dtype != jnp.int32:  # what does not fit an int32 must not wrap into the limits
                info = jnp.iinfo(value.dtype)
                value = jnp.clip(value, max(info.min, -BEYOND), min(info.max, BEYOND))
            return value.astype(jnp.int32)
        least, greatest = self.limits(name)
        if not _of_integers(value) or ((np.asarray(value) < least) | (np.asarray(value) > greatest)).any():
            self._refuse(name, self._wanted(name, value))
        if isinstance(value, int):
            return MODES[value] if name in ROUNDED else value
        return jnp.asarray(value, jnp.int32)

    def _wanted(self, name: str, value: Any) -> str:
        """What a field of LIMITS may be, in words for who gave this value."""
        wanted = WANTED[name].format(*self.limits(name))
        if isinstance(value, int | np.integer):
            wanted = wanted.removeprefix("an integer ")
        return wanted if _of_integers(value) else wanted + ELSEWHERE.get(name, "")

    def limits(self, name: str) -> tuple[int, int]:
        """The least and the greatest value of a field that may be traced."""
        least, greatest = LIMITS[name]
        return least, min(greatest, self.result.mantissa_bits) if name == "result_bits" and self.result.mantissa_bits else greatest

    def _check_together(self) -> None:
        """The fields that exclude each other."""
        exact = self.fraction_bits is None
        if exact and not (isinstance(self.terms, int) and self.terms == 1):
            self._refuse("terms", "1 where fraction_bits is None: an exact step is a fused multiply-add")
        if exact and not cuts(self.alignment):
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

    @property
    def common(self) -> Format | None:
        """The format that A and B are converted to before they are multiplied; None: they stay as they are."""
        if self.result.is_integer:
            return None
        return self.result if self.fraction_bits is None else self.multiplicand

    def uses_only(self, *names: str) -> bool:
        """All other fields have their defaults: for code that knows these fields, and must refuse what it does not know."""
        others = (f for f in fields(self) if f.name not in names)
        return all(type(value := getattr(self, f.name)) is type(f.default) and value == f.default for f in others)

    def replace(self, **changes: Any) -> "Model":
        """The model with some fields changed. Raises TypeError for an unknown field."""
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


class Signature(NamedTuple):
    """What `program.multiply_add` must know of an instruction besides its model."""

    a: Format
    b: Format
    c: Format
    d: Format
    k: int  # products of one instruction
    rounding: str | None = None  # the instruction's own, in place of the model's (f64)
    clamp: bool = False  # .satfinite
    bit_op: str | None = None  # "xor" or "and", for b1
    scale: Format | None = None  # of the block scales
    scale_vec: int = 0  # block scales of one instruction, for a row of A or a column of B
    native: Any = None  # how a GPU's own instruction may compute it, `tcemu.native.products.Native`; None: it is emulated


Scales = tuple[ArrayLike, ArrayLike]


class Promotion(NamedTuple):
    """What happens to sums outside the instruction: a part of K begins at +0, and what it leaves is added to an f32 sum, rounded RN."""

    instructions: int  # of a part
    # None, or each part is multiplied first, by the f32 product of a scale of its rows and one of its columns: sum = fma(scale, part, sum).
    # How many rows of A, and how many columns of B, share one; None: all
    reach: tuple[int | None, int | None] | None


def _of_integers(value: Any) -> bool:
    """An integer, or an array of them, traced or not. A bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer | np.ndarray | jax.Array):
        return False
    return jnp.issubdtype(value.dtype if isinstance(value, jax.Array) else np.asarray(value).dtype, jnp.integer)


def within_limits(model: Model) -> tuple[Model, Array | None]:
    """The model with its traced fields cut to their limits, and whether none of them was outside: bool, or None if none is traced.

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
