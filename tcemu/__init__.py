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
from tcemu.operations.mma import mma_sp as mma_sp
from tcemu.operations.mma import pack as pack
from tcemu.operations.mma import unpack as unpack
from tcemu.operations.sparsify import densify as densify
from tcemu.operations.sparsify import sparsify as sparsify
from tcemu.study.explain import explain as explain
