"""What the manual says of instructions of a warp, in plain Python, lane by lane (PTX ISA 9.7.9.6, 9.7.13). It shares nothing with tcemu.

Each function takes one warp: lists of 32. Lanes that are not active get None.
"""

from __future__ import annotations


def member_lanes(active, masks, lane):
    return [j for j in range(32) if masks[lane] >> j & 1 and active[j]]


def shfl(mode, a, b, c, active):
    found = []
    for lane in range(32):
        segment, bound, step = c[lane] >> 8 & 31, c[lane] & 31, b[lane] & 31
        most, least = (lane & segment) | (bound & ~segment & 31), lane & segment
        j = {"up": lane - step, "down": lane + step, "bfly": lane ^ step, "idx": least | (step & ~segment & 31)}[mode]
        inside = j >= most if mode == "up" else j <= most
        j = j if inside else lane
        found.append((a[j] if active[j] else 0, inside))
    return found


def vote(mode, p, active, masks):
    found = []
    for lane in range(32):
        held = [p[j] for j in member_lanes(active, masks, lane)]
        ballot = sum(1 << j for j in member_lanes(active, masks, lane) if p[j])
        found.append({"all": all(held), "any": any(held), "uni": all(held) or not any(held), "ballot": ballot}[mode])
    return found


def match(mode, a, active, masks):
    found = []
    for lane in range(32):
        same = [j for j in member_lanes(active, masks, lane) if a[j] == a[lane]]
        every = same == member_lanes(active, masks, lane)
        mask = sum(1 << j for j in same)
        found.append(mask if mode == "any" else (mask if every else 0, every))
    return found


def redux(operator, kind, a, active, masks):
    def number(x):
        return x - 2**32 if kind == "s32" and x >> 31 else x

    found = []
    for lane in range(32):
        values = [number(a[j]) for j in member_lanes(active, masks, lane)] or [0]
        total = values[0]
        for value in values[1:]:
            total = {
                "add": total + value, "min": min(total, value), "max": max(total, value), "and": total & value, "or": total | value,
                "xor": total ^ value,
            }[operator]  # fmt: skip
        found.append(total % 2**32)
    return found
