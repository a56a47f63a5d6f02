"""One projection of q, k and v on one side and three on the other, or a gate and its twin: the products are aligned and compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.planted_drifts import PRODUCTS, plant_product
from support.sampling import sample_cases

from tcemu.drift import Drift, locate, record

RNG = np.random.default_rng(21)
D, HIDDEN = 24, 20
W = {
    name: jnp.asarray(RNG.standard_normal((D, size)) / 5, jnp.float32)
    for name, size in zip("qkvgu", (D, 12, 12, HIDDEN, HIDDEN), strict=True)
}
DOWN = jnp.asarray(RNG.standard_normal((HIDDEN, D)) / 5, jnp.float32)
X = jnp.asarray(RNG.standard_normal((6, D)), jnp.float32)


def block(project):
    def fn(x):
        with jax.named_scope("attention"):
            q, k, v = project(x, "qkv")
            weights = jax.nn.softmax((q[:, :12] + q[:, 12:]) @ k.T)
            x = x + jnp.pad(weights @ v, ((0, 0), (0, 12)))
        with jax.named_scope("mlp"):
            gate, up = project(x, "gu")
            return x + (jnp.tanh(gate) * up) @ DOWN

    return fn


def split(x, names):
    return [x @ W[name] for name in names]


def fused(x, names):
    return jnp.split(x @ jnp.concatenate([W[name] for name in names], 1), np.cumsum([W[name].shape[1] for name in names])[:-1], 1)


def run(project, number=None, how="tf32"):
    """Record a run, with the product of this number computed otherwise; of a split projection, 0, 1 and 2 are q, k and v.

    All other products are sequential sums, whatever kernel XLA chooses for their shape.
    """
    seen = []

    def substitute(at, name, operands, results):
        if name != "dot_general":
            return None
        seen.append(at)
        operation = type("Operation", (), {"name": name, "attributes": {"dimension_numbers": [[[1], [0]], [[], []]]}})
        plain = number is None or len(seen) - 1 not in np.atleast_1d(number)
        return [plant_product(operation, operands, results[0], PRODUCTS["products rounded" if plain else how][0])]

    return record(block(project), substitute=substitute)(X), seen


def test_a_fused_and_a_split_projection_are_one_product():
    (left, _), (right, _) = run(fused), run(split)
    assert locate(left, right, targets=()).lines == () and locate(right, left, targets=()).lines == ()


CASES = {  # number of the product with another arithmetic on the fused and on the split side; the lines of the report
    "fused qkv": (0, None, ("a", 0)),
    "one of q, k, v": (None, 1, ("a", 0)),
    "all of q, k, v": (None, (0, 1, 2), ("a", 0)),
    "fused gate and up": (3, None, ("m", 3)),
    "up": (None, 6, ("m", 3)),
}


@pytest.mark.parametrize("case", sample_cases(CASES, ["one of q, k, v"]))
@pytest.mark.parametrize("how", ["tf32", pytest.param("pairwise", marks=pytest.mark.full)])
def test_a_drift_of_a_fused_or_a_split_projection_is_found_and_named(case, how):
    left_number, right_number, (scope, place) = CASES[case]
    (left, numbers), (right, _) = run(fused, left_number, how), run(split, right_number, how)
    kind = {"tf32": "operands rounded", "pairwise": "order of the sum"}[how]
    for drift in (locate(left, right, targets=()), locate(right, left, targets=())):
        (source,) = drift.sources
        assert source == drift.lines[0] and kind in source.cause.kinds, str(drift)
        assert source.path.startswith(scope) and " parts (" in source.name
        assert ("in part " in source.cause.left + source.cause.right) == (case in ("one of q, k, v", "up")), str(drift)
    assert locate(left, right, targets=()).sources[0].left == numbers[place]
    assert Drift.from_json(drift.to_json()) == drift


@pytest.mark.full
def test_linear_layers_of_torch_with_biases_are_joined(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    parts = [torch.nn.Linear(24, size) for size in (20, 12, 12)]
    whole = torch.nn.Linear(24, 44)
    whole.weight.data, whole.bias.data = (torch.cat([getattr(part, name).data for part in parts]) for name in ("weight", "bias"))
    x = torch.randn(5, 24)

    def planted(number, name, operands, results):
        """The left operand is truncated to bf16, which no hypothesis does."""
        if name != "aten.addmm":
            return None
        bias, a, b = operands
        return [bias + (a.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) @ b]

    with record(tmp_path / "whole.drift"):
        q, k, v = whole(x).split([20, 12, 12], -1)
        (torch.tanh(q), torch.tanh(k), torch.tanh(v))
    with record(tmp_path / "parts.drift"):
        q, k, v = (part(x) for part in parts)
        (torch.tanh(q), torch.tanh(k), torch.tanh(v))
    assert locate(tmp_path / "whole.drift", tmp_path / "parts.drift", targets=()).sources == ()
    with record(tmp_path / "planted.drift", substitute=planted):
        q, k, v = (part(x) for part in parts)
        (torch.tanh(q), torch.tanh(k), torch.tanh(v))
    drift = locate(tmp_path / "whole.drift", tmp_path / "planted.drift", targets=())
    (source,) = drift.sources
    assert source.name.startswith("aten.addmm | aten.addmm in 3 parts") and "unexplained" in source.cause.right, str(drift)
