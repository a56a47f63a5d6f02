"""Drifts that were planted into runs of small models of torch, forward and backward, and drifts of torch's own compiler."""

import shutil
from collections import Counter
from functools import cache

import pytest

pytest.importorskip("torch")

import torch
from support.sampling import sample_cases
from support.torch_drifts import record_model, torch_plans

from tcemu.drift import locate, read_record, record
from tcemu.uses.drift.causes import build_program, producers


@cache
def base(name):
    import tempfile

    folder = tempfile.mkdtemp()
    return read_record(record_model(name, f"{folder}/base.drift"))


def replacements(name, operation=None, plan=None):
    """Every plan for the model that changes a result, or those of one kind: (operation, name, hypothesis, results)."""
    read = base(name)
    for op in read.operations:
        for how, kind, plant in torch_plans(op):
            if (operation, plan) in ((None, None), (op.name, how)):
                operands, results = read.values(op.operands), read.values(op.results)
                replacement = plant(operands, results[0]).astype(results[0].dtype)
                if replacement.tobytes() != results[0].tobytes():
                    yield op.index, how, kind, [replacement, *results[1:]]


ORDERS = {"pairwise": "pairwise (", "two slices": " in 2 slices of ", "four lanes": "4 lanes of ", "products rounded": ", products rounded"}


def check(name, folder, changes):
    """Locate a run with changed results: the sources are the changed operations, in order, each with its hypothesis."""
    substitute = lambda number, *_: next((result for at, _, _, result in changes if at == number), None)
    path = folder / f"{'_'.join(f'{at}_{how}' for at, how, *_ in changes)}.drift".replace(" ", "_")
    drift = locate(base(name), record_model(name, path, substitute), targets=())
    path.unlink()
    assert [line.left for line in drift.sources] == [at for at, *_ in changes], f"{name} {changes}\n{drift}"
    for line, (_, how, kind, _) in zip(drift.sources, changes, strict=True):
        # torch's own sum may have the planted order, or its missing fma: then the other difference is named, and the planted order
        assert kind in line.cause.kinds or ORDERS.get(how, "nothing") in line.cause.right, f"{name} {how}: expected {kind}\n{drift}"


CASES = {
    "gpt, forward": ("gpt", [("addmm", "two slices", 0)]),
    "gpt, backward": ("gpt", [("mm", "tf32", -1)]),
    "moe": ("moe", [("bmm", "bf16 operands", 0)]),
    "convnet": ("convnet", [("convolution", "four lanes", 0)]),
}


@pytest.mark.parametrize("case", sample_cases(CASES, ["convnet"]))
def test_a_drift_planted_into_torch_is_found_and_named(case, tmp_path):
    name, plans = CASES[case]
    check(name, tmp_path, [list(replacements(name, f"aten.{operation}", how))[place] for operation, how, place in plans])


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", "moe", "convnet"])
def test_every_drift_planted_into_torch_is_found_and_named(name, tmp_path):
    counts = Counter()
    for change in replacements(name):
        check(name, tmp_path, [change])
        counts[change[2]] += 1
    print(name, sum(counts.values()), dict(counts))
    assert sum(counts.values()) >= {"gpt": 60, "moe": 40, "convnet": 15}[name]


def gated_model():
    import torch

    class Gate(torch.nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.LayerNorm(24), torch.nn.Linear(24, 20), Gate(), torch.nn.Linear(20, 6), torch.nn.Softmax(-1))
    return model.bfloat16(), torch.randn(5, 24).bfloat16()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
def test_torch_compile_skips_roundings_of_eager(tmp_path):
    """Inductor keeps the products of a gate in f32: pytorch#195214 and its like."""
    import torch

    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    model, x = gated_model()
    with torch.no_grad():
        with record(tmp_path / "eager.drift", model):
            model(x)
        model[2] = torch.compile(model[2])
        model(x)
        with record(tmp_path / "compiled.drift", model, compiled=True):
            model(x)
    drift = locate(tmp_path / "eager.drift", tmp_path / "compiled.drift", targets=())
    (source,) = drift.sources
    assert source.cause.kinds == ("a rounding less",) and "not rounded to bfloat16: mul" in source.cause.right, str(drift)


class Heads(torch.nn.Module):
    """A projection to heads, whose view may take head size and heads for each other."""

    def __init__(self, swapped):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.swapped = torch.nn.Linear(16, 16).bfloat16(), swapped

    def forward(self, x):
        y = self.project(x).view(2, 8, 4, 4)
        y = (y.transpose(2, 3) if self.swapped else y).transpose(1, 2)
        return (y * 3).exp()


def record_heads(path, swapped):
    torch.manual_seed(1)
    x, model = torch.randn(2, 8, 16).bfloat16(), Heads(swapped)
    with record(str(path), model):
        model(x)
    return str(path)


def test_heads_that_a_view_swaps_are_a_source(tmp_path):
    found = locate(record_heads(tmp_path / "left.drift", False), record_heads(tmp_path / "right.drift", True), targets=())
    (source,) = found.sources
    assert source.name == "aten.mul" and source.cause.kinds == ("order of elements",)
    assert "operand 0, a view of an earlier result" in str(source.cause)


def test_a_transposed_result_is_found_by_its_order_in_memory(tmp_path):
    run = read_record(record_heads(tmp_path / "run.drift", False))
    scaled = next(operation for operation in run.operations if operation.name == "aten.mul")
    (earlier,) = producers(run, scaled, 1)
    assert earlier.name == "aten.addmm"
    identity, shape, axes = run.stored_order(scaled.operands[0])
    assert identity == earlier.results[0].identity and shape == (2, 8, 4, 4) and axes == (0, 2, 1, 3)
    program = build_program(run, (earlier, scaled))
    assert [node.kind for node in program.nodes if node.kind in ("reshape", "transpose")] == ["reshape", "transpose"]
