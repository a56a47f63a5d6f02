"""Renew the figures of the claims' quick forms, tests/claims_quick.json: `python tests/renew_claims.py [NAME ...]`.

tests/uses/study/test_claims.py takes the spread over seeds from there. Read the difference before you commit it: a figure that moves by
more than its last digits means that an arithmetic has changed. Claims run side by side, one on each CPU.
"""

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tcemu.base.results import to_json
from tcemu.uses.study.claims import get_claim, list_claims

FILE = Path(__file__).parent / "claims_quick.json"
SEEDS = range(8)


def figures(name: str) -> dict:
    """The figures of a claim's quick form over the seeds."""
    return json.loads(to_json(get_claim(name).reproduce(SEEDS, quick=True).values))


def main(names: list[str]) -> int:
    kept = json.loads(FILE.read_text()) if FILE.is_file() else {}
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(figures, name): name for name in names or list_claims()}
        for done in as_completed(asked):
            kept[asked[done]] = done.result()
            print(f"{asked[done]}: {len(done.result())} figures, {len(SEEDS)} seeds", flush=True)
    FILE.write_text(to_json(dict(sorted(kept.items())), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
