"""The arithmetic of an instruction as a value: `Model`, and `Signature`, what an engine must know of the instruction besides."""

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.typing import ArrayLike

from tcemu.formats import F16, F32, F64, ROUNDINGS, S32, Format, Rounding, cuts

MAX_FRACTION_BITS = 40  # a wide term is two 24-bit parts, and 128 of the upper ones still fit an s32 (see `dot_add`)
MAX_TERMS = 32  # of a step whose size is traced; the largest step of any NVIDIA unit that aligns each product


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Model:
    """The arithmetic of an instruction, as a value: D = A·B + C by steps along K.

    A step adds `terms` products and the running value in one fused sum and rounds it to `result`; with `fraction_bits=None` it is exact
    and has one product: an IEEE fused multiply-add. A step never reaches into the next instruction. Without `chain`, all steps follow each
    other, from C on. With it, every chain of products starts from nothing, and its outcome is added to C, rounded RN.

    fraction_bits, floor, result_bits, terms, rounding and alignment may be arrays, so that `jax.vmap` sweeps them in one compiled program
    (terms then up to MAX_TERMS, rounding and alignment as int32 indices into `formats.ROUNDINGS`). As a pytree a model has just its arrays
    as leaves.
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
        def refuse(field: str, wanted: str) -> None:
            raise ValueError(f"Model({field}={getattr(self, field)!r}): {field} must be {wanted}")

        if isinstance(self.result, Format) and self.result not in (F16, F32, F64, S32):
            refuse("result", "f16, f32, f64 or s32")
        if isinstance(self.terms, int) and self.terms < 1:
            refuse("terms", "at least 1")
        if isinstance(self.fraction_bits, int) and not 1 <= self.fraction_bits <= MAX_FRACTION_BITS:
            refuse("fraction_bits", f"from 1 to {MAX_FRACTION_BITS}, or None for exact")
        if self.fraction_bits is None and self.terms != 1:
            refuse("terms", "1 where fraction_bits is None: an exact step is a fused multiply-add")
        if isinstance(self.rounding, str) and self.rounding not in ROUNDINGS[:-1]:
            refuse("rounding", f"one of {', '.join(ROUNDINGS[:-1])}")
        if isinstance(self.alignment, str) and self.alignment not in ROUNDINGS[:-1]:
            refuse("alignment", f"one of {', '.join(ROUNDINGS[:-1])}")
        if self.fraction_bits is None and not cuts(self.alignment):
            refuse("alignment", '"RZ" where fraction_bits is None: nothing is cut')
        if isinstance(self.result_bits, int) and not 1 <= self.result_bits <= self.result.mantissa_bits:
            refuse("result_bits", f"from 1 to {self.result.mantissa_bits}, or None for all")
        if isinstance(self.chain, str) and self.chain != "k":
            refuse("chain", 'a number of products, "k" for those of one instruction, or None')
        if self.together and (self.chain is None or not isinstance(self.chain, int | str)):
            refuse("together", "False where there is no chain")
        if self.from_zero and (self.chain is None or self.fraction_bits is not None):
            refuse("from_zero", "False where there is no chain of exact steps; no other has a zero of its own")
        if self.summed is not None and (self.summed < 1 or (isinstance(self.terms, int) and self.terms % self.summed)):
            refuse("summed", f"None or a divisor of terms={self.terms}")
        if self.summed is not None and (self.fraction_bits is None or self.multiplicand is not None or self.groups != 1):
            refuse("summed", "None where steps are exact, where A and B are converted first, or where products are dealt out in groups")

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
        return cls(**dict(static), **dict(zip(names, arrays, strict=True)))


class Signature(NamedTuple):
    """What `run` must know of an instruction besides its model."""

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


Scales = tuple[ArrayLike, ArrayLike]


def fills_k(model: Model, signature: Signature) -> bool:
    """Whether K is filled up to whole instructions; else it is a row of single multiply-adds, of any length."""
    return signature.a.is_integer or model.fraction_bits is not None or model.chain is not None or signature.d != model.result


def fitted(model: Model, signature: Signature, block: int | None) -> Model:
    """The model as the instruction uses it: with the instruction's own rounding, if it states one.

    block: products that share a scale; None: there are no scales. Raises ValueError for a model whose arithmetic is not defined for the
    instruction.
    """
    _check(model, signature, block)
    return model if signature.rounding is None else model.replace(rounding=signature.rounding.upper())


def _check(model: Model, signature: Signature, block: int | None) -> None:
    if model.result.is_integer:
        return
    k, summed, groups, common, scaling = signature.k, model.summed, model.groups, model.common, signature.scale
    if block is None or scaling is None:
        if summed is not None:
            raise ValueError(f"Model(summed={summed}): only products with block scales are summed in groups; give None. PTX ISA 9.7.14.3")
    elif model.fraction_bits is None:
        raise ValueError("Model(fraction_bits=None): exact steps take no block scales; give a number of bits. PTX ISA 9.7.14.3")
    elif summed is None:
        if scaling.mantissa_bits:
            raise ValueError(f"Model(summed=None): scales of {scaling} multiply whole groups; give `summed`, as 16. PTX ISA 9.7.14.3")
    elif block % summed:
        raise ValueError(f"Model(summed={summed}): must divide the {block} products that share a scale. PTX ISA 9.7.14.3")
    else:
        check_exact(signature.a, signature.b, scaling, summed)
    if groups > 1 and k % (2 * groups):
        raise ValueError(f"Model(groups={groups}): the {k} products of an instruction are no {groups} groups of pairs")
    if model.fraction_bits is not None and signature.a.words == 2:
        raise ValueError("Model(fraction_bits=...): products of f64 are fused multiply-adds; give fraction_bits=None. PTX ISA 9.7.14.5.14")
    for fmt in (signature.a, signature.b):
        if common is not None and not common.holds(fmt):
            raise ValueError(
                f"the model converts A and B to {common} first, which does not hold every value of {fmt}; choose a wider format"
            )


def check_exact(a: Format, b: Format, scale: Format, products: int) -> None:
    """Raises ValueError if the sum of so many products, with its scales, would not be exact."""
    largest = [2 ** (fmt.mantissa_bits + 1 + fmt.greatest_exponent - fmt.least_exponent) for fmt in (a, b)]
    finite = all(fmt.specials == "none" and fmt.greatest_exponent - fmt.least_exponent + fmt.mantissa_bits < 8 for fmt in (a, b))
    if not finite or products * largest[0] * largest[1] * 4 ** (scale.mantissa_bits + 1) > 2**24:
        raise ValueError(
            f"summed={products}: the exact sum of {products} products of {a} and {b}, times two scales of {scale}, does not fit 24 bits; "
            "the kinds that sum in groups have e2m1 operands. PTX ISA 9.7.14.3"
        )
