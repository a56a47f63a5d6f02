"""The BibTeX of an arithmetic: every source that a row or a recipe names has an entry, and CITATION.cff says the same of this package."""

import re
from pathlib import Path

import pytest

import tcemu
from tcemu.engine.architectures.bibliography import PUBLICATIONS, THIS_PACKAGE, list_publications, make_bibtex
from tcemu.engine.architectures.model_rows import ROWS
from tcemu.operations.products.recipes import RECIPES
from tcemu.operations.products.recipes import ROWS as RECIPE_ROWS

CITATION = (Path(__file__).parents[3] / "CITATION.cff").read_text()
ENTRY = re.compile(r"@(\w+)\{([\w-]+),\n((?:  \w+ +=\s\{.*\},\n)+)\}")


def keys(text):
    """The keys of BibTeX text, which is nothing but entries."""
    entries = [ENTRY.fullmatch(part) for part in text.split("\n\n")]
    assert all(entries), text
    for entry in entries:
        assert entry and entry[3].count("{") == entry[3].count("}")
        names = re.findall(r"^  (\w+)", entry[3], re.MULTILINE)
        assert len(set(names)) == len(names) and {"author", "title"} <= set(names)
    return [entry[2] for entry in entries if entry]


def test_every_source_of_an_arithmetic_has_an_entry():
    for row in ROWS:
        found = {publication.key for publication in list_publications(row.evidence.source)}
        for paper in row.evidence.papers:
            assert list_publications(paper), paper
        assert not row.evidence.assembler or "nvidia-ptxas" in found
        assert keys(row.evidence.bibtex())[0] == "tcemu" and set(keys(row.evidence.bibtex())) == found | {"tcemu"}


def test_every_source_of_a_recipe_has_an_entry():
    for row in RECIPE_ROWS.values():
        named = {publication.arxiv for publication in list_publications(row.source)}
        assert set(re.findall(r"arXiv (\d{4}\.\d{5})", row.source)) <= named and list_publications(row.source)
    for name in RECIPES:
        keys(tcemu.get_recipe(name).bibtex())


@pytest.mark.parametrize(
    ("op", "target", "wanted"),
    [
        ("f16", "H100", ["tcemu", "nvidia-ptxas"]),
        ("f16", "A100", ["tcemu", "xie2025mmasim", "khattak2025models"]),
        ("f16", "T4", ["tcemu", "xie2025mmasim"]),
        ("mma.sync.aligned.m8n8k4.row.col.f16.f16.f16.f16", "V100", ["tcemu", "khattak2025models"]),
        ("f64", "A100", ["tcemu", "nvidia-ptx"]),
    ],
)
def test_the_entries_of_an_arithmetic(op, target, wanted):
    if (op, target) == ("f16", "T4"):
        op = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    assert keys(tcemu.evidence(op, target).bibtex()) == wanted


def test_the_entries_of_a_recipe():
    assert keys(tcemu.get_recipe("deepseek").bibtex()) == ["tcemu", "nvidia-ptxas", "deepseek2024v3", "deepgemm"]
    assert "sftensor-tcgen05" in keys(tcemu.get_recipe("nvfp4_training").bibtex())
    assert keys(tcemu.get_recipe("bf16").what_if(fraction_bits=9, backward=True).bibtex()) == ["tcemu", "kalamkar2019bfloat16"]
    assert make_bibtex() == THIS_PACKAGE.entry


def test_rows_are_distinct():
    assert len({row.key for row in PUBLICATIONS}) == len(PUBLICATIONS)
    for row in PUBLICATIONS:
        assert keys(row.entry) == [row.key] and (row.year == "" or re.fullmatch(r"20\d\d", row.year))
        assert not row.arxiv or row.year == f"20{row.arxiv[:2]}"


def test_the_citation_file_says_the_same():
    stated = dict(re.findall(r"^([\w-]+): \"?(.*?)\"?$", CITATION, re.MULTILINE))
    more = dict(THIS_PACKAGE.more)
    assert (stated["title"], stated["version"], stated["date-released"]) == (THIS_PACKAGE.title, more["version"], more["date"])
    assert stated["version"] == tcemu.__version__ and stated["license"] == more["note"] and more["date"].startswith(THIS_PACKAGE.year)
