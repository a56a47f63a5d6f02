"""NVIDIA's tensor-core instructions, bit for bit, as pure JAX functions over thousands of simulated warps."""

from tcemu import formats, fuzz, quantize, replay, silicon, viz
from tcemu.architectures.lookup import evidence, model, models
from tcemu.arithmetic.model import Model
from tcemu.checking import checked
from tcemu.compilation import cache_compilations
from tcemu.emulation import policies
from tcemu.emulation.compare import compare
from tcemu.emulation.emulate import emulate
from tcemu.errors import NotModelled, UndefinedBehaviour, Unsupported
from tcemu.executing import execution
from tcemu.explanation.explain import explain
from tcemu.isa.catalog import check, instructions, is_supported, targets
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import Instruction
from tcemu.linalg import recipes
from tcemu.linalg.dot_general import dot_general
from tcemu.linalg.gemm import gemm
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.matmul import matmul
from tcemu.linalg.ragged_dot import ragged_dot
from tcemu.linalg.recipes import Recipe, recipe
from tcemu.operations.dot import dot
from tcemu.operations.mma import mma, mma_sp
from tcemu.operations.movement import ldmatrix, movmatrix, stmatrix
from tcemu.operations.registers import pack, unpack
from tcemu.operations.serving import backends
from tcemu.operations.sparsify import densify, sparsify
from tcemu.operations.warpgroup import Warpgroup
from tcemu.operations.wgmma import uniform_descriptor, wgmma
from tcemu.operations.wmma import wmma_load, wmma_mma, wmma_store
from tcemu.quantize.blocks import BlockFormat, BlockQuantized, block_dequantize, block_quantize
from tcemu.quantize.operands import Quantizer
from tcemu.shared_memory import SharedLayout, descriptor, from_shared, to_shared

__version__ = "0.1.0"  # pyproject.toml takes it from here, so that it is the version of the code that runs, installed or not

__all__ = [  # noqa: RUF022  in groups
    # what PTX has
    "Instruction", "parse", "check", "is_supported", "targets", "instructions",
    # the arithmetic of each instruction
    "Model", "model", "models", "evidence", "backends", "execution",
    # instructions, on registers and on memory
    "mma", "mma_sp", "wmma_load", "wmma_mma", "wmma_store", "wgmma", "Warpgroup", "ldmatrix", "stmatrix", "movmatrix",
    "SharedLayout", "descriptor", "uniform_descriptor", "to_shared", "from_shared", "checked", "cache_compilations",
    # the same on matrices of codes
    "dot", "pack", "unpack", "sparsify", "densify",
    # products of float arrays, and how they are quantised
    "gemm", "matmul", "dot_general", "ragged_dot", "Recipe", "recipe", "KernelRecipe", "Quantizer",
    "BlockFormat", "BlockQuantized", "block_quantize", "block_dequantize",
    # whole functions, and single results
    "emulate", "compare", "explain",
    # errors
    "Unsupported", "NotModelled", "UndefinedBehaviour",
    # modules
    "formats", "quantize", "recipes", "policies", "viz", "fuzz", "replay", "silicon",
]  # fmt: skip
