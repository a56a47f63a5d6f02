"""Quantisers by contract: each row against a transcription of the library's code, torchao against itself, layouts, and the matrix."""

import os
import subprocess
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracles import contracts_reference as oracle
from oracles import four_over_six_reference as exact
from support.sampling import sample_cases

import tcemu
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.quantize.contract_matrix import BLOCK, OPEN, REGIONS, SPECIAL, contract_words, draw_blocks, special_words
from tcemu.operations.quantize.contracts import quantize_blocks, round_elements, seed_words
from tcemu.operations.quantize.philox import philox, triton_randint
from tcemu.operations.quantize.scale_factors import ONE, Factor
from tcemu.operations.quantize.two_level_scales import FourOverSixScale, TwoLevelScale
from tcemu.quantize import (
    CONTRACTS,
    SCALE_LAYOUTS,
    arrange_scales,
    block_dequantize,
    block_quantize,
    contract_matrix,
    dequantize_groups,
    get_contract,
    restore_scales,
)

NAMES = sorted(CONTRACTS)
USUAL = ["sglang_group_ue8m0", "vllm_nvfp4"]


def expected_words(name, codes, tensor):
    """The words of the transcription: codes of elements, words of scales, f32 words of the tensor's scale."""
    contract = CONTRACTS[name]
    x, t, element = codes.view(np.float32), tensor.view(np.float32), str(contract.element)
    (function,) = oracle.LIBRARIES[name]
    arguments = (x, t) if contract.scale.format.name in ("f32", "ue4m3") else (x, t, element)
    with np.errstate(all="ignore"):
        values, cast, scales, *more = function(*arguments)
    if contract.scale.format.name == "f32":
        scales = np.where(np.isnan(scales), np.uint32(0x7FFFFFFF), scales.astype(np.float32).view(np.uint32))
    elif scales.dtype == ml_dtypes.float8_e4m3fn:
        scales = np.where(np.isnan(scales.astype(np.float32)), 0x7F, scales.view(np.uint8))
    stored = None if not more or more[0] is None else more[0].astype(np.float32).view(np.uint32)
    return oracle.element_codes(element, values, cast), scales, stored


def claimed_regions(name):
    """The regions of which a row claims words."""
    return [region for region in REGIONS if not (CONTRACTS[name].open_specials and region in SPECIAL)]


def count_differing(name, blocks, seed=0):
    compared = wrong = 0
    source = CONTRACTS[name].only or F32
    for region in claimed_regions(name):
        codes, tensor = draw_blocks(region, CONTRACTS[name].element, blocks, seed, source)
        words = contract_words(CONTRACTS[name], region, blocks, seed, source)
        for found, expected in zip(words, expected_words(name, codes, tensor), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                wrong += int((found != np.broadcast_to(expected, found.shape)).sum())
        compared += codes.size
    return wrong, compared


@pytest.mark.parametrize("name", sample_cases(NAMES, USUAL))
def test_a_contract_is_the_librarys_code(name):
    assert count_differing(name, 512) == (0, 512 * BLOCK * len(claimed_regions(name)))


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_contract_is_the_librarys_code_on_ten_million_numbers(name):
    wrong = compared = 0
    for seed in range(1, 6):
        more = count_differing(name, 16_384, seed)
        wrong, compared = wrong + more[0], compared + more[1]
    assert (wrong, compared) == (0, 5 * 16_384 * BLOCK * len(claimed_regions(name))) and compared > 7_000_000


def test_every_contract_has_a_transcription():
    assert set(oracle.LIBRARIES) == set(CONTRACTS)
    assert all(row.source and row.versions and row.libraries and row.name == name for name, row in CONTRACTS.items())
    assert get_contract("te_current").versions == "01c24fe, 0064fbd" and get_contract("mlx_mxfp4").versions == "0.32.4, 0087b78"
    assert get_contract("te_delayed").versions == "release 1.3, release 1.12" and get_contract("ocp_mxfp4").versions == "MX 1.0"


# ---- torchao's own words


def torchao_words(name, codes, tensor):
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchao")
    x, t = torch.from_numpy(codes.view(np.float32).copy()), torch.from_numpy(tensor.view(np.float32).copy())
    if name.startswith("torchao_float8"):
        from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

        scale = amax_to_scale(torch.amax(torch.abs(x), -1, keepdim=True), torch.float8_e4m3fn, name.endswith("power_of_two"))
        return to_fp8_saturated(x * scale, torch.float8_e4m3fn).view(torch.uint8).numpy(), (1.0 / scale).numpy().view(np.uint32)
    if name == "torchao_inference":
        from torchao.quantization.quant_primitives import _choose_scale_float8, _quantize_affine_float8

        scale = _choose_scale_float8(x, [1, x.shape[-1]])
        return _quantize_affine_float8(x, scale).view(torch.uint8).numpy(), scale.numpy().view(np.uint32)
    if name.startswith("torchao_nvfp4"):
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

        found = [
            nvfp4_quantize(row[None], 16, None if "one_level" in name else per_tensor_amax_to_scale(amax))
            for row, amax in zip(x, t, strict=True)
        ]
        scales, packed = (np.concatenate([part.view(torch.uint8).numpy() for part in parts]) for parts in zip(*found, strict=True))
        return unpack_nibbles(packed), scales
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    element = torch.float8_e4m3fn if "mxfp8" in name else torch.float4_e2m1fn_x2
    scales, data = to_mx(x, element, x.shape[-1], ScaleCalculationMode[name.rsplit("_", 1)[1].upper()])
    words = data.view(torch.uint8).numpy()
    return (words if "mxfp8" in name else unpack_nibbles(words)), scales.view(torch.uint8).numpy().reshape(-1, 1)


def unpack_nibbles(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def test_casts_to_fnuz_are_torchs():
    """Every bfloat16 and the ties of e4m3fnuz, which aiter's cast on gfx942 rounds by torch."""
    torch = pytest.importorskip("torch")
    codes = np.arange(1 << 16, dtype=np.uint32) << 16
    x = np.concatenate([codes, codes + 0x8000]).view(np.float32)
    expected = torch.from_numpy(x).to(torch.float8_e4m3fnuz).view(torch.uint8).numpy()
    found = round_elements(CONTRACTS["aiter_per_token_fnuz"], jnp.asarray(x.view(np.uint32)), Factor(jnp.full(x.shape, ONE), False))
    np.testing.assert_array_equal(found, expected)


TORCHAO = [name for name in NAMES if name.startswith("torchao") and "before" not in name]


def compare_with_torchao(name, blocks, seed):
    """Words that differ from torchao's own. The sign and payload of a NaN that arises on a CPU are left out."""
    compared = wrong = 0
    for region in REGIONS:
        codes, tensor = draw_blocks(region, CONTRACTS[name].element, blocks, seed)
        words = quantize_blocks(CONTRACTS[name], jnp.asarray(codes), jnp.asarray(tensor))
        elements, scales = torchao_words(name, codes, tensor)
        found, found_scales = np.asarray(words.codes), np.asarray(words.scales)
        arose = np.zeros(found.shape, bool)
        if CONTRACTS[name].element.name == "e4m3":
            elements = np.where(elements & 0x7F == 0x7F, 0x7F, elements)
        else:
            with np.errstate(all="ignore"):
                values = oracle.LIBRARIES[name][0](
                    *((codes.view(np.float32), tensor.view(np.float32), "e2m1")[: 2 if "nv" in name else 3])
                )[0]
            arose = np.isnan(values) & ~np.isnan(codes.view(np.float32))
        if scales.dtype == np.uint32:
            scales = np.where(np.isnan(scales.view(np.float32)), np.uint32(0x7FFFFFFF), scales)
        else:
            scales = np.where(scales == 0xFF, 0x7F, scales) if "nv" in name else scales
        wrong += int(((found != elements) & ~arose).sum()) + int((found_scales != scales).sum())
        compared += found.size + found_scales.size
    return wrong, compared


@pytest.mark.parametrize("name", sample_cases(TORCHAO, ["torchao_mxfp8_rceil"]))
def test_a_contract_of_torchao_has_its_words(name):
    wrong, compared = compare_with_torchao(name, 256, 3)
    assert wrong == 0 and compared > 256 * len(REGIONS) * BLOCK


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in TORCHAO if "nvfp4" not in name])
def test_a_contract_of_torchao_has_its_words_on_ten_million_numbers(name):
    results = [compare_with_torchao(name, 16_384, seed) for seed in range(10, 15)]
    assert sum(wrong for wrong, _ in results) == 0 and sum(compared for _, compared in results) > 10_000_000


def test_torchs_log2_is_rounded_once_near_powers_of_two():
    torch = pytest.importorskip("torch")
    fields = np.arange(1, 255, dtype=np.int64)[:, None] << 23
    codes = (fields + np.arange(-64, 64)).clip(1, 0x7F7FFFFF).astype(np.uint32).ravel()
    codes = np.concatenate([codes, np.arange(0x400000 - 64, 0x400000 + 64, dtype=np.uint32)])
    found = torch.log2(torch.from_numpy(codes.view(np.float32).copy())).numpy()
    expected = np.log2(codes.view(np.float32).astype(np.float64)).astype(np.float32)
    assert (np.ceil(found) == np.ceil(expected)).all() and (np.floor(found) == np.floor(expected)).all()


# ---- MLX's own words


def mlx_words(mode, x):
    mlx = pytest.importorskip("mlx.core")
    packed, scales = mlx.quantize(mlx.array(x), mode=mode)
    words = np.array(packed).view(np.uint8)
    return (words if mode == "mxfp8" else unpack_nibbles(words)), np.array(scales)


def mlx_blocks(mode, blocks, seed):
    """f32 blocks that aim at what rules disagree on, as wide as the mode's, without Inf and NaN."""
    element = CONTRACTS[f"mlx_{mode}"].element
    drawn = [draw_blocks(region, element, 2 * blocks, seed)[0] for region in claimed_regions("mlx_mxfp4")]
    x = np.concatenate(drawn).view(np.float32)
    return x if mode == "nvfp4" else x.reshape(-1, 2 * BLOCK)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_a_contract_of_mlx_has_its_words(mode):
    x = mlx_blocks(mode, 1024, 4)
    elements, scales = mlx_words(mode, x)
    found = get_contract(f"mlx_{mode}").quantize(x)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(found.codes, elements)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_mlxs_scales_of_every_exponent_and_of_the_numbers_beside(mode):
    largest = np.float32(448 if mode == "mxfp8" else 6)
    powers = largest * np.exp2(np.arange(-149, 120, dtype=np.float64)).astype(np.float32)
    codes = (powers.view(np.uint32)[:, None].astype(np.int64) + np.arange(-8, 9)).clip(0).astype(np.uint32).ravel()
    x = np.zeros((len(codes), 32), np.uint32)
    x[:, 5] = codes
    elements, scales = mlx_words(mode, x.view(np.float32))
    found = get_contract(f"mlx_{mode}").quantize(x.view(np.float32))
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(found.codes, elements)


def test_mlxs_elements_of_every_f16_that_a_scale_of_one_leaves():
    """amax 6 gives the scale 1 in both formats of e2m1: every finite f16 up to 6, and the f32 numbers beside the middles."""
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32).view(np.uint32)[:, None] + np.arange(-3, 4)
    x = np.concatenate(
        [np.arange(0x4601, dtype=np.uint16).view(np.float16).astype(np.float32), middles.astype(np.uint32).ravel().view(np.float32)]
    )
    x = np.resize(np.concatenate([x, -x]), (-(-2 * len(x) // 15) * 15,)).reshape(-1, 15)
    x = np.concatenate([x, np.full((len(x), 1), 6, np.float32)], axis=1)
    for mode, blocks in (("nvfp4", x), ("mxfp4", np.resize(x, (-(-len(x) // 2), 32)))):
        elements, scales = mlx_words(mode, blocks)
        found = get_contract(f"mlx_{mode}").quantize(blocks)
        np.testing.assert_array_equal(found.scales, scales)
        np.testing.assert_array_equal(found.codes, elements)


# ---- four over six, against fractions


FOUR_OVER_SIX = [row for row in CONTRACTS.values() if isinstance(row.scale, FourOverSixScale)]
USUAL_4OVER6 = ["flashinfer_nvfp4_4over6_mse_256"]


def four_over_six_blocks(largest, every):
    """Blocks whose scale, mapped to 6, is each code of ue4m3 or a middle of two, with elements near the middles of both candidates."""
    values = [float(value) for value in exact.E4M3]
    wanted = [value for pair in pairwise(values) for value in (pair[0], sum(pair) / 2)] + values[-1:]
    rng = np.random.default_rng(5)
    middles = np.array([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0, 6.0])
    blocks, tensors = [], []
    for number, value in enumerate(wanted[1::every]):
        tensor = np.float32(2.0 ** rng.integers(-20, 20) * rng.uniform(1, 2))
        step = float(tensor) / (6 * largest)  # the value of a scale of one
        amax = np.float32(min(6 * value * step * (1 + rng.integers(-2, 3) * 2.0**-23), float(tensor)))
        x = (
            rng.choice(middles, 16)
            * value
            * step
            * rng.choice([1, 1.5], 16)
            * rng.choice([-1, 1], 16)
            * (1 + rng.integers(-1, 2, 16) * 2.0**-23)
        )
        x = np.where(rng.random(16) < 0.5, x, rng.uniform(-1, 1, 16) * amax).astype(np.float32)
        x = np.clip(x, -amax, amax)
        x[number % 16] = amax
        blocks.append(np.where(x == 0, np.float32(0), x))  # +0: fractions have no sign of zero
        tensors.append(tensor)
    return np.array(blocks, np.float32), np.array(tensors, np.float32)[:, None]


@pytest.mark.parametrize("name", sample_cases([row.name for row in FOUR_OVER_SIX], USUAL_4OVER6))
def test_four_over_six_is_what_fractions_give(name):
    check_four_over_six(name, 3)


@pytest.mark.full
@pytest.mark.parametrize("name", [row.name for row in FOUR_OVER_SIX])
def test_four_over_six_is_what_fractions_give_for_every_scale(name):
    check_four_over_six(name, 1)


def check_four_over_six(name, every):
    scale = CONTRACTS[name].scale
    assert isinstance(scale, FourOverSixScale)
    x, tensor = four_over_six_blocks(scale.largest, every)
    words = quantize_blocks(CONTRACTS[name], jnp.asarray(x.view(np.uint32)), jnp.asarray(tensor.view(np.uint32)))
    taken = set()
    for block, amax, code, codes in zip(x, tensor[:, 0], np.asarray(words.scales)[:, 0], np.asarray(words.codes), strict=True):
        expected = exact.quantize([Fraction(float(v)) for v in block], Fraction(float(amax)), scale.largest, scale.squared, scale.error)
        signs = np.where(block < 0, 8, 0)
        assert (int(code), [int(c) for c in codes]) == (expected[0], expected[1]), (block, amax)
        assert ((codes & 8) == signs).all()
        taken.add(round(float(exact.E4M3[code]) * float(amax) / scale.largest / float(np.abs(block).max()), 1))
    assert len(x) > 80 / every and len(taken) > 1  # both candidates are taken


def test_four_over_six_on_arrays_is_that_on_their_blocks():
    contract, x = get_contract("te_nvfp4_4over6_mse"), np.random.default_rng(6).standard_normal((2, 3, 64)).astype(np.float32)
    words, amax = contract.quantize(x), np.abs(x).max()
    tensor = jnp.full((24, 1), np.float32(amax).view(np.uint32))
    blocks = quantize_blocks(contract, jnp.asarray(x.reshape(-1, 16).view(np.uint32)), tensor)
    np.testing.assert_array_equal(np.asarray(words.codes).reshape(-1, 16), blocks.codes)
    np.testing.assert_array_equal(np.asarray(words.scales).reshape(-1, 1), blocks.scales)
    values = np.asarray(dequantize_groups(contract, words))
    plain = np.asarray(dequantize_groups(get_contract("te_nvfp4"), get_contract("te_nvfp4").quantize(x)))
    assert ((values - x) ** 2).sum() < ((plain - x) ** 2).sum()  # what the rule is for


# ---- vLLM's MXFP4 on bfloat16


def test_vllms_mxfp4_of_every_bfloat16():
    """Every finite bf16 as amax below 1.75 * 2^127, and every one as an element beside it: the reference at bf16's own widths."""
    amax = np.arange(1, 0x7F60, dtype=np.uint32)
    blocks = np.zeros((len(amax), 32), np.uint32)
    blocks[:, 0] = amax
    rng = np.random.default_rng(8)
    blocks[:, 1:] = (amax[:, None] - rng.integers(0, 5 << 7, (len(amax), 31)).clip(0, amax[:, None])).astype(np.uint32) | rng.choice(
        [0, 0x8000], (len(amax), 31)
    ).astype(np.uint32)
    x = (blocks << 16).view(np.float32)
    values, cast, scales = oracle.vllm_mxfp4(x, None, "e2m1", mantissa_bits=7)
    words = get_contract("vllm_mxfp4").quantize(x.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(words.scales, scales)
    np.testing.assert_array_equal(words.codes, oracle.element_codes("e2m1", values, cast))
    with pytest.raises(tcemu.NotModelled, match="known for bf16 x alone"):
        get_contract("vllm_mxfp4").quantize(x)


# ---- what a library leaves open


def test_what_a_library_leaves_open_is_no_claim():
    assert special_words(CONTRACTS["mlx_mxfp4"])["1 and NaN"] == OPEN and special_words(CONTRACTS["ocp_mxfp4"])["1 and NaN"] != OPEN
    (found,) = contract_matrix(["mlx_mxfp4", "ocp_mxfp4"], blocks=64).comparisons
    assert {d.region for d in found.divergences if not d.compared} == set(SPECIAL) and not set("in") & set(found.letters)


@pytest.mark.full
def test_a_counterexample_that_needs_its_whole_block_says_so():
    """Two sums of squares of one block lie so near to each other that no two of its elements part by themselves."""
    names = ["te_nvfp4_4over6_mse", "flashinfer_nvfp4_4over6_mse"]
    blocks, tensor = draw_blocks("ordinary", CONTRACTS[names[0]].element, 20_000)
    words = [quantize_blocks(CONTRACTS[name], jnp.asarray(blocks), jnp.asarray(tensor)) for name in names]
    (row,) = np.flatnonzero(np.asarray(words[0].scales != words[1].scales)[:, 0])
    (comparison,) = contract_matrix(names, blocks=20_000).comparisons
    example = next(d.example for d in comparison.divergences if d.region == "ordinary")
    assert not example.alone and "among other elements: " in str(example)
    assert (example.left[1], example.right[1]) == (int(words[0].scales[row, 0]), int(words[1].scales[row, 0]))
    assert example.left != example.right


# ---- the package's own quantisers are rows of the table


@pytest.mark.full
def test_the_packages_mx_formats_are_the_ocp_rows():
    for kind, name in (("mxfp8_e4m3", "ocp_mxfp8"), ("mxfp4", "ocp_mxfp4")):
        x = np.concatenate([draw_blocks(region, CONTRACTS[name].element, 128)[0] for region in REGIONS]).view(np.float32)
        x = x.reshape(-1, 2 * BLOCK)
        q, words = block_quantize(x, kind), get_contract(name).quantize(x)
        np.testing.assert_array_equal(q.codes, words.codes)
        np.testing.assert_array_equal(q.scales, words.scales)
        np.testing.assert_array_equal(np.asarray(block_dequantize(q)), np.asarray(dequantize_groups(get_contract(name), words)))


@pytest.mark.full
def test_the_packages_nvfp4_is_the_row_of_transformer_engine():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q, words = block_quantize(x, "nvfp4"), get_contract("te_nvfp4").quantize(x)
    np.testing.assert_array_equal(q.codes, words.codes)
    np.testing.assert_array_equal(q.scales, words.scales)
    assert np.asarray(q.tensor_scale).view(np.uint32) == np.asarray(words.tensor_scale)


# ---- arrays of any shape


@pytest.mark.parametrize("extent", sample_cases(["1 x 128", "128 x 128"], ["128 x 128"]))
def test_groups_share_scales(extent):
    groups = (5, 2) if extent == "1 x 128" else (1, 2)
    contract = get_contract("deepgemm")
    x = np.random.default_rng(1).standard_normal((3, 5, 200)).astype(np.float32)
    words = contract.quantize(x, extent=extent)
    assert words.scales.shape == (3, *groups) and words.codes.shape == x.shape
    rows = 128 if extent.startswith("128") else 1
    for batch in range(3):
        for r in range(groups[0]):
            for k in range(2):
                group = x[batch, r * rows : (r + 1) * rows, 128 * k : 128 * (k + 1)]
                alone = quantize_blocks(contract, jnp.asarray(group.reshape(1, -1).view(np.uint32)), jnp.zeros((1, 1), jnp.uint32))
                assert np.asarray(alone.scales)[0, 0] == np.asarray(words.scales)[batch, r, k]
                part = np.asarray(words.codes)[batch, r * rows : (r + 1) * rows, 128 * k : 128 * (k + 1)]
                np.testing.assert_array_equal(np.asarray(alone.codes).reshape(group.shape), part)


@pytest.mark.full
def test_tensors_rows_vectors_jit_and_vmap():
    contract, x = get_contract("vllm_per_tensor"), np.random.default_rng(2).standard_normal((3, 4, 40)).astype(np.float32)
    assert contract.quantize(x).scales.shape == (1, 1, 1) and contract.quantize(x, extent="row").scales.shape == (3, 4, 1)
    rows = contract.quantize(x, extent="row")
    mapped = jax.jit(jax.vmap(lambda y: contract.quantize(y, extent="row")))(x)
    for one, other in zip(rows[:2], mapped[:2], strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(contract.quantize(x[0, 0], extent="row").codes, rows.codes[0, 0])
    values = np.asarray(dequantize_groups(contract, rows, "row"))
    assert np.abs(values - x).max() < 0.15
    bf16 = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(contract.quantize(bf16).codes, contract.quantize(bf16.astype(np.float32)).codes)


def test_a_scale_in_the_dtype_of_x():
    x = np.random.default_rng(3).standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    scales = np.asarray(get_contract("torchao_inference").quantize(x, extent="row").scales).view(np.float32)
    amax = np.abs(x.astype(np.float32)).max(-1, keepdims=True)
    np.testing.assert_array_equal(scales, (amax / np.float32(448)).astype(ml_dtypes.bfloat16).astype(np.float32))


def test_mistakes_say_what_would_work():
    with pytest.raises(ValueError, match="did you mean 'vllm_per_token'"):
        get_contract("vllm_per_tokens")
    with pytest.raises(ValueError, match="1 x 128, 128 x 128"):
        get_contract("deepgemm").quantize(np.ones((2, 128), np.float32), extent="row")
    with pytest.raises(ValueError, match="no scale for the whole tensor"):
        get_contract("deepgemm").quantize(np.ones((2, 128), np.float32), tensor_amax=1.0)
    with pytest.raises(TypeError, match="expected float32"):
        get_contract("deepgemm").quantize(np.ones((2, 128), np.int32))
    with pytest.raises(ValueError, match="need two"):
        get_contract("deepgemm").quantize(np.ones(128, np.float32), extent="128 x 128")
    with pytest.raises(tcemu.NotModelled, match="known for f32 x alone; got bf16"):
        get_contract("compressed_tensors_fp8").quantize(np.ones((2, 128), ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="expected one of linear"):
        arrange_scales(np.zeros((4, 4), np.uint8), "swizzled")


# ---- the matrix


def test_a_pair_parts_where_the_table_says():
    """SGLang's two float8 kernels differ on special values alone; torchao's eager RCEIL and a rounding of bits near powers of two too."""
    found = contract_matrix(["sglang_group", "sglang_group_v1", "torchao_mxfp8_rceil", "mslk_mxfp8"], blocks=512)
    letters = {(c.left, c.right): c.letters for c in found.comparisons}
    assert letters[("sglang_group", "sglang_group_v1")] == "in"
    assert letters[("torchao_mxfp8_rceil", "mslk_mxfp8")].startswith("os")
    assert "1 sglang_group        037cd6e\n" in str(found) and found.records()[0]["right_version"] == "00568d9"
    assert found.records() and all("by scale" in row["counterexample"] for row in found.records())


@pytest.mark.full
def test_every_pair_parts_but_those_that_are_known_to_be_equal_in_f32():
    found = contract_matrix(blocks=20_000)
    equal = {frozenset((c.left, c.right)) for c in found.comparisons if c.equal}
    assert equal == {frozenset(("torchao_inference", "aiter_per_tensor"))}  # torchao's scale has the dtype of x
    (pair,) = contract_matrix(["torchao_inference", "aiter_per_tensor"], blocks=80_000, seed=1).comparisons
    assert pair.equal and sum(d.compared for d in pair.divergences) * BLOCK > 10_000_000


@pytest.mark.full
def test_the_page_has_the_whole_matrix():
    assert str(contract_matrix()).rstrip() == (Path(__file__).parents[3] / "docs" / "data" / "contract_matrix.txt").read_text().rstrip()


@pytest.mark.full
def test_a_counterexample_is_one():
    """The two numbers of each counterexample, quantised by themselves, give the words that it names."""
    found = contract_matrix(blocks=256)
    checked = 0
    for comparison in found.comparisons:
        for divergence in comparison.divergences:
            example = divergence.example
            if example is None or not example.alone or not np.isfinite(example.amax) or divergence.region in ("zero", "negative zero"):
                continue
            block = np.zeros((1, BLOCK), np.float32)
            block[0, :2] = example.amax, example.x
            tensor = np.float32([[1 if example.tensor_amax is None else example.tensor_amax]]).view(np.uint32)
            for name, (code, scale) in ((comparison.left, example.left), (comparison.right, example.right)):
                if CONTRACTS[name].noise_bits:
                    continue  # its noise depends on the place of the block
                words = quantize_blocks(CONTRACTS[name], jnp.asarray(block.view(np.uint32)), jnp.asarray(tensor))
                assert (int(np.asarray(words.codes)[0, 1]), int(np.asarray(words.scales)[0, 0])) == (code, scale), (comparison.left, name)
                checked += 1
    assert checked > 1000


@pytest.mark.full
def test_multiplying_by_a_reciprocal_gives_the_exponent_of_a_division_for_every_fraction():
    """Every f32 fraction: fl(amax * fl(1 / max)) and fl(amax / max) have the same power of two above them, for 448 and for 6."""
    amax = (np.uint32(127 << 23) + np.arange(1 << 23, dtype=np.uint32)).view(np.float32)
    ceil = lambda x: (x.view(np.uint32) >> 23) + ((x.view(np.uint32) & 0x7FFFFF) != 0)
    for largest in (np.float32(448), np.float32(6)):
        assert (ceil(amax / largest) == ceil(amax * (np.float32(1) / largest))).all()


# ---- stochastic rounding


def test_philox_has_its_published_words():
    """Known answers of Random123 1.14, kat_vectors, philox4x32 with 7 and 10 rounds."""
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    known = {
        7: (((0,) * 4, (0,) * 2, "5f6fb709 0d893f64 4f121f81 4f730a48"), (*pi, "4dfccaba 190a87f0 c47362ba b6b5242a")),
        10: (((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"), (*pi, "d16cfe09 94fdcceb 5001e420 24126ea1")),
    }
    for rounds, cases in known.items():
        for counter, key, words in cases:
            found = philox(tuple(jnp.uint32(word) for word in counter), jnp.asarray(key, jnp.uint32), rounds)
            assert " ".join(f"{int(word):08x}" for word in found) == words


def test_stochastic_rounding_by_a_seed():
    """A matrix of several rows and groups is the transcription's, group by group; zeros become 6 about half the time."""
    contract, x = get_contract("mslk_mx4_stochastic"), np.random.default_rng(8).standard_normal((3, 96)).astype(ml_dtypes.bfloat16)
    seed = (5 << 40) + 77
    words = contract.quantize(x, seed=seed)
    values, cast, scales = oracle.mslk_mx4_stochastic(x.astype(np.float32).reshape(-1, 32), None, "e2m1", seed)
    np.testing.assert_array_equal(np.asarray(words.codes).reshape(-1, 32), oracle.element_codes("e2m1", values, cast))
    np.testing.assert_array_equal(np.asarray(words.scales).reshape(-1, 1), scales)
    assert (np.asarray(contract.quantize(x, seed=seed + 1).codes) != np.asarray(words.codes)).any()
    zeros = np.asarray(contract.quantize(np.zeros((64, 64), np.float32), seed=1).codes)
    assert set(np.unique(zeros)) == {0, 7} and 0.45 < (zeros == 7).mean() < 0.55
    with pytest.raises(ValueError, match="initial_seed"):
        contract.quantize(x)
    with pytest.raises(ValueError, match="rounds to nearest"):
        get_contract("mslk_mx4_ceil").quantize(x, seed=1)
    with pytest.raises(ValueError, match="multiple of 32"):
        contract.quantize(x[:, :40], seed=1)


@pytest.mark.full
def test_the_random_words_are_tritons():
    """Triton's own randint, by its interpreter."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    script = Path(__file__).parents[2] / "oracles" / "triton_randint.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    for seed in (0, 1, 0x5A5A5A5A, (5 << 40) + 77, (1 << 63) - 1):
        text = subprocess.run([sys.executable, script, str(seed)], env=environment, capture_output=True, text=True, check=True).stdout
        found = triton_randint(jnp.asarray(seed_words(seed)), jnp.arange(256, dtype=jnp.uint32), 7)
        assert [int(word) for word in text.split()] == np.asarray(found).tolist()


# ---- layouts


def test_layouts_are_permutations_and_formulas():
    rows, columns = 200, 10
    scales = np.random.default_rng(5).integers(1, 255, (2, rows, columns), np.uint8)
    for name, layout in SCALE_LAYOUTS.items():
        stored = np.asarray(arrange_scales(scales, name))
        np.testing.assert_array_equal(restore_scales(jnp.asarray(stored), name, rows, columns), scales)
        assert stored.shape[-1] == (rows + -rows % layout.rows) * (columns + -columns % layout.columns)
    m, k = np.divmod(np.arange(rows * columns), columns)
    tiles = -(-columns // 4)
    at = (m // 128) * tiles * 512 + (k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4  # get_sf_out_offset_128x4
    np.testing.assert_array_equal(np.asarray(arrange_scales(scales, "128x4"))[:, at], scales.reshape(2, -1))
    at = (m // 8) * tiles * 32 + (k // 4) * 32 + (m % 8) * 4 + k % 4  # get_sf_out_offset_8x4
    np.testing.assert_array_equal(np.asarray(arrange_scales(scales, "8x4"))[:, at], scales.reshape(2, -1))
    packed = np.pad(scales[0], [(0, 0), (0, 2)]).copy().view(np.int32)  # pack_ue8m0_to_int, then column-major
    np.testing.assert_array_equal(np.asarray(arrange_scales(scales[0], "deepgemm")).view(np.int32), packed.T.ravel())
    with pytest.raises(ValueError, match="bytes"):
        restore_scales(jnp.zeros(5, jnp.uint8), "8x4", 8, 4)


def test_torchaos_blocked_scales():
    torch = pytest.importorskip("torch")
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = np.random.default_rng(6).integers(0, 256, (130, 6), np.uint8)
    expected = utils.to_blocked(torch.from_numpy(scales), use_triton_kernel=False).numpy().ravel()
    np.testing.assert_array_equal(arrange_scales(scales, "128x4"), expected)


def test_two_level_contracts_take_the_tensors_magnitude():
    contract = get_contract("vllm_nvfp4")
    assert isinstance(contract.scale, TwoLevelScale)
    x = np.random.default_rng(7).standard_normal((2, 32)).astype(np.float32)
    own, given = contract.quantize(x), contract.quantize(x, tensor_amax=np.abs(x).max())
    np.testing.assert_array_equal(own.codes, given.codes)
    assert (np.asarray(contract.quantize(x, tensor_amax=100.0).scales) <= np.asarray(own.scales)).all()
