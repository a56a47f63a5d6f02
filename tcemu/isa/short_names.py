"""Short names of common instructions: "f16", "e4m3 wgmma", "bf16 sparse", "nvf4", derived from the table of instructions.

A name is the format that A and B have, or a kind with block scales; then "wgmma" or "wmma" for another family than mma; then "sparse". It
means the instruction with the largest shape of those that the first target from sm_80 on has which has any, with f32 sums (f64 for f64,
s32 for integers), A row-major and B column-major, and no further qualifier.
"""

from difflib import get_close_matches
from functools import cache
from re import findall, split

from tcemu.formats import F32, F64, S32, Format
from tcemu.isa.instructions import DEFAULT_ROUNDING, Instruction
from tcemu.isa.syntax import syntax_rows

SCALED: dict[tuple, str] = {  # kind, format, scale_vec, format of the scales -> the name
    ("mxf8f6f4", "e4m3", 1, "ue8m0"): "mxf8", ("mxf4", "e2m1", 2, "ue8m0"): "mxf4", ("mxf4nvf4", "e2m1", 4, "ue4m3"): "nvf4",
}  # fmt: skip
FAMILIES = {"mma": ("mma", "mma.sp"), "wgmma": ("wgmma", "wgmma.sp"), "wmma": ("wmma.mma", None)}  # dense, sparse
ALSO = {  # what others call a format or a kind
    "fp16": "f16", "half": "f16", "bfloat16": "bf16", "fp64": "f64", "int8": "s8", "uint8": "u8", "int4": "s4", "uint4": "u4",
    "mxfp8": "mxf8", "mxfp4": "mxf4", "nvfp4": "nvf4",
}  # fmt: skip
AFTER = ("wgmma", "wmma", "sparse", "xor", "and")  # the words that follow the format, in their order
OLDEST = 80  # the tensor cores of sm_80 brought the shapes that are usual today


@cache
def short_names() -> dict[str, Instruction]:
    """Every short name, as "e4m3 wgmma sparse", and the instruction that it means."""
    found: dict[str, list[Instruction]] = {}
    for op in syntax_rows():
        if op.k and (name := _name(op)):
            found.setdefault(name, []).append(op)
    return {name: _commonest(found[name]) for name in sorted(found, key=lambda name: (name.split()[1:] != [], name))}


def by_short_name(text: str) -> Instruction | None:
    """The instruction that a short name means, its words in any order and in upper or lower case; None if it is no such name."""
    if len(text) > 40:
        return None
    words = [ALSO.get(word, word) for word in split(r"[\s-]+", text.strip().lower()) if word != "mma"]
    return short_names().get(" ".join(sorted(words, key=lambda word: AFTER.index(word) if word in AFTER else -1)))


def near_short_names(text: str) -> list[str]:
    """The short names that are nearest to a text that is none."""
    asked = " ".join(text.lower()[:40].split())
    begun = [name for name in short_names() if asked and name.startswith(f"{asked} ")]
    return sorted(begun, key=len)[:3] or get_close_matches(asked, (*short_names(), *ALSO), n=3, cutoff=0.6)


def _name(op: Instruction) -> str:
    """The short name that an instruction might have: without regard to its shape; "" if none."""
    family = next((family for family, both in FAMILIES.items() if op.family in both), None)
    plain = op.a == op.b and not op.satfinite and op.rounding in (None, DEFAULT_ROUNDING)
    plain = plain and (op.alayout, op.blayout) in ((None, None), ("row", "col"))
    if family is None or not plain or op.a is None or op.d != _sums(op.a) or op.c not in (None, op.d):
        return ""
    first = SCALED.get((op.kind, op.a.name, op.scale_vec, op.stype.name), "") if op.stype else op.a.name
    words = [first, None if family == "mma" else family, "sparse" if op.sparse else None, op.bit_op]
    return " ".join(word for word in words if word) if first else ""


def _sums(fmt: Format) -> Format:
    return S32 if fmt.is_integer or fmt.bits == 1 else F64 if fmt == F64 else F32


def _commonest(ops: list[Instruction]) -> Instruction:
    """The largest of those that the first target has; of the same size the one nearest to a square, and with the fewest qualifiers."""
    since = {op: min(max(OLDEST, *map(int, findall(r"\d+", target))) for target, _ in syntax_rows()[op].needs) for op in ops}
    there = [op for op in ops if since[op] == min(since.values())]
    return max(there, key=lambda op: (op.m * op.n * op.k, min(op.m, op.n), op.kind is None, not op.ordered))
