"""What the manual says of integer and logic instructions, in Python's integers, one value at a time. It shares nothing with tcemu.

Each function takes the parts of the opcode and one value for each source, raw bits; it returns a tuple of raw bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

BITS = re.compile(r"[bsuf](\d+)$")


def type_bits(kind: str) -> int:
    return int(re.sub(r"x2$", "", kind)[1:])


def value(x: int, kind: str) -> int:
    bits = type_bits(kind)
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def clamp(x: int) -> int:
    return max(-(2**31), min(2**31 - 1, x))


def each(function: Callable[..., int]) -> Callable[..., tuple[int]]:
    """A function of the parts and of integers -> one of raw bits, each half of a packed type by itself."""

    def whole(parts: list[str], *raw: int) -> tuple[int]:
        kind = parts[-1]
        if kind.endswith("x2"):
            single = kind[:-2]
            lower, upper = ([(x >> at) & 0xFFFF for x in raw] for at in (0, 16))
            low, high = (function(parts, *(value(x, single) for x in half)) & 0xFFFF for half in (lower, upper))
            return (low | (high << 16),)
        return (function(parts, *(value(x, kind) for x in raw)) & ((1 << type_bits(kind)) - 1),)

    return whole


def add(parts, a, b):
    return clamp(a + b) if "sat" in parts else a + b


def sub(parts, a, b):
    return clamp(a - b) if "sat" in parts else a - b


def mul(parts, a, b, c=0):
    kind = parts[-1]
    bits = type_bits(kind)
    product = value(a, kind) * value(b, kind)
    if "wide" in parts:
        return ((product + c) % (1 << 2 * bits),)
    part = value((product >> (bits if "hi" in parts else 0)) % (1 << bits), kind)
    total = part + value(c, kind)
    return ((clamp(total) if "sat" in parts else total) % (1 << bits),)


def mul24(parts, a, b, c=0):
    kind = parts[-1]

    def low(x):
        x %= 1 << 24
        return x - (1 << 24) if kind == "s32" and x >> 23 else x

    product = (low(a) * low(b)) % (1 << 48)
    part = value((product >> 16 if "hi" in parts else product) % (1 << 32), kind)
    total = part + value(c, kind)
    return ((clamp(total) if "sat" in parts else total) % (1 << 32),)


def div(parts, a, b):
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def rem(parts, a, b):
    return -1 if b == 0 else a - b * div(parts, a, b)


def extremum(pick):
    return each(lambda parts, a, b: max(0, pick(a, b)) if "relu" in parts else pick(a, b))


def bfind(parts, a):
    kind = parts[-1]
    bits = type_bits(kind)
    if kind[0] == "s" and a >> (bits - 1):
        a = a ^ ((1 << bits) - 1)
    place = a.bit_length() - 1
    if place < 0:
        return (0xFFFFFFFF,)
    return (bits - 1 - place if "shiftamt" in parts else place,)


def fns(parts, mask, base, offset):
    offset = value(offset, "s32")
    if offset == -(2**31):  # as silicon has it
        return (0,)
    if base > 31:
        return (0xFFFFFFFF,)
    if offset == 0:
        return (base if mask >> base & 1 else 0xFFFFFFFF,)
    places = [i for i in range(32) if mask >> i & 1 and (i >= base if offset > 0 else i <= base)]
    places = places if offset > 0 else places[::-1]
    return (places[abs(offset) - 1] if abs(offset) <= len(places) else 0xFFFFFFFF,)


def bfe(parts, a, b, c):
    kind = parts[-1]
    bits = type_bits(kind)
    top = bits - 1
    start, length = (b, c) if bits == 64 else (b & 0xFF, c & 0xFF)
    length = min(length, 64)
    sign = 0 if kind[0] == "u" or length == 0 else a >> min(start + length - 1, top) & 1
    return (sum((a >> (start + i) & 1 if i < length and start + i <= top else sign) << i for i in range(bits)),)


def bfi(parts, a, b, c, d):
    bits = type_bits(parts[-1])
    start, length = (c, d) if bits == 64 else (c & 0xFF, d & 0xFF)
    length = min(length, 255)
    for i in range(length):
        if start + i < bits:
            b = (b & ~(1 << (start + i))) | ((a >> i & 1) << (start + i)) if i < bits else b & ~(1 << (start + i))
    return (b,)


def bmsk(parts, a, b):
    if "wrap" in parts:
        a, b = a % 32, b % 32
    a, b = min(a, 32), min(b, 32)
    return (((1 << b) - 1) << a & 0xFFFFFFFF,)


def szext(parts, a, n):
    n = n % 32 if "wrap" in parts else min(n, 32)
    low = a % (1 << n)
    if parts[-1] == "s32" and n and low >> (n - 1):
        low -= 1 << n
    return (low % (1 << 32),)


def dot(parts, a, b, c):
    a_kind, b_kind = parts[-2:]
    if len(parts) == 2:
        pairs = [(value(a >> 8 * i & 255, a_kind[0] + "8"), value(b >> 8 * i & 255, b_kind[0] + "8")) for i in range(4)]
    else:
        first = 16 if "hi" in parts else 0
        pairs = [(value(a >> 16 * i & 65535, a_kind[0] + "16"), value(b >> (first + 8 * i) & 255, b_kind[0] + "8")) for i in range(2)]
    return ((c + sum(x * y for x, y in pairs)) % (1 << 32),)


def carry_add(sign):
    """`.cc` and its readers, as machine code computes them: a subtraction is a + ~b + CC.CF, so that its flag is 1 without a borrow."""

    def compute(parts, a, b, flag=None):
        bits = type_bits(parts[-1])
        addend = b if sign > 0 else (1 << bits) - 1 - b
        total = a + addend + (int(flag) if flag is not None else int(sign < 0))
        return (total % (1 << bits), total >= 1 << bits)[: 1 + ("cc" in parts)]

    return compute


def carry_mad(parts, a, b, c, flag=0):
    kind = parts[-1]
    bits = type_bits(kind)
    part = (value(a, kind) * value(b, kind) >> (bits if "hi" in parts else 0)) % (1 << bits)
    total = part + c + flag
    return (total % (1 << bits), total >= 1 << bits)[: 1 + ("cc" in parts)]


def lop3(parts, a, b, c, table, q=None):
    d = sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))
    return (d,) if q is None else (d, (d != 0) or q if "or" in parts else (d != 0) and q)


def shf(parts, a, b, n):
    n = n % 32 if "wrap" in parts else min(n, 32)
    both = b << 32 | a
    return ((both >> n if "r" in parts else both << n >> 32) % (1 << 32),)


def shl(parts, a, n):
    bits = type_bits(parts[-1])
    return ((a << n) % (1 << bits) if n < bits else 0,)


def shr(parts, a, n):
    kind = parts[-1]
    return ((value(a, kind) >> min(n, 64)) % (1 << type_bits(kind)),)


def prmt(parts, a, b, c):
    data = [*(a >> 8 * i & 255 for i in range(4)), *(b >> 8 * i & 255 for i in range(4))]
    mode, s = parts[-1], c & 3
    if mode == "b32":
        chosen = []
        for i in range(4):
            nibble = c >> 4 * i & 15
            byte = data[nibble & 7]
            chosen.append((255 if byte >> 7 else 0) if nibble >> 3 else byte)
    else:
        places = {
            "f4e": [s, s + 1, s + 2, s + 3], "b4e": [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8], "rc8": [s] * 4,
            "ecl": [max(i, s) for i in range(4)], "ecr": [min(i, s) for i in range(4)], "rc16": [2 * (s & 1), 2 * (s & 1) + 1] * 2,
        }[mode]  # fmt: skip
        chosen = [data[at] for at in places]
    return (sum(byte << 8 * i for i, byte in enumerate(chosen)),)


COMPARED = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b, "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip
COMBINED = {"and": lambda p, c: p and c, "or": lambda p, c: p or c, "xor": lambda p, c: p != c}


def setp(parts, a, b, c=None):
    held = COMPARED[parts[0]](value(a, parts[-1]), value(b, parts[-1]))
    return tuple(p if c is None else COMBINED[parts[1]](p, bool(c)) for p in (held, not held))


def set_(parts, a, b, c=None):
    held = setp(parts, a, b, c)[0]
    return ({"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}[parts[-2]] if held else 0,)


def cnot(parts, a):
    return (int(a == 0),)


REFERENCE = {
    "add": each(add), "sub": each(sub), "mul": mul, "mad": mul, "mul24": mul24, "mad24": mul24,
    "sad": each(lambda parts, a, b, c: c + abs(a - b)), "div": each(div), "rem": each(rem),
    "abs": each(lambda parts, a: abs(a)), "neg": each(lambda parts, a: -a), "min": extremum(min), "max": extremum(max),
    "popc": lambda parts, a: (bin(a).count("1"),), "clz": lambda parts, a: (type_bits(parts[-1]) - a.bit_length(),), "bfind": bfind,
    "fns": fns, "brev": lambda parts, a: (int(f"{a:0{type_bits(parts[-1])}b}"[::-1], 2),), "bfe": bfe, "bfi": bfi, "bmsk": bmsk,
    "szext": szext, "dp4a": dot, "dp2a": dot, "addc": carry_add(1), "subc": carry_add(-1), "madc": carry_mad, "add.cc": carry_add(1),
    "sub.cc": carry_add(-1), "mad.cc": carry_mad, "lop3": lop3, "shf": shf, "shl": shl, "shr": shr, "prmt": prmt, "setp": setp, "set": set_,
    "cnot": cnot, "selp": lambda parts, a, b, c: (a if c else b,), "slct": lambda parts, a, b, c: (a if value(c, "s32") >= 0 else b,),
    "and": lambda parts, a, b: (a & b,), "or": lambda parts, a, b: (a | b,), "xor": lambda parts, a, b: (a ^ b,),
    "not": lambda parts, a: ((not a) if parts[-1] == "pred" else a ^ ((1 << type_bits(parts[-1])) - 1),),
}  # fmt: skip


def reference(opcode: str) -> Callable[..., tuple[int, ...]]:
    name, *parts = opcode.split(".")
    key = f"{name}.cc" if "cc" in parts and name in ("add", "sub", "mad") else name
    return lambda *values: REFERENCE[key](parts, *values)
