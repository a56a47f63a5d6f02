"""PTX files with mistakes. Each mutation of a text follows from a seed, so that a failing file can be made again."""

import random
import re
from collections.abc import Callable

WORD = re.compile(r"[%$\w.:]+|[^\s\w]")
PARTS = (
    "f32",
    "f64",
    "b8",
    "u64",
    "s16",
    "pred",
    "rn",
    "sat",
    "ftz",
    "v4",
    "shared",
    "param",
    "wide",
    "x",
    "",
    "sync",
    "m16n8k16",
    "approx",
)
MARKS = "{}[]()<>,;:+-*/%&|^~!?=@.\"'\\\0\t\n #$_0xF9é"
NUMBERS = (
    "0",
    "1",
    "-1",
    "3",
    "31",
    "33",
    "255",
    "4096",
    "65537",
    "0x7fffffff",
    "4294967296",
    "-9223372036854775808",
    "0f7FC00000",
    "1e400",
)
OPCODES = (
    "add.s32",
    "mov.b64",
    "ld.global.u32",
    "st.shared.v4.f32",
    "bar.sync",
    "bra",
    "ret",
    "mma.sync",
    "cvt.f32",
    "call",
    "exit",
    "trap",
)


def _line(text: str, pick: random.Random, change: Callable[[list[str], int], None]) -> str:
    lines = text.split("\n")
    change(lines, pick.randrange(len(lines)))
    return "\n".join(lines)


def _word(text: str, pick: random.Random, change: Callable[[str], str], pattern: re.Pattern[str] = WORD) -> str:
    """Change one match of the pattern."""
    found = [match for match in pattern.finditer(text) if not match[0].isspace()]
    if not found:
        return text
    match = pick.choice(found)
    return text[: match.start()] + change(match[0]) + text[match.end() :]


def a_character(text: str, pick: random.Random) -> str:
    """Drop, insert or replace one character."""
    at, how = pick.randrange(len(text)), pick.randrange(3)
    return text[:at] + ("" if how == 0 else pick.choice(MARKS)) + text[at + (how != 1) :]


def a_token(text: str, pick: random.Random) -> str:
    """Drop, double or replace one token."""
    other = pick.choice(WORD.findall(text))
    return _word(text, pick, lambda word: pick.choice(("", f"{word} {word}", other)))


def a_line(text: str, pick: random.Random) -> str:
    """Drop or double one line, or swap two."""
    how = pick.randrange(3)

    def change(lines: list[str], at: int) -> None:
        if how == 2:
            other = pick.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at : at + 1] = [lines[at]] * (2 * how)

    return _line(text, pick, change)


def a_number(text: str, pick: random.Random) -> str:
    """Replace one number."""
    return _word(text, pick, lambda _: pick.choice(NUMBERS), re.compile(r"(?<![\w$%.])-?\d\w*"))


def a_register(text: str, pick: random.Random) -> str:
    """Replace one use of a register by another register."""
    names = re.findall(r"%\w+", text) or ["%r1"]
    return _word(text, pick, lambda _: pick.choice(names), re.compile(r"%\w+"))


def an_opcode(text: str, pick: random.Random) -> str:
    """Replace, drop or insert one qualifier of an opcode, or replace the opcode."""

    def change(opcode: str) -> str:
        parts = opcode.split(".")
        at, how = pick.randrange(len(parts)), pick.randrange(4)
        if how == 3:
            return pick.choice(OPCODES)
        parts[at : at + (how != 2)] = [] if how == 0 else [pick.choice(PARTS)]
        return ".".join(parts)

    return _word(text, pick, change, re.compile(r"(?m)(?<=^    )[a-z][\w.:]+|(?<=^\t)[a-z][\w.:]+"))


OPERANDS = (
    "%r1", "{%r1}", "{%r1, %r2}", "{%rd1, _}", "%laneid", "%clock", "%clock64", "%tid.x", "%pm0", "_", "_|_", "%r1|%p1", "1.5", "-7",
    "0f3F800000", "!%p1", "[%rd1]", "[%r1+4]", "[%laneid]", "[4096]", "[%rd1, {%r1, %clock}]", "%rd1", "%p1", "%f1", "{{%r1}, %r2}",
)  # fmt: skip


def an_operand(text: str, pick: random.Random) -> str:
    """Replace one operand of an instruction, also of a call, by one of any class."""

    def change(operand: str) -> str:
        return pick.choice((*OPERANDS, pick.choice(re.findall(r"(?<=[ ,(])[%\w$.]+(?=[,;)])", text) or ["x"])))

    return _word(text, pick, change, re.compile(r"(?m)(?<=[ \t,(])(?:[%\w$.!-]+|\{[^{}\n;]*\}|\[[^\[\]\n;]*\])(?=\s*[,;)])"))


def the_end(text: str, pick: random.Random) -> str:
    """Truncate the text."""
    return text[: pick.randrange(len(text))]


KINDS = (a_character, a_token, a_line, a_number, a_register, an_opcode, an_opcode, a_register, an_operand, an_operand, an_operand, the_end)


def mutate(text: str, seed: int) -> str:
    """Return the text with one to three mistakes, which the seed chooses."""
    pick = random.Random(seed)
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        text = pick.choice(KINDS)(text, pick) or "."
    return text
