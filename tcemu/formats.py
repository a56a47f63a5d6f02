"""Number formats: what the bits of one element mean. Where an element sits in a register is `packing`'s affair."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """One number format, as PTX names it.

    A finite float is (-1)^sign * significand * 2^(exponent - mantissa_bits); subnormals use the exponent of the smallest normal.
    """

    name: str
    bits: int  # width of a code, from bit 0
    exponent_bits: int = 0  # 0: an integer format
    mantissa_bits: int = 0  # stored fraction bits
    bias: int = 0
    signed: bool = True
    specials: str = "none"  # "ieee": Inf and NaN; "nan": all ones is NaN; "none": every code is finite
    unused_bits: int = 0  # low bits of the code that the hardware ignores (tf32 in a 32-bit word)

    def __repr__(self) -> str:
        return self.name


# floats: IEEE 754-2019 table 3.5; tf32, bf16: PTX ISA 5.2.3; fp8, fp6, fp4, ue8m0: OCP MX 1.0 section 5.3; ue4m3: PTX ISA 5.2.3
F64 = Format("f64", 64, 11, 52, 1023, specials="ieee")
F32 = Format("f32", 32, 8, 23, 127, specials="ieee")
TF32 = Format("tf32", 32, 8, 10, 127, specials="ieee", unused_bits=13)
F16 = Format("f16", 16, 5, 10, 15, specials="ieee")
BF16 = Format("bf16", 16, 8, 7, 127, specials="ieee")
E5M2 = Format("e5m2", 8, 5, 2, 15, specials="ieee")
E4M3 = Format("e4m3", 8, 4, 3, 7, specials="nan")
E3M2 = Format("e3m2", 6, 3, 2, 3)
E2M3 = Format("e2m3", 6, 2, 3, 1)
E2M1 = Format("e2m1", 4, 2, 1, 1)
UE8M0 = Format("ue8m0", 8, 8, 0, 127, signed=False, specials="nan")
UE4M3 = Format("ue4m3", 7, 4, 3, 7, signed=False, specials="nan")
S32 = Format("s32", 32)
S8 = Format("s8", 8)
U8 = Format("u8", 8, signed=False)
S4 = Format("s4", 4)
U4 = Format("u4", 4, signed=False)
B1 = Format("b1", 1, signed=False)

FORMATS = {f.name: f for f in (F64, F32, TF32, F16, BF16, E5M2, E4M3, E3M2, E2M3, E2M1, UE8M0, UE4M3, S32, S8, U8, S4, U4, B1)}
