"""Fingerprints of functions that use other makers' units: planted ones, and the products of this CPU's libraries."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from oracles import x86_probe
from support.sampling import sample_cases

import tcemu
from tcemu.engine.isa.other_makers import find_unit
from tcemu.formats import BF16, F32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.replay import fingerprint, loads
from tcemu.uses.replay.order_candidates import TARGETS

ON_THIS_CPU = """
import sys
from tcemu import replay
if sys.argv[1] == "torch":
    import torch
    torch.set_num_threads(1)
    fn = torch.matmul
else:
    import jax.numpy as jnp
    fn = jnp.matmul
found = replay.fingerprint(fn, 16, 32, int(sys.argv[2]), operand_dtype="bf16", framework=sys.argv[1])
print(replay.dumps(found.recipe) if found.recipe else "")
"""


def unit_steps(name: str, target: str) -> Steps:
    op = find_unit(name)
    assert op is not None
    return Steps(op, target)


PLANTED = [
    ("vdpbf16ps", "znver4", Slices.single(96)),
    ("vdpbf16ps", "znver4", Slices.even(200, 3, 64)),
    ("tdpbf16ps", "sapphirerapids", Slices.even(192, 2, 32)),
]


@pytest.mark.full
def test_amx_is_found_by_the_bits():
    """Without slices, TDPBF16PS is two lanes of multiply-adds over slices of 32, and is found as such."""
    op = find_unit("tdpbf16ps")
    recipe = KernelRecipe(BF16, BF16, F32, unit_steps("tdpbf16ps", "sapphirerapids"), Slices.single(64), Merge())
    found = fingerprint(lambda a, b: np.asarray(tcemu.matmul(a, b, recipe=recipe)), 16, 16, 64, operand_dtype="bf16").recipe
    assert op is not None and found is not None
    a, b = (np.random.default_rng(3).standard_normal(shape).astype(np.float32) for shape in ((16, 64), (64, 16)))
    assert (np.asarray(tcemu.matmul(a, b, recipe=found)) == np.asarray(tcemu.gemm(a, b, op=op, target="sapphirerapids"))).all()


@pytest.mark.parametrize("planted", sample_cases(PLANTED, 3))
def test_a_planted_kernel_of_another_maker_is_found(planted):
    name, target, slices = planted
    recipe = KernelRecipe(BF16, BF16, F32, unit_steps(name, target), slices, Merge())
    found = fingerprint(lambda a, b: np.asarray(tcemu.matmul(a, b, recipe=recipe)), 16, 16, slices.k, operand_dtype="bf16")
    assert found.recipe is not None, str(found)
    assert isinstance(found.recipe.unit, Steps) and found.recipe.unit.arithmetic == unit_steps(name, target).arithmetic
    assert found.recipe.slices.edges == slices.edges


def test_units_of_other_makers_are_tried_only_where_others_fail():
    recipe = KernelRecipe(BF16, BF16, F32, unit_steps("vdpbf16ps", "znver4"), Slices.single(48))
    found = fingerprint(
        lambda a, b: np.asarray(tcemu.matmul(a, b, recipe=recipe)), 16, 16, 48, operand_dtype="bf16", targets=[*TARGETS, "sm_90"]
    )
    assert found.recipe is None and "other makers" not in str(found)


def fingerprint_here(framework: str, k: int, isa: str | None = None) -> KernelRecipe | None:
    """The recipe of this CPU's bf16 product in a process of its own, where oneDNN may use this instruction set at most."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment |= {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    command = [sys.executable, "-c", ON_THIS_CPU, framework, str(k)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=True)
    return loads(done.stdout) if done.stdout.strip() else None


def skip_without_unit(name: str) -> None:
    """Skips where the machine has no torch, or a CPU without the instruction."""
    pytest.importorskip("torch")
    if x86_probe.FLAGS[name] not in x86_probe.cpu_flags():
        pytest.skip(f"this CPU has no {x86_probe.FLAGS[name]}")


@pytest.mark.full
@pytest.mark.parametrize("k", [64, 1000, 3000])
def test_onednn_multiplies_bf16_by_tdpbf16ps(k):
    """On a Sapphire Rapids: over all of K, without further slices. The recipe names the multiply-adds and has the instruction's bits."""
    skip_without_unit("tdpbf16ps")
    recipe = fingerprint_here("torch", k, "AVX512_CORE_AMX")
    assert recipe is not None and isinstance(recipe.unit, Lanes)
    assert (recipe.unit.lanes, recipe.unit.fused, recipe.unit.flush, recipe.merge.start) == (2, True, True, "zero")
    a, b = (np.random.default_rng(k).standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((16, k), (k, 32)))
    d = np.asarray(tcemu.gemm(a, b, op="tdpbf16ps", target="sapphirerapids"))
    assert (np.asarray(tcemu.matmul(a, b, recipe=recipe)) == d.astype(ml_dtypes.bfloat16)).all()


@pytest.mark.full
@pytest.mark.parametrize("k", [64, 1000, 3000])
def test_onednn_multiplies_bf16_by_vdpbf16ps(k):
    """On a Zen 4: in one slice up to 512, in slices of at most 1,024 beyond."""
    skip_without_unit("vdpbf16ps")
    recipe = fingerprint_here("torch", k, "AVX512_CORE_BF16")
    assert recipe is not None and isinstance(recipe.unit, Steps) and recipe.unit.op == find_unit("vdpbf16ps")
    assert recipe.unit.model is None and len(recipe.slices.edges) - 1 == {64: 1, 1000: 2, 3000: 3}[k]


@pytest.mark.full
def test_onednn_without_the_instruction_emulates_it_and_keeps_subnormals():
    skip_without_unit("vdpbf16ps")
    recipe = fingerprint_here("torch", 64, "AVX512_CORE")
    assert recipe is not None and isinstance(recipe.unit, Steps)
    assert recipe.unit.arithmetic == unit_steps("vdpbf16ps", "znver4").arithmetic.replace(flush=None)


@pytest.mark.full
@pytest.mark.parametrize(("framework", "isa"), [("torch", "AVX2"), ("jax", None)])
def test_libraries_without_the_unit_multiply_in_f32(framework, isa):
    pytest.importorskip("torch")
    recipe = fingerprint_here(framework, 64, isa)
    assert recipe is not None and not isinstance(recipe.unit, Steps)


PRODUCT_OF_BYTES = """
import sys
import numpy as np
import torch
a, b = (torch.from_numpy(v) for v in np.load(sys.argv[1]).values())
np.save(sys.argv[2], torch._int_mm(a, b).numpy())
"""


def saturating_pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A·B as VPMADDUBSW adds it: A + 128 as unsigned bytes, each pair of products along K clamped to 16 bits."""
    shifted, b = a.astype(np.int64) + 128, b.astype(np.int64)
    pairs = shifted[:, ::2, None] * b[::2] + shifted[:, 1::2, None] * b[1::2]
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(1) - 128 * b.sum(0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("isa", "unit"),
    [("AVX512_CORE_AMX", "tdpbssd"), ("AVX512_CORE_VNNI", "vpdpbusd"), ("AVX512_CORE", "vpdpbusd"), ("AVX2", "vpdpbusd")],
)
def test_onednn_multiplies_bytes_exactly_only_with_an_instruction_for_it(isa, unit, tmp_path):
    """Without VNNI and AMX, pairs of products saturate in 16 bits, and most outputs of `torch._int_mm` are wrong."""
    skip_without_unit(unit)
    for k in (64, 1000):
        a, b = (np.random.default_rng(k).integers(-128, 128, shape).astype(np.int8) for shape in ((64, k), (k, 64)))
        np.savez(tmp_path / "operands.npz", a, b)
        command = [sys.executable, "-c", PRODUCT_OF_BYTES, tmp_path / "operands.npz", tmp_path / "product.npy"]
        subprocess.run(command, env=os.environ | {"ONEDNN_MAX_CPU_ISA": isa}, timeout=500, check=True)
        product, exact = np.load(tmp_path / "product.npy"), np.asarray(tcemu.gemm(a, b, op="tdpbssd", target="sapphirerapids"))
        if isa in ("AVX512_CORE", "AVX2"):
            assert (product == saturating_pairs(a, b)).all() and (product != exact).mean() > 0.5
        else:
            assert (product == exact).all()
