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
    from tcemu.base.checking import checked
    from tcemu.base.compilation import cache_compilations
    from tcemu.base.errors import NotModelled, UndefinedBehaviour, Unsupported
    from tcemu.base.execution import execution
    from tcemu.emulated_functions import emulate
    from tcemu.engine.architectures.lookup import evidence, get_model, list_models
    from tcemu.engine.arithmetic.model import Model
    from tcemu.engine.backends.installation import show_versions
    from tcemu.engine.instructions.dot import dot
    from tcemu.engine.instructions.mma import mma, mma_sp
    from tcemu.engine.instructions.movers import ldmatrix, movmatrix, stmatrix
    from tcemu.engine.instructions.register_packing import pack, unpack
    from tcemu.engine.instructions.sparsify import densify, prune, sparsify
    from tcemu.engine.instructions.wgmma import wgmma
    from tcemu.engine.instructions.wmma import wmma_load, wmma_mma, wmma_store
    from tcemu.engine.isa.families import Instruction
    from tcemu.engine.isa.grammar import parse
    from tcemu.engine.isa.legality import check, targets
    from tcemu.operations.products import recipes
    from tcemu.operations.products.attention.dot_product_attention import attention
    from tcemu.operations.products.dot_general import dot_general
    from tcemu.operations.products.gemm import gemm
    from tcemu.operations.products.matmul import matmul
    from tcemu.operations.products.ragged.ragged_dot import ragged_dot
    from tcemu.operations.products.recipes import Recipe, get_recipe
    from tcemu.uses.emulation import policies
    from tcemu.uses.emulation.compare import compare
    from tcemu.uses.explanation.explain import explain

__version__ = "1.0.0rc1"  # pyproject.toml takes it from here, so that it is the version of the code that runs, installed or not

PUBLIC_NAMES = (  # the module that defines them, and the names
    # what PTX has
    ("tcemu.engine.isa.families", "Instruction"),
    ("tcemu.engine.isa.grammar", "parse"),
    ("tcemu.engine.isa.legality", "check targets"),
    # the arithmetic of each instruction
    ("tcemu.engine.arithmetic.model", "Model"),
    ("tcemu.engine.architectures.lookup", "get_model list_models evidence"),
    ("tcemu.base.execution", "execution"),
    # instructions, on registers and on memory
    ("tcemu.engine.instructions.mma", "mma mma_sp"),
    ("tcemu.engine.instructions.wmma", "wmma_load wmma_mma wmma_store"),
    ("tcemu.engine.instructions.wgmma", "wgmma"),
    ("tcemu.engine.instructions.movers", "ldmatrix stmatrix movmatrix"),
    ("tcemu.base.checking", "checked"),
    ("tcemu.base.compilation", "cache_compilations"),
    ("tcemu.engine.backends.installation", "show_versions"),
    # the same on matrices of codes
    ("tcemu.engine.instructions.dot", "dot"),
    ("tcemu.engine.instructions.register_packing", "pack unpack"),
    ("tcemu.engine.instructions.sparsify", "sparsify densify prune"),
    # products of float arrays
    ("tcemu.operations.products.gemm", "gemm"),
    ("tcemu.operations.products.matmul", "matmul"),
    ("tcemu.operations.products.dot_general", "dot_general"),
    ("tcemu.operations.products.ragged.ragged_dot", "ragged_dot"),
    ("tcemu.operations.products.attention.dot_product_attention", "attention"),
    ("tcemu.operations.products.recipes", "Recipe get_recipe"),
    # whole functions, and single results
    ("tcemu.emulated_functions", "emulate"),
    ("tcemu.uses.emulation.compare", "compare"),
    ("tcemu.uses.explanation.explain", "explain"),
    # errors
    ("tcemu.base.errors", "Unsupported NotModelled UndefinedBehaviour"),
    # modules, each with a subject
    ("tcemu", "formats isa layouts instructions backends quantize products functional"),
    ("tcemu.operations.products", "recipes"),
    ("tcemu.uses.emulation", "policies"),
    ("tcemu", "fuzz study replay drift silicon ptx viz"),
)

__all__, __getattr__, __dir__ = lazy_names(__name__, PUBLIC_NAMES)
