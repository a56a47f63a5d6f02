"""What products say of derivatives that they lack and of arrays on two devices; tables for notebooks; lines of progress."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.device_processes import run_on_devices

import tcemu
from tcemu.base import progress
from tcemu.uses.emulation import compare as comparison
from tcemu.uses.study import sweeps

X, W = np.ones((4, 32), np.float32), np.ones((32, 8), np.float32)


@pytest.mark.parametrize("function", ["matmul", "emulate"])
@pytest.mark.parametrize(
    "twice", [lambda f: jax.grad(lambda w: jax.grad(f)(w).sum()), lambda f: jax.jacrev(jax.jacrev(f))], ids=["grad", "jacrev"]
)
def test_a_second_derivative_by_recipes_says_what_has_one(function, twice):
    product = lambda w: (tcemu.matmul(X, w, recipe="bf16 on A100") ** 2).sum()
    loss = product if function == "matmul" else tcemu.emulate(lambda w: ((X @ w) ** 2).sum(), "bf16 on A100")
    with pytest.raises(TypeError, match=r'second derivatives .* backward="exact"\), has derivatives of any order'):
        twice(loss)(W)


def test_exact_gradients_have_second_derivatives():
    recipe = tcemu.get_recipe("bf16", "A100", backward="exact")
    loss = lambda w: (tcemu.matmul(X, w, recipe=recipe) ** 2).sum()
    plain = lambda w: ((X @ w) ** 2).sum()
    second = lambda f: jax.grad(lambda w: (jax.grad(f)(w) ** 2).sum())(W)
    np.testing.assert_allclose(second(loss), second(plain), rtol=1e-5)


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, tcemu
first, second = jax.devices()
a, b = jax.device_put(np.ones((16, 16), np.float32), first), jax.device_put(np.ones((16, 8), np.float32), second)
half = [x.astype(jnp.float16).view(jnp.uint16) for x in (a, b)]
q = [jax.device_put(np.ones((4, 2, 16), np.float32), device) for device in (first, second, first)]
calls = {
    "gemm": lambda: tcemu.gemm(a, b, op="f16", target="A100"),
    "matmul": lambda: tcemu.matmul(a, b, recipe="bf16 on A100"),
    "emulate": lambda: tcemu.emulate(lambda a, b: a @ b, "bf16 on A100")(a, b),
    "dot": lambda: tcemu.dot("f16", *half, jnp.zeros((16, 8), jnp.uint32), target="A100"),
    "attention": lambda: tcemu.attention(*q, recipe="bf16 on A100"),
}
for name, call in calls.items():
    try:
        call()
    except ValueError as error:
        assert "jax.device_put(x, y.sharding)" in str(error), error
        print(name, str(error).partition(":1")[0])
print(tcemu.gemm(a, jax.device_put(b, a.sharding), op="f16", target="A100").devices() == {first})
print(tcemu.gemm(a, np.ones((16, 8), np.float32), op="f16", target="A100").shape)
"""


def test_arrays_on_two_devices_are_named():
    lines = run_on_devices(2, TWO_DEVICES).splitlines()
    assert lines == [
        "gemm a is on cpu:0 and b on cpu", "matmul a is on cpu:0 and b on cpu", "emulate operand 1 is on cpu:0 and operand 2 on cpu",
        "dot operand 1 is on cpu:0 and operand 2 on cpu", "attention q is on cpu:0 and k on cpu", "True", "(16, 8)",
    ]  # fmt: skip


# ---- notebooks


def test_models_and_recipes_are_tables_in_a_notebook():
    model = tcemu.get_model("f16", "H100")._repr_html_()
    assert (
        model.count("<tr>") == 1 + len(repr(tcemu.get_model("f16", "H100")).split("=")) - 1 and "<td>fraction_bits</td><td>25</td>" in model
    )
    recipe = tcemu.get_recipe("fp8", "H100")._repr_html_()
    assert [f"<td>{name}</td>" in recipe for name in ("D", "dA", "dB")] == [True] * 3 and recipe.count("<tr>") == 4
    assert (
        "backward: exact" in tcemu.Recipe("f16", "A100", name="<mine>")._repr_html_()
        and "&lt;mine&gt;" in tcemu.Recipe("f16", "A100", name="<mine>")._repr_html_()
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("module", "run", "shown"),
    [
        (sweeps, lambda: tcemu.study.sweep(tcemu.gemm, {"op": ["f16", "bf16"]}, operands=(X, W)), "sweep: 1 of 2 points"),
        (
            comparison,
            lambda: tcemu.compare(lambda x: jnp.tanh(x @ W) @ W.T, ["f16 on A100", "bf16 on A100"], (X,), results=False),
            "compare: 3 of 4 products by their policies",
        ),
    ],
    ids=["sweep", "compare"],
)
def test_a_terminal_sees_how_far_it_is(module, run, shown, monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(module, "interactive_line", lambda total: progress.ProgressLine(total, stream))
    run()
    assert shown in stream.getvalue() and stream.getvalue().endswith("\r")  # the line goes at the end
