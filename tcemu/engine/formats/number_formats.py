"""The number formats, one row each, and the array dtypes that store them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

SPECIALS = ("ieee", "nan", "fnuz", "none")


@dataclass(frozen=True)
class Format:
    """One number format.

    A finite float is (-1)^sign * significand * 2^(exponent - mantissa_bits); subnormals use the exponent of the smallest normal.

    Raises:
        ValueError: The fields contradict each other.
    """

    name: str  # PTX's name, without the dot
    bits: int  # width of a code, counted from bit 0
    exponent_bits: int = 0  # width of the exponent field; 0 for an integer
    mantissa_bits: int = 0  # stored fraction bits
    bias: int = 0  # exponent bias
    signed: bool = True  # presence of a sign bit
    # special values: "ieee": Inf and NaN; "nan": only NaN, all ones; "fnuz": only NaN, the sign bit alone, so that zero has no sign;
    # "none": every code is finite
    specials: str = "none"
    unused_bits: int = 0  # low bits of the code that the hardware ignores (tf32 in a 32-bit register)
    subnormals: bool = True  # presence of subnormals and zero; False: exponent field 0 is an ordinary exponent

    def __post_init__(self) -> None:
        fields = self.signed + self.exponent_bits + self.mantissa_bits + self.unused_bits
        if self.specials not in SPECIALS:
            raise ValueError(f"Format({self.name!r}, specials={self.specials!r}): expected one of {', '.join(map(repr, SPECIALS))}")
        if not self.is_integer and self.bits != fields:
            raise ValueError(
                f"Format({self.name!r}, bits={self.bits}): the sign, {self.exponent_bits} exponent bits, {self.mantissa_bits} fraction "
                f"bits and {self.unused_bits} unused bits are {fields} bits"
            )
        if self.is_integer and (self.mantissa_bits or self.specials != "none"):
            raise ValueError(f"Format({self.name!r}): a format without an exponent is an integer: mantissa_bits=0, specials='none'")
        if not self.mantissa_bits and self.specials == "ieee":
            raise ValueError(f"Format({self.name!r}, specials='ieee', mantissa_bits=0): a NaN has fraction bits; specials='nan' has none")
        if not self.subnormals and self.mantissa_bits:
            raise ValueError(f"Format({self.name!r}, subnormals=False): such a format has powers of two alone, as ue8m0: mantissa_bits=0")

    def __repr__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        """True for an integer format."""
        return self.exponent_bits == 0

    @property
    def dtype(self) -> np.dtype:
        """Smallest unsigned dtype that holds one code; uint32 for a 64-bit code, which is two words."""
        return np.dtype(np.uint8 if self.bits <= 8 else np.uint16 if self.bits <= 16 else np.uint32)

    @property
    def words(self) -> int:
        """Number of words of one code: 2 for 64 bits, else 1."""
        return 2 if self.bits == 64 else 1

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal, and of every subnormal."""
        return (1 if self.subnormals else 0) - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return (1 << self.exponent_bits) - 1 - self.bias - (self.specials == "ieee" or not self.subnormals)

    @property
    def max_magnitude(self) -> int:
        """Code of the largest finite value, without the sign and the unused bits."""
        if self.is_integer:
            return (1 << (self.bits - self.signed)) - 1
        return {"ieee": self.infinity, "nan": self.nan}.get(self.specials, self._all_ones + 1) - 1

    def can_represent(self, other: Format) -> bool:
        """Check if this format can represent every finite value of another format.

        Args:
            other: The other format. False if one format is an integer and the other a float.

        Returns:
            True if every finite value of `other` is a value of this format.
        """
        if self.signed < other.signed or self.is_integer != other.is_integer:
            return False
        if self.is_integer:
            return self.bits - self.signed >= other.bits - other.signed
        return (
            self.mantissa_bits >= other.mantissa_bits
            and self.min_exponent - self.mantissa_bits <= other.min_exponent - other.mantissa_bits
            and self.max_exponent >= other.max_exponent
        )

    @property
    def infinity(self) -> int:
        """Code of +Inf in a format with "ieee" specials, without the unused bits."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def nan(self) -> int:
        """Code of the canonical NaN of PTX conversions: all ones, positive (PTX ISA 9.7.9, cvt); the only NaN of a "fnuz" format.

        A stored code has ones in its unused bits too.
        """
        return self._all_ones + (self.specials == "fnuz")

    @property
    def negative_zero(self) -> int:
        """Code of -0, or of 0 in a format whose zero has no sign."""
        return 0 if self.is_integer or not self.signed or self.specials == "fnuz" else 1 << (self.bits - 1)

    @property
    def _all_ones(self) -> int:
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1


# floats: IEEE 754-2019 table 3.5; tf32, bf16: PTX ISA 5.2.3; fp8, fp6, fp4, ue8m0: OCP MX 1.0 section 5.3; ue4m3: PTX ISA 5.2.3;
# fnuz: AMD CDNA3 ISA, 7.2; arXiv 2206.02915
F64 = Format("f64", 64, 11, 52, 1023, specials="ieee")
F32 = Format("f32", 32, 8, 23, 127, specials="ieee")
TF32 = Format("tf32", 32, 8, 10, 127, specials="ieee", unused_bits=13)
F16 = Format("f16", 16, 5, 10, 15, specials="ieee")
BF16 = Format("bf16", 16, 8, 7, 127, specials="ieee")
E5M2 = Format("e5m2", 8, 5, 2, 15, specials="ieee")
E4M3 = Format("e4m3", 8, 4, 3, 7, specials="nan")
E5M2FNUZ = Format("e5m2fnuz", 8, 5, 2, 16, specials="fnuz")
E4M3FNUZ = Format("e4m3fnuz", 8, 4, 3, 8, specials="fnuz")
E3M2 = Format("e3m2", 6, 3, 2, 3)
E2M3 = Format("e2m3", 6, 2, 3, 1)
E2M1 = Format("e2m1", 4, 2, 1, 1)
UE8M0 = Format("ue8m0", 8, 8, 0, 127, signed=False, specials="nan", subnormals=False)
UE4M3 = Format("ue4m3", 7, 4, 3, 7, signed=False, specials="nan")
# Block scales of sm_107a, for blocks of 16 and 32 elements of e2m1: CUTLASS 4.8, float_ue5m3_t. The top codes are disputed: published PTX
# notes and AMD's kernels have 114688 as 0xFE and NaN as 0xFF alone, as here; arXiv 2609.02846, Eq. 3, reserves the top exponent, so that
# 61440 is the largest. No instruction of a modelled target takes it
UE5M3 = Format("ue5m3", 8, 5, 3, 15, signed=False, specials="nan")
S32 = Format("s32", 32)
S8 = Format("s8", 8)
U8 = Format("u8", 8, signed=False)
S4 = Format("s4", 4)
U4 = Format("u4", 4, signed=False)
B1 = Format("b1", 1, signed=False)

FORMATS = {
    f.name: f
    for f in (
        F64, F32, TF32, F16, BF16, E5M2, E4M3, E5M2FNUZ, E4M3FNUZ, E3M2, E2M3, E2M1, UE8M0, UE4M3, UE5M3, S32, S8, U8, S4, U4, B1,
    )
}  # fmt: skip

ARRAY_FORMATS = {  # the format of an array by its dtype
    np.dtype(dtype): fmt
    for dtype, fmt in {
        np.float64: F64, np.float32: F32, np.float16: F16, ml_dtypes.bfloat16: BF16, ml_dtypes.float8_e5m2: E5M2,
        ml_dtypes.float8_e4m3fn: E4M3, ml_dtypes.float8_e5m2fnuz: E5M2FNUZ, ml_dtypes.float8_e4m3fnuz: E4M3FNUZ,
        ml_dtypes.float6_e3m2fn: E3M2, ml_dtypes.float6_e2m3fn: E2M3, ml_dtypes.float4_e2m1fn: E2M1,
        ml_dtypes.float8_e8m0fnu: UE8M0, np.int32: S32, np.int8: S8, np.uint8: U8, ml_dtypes.int4: S4, ml_dtypes.uint4: U4,
    }.items()
}  # fmt: skip
