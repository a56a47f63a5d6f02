"""`explain`: one dot product of one instruction, step by step, on one target or on several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.engine.architectures.lookup import COMPUTING_FAMILIES, DESCRIBED_FAMILIES, resolve_arithmetic
from tcemu.engine.architectures.model_rows import ModelRow
from tcemu.engine.arithmetic.fitting import needs_whole_instructions, specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.exact_values import NAN, Value, decode, encode, infinity
from tcemu.engine.arithmetic.reference.reference_products import decode_products, gather_stored
from tcemu.engine.arithmetic.reference.reference_steps import reduce_products
from tcemu.engine.formats.number_formats import F64, Format
from tcemu.engine.formats.rounding import CONVERSION_ROUNDINGS, ROUNDINGS
from tcemu.engine.isa.families import Instruction, MatrixMultiply
from tcemu.engine.isa.legality import check, manual_section
from tcemu.engine.isa.other_makers import UNIT_FAMILIES
from tcemu.engine.isa.targets import resolve_target
from tcemu.uses.explanation.explanation_results import Explanation, Explanations
from tcemu.uses.explanation.step_text import PADDING_NAME

EXPLAIN_ROUNDINGS = tuple(mode for mode in CONVERSION_ROUNDINGS if mode != "SR")


def explain(
    op: str | Instruction,
    a_row: Any,
    b_col: Any,
    c: Any = 0,
    *,
    target: str | Sequence[str],
    model: Model | str | Sequence[Model | str | None] | None = None,
    e: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    codes: bool = False,
    rounding: str = "RN",
    saturate: bool = False,
) -> Explanation | Explanations:
    """Decompose one element of D = A·B + C into its terms, sums and roundings.

    The explanation has the exact value, exponent and shift of each term, its retained and truncated bits, the sums and the roundings. It is
    computed with Python integers and fractions only, and shares no arithmetic with `dot`.

    Args:
        op: PTX spelling, short name or `Instruction` of mma, mma.sp, wmma.mma, wgmma or wgmma.sp.
        a_row: K elements of a row of A: ints, floats, Fractions or arrays of any real dtype. K may be several instructions long; it is
            padded to whole instructions as `gemm` does. A sparse instruction takes the stored elements.
        b_col: K elements of a column of B. With a sparse instruction, the elements of B that the stored elements multiply, or the whole
            column if `e` is given.
        c: One element of C.
        target: A GPU or target, or several.
        model: Another arithmetic in place of the target's own, or changes of that one in words, such as "fraction_bits=13"; or several;
            None in a sequence is the target's own. One target goes with several models, and one model with several targets.
        e: The row's 4-bit sparsity metadata fields.
        scale_a: Block scales of the row, one for `op.k // op.scaling.count` elements along K. Scales in an unsigned array, which `gemm`
            takes as codes, are refused unless `codes` is True.
        scale_b: Block scales of the column.
        codes: All operands are raw codes (ints or integer arrays, f64 also uint32[K, 2], low word first), not numbers.
        rounding: Rounding of numbers to the instruction's formats.
        saturate: Numbers out of range become the largest finite value, and not Inf or NaN. Either way the explanation names them.

    Returns:
        An `Explanation`, or for several targets or models `Explanations`, which compares them. Print it, or take its `to_dict()`.

    Raises:
        Unsupported: PTX does not give `op` to a target.
        NotModelled: There is no evidence for the arithmetic of `op` on a target.
        TypeError: An operand has the wrong type.
        ValueError: An operand has the wrong length or value, or a model does not fit `op`.

    Source: the arithmetic is `tcemu.evidence(op, target)`; PTX ISA 9.7.14, 9.7.15.
    """
    targets = [target] if isinstance(target, str) else list(target)
    models = [model] if model is None or isinstance(model, Model | str) else list(model)
    several = not isinstance(target, str) or not (model is None or isinstance(model, Model | str))
    if not targets or not models or (len(targets) > 1 and len(models) > 1 and len(targets) != len(models)):
        raise ValueError(f"got {len(targets)} targets and {len(models)} models; expected one target, one model, or one model per target")
    count = max(len(targets), len(models))
    targets, models = targets * (count // len(targets)), models * (count // len(models))
    arguments = {"a_row": a_row, "b_col": b_col, "c": c, "e": e, "scale_a": scale_a, "scale_b": scale_b}
    explanations = tuple(
        _explain_one(op, OperandReader(arguments, codes, rounding, saturate), *pair) for pair in zip(targets, models, strict=True)
    )
    return Explanations(explanations) if several else explanations[0]


def _explain_one(op: str | Instruction, operands: OperandReader, target: str, model: Model | str | None) -> Explanation:
    op, target = check(op, target), resolve_target(target)
    if op.family not in (*COMPUTING_FAMILIES, *DESCRIBED_FAMILIES, *UNIT_FAMILIES):
        raise Unsupported(f"{op} is {op.family}; tcemu.explain takes {', '.join(COMPUTING_FAMILIES)}. PTX ISA {manual_section(op)}")
    if isinstance(model, str):
        model = resolve_arithmetic(op, target, model).model
    model = None if model is None else concrete_model(model)
    resolved = resolve_arithmetic(op, target, model)
    op = resolved.op
    label, evidence = _describe_target(target, model, resolved.row)
    spec = product_spec(op)
    model, _ = specialize(resolved.model, spec, spec.k // spec.scale_vec if op.scaling is not None else None)
    a, b, c = (operands.read(op, name, fmt) for name, fmt in (("a_row", spec.a), ("b_col", spec.b), ("c", spec.c)))
    if len(c) != 1:
        raise ValueError(f"c: got {len(c)} elements; expected one of {spec.c}, for one element of D")
    if not a:
        raise ValueError("a_row: got no elements; expected at least one")
    b, names = _gather_column(op, a, b, operands.arguments["e"], resolved.clamped_metadata)
    padding = -len(a) % spec.k if needs_whole_instructions(model, spec) else 0
    scales = _read_scales(op, operands, len(a), len(a) + padding)
    a, b, names = (*a, *[spec.a.negative_zero] * padding), (*b, *[0] * padding), [*names, *[PADDING_NAME] * padding]
    products = decode_products(model, spec, a, b, names, scales)
    steps, result = reduce_products(model, spec, products, c[0])
    return Explanation(
        op=op,
        target=target,
        label=label,
        evidence=evidence,
        model=model,
        spec=spec,
        a=a,
        b=b,
        c=c[0],
        scales=scales,
        products=tuple(products),
        steps=steps,
        result=result,
        rounded=tuple(operands.rounded),
        out_of_range=tuple(operands.out_of_range),
        padding=padding,
    )


def _describe_target(target: str, model: Model | None, own: ModelRow | None) -> tuple[str, str]:
    """Return the target with the differences from its own arithmetic, and the evidence of the arithmetic."""
    if model is None:
        assert own is not None
        return target, f"{own.evidence.level}: {own.evidence.source}"
    if own is None:
        return f"{target}, {model}", "a what-if; the target's own arithmetic is not modelled"
    changed = [(field.name, getattr(model, field.name)) for field in fields(model)]
    changed = [f"{name} {value}" for name, value in changed if value != getattr(own.model, name, None)]
    return ", ".join([target, *changed]), "a what-if" if changed else "a model equal to the target's own"


def _gather_column(op: MatrixMultiply, a: Sequence[int], b: Sequence[int], e: Any, clamped: bool) -> tuple[Sequence[int], list[str]]:
    """Return the elements of B that the elements of A multiply, and the names of their positions along K."""
    if e is None:
        if len(a) != len(b):
            hint = " (the stored elements, and the elements of B that they multiply; a whole column needs e)" if op.sparse else ""
            raise ValueError(f"a_row has {len(a)} elements and b_col {len(b)}; the numbers must be equal{hint}")
        return b, [f"k {i}" for i in range(len(a))]
    if not op.sparse:
        raise ValueError(f"e: {op} has no sparsity metadata; leave it out. PTX ISA {manual_section(op)}")
    if len(b) != 2 * len(a) or len(b) % op.chunk_size:
        raise ValueError(
            f"a_row has {len(a)} elements and b_col {len(b)}; with e expected K/2 and K, K a multiple of {op.chunk_size}, for {op}"
        )
    return gather_stored(op.chunk_size, b, row_metadata(op, e, len(b) // op.chunk_size), clamped)


def _read_scales(op: MatrixMultiply, operands: OperandReader, count: int, padded: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the codes of both rows of scales for `count` products, padded with ones, or None if there are none."""
    scale_a, scale_b = operands.arguments["scale_a"], operands.arguments["scale_b"]
    if op.scaling is None and scale_a is None and scale_b is None:
        return None
    if op.scaling is None:
        raise ValueError(f"scale_a, scale_b: {op} has no block scales; leave them out. PTX ISA {manual_section(op)}")
    fmt = op.scaling.format
    block = product_spec(op).k // op.scaling.count
    expected_count = -(-count // block)
    expected = f"expected {expected_count} of {fmt}, one for {block} products, for {op}. PTX ISA {manual_section(op)}"

    def read_row(name: str, scales: Any) -> tuple[int, ...]:
        if scales is None:
            raise ValueError(f"{name}: missing; {expected}")
        if not operands.raw and np.dtype(getattr(scales, "dtype", float)).kind == "u":
            raise TypeError(f"{name}: got {scales.dtype}, which gemm takes for raw codes; expected floats, or raw codes and codes=True")
        row = operands.read(op, name, fmt)
        if len(row) != expected_count:
            raise ValueError(f"{name}: got {len(row)}; {expected}")
        return (*row, *[fmt.bias << fmt.mantissa_bits] * (padded // block - expected_count))

    return read_row("scale_a", scale_a), read_row("scale_b", scale_b)


# ---- operands as codes


class OperandReader:
    """Reads the operands of `explain` as codes, and records the names of those that were rounded, and the numbers beyond their format."""

    def __init__(self, arguments: Mapping[str, Any], raw: bool, rounding: str, saturate: bool = False) -> None:
        if rounding not in EXPLAIN_ROUNDINGS:
            raise ValueError(f"rounding={rounding!r}: expected one of {', '.join(EXPLAIN_ROUNDINGS)}")
        self.arguments, self.raw, self.rounding = arguments, raw, rounding
        self.saturate = saturate
        self.rounded: list[str] = []
        self.out_of_range: list[str] = []

    def read(self, op: Instruction, name: str, fmt: Format) -> tuple[int, ...]:
        """Return the codes of an operand."""
        expected = (
            f"raw codes of {fmt} (ints, or an integer array)" if self.raw else "numbers (ints, floats, Fractions, or an array of them)"
        )
        expected += f", for {op}; codes={not self.raw} is for {'numbers' if self.raw else 'raw codes'}"
        elements = _element_list(name, fmt, self.arguments[name], expected, self.raw)
        if self.raw:
            return tuple(_validate_code(name, fmt, element, expected) for element in elements)
        values, codes = _round_numbers(name, fmt, elements, self.rounding, self.saturate, expected)
        if any(decode(fmt, code).value != value for value, code in zip(values, codes, strict=True)):
            self.rounded.append(name)
        self.out_of_range += _describe_out_of_range(name, fmt, values, codes)
        return codes


def _element_list(name: str, fmt: Format, operand: Any, expected: str, raw: bool) -> list[Any]:
    """Return one Python value per element. The callers check the types of the values."""
    if isinstance(operand, Sequence) and not isinstance(operand, str | bytes):
        operand = [_element_list(name, fmt, x, expected, raw)[0] if _is_array(x) and x.ndim == 0 else x for x in operand]
        if not any(_is_array(x) and x.ndim for x in operand):
            return operand
        operand = np.asarray(operand)
    if not _is_array(operand):
        return [operand]
    array = np.asarray(operand)
    words = fmt.words if raw and array.dtype == np.uint32 else 1
    if array.ndim > words or (words == 2 and array.shape[-1:] != (2,)):
        raise ValueError(f"{name}: got {array.dtype}{list(array.shape)}; expected one row or column, {expected}")
    if words == 2:
        return [low | high << 32 for low, high in array.reshape(-1, 2).tolist()]
    if not (array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.integer) or jnp.issubdtype(array.dtype, jnp.floating)):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; expected {expected}")
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 8:
        array = array.astype(np.float64)
    return array.reshape(-1).tolist()  # NumPy scalars if the dtype is longdouble


def _is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def _validate_code(name: str, fmt: Format, code: Any, expected: str) -> int:
    if not isinstance(code, int):
        raise TypeError(f"{name}: got {code!r}; expected {expected}")
    container_bits = 8 * fmt.dtype.itemsize * fmt.words
    if not 0 <= code < 1 << container_bits:
        shown = code if abs(code) < 1 << 64 else "an integer of more than 64 bits"
        raise ValueError(f"{name}: {shown} is no code of {fmt}, which is from 0 to {(1 << container_bits) - 1:#x}; expected {expected}")
    return code & (1 << fmt.bits) - 1


def _round_numbers(
    name: str, fmt: Format, numbers: Sequence[Any], rounding: str, saturate: bool, expected: str
) -> tuple[list[Value], tuple[int, ...]]:
    """Return the exact values of numbers and their codes."""
    values, codes = [], []
    for number in numbers:
        if isinstance(number, np.floating) and not isinstance(number, float):
            number = Fraction(*number.as_integer_ratio()) if np.isfinite(number) and number else float(number)
        if not isinstance(number, int | float | Fraction):
            raise TypeError(f"{name}: got {number!r}; expected {expected}")
        value, negative = exact_value(number)
        if fmt == F64 and isinstance(number, float):
            code = int(np.float64(number).view(np.uint64))
        else:
            code = encode(fmt, value, rounding, overflow="saturate" if saturate else "ieee", negative_zero=negative)
        values.append(value)
        codes.append(code)
    return values, tuple(codes)


def _describe_out_of_range(name: str, fmt: Format, values: Sequence[Value], codes: Sequence[int]) -> Iterator[str]:
    """Yield a sentence for each finite number beyond the range of its format."""
    largest = decode(fmt, fmt.max_magnitude << fmt.unused_bits).value
    assert isinstance(largest, Fraction)
    least = -largest - fmt.is_integer if fmt.signed else Fraction(0)
    half_unit = 0 if fmt.is_integer else largest / (1 << fmt.mantissa_bits + 2)  # numbers that near may round to the largest
    for index, (value, code) in enumerate(zip(values, codes, strict=True)):
        became = decode(fmt, code).value
        if isinstance(value, Fraction) and value and (isinstance(became, str) or not least - half_unit <= value <= largest + half_unit):
            limit = f"least is {_short_text(least)}" if value < 0 and -least != largest else f"largest is {_short_text(largest)}"
            place = name if name == "c" else f"{name}[{index}]"
            yield f"{place} = {_short_text(value)} lies beyond {fmt}, whose {limit}, and became {_short_text(became)}"


def _short_text(value: Value) -> str:
    """Return a value as text of some ten characters."""
    if isinstance(value, str):
        return value.lstrip("+")
    if abs(value) >= 1e300:
        return "a number beyond 1e300" if value > 0 else "a number beyond -1e300"
    return str(value) if value.denominator == 1 and abs(value) < 10**9 else f"{float(value):.9g}"


def exact_value(number: int | float | Fraction) -> tuple[Value, bool]:
    """Return a Python number as an exact value, and its sign: True for negative numbers and for -0.0."""
    if isinstance(number, float) and not np.isfinite(number):
        return (NAN if np.isnan(number) else infinity(number < 0)), number < 0
    return Fraction(number), number < 0 or str(number) == "-0.0"


def row_metadata(op: MatrixMultiply, e: Any, count: int) -> list[int]:
    """Return the 4-bit metadata fields of one row."""
    metadata = np.asarray(e)
    if not np.issubdtype(metadata.dtype, np.integer) or metadata.shape != (count,) or ((metadata < 0) | (metadata > 15)).any():
        raise ValueError(
            f"e: got {e!r}; expected {count} metadata fields from 0 to 15, one for {op.chunk_size} elements along K. "
            f"PTX ISA {manual_section(op)}"
        )
    return metadata.tolist()


def concrete_model(model: Model) -> Model:
    """Return the model with plain numbers in place of arrays. Raises TypeError for traced values."""
    changes = {}
    for name in ("terms", "fraction_bits", "floor", "result_bits", "rounding", "alignment"):
        value = getattr(model, name)
        if value is not None and not isinstance(value, int | str):
            try:
                changes[name] = int(value)
            except TypeError as error:
                raise TypeError(f"model: its {name} is traced; explain needs plain numbers, so call it outside jit and vmap") from error
    for name in changes.keys() & {"rounding", "alignment"}:
        changes[name] = ROUNDINGS[changes[name]]
    return model.replace(**changes) if changes else model
