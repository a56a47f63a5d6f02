"""Predicted orders: the shipped rules are what the script fits, they get the measured shapes right, and nothing calls them measured."""

import importlib
import sys
from itertools import pairwise
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.base.errors import NotModelled
from tcemu.cli import main
from tcemu.replay import dumps, find_order_changes, get_kernel_recipe, library_policy, loads
from tcemu.uses.replay.kernel_choices import list_proposals
from tcemu.uses.replay.kernel_profiles import ShapePolicy, find_profile, list_profiles, predict_recipe, proposed_recipe
from tcemu.uses.replay.predicted_orders import (
    NVJET_GRAINS,
    RULES_FILE,
    XLA_LIBRARIES,
    most_slices,
    predict_order,
    shipped_rules,
    xla_cost,
)
from tcemu.uses.replay.summation_levels import equivalence_key

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("replay_rules")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


# ---- the rules


def test_the_most_slices_of_a_length():
    for least in (2, 5, 21):
        for tiles in range(1, 400):
            counts = [s for s in range(1, tiles + 1) if -(-tiles // s) >= least]
            assert most_slices(tiles, least) == max(counts, default=1)


@pytest.mark.full
def test_the_shipped_rules_are_what_the_script_fits(script):
    known = script.known_answers()
    rule = script.fit_nvjet(known)
    assert script.as_json(script.fit(known, rule, script.fit_trees(rule)), known) == RULES_FILE.read_text()
    assert len(known) > 25_000


def test_held_out_shapes_of_an_h100(script):
    """They were measured after the rules were made, on another card; a third was drawn among long K, where a prediction is hard."""
    known = script.held_out_on_h100()
    found = [(right, probability) for _, right, probability in script.answers(known, shipped_rules())]
    high = [right for right, probability in found if probability >= 0.99]
    assert all(high) and len(high) >= 0.65 * len(known) and len(known) > 80
    profiles = {name: find_profile(list_profiles(), name, None, None).shapes for name in {one.library for one in known}}
    assert not any(one.shape in profiles[one.library] for one in known)


@pytest.mark.full
def test_shapes_of_an_h100_that_test_the_rules(script):
    """1,208 shapes on which nothing was fitted or counted: at least 98 % right, and every known proposal is the measured order."""
    _, known = script.measured_on_h100()
    high = [right for _, right, probability in script.answers(known, shipped_rules()) if probability >= 0.98]
    assert sum(high) >= 0.98 * len(high) and len(high) > 0.6 * len(known) > 700
    proposed = script.answers_by_proposal(known, shipped_rules())
    assert all(right for _, right, _ in proposed) and len(proposed) > 700


def test_a_proposal_determines_the_order():
    """Measured shapes of each kind of kernel, tf32 and 16 bits, with slices that are merged in f32, in f16 and serially."""
    profiles = {name: find_profile(list_profiles(), name, None, "H100") for name in ("torch-tf32", "torch-f16", "torch-bf16")}
    seen = set()
    for name, profile in profiles.items():
        choices = list_proposals().libraries[name]
        for shape in sorted(set(profile.shapes) & set(choices))[::9]:
            recipe, measured = proposed_recipe(profile, shape), profile.kernel_recipe(shape)
            if recipe is not None:
                assert recipe.has_order(measured) or equivalence_key(recipe) == equivalence_key(measured), (name, shape)
                seen.add((name, choices[shape].algorithm, choices[shape].reduction_scheme if len(recipe.slices.edges) > 2 else ""))
    assert len(seen) > 12 and {algorithm for _, algorithm, _ in seen} == {21, 23, 24, 55, 63, 66}


def test_the_h100_has_predictions_and_proposals():
    measured = find_profile(list_profiles(), "torch-tf32", None, "H100").shapes
    choices = list_proposals().libraries["torch-tf32"].items()
    shape = next(shape for shape, choice in choices if choice.algorithm == 21 and choice.split_k > 3 and shape not in measured)
    recipe = get_kernel_recipe("torch-tf32", *shape, gpu="H100", predicted=True)
    assert "cuBLASLt proposed algorithm 21" in str(recipe) and "NVIDIA H100" in str(recipe.conditions.gpu)
    assert get_kernel_recipe("torch-f16", 64, 64, 8192).conditions.gpu == "NVIDIA H200"  # where no GPU is given
    with pytest.raises(NotModelled, match="NVIDIA H100"):
        get_kernel_recipe("torch-e4m3", 128, 128, 128, gpu="H100")


def test_what_cublaslt_proposes(script):
    """A sample of proposals for nvjet: what its rules predict with a probability of 0.98 is proposed."""
    proposed = script.proposed_on_h100()
    found = script.answers(proposed[::40], shipped_rules()._replace(trees={}))
    assert all(right for _, right, probability in found if probability >= 0.98)
    assert sum(probability >= 0.98 for *_, probability in found) > 450


def accuracy(library: str, aligned: bool, least: float) -> tuple[int, int, int]:
    """Measured shapes, those that are predicted with a probability of `least` or more, and how many of these are right."""
    profile = find_profile(list_profiles(), library, None, None)
    shapes = [shape for shape in profile.shapes if aligned == (shape[1] % 8 == 0 and shape[2] % 8 == 0)]
    answered = right = 0
    for shape in shapes:
        try:
            recipe = predict_recipe(profile, shape)
        except NotModelled:
            continue
        assert recipe.conditions.probability is not None and recipe.k == shape[2]
        if recipe.conditions.probability >= least:
            answered += 1
            right += recipe.has_order(profile.kernel_recipe(shape))
    return len(shapes), answered, right


@pytest.mark.parametrize("library", sample_cases([*NVJET_GRAINS, *XLA_LIBRARIES], ["torch-f16", "torch-bf16", "torch-e4m3", "jax-bf16"]))
def test_rules_get_aligned_shapes_right(library):
    """98 % right where a rule answers, and it answers 80 %: the rules were fitted on these shapes, `replay_rules.py` cross-validates."""
    shapes, answered, right = accuracy(library, True, 0.98)
    assert right >= 0.98 * answered and answered >= 0.8 * shapes > 0


@pytest.mark.parametrize("library", sample_cases(XLA_LIBRARIES, 1))
def test_xla_s_own_rule_gets_every_matrix_right(library):
    """It was not fitted."""
    profile = find_profile(list_profiles(), library, None, None)
    matrices = [shape for shape in profile.shapes if min(shape) > 1]
    assert all(predict_recipe(profile, shape).has_order(profile.kernel_recipe(shape)) for shape in matrices)
    assert len(matrices) > 370 and any(len(profile.kernel_recipe(shape).slices.edges) > 30 for shape in matrices)


def test_a_wrong_rule_is_seen():
    """Shapes tell 21 tiles of K from 20 and from 22, and Hopper's costs from others."""
    rules, measured = shipped_rules(), find_profile(list_profiles(), "torch-f16", None, None)
    shapes = [shape for shape in measured.shapes if shape[1] % 8 == 0 and shape[2] % 8 == 0]

    def right(chunk: int) -> int:
        changed = rules._replace(nvjet=rules.nvjet._replace(min_chunk=chunk))
        found = 0
        for shape in shapes:
            try:
                found += predict_recipe(measured, shape, changed).has_order(measured.kernel_recipe(shape))
            except NotModelled:
                continue
        return found

    assert right(21) > right(20) and right(21) > right(22)
    splits = lambda shape, sm_count: min((1 << i for i in range(12)), key=lambda count: xla_cost(shape, count, sm_count))
    assert splits((1568, 992, 5808), 132) == 2 != splits((1568, 992, 5808), 1000)


@pytest.mark.full
def test_cross_validation(script):
    """98 % right and 80 % answered for aligned f16, bf16 and e4m3, at most 2 % wrong of predictions from 0.99, as the page says."""
    known, rules = script.known_answers(), shipped_rules()
    lines = [*script.rule_lines(rules), "", *script.cross_validate(known, rules)]
    assert "\n".join(lines) + "\n" == (ROOT / "docs" / "data" / "replay_rules.md").read_text()
    cells: dict[str, list[str]] = {}
    for line in lines:
        cells.setdefault(line.split(" | ")[0].removeprefix("| "), line.strip("| ").split(" | "))
    percent = lambda cell: float(cell.rstrip("%) ").split()[-1].lstrip("("))
    for library in ("torch-f16", "torch-bf16", "torch-e4m3"):
        _, _, share, right = cells[f"{library}, aligned"]
        assert percent(share) >= 80 and percent(right) >= 98
    *_, predictions, wrong = cells["0.99 or more"]
    assert percent(wrong) <= 2 and int(predictions.replace(",", "")) > 1000


def test_the_page_has_the_shares_of_models(script):
    assert "\n".join(script.model_lines()) + "\n" == (ROOT / "docs" / "data" / "replay_models.md").read_text()


# ---- recipes


def test_a_predicted_recipe_says_so():
    measured = get_kernel_recipe("torch-f16", 64, 64, 8192, predicted=True)
    assert measured == get_kernel_recipe("torch-f16", 64, 64, 8192) and "not measured" not in str(measured)
    recipe = get_kernel_recipe("torch-f16", 48, 64, 8192, predicted=True)
    assert recipe.has_order(measured) and recipe.conditions.probability == pytest.approx(0.99, abs=0.01)
    assert "not measured: predicted with a probability of 0.99" in str(recipe) and "seen:" not in str(recipe)
    assert loads(dumps(recipe)) == recipe


def test_the_fault_that_omits_products_is_predicted():
    profile = find_profile(list_profiles(), "torch-f16", None, None)
    assert predict_recipe(profile, (64, 64, 11528)).slices.dropped == 8 == profile.kernel_recipe((64, 64, 11528)).slices.dropped


@pytest.mark.parametrize(
    ("library", "shape", "words"),
    [
        ("torch-f16", (48, 1, 1000), "no rule predicts the order of 48 x 1 x 1000"),
        ("torch-e4m3-slow", (64, 64, 65536), "K up to 16384"),
        ("jax-f16", (1, 512, 512), "M, N and K from 2 on"),
        ("torch-f32", (48, 64, 64), "no rule predicts orders of torch-f32"),
    ],
)
def test_what_no_rule_covers_is_refused(library, shape, words):
    with pytest.raises(NotModelled, match=words):
        get_kernel_recipe(library, *shape, predicted=True)
    with pytest.raises(NotModelled, match="was not measured"):
        get_kernel_recipe(library, *shape)


def test_doubtful_predictions_are_refused_unless_wanted():
    shape = (16, 3456, 7488)
    with pytest.raises(NotModelled, match=r"predicted with a probability of 0\.6\d\d only; min_probability=0\.98"):
        get_kernel_recipe("torch-f16", *shape, predicted=True)
    assert get_kernel_recipe("torch-f16", *shape, predicted=True, min_probability=0.5).slices.rule == (2, 64)
    prediction, probability = predict_order("torch-f16", shape, 132)
    assert "one wave of 132" in prediction.why and probability < 0.9


# ---- a policy


def test_a_policy_predicts_and_its_report_says_so():
    x, up = (jnp.asarray(np.random.default_rng(1).standard_normal(s), jnp.bfloat16) for s in ((40, 96), (96, 512)))
    policy = library_policy("jax-bf16", missing="predicted")
    emulated = tcemu.emulate(lambda x: x @ up, policy)
    text = str(emulated.report(x))
    assert text.count("PREDICTED") == 1 and text.count("predicted with a probability of 0.999") == 1
    wanted = tcemu.matmul(x, up, recipe=get_kernel_recipe("jax-bf16", 40, 512, 96, predicted=True), dtype=jnp.bfloat16)
    assert (emulated(x) == wanted).all()
    with pytest.raises(NotModelled, match="has other axes"):
        tcemu.emulate(lambda x: jnp.einsum("md,nd->mn", x, x), policy)(x)
    left = tcemu.emulate(lambda x: (x[:1] @ up, x @ up), library_policy("jax-bf16", predicted=True, missing=None)).report(x)
    assert [entry.replaced for entry in left.entries] == [False, True]
    assert left.entries[0].reason == "not measured for jax-bf16, and not predicted"
    again = tcemu.policies.from_json(tcemu.policies.to_json(policy))
    assert (
        isinstance(again, ShapePolicy) and (again.min_probability, again.refuse_missing) == (0.98, True) and "predicted=True" in repr(again)
    )


# ---- at which M


def test_at_which_m_the_order_changes():
    found = find_order_changes("jax-bf16", 4096, 4096, range(2, 513))
    counts = [max(1, len(one.recipe.slices.edges) - 1) for one in found.ranges if one.recipe is not None]
    assert found.changes == (69, 129, 385) and counts == [8, 4, 2, 1]
    text = str(found)
    assert "8 slices of 512 by wgmma, K = 16" in text and "predicted" in text and "changes at M = 69, 129, 385" in text
    edges = [(one.first, one.last) for one in found.ranges]
    assert edges[0][0] == 2 and edges[-1][1] == 512 and all(x[1] + 1 == y[0] for x, y in pairwise(edges))
    assert found.records()[0]["source"] == "predicted"


def test_measured_and_unknown_rows_stand_apart():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    found = find_order_changes("jax-bf16", 4096, 1, (1, 2))
    assert [one.source for one in found.ranges] == ["unknown"] and "2 of the M in these ranges are unknown" in str(found)
    mixed = find_order_changes("torch-f16", 64, 8192, range(63, 66))
    assert [(one.first, one.last, one.source) for one in mixed.ranges] == [
        (63, 63, "predicted"), (64, 64, "measured"), (65, 65, "unknown"),
    ]  # fmt: skip
    assert mixed.changes == () and mixed.plot().axes[0].get_xlabel() == "M, rows"


def test_the_command_prints_the_orders(capsys):
    assert main(["replay", "orders", "torch-bf16", "384", "1536", "--rows", "8:20"]) == 0
    assert "one slice by wgmma, K = 16" in capsys.readouterr().out
    for rows in ("8", "9:8", "0:4", "1:999999"):
        assert main(["replay", "orders", "torch-bf16", "384", "1536", "--rows", rows]) != 0
    assert main(["replay", "orders", "torch-int8", "384", "1536"]) != 0
