"""Number formats: what the bits of one element mean. Where an element sits in a register is `packing`'s affair.

`table` has the formats, `rounding` the modes, `coding` the way from codes to numbers and back, `arrays` that between codes and arrays.
Codes are raw bits in the smallest unsigned dtype that holds them (uint8, uint16, uint32); a 64-bit code is uint32[..., 2], low word first.
Only integers touch a value here, so that subnormals and roundings are the same on every backend.
"""

from tcemu.formats.arrays import NO_GRADIENT as NO_GRADIENT
from tcemu.formats.arrays import array_codes as array_codes
from tcemu.formats.arrays import array_format as array_format
from tcemu.formats.arrays import from_float as from_float
from tcemu.formats.arrays import round_to as round_to
from tcemu.formats.arrays import to_float as to_float
from tcemu.formats.coding import Number as Number
from tcemu.formats.coding import code_limbs as code_limbs
from tcemu.formats.coding import convert as convert
from tcemu.formats.coding import decode as decode
from tcemu.formats.coding import decode_limbs as decode_limbs
from tcemu.formats.coding import encode as encode
from tcemu.formats.coding import encode_limbs as encode_limbs
from tcemu.formats.coding import limbs_code as limbs_code
from tcemu.formats.rounding import ROUNDINGS as ROUNDINGS
from tcemu.formats.rounding import Rounding as Rounding
from tcemu.formats.rounding import cuts as cuts
from tcemu.formats.rounding import round_up as round_up
from tcemu.formats.table import ARRAY_FORMATS as ARRAY_FORMATS
from tcemu.formats.table import B1 as B1
from tcemu.formats.table import BF16 as BF16
from tcemu.formats.table import E2M1 as E2M1
from tcemu.formats.table import E2M3 as E2M3
from tcemu.formats.table import E3M2 as E3M2
from tcemu.formats.table import E4M3 as E4M3
from tcemu.formats.table import E5M2 as E5M2
from tcemu.formats.table import F16 as F16
from tcemu.formats.table import F32 as F32
from tcemu.formats.table import F64 as F64
from tcemu.formats.table import FORMATS as FORMATS
from tcemu.formats.table import S4 as S4
from tcemu.formats.table import S8 as S8
from tcemu.formats.table import S32 as S32
from tcemu.formats.table import TF32 as TF32
from tcemu.formats.table import U4 as U4
from tcemu.formats.table import U8 as U8
from tcemu.formats.table import UE4M3 as UE4M3
from tcemu.formats.table import UE8M0 as UE8M0
from tcemu.formats.table import Format as Format
