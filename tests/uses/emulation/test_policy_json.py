"""Policies as JSON and back, those for functions too: each form decides as before; what cannot be saved and hostile files are refused."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu import functional, policies
from tcemu.uses.emulation.decisions import as_policy
from tcemu.uses.emulation.function_choices import as_function_policy
from tcemu.uses.emulation.policies import Where

BF16, FP8 = tcemu.get_recipe("bf16"), tcemu.get_recipe("fp8")
EVERY_WHERE = Where(
    name="*dot*", parameter="up*", role=("activation", "weight"), shape=(None, 16), dtype=jnp.dtype("bfloat16"), primitive="dot_general"
)


def kernel_recipe():
    return tcemu.replay.get_kernel_recipe("jax-bf16", *next(iter(_profile().shapes)), gpu=_profile().gpu)


def _profile():
    return next(profile for profile in tcemu.replay.list_profiles() if profile.library == "jax-bf16")


FORMS = {
    "a recipe": lambda: BF16,
    "a name": lambda: "fp8 on H100",
    "nothing": lambda: None,
    "rules": lambda: {"*up*": "bf16", re.compile("DOWN|_x", re.IGNORECASE): None, Where(role="weight"): FP8, EVERY_WHERE: "deepseek"},
    "pairs": lambda: [("*", tcemu.dot_general("fp8", a="rhs")), (Where(shape=(4, None), role="gradient"), None)],
    "a kernel": lambda: {"*": tcemu.dot_general(kernel_recipe())},
    "linear_only": lambda: policies.linear_only("bf16"),
    "skip_attention": lambda: policies.skip_attention({"*": "fp8"}),
    "skip_ends": lambda: policies.skip_ends(policies.linear_only("bf16"), first=0, last=2),
    "library": lambda: tcemu.replay.library_policy("jax-bf16"),
    "library, leave": lambda: tcemu.replay.library_policy("jax-bf16", missing=None),
    "library, recipe": lambda: policies.skip_ends(tcemu.replay.library_policy("jax-bf16", missing="bf16 on A100")),
}  # fmt: skip


def model(params, x):
    for layer in ("up", "mid", "down"):
        x = jnp.tanh(x @ params[layer])
    return x


PARAMS = {name: np.zeros((16, 16), np.float32) for name in ("up", "mid", "down")}
X = np.zeros((4, 16), np.float32)


def decisions(policy):
    return [(entry.name, entry.replaced, entry.reason) for entry in tcemu.emulate(model, policy).report(PARAMS, X)]


@pytest.mark.parametrize("name", FORMS)
def test_a_policy_decides_as_the_saved_one(name):
    policy = FORMS[name]()
    text = policies.to_json(policy, indent=1)
    back = policies.from_json(text)
    assert policies.to_json(back, indent=1) == text and repr(back) == repr(as_policy(policy))
    if name.startswith(("a recipe", "a name", "nothing", "rules", "pairs", "a kernel")):
        assert back == as_policy(policy)
    if name not in ("a kernel", "library"):  # these refuse products of other shapes
        assert decisions(back) == decisions(policy)


def named_choice(product):
    return BF16


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (named_choice, "test_policy_json.named_choice is a function"),
        ({"*": jax.lax.dot_general}, "dot_general is a function"),
        ([(named_choice, "bf16")], "the pattern .*named_choice is a function.*Where"),
        (policies.skip_ends(named_choice), "named_choice is a function"),
        ({"*": tcemu.dot_general("nvfp4_training", key=jax.random.key(0))}, "holds a random key"),
        ([(re.compile(b"x"), "bf16")], "of bytes"),
    ],
)
def test_what_is_no_value_is_refused_by_name(policy, said):
    with pytest.raises(TypeError, match=said):
        policies.to_json(policy)


HOSTILE = (
    (3, "got 3; expected null"),
    ({"rules": 3}, "policy.rules: got 3"),
    ({"rules": [["*"]]}, "policy.rules"),
    ({"rules": [[3, None]]}, "pattern: got 3"),
    ({"rules": [["*", "bf16"]]}, "policy: got bf16"),
    ({"rules": [], "more": 1}, "unknown"),
    ({"rules": [[{"regex": "(", "flags": 32}, None]]}, "is no regular expression"),
    ({"rules": [[{"regex": "x", "flags": 128}, None]]}, "expected a regular expression and its flags"),
    ({"rules": [[{"regex": "x", "flags": True}, None]]}, "flags"),
    ({"rules": [[{"where": {"name": "x"}}, None]]}, "where: missing"),
    ({"restriction": "skip_all", "arguments": {}, "policy": None}, "expected one of linear_only"),
    ({"restriction": ["x"], "arguments": {}, "policy": None}, "expected one of linear_only"),
    ({"restriction": "skip_ends", "arguments": {"first": 1}, "policy": None}, "missing"),
    ({"restriction": "skip_ends", "arguments": {"first": -1, "last": 1}, "policy": None}, "first=-1"),
    ({"restriction": "skip_ends", "arguments": {"first": "1", "last": True}, "policy": None}, "first='1'"),
    ({"library_policy": {"library": "x", "library_version": "", "gpu": "", "missing": None}}, "no profile of x"),
    ({"library_policy": {"library": 3, "library_version": "", "gpu": "", "missing": None}}, "expected text"),
    ({"dot_general": {}, "a": "lhs", "name": ""}, "a recipe: missing"),
    ({"dot_general": {}, "a": ["lhs"], "name": ""}, "expected lhs or rhs"),
    ({"kernel_recipe": {}, "a": "lhs", "name": ""}, "a kernel recipe: missing"),
)


@pytest.mark.parametrize(("data", "said"), HOSTILE)
def test_hostile_policies_are_named_errors(data, said):
    with pytest.raises(ValueError, match=said):
        policies.from_json(json.dumps({"kind": "tcemu policy", "version": 1, "policy": data}))


def test_hostile_texts_and_patterns():
    where = {name: None for name in ("name", "parameter", "role", "shape", "dtype", "primitive")}
    changes = {"name": 3, "role": ["weight"], "shape": [1.5], "dtype": "int4711", "primitive": [], "parameter": {}}
    for name, value in changes.items():
        with pytest.raises(ValueError, match="where"):
            pattern = {"where": where | {name: value}}
            policies.from_json(json.dumps({"kind": "tcemu policy", "version": 1, "policy": {"rules": [[pattern, None]]}}))
    nested = None
    for _ in range(40):
        nested = {"restriction": "linear_only", "arguments": {}, "policy": nested}
    for text in (json.dumps({"kind": "tcemu policy", "version": 1, "policy": nested}), "", "[]", BF16.to_json(), "[" * 10**5):
        with pytest.raises(ValueError):
            policies.from_json(text)


# ---- policies for functions

KERNELS = (
    functional.SoftmaxKernel(functional.RowSum(warps=1, vector=2, lanes=4, reversed_pairs=(4, 5)), division="rn", block=64),
    functional.RmsNormKernel(functional.RowSum(tile=1024, thread_order="chain"), round_before_weight=False),
    functional.LayerNormKernel(moments="welford", fused=False),
    functional.SiluKernel(power="exact"),
    functional.GeluKernel("tanh.approx"),
)
FUNCTIONS = {
    "nothing": None,
    "a name": "liger",
    "no rules": (),
    "rules": {"softmax": "triton", re.compile("NORM", re.IGNORECASE): None, "*": "liger"},
    "values": [(f"kind {number}", kernel) for number, kernel in enumerate(KERNELS)],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_policy_for_functions_equals_the_saved_one(name):
    text = policies.functions_to_json(FUNCTIONS[name], indent=1)
    back = policies.functions_from_json(text)
    assert back == as_function_policy(FUNCTIONS[name]) and policies.functions_to_json(back, indent=1) == text


def test_a_policy_for_functions_decides_as_the_saved_one():
    fn = lambda x: jax.nn.softmax(jax.nn.silu(x)) + jax.nn.gelu(x)
    rules = [("softmax", KERNELS[0]), (re.compile("gelu"), None), ("*", "liger")]
    report = lambda functions: tcemu.emulate(fn, None, functions=functions).report(X)
    entries = report(policies.functions_from_json(policies.functions_to_json(rules))).entries
    assert entries == report(rules).entries and [entry.kernel for entry in entries if entry.replaced] == ["liger", KERNELS[0]]


def named_kernel(function):
    return "liger"


@pytest.mark.parametrize(
    ("functions", "error", "said"),
    [
        (named_kernel, TypeError, r"test_policy_json\.named_kernel is a function"),
        ([(named_kernel, "liger")], TypeError, "the pattern .*named_kernel is a function"),
        ({"softmax": 3}, TypeError, "functions: got"),
        ([(re.compile(b"x"), "liger")], TypeError, "of bytes"),
        ("cudnn", ValueError, "'cudnn' is the name of no kernel"),
    ],
)
def test_functions_that_are_no_values_are_refused_by_name(functions, error, said):
    with pytest.raises(error, match=said):
        policies.functions_to_json(functions)


def saved_softmax(**changes):
    plain = json.loads(policies.functions_to_json({"softmax": KERNELS[0]}))["functions"]["rules"][0][1]["SoftmaxKernel"]
    sums = {name: changes.pop(name) for name in tuple(changes) if name in plain["sums"]}
    return {"rules": [["softmax", {"SoftmaxKernel": {**plain, "sums": {**plain["sums"], **sums}, **changes}}]]}


HOSTILE_FUNCTIONS = (
    (3, "functions: got 3"),
    ("cudnn", "'cudnn' is the name of no kernel"),
    ({"rules": 3}, "functions.rules: got 3"),
    ({"rules": [["*"]]}, "functions.rules"),
    ({"rules": [], "more": 1}, "unknown"),
    ({"rules": [[3, None]]}, "functions: got the pattern 3"),
    ({"rules": [[{"where": {}}, None]]}, "expected text, or an object with regex"),
    ({"rules": [[{"regex": "(", "flags": 32}, None]]}, "is no regular expression"),
    ({"rules": [["softmax", "liger"]]}, "'liger' is the name of no kernel; .*softmax: triton"),
    ({"rules": [["softmax", 3]]}, "kernel: got 3"),
    ({"rules": [["softmax", {"RowSum": {}}]]}, "kernel: got"),
    ({"rules": [["softmax", {"SoftmaxKernel": {}}]]}, "kernel: missing"),
    (saved_softmax(power="ex3"), "power='ex3'"),
    (saved_softmax(block=True), "block=True"),
    (saved_softmax(sums=None), "kernel.sums: got None"),
    (saved_softmax(warps=3), "warps=3"),
    (saved_softmax(warps=[1]), "sums.warps: got"),
    (saved_softmax(reversed_pairs=""), "reversed_pairs: got ; expected a list"),
    (saved_softmax(reversed_pairs=[-1]), "reversed_pairs="),
    (saved_softmax(more=1), "unknown"),
)


@pytest.mark.parametrize(("data", "said"), HOSTILE_FUNCTIONS)
def test_hostile_policies_for_functions_are_named_errors(data, said):
    with pytest.raises(ValueError, match=said):
        policies.functions_from_json(json.dumps({"kind": "tcemu policy for functions", "version": 1, "functions": data}))


def test_a_file_of_the_other_kind_is_refused():
    with pytest.raises(ValueError, match=r"'tcemu policy for functions'.*expected 'tcemu policy'"):
        policies.from_json(policies.functions_to_json("liger"))
    with pytest.raises(ValueError, match="'tcemu policy', version 1; expected 'tcemu policy for functions'"):
        policies.functions_from_json(policies.to_json("bf16"))
