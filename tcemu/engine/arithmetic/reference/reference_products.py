"""Products of one row of A and one column of B in plain Python numbers; part of the reference, see `reference_steps`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.reference.exact_values import DecodedCode, Value, convert, decode, flush, multiply_values

UNITS_PER_CHUNK = 4  # units that a field of sparsity metadata selects two from: PTX ISA 9.7.14.6.1


@dataclass(frozen=True)
class Product:
    """One product as an operand of a step."""

    index: int  # position along K
    name: str  # name of the position along K; in a sparse instruction, of the element of B
    a: int  # code of A's element
    b: int  # code of B's element
    decoded_a: DecodedCode  # A's element after the conversion to a common format
    decoded_b: DecodedCode  # B's element after the conversion to a common format
    scales: tuple[DecodedCode, DecodedCode] | None = None  # block scales of A and B
    scale_codes: tuple[int, int] | None = None  # codes of the block scales of A and B

    @property
    def value(self) -> Value:
        """The exact product without scales."""
        return multiply_values(self.decoded_a.value, self.decoded_b.value)


def decode_products(
    model: Model,
    spec: ProductSpec,
    a: Sequence[int],
    b: Sequence[int],
    names: Sequence[str],
    scales: tuple[Sequence[int], Sequence[int]] | None,
) -> list[Product]:
    """Decode the products along K; A and B are converted to the model's common format first, if it has one.

    Args:
        model: The arithmetic of the instruction.
        spec: Formats of the instruction.
        a: Codes of the row of A.
        b: Codes of the column of B.
        names: Names of the positions along K.
        scales: Codes of the block scales of the row and of the column, each for `k // scale_vec` products.
    """
    common = model.common_format
    block = spec.k // spec.scale_vec if scales else 1
    products = []
    for index, (code_a, code_b, name) in enumerate(zip(a, b, names, strict=True)):
        flushed = (spec.a, flush(spec.a, code_a, model.flush)), (spec.b, flush(spec.b, code_b, model.flush))
        decoded_a, decoded_b = (
            decode(fmt, code) if common is None else decode(common, convert(fmt, common, code)) for fmt, code in flushed
        )
        product = Product(index, name, a=code_a, b=code_b, decoded_a=decoded_a, decoded_b=decoded_b)
        if scales is not None and spec.scale is not None:
            codes = scales[0][index // block], scales[1][index // block]
            decoded = decode(spec.scale, codes[0]), decode(spec.scale, codes[1])
            product = replace(product, scales=decoded, scale_codes=codes)
        products.append(product)
    return products


def gather_stored(chunk: int, b: Sequence[int], fields: Sequence[int], clamped: bool) -> tuple[list[int], list[str]]:
    """Gather the elements of B that the stored elements of a sparse row of A multiply.

    Args:
        chunk: Elements of B that one metadata field selects from: 2, 4 or 8.
        b: A dense column of B.
        fields: Metadata of the row, 4 bits each.
        clamped: An undefined field selects as on some targets: the first unit is at most 2, the second at least 1.

    Returns:
        The elements of B, and the names of their positions along K.

    Source: PTX ISA 9.7.14.6.1.
    """
    elements: list[int] = []
    names: list[str] = []
    for number, field in enumerate(fields):
        first, second = field % UNITS_PER_CHUNK, field // UNITS_PER_CHUNK % UNITS_PER_CHUNK
        units = (min(first, 2), max(second, 1)) if clamped else (first, second)
        start = number * chunk
        if chunk < UNITS_PER_CHUNK:  # a unit is half an element of 32 bits
            low, high = (b[start + unit // 2] >> 16 * (unit % 2) & 0xFFFF for unit in units)
            elements.append(low | high << 16)
            positions = dict.fromkeys(start + unit // 2 for unit in units)
            names.append("k " + "+".join(map(str, positions)))
            continue
        size = chunk // UNITS_PER_CHUNK
        positions = [start + size * unit + i for unit in units for i in range(size)]
        elements += [b[position] for position in positions]
        names += [f"k {position}" for position in positions]
    return elements, names
