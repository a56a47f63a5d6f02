"""The same number formats by other authors: ml_dtypes' dtypes and gfloat's descriptions, by PTX name. Oracles for tests only."""

import gfloat
import gfloat.formats as described
import ml_dtypes
import numpy as np
from gfloat import FormatInfo, RoundMode

DTYPES = {
    "f64": np.float64,
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,  # its codes without sign
    "s32": np.int32,
    "s8": np.int8,
    "u8": np.uint8,
    "s4": ml_dtypes.int4,
    "u4": ml_dtypes.uint4,
}
# ml_dtypes casts to e8m0 round ties up and 2^21 values below 2^-126 wrongly, so e8m0 is left to gfloat and the reference
CAST_BY_ML_DTYPES = ("f16", "bf16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1")

_E4M3 = described.format_info_ocp_e4m3


def _fnuz(name: str, precision: int, bias: int) -> FormatInfo:
    """A format of 8 bits with one NaN, at the code of -0, and no Inf."""
    return FormatInfo(
        name=name, k=8, precision=precision, bias=bias, has_nz=False, domain=_E4M3.domain, num_high_nans=0, has_subnormals=True,
        is_signed=True, is_twos_complement=False,
    )  # fmt: skip


def _unsigned(name: str, bits: int, bias: int) -> FormatInfo:
    """Return a format without sign and with three mantissa bits, as NVIDIA's block scales have it."""
    return FormatInfo(
        name=name,
        k=bits,
        precision=4,
        bias=bias,
        has_nz=False,
        domain=_E4M3.domain,
        num_high_nans=1,
        has_subnormals=True,
        is_signed=False,
        is_twos_complement=False,
    )


GFLOAT = {
    "e5m2fnuz": _fnuz("e5m2fnuz", 3, 16),
    "e4m3fnuz": _fnuz("e4m3fnuz", 4, 8),
    "f64": described.format_info_binary64,
    "f32": described.format_info_binary32,
    "tf32": FormatInfo(
        name="tf32",
        k=19,
        precision=11,
        bias=127,
        has_nz=True,
        domain=described.format_info_binary32.domain,
        num_high_nans=2**10 - 1,
        has_subnormals=True,
        is_signed=True,
        is_twos_complement=False,
    ),
    "f16": described.format_info_binary16,
    "bf16": described.format_info_bfloat16,
    "e5m2": described.format_info_ocp_e5m2,
    "e4m3": _E4M3,
    "e3m2": described.format_info_ocp_e3m2,
    "e2m3": described.format_info_ocp_e2m3,
    "e2m1": described.format_info_ocp_e2m1,
    "ue8m0": described.format_info_ocp_e8m0,
    "ue4m3": _unsigned("ue4m3", 7, 7),
    "ue5m3": _unsigned("ue5m3", 8, 15),
}
GFLOAT_MODES = {
    "RN": RoundMode.TiesToEven,
    "RZ": RoundMode.TowardZero,
    "RM": RoundMode.TowardNegative,
    "RP": RoundMode.TowardPositive,
}


def round_with_gfloat(name: str, x: np.ndarray, mode: str, saturate: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64 values rounded by gfloat, and where gfloat has an answer.

    It has none for NaN in a format without one, nor for the sign of unsigned formats; a format without specials is asked to saturate, as it
    always does on a GPU; and ue8m0 has no zero, nor anything below its least value.
    """
    info = GFLOAT[name]
    valid = np.ones(x.shape, bool)
    if info.num_nans == 0:
        valid &= ~np.isnan(x)
        saturate = True
    if not info.is_signed:
        valid &= ~(x < 0) & ~(np.isnan(x) & np.signbit(x))
    if name == "ue8m0":
        valid &= ~(x < 2.0**-127)
    return gfloat.round_ndarray(info, np.where(valid, x, 1.0), GFLOAT_MODES[mode], saturate), valid


def same_floats(got: np.ndarray, want: np.ndarray) -> bool:
    """Equal bit for bit as float32, every NaN alike."""
    with np.errstate(invalid="ignore"):  # narrowing a signalling NaN
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    nan = np.isnan(want)
    return bool((np.isnan(got) == nan).all() and (got[~nan].view(np.uint32) == want[~nan].view(np.uint32)).all())
