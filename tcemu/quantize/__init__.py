"""Quantisation to narrow formats: operands of a product with their scales, and the block formats MX and NVFP4."""

from tcemu.quantize.block_formats import BLOCK_FORMATS as BLOCK_FORMATS
from tcemu.quantize.block_formats import BlockFormat as BlockFormat
from tcemu.quantize.block_formats import BlockQuantized as BlockQuantized
from tcemu.quantize.block_formats import block_dequantize as block_dequantize
from tcemu.quantize.block_formats import block_quantize as block_quantize
from tcemu.quantize.hadamard import SIGNS_16 as SIGNS_16
from tcemu.quantize.quantizer import Quantizer as Quantizer
from tcemu.quantize.scale_rules import RULES as RULES
