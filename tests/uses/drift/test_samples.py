"""Arithmetics are tried on samples: a sample has the words of the whole result, and a fast chain of fma has those of fma."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.planted_drifts import MODELS, fused_chain
from support.sampling import sample_cases

from tcemu.drift import identify, read_record, record
from tcemu.formats import F32
from tcemu.uses.drift.causes import Trial, build_program, program_inputs, raw_words
from tcemu.uses.drift.program_evaluation import evaluate
from tcemu.uses.drift.programs import Program
from tcemu.uses.drift.recorded_operations import BUILDERS, append_operation
from tcemu.uses.drift.samples import take_sample
from tcemu.uses.drift.sum_evaluation import sum_products
from tcemu.uses.drift.summation import plain_summation

FUSED = 4  # operations that follow each other, taken as one program


@pytest.mark.parametrize("name", sample_cases(MODELS, ("moe",)))
def test_a_sample_has_the_words_of_the_whole_result(name):
    model = MODELS[name]()
    run = read_record(record(model.fn)(*model.arguments))
    rng, count = np.random.default_rng(0), 0
    for operation in run.operations:
        for length in (1, FUSED):
            program = build_program(run, run.operations[max(operation.index + 1 - length, 0) : operation.index + 1])
            inputs = None if program is None else program_inputs(run, program)
            expected = run.value(operation.results[0])
            if program is None or inputs is None or expected is None or len(program.sums) > 1:  # one summation has one K
                continue
            at = rng.integers(0, expected.size, 9)
            sample = take_sample(program, inputs, at)
            assert sample is not None
            for choices in Trial(program, inputs, expected, at).variants(())[::150]:
                whole, some = (raw_words(evaluate(program, inputs, choices, s)) for s in (None, sample))
                np.testing.assert_array_equal(some, whole[at], f"{operation.title}: {choices}")
                count += 1
    assert count > 40


def test_a_sum_on_a_midpoint_is_rounded_once():
    """(1 + 2^-23) + (2^-24 - 2^-64): f64 rounds this to a midpoint of f32, which would round up."""
    small = np.float32(2.0**-12)
    a = np.array([[1 + 2.0**-23, (1 + 2.0**-20) * small], [1.5, 0.25]], np.float32)
    b = np.array([[1, (1 - 2.0**-20) * small], [1.25, 3.0]], np.float32)
    plain = plain_summation(F32, F32, 2)
    rows = sum_products(plain, a, b)
    assert rows.tolist() == fused_chain(a, b).tolist() and rows[0] == np.float32(1 + 2.0**-23)
    assert sum_products(plain, a[:, None], b[None])[0, 0] == rows[0]


def test_a_logistic_in_bf16_rounds_each_step():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(300), jnp.bfloat16)
    (line,) = identify(record(jax.lax.logistic)(x), targets=()).operations
    assert line.is_explained and "each step rounded" in line.arithmetic, line


def test_a_fault_of_a_builder_is_no_unknown_operation(monkeypatch):
    """Parameters of another kind than a builder knows make an operation unknown; any other exception is a fault, and stays one."""
    run = read_record(record(lambda x: x.sum(axis=0))(np.ones((2, 3), np.float32)))
    (operation,) = [op for op in run.operations if op.name == "reduce_sum"]
    refs = [("input", 0)]
    assert append_operation(Program(), operation, refs) == ("node", 0)
    for attributes in ({}, {"axes": "0"}, {"axes": [5]}, {"axes": [0.5]}):
        assert append_operation(Program(), replace(operation, attributes=attributes), refs) is None
    assert append_operation(Program(), operation, []) is None
    for error in (KeyError("axes"), TypeError("a bug"), IndexError("a bug"), ValueError("a bug")):
        monkeypatch.setitem(BUILDERS, "reduce_sum", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            append_operation(Program(), operation, refs)
