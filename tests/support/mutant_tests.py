"""Tests as detectors of faults: which of them execute which lines, and those that reach a mutant, the fastest first."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, NamedTuple

import pytest

from support.mutant_detectors import executed_lines
from support.mutant_runs import Detector
from support.mutations import ROOT, Mutant


class TestCase(NamedTuple):
    """A test of the usual run."""

    name: str  # pytest's
    seconds: float
    reached: frozenset[tuple[str, int]]  # lines that it executes without a fault

    __test__ = False


def _pytest(files: list[str], plugin: Any, *options: str) -> int:
    arguments = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", *options]
    return int(pytest.main([*arguments, *(str(ROOT / file) for file in files)], plugins=[plugin]))


class _Recorder:
    """Notes the lines and the seconds of each test."""

    def __init__(self, files: tuple[str, ...]) -> None:
        self.files = files
        self.cases: list[TestCase] = []
        self.failed: list[str] = []
        self.of_collection: set[tuple[str, int]] = set()  # parameters of tests are made then

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        with executed_lines(self.files, self.of_collection):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        lines: set[tuple[str, int]] = set()
        began = time.process_time()
        with executed_lines(self.files, lines):
            done = yield
        self.cases.append(TestCase(item.nodeid, time.process_time() - began, frozenset(lines)))
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def record_tests(test_file: str, files: tuple[str, ...]) -> list[TestCase]:
    """The tests of a file that the usual run has, with the lines of the files that they execute. For a process of its own.

    Raises AssertionError if one fails without a fault.
    """
    recorder = _Recorder(files)
    status = _pytest([test_file], recorder)
    assert status in (0, 5) and not recorder.failed, f"without a fault, {test_file} fails: {status}, {recorder.failed}"
    return [case._replace(reached=case.reached | recorder.of_collection) for case in recorder.cases]


class _Chooser:
    """Runs some tests, in their order, until one fails. Tests that there are with the fault alone come first."""

    def __init__(self, names: list[str], every: set[str]) -> None:
        self.places = {name: at for at, name in enumerate(names)}
        self.every = every
        self.failed = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [
            item for item in items if item.nodeid in self.places or (item.nodeid not in self.every and not item.get_closest_marker("full"))
        ]
        items[:] = sorted(chosen, key=lambda item: self.places.get(item.nodeid, -1))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            message = str(report.longrepr).strip().splitlines()
            self.failed = f"{report.nodeid}: {message[-1] if message else ''}"[:300]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} cannot be collected"


def reaching(cases: list[TestCase], mutant: Mutant) -> list[TestCase]:
    """The tests that execute a fault, the fastest first."""
    lines = {(mutant.path, line) for line in range(mutant.first_line, mutant.last_line + 1)}
    return sorted((case for case in cases if mutant.is_executed_by_import or lines & case.reached), key=lambda case: case.seconds)


def test_detectors(cases: list[TestCase], mutant: Mutant) -> list[Detector]:
    """The tests that execute a fault, a detector for each file, the fastest first."""
    by_file: dict[str, list[TestCase]] = {}
    for case in reaching(cases, mutant):
        by_file.setdefault(case.name.split("::")[0], []).append(case)
    every = {case.name for case in cases}

    def run(file: str, names: list[str]) -> str:
        chooser = _Chooser(names, every)
        status = _pytest([file], chooser, "-x")
        return chooser.failed or ("" if status in (0, 5) else f"pytest ended with status {status}")

    files = sorted(by_file, key=lambda file: sum(case.seconds for case in by_file[file]))
    return [Detector("tests", partial(run, file, [case.name for case in by_file[file]])) for file in files]


test_detectors.__test__ = False  # type: ignore[attr-defined]
