"""Renew the times in tests/README.md from a run's report: `pytest --junitxml run.xml`, then `python tests/times.py run.xml`.

    python tests/times.py run.xml             the column of the usual run
    python tests/times.py full.xml --full     the column of `pytest -m full`

Only the files that the report names get a new time. A file's time is the sum over its tests, with their fixtures, without the imports.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

README = Path(__file__).resolve().parent / "README.md"
ROW = re.compile(r"^(\| `(?P<file>test_\w+\.py)` \|.*\| )(?P<usual>[\d.-]+) \| (?P<full>[\d.-]+) \|$", re.MULTILINE)


def seconds(report: str) -> dict[str, float]:
    """Seconds of each test file in a JUnit report. Tests that were skipped do not count."""
    total: Counter[str] = Counter()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("skipped") is None:
            file = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
            total[f"{file}.py"] += float(case.get("time", 0))
    return dict(total)


def usual() -> dict[str, float]:
    """What tests/README.md says of the usual run, for the files of which it says something."""
    return {row["file"]: float(row["usual"]) for row in ROW.finditer(README.read_text()) if row["usual"] != "-"}


def renewed(text: str, times: dict[str, float], column: str) -> str:
    """The text with new times in one column, "usual" or "full", of the table of files."""

    def row(match: re.Match[str]) -> str:
        said = {name: match[name] for name in ("usual", "full")}
        if match["file"] in times:
            said[column] = f"{times[match['file']]:.0f}"
        return f"{match[1]}{said['usual']} | {said['full']} |"

    return ROW.sub(row, text)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Renews the times in tests/README.md from a JUnit report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--full", action="store_true", help="the report is of `pytest -m full`")
    args = parser.parse_args(words)
    times = seconds(args.report.read_text())
    README.write_text(renewed(README.read_text(), times, "full" if args.full else "usual"))
    print(f"{len(times)} files, {sum(times.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
