"""Print the seconds that each test file took, from a JUnit report.

    pytest -n 2 --dist loadfile --junitxml run.xml
    python tests/file_times.py run.xml            prints a table, the slowest file first
    python tests/file_times.py run.xml --save     also writes tests/file_times.json, by which several processes take the slowest files first

A file's time is the sum over its tests, with their fixtures, without the imports. Files that the report does not name keep their time.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).with_suffix(".json")


def read_report(report: str) -> dict[str, float]:
    """Seconds of each test file in a JUnit report. Skipped tests do not count."""
    total: Counter[str] = Counter()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("skipped") is None:
            file = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
            total[f"{file}.py"] += float(case.get("time", 0))
    return dict(total)


def saved_seconds() -> dict[str, float]:
    """The saved seconds of the usual run, by file name."""
    return json.loads(FILE.read_text()) if FILE.is_file() else {}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Prints the seconds per test file of a JUnit report.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--save", action="store_true", help=f"also write {FILE.name}")
    args = parser.parse_args(words)
    seconds = read_report(args.report.read_text())
    for file, time in sorted(seconds.items(), key=lambda item: -item[1]):
        print(f"{time:8.1f} s  {file}")
    print(f"{sum(seconds.values()):8.1f} s  in {len(seconds)} files")
    if args.save:
        times = {file: round(time, 1) for file, time in (saved_seconds() | seconds).items()}
        FILE.write_text(json.dumps(dict(sorted(times.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
