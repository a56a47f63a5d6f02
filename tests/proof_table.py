"""Write the table of proofs in docs/verified.md anew: `python tests/proof_table.py run.xml "machine, date"`.

run.xml: `pytest -m "full or not full" --junitxml run.xml tests/engine/proofs`; or several reports, a file each. The seconds are those of
the process, on one core.
"""

import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "verified.md"
BEGIN, END = "<!-- proofs: written by tests/proof_table.py -->\n", "<!-- end of proofs -->\n"


def read_seconds(report: str) -> dict[str, float]:
    """The seconds of each test function, all its cases together. A test that failed or was skipped has none."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.fromstring(report).iter("testcase"):
        if any(child.tag in ("failure", "error", "skipped") for child in case):
            raise SystemExit(f"{case.get('name')} did not pass: a table of proofs needs all of them")
        for value in case.iter("property"):
            if value.get("name") == "seconds":
                seconds[str(case.get("name")).partition("[")[0]] += float(str(value.get("value")))
    return seconds


def render_table(proofs: dict, seconds: dict[str, float]) -> str:
    """The rows, by the first formula."""
    names = lambda proof: ", ".join(name if " " in name else f"`{name}`" for name in proof.formulas)
    rows = [
        f"| {names(proof)} | {proof.domain} | {proof.method} | {seconds[test]:.1f} |" for test, proof in proofs.items() if test in seconds
    ]
    return (
        "\n".join(["| formula of `tcemu.engine.arithmetic.step` | proved for | by | seconds |", "|---|---|---|---|", *sorted(rows)]) + "\n"
    )


def load_proofs() -> dict:
    """Every proof, by the name of its test."""
    if str(TESTS / "proofs") not in sys.path:
        sys.path.insert(0, str(TESTS / "proofs"))
    for path in sorted((TESTS / "proofs").glob("test_*_proofs.py")):
        import_module(path.stem)
    return import_module("proof_records").PROOFS


def main(*words: str) -> None:
    *reports, machine = words
    seconds: dict[str, float] = {}
    for report in reports:
        seconds |= read_seconds(Path(report).read_text())
    table = f"{machine}: {sum(seconds.values()):,.0f} s.\n\n{render_table(load_proofs(), seconds)}"
    text, count = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}{table}{END}", PAGE.read_text(), flags=re.DOTALL)
    assert count == 1, f"{PAGE} has no place for the table"
    PAGE.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
