"""Renew what a page shows under its blocks: `python tests/renew_pages.py README.md docs/start.md`.

Only texts that differ in more than times are written anew; read the difference before you commit it.
"""

import os
import sys
import tempfile
from pathlib import Path

from support import pages


def renew_page(text: str, together: bool) -> str:
    """The page with what its blocks print today."""
    new = [(block.shown, out) for block, out in pages.run_page(pages.blocks(text), together) if block.shown]
    for (begin, end), out in reversed(new):
        if pages.comparable(out) != pages.comparable(text[begin:end]):
            text = text[:begin] + "\n".join(line.rstrip() for line in out.strip("\n").splitlines()) + "\n" + text[end:]
    return text


def main(names: list[str]) -> int:
    paths = [Path(name).resolve() for name in names]
    for path in paths:
        before = path.read_text()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            after = renew_page(before, together=path.name != "README.md")
            os.chdir(path.parent)
        path.write_text(after)
        print(f"{path.name}: {'renewed' if before != after else 'as it was'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
