"""NVFP4's rule "four over six" for one block in fractions: slow, exact, and without an array.

Each f32 operation is an exact rational number, rounded once by `round_to`. The steps are those of TransformerEngine's
quantize_4over6_nvfp4.cuh, and of FlashInfer's reference where the error is scaled by the tensor's scale. Numbers are finite.
"""

from fractions import Fraction

E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]
E4M3 = [Fraction(m, 512) for m in range(8)] + [Fraction(8 + m, 512) * 2**e for e in range(15) for m in range(8) if (e, m) != (14, 7)]
MAX_F32 = Fraction((2**24 - 1) * 2**104)


def round_to(x: Fraction, bits: int = 24, least: int = -149) -> Fraction:
    """The nearest number of `bits` bits, ties to even; at least in units of 2^least. Beyond the largest f32: an error."""
    if x == 0:
        return x
    magnitude, exponent = abs(x), 0
    while magnitude >= 2 ** (exponent + 1):
        exponent += 1
    while magnitude < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** max(exponent - bits + 1, least)
    found = round(x / unit) * unit
    assert abs(found) <= MAX_F32
    return found


def nearest_code(values: list[Fraction], x: Fraction) -> int:
    """The code of the nearest of ascending values, ties to the even code; the largest beyond them."""
    below = max(n for n, value in enumerate(values) if value <= x)
    if below == len(values) - 1:
        return below
    middle = (values[below] + values[below + 1]) / 2
    return below + (x > middle or (x == middle and below % 2 == 1))


def quantize(x: list[Fraction], tensor_amax: Fraction, largest: int, squared: bool, error: str) -> tuple[int, list[int]]:
    """The code of the scale and those of the elements, whose sign is bit 3. The signs of zeros are those of positive numbers."""
    encode = min(round_to(6 * largest / tensor_amax), MAX_F32) if tensor_amax else Fraction(1)
    decode = round_to(1 / encode)
    base = round_to(round_to(max(map(abs, x)) / 6) * encode)
    found = []
    for expand in (Fraction(3, 2), Fraction(1)):
        scale = nearest_code(E4M3, min(round_to(base * expand), Fraction(448)))
        step = round_to(E4M3[scale] * decode)
        inverse = min(round_to(1 / step), MAX_F32) if step else MAX_F32
        codes, total = [], Fraction(0)
        for value in x:
            code = nearest_code(E2M1, round_to(abs(value) * inverse) if abs(value) * inverse < 2**100 else Fraction(2**100))
            sign = -1 if value < 0 else 1
            product = sign * E2M1[code] * E4M3[scale]
            if error == "f16":
                difference = round_to(round_to(product, 11, -24) - round_to(value * encode))
            elif error == "amax":
                difference = round_to(round_to(round_to(round_to(product) * tensor_amax) / (6 * largest)) - value)
            else:
                difference = round_to(round_to(round_to(product) * decode) - value)
            total = round_to(total + (round_to(difference * difference) if squared else abs(difference)))
            codes.append(code | (8 if value < 0 else 0))
        found.append((total, scale, codes))
    (error4, scale4, four), (error6, scale6, six) = found
    return (scale4, four) if error4 < error6 else (scale6, six)
