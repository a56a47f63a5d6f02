"""`infer_model` on random models: each is found, or the fields that no operand shows are said to be undetermined, with all their values.

The black box is the reference in plain Python, which shares no arithmetic with the engine that computes the hypotheses.
"""

import random
from contextlib import suppress
from functools import lru_cache

import numpy as np
import pytest

import tcemu
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.reference.reference_products import decode_products
from tcemu.engine.arithmetic.reference.reference_steps import reduce_products
from tcemu.engine.isa.legality import targets
from tcemu.formats import BF16, F16, F32, F64, TF32
from tcemu.uses.fuzz.case_generator import codes_to_integers, integers_to_codes
from tcemu.uses.fuzz.implementations import Implementation, emulator
from tcemu.uses.fuzz.model_hypotheses import DotDrawer, group_models, predict
from tcemu.uses.fuzz.model_inference import InferredModel, ModelSearch
from tcemu.uses.fuzz.model_probes import ProbeBench, Unreachable

M16N8 = "mma.sync.aligned.m16n8"
OPS = {
    "f16": f"{M16N8}k8.row.col.f32.f16.f16.f32",
    "f16 k16": f"{M16N8}k16.row.col.f32.f16.f16.f32",
    "f16 to f16": f"{M16N8}k8.row.col.f16.f16.f16.f16",
    "bf16": f"{M16N8}k8.row.col.f32.bf16.bf16.f32",
    "tf32": f"{M16N8}k4.row.col.f32.tf32.tf32.f32",
    "e4m3": f"{M16N8}k16.row.col.f32.e4m3.e4m3.f32",
    "e5m2 to f16": f"{M16N8}k16.row.col.f16.e5m2.e5m2.f16",
    "mxf8": f"{M16N8}k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0",
    "mxf4": f"{M16N8}k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0",
    "f64": "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
}
STRUCTURES = {  # orders that random models of an instruction have: few, since each compiles its own programs
    "f16": [{"terms": 4}, {"terms": 8}, {"terms": 3}, {"terms": 2, "chain": "k"}, {"terms": 1}],
    "f16 k16": [{"terms": 4, "groups": 2, "chain": "k"}, {"terms": 4, "chain": 8, "together": True}],
    "f16 to f16": [{"terms": 4}, {"terms": 8}, {"terms": 2, "chain": 4}],
    "bf16": [{"terms": 4}, {"terms": 1}, {"terms": 1, "chain": "k"}],
    "tf32": [{"terms": 4}, {"terms": 2}],
    "e4m3": [{"terms": 16}, {"terms": 8, "groups": 2}],
    "e5m2 to f16": [{"terms": 16}],
    "mxf8": [{"terms": 32}],
    "mxf4": [{"terms": 64, "summed": 16}],
    "f64": [{"terms": 1}, {"terms": 1, "chain": "k"}],
}
WEIGHTS = {
    "f16": 60,
    "f16 k16": 25,
    "f16 to f16": 40,
    "bf16": 25,
    "tf32": 15,
    "e4m3": 15,
    "e5m2 to f16": 10,
    "mxf8": 4,
    "mxf4": 2,
    "f64": 4,
}


def random_model(number):
    """An instruction and a model that it can have."""
    draw = random.Random(number)
    name = draw.choices(list(OPS), WEIGHTS.values())[0]
    op, shape = tcemu.parse(OPS[name]), dict(draw.choice(STRUCTURES[name]))
    roundings = ("RZ", "RN", "RM", "RP")
    result = draw.choice((F16, F16, F32)) if op.d == F16 else op.d
    if op.d == F64 or (shape["terms"] == 1 and draw.random() < 0.6):
        from_zero = "chain" in shape and draw.random() < 0.5
        return name, Model(result, fraction_bits=None, rounding=draw.choice(roundings), from_zero=from_zero, **shape)
    fields = {
        "fraction_bits": draw.choice((draw.randint(1, 12), draw.randint(10, 25), draw.randint(20, 28), draw.randint(26, 40))),
        "rounding": draw.choice(roundings),
        "alignment": draw.choice(("RZ", "RZ", *roundings)),
        "floor": draw.choice((-1024, -133, -133, -126, -60, -30, -21, -19, draw.randint(-40, -8))),
        "result_bits": draw.choice((None, None, draw.randint(1, result.mantissa_bits))),
        "multiplicand": draw.choice((None, None, F16, TF32, BF16)),
    }
    model = Model(
        result, **shape, **fields | ({"multiplicand": None} if "summed" in shape or ("groups" not in shape and result == F64) else {})
    )
    spec = product_spec(op)
    with suppress(ValueError):
        specialize(model, spec, None if spec.scale is None else spec.k // spec.scale_vec)
        return name, model
    return name, model.replace(multiplicand=None)


def reference_box(op, model):
    """The reference on the diagonal of each case, where `ProbeBench` puts its dot products."""
    spec = product_spec(op)
    used = model if spec.rounding is None else model.replace(rounding=spec.rounding.upper())

    @lru_cache(maxsize=1 << 16)
    def dot(a, b, c, scales):
        if not any(a) and not any(b) and c == 0:
            return 0
        names = [str(i) for i in range(len(b))]
        return reduce_products(used, spec, decode_products(used, spec, list(a), list(b), names, scales), c)[1]

    def box(operands):
        a, b, c = (codes_to_integers(getattr(spec, name), np.asarray(operands[name])) for name in "abc")
        d = np.zeros(c.shape, object)
        as_tuple = lambda v: tuple(int(x) for x in v)
        for case in range(len(c)):
            for i in range(min(op.m, op.n)):
                scales = None
                if op.scaling is not None:
                    scales = as_tuple(operands["scale_a"][case, i]), as_tuple(operands["scale_b"][case, :, i])
                d[case, i, i] = dot(as_tuple(a[case, i]), as_tuple(b[case, :, i]), int(c[case, i, i]), scales)
        return integers_to_codes(spec.d, d)

    return Implementation("reference", box, traceable=False)


def find(name, model):
    op = tcemu.parse(OPS[name])
    search = ModelSearch(ProbeBench(op, reference_box(op, model)), 1)
    models = search.find_models()
    return InferredModel(
        op, "reference", models[0] if models else None, tuple(search.findings), search.bench.probe_count, None, tuple(models)
    )


def check_found(name, planted):
    found = find(name, planted)
    assert found.model is not None, f"{planted}\n{found}"
    assert found.admits(planted), f"{planted}\n{found}\n{found.undetermined}"
    # what is said to be the same is the same over another search
    spec, bench = product_spec(found.op), ProbeBench(found.op, reference_box(found.op, planted))
    drawer = DotDrawer(spec, bench.top, bench.normal_bottom, 77)
    survivors = random.Random(1).sample(found.survivors, min(24, len(found.survivors)))
    for dots in (drawer.draw(2048), drawer.draw(1024, high=True)):
        (expected,) = predict(spec, group_models([planted])[0], dots)
        for group in group_models(survivors):
            wrong = (predict(spec, group, dots) != expected).sum(1)
            assert not wrong.any(), f"{planted}\n{list(group.models())[int(wrong.argmax())]}: {wrong.max()} differ\n{found.undetermined}"
    # a field that is not listed has one value
    for field in vars(planted):
        if field not in found.undetermined:
            assert len({getattr(model, field) for model in found.survivors}) == 1, field
            assert getattr(found.model, field) == getattr(planted, field) or field in ("result_bits",), (field, str(found))
    return found


SAMPLE = (("tf32", Model(F32, terms=4, fraction_bits=22, rounding="RN")), ("tf32", Model(F32, terms=4, fraction_bits=9)))


@pytest.mark.full
@pytest.mark.parametrize(("name", "model"), SAMPLE, ids=("22 bits, RN", "9 bits"))
def test_a_model_below_23_bits_is_found_with_the_rounding_that_its_answers_leave(name, model):
    found = check_found(name, model)
    assert found.model.terms == 4 and found.model.fraction_bits == model.fraction_bits
    assert ("rounding" in found.undetermined) == (model.fraction_bits == 9)


@pytest.mark.full
def test_steps_that_lose_nothing_are_not_asked_about_each_small_term():
    """528 pairs of slots at four sizes are some 2,000 questions; each of 31 small terms by itself would make 68,000."""
    op = tcemu.parse(OPS["mxf8"])
    model = Model(F32, terms=32, fraction_bits=40, rounding="RN", result_bits=11)
    search = ModelSearch(ProbeBench(op, emulator(op, next(iter(targets(op))), model, "a wide step")), 1)
    with pytest.raises(Unreachable, match="survive beside every"):
        search.find_models()
    assert search.bench.probe_count < 3000


@pytest.mark.full
@pytest.mark.parametrize("number", range(200))
def test_a_random_model_is_found_or_said_to_be_undetermined(number):
    name, planted = random_model(number)
    try:
        check_found(name, planted)
    except Unreachable:  # a step that loses nothing in the whole range of its operands shows no order
        bench = ProbeBench(tcemu.parse(OPS[name]), reference_box(tcemu.parse(OPS[name]), planted))
        assert planted.terms >= bench.k and planted.fraction_bits >= bench.top - bench.bottom
