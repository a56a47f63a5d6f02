"""The documentation: its blocks print what they show, its links lead somewhere, every public name has its place, and it builds."""

import filecmp
import html
import json
import re
import runpy
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from renew_pages import renew_page
from support import pages
from support.sampling import sample_cases

import tcemu
from tcemu.cli import parser

ROOT, DOCS = pages.ROOT, pages.ROOT / "docs"
DOCUMENTS = [*pages.PAGES, *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
DOCUMENTS += [ROOT / "tests" / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "tests" / "golden" / "README.md"]
RUNNING = [str(path.relative_to(DOCS)) for path in pages.PAGES if any(block.runs for block in pages.blocks(path.read_text()))]
# a page of each kind that compiles little: the first page, concepts, a how-to, commands
CHEAP = [
    "concepts/evidence.md", "concepts/layouts.md", "howto/replay_predicted.md", "start.md",
]  # fmt: skip
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)|^```\{(?:image|include|figure)\} (\S+)$", re.MULTILINE)
PICTURES = sorted(path.name for path in (DOCS / "pictures").glob("*.svg"))
NEEDED = ("sphinx", "myst_nb", "furo", "sphinx_design")  # what the extra `docs` brings
MOST_SECONDS = 60


# ---- blocks


@pytest.mark.parametrize("name", sample_cases(RUNNING, CHEAP))
def test_what_a_page_runs_prints_what_it_shows(name, tmp_path, monkeypatch):
    text = (DOCS / name).read_text()
    monkeypatch.chdir(tmp_path)
    for block, out in pages.run_page(pages.blocks(text)):
        assert pages.comparable(out) == pages.comparable(pages.shown_text(block, text)), block.code


def test_commands_that_are_not_run_are_such():
    """Those that take minutes or a GPU: the parser takes their words."""
    lines = [line for path in pages.PAGES for block in pages.blocks(path.read_text()) if block.why_not for line in block.commands]
    assert len(lines) >= 5
    for line in lines:
        parser().parse_args(pages.page_words(line))


def test_every_other_line_of_a_shell_is_known():
    """The README's first is run by hand and in test_demo.py, the checks by .ci/run, the site's own below. XLA's dump needs a GPU."""
    known = {
        "python3 -m venv .venv && .venv/bin/pip install '.[cpu]' && .venv/bin/tcemu demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest -n 2 --dist loadfile",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]'",
        "ruff check . && ruff format --check . && pyright --pythonpath .venv/bin/python",
        'XLA_FLAGS="--xla_dump_to=dump --xla_dump_hlo_as_text --xla_dump_large_constants --xla_dump_emitter_re=ptx" python train.py',
        ".venv/bin/pip install -e '.[docs]' && .venv/bin/sphinx-build -W -c docs . build/docs",
    }
    assert {line for path in DOCUMENTS for block in pages.blocks(path.read_text()) for line in block.others} == known


def test_code_fits_its_column():
    """At 1,280 pixels the column of a page shows 88 characters of code. Text in PTX may be longer, whose lines messages count."""
    lines = [(str(path), line) for path, block in python_blocks() for line in block.code.splitlines()]
    in_ptx = re.compile(r"^[^\"']*(;|\) +)( *//.*)?$|%r\d")
    assert len(lines) > 300 and [(name, line) for name, line in lines if len(line) > 88 and not in_ptx.search(line)] == []


def test_every_block_can_be_pasted_into_the_prompt():
    """Of Python 3.11, which reads a line at a time; a later one takes whole blocks."""
    found = {(str(path), block.code): said for path, block in python_blocks() if (said := pages.prompt_error(block.code))}
    assert found == {}
    assert "invalid syntax at 'print(x)'" in pages.prompt_error("for x in 'ab':\n    pass\nprint(x)\n")


def python_blocks() -> list[tuple[Path, pages.Block]]:
    return [(path, block) for path in pages.PAGES for block in pages.blocks(path.read_text()) if block.language == "python"]


def test_blocks_are_found_with_what_follows_them():
    text = "```python\nx = 1\nprint(x)\n```\n\n```text\n1\n```\n\n<!-- parsed only: slow -->\n```sh\ntcemu demo\nls\n```\n"
    first, second = pages.blocks(text)
    assert (first.language, pages.shown_text(first, text), first.runs) == ("python", "1\n", True)
    assert (second.why_not, second.commands, second.others, second.shown, second.runs) == ("slow", ["tcemu demo"], ["ls"], None, False)
    assert [out for _, out in pages.run_page([first])] == ["1\n"]


def test_texts_are_renewed_where_they_differ_in_more_than_times():
    text = "```python\nprint({})\n```\n\n```text\n2\n```\n"
    assert renew_page(text.format(1), together=True) == text.format(1).replace("\n2\n", "\n1\n")
    assert renew_page(text.format(2), together=False) == text.format(2)
    timed = text.format("'in 1.5 s'").replace("\n2\n", "\nin 0.3 s\n")
    assert renew_page(timed, together=True) == timed


# ---- links


def anchors(path: Path) -> set[str]:
    """The headings of a page as a code host and MyST name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(path: Path) -> list[str]:
    """The relative links of a document that lead nowhere."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
    found = []
    for link in (one or other for one, other in LINK.findall(pages.FENCE.sub("", text))):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(path):
    assert dead(path) == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "a.md"
    page.write_text("# Some Heading\n[x](b.md) [y](#some-heading) [z](#none) [w](https://example.org/)\n```{image} c.svg\n```\n")
    assert dead(page) == ["b.md", "#none", "c.svg"]


def test_files_that_the_documents_name_are_there():
    folders = "tcemu|tests|docs|notebooks|benchmarks|.ci|.github"
    named = {name for path in [*pages.PAGES, ROOT / "README.md"] for name in re.findall(rf"`((?:{folders})/[\w./]+)`", path.read_text())}
    assert {"notebooks/minilm.ipynb", "tests/golden"} <= named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# ---- the reference


def public_names() -> set[str]:
    """Every public name of the package as one calls it, once: a module's name that the package itself has too is not counted again."""
    top = {name for name in tcemu.__all__ if not isinstance(getattr(tcemu, name), types.ModuleType)}
    names = {f"tcemu.{name}" for name in top}
    for module in set(tcemu.__all__) - top - {"recipes"}:
        held = getattr(tcemu, module)
        public = getattr(held, "__all__", None) or [name for name in vars(held) if not name.startswith("_")]
        values = {name: getattr(held, name) for name in public}
        again = {id(getattr(tcemu, name)) for name in top}
        names |= {f"tcemu.{module}.{n}" for n, v in values.items() if id(v) not in again and not isinstance(v, types.ModuleType)}
    return names | {"tcemu.recipes.RECIPES"}


def test_every_public_name_is_on_a_page():
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    formats = {f"tcemu.formats.{name.upper()}" for name in tcemu.formats.FORMATS}  # a table has these
    silicon = {"tcemu.silicon.gpu"}  # the module and a function of it have one name; `Gpu` says what it gives
    assert public_names() - formats - silicon - set(documented) == set()


@pytest.fixture(scope="module")
def markup():
    """docs/_extensions/docstrings.py: its names."""
    pytest.importorskip("sphinx", reason="sphinx is not installed (pip install -e '.[docs]')")
    return SimpleNamespace(**runpy.run_path(str(DOCS / "_extensions" / "docstrings.py")))


def test_docstrings_become_markup(markup):
    """Arguments are points of a list, also those that are named inside a line; stars are text; a field has its comment."""
    lines = [
        "What it does, *args too.",
        "",
        "    a: [..., M]; b: what",
        "        `it * b` is. cd: no argument. c, d: two",
        "    Returns x_.",
    ]
    shown = [line for line in markup.marked(lines, {"a", "b", "c", "d"}) if line]
    assert shown[0] == r"What it does, \*args too."
    assert shown[1:3] == ["- **a**: [..., M]; **b**: what", "  `it * b` is. cd: no argument. **c**, **d**: two"]
    assert shown[3] == r"Returns x\_."
    assert any(line.startswith("- **terms** (`16`): ") for line in markup.fields(tcemu.Model))


def test_google_sections_become_fields(markup):
    lines = [
        "Multiply *two* matrices.",
        "",
        "Args:",
        "    a: Array [..., M, K], |a| < 1.",
        "",
        "Returns:",
        "    D_.",
        "",
        "Source: PTX ISA 9.7.",
    ]
    markup.process(SimpleNamespace(config=markup.NAPOLEON), "function", "f", None, None, lines)
    text = "\n".join(lines)
    assert r"\*two\*" in text and ":param a: Array [..., M, K], \\|a\\| < 1." in text and ":returns:" in text
    assert ".. rubric:: Source" in text


def test_signatures_have_types_by_their_short_names(markup):
    text, returned = markup.typed_signature(None, "function", "tcemu.gemm", tcemu.gemm, None, None, None)
    assert (
        text.startswith("(a: ArrayLike, b: ArrayLike, c: ArrayLike | None = None, *, op: str | Instruction,")
        and returned == "Array | np.ndarray"
    )
    method, _ = markup.typed_signature(None, "method", "tcemu.Recipe.what_if", tcemu.Recipe.what_if, None, None, None)
    assert method.startswith("(*, backward: bool = True, **changes: Any)")
    assert markup.typed_signature(None, "class", "tcemu.Model", tcemu.Model, None, None, None) is None


def test_a_source_link_leads_to_the_lines_of_a_definition(markup):
    address = markup.source_address("https://example.org/tcemu", "tcemu", "gemm")
    path, first, last = re.fullmatch(r"https://example.org/tcemu/blob/main/(\S+)#L(\d+)-L(\d+)", address).groups()
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert lines[int(first) - 1] == "def gemm(" and lines[int(last)] == "" and int(last) - int(first) > 40
    assert markup.source_address("https://example.org/tcemu", "tcemu", "Recipe.arithmetic").startswith(
        "https://example.org/tcemu/blob/main/"
    )
    assert markup.source_address("https://example.org/tcemu", "tcemu.recipes", "RECIPES") is None


# ---- pictures


@pytest.fixture(scope="module")
def draw():
    """docs/pictures/draw.py: its names."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / "pictures" / "draw.py")))


@pytest.mark.parametrize("name", sample_cases(PICTURES, [name for name in PICTURES if name != "error_by_width.svg"]))
def test_a_picture_is_as_the_script_draws_it(name, draw):
    stored = (DOCS / "pictures" / name).read_text()
    if name in ("dot_product.svg", "order_changes.svg"):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    drawn = draw.PICTURES[name]()
    if "Matplotlib v" in stored and _matplotlib_version(stored) != _matplotlib_version(drawn):  # other versions write other paths
        assert _words(drawn) == _words(stored)
    else:
        assert drawn == stored
    assert drawn.count("<title>") == 1 and ElementTree.fromstring(drawn).tag.endswith("svg")


def _matplotlib_version(svg: str) -> str:
    return re.search(r"Matplotlib (v[\w.]+)", svg)[1]  # type: ignore[index]


def _words(svg: str) -> list[str]:
    return [text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text") for text in element.itertext()]


def test_every_picture_has_its_line_in_the_script(draw):
    assert sorted(draw.PICTURES) == PICTURES


# ---- the site


@pytest.mark.full
def test_it_builds_without_a_warning_and_twice_the_same(tmp_path):
    for package in NEEDED:
        pytest.importorskip(package, reason=f"{package} is not installed (pip install -e '.[docs]')")
    sites = [tmp_path / "one", tmp_path / "two"]
    for site in sites:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "sphinx", "-q", "-W", "-c", "docs", ".", site], check=True, cwd=ROOT)
        assert time.monotonic() - began < MOST_SECONDS
    files = [sorted(p.relative_to(site) for p in site.rglob("*") if p.is_file() and ".doctrees" not in p.parts) for site in sites]
    assert files[0] == files[1]
    _, other, errors = filecmp.cmpfiles(sites[0], sites[1], [str(name) for name in files[0]], shallow=False)
    assert (other, errors) == ([], [])
    assert {Path("docs/index.html"), Path("docs/start.html"), Path("index.html"), Path("CHANGELOG.html")} <= set(files[0])
    assert [f"{page.relative_to(sites[0])}: {link}" for page in sorted(sites[0].rglob("*.html")) for link in dead_in_html(page)] == []
    searched = (sites[0] / "searchindex.js").read_text()
    assert [word for word in ("h100", "fraction_bits", "wgmma") if f'"{word}":[[' not in searched] == []  # what an entry of the index says


def dead_in_html(page: Path) -> list[str]:
    """What a page of the site links to, or loads, and is not there; whatever it loads from elsewhere."""
    text = page.read_text()
    found = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="((?:https?:)?//[^"]+)"', text)
    for link in re.findall(r'(?:href|src)="(?!https?:|mailto:|data:|//)([^"]+)"', text):
        name, _, anchor = unquote(html.unescape(link)).partition("#")
        target = (page.parent / name.partition("?")[0]).resolve() if name else page
        if not target.exists() or (anchor and f'id="{anchor}"' not in target.read_text()):
            found.append(link)
    return found
