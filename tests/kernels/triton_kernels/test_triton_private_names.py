"""Private names of Triton's interpreter that tcemu uses exist in the Triton that is installed."""

import importlib

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'tcemu[triton]'")

from support.private_names import names_of


@pytest.mark.parametrize("name", sorted({name.split(".")[1] for name in names_of("interpreter")} - {"_ir", "_prepare_dot_scaled_operand"}))
def test_a_private_name_exists(name):
    assert hasattr(importlib.import_module("triton.runtime.interpreter"), name)
