"""NVIDIA's tensor-core instructions, bit for bit, as pure JAX functions over thousands of simulated warps."""

from tcemu.arithmetic.program import Model as Model
from tcemu.catalog import check as check
from tcemu.catalog import instructions as instructions
from tcemu.catalog import is_supported as is_supported
from tcemu.catalog import targets as targets
from tcemu.checked import checked as checked
from tcemu.errors import NotModelled as NotModelled
from tcemu.errors import UndefinedBehaviour as UndefinedBehaviour
from tcemu.errors import Unsupported as Unsupported
from tcemu.gemm import gemm as gemm
from tcemu.grammar import parse as parse
from tcemu.instructions import Instruction as Instruction
from tcemu.models import models as models
from tcemu.operations.mma import dot as dot
from tcemu.operations.mma import evidence as evidence
from tcemu.operations.mma import mma as mma
from tcemu.operations.mma import pack as pack
from tcemu.operations.mma import unpack as unpack
from tcemu.operations.movement import ldmatrix as ldmatrix
from tcemu.operations.movement import movmatrix as movmatrix
from tcemu.operations.movement import stmatrix as stmatrix
from tcemu.operations.wmma import wmma_load as wmma_load
from tcemu.operations.wmma import wmma_mma as wmma_mma
from tcemu.operations.wmma import wmma_store as wmma_store
