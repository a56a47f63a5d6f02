"""What the video instructions compute, in Python's integers (PTX ISA 9.7.18). It shares nothing with tcemu.

The packed ones follow the manual's text. The scalar ones follow the machine code that ptxas 13.0 makes of them for sm_90, read statement by
statement. An instruction is its opcode and its operands, written as "%r1.h0" or "-%r2"; the values are those of the whole registers.
"""

from __future__ import annotations

LIMITS = {("s", bits): (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)}
LIMITS |= {("u", bits): (0, 2**bits - 1) for bits in (8, 16, 32)}


def signed(x: int, bits: int) -> int:
    x %= 2**bits
    return x - 2**bits if x >> bits - 1 else x


def part(x: int, kind: str, selector: str) -> int:
    """partSelectSignExtend."""
    bits = {"": 32, "b": 8, "h": 16}[selector[:1]]
    x = x >> int(selector[1:] or 0) * bits & 2**bits - 1
    return signed(x, bits) if kind == "s32" else x


def clamp(x: int, sign: str, bits: int) -> int:
    low, high = LIMITS[sign, bits]
    return max(low, min(high, x))


def compare(parts: list[str], a: int, b: int) -> int:
    held = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    return int(next(held[each] for each in parts if each in held))


def basic(name: str, a: int, b: int) -> int:
    if name == "vavrg":
        return (a + b + 1) >> 1 if a + b >= 0 else (a + b) >> 1
    return {"vadd": a + b, "vsub": a - b, "vabsdiff": abs(a - b), "vmin": min(a, b), "vmax": max(a, b)}[name]


def scalar(name: str, parts: list[str], operands: list[str], values: list[int]) -> int:
    kinds = [each for each in parts if each in ("u32", "s32")]
    dtype, atype, btype = kinds if len(kinds) == 3 else ["u32", *kinds]
    selectors = [operand.partition(".")[2] for operand in operands]
    negated = [operand.startswith("-") for operand in operands] + [False]
    a, b = part(values[0], atype, selectors[1]), part(values[1], btype, selectors[2])
    c = values[2] if len(values) > 2 else 0
    if name == "vmad":
        return multiply_add(parts, signed(a, 32) * signed(b, 32), signed(c, 32), negated, "s32" in (atype, btype)) % 2**32
    if name == "vset":
        t, dtype = compare(parts, a, b), atype
    elif name in ("vshl", "vshr"):
        count = min(b, 32) if "clamp" in parts else b & 31
        t = signed(a << count, 64) if name == "vshl" else a >> count
    else:
        t = basic(name, a, b)
    narrow, kind = selectors[0], dtype[0]
    compared = t
    if "sat" in parts:
        if narrow and name not in ("vshl", "vshr"):  # unsigned, of the low word; the limit if the high word is not zero
            top = LIMITS[kind, {"b": 8, "h": 16}[narrow[0]]][1]
            t = top if t >> 32 else min(t, top)
        elif kind == "s":
            t = clamp(signed(t, 34), "s", 32)
        elif name == "vshl":
            t = clamp(signed(t, 34), "u", 32)
        else:
            t = t % 2**32 if t >= 0 else 0
        compared = t if kind == "u" and name != "vshl" else signed(t, 32)
    if narrow:
        bits, at = {"b": 8, "h": 16}[narrow[0]], int(narrow[1:]) * {"b": 8, "h": 16}[narrow[0]]
        moved = t >> 16 if narrow == "h1" else t  # a permutation that takes the upper half
        return c & ~((2**bits - 1) << at) | (moved % 2**bits) << at
    if "add" in parts:
        t += c
    elif "min" in parts or "max" in parts:
        compared = signed(compared, 32) if name in ("vadd", "vsub") else compared
        left, right = (compared, signed(c, 32)) if kind == "s" else (compared % 2**64, c)
        t = (min if "min" in parts else max)(left, right)
    return t % 2**32


def multiply_add(parts: list[str], product: int, c: int, negated: list[bool], signed_source: bool) -> int:
    """The word of vmad, before it is cut to 32 bits. Sources are signed words."""
    flipped = negated[1] ^ negated[2]
    total = (~product if flipped else product) + (~c if negated[3] else c) + (1 if flipped or negated[3] or "po" in parts else 0)
    final = "s" if signed_source or flipped or negated[3] else "u"
    shift = 7 if "shr7" in parts else 15 if "shr15" in parts else 0
    total = total >> shift if final == "s" else total % 2**64 >> shift
    if "sat" not in parts:
        return total
    return clamp(total if final == "s" else signed(total, 64), final, 32)


def packed(name: str, parts: list[str], operands: list[str], values: list[int]) -> int:
    count = int(name[-1])
    bits = 32 // count
    kinds = [each for each in parts if each in ("u32", "s32")]
    dtype, atype, btype = kinds if len(kinds) == 3 else ["u32", *kinds]
    selectors = [operand.partition(".")[2][1:] for operand in operands]
    mask = selectors[0] or "3210"[-count:]
    sources = [values[i // count] >> i % count * bits & 2**bits - 1 for i in range(2 * count)]
    orders = [selectors[1] or "3210"[-count:], selectors[2] or "".join(str(i) for i in reversed(range(count, 2 * count)))]
    d = values[2] if "add" in parts else 0
    for i in range(count):
        a, b = (sources[int(order[count - 1 - i])] for order in orders)
        a, b = signed(a, bits) if atype == "s32" else a, signed(b, bits) if btype == "s32" else b
        t = compare(parts, a, b) if name.startswith("vset") else basic(name[:-1], a, b)
        t = clamp(t, dtype[0], bits) if "sat" in parts else t
        if "add" in parts:
            d += t if str(i) in mask else 0
        else:
            kept = values[2] >> i * bits
            d |= ((t if str(i) in mask else kept) & 2**bits - 1) << i * bits
    return d % 2**32


def reference(opcode: str, operands: list[str], values: list[int]) -> int:
    name, *parts = opcode.split(".")
    return (packed if name[-1] in "24" else scalar)(name, parts, operands, values)
