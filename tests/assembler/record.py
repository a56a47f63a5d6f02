"""Ask NVIDIA's assembler which candidates it takes, on every target that it knows, and keep the answers in answers.json.xz.

    python tests/assembler/record.py PTXAS_12.9 PTXAS_13.0 PTXAS_13.5

The three come with CUDA toolkits of those versions or with the packages nvidia-cuda-nvcc-cu12 12.9 and nvidia-cuda-nvcc 13.5. 12.9 is the
last that knows sm_70 and sm_72; 13.5 knows PTX ISA 9.1. A run takes about an hour on one core.

Each question is one PTX file with a statement on a line of its own. ptxas reports every faulty line and stops before code generation,
because the last line is faulty on purpose: that its error comes back is the proof that all lines were read. What passes is then assembled
to the end, each statement in a kernel of its own. A run that is broken off goes on where it stopped.
"""

import hashlib
import json
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from candidates import Candidate, candidates

PARTIAL = Path(tempfile.gettempdir()) / "tcemu-record.json"
ANSWERS = Path(__file__).parent / "answers.json.xz"
HEADER = """.version {isa}
.target {target}
.address_size 64
.visible .entry k() {{
.reg .b32 %r<300>; .reg .b64 %g<300>; .reg .b64 %d<4>; .reg .pred %p<2>;
"""
PART = 4000  # statements in one question
KERNELS = 128  # statements in one whole assembly
SENTINEL = "mma.sync.aligned.sentinel;"
# errors that speak of the operands, not of the spelling; a line with no other error would be one that we asked wrongly
OPERAND_ERRORS = re.compile(r"vector size|Arguments mismatch|Vector of size|Vector operand")
TARGETS = {
    "12.9": "sm_70 sm_72 sm_101 sm_101a sm_101f",
    "13.0": "sm_75 sm_80 sm_86 sm_87 sm_88 sm_89 sm_90 sm_90a sm_100 sm_100a sm_100f sm_103 sm_103a sm_103f sm_110 sm_110a sm_110f "
    "sm_120 sm_120a sm_120f sm_121 sm_121a sm_121f",
}
TARGETS["13.5"] = TARGETS["13.0"]
NEWEST = {"12.9": "8.8", "13.0": "9.0", "13.5": "9.1"}
# the versions at which something changes, asked with 12.9 (to 8.8) on the targets that have most
VERSIONS = ("6.0", "6.1", "6.2", "6.3", "6.4", "6.5", "7.0", "7.1", "7.7", "7.8", "8.0", "8.1", "8.2", "8.3", "8.4", "8.5", "8.6", "8.7")
HISTORY = ("sm_70", "sm_72", "sm_89", "sm_90", "sm_75", "sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_120f", "sm_121a")


def ask(ptxas: str, isa: str, target: str, statements: list[str]) -> list[list[str]]:
    """The errors of each statement; none if the assembler takes it."""
    header = HEADER.format(isa=isa, target=target)
    first = header.count("\n") + 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "question.ptx"
        path.write_text(header + "\n".join([*statements, SENTINEL]) + "\nret; }\n")
        done = subprocess.run([ptxas, f"-arch={target}", str(path), "-o", f"{folder}/out"], capture_output=True, text=True, check=False)
    errors: list[list[str]] = [[] for _ in range(len(statements) + 1)]
    for line in (done.stdout + done.stderr).splitlines():
        found = re.search(r"line (\d+); (?:error|fatal) *: (.*)", line)
        if found and 0 <= int(found[1]) - first < len(errors):
            errors[int(found[1]) - first].append(found[2])
        elif found and int(found[1]) < first:  # the version is too old for the target
            return [[found[2]]] * len(statements)
    if errors.pop():
        return errors
    if done.returncode < 0 and len(statements) > 1:  # some statements crash the assembler: find them by halves
        half = len(statements) // 2
        return ask(ptxas, isa, target, statements[:half]) + ask(ptxas, isa, target, statements[half:])
    if done.returncode < 0:
        return [["the assembler crashes"]]
    raise RuntimeError(f"{ptxas} {target} ISA {isa}: the last line was not read: {(done.stdout + done.stderr)[-400:]}")


def assemble_statements(ptxas: str, isa: str, target: str, statements: list[str]) -> list[bool]:
    """Whether each statement, in a kernel of its own, goes through the whole assembler. Some are refused only after the first reading."""
    if not statements:
        return []
    register_lines = HEADER.split("\n", 4)[4].strip().format()
    kernels = [f".visible .entry k{i}() {{ {register_lines}\n{text}\nret; }}" for i, text in enumerate(statements)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.ptx"
        path.write_text(f".version {isa}\n.target {target}\n.address_size 64\n" + "\n".join(kernels) + "\n")
        command = [ptxas, f"-arch={target}", str(path), "-o", f"{folder}/out"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return [True] * len(statements)
    lines = re.findall(r"kernels.ptx, line (\d+); (?:error|fatal)", done.stdout + done.stderr)
    faulty = {(int(line) - 4) // 3 for line in lines}
    if faulty:
        rest = iter(assemble_statements(ptxas, isa, target, [text for i, text in enumerate(statements) if i not in faulty]))
        return [i not in faulty and next(rest) for i in range(len(statements))]
    if len(statements) == 1:
        return [False]
    half = len(statements) // 2
    return assemble_statements(ptxas, isa, target, statements[:half]) + assemble_statements(ptxas, isa, target, statements[half:])


def column(ptxas: str, isa: str, target: str, asked: list[Candidate], *, whole: bool = True) -> tuple[list[bool], list[int]]:
    """Which candidates the assembler takes, with `whole` through code generation; and those refused for their operands only."""
    statements = [(i, f"{c.spelling} {operands};") for i, c in enumerate(asked) for operands in c.operands]
    read: dict[int, str] = {}
    errors: list[list[list[str]]] = [[] for _ in asked]
    for start in range(0, len(statements), PART):
        part = statements[start : start + PART]
        for (i, text), found in zip(part, ask(ptxas, isa, target, [text for _, text in part]), strict=True):
            if not found:
                read.setdefault(i, text)
            errors[i].append(found)
    doubted = [i for i in range(len(asked)) if i not in read and all(all(map(OPERAND_ERRORS.search, said)) for said in errors[i])]
    taken = [i in read for i in range(len(asked))]
    texts = list(read.items())
    for start in range(0, len(texts) if whole else 0, KERNELS):
        part = texts[start : start + KERNELS]
        for (i, _), yes in zip(part, assemble_statements(ptxas, isa, target, [text for _, text in part]), strict=True):
            taken[i] = yes
    return taken, doubted


def settle(ptxas: str, isa: str, target: str, doubtful: list[Candidate], everything: list[Candidate]) -> list[str]:
    """Those of the doubtful that the assembler takes with some operand list of another spelling of the same instruction."""
    lists: dict[str, set[str]] = {}
    for c in everything:
        lists.setdefault(c.spelling.split(".")[0], set()).update(c.operands)
    taken = []
    for c in doubtful:
        statements = [f"{c.spelling} {operands};" for operands in sorted(lists[c.spelling.split(".")[0]])]
        taken += [text for text, errors in zip(statements, ask(ptxas, isa, target, statements), strict=True) if not errors]
    return taken


def main(paths: list[str]) -> None:
    versions = {}
    for path in paths:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
        versions[re.search(r"release (\d+\.\d+)", said)[1]] = path, re.search(r"V([\d.]+)", said)[1]
    everything = candidates()
    questions = [(v, NEWEST[v], target) for v in TARGETS for target in TARGETS[v].split()]
    questions += [("12.9", isa, target) for target in HISTORY for isa in VERSIONS]
    questions += [("13.0", isa, target) for target in ("sm_103a", "sm_110a", "sm_110f") for isa in ("8.6", "8.7", "8.8")]
    questions += [("13.5", "9.5", target) for target in ("sm_107", "sm_107a", "sm_107f")]  # newer than PTX ISA 9.3
    questions += [("13.5", "9.0", target) for target in ("sm_90a", "sm_120a", "sm_120f", "sm_100a")]
    # a run that was broken off goes on where it stopped, as long as the candidates are the same
    key = hashlib.sha256(repr([(c.spelling, c.form, c.operands) for c in everything]).encode()).hexdigest()
    columns, masks, doubtful = [], [0] * len(everything), set()
    if PARTIAL.exists():
        kept = json.loads(PARTIAL.read_text())
        if kept["key"] == key:
            columns, masks, doubtful = kept["columns"], kept["masks"], set(kept["doubtful"])
    for version, isa, target in questions:
        if [version, isa, target] in columns:
            continue
        number = len(columns)
        # an older version is asked only about what the newest takes, and only whether it can be read
        newest = (isa == NEWEST[version] and target in TARGETS[version].split()) or isa == "9.5"
        latest = [i for i, (v, latest, name) in enumerate(columns) if name == target and latest == NEWEST[v] and v != "13.5"]
        before = None if newest else latest[0]
        chosen = [i for i in range(len(everything)) if before is None or masks[i] >> before & 1]
        taken, doubted = column(versions[version][0], isa, target, [everything[i] for i in chosen], whole=newest)
        for i, yes in zip(chosen, taken, strict=True):
            masks[i] |= yes << number
        doubtful |= {chosen[i] for i in doubted} if newest else set()
        columns.append([version, isa, target])
        PARTIAL.write_text(json.dumps({"key": key, "columns": columns, "masks": masks, "doubtful": sorted(doubtful)}))
        print(f"{version} ISA {isa} {target}: {sum(taken)} of {len(chosen)}", flush=True)
    distinct = sorted(set(masks))
    record = {
        "assembler": {version: full for version, (_, full) in versions.items()},
        "columns": columns,
        "masks": [f"{mask:x}" for mask in distinct],
        "spellings": [f"{c.spelling} {c.form} {distinct.index(mask)}" for c, mask in zip(everything, masks, strict=True)],
    }
    ANSWERS.write_bytes(lzma.compress(json.dumps(record, separators=(",", ":")).encode(), preset=9))
    print(
        f"{len(everything)} candidates, {sum(map(bool, masks))} taken somewhere, {len(distinct)} patterns, {ANSWERS.stat().st_size} bytes"
    )
    for target in ("sm_90a", "sm_120a"):
        taken = settle(versions["13.5"][0], NEWEST["13.5"], target, [everything[i] for i in sorted(doubtful)], everything)
        print(
            f"{len(doubtful)} refused for their operands only; with any operands of their instruction {target} takes {len(taken)}",
            *taken,
            sep="\n",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
