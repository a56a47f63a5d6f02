"""Ask NVIDIA's assembler about statements outside the tensor-core families, and about operands of every class.

    python tests/assembler/record_statements.py PTXAS_12.9 PTXAS_13.0 PTXAS_13.5

The three come with CUDA toolkits of those versions or with the packages nvidia-cuda-nvcc-cu12 12.9 and nvidia-cuda-nvcc 13.5.
statement_answers.json.xz has which spellings the assembler reads on each target and version, operand_answers.json.xz which operands 13.0
reads. Both are answers of the assembler's reader: ptxas stops before code generation, because the last line is faulty on purpose. A run
takes about fifteen minutes on one core.
"""

import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import operand_candidates
import statement_candidates

FOLDER = Path(__file__).parent
STATEMENTS, OPERANDS = FOLDER / "statement_answers.json.xz", FOLDER / "operand_answers.json.xz"
SENTINEL = "mma.sync.aligned.sentinel;"
PART, MUTANT_PART = 3000, 600  # statements in one question; a fatal error, which most bases have some of, costs another question
NEWEST = {"12.9": "8.8", "13.0": "9.0", "13.5": "9.1"}
TARGETS = {
    "12.9": "sm_70 sm_72 sm_75 sm_80 sm_86 sm_87 sm_89 sm_90 sm_90a sm_100 sm_100f sm_100a sm_103a sm_120 sm_120f sm_120a",
    "13.0": "sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_90a sm_100 sm_100f sm_100a sm_103 sm_103f sm_103a sm_110 sm_110f sm_110a sm_120 "
    "sm_120f sm_120a sm_121 sm_121f sm_121a",
}
TARGETS["13.5"] = TARGETS["13.0"]
VERSIONS = [
    "6.0",
    "6.2",
    "6.3",
    "6.4",
    "6.5",
    "7.0",
    "7.1",
    "7.2",
    "7.3",
    "7.4",
    "7.5",
    "7.6",
    "7.7",
    "7.8",
    "8.0",
    "8.1",
    "8.2",
    "8.3",
    "8.4",
    "8.5",
    "8.6",
    "8.7",
]  # asked with 12.9
HISTORY = {"sm_70": "6.0", "sm_80": "7.0", "sm_90": "7.8", "sm_90a": "8.0", "sm_100a": "8.6", "sm_120a": "8.7"}  # with the first version


def version(text: str) -> tuple[int, ...]:
    """A version as numbers."""
    return tuple(map(int, text.split(".")))


def ask(ptxas: str, target: str, head: str, statements: Sequence[str], end: str) -> list[bool]:
    """Whether the assembler reads each statement. Some errors are fatal: the rest is then asked again."""
    if not statements:
        return []
    first = head.count("\n") + 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "question.ptx"
        path.write_text(head + "\n".join([*statements, SENTINEL]) + end)
        done = subprocess.run([ptxas, f"-arch={target}", str(path), "-o", f"{folder}/out"], capture_output=True, text=True, check=False)
    text = done.stdout + done.stderr
    faulty = {int(line) - first for line in re.findall(r"line (\d+); (?:error|fatal)", text)}
    if min(faulty, default=0) < 0:
        raise RuntimeError(f"{ptxas} {target}: the head is faulty: {text[:400]}")
    if len(statements) in faulty:
        return [at not in faulty for at in range(len(statements))]
    stops = [int(line) - first for line in re.findall(r"line (\d+); (?:fatal|error *: (?:Parsing|syntax))", text)]
    if stops:
        at = stops[0]
        return [i not in faulty for i in range(at)] + [False] + ask(ptxas, target, head, statements[at + 1 :], end)
    if len(statements) == 1:
        return [False]
    half = len(statements) // 2
    return ask(ptxas, target, head, statements[:half], end) + ask(ptxas, target, head, statements[half:], end)


def ask_all(ptxas: str, target: str, head: str, statements: Sequence[str], end: str, part: int = PART) -> list[bool]:
    """Whether the assembler reads each of many statements."""
    return [answer for at in range(0, len(statements), part) for answer in ask(ptxas, target, head, statements[at : at + part], end)]


def spellings() -> list[str]:
    """Every spelling to ask about once, in a fixed order."""
    rows = statement_candidates.statement_rows()
    found = [spelling for row in rows for spelling in statement_candidates.spellings(row)]
    return list(dict.fromkeys([*found, *(spelling for row in rows for spelling in statement_candidates.around(row))]))


def record_statements(paths: dict[str, str]) -> dict[str, object]:
    """The answers to all spellings in all columns."""
    asked = spellings()
    texts = [(i, f"{spelling} {text};") for i, spelling in enumerate(asked) for text in statement_candidates.operands(spelling)]
    columns = [(name, NEWEST[name], target) for name in TARGETS for target in TARGETS[name].split()]
    columns += [("12.9", isa, target) for target, least in HISTORY.items() for isa in VERSIONS if version(isa) >= version(least)]
    columns += [("13.5", "9.5", target) for target in ("sm_107", "sm_107f", "sm_107a")]  # newer than PTX ISA 9.3
    masks = [0] * len(asked)
    for number, (name, isa, target) in enumerate(columns):
        wide = statement_candidates.WIDE if version(isa) >= (8, 3) else ""
        head = statement_candidates.HEADER.format(isa=isa, target=target, wide=wide)
        answers = ask_all(paths[name], target, head, [text for _, text in texts], operand_candidates.ENTRY_END)
        for (i, _), taken in zip(texts, answers, strict=True):
            masks[i] |= taken << number
        print(f"{name} ISA {isa} {target}: {sum(mask >> number & 1 for mask in masks)} of {len(asked)}", flush=True)
    return {"columns": columns, "spellings": [f"{mask:x} {spelling}" for mask, spelling in zip(masks, asked, strict=True)]}


def record_operands(ptxas: str) -> dict[str, object]:
    """Which statements with an operand of another class are read, as a string of 0 and 1 for each base that is read."""
    found = []
    for target, wanted in (("sm_100a", False), ("sm_90a", True)):
        bases = [base for base in operand_candidates.bases() if base[0].startswith("wgmma") == wanted]
        head = operand_candidates.HEADER.format(target=target) + operand_candidates.ENTRY.format(number=0)
        legal = ask_all(ptxas, target, head, [f"{spelling} {text};" for spelling, text in bases], operand_candidates.ENTRY_END)
        bases = [base for base, taken in zip(bases, legal, strict=True) if taken]
        texts = [text for base in bases for text in operand_candidates.mutants(*base)]
        answers = iter(ask_all(ptxas, target, head, texts, operand_candidates.ENTRY_END, MUTANT_PART))
        for spelling, text in bases:
            bits = "".join(str(int(next(answers))) for _ in operand_candidates.mutants(spelling, text))
            found.append(f"{target} {spelling} | {text} | {bits}")
        print(f"{target}: {len(bases)} statements, {len(texts)} mutants", flush=True)
    return {"isa": "9.0", "bases": found}


def main(paths: list[str]) -> None:
    """Record both files."""
    names, full = {}, {}
    for path in paths:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        name = re.search(r"release (\d+\.\d+)", said)[1]
        names[name], full[name] = path, re.search(r"V([\d.]+)", said)[1]
    for path, record in ((OPERANDS, lambda: record_operands(names["13.0"])), (STATEMENTS, lambda: record_statements(names))):
        text = json.dumps({"assembler": full, **record()}, separators=(",", ":"))
        path.write_bytes(lzma.compress(text.encode(), preset=9))
        print(f"{path.name}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
