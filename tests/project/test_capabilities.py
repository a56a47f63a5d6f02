"""Targets are rows: code asks for what a target has, and never for its name."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "tcemu"
NAMES = re.compile(r"sm_\d+[af]?\+?")
# The files of rows: a new target is added there. Each names targets because it is a table
ROWS = {
    "engine/isa/targets.py": "what each target has",
    "engine/isa/syntax_table.py": "which target has which instruction of the tensor cores",
    "engine/isa/statement_table.py": "which target has which other statement",
    "engine/architectures/model_rows.py": "the arithmetic of each target",
}
# Other files that name targets, and why a new target does not touch them
OTHERS = {
    "engine/backends/native/units.py": "the GPUs whose words were recorded, which may compute themselves",
    "operations/products/recipes.py": "rows: what is known of cuBLASLt's sums with fast accumulation off",
    "operations/products/wide.py": "rows: the target of each library's source",
    "operations/products/ozaki_slices.py": "rows: the target of each library's source",
    "operations/products/ozaki_moduli.py": "rows: the target of each library's source",
    "operations/functional/torch_cuda/fused_attention.py": "PyTorch's attention on Hopper: its kernels' own target",
    "operations/functional/torch_cuda/product_kernels.py": "PyTorch's products on Hopper: their kernels' own target",
    "uses/replay/order_candidates.py": "candidates: four targets that have every arithmetic of these formats",
    "uses/study/claims/attention_errors.py": "a claim's own targets",
    "uses/study/claims/fp8_sums.py": "a claim's own targets",
    "uses/study/claims/long_context.py": "a claim's own targets",
    "uses/study/claims/narrow_sums.py": "a claim's own targets",
    "uses/study/claims/single_results.py": "a claim's own targets",
    "uses/study/claims/wide_products.py": "a claim's own targets",
    "faces/commands/demo_command.py": "the demonstration's own target",
}
NAME_TESTS = ("startswith", "endswith", "removeprefix", "removesuffix", "strip", "lstrip", "rstrip", "replace")


@cache
def trees() -> dict[str, ast.Module]:
    """The modules that have a target, or its name."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    return {name: ast.parse(text) for name, text in texts.items() if re.search(r"target|[\"'(]sm", text, re.IGNORECASE)}


def named_targets(tree: ast.AST) -> set[str]:
    """The strings of a module that are names of targets, whole."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {text for text in texts if NAMES.fullmatch(text)}


def name_tests(tree: ast.AST) -> Iterator[str]:
    """Calls that look into the name of a target: `target.startswith(...)`, `fullmatch("sm_...", target)`, and `target[-1]`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in NAME_TESTS:
            if "target" in ast.unparse(node.func.value).lower() or any(named_prefix(argument) for argument in node.args):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and last_name(node.func) in ("match", "fullmatch", "search"):
            yield from (ast.unparse(node) for argument in node.args[:1] if named_prefix(argument))
        elif (
            isinstance(node, ast.Subscript)
            and last_name(node.value) == "target"
            and re.fullmatch(r"(\w+\.)*target", ast.unparse(node.value))
        ):
            yield ast.unparse(node)


def last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def named_prefix(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"\(?sm_?", node.value) is not None


def test_targets_are_named_in_rows_alone():
    found = {name for name, tree in trees().items() if named_targets(tree)}
    assert found == ROWS.keys() | OTHERS.keys()


# Expressions that take a name apart without asking anything of the target
SPELLINGS = {
    ("engine/isa/targets.py", "fullmatch('sm_(\\\\d+)([af]?)', name)"),  # `parse_target_name`, the one place
    ("engine/isa/targets.py", "fullmatch('sm ?\\\\d.*', unknown)"),  # names that people write
    ("engine/backends/cuda/nvrtc.py", "architecture.startswith('sm_')"),  # NVRTC's "sm_90" or "compute_90"
    ("kernels/ptx/cuda_source.py", "resolve_target(target).replace('sm_', 'compute_')"),
    ("kernels/ptx/scalar/number_conversions.py", "target[0]"),  # the target format of a conversion
    ("kernels/ptx/scalar/number_conversions.py", "target[1:]"),
}


def test_no_code_looks_into_the_name_of_a_target():
    found = {(name, call) for name, tree in trees().items() for call in name_tests(tree)}
    assert found == SPELLINGS, sorted(found ^ SPELLINGS)


def test_the_rule_finds_what_it_forbids():
    for text in (
        "target.startswith('sm_10')", "fullmatch('sm_1[01]', x)", "int(target.strip('smaf'))", "x = target[-1] in 'af'",
        "op.target.rstrip('af')",
    ):  # fmt: skip
        assert list(name_tests(ast.parse(text))), text
    assert not list(name_tests(ast.parse("row.name.startswith('tcgen05')")))
    assert named_targets(ast.parse("x == 'sm_75'")) == {"sm_75"} and not named_targets(ast.parse("'needs sm_80 or later'"))


# The rows by which Rubin came: a new target touches these files of the package and no other
RUBIN = {
    "engine/isa/targets.py": "its names, what it has, its GPUs",
    "engine/isa/tcgen05_kinds.py": "K of 64 and 128, ue5m3, their codes in the descriptor",
    "engine/isa/syntax_table.py": "the forms of tcgen05 that the target ending in a has",
    "engine/isa/statement_table.py": "stochastic rounding, which the target ending in a has",
}
TEXTS = {"engine/formats/number_formats.py": "a comment: whose format ue5m3 is"}  # prose that names Rubin


def test_a_new_target_is_rows():
    """Counted, so that code which learns of Rubin is noticed."""
    naming = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if re.search(r"sm_?107|[Rr]ubin|10, 7", path.read_text())}
    assert naming == RUBIN.keys() | TEXTS.keys() and len(RUBIN) == 4
    assert RUBIN.keys() - {"engine/isa/tcgen05_kinds.py"} <= ROWS.keys()
    kinds = trees()["engine/isa/tcgen05_kinds.py"]  # a table: its only code is a range and the K that every target has
    assert [node.name for node in ast.walk(kinds) if isinstance(node, ast.FunctionDef)] == ["_multiples", "k"]
