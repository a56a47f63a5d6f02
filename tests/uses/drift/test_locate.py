"""Drifts that were planted into runs of small models are found first, named right, and nothing else is blamed."""

import json
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.drift_records import recorded_product
from support.planted_drifts import MODELS, PRODUCTS, fused_chain, plans, plant_product, two_slices

from tcemu import dot_general, emulate
from tcemu.base.saved_files import DamagedFile
from tcemu.drift import Drift, locate, read_record, record
from tcemu.replay import loads

BF16 = jnp.bfloat16


@cache
def base(name):
    model = MODELS[name]()
    run = record(model.fn)(*model.arguments)
    return model, run, read_record(run)


def replacements(name):
    """Every plan for the model that changes a result: (operation, name, hypothesis, replacement), computed one by one."""
    _, _, read = base(name)
    for operation in read.operations:
        operands, (result, *_) = read.values(operation.operands), read.values(operation.results)
        for how, kind, plant in plans(operation):
            replacement = plant(operands, result)
            if replacement.tobytes() != result.tobytes():
                yield operation.index, how, kind, replacement


def planted(name, operation_name, how, place=0):
    """One plan: for the operation of this name at this place among its like."""
    _, _, read = base(name)
    operation = [operation for operation in read.operations if operation.name == operation_name][place]
    operands, (result, *_) = read.values(operation.operands), read.values(operation.results)
    kind, plant = next((kind, plant) for plan, kind, plant in plans(operation) if plan == how)
    replacement = plant(operands, result)
    assert replacement.tobytes() != result.tobytes()
    return operation.index, how, kind, replacement


def run_planted(name, changes):
    model, run, _ = base(name)
    changed = record(model.fn, substitute=lambda number, *_: [changes[number]] if number in changes else None)(*model.arguments)
    return run, changed


def check(name, number, how, kind, replacement):
    drift = locate(*run_planted(name, {number: replacement}), targets=())
    said = f"{name} {number} {how}: expected {kind}\n{drift}"
    assert [line.left for line in drift.sources] == [number], said
    assert drift.lines[0].left == number, said
    cause = drift.sources[0].cause
    assert kind in cause.kinds, said
    return drift


@pytest.mark.parametrize(
    ("name", "operation", "how"),
    [
        pytest.param("gpt", "dot_general", "tf32", marks=pytest.mark.full),
        ("gpt", "exp", "GPU function"),
        pytest.param("moe", "logistic", "GPU function", marks=pytest.mark.full),
        pytest.param("convnet", "reduce_sum", "pairwise", marks=pytest.mark.full),
    ],
)
def test_a_planted_drift_is_found_and_named(name, operation, how):
    check(name, *planted(name, operation, how))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_every_planted_drift_is_found_and_named(name):
    counts = Counter()
    for plan in replacements(name):
        check(name, *plan)
        counts[plan[2]] += 1
    print(name, dict(counts))
    assert sum(counts.values()) >= {"gpt": 40, "moe": 15, "convnet": 20}[name]


@pytest.mark.full
def test_two_drifts_at_once_are_both_found():
    _, _, read = base("gpt")
    products = [operation for operation in read.operations if operation.name == "dot_general"]
    first, last = products[0], products[-1]
    values = [(read.values(op.operands), read.values(op.results)[0]) for op in (first, last)]
    pairwise = PRODUCTS["pairwise"][0]
    truncated = PRODUCTS["tf32"][0]
    replaced = plant_product(first, *values[0], pairwise)

    def substitute(number, name, operands, results):
        if number == first.index:
            return [replaced]
        return [plant_product(last, operands, results[0], truncated)] if number == last.index else None

    model, run, _ = base("gpt")
    drift = locate(run, record(model.fn, substitute=substitute)(*model.arguments), targets=())
    assert [(line.role, line.left) for line in drift.sources] == [("source", first.index), ("hidden source", last.index)], str(drift)
    assert "order of the sum" in drift.sources[0].cause.kinds and "operands rounded" in drift.sources[1].cause.kinds


def test_a_fused_program_is_explained_by_its_roundings():
    """XLA on a CPU contracts a product and an addition, and skips roundings to bf16 between two operations."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((8, 24)), BF16) for _ in range(2))

    def narrow(x, y):
        return x * y + y

    def wide(x, y):
        return (x.astype(jnp.float32) * y.astype(jnp.float32) + y.astype(jnp.float32)).astype(BF16)

    left, right = record(narrow)(x, y), record(lambda x, y: jax.jit(wide)(x, y), whole=("wide",))(x, y)
    drift = locate(left, right, targets=())
    (source,) = drift.sources
    assert source.cause.kinds == ("a rounding less",) and "not rounded to bfloat16: mul" in source.cause.right, str(drift)
    assert locate(right, left, targets=()).sources[0].cause.kinds == ("a rounding less",)
    compiled = locate(left, record(narrow, compiled=True)(x, y), targets=())
    assert [line.cause.kinds for line in compiled.sources] in ([], [("a rounding less",)])  # as this version of XLA fuses


def test_what_no_hypothesis_gives_is_unexplained():
    name = "gpt"
    _, _, read = base(name)
    product = next(operation for operation in read.operations if operation.name == "dot_general")
    (result,) = read.values(product.results)
    changed = np.nextafter(result, np.float32(np.inf))
    drift = locate(*run_planted(name, {product.index: changed}), targets=())
    assert len(drift.sources) == len(drift.unexplained) == 1
    assert "of 32 words wrong" in drift.sources[0].cause.right
    far = result * np.float32(1.01)
    outside = locate(*run_planted(name, {product.index: far}), targets=()).sources[0].legitimate
    assert outside.left <= 1 < outside.right
    assert drift.sources[0].legitimate.left <= 1


def test_equal_runs_renamed_modules_and_other_batches():
    model, run, _ = base("gpt")
    again = record(model.fn)(*model.arguments)
    assert locate(run, again).lines == () and "no operation differs" in str(locate(run, again))
    w = jnp.asarray(np.random.default_rng(4).standard_normal((12, 7)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((4, 12)), jnp.float32)

    def layer(scope, factor):
        def fn(x):
            with jax.named_scope(scope):
                return jnp.tanh(x * 2) * factor + x

        return fn

    assert locate(record(layer("a", 1.5))(x), record(layer("b", 1.5))(x), targets=()).lines == ()
    small, large = record(lambda x: x @ w)(x[1:3]), record(lambda x: x @ w)(x)
    assert locate(small, large, rows=[1, 2], targets=()).sources == ()
    with pytest.raises(ValueError, match="smaller batch as left"):
        locate(large, small)
    with pytest.raises(ValueError, match="rows"):
        locate(small, large, rows=[3, 4])


def test_the_share_of_the_final_difference_is_measured():
    name = "gpt"
    model, _, read = base(name)
    product = next(operation for operation in read.operations if operation.name == "dot_general")
    values = read.values(product.operands), read.values(product.results)[0]
    left, right = run_planted(name, {product.index: plant_product(product, *values, PRODUCTS["tf32"][0])})
    drift = locate(left, right, targets=(), fn=lambda: model.fn(*model.arguments))
    assert drift.sources[0].share == pytest.approx(1.0)  # one source makes the whole difference
    drift = locate(left, right, targets=(), fn=lambda: model.fn(*model.arguments), metric="kl")
    assert drift.sources[0].share == pytest.approx(1.0)
    with pytest.raises(ValueError, match="metric"):
        locate(left, right, metric="ulp")


def test_a_drift_is_saved_as_json_and_pins_its_sums():
    name = "gpt"
    drift = check(name, *planted(name, "dot_general", "pairwise"))
    text = drift.to_json()
    assert Drift.from_json(text) == drift and str(Drift.from_json(text)) == str(drift)
    assert "<svg" in drift.html() and "<script" not in drift.html()
    (pinned,) = drift.recipes()
    recipe = loads(json.dumps(pinned["right"]))
    assert recipe.k == 24
    _, _, read = base(name)
    operation = read.operations[drift.sources[0].left]
    if len(operation.operands[0].shape) == 2:  # `emulate` gives the bits of the right side
        a, b = read.values(operation.operands)
        *_, replacement = planted(name, "dot_general", "pairwise")
        emulated = emulate(lambda a, b: a @ b, dot_general(recipe))(a, b)
        assert np.asarray(emulated).tobytes() == replacement.tobytes()
    for damaged in (text.replace('"source"', '"sauce"', 1), text.replace('"kinds"', '"kind"', 1), text[:-2], "[]"):
        with pytest.raises(DamagedFile):
            Drift.from_json(damaged)


def test_near_twins_are_both_named_until_an_element_tells_them_apart():
    """Four lanes and two slices of eight products, first on rows with two elements that are not zero, which both add once."""
    rng = np.random.default_rng(8)
    full, b = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((8, 6)).astype(np.float32)
    few = np.where(np.isin(np.arange(8), (0, 5)), full, np.float32(0))

    def four_fused_lanes(x, y):
        lanes = [fused_chain(x[:, lane::4], y[:, lane::4]) for lane in range(4)]
        return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])

    for a, are_twins in ((few, True), (full, False)):
        rows, columns = np.repeat(a, 6, 0), np.tile(b.T, (5, 1))
        chain, lanes, slices = (add(rows, columns).reshape(5, 6) for add in (fused_chain, four_fused_lanes, two_slices))
        assert (lanes.tobytes() == slices.tobytes()) == are_twins
        (source,) = locate(recorded_product(a, b, chain), recorded_product(a, b, lanes), targets=()).sources
        named = [source.cause.right, *source.cause.twins]
        assert source.cause.kinds[:1] == ("order of the sum",) and any("4 lanes of 1" in words for words in named), str(source)
        assert any("2 slices of 4" in words for words in named) == are_twins, str(source)
