"""Number formats: the meaning of the bits of one element. `tcemu.engine.layouts.packing` says where the element sits in a register.

`number_formats` lists the formats and `rounding` the rounding modes. `coding` decodes and encodes codes; `float_arrays` converts between
codes and arrays of numbers. Codes are raw bits in the smallest unsigned dtype that holds them (uint8, uint16, uint32); a 64-bit code is
uint32[..., 2], low word first. All arithmetic here is integer arithmetic, so every backend treats subnormals and rounding the same.
"""

from tcemu.engine.formats.coding import Number as Number
from tcemu.engine.formats.coding import codes_to_limbs as codes_to_limbs
from tcemu.engine.formats.coding import convert as convert
from tcemu.engine.formats.coding import decode as decode
from tcemu.engine.formats.coding import decode_limbs as decode_limbs
from tcemu.engine.formats.coding import encode as encode
from tcemu.engine.formats.coding import encode_limbs as encode_limbs
from tcemu.engine.formats.coding import limbs_to_codes as limbs_to_codes
from tcemu.engine.formats.float_arrays import NO_GRADIENT as NO_GRADIENT
from tcemu.engine.formats.float_arrays import array_codes as array_codes
from tcemu.engine.formats.float_arrays import array_format as array_format
from tcemu.engine.formats.float_arrays import from_float as from_float
from tcemu.engine.formats.float_arrays import number_array as number_array
from tcemu.engine.formats.float_arrays import round_float as round_float
from tcemu.engine.formats.float_arrays import to_float as to_float
from tcemu.engine.formats.number_formats import ARRAY_FORMATS as ARRAY_FORMATS
from tcemu.engine.formats.number_formats import B1 as B1
from tcemu.engine.formats.number_formats import BF16 as BF16
from tcemu.engine.formats.number_formats import E2M1 as E2M1
from tcemu.engine.formats.number_formats import E2M3 as E2M3
from tcemu.engine.formats.number_formats import E3M2 as E3M2
from tcemu.engine.formats.number_formats import E4M3 as E4M3
from tcemu.engine.formats.number_formats import E4M3FNUZ as E4M3FNUZ
from tcemu.engine.formats.number_formats import E5M2 as E5M2
from tcemu.engine.formats.number_formats import E5M2FNUZ as E5M2FNUZ
from tcemu.engine.formats.number_formats import F16 as F16
from tcemu.engine.formats.number_formats import F32 as F32
from tcemu.engine.formats.number_formats import F64 as F64
from tcemu.engine.formats.number_formats import FORMATS as FORMATS
from tcemu.engine.formats.number_formats import S4 as S4
from tcemu.engine.formats.number_formats import S8 as S8
from tcemu.engine.formats.number_formats import S32 as S32
from tcemu.engine.formats.number_formats import TF32 as TF32
from tcemu.engine.formats.number_formats import U4 as U4
from tcemu.engine.formats.number_formats import U8 as U8
from tcemu.engine.formats.number_formats import UE4M3 as UE4M3
from tcemu.engine.formats.number_formats import UE5M3 as UE5M3
from tcemu.engine.formats.number_formats import UE8M0 as UE8M0
from tcemu.engine.formats.number_formats import Format as Format
from tcemu.engine.formats.rounding import CONVERSION_ROUNDINGS as CONVERSION_ROUNDINGS
from tcemu.engine.formats.rounding import ROUNDINGS as ROUNDINGS
from tcemu.engine.formats.rounding import Rounding as Rounding
from tcemu.engine.formats.rounding import round_magnitude as round_magnitude
from tcemu.engine.formats.rounding import truncates as truncates
