"""The products of one row of A and one column of B, in plain Python numbers. Part of the reference: see `steps`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tcemu.arithmetic.model import Model, Signature
from tcemu.explanation.exact import Decoded, Value, convert, decode, multiplied

UNITS = 4  # of a chunk of sparsity metadata, which keeps two of them: PTX ISA 9.7.14.6.1


@dataclass(frozen=True)
class Product:
    """One product on its way in: where it stands along K, its codes, and what they mean once A and B are converted."""

    index: int
    name: str  # of its place along K; in a sparse instruction, of the element of B
    a: int
    b: int
    x: Decoded  # A's element
    y: Decoded  # B's element
    scales: tuple[Decoded, Decoded] | None = None  # of A and of B
    scale_codes: tuple[int, int] | None = None

    @property
    def value(self) -> Value:
        """Without scales."""
        return multiplied(self.x.value, self.y.value)


def products(
    model: Model,
    signature: Signature,
    a: Sequence[int],
    b: Sequence[int],
    names: Sequence[str],
    scales: tuple[Sequence[int], Sequence[int]] | None,
) -> list[Product]:
    """The products of codes along K, A and B converted first if the model says so.

    scales: codes of the block scales of the row and of the column, each for `k // scale_vec` products.
    """
    common = model.common
    block = signature.k // signature.scale_vec if scales else 1
    made = []
    for index, (x, y, name) in enumerate(zip(a, b, names, strict=True)):
        meant = [
            decode(fmt, code) if common is None else decode(common, convert(fmt, common, code))
            for fmt, code in ((signature.a, x), (signature.b, y))
        ]
        product = Product(index, name, a=x, b=y, x=meant[0], y=meant[1])
        if scales is not None and signature.scale is not None:
            of_a, of_b = scales[0][index // block], scales[1][index // block]
            decoded = decode(signature.scale, of_a), decode(signature.scale, of_b)
            product = replace(product, scales=decoded, scale_codes=(of_a, of_b))
        made.append(product)
    return made


def met(chunk: int, b: Sequence[int], fields: Sequence[int], clamped: bool) -> tuple[list[int], list[str]]:
    """The elements of B that a row of a sparse A meets, and the names of their places along K.

    chunk: elements of B that one metadata field chooses from: 2, 4 or 8. b: a dense column. fields: the row's metadata, 4 bits each.
    clamped: what an undefined field chooses on some targets: the first unit is at most 2, the second at least 1.
    Source: PTX ISA 9.7.14.6.1.
    """
    elements: list[int] = []
    names: list[str] = []
    for number, field in enumerate(fields):
        first, second = field % UNITS, field // UNITS % UNITS
        units = (min(first, 2), max(second, 1)) if clamped else (first, second)
        start = number * chunk
        if chunk < UNITS:  # a unit is half an element of 32 bits
            low, high = (b[start + unit // 2] >> 16 * (unit % 2) & 0xFFFF for unit in units)
            elements.append(low | high << 16)
            places = dict.fromkeys(start + unit // 2 for unit in units)
            names.append("k " + "+".join(map(str, places)))
            continue
        size = chunk // UNITS
        places = [start + size * unit + i for unit in units for i in range(size)]
        elements += [b[place] for place in places]
        names += [f"k {place}" for place in places]
    return elements, names
