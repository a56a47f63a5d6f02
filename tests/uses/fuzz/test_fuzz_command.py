"""`tcemu fuzz`: runs that are made longer, the account that is kept beside a run, and the progress of a family."""

import io
import re
from pathlib import Path

import numpy as np
import pytest

import tcemu
from tcemu import fuzz
from tcemu.cli import main
from tcemu.faces.commands import fuzz_commands as command
from tcemu.uses.fuzz.differential_run import read_run_header

SMALL = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
WORDS = ["fuzz", SMALL, "--left", "A100", "--right", "H100", "--quiet"]


def result_line(run: fuzz.FuzzRun) -> tuple:
    return (run.done, run.cases, run.wrong_cases, run.wrong_outputs, run.first, run.by_kind.tolist())


def coverage_line(run: fuzz.FuzzRun) -> list:
    return [counts.tolist() for counts in run.coverage]


# ---- longer runs


@pytest.mark.full
def test_a_finished_run_goes_on_to_more_cases(tmp_path):
    """With the counts of one that asked for all of them at once; what is done is not done again."""
    compare = lambda cases, out: fuzz.find_mismatches(SMALL, "A100", "H100", cases=cases, out=out, iterations=1, shrink=False)
    whole = compare(1400, tmp_path / "whole")
    assert compare(300, tmp_path / "odd").complete and result_line(compare(1400, tmp_path / "odd")) == result_line(whole)
    first = compare(320, tmp_path / "held")
    assert first.complete and read_run_header(tmp_path / "held")["cases"] == 320
    longer = compare(1400, tmp_path / "held")
    assert (
        longer.complete and result_line(longer) == result_line(whole) and coverage_line(longer) == coverage_line(whole)
    )  # of one case in 16 from 320 on
    assert read_run_header(tmp_path / "held") | {"seconds": 0} == read_run_header(tmp_path / "whole") | {"seconds": 0}
    done = []
    again = fuzz.find_mismatches(SMALL, "A100", "H100", cases=1400, out=tmp_path / "held", shrink=False, report=done.append)
    assert result_line(again) == result_line(longer) and coverage_line(again) == coverage_line(longer) and done == []
    with pytest.raises(ValueError, match="holds another run: cases is 1400 there and 300 here"):
        compare(300, tmp_path / "held")


@pytest.mark.full
def test_the_command_makes_a_run_longer(tmp_path, capsys):
    out = ["--out", str(tmp_path)]
    assert main([*WORDS, "--cases", "208", *out]) == 1
    capsys.readouterr()
    assert main([*WORDS, "--cases", "608", *out]) == 1
    assert "608 of 608 cases" in capsys.readouterr().out
    assert main(["fuzz", "--resume", str(tmp_path), "--cases", "900", "--quiet"]) == 1
    held = capsys.readouterr().out
    assert main([*WORDS, "--cases", "900"]) == 1
    assert capsys.readouterr().out == held and "900 of 900 cases" in held
    assert main(["fuzz", "--resume", str(tmp_path), "--cases", "100", "--quiet"]) == 2
    assert "is a run of 900 already; give more" in capsys.readouterr().err
    assert main(["fuzz", "--resume", str(tmp_path), "--seed", "1"]) == 2
    assert "only --cases" in capsys.readouterr().err


def test_by_name_and_by_target_are_one_run(tmp_path, capsys):
    assert main([*WORDS, "--cases", "100", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert main(["fuzz", SMALL, "--left", "sm_80", "--right", "h200", "--quiet", "--cases", "100", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out == said


# ---- what is kept for people


def test_the_account_is_kept_beside_the_run(tmp_path, capsys):
    assert main([*WORDS, "--cases", "200", "--out", str(tmp_path)]) == 1
    assert (tmp_path / "report.txt").read_text() == capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == ["report.txt", "run.npz"]
    assert main(["fuzz", "--resume", str(tmp_path), "--cases", "300", "--quiet"]) == 1
    assert (tmp_path / "report.txt").read_text() == capsys.readouterr().out


def test_an_account_that_cannot_be_written_is_said(tmp_path, capsys):
    (tmp_path / "report.txt").mkdir()
    assert main([*WORDS, "--cases", "100", "--out", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert "100 of 100 cases" in out and "report.txt cannot be written: " in error and "the run's own file" in error
    assert read_run_header(tmp_path)["done"] == 100


# ---- families


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    """Runs that compare nothing, and of which the third differs."""
    runs = []

    def run(op, left, right, *, cases, out=None, report=None, **rest):
        runs.append(report)
        side = fuzz.get_implementation(op, "sm_90a")
        by_kind = np.zeros((1, 2), np.int64)
        if out:
            Path(out).mkdir(parents=True, exist_ok=True)
        kinds = (fuzz.KINDS[0],)
        return fuzz.FuzzRun(tcemu.parse(op), side, side, cases, 0, kinds, cases, int(len(runs) == 3), int(len(runs) == 3), (), by_kind)

    monkeypatch.setattr(command, "find_mismatches", run)
    return runs


def test_a_family_shows_one_line_that_is_rewritten(quick, capsys, monkeypatch, tmp_path):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    count = len(tcemu.isa.instructions("sm_90a", "wgmma.sp"))
    assert main(["fuzz", "wgmma.sp", "--left", "H100", "--right", "H200", "--cases", "10", "--out", str(tmp_path)]) == 1
    shown = terminal.getvalue()
    assert "\n" not in shown and quick == [None] * count  # the runs themselves say nothing
    lines = [line.strip() for line in shown.split("\r") if line.strip()]
    assert lines[0] == f"0 of {count} spellings" and re.fullmatch(rf"{count - 1} of {count} spellings, \d+ s left", lines[-1])
    assert len(lines) == count and shown.endswith("\r")  # nothing is left standing
    said = capsys.readouterr().out
    assert len(said.splitlines()) == count and said.count("1 of 20,") == said.splitlines()[2].count("1 of 20,")
    assert (tmp_path / "report.txt").read_text() == said
    assert len(list(tmp_path.glob("*/report.txt"))) == count


def test_elsewhere_the_line_comes_now_and_then(capsys):
    progress, stream = command.SpellingProgress(78, io.StringIO()), io.StringIO()
    progress.stream = stream
    progress.show(0)
    assert stream.getvalue() == ""
    progress.started -= 180
    progress.show(19)
    progress.clear()
    progress.show(20)
    assert stream.getvalue() == "19 of 78 spellings, 9 min left\n"


def test_quiet_is_quiet(quick, capsys):
    assert main(["fuzz", "wgmma.sp", "--left", "H100", "--right", "H200", "--cases", "10", "--quiet"]) == 1
    assert capsys.readouterr().err == ""
