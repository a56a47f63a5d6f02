"""The reference behind `explain` is independent of the engine: what its files import, and the order of steps that both work out."""

import ast
import sys
from itertools import product
from pathlib import Path

import pytest

from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.reference.reference_steps import batched, split_into_steps, steps_per_chain

FOLDER = Path(__file__).parents[3] / "tcemu" / "engine" / "arithmetic" / "reference"
INDEPENDENT = ("reference_steps", "reference_products", "exact_values")
RECORDS = {  # what the reference shares with the engine: records and names, and no function
    "tcemu.engine.arithmetic.model": {"Model", "TO_ODD"},
    "tcemu.engine.arithmetic.product_spec": {"ProductSpec"},
    "tcemu.engine.formats": {"Format", "F32", "F64", "S32"},
}


def offences(source: str) -> list[str]:
    """What a file of the reference imports and may not."""
    wrong = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wrong += [alias.name for alias in node.names if alias.name.split(".")[0] not in sys.stdlib_module_names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            ours = module == "tcemu.base.errors" or module in {f"tcemu.engine.arithmetic.reference.{name}" for name in INDEPENDENT}
            if node.level or not (ours or module.split(".")[0] in sys.stdlib_module_names):
                names = {alias.name for alias in node.names}
                wrong += [f"{module}.{name}" for name in sorted(names - RECORDS.get(module, set()))]
    return wrong


@pytest.mark.parametrize("name", INDEPENDENT)
def test_the_reference_imports_records_and_nothing_that_computes(name):
    assert offences((FOLDER / f"{name}.py").read_text()) == []


def test_an_import_of_the_engine_is_seen():
    assert offences("import jax\nfrom math import floor") == ["jax"]
    assert offences("from tcemu.formats import Format, decode") == ["tcemu.formats.decode"]
    assert offences("from tcemu.engine.arithmetic.order import Order") == ["tcemu.engine.arithmetic.order.Order"]
    assert offences("from tcemu.uses.explanation.explain import codes") == ["tcemu.uses.explanation.explain.codes"]
    assert offences("from . import view") == [".view"]


@pytest.mark.parametrize("k", [4, 8, 16, 24, 32, pytest.param(64, marks=pytest.mark.full)])
def test_the_order_of_steps_and_chains_is_that_of_the_engine(k):
    """Also where steps do not fill a group, and where chains do not fill an instruction or reach beyond it."""
    compared = 0
    for terms, groups, chain in product(range(1, k + 3), (1, 2, 4, 8), (None, "k", *range(1, 2 * k + 1))):
        if k % (2 * groups):
            continue
        order = Order(terms, groups, chain)
        steps = split_into_steps(range(k), terms, groups)
        assert [list(step) for step in steps] == order.steps(k), order
        length = None if chain is None else steps_per_chain(chain, k, len(steps))
        assert (len(steps), length) == (order.steps_per_instruction(k), order.steps_per_chain(k)), order
        chains = [[list(step) for step in own] for own in batched(steps, length or len(steps))]
        assert chains == order.chains(k), order
        compared += 1
    assert compared > 40
