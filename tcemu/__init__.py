"""NVIDIA's tensor-core instructions, bit for bit, as pure JAX functions over thousands of simulated warps."""

import ast
import sys
from functools import cache
from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # where the public names are; `__getattr__` reads these lines, so that --help needs no JAX
    from tcemu import formats, fuzz, ptx, quantize, replay, silicon, study, viz
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
    from tcemu.isa.targets import gpus
    from tcemu.linalg import recipes
    from tcemu.linalg.attention import attention
    from tcemu.linalg.delayed import DelayedScaling, delayed_matmul
    from tcemu.linalg.dot_general import dot_general
    from tcemu.linalg.flash import Flash
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
    from tcemu.quantize.block_formats import BlockFormat, BlockQuantized
    from tcemu.quantize.blocks import block_dequantize, block_quantize
    from tcemu.quantize.operands import Quantizer
    from tcemu.shared_memory import SharedLayout, descriptor, from_shared, to_shared

__version__ = "0.1.0"  # pyproject.toml takes it from here, so that it is the version of the code that runs, installed or not

__all__ = [  # noqa: RUF022  in groups
    # what PTX has
    "Instruction", "parse", "check", "is_supported", "targets", "gpus", "instructions",
    # the arithmetic of each instruction
    "Model", "model", "models", "evidence", "backends", "execution",
    # instructions, on registers and on memory
    "mma", "mma_sp", "wmma_load", "wmma_mma", "wmma_store", "wgmma", "Warpgroup", "ldmatrix", "stmatrix", "movmatrix",
    "SharedLayout", "descriptor", "uniform_descriptor", "to_shared", "from_shared", "checked", "cache_compilations",
    # the same on matrices of codes
    "dot", "pack", "unpack", "sparsify", "densify",
    # products of float arrays, and how they are quantised
    "gemm", "matmul", "dot_general", "ragged_dot", "Recipe", "recipe", "KernelRecipe", "Quantizer", "DelayedScaling", "delayed_matmul",
    "attention", "Flash",
    "BlockFormat", "BlockQuantized", "block_quantize", "block_dequantize",
    # whole functions, and single results
    "emulate", "compare", "explain",
    # errors
    "Unsupported", "NotModelled", "UndefinedBehaviour",
    # modules
    "formats", "quantize", "recipes", "policies", "viz", "fuzz", "study", "replay", "silicon", "ptx",
]  # fmt: skip


@cache
def _homes() -> dict[str, str]:
    """Every public name and the module that it comes from, as the block above says."""
    source = sys.modules[__name__].__spec__.loader.get_source(__name__)  # type: ignore[union-attr]
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    return {alias.name: node.module or "" for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package, at its first use."""
    home = None if name.startswith("__") else _homes().get(name, "tcemu")
    try:
        module = import_module(home or "")
        value = getattr(module, name) if home != "tcemu" and hasattr(module, name) else import_module(f"{home}.{name}")
    except (ModuleNotFoundError, ValueError) as error:
        if home is not None and getattr(error, "name", None) != f"{home}.{name}":
            raise
        raise AttributeError(f"module 'tcemu' has no attribute {name!r}; dir(tcemu) has the public names") from None
    if isfunction(value):
        from tcemu.signatures import readable

        value.__signature__ = readable(value)  # type: ignore[attr-defined]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names; the package's own modules are there too, and no user needs them."""
    return [*__all__, "__version__", "__doc__", "__file__", "__name__", "__path__"]
