"""Whole models by `tcemu.torch.emulate(model, gpu="H200")`, from their inputs alone, beside the digests of every operation on an H200.

`models_h200.json.xz` has runs of small Hugging Face models (tests/gpu_runs/model_operations.py): the first eight digits of the digest of
each float result. Up to the first operation that the report names as not known, all results are equal; where it names none, all are.
"""

import importlib.util
import json
import lzma
from functools import cache
from pathlib import Path

import pytest
from support.sampling import sample_cases
from support.systems import skip_file
from support.torch_helpers import MISSING, torch

import tcemu

skip_file(MISSING if torch is None else "")
skip_file("" if importlib.util.find_spec("transformers") else "transformers is not installed: pip install transformers==5.17.0")
TESTS = Path(__file__).parents[2]
CHEAP = ("llama_f16_c",)


@cache
def script():
    spec = importlib.util.spec_from_file_location("model_operations", TESTS / "gpu_runs/model_operations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def recorded():
    return json.loads(lzma.decompress((TESTS / "golden/models_h200.json.xz").read_bytes()))


def chosen_names():
    """Whisper's convolutions of one axis are held to words by tests/uses/replay/test_torch_convolutions.py."""
    return sorted(name for name in recorded()["cases"] if not name.startswith("whisper"))


@pytest.mark.parametrize("name", sample_cases(chosen_names(), CHEAP))
def test_every_operation_of_a_model_has_the_words_of_an_h200(name):
    models, case = script(), recorded()["cases"][name]
    model, run = models.make(name, "cpu")
    assert models.parameters(model) == case["before"]
    found = models.Comparison(models.unpack(recorded(), name))
    unknown_before = []

    def check(row, outs):
        found(row, outs)
        if found.differ and not unknown_before:
            unknown_before.append(emulated.report().counts()["not known"])

    with tcemu.torch.emulate(model, gpu="H200", unknown="leave") as emulated, models.Log(check):
        run()
    known = not emulated.report().counts()["not known"]
    assert found.total > 20 and found.equal
    assert not found.differ if known else not found.differ or unknown_before[0]
    assert not known or models.parameters(model) == case["after"]
