"""Hypotheses about the arithmetic of a black box: models, their results on the same operands, and operands drawn to tell them apart.

All models of a group share the fields that must be known before tracing, so that one compiled program computes thousands of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from tcemu.base.execution import without_native
from tcemu.engine.arithmetic.model import MAX_FRACTION_BITS, ROUNDING_MODES, Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.number_formats import F16, FORMATS, Format
from tcemu.uses.fuzz.case_generator import DotOperands, codes_to_integers, integers_to_codes

PAIRS_PER_CALL = 8192  # pairs of a model and a dot product that one call computes
NUMERIC_FIELDS = ("fraction_bits", "floor", "result_bits", "rounding", "alignment")
FRACTION_BITS, FLOOR, RESULT_BITS, ROUNDING, ALIGNMENT = range(len(NUMERIC_FIELDS))
LOWEST_FLOOR = -1024  # as in `Model`
PLAIN_ROUNDINGS = tuple(ROUNDING_MODES.index(mode) for mode in ("RZ", "RN", "RM", "RP"))  # the plainest first

DotArrays = dict[str, np.ndarray]  # codes by operand, with an axis of dot products in front: a and b [dots, K], c [dots], scales [dots, S]


@dataclass(frozen=True, eq=False)
class ModelGroup:
    """Models that differ in numeric fields only.

    Attributes:
        base: The model of all other fields. Its `fraction_bits` is None if all steps are exact; then only roundings differ.
        numbers: The numeric fields, int32 [models, 5]; roundings as indices into ROUNDING_MODES.
    """

    base: Model
    numbers: np.ndarray

    def select(self, chosen: np.ndarray) -> "ModelGroup":
        return ModelGroup(self.base, self.numbers[chosen])

    def with_field(self, field: int, values: Sequence[int]) -> "ModelGroup":
        """Return every model with every one of these values of a field."""
        numbers = np.repeat(self.numbers, len(values), axis=0)
        numbers[:, field] = np.tile(values, len(self.numbers))
        return ModelGroup(self.base, numbers)

    def models(self) -> Iterator[Model]:
        """Yield the models. A result that keeps all bits has `result_bits=None`."""
        for number in self.numbers.tolist():
            fields: dict[str, Any] = {"rounding": ROUNDING_MODES[number[ROUNDING]]}
            if self.base.fraction_bits is not None:
                kept = number[RESULT_BITS]
                fields |= {"fraction_bits": number[FRACTION_BITS], "floor": number[FLOOR], "alignment": ROUNDING_MODES[number[ALIGNMENT]]}
                fields["result_bits"] = None if kept == self.base.result.mantissa_bits else kept
            yield self.base.replace(**fields)


def model_numbers(model: Model) -> list[int]:
    """Return the numeric fields of a model."""
    bits = 1 if model.fraction_bits is None else int(model.fraction_bits)
    kept = model.result.mantissa_bits if model.result_bits is None else int(model.result_bits)
    return [bits, int(model.floor), kept, ROUNDING_MODES.index(model.rounding), ROUNDING_MODES.index(model.alignment)]


def group_models(models: Sequence[Model]) -> list[ModelGroup]:
    """Group models by the fields that are not numeric."""
    groups: dict[Model, list[list[int]]] = {}
    for model in models:
        plain = {name: Model.__dataclass_fields__[name].default for name in NUMERIC_FIELDS}
        base = model.replace(**plain | ({"fraction_bits": None} if model.fraction_bits is None else {}))
        groups.setdefault(base, []).append(model_numbers(model))
    return [ModelGroup(base, np.array(numbers, np.int32)) for base, numbers in groups.items()]


# ---- the hypotheses


def fused_group(base: Model) -> ModelGroup:
    """Return all widths, result widths, roundings and alignments of one kind of step, the plainest first. The floor is the lowest."""
    kept = range(base.result.mantissa_bits, 0, -1)
    axes = np.meshgrid(PLAIN_ROUNDINGS, PLAIN_ROUNDINGS, kept, range(MAX_FRACTION_BITS, 0, -1), indexing="ij")
    alignment, rounding, result_bits, bits = (axis.ravel() for axis in axes)
    return ModelGroup(base, np.stack([bits, np.full_like(bits, LOWEST_FLOOR), result_bits, rounding, alignment], -1).astype(np.int32))


def exact_group(base: Model) -> ModelGroup:
    """Return the roundings of a chain of fused multiply-adds."""
    return ModelGroup(base, np.array([[1, LOWEST_FLOOR, 1, rounding, PLAIN_ROUNDINGS[0]] for rounding in PLAIN_ROUNDINGS], np.int32))


def equal_multiplicands(a: Format, b: Format) -> list[tuple[Format | None, ...]]:
    """Return the formats to which a fused step may convert A and B first, in classes whose members give the same alignment.

    A conversion is exact, so it shows only in the exponents of subnormal operands.
    """
    classes: dict[tuple[int, int], list[Format | None]] = {}
    for fmt in (None, F16, *(f for f in FORMATS.values() if f != F16 and not f.is_integer and f.signed)):
        if fmt is not None and (not (fmt.can_represent(a) and fmt.can_represent(b)) or fmt.mantissa_bits > 11):
            continue
        lowest = (max(min(x.min_exponent, (fmt or x).min_exponent), x.min_exponent - x.mantissa_bits) for x in (a, b))
        key_a, key_b = lowest
        classes.setdefault((key_a, key_b), []).append(fmt)
    return [tuple(members) for members in classes.values()]


def structure(order: Order, k: int) -> tuple:
    """Return the steps of one instruction in a form that is equal for orders that compute the same."""
    if order.chain is None:
        return None, order.steps(k)
    chains = order.chains(k)
    return order.together and len(chains) > 1, chains


def equal_orders(order: Order, k: int) -> list[Order]:
    """Return all orders with the steps of this one in an instruction of k products."""
    wanted, found = structure(order, k), []
    for groups in [1, *(g for g in range(2, k // 2 + 1) if k % (2 * g) == 0)]:
        for terms in range(1, k // groups + 1):
            steps = Order(terms, groups)
            if steps.steps(k) != order.steps(k):
                continue
            if order.chain is None:
                found.append(steps)
                continue
            count = steps.steps_per_instruction(k)
            for chain in ("k", *(c for c in range(1, k + 1) if c * count % k == 0)):
                for together in (False, True):
                    candidate = Order(terms, groups, chain, together)
                    if structure(candidate, k) == wanted and not (together and count % (candidate.steps_per_chain(k) or 1)):
                        found.append(candidate)
    return found


# ---- results


@partial(jax.jit, static_argnames=("spec", "base"))
def _compute_pairs(spec: ProductSpec, base: Model, numbers: jax.Array, dots: dict[str, jax.Array]) -> jax.Array:
    """Return D's code for each pair of a model and a dot product."""

    def one(number: jax.Array, dot: dict[str, jax.Array]) -> jax.Array:
        names = ("rounding",) if base.fraction_bits is None else NUMERIC_FIELDS
        model = base.replace(**{name: number[NUMERIC_FIELDS.index(name)] for name in names})
        scales = (dot["scale_a"][None], dot["scale_b"][:, None]) if "scale_a" in dot else None
        return multiply_matrices(model, spec, dot["a"][None], dot["b"][:, None], dot["c"][None, None], scales)[0, 0]

    with without_native():
        return jax.vmap(one)(numbers, dots)


def predict(spec: ProductSpec, group: ModelGroup, dots: DotArrays) -> np.ndarray:
    """Compute D's codes of every model for every dot product, [models, dots], as integers.

    Raises:
        ValueError: The models' arithmetic is not defined for the instruction.
    """
    spec = spec._replace(family="")
    formats = {"a": spec.a, "b": spec.b, "c": spec.c}
    codes = {name: integers_to_codes(formats[name], v) if name in formats else v.astype(np.uint8) for name, v in dots.items()}
    count = len(dots["c"])
    pairs = np.arange(len(group.numbers) * count)
    results = []
    for start in range(0, len(pairs), PAIRS_PER_CALL):
        chosen = np.resize(pairs[start : start + PAIRS_PER_CALL], PAIRS_PER_CALL)
        model, dot = chosen // count, chosen % count
        results.append(_compute_pairs(spec, group.base, group.numbers[model], {name: v[dot] for name, v in codes.items()}))
    d = np.concatenate([np.asarray(result) for result in results])[: len(pairs)]
    return codes_to_integers(spec.d, d).reshape(-1, count)


# ---- operands


def float_codes(fmt: Format, negative: np.ndarray, exponent: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """Return codes of finite values, uint64: leading exponents are clipped to the format's, fractions have `mantissa_bits` bits."""
    field = np.clip(exponent + fmt.bias, 0, fmt.max_exponent + fmt.bias).astype(np.uint64)
    code = np.minimum(field << np.uint64(fmt.mantissa_bits) | fraction.astype(np.uint64), np.uint64(fmt.max_magnitude))
    sign = negative.astype(np.uint64) << np.uint64(fmt.bits - 1 - fmt.unused_bits) if fmt.signed else np.uint64(0)
    return (code | sign) << np.uint64(fmt.unused_bits)


class DotDrawer:
    """Draws dot products whose sums depend on alignment, widths and roundings.

    The shares of few-bit fractions, cancelling terms, small terms at any distance, and zeros change from one dot product to the next.
    """

    def __init__(self, spec: ProductSpec, top: int, bottom: int, seed: int):
        self.spec, self.top, self.bottom = spec, top, bottom
        self.largest = max(top, min(spec.a.max_exponent + spec.b.max_exponent, 60)) if spec.scale is None else top  # of products
        self.random = np.random.default_rng(seed)

    def draw(self, count: int, *, high: bool = False) -> DotArrays:
        """Draw dot products.

        Args:
            count: Number of dot products.
            high: Whether the largest terms are near the top of the range, where no floor shows, and operands are normal numbers.
        """
        spec, random, k = self.spec, self.random, self.spec.k
        shape = count, k
        per_dot = lambda *choices: random.choice(np.array(choices), (count, 1))
        lowest = self.top - 8 if high else self.bottom - per_dot(0, 0, 12)
        largest = lowest + (random.random((count, 1)) * (self.top - 2 - lowest)).astype(int)
        edge, spread = random.integers(0, MAX_FRACTION_BITS + 6, (count, 1)), per_dot(0, 1, 3, 8, 46)
        near = (random.random(shape) * (spread + 1)).astype(int)
        distance = np.where(random.random(shape) < per_dot(0, 0.3, 0.7, 0.9), edge + random.integers(-1, 2, shape), near)
        distance[np.arange(count), random.integers(0, k, count)] = 0
        style = random.choice([0, 1, 2], (count, 1), p=[0.5, 0.2, 0.3])
        carries, cancels = style == 1, (style == 2) & (k > 1)  # the largest sums; a pair of large terms beside small ones
        slots, pair = np.arange(k), random.integers(0, max(k // 2, 1), (count, 1))
        in_pair = cancels & (slots // 2 == pair)
        largest = np.where(cancels & (random.random((count, 1)) < 0.3), random.integers(self.top - 2, self.largest, (count, 1)), largest)
        distance = np.where(in_pair, 0, np.where(cancels, edge + random.integers(-1, 2, shape), distance))
        distance = np.where(carries & (random.random(shape) < per_dot(0.7, 0.9, 1)), 0, distance)
        exponent = largest - np.maximum(distance, 0)
        scales: DotArrays = {}
        if spec.scale is not None:
            exponent = self._draw_scales(scales, exponent, count)
        split = random.integers(-3, 4, shape)
        exponents = {"a": exponent // 2 + split}
        exponents["a"] = np.clip(exponents["a"], exponent - spec.b.max_exponent, exponent - spec.b.min_exponent)
        exponents["a"] = np.clip(exponents["a"], spec.a.min_exponent if high else spec.a.min_exponent - 1, spec.a.max_exponent)
        exponents["b"] = exponent - exponents["a"]
        if high:
            exponents["b"] = np.maximum(exponents["b"], spec.b.min_exponent)
        share = per_dot(0, 0.3, 0.8, 1)
        fractions = {name: self._draw_fractions(fmt, shape, share) for name, fmt in (("a", spec.a), ("b", spec.b))}
        for name, fmt in (("a", spec.a), ("b", spec.b)):
            nearly_all = np.uint64((1 << fmt.mantissa_bits) - 1) - random.integers(0, min(3, 1 << fmt.mantissa_bits), shape, np.uint64)
            fractions[name] = np.where(carries, nearly_all, fractions[name])
        one_sign = per_dot(0, 1)
        negative = random.random(shape) < np.where(carries, one_sign, per_dot(0, 0.5, 0.5, 1))
        twinned = np.where(carries, False, np.where(cancels, in_pair, random.random(shape) < per_dot(0, 0, 0.5, 1)))
        twin = np.where(twinned & (slots & 1 == 1), slots ^ 1, slots)
        take = lambda v: np.take_along_axis(v, twin, 1)
        flipped = twin != slots
        negative = take(negative) ^ flipped
        exponents, fractions = ({name: take(v) for name, v in values.items()} for values in (exponents, fractions))
        nudged = flipped & ~cancels & (random.random(shape) < per_dot(0, 0.3, 1))
        fractions["a"] = fractions["a"] ^ nudged.astype(np.uint64) if spec.a.mantissa_bits else fractions["a"]
        zero = (random.random(shape) < np.where(carries, 0, per_dot(0, 0.2, 0.6, 0.9))) & ~in_pair
        codes: DotArrays = {}
        for name, fmt in (("a", spec.a), ("b", spec.b)):
            sign = negative if name == "a" else np.zeros(shape, bool)
            codes[name] = np.where(zero, np.uint64(0), float_codes(fmt, sign, exponents[name], fractions[name]))
        c = self._draw_accumulators(largest[:, 0], exponents, fractions, negative, high)
        full = (1 << spec.c.mantissa_bits) - 1 - random.integers(0, 1 << max(spec.c.mantissa_bits - 8, 1), count)
        near_exponent = np.clip(largest[:, 0] + random.integers(-1, 4, count), spec.c.min_exponent, min(spec.c.max_exponent, self.top + 1))
        most = float_codes(spec.c, one_sign[:, 0] == 1, near_exponent, full.astype(np.uint64))
        return codes | scales | {"c": np.where(carries[:, 0] & (random.random(count) < 0.8), most, c)}

    def _draw_fractions(self, fmt: Format, shape: tuple[int, int], share: np.ndarray) -> np.ndarray:
        """Draw fractions: a share of zeros and single bits, and all bits, or all ones, otherwise."""
        random, bits = self.random, fmt.mantissa_bits
        drawn = random.integers(0, 1 << bits, shape, np.uint64)
        drawn = np.where(random.random(shape) < 0.2, np.uint64((1 << bits) - 1), drawn)
        few = np.uint64(1) << random.integers(0, max(bits, 1), shape, np.uint64)
        few = np.where((random.random(shape) < 0.6) | (bits == 0), np.uint64(0), few)
        return np.where(random.random(shape) < share, few, drawn)

    def _draw_scales(self, scales: DotArrays, exponent: np.ndarray, count: int) -> np.ndarray:
        """Draw scales that carry each block's largest exponent, and return the exponents that remain for the elements."""
        spec, random, scale = self.spec, self.random, self.spec.require_scale()
        blocks = exponent.reshape(count, spec.scale_vec, -1)
        total = blocks.max(-1) - random.integers(0, 3, (count, spec.scale_vec))
        first = np.clip(total // 2 + random.integers(-2, 3, total.shape), -scale.bias + 1, scale.max_exponent)
        plain = np.zeros(total.shape, bool)
        bits = scale.mantissa_bits
        for name, part in (("scale_a", first), ("scale_b", total - first)):
            fraction = random.integers(0, 1 << bits, total.shape, np.uint64) * (random.random(total.shape) < 0.5) if bits else plain
            scales[name] = float_codes(scale, plain, part, fraction)
        return (blocks - total[..., None]).reshape(exponent.shape)

    def _draw_accumulators(
        self, largest: np.ndarray, exponents: dict[str, np.ndarray], fractions: DotArrays, negative: np.ndarray, high: bool
    ) -> np.ndarray:
        """Draw C: zero, a value at some distance from the products, or one that nearly cancels a product."""
        spec, random, count = self.spec, self.random, len(largest)
        fmt, away = spec.c, random.integers(-12, MAX_FRACTION_BITS + 6, count)
        exponent = largest - np.where(random.random(count) < 0.4, away // 8, away)
        fraction = self._draw_fractions(fmt, (count, 1), random.choice([0.0, 0.5, 1.0], (count, 1)))[:, 0]
        sign = random.random(count) < 0.5
        row, slot = np.arange(count), random.integers(0, spec.k, count)
        up = fmt.mantissa_bits - spec.a.mantissa_bits
        cancels = (random.random(count) < 0.3) & (spec.scale is None) & (up >= 0)
        exponent = np.where(cancels, exponents["a"][row, slot] + exponents["b"][row, slot], exponent)
        same = fractions["a"][row, slot] << np.uint64(max(up, 0)) | np.uint64(1) * (random.random(count) < 0.3).astype(np.uint64)
        fraction = np.where(cancels, same, fraction)
        sign = np.where(cancels, ~negative[row, slot], sign)
        least = fmt.min_exponent if high else fmt.min_exponent - 1
        exponent = np.clip(exponent, least, min(fmt.max_exponent, self.top + 1))
        code = float_codes(fmt, sign, exponent, fraction)
        return np.where(random.random(count) < 0.25, np.uint64(0), code)


def select_dots(dots: DotArrays, chosen: Any) -> DotArrays:
    """Return some of the dot products."""
    return {name: v[chosen] for name, v in dots.items()}


def join_dots(parts: Sequence[DotArrays]) -> DotArrays:
    """Join dot products along their axis."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def stack_dots(dots: Sequence[DotOperands]) -> DotArrays:
    """Return lists of codes as arrays."""
    arrays = {name: np.array([dot[name] for dot in dots], np.uint64) for name in dots[0]}
    return arrays | {"c": arrays["c"][:, 0]}


def list_dots(dots: DotArrays) -> list[DotOperands]:
    """Return the dot products as lists of codes."""
    count = len(dots["c"])
    return [{name: [int(v[i])] if name == "c" else [int(x) for x in v[i]] for name, v in dots.items()} for i in range(count)]
