"""Spellings of statements outside the tensor-core families to ask the assembler about, each with operands.

Every spelling of a line of `tcemu.engine.isa.statement_table` is a candidate, or `LIMIT` of them where a line has more, and so is what lies
around them: a qualifier lost, and one of the same instruction in its place. The operands are written here, from the manual.
"""

import random
from collections.abc import Iterator
from functools import cache
from math import prod

from tcemu.engine.isa.statement_table import TYPE_NAME, StatementRow, parse_line, statement_rows

LIMIT, AROUND = 60, 12  # spellings of a line, and spellings around them
HEADER = """.version {isa}
.target {target}
.address_size 64
.global .align 128 .b8 gvar[256]; .const .align 16 .b8 cvar[256]; .func fn() {{ ret; }}
.visible .entry k(.param .align 16 .b8 prm[64]) {{
.param .align 16 .b8 prm2[64]; .reg .b8 %c<4>; .reg .pred %p<8>; .reg .b16 %h<12>; .reg .b32 %r<300>; .reg .b64 %d<300>;{wide}
.shared .align 128 .b8 svar[256]; .local .align 16 .b8 lvar[256]; T: .branchtargets L1;
"""
WIDE = " .reg .b128 %q<4>;"  # since PTX ISA 8.3


def spellings(row: StatementRow, limit: int = LIMIT) -> list[str]:
    """Spellings of a line: all, or a sample that has every qualifier."""
    choices = [[*slot.choices, *([] if slot.required else [""])] for slot in row.slots]
    count = prod(map(len, choices))
    draw = random.Random(f"{row.head} {row.line}")
    numbers = range(count) if count <= limit else draw.sample(range(count), limit)
    found = []
    for number in numbers:
        parts = []
        for options in choices:
            number, at = divmod(number, len(options))
            parts.append(options[at])
        found.append(".".join([row.head, *filter(None, parts)]))
    if count > limit:  # each choice once with as little else as possible
        least = [options[0] if "" not in options else "" for options in choices]
        for i, options in enumerate(choices):
            found += [".".join([row.head, *filter(None, [*least[:i], option, *least[i + 1 :]])]) for option in options]
    return list(dict.fromkeys(found))


@cache
def vocabulary() -> dict[str, list[str]]:
    """The qualifiers of each instruction name."""
    words: dict[str, dict[str, None]] = {}
    for row in statement_rows():
        found = words.setdefault(row.head.partition(".")[0], {})
        found |= dict.fromkeys(row.head.split(".")[1:])
        found |= dict.fromkeys(choice for slot in parse_line(row.line) for choice in slot.choices)
    return {name: list(found) for name, found in words.items()}


def around(row: StatementRow) -> Iterator[str]:
    """Spellings with a qualifier lost, or another one in its place."""
    draw = random.Random(f"around {row.head} {row.line}")
    name = row.head.partition(".")[0]
    for spelling in draw.choices(spellings(row), k=AROUND):
        _, *parts = spelling.split(".")
        if parts:
            at = draw.randrange(len(parts))
            other = draw.choice([[], [draw.choice(vocabulary()[name])]])
            yield ".".join([name, *parts[:at], *other, *parts[at + 1 :]])


def bits(kind: str) -> int:
    """The size of a type."""
    if kind.endswith("x2") and kind[0] in "eu" and kind[1] in "e2345":
        return 8 if kind == "e2m1x2" else 16
    digits = "".join(c if c.isdigit() else " " for c in kind.replace("bf16", "f16").replace("tf32", "f32")).split()
    if kind == "pred":
        return 1
    return int(digits[0]) * (int(digits[1]) if len(digits) > 1 else 1) if kind[0] in "busf" else 32


def register(kind: str, number: int) -> str:
    """A register of a type."""
    letter = {1: "p", 4: "h", 8: "h", 16: "h", 64: "d", 128: "q"}.get(bits(kind), "r")
    return f"%{letter}{number}"


def types(spelling: str) -> list[str]:
    """The types of a spelling."""
    return [part for part in spelling.split(".")[1:] if TYPE_NAME.fullmatch(part)]


def vector(spelling: str) -> int:
    return next((int(part[1:]) for part in spelling.split(".") if part in ("v2", "v4", "v8")), 1)


def group(kind: str, count: int, first: int = 1) -> str:
    names = [register(kind, first + i) for i in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


SOURCES = {  # operands behind the destination, as types; "t": the statement's type
    **dict.fromkeys(("add", "sub", "mul", "mul24", "div", "rem", "min", "max", "and", "or", "xor", "copysign", "addc", "subc"), "tt"),
    **dict.fromkeys(("abs", "neg", "popc", "clz", "bfind", "brev", "not", "cnot", "rcp", "sqrt", "rsqrt", "mov"), "t"),
    **dict.fromkeys(("sin", "cos", "lg2", "ex2", "tanh"), "t"),
    **dict.fromkeys(("mad", "fma", "mad24", "sad", "madc"), "ttt"),
}


def operands(spelling: str) -> tuple[str, ...]:
    """Lists of operands, of which the assembler takes at least one if it takes the spelling."""
    name, *parts = spelling.split(".")
    if not parts:
        return ("L1" if name == "bra" else "%r1, T" if name == "brx" else "fn" if name == "call" else "7" if name == "pmevent" else "",)
    kinds = types(spelling) or ["b32"]
    t = kinds[-1]
    word = lambda *numbers: ", ".join(f"%r{n}" for n in numbers)
    policy = ", %d9" if "L2::cache_hint" in parts else ""
    if name == "cvt":
        d = register("b16" if bits(kinds[0]) < 16 and "pack" not in parts else kinds[0] if "pack" not in parts else "b32", 1)
        a, b = register(t, 2), register(t, 3)
        if "pack" in parts:
            return (f"{d}, %r2, %r3", f"{d}, %r2, %r3, %r4")
        return (
            f"{d}, {a}",
            f"{d}, {a}, {b}",
            f"{d}, {a}, {b}, %r5",
            f"{d}, {{{a}, {b}, {register(t, 4)}, {register(t, 5)}}}, %r6",
            f"%h1, {{{a}, {b}, {register(t, 4)}, {register(t, 5)}}}, %r6",
            f"%c1, {a}",
            f"%c1, {a}, {b}",
            f"{d}, %c2",
        )
    if name in ("setp", "set"):
        source = t
        d = register("pred" if name == "setp" else kinds[0], 1)
        combine = ", %p4" if {"and", "or", "xor"} & set(parts) else ""
        pair = (f"%p1|%p2, {register(source, 2)}, {register(source, 3)}{combine}",) if name == "setp" else ()
        return (f"{d}, {register(source, 2)}, {register(source, 3)}{combine}", *pair)
    if name == "selp":
        return (f"{register(t, 1)}, {register(t, 2)}, {register(t, 3)}, %p1",)
    if name == "slct":
        return (f"{register(kinds[0], 1)}, {register(kinds[0], 2)}, {register(kinds[0], 3)}, {register(t, 4)}",)
    if name == "testp":
        return (f"%p1, {register(t, 1)}",)
    if name in ("popc", "clz", "bfind"):
        return (f"%r1, {register(t, 2)}",)
    if name == "lop3":
        return ("%r1, %r2, %r3, %r4, 3", "%r1|%p1, %r2, %r3, %r4, 3, %p2")
    if name in ("shf", "prmt", "fns", "dp4a", "dp2a"):
        return (word(1, 2, 3, 4),)
    if name in ("bmsk", "szext"):
        return (word(1, 2, 3),)
    if name in ("shl", "shr"):
        return (f"{register(t, 1)}, {register(t, 2)}, %r3",)
    if name == "bfe":
        return (f"{register(t, 1)}, {register(t, 2)}, %r3, %r4",)
    if name == "bfi":
        return (f"{register(t, 1)}, {register(t, 2)}, {register(t, 3)}, %r4, %r5",)
    if name in SOURCES and (name != "mov" or t != "b128"):
        forms = [SOURCES[name], *(["ttt"] if name in ("min", "max") else [])]
        found = []
        for form in forms:
            narrow = kinds[-1]
            d = f"{narrow[0]}{2 * bits(narrow)}" if "wide" in parts else kinds[0]
            given = [register(narrow, 2 + i) for i in range(len(form))]
            if len(kinds) > 1:
                given[-1] = register(kinds[0], 1 + len(form))
            if "wide" in parts and name == "mad":
                given[-1] = register(d, 4)
            found.append(", ".join([register(d, 1), *given]))
        return tuple(found)
    if name == "mov":
        return ("%q1, %q2", "{%d1, %d2}, %q1")
    if name == "shfl":
        return ("%r1|%p1, %r2, %r3, %r4" + ", %r5" * ("sync" in parts),)
    if name == "vote":
        return (f"{register(t, 1)}, %p2" + ", %r3" * ("sync" in parts),)
    if name == "match":
        return (f"%r1, {register(t, 2)}, %r3",)
    if name == "redux":
        return (word(1, 2, 3),)
    if name == "activemask":
        return ("%r1",)
    if name == "elect":
        return ("%r1|%p1, %r2",)
    if name == "bra":
        return ("L1",)
    if name == "brx":
        return ("%r1, T",)
    if name == "call":
        return ("fn",)
    if name in ("ret", "exit", "trap", "brkpt"):
        return ("",)
    if name == "pmevent":
        return ("7",)
    if name == "nanosleep":
        return ("%r1",)
    if name in ("bar", "barrier"):
        if "warp" in parts:
            return ("%r1",)
        if "cluster" in parts:
            return ("",)
        if "red" in parts:
            return (f"{register('b32' if 'popc' in parts else 'pred', 1)}, 1, %p2",)
        return ("1, 64",) if "arrive" in parts else ("1",)
    if name in ("ld", "ldu"):
        place = "cvar" if "const" in parts else "prm" if any(p.startswith("param") for p in parts) else "%d8"
        place = "svar" if any(p.startswith("shared") for p in parts) else "lvar" if "local" in parts else place
        return tuple(f"{group(t, vector(spelling))}, [{at}]{policy}" for at in ([place, "prm2"] if place == "prm" else [place]))
    if name == "mbarrier":
        b = "[%d1]"
        return {
            "init": (f"{b}, %r1",),
            "inval": (b,),
            "expect_tx": (f"{b}, %r1",),
            "complete_tx": (f"{b}, %r1",),
            "pending_count": ("%r1, %d1",),
            "test_wait": (f"%p1, {b}, %d2", f"%p1, {b}, %r2"),
            "try_wait": (f"%p1, {b}, %d2", f"%p1, {b}, %r2"),
        }.get(parts[0], (f"%d2, {b}", f"_, {b}", f"%d2, {b}, %r1", f"_, {b}, %r1"))
    if name == "cp":
        return copy_operands(parts, policy)
    if name == "red" and parts[0] == "async":
        return (f"[%d1], {register(t, 2)}, [%d3]",)
    if name == "st" and parts[0] == "async":
        return (f"[%d1], {group(t, vector(spelling), 2)}, [%d7]",)
    if name == "st" and parts[0] == "bulk":
        return ("[%d1], %d2, 0",)
    if name == "clusterlaunchcontrol":
        if parts[0] == "try_cancel":
            return ("[%d1], [%d2]",)
        return (f"{'%p1' if 'pred' in parts else '{%r1, %r2, %r3, %r4}' if 'v4' in parts else '%r1'}, %q1",)
    if name == "griddepcontrol":
        return ("",)
    if name == "setmaxnreg":
        return ("40",)
    if name == "createpolicy":
        return {"fractional": ("%d1", "%d1, 0.5"), "range": ("%d1, [%d2], %r1, %r2",), "cvt": ("%d1, %d2",)}.get(parts[0], ("%d1",))
    if name == "tensormap":
        if parts[0] == "cp_fenceproxy":
            return ("[%d1], [%d2], 128",)
        return ("[%d1], %r2", "[%d1], 0, %r2", "[%d1], 1", "[%d1], %d2", "[%d1], 0, %d2")
    if name == "st":
        place = "svar" if any(p.startswith("shared") for p in parts) else "lvar" if "local" in parts else "%d8"
        place = "cvar" if "const" in parts else "prm2" if any(p.startswith("param") for p in parts) else place
        return (f"[{place}], {group(t, vector(spelling))}{policy}",)
    if name in ("atom", "red"):
        place = "svar" if any(p.startswith("shared") for p in parts) else "%d8"
        b = group(t, vector(spelling), 11 if t != "f16" and t != "bf16" else 1)
        third = f", {register(t, 3)}" if "cas" in parts else ""
        return (f"{group(t, vector(spelling)) + ', ' if name == 'atom' else ''}[{place}], {b}{third}{policy}",)
    if name == "cvta":
        place = {"shared": "svar"}
        return (f"{register(t, 1)}, {register(t, 2)}",)
    if name == "isspacep":
        return ("%p1, %d1",)
    if name == "mapa":
        return (f"{register(t, 1)}, {register(t, 2)}, %r3",)
    if name == "getctarank":
        return (f"%r1, {register(t, 2)}",)
    if name in ("prefetch", "prefetchu"):
        return ("[%d1]", "[lvar]")
    if name in ("applypriority", "discard"):
        return ("[%d1], 128",)
    if name in ("fence", "membar"):
        return ("", "[%d1], 128")
    if name == "alloca":
        return (f"{register(t, 1)}, {register(t, 2)}, 8",)
    if name in ("stacksave", "stackrestore"):
        return (register(t, 1),)
    raise ValueError(f"{spelling}: no operands are written for {name}")


def copy_operands(parts: list[str], policy: str) -> tuple[str, ...]:
    """Lists of operands of a `cp`."""
    if "tensor" not in parts and "bulk" not in parts:
        return {"mbarrier": ("[%d1]",), "commit_group": ("",), "wait_all": ("",), "wait_group": ("0",)}.get(
            "".join(parts[1:2]), (f"[%d1], [%d2], 16{policy}", f"[%d1], [%d2], 4{policy}")
        )
    if "commit_group" in parts:
        return ("",)
    if "wait_group" in parts:
        return ("0",)
    multicast = ", %h1" if "multicast::cluster" in parts else ""
    if "tensor" not in parts:
        if "prefetch" in parts:
            return (f"[%d1], %r1{policy}",)
        mask = ", %h2" if "cp_mask" in parts else ""
        return (f"[%d1], [%d2], %r1{policy}{mask}", f"[%d1], [%d2], %r1, [%d3]{multicast}{policy}")
    rank = next((int(part[0]) for part in parts if part in ("1d", "2d", "3d", "4d", "5d")), 1)
    rows = any(part.endswith(("gather4", "scatter4")) for part in parts)
    box = "[%d1, {" + ", ".join(f"%r{i}" for i in range(5 if rows else rank)) + "}]"
    offsets = ", {" + ", ".join(f"%h{i + 3}" for i in range(max(rank - 2, 1))) + "}"
    if "prefetch" in parts:
        return (f"{box}{policy}", f"{box}{offsets}{policy}", f"{box}, {{%h3, %h4}}{policy}")
    return (f"[%d2], {box}, [%d3]{multicast}{policy}", f"[%d2], {box}, [%d3]{offsets}{multicast}{policy}", f"{box}, [%d2]{policy}")
