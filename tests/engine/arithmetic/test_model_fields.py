"""What a Model may be: known values outside the limits raise with the limits, traced ones give NaN, and raise in checked mode."""

import copy
import pickle
from dataclasses import fields
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import fuzz
from tcemu.cli import main
from tcemu.engine.arithmetic.model import Model, what_if, what_if_fields
from tcemu.formats import BF16, F16, F32, F64

F16_OP = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
MXF4_OP = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0"
TRACEABLE = {"terms": 16, "fraction_bits": 25, "floor": -133, "result_bits": 23, "rounding": 1, "alignment": 0}  # values inside
OUTSIDE = {
    "terms": (0, -1, 1 << 17), "fraction_bits": (-5, 0, 41, 60, 99), "floor": (-1025, 513, 10**8), "result_bits": (0, 24, 40),
    "rounding": (-1, 4, 9), "alignment": (-1, 4, 9),
}  # fmt: skip


def ones(model, k=64):
    """64 products of ones, by one model."""
    return tcemu.gemm(jnp.ones((1, k)), jnp.ones((k, 1)), op=F16_OP, target="sm_90a", model=model)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in OUTSIDE.items() for value in values])
@pytest.mark.parametrize("kind", [int, np.int64, np.asarray, jnp.asarray])
def test_a_known_value_outside_raises_with_the_limits(field, value, kind):
    with pytest.raises(
        ValueError, match=rf"Model\({field}=.*{value}.*\): {field} must be ((an integer )?from -?\d+ to \d+|one of RN, RZ, RM, RP)"
    ):
        Model(F32, **{field: kind(value)})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"result": "f32"}, "result must be f16, f32, f64 or s32, of tcemu.formats"),
        (
            {"fraction_bits": 10.0},
            "an integer from 1 to 40, or None for exact; tcemu.study.surrogate takes a real number of bits, with gradients",
        ),
        ({"fraction_bits": "10"}, "fraction_bits must be an integer"),
        ({"fraction_bits": True}, "fraction_bits must be"),
        ({"rounding": "nonsense"}, "rounding must be one of RN, RZ, RM, RP"),
        ({"rounding": None}, "rounding must be one of RN, RZ, RM, RP"),
        ({"terms": None}, "terms must be an integer from 1 to 65536"),
        ({"chain": 0}, "chain must be a number of products"),
        ({"chain": -1}, "chain must be a number of products"),
        ({"chain": 2.0}, "chain must be a number of products"),
        ({"groups": 0}, "groups must be a number of groups, at least 1"),
        ({"groups": "2"}, "groups must be a number of groups"),
        ({"summed": 0}, "summed must be a number of products, or None"),
        ({"multiplicand": "f16"}, "multiplicand must be a float format"),
        ({"together": 1}, "together must be True or False"),
        ({"result": F64}, "result must be f16 or f32 where there are fraction_bits"),
        ({"fraction_bits": None, "terms": 1, "result_bits": 10}, "result_bits must be None where fraction_bits is None"),
        ({"fraction_bits": None, "terms": 1, "multiplicand": F16}, "multiplicand must be None where fraction_bits is None"),
    ],
)
def test_what_cannot_be_is_named(fields, said):
    with pytest.raises(ValueError, match=said):
        Model(**({"result": F32} | fields))


@pytest.mark.parametrize("field", sample_cases(OUTSIDE, 6))
def test_a_traced_value_outside_gives_nan_and_an_inside_one_does_not(field):
    values = (*OUTSIDE[field], TRACEABLE[field])
    results = jax.vmap(lambda value: ones(Model(F32).replace(**{field: value})))(jnp.asarray(values))
    assert np.isnan(results).ravel().tolist() == [True] * len(OUTSIDE[field]) + [False]


def test_a_traced_value_outside_raises_in_checked_mode():
    checked = tcemu.checked(jax.jit(lambda bits: ones(Model(F32, fraction_bits=bits))))
    assert float(checked(jnp.int32(25))[0, 0]) == 64
    with pytest.raises(tcemu.UndefinedBehaviour, match="a traced field of the model is outside its limits"):
        checked(jnp.int32(60))


@pytest.mark.full
def test_a_traced_result_in_f16_or_f64_is_nan_too():
    half = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
    model = Model(F16, floor=-21, rounding="RN")
    by_bits = jax.jit(
        lambda bits: tcemu.gemm(jnp.ones((1, 16)), jnp.ones((16, 1)), op=half, target="sm_90a", model=model.replace(fraction_bits=bits))
    )
    assert np.isnan(by_bits(60)).all() and by_bits(25)[0, 0] == 16
    double, one = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", np.array([[[0, 0x3FF00000]]], np.uint32)
    a, b = np.broadcast_to(one, (8, 4, 2)), np.broadcast_to(one, (4, 8, 2))
    c = np.zeros((8, 8, 2), np.uint32)
    exact = Model(F64, 1, None, rounding="RN")
    dot = jax.jit(lambda mode: tcemu.dot(double, a, b, c, target="sm_90a", model=exact.replace(rounding=mode)))
    assert dot(0)[0, 0].tolist() == [0, 0x40100000]


@pytest.mark.parametrize("dtype", sample_cases([np.uint8, np.uint16, np.uint32, np.int8, np.int64], [np.int64]))
def test_every_integer_dtype_means_its_value(dtype):
    assert float(ones(Model(F32, fraction_bits=dtype(25)))[0, 0]) == 64
    swept = jax.vmap(lambda bits: ones(Model(F32, fraction_bits=bits)))
    assert (swept(np.arange(3, 27, dtype=dtype)) == swept(jnp.arange(3, 27, dtype=jnp.int32))).all()


def test_a_field_is_one_number():
    with pytest.raises(ValueError, match=r"fraction_bits=\.\.\.\): got an array \[8\]; a field is one number, and jax.vmap sweeps several"):
        ones(Model(F32, fraction_bits=jnp.arange(8, 16)))


@pytest.mark.parametrize("field", ["groups", "chain", "summed", "together", "from_zero"])
def test_what_must_be_known_before_tracing_says_so(field):
    with pytest.raises(ValueError, match=f"{field} must be known before tracing"):
        jax.jit(lambda value: ones(Model(F32, **{field: value})))(2)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model(F32, terms=4, chain=12, together=True), "products of an instruction must be whole chains"),
        (Model(F32, terms=16, chain=12), "a chain must be whole steps"),
        (Model(F32, multiplicand=F64), "whose products have more than the 24 bits that a fused step adds"),
        (Model(F32, multiplicand=F32), "whose products have more than the 24 bits"),
    ],
)
def test_gemm_and_explain_refuse_alike(model, said):
    with pytest.raises(ValueError, match=said):
        ones(model)
    with pytest.raises(ValueError, match=said):
        tcemu.explain(F16_OP, [1.0] * 64, [1.0] * 64, target="sm_90a", model=model)


@pytest.mark.parametrize("model", [["exact"], {}, 24])
def test_what_is_no_model_is_named(model):
    with pytest.raises(TypeError, match=r"model: got .*tcemu.Model"):
        ones(model)
    with pytest.raises(TypeError, match=r"model=.*tcemu.Model"):
        tcemu.Recipe(F16_OP, "sm_90a", model=model)


@pytest.mark.full
def test_traced_terms_reach_a_whole_instruction():
    """As static ones do: 64 products of an instruction in one step."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 16, shape, dtype=np.uint8) for shape in ((16, 64), (64, 8)))
    scales = {"scale_a": np.full((16, 2), 127, np.uint8), "scale_b": np.full((2, 8), 127, np.uint8)}
    model = Model(F32, fraction_bits=6)
    dot = lambda terms: tcemu.dot(MXF4_OP, a, b, np.zeros((16, 8), np.uint32), target="sm_120a", model=model.replace(terms=terms), **scales)
    traced = jax.jit(dot)
    assert (traced(jnp.int32(64)) == dot(64)).all()
    assert (traced(jnp.int32(100)) == dot(64)).all()  # a step never reaches into the next instruction
    assert (traced(jnp.int32(32)) != dot(64)).any()


@pytest.mark.full
def test_a_model_goes_through_jax_with_anything_in_its_leaves():
    """JAX puts axes, shapes and placeholders where the arrays were."""
    model = Model(F32, fraction_bits=jnp.arange(8, 12))
    assert jax.tree.map(lambda _: 0, model).fraction_bits == 0
    assert jax.eval_shape(lambda m: m, model).fraction_bits.shape == (4,)
    assert jax.vmap(ones)(model).shape == (4, 1, 1)


@pytest.mark.full
def test_a_traced_unsigned_value_beyond_an_int32_is_outside():
    """2^32 - 133 is not -133."""
    by_floor = jax.jit(lambda floor: ones(Model(F32, floor=floor)))
    assert np.isnan(by_floor(jnp.uint32(2**32 - 133))).all() and by_floor(jnp.uint32(0))[0, 0] == 64
    with jax.enable_x64(True):
        assert np.isnan(by_floor(jnp.int64(2**32 - 133))).all() and by_floor(jnp.int64(-133))[0, 0] == 64


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_model_is_the_model(copied):
    for model in (Model(F32), Model(F32, multiplicand=F16), Model(F64, 1, None, rounding="RN")):
        assert copied(model) == model and hash(copied(model)) == hash(model) and repr(copied(model)) == repr(model)
    assert int(copied(Model(F32, fraction_bits=jnp.int32(7))).fraction_bits) == 7


def test_a_copied_model_keeps_the_payload_of_a_nan():
    """Its formats are equal to the package's own, and not the same objects."""
    double, nan = "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", 0xFFF0000000000123
    model = copy.deepcopy(tcemu.get_model(double, "sm_90a"))
    given = np.full((1, 4), nan, np.uint64).view(np.float64)
    d = tcemu.gemm(given, np.ones((4, 1)), op=double, target="sm_90a", model=model)
    explained = tcemu.explain(double, [nan] * 4, [0x3FF0000000000000] * 4, 0, target="sm_90a", model=model, codes=True)
    assert int(np.asarray(d).view(np.uint64)[0, 0]) == explained.result == nan | 1 << 51


def test_subclasses_of_int_and_a_carried_model():
    bits = IntEnum("Bits", {"ALL": 25}).ALL
    assert Model(F32, fraction_bits=bits) == Model(F32) and float(ones(Model(F32, fraction_bits=bits))[0, 0]) == 64
    step = lambda model, _: (model.replace(fraction_bits=model.fraction_bits + 1), ones(model)[0, 0])
    swept = jax.lax.scan(step, Model(F32, fraction_bits=jnp.int32(39)), None, length=4)[1]
    assert np.isnan(swept).tolist() == [False, False, True, True]


def test_new_traced_values_compile_nothing():
    """A sweep of a thousand values is one program: nothing grows."""
    swept = jax.jit(lambda bits: ones(Model(F32, fraction_bits=bits)))
    results = [swept(np.int32(1 + at % 40)) for at in range(1000)]
    assert swept._cache_size() == 1 and float(results[24][0, 0]) == 64


# ---- FIELD=VALUE as text: every field of `Model`, each by its own kind of value, and what is said of the others.


QUAD = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
EXACT = Model(F32, 1, None, rounding="RN", chain=4, from_zero=True)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("fraction_bits=24,terms=8", {"fraction_bits": 24, "terms": 8}),
        ("floor=-20,rounding=RM,alignment=RN", {"floor": -20, "rounding": "RM", "alignment": "RN"}),
        ("result_bits=13", {"result_bits": 13}),
        ("result_bits=None", {"result_bits": None}),
        ("chain=k,together=True", {"chain": "k", "together": True}),
        ("chain=8,groups=2", {"chain": 8, "groups": 2}),
        ("result=f16,multiplicand=bf16", {"result": F16, "multiplicand": BF16}),
        ("multiplicand=None,summed=None", {"multiplicand": None, "summed": None}),
        ("summed=8", {"summed": 8}),
        ("result=f16,result_bits=10", {"result": F16, "result_bits": 10}),
    ],
)
def test_each_field_reads_its_own_kind_of_value(text, changes):
    assert what_if(Model(F32), text) == Model(F32).replace(**changes)


def test_true_and_false_are_no_words():
    """The word "False" is a string that Python takes for true."""
    assert what_if(EXACT, "from_zero=False").from_zero is False
    assert what_if(EXACT.replace(from_zero=False), "from_zero=True").from_zero is True


def test_every_field_is_known():
    assert what_if_fields().keys() == {field.name for field in fields(Model)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bits=3", "unknown field 'bits'; the fields are terms, fraction_bits, floor"),
        ("terms", "'terms' is no FIELD=VALUE"),
        ("terms=", "'terms=' is no FIELD=VALUE"),
        ("", "'' is no FIELD=VALUE"),
        ("terms=many", "terms: got 'many'; expected a whole number$"),
        ("terms=None", "terms: got 'None'; expected a whole number$"),
        ("terms=True", "terms: got 'True'; expected a whole number$"),
        ("fraction_bits=2.5", r"fraction_bits: got '2\.5'; expected a whole number or None$"),
        ("from_zero=0", "from_zero: got '0'; expected True or False$"),
        ("rounding=SR", "rounding: got 'SR'; expected RN, RZ, RM, RP or RO$"),
        ("chain=K", "chain: got 'K'; expected a whole number, k or None$"),
        ("result=f31", "result: got 'f31'; expected f64, f32, tf32, f16"),
        ("multiplicand=8", "multiplicand: got '8'; expected f64, f32, .* or None$"),
        ("fraction_bits=99", r"Model\(fraction_bits=99\): fraction_bits must be from 1 to 40"),
        ("result=bf16", "result must be f16, f32, f64 or s32"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(ValueError, match=said):
        what_if(Model(F32), text)


def test_explain_computes_with_what_was_said(capsys):
    """m8n8k4 on sm_90a starts from +0, so 0 x -1 and C = -0 give +0; from nothing they give -0."""
    words = ["explain", QUAD, "--a=0", "--b=-1", "--c=-0.0", "--target", "sm_90a", "--what-if"]
    assert main([*words, "from_zero=False"]) == 0
    out = capsys.readouterr().out
    assert "[2] D = 80000000 = -0" in out and "[1] D = 00000000 = 0" in out
    assert main([*words, "from_zero=True"]) == 0
    assert "[2] D = 00000000 = 0" in capsys.readouterr().out
    assert main([*words, "from_zero=no"]) == 2
    assert "tcemu explain: --what-if from_zero=no: from_zero: got 'no'; expected True or False" in capsys.readouterr().err


def test_the_sides_of_a_comparison_read_the_same_words():
    op = tcemu.parse(QUAD)
    side = fuzz.get_implementation(op, "sm_90a:from_zero=False,rounding=RZ")
    assert side.model == tcemu.get_model(op, "sm_90a").replace(from_zero=False, rounding="RZ")
    codes = {"a": np.zeros((1, 8, 4), np.uint16), "b": np.full((1, 4, 8), 0xBC00, np.uint16), "c": np.full((1, 8, 8), 1 << 31, np.uint32)}
    assert int(np.asarray(side.fn(codes))[0, 0, 0]) == 1 << 31
    with pytest.raises(ValueError, match="from_zero: got 'nothing'; expected True or False"):
        fuzz.get_implementation(op, "sm_90a:from_zero=nothing")
