"""The sentence on a product's unit: where two units of a target have other sums, and that what it tells to ask for is the other one."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.cli import main
from tcemu.engine.architectures.lookup import find_row
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import RECIPE_NAMES, instructions
from tcemu.formats import F32, S32
from tcemu.operations.products.unit_choice import describe_unit

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((2, 16, 16), np.float32)
MMA = "Unit: mma.sync. It multiplies e4m3 as f16 there. Libraries use wgmma on sm_90a, whose sums differ: op='e4m3 wgmma' or recipe='fp8"
WGMMA = "Unit: wgmma, which libraries use on sm_90a. mma.sync has other sums there: op='e4m3'."


def test_the_natural_question():
    assert describe_unit("e4m3", "H100").startswith(MMA) and describe_unit("e4m3 wgmma", "H100") == WGMMA
    assert "tcgen05 on sm_100a, whose sums differ: op='e4m3 tcgen05' or recipe='fp8 on sm_100a'" in describe_unit("e4m3", "B200")
    assert describe_unit("e4m3 tcgen05", "B200").startswith("Unit: tcgen05, which libraries use on sm_100a. mma.sync has other sums")
    for op, target in (("f16", "H100"), ("f16", "A100"), ("e4m3", "L40S"), ("e4m3", "RTX 5090"), ("s8", "H100"), ("f64", "H100")):
        assert describe_unit(op, target) == ""  # one unit, or two with the same sums


@pytest.mark.parametrize("target", sample_cases(["sm_90a", "sm_100a", "sm_103f"], ["sm_100a"]))
def test_what_it_says_to_ask_for_is_the_other_arithmetic(target):
    """Every instruction of a target: its sentence stands exactly where the units differ, by the table of models."""
    said = 0
    products = [op for op in instructions(target) if isinstance(op, MatrixMultiply)]
    types = lambda op: (op.a, op.b, op.d, op.sparse)
    same_types: dict[tuple, list[MatrixMultiply]] = {types(op): [] for op in products}
    for op in products:
        same_types[types(op)] += [op] * (op.d != S32)
    for op in products:
        if op.n not in (8, 16):
            continue
        text, own, twins = describe_unit(op, target), find_row(op, target).model, same_types[types(op)]
        if not text:
            models = {find_row(one, target).model for one in twins if "wgmma" in (op.family[:5], one.family[:5])}
            assert op.d == S32 or target != "sm_90a" or models <= {own} or "wgmma" in op.family
            continue
        said += 1
        asks = re.findall(r"op='([^']+)'", text)
        recipes = [tcemu.get_recipe(name) for name in re.findall(r"recipe='([^']+)'", text)]
        assert asks or recipes
        assert all(find_row(tcemu.check(ask, target), target).model != own for ask in asks)
        assert all(recipe.arithmetic != own and op.d == F32 and recipe.op.a == op.a for recipe in recipes)
    assert said > 5


def test_the_recipes_that_messages_name_take_these_operands():
    for key, name in RECIPE_NAMES.items():
        op = tcemu.get_recipe(name, "RTX 5090").op
        assert key in (op.a.name if op.scaling is None else op.kind, f"{op.kind} {op.a}") and op.a == op.b


def test_recipes_and_explanations_say_it(capsys):
    assert "Unit: wgmma" in repr(tcemu.get_recipe("fp8 on H100")) and "Unit:" not in repr(tcemu.get_recipe("bf16 on H100"))
    assert repr(tcemu.get_recipe("fp8 on H100")).count("Unit:") == 1  # not of each gradient again
    assert MMA in " ".join(str(tcemu.explain("e4m3", [1], [1], target="H100")).split())
    assert main(["check", "e4m3", "--target", "H100"]) == 0
    assert MMA in " ".join(capsys.readouterr().out.split())


@pytest.mark.full
def test_every_report_says_it(tmp_path, capsys):
    assert MMA in " ".join(str(tcemu.explain("e4m3", [1], [1], target=["L40S", "H100"])).split())
    assert MMA in " ".join(str(tcemu.fuzz.find_mismatches("e4m3", "L40S", "H100", cases=2, coverage=False, shrink=False)).split())
    np.save(tmp_path / "A.npy", A)
    for words, said in (("--op e4m3", MMA), ("--recipe fp8", WGMMA)):
        assert main(["gemm", *[str(tmp_path / "A.npy")] * 2, *words.split(), "--target", "H100"]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def multiply(a, b):
    return a @ b


def check_sentences(result, sentences):
    """They stand once in the text of a result and of one that was saved and loaded."""
    for same in (result, type(result).from_json(result.to_json())):
        text = " ".join(str(same).split())
        assert text.count("Unit:") == len(sentences) and all(sentence in text for sentence in sentences)


def test_results_of_functions_say_it():
    check_sentences(tcemu.emulate(multiply, "fp8 on H100").report(A, B), [WGMMA])


@pytest.mark.full
def test_comparisons_and_grids_say_it():
    compared = tcemu.compare(multiply, {"FP8": "fp8 on H100", "bf16": "bf16 on H100"}, (A, B), results=False)
    grid = tcemu.study.sweep(tcemu.matmul, {"op": ["e4m3", "e4m3 wgmma"], "target": ["H100"]}, operands=(A, B), measures="normwise")
    check_sentences(compared, [WGMMA])
    check_sentences(grid, [MMA, WGMMA])
    assert "Unit:" not in str(tcemu.emulate(multiply, "fp8 on L40S").report(A, B))
    assert "Unit:" not in str(tcemu.emulate(multiply, lambda product: jax.lax.dot_general).report(A, B))
    kernel = replace(grid, facts=tuple((target, "fma", *others) for target, _, *others in grid.facts))
    assert "Unit:" not in str(kernel)
