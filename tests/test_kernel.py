"""The Pallas kernel, its inner operations in plain integers and interpreted, against the steps that any device runs."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernel_cases import CASES, HOPPER, operands, signature

from tcemu.architectures.lookup import COMPUTING
from tcemu.architectures.rows import ROWS
from tcemu.arithmetic import program
from tcemu.arithmetic.kernels import tile
from tcemu.arithmetic.kernels.tile import steps_of
from tcemu.arithmetic.model import Model, Signature
from tcemu.formats import F16, F32, UE8M0

SAMPLE = ("f16", "nvf4")  # each kind of plan


def by_kernel(name, a, b, c, scales):
    by_tiles = tile.program(CASES[name][0], signature(name), assembly=False)
    assert by_tiles is not None
    return by_tiles(a, b, c, scales)


@pytest.mark.parametrize("name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_the_kernel_is_the_walk(name):
    both = jax.jit(lambda *args: (by_kernel(name, *args), program.multiply_add(CASES[name][0], signature(name), *args)))
    for raw in (True, False):
        got, wanted = both(*operands(name, raw, 40, 72, 128))
        wrong = int((got != wanted).sum())
        assert wrong == 0, f"{wrong} mismatches of {wanted.size}, raw={raw}"
        assert len(np.unique(wanted)) > (2 if raw else 100)


@pytest.mark.full
@pytest.mark.parametrize("shared", (True, False))
def test_each_matrix_of_a_batch_has_special_steps_of_its_own(shared):
    """Inf in the first step of one A, in the third of another; and in the second of a B that all of them share."""
    a, b, c, _ = operands("f16", False, 16, 8, 48, (4,))
    a = a.at[1, 3, 5].set(F16.infinity).at[2, 1, 40].set(F16.infinity)
    b = b[0].at[20, 2].set(F16.infinity) if shared else b
    wanted = program.multiply_add(HOPPER, signature("f16"), a, b, c)
    assert (by_kernel("f16", a, b, c, None) == wanted).all()
    finite = (wanted & 0x7FFFFFFF) < F32.infinity
    assert (~finite).any((1, 2)).tolist() == ([True] * 4 if shared else [False, True, True, False]) and finite.any()


@pytest.mark.full
def test_batches_broadcast_and_vmap():
    a, b, c, _ = operands("f16", True, 16, 8, 32, (3, 2))
    wanted = program.multiply_add(HOPPER, signature("f16"), a, b, c)
    assert (by_kernel("f16", a, b, c, None) == wanted).all()
    assert (jax.vmap(lambda a, b, c: by_kernel("f16", a, b, c, None), (1, 1, 1), 1)(a, b, c) == wanted).all()
    one = program.multiply_add(HOPPER, signature("f16"), a, b[0, 0], c)
    assert (by_kernel("f16", a, b[0, 0], c, None) == one).all()
    assert (jax.vmap(lambda a, c: by_kernel("f16", a, b[0, 0], c, None))(a, c) == one).all()


@pytest.mark.parametrize("name", ["f16", "e4m3", "mxf8", "nvf4"])
def test_the_ptx_form_lowers_for_cuda(name):
    call = jax.jit(tile.program(CASES[name][0], signature(name)))
    try:
        text = call.trace(*operands(name, True, 64, 64, 64)).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # JAX 0.11
        pytest.skip(f"this JAX lowers for a GPU only where one is: {error}")
    assert "__gpu$xla.gpu.triton" in text


def test_which_rows_have_a_kernel():
    """Every f32 result that is cut toward zero step by step; not chains, other roundings, exact steps or integers."""
    for row in ROWS:
        for a in row.multiplicands:
            model = row.model
            scale = UE8M0 if model.summed else None
            steps = steps_of(model, Signature(a, a, F32, row.accumulators[0], 64, scale=scale))
            wanted = row.accumulators == (F32,) and model.rounding == "RZ" and model.chain is None and model.fraction_bits is not None
            assert (steps is not None) == wanted, (row, a)
    assert {row.family for row in ROWS} >= set(COMPUTING)


def test_what_cannot_be_static_has_no_kernel():
    traced = [HOPPER.replace(**{field: jnp.int32(1)}) for field in ("fraction_bits", "floor", "terms", "result_bits", "rounding")]
    others = [HOPPER.replace(rounding="RN"), HOPPER.replace(chain="k"), Model(F16, 16, 25, -21, "RN"), HOPPER.replace(terms=3)]
    assert [steps_of(model, signature("f16")) for model in traced + others] == [None] * len(traced + others)
    assert steps_of(HOPPER.replace(fraction_bits=40), signature("f16")) is None


SHARDED = """
import jax, numpy as np, jax.numpy as jnp, test_kernel as t
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda v, *spec: jax.device_put(v, NamedSharding(mesh, P(*spec)))
for name in ("f16", "mxf8"):
    a, b, c, scales = t.operands(name, True, 64, 64, 64)
    wanted = t.program.multiply_add(t.CASES[name][0], t.signature(name), a, b, c, scales)
    if scales is not None:
        scales = put(scales[0], "x", None), put(scales[1], None, "y")
    call = jax.jit(lambda *args: t.by_kernel(name, *args)).lower(put(a, "x", None), put(b, None, "y"), put(c, "x", "y"), scales).compile()
    d = call(put(a, "x", None), put(b, None, "y"), put(c, "x", "y"), scales)
    assert d.sharding.spec == P("x", "y"), d.sharding
    assert (np.asarray(d) == np.asarray(wanted)).all()
    assert "all-gather" not in call.as_text()
print("sharded", len(jax.devices()))
"""


@pytest.mark.full
def test_the_kernel_is_cut_along_m_and_n_over_devices():
    here = Path(__file__).parent
    found = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=8", PYTHONPATH=f"{here.parent}{os.pathsep}{here}")
    run = subprocess.run([sys.executable, "-c", SHARDED], env=found, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout == "sharded 8\n", run.stderr[-3000:]
