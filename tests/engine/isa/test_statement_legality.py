"""The targets and versions of statements outside the tensor-core families, against the answers of ptxas 12.9, 13.0 and 13.5.

tests/assembler/record_statements.py asked; the spellings are those of the table and what lies around them.
"""

import json
import lzma
import sys
from functools import cache
from pathlib import Path

import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import Unsupported
from tcemu.engine.isa.legality import statement_versions
from tcemu.engine.isa.statement_table import find_forms, statement_rows
from tcemu.kernels.ptx.linker.instruction_table import BRANCHES, ENDINGS, PREPARE

BATCHES = 12
ASSEMBLER = Path(__file__).parents[2] / "assembler"
# where the assembler is laxer than the table: name -> (reason, which spelling, assembler, version and target)
LAXER = {
    "an older assembler": (
        "ptxas 12.9 reads cvt.ftz.f32.bf16 from sm_80 on; 13.0 and 13.5 say that it needs sm_90",
        lambda spelling, assembler, isa, target: spelling == "cvt.ftz.f32.bf16" and assembler == "12.9",
    ),
    "cp.async to .shared::cta": (
        "ptxas reads it before PTX ISA 7.8, which introduced .shared::cta",
        lambda spelling, assembler, isa, target: spelling.startswith("cp.async.c") and ".shared::cta" in spelling and isa < (7, 8),
    ),
}


@cache
def answers():
    return json.loads(lzma.decompress((ASSEMBLER / "statement_answers.json.xz").read_bytes()))


def version(text):
    return tuple(map(int, text.split(".")))


@cache
def recorded():
    """Return each spelling with the columns that read it, as bits."""
    rows = (row.split(" ") for row in answers()["spellings"])
    return {spelling: int(mask, 16) for mask, spelling in rows}


def test_the_record_says_where_it_comes_from_and_has_every_line():
    assert answers()["assembler"] == {"12.9": "12.9.86", "13.0": "13.0.88", "13.5": "13.5.37"}
    assert {target for _, _, target in answers()["columns"]} == set(tcemu.targets())
    asked = {form.row for spelling in recorded() for form in find_forms(spelling)}
    assert [row for row in statement_rows() if row not in asked] == []
    assert len(recorded()) > 14_000 and len(answers()["columns"]) > 120


def legal_columns(spelling):
    """Return the columns in which a spelling is legal here, as bits."""
    versions = {target: statement_versions(spelling, target) for target in tcemu.targets()}
    mask = 0
    for number, (_, isa, target) in enumerate(answers()["columns"]):
        held = any(lowest <= version(isa) and (until is None or version(isa) < until) for lowest, until in versions[target])
        mask |= held << number
    return mask


@pytest.mark.parametrize("batch", sample_cases(range(BATCHES), (3,)))
def test_no_disagreement_on_any_target_and_version(batch):
    """What the assembler reads is legal here or a named exception, and it reads all that is legal here."""
    laxer, stricter, seen = [], [], 0
    for spelling in [*recorded()][batch::BATCHES]:
        if not find_forms(spelling):
            continue
        seen += len(answers()["columns"])
        taken, mine = recorded()[spelling], legal_columns(spelling)
        if taken == mine:
            continue
        for number, (assembler, isa, target) in enumerate(answers()["columns"]):
            if mine >> number & 1 and not taken >> number & 1:
                stricter.append((spelling, assembler, isa, target))
            if taken >> number & 1 and not mine >> number & 1 and not exceptions(spelling, assembler, version(isa), target):
                laxer.append((spelling, assembler, isa, target))
    assert laxer == [] and stricter == [], (len(laxer), laxer[:20], len(stricter), stricter[:20])
    assert seen > 100_000


def exceptions(spelling, assembler, isa, target):
    """Return the names of the exceptions that apply."""
    return [name for name, (_, applies) in LAXER.items() if applies(spelling, assembler, isa, target)]


def test_every_exception_is_needed():
    spellings = ("cvt.ftz.f32.bf16", "cp.async.ca.shared::cta.global")
    columns = enumerate(answers()["columns"])
    wrong = [
        (spelling, assembler, version(isa), target)
        for number, (assembler, isa, target) in columns
        for spelling in spellings
        if recorded()[spelling] >> number & 1 and not legal_columns(spelling) >> number & 1
    ]
    assert {name for each in wrong for name in exceptions(*each)} == {*LAXER}


def test_every_instruction_that_runs_has_rows():
    """Names of tensor-core instructions are in the table of `tcemu.engine.isa.syntax_table`."""
    tensor = {"mma", "wmma", "ldmatrix", "stmatrix", "movmatrix", "wgmma", "tcgen05"}
    names = {row.head.partition(".")[0] for row in statement_rows()}
    assert names == {*PREPARE, *ENDINGS, *BRANCHES, "barrier"} - tensor


@pytest.mark.parametrize(
    ("spelling", "target", "isa", "said"),
    [
        ("redux.sync.min.f32", "sm_120", None, "redux.sync.min.f32 needs sm_100a or sm_100f and its family; the target is sm_120"),
        ("cvt.rn.satfinite.e2m1x2.f32", "sm_120", None, "needs sm_100a or sm_120a or .*; the target is sm_120. PTX ISA 9.7.9.21"),
        ("cvt.f32.bf16", "sm_70", None, "needs sm_80 or later; the target is sm_70"),
        ("elect.sync", "sm_80", None, "needs sm_90 or later"),
        ("mapa.u64", "sm_89", None, "needs sm_90 or later"),
        ("add.f32x2", "sm_90a", None, "needs sm_100 or later"),
        ("elect.sync", "sm_90", "7.8", r"on sm_90 needs PTX ISA 8.0 or newer; the version is 7.8"),
        ("shfl.bfly.b32", "sm_80", "7.0", "removed in PTX ISA 6.4"),
        ("ld.global.L1::no_allocate.L2::cache_hint.u32", "sm_75", None, "needs sm_80 or later"),
        ("add.f33", "sm_80", None, "is not supported: it needs u16"),
    ],
)
def test_what_a_target_or_version_lacks_is_named(spelling, target, isa, said):
    with pytest.raises(Unsupported, match=said):
        tcemu.check(spelling, target, isa)


def test_check_takes_statements_and_whole_lines():
    assert str(tcemu.check("@!%p1 redux.sync.add.u32 %r1, %r2, %r3;", "A100")) == "redux.sync.add.u32"
    assert tcemu.check("add.rn.ftz.f32", "V100", "6.0").family == "add"
    assert tcemu.targets("cvt.rn.satfinite.e2m1x2.f32")[-1] == "sm_121a" and tcemu.targets("redux.sync.min.f32", "8.5") == ()
    assert tcemu.targets("no.instruction") == ()


def test_candidates_are_those_that_were_asked(monkeypatch):
    monkeypatch.syspath_prepend(str(ASSEMBLER))
    sys.modules.pop("record_statements", None)
    from record_statements import spellings

    assert [*recorded()] == spellings()
