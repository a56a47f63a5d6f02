"""Ask NVIDIA's assembler which statements of tcgen05 it takes, and keep the answers in tcgen05_answers.json.xz.

    python tests/assembler/record_tcgen05.py PTXAS_13.0 PTXAS_13.5

The assemblers are in the CUDA toolkits 13.0 and 13.5 or in the packages nvidia-cuda-nvcc of these versions. 13.5 is asked about the targets
that 13.0 does not know. A run takes about three minutes on one core.

A question is a kernel with up to 400 statements of one cta_group, since ptxas refuses two in a function. The lines that it names are
faulty; they are left out, and the question is put again until the rest goes through the whole assembler.
"""

import json
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tcgen05_candidates import candidates

ANSWERS = Path(__file__).parent / "tcgen05_answers.json.xz"
HEADER = """.version {isa}
.target {target}
.address_size 64
.visible .entry k() {{
.reg .b32 %r<300>; .reg .b64 %d<8>; .reg .b16 %h; .reg .pred %p; .shared .align 16 .b8 memory[64];
"""
PART = 400
FILLER = "mov.b32 %r0, %r1;"  # behind each statement, since a syntax error may also be reported for the next line
COLUMNS = [
    *(("13.0", "9.0", f"sm_{number}{suffix}") for number in (100, 103, 110) for suffix in ("a", "f", "")),
    *(("13.0", "9.0", target) for target in ("sm_120a", "sm_121f", "sm_90a")),
    *(("13.0", "8.8", target) for target in ("sm_100a", "sm_100f", "sm_103a", "sm_103f")),
    *(("13.0", isa, "sm_100a") for isa in ("8.7", "8.6")),
    *(("13.5", "9.5", target) for target in ("sm_107a", "sm_107f", "sm_107")),
]


def faulty_lines(ptxas: str, isa: str, target: str, statements: list[str]) -> set[int] | None:
    """The indices of the statements that the assembler names; None if it fails without a name."""
    header = HEADER.format(isa=isa, target=target)
    first = header.count("\n") + 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "question.ptx"
        path.write_text(header + "".join(f"{statement};\n{FILLER}\n" for statement in statements) + "ret; }\n")
        done = subprocess.run([ptxas, f"-arch={target}", str(path), "-o", f"{folder}/out"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return set()
    lines = [int(line) - first for line in re.findall(r"line (\d+); (?:error|fatal)", done.stdout + done.stderr)]
    return {line // 2 for line in lines if 0 <= line < 2 * len(statements) and line % 2 == 0} or None


def taken(ptxas: str, isa: str, target: str, statements: list[str]) -> set[str]:
    """The statements that the assembler takes."""
    rest = list(statements)
    while rest:
        faulty = faulty_lines(ptxas, isa, target, rest)
        if faulty is None and len(rest) == 1:
            return set()
        if faulty is None:
            half = len(rest) // 2
            return taken(ptxas, isa, target, rest[:half]) | taken(ptxas, isa, target, rest[half:])
        if not faulty:
            return set(rest)
        rest = [statement for i, statement in enumerate(rest) if i not in faulty]
    return set()


def version(ptxas: str) -> str:
    said = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([\d.]+)", said)
    assert found is not None, said
    return found[1]


def main(*assemblers: str) -> None:
    versions = {name.rpartition(".")[0]: (ptxas, name) for ptxas in assemblers for name in [version(ptxas)]}
    everything = candidates()
    # a statement with both or neither goes with those of cta_group::1; one that mixes is alone, so that it harms no other
    groups = [
        [s for s in everything if wanted(s)]
        for wanted in (lambda s: "group::2" not in s, lambda s: "group::2" in s and "group::1" not in s)
    ]
    alone = [[s] for s in everything if "group::2" in s and "group::1" in s]
    masks = dict.fromkeys(everything, 0)
    for number, (assembler, isa, target) in enumerate(COLUMNS):
        parts = [group[i : i + PART] for group in groups for i in range(0, len(group), PART)] + alone
        found = set().union(*(taken(versions[assembler][0], isa, target, part) for part in parts))
        for statement in found:
            masks[statement] |= 1 << number
        print(f"ISA {isa} {target}: {len(found)} of {len(everything)}", flush=True)
    record = {
        "assembler": {name: full for name, (_, full) in versions.items()},
        "columns": COLUMNS,
        "statements": [f"{mask:x} {statement}" for statement, mask in masks.items()],
    }
    ANSWERS.write_bytes(lzma.compress(json.dumps(record, separators=(",", ":")).encode(), preset=9))
    print(f"{len(everything)} statements, {sum(map(bool, masks.values()))} taken somewhere, {ANSWERS.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
