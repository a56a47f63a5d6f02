"""Quantisation to narrow formats: operands of a product with their scales, and the block formats MX and NVFP4."""

from tcemu.operations.quantize.block_formats import BLOCK_FORMATS as BLOCK_FORMATS
from tcemu.operations.quantize.block_formats import BlockFormat as BlockFormat
from tcemu.operations.quantize.block_formats import BlockQuantized as BlockQuantized
from tcemu.operations.quantize.block_formats import block_dequantize as block_dequantize
from tcemu.operations.quantize.block_formats import block_quantize as block_quantize
from tcemu.operations.quantize.contract_matrix import ContractMatrix as ContractMatrix
from tcemu.operations.quantize.contract_matrix import contract_matrix as contract_matrix
from tcemu.operations.quantize.contract_rows import CONTRACTS as CONTRACTS
from tcemu.operations.quantize.contract_rows import get_contract as get_contract
from tcemu.operations.quantize.contracts import QuantizedGroups as QuantizedGroups
from tcemu.operations.quantize.contracts import QuantizerContract as QuantizerContract
from tcemu.operations.quantize.contracts import dequantize_groups as dequantize_groups
from tcemu.operations.quantize.hadamard import SIGNS_16 as SIGNS_16
from tcemu.operations.quantize.quantizer import Quantizer as Quantizer
from tcemu.operations.quantize.scale_layouts import SCALE_LAYOUTS as SCALE_LAYOUTS
from tcemu.operations.quantize.scale_layouts import arrange_scales as arrange_scales
from tcemu.operations.quantize.scale_layouts import restore_scales as restore_scales
from tcemu.operations.quantize.scale_rules import RULES as RULES
