"""Spellings of the manual, of the recorded words, and of people who mistype."""

import random
import time
from collections import Counter

import pytest
from support.manual_examples import EXAMPLES, SLIPS

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import spellings
from tcemu.engine.isa.grammar import parse, split_operands
from tcemu.engine.isa.syntax_table import syntax_rows


@pytest.mark.parametrize(("section", "statement"), EXAMPLES)
def test_examples_of_the_manual(section, statement):
    if statement in SLIPS:
        said, corrected = SLIPS[statement]
        with pytest.raises(Unsupported) as caught:
            parse(statement)
        assert said in str(caught.value)
        statement = corrected
    op = parse(statement)
    assert op == parse(str(op)) == parse(statement.split(" ")[0])
    given = statement.rstrip(";").partition(" ")[2]
    assert ",".join(op.arguments).replace(" ", "") == given.replace(" ", "")
    # wmma's stride and the registers are in the sections of the instruction itself; all others stand in their own
    assert syntax_rows()[op].section == section or section in (
        "9.7.14.4.2",
        "9.7.14.4.4",
        "9.7.14.4.5",
        "9.7.15.6.3",
        "9.7.15.7.1",
        "9.7.15.7.3",
    )


def test_every_slip_is_an_example():
    assert len(EXAMPLES) == 109 and set(SLIPS) <= {statement for _, statement in EXAMPLES}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("movmatrix.sync.aligned.m8n8.trans.b16 d;", "1 operands, but the statement takes d, a. PTX ISA 9.7.14.5.17."),
        ("wgmma.fence.sync.aligned 0;", "1 operands, but the statement takes no operand"),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {a,b,c,d}, x, y, p, 1, 1;", "6 operands, but the statement takes d, a_desc"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {a,b,c,d}, {x,y}, z, p;", "operand a has 2 registers, but takes 4"),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {a,b,c,d}, {x}, {y}, {a,b,c,d};", "operand d has 4 registers, but takes 2"),
        ("ldmatrix.sync.aligned.m8n8.x2.b16 {r0}, [p];", "operand r has 1 registers, but takes 2"),
        ("movmatrix.sync.aligned.m8n8.trans.b16 {d}, a, ;", "3 operands, but the statement takes d, a"),
        ("mma .sync.aligned", "mma: missing qualifier"),
    ],
)
def test_wrong_operands(statement, said):
    with pytest.raises(Unsupported) as caught:
        parse(statement)
    assert said in str(caught.value)


def test_arguments():
    assert split_operands("{a, b}, [c+4], {1, {2}}, d ,e") == ("{a, b}", "[c+4]", "{1, {2}}", "d", "e")
    assert split_operands("}a,b") == ("}a,b",)  # unbalanced: left as it is


FOREIGN = (
    *("ftz", "sat", "global", "trans", "x4", "or", "b16", "kind::f16", "scale_vec::3X", "m16n8k12", "row", "f32", "sp", "xor", "popc"),
    *(
        "",
        "\x00",
        "x" * 5000,
        "m64n20k16",
        "m" + "9" * 4000 + "n8k16",
        "é",
        "ｍ１６ｎ８ｋ１６",
        "\N{ZERO WIDTH SPACE}sync",
        "f32 ",
        "\n",
        "{",
        ";",
        "@p",
    ),
)


def mutants(count: int, seed: int = 2):
    """Legal spellings with one to three qualifiers deleted, swapped, doubled, made foreign or replaced."""
    draw = random.Random(seed)
    legal = [spelling for op in syntax_rows() for spelling in spellings(op)]
    words = sorted({word for spelling in legal for word in spelling.split(".")})
    for _ in range(count):
        parts = draw.choice(legal).split(".")
        for _ in range(draw.choice((1, 1, 2, 3))):
            i, j = draw.randrange(len(parts)), draw.randrange(len(parts))
            change = draw.randrange(5)
            if change == 0 and len(parts) > 1:
                del parts[i]
            elif change == 1:
                parts[i], parts[j] = parts[j], parts[i]
            elif change == 2:
                parts.insert(i, parts[j])
            elif change == 3:
                parts.insert(i, draw.choice(FOREIGN))
            else:
                parts[i] = draw.choice(words)
        yield ".".join(parts)


KINDS = ("unknown instruction", "unknown qualifier", "missing qualifier", "impossible combination")


def hold(count: int) -> Counter:
    """Every mutant parses to an instruction that spells itself, or raises Unsupported with one of the four messages and what would work."""
    found = Counter()
    for text in mutants(count):
        try:
            op = parse(text)
        except Unsupported as error:
            message = str(error)
            kind = [kind for kind in KINDS if f": {kind}" in message]
            assert len(kind) == 1 and len(message) < 2500 and "PTX ISA 9.7.1" in message, (text[:200], message)
            if "nearest legal spelling: " in message:
                nearest = message.split("nearest legal spelling: ")[1].split(" ")[0].removesuffix(".")
                parse(nearest)
            found[kind[0]] += 1
        else:
            assert parse(str(op)) == op
            found["legal"] += 1
    assert min(found[kind] for kind in (*KINDS, "legal")) > count // 100, found
    return found


def test_mutants():
    """A sample, 8,000, of the 200,000 that `pytest -m full` runs."""
    hold(8_000)


@pytest.mark.full
def test_all_mutants():
    started = time.process_time()
    assert sum(hold(200_000).values()) == 200_000
    assert time.process_time() - started < 60


REPEATED = ["mma" + word * 10**5 for word in (".", ".sync", ".f16", ".m16n8k16", ".m1n1k1")]
ODD = ["", " ", ".", "...", ";", "\x00", "é" * 9, "mma", "mma.", ".mma", "a" * 10**6, "mma." * 10**5, "@", "@p ;", "{" * 9999, *REPEATED]


@pytest.mark.parametrize("text", ODD, ids=lambda text: f"{text[:9]!r}-{len(text)}")
def test_odd_texts(text):
    with pytest.raises(Unsupported) as caught:
        parse(text)
    assert len(str(caught.value)) < 3000


LONG = [character * 10**6 for character in "{,; @x."] + ["{" * 10**5 + ", " * 10**5, " " * 10**6 + "x", "x" + " " * 10**6 + "y;"]


@pytest.mark.parametrize("rest", LONG, ids=lambda rest: f"{rest[:2]!r}-{len(rest)}")
def test_long_operands_do_not_hang(rest):
    started = time.process_time()
    try:
        parse(f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {rest}")
    except Unsupported as error:
        assert len(str(error)) < 3000
    else:
        assert set(rest) == {" "}
    assert time.process_time() - started < 5


def test_twenty_thousand_spellings_a_second():
    """Distinct ones, most not in the canonical order."""
    draw = random.Random(1)
    texts = set()
    for op in syntax_rows():
        for spelling in spellings(op) if "sync" in op.slots else ():
            name, _, rest = spelling.partition(".sync")
            words = rest.split(".")[1:]
            for _ in range(14):
                at = draw.randrange(len(words) + 1)
                texts.add(".".join([name, *words[:at], "sync", *words[at:]]))
    started = time.process_time()
    for text in texts:
        parse(text)
    rate = len(texts) / (time.process_time() - started)
    assert len(texts) > 12_000 and rate > 20_000, rate
