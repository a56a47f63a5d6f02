"""NVIDIA's tensor-core instructions, bit for bit, as pure JAX functions over thousands of simulated warps."""

from typing import TYPE_CHECKING

from tcemu.base.lazy_names import lazy_names

if TYPE_CHECKING:  # for type checkers; a test holds these lines to the table below
    from tcemu import (
        backends,
        drift,
        formats,
        functional,
        fuzz,
        instructions,
        isa,
        layouts,
        products,
        ptx,
        quantize,
        replay,
        silicon,
        study,
        viz,
    )
    from tcemu.architectures.lookup import evidence, get_model, list_models
    from tcemu.arithmetic.model import Model
    from tcemu.backends.installation import show_versions
    from tcemu.base.checking import checked
    from tcemu.base.compilation import cache_compilations
    from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported
    from tcemu.base.execution import execution
    from tcemu.emulation import policies
    from tcemu.emulation.compare import compare
    from tcemu.emulation.emulate import emulate
    from tcemu.explanation.explain import explain
    from tcemu.instructions.dot import dot
    from tcemu.instructions.mma import mma, mma_sp
    from tcemu.instructions.movers import ldmatrix, movmatrix, stmatrix
    from tcemu.instructions.register_packing import pack, unpack
    from tcemu.instructions.sparsify import densify, prune, sparsify
    from tcemu.instructions.wgmma import wgmma
    from tcemu.instructions.wmma import wmma_load, wmma_mma, wmma_store
    from tcemu.isa.families import Instruction
    from tcemu.isa.grammar import parse
    from tcemu.isa.legality import check, targets
    from tcemu.products import recipes
    from tcemu.products.attention.dot_product_attention import attention
    from tcemu.products.dot_general import dot_general
    from tcemu.products.gemm import gemm
    from tcemu.products.matmul import matmul
    from tcemu.products.ragged.ragged_dot import ragged_dot
    from tcemu.products.recipes import Recipe, get_recipe

__version__ = "1.0.0rc1"  # pyproject.toml takes it from here, so that it is the version of the code that runs, installed or not

PUBLIC_NAMES = (  # the module that defines them, and the names
    # what PTX has
    ("tcemu.isa.families", "Instruction"),
    ("tcemu.isa.grammar", "parse"),
    ("tcemu.isa.legality", "check targets"),
    # the arithmetic of each instruction
    ("tcemu.arithmetic.model", "Model"),
    ("tcemu.architectures.lookup", "get_model list_models evidence"),
    ("tcemu.base.execution", "execution"),
    # instructions, on registers and on memory
    ("tcemu.instructions.mma", "mma mma_sp"),
    ("tcemu.instructions.wmma", "wmma_load wmma_mma wmma_store"),
    ("tcemu.instructions.wgmma", "wgmma"),
    ("tcemu.instructions.movers", "ldmatrix stmatrix movmatrix"),
    ("tcemu.base.checking", "checked"),
    ("tcemu.base.compilation", "cache_compilations"),
    ("tcemu.backends.installation", "show_versions"),
    # the same on matrices of codes
    ("tcemu.instructions.dot", "dot"),
    ("tcemu.instructions.register_packing", "pack unpack"),
    ("tcemu.instructions.sparsify", "sparsify densify prune"),
    # products of float arrays
    ("tcemu.products.gemm", "gemm"),
    ("tcemu.products.matmul", "matmul"),
    ("tcemu.products.dot_general", "dot_general"),
    ("tcemu.products.ragged.ragged_dot", "ragged_dot"),
    ("tcemu.products.attention.dot_product_attention", "attention"),
    ("tcemu.products.recipes", "Recipe get_recipe"),
    # whole functions, and single results
    ("tcemu.emulation.emulate", "emulate"),
    ("tcemu.emulation.compare", "compare"),
    ("tcemu.explanation.explain", "explain"),
    # errors
    ("tcemu.base.errors", "Unsupported NotModelled UndefinedBehaviour"),
    # modules, each with a subject
    ("tcemu", "formats isa layouts instructions backends quantize products functional"),
    ("tcemu.products", "recipes"),
    ("tcemu.emulation", "policies"),
    ("tcemu", "fuzz study replay drift silicon ptx viz"),
)

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC_NAMES)
