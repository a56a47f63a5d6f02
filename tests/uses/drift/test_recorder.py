"""Records: every operation with its operands and results, readable after a kill, and rejected with a name when damaged."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.drift_records import recorded

from tcemu.base.saved_files import DamagedFile
from tcemu.drift import locate, read_record, record

RECORDER = Path(__file__).parents[3] / "tcemu" / "uses" / "drift" / "recorder.py"
X = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
W = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)


def mlp(x, w):
    with jax.named_scope("mlp"):
        hidden = jnp.tanh((x @ w).astype(jnp.bfloat16))
    return jax.lax.scan(lambda total, row: (total + row, row * 2), hidden[0], hidden)[0].sum()


def parts_of(content: bytes) -> list[tuple[int, int]]:
    """Start and end of each part, by safetensors' own layout."""
    found, at = [], 0
    while at < len(content):
        length = int.from_bytes(content[at : at + 8], "little")
        header = json.loads(content[at + 8 : at + 8 + length])
        data = max([tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"], default=0)
        found.append((at, at + 8 + length + data))
        at = found[-1][1]
    return found


def test_a_function_of_jax_is_recorded_operation_by_operation():
    run = record(mlp)(X, W)
    read = read_record(run)
    assert read.complete and run.result == mlp(X, W)
    names = [operation.name for operation in read.operations]
    assert names[:3] == ["dot_general", "convert_element_type", "tanh"] and names.count("add") == 3  # the scan, iteration by iteration
    product = read.operations[0]
    assert product.path == "mlp" and product.source.startswith("test_recorder.py:") and not product.backward
    a, b = read.values(product.operands)
    (d,) = read.values(product.results)
    assert (a == X).all() and (b == W).all() and (d == jnp.matmul(X, W)).all()
    assert read.value(read.operations[1].results[0]).dtype == ml_dtypes.bfloat16


def test_gradients_are_backward_operations_and_one_program_gives_its_intermediates():
    read = read_record(record(jax.grad(mlp))(X, W))
    assert {operation.name for operation in read.operations if operation.backward} >= {"mul", "dot_general"}
    compiled = read_record(record(mlp, compiled=True)(X, W))
    assert [operation.name for operation in compiled.operations][:3] == ["dot_general", "convert_element_type", "tanh"]


def test_a_jitted_function_may_stay_whole_and_a_result_may_be_replaced():
    whole = read_record(record(lambda x: jax.jit(mlp)(x, W) * 2, whole=("mlp",))(X))
    assert [operation.name for operation in whole.operations] == ["jit:mlp", "mul"]
    calls = []

    def substitute(number, name, operands, results):
        calls.append((number, name))
        return [np.zeros_like(results[0])] if name == "dot_general" else None

    run = record(mlp, substitute=substitute)(X, W)
    assert run.result == 0 and calls[0] == (0, "dot_general") and len(calls) == run.count


def test_budget_and_rows_limit_what_is_kept():
    read = read_record(record(mlp, budget=0)(X, W))
    assert all(tensor.kept is None for operation in read.operations for tensor in operation.operands)
    read = read_record(record(mlp, rows=[0, 2])(X, W))
    product = read.operations[0]
    assert product.operands[0].rows == (0, 2) and (read.value(product.operands[0]) == X[[0, 2]]).all()
    assert read.values(product.operands) is None  # the whole was not kept
    with pytest.raises(ValueError, match="budget"):
        record(mlp, budget=-1)
    with pytest.raises(ValueError, match="rows"):
        record(mlp, rows=[-1])
    with pytest.raises(TypeError, match="file name"):
        record(3)


def test_a_record_is_never_overwritten(tmp_path):
    file = tmp_path / "run.drift"
    assert record(mlp, file)(X, W).path == file
    before = file.read_bytes()
    for again in (lambda: record(mlp, file)(X, W), lambda: record(file)):
        with pytest.raises(FileExistsError, match="never overwritten"):
            again()
    assert file.read_bytes() == before


def test_a_killed_run_is_readable_to_its_last_complete_operation(tmp_path):
    content = record(mlp)(X, W).content()
    edges = parts_of(content)
    assert len(edges) == 2 + len(read_record(content).operations)
    whole = [end for _, end in edges]
    for cut in (*range(whole[0], len(content), 37), len(content) - 1):
        read = read_record(content[:cut])
        assert not read.complete
        assert len(read.operations) == sum(end <= cut for end in whole) - 1, cut
    with pytest.raises(DamagedFile, match="truncated"):
        read_record(content[: whole[0] - 1])
    with pytest.raises(DamagedFile, match="empty"):
        read_record(b"")
    with pytest.raises(DamagedFile, match="follow the end"):
        read_record(content + b"x")
    with pytest.raises(FileNotFoundError, match="no such record"):
        read_record(tmp_path / "none.drift")


def test_damaged_records_raise_named_errors_and_nothing_else():
    content = record(mlp)(X, W).content()
    rng = random.Random(44)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            read = read_record(bytes(damaged))
            for operation in read.operations:
                read.values(operation.operands)
                read.values(operation.results)
            outcomes["read"] += 1
        except DamagedFile:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100  # many changes hit a header or a kept tensor; a change of a name or a path is not seen
    data_start = parts_of(content)[1][1] - 1  # the last byte of the first operation's data
    changed = bytearray(content)
    changed[data_start] ^= 1
    read = read_record(bytes(changed))
    with pytest.raises(DamagedFile, match="not those that were recorded"):
        read.values(read.operations[0].operands), read.values(read.operations[0].results)


def test_the_recorder_is_one_file_that_needs_no_tcemu(tmp_path):
    program = (
        "import sys; sys.modules['tcemu'] = None; import numpy, recorder\n"
        "run = recorder.record(lambda x: x @ x, 'alone.drift')(numpy.eye(2, dtype=numpy.float32)); print(run.count)"
    )
    (tmp_path / "recorder.py").write_bytes(RECORDER.read_bytes())
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)
    assert len(read_record(tmp_path / "alone.drift").operations) == 1


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_is_recorded_forward_and_backward_with_module_paths(tmp_path):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).bfloat16()
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    with record(tmp_path / "run.drift", model) as run:
        model(x).float().sum().backward()
        run.next_step()
        expected = model(x)
    read = read_record(tmp_path / "run.drift")
    assert read.complete and {operation.step for operation in read.operations} == {0, 1}
    forward = [(operation.path, operation.name) for operation in read.operations if operation.step == 1]
    assert forward == [("0", "aten.addmm"), ("1", "aten.gelu"), ("2", "aten.native_layer_norm"), ("3", "aten.addmm")]
    backward = {operation.name: operation.path for operation in read.operations if operation.backward}
    assert backward["aten.native_layer_norm_backward"] == "2" and backward["aten.gelu_backward"] == "1"
    kept = read.value(read.operations[-1].results[0])
    assert (kept.view(np.int16) == expected.detach().view(torch.int16).numpy()).all()
    model.zero_grad()
    with record(tmp_path / "modules.drift", model, compiled=True):
        model(x.requires_grad_()).float().sum().backward()
    modules = read_record(tmp_path / "modules.drift").operations
    assert [op.name for op in modules if not op.backward] == [
        "module.Linear", "module.GELU", "module.LayerNorm", "module.Linear", "module.Sequential"
    ]  # fmt: skip
    backward = [(op.path, op.name) for op in modules if op.backward and op.name != "module.gradient"]
    assert backward == [("3", "module.Linear"), ("2", "module.LayerNorm"), ("1", "module.GELU"), ("0", "module.Linear")]
    gradients = {op.path: op.results[0] for op in modules if op.name == "module.gradient"}
    assert set(gradients) == {name for name, _ in model.named_parameters()}


def test_records_with_hostile_parameters_are_compared_without_another_error():
    """Parameters, names and shapes that do not fit: a named error, or a source that is unexplained."""
    rng = random.Random(45)
    x, w = np.ones((3, 4), np.float32), np.ones((4, 5), np.float32)
    hostile = [-1, 99, 1 << 60, None, "x", [], [[]], [[[7], [0]], [[], []]], {"a": 1}, [1 << 40], [[0, 1 << 50]], 2.5]
    real = [
        ("dot_general", [x, w], {"dimension_numbers": [[[1], [0]], [[], []]]}),
        ("reduce_sum", [x], {"axes": [1]}),
        ("transpose", [x], {"permutation": [1, 0]}),
        ("broadcast_in_dim", [x], {"shape": [3, 4], "broadcast_dimensions": [0, 1]}),
        ("integer_pow", [x], {"y": 2}),
        ("aten.sum", [x], {"args": ["#0", [1], False], "kwargs": {}}),
        ("aten._softmax", [x], {"args": ["#0", -1, False], "kwargs": {}}),
        ("aten.convolution", [x.reshape(1, 3, 2, 2), np.ones((2, 3, 1, 1), np.float32)],
         {"args": ["#0", "#1", None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1], "kwargs": {}}),
    ]  # fmt: skip
    outcomes = 0
    for _ in range(150):
        name, operands, attributes = rng.choice(real)
        changed = json.loads(json.dumps(attributes))
        key = rng.choice(list(changed))
        if isinstance(changed[key], list) and changed[key] and rng.random() < 0.7:
            changed[key][rng.randrange(len(changed[key]))] = rng.choice(hostile)
        else:
            changed[key] = rng.choice(hostile)
        sides = [recorded([(name, operands, [np.full((3, 5), value, np.float32)], changed)]) for value in (1, 2)]
        drift = locate(*sides, targets=())
        outcomes += len(drift.unexplained)
    assert outcomes > 100
