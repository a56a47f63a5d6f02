"""Logs of PyTorch's DebugMode on an H200, compared with the runs that are computed here as on that GPU."""

import json
import lzma
import re
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from gpu_runs.debug_mode_logs import RUNS, draw_words, make_layer

import tcemu
from tcemu.base.saved_files import DamagedFile
from tcemu.uses.drift.debug_logs import DebugLog, hash_tensor, read_run

LOGS = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden/debug_mode_h200.json.xz").read_bytes()))["logs"]


@cache
def emulated(name):
    dtype, run, *_ = RUNS[name]
    model, path = make_layer(dtype), Path(mkdtemp()) / f"{name}.drift"
    with tcemu.torch.emulate(model, gpu="H200"), tcemu.drift.record(str(path), model):
        run(model, draw_words())
    return tcemu.drift.read_record(path)


@pytest.mark.parametrize("name", ["forward_bf16", "forward_f16", "step_bf16"])
def test_every_hash_of_a_gpus_log_is_that_of_the_emulated_run(name):
    log = DebugLog(LOGS[name], name)
    assert len(log.operations) == {"step_bf16": 112}.get(name, 12)
    found = tcemu.drift.locate(log, emulated(name))
    assert not found.lines and found.left_count == found.right_count == len(log.operations)


def test_the_first_operation_with_another_hash_is_the_source():
    line = next(line for line in LOGS["forward_bf16"].splitlines() if "aten::gelu" in line)
    hashed = re.search(r"'hash': \([\d.]+, (\d+)\)", line)
    assert hashed is not None
    text = LOGS["forward_bf16"].replace(hashed[1], str(int(hashed[1]) ^ 1 << 60))  # in the operands of what follows, too
    found = tcemu.drift.locate(DebugLog(text, "changed.log"), emulated("forward_bf16"))
    (source,) = found.sources
    assert source.name == "aten.gelu" and source.cause is not None and "hashes alone" in source.cause.left
    assert source.legitimate is None and source.difference is None


def test_two_logs_are_compared_and_a_file_is_read_as_what_it_is(tmp_path):
    path = tmp_path / "gpu.log"
    path.write_text(LOGS["forward_bf16"])
    log = read_run(path)
    assert isinstance(log, DebugLog) and not tcemu.drift.locate(log, path).lines
    assert [op.path for op in log.operations[:4]] == ["embedding", "norm", "qkv", ""]
    assert str(log.operations[1].results[0]) == "bfloat16[2,40,128]"


def test_a_log_without_hashes_or_without_operators_is_refused():
    with pytest.raises(DamagedFile, match="hash_inputs=True"):
        DebugLog(LOGS["plain_bf16"], "plain.log")
    with pytest.raises(DamagedFile, match="hash_tensor"):
        DebugLog(re.sub(r", \d{4,}\)", ")", LOGS["forward_bf16"]), "norms.log")
    with pytest.raises(DamagedFile, match="no log of operators"):
        DebugLog("[nn.Mod] Layer\n", "empty.log")


@pytest.mark.parametrize(
    ("shape", "log"),
    [
        ("2, 2", "{'hash': 1j, 'input_hash': ((1,), {})}"), ("2, 2", "{'hash': ..., 'input_hash': ((1,), {})}"),
        ("2, 2", "{'hash': b'a', 'input_hash': ((1,), {})}"), ("2, 2", "{[1]: 1, 'hash': 1}"),
        ("2 2", "{'hash': 1, 'input_hash': ((1,), {})}"),
        ("9" * 6000, "{'hash': 1, 'input_hash': ((1,), {})}"), ("2, 2", "{'hash': " + "[" * 5000 + "1" + "]" * 5000 + "}"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_refused_as_damaged(shape, log):
    with pytest.raises(DamagedFile, match=r"operation 0, aten\.neg, has no hashes"):
        DebugLog(f"    aten::neg(t: f32[{shape}])  ->  t: f32[2, 2]  # {log}", "damaged.log")


def test_values_are_not_made_of_a_log():
    log = DebugLog(LOGS["forward_bf16"], "gpu.log")
    for judge in (tcemu.drift.identify, lambda run: tcemu.drift.predict(run, gpu="H200")):
        with pytest.raises(ValueError, match="hashes, and no values"):
            judge(log)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.bool], ids=str)
def test_hashes_are_those_of_pytorch(dtype):
    x = (torch.randn(37, 5, generator=torch.Generator().manual_seed(4)) * 100).to(dtype)
    wide = x.to(torch.float64 if dtype.is_floating_point else torch.int64)
    value = x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if dtype == torch.bfloat16 else x.numpy()
    assert int(hash_tensor(value), 16) == torch.hash_tensor(wide).item()


def test_a_tensor_with_nan_and_one_that_was_not_kept_are_not_compared(tmp_path):
    assert hash_tensor(np.array([1.0, np.nan], np.float32)) == "" and hash_tensor(np.zeros((0, 3), np.float32)) == "0"
    model = make_layer(torch.bfloat16)
    path = tmp_path / "short.drift"
    with tcemu.torch.emulate(model, gpu="H200"), tcemu.drift.record(str(path), model, budget=0):
        RUNS["forward_bf16"][1](model, draw_words())
    found = tcemu.drift.locate(DebugLog(LOGS["forward_bf16"], "gpu.log"), path)
    assert not found.sources and {line.role for line in found.lines} == {"not compared"}
