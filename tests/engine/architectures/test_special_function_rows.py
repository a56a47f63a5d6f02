"""The evidence of special functions."""

import pytest
from support.ptx_recorded import array, document

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.special_function_rows import FUNCTIONS, NARROW, ROWS, TANH, special_function_evidence
from tcemu.engine.isa.targets import TARGETS


def test_every_target_has_each_function_once():
    rows = {(target, name) for row in ROWS for target in row.targets for name in row.functions}
    assert len(rows) == sum(len(row.targets) * len(row.functions) for row in ROWS)
    modelled = [name for name, target in TARGETS.items() if not target.public]
    assert rows == {(t, f) for t in modelled for f in FUNCTIONS} - {(t, f) for t in ("sm_70", "sm_72") for f in (*NARROW, *TANH)}


def test_the_recorded_words_are_counted():
    known = special_function_evidence("ex2.approx.ftz.f32", "H200")
    assert known.level == "silicon" and known.golden == "tests/golden/ptx_scalars.json.xz" and "family ptx_scalars" in known.source
    cases = [case for case in document()["cases"] if (".approx" in case["op"] or ".full" in case["op"]) and "tanh" not in case["op"]]
    counts = [len(array(document()["codes"], 16)) if case["sources"] == ["codes"] else 122 for case in cases]
    assert sum(counts) == known.recorded


def test_levels_and_errors():
    levels = {gpu: special_function_evidence("rcp.approx.f32", gpu).level for gpu in ("V100", "A100", "H100", "B200")}
    assert levels == {"V100": "literature", "A100": "assumed", "H100": "silicon", "B200": "assumed"}
    assert special_function_evidence("div.full.f32", "A100").level == "assumed"
    assert special_function_evidence("tanh.approx.bf16x2", "H100").golden == "tests/golden/tanh.npz"
    with pytest.raises(NotModelled, match=r"ex2\.approx\.f32 on sm_107a: there is no evidence"):
        special_function_evidence("ex2.approx.f32", "Rubin")
    with pytest.raises(NotModelled, match=r"tanh\.approx\.f32 on sm_70.*from sm_75 on"):
        special_function_evidence("tanh.approx.f32", "V100")
    with pytest.raises(ValueError, match="approximate instruction"):
        special_function_evidence("add.f32", "H100")
