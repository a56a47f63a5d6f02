"""The exact reference of the block-scaled steps (sm_120, sm_100): by publication, not by our own recordings.

arXiv 2511.10909 v2, table 5, and the sm_120 measurements that agree with it. The result is f32, rounded toward zero.
"""

from collections.abc import Sequence

from oracles.reference import NAN, align_add_round, parts, product_terms


def scaled_dot_add(
    a_codes: Sequence[int], b_codes: Sequence[int], c_code: int, a_fmt: str, b_fmt: str, a_scales: Sequence[int], b_scales: Sequence[int],
    alignment: str = "RZ",
) -> int:  # fmt: skip
    """mxf8f6f4: the exponents of the ue8m0 scales join a product's before alignment; each list is spread evenly over the products."""
    terms, infinities = product_terms(a_codes, b_codes, a_fmt, b_fmt)
    shifted = []
    for i, term in enumerate(terms):
        scales = [parts("ue8m0", codes[i * len(codes) // len(terms)]) for codes in (a_scales, b_scales)]
        if any(kind == "nan" for kind, *_ in scales):
            infinities |= NAN
        shift = sum(exponent for *_, exponent in scales)
        shifted.append(None if term is None else (term[0], term[1], term[2] + shift, term[3] + shift))
    return align_add_round(shifted, infinities, c_code, 25, -133, "f32", "RZ", alignment)


def grouped_dot_add(
    a_codes: Sequence[int], b_codes: Sequence[int], c_code: int, scale: str, a_scales: Sequence[int], b_scales: Sequence[int],
    alignment: str = "RZ",
) -> int:  # fmt: skip
    """mxf4 and mxf4nvf4: groups of 16 e2m1 products are added exactly and multiplied by the significands of their two scales.

    A group is aligned by the exponents of its scales alone, even if its products cancel; if all of them, or a scale, are zero, it takes no
    part. `scale` is ue8m0 or ue4m3; each list of scales is spread evenly over the products.
    """
    terms, infinities = product_terms(a_codes, b_codes, "e2m1", "e2m1")
    groups = []
    for first in range(0, len(terms), 16):
        scales = [parts(scale, codes[first * len(codes) // len(terms)]) for codes in (a_scales, b_scales)]
        if any(kind == "nan" for kind, *_ in scales):
            infinities |= NAN
        members = [term for term in terms[first : first + 16] if term is not None]
        total = sum(
            (-1) ** sign * integer << exponent for sign, integer, exponent, _ in members
        )  # in units of 2^-2: e2m1's exponents are >= 0
        significand, exponent = scales[0][2] * scales[1][2], scales[0][3] + scales[1][3]
        if members and significand:
            below = 2 + (6 if scale == "ue4m3" else 0)
            groups.append((int(total < 0), abs(total) * significand, exponent, exponent - below))
    return align_add_round(groups, infinities, c_code, 35, -139, "f32", "RZ", alignment)
