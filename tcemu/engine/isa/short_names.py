"""Short names of common instructions: "f16", "e4m3 wgmma", "bf16 sparse", "f16 f16acc", derived from the table of instructions.

A name is the format of A and B, or a kind with block scales; then "wgmma", "tcgen05" or "wmma" for families other than mma; then "sparse";
then "f16acc" for sums in f16; then "xor" or "and" for b1. It means the instruction with the largest shape on the first target, from sm_80
on, that has such an instruction. Without "f16acc" the instruction accumulates in f32 (f64 for f64, s32 for integers). A is row-major, B is
column-major, and no optional qualifier is set.

Older targets have smaller shapes. `tcemu.engine.isa.legality.resolve_op` chooses among the instructions of a name for a target.
"""

from difflib import get_close_matches
from functools import cache
from re import findall, split

from tcemu.engine.formats.number_formats import F16, F32, F64, S32, Format
from tcemu.engine.isa.families import DEFAULT_ROUNDING, Instruction, MatrixMultiply, Mma, Wmma
from tcemu.engine.isa.syntax_table import syntax_row, syntax_rows
from tcemu.engine.isa.tcgen05 import usual_products

SCALED_NAMES: dict[tuple, str] = {  # names by kind, format, scales per row and format of the scales
    ("mxf8f6f4", "e4m3", 1, "ue8m0"): "mxf8", ("mxf4", "e2m1", 2, "ue8m0"): "mxf4", ("mxf4nvf4", "e2m1", 4, "ue4m3"): "nvf4",
}  # fmt: skip
FAMILY_WORDS = {  # dense and sparse family by word
    "mma": ("mma", "mma.sp"), "wgmma": ("wgmma", "wgmma.sp"), "tcgen05": ("tcgen05.mma", "tcgen05.mma.sp"), "wmma": ("wmma.mma", None),
}  # fmt: skip
ALIASES = {  # other common names of formats and kinds: those of papers, and the dtypes of JAX, NumPy and PyTorch
    "fp16": "f16", "half": "f16", "float16": "f16", "bfloat16": "bf16", "tfloat32": "tf32", "tensorfloat32": "tf32",
    "fp64": "f64", "double": "f64", "float64": "f64", "int8": "s8", "uint8": "u8", "int4": "s4", "uint4": "u4", "int1": "b1",
    "e4m3fn": "e4m3", "float8_e4m3": "e4m3", "float8_e4m3fn": "e4m3", "fp8_e4m3": "e4m3", "float8_e5m2": "e5m2", "fp8_e5m2": "e5m2",
    "e3m2fn": "e3m2", "float6_e3m2fn": "e3m2", "fp6_e3m2": "e3m2", "e2m3fn": "e2m3", "float6_e2m3fn": "e2m3", "fp6_e2m3": "e2m3",
    "e2m1fn": "e2m1", "float4_e2m1fn": "e2m1", "float4_e2m1fn_x2": "e2m1", "fp4_e2m1": "e2m1",
    "mxfp8": "mxf8", "mxfp4": "mxf4", "nvfp4": "nvf4",
}  # fmt: skip
NO_SHORT_NAMES = {  # other words that people try, with what to say of them
    **dict.fromkeys(("fp8", "float8", "f8"), "is two formats, e4m3 and e5m2"),
    **dict.fromkeys(("fp6", "float6", "f6", "mxfp6"), "is two formats, e3m2 and e2m3"),
    **dict.fromkeys(("fp4", "float4", "f4"), "is the format e2m1, and mxf4 and nvf4 with block scales"),
    **dict.fromkeys(("f32", "fp32", "float32", "float"), "is no format of A and B on a tensor core; tf32, bf16 and f16 are"),
    **dict.fromkeys(
        ("e4m3fnuz", "float8_e4m3fnuz", "e5m2fnuz", "float8_e5m2fnuz"), "is a format of AMD's GPUs; NVIDIA's are e4m3 and e5m2"
    ),
}
F16_SUMS = "f16acc"  # the word for accumulators, C and D, in f16
SUFFIX_ORDER = ("wgmma", "tcgen05", "wmma", "sparse", F16_SUMS, "xor", "and")  # words after the format, in order
OLDEST_TARGET = 80  # number of the first target with today's usual shapes


@cache
def instructions_by_name() -> dict[str, tuple[MatrixMultiply, ...]]:
    """Return every short name, such as "e4m3 wgmma sparse", with all its instructions.

    The first is the one that the name means by itself. The others, which other targets have, follow: smaller ones, then that of tcgen05.
    """
    found: dict[str, list[MatrixMultiply]] = {}
    for op in (*syntax_rows(), *usual_products()):
        if isinstance(op, MatrixMultiply) and (name := _short_name(op)):
            found.setdefault(name, []).append(op)
    ordered = {name: _most_common_first(ops) for name, ops in found.items()}
    # without a family a name also means what only tcgen05 multiplies on a target: block scales on sm_100a
    ordered |= {name: (*ops, *ordered.get(_with_family(name, "tcgen05"), ())) for name, ops in ordered.items()}
    return {name: ordered[name] for name in sorted(ordered, key=lambda name: (name.split()[1:] != [], name))}


def _with_family(name: str, family: str) -> str:
    """Return a short name without a family with one: "f16 sparse" becomes "f16 tcgen05 sparse"."""
    first, *rest = name.split()
    return "" if set(rest) & set(FAMILY_WORDS) else " ".join([first, family, *rest])


@cache
def short_names() -> dict[str, MatrixMultiply]:
    """Return every short name with the instruction that it means where no target is given."""
    return {name: ops[0] for name, ops in instructions_by_name().items()}


def canonical_short_name(text: str) -> str | None:
    """Return a short name as the tables have it.

    Args:
        text: Words of a short name in any order and case.

    Returns:
        The name, or None if the text is no short name.
    """
    if len(text) > 40:
        return None
    words = [ALIASES.get(word, word) for word in split(r"[\s-]+", text.strip().lower()) if word != "mma"]
    name = " ".join(sorted(words, key=lambda word: SUFFIX_ORDER.index(word) if word in SUFFIX_ORDER else -1))
    return name if name in short_names() else None


def find_short_name(text: str) -> Instruction | None:
    """Return the instruction that a short name means where no target is given, or None if the text is no short name.

    Args:
        text: Words of a short name in any order and case.
    """
    name = canonical_short_name(text)
    return None if name is None else short_names()[name]


def nearest_short_names(text: str) -> list[str]:
    """Return up to three short names nearest to a text that is no short name.

    Args:
        text: Any text.
    """
    words = " ".join(text.lower()[:40].split())
    longer = [name for name in short_names() if words and name.startswith(f"{words} ")]
    return sorted(longer, key=len)[:3] or get_close_matches(words, (*short_names(), *ALIASES), n=3, cutoff=0.6)


def describe_other_word(text: str) -> str:
    """Return what is so of a word that people take for a short name, such as "fp8 is two formats, e4m3 and e5m2"; "" if nothing is known.

    Args:
        text: Any text.
    """
    word = next((word for word in text.lower()[:40].split() if word in NO_SHORT_NAMES), "")
    return f"{word} {NO_SHORT_NAMES[word]}" if word else ""


def _short_name(op: MatrixMultiply) -> str:
    """Return the short name that fits an instruction apart from its shape; "" if no name fits."""
    family = next((family for family, both in FAMILY_WORDS.items() if op.family in both), None)
    plain = op.a == op.b and not op.satfinite and op.rounding in (None, DEFAULT_ROUNDING)
    plain = plain and (not isinstance(op, Mma | Wmma) or (op.alayout, op.blayout) == ("row", "col"))
    if family is None or not plain or op.d not in (_usual_accumulator(op.a), F16) or op.accumulator != op.d:
        return ""
    scaling = op.scaling
    first = op.a.name if scaling is None else SCALED_NAMES.get((op.kind, op.a.name, scaling.count, scaling.format.name), "")
    words = [first, None if family == "mma" else family, "sparse" if op.sparse else None, F16_SUMS if op.d == F16 else None, op.bit_op]
    return " ".join(word for word in words if word) if first else ""


def _usual_accumulator(fmt: Format) -> Format:
    return S32 if fmt.is_integer or fmt.bits == 1 else F64 if fmt == F64 else F32


def _most_common_first(ops: list[MatrixMultiply]) -> tuple[MatrixMultiply, ...]:
    """Return the largest instruction of the first target that has any of them, then the others from large to small.

    Among instructions of equal size the one nearest to a square with the fewest qualifiers comes first.
    """
    since = {op: min(max(OLDEST_TARGET, *map(int, findall(r"\d+", target))) for target, _ in syntax_row(op).needs) for op in ops}
    size = lambda op: (op.m * op.n * op.k, min(op.m, op.n), op.kind is None, not op.ordered)
    common = max((op for op in ops if since[op] == min(since.values())), key=size)
    return (common, *sorted((op for op in ops if op != common), key=size, reverse=True))
