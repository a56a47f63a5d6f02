"""`tcemu drift`: the report, its files, and the exit status."""

import json

import numpy as np
import pytest

from tcemu.cli import main
from tcemu.drift import Drift, Recording, record
from tcemu.operations.functional.torch_cuda.elementwise import elementwise


@pytest.fixture
def records(tmp_path, monkeypatch):
    """Two records of a function: on the right, its second operation is rounded to f16, or wrong."""
    monkeypatch.chdir(tmp_path)
    x = np.linspace(-2, 3, 40, dtype=np.float32)

    def run(name, change):
        substitute = lambda number, name, operands, results: [change(results[0])] if number == 1 else None
        record(lambda x: (x * 3 + x) * 2, name, substitute=substitute)(x)

    run("left.drift", lambda y: y)
    run("right.drift", lambda y: y.astype(np.float16).astype(np.float32))
    run("wrong.drift", lambda y: y * np.float32(1.5))


def test_the_report_is_printed_and_written(records, capsys):
    words = ["drift", "left.drift", "right.drift", "--json", "d.json", "--html", "d.html", "--recipes", "r.json"]
    assert main([*words, "--fail-on", "unexplained", "--fail-on", "outside"]) == 1  # rounded to f16 is outside the bound of f32
    out = capsys.readouterr().out
    assert "source: 1: add" in out and "cause: a rounding more" in out and "also rounded to float16" in out
    with open("d.json") as file:
        assert str(Drift.from_json(file.read())) == out.rstrip("\n")
    with open("d.html") as html, open("r.json") as recipes:
        assert "<svg" in html.read() and json.load(recipes) == []
    assert main([*words, "--overwrite", "--fail-on", "unexplained"]) == 0
    assert main(words) == 2 and "exists already" in capsys.readouterr().err


def test_the_exit_status_serves_ci(records, capsys):
    assert main(["drift", "left.drift", "left.drift", "--fail-on", "source"]) == 0
    assert main(["drift", "left.drift", "right.drift", "--fail-on", "source"]) == 1
    assert main(["drift", "left.drift", "wrong.drift", "--fail-on", "unexplained"]) == 1
    assert main(["drift", "left.drift", "wrong.drift"]) == 0
    assert main(["drift", "left.drift", "none.drift"]) == 2
    assert main(["drift", "left.drift", "right.drift", "--rows", "a"]) == 2
    with open("left.drift", "r+b") as file:
        file.write(b"\xff" * 8)
    assert main(["drift", "left.drift", "right.drift"]) == 2
    errors = capsys.readouterr().err
    assert "no such record" in errors and "expected row numbers" in errors and "a header at byte 0" in errors


def test_one_record_is_identified(records, capsys):
    assert main(["drift", "left.drift", "--fail-on", "unexplained"]) == 0
    assert "left.drift: 3 of 3 operations are explained" in capsys.readouterr().out
    assert main(["drift", "wrong.drift", "--fail-on", "unexplained"]) == 1
    assert main(["drift", "left.drift", "--rows", "0", "--fail-on", "outside"]) == 2
    assert "RIGHT is missing" in capsys.readouterr().err


def test_one_record_is_judged_by_what_a_gpu_gives(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    x = np.linspace(-3, 3, 64, dtype=np.float16)
    table = elementwise("gelu", x)
    for name, wrong in (("h100.drift", 0), ("other.drift", 1)):
        run = Recording(name, 1 << 20, None, None, "torch")
        facts = {"source": "", "backward": False}
        run.add("aten.gelu", [x], [np.asarray(table)], path="mlp", attributes={"args": ["#0"], "kwargs": {}}, **facts)
        total = (x + x).view(np.uint16)
        total[5] ^= wrong
        run.add("aten.add", [x, x], [total.view(np.float16)], path="mlp", attributes={"args": ["#0", "#1"], "kwargs": {}}, **facts)
        run.add("aten.erfinv", [x], [x], path="mlp", attributes={"args": ["#0"], "kwargs": {}}, **facts)
        run.close()
    assert main(["drift", "h100.drift", "--gpu", "H100", "--fail-on", "unexplained"]) == 0
    out = capsys.readouterr().out
    assert "2 equal, 1 not known" in out and "128 of 128 words equal" in out and "aten.erfinv: erfinv has no rule" in out
    assert main(["drift", "other.drift", "--gpu", "H100", "--fail-on", "unexplained", "--json", "o.json"]) == 1
    assert "first that no H100 with torch 2.11 would give: 1 mlp: aten.add: 1 of 64 words differ" in capsys.readouterr().out
    with open("o.json") as file:
        assert json.load(file)["different"] == 1
    assert main(["drift", "h100.drift", "--gpu", "B200"]) == 2 and main(["drift", "h100.drift", "other.drift", "--gpu", "H100"]) == 2
    errors = capsys.readouterr().err
    assert "known are H100, H200" in errors and "judges one record" in errors
