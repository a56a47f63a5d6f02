"""FIELD=VALUE as text: every field of `Model`, each by its own kind of value, and what is said of the others."""

from dataclasses import fields

import numpy as np
import pytest

import tcemu
from tcemu import fuzz
from tcemu.arithmetic.model import Model
from tcemu.arithmetic.what_if import known_fields, what_if
from tcemu.cli import main
from tcemu.formats import BF16, F16, F32, F64

QUAD = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
EXACT = Model(F32, 1, None, rounding="RN", chain=4, from_zero=True)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("fraction_bits=24,terms=8", {"fraction_bits": 24, "terms": 8}),
        ("floor=-20,rounding=RM,alignment=RN", {"floor": -20, "rounding": "RM", "alignment": "RN"}),
        ("result_bits=13", {"result_bits": 13}),
        ("result_bits=None", {"result_bits": None}),
        ("chain=k,together=True", {"chain": "k", "together": True}),
        ("chain=8,groups=2", {"chain": 8, "groups": 2}),
        ("result=f16,multiplicand=bf16", {"result": F16, "multiplicand": BF16}),
        ("multiplicand=None,summed=None", {"multiplicand": None, "summed": None}),
        ("summed=8", {"summed": 8}),
        ("result=f64,terms=1,fraction_bits=None", {"result": F64, "terms": 1, "fraction_bits": None}),
    ],
)
def test_each_field_reads_its_own_kind_of_value(text, changes):
    assert what_if(Model(F32), text) == Model(F32).replace(**changes)


def test_true_and_false_are_no_words():
    """The word "False" is a string that Python takes for true."""
    assert what_if(EXACT, "from_zero=False").from_zero is False
    assert what_if(EXACT.replace(from_zero=False), "from_zero=True").from_zero is True


def test_every_field_is_known():
    assert known_fields().keys() == {field.name for field in fields(Model)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bits=3", "'bits=3' is no FIELD=VALUE; the fields are terms, fraction_bits, floor"),
        ("terms", "'terms' is no FIELD=VALUE"),
        ("terms=", "'terms=' is no FIELD=VALUE"),
        ("", "'' is no FIELD=VALUE"),
        ("terms=many", "terms: got 'many'; wanted a whole number$"),
        ("terms=None", "terms: got 'None'; wanted a whole number$"),
        ("terms=True", "terms: got 'True'; wanted a whole number$"),
        ("fraction_bits=2.5", r"fraction_bits: got '2\.5'; wanted a whole number or None$"),
        ("from_zero=0", "from_zero: got '0'; wanted True or False$"),
        ("rounding=SR", "rounding: got 'SR'; wanted RN, RZ, RM or RP$"),
        ("chain=K", "chain: got 'K'; wanted a whole number, k or None$"),
        ("result=f31", "result: got 'f31'; wanted f64, f32, tf32, f16"),
        ("multiplicand=8", "multiplicand: got '8'; wanted f64, f32, .* or None$"),
        ("fraction_bits=99", r"Model\(fraction_bits=99\): fraction_bits must be from 1 to 40"),
        ("result=bf16", "result must be f16, f32, f64 or s32"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        what_if(Model(F32), text)


def test_explain_computes_with_what_was_said(capsys):
    """m8n8k4 on sm_90a starts from +0, so 0 x -1 and C = -0 give +0; from nothing they give -0."""
    words = ["explain", QUAD, "--a=0", "--b=-1", "--c=-0.0", "--target", "sm_90a", "--what-if"]
    assert main([*words, "from_zero=False"]) == 0
    out = capsys.readouterr().out
    assert "[2] D = 80000000 = -0" in out and "[1] D = 00000000 = 0" in out
    assert main([*words, "from_zero=True"]) == 0
    assert "[2] D = 00000000 = 0" in capsys.readouterr().out
    assert main([*words, "from_zero=no"]) == 2
    assert "tcemu explain: --what-if from_zero=no: from_zero: got 'no'; wanted True or False" in capsys.readouterr().err


def test_the_sides_of_a_comparison_read_the_same_words():
    op = tcemu.parse(QUAD)
    side = fuzz.side(op, "sm_90a:from_zero=False,rounding=RZ")
    assert side.model == tcemu.model(op, "sm_90a").replace(from_zero=False, rounding="RZ")
    codes = {"a": np.zeros((1, 8, 4), np.uint16), "b": np.full((1, 4, 8), 0xBC00, np.uint16), "c": np.full((1, 8, 8), 1 << 31, np.uint32)}
    assert int(np.asarray(side.call(codes))[0, 0, 0]) == 1 << 31
    with pytest.raises(ValueError, match="from_zero: got 'nothing'; wanted True or False"):
        fuzz.side(op, "sm_90a:from_zero=nothing")
