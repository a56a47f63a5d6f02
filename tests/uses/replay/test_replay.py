"""`tcemu replay` and what stands around the probes: frameworks, arguments, profiles, the command line, the libraries that are here."""

import json
import lzma
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.changed_json import json_paths, replace_at
from support.sampling import sample_cases

import tcemu
from tcemu.base.errors import NotModelled
from tcemu.cli import main
from tcemu.formats import BF16, E4M3, E5M2, F16, F32
from tcemu.operations.products.library.kernel_json import to_dict
from tcemu.operations.products.library.kernel_recipe import KernelRecipe
from tcemu.replay import Epilogue, Lanes, ProductForm, Slices, Steps, dumps, get_kernel_recipe, library_policy, loads
from tcemu.uses.replay.black_box import detect_framework
from tcemu.uses.replay.fingerprinting import fingerprint
from tcemu.uses.replay.kernel_profiles import PROFILE_KIND, PROFILE_VERSION, ShapePolicy, find_kernel_recipe, list_profiles, read_profile

WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16"
FP8 = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e5m2.e4m3"
CHAIN = KernelRecipe(F16, F16, F32, Steps(WGMMA, "sm_90a"), Slices.single(64))  # pyright: ignore[reportArgumentType]

MIXED = KernelRecipe(E5M2, E4M3, BF16, Steps(FP8, "sm_90a"), Slices.single(64), epilogue=Epilogue(True))  # pyright: ignore[reportArgumentType]


def chain(a, b):
    """A function of NumPy arrays: the module's own, for the command line."""
    return np.asarray(tcemu.matmul(a, b, recipe=CHAIN.without_shape()))


@pytest.mark.parametrize("dtype", sample_cases(["f32", "bf16"], ["f32"]))
def test_the_dot_of_xla_on_this_cpu(dtype):
    """Whatever XLA does here: what is found gives its bits on operands of its own, or nothing is claimed."""
    found = fingerprint(jnp.matmul, 8, 8, 96, operand_dtype=dtype)
    assert found.determined == (found.recipe is not None) and found.calls <= 64 and ("undetermined" in str(found)) != found.determined
    if found.recipe is not None:
        rng = np.random.default_rng(5)
        a, b = (jnp.asarray(rng.standard_normal(shape), {"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype]) for shape in ((8, 96), (96, 8)))
        assert (np.asarray(tcemu.matmul(a, b, recipe=found.recipe), np.float32) == np.asarray(jnp.matmul(a, b), np.float32)).all()


@pytest.mark.full
def test_numpy_on_this_cpu():
    found = fingerprint(np.matmul, 1, 8, 40, operand_dtype="f32")
    if found.recipe is not None:
        rng = np.random.default_rng(5)
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, 40), (40, 8)))
        assert (np.asarray(tcemu.matmul(a, b, recipe=found.recipe)) == np.matmul(a, b)).all()
    assert found.calls <= 64


@pytest.mark.full
def test_a_few_outputs_take_more_calls():
    """One output a call: the order is found by more of them, or nothing is said."""
    found = fingerprint(lambda a, b: np.asarray(tcemu.matmul(a, b, recipe=CHAIN.without_shape())), 1, 1, 64)
    assert found.recipe is None or found.compared >= 24
    assert 24 < found.calls <= 64


def test_calls_that_are_spent():
    found = fingerprint(chain, 4, 4, 64, max_calls=10)
    assert found.recipe is None and "all 10 calls" in str(found) and found.calls == 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"operand_dtype": "f8"}, "operand_dtype='f8'"),
        ({"operand_dtype": "f64"}, "one of f16"),
        ({"operand_dtype": "int8"}, "sums of integers are exact"),
        ({"operand_dtype": ("f16", "bf16")}, "FP8"),
        ({"operand_dtype": ("e4m3",) * 3}, "or two of e4m3 and e5m2"),
        ({"m": 0}, "m=0"),
        ({"k": True}, "k=True"),
        ({"max_calls": 3}, "max_calls=3"),
        ({"framework": "tensorflow"}, "framework='tensorflow'"),
    ],
)
def test_arguments_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        fingerprint(chain, **({"m": 4, "n": 4, "k": 64} | options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scales": "columns"}, "scales='columns'"),
        ({"bias": "e4m3"}, "bias='e4m3'.*f32, f16, bf16"),
        ({"bias": "f16", "bias_shape": "rows"}, "bias_shape='rows'"),
        ({"alpha": 0}, "numbers other than 0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"scales": "rows", "alpha": 2}, "alpha=2.*scales"),
        ({"beta": 2}, "beta=2.*bias="),
    ],
)
def test_forms_that_cannot_be(options, said):
    with pytest.raises(ValueError, match=said):
        ProductForm(**options)
    with pytest.raises(TypeError, match="ProductForm"):
        fingerprint(chain, 4, 4, 64, form="rows")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda a, b: a.astype(np.float64) @ b.astype(np.float64), "f64"),
        (lambda a, b: (a @ b)[:1], "\\[M, N\\]"),
        (lambda a, b: np.zeros((4, 4), complex), "complex128"),
    ],
)
def test_results_that_cannot_be(fn, said):
    with pytest.raises((ValueError, TypeError), match=said):
        fingerprint(fn, 4, 4, 8)


def test_the_framework_is_that_of_the_function():
    assert (
        detect_framework(jnp.matmul) == detect_framework(jax.jit(chain)) == "jax"
        and detect_framework(np.matmul) == detect_framework(chain) == "numpy"
    )


# ---- profiles


def make_profile(**changes):
    recipes = [to_dict(CHAIN), to_dict(CHAIN.replace(slices=Slices.even(64, 2, 32)))]
    held = {
        "kind": PROFILE_KIND, "version": PROFILE_VERSION, "library": "torch-f16", "library_version": "torch 2.11", "gpu": "H200",
        "sm_count": 132,
        "date": "2026-11-22", "recipes": recipes, "shapes": [[4, 4, 64, 0, 32], [8, 4, 64, 1, 64]],
    }  # fmt: skip
    return lzma.compress(json.dumps(held | changes).encode())


def test_a_profile_has_what_was_measured_and_refuses_the_rest():
    known = (read_profile(make_profile()),)
    found = find_kernel_recipe(known, "torch-f16", (8, 4, 64), None, "H200")
    assert len(found.slices.edges) == 3 and found.conditions.m == 8 and "64 outputs on 2026-11-22" in found.conditions.evidence
    for library, shape, gpu, said in (
        ("torch-f16", (8, 8, 64), None, "near it 8 x 4 x 64"),
        ("torch-bf16", (8, 4, 64), None, "no profile of torch-bf16"),
        ("torch-f16", (8, 4, 64), "H100", "no profile of torch-f16 H100"),
    ):
        with pytest.raises(NotModelled, match=said):
            find_kernel_recipe(known, library, shape, None, gpu)
    with pytest.raises(ValueError, match="give version= or gpu="):
        find_kernel_recipe(known * 2, "torch-f16", (8, 4, 64), None, None)


@pytest.mark.parametrize(
    "content", [b"", lzma.compress(b"[]"), make_profile(version=2), make_profile(shapes=[[1, 1, 64, 7, 2]]), make_profile(more=1)]
)
def test_what_is_no_profile_is_refused(content):
    with pytest.raises(ValueError, match="not a profile"):
        read_profile(content)


def test_no_changed_profile_ends_in_another_error_than_valueerror():
    """Every value of a profile is replaced by values of other types; what is still read gives recipes or a ValueError."""
    plain = json.loads(lzma.decompress(make_profile()))
    refused = 0
    for path, value in product([*json_paths(plain), None], (None, True, 1.5, -1, "x", [], [1], [[1]], {}, {"a": 1})):
        changed = value if path is None else replace_at(plain, path, value)
        try:
            profile = read_profile(lzma.compress(json.dumps(changed).encode(), preset=0))
            assert str(profile) and [profile.kernel_recipe(shape) for shape in profile.shapes] != [None]
        except ValueError:
            refused += 1
    assert refused > 500


def test_what_is_shipped_can_be_read():
    for profile in list_profiles():
        assert len(repr(profile)) < 200 and profile.library in repr(profile)
        for shape in profile.shapes:
            assert profile.kernel_recipe(shape).k == shape[2]


# ---- the command line


def test_fingerprint_show_and_diff(tmp_path, capsys):
    path, other = tmp_path / "one.json", tmp_path / "other.json"
    assert main(["replay", "fingerprint", "test_replay:chain", "8", "8", "64", "--out", str(path)]) == 0
    said = capsys.readouterr()
    assert "K = 64 in one slice" in said.out and "call 19 of at most 64" in said.err
    assert main(["replay", "show", str(path)]) == 0
    assert "kernel recipe: f16 x f16 -> f32, M = 8, N = 8" in capsys.readouterr().out
    other.write_text(dumps(CHAIN.replace(slices=Slices.even(64, 2, 32))))
    rng = np.random.default_rng(0)
    for name, shape in (("a", (3, 64)), ("b", (64, 4))):
        np.save(tmp_path / f"{name}.npy", rng.standard_normal(shape).astype(np.float16))
    files = [str(tmp_path / "a.npy"), str(tmp_path / "b.npy"), "--left", str(path), "--right"]
    assert main(["replay", "diff", *files, str(other)]) == 0
    assert "the first sum that differs is number 2" in (said := capsys.readouterr().out) and "instruction of k 32 to 47" in said
    assert main(["replay", "diff", *files, str(path)]) == 0
    assert "0 of 12 outputs differ" in capsys.readouterr().out


def scaled_product(a, b, scale_a, scale_b):
    """Two formats, and a scale for each tensor."""
    return np.asarray(tcemu.matmul(a, b, recipe=MIXED, scale_a=scale_a, scale_b=scale_b, dtype=jnp.bfloat16))


@pytest.mark.full
def test_fingerprint_takes_two_formats_and_scales(tmp_path, capsys):
    path = tmp_path / "one.json"
    words = ["fingerprint", "test_replay:scaled_product", "8", "8", "64", "--dtype", "e5m2,e4m3", "--scales", "tensor", "--quiet", "--out"]
    assert main(["replay", *words, str(path)]) == 0
    assert "e5m2 x e4m3 -> bf16, M = 8, N = 8, scales tensor" in capsys.readouterr().out
    found = replace(loads(path.read_text()).without_shape(), conditions=MIXED.conditions)
    assert found == MIXED


def strange(a, b):
    """Sums that have no order of a candidate."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


@pytest.mark.full
def test_what_is_undetermined_has_a_status_of_its_own(tmp_path, capsys):
    path = tmp_path / "none.json"
    assert main(["replay", "fingerprint", "test_replay:strange", "8", "8", "64", "--quiet", "--out", str(path)]) == 3
    assert "undetermined" in capsys.readouterr().out and not path.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fingerprint", "nothing", "4", "4", "8"], "'nothing' names no function"),
        (["fingerprint", "no_such_module:f", "4", "4", "8"], "no_such_module"),
        (["fingerprint", "numpy:pi", "4", "4", "8"], "numpy:pi"),
        (["fingerprint", "numpy", "4", "4", "8", "--dtype", "f9"], "operand_dtype='f9'"),
        (["show", "nothing.json"], "is no file"),
    ],
)
def test_mistakes_are_told(words, said, capsys):
    assert main(["replay", *words]) == 2
    assert said in capsys.readouterr().err


def test_files_that_hold_no_recipe(tmp_path, capsys):
    for content in (b"", b"{}", b"\xff\xfe", b"[" * 5000):
        (tmp_path / "bad.json").write_bytes(content)
        assert main(["replay", "show", str(tmp_path / "bad.json")]) == 2
        assert "holds no recipe" in capsys.readouterr().err
    assert str(CHAIN.replace(dtype=BF16)) and Lanes()


# ---- a policy by shapes


def model(x, up, down):
    return jnp.tanh(x @ up) @ down


def matrices(*shapes, dtype=jnp.bfloat16):
    return [jnp.asarray(np.random.default_rng(n).standard_normal(shape), dtype) for n, shape in enumerate(shapes)]


@pytest.mark.full
def test_a_policy_takes_the_recipe_of_each_shape():
    given = matrices((96, 256), (256, 1024), (1024, 256))
    emulated = tcemu.emulate(model, library_policy("jax-bf16"))
    assert [entry.reason for entry in emulated.report(*given).entries] == ["jax-bf16 96 x 1024 x 256", "jax-bf16 96 x 256 x 1024"]
    x, up, down = given
    hidden = jnp.tanh(tcemu.matmul(x, up, recipe=get_kernel_recipe("jax-bf16", 96, 1024, 256), dtype=jnp.bfloat16))
    wanted = tcemu.matmul(hidden, down, recipe=get_kernel_recipe("jax-bf16", 96, 256, 1024), dtype=jnp.bfloat16)
    assert (jax.jit(emulated)(*given) == wanted).all()
    assert "jax-bf16" in repr(emulated) and "NVIDIA H200" in repr(emulated)


def test_leading_axes_of_a_linear_layer_are_rows_of_one_product():
    x, up, down = matrices((4, 24, 256), (256, 1024), (1024, 256))
    emulated = tcemu.emulate(model, library_policy("jax-bf16"))
    assert [entry.reason for entry in emulated.report(x, up, down).entries] == ["jax-bf16 96 x 1024 x 256", "jax-bf16 96 x 256 x 1024"]
    flat = tcemu.emulate(lambda x, w: x @ w, library_policy("jax-bf16"))
    assert (flat(x, up) == flat(x.reshape(96, 256), up).reshape(4, 24, 1024)).all()
    deep = x.reshape(2, 2, 24, 256)
    assert [entry.reason for entry in flat.report(deep, up).entries] == ["jax-bf16 96 x 1024 x 256"]
    with pytest.raises(NotModelled, match="has other axes"):
        tcemu.emulate(lambda x: jnp.einsum("btd,bsd->bts", x, x), library_policy("jax-bf16"))(x)


@pytest.mark.full
def test_a_policy_of_two_formats():
    profile = read_profile(make_profile(library="torch-e5m2-e4m3", recipes=[to_dict(MIXED)], shapes=[[4, 8, 64, 0, 32]]))
    by_shape = ShapePolicy(profile, None, refuse_missing=True)
    x, w = (matrix.astype(dtype) for matrix, dtype in zip(matrices((4, 64), (64, 8)), (jnp.float8_e5m2, jnp.float8_e4m3fn), strict=True))
    product = lambda x, w: jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)
    assert (tcemu.emulate(product, by_shape)(x, w) == tcemu.matmul(x, w, recipe=MIXED, dtype=jnp.bfloat16)).all()
    with pytest.raises(NotModelled, match="was measured for e5m2 x e4m3 -> bf16"):
        tcemu.emulate(lambda w, x: product(w.T, x.T), by_shape)(w, x)


def test_a_policy_refuses_what_was_not_measured_or_does_what_it_is_told():
    x, w = matrices((97, 256), (256, 256))
    for fn, given, words in (
        (jnp.matmul, (x, w), "97 x 256 x 256 was not measured"),
        (lambda x, w: jnp.einsum("mk,nk->mn", x, w), (x, w), "has other axes"),
        (jnp.matmul, matrices((96, 256), (256, 256), dtype=jnp.float16), "was measured for bf16 x bf16 -> bf16"),
    ):
        with pytest.raises(NotModelled, match=words) as error:
            tcemu.emulate(fn, library_policy("jax-bf16"))(*given)
        assert "missing=None) leaves such a product" in str(error.value)
    left = tcemu.emulate(lambda x, w: (x @ w, x[:96] @ w), library_policy("jax-bf16", missing=None)).report(x, w)
    assert [entry.replaced for entry in left.entries] == [False, True]
    assert left.entries[0].reason == "not measured for jax-bf16"
    other = tcemu.emulate(jnp.matmul, library_policy("jax-bf16", missing="bf16"))
    assert other.report(x, w).entries[0].reason.endswith(", not measured for jax-bf16")
    assert "not measured" not in str(other.report(x[:96], w))
    inside = tcemu.emulate(lambda x: x @ w, tcemu.policies.linear_only(library_policy("jax-bf16", missing="bf16")))
    assert inside.report(x).entries[0].reason.endswith(", not measured for jax-bf16")
    assert (other(x, w) == tcemu.matmul(x, w, recipe="bf16", dtype=jnp.bfloat16)).all()
    whole = jnp.arange(6).reshape(2, 3)
    assert (tcemu.emulate(lambda: whole @ whole.T, library_policy("jax-bf16", missing=None))() == whole @ whole.T).all()
    with pytest.raises(NotModelled, match="no profile of jax-int8"):
        library_policy("jax-int8")
    with pytest.raises(ValueError, match="recipe"):
        library_policy("jax-bf16", missing="nothing like it")
    with pytest.raises(NotModelled, match=r"with scales \(rows\) and a bias \(bf16 columns\), and the products of a program"):
        library_policy("torch-e4m3-rows-bias")
