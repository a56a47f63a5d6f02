"""Statements with an operand of every class in each position, to ask the assembler about.

Bases are the statements of `statement_candidates` that have no more qualifiers than they need, one for each type, and some statements of
tensor cores. `REPLACEMENTS` has the classes of operands.
"""

from collections.abc import Iterator
from functools import cache

from candidates import operand_forms
from statement_candidates import operands

from tcemu.engine.isa.statement_table import TYPE_NAME, StatementRow, statement_rows

REPLACEMENTS = {
    "predicate": "%p5", "negated predicate": "!%p5", "b16": "%h5", "b32": "%r5", "b64": "%d5", "f32": "%f5", "f64": "%e5", "u32": "%u5",
    "s32": "%s5", "u16": "%v5", "u64": "%w5", "f16": "%hf5", "f16x2": "%hx5", "integer": "1", "negative": "-1", "large": "0x1FFFFFFFF",
    "float": "1.5", "f32 bits": "0f3F800000", "f64 bits": "0d3FF0000000000000", "special": "%tid.x", "lane": "%laneid", "clock": "%clock64",
    "variable": "gvar", "variable with offset": "gvar+4", "shared variable": "svar", "parameter": "prm", "address": "[%d5]",
    "absolute address": "[16]", "address with coordinates": "[%d5, {%r5}]", "vector of 1": "{%r5}", "vector of 2": "{%r5, %r6}",
    "vector of 4": "{%r5, %r6, %r7, %r4}", "vector of halves": "{%h5, %h6}", "pair": "%r5|%p5", "predicates": "%p5|%p6", "discarded": "_",
    "label": "L1",
}  # fmt: skip
HEADER = """.version 9.0
.target {target}
.address_size 64
.global .align 128 .b8 gvar[256]; .const .align 16 .b8 cvar[256]; .func fn() {{ ret; }}
"""
ENTRY = """.visible .entry k{number}(.param .align 16 .b8 prm[64]) {{
.param .align 16 .b8 prm2[64]; .reg .pred %p<8>; .reg .b8 %c<4>; .reg .b16 %h<12>; .reg .b32 %r<32>; .reg .b64 %d<12>; .reg .b64 %g<8>;
.reg .f32 %f<8>; .reg .f64 %e<8>; .reg .u32 %u<8>; .reg .s32 %s<8>; .reg .u16 %v<8>; .reg .u64 %w<8>; .reg .f16 %hf<8>; .reg .f16x2 %hx<8>;
.reg .b128 %q<4>; .shared .align 128 .b8 svar[256]; .local .align 16 .b8 lvar[256]; T: .branchtargets L1;
"""
ENTRY_END = "\nL1: ret; }\n"
TENSOR = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64",
    "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32", "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32",
    "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32", "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16",
    "wmma.store.d.sync.aligned.row.m16n16k16.global.f32", "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
    "stmatrix.sync.aligned.m8n8.x2.shared.b16", "movmatrix.sync.aligned.m8n8.trans.b16",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", "wgmma.fence.sync.aligned", "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned",
)  # fmt: skip


LIKE_OTHERS = ("s16", "u32", "s64", "s8", "b8", "s16x2", "bf16x2")  # types whose operands are those of u16, s32, u64, u8, u16x2 and f16x2


MODES = ("L2::cache_hint", "parity", "multicast::cluster", "cp_mask", "ballot", "popc")  # qualifiers that change the operands


def base_spellings(row: StatementRow) -> Iterator[str]:
    """The spellings of a line with no more qualifiers than it needs: one for each choice of its types and of its modes."""
    least = [slot.choices[0] if slot.required else "" for slot in row.slots]
    yield ".".join([row.head, *filter(None, least)])
    for i, slot in enumerate(row.slots):
        for choice in slot.choices:
            if (choice not in LIKE_OTHERS and TYPE_NAME.fullmatch(choice)) or choice in (
                "L2::cache_hint",
                "parity",
                "multicast::cluster",
                "cp_mask",
                "ballot",
                "popc",
            ):
                yield ".".join([row.head, *filter(None, [*least[:i], choice, *least[i + 1 :]])])


@cache
def bases() -> tuple[tuple[str, str], ...]:
    """Opcodes, each with a list of operands that may be right."""
    spellings = dict.fromkeys(spelling for row in statement_rows() for spelling in base_spellings(row))
    found = [(spelling, text) for spelling in spellings for text in operands(spelling)]
    found += [(spelling, text) for spelling in TENSOR for texts in operand_forms(spelling).values() for text in texts]
    return tuple(found)


def split(text: str) -> list[str]:
    """The operands of a list, split at the commas outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[(") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts] if text else []


@cache
def _with_discards() -> frozenset[str]:
    """The first spelling of each line: `_` stands in these alone, since ptxas stops at each that it does not take."""
    return frozenset(next(base_spellings(row)) for row in statement_rows()) | frozenset(TENSOR)


def mutants(spelling: str, text: str) -> Iterator[str]:
    """The statement, and the statement with each class of operands in each position, and without each operand."""
    given = split(text)
    yield f"{spelling} {text};"
    for at in range(len(given)):
        for other in REPLACEMENTS.values():
            if other == "_" and spelling not in _with_discards():
                continue
            yield f"{spelling} {', '.join([*given[:at], other, *given[at + 1 :]])};"
        yield f"{spelling} {', '.join(given[:at] + given[at + 1 :])};"
    yield f"{spelling} {', '.join([*given, '%r5'])};"
