"""What the manual's text of the video instructions computes, in Python's integers (PTX ISA 9.7.18). It shares nothing with tcemu.

An instruction is its opcode and its operands, written as "%r1.h0" or "-%r2"; the values are those of the whole registers.
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
        final = "s" if "s32" in (atype, btype) or negated[1] ^ negated[2] or negated[3] else "u"
        product, lsb = a * b, 0
        if "po" in parts:
            lsb = 1
        elif negated[1] ^ negated[2]:
            product, lsb = ~product, 1
        elif negated[3]:
            c, lsb = ~c % 2**32, 1
        total = product + (signed(c, 32) if final == "s" else c) + lsb
        if negated[1] ^ negated[2] and negated[3]:
            total = product + lsb - signed(c, 32)
        total >>= 7 if "shr7" in parts else 15 if "shr15" in parts else 0
        return (clamp(total, final, 32) if "sat" in parts else total) % 2**32
    if name == "vset":
        t = compare(parts, a, b)
    elif name in ("vshl", "vshr"):
        count = min(b, 32) if "clamp" in parts else b & 31
        t = a << count if name == "vshl" else a >> count
    else:
        t = basic(name, a, b)
    bits = {"": 32, "b": 8, "h": 16}[selectors[0][:1]]
    t = clamp(t, dtype[0], bits) if "sat" in parts else signed(t, 33)
    if selectors[0]:
        at = int(selectors[0][1:]) * bits
        return c & ~((2**bits - 1) << at) | (t % 2**bits) << at
    third = signed(c, 32) if dtype == "s32" else c
    if "add" in parts:
        t += third
    elif "min" in parts or "max" in parts:
        t = (min if "min" in parts else max)(t, third)
    return t % 2**32


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
