"""The line of progress of `tcemu.torch` while programs compile: on a terminal and in a notebook, and nowhere else."""

import io
import sys

import pytest
from support.systems import skip_file
from support.torch_helpers import MISSING, torch, tt

from tcemu.base import progress

skip_file(MISSING if torch is None else "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run_step(monkeypatch):
    """A step of an emulated layer, with its gradients, that returns what it writes to a stream in the place of stderr."""
    from tcemu.faces.torch import operators

    monkeypatch.setattr(operators, "compile_progress", operators.CompileProgress())
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(5, 7, bias=False), torch.randn(3, 5)

    def run(stream):
        with monkeypatch.context() as patch, tt.emulate(layer, "bf16") as emulated:
            patch.setattr(sys, "stderr", stream)
            emulated(x).sum().backward()
        return "" if stream is None else stream.getvalue()

    return run


def test_a_terminal_shows_each_program_while_it_compiles(run_step):
    written = run_step(Terminal())
    shown = [text.strip() for text in written.split("\r") if text.strip()]
    assert [text.rpartition(";")[0] for text in shown] == [
        "tcemu.torch: compiles program 1, matmul of float32[3, 5] · float32[5, 7]",
        "tcemu.torch: compiles program 2, matmul backward of float32[3, 5] · float32[5, 7]",
    ]
    assert all(text.endswith(" s so far") for text in shown)
    assert written.endswith(f"\r{' ' * len(shown[-1])}\r")  # the line is gone when the step is done
    assert run_step(Terminal()) == ""


def test_a_notebook_shows_long_compilations_alone(run_step, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert run_step(io.StringIO()) == ""
    from tcemu.faces.torch import operators

    monkeypatch.setattr(operators, "compile_progress", slow := operators.CompileProgress(seconds=progress.REPORT_INTERVAL + 4.6))
    (line,) = run_step(io.StringIO()).splitlines()  # the next line comes ten seconds later
    assert line == "tcemu.torch: compiles program 1, matmul of float32[3, 5] · float32[5, 7]; 15 s so far"
    assert slow.last_report > progress.REPORT_INTERVAL


def test_nothing_is_shown_where_nobody_watches(run_step, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert run_step(io.StringIO()) == ""
    assert run_step(None) == ""  # a process without streams, as under pythonw
