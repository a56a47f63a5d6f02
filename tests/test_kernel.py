"""The Pallas kernel, its inner operations in plain integers and interpreted, against the steps that any device runs."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tcemu.architectures.lookup import COMPUTING
from tcemu.architectures.rows import ROWS
from tcemu.arithmetic import program
from tcemu.arithmetic.kernels import tile
from tcemu.arithmetic.kernels.tile import steps_of
from tcemu.arithmetic.model import Model, Signature
from tcemu.formats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, TF32, UE4M3, UE8M0

HOPPER, FP8, BLACKWELL = Model(F32, 16, 25, -133), Model(F32, 32, 13, -133, result_bits=13), Model(F32, 32, 25, -133)
GROUPED = Model(F32, 64, 35, -139, summed=16)
CASES = {  # model, formats, scale format, products that share a scale
    "f16": (HOPPER, F16, F16, None, 0),
    "bf16": (HOPPER, BF16, BF16, None, 0),
    "tf32": (HOPPER.replace(terms=8), TF32, TF32, None, 0),
    "e4m3": (FP8, E4M3, E4M3, None, 0),
    "e5m2 and e4m3": (FP8, E5M2, E4M3, None, 0),
    "e3m2 and e2m3, two sums": (BLACKWELL, E3M2, E2M3, None, 0),
    "mxf8": (BLACKWELL, E4M3, E5M2, UE8M0, 32),
    "mxf4": (GROUPED, E2M1, E2M1, UE8M0, 32),
    "nvf4": (GROUPED, E2M1, E2M1, UE4M3, 16),
    "volta": (Model(F32, 4, 23, -131), F16, F16, None, 0),
    "a floor among the products": (HOPPER.replace(floor=-3), F16, BF16, None, 0),
    "few bits": (Model(F32, 8, 9, -20, result_bits=5), E4M3, F16, None, 0),
    "fewer bits than the result keeps": (Model(F32, 8, 9, -133), E4M3, E5M2, None, 0),
    "fewer bits in an f64": (Model(F32, 8, 17, -133), F16, F16, None, 0),
    "a floor among the accumulators": (FP8.replace(floor=-100), E4M3, E4M3, None, 0),
    "27 bits": (Model(F32, 8, 27, -133), E4M3, E4M3, None, 0),
}
SAMPLE = ("f16", "nvf4")  # each kind of plan


def codes(rng, fmt, shape, raw):
    """Any code, but Inf and NaN made rare; or values around 1, so that products cancel and meet in their exponents."""
    code = rng.integers(0, 1 << fmt.bits, shape, dtype=np.uint64)
    at, top = fmt.mantissa_bits + fmt.unused_bits, (1 << fmt.exponent_bits) - 1
    field = (code >> np.uint64(at)).astype(int) & top
    near = np.clip(fmt.bias + rng.integers(-3, 4, shape), 1, max(1, top - 1))
    wanted = np.where((field == top) & (rng.random(shape) < 0.98), near, field) if raw else near
    return jnp.asarray((code ^ ((field ^ wanted).astype(np.uint64) << np.uint64(at))).astype(fmt.dtype))


def operands(name, raw, m, n, k, batch=(), seed=0):
    """a, b, c and the scales."""
    rng = np.random.default_rng(seed)
    _, a, b, scale, share = CASES[name]
    c = codes(rng, F32, (*batch, m, n), raw)
    if raw:  # among them NaN of many words, and what stands far above and below the products
        c = jnp.where(jnp.asarray(rng.random(c.shape) < 0.1), jnp.uint32(0xFF800000) + (c & 0xFFF), c)
    x, y = codes(rng, a, (*batch, m, k), raw), codes(rng, b, (*batch, k, n), raw)
    x, c = x.at[..., ::8, :].set(0), c.at[..., ::8, ::4].set(1 << 31)  # the accumulator alone, and -0
    if scale is None:
        return x, y, c, None
    size = lambda count: rng.integers(0 if raw else 100, 128 if raw else 110, count).astype(np.uint8)  # noqa: E731
    scales = [size((*batch, m, k // share)), size((*batch, k // share, n))]
    for v in scales if raw else ():
        v[rng.random(v.shape) < 0.02] = scale.nan
    return x, y, c, tuple(map(jnp.asarray, scales))


def signature(name):
    model, a, b, scale, _ = CASES[name]
    return Signature(a, b, F32, F32, max(16, model.terms), scale=scale)


def by_kernel(name, a, b, c, scales):
    by_tiles = tile.program(CASES[name][0], signature(name), assembly=False)
    assert by_tiles is not None
    return by_tiles(a, b, c, scales)


@pytest.mark.parametrize("name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_the_kernel_is_the_walk(name):
    both = jax.jit(lambda *args: (by_kernel(name, *args), program.run(CASES[name][0], signature(name), *args)))
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
    wanted = program.run(HOPPER, signature("f16"), a, b, c)
    assert (by_kernel("f16", a, b, c, None) == wanted).all()
    finite = (wanted & 0x7FFFFFFF) < F32.infinity
    assert (~finite).any((1, 2)).tolist() == ([True] * 4 if shared else [False, True, True, False]) and finite.any()


@pytest.mark.full
def test_batches_broadcast_and_vmap():
    a, b, c, _ = operands("f16", True, 16, 8, 32, (3, 2))
    wanted = program.run(HOPPER, signature("f16"), a, b, c)
    assert (by_kernel("f16", a, b, c, None) == wanted).all()
    assert (jax.vmap(lambda a, b, c: by_kernel("f16", a, b, c, None), (1, 1, 1), 1)(a, b, c) == wanted).all()
    one = program.run(HOPPER, signature("f16"), a, b[0, 0], c)
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
    wanted = t.program.run(t.CASES[name][0], t.signature(name), a, b, c, scales)
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
