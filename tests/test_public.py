"""The public names are those that other programs call, and nothing else by accident."""

import inspect
import types

import tcemu

NAMES = {
    "Instruction", "parse", "check", "is_supported", "targets", "instructions", "evidence",
    "mma", "dot", "pack", "unpack", "gemm", "Model", "model", "models", "checked", "explain",
    "mma_sp", "sparsify", "densify",
    "wgmma", "descriptor", "uniform_descriptor", "Warpgroup", "SharedLayout", "to_shared", "from_shared",
    "block_quantize", "block_dequantize", "BlockFormat", "BlockQuantized",
    "Recipe", "recipe", "Quantizer", "matmul", "dot_general", "emulate", "compare",
    "wmma_load", "wmma_mma", "wmma_store", "ldmatrix", "stmatrix", "movmatrix",
    "Unsupported", "NotModelled", "UndefinedBehaviour",
}  # fmt: skip


def test_the_package_exports_its_names_and_its_modules_only():
    exported = {name for name in vars(tcemu) if not name.startswith("_")}
    assert exported >= NAMES
    assert all(isinstance(getattr(tcemu, name), types.ModuleType) for name in exported - NAMES)


def test_every_name_says_what_it_is():
    for name in NAMES:
        assert len(inspect.getdoc(getattr(tcemu, name)) or "") > 40, name


def test_the_errors_are_value_errors():
    assert all(issubclass(error, ValueError) for error in (tcemu.Unsupported, tcemu.NotModelled, tcemu.UndefinedBehaviour))
