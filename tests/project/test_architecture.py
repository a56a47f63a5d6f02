"""The developers' documents are short, and what ARCHITECTURE.md names exists: files, folders, and every name of the three walks."""

import importlib
import re
from functools import reduce

import pytest
from support import pages

TEXT = (pages.ROOT / "ARCHITECTURE.md").read_text()
MAX_WORDS = {"ARCHITECTURE.md": 2000, "benchmarks/README.md": 1200, "tests/README.md": 1000, "CONTRIBUTING.md": 1300}
WINGS = sorted(path.relative_to(pages.ROOT).as_posix() for path in (pages.ROOT / "tcemu").glob("*/README.md"))
MAX_WING_WORDS = 300  # outside the picture
ALL_TEXT = "\n".join([TEXT, *((pages.ROOT / name).read_text() for name in WINGS)])
HOW_TOS = sorted(path.name for path in (pages.ROOT / "docs" / "howto").glob("*.md"))
MAX_HOW_TO_WORDS = 900  # outside blocks of code and of output
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
DOTTED = sorted(set(re.findall(r"`(tcemu(?:\.\w+)+)`", TEXT)))
PATHS = sorted(set(re.findall(r"[\w./]+/(?:[\w.]+\.(?:py|md|txt|xz|cu))?", re.sub(r"\(http[^)]*\)", "", ALL_TEXT))))


def resolve(name: str) -> object:
    """The object of a dotted name: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "-"):
                raise
            continue
        return reduce(getattr, parts[count:], module)
    raise AttributeError(name)


def is_there(path: str) -> bool:
    """Whether a path exists from the root of the repository, from the package, or from a folder of it."""
    roots = (pages.ROOT, *(folder for folder in (pages.ROOT / "tcemu").glob("**/") if "__pycache__" not in folder.parts))
    return any((root / path.rstrip("/")).exists() for root in roots)


@pytest.mark.parametrize("name", MAX_WORDS)
def test_a_document_is_short(name):
    assert len((pages.ROOT / name).read_text().split()) <= MAX_WORDS[name]


@pytest.mark.parametrize("name", WINGS)
def test_the_page_of_a_wing_is_short_and_has_a_picture(name):
    text = (pages.ROOT / name).read_text()
    assert len(BLOCK.findall(text)) == 1 and len(BLOCK.sub("", text).split()) <= MAX_WING_WORDS


@pytest.mark.parametrize("name", HOW_TOS)
def test_a_how_to_is_short(name):
    text = (pages.ROOT / "docs" / "howto" / name).read_text()
    assert len(BLOCK.sub("", text).split()) <= MAX_HOW_TO_WORDS


@pytest.mark.parametrize("name", DOTTED)
def test_a_name_exists(name):
    assert resolve(name) is not None


def test_a_name_that_is_gone_is_seen():
    with pytest.raises(AttributeError):
        resolve("tcemu.engine.instructions.mma.walk_nowhere")
    with pytest.raises(AttributeError):
        resolve("tcemu.instructions.attic.mma")


def test_files_and_folders_exist():
    assert len(PATHS) > 30
    assert [path for path in PATHS if not is_there(path)] == []


def test_the_walks_name_what_the_data_passes_through():
    walks = TEXT.partition("## Three walks through the code")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\*\*One ", walks, re.MULTILINE)) == 3
    assert all(len(re.findall(r"`tcemu\.", walk)) >= 4 for walk in walks.split("**One ")[1:])


def test_every_wing_has_its_page_and_every_room_its_row():
    wings = {path.parent for path in (pages.ROOT / "tcemu").glob("*/__init__.py")} - {pages.ROOT / "tcemu" / "base"}
    rows = {wing.name: set(re.findall(r"`(?:ptx/)?(\w+)/", (wing / "README.md").read_text())) for wing in wings}
    rooms = {wing.name: {path.parent.name for path in wing.glob("*/__init__.py")} for wing in wings}
    rows["kernels"] |= {"ptx", "triton", "cute", "xla"}  # its picture has them
    assert {wing: rooms[wing] - rows[wing] for wing in rooms if rooms[wing] - rows[wing]} == {}
    assert all(f"(tcemu/{wing}/README.md)" in TEXT for wing in rooms)
