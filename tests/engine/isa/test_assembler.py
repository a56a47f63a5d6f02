"""The catalogue against NVIDIA's assembler: tests/assembler/answers.json.xz holds what ptxas 12.9, 13.0 and 13.5 said (see record.py)."""

import json
import lzma
import re
import shutil
from collections import Counter
from functools import cache
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import Instruction, spellings
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import instructions, min_version, targets
from tcemu.engine.isa.syntax_table import syntax_rows

NEWEST = {"12.9": "8.8", "13.0": "9.0", "13.5": "9.1"}
LATER = "9.5"  # at which 13.5 was asked about the targets that are newer than PTX ISA 9.1
# targets that ptxas knows and the manual of 9.1 does not name
RENAMED = {"sm_101": "sm_110", "sm_101f": "sm_110f", "sm_101a": "sm_110a"}  # from PTX ISA 9.0 on: 9.7.14.5.15, Target ISA Notes


@cache
def answers():
    return json.loads(lzma.decompress((Path(__file__).parents[2] / "assembler" / "answers.json.xz").read_bytes()))


@cache
def recorded_answers() -> list[tuple[str, str, int]]:
    """Spelling, form of the operands, and a bit for each column that took it."""
    masks = [int(mask, 16) for mask in answers()["masks"]]
    rows = (row.split(" ") for row in answers()["spellings"])
    return [(spelling, form, masks[int(mask)]) for spelling, form, mask in rows]


def twice(spelling: str, word: str) -> bool:
    return spelling.split(".").count(word) > 1


def head(spelling: str) -> str:
    return spelling.split(".")[0]


# where the assembler takes what the manual does not give: name -> (reason, which spellings)
LAXER = {
    "a repeated flag": (
        "the assembler lets .sync and .satfinite stand twice; the syntax blocks have each once",
        lambda s: twice(s, "sync") or twice(s, "satfinite"),
    ),
    "a layout that means nothing": (
        "the assembler ignores .row and .col on instructions whose syntax has no layout (9.7.14.5.15 to .17, 9.7.15.5.2)",
        lambda s: head(s) in ("ldmatrix", "stmatrix", "movmatrix", "wgmma") and re.search(r"\.(row|col)\b", s),
    ),
    "wgmma without .aligned": (
        "the manual calls .aligned mandatory (9.7.15.5.2, 9.7.15.7); the assembler does not ask for it",
        lambda s: head(s) == "wgmma" and ".aligned" not in s,
    ),
    "wmma f64 and sub-byte of other shapes": (
        "the assembler takes .f64, .s4 and .u4 with shapes that no table has (9.7.14.1 gives m8n8k4, m8n8k32); undocumented",
        lambda s: head(s) == "wmma" and ((".f64" in s and ".m8n8k4." not in s) or (re.search(r"\.[su]4\b", s) and ".m8n8k32." not in s)),
    ),
    "wmma b1 of other shapes": (
        "without .popc the assembler takes .xor of .b1 with every shape but m8n8k128, which is the one the manual gives",
        lambda s: s.startswith("wmma.mma.xor.sync.") and ".b1.b1." in s and ".m8n8k128." not in s,
    ),
    "a bit operation that means nothing": (
        "the assembler ignores .and, .or and .xor without .popc on .s4 and .u4; the syntax has them for .b1",
        lambda s: head(s) == "mma" and re.search(r"\.(and|or|xor)\.", s) and re.search(r"\.[su]4\.", s),
    ),
    "a kind that means nothing": (
        "on targets with tcgen05 the assembler ignores its .kind::f16 and .kind::i8 on fp8 mma",
        lambda s: head(s) == "mma" and re.search(r"\.kind::(f16|i8)\b", s),
    ),
    "wmma.load without a type": (
        "ptxas 12.9 takes .f16 to be meant",
        lambda s: s == "wmma.load.a.sync.aligned.row.m16n16k16.shared",
    ),
    "wmma f32 accumulators of the integer shapes": (
        "wmma.load.c and wmma.store.d take .f32 and .f16 with m8n8k32, m8n8k128 and m16n16k8, which have .s32 or .f32 (9.7.14.4.3, .4)",
        lambda s: re.match(r"wmma\.(load\.c|store\.d)\..*\.(m8n8k(32|128)\..*f(16|32)|m16n16k8\..*(f16|s32))$", s),
    ),
}


@cache
def exception(spelling: str) -> str | None:
    return next((name for name, (_, applies) in LAXER.items() if applies(spelling)), None)


def test_the_record_is_large_and_says_where_it_comes_from():
    assert answers()["assembler"] == {"12.9": "12.9.86", "13.0": "13.0.88", "13.5": "13.5.37"}
    assert len({spelling for spelling, _, _ in recorded_answers()}) > 28000
    recorded = {target for _, _, target in answers()["columns"]}
    assert recorded == set(targets()) | set(RENAMED)


def catalogue() -> list[Instruction]:
    """The instructions that record.py asks about; test_tcgen05_spellings.py has the others."""
    return [op for op in syntax_rows() if not op.family.startswith("tcgen05")]


def test_every_spelling_of_the_catalogue_was_asked():
    asked = {spelling for spelling, _, _ in recorded_answers()}
    assert not [s for op in catalogue() for s in spellings(op) if s not in asked]


@cache
def parse_candidates() -> dict[str, Instruction | None]:
    def meaning(spelling: str) -> Instruction | None:
        try:
            return parse(spelling)
        except Unsupported:
            return None

    return {spelling: meaning(spelling) for spelling, _, _ in recorded_answers()}


@cache
def number_candidates() -> tuple[list[Instruction | None], np.ndarray]:
    """The distinct meanings of the recorded spellings, and for each answer the number of its meaning."""
    numbers: dict[Instruction | None, int] = {}
    of_spelling = {spelling: numbers.setdefault(op, len(numbers)) for spelling, op in parse_candidates().items()}
    return list(numbers), np.array([of_spelling[spelling] for spelling, _, _ in recorded_answers()])


def answers_of_column(number: int) -> np.ndarray:
    """For each answer: the column's assembler took the spelling."""
    return np.array([bool(mask >> number & 1) for mask in map(int, answers()["masks"], repeat(16))])[mask_numbers()]


@cache
def mask_numbers() -> np.ndarray:
    return np.array([int(row.rpartition(" ")[2]) for row in answers()["spellings"]])


def version(isa: str) -> tuple[int, ...]:
    return tuple(map(int, isa.split(".")))


def test_no_disagreement_on_any_target():
    """At the newest version of each assembler: what it takes is legal here or a named exception, and it takes all that is legal here."""
    laxer, stricter, used, compared = [], [], Counter(), 0
    ops, of_op = number_candidates()
    for number, (assembler, isa, target) in enumerate(answers()["columns"]):
        if isa not in (NEWEST[assembler], LATER):
            continue
        # under its new name a target came with 9.0, which brought no instruction
        legal = set(instructions(RENAMED[target], isa="9.0") if target in RENAMED else instructions(target, isa=isa))
        mine, taken = np.array([op in legal for op in ops])[of_op], answers_of_column(number)
        compared += len(taken)
        for at in np.flatnonzero(taken & ~mine):
            spelling, form, _ = recorded_answers()[at]
            name = exception(spelling)
            used[name] += 1
            if name is None:
                laxer.append((spelling, form, target, isa))
        stricter += [(*recorded_answers()[at][:2], target, isa) for at in np.flatnonzero(mine & ~taken)]
    assert not laxer, laxer[:20]
    assert not stricter, stricter[:20]
    assert set(used) == set(LAXER), "an exception that nothing needs"
    assert compared > 1_500_000


# where the assembler takes an older version than the manual gives: name -> reason
SOONER = {
    "kind::f8f6f4 with fp8": "the manual gives .kind to PTX ISA 8.7; the assembler takes it with two fp8 types from 8.6 on",
}


def sooner(spelling: str) -> str | None:
    fp8 = all(word in ("f16", "f32", "e4m3", "e5m2") for word in re.findall(r"\.([fe]\d\w*)", spelling))
    return "kind::f8f6f4 with fp8" if ".kind::f8f6f4." in spelling and fp8 else None


def test_no_disagreement_on_versions():
    """At older PTX ISA versions the assembler takes what is legal here, and refuses what came later."""
    columns, differ, used, compared = answers()["columns"], [], set(), 0
    ops, of_op = number_candidates()
    known = np.array([op is not None for op in ops])[of_op]
    for number, (assembler, isa, target) in enumerate(columns):
        if isa in (NEWEST[assembler], LATER):
            continue
        newest = next(i for i, (v, latest, name) in enumerate(columns) if name == target and latest == NEWEST[v])
        of_newest, of_this = answers_of_column(newest), answers_of_column(number)
        asked = of_newest & known  # of older versions
        since = [op and min_version(op, target) for op in ops]
        assert None not in {since[op] for op in np.unique(of_op[asked])}
        legal = np.array([lowest is not None and lowest <= version(isa) for lowest in since])[of_op]
        compared += int(asked.sum())
        for at in np.flatnonzero(asked & (of_this != legal)):
            spelling, taken = recorded_answers()[at][0], of_this[at]
            if taken and sooner(spelling):
                used.add(sooner(spelling))
            else:
                differ.append((spelling, target, isa, taken, since[of_op[at]]))
    assert not differ, (len(differ), differ[:20])
    assert used == set(SOONER)
    assert compared > 200_000


def vector(op: Instruction, operand: str) -> str:
    first = 200 if operand == "a" and op.warps == 4 else 0  # apart from D, which may take up to 128
    letter, count = ("g", op.register_count(operand) // 2) if op.container_bits(operand) == 64 else ("r", op.register_count(operand))
    return "{" + ", ".join(f"%{letter}{first + i}" for i in range(count)) + "}"


def values(op: Instruction, operand: str) -> list[str]:
    """What an operand may be, in the registers of record.py's header: all of the valid selectors and immediates."""
    if operand in ("a", "b", "c", "d", "r") and op.family != "movmatrix":
        return [vector(op, operand)]
    if operand in ("selector_a", "selector_b"):
        threads = op.scaling.thread_ids[operand[-1]]
        return [f"{{{byte}, {thread}}}" for byte in op.scaling.byte_ids for thread in threads]
    if operand in ("f", "sp_sel"):
        return [str(selector) for selector in op.selectors]
    said = {"a_desc": "%d0", "b_desc": "%d1", "p": "[%d0]", "scale_d": "%p0 1", "stride": "%r253 64", "n": "0 7"}
    said |= {"imm_scale_a": "1 -1", "imm_scale_b": "1 -1", "imm_trans_a": "0 1", "imm_trans_b": "0 1"}
    return said.get(operand, "%r250").split(" ")


def statements(op: Instruction) -> list[str]:
    """Statements that together hold every form, and every value of every operand."""
    found = []
    for form in op.operand_forms:
        each = [values(op, operand) for operand in form]
        found += [f"{op} {', '.join(v[i % len(v)] for v in each)};" for i in range(max(map(len, each), default=1))]
    return found


def test_statements_of_every_instruction_parse():
    """What `forms`, `registers`, `selectors`, `byte_ids` and `thread_ids` say makes statements that the grammar takes."""
    everything = [(op, text) for op in catalogue() for text in statements(op)]
    assert len(everything) == 7102
    for op, text in everything:
        assert parse(text) == op and len(parse(text).arguments) in {len(form) for form in op.operand_forms}


@pytest.mark.full
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="no ptxas on PATH")
@pytest.mark.parametrize("target", ["sm_90a", "sm_120a"])
def test_the_assembler_takes_them(monkeypatch, target):
    """Registers, operands and selectors of every instruction, through code generation; for ptxas 13.0 or later."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "assembler"))
    from record import KERNELS, assembled

    texts = [text for op in instructions(target, isa="9.0") if op in catalogue() for text in statements(op)]
    for start in range(0, len(texts), KERNELS):
        part = texts[start : start + KERNELS]
        assert [text for text, taken in zip(part, assembled("ptxas", "9.0", target, part), strict=True) if not taken] == []
