"""Random models, valid and not: `gemm`, `explain` and the exact reference agree, or all three refuse, the first two with the same words."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy learns its dtypes
import numpy as np
import pytest
from oracles.model_reference import MODES, Fields, Kind, is_defined, multiply_add
from oracles.reference import FORMATS as SPECS
from support.random_operands import CLASSES, codes
from support.sampling import sample_cases

import tcemu
from tcemu import Model
from tcemu.formats import FORMATS


class Case(NamedTuple):
    op: str
    target: str
    kind: Kind
    results: tuple[str, ...]  # formats that a model's steps may have


MMA = "mma.sync.aligned."
F32_C = ("f32", "f32")
CASES = {
    "f16": Case(MMA + "m16n8k16.row.col.f32.f16.f16.f32", "sm_90a", Kind("f16", "f16", *F32_C, 16), ("f32", "f32", "f16")),
    "f16 to f16": Case(MMA + "m16n8k16.row.col.f16.f16.f16.f16", "sm_90a", Kind("f16", "f16", "f16", "f16", 16), ("f16", "f32")),
    "f16 from f16": Case(MMA + "m8n8k4.row.col.f32.f16.f16.f16", "sm_70", Kind("f16", "f16", "f16", "f32", 4), ("f32", "f16")),
    "bf16": Case(MMA + "m16n8k8.row.col.f32.bf16.bf16.f32", "sm_90a", Kind("bf16", "bf16", *F32_C, 8), ("f32", "f32", "f16")),
    "tf32": Case(MMA + "m16n8k8.row.col.f32.tf32.tf32.f32", "sm_90a", Kind("tf32", "tf32", *F32_C, 8), ("f32",)),
    "e4m3": Case(MMA + "m16n8k32.row.col.f32.e4m3.e5m2.f32", "sm_90a", Kind("e4m3", "e5m2", *F32_C, 32), ("f32", "f16")),
    "f8f6f4": Case(MMA + "m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32", "sm_120a", Kind("e4m3", "e2m1", *F32_C, 32), ("f32", "f16")),
    "mxf8f6f4": Case(
        MMA + "m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e5m2.e2m3.f32.ue8m0", "sm_120a",
        Kind("e5m2", "e2m3", *F32_C, 32, "ue8m0", 32), ("f32", "f16"),
    ),
    "mxf4": Case(
        MMA + "m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0", "sm_120a",
        Kind("e2m1", "e2m1", *F32_C, 64, "ue8m0", 32), ("f32", "f16"),
    ),
    "nvf4": Case(
        MMA + "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3", "sm_120a",
        Kind("e2m1", "e2m1", *F32_C, 64, "ue4m3", 16), ("f32", "f16"),
    ),
    "f64": Case(
        MMA + "m8n8k4.row.col.rm.f64.f64.f64.f64", "sm_90a", Kind("f64", "f64", "f64", "f64", 4, rounding="RM"), ("f64", "f64", "f32")
    ),
}  # fmt: skip
NUMPY = {"f64": "float64", "f32": "float32", "tf32": "float32", "f16": "float16", "bf16": "bfloat16", "e5m2": "float8_e5m2",
         "e4m3": "float8_e4m3fn", "e2m3": "float6_e2m3fn", "e2m1": "float4_e2m1fn"}  # fmt: skip
M, N = 2, 3


class Operands(NamedTuple):
    a: np.ndarray  # codes, f64 as uint64
    b: np.ndarray
    c: np.ndarray
    scales: tuple[np.ndarray, np.ndarray] | None


def operands(kind: Kind, k: int, rng: np.random.Generator) -> Operands:
    def draw(fmt: str, *shape: int) -> np.ndarray:
        drawn = codes(fmt, str(rng.choice(CLASSES)), shape, rng)
        return drawn & ~drawn.dtype.type((1 << SPECS[fmt].ignored) - 1)

    scales = None
    if kind.scale is not None:
        near = lambda *shape: (rng.integers(-6, 7, shape) + (127 if kind.scale == "ue8m0" else 0x38)).astype(np.uint8)
        anything = lambda *shape: rng.integers(0, 1 << SPECS[kind.scale].bits, shape).astype(np.uint8)
        scales = (
            (near if rng.random() < 0.7 else anything)(M, k // kind.block),
            (near if rng.random() < 0.7 else anything)(k // kind.block, N),
        )
    return Operands(draw(kind.a, M, k), draw(kind.b, N, k).T, draw(kind.c, M, N), scales)


def numbers(fmt: str, drawn: np.ndarray) -> np.ndarray:
    """Codes as a NumPy array of floats with the same bits."""
    return np.ascontiguousarray(drawn).view(np.dtype(NUMPY[fmt]))


def run_gemm(case: Case, model: Model, drawn: Operands) -> np.ndarray:
    kind = case.kind
    scales = {} if drawn.scales is None else dict(zip(("scale_a", "scale_b"), drawn.scales, strict=True))
    d = tcemu.gemm(
        numbers(kind.a, drawn.a), numbers(kind.b, drawn.b), numbers(kind.c, drawn.c), op=case.op, target=case.target, model=model, **scales
    )
    assert d.dtype == np.dtype(NUMPY[kind.d])
    return np.asarray(d).view(f"uint{SPECS[kind.d].bits}")


def run_explain(case: Case, model: Model, drawn: Operands, i: int, j: int) -> int:
    scales = {} if drawn.scales is None else {"scale_a": drawn.scales[0][i], "scale_b": drawn.scales[1][:, j]}
    operands = drawn.a[i], drawn.b[:, j], drawn.c[i, j]
    return tcemu.explain(case.op, *operands, target=case.target, model=model, codes=True, **scales).result


def run_reference(case: Case, model: Fields, drawn: Operands, i: int, j: int) -> int:
    scales = None if drawn.scales is None else (drawn.scales[0][i].tolist(), drawn.scales[1][:, j].tolist())
    return multiply_add(model, case.kind, drawn.a[i].tolist(), drawn.b[:, j].tolist(), int(drawn.c[i, j]), scales)


# ---- models


def drawn_fields(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Fields of a model that has a meaning, most of the time."""
    kind, pick = case.kind, lambda *values: values[rng.integers(len(values))]
    result = pick(*case.results)
    exact = kind.a == "f64" or (kind.scale is None and rng.random() < 0.3)
    mantissa = SPECS[result].fraction
    fields: dict[str, Any] = {
        "result": result,
        "rounding": pick(*MODES),
        "floor": int(pick(-1024, -512, -133, -139, -21, 0, 40, 512, -14, -126)),
    }
    fields["chain"] = pick(None, None, "k", kind.k, kind.k // 2, 2 * kind.k, kind.k // 4)
    fields["together"] = fields["chain"] is not None and bool(rng.integers(2))
    fields["groups"] = int(pick(1, 1, 1, 2, 4)) if kind.scale is None or kind.a != "e2m1" else 1
    if exact:
        fields |= {"fraction_bits": None, "terms": 1, "from_zero": fields["chain"] is not None and bool(rng.integers(2))}
        return fields
    fields["fraction_bits"] = int(rng.integers(1, 41))
    fields["alignment"] = pick("RZ", "RZ", *MODES)
    fields["result_bits"] = pick(None, None, int(rng.integers(1, mantissa + 1)), 13, 1)
    fields["terms"] = int(pick(1, 2, 4, 8, 16, 32, 64, 3, 5, 7, 100, 65536))
    if kind.a == "e2m1" and kind.scale is not None:
        fields["summed"] = pick(2, 4, 8, 16) if kind.scale == "ue4m3" else pick(None, 2, 4, 8, 16, 32)
        fields["terms"] *= fields["summed"] or 1
    else:
        fields["multiplicand"] = pick(None, None, None, "f16", "bf16", "tf32")
    return fields


def spoil_field(fields: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """With a field out of range, or one that the others may not allow."""
    odd = {
        "terms": (0, -1, 65537, 6, 12), "fraction_bits": (0, 41, -5, None), "floor": (-1025, 513), "result_bits": (0, 11, 24, 53),
        "rounding": ("SR", 4, -1), "alignment": ("RP", "nonsense"), "multiplicand": ("f32", "f64", "e4m3", "e5m2"), "groups": (3, 0, 8, 64),
        "chain": (0, 5, 12, 3), "together": (True,), "summed": (3, 0, 4, 64), "from_zero": (True,), "result": ("f64", "f16"),
    }  # fmt: skip
    name = str(rng.choice(list(odd)))
    return fields | {name: odd[name][rng.integers(len(odd[name]))]}


def resolve_formats(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: FORMATS[value] if name in ("result", "multiplicand") and value is not None else value for name, value in fields.items()}


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives, or the words with which it refuses."""
    try:
        return call()
    except ValueError as error:
        return str(error)


DEFAULTS = {"terms": 16, "fraction_bits": 25, "floor": -133, "rounding": "RZ", "result_bits": None, "multiplicand": None, "groups": 1,
            "chain": None, "together": False, "summed": None, "alignment": "RZ", "from_zero": False}  # fmt: skip


def meaning(fields: dict[str, Any], kind: Kind) -> Fields | None:
    """The model as the reference takes it; None where it has no meaning there."""
    for name, count in (("groups", 1), ("chain", 1), ("summed", 1)):
        if isinstance(fields.get(name), int) and fields[name] < count:
            return None
    if not {fields["rounding"], fields.get("alignment", "RZ")} <= set(MODES):
        return None
    model = Fields(**(DEFAULTS | fields))
    return model if is_defined(model, kind) else None


def compare(case: Case, fields: dict[str, Any], rng: np.random.Generator) -> bool:
    """Whether the model had a meaning; all three agree, or all refuse."""
    kind = case.kind
    drawn, expected = operands(kind, kind.k * int(rng.integers(1, 4)), rng), meaning(fields, kind)
    model = outcome(lambda: Model(**resolve_formats(fields)))
    if isinstance(model, str):
        assert expected is None, (model, fields)
        return False
    d, explained = outcome(lambda: run_gemm(case, model, drawn)), outcome(lambda: run_explain(case, model, drawn, 0, 0))
    if expected is None:
        assert isinstance(d, str) and d == explained, (d, explained, fields)
        return False
    assert not isinstance(d, str) and not isinstance(explained, str), (d, explained, fields)
    wanted = [[run_reference(case, expected, drawn, i, j) for j in range(N)] for i in range(M)]
    assert d.tolist() == wanted, (fields, d, wanted)
    assert [[run_explain(case, model, drawn, i, j) for j in range(N)] for i in range(M)] == wanted, fields
    return True


@pytest.mark.parametrize("seed", sample_cases(range(200), 50))
def test_three_agree_or_refuse(seed):
    case, rng = list(CASES.values())[seed % len(CASES)], np.random.default_rng(seed)
    fields = drawn_fields(case, rng)
    compare(case, spoil_field(fields, rng) if rng.random() < 0.4 else fields, rng)


def test_the_drawn_models_are_valid_and_not():
    """What the test above can show depends on it."""
    counts = {True: 0, False: 0}
    for seed in range(200):
        case, rng = list(CASES.values())[seed % len(CASES)], np.random.default_rng(seed)
        fields = drawn_fields(case, rng)
        counts[meaning(spoil_field(fields, rng) if rng.random() < 0.4 else fields, case.kind) is not None] += 1
    assert min(counts.values()) > 60, counts


TRACED = {
    "f16": {"result": "f32"},
    "tf32": {"result": "f32", "chain": "k", "groups": 2},
    "e4m3": {"result": "f16", "multiplicand": "f16", "groups": 2, "chain": "k", "together": True},
    "mxf8f6f4": {"result": "f32"},
    "mxf4": {"result": "f32", "summed": 16},
    "nvf4": {"result": "f16", "summed": 8, "chain": "k"},
}


@pytest.mark.parametrize("name", sample_cases(TRACED, ["mxf4"]))
def test_traced_fields_agree_or_give_nan(name):
    """40 models in one compiled program. A field out of range gives NaN, where a static one raises."""
    case, rng, static = CASES[name], np.random.default_rng(7), TRACED[name]
    count, mantissa = 40, SPECS[static["result"]].fraction
    draw = {
        "terms": rng.choice([1, 2, 3, 8, 16, 32, 48, 64, 100, 65536, 0, 65537], count),
        "fraction_bits": np.where(rng.random(count) < 0.1, rng.choice([0, 41, -3], count), rng.integers(1, 41, count)),
        "floor": rng.choice([-1024, -139, -133, -21, 0, 30, 512, 513, -1025], count),
        "result_bits": rng.integers(1, mantissa + 2, count),
        "rounding": rng.integers(0, 4, count),
        "alignment": np.where(rng.random(count) < 0.1, 4, rng.integers(0, 4, count)),
    }
    drawn = operands(case.kind, 2 * case.kind.k, rng)
    kind = case.kind
    scales = {} if drawn.scales is None else dict(zip(("scale_a", "scale_b"), drawn.scales, strict=True))
    a, b, c = (numbers(fmt, v) for fmt, v in ((kind.a, drawn.a), (kind.b, drawn.b), (kind.c, drawn.c)))
    model = Model(**resolve_formats(static))
    swept = jax.jit(jax.vmap(lambda traced: tcemu.gemm(a, b, c, op=case.op, target=case.target, model=model.replace(**traced), **scales)))
    got = np.asarray(swept({field: jnp.asarray(values) for field, values in draw.items()}))
    words, refused = got.view(f"uint{SPECS[kind.d].bits}"), 0
    for at in range(count):
        one = {field: int(values[at]) for field, values in draw.items()}
        modes = {field: MODES[one[field]] if one[field] < len(MODES) else "none" for field in ("rounding", "alignment")}
        expected = meaning(static | one | modes, kind)
        if expected is None:
            refused += 1
            assert (words[at] == SPECS[kind.d].nan).all(), one
        else:
            assert words[at].tolist() == [[run_reference(case, expected, drawn, i, j) for j in range(N)] for i in range(M)], one
    assert 5 < refused < 35


@pytest.mark.parametrize("k", sample_cases([2, 3], 2))
def test_a_short_product_in_f64_ends(k):
    """Two or three multiply-adds in f64. XLA on CPU once made one kernel of two, which was not done after a minute."""
    rng = np.random.default_rng(k)
    case = CASES["f64"]
    kind = case.kind._replace(rounding="RN")
    case = case._replace(op=case.op.replace(".rm", ""), kind=kind)
    drawn = operands(kind, k, rng)
    model = tcemu.get_model(case.op, case.target)
    wanted = [[run_reference(case, Fields.from_model(model), drawn, i, j) for j in range(N)] for i in range(M)]
    assert run_gemm(case, model, drawn).tolist() == wanted


@pytest.mark.parametrize("rounding", sample_cases(MODES, ("RP",)))
def test_a_chain_that_starts_from_its_first_product_adds_nothing_to_it(rounding):
    """Products of +0: the chain is +0 in every rounding, so that with C = -0 the sum is +0."""
    case = CASES["f16"]
    model = Model(FORMATS["f32"], 1, None, rounding=rounding, chain=8)
    drawn = Operands(np.zeros((M, 16), np.uint16), np.zeros((16, N), np.uint16), np.full((M, N), 1 << 31, np.uint32), None)
    assert run_reference(case, Fields.from_model(model), drawn, 0, 0) == 0
    assert run_explain(case, model, drawn, 0, 0) == 0
    assert run_gemm(case, model, drawn).tolist() == [[0] * N] * M
