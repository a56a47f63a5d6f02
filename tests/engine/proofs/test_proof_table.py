"""The table of proofs: it names every formula, and none that there is not."""

import inspect
from functools import reduce
from importlib import import_module
from pkgutil import iter_modules

import pytest
from proof_records import SOLVER, Proof
from proof_table import load_proofs, read_seconds, render_table

from tcemu.engine.arithmetic import step

MODULES = {module.name: import_module(f"tcemu.engine.arithmetic.step.{module.name}") for module in iter_modules(step.__path__)}
# the interface of values and a renderer, a constant, and the numbers that the proofs of guards compute again
NO_FORMULAS = {"decoding.sign_bit", "forms.bounded_form", "forms.unit_exponent", "forms.largest_value"}

NOT_PROVED = {  # see docs/verified.md
    "anchored": (
        "alignment_word", "base_of_lines", "begin_sum", "end_in_f64", "end_sum", "exponent_power", "factor_bf16", "factor_unit",
        "factor_value", "is_near", "is_plain", "is_small", "lowest_bit", "not_integers", "own_exponent", "reach", "result_code",
        "result_float", "round_kept", "sign_byte", "takes_part",
    ),
    "kept_floats": (
        "align_word", "exponent_offset", "finite_as_one", "is_far", "keep_float", "least_alignment", "move", "own_word", "scale_of_word",
    ),
    "forms": ("anchored_form", "keeps_floats"),
}  # fmt: skip


def test_every_formula_is_proved():
    functions = {
        f"{name}.{function}"
        for name, module in MODULES.items()
        for function, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not function.startswith("_")
    }
    functions = {name for name in functions if name.partition(".")[0] not in ("values", "jax_values")}
    proved = {name for proof in load_proofs().values() for name in proof.formulas}
    known = {f"{module}.{name}" for module, names in NOT_PROVED.items() for name in names}
    assert len(functions) > 90 and functions - proved == NO_FORMULAS | known


def test_every_name_of_the_table_is_there():
    named = {name for proof in load_proofs().values() for name in proof.formulas if " " not in name and not name.startswith("llvm.")}
    for name in named:
        module, *attributes = name.split(".")
        assert reduce(getattr, attributes, MODULES[module]) is not None


def test_the_table_sums_the_seconds_of_all_cases():
    case = '<testcase name="test_a[{}]"><properties><property name="seconds" value="1.25"/></properties>{}</testcase>'
    seconds = read_seconds(f"<testsuite>{case.format(1, '')}{case.format(2, '')}</testsuite>")
    assert seconds == {"test_a": 2.5}
    assert "| `rounding.cut`, whole steps | all words | solver | 2.5 |" in render_table(
        {"test_a": Proof(("rounding.cut", "whole steps"), SOLVER, "all words")}, seconds
    )
    with pytest.raises(SystemExit, match=r"test_a\[2\] did not pass"):
        read_seconds(f"<testsuite>{case.format(2, '<failure/>')}</testsuite>")
